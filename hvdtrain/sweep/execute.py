"""Runs a sweep: brings hosts up, sets and measures the rate, launches jobs, checks their records, retries once."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain import records
from hvdtrain.observe.progress import duration
from hvdtrain.sweep import command, folder
from hvdtrain.sweep.estimate import CLUSTER_S, VERIFY_S, Estimator
from hvdtrain.sweep.file import Sweep
from hvdtrain.sweep.network import Network, Verified, cluster_name, hosts
from hvdtrain.sweep.plan import Run
from hvdtrain.sweep.preview import Preview
from hvdtrain.sweep.process import Children, Stopped, Timeout
from hvdtrain.sweep.show import STATES, Display, Outcome
from hvdtrain.system import exits, files
from hvdtrain.system.commands import Command
from hvdtrain.system.exits import Failure

ATTEMPTS = 2
MACHINE_LOCK = "hvdtrain-sweep.lock"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A sweep as planned, before its first run."""

    sweep: Sweep
    root: Path
    """The sweep's own folder"""
    outcomes: list[Outcome]
    """One per run, in order; `state` tells which are done and which cannot run here"""
    previews: dict[str, Preview]
    estimator: Estimator
    flags: dict[str, Command]
    """Name of the run -> flags of its workload"""

    def waiting(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.state == "waiting"]

    def left_s(self, left: list[Outcome], rate: str | None = None) -> float | None:
        """Expected seconds of these runs with throttling and cool-down; None if one of them is unknown.

        `rate`: the current rate of the links.
        """
        total, first = 0.0, rate is None
        for outcome in left:
            seconds = self.estimator.of(outcome.run).seconds
            if seconds is None:
                return None
            total += seconds + self.sweep.cooldown_s
            point = outcome.run.point
            total += CLUSTER_S if first and point.on_cluster else 0.0
            first = first and not point.on_cluster
            if point.rate is not None and point.rate != rate:
                rate = point.rate
                total += VERIFY_S * (point.hosts + (point.hosts > 1)) if point.rate_bit_s else 0.0
        return total


def classify(task: Task, lacking: dict[str, str]) -> None:
    """Sets the state of each outcome: done before, lacking something here, or waiting. Changes nothing on disk."""
    for outcome in task.outcomes:
        point = outcome.run.point
        state, reason = folder.state(outcome.folder, outcome.run, task.previews.get(point.name))
        if state == "done":
            outcome.state = "kept"
        elif point.name in lacking:
            outcome.state, outcome.reason = "lacking", lacking[point.name]
        elif state != "absent":
            outcome.reason = f"{state}, will be renamed and run again: {reason}"


@contextlib.contextmanager
def alone(root: Path) -> Iterator[tuple[int, ...]]:
    """Locks the machine and the folder against other sweeps; yields the locks' descriptors. Raises Failure (1, 73)."""
    handles: list[int] = []
    path = Path(tempfile.gettempdir()) / MACHINE_LOCK
    try:
        try:
            folder.make_owned(root)
            handles.append(os.open(root, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            raise folder.cannot_write(root, error) from error
        if not os.access(root, os.W_OK):
            raise Failure(f"{root}: not writable; choose another --root", exits.CANNOT_WRITE)
        try:
            handles.append(files.open_lock(path))
        except OSError as error:
            hint = "remove it, or set TMPDIR to a folder of your own"
            raise files.refused(path, error, exits.CANNOT_WRITE, hint) from error
        for handle, what in zip(handles, (f"a sweep into {root}", "another sweep"), strict=True):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                told = os.pread(handles[1], 200, 0).decode(errors="replace").strip()
                raise Failure(
                    f"{what} is running on this machine, or its last job ({told or 'it does not say which'}): "
                    "they would spoil each other's figures; wait for it, or end it"
                ) from error
        if os.pread(handles[1], 8, 0) in (b"", b"process "):  # else the file is not our lock
            with contextlib.suppress(OSError):  # the file may be another user's
                os.ftruncate(handles[1], 0)
                os.pwrite(handles[1], f"process {os.getpid()}, {root}".encode(), 0)
        yield tuple(handles)
    finally:
        for handle in handles:
            os.close(handle)


def most_hosts(left: Sequence[Outcome]) -> int:
    """The largest number of hosts among the next runs of equal rate; their links are measured together."""
    found = 1
    rate = left[0].run.point.rate
    for point in (outcome.run.point for outcome in left if outcome.run.point.hosts > 1):
        if point.rate != rate:
            break
        found = max(found, point.hosts)
    return found


class Executor:
    """Executes a task's waiting runs in order."""

    def __init__(self, task: Task, children: Children, display: Display) -> None:
        self._task, self._children, self._display = task, children, display
        self._name = cluster_name(task.sweep, task.root)
        self._network = Network(task.sweep, self._name, children) if task.sweep.cluster else None
        self._rate: str | None = None
        self._launched = False

    def run(self) -> Failure | None:
        """Executes all and restores the network; returns the Failure that stopped it (signal, full disk) or None."""
        stopped_by: Failure | None = None
        try:
            waiting = self._task.waiting()
            for index, outcome in enumerate(waiting):
                self._children.check()
                left = waiting[index:]
                self._display.begin(outcome.run.name, self._task.left_s(left, self._rate))
                self._do(outcome, left)
                self._rate = outcome.run.point.rate or self._rate
                self._display.end(self._told(outcome))
        except Stopped:
            stopped_by = Failure("stopped; the same command goes on", exits.RESUMABLE)
        except Failure as failure:
            stopped_by = failure
        finally:
            problems = self._network.close() if self._network else []
        if problems:
            told = f"the network could not be put back: {'; '.join(problems)}"
            stopped_by = Failure(f"{stopped_by}; {told}", stopped_by.code) if stopped_by else Failure(told)
        return stopped_by

    def _told(self, outcome: Outcome) -> str:
        text = f"{STATES[outcome.state]}: {outcome.run.name}"
        if outcome.seconds is not None:
            text += f", {duration(outcome.seconds)}"
        end = folder.summary(outcome.folder) if outcome.state in ("done", "marked") else None
        if end:
            rate, scores = end.get("samples_per_s"), end.get("test_scores", {})
            text += "" if rate is None else f", {rate:.1f} samples/s"
            text += "".join(f", test {name} {value:.4f}" for name, value in list(scores.items())[:1])
        about = outcome.marked or outcome.reason
        return f"{text} ({about})" if about else text

    def _do(self, outcome: Outcome, left: list[Outcome]) -> None:
        """Executes one run; repeats it once if it fails."""
        began = time.monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            if self._launched and self._task.sweep.cooldown_s:
                self._children.rest(self._task.sweep.cooldown_s)
            try:
                cluster = self._network if outcome.run.point.on_cluster else None
                verified = cluster.ready(outcome.run.point, most_hosts(left)) if cluster else Verified()
            except Failure as failure:
                outcome.state = "lacking" if failure.code in (exits.UNREACHABLE, exits.NO_PERMISSION) else "failed"
                outcome.reason = str(failure)
                return
            outcome.marked, outcome.reason = verified.marked, None
            if verified.marked and self._task.sweep.when_off == "refuse":
                outcome.state, outcome.reason, outcome.marked = "refused", verified.marked, None
                return
            began = time.monotonic()
            code, problem = self._launch(outcome, verified, attempt)
            outcome.seconds = round(time.monotonic() - began, 2)
            if problem is None:
                outcome.state = "marked" if outcome.marked else "done"
                self._task.estimator.learn(outcome.run, outcome.seconds)
                return
            kept = folder.aside(outcome.folder, "failed")
            outcome.log, outcome.reason = kept / folder.LOG, problem
            outcome.lines = folder.tail(outcome.log)
            if code in (exits.CANNOT_WRITE, exits.IO_ERROR):
                outcome.state = "failed"
                raise Failure(f"{kept}: {problem}: {' '.join(outcome.lines[-1:])}; the same command goes on", code)
            if attempt < ATTEMPTS:
                self._display.end(f"{problem}: {outcome.run.name}, once more (log: {outcome.log})", 0)
        outcome.state, outcome.marked = "failed", None

    def _launch(self, outcome: Outcome, verified: Verified, attempt: int) -> tuple[int, str | None]:
        """Launches the job; returns its exit code, and what is wrong with the run or None."""
        run, where = outcome.run, outcome.folder
        words = command_of(self._task, outcome, self._name)
        if where.exists():
            folder.aside(where, "unfinished" if not (where / "COMPLETE").exists() else "other")
        rate = run.point.rate_bit_s
        point = records.Point(
            sweep=self._task.sweep.name,
            point=run.point.name,
            repeat=run.repeat,
            kind=run.kind,
            attempt=attempt,
            order=run.order,
            settings=run.point.settings,
            command=words,
            rate_mbit=rate / 1e6 if rate else None,
            rate_off_percent=verified.off_percent,
            marked=verified.marked,
        )
        folder.make(where, point)
        self._launched = True
        try:
            log = (where / folder.LOG).open("wb")
            folder.own(where / folder.LOG)
        except OSError as error:
            raise folder.cannot_write(where, error) from error
        with log, tempfile.TemporaryDirectory(prefix="hvdtrain-sweep-") as scratch:
            if os.geteuid() == 0:
                os.chown(scratch, where.stat().st_uid, -1)  # the hosts run as that user
            try:
                timeout_s = self._task.sweep.timeout_s
                with self._children.beside(self._others(run, Path(scratch))):
                    code = self._children.job(words, log, timeout_s)
            except Timeout:
                return exits.FAILED, f"it was ended after {self._task.sweep.timeout_s:g} s (timeout_s)"
            except Failure as failure:
                return failure.code, str(failure)
        self._children.check()  # a signal to the terminal's process group reaches the job as well
        if code:
            return code, f"exit code {code}"
        return code, folder.unfit(where, run, self._task.previews.get(run.point.name))

    def _others(self, run: Run, scratch: Path) -> list[Command]:
        """What the cluster's other hosts do beside a run on one host ([cluster] fill): the same, each by itself."""
        spec = self._task.sweep.cluster
        if spec is None or "fill" not in run.point.settings.get("cluster", {}):
            return []
        flags, name = self._task.flags[run.name], self._name
        return [command.launch(run, flags, scratch / host, hosts=[host], inside=name) for host in spec.virtual[1:]]


def command_of(task: Task, outcome: Outcome, name: str) -> Command:
    """The command line of a run; `name`: of the virtual cluster."""
    run, spec = outcome.run, task.sweep.cluster
    on = spec if run.point.on_cluster else None
    names = hosts(on, name, run.point.hosts) if on else ["localhost"]
    inside = name if on and not on.hostfile else None
    return command.launch(run, task.flags[run.name], outcome.folder, hosts=names, inside=inside)
