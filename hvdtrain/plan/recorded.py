"""A recorded run as a profile, to plan other strategies, rates or hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from hvdtrain import records
from hvdtrain.plan import coding, network, prediction, profile
from hvdtrain.plan.choice import FAST_LINK
from hvdtrain.plan.network import Link
from hvdtrain.plan.prediction import Host
from hvdtrain.plan.profile import MOST_PARAMETERS, Point, Positive, Profile, Samples, Seconds, Shapes
from hvdtrain.strategies.cost import elements
from hvdtrain.strategies.spec import Spec, parse
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run that its plan depends on. A script has a strategy only."""

    strategy: str
    optimizer: str | None = None
    framework: Literal["torch", "tensorflow", "auto"] = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    batch_size: Samples | None = None
    global_batch_size: Samples | None = None
    epoch_samples: Samples | None = None


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, or the link of its host."""

    host: str
    cpu: str | None = None
    cores: Positive | None = None
    threads: Samples | None = None
    device: str | None = None
    goodput_to: str | None = None
    goodput_mbit: Seconds | None = None


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    global_batch: Samples | None = None
    stages: Samples = 1
    steps: Samples | None = None
    """Planned; a run to a target accuracy may make fewer"""
    train: Samples | None = None
    """Samples of an epoch"""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan needs of a manifest, whose own types are loose."""

    config: Config
    ranks: Annotated[list[Rank], Meta(min_length=1)]
    links: list[Rank]
    plan: Numbers
    data: Numbers
    shapes: Shapes


class Recorded(NamedTuple):
    """The records of a finished run, and its mean times of a step without warm-up."""

    folder: Path
    manifest: records.Manifest
    facts: Facts
    summary: records.Summary
    step_s: float
    compute_s: float
    profile: Profile | None
    """The run's own, if --strategy auto made one"""

    @property
    def config(self) -> Config:
        return self.facts.config

    @property
    def exchange(self) -> Spec:
        return parse(self.config.strategy)

    @property
    def global_batch(self) -> int:
        """Samples of a step. A script that does not log them has one per rank."""
        return self.facts.plan.global_batch or self.summary.global_batch or self.summary.ranks

    @property
    def links(self) -> dict[str, Link]:
        """The links that the run measured, by host."""
        return network.measured(self.manifest.links)

    def hosts(self) -> list[Host]:
        """Return the hosts of the run, with fast links where it measured none."""
        links, hosts = self.links, []
        for name in self.manifest.hosts:
            mine = [rank for rank in self.facts.ranks if rank.host == name]
            hosts.append(Host(name=name, link=links.get(name, FAST_LINK), ranks=len(mine), cores=mine[0].cores))
        return hosts


def read(folder: Path) -> Recorded:
    """Read a run folder. Raises Failure (65, 74, 77) if it holds no finished run in one stage with times of steps."""
    path = folder / "manifest.json"
    if not path.exists():
        raise Failure(
            f"{folder}: not a run folder (no manifest.json); hint: see `hvdtrain results list`", exits.BAD_DATA
        )
    manifest, summary = records.read_document(path, records.Manifest), records.summary(folder)
    try:
        facts = msgspec.convert({name: getattr(manifest, name) for name in Facts.__struct_fields__}, Facts)
    except msgspec.ValidationError as error:
        raise Failure(f"{path}: cannot be planned from ({error}); hint: choose another run", exits.BAD_DATA) from None
    if facts.plan.stages != 1 or not 1 <= elements(facts.shapes) <= MOST_PARAMETERS:
        reason = "it has --stages" if facts.plan.stages != 1 else "its manifest has no shapes of parameters"
        raise Failure(f"{folder}: cannot be planned from, because {reason}; hint: choose another run", exits.BAD_DATA)
    step_s, shares = None, {}
    if summary and summary.ranks == len(manifest.ranks):
        shares = summary.step_shares or ({"compute": 1.0} if summary.hosts == 1 else {})
        if summary.samples_per_s and summary.global_batch:
            step_s = summary.global_batch / summary.samples_per_s
        elif facts.plan.global_batch is None and summary.steps:  # a script that does not log its samples
            step_s = summary.train_s / summary.steps
    compute_s = (step_s or 0.0) * shares.get("compute", 0.0)
    if summary is None or not summary.steps or step_s is None or not 1e-9 < compute_s <= 1.01 * step_s < 1e9:
        raise Failure(
            f"{folder}: no step times without warm-up; hint: choose a run with more steps, see `hvdtrain results list`",
            exits.BAD_DATA,
        )
    own = folder / profile.NAME
    made = profile.read(own) if own.exists() else None
    return Recorded(folder, manifest, facts, summary, step_s, compute_s, made)


def as_profile(run: Recorded, exchanges: Sequence[Spec]) -> Profile:
    """Return a profile whose prediction for the run's own hosts and strategy is the recorded step time.

    `exchanges`: what else will be predicted, with the costs of `coding.recorded`. The ratio of the recorded to the
    simulated step time applies to all predictions for several hosts with the same backend, if the run measured its
    links.
    """
    manifest, rank, hosts = run.manifest, run.facts.ranks[0], run.hosts()
    batch = max(1, round(run.global_batch / len(run.facts.ranks)))
    made = run.profile or Profile(
        machine={"processor": rank.cpu and re.sub(r", \d+ cores$", "", rank.cpu), "cores": rank.cores or 1.0},
        workload=manifest.workload,
        model=str(manifest.model.get("name", manifest.workload)),
        setup={"device": rank.device, "optimizer": run.config.optimizer},
        shapes=manifest.shapes,
        epoch_samples=run.config.epoch_samples or run.facts.data.train or run.global_batch,
        threads=rank.threads or 1,
        from_run=True,
        points=[Point(batch=batch, backward_s=run.compute_s, update_s=0.0, variation=0.0, steps=run.summary.steps)],
    )
    names = prediction.reducers([*exchanges, run.exchange])
    expected_s = coding.recorded(names, manifest.shapes)
    made = profile.with_coding(made, expected_s | made.coding_s)
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
