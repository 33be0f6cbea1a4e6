"""The training loop, which does not depend on framework, model or strategy.

    for each epoch:
        for each batch:  gradients -> strategy: exchange and update -> record
        evaluate on the validation split, record, save a checkpoint
    evaluate on the test split (with scores: the best epoch's weights), record, mark the run COMPLETE

A signal to any rank ends the loop with a checkpoint. That happens after the current step, or after the next exchange if
the strategy lets ranks train on their own for some steps. With --strategy auto, the strategy may change between two
steps (`adaptive`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain import records
from hvdtrain.comm.elastic import ElasticCommunicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.lifecycle import StopSignal
from hvdtrain.frameworks import Replica
from hvdtrain.observe.progress import Progress
from hvdtrain.observe.timing import WARMUP_STEPS, Clock, Spent, process_age_s, step_shares
from hvdtrain.plan.choice import Chosen
from hvdtrain.strategies import STOP, Exchanged, parse
from hvdtrain.system import exits, locks
from hvdtrain.system.exits import Failure
from hvdtrain.training import consistency, elastic, manifest, observers, snapshot
from hvdtrain.training.adaptive import Adaptive, mean_optimizer
from hvdtrain.training.balance import Balance
from hvdtrain.training.checkpoint import Checkpoints, Loaded
from hvdtrain.training.evaluation import Evaluator, Judge, timed_inference
from hvdtrain.training.joining import Joining
from hvdtrain.training.summary import show_shares
from hvdtrain.training.train_state import Position

if TYPE_CHECKING:
    from hvdtrain.training.job import Job


class Loop:
    """One rank's training run in `folder`, which exists. All ranks call the same methods in the same order."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        *,
        replica: Replica,
        stop: StopSignal,
        judge: Judge | None = None,
        precise_bn: int = 0,
    ) -> None:
        assert job.strategy is not None
        self._metric, self._judge = job.workload.metric, judge
        self._run, self._config, self._plan = job.run, job.run.config, job.run.plan
        self._target = self._metric.target(self._config.target) if self._config.target else None
        self._dataset, self._loader, self._world, self._data = job.dataset, job.loader, job.ranks, job.data
        self._replica, self._strategy = replica, job.strategy
        self._folder, self._stop = folder, stop
        self._job = job
        self._evaluator = Evaluator(job, replica, judge, precise_bn)
        self._checkpoints = self._new_checkpoints()
        self._records_of = elastic.records_number(self._world, self._plan.ranks)
        """Number of the file that this rank writes; 0 from the time when it takes over from a lost rank 0"""
        self._writer = observers.writer(self._config, folder, self._records_of)
        self._joining = Joining(self._world, replica, job.strategy, self._welcome, self._enter, self._use)
        self._transactions = elastic.Transactions(
            self._world,
            replica,
            job.strategy,
            self._adopt,
            self._learn,
            self._joining.hand_over,
        )
        self._observers = observers.Observers(
            self._config, self._plan.steps, folder, world=self._world, replica=replica, say=self._say
        )
        self._clock = Clock(replica.synchronize)
        self._at = Position(strategy=str(job.exchange))
        self._shapes = job.workload.model.vector_shapes(self._config.framework)
        watched = job.auto and job.profile and (job.ranks.hosts_count > 1 or job.ranks.elastic)
        self._adaptive = Adaptive(job) if watched else None
        self._balance = Balance(self._plan.shares or ()) if self._config.shares == "measured" else None
        self._stopping = self._save_due = self._check_due = self._choose_due = self._published = False
        self._steps_here = self._steps_of_strategy = 0
        self._computed = job.strategy.capabilities.in_backward
        """Whether bytes sent are computed, because the backend does not count them"""
        self._spent = Spent()
        self._first_step_s: float | None = None

    def _new_checkpoints(self) -> Checkpoints:
        """Collective."""
        return Checkpoints(
            self._folder / "checkpoints",
            self._world,
            keep=self._config.keep_checkpoints,
            identity=self._run.identity(),
            layout=self._world.gather(self._world.local_rank),
            cut=[*self._plan.cut],
            stages=self._world.gather(self._job.stages.stage),
            check=self._position,
            report=self._say,
        )

    def run(self) -> records.Summary | None:
        """Train to the end. Returns None if a signal stopped the run, after saving a checkpoint."""
        if not self._world.joining:
            if self._config.resume:
                self._resume()
            (self._folder / "COMPLETE").unlink(missing_ok=True)
        self._stop.resumable = True
        self._world.begin(elastic.begun(self._job, self._folder))
        with contextlib.ExitStack() as watching:
            watching.enter_context(self._observers.watching(self._at.step))
            self._began_unix_s, self._nic_began = time.time(), self._world.nic_counters()
            if self._world.joining:
                self._joining.follow()
                self._transactions.regroup()
            while self._at.epoch < self._config.epochs and not self._at.reached(self._target, self._metric):
                if not self._epoch(self._at.epoch):
                    return None
            return self._finish(watching)

    def _epoch(self, epoch: int) -> bool:
        """Train to the end of the epoch, evaluate, record and save. Returns False if a signal stopped the run."""
        while (finished := self._train(epoch)) is None:
            pass  # the members changed
        if finished:
            self._end_epoch(epoch)
        return finished

    def _train(self, epoch: int) -> bool | None:
        """Train to the end of the epoch. Returns False if a signal stopped the run, None if the members changed."""
        start, every, loader = self._at.consumed, self._config.checkpoint_steps, self._loader
        ends = loader.ends(start)
        first, label = loader.step_at(start), f"epoch {epoch + 1}/{self._config.epochs}"
        if (stopped := self._due(last=not ends)) is not True:
            return stopped
        with (
            contextlib.closing(self._loader.epoch(epoch, start=start)) as batches,
            Progress(label, first + len(ends), "steps", enabled=self._world.rank == 0, done=first) as progress,
        ):
            for end in ends:
                last = end == ends[-1]
                self._joining.admit(functools.partial(elastic.has_room, self._job, self._world), self._at.consumed)
                before = self._transactions.statistics()
                try:
                    with self._observers.step(self._at.step):
                        loss = self._step(epoch, batches, end, last)
                except elastic.LOST:
                    if not self._world.elastic:
                        raise
                    self._transactions.abandon(before)
                    return None
                progress.advance(note=f"loss {loss:.4f}")
                self._save_due |= bool(every and self._at.step % every == 0)
                self._transactions.regroup()
                if self._loader is not loader:
                    return None
                if (stopped := self._due(last)) is not True:
                    return stopped
        if self._world.elastic and not self._strategy.in_sync:  # members changed during the last exchange of the epoch
            if not self._transactions.regroup():  # other ranks have gone on with smaller batches
                self._at.step = self._world.step = self._world.target
                return None
            done = self._strategy.synchronize(self._replica, self._clock)
            self._learn(done)
            self._at.bytes_sent += done.sent_bytes
            return None
        return True

    def _due(self, last: bool) -> bool | None:
        """Choose the strategy, compare the replicas and save a checkpoint, if due.

        Returns False if the run has to stop, None if the members changed.
        """
        world, loader = self._world, self._loader
        if self._choose_due and not self._stopping and not world.suspended and not self._choose():
            return None
        strategy = self._strategy
        if self._check_due and strategy.in_sync and not world.suspended:
            if not self._transactions.attempt(lambda: consistency.check(self._replica.state(), self._data))[0]:
                return None
            self._check_due = False
        savable = (strategy.in_sync or strategy.shared_weights is not None) and not world.suspended
        if savable and (self._stopping or (self._save_due and not last)):
            if not self._save():
                return None
            if self._stopping:
                return False
        return True if self._loader is loader else None

    def _welcome(self, metrics_at: int) -> elastic.Welcome:
        """Return the position of this rank 0 for ranks whose host has come back."""
        metrics = (self._folder / "metrics" / "rank0000.jsonl").read_bytes()
        return elastic.Welcome(
            position=dataclasses.asdict(self._at),
            due=[self._check_due, self._save_due, self._stopping],
            lock=locks.job(),
            manifest=json.loads((self._folder / manifest.NAME).read_text()),
            metrics=metrics[metrics_at:].decode(),
            metrics_at=metrics_at,
        )

    def _enter(self, welcome: elastic.Welcome, earlier: str) -> None:
        """Continue at the position of rank 0, as a rank whose host has come back. `earlier`: see `copy_records`."""
        at = self._at = Position(**welcome.position)
        self._check_due, self._save_due, self._stopping = welcome.due
        self._world.step = at.step
        self._writer.close()
        elastic.copy_records(self._folder, self._records_of, welcome, earlier)
        self._writer = observers.writer(self._config, self._folder, self._records_of)

    def _adopt(self, lost_s: float) -> None:
        """Divide the rest of the epoch among the present members. Collective."""
        assert isinstance(self._world, ElasticCommunicator)
        at = self._at
        # A rank that saw the end of an evaluation is in the next epoch, and others are not yet.
        positions = self._world.gather([at.epoch, at.consumed])
        at.consumed = max(consumed for epoch, consumed in positions if epoch == at.epoch)
        self._checkpoints = self._new_checkpoints()
        self._loader, self._plan = elastic.divided(self._job, self._world, self._balance)
        elastic.keep_division(self._folder, self._world, self._plan)
        if self._adaptive:
            self._choose_due = False  # some ranks may not have read the request
            self._adaptive.regroup(self._plan)
        if self._world.rank == 0 and self._records_of != 0:
            elastic.take_over(self._folder, self._records_of)
            self._writer.close()
            self._writer, self._records_of = observers.writer(self._config, self._folder, 0), 0
        at.epoch_s += lost_s
        record = elastic.view_record(self._world, at, self._plan, lost_s)
        self._writer.write(record)
        self._say(elastic.described(record, self._plan))

    def _step(self, epoch: int, batches: Any, end: int, last: bool) -> float:
        """Run a step up to sample `end` of the epoch and return its mean loss. `last`: whether it ends the epoch."""
        at, clock = self._at, self._clock
        self._world.step = at.step
        if self._world.suspended and not self._strategy.capabilities.local_updates:
            raise PeerLost("a host was lost")
        lr = self._plan.learning_rate(epoch * self._plan.steps_per_epoch + self._loader.step_at(at.consumed))
        began = time.perf_counter()
        with clock.span("data"):
            batch = next(batches)
        with clock.span("compute"):
            request = self._adaptive.request if self._adaptive else 0.0
            self._replica.backward(batch, lr, request + STOP * (self._stop.requested is not None))
        done = [self._strategy.step(self._replica, lr, clock)]
        self._choose_due = self._adaptive is not None and done[0].choose
        if (every := self._config.check_replicas) and (at.step + 1) % every == 0:
            self._check_due = True
        if last or self._choose_due or (self._check_due and self._strategy.in_sync):
            done.append(self._strategy.synchronize(self._replica, clock))
        decay = None
        if self._config.ema and any(each.totals is not None for each in done):  # all ranks know the same weights
            decay = at.averaging_decay(self._config.ema)
            with clock.span("compute"):
                self._replica.average(decay, self._strategy.shared_weights)
        self._joining.add_step(lr, decay)
        for each in done:
            self._learn(each)
        loss = done[0].loss
        if not math.isfinite(loss):
            raise Failure(
                f"the loss is {loss} at step {at.step} (epoch {epoch + 1}, learning rate {lr:g}); hint: lower --lr or "
                f"lengthen --warmup-epochs. Earlier checkpoints are in {self._folder / 'checkpoints'}"
            )
        compute_s, exchange_s, waited_s = clock.take("compute"), clock.take("communication"), self._replica.waited_s()
        stages_bytes, local_stages_bytes = self._replica.sent_bytes()
        record = records.Step(
            step=at.step,
            epoch=epoch,
            loss=loss,
            samples=batch.weight,
            lr=lr,
            data_s=clock.take("data"),
            compute_s=compute_s - (waited_s or 0.0),
            communication_s=None if waited_s is None else exchange_s + waited_s,
            bytes_sent=stages_bytes + sum(each.sent_bytes for each in done),
            local_bytes_sent=None if self._computed else local_stages_bytes + self._world.take_local_sent_bytes(),
            **done[0].notes,
            warmup=self._steps_of_strategy < WARMUP_STEPS or self._observers.distort(at.step),
        )
        self._writer.write(record)
        self._spent.add(record)
        seconds = time.perf_counter() - began
        at.add(record, seconds=seconds, consumed=end)
        if self._adaptive:
            self._adaptive.add(record, seconds)
        if self._balance:
            self._balance.add(record)
        if not record.warmup:
            self._world.report_pace(record.compute_s)
        self._world.step = at.step
        if self._steps_here == 0:
            self._first_step_s = process_age_s()
            self._say(f"first step     done {self._first_step_s:.1f} s after the start of this process")
        self._steps_here += 1
        self._steps_of_strategy += 1
        return loss

    def _learn(self, done: Exchanged) -> None:
        """Take the totals and the requests of all ranks that an exchange has brought."""
        if done.totals is not None:
            self._at.learn(done.totals)
        self._stopping |= done.stop
        self._choose_due |= done.choose  # short epochs may end before a request arrives in a step

    def _choose(self) -> bool:
        """Choose the strategy again and change it if that pays, while all ranks have the same weights.

        Returns False if the members changed before all ranks knew the choice.
        """
        assert self._adaptive is not None
        began, before, adaptive = time.perf_counter(), self._at.strategy, self._adaptive
        local = self._strategy.capabilities.local_updates

        def choose() -> tuple[Chosen, dict[str, Any] | None]:
            chosen, state = adaptive.again(before), None
            if chosen.strategy != before:
                if local and not parse(chosen.strategy).capabilities.local_updates:
                    state = mean_optimizer(self._replica, self._data)
                consistency.check(self._replica.state(), self._data)
            return chosen, state

        def change(result: tuple[Chosen, dict[str, Any] | None]) -> None:
            self._choose_due = False
            if self._world.hosts_count == 1:  # the others were lost during the choice; if one comes back, all ask again
                return
            chosen, state = result
            if chosen.strategy != before:
                self._use(chosen.strategy)
            if state is not None:
                self._replica.load(state)
            adaptive.settle()
            self._record_choice(chosen, before, time.perf_counter() - began)

        return self._transactions.attempt(choose, change)[0]

    def _record_choice(self, chosen: Chosen, before: str, seconds: float) -> None:
        assert self._adaptive is not None
        self._at.epoch_s += seconds
        if self._world.rank == 0 or self._world.elastic:
            self._writer.write(
                records.Chosen(
                    step=self._at.step,
                    strategy=chosen.strategy,
                    reason=chosen.reason,
                    choice_s=seconds,
                    links=self._adaptive.links,
                )
            )
        change = "kept" if chosen.strategy == before else f"instead of {before}"
        self._say(f"strategy       {chosen.strategy} from step {self._at.step}, {change}: {chosen.reason}")

    def _use(self, name: str) -> None:
        """Exchange by the strategy `name` from the next step on. Does nothing if it runs already."""
        if name == self._at.strategy:
            return
        self._strategy = parse(name).make(self._config, self._data, self._shapes)
        self._replica.use(self._strategy)
        self._transactions.use(self._strategy)
        self._joining.use(self._strategy)
        self._at.strategy, self._steps_of_strategy = name, 0

    def _end_epoch(self, epoch: int) -> None:
        with self._clock.span("validation"):
            loss, scores, _ = self._transactions.until_done(
                lambda: self._evaluator.after_epoch(epoch, self._loader, self._plan)
            )
        before = self._plan.shares
        if self._balance and epoch + 1 < self._config.epochs:
            self._transactions.until_done(self._share_again)
        record, is_best = self._at.end_epoch(
            epoch,
            self._metric,
            scores,
            validation_loss=loss,
            validation_s=self._clock.take("validation"),
            unix_s=time.time(),
            shares=[] if self._plan.shares == before else list(self._plan.shares or ()),
        )
        if self._world.rank == 0 or self._world.elastic:
            self._writer.write(record)
        if self._world.rank == 0:
            rate = "" if record.samples_per_s is None else f", {record.samples_per_s:.0f} samples/s"
            self._say(
                f"epoch {epoch + 1}/{self._config.epochs}: train loss {record.train_loss:.4f} "
                f"{self._metric.words(record.train_scores)}, validation {self._metric.words(scores)}, "
                f"{record.train_s:.1f} s{rate}"
            )
        every = self._config.checkpoint_epochs
        if self._save_due or (every and ((epoch + 1) % every == 0 or (self._judge and is_best))):
            while not self._save(best=is_best):
                pass  # the members changed

    def _share_again(self) -> None:
        """Divide the batches of the next epoch by the ranks' present speed, if that pays. Collective."""
        assert self._balance is not None
        shares = self._balance.shares(self._world)
        if shares == self._plan.shares:
            return
        self._loader, self._plan = self._loader.divided(shares), dataclasses.replace(self._plan, shares=shares)
        elastic.keep_division(self._folder, self._world, self._plan)
        text = show_shares(shares, self._loader.rank_samples)
        self._say(f"shares         {text} from step {self._at.step} on: the speeds of the ranks have changed")

    def _finish(self, watching: contextlib.ExitStack) -> records.Summary:
        """Evaluate on the test split, end `watching`, time inference, write the summary and then COMPLETE."""
        world = self._world
        until_done = self._transactions.until_done
        tested_step = until_done(self._take_best) if self._judge else self._at.step
        if self._config.ema:  # they stay: the caller gets the model that was tested
            self._replica.swap_average()
        with self._clock.span("test"):
            test_loss, test_scores, test_sums = until_done(
                lambda: self._evaluator.split(self._dataset.test, self._plan)
            )
        ended_unix_s = time.time()
        watching.close()
        sizes = self._config.inference_sizes if world.rank == 0 else []
        split = self._dataset.test if len(self._dataset.test) else self._dataset.validation
        inference = timed_inference(self._replica, split, sizes if len(split) else [])
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        own = [world.host, rss, world.nic_bytes(self._nic_began), dataclasses.asdict(self._spent)]
        facts = until_done(lambda: world.gather(own))
        summary = self._at.summary(
            run_dir=str(self._folder),
            workload=self._run.workload,
            framework=world.framework,
            strategy=self._at.strategy,
            ranks=world.size,
            hosts=max(world.hosts_count, len({host for host, *_ in facts})),
            parameters=self._run.model["parameters"],
            global_batch=self._plan.global_batch,
            epochs=self._config.epochs,
            test_loss=test_loss,
            test_scores=test_scores,
            test_sums={name: each.tolist() for name, each in test_sums.items()},
            tested_step=tested_step,
            bytes_sent_source="computed" if self._computed else "counted",
            local_bytes_sent=None if self._computed else self._at.local_bytes_sent,
            test_s=self._clock.take("test"),
            first_step_s=self._first_step_s,
            peak_rss_bytes=max(rss for _, rss, *_ in facts),
            nic_bytes=[nic for *_, nic, _ in facts if nic],
            step_shares=step_shares([Spent(**spent) for *_, spent in facts]),
            began_unix_s=self._began_unix_s,
            ended_unix_s=ended_unix_s,
            inference=inference,
        )
        until_done(lambda: self._publish(summary))
        self._publish(summary)  # rank 0 may have been lost meanwhile
        self._writer.close()
        return summary

    def _publish(self, summary: records.Summary) -> None:
        """Complete the run folder, on rank 0."""
        if self._world.rank == 0 and not self._published:
            self._published = True
            self._writer.write(summary)
            records.write_document(self._folder / "COMPLETE", {"schema": records.SCHEMA, "utc": records.utc_now()})

    def _take_best(self) -> int:
        """Load the weights of the best epoch, if they were saved. Returns the number of steps after which they were."""
        if self._at.best_step == self._at.step or not self._config.checkpoint_epochs:
            return self._at.step
        loaded = self._checkpoints.newest(best=True)
        if loaded is None:
            return self._at.step
        snapshot.restore_model(loaded, self._replica)
        return loaded.step

    def _save(self, best: bool = False) -> bool:
        """Save a checkpoint. Returns False if the members changed meanwhile."""
        began = time.perf_counter()

        def save() -> None:
            shared, local = snapshot.taken(self._replica, self._strategy)
            self._checkpoints.save(self._at.step, shared, local, dataclasses.asdict(self._at), best=best)

        if not self._transactions.attempt(save)[0]:
            return False
        self._save_due = False
        seconds = time.perf_counter() - began
        self._at.checkpoint_s += seconds
        if self._world.rank == 0 or self._world.elastic:
            self._writer.write(records.Saved(step=self._at.step, checkpoint_s=seconds, best=best))
        return True

    def _resume(self) -> None:
        loaded = self._checkpoints.newest()
        if loaded is None:
            self._checkpoints.check_none()
            self._say("starting at step 0")
            return
        self._at = self._restore(loaded)
        hosts = len(set(self._world.gather(self._world.host)))
        self._writer.write(
            records.Resumed(
                step=self._at.step, utc=records.utc_now(), links=self._world.links, ranks=self._world.size, hosts=hosts
            )
        )
        self._say(f"resumed at step {self._at.step} of {self._plan.steps}, strategy {self._at.strategy}")

    def _restore(self, loaded: Loaded) -> Position:
        """Restore a checkpoint, with its strategy. Returns its position. Raises Failure (65, 78)."""
        at, running = self._position(loaded.progress, loaded.step), self._at.strategy
        if at.strategy != running:
            elastic.check(self._job.workload.environment.launcher, parse(at.strategy), self._config)
            self._use(at.strategy)
            if loaded.others and not loaded.local and (refusal := self._strategy.reshard_refusal):
                raise Failure(
                    f"checkpoint of step {loaded.step}: its strategy is {at.strategy}, {refusal}; hint: start "
                    "as many ranks as before",
                    exits.BAD_CONFIG,
                )
        snapshot.restore(loaded, self._replica, self._strategy)
        return at

    def _position(self, progress: dict[str, Any], step: int) -> Position:
        samples = self._config.epoch_samples or len(self._dataset.train)
        return Position.loaded(progress, step, epoch_samples=samples)

    def _say(self, message: str) -> None:
        if self._world.rank == 0:
            print(message, file=sys.stderr, flush=True)
