"""A recorded run as a profile, to plan other strategies, rates or hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hvdtrain import records
from hvdtrain.plan import coding, network, prediction, profile
from hvdtrain.plan.choice import FAST_LINK
from hvdtrain.plan.network import Link
from hvdtrain.plan.prediction import Host
from hvdtrain.plan.profile import Point, Profile
from hvdtrain.strategies.spec import Exchange, parse
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class Recorded(NamedTuple):
    """The records of a finished run, and its mean times of a step without warm-up."""

    folder: Path
    manifest: records.Manifest
    summary: records.Summary
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
        """Samples of a step. A script that does not log them has one per rank."""
        return int(self.manifest.plan.get("global_batch") or self.summary.global_batch or self.summary.ranks)

    @property
    def links(self) -> dict[str, Link]:
        """The links that the run measured, by host."""
        return network.measured(self.manifest.links)

    def hosts(self) -> list[Host]:
        """Return the hosts of the run, with fast links where it measured none."""
        manifest, links, hosts = self.manifest, self.links, []
        for name in manifest.hosts:
            mine = [rank for rank in manifest.ranks if rank.get("host") == name]
            hosts.append(Host(name=name, link=links.get(name, FAST_LINK), ranks=len(mine), cores=mine[0].get("cores")))
        return hosts


def read(folder: Path) -> Recorded:
    """Read a run folder. Raises Failure (65, 74, 77) if it holds no finished run in one stage with times of steps."""
    path = folder / "manifest.json"
    if not path.exists():
        raise Failure(
            f"{folder}: not a run folder (no manifest.json); hint: see `hvdtrain results list`", exits.BAD_DATA
        )
    manifest, summary = records.read_document(path, records.Manifest), records.summary(folder)
    if manifest.plan.get("stages", 1) != 1 or not manifest.shapes:
        reason = "its manifest has no shapes of parameters" if not manifest.shapes else "it has --stages"
        raise Failure(f"{folder}: cannot be planned from, because {reason}; hint: choose another run", exits.BAD_DATA)
    step_s, shares = None, {}
    if summary and summary.ranks == len(manifest.ranks):
        shares = summary.step_shares or ({"compute": 1.0} if summary.hosts == 1 else {})
        if summary.samples_per_s and summary.global_batch:
            step_s = summary.global_batch / summary.samples_per_s
        elif "global_batch" not in manifest.plan and summary.steps:  # a script that does not log its samples
            step_s = summary.train_s / summary.steps
    if summary is None or not step_s or not shares.get("compute"):
        raise Failure(
            f"{folder}: no step times without warm-up; hint: choose a run with more steps, see `hvdtrain results list`",
            exits.BAD_DATA,
        )
    own = folder / profile.NAME
    made = profile.read(own) if own.exists() else None
    return Recorded(folder, manifest, summary, step_s, shares["compute"] * step_s, made)


def as_profile(run: Recorded, exchanges: Sequence[Exchange], coding_s: Mapping[str, float] | None = None) -> Profile:
    """Return a profile whose prediction for the run's own hosts and strategy is the recorded step time.

    `exchanges`: what else will be predicted. `coding_s`: see `Profile.coding_s`; what is missing there is taken from
    `coding.recorded`. The ratio of the recorded to the simulated step time applies to all predictions for several hosts
    with the same backend, if the run measured its links.
    """
    manifest = run.manifest
    rank, hosts = manifest.ranks[0], run.hosts()
    batch = max(1, round(run.global_batch / len(manifest.ranks)))
    made = run.profile or Profile(
        machine={"processor": rank.get("cpu"), "cores": rank.get("cores") or 1.0},
        workload=manifest.workload,
        model=str(manifest.model.get("name", manifest.workload)),
        setup={"device": rank.get("device")},
        shapes=manifest.shapes,
        epoch_samples=int(manifest.config.get("epoch_samples") or manifest.data.get("train") or run.global_batch),
        threads=int(rank.get("threads") or 1),
        from_run=True,
        points=[Point(batch=batch, backward_s=run.compute_s, update_s=0.0, variation=0.0, steps=run.summary.steps)],
    )
    names = prediction.reducers([*exchanges, run.exchange])
    expected_s = coding.recorded(names, manifest.shapes)
    made = profile.with_coding(made, expected_s | made.coding_s | dict(coding_s or {}))
    if prediction.unpredictable(made, run.exchange) or (len(hosts) > 1 and not run.links):
        return made
    own = prediction.predict(made, run.exchange, hosts, run.global_batch)
    if len(hosts) == 1:
        factor = run.step_s / own.step_s
        points = [
            msgspec.structs.replace(each, backward_s=each.backward_s * factor, update_s=each.update_s * factor)
            for each in made.points
        ]
        return msgspec.structs.replace(made, points=points)
    return msgspec.structs.replace(made, factors={run.exchange.capabilities.backend: run.step_s / own.step_s})
