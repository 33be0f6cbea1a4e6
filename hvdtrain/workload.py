"""What every workload does round its own data and model: connects the ranks, makes the replica, trains and reports."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain import exits, run, strategies, world
from hvdtrain.config import TrainConfig
from hvdtrain.data import Parts
from hvdtrain.data.loader import Loader
from hvdtrain.frameworks import Replica
from hvdtrain.loop import Judge, Loop
from hvdtrain.strategies import Strategy
from hvdtrain.strategies.hybrid import measured_shares


def connect(
    config: TrainConfig, place: world.Place, threads: int, shapes: Sequence[tuple[int, ...]]
) -> tuple[world.World, Strategy, str]:
    """The ranks and the strategy for parameters of these `shapes`, and this rank's device. Collective."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when a framework is first imported
    if config.framework == "torch":
        from hvdtrain.frameworks.pytorch import prepare
    else:
        from hvdtrain.frameworks.tensorflow import prepare
    device = prepare(config.device, place.local_rank, threads, one_each=config.strategy == "hybrid")
    carrier = strategies.chosen(config)[0].carrier
    ranks = world.World(config.framework, gpu=device != "cpu", carrier=carrier, timeline=config.horovod_timeline)
    return ranks, strategies.make(config, ranks, shapes), device


def compute_dtype(config: TrainConfig) -> Any:
    """TensorFlow's type of --precision."""
    from hvdtrain.frameworks.tensorflow import PRECISIONS

    return PRECISIONS[config.precision]


def replica(model: Any, config: TrainConfig, ranks: world.World, strategy: Strategy, device: str) -> Replica:
    """The model on its device, with its optimizer."""
    if config.framework == "torch":
        from hvdtrain.frameworks.pytorch import TorchReplica

        return TorchReplica(model, device=device, config=config, world=ranks, strategy=strategy)
    from hvdtrain.frameworks.tensorflow import TensorFlowReplica

    return TensorFlowReplica(model, device=device, config=config, world=ranks, strategy=strategy)


def train(
    this: run.Run,
    facts: dict[str, Any],
    *,
    dataset: Parts,
    loader: Loader,
    ranks: world.World,
    replica: Replica,
    strategy: Strategy,
    threads: int,
    stop: world.StopSignal,
    judge: Judge | None = None,
    precise_bn: int = 0,
    documents: Mapping[str, Any] | None = None,
) -> int:
    """Trains in the run's folder and shows the summary on stdout; returns the exit code. Collective.

    `facts` are shown before step 0; `documents` are kept in the folder, by file name.
    """
    config, device = this.config, replica.device
    facts["collectives"] = ranks.collectives
    unseen = device == "cpu" and config.device == "auto"
    facts["device"] = f"{device} ({config.framework} sees no GPU)" if unseen else device
    folder = run.open_folder(config, this.workload, ranks)
    if config.strategy == "hybrid" and this.plan.shares is None:
        shares = run.kept_shares(folder, ranks) or measured_shares(ranks, replica, loader.first_of)
        loader, this = (
            loader.divided(shares),
            dataclasses.replace(this, plan=dataclasses.replace(this.plan, shares=shares)),
        )
        facts["shares"] = run.show_shares(shares, loader.rank_samples)
    facts |= run.write_manifest(this, folder, device=device, threads=threads, world=ranks, documents=documents or {})
    if ranks.rank == 0:
        print(run.arithmetic(config, this.plan, facts), file=sys.stderr, flush=True)
    summary = Loop(
        this,
        folder,
        dataset=dataset,
        loader=loader,
        world=ranks,
        replica=replica,
        strategy=strategy,
        stop=stop,
        judge=judge,
        precise_bn=precise_bn,
    ).run()
    if ranks.rank == 0:
        if summary is None:
            print(f"hvdtrain: stopped; continue with --run-dir {folder} --resume", file=sys.stderr, flush=True)
        else:
            run.show_summary(summary, as_json=config.json)
    ranks.leave()
    return exits.RESUMABLE if summary is None else exits.OK
