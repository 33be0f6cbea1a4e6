"""What every workload does round its own data and model: reads its settings, connects the ranks, trains and reports.

config, place = begin(MyConfig, "mine", __doc__)
job = Workload(name="mine", config=config, place=place, dataset=..., shapes=..., ...).connect()
if job is None:  # a dry run
    return exits.OK
replica = job.replica(model, state)
return job.train(replica, stop)
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from hvdtrain import records, strategies
from hvdtrain.comm import lifecycle, world
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.launch_env import LaunchEnv, launch_env
from hvdtrain.config import batch_plan, parser
from hvdtrain.config.options import TrainConfig
from hvdtrain.data.loader import Loader
from hvdtrain.frameworks import Replica, in_vector, resolve
from hvdtrain.models.layers import Layer
from hvdtrain.pipeline.partition import Partition, measured_s
from hvdtrain.pipeline.plan import Stages
from hvdtrain.pipeline.schedule import Pipe, StageModel
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.records.metrics import Metric
from hvdtrain.strategies import Exchange, Reducer, Strategy, catalog, registry
from hvdtrain.strategies import shares as unequal_shares
from hvdtrain.strategies.cost import elements
from hvdtrain.system import exits, locks
from hvdtrain.system.exits import Failure
from hvdtrain.training import observers, resume, run_folder, snapshot, threads
from hvdtrain.training.loop import Judge, Loop
from hvdtrain.training.threads import Threads

C = TypeVar("C", bound=TrainConfig)


def begin(cls: type[C], name: str, purpose: str, argv: Sequence[str] | None = None) -> tuple[C, LaunchEnv]:
    """The config of workload `name`, its framework chosen, and what the launcher says of our place among the ranks.

    `purpose` heads the help; `argv`: its flags, else those of this process. Raises Failure (2, 65, 78) for settings
    that are not accepted.
    """
    config, place = resume.parse(cls, name, purpose, argv), launch_env()
    for name in parser.misspelled_variables(cls) if place.rank == 0 else ():
        print(f"hvdtrain: warning: unknown variable {name}", file=sys.stderr)
    return dataclasses.replace(config, framework=resolve(config.framework)), place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is to be trained on what, told by numbers alone, before a framework is loaded."""

    name: str
    config: TrainConfig
    place: LaunchEnv
    dataset: Any
    """Its name, its fingerprint, and the splits train, validation and test: see `data.Split`"""
    data: Mapping[str, Any]
    """What the manifest says of the data besides name, fingerprint and the splits' lengths"""
    data_words: str
    """The data set in a line, for people"""
    model: Mapping[str, Any]
    """What the manifest says of the model besides the number of its parameters: name, spec ..."""
    model_words: str
    """The model's name and size, for people"""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the trained arrays, in the model's order and PyTorch's layout"""
    metric: Metric
    """What is added up over samples, and the scores made of it"""
    multiply_adds: float
    """Of a layer of mean size for one sample, forward"""
    layers: Sequence[Layer] = ()
    """The model as a row of layers, if it can be cut into stages: see `Job.staged`"""

    def connect(self) -> Job | None:
        """Connects the ranks; None if the config asks for a dry run or the list of strategies, which are then shown.

        Collective. Raises Failure (78) if settings do not fit together, the data, the launcher or the other ranks.
        """
        config, place = self.config, self.place
        sizes = [elements(self.of_arrays(layer.arrays)) for layer in self.layers]
        stages = Stages.of(config, place, self.layers, sizes, self.model_words)
        shapes, replicas = in_vector(config.framework, self.shapes.values()), stages.mesh.replicas
        batch = resume.global_batch(config, replicas)
        layout, buckets = stages.layout(), not stages.parted
        if catalog.help_requested(config.strategy):
            if place.rank == 0:
                catalog.show(config.strategy, shapes, layout)
            return None
        exchange = strategies.chosen(config)
        stages.check(exchange)
        shares = unequal_shares.given(config, replicas)
        loader = Loader(
            self.dataset.train,
            global_batch=batch,
            rank=stages.data,
            size=replicas,
            seed=config.seed,
            shares=shares,
            micro_batches=batch_plan.micro_batches(config),
            epoch_samples=config.epoch_samples,
        )
        plan = batch_plan.batch_plan(config, replicas, batch, loader.steps_per_epoch, shares)
        observers.check(config, plan.steps, place)
        if config.target:
            self.metric.target(config.target)
            if not len(getattr(self.dataset, config.evaluate_on)):
                told = f"--target {config.target} is looked for in the {config.evaluate_on} data: give some"
                raise Failure(told, exits.BAD_DATA)
        parameters = sum(math.prod(shape) for shape in shapes)
        used = threads.per_rank(config.threads, place, plan.rank_batch * self.multiply_adds)
        facts: dict[str, Any] = {
            "model": f"{self.model_words}: {parameters:,} parameters, {4 * parameters / 1e6:.2f} MB",
            "data": f"{self.dataset.name}: {self.data_words}",
            "ranks": f"{place.size} ({place.launcher}), {config.framework}, {used}",
            "exchange": exchange.fact(shapes, layout, buckets=buckets),
        }
        if config.stages > 1:
            cut = stages.guessed()
            shapes = max((self.of_stage(cut, stage) for stage in range(config.stages)), key=elements)
            facts |= stages.facts(cut, plan.rank_batch) | {"exchange": exchange.fact(shapes, layout, buckets=False)}
        if config.shares is not None:
            facts["shares"] = run_folder.show_shares(plan.shares, loader.rank_samples)
        splits = {split: len(getattr(self.dataset, split)) for split in ("train", "validation", "test")}
        about = run_folder.Run(
            workload=self.name,
            config=config,
            plan=plan,
            data={"name": self.dataset.name, "fingerprint": self.dataset.fingerprint, **self.data, **splits},
            model={"parameters": parameters, **self.model},
        )
        if config.dry_run:
            if place.rank == 0:
                run_folder.show_dry_run(about, facts, exchange.cost(shapes, layout, buckets=buckets))
            return None
        ranks, device = connected(config, exchange, place, used, self.dataset.fingerprint, parted=stages.parted)
        data = ranks
        if config.stages > 1:
            group = ranks.group.subgroup(stages.mesh.holders(stages.stage))
            data = world.connect(config.framework, device != "cpu", backend="tcp", group=group)
        strategy = exchange.make(config, data, shapes)
        return Job(
            about,
            facts,
            self.dataset,
            loader,
            self.metric,
            ranks,
            exchange,
            strategy,
            device,
            used.count,
            work=self,
            data=data,
            stages=stages,
            pipe=Pipe() if stages.parted else None,
        )

    def of_stage(self, cut: Partition, stage: int) -> list[tuple[int, ...]]:
        """Shapes of a stage's trained arrays, as they lie in its vector."""
        return self.of_arrays(cut.arrays(stage))

    def of_arrays(self, names: Iterable[str]) -> list[tuple[int, ...]]:
        """Shapes of those that are trained among them, as they lie in a vector."""
        return in_vector(self.config.framework, [self.shapes[name] for name in names if name in self.shapes])


@dataclasses.dataclass(frozen=True)
class Job:
    """The connected ranks and what each brings."""

    about: run_folder.Run
    facts: Mapping[str, Any]
    """Shown before step 0"""
    dataset: Any
    loader: Loader
    metric: Metric
    ranks: Communicator
    exchange: Exchange
    """What --strategy means, resolved once"""
    strategy: Strategy
    device: str
    """This rank's"""
    threads: int
    work: Workload
    data: Communicator
    """The ranks with the same part of the model: all, if it is whole"""
    stages: Stages
    pipe: Pipe | None
    """What a step goes through in parts, if it does"""
    part: range | None = None
    """The layers of this rank's stage; None: all"""

    def over(self, dataset: Any) -> Job:
        """The same with the same items seen in another way, as features, say."""
        return dataclasses.replace(self, dataset=dataset, loader=self.loader.over(dataset.train))

    def staged(self, model: Callable[[range | None], Any]) -> Job:
        """The same with this rank's `part` of the model; collective. `model` makes one of these layers, None: all.

        Without --cut-at every rank times each layer, forward and backward. Raises Failure (69, 78).
        """
        config, mesh, plan = self.about.config, self.stages.mesh, self.about.plan
        if config.stages == 1:
            return self
        kept = self.ranks.gather(resume.kept_cut(config))[0]
        cut = self.stages.measured(self.ranks, kept, lambda: self._seconds(model))
        stage, shapes = self.stages.stage, self.work.of_stage(cut, self.stages.stage)
        layout = dataclasses.replace(self.stages.layout(), hosts=self.data.hosts_count)
        facts = self.stages.facts(cut, plan.rank_batch)
        told = self.exchange.fact(shapes, layout, buckets=False)
        facts["exchange"] = told if mesh.replicas > 1 else "none: one replica of each stage"
        strategy = self.exchange.make(config, self.data, shapes)
        return dataclasses.replace(
            self,
            about=dataclasses.replace(self.about, plan=dataclasses.replace(plan, cut=cut.names)),
            facts={**self.facts, **facts},
            strategy=strategy,
            pipe=self.stages.connected(self.ranks, cut),
            part=cut.part(stage),
        )

    def _seconds(self, model: Callable[[range | None], Any]) -> list[float]:
        """Of each layer by itself, forward and backward, for a sample of a micro-batch."""
        config, layers = self.about.config, self.stages.layers
        alone = world.connect(config.framework, backend="tcp", group=world.RankGroup.watched(Communicator()))

        def part(number: int) -> StageModel:
            shapes = self.work.of_arrays(layers[number].arrays)
            strategy = strategies.parse(registry.DEFAULT_REDUCER).make(config, alone, shapes)
            pipe = Pipe(int(number == len(layers) - 1), 2)
            made = model(range(number, number + 1))
            return cast(StageModel, replica_of(made, config, alone, strategy, self.device, self.metric, pipe))

        batch = self.loader.first_of(None)
        return measured_s(part, layers, (batch.parts or (batch,))[0])

    def replica(self, model: Any, state: Arrays) -> Replica:
        """The model on its device with its optimizer, in the state that all ranks agree on: arrays by name, all
        parameters and perhaps some that are each rank's own. Collective. Raises Failure (78): see `statistics_of`."""
        replica = replica_of(model, self.about.config, self.data, self.strategy, self.device, self.metric, self.pipe)
        agreed = self.data.agreed(state)
        own = agreed.keys() & replica.local_state().keys()
        replica.load({f"parameter.{name}": array for name, array in agreed.items() if name not in own})
        replica.load_local({name: agreed[name] for name in own})
        return replica

    def whole(self, replica: Replica) -> Arrays:
        """Parameters and what else the model has, of all stages, by name. Collective."""
        return snapshot.whole(replica, self.ranks, gives=self.stages.data == 0)

    def train(self, replica: Replica, stop: lifecycle.StopSignal, **more: Any) -> int:
        """The exit code after `trained`; the ranks part."""
        summary = self.trained(replica, stop, **more)
        self.leave()
        return exits.RESUMABLE if summary is None else exits.OK

    def leave(self) -> None:
        """The ranks part. Collective."""
        if self.pipe is not None:
            self.pipe.leave()
        if self.data is not self.ranks:
            self.data.shutdown()
        self.ranks.shutdown()
        locks.release()

    def trained(
        self,
        replica: Replica,
        stop: lifecycle.StopSignal,
        *,
        judge: Judge | None = None,
        precise_bn: int = 0,
        documents: Mapping[str, Any] | None = None,
    ) -> records.Summary | None:
        """Trains in the run's folder and shows the summary on stdout. Returns rank 0's on all ranks, None if a signal
        has stopped the run. Collective.

        `documents` are kept in the folder, by file name.
        """
        about, config, ranks, loader, device = self.about, self.about.config, self.ranks, self.loader, self.device
        told = f"{device} ({config.framework} sees no GPU)" if device == "cpu" and config.device == "auto" else device
        facts = {**self.facts, "collectives": ranks.library, "device": told}
        folder = run_folder.open_folder(config, about.workload, ranks)
        if config.shares == "measured":
            how, shares = "as this run began", run_folder.kept_shares(folder, ranks)
            if shares is None:
                found = unequal_shares.measure(ranks, self.strategy, replica, loader.first_of)
                shares, how = found.shares, str(found)
            about = dataclasses.replace(about, plan=dataclasses.replace(about.plan, shares=shares))
            loader = loader.divided(shares)
            facts["shares"] = f"{run_folder.show_shares(shares, loader.rank_samples)}, {how}"
        run_folder.check_same(about, self.exchange, self.strategy.reshard_refusal, folder, ranks)
        facts |= run_folder.write_manifest(
            about,
            self.exchange,
            folder,
            metric=self.metric,
            device=device,
            threads=self.threads,
            world=ranks,
            documents=documents or {},
        )
        if ranks.rank == 0:
            print(run_folder.arithmetic(config, about.plan, facts), file=sys.stderr, flush=True)
        summary = Loop(
            about,
            folder,
            dataset=self.dataset,
            loader=loader,
            world=ranks,
            data=self.data,
            stage=self.stages.stage,
            replica=replica,
            strategy=self.strategy,
            stop=stop,
            metric=self.metric,
            judge=judge,
            precise_bn=precise_bn,
        ).run()
        if ranks.rank == 0:
            if summary is None:
                again = run_folder.command(folder, about.workload, ranks)
                print(f"hvdtrain: stopped; continue {again}", file=sys.stderr, flush=True)
            else:
                run_folder.show_summary(summary, self.metric, as_json=config.json)
                if tip := run_folder.advised(config, summary, ranks.links):
                    print(f"hvdtrain: {tip}", file=sys.stderr, flush=True)
        if summary is None:
            return None
        return records.Summary(**ranks.gather(msgspec.structs.asdict(summary) if ranks.rank == 0 else None)[0])


def connected(
    config: TrainConfig, exchange: Exchange, place: LaunchEnv, used: Threads, data: str = "", *, parted: bool = False
) -> tuple[Communicator, str]:
    """The ranks, which agree on settings and on the fingerprint of their `data`, and this one's device. Collective.

    `parted`: a step goes through the model in parts, which streams carry. Raises Failure (78) if the strategy does not
    go with the launcher, (69) if ranks did not find each other, (65, 78) if they do not agree."""
    backend = "tcp" if parted else exchange.capabilities.backend
    if backend == "horovod" and place.launcher == "torchrun":
        able = [name for name in registry.names(Strategy) if registry.lookup(name).capabilities.backend != "horovod"]
        first, *others = able
        raise Failure(
            f"--strategy {config.strategy} is Horovod's, whose ranks torchrun cannot connect: give --strategy "
            f"{first} (or {', '.join([*registry.names(Reducer), *others])}), or start it with mpirun or horovodrun",
            exits.BAD_CONFIG,
        )
    if config.framework not in sys.modules:  # else OpenMP has read its variables, as in a script
        used.use()
    if config.framework == "torch":
        from hvdtrain.frameworks.pytorch import prepare
    else:
        from hvdtrain.frameworks.tensorflow import prepare
    device = prepare(config.device, place.local_rank, used.count, exclusive_gpu=config.shares is not None)
    ranks = world.connect(
        config.framework,
        gpu=device != "cpu",
        backend=backend,
        timeline=config.horovod_timeline,
        stall_limit_s=config.stall_limit,
    )
    if ranks.size != place.size:
        told = f"{place.launcher} started {place.size} ranks, of which {ranks.size} found each other"
        raise Failure(f"{told}: is it of another MPI than what is loaded here? See hvdtrain doctor", exits.UNREACHABLE)
    run_folder.check_alike(config, data, ranks)
    return ranks, device


def replica_of(
    model: Any,
    config: TrainConfig,
    ranks: Communicator,
    strategy: Strategy,
    device: str,
    metric: Metric,
    pipe: Pipe | None = None,
) -> Any:
    """The model on its device with its optimizer, as the framework of the config makes it: a `frameworks.Replica`, and
    a `StageModel` with a `pipe`."""
    told = {"device": device, "config": config, "world": ranks, "strategy": strategy, "metric": metric}
    made: Any
    if config.framework == "torch":
        from hvdtrain.frameworks.pytorch import TorchReplica as made

        if pipe is not None:
            from hvdtrain.frameworks.pipeline_torch import PipelineTorch as made
    else:
        from hvdtrain.frameworks.tensorflow import TensorFlowReplica as made

        if pipe is not None:
            from hvdtrain.frameworks.pipeline_tensorflow import PipelineTensorFlow as made
    return made(model, **told) if pipe is None else made(model, **told, pipe=pipe)
