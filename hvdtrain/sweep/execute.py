"""Executes a sweep: starts hosts, sets and measures rates, launches jobs, checks records, and retries failures once."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.observe.progress import duration
from hvdtrain.sweep import command, folder
from hvdtrain.sweep.file import Sweep
from hvdtrain.sweep.grid import Run
from hvdtrain.sweep.network import LinkCheck, Network, cluster_name
from hvdtrain.sweep.process import Children, Stopped
from hvdtrain.system import exits, files
from hvdtrain.system.commands import Command, as_calling_user
from hvdtrain.system.exits import Failure

ATTEMPTS = 2
MACHINE_LOCK = "hvdtrain-sweep.lock"
STATES = {
    "done": "done",
    "marked": "marked",
    "kept": "done before",
    "failed": "FAILED",
    "skipped": "skipped",
    "waiting": "not run",
}


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """The state of a run in a sweep."""

    run: Run
    folder: Path
    flags: Command | None
    """Flags of the workload or command; None if they are unknown because the number of ranks is"""
    dry_run: Mapping[str, Any] | None
    """The workload's dry run; None for a command"""
    state: str = "waiting"
    """A key of STATES"""
    reason: str | None = None
    """Why it was marked, skipped, failed or will be repeated"""
    seconds: float | None = None
    log: Path | None = None
    """The log of a failed run"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """All runs of a sweep, in order."""

    sweep: Sweep
    root: Path
    """The folder of the sweep"""
    outcomes: list[Outcome]

    @property
    def cluster(self) -> str:
        """Name of its virtual cluster."""
        return cluster_name(self.sweep, self.root)

    def waiting(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.state == "waiting"]

    def command_of(self, outcome: Outcome) -> Command:
        """The command line of a run; empty if its flags are unknown."""
        if outcome.flags is None:
            return []
        experiment = outcome.run.experiment
        spec = self.sweep.cluster
        hosts = spec.names[: experiment.hosts] if spec else ["localhost"]
        cluster = self.cluster if spec and spec.virtual else None
        return command.launch(outcome.run, outcome.flags, outcome.folder, hosts=hosts, cluster=cluster)

    def classify(self) -> None:
        """Sets the state of runs that were done before. Changes nothing on disk."""
        for outcome in self.outcomes:
            state, reason = folder.state(outcome.folder, outcome.run, outcome.dry_run)
            if state == "done":
                outcome.state = "kept"
            elif state != "absent" and outcome.state == "waiting":
                outcome.reason = f"{state}, will be renamed and run again: {reason}"


def say(text: str) -> None:
    """Prints one line on stderr. Ignores a closed stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(f"sweep: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[int]:
    """Creates the folder and locks the machine against other sweeps. Yields the descriptor. Raises Failure (1, 73)."""
    path = Path(tempfile.gettempdir()) / MACHINE_LOCK
    try:
        with as_calling_user():
            root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise folder.cannot_write(root, error) from error
    try:
        handle = files.open_lock(path)
    except OSError as error:
        hint = "remove it, or set TMPDIR to a folder of your own"
        raise files.refused(path, error, exits.CANNOT_WRITE, hint) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "unknown owner"
            hint = "hint: wait for it or stop it, since two sweeps would distort each other's measurements"
            raise Failure(f"another sweep or its last job is running on this machine ({owner}); {hint}") from error
        if os.pread(handle, 8, 0) in (b"", b"process "):  # never overwrite a file that is not our lock
            with contextlib.suppress(OSError):  # the file may belong to another user
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"process {os.getpid()}, {root}".encode(), 0)
        yield handle
    finally:
        os.close(handle)


class Executor:
    """Executes the waiting runs of a sweep in order."""

    def __init__(self, task: Task, children: Children) -> None:
        self._task, self._children = task, children
        self._network = Network(task.sweep, task.cluster, children.environment) if task.sweep.cluster else None
        self._launched = False

    def run(self) -> Failure | None:
        """Executes all runs and restores the network. Returns the Failure that stopped the sweep, or None."""
        failure: Failure | None = None
        try:
            waiting = self._task.waiting()
            for number, outcome in enumerate(waiting, start=1):
                self._children.check()
                say(f"{number}/{len(waiting)} {outcome.run.name}")
                self._execute(outcome)
                text = f"{STATES[outcome.state]}: {outcome.run.name}"
                text += "" if outcome.seconds is None else f", {duration(outcome.seconds)}"
                say(text + (f" ({outcome.reason})" if outcome.reason else ""))
        except Stopped:
            failure = Failure("stopped; hint: run the same command again to continue", exits.RESUMABLE)
        except Failure as error:
            failure = error
        finally:
            errors = self._network.close() if self._network else []
        if errors:
            message = f"cannot restore the network: {'; '.join(errors)}"
            failure = Failure(f"{failure}; {message}", failure.code) if failure else Failure(message)
        return failure

    def _execute(self, outcome: Outcome) -> None:
        """Executes one run, and repeats it once if it fails."""
        for attempt in range(1, ATTEMPTS + 1):
            if self._launched and self._task.sweep.cooldown_s:
                self._children.sleep(self._task.sweep.cooldown_s)
            try:
                check = self._network.prepare(outcome.run.experiment) if self._network else LinkCheck()
            except Failure as failure:
                outcome.state = "skipped" if failure.code in (exits.UNREACHABLE, exits.NO_PERMISSION) else "failed"
                outcome.reason = str(failure)
                return
            began_s = time.monotonic()
            code, problem = self._launch(outcome, check, attempt)
            outcome.seconds = round(time.monotonic() - began_s, 2)
            if problem is None:
                outcome.state, outcome.reason = "marked" if check.marked else "done", check.marked
                return
            renamed = folder.set_aside(outcome.folder, "failed")
            outcome.state, outcome.reason, outcome.log = "failed", problem, renamed / folder.LOG
            if code in (exits.CANNOT_WRITE, exits.IO_ERROR):
                hint = "hint: make room, then run the same command again to continue"
                raise Failure(f"{renamed}: {problem}: {' '.join(folder.tail(outcome.log)[-1:])}; {hint}", code)

    def _launch(self, outcome: Outcome, check: LinkCheck, attempt: int) -> tuple[int, str | None]:
        """Launches the job. Returns its exit code, and the problem of the run or None."""
        run, target, sweep = outcome.run, outcome.folder, self._task.sweep
        words = self._task.command_of(outcome)
        if target.exists():
            folder.set_aside(target, "other" if (target / "COMPLETE").exists() else "unfinished")
        rate = run.experiment.rate_bit_s
        request = records.Experiment(
            sweep=sweep.name,
            experiment=run.experiment.name,
            repeat=run.repeat,
            kind=run.kind,
            attempt=attempt,
            order=run.order,
            settings=run.experiment.settings,
            program=folder.program(run),
            command=words,
            rate_mbit=rate / 1e6 if rate else None,
            rate_off_percent=check.off_percent,
            marked=check.marked,
        )
        self._launched = True
        with folder.make(target, request) as log, tempfile.TemporaryDirectory(prefix="hvdtrain-sweep-") as scratch:
            if os.geteuid() == 0:
                os.chown(scratch, target.stat().st_uid, -1)  # the hosts run as that user
            try:
                with self._children.background(self._fill_commands(outcome, Path(scratch))):
                    code = self._children.job(words, log)
            except Failure as failure:
                return failure.code, str(failure)
        self._children.check()  # a signal to the terminal's process group also reaches the job
        return code, f"exit code {code}" if code else folder.mismatch(target, run, outcome.dry_run)

    def _fill_commands(self, outcome: Outcome, scratch: Path) -> Sequence[Command]:
        """Commands that keep the other hosts busy during a run on one host ([cluster] fill)."""
        spec, run, flags = self._task.sweep.cluster, outcome.run, outcome.flags
        if spec is None or flags is None or "fill" not in run.experiment.settings.get("cluster", {}):
            return []
        hosts, name = spec.virtual[1:], self._task.cluster
        return [command.launch(run, flags, scratch / host, hosts=[host], cluster=name) for host in hosts]
