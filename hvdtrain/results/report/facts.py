"""The surroundings of the runs: software, machines and commands, from the records of their runs."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdtrain import records
from hvdtrain.results import groups
from hvdtrain.results.read import frame
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.tables.model import Column, Table
from hvdtrain.system.redaction import without_secrets


def environment(loaded: Loaded) -> Table:
    """Software, hosts, devices, NICs, model and data of the complete runs, with the number of runs for each value."""
    counted: Counter[tuple[str, str]] = Counter()
    for run_dir in loaded.complete["run_dir"]:
        counted.update(list(dict.fromkeys(_facts(frame.manifest(run_dir)))))
    names = list(dict.fromkeys(name for name, _ in counted))
    order = sorted(counted.items(), key=lambda item: (names.index(item[0][0]), -item[1], item[0][1]))
    rows = [{"what": name, "value": value, "runs": number} for (name, value), number in order]
    columns = [Column("what", "what"), Column("value", "as recorded", prose=True), Column("runs", "runs")]
    return Table("environment", "Software and machines", columns, rows)


def _facts(manifest: records.Manifest) -> Iterator[tuple[str, str]]:
    """(name, value) of the surroundings in a manifest."""
    yield from ((name, version) for name, version in manifest.versions.items() if version is not None)
    yield "git commit", manifest.git_commit or "not recorded"
    yield "hosts", ", ".join(manifest.hosts) or "not recorded"
    for rank in manifest.ranks:
        yield "device of a rank", str(rank.get("device") or "not recorded")
        yield "CPU threads per rank", str(rank.get("threads") or "not recorded")
        if rank.get("cpu"):
            share = f", of which the host may use {rank['cores']}" if rank.get("cores") else ""
            yield "processor", f"{rank['cpu']}{share}"
    yield "backend", manifest.backend
    for link in manifest.links:
        speed = f"{link['speed_mbit']} Mbit/s negotiated" if link.get("speed_mbit") else "unknown speed"
        yield "NIC", f"{link.get('nic')} ({speed})"
    yield "data set", _named(manifest.data, ("train", "validation", "test"))
    yield "SHA-256 of the data set", str(manifest.data.get("fingerprint") or "not recorded")
    yield "model", _named(manifest.model, ("parameters",))


def _named(about: Mapping[str, Any], numbers: Sequence[str]) -> str:
    """`digits, 1,437 train, 126 validation`."""
    known = [f"{about[name]:,} {name}" for name in numbers if isinstance(about.get(name), int)]
    return ", ".join([str(about.get("name")), *known])


def commands(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """For the first run of each group: a comment with its hosts, ranks and throttle, and the command that started it
    (a sweep's launch command, or else the command of each rank)."""
    for group in groups.by(loaded.complete):
        _, run_dir = min(zip(group.values("started_utc"), group.values("run_dir"), strict=True))
        hosts, per_host, rate = (group.key[name] for name in ("hosts", "ranks_per_host", "rate_mbit"))
        needs = "hosts not recorded" if hosts is None else f"hosts: {hosts:g}, ranks: {hosts * per_host:g}"
        if rate is not None:
            needs += f", links: tools/throttle.sh {rate:g}mbit"
        experiment = frame.experiment(run_dir)
        words = without_secrets(experiment.command) if experiment else frame.program(run_dir)
        yield f"# {needs}", shlex.join(words)
