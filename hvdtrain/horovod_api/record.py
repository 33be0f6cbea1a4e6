"""The run folder of a user's own script: like a workload's, of what can be known of a script.

`begin` when its optimizer is made, `Steps.done` after each step, `log` for what the script tells, `finish` when it
shuts down or ends. HVDTRAIN_RUN_DIR names the folder, HVDTRAIN_RECORD=0 leaves it out, HVDTRAIN_MONITOR,
_MONITOR_MS and _MONITOR_IDLE_S are as for workloads. Rank 0's variables count. What a script does not tell is missing
in the records: a step's samples, the wait for its batch (which is within compute_s), the batch arithmetic.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import json
import math
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain import records
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.options import TrainConfig
from hvdtrain.horovod_api import exit_status, script
from hvdtrain.observe.timing import WARMUP_STEPS, Spent, process_age_s, step_shares
from hvdtrain.records.metrics import Score
from hvdtrain.strategies import Exchange
from hvdtrain.system import exits, locks
from hvdtrain.system.exits import Failure
from hvdtrain.training import manifest as run_manifest
from hvdtrain.training import observers, run_folder
from hvdtrain.training.summary import advised

VARIABLES = ("RECORD", "RUN_DIR", "RESUME", "MONITOR", "MONITOR_MS", "MONITOR_IDLE_S")
FAILED_PATIENCE_S = 2.0
"""How long a rank that failed waits for others to hear of it: they may still be training"""
Gather = Callable[[bytes], list[bytes]]


def begin(
    world: Communicator, exchange: Exchange, *, parameters: int, device: str, threads: int, gather: Gather
) -> Steps | None:
    """Opens the run's folder, measures the links and writes the manifest, once in a process; None if the script is not
    to be recorded. Collective.

    `parameters`: numbers that the optimizer trains. `device`: this rank's; `threads`: that it computes with. `gather`:
    the bytes of every rank when the script ends, where the world may still be exchanging.

    Raises Failure (73) if HVDTRAIN_RUN_DIR cannot be made or holds a run, (78) for monitors that there are not.
    """
    global begun, _recorder
    begun = True
    asked = world.gather({name: os.environ.get(f"HVDTRAIN_{name}") for name in VARIABLES})[0]
    if asked["RECORD"] == "0":
        return None
    try:
        config = TrainConfig(
            framework=world.framework,  # type: ignore[arg-type]
            strategy=str(exchange),
            run_dir=script.free(asked["RUN_DIR"], again=asked["RESUME"] not in (None, "", "0", "false")),
            monitor=asked["MONITOR"] or "none",
            monitor_ms=int(asked["MONITOR_MS"] or TrainConfig.monitor_ms),
            monitor_idle_s=float(asked["MONITOR_IDLE_S"] or 0),
        )
    except ValueError as error:
        raise Failure(f"HVDTRAIN_MONITOR_MS and _MONITOR_IDLE_S take numbers: {error}", exits.BAD_CONFIG) from None
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(sys.argv[0]).stem) or "script"
    try:
        folder = run_folder.open_folder(config, name, world)
    except Failure as failure:
        told = str(failure).replace("add --resume to continue it, or ", "").replace("--run-dir", "HVDTRAIN_RUN_DIR")
        if asked["RUN_DIR"]:
            raise Failure(told, failure.code) from None
        _say(world, f"the script goes on without a run folder: {told}")
        return None
    world.set_run_folder(str(folder), "")
    world.measure_links()
    seed, rest = script.seed_and_rest(sys.argv)
    manifest = records.Manifest(
        workload=name,
        argv=sys.argv,
        config={
            "framework": world.framework,
            "strategy": str(exchange),
            "seed": seed,
            "monitor": config.monitor,
            "arguments": rest,
        },
        exchange=exchange.facts(buckets=False),
        plan={"ranks": world.size},
        data={},
        model={"parameters": parameters},
        metric={},
        **run_manifest.surroundings(device, threads, world),
    )
    run_manifest.keep(manifest, folder, {}, world)
    _recorder = Recorder(world, config, manifest, folder, device, gather)
    exit_status.watch()
    atexit.register(_ended)
    return steps()


def steps() -> Steps | None:
    """Those of one more optimizer; None if nothing is recorded."""
    return None if _recorder is None else Steps(_recorder)


def log(**told: Any) -> None:
    """What a script tells of itself, all ranks or rank 0 alone; nothing is sent. Harmless where nothing is recorded.

        hvd.log(loss=loss.item(), samples=len(batch))     # after optimizer.step(): of that step
        hvd.log(epoch=3, accuracy=0.91, val_loss=0.4)     # after an evaluation: of the epoch that has ended
        hvd.log(test_accuracy=0.93)                       # at the end

    Numbers by name. `loss` is the training's mean, `samples` this rank's. Other names are scores: of the validation, or
    as the prefix says, train_, val_, validation_ or test_. Raises ValueError for what is no number or no name.
    """
    numbers = {name: script.number(name, value) for name, value in told.items()}
    if _recorder is not None:
        _recorder.log(numbers)


def finish() -> None:
    """Writes the run's end, unless the script is handling an exception. Waits for the other ranks to end, never raises,
    and does nothing the second time. COMPLETE follows when the process ends normally."""
    _finish(exit_status.handling())


def _ended() -> None:
    """What is left to do when the process ends."""
    failure = exit_status.failure()
    _finish(failure)
    if _finished is not None:
        _finished.mark(failure)


def _finish(failure: str | None) -> None:
    global _recorder, _finished
    recorder, _recorder = _recorder, None
    if recorder is not None:
        _finished = recorder
        try:
            recorder.end(failure)
        except Exception as error:
            print(f"hvdtrain: the run's records end early: {error}", file=sys.stderr, flush=True)


_recorder: Recorder | None = None
_finished: Recorder | None = None
begun = False
"""Whether this process was to be recorded once"""


class Steps:
    """Those of one optimizer, or one tape."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def done(
        self, *, lr: float | None, exchange_s: float | None, sent_bytes: int, local_sent_bytes: int | None
    ) -> None:
        """A step is done, just now. `exchange_s`: waited for the exchange; None: cannot be told apart.
        `local_sent_bytes`: None if `sent_bytes` is computed, and not counted."""
        if self._recorder is _recorder:  # else its records have ended
            self._recorder.step(self, lr, exchange_s, sent_bytes, local_sent_bytes)

    def exchanged(self, waited_s: float, sent_bytes: int, local_sent_bytes: int) -> None:
        """Ranks made their weights the same between two steps, just now: the first one has it, as in a workload."""
        if self._recorder is _recorder:
            self._recorder.step(None, None, waited_s, sent_bytes, local_sent_bytes)


class Recorder:
    """One rank's records."""

    def __init__(
        self,
        world: Communicator,
        config: TrainConfig,
        manifest: records.Manifest,
        folder: Path,
        device: str,
        gather: Gather,
    ) -> None:
        self._world, self._config, self._manifest, self._folder = world, config, manifest, folder
        self._gather = gather
        self._writer = records.Writer(folder / "metrics" / f"rank{world.rank:04d}.jsonl")
        self._spent, self._steps, self._sent_bytes = Spent(), 0, 0
        self._local_sent_bytes: int | None = 0
        """None as soon as bytes are computed, and not counted"""
        self._first: Steps | None = None
        self._latest: Steps | None = None
        self._waiting: records.Step | None = None
        """The last step, which the script may still tell of"""
        self._losses, self._loss_sum = 0, 0.0
        """Steps of this epoch that told a loss, and the sum"""
        self._batches = collections.Counter[int]()
        """How often a step had so many samples"""
        self._rated_samples, self._rated_s = 0, 0.0
        self._scores: dict[str, Score] = {}
        self._epochs: list[dict[str, float]] = []
        self._last: dict[str, float] = {}
        """Scores that were told without an epoch"""
        self._test: dict[str, float] = {}
        self._test_loss: float | None = None
        self._train_s = self._validation_s = 0.0
        self._first_step_s: float | None = None
        self._watching = contextlib.ExitStack()
        if config.monitor != "none":
            say = lambda text: _say(world, text)  # noqa: E731
            self._watching.enter_context(observers.monitoring(config, folder, world, device, say))
        self._began_unix_s, self._nic_began = time.time(), world.nic_counters()
        self._epoch_began = self._stepped = time.perf_counter()
        self._failure: str | None = "its records end early"
        self._mine: Any = None
        self._told: list[Any] = []
        self._ending = threading.Event()
        self._ender = threading.Thread(target=self._tell, daemon=True)  # Python 3.12 starts none while it ends
        self._ender.start()

    def step(
        self,
        of: Steps | None,
        lr: float | None,
        exchange_s: float | None,
        sent_bytes: int,
        local_sent_bytes: int | None,
    ) -> None:
        """See `Steps`; `of` is None between two. Where optimizers take turns, as in a GAN, the first one's steps count,
        and each holds what the others do next; one that makes two steps on end is the first from there on."""
        mine = of is not None and of in (self._first or of, self._latest)
        self._latest = of or self._latest
        now = time.perf_counter() if of else self._stepped + (exchange_s or 0.0)
        whole_s, self._stepped = now - self._stepped, now
        waited_s = min(exchange_s or 0.0, whole_s)
        if not mine:
            if (before := self._waiting) is None:  # it is written
                self._sent_bytes += sent_bytes
                self._local_sent_bytes = _sum(self._local_sent_bytes, local_sent_bytes)
            else:
                so_far_s = before.communication_s
                self._waiting = msgspec.structs.replace(
                    before,
                    compute_s=before.compute_s + whole_s - waited_s,
                    communication_s=None if so_far_s is None or exchange_s is None else so_far_s + waited_s,
                    bytes_sent=before.bytes_sent + sent_bytes,
                    local_bytes_sent=_sum(before.local_bytes_sent, local_sent_bytes),
                )
            return
        self._first = of
        self._flush()
        self._waiting = records.Step(
            step=self._steps,
            epoch=len(self._epochs),
            loss=None,
            samples=None,
            lr=lr,
            data_s=None,
            compute_s=whole_s - waited_s,
            communication_s=None if exchange_s is None else waited_s,
            bytes_sent=sent_bytes,
            local_bytes_sent=local_sent_bytes,
            warmup=self._steps < WARMUP_STEPS,
        )
        self._first_step_s = self._first_step_s or process_age_s()
        self._steps += 1

    def log(self, told: dict[str, float]) -> None:
        loss, epoch = told.pop("loss", None), told.pop("epoch", None)
        samples = told.pop("samples", None)
        if epoch is None and (before := self._waiting) is not None:
            self._waiting = msgspec.structs.replace(
                before,
                loss=before.loss if loss is None else script.finite(loss),
                samples=before.samples if samples is None else int(samples),
            )
        by_part: dict[str, dict[str, float]] = {"train": {}, "validation": {}, "test": {}}
        for name, value in told.items():
            part, _, rest = name.partition("_")
            part = {"val": "validation"}.get(part, part)
            in_part = part in by_part and rest
            by_part[part if in_part else "validation"][rest if in_part else name] = value
        losses = {part: script.finite(scores.pop("loss", None)) for part, scores in by_part.items()}
        found = {part: {name: v for name, v in each.items() if math.isfinite(v)} for part, each in by_part.items()}
        self._declare(found)
        self._test |= found["test"]
        self._test_loss = losses["test"] if losses["test"] is not None else self._test_loss
        if epoch is None:
            self._last |= found["validation"]
        else:
            self._end_epoch(int(epoch), script.finite(loss), losses["validation"], found)

    def _end_epoch(
        self, epoch: int, loss: float | None, validation_loss: float | None, scores: dict[str, dict[str, float]]
    ) -> None:
        self._flush()
        now = time.perf_counter()
        train_s, validation_s = self._stepped - self._epoch_began, now - self._stepped
        mean = self._loss_sum / self._losses if self._losses else None
        record = records.Epoch(
            epoch=epoch,
            step=self._steps,
            train_loss=mean if loss is None else loss,
            train_scores=scores["train"],
            validation_loss=validation_loss,
            validation_scores=scores["validation"],
            train_s=train_s,
            validation_s=validation_s,
            samples=None,
            samples_per_s=None,
            unix_s=time.time(),
        )
        if self._world.rank == 0:
            self._writer.write(record)
        self._epochs.append(scores["validation"])
        self._train_s += train_s
        self._validation_s += validation_s
        self._losses, self._loss_sum = 0, 0.0
        self._epoch_began = self._stepped = now

    def _flush(self) -> None:
        """Writes the last step."""
        record, self._waiting = self._waiting, None
        if record is None:
            return
        self._writer.write(record)
        self._spent.add(record)
        self._sent_bytes += record.bytes_sent
        self._local_sent_bytes = _sum(self._local_sent_bytes, record.local_bytes_sent)
        if record.loss is not None:
            self._losses, self._loss_sum = self._losses + 1, self._loss_sum + record.loss
        if record.samples is None:
            return
        self._batches[record.samples] += 1
        if not record.warmup:
            self._rated_samples += record.samples
            self._rated_s += record.compute_s + (record.communication_s or 0.0)

    def _declare(self, found: dict[str, dict[str, float]]) -> None:
        """The manifest names every score that was told; the first one is the primary metric."""
        told = [(name, value) for scores in found.values() for name, value in scores.items()]
        known = self._scores
        new = {name: script.score(name, v) for name, v in told if name not in known or not known[name].possible(v)}
        if not new:
            return
        self._scores |= new
        scores = {name: dataclasses.asdict(score) for name, score in self._scores.items()}
        metric = {"primary": next(iter(scores)), "scores": scores}
        self._manifest = msgspec.structs.replace(self._manifest, metric=metric)
        if self._world.rank == 0:
            records.write_document(self._folder / "manifest.json", records.as_json(self._manifest))

    # --- the end ------------------------------------------------------------------------------------------------

    def end(self, failure: str | None) -> None:
        """Ends this rank's records, as a `failure` if that is why; rank 0 writes the summary if no rank has failed.
        Collective, but a rank that failed does not wait long."""
        self._flush()
        ended_unix_s = time.time()
        self._watching.close()
        facts, failure = self._of_all(failure)
        if self._world.rank == 0 and failure is None:
            summary = self._summary(facts, ended_unix_s)
            self._writer.write(summary)
            _say(self._world, script.words(summary))
            if tip := advised(self._config, summary, self._world.links):
                _say(self._world, tip.replace("--strategy ", "HVDTRAIN_STRATEGY=", 1))
        self._writer.close()
        locks.release()
        self._failure = failure

    def mark(self, failure: str | None) -> None:
        """Marks the run COMPLETE if all its records are there and the process ends without a `failure`."""
        if failure := self._failure or failure:
            _say(self._world, f"run folder {self._folder}: unfinished, because {failure}")
        elif self._world.rank == 0:
            records.write_document(self._folder / "COMPLETE", {"schema": records.SCHEMA, "utc": records.utc_now()})

    def _summary(self, facts: list[list[Any]], ended_unix_s: float) -> records.Summary:
        shares = step_shares([Spent(**spent) for _, _, spent, *_ in facts])
        shares.pop("data", None)  # a script does not tell
        samples = sum(rated for *_, rated, _ in facts)
        rate = samples / self._rated_s if samples and self._rated_s else None
        batches = [each for *_, each in facts if each]
        return records.Summary(
            run_dir=str(self._folder),
            workload=self._manifest.workload,
            framework=self._world.framework,
            strategy=self._config.strategy,
            ranks=self._world.size,
            hosts=len(self._manifest.hosts),
            parameters=self._manifest.model["parameters"],
            global_batch=sum(batches) if len(batches) == self._world.size else None,
            epochs=len(self._epochs),
            steps=self._steps,
            test_loss=self._test_loss,
            test_scores=self._test or ({} if self._epochs else self._last),
            validation_scores=self._epochs,
            train_s=self._train_s + self._stepped - self._epoch_began,
            validation_s=self._validation_s,
            test_s=None,
            checkpoint_s=None,
            samples_per_s=rate,
            samples_per_s_per_rank=rate / self._world.size if rate else None,
            data_share=None,
            bytes_sent=self._sent_bytes,
            bytes_sent_source="computed" if self._local_sent_bytes is None else "counted",
            local_bytes_sent=self._local_sent_bytes,
            first_step_s=self._first_step_s,
            peak_rss_bytes=max(rss for rss, *_ in facts),
            nic_bytes=[nic for _, nic, *_ in facts if nic],
            step_shares=shares,
            began_unix_s=self._began_unix_s,
            ended_unix_s=ended_unix_s,
        )

    def _of_all(self, failure: str | None) -> tuple[list[list[Any]], str | None]:
        """What every rank contributes to the summary, in rank order, and the first failure of a rank."""
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        nic = self._world.nic_bytes(self._nic_began)
        batch = self._batches.most_common(1)[0][0] if self._batches else None
        self._mine = (failure, [rss, nic, dataclasses.asdict(self._spent), self._rated_samples, batch])
        self._ending.set()
        self._ender.join(None if failure is None else FAILED_PATIENCE_S)
        if failure is None and not self._told:
            failure = "a rank was gone before its records ended"
        failures = [f"on rank {rank} {each}" for rank, (each, _) in enumerate(self._told) if each]
        return [facts for _, facts in self._told], failure or next(iter(failures), None)

    def _tell(self) -> None:
        self._ending.wait()
        with contextlib.suppress(Exception):  # a rank that is gone
            self._told = [json.loads(each) for each in self._gather(json.dumps(self._mine).encode())]


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _say(world: Communicator, text: str) -> None:
    if world.rank == 0:
        print(f"hvdtrain: {text}", file=sys.stderr, flush=True)
