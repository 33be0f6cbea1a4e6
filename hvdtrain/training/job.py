"""A job: connected ranks that train a workload."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from hvdtrain import records, strategies
from hvdtrain.comm import lifecycle
from hvdtrain.comm.world import alone
from hvdtrain.frameworks import Replica
from hvdtrain.pipeline.partition import measured_s
from hvdtrain.pipeline.schedule import Pipe, StageModel
from hvdtrain.plan import advice
from hvdtrain.plan.profile import NAME as PROFILE
from hvdtrain.plan.profile import as_json
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.strategies import registry
from hvdtrain.strategies import shares as unequal_shares
from hvdtrain.system import exits, locks
from hvdtrain.training import elastic, manifest, profiled, resume, run_folder, snapshot, summary
from hvdtrain.training.connected import Connected
from hvdtrain.training.evaluation import Judge
from hvdtrain.training.framework import load_first, make_replica
from hvdtrain.training.loop import Loop


class Job(Connected):
    """Connected ranks that train."""

    def staged(self, model: Callable[[range | None], Any], initial: Callable[[range | None], Arrays]) -> Job:
        """Return this job with the stage of this rank. Collective.

        `model` makes these layers, or all for None, and `initial` their first state (see `replica`).
        Without --cut-at every rank times each layer, forward and backward. With --strategy auto, and one stage, every
        rank profiles the model, and the job has the chosen strategy. Raises Failure (69, 78).
        """
        config, plan, stage = self.run.config, self.run.plan, self.stages.stage
        if config.stages == 1:
            return profiled.with_strategy(self, model, initial)
        earlier = resume.kept(config)
        same = earlier is not None and earlier.plan.get("stages", 1) == config.stages
        kept = self.ranks.gather(tuple(earlier.plan.get("cut", ())) if earlier and same else ())[0]
        cut = self.stages.measured(self.ranks, kept, lambda: self._layer_seconds(model))
        shapes = self.workload.model.vector_shapes(config.framework, cut.arrays(stage))
        layout = dataclasses.replace(self.stages.layout(), hosts=self.data.hosts_count)
        exchange = "none: one replica of each stage"
        if self.stages.mesh.replicas > 1:
            exchange = self.exchange.fact(shapes, layout, buckets=False)
        return dataclasses.replace(
            self,
            run=dataclasses.replace(self.run, plan=dataclasses.replace(plan, cut=cut.names)),
            facts={**self.facts, **self.stages.facts(cut, plan.rank_batch), "exchange": exchange},
            strategy=self.exchange.make(config, self.data, shapes),
            pipe=self.stages.connected(self.ranks, cut),
            part=cut.part(stage),
        )

    def _layer_seconds(self, model: Callable[[range | None], Any]) -> list[float]:
        """Measure the seconds of each layer, forward and backward, for one sample of a micro-batch."""
        config, layers = self.run.config, self.stages.layers
        single = alone(config.framework)

        def layer(number: int) -> StageModel:
            shapes = self.workload.model.vector_shapes(config.framework, layers[number].arrays)
            strategy = strategies.parse(registry.DEFAULT_REDUCER).make(config, single, shapes)
            pipe = Pipe(int(number == len(layers) - 1), 2)
            network, metric = model(range(number, number + 1)), self.workload.metric
            return cast(StageModel, make_replica(network, config, single, strategy, self.device, metric, pipe))

        batch = self.loader.first_of(None)
        return measured_s(layer, layers, (batch.parts or (batch,))[0])

    def replica(self, model: Any, state: Arrays) -> Replica:
        """Put the model on its device, with its optimizer and the state on which all ranks agree. Collective.

        `state`: arrays by name, all parameters and possibly arrays of `Replica.local_state`. Raises Failure (78): see
        `statistics_of`.
        """
        assert self.strategy is not None, "call staged first"
        replica: Replica = make_replica(
            model, self.run.config, self.data, self.strategy, self.device, self.workload.metric, self.pipe
        )
        load_first(replica, self.data.agreed(state))
        return replica

    def whole(self, replica: Replica) -> Arrays:
        """Return the parameters and the other arrays of all stages, by name. Collective."""
        return snapshot.whole(replica, self.ranks, gives=self.stages.data == 0)

    def train(self, replica: Replica, stop: lifecycle.StopSignal, **options: Any) -> int:
        """Train, disconnect the ranks, and return the exit code. Options: see `trained`."""
        result = self.trained(replica, stop, **options)
        self.shut_down()
        return exits.RESUMABLE if result is None else exits.OK

    def shut_down(self) -> None:
        """Disconnect from the other ranks and release the run folder. Collective."""
        if self.pipe is not None:
            self.pipe.shut_down()
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
        """Train in the run folder and print the summary. Returns rank 0's summary on all ranks. Collective.

        Returns None if a signal stopped the run. `documents`: JSON files to keep in the folder, by name.
        """
        ranks, config = self.ranks, self.run.config
        if ranks.joining:
            job, folder = elastic.joined(self)
            if ranks.sentinel:
                ranks.sentinel.set_run_folder(str(folder), run_folder.command(folder, self.run.workload, ranks))
            return Loop(job, folder, replica=replica, stop=stop, judge=judge, precise_bn=precise_bn).run()
        folder = run_folder.open_folder(config, self.run.workload, ranks)
        job = self._with_measured_shares(replica) if config.shares == "measured" else self
        manifest.check_same(job, folder)
        profile = {PROFILE: as_json(job.profile)} if job.profile else {}
        manifest.write(job, folder, {**(documents or {}), **profile})
        if ranks.rank == 0:
            print(summary.arithmetic(config, job.run.plan, job._all_facts()), file=sys.stderr, flush=True)
        result = Loop(job, folder, replica=replica, stop=stop, judge=judge, precise_bn=precise_bn).run()
        if ranks.rank == 0:
            if result is None:
                command = run_folder.command(folder, self.run.workload, ranks)
                print(f"hvdtrain: stopped; continue {command}", file=sys.stderr, flush=True)
            else:
                summary.show_summary(result, self.workload.metric, as_json=config.json)
                last = dataclasses.replace(config, strategy=result.strategy)
                if tip := advice.after_run(last, folder):
                    print(f"hvdtrain: {tip}", file=sys.stderr, flush=True)
        if result is None or ranks.elastic:  # all ranks have the summary
            return result
        return records.Summary(**ranks.gather(msgspec.structs.asdict(result) if ranks.rank == 0 else None)[0])

    def _with_measured_shares(self, replica: Replica) -> Job:
        """Return this job with the last shares of the run to resume, or with shares measured now. Collective."""
        assert self.strategy is not None
        earlier = resume.kept(self.run.config) if self.ranks.rank == 0 else None
        source, shares = "from this run's earlier steps", self.ranks.gather(earlier and earlier.plan.get("shares"))[0]
        shares = tuple(shares) if shares and len(shares) == self.ranks.size else None
        if shares is None:
            measurement = unequal_shares.measure(self.ranks, replica, self.loader.first_of)
            source, shares = str(measurement), measurement.shares
        loader, plan = self.loader.divided(shares), dataclasses.replace(self.run.plan, shares=shares)
        fact = f"{summary.show_shares(shares, loader.rank_samples)}, {source}"
        run, facts = dataclasses.replace(self.run, plan=plan), {**self.facts, "shares": fact}
        return dataclasses.replace(self, run=run, loader=loader, facts=facts)

    def _all_facts(self) -> dict[str, Any]:
        """Return `facts` with those that are known only when the ranks are connected."""
        config, device = self.run.config, self.device
        if device == "cpu" and config.device == "auto":
            device = f"{device} ({config.framework} sees no GPU)"
        facts = {**self.facts, "backend": self.ranks.library, "device": device}
        return facts | ({"links": summary.show_links(self.ranks.links)} if self.ranks.links else {})
