"""A recorded run as a profile, to plan other strategies, rates or hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hvdtrain import records
from hvdtrain.plan import network, prediction, profile
from hvdtrain.plan.network import Link
from hvdtrain.plan.prediction import Host
from hvdtrain.plan.profile import Point, Profile
from hvdtrain.results.read import run as run_reader
from hvdtrain.results.read.folders import exists
from hvdtrain.strategies.spec import Exchange, parse
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class Recorded(NamedTuple):
    """A run folder, and its mean times of a step."""

    folder: Path
    manifest: records.Manifest
    step_s: float
    compute_s: float
    profile: Profile | None
    """The run's own, if --strategy auto made one"""

    @property
    def flags(self) -> dict[str, Any]:
        return self.manifest.config

    @property
    def exchange(self) -> Exchange:
        return parse(str(self.manifest.config["strategy"]))

    @property
    def global_batch(self) -> int:
        return int(self.manifest.plan["global_batch"])

    @property
    def links(self) -> dict[str, Link]:
        """The links that the run measured, by host."""
        return network.measured(self.manifest.links)

    def hosts(self) -> list[Host]:
        """Return the hosts of the run, with fast links where it measured none."""
        manifest, links, hosts = self.manifest, self.links, []
        for name in manifest.hosts:
            mine = [rank for rank in manifest.ranks if rank.get("host") == name]
            link = links.get(name, Link.of_rate(10e9))
            hosts.append(Host(name=name, link=link, ranks=len(mine), cores=mine[0].get("cores")))
        return hosts


def read(folder: Path) -> Recorded:
    """Read a run folder. Raises Failure (65, 74, 77) if it holds no finished run of a workload in one stage."""
    path = folder / "manifest.json"
    if not exists(path):
        raise Failure(
            f"{folder}: not a run folder (no manifest.json); hint: see `hvdtrain results list`", exits.BAD_DATA
        )
    manifest = records.read_document(path, records.Manifest)
    if manifest.plan.get("stages", 1) != 1 or not manifest.plan.get("global_batch"):
        raise Failure(f"{folder}: only runs of a workload without --stages can be planned from", exits.BAD_DATA)
    row = run_reader.row(folder, [])
    step_s, compute_s = row.get("step_s"), row.get("compute_s")
    if not step_s or not compute_s or not math.isfinite(step_s):
        raise Failure(
            f"{folder}: no step times without warm-up; hint: choose a run with more steps, see `hvdtrain results list`",
            exits.BAD_DATA,
        )
    own = folder / profile.NAME
    return Recorded(folder, manifest, step_s, compute_s, profile.read(own) if exists(own) else None)


def as_profile(
    run: Recorded, shapes: list[list[int]], model: str, setup: Mapping[str, Any], coding_s: dict[str, float]
) -> Profile:
    """Return a profile whose prediction for the run's own hosts and strategy is the recorded step time.

    Without a profile of its own, a run has one batch size, so other batches are taken to cost in proportion. What the
    simulation does not explain is added to each prediction for several hosts, if the run measured its links.
    """
    manifest = run.manifest
    rank = manifest.ranks[0]
    hosts = run.hosts()
    batch = max(1, round(run.global_batch / len(manifest.ranks)))
    made = run.profile or Profile(
        machine={"processor": rank.get("cpu"), "cores": rank.get("cores") or 1.0},
        workload=manifest.workload,
        model=model,
        setup=dict(setup),
        shapes=shapes,
        epoch_samples=int(manifest.config.get("epoch_samples") or manifest.data["train"]),
        threads=int(rank.get("threads") or 1),
        points=[Point(batch=batch, backward_s=run.compute_s, update_s=0.0, variation=0.0, steps=1)],
    )
    made = profile.with_coding(made, coding_s)
    if len(hosts) > 1 and not run.links:
        return made
    own = prediction.predict(made, run.exchange, hosts, run.global_batch)
    if len(hosts) == 1:
        factor = run.step_s / own.step_s
        points = [
            msgspec.structs.replace(each, backward_s=each.backward_s * factor, update_s=each.update_s * factor)
            for each in made.points
        ]
        return msgspec.structs.replace(made, points=points)
    return msgspec.structs.replace(made, unexplained_s=run.step_s - own.step_s)
