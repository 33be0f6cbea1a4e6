"""The stages of a run: the mesh of ranks, the partition of the model, and the facts shown before step 0."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from hvdtrain.comm import world
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.channel import neighbours
from hvdtrain.comm.launch_env import LaunchEnv
from hvdtrain.config import batch_plan
from hvdtrain.config.options import TrainConfig
from hvdtrain.models.layers import Layer
from hvdtrain.pipeline import partition
from hvdtrain.pipeline.mesh import Mesh
from hvdtrain.pipeline.partition import Partition
from hvdtrain.pipeline.schedule import NUMBER_BYTES, Pipe, warm_up
from hvdtrain.strategies import Layout, Spec
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a run before they are connected."""

    config: TrainConfig
    environment: LaunchEnv
    mesh: Mesh
    layers: Sequence[Layer]
    """The model's layers; empty if it cannot be partitioned"""
    parameters: Sequence[int]
    """Number of parameters of each layer"""

    @classmethod
    def of(
        cls, config: TrainConfig, environment: LaunchEnv, layers: Sequence[Layer], parameters: Sequence[int], model: str
    ) -> Stages:
        """Make the stages; a dry run without a launcher assumes one rank per stage.

        Raises Failure (78) for settings that cannot be combined.
        """
        assumed = config.dry_run and environment.launcher == "alone"
        ranks = config.stages if assumed else environment.size
        mesh = Mesh(ranks=ranks, stages=config.stages)
        if config.stages > 1 and not layers:
            raise Failure(
                f"--stages {config.stages}: {model} cannot be partitioned; hint: docs/guides/large-models.md "
                "lists the models that can",
                exits.BAD_CONFIG,
            )
        if config.stages > 1 and config.precision == "fp16":
            raise Failure(
                "--precision fp16 cannot be combined with --stages, because each stage would scale its own loss; hint: "
                "--precision bf16 or fp32",
                exits.BAD_CONFIG,
            )
        if config.stages == 1 and not config.resume and config.cut_at:
            raise Failure("--cut-at needs more than one stage; hint: add --stages", exits.BAD_CONFIG)
        return cls(config, environment, mesh, layers, parameters)

    @property
    def data(self) -> int:
        """The replica of this rank."""
        return self._place[0]

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self._place[1]

    @property
    def _place(self) -> tuple[int, int]:
        # A rank of a new host of an elastic job has no place among the ranks that start the job. It gets one later.
        return self.mesh.at(min(self.environment.rank, self.mesh.ranks - 1))

    @property
    def parted(self) -> bool:
        """Whether a step goes through the model in micro-batches."""
        return self.mesh.stages > 1 or batch_plan.micro_batches(self.config) > 1

    def check(self, exchange: Spec) -> None:
        """Raise Failure (78) for a strategy or option that cannot be combined with stages or micro-batches."""
        if not self.parted:
            return
        stages, parts = self.mesh.stages, batch_plan.micro_batches(self.config)
        flag = f"--stages {stages}" if stages > 1 else f"--micro-batches {parts}"
        if self.config.shares is not None:
            raise Failure(f"--shares cannot be combined with {flag}; hint: leave one of them out", exits.BAD_CONFIG)
        able = exchange.capabilities
        several = self.mesh.replicas > 1
        if able.backend not in world.BUILT_IN or (several and (able.in_backward or able.backend != "tcp")):
            raise Failure(
                f"--strategy {exchange} cannot be combined with {flag} on {self.mesh.ranks} ranks; hint: hierarchical "
                "(exact sums) or another reducer",
                exits.BAD_CONFIG,
            )

    def layout(self) -> Layout:
        """Return the layout of the ranks that exchange this stage's gradients."""
        hosts = {rank // self.environment.local_size for rank in self.mesh.holders(self.stage)}
        return Layout(ranks=self.mesh.replicas, hosts=len(hosts))

    def micro_batches(self, rank_batch: int) -> int:
        """Return the micro-batches of a step: like the loader, fewer than requested if they would have one sample."""
        return max(1, min(batch_plan.micro_batches(self.config), rank_batch // 2))

    def held(self, stage: int, rank_batch: int) -> int:
        """Return the maximum number of micro-batches that a stage has run forward but not yet backward."""
        return 1 + warm_up(stage, self.mesh.stages, self.micro_batches(rank_batch))

    def guessed(self) -> Partition:
        """Return the partition of --cut-at, or one by multiply-adds alone. Raises Failure (78), as `measured` does."""
        if self.config.cut_at:
            return partition.named(self.layers, self.mesh.stages, self.config.cut_at.split(","))
        return partition.balanced(self.layers, self.mesh.stages, [layer.multiply_adds for layer in self.layers], 0.0)

    def measured(self, ranks: Communicator, kept: Sequence[str], seconds: Callable[[], Sequence[float]]) -> Partition:
        """Return the partition of --cut-at, of an earlier start of the run (`kept`), or one by measured times.

        `seconds()` measures the time of each layer for one sample. Collective.
        """
        if names := self.config.cut_at or ",".join(kept):
            return partition.named(self.layers, self.mesh.stages, names.split(","))
        times = ranks.gather(list(seconds()))
        fastest = [min(each) for each in zip(*times, strict=True)]  # other programs may have used some processors
        rates = [link["goodput_mbit"] for link in ranks.links if link["goodput_mbit"]]
        per_number = NUMBER_BYTES * 8e-6 / min(rates) if rates else 0.0
        return partition.balanced(self.layers, self.mesh.stages, fastest, per_number)

    def connected(self, ranks: Communicator, layers: Partition) -> Pipe:
        """Connect this rank with its neighbours in the pipeline. Collective."""
        replica, stage, last = self.data, self.stage, self.mesh.stages - 1
        before = self.mesh.rank(replica, stage - 1) if stage else None
        after = self.mesh.rank(replica, stage + 1) if stage < last else None
        previous, following = neighbours(ranks.group.rendezvous, ranks.group.endpoint, before, after)
        return Pipe(
            stage,
            self.mesh.stages,
            before=previous,
            after=following,
            inputs=layers.boundary(stage - 1) if stage else (),
            outputs=layers.boundary(stage) if stage < last else (),
        )

    def facts(self, layers: Partition, rank_batch: int) -> dict[str, str]:
        """Return the facts shown before step 0: one line for the pipeline, and one for each stage."""
        parts, stages = self.micro_batches(rank_batch), self.mesh.stages
        samples = -(-rank_batch // parts)
        idle = partition.bubble(stages, parts)
        lines = {
            "pipeline": f"{stages} stages x {self.mesh.replicas} replicas, {parts} micro-batches of {samples} samples, "
            f"1f1b; equally fast stages would be idle for {idle:.0%} of a step"
        }
        work = sum(layer.multiply_adds for layer in self.layers)
        for stage, (begin, end) in enumerate(itertools.pairwise(layers.borders)):
            inside = self.layers[begin:end]
            share = sum(layer.multiply_adds for layer in inside) / work
            names = f"{inside[0].name} to {inside[-1].name}" if len(inside) > 1 else inside[0].name
            line = f"{names}: {sum(self.parameters[begin:end]):,} parameters, {share:.0%} of the work, "
            line += f"activations of up to {self.held(stage, rank_batch)} micro-batches"
            if stage < stages - 1:
                sent = layers.boundary_numbers(stage) * samples * NUMBER_BYTES
                line += f", sends and receives {sent / 1e6:.3f} MB per micro-batch"
            lines[f"stage {stage}"] = f"{line}; rank {', '.join(map(str, self.mesh.holders(stage)))}"
        return lines
