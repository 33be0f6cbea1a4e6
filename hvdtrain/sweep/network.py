"""Brings up a sweep's hosts when they are first needed, throttles and measures their links, and restores both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from hvdtrain.lab import virtual
from hvdtrain.sweep import command
from hvdtrain.sweep.file import ClusterSpec, Sweep
from hvdtrain.sweep.plan import UNLIMITED, Point
from hvdtrain.sweep.process import Children, told, whole
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import show_rate


@dataclasses.dataclass(frozen=True)
class Verified:
    """Result of measuring the links: the fields rate_off_percent and marked of `point.json`."""

    off_percent: float | None = None
    marked: str | None = None


def cluster_name(sweep: Sweep, root: Path) -> str:
    """Name of the virtual cluster: the existing one's, or one derived from the sweep, the same after a stop."""
    if sweep.cluster and sweep.cluster.existing:
        return sweep.cluster.existing
    return "s" + hashlib.sha256(f"{sweep.name}\0{root.resolve()}".encode()).hexdigest()[:7]


def hosts(spec: ClusterSpec, name: str, count: int) -> list[str]:
    """Names of the first `count` hosts; of an existing cluster that is not up those that it might have."""
    known = spec.virtual or spec.machines or [chr(ord("a") + number) for number in range(count)]
    if spec.existing and name in virtual.clusters():
        known = [host.name for host in virtual.load(name).hosts]
    return list(known[:count])


class Network:
    """The hosts that are up and the current rate of their links."""

    def __init__(self, sweep: Sweep, name: str, children: Children) -> None:
        assert sweep.cluster is not None
        self._sweep, self._spec, self._name = sweep, sweep.cluster, name
        self._children, self._environment = children, children.environment
        self._up = False
        self._broken: Failure | None = None
        self._changed = False
        self._rate: str | None = None
        """Set by this sweep; None: the links are as they were found, or a change failed"""
        self._measured: dict[str, dict[str, Any]] = {}
        """Link `a -> b` -> its measurement at the current rate"""
        self._unmeasured: str | None = None

    def ready(self, point: Point, most: int) -> Verified:
        """Brings the hosts up and sets the point's rate; measures the links of `most` hosts once for the next runs too.

        Raises Stopped, and Failure if the hosts cannot be brought up (also on every later call) or the rate be set.
        """
        self._bring_up()
        if point.hosts == 1:
            return Verified()
        wanted = point.rate if point.rate is not None or not self._changed else UNLIMITED
        if wanted is not None and wanted != self._rate:
            self._set(wanted)
        if not point.rate_bit_s:
            return Verified()
        names = hosts(self._spec, self._name, point.hosts)
        if not self._unmeasured and not all(any(link.startswith(f"{n} -> ") for link in self._measured) for n in names):
            self._measure(hosts(self._spec, self._name, max(most, point.hosts)))
        return self._judge(names, point)

    def close(self) -> list[str]:
        """Clears the throttle and takes the sweep's own cluster down, in whatever state; returns the errors."""
        problems = []
        steps = []
        if self._changed and not self._spec.virtual:
            steps.append(command.throttle(UNLIMITED, self._spec, self._name))
        if self._up:
            steps.append(command.down(self._name))
        for words in steps:
            try:
                whole(words, self._environment)
            except Failure as failure:
                problems.append(str(failure))
        self._up = self._changed = False
        return problems

    def _bring_up(self) -> None:
        if self._up or not self._spec.virtual:
            return
        if self._broken:
            raise self._broken
        try:
            # A killed sweep leaves its cluster behind. The name belongs to this sweep alone.
            whole(command.down(self._name), self._environment)
            whole(command.up(self._spec, self._name), self._environment)
        except Failure as failure:
            self._broken = failure
            raise
        self._up, self._rate = True, UNLIMITED

    def _set(self, rate: str) -> None:
        words = command.throttle(rate, self._spec, self._name)
        self._measured, self._unmeasured = {}, None
        self._rate = None  # unknown if the command fails
        try:
            whole(words, self._environment)
        except Failure as failure:
            raise Failure(f"rate {rate} cannot be set: {failure}", failure.code) from failure
        self._rate, self._changed = rate, True

    def _measure(self, names: list[str]) -> None:
        """Measures the links of these hosts; all once more if one is off its rate."""
        for _ in range(2):
            for words in command.verify(names, self._spec, self._name, self._sweep.off_percent):
                code, out, err = self._children.said(words)
                try:
                    document = json.loads(out)
                except ValueError:
                    document = {"links": []}
                parts = document.get("hosts", [document])
                found = [(part.get("host"), link) for part in parts for link in part["links"]]
                if not found:
                    self._unmeasured = f"rate not verified: {told(err) or f'exit code {code}'}"
                    return
                for host, link in found:
                    self._measured[link["link"].replace("here", host) if host else link["link"]] = link
            if all(link["ok"] for link in self._measured.values()):
                return

    def _judge(self, names: list[str], point: Point) -> Verified:
        if self._unmeasured:
            return Verified(None, self._unmeasured)
        ends = {name: set(name.split(" -> ")) & set(names) for name in self._measured}
        links = {name: link for name, link in self._measured.items() if ends[name]}
        worst = max(links.values(), key=lambda link: abs(link["off_percent"]))
        off = worst["off_percent"]
        bad = [(name, link) for name, link in links.items() if not link["ok"]]
        if not bad:
            return Verified(off)
        name, link = max(bad, key=lambda pair: abs(pair[1]["off_percent"]))
        figures = (
            f"{link['goodput_mbit']:.4g} Mbit/s instead of {link['expected_mbit']:.4g} ({link['off_percent']:+.1f} %)"
        )
        if abs(link["off_percent"]) <= self._sweep.off_percent:
            figures = "lets short messages through faster than its rate"
        return Verified(off, f"{name} at {show_rate(point.rate_bit_s or 0)}: {figures}")
