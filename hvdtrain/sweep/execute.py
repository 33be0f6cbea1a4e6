"""Executes a sweep: starts hosts, sets and measures rates, launches jobs, checks records, and retries failures once."""

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
from hvdtrain.sweep.dry_run import DryRun
from hvdtrain.sweep.file import Sweep
from hvdtrain.sweep.grid import Run
from hvdtrain.sweep.network import LinkCheck, Network, cluster_name
from hvdtrain.sweep.process import Children, Stopped, Timeout
from hvdtrain.sweep.show import STATES, Outcome, say
from hvdtrain.system import exits, files
from hvdtrain.system.commands import Command
from hvdtrain.system.exits import Failure

ATTEMPTS = 2
MACHINE_LOCK = "hvdtrain-sweep.lock"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """All runs of a sweep, with everything needed to execute them."""

    sweep: Sweep
    root: Path
    """The folder of the sweep"""
    outcomes: list[Outcome]
    """The state of each run, in order"""
    dry_runs: dict[str, DryRun]
    """By name of the experiment"""
    flags: dict[str, Command]
    """Flags of the workload, by name of the run"""

    def waiting(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.state == "waiting"]


def classify(task: Task, skipped: dict[str, str]) -> None:
    """Sets the state of each run: kept, skipped or waiting. Changes nothing on disk.

    `skipped` maps the names of experiments that cannot run here to the reason.
    """
    for outcome in task.outcomes:
        name = outcome.run.experiment.name
        state, reason = folder.state(outcome.folder, outcome.run, task.dry_runs.get(name))
        if state == "done":
            outcome.state = "kept"
        elif name in skipped:
            outcome.state, outcome.reason = "skipped", skipped[name]
        elif state != "absent":
            outcome.reason = f"{state}, will be renamed and run again: {reason}"


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[tuple[int, ...]]:
    """Locks the machine and the folder against other sweeps. Yields the descriptors. Raises Failure (1, 73)."""
    handles: list[int] = []
    path = Path(tempfile.gettempdir()) / MACHINE_LOCK
    try:
        try:
            folder.make_owned(root)
            handles.append(os.open(root, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            raise folder.cannot_write(root, error) from error
        if not os.access(root, os.W_OK):
            raise Failure(f"{root}: not writable; hint: choose another --root", exits.CANNOT_WRITE)
        try:
            handles.append(files.open_lock(path))
        except OSError as error:
            hint = "remove it, or set TMPDIR to a folder of your own"
            raise files.refused(path, error, exits.CANNOT_WRITE, hint) from error
        for handle, what in zip(handles, (f"a sweep into {root}", "another sweep"), strict=True):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.pread(handles[1], 200, 0).decode(errors="replace").strip() or "unknown owner"
                hint = "hint: wait for it or stop it, since two sweeps would distort each other's measurements"
                raise Failure(f"{what} or its last job is running on this machine ({owner}); {hint}") from error
        if os.pread(handles[1], 8, 0) in (b"", b"process "):  # never overwrite a file that is not our lock
            with contextlib.suppress(OSError):  # the file may belong to another user
                os.ftruncate(handles[1], 0)
                os.pwrite(handles[1], f"process {os.getpid()}, {root}".encode(), 0)
        yield tuple(handles)
    finally:
        for handle in handles:
            os.close(handle)


def most_hosts(outcomes: Sequence[Outcome]) -> int:
    """The largest number of hosts in the next runs with the same rate, whose links are measured together."""
    most = 1
    rate = outcomes[0].run.experiment.rate
    for experiment in (outcome.run.experiment for outcome in outcomes if outcome.run.experiment.hosts > 1):
        if experiment.rate != rate:
            break
        most = max(most, experiment.hosts)
    return most


class Executor:
    """Executes the waiting runs of a sweep in order."""

    def __init__(self, task: Task, children: Children) -> None:
        self._task, self._children = task, children
        self._name = cluster_name(task.sweep, task.root)
        self._network = Network(task.sweep, self._name, children) if task.sweep.cluster else None
        self._launched = False

    def run(self) -> Failure | None:
        """Executes all runs and restores the network. Returns the Failure that stopped the sweep, or None."""
        failure: Failure | None = None
        try:
            waiting = self._task.waiting()
            for index, outcome in enumerate(waiting):
                self._children.check()
                say(f"{index + 1}/{len(waiting)} {outcome.run.name}")
                self._execute(outcome, most_hosts(waiting[index:]))
                say(self._describe(outcome))
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

    def _describe(self, outcome: Outcome) -> str:
        text = f"{STATES[outcome.state]}: {outcome.run.name}"
        if outcome.seconds is not None:
            text += f", {duration(outcome.seconds)}"
        summary = records.summary(outcome.folder) if outcome.state in ("done", "marked") else None
        if summary:
            text += "" if summary.samples_per_s is None else f", {summary.samples_per_s:.1f} samples/s"
            text += "".join(f", test {name} {value:.4f}" for name, value in list(summary.test_scores.items())[:1])
        note = outcome.marked or outcome.reason
        return f"{text} ({note})" if note else text

    def _execute(self, outcome: Outcome, most_hosts: int) -> None:
        """Executes one run, and repeats it once if it fails."""
        for attempt in range(1, ATTEMPTS + 1):
            if self._launched and self._task.sweep.cooldown_s:
                self._children.sleep(self._task.sweep.cooldown_s)
            try:
                network = self._network if outcome.run.experiment.on_cluster else None
                check = network.prepare(outcome.run.experiment, most_hosts) if network else LinkCheck()
            except Failure as failure:
                outcome.state = "skipped" if failure.code in (exits.UNREACHABLE, exits.NO_PERMISSION) else "failed"
                outcome.reason = str(failure)
                return
            outcome.marked, outcome.reason = check.marked, None
            began_s = time.monotonic()
            code, problem = self._launch(outcome, check, attempt)
            outcome.seconds = round(time.monotonic() - began_s, 2)
            if problem is None:
                outcome.state = "marked" if outcome.marked else "done"
                return
            renamed = folder.set_aside(outcome.folder, "failed")
            outcome.log, outcome.reason = renamed / folder.LOG, problem
            outcome.lines = folder.tail(outcome.log)
            if code in (exits.CANNOT_WRITE, exits.IO_ERROR):
                outcome.state = "failed"
                hint = "hint: make room, then run the same command again to continue"
                raise Failure(f"{renamed}: {problem}: {' '.join(outcome.lines[-1:])}; {hint}", code)
            if attempt < ATTEMPTS:
                say(f"{problem}: {outcome.run.name}, trying once more (log: {outcome.log})")
        outcome.state, outcome.marked = "failed", None

    def _launch(self, outcome: Outcome, check: LinkCheck, attempt: int) -> tuple[int, str | None]:
        """Launches the job. Returns its exit code, and what is wrong with the run or None."""
        run, target, sweep = outcome.run, outcome.folder, self._task.sweep
        words = command_of(self._task, outcome, self._name)
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
        folder.make(target, request)
        self._launched = True
        try:
            log = (target / folder.LOG).open("wb")
            folder.set_owner(target / folder.LOG)
        except OSError as error:
            raise folder.cannot_write(target, error) from error
        with log, tempfile.TemporaryDirectory(prefix="hvdtrain-sweep-") as scratch:
            if os.geteuid() == 0:
                os.chown(scratch, target.stat().st_uid, -1)  # the hosts run as that user
            try:
                with self._children.background(self._fill_commands(run, Path(scratch))):
                    code = self._children.job(words, log, sweep.timeout_s)
            except Timeout:
                return exits.FAILED, f"exceeded timeout_s = {sweep.timeout_s:g}"
            except Failure as failure:
                return failure.code, str(failure)
        self._children.check()  # a signal to the terminal's process group also reaches the job
        if code:
            return code, f"exit code {code}"
        return code, folder.mismatch(target, run, self._task.dry_runs.get(run.experiment.name))

    def _fill_commands(self, run: Run, scratch: Path) -> list[Command]:
        """Commands that keep the other hosts busy during a run on one host ([cluster] fill)."""
        spec = self._task.sweep.cluster
        if spec is None or "fill" not in run.experiment.settings.get("cluster", {}):
            return []
        flags, name = self._task.flags[run.name], self._name
        return [command.launch(run, flags, scratch / host, hosts=[host], cluster=name) for host in spec.virtual[1:]]


def command_of(task: Task, outcome: Outcome, name: str) -> Command:
    """The command line of a run. `name` is that of the virtual cluster."""
    experiment = outcome.run.experiment
    spec = task.sweep.cluster if experiment.on_cluster else None
    hosts = spec.names[: experiment.hosts] if spec else ["localhost"]
    cluster = name if spec and not spec.hostfile else None
    return command.launch(outcome.run, task.flags[outcome.run.name], outcome.folder, hosts=hosts, cluster=cluster)
