"""What a run's settings mean for its stages: the grid of ranks, the cut, and what is told of them before step 0."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence

from hvdtrain.comm.channel import neighbours
from hvdtrain.comm.launch_env import Place
from hvdtrain.comm.world import World
from hvdtrain.config import batch_plan
from hvdtrain.config.options import TrainConfig
from hvdtrain.models.layers import Layer
from hvdtrain.pipeline import partition as cuts
from hvdtrain.pipeline.mesh import Grid
from hvdtrain.pipeline.partition import Cut
from hvdtrain.pipeline.schedule import NUMBER_BYTES, Pipe, ahead
from hvdtrain.strategies import Exchange, Layout
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a run before they are connected."""

    config: TrainConfig
    place: Place
    grid: Grid
    layers: Sequence[Layer]
    """Empty for a model that has no row of layers"""
    parameters: Sequence[int]
    """Of each layer"""

    @classmethod
    def of(
        cls, config: TrainConfig, place: Place, layers: Sequence[Layer], parameters: Sequence[int], model: str
    ) -> Stages:
        """Of a dry run by itself those of as many ranks. Raises Failure (78) for settings that do not go together."""
        imagined = config.dry_run and place.launcher == "alone"
        grid = Grid(ranks=config.stages if imagined else place.size, stages=config.stages, across=config.stage_across)
        if config.stages > 1 and not layers:
            raise Failure(
                f"--stages {config.stages}: {model} cannot be cut (docs/STAGES.md says what can)", exits.BAD_CONFIG
            )
        if config.stages > 1 and config.precision == "fp16":
            told = "each stage would scale its loss by itself; take --precision bf16 or fp32"
            raise Failure(f"--precision fp16 does not go with --stages: {told}", exits.BAD_CONFIG)
        if config.stages > 1 and config.inference:
            told = "rank 0, which times the model, has a part of it; resume the run with --stages 1 for that"
            raise Failure(f"--inference does not go with --stages: {told}", exits.BAD_CONFIG)
        if config.stages == 1 and not config.resume and (config.cut_at or config.recompute):
            told = "--cut-at cuts a model into stages" if config.cut_at else "--recompute saves memory of stages"
            raise Failure(f"{told}: give --stages too", exits.BAD_CONFIG)
        _ = most_bytes(config)
        return cls(config, place, grid, layers, parameters)

    @property
    def data(self) -> int:
        """This rank's place along the data."""
        return self.grid.at(self.place.rank)[0]

    @property
    def stage(self) -> int:
        """This rank's place along the model."""
        return self.grid.at(self.place.rank)[1]

    @property
    def parted(self) -> bool:
        """Whether a step goes through the model in parts."""
        return self.grid.stages > 1 or batch_plan.micro_batches(self.config) > 1

    def check(self, exchange: Exchange) -> None:
        """Raises Failure (78) for a strategy that replicas of a stage cannot have, and for what needs Horovod."""
        if self.parted and self.config.horovod_timeline:
            told = "Horovod does not run where a step goes through the model in parts; take --profile"
            raise Failure(f"--horovod-timeline: {told}", exits.BAD_CONFIG)
        strategy, several = exchange.strategy, self.grid.replicas > 1
        alone = strategy.divides or strategy.carrier == "servers"
        if self.parted and (alone or (several and (strategy.in_backward or strategy.carrier != "streams"))):
            stages, parts = self.grid.stages, batch_plan.micro_batches(self.config)
            what = f"--stages {stages}" if stages > 1 else f"--micro-batches {parts}"
            raise Failure(
                f"--strategy {exchange} does not go with {what} on {self.grid.ranks} ranks: it needs a step's only "
                "backward, or all ranks; take hierarchical (exact sums) or another reducer",
                exits.BAD_CONFIG,
            )

    def layout(self, rows: Sequence[int] = ()) -> Layout:
        """Who exchanges this stage's gradients; `rows` as there, where a step goes through the model at once."""
        hosts = {rank // self.place.local_size for rank in self.grid.holders(self.stage)}
        return Layout(ranks=self.grid.replicas, hosts=len(hosts), rows=() if self.parted else rows)

    def parts(self, rank_batch: int) -> int:
        """Micro-batches of a step: fewer than asked where they would have one sample, as the loader makes them."""
        return max(1, min(batch_plan.micro_batches(self.config), rank_batch // 2))

    def held(self, stage: int, rank_batch: int) -> int:
        """Micro-batches that have gone forward through a stage and not yet backward, at most."""
        return 1 + ahead(self.config.stage_order, stage, self.grid.stages, self.parts(rank_batch))

    def needed_bytes(self, rank_batch: int) -> cuts.Needed:
        """What a stage of these layers needs: weights, gradients and what the optimizer keeps, in fp32, and what is
        held of its micro-batches. What the framework itself takes comes on top."""
        samples = -(-rank_batch // self.parts(rank_batch))
        copies = 4 if self.config.optimizer == "adam" else 3

        def needed(stage: int, begin: int, end: int) -> float:
            held, came = self.held(stage, rank_batch), math.prod(self.layers[begin - 1].output) if begin else 0
            kept = sum(math.prod(each.output) if each.held is None else each.held for each in self.layers[begin:end])
            waiting = came * held + kept * (1 if self.config.recompute else held)
            return NUMBER_BYTES["fp32"] * (copies * sum(self.parameters[begin:end]) + samples * waiting)

        return needed

    def guessed(self, rank_batch: int) -> Cut:
        """The cut that --cut-at names, or one by multiply-adds alone. Raises Failure (78), and so `measured`."""
        return self._cut(self.config.cut_at, [layer.multiply_adds for layer in self.layers], 0.0, rank_batch)

    def measured(
        self, ranks: World, kept: Sequence[str], seconds: Callable[[], Sequence[float]], rank_batch: int
    ) -> Cut:
        """The cut that --cut-at names, that an earlier start of the run `kept`, or by `seconds` of each layer and
        sample and the slowest link. Collective."""
        if names := self.config.cut_at or ",".join(kept):
            return self._cut(names, (), 0.0, rank_batch)
        every = ranks.gather(list(seconds()))
        fastest = [min(times) for times in zip(*every, strict=True)]  # others may have used the processors meanwhile
        rates = [link["goodput_mbit"] for link in ranks.measure_links() if link["goodput_mbit"]]
        per_number = NUMBER_BYTES[self.config.activations] * 8e-6 / min(rates) if rates else 0.0
        return self._cut(None, fastest, per_number, rank_batch)

    def _cut(self, names: str | None, seconds: Sequence[float], per_number: float, rank_batch: int) -> Cut:
        stages, memory = self.grid.stages, (self.needed_bytes(rank_batch), most_bytes(self.config))
        if names:
            return cuts.within(cuts.named(self.layers, stages, names.split(",")), *memory)
        return cuts.balanced(self.layers, stages, seconds, per_number, *memory)

    def connected(self, ranks: World, cut: Cut) -> Pipe:
        """This rank's place in its pipeline. Collective."""
        data, stage, last = self.data, self.stage, self.grid.stages - 1
        before = self.grid.rank(data, stage - 1) if stage else None
        after = self.grid.rank(data, stage + 1) if stage < last else None
        left, right = neighbours(ranks.met.meeting, ranks.met.reach, before, after)
        return Pipe(
            stage,
            self.grid.stages,
            before=left,
            after=right,
            inputs=cut.boundary(stage - 1) if stage else (),
            outputs=cut.boundary(stage) if stage < last else (),
            order=self.config.stage_order,
            coding=self.config.activations,
            recompute=self.config.recompute,
        )

    def facts(self, cut: Cut, rank_batch: int) -> dict[str, str]:
        """What there is to show: a line for all, and one for each stage."""
        parts, stages = self.parts(rank_batch), self.grid.stages
        samples = -(-rank_batch // parts)
        told = {
            "pipeline": f"{stages} stages x {self.grid.replicas} replicas, {parts} micro-batches of {samples} samples, "
            f"{self.config.stage_order}: idle {cuts.bubble(stages, parts):.0%} of a step if all stages are equally fast"
        }
        needed = self.needed_bytes(rank_batch)
        what = "the inputs of " if self.config.recompute else ""
        work = sum(layer.multiply_adds for layer in self.layers)
        for stage, (begin, end) in enumerate(itertools.pairwise(cut.borders)):
            inside = self.layers[begin:end]
            share = sum(layer.multiply_adds for layer in inside) / work
            words = f"{inside[0].name} to {inside[-1].name}" if len(inside) > 1 else inside[0].name
            words += f": {sum(self.parameters[begin:end]):,} parameters, {share:.0%} of the work, "
            held = self.held(stage, rank_batch)
            words += f"{needed(stage, begin, end) / 1e6:,.0f} MB, holds {what}{held} of the micro-batches"
            if stage < stages - 1:
                sent = cut.boundary_numbers(stage) * samples * NUMBER_BYTES[self.config.activations]
                words += f", sends {sent / 1e6:.3f} MB per micro-batch, and receives as much"
            told[f"stage {stage}"] = f"{words}; rank {', '.join(map(str, self.grid.holders(stage)))}"
        return told


def most_bytes(config: TrainConfig) -> float:
    """--stage-memory, infinite without it. Raises Failure (78)."""
    if config.stage_memory is None:
        return math.inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MG])B", config.stage_memory, re.ASCII)
    if found is None or (config.stages == 1 and not config.resume):
        told = "it is of stages, give --stages too" if found else "give a size, e.g. 800MB or 1.5GB"
        raise Failure(f"--stage-memory {config.stage_memory}: {told}", exits.BAD_CONFIG)
    return float(found[1]) * {"M": 1e6, "G": 1e9}[found[2]]
