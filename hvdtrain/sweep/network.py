"""Starts the hosts of a sweep when they are first needed, throttles and measures their links, and restores both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.sweep import command
from hvdtrain.sweep.file import Sweep
from hvdtrain.sweep.grid import UNLIMITED, Experiment
from hvdtrain.sweep.process import run_uninterrupted
from hvdtrain.system import exits
from hvdtrain.system.commands import succeeds
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

    def __init__(self, sweep: Sweep, name: str, environment: Mapping[str, str]) -> None:
        assert sweep.cluster is not None
        self._sweep, self._spec, self._name, self._environment = sweep, sweep.cluster, name, environment
        self._running = self._throttled = False
        self._start_error: Failure | None = None
        self._rate: str | None = None
        """The rate that this sweep has set; None if it has set none or the last change failed"""
        self._links: dict[str, dict[str, Any]] = {}
        """Link `a -> b` -> its measurement at the current rate"""

    def prepare(self, experiment: Experiment) -> LinkCheck:
        """Starts the hosts, sets the experiment's rate, and measures all links once after each change of the rate.

        An experiment is judged by the links of its own hosts. Raises Failure if the hosts cannot be started (again on
        every later call) or the rate cannot be set.
        """
        self._start()
        if experiment.hosts == 1:
            return LinkCheck()
        rate = experiment.rate if experiment.rate is not None or not self._throttled else UNLIMITED
        if rate is not None and rate != self._rate:
            self._set_rate(rate)
        if not experiment.rate_bit_s:
            return LinkCheck()
        try:
            self._links = self._links or self._measured()
        except Failure as failure:
            return LinkCheck(None, f"rate not verified: {failure}")
        own = set(self._spec.names[: experiment.hosts])
        links = {name: link for name, link in self._links.items() if own & set(name.split(" -> "))}
        name, worst = max(links.items(), key=lambda pair: (not pair[1]["ok"], abs(pair[1]["off_percent"])))
        if worst["ok"]:
            return LinkCheck(worst["off_percent"])
        problem = "short messages pass faster than the rate"
        if abs(off := worst["off_percent"]) > self._sweep.off_percent:
            problem = f"{worst['goodput_mbit']:.4g} Mbit/s instead of {worst['expected_mbit']:.4g} ({off:+.1f} %)"
        return LinkCheck(off, f"{name} at {show_rate(experiment.rate_bit_s)}: {problem}")

    def close(self) -> list[str]:
        """Restores the links and removes the sweep's own cluster, whatever state they are in. Returns the errors."""
        errors = []
        restore = self._throttled and not self._spec.virtual
        commands = [command.throttle(UNLIMITED, self._spec, self._name)] if restore else []
        commands += [command.down(self._name)] if self._running else []
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
            if os.geteuid() and not succeeds(["sudo", "-n", "true"]):
                hint = "hint: use sudo, or allow sudo without a password (NOPASSWD in sudoers)"
                raise Failure(f"virtual hosts need root; {hint}", exits.NO_PERMISSION)
            # A killed sweep leaves its cluster behind. Only this sweep uses the name.
            run_uninterrupted(command.down(self._name), self._environment)
            run_uninterrupted(command.up(self._spec, self._name), self._environment)
        except Failure as failure:
            self._start_error = failure
            raise
        self._running, self._rate = True, UNLIMITED

    def _set_rate(self, rate: str) -> None:
        self._links = {}
        self._rate = None  # stays unknown if the command fails
        try:
            run_uninterrupted(command.throttle(rate, self._spec, self._name), self._environment)
        except Failure as failure:
            raise Failure(f"cannot set rate {rate}: {failure}", failure.code) from failure
        self._rate, self._throttled = rate, True

    def _measured(self) -> dict[str, dict[str, Any]]:
        """Measures the links of all hosts, and once more if one is off its rate. Raises Failure."""
        for _ in range(2):
            links: dict[str, dict[str, Any]] = {}
            for words in command.verify(self._spec, self._name, self._sweep.off_percent):
                document = json.loads(run_uninterrupted(words, self._environment, verdict=True))
                for host in document.get("hosts", [document]):
                    for link in host["links"]:
                        ends = [host.get("host") or end if end == "here" else end for end in link["link"].split(" -> ")]
                        links[" -> ".join(ends)] = link
            if all(link["ok"] for link in links.values()):
                break
        return links
