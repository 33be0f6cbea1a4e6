"""What every workload does with its own data and model: reads options, connects the ranks, trains and reports.

config, environment = begin(MyConfig, "mine", __doc__)
job = Workload(name="mine", config=config, environment=environment, data=..., model=..., metric=...).connect()
if job is None:  # a dry run
    return exits.OK
return job.train(job.replica(model, state), stop)
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hvdtrain import strategies
from hvdtrain.comm import world
from hvdtrain.comm.backends.base import RankGroup
from hvdtrain.comm.launch_env import LaunchEnv, launch_env
from hvdtrain.config import batch_plan, parser
from hvdtrain.config.options import TrainConfig
from hvdtrain.data.loader import Loader
from hvdtrain.frameworks import resolve
from hvdtrain.pipeline.plan import Stages
from hvdtrain.pipeline.schedule import Pipe
from hvdtrain.strategies import Reducer, Spec, Strategy, automatic, catalog, registry, shares
from hvdtrain.strategies.cost import elements
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import elastic, framework, observers, profiled, resume, run_folder, summary, threads
from hvdtrain.training.connected import Data as Data
from hvdtrain.training.connected import Described
from hvdtrain.training.connected import Model as Model
from hvdtrain.training.job import Job
from hvdtrain.training.threads import Threads

C = TypeVar("C", bound=TrainConfig)


def begin(cls: type[C], name: str, purpose: str) -> tuple[C, LaunchEnv]:
    """Return the config of workload `name`, with its framework resolved, and this process's launch environment.

    `purpose` heads the help. Raises Failure (2, 65, 78) for invalid options.
    """
    config, environment = resume.parse(cls, name, purpose), launch_env()
    for name in parser.misspelled_variables(cls) if environment.rank == 0 else ():
        print(f"hvdtrain: warning: unknown variable {name}", file=sys.stderr)
    return dataclasses.replace(config, framework=resolve(config.framework)), environment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(Described):
    """A model, its data and its metric, before the ranks are connected."""

    def connect(self) -> Job | None:
        """Connect the ranks. Returns None if only a dry run or the help of --strategy was requested. Collective.

        Raises Failure (65, 69, 78) if options cannot be combined, ranks cannot be found, or they do not agree.
        """
        config, environment, stages = self.config, self.environment, self._stages()
        profiled.check(self)
        if catalog.help_requested(config.strategy):
            if environment.rank == 0:
                catalog.show(config.strategy, self.model.vector_shapes(config.framework), stages.layout())
            return None
        exchange = self._resolve(stages)
        loader = self._loader(stages)
        run = self._run(loader, stages)
        used = threads.per_rank(config.threads, environment, run.plan.rank_batch * self.model.multiply_adds)
        if config.dry_run:
            if environment.rank == 0:
                cost = exchange.cost(self._largest_stage(stages), stages.layout(), buckets=not stages.parted)
                summary.show_dry_run(run, self._facts(run, loader, stages, exchange, used), cost)
            return None

        device = framework.prepare(
            config.framework,
            used,
            device=config.device,
            local_rank=environment.local_rank,
            exclusive_gpu=config.shares is not None,
        )
        group = dataclasses.replace(self._find_ranks(exchange, stages, device), between_hosts=config.backend)
        run_folder.check_alike(config, self.data.dataset.fingerprint, group)
        exchange = self._resolve(stages, group.measure_links())
        backend = "tcp" if stages.parted else exchange.capabilities.backend
        ranks = data = world.connect(config.framework, device != "cpu", backend=backend, group=group, owned=True)
        if config.stages > 1:
            replicas = world.subgroup(group, stages.mesh.holders(stages.stage))
            data = world.connect(config.framework, device != "cpu", backend="tcp", group=replicas)
        return Job(
            workload=self,
            run=run,
            facts=self._facts(run, loader, stages, exchange, used),
            loader=loader,
            exchange=exchange,
            strategy=None if config.stages > 1 else exchange.make(config, data, self._largest_stage(stages)),
            ranks=ranks,
            data=data,
            device=device,
            threads=used.count,
            stages=stages,
            pipe=Pipe() if stages.parted else None,
        )

    def _stages(self) -> Stages:
        sizes = [elements(self.model.vector_shapes(self.config.framework, layer.arrays)) for layer in self.model.layers]
        return Stages.of(self.config, self.environment, self.model.layers, sizes, self.model.title)

    def _resolve(self, stages: Stages, links: Sequence[Mapping[str, Any]] = ()) -> Spec:
        """Resolve --strategy. Raises Failure (78) if it cannot be combined with other options or with the stages."""
        exchange = strategies.resolve(self.config, links)
        stages.check(exchange)
        elastic.check(self.environment.launcher, exchange, self.config)
        return exchange

    def _loader(self, stages: Stages) -> Loader:
        replicas = stages.mesh.replicas
        return Loader(
            self.data.dataset.train,
            global_batch=resume.global_batch(self.config, replicas),
            rank=stages.data,
            size=replicas,
            seed=self.config.seed,
            shares=shares.given(self.config, replicas),
            micro_batches=batch_plan.micro_batches(self.config),
            epoch_samples=self.config.epoch_samples,
        )

    def _run(self, loader: Loader, stages: Stages) -> run_folder.Run:
        """Make the batch plan and the description of the run.

        Raises Failure (65, 78) for options that do not fit this plan or the data.
        """
        config, dataset = self.config, self.data.dataset
        plan = batch_plan.batch_plan(
            config,
            stages.mesh.replicas,
            resume.global_batch(config, stages.mesh.replicas),
            loader.steps_per_epoch,
            shares.given(config, stages.mesh.replicas),
        )
        observers.check(config, plan.steps)
        if config.target:
            self.metric.target(config.target)
            if not len(getattr(dataset, config.evaluate_on)):
                message = f"--target {config.target} needs {config.evaluate_on} data, and there are none"
                raise Failure(f"{message}; hint: use data with this split", exits.BAD_DATA)
        splits = {split: len(getattr(dataset, split)) for split in ("train", "validation", "test")}
        parameters = sum(math.prod(shape) for shape in self.model.shapes.values())
        return run_folder.Run(
            workload=self.name,
            config=config,
            plan=plan,
            data={"name": dataset.name, "fingerprint": dataset.fingerprint, **self.data.facts, **splits},
            model={"parameters": parameters, **self.model.facts},
        )

    def _largest_stage(self, stages: Stages) -> list[tuple[int, ...]]:
        """Return the vector shapes of the stage with the most parameters, before layers are measured."""
        if self.config.stages == 1:
            return self.model.vector_shapes(self.config.framework)
        cut = stages.guessed()
        names = [cut.arrays(stage) for stage in range(self.config.stages)]
        return max((self.model.vector_shapes(self.config.framework, each) for each in names), key=elements)

    def _facts(
        self, run: run_folder.Run, loader: Loader, stages: Stages, exchange: Spec, used: Threads
    ) -> dict[str, Any]:
        """Return the facts that are shown before step 0."""
        config, parameters = self.config, run.model["parameters"]
        layout, shapes = stages.layout(), self._largest_stage(stages)
        facts: dict[str, Any] = {
            "model": f"{self.model.title}: {parameters:,} parameters, {4 * parameters / 1e6:.2f} MB",
            "data": f"{self.data.dataset.name}: {self.data.title}",
            "ranks": f"{self.environment.size} ({self.environment.launcher}), {config.framework}, {used}",
            "exchange": f"{config.strategy}: chosen before step 0"
            if automatic.rule(config.strategy)
            else exchange.fact(shapes, layout, buckets=not stages.parted),
        }
        if config.stages > 1:
            facts |= stages.facts(stages.guessed(), run.plan.rank_batch)
        if config.shares is not None:
            facts["shares"] = summary.show_shares(run.plan.shares, loader.rank_samples)
        return facts

    def _find_ranks(self, exchange: Spec, stages: Stages, device: str) -> RankGroup:
        """Find the ranks through Horovod if it is the backend, otherwise through the launcher. Collective."""
        horovod = exchange.capabilities.backend == "horovod" and not stages.parted
        if horovod and self.environment.launcher == "torchrun":
            able = registry.names(Strategy)
            able = [name for name in able if registry.lookup(name).capabilities.backend != "horovod"]
            raise Failure(
                f"--strategy {exchange} needs Horovod, which does not support torchrun; hint: start the ranks with "
                f"mpirun or horovodrun, or use --strategy {', '.join([*able, *registry.names(Reducer)])}",
                exits.BAD_CONFIG,
            )
        return world.find_ranks(
            self.config.framework,
            horovod=horovod,
            gpu=device != "cpu",
            stall_limit_s=world.stall_limit_s(),
            elastic=True,
        )
