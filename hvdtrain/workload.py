"""What every workload does round its own data and model: connects the ranks, makes the replica, trains and reports."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvdtrain import exits, lock, records, run, strategies, world
from hvdtrain.arrays_file import Arrays
from hvdtrain.config import TrainConfig
from hvdtrain.data import Parts
from hvdtrain.data.loader import Loader
from hvdtrain.exits import Failure
from hvdtrain.frameworks import Replica
from hvdtrain.loop import Judge, Loop
from hvdtrain.strategies import Strategy, advice
from hvdtrain.strategies.hybrid import measured_shares
from hvdtrain.threads import Threads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The connected ranks and what each brings."""

    config: TrainConfig
    ranks: world.World
    strategy: Strategy
    device: str
    """This rank's"""
    threads: int

    def replica(self, model: Any, state: Arrays, buffers: Iterable[str] = ()) -> Replica:
        """The model on its device with its optimizer, in the state that all ranks agree on: arrays by name, of which
        `buffers` are each rank's own. Collective."""
        config, strategy = self.config, self.strategy
        replica: Replica
        if config.framework == "torch":
            from hvdtrain.frameworks.pytorch import TorchReplica

            replica = TorchReplica(model, device=self.device, config=config, world=self.ranks, strategy=strategy)
        else:
            from hvdtrain.frameworks.tensorflow import TensorFlowReplica

            replica = TensorFlowReplica(model, device=self.device, config=config, world=self.ranks, strategy=strategy)
        agreed, own = self.ranks.agreed(state), set(buffers)
        replica.load({f"parameter.{name}": array for name, array in agreed.items() if name not in own})
        replica.load_local({name: agreed[name] for name in own})
        return replica

    def train(
        self,
        this: run.Run,
        facts: dict[str, Any],
        replica: Replica,
        dataset: Parts,
        loader: Loader,
        stop: world.StopSignal,
        *,
        judge: Judge | None = None,
        precise_bn: int = 0,
        documents: Mapping[str, Any] | None = None,
    ) -> int:
        """Trains in the run's folder and shows the summary on stdout; returns the exit code. Collective.

        `facts` are shown before step 0; `documents` are kept in the folder, by file name.
        """
        config, ranks, device = self.config, self.ranks, self.device
        facts["collectives"] = ranks.collectives
        unseen = device == "cpu" and config.device == "auto"
        facts["device"] = f"{device} ({config.framework} sees no GPU)" if unseen else device
        folder = run.open_folder(config, this.workload, ranks)
        if config.strategy == "hybrid" and this.plan.shares is None:
            how, shares = "as this run began", run.kept_shares(folder, ranks)
            if shares is None:
                found = measured_shares(ranks, replica, loader.first_of)
                how, shares = str(found), found.shares
            this = dataclasses.replace(this, plan=dataclasses.replace(this.plan, shares=shares))
            loader = loader.divided(shares)
            facts["shares"] = f"{run.show_shares(shares, loader.rank_samples)}, {how}"
        run.check_same(this, folder, ranks)
        facts |= run.write_manifest(
            this, folder, device=device, threads=self.threads, world=ranks, documents=documents or {}
        )
        if ranks.rank == 0:
            print(run.arithmetic(config, this.plan, facts), file=sys.stderr, flush=True)
        summary = Loop(
            this,
            folder,
            dataset=dataset,
            loader=loader,
            world=ranks,
            replica=replica,
            strategy=self.strategy,
            stop=stop,
            judge=judge,
            precise_bn=precise_bn,
        ).run()
        if ranks.rank == 0:
            if summary is None:
                again = run.command(folder, this.workload, ranks)
                print(f"hvdtrain: stopped; continue {again}", file=sys.stderr, flush=True)
            else:
                run.show_summary(summary, as_json=config.json)
                if tip := advised(config, summary, ranks.links):
                    print(f"hvdtrain: {tip}", file=sys.stderr, flush=True)
        ranks.leave()
        lock.release()
        return exits.RESUMABLE if summary is None else exits.OK


def connect(
    config: TrainConfig,
    place: world.Place,
    threads: Threads,
    shapes: Sequence[tuple[int, ...]],
) -> Job:
    """Connects the ranks, to train parameters of these `shapes`. Collective. Raises Failure (78) if the strategy does
    not go with the launcher, or ranks have other settings than rank 0."""
    carrier = strategies.chosen(config)[0].carrier
    if carrier == "horovod" and place.launcher == "torchrun":
        others = [name for name, one in strategies.SCHEDULES.items() if one.carrier != "horovod"]
        raise Failure(
            f"--strategy {config.strategy} is Horovod's, whose ranks torchrun cannot connect: add --strategy native "
            f"(or {', '.join([*strategies.REDUCERS, *others[1:]])}), or start it with mpirun or horovodrun",
            exits.BAD_CONFIG,
        )
    threads.use()
    if config.framework == "torch":
        from hvdtrain.frameworks.pytorch import prepare
    else:
        from hvdtrain.frameworks.tensorflow import prepare
    device = prepare(config.device, place.local_rank, threads.count, one_each=config.strategy == "hybrid")
    ranks = world.World(config.framework, gpu=device != "cpu", carrier=carrier, timeline=config.horovod_timeline)
    run.check_alike(config, ranks)
    strategy = strategies.make(config, ranks, shapes)
    return Job(config=config, ranks=ranks, strategy=strategy, device=device, threads=threads.count)


def advised(config: TrainConfig, summary: records.Summary, links: Sequence[Mapping[str, Any]]) -> str | None:
    """What to try if the hosts of a run have waited long for each other; None if there is nothing to say."""
    if summary.hosts == 1 or not (shares := summary.step_shares):
        return None
    wire_s = advice.wire_s(summary.parameters, summary.hosts, links)
    compute_s = shares["compute"] * summary.train_s / summary.steps
    tip = advice.advice(config, shares, wire_s / compute_s if wire_s else None)
    return f"{shares['exchange']:.0%} of a step was waiting for other hosts: {tip}" if tip else None


def compute_dtype(config: TrainConfig) -> Any:
    """TensorFlow's type of --precision."""
    from hvdtrain.frameworks.tensorflow import PRECISIONS

    return PRECISIONS[config.precision]
