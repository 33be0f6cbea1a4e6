"""The training loop, which does not depend on framework, model, strategy or members.

    for each epoch:
        for each batch:  gradients -> strategy: exchange and update -> record -> duties that are due
        evaluate on the validation split, record, save a checkpoint
    evaluate on the test split (with scores: the best epoch's weights), record, mark the run COMPLETE

A signal to any rank ends the loop with a checkpoint. That happens after the current step, or after the next exchange if
the strategy lets ranks train on their own for some steps. Collective work goes through `membership`, because the
members may change during it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain import records
from hvdtrain.comm.lifecycle import StopSignal
from hvdtrain.frameworks import Replica
from hvdtrain.observe.progress import Progress
from hvdtrain.observe.timing import WARMUP_STEPS, Clock, Spent, process_age_s, step_shares
from hvdtrain.strategies import STOP
from hvdtrain.system.exits import Failure
from hvdtrain.training import observers, snapshot
from hvdtrain.training.adaptive import Adaptive
from hvdtrain.training.balance import Balance
from hvdtrain.training.duties import Choose, Compare, Duty, Save, Share
from hvdtrain.training.evaluation import Evaluator, Judge, timed_inference
from hvdtrain.training.membership import Outcome, members_of
from hvdtrain.training.state import RunState

if TYPE_CHECKING:
    from hvdtrain.training.connected import Connected


class Loop:
    """One rank's training run in `folder`, which exists. All ranks call the same methods in the same order."""

    def __init__(
        self,
        job: Connected,
        folder: Path,
        *,
        replica: Replica,
        stop: StopSignal,
        judge: Judge | None = None,
        precise_bn: int = 0,
    ) -> None:
        self._metric, self._judge, self._dataset = job.workload.metric, judge, job.dataset
        self._run, self._config, self._world = job.run, job.run.config, job.ranks
        self._target = self._metric.target(self._config.target) if self._config.target else None
        self._replica, self._stop = replica, stop
        state = self._state = RunState(job, folder, replica)
        self._evaluator = Evaluator(job, replica, judge, precise_bn)
        self._observers = observers.Observers(
            self._config, state.plan.steps, folder, world=self._world, replica=replica, say=state.say
        )
        self._clock = Clock(replica.now, replica.seconds)
        watched = job.auto and job.profile and (job.ranks.hosts_count > 1 or job.ranks.elastic)
        self._adaptive = Adaptive(job) if watched else None
        self._balance = Balance(state.plan.shares or ()) if self._config.shares == "measured" else None
        self._members = members_of(state, self._balance, self._adaptive)
        self._share = Share(state, self._balance) if self._balance else None
        choose = Choose(state, self._adaptive) if self._adaptive else None
        duties: list[Duty | None] = [choose, Compare(state), self._share, Save(state)]
        self._duties = [duty for duty in duties if duty is not None]
        self._published = False
        self._computed = state.strategy.capabilities.in_backward
        """Whether bytes sent are computed, because the backend does not count them"""
        self._spent = Spent()
        self._first_step_s: float | None = None
        self._last_loss = math.nan  # before the first step

    def run(self) -> records.Summary | None:
        """Train to the end. Returns None if a signal stopped the run, after saving a checkpoint."""
        state = self._state
        if not self._world.joining:
            if self._config.resume:
                state.resume()
            (state.folder / "COMPLETE").unlink(missing_ok=True)
        self._stop.resumable = True
        with contextlib.ExitStack() as watching:
            watching.enter_context(self._observers.watching())
            self._began_unix_s, self._nic = time.time(), observers.NicBytes(self._world)
            self._members.begin()
            while state.at.epoch < self._config.epochs and not state.at.reached(self._target, self._metric):
                if not self._epoch(state.at.epoch):
                    return None
            return self._finish(watching)

    def _epoch(self, epoch: int) -> bool:
        """Train to the end of the epoch, evaluate, record and save. Returns False if a signal stopped the run."""
        while (outcome := self._train(epoch)) is Outcome.CHANGED:
            pass
        if outcome is Outcome.STOPPED:
            return False
        self._end_epoch(epoch)
        return True

    def _train(self, epoch: int) -> Outcome:
        """Train from the present position to the end of the epoch."""
        state, loader, start = self._state, self._state.loader, self._state.at.consumed
        ends, first, label = loader.ends(start), loader.step_at(start), f"epoch {epoch + 1}/{self._config.epochs}"
        outcome = self._do_duties(last=not ends)
        with (
            contextlib.closing(loader.epoch(epoch, start=start)) as batches,
            Progress(label, first + len(ends), "steps", enabled=self._world.rank == 0, done=first) as progress,
        ):
            for end in ends:
                if outcome is not Outcome.DONE:
                    return outcome
                last = end == ends[-1]
                with self._observers.step(state.at.step):
                    outcome = self._members.step(functools.partial(self._step, epoch, batches, end, last))
                if outcome is Outcome.DONE:
                    progress.advance(note=f"loss {self._last_loss:.4f}")
                    outcome = self._do_duties(last)
        return self._members.agree(self._synchronize) if outcome is Outcome.DONE else outcome

    def _do_duties(self, last: bool) -> Outcome:
        state = self._state
        for duty in self._duties:
            if duty.is_due(last):
                outcome = self._members.attempt(duty.run, duty.apply)
                if state.stopped or outcome is not Outcome.DONE:
                    return Outcome.STOPPED if state.stopped else outcome
        return Outcome.DONE

    def _step(self, epoch: int, batches: Any, end: int, last: bool) -> None:
        """Run a step up to sample `end` of the epoch. `last`: whether it ends the epoch."""
        state, clock, at = self._state, self._clock, self._state.at
        lr = state.plan.learning_rate(epoch * state.plan.steps_per_epoch + state.loader.step_at(at.consumed))
        began = time.perf_counter()
        with clock.span("data"):
            batch = next(batches)
        with clock.span("compute"):
            request = self._adaptive.request if self._adaptive else 0.0
            self._replica.backward(batch, lr, request + STOP * (self._stop.requested is not None))
        done = [state.strategy.step(self._replica, lr, clock)]
        choose = state.due.choose or done[0].choose
        if (every := self._config.check_replicas) and (at.step + 1) % every == 0:
            state.due.check = True
        if last or choose or (state.due.check and state.strategy.in_sync):
            done.append(state.strategy.synchronize(self._replica, clock))
        if self._config.ema and any(each.totals is not None for each in done):  # all ranks know the same weights
            with clock.span("compute"):
                self._replica.average(at.averaging_decay(self._config.ema), state.strategy.common_weights)
        for each in done:
            state.learn(each)  # short epochs may end before a request arrives in a step
        if not math.isfinite(done[0].loss):
            raise Failure(
                f"the loss is {done[0].loss} at step {at.step} (epoch {epoch + 1}, learning rate {lr:g}); hint: lower "
                f"--lr or lengthen --warmup-epochs. Earlier checkpoints are in {state.folder / 'checkpoints'}"
            )
        compute_s, exchange_s, waited_s = clock.take("compute"), clock.take("communication"), self._replica.waited_s()
        stages_bytes, local_stages_bytes = self._replica.sent_bytes()
        record = records.Step(
            step=at.step,
            epoch=epoch,
            loss=done[0].loss,
            samples=batch.weight,
            lr=lr,
            data_s=clock.take("data"),
            compute_s=compute_s - (waited_s or 0.0),
            communication_s=None if waited_s is None else exchange_s + waited_s,
            bytes_sent=stages_bytes + sum(each.sent_bytes for each in done),
            local_bytes_sent=None if self._computed else local_stages_bytes + self._world.take_local_sent_bytes(),
            **done[0].notes,
            warmup=state.steps_of_strategy < WARMUP_STEPS or self._observers.distort(at.step),
        )
        state.writer.write(record)
        at.add(record, seconds=(seconds := time.perf_counter() - began), consumed=end)
        if (interval := self._config.checkpoint_steps) and at.step % interval == 0:
            state.due.save = True
        self._observe(record, seconds)
        self._last_loss = done[0].loss

    def _observe(self, step: records.Step, seconds: float) -> None:
        """Pass a step of this rank, which took `seconds`, to all that watch its speed."""
        self._spent.add(step)
        if self._adaptive:
            self._adaptive.add(step, seconds)
        if self._balance:
            self._balance.add(step)
        if math.isnan(self._last_loss):
            self._first_step_s = process_age_s()
            self._state.say(f"first step     done {self._first_step_s:.1f} s after the start of this process")
        self._state.steps_of_strategy += 1

    def _synchronize(self) -> None:
        done = self._state.strategy.synchronize(self._replica, self._clock)
        self._state.learn(done)
        self._state.at.bytes_sent += done.sent_bytes

    def _end_epoch(self, epoch: int) -> None:
        state = self._state
        with self._clock.span("validation"):
            loss, scores, _ = self._members.until_done(
                lambda: self._evaluator.after_epoch(epoch, state.loader, state.plan)
            )
        record, is_best = state.at.end_epoch(
            epoch,
            self._metric,
            scores,
            validation_loss=loss,
            validation_s=self._clock.take("validation"),
            unix_s=time.time(),
            shares=list(state.plan.shares or ()) if self._share and self._share.divided else [],
        )
        state.record(record)
        rate = "" if record.samples_per_s is None else f", {record.samples_per_s:.0f} samples/s"
        state.say(
            f"epoch {epoch + 1}/{self._config.epochs}: train loss {record.train_loss:.4f} "
            f"{self._metric.words(record.train_scores)}, validation {self._metric.words(scores)}, "
            f"{record.train_s:.1f} s{rate}"
        )
        if state.due.save or self._config.checkpoint_steps != 0:
            save = Save(state, best=is_best)
            save.apply(self._members.until_done(save.run))

    def _finish(self, watching: contextlib.ExitStack) -> records.Summary:
        """Evaluate on the test split, end `watching`, time inference, write the summary and then COMPLETE."""
        world = self._world
        state, until_done = self._state, self._members.until_done
        tested_step = until_done(self._take_best) if self._judge else state.at.step
        if self._config.ema:  # they stay: the caller gets the model that was tested
            self._replica.swap_average()
        with self._clock.span("test"):
            test_loss, test_scores, test_sums = until_done(
                lambda: self._evaluator.split(self._dataset.test, state.plan)
            )
        ended_unix_s = time.time()
        watching.close()
        sizes = state.job.workload.inference if world.rank == 0 else []
        split = self._dataset.test if len(self._dataset.test) else self._dataset.validation
        inference = timed_inference(self._replica, split, sizes if len(split) else [])
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        own = [world.host, rss, self._nic.entry(), dataclasses.asdict(self._spent)]
        facts = until_done(lambda: world.gather(own))
        summary = state.at.summary(
            run_dir=str(state.folder),
            workload=self._run.workload,
            framework=world.framework,
            strategy=state.at.strategy,
            ranks=world.size,
            hosts=max(world.hosts_count, len({host for host, *_ in facts})),
            parameters=self._run.model["parameters"],
            global_batch=state.plan.global_batch,
            epochs=self._config.epochs,
            test_loss=test_loss,
            test_scores=test_scores,
            test_sums={name: each.tolist() for name, each in test_sums.items()},
            tested_step=tested_step,
            bytes_sent_source="computed" if self._computed else "counted",
            local_bytes_sent=None if self._computed else state.at.local_bytes_sent,
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
        state.writer.close()
        return summary

    def _publish(self, summary: records.Summary) -> None:
        """Complete the run folder, on rank 0."""
        if self._world.rank == 0 and not self._published:
            self._published = True
            self._state.writer.write(summary)
            complete = {"schema": records.SCHEMA, "utc": records.utc_now()}
            records.write_document(self._state.folder / "COMPLETE", complete)

    def _take_best(self) -> int:
        """Load the model of the best epoch, if it was saved. Returns the number of steps after which it was."""
        state = self._state
        if state.at.best_step == state.at.step or self._config.checkpoint_steps == 0:
            return state.at.step
        loaded = state.checkpoints.newest(best=True)
        if loaded is None:
            return state.at.step
        snapshot.restore_model(loaded, self._replica)
        return loaded.step
