"""Records one rank of a user's script: its steps, the logged scores, and on rank 0 the summary."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hvdtrain import records
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.options import TrainConfig
from hvdtrain.horovod_api import script
from hvdtrain.observe.timing import WARMUP_STEPS, Spent, process_age_s, step_shares
from hvdtrain.plan import advice
from hvdtrain.records.metrics import Score
from hvdtrain.strategies import Spec
from hvdtrain.system import locks
from hvdtrain.system.exits import Failure
from hvdtrain.training import observers

SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
"""Splits of the data by the prefixes of logged names"""
Gather = Callable[[bytes], list[bytes]]
Number = TypeVar("Number", int, float)


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """A method of a `Recorder` whose errors end the records, with a warning, but never the training."""

    @functools.wraps(method)
    def harmless(self: Recorder, *arguments: Any) -> None:
        if self.ended or self._failed:
            return
        try:
            method(self, *arguments)
        except Exception as error:
            self._failed, reason = True, str(error).partition("; hint: ")[0]
            self.interruption = f"its records have ended: {reason}"
            print(f"hvdtrain: warning: training continues without records: {reason}", file=sys.stderr, flush=True)

    return harmless


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
        self._writer = records.Writer(folder / "metrics" / f"rank{world.rank:04d}.jsonl")
        self._spent, self._steps, self._sent_bytes = Spent(), 0, 0
        self._local_sent_bytes: int | None = 0
        """None if bytes are computed rather than counted"""
        self._optimizer: object = None
        """The first one that made a step. Its steps are recorded"""
        self._others, self._others_s, self._others_bytes = 0, 0.0, 0
        """Steps of other optimizers; seconds that they waited and bytes that they sent since the last recorded step"""
        self._unwritten: records.Step | None = None
        """The last step, whose values may still be logged"""
        self._epoch_losses = list[float]()
        self._batches = collections.Counter[int]()
        """Number of steps by their number of samples"""
        self._rated_samples, self._rated_s = 0, 0.0
        """Samples and seconds of the steps that count for the rate"""
        self._scores: dict[str, Score] = {}
        self._epochs: list[dict[str, float]] = []
        """Validation scores of each epoch"""
        self._scores_without_epoch: dict[str, float] = {}
        self._test: dict[str, float] = {}
        self._test_loss: float | None = None
        self._train_s = self._validation_s = 0.0
        self._first_step_s: float | None = None
        self._monitors = contextlib.ExitStack()
        if config.monitor != "none":
            self._monitors.enter_context(observers.monitoring(config, folder, world, device, self._print))
        self._began_unix_s, self._nic = time.time(), observers.NicBytes(world)
        self._epoch_began = self._stepped = self._trained = time.perf_counter()
        """When the epoch began, the last recorded step ended, and the last step of any optimizer did"""
        self.ended = self._failed = False
        self.choosing = False
        """Whether the strategy has yet to be chosen, so that steps are not representative"""
        self._failure: str | None = "its records end early"
        self.interruption: str | None = None
        """Why the records cannot become complete: ranks of an elastic job were lost, or a file cannot be written"""
        self._gather = gather

    @_harmless
    def step(
        self,
        optimizer: object,
        lr: float | None,
        exchange_s: float | None,
        sent_bytes: int,
        local_sent_bytes: int | None,
    ) -> None:
        """Records a step of `optimizer`, see `record.Steps`; None for an exchange between two steps.

        Only the steps of the first optimizer are recorded. Each includes what others have done since the step before.
        """
        if optimizer is not None and optimizer is not (self._optimizer or optimizer):
            self._others, self._trained = self._others + 1, time.perf_counter()
            self._others_s += exchange_s or 0.0
            self._others_bytes += sent_bytes
            self._local_sent_bytes = _sum(self._local_sent_bytes, local_sent_bytes)
            return
        now = time.perf_counter() if optimizer else self._stepped + (exchange_s or 0.0)
        whole_s, self._stepped, self._trained = now - self._stepped, now, now
        waited_s = min((exchange_s or 0.0) + self._others_s, whole_s)
        step = records.Step(
            step=0,  # until it is written
            epoch=len(self._epochs),
            loss=None,
            samples=None,
            lr=lr,
            data_s=None,
            compute_s=whole_s - waited_s,
            communication_s=None if exchange_s is None else waited_s,
            bytes_sent=sent_bytes + self._others_bytes,
            local_bytes_sent=local_sent_bytes,
            warmup=self.choosing,
        )
        self._others_s, self._others_bytes = 0.0, 0
        if optimizer is not None:
            self._optimizer = optimizer
            self._flush()
            self._first_step_s = self._first_step_s or process_age_s()
            self._unwritten = step
        elif self._unwritten:
            self._unwritten = _joined(self._unwritten, step)
        else:  # the step that it belongs to is written
            self._sent_bytes += step.bytes_sent
            self._local_sent_bytes = _sum(self._local_sent_bytes, local_sent_bytes)

    @_harmless
    def log(self, numbers: dict[str, float]) -> None:
        """Records the numbers of `record.log`."""
        loss, epoch, samples = (numbers.pop(name, None) for name in ("loss", "epoch", "samples"))
        if epoch is None and self._unwritten:
            step = self._unwritten
            self._unwritten = msgspec.structs.replace(
                step,
                loss=step.loss if loss is None else script.finite(loss),
                samples=step.samples if samples is None else int(samples),
            )
        losses = dict[str, float | None]()
        scores: dict[str, dict[str, float]] = {"train": {}, "validation": {}, "test": {}}
        for name, value in numbers.items():
            prefix, _, rest = name.partition("_")
            split, score = (SPLITS[prefix], rest) if prefix in SPLITS and rest else ("validation", name)
            if score == "loss":
                losses[split] = script.finite(value)
            elif math.isfinite(value):
                scores[split][score] = value
        self._declare(scores)
        self._test |= scores["test"]
        if losses.get("test") is not None:
            self._test_loss = losses["test"]
        if epoch is None:
            self._scores_without_epoch |= scores["validation"]
        else:
            self._end_epoch(int(epoch), script.finite(loss), losses.get("validation"), scores)

    def _end_epoch(
        self, epoch: int, loss: float | None, validation_loss: float | None, scores: dict[str, dict[str, float]]
    ) -> None:
        self._flush()
        now = time.perf_counter()
        train_s, validation_s = self._trained - self._epoch_began, now - self._trained
        mean_loss = sum(self._epoch_losses) / len(self._epoch_losses) if self._epoch_losses else None
        record = records.Epoch(
            epoch=epoch,
            step=self._steps,
            train_loss=mean_loss if loss is None else loss,
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
        self._epoch_losses.clear()
        self._epoch_began = self._stepped = self._trained = now
        self._others_s = 0.0

    @_harmless
    def _write_last_step(self) -> None:
        self._flush()

    def _flush(self) -> None:
        """Writes the last step."""
        if self._unwritten is None:
            return
        step, self._unwritten = self._unwritten, None
        warmup = step.warmup or self._steps < WARMUP_STEPS
        step = msgspec.structs.replace(step, step=self._steps, warmup=warmup)
        self._steps += 1
        self._writer.write(step)
        self._spent.add(step)
        self._sent_bytes += step.bytes_sent
        self._local_sent_bytes = _sum(self._local_sent_bytes, step.local_bytes_sent)
        if step.loss is not None:
            self._epoch_losses.append(step.loss)
        if step.samples is None:
            return
        self._batches[step.samples] += 1
        if not step.warmup:
            self._rated_samples += step.samples
            self._rated_s += step.compute_s + (step.communication_s or 0.0)

    def _declare(self, scores: dict[str, dict[str, float]]) -> None:
        """Adds new scores to the manifest; the first one is the primary metric."""
        logged = [item for values in scores.values() for item in values.items()]
        known = self._scores
        new = {name: script.score(name, v) for name, v in logged if name not in known or not known[name].possible(v)}
        if not new:
            return
        self._scores |= new
        declared = {name: dataclasses.asdict(score) for name, score in self._scores.items()}
        self._amend(metric={"primary": next(iter(declared)), "scores": declared})

    @_harmless
    def chose(self, exchange: Spec, reason: str) -> None:
        """Adds the strategy that `auto` has chosen to the manifest. The time that this took is not part of a step."""
        self._stepped = time.perf_counter()
        self._config = dataclasses.replace(self._config, strategy=str(exchange))
        config = {**self._manifest.config, "strategy": str(exchange)}
        self._amend(config=config, exchange={**exchange.facts(buckets=False), "chosen": reason})

    def _amend(self, **fields: Any) -> None:
        self._manifest = msgspec.structs.replace(self._manifest, **fields)
        if self._world.rank == 0:
            records.write_document(self._folder / "manifest.json", records.as_json(self._manifest))

    # --- the end ------------------------------------------------------------------------------------------------

    def end(self, failure: str | None) -> None:
        """Ends this rank's records; rank 0 waits for the others, and writes the summary if none reports a `failure`.

        Never raises; a second call does nothing.
        """
        if self.ended:
            return
        ended_unix_s = time.time()
        self._write_last_step()
        self._sent_bytes += self._others_bytes
        self.ended = True
        try:
            self._end(failure or self.interruption, ended_unix_s)
        except Exception as error:
            print(f"hvdtrain: the run's records end early: {error}", file=sys.stderr, flush=True)

    def _end(self, failure: str | None, ended_unix_s: float) -> None:
        try:
            self._monitors.close()
        except Exception as error:
            failure = failure or str(error)
        facts, failure = self._gather_facts(failure)
        if self._world.rank == 0 and failure is None:
            summary = self._summary(facts, ended_unix_s)
            self._writer.write(summary)
            exchange = summary.step_shares.get("exchange")
            waited = "" if exchange is None else f", {exchange:.0%} of a step waiting for the exchange"
            others = f" of the first optimizer (others made {self._others})" if self._others else ""
            self._print(f"run folder {summary.run_dir}: {summary.steps} steps{others}{waited}")
            if tip := advice.after_run(self._config, self._folder):
                self._print(tip.replace("--strategy ", "HVDTRAIN_STRATEGY=", 1))
        self._writer.close()
        locks.release()
        self._failure = failure

    def mark(self, failure: str | None) -> None:
        """Marks the run COMPLETE if its records are complete and the process ends without a `failure`."""
        if failure := self._failure or failure:
            self._print(f"run folder {self._folder}: unfinished, because {failure}")
        elif self._world.rank == 0:
            try:
                records.write_document(self._folder / "COMPLETE", {"schema": records.SCHEMA, "utc": records.utc_now()})
            except Failure as error:
                self._print(f"run folder {self._folder}: unfinished, because {error}")

    def _summary(self, facts: list[dict[str, Any]], ended_unix_s: float) -> records.Summary:
        shares = step_shares([Spent(**each["spent"]) for each in facts])
        shares.pop("data", None)  # part of compute
        samples = sum(each["samples"] for each in facts)
        rate = samples / self._rated_s if samples and self._rated_s else None
        batches = [each["batch"] for each in facts if each["batch"]]
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
            test_scores=self._test or ({} if self._epochs else self._scores_without_epoch),
            validation_scores=self._epochs,
            train_s=self._train_s + self._trained - self._epoch_began,
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
            peak_rss_bytes=max(each["rss_bytes"] for each in facts),
            nic_bytes=[each["nic"] for each in facts if each["nic"]],
            step_shares=shares,
            began_unix_s=self._began_unix_s,
            ended_unix_s=ended_unix_s,
        )

    def _gather_facts(self, failure: str | None) -> tuple[list[dict[str, Any]], str | None]:
        """The contributions to the summary, on rank 0 of all ranks in their order, and the first failure of a rank."""
        own = {
            "failure": failure,
            "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "nic": self._nic.entry(),
            "spent": dataclasses.asdict(self._spent),
            "samples": self._rated_samples,
            "batch": self._batches.most_common(1)[0][0] if self._batches else None,
        }
        if failure is not None and self._world.rank == 0:  # the others may still be training
            return [own], failure
        try:
            facts = [json.loads(each) for each in self._gather(json.dumps(own).encode())]
        except OSError:
            return [own], failure or "a rank ended before the run's records were complete"
        failures = (f"on rank {rank} {each['failure']}" for rank, each in enumerate(facts) if each["failure"])
        return facts, failure or next(failures, None)

    def _print(self, text: str) -> None:
        if self._world.rank == 0:
            print(f"hvdtrain: {text}", file=sys.stderr, flush=True)


def _joined(step: records.Step, other: records.Step) -> records.Step:
    """A step with an exchange after it."""
    return msgspec.structs.replace(
        step,
        compute_s=step.compute_s + other.compute_s,
        communication_s=_sum(step.communication_s, other.communication_s),
        bytes_sent=step.bytes_sent + other.bytes_sent,
        local_bytes_sent=_sum(step.local_bytes_sent, other.local_bytes_sent),
    )


def _sum(one: Number | None, other: Number | None) -> Number | None:
    return None if one is None or other is None else one + other
