"""Starts the hosts of a sweep when they are first needed, throttles and measures their links, and restores both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.sweep import command
from hvdtrain.sweep.file import Sweep
from hvdtrain.sweep.grid import UNLIMITED, Experiment
from hvdtrain.sweep.process import Children, error_message, run_uninterrupted
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import show_rate


@dataclasses.dataclass(frozen=True)
class LinkCheck:
    """Result of measuring the links: the fields rate_off_percent and marked of `experiment.json`."""

    off_percent: float | None = None
    marked: str | None = None


def cluster_name(sweep: Sweep, root: Path) -> str:
    """Name of the sweep's virtual cluster. It is the same when an interrupted sweep continues."""
    return "s" + hashlib.sha256(f"{sweep.name}\0{root.resolve()}".encode()).hexdigest()[:7]


class Network:
    """The running hosts and the current rate of their links."""

    def __init__(self, sweep: Sweep, name: str, children: Children) -> None:
        assert sweep.cluster is not None
        self._sweep, self._spec, self._name = sweep, sweep.cluster, name
        self._children, self._environment = children, children.environment
        self._running = False
        self._start_error: Failure | None = None
        self._throttled = False
        self._rate: str | None = None
        """The rate that this sweep has set; None if it has set none or the last change failed"""
        self._measurements: dict[str, dict[str, Any]] = {}
        """Link `a -> b` -> its measurement at the current rate"""
        self._measure_error: str | None = None

    def prepare(self, experiment: Experiment, most_hosts: int) -> LinkCheck:
        """Starts the hosts, sets the experiment's rate and measures the links.

        Measures `most_hosts` hosts at once, so that the following runs need no measurement. Raises Stopped, and Failure
        if the hosts cannot be started (again on every later call) or the rate cannot be set.
        """
        self._start()
        if experiment.hosts == 1:
            return LinkCheck()
        rate = experiment.rate if experiment.rate is not None or not self._throttled else UNLIMITED
        if rate is not None and rate != self._rate:
            self._set_rate(rate)
        if not experiment.rate_bit_s:
            return LinkCheck()
        names = list(self._spec.names[: experiment.hosts])
        senders = {link.partition(" -> ")[0] for link in self._measurements}
        if not self._measure_error and not senders.issuperset(names):
            self._measure(self._spec.names[: max(most_hosts, experiment.hosts)])
        return self._judge(names, experiment)

    def close(self) -> list[str]:
        """Restores the links and removes the sweep's own cluster, whatever state they are in. Returns the errors."""
        errors = []
        commands = []
        if self._throttled and not self._spec.virtual:
            commands.append(command.throttle(UNLIMITED, self._spec, self._name))
        if self._running:
            commands.append(command.down(self._name))
        for words in commands:
            try:
                run_uninterrupted(words, self._environment)
            except Failure as failure:
                errors.append(str(failure))
        self._running = self._throttled = False
        return errors

    def _start(self) -> None:
        if self._running or not self._spec.virtual:
            return
        if self._start_error:
            raise self._start_error
        try:
            # A killed sweep leaves its cluster behind. Only this sweep uses the name.
            run_uninterrupted(command.down(self._name), self._environment)
            run_uninterrupted(command.up(self._spec, self._name), self._environment)
        except Failure as failure:
            self._start_error = failure
            raise
        self._running, self._rate = True, UNLIMITED

    def _set_rate(self, rate: str) -> None:
        self._measurements, self._measure_error = {}, None
        self._rate = None  # stays unknown if the command fails
        try:
            run_uninterrupted(command.throttle(rate, self._spec, self._name), self._environment)
        except Failure as failure:
            raise Failure(f"cannot set rate {rate}: {failure}", failure.code) from failure
        self._rate, self._throttled = rate, True

    def _measure(self, names: Sequence[str]) -> None:
        """Measures the links of these hosts, and all of them once more if one is off its rate."""
        for _ in range(2):
            for words in command.verify(names, self._spec, self._name, self._sweep.off_percent):
                code, out, err = self._children.output(words)
                try:
                    document = json.loads(out)
                except ValueError:
                    document = {"links": []}
                hosts = document.get("hosts", [document])
                links = [(host.get("host"), link) for host in hosts for link in host["links"]]
                if not links:
                    self._measure_error = f"rate not verified: {error_message(err) or f'exit code {code}'}"
                    return
                for host, link in links:
                    ends = [host if host and end == "here" else end for end in link["link"].split(" -> ")]
                    self._measurements[" -> ".join(ends)] = link
            if all(link["ok"] for link in self._measurements.values()):
                return

    def _judge(self, names: list[str], experiment: Experiment) -> LinkCheck:
        """Checks only the links of these hosts."""
        if self._measure_error:
            return LinkCheck(None, self._measure_error)
        links = {name: link for name, link in self._measurements.items() if set(name.split(" -> ")) & set(names)}
        worst = max(links.values(), key=lambda link: abs(link["off_percent"]))["off_percent"]
        failed = [(name, link) for name, link in links.items() if not link["ok"]]
        if not failed:
            return LinkCheck(worst)
        name, link = max(failed, key=lambda pair: abs(pair[1]["off_percent"]))
        problem = (
            f"{link['goodput_mbit']:.4g} Mbit/s instead of {link['expected_mbit']:.4g} ({link['off_percent']:+.1f} %)"
        )
        if abs(link["off_percent"]) <= self._sweep.off_percent:
            problem = "short messages pass faster than the rate"
        return LinkCheck(worst, f"{name} at {show_rate(experiment.rate_bit_s or 0)}: {problem}")
