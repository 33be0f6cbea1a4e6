"""The agent of one host in an elastic job: it starts the host's ranks and connects them to the launcher.

`launch.elastic` starts one agent per host, over ssh or with Slurm's srun. Both sides send messages (`line`):

    launcher -> agent   the job (first line), beat, to + message (for ranks), signal, stalls (of other hosts), end
    agent -> launcher   beat, from + message (of a rank), stdout (of a rank), ended + code (of a rank), stall

Each rank has a socket to its agent, whose number is in HVDTRAIN_ELASTIC_FD, and its standard error is the agent's. The
ranks of a host live and die together: if a signal ends one, the agent kills the others. It also kills them if the
launcher is gone or silent, so that no rank of a lost host continues.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.launch import stalls
from hvdtrain.launch.line import CHUNK, JOB, REPORT, TO_AGENT, WATCHED, BrokenLine, Line, decoded, fits
from hvdtrain.system import hosts, net, proc, ssh
from hvdtrain.system.commands import Command
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import Slots

FD = "HVDTRAIN_ELASTIC_FD"
"""Variable with the descriptor of a rank's socket to its agent"""
BEAT_S = 0.5
LOOK_S = 1.0
LAUNCHER = "the launcher"
LAST_S = 2.0
"""Time to pass on the last output of the ranks"""
ALONE_S = 10.0
"""Silence of the launcher after which the agent kills its ranks. The launcher gives a host up much earlier"""
ROOT = str(Path(__file__).resolve().parents[2])
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from hvdtrain.launch.agent import main; main()"


SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none", "--mem=0", "--immediate=10")
"""Runs a command alongside the other steps of this allocation, on all cores of the job there. See srun(1)"""


def on_host(host: str, address: str, words: Command) -> Command:
    """The words that run a command on a host: with srun if Slurm has allocated it to this job, otherwise over ssh.

    Without either if the host is this machine.
    """
    if net.is_own(address):
        return words
    with contextlib.suppress(Failure):
        if host in hosts.expand_nodelist(os.environ.get("SLURM_JOB_NODELIST", "")):
            return [*SRUN, f"--nodelist={host}", "--", *words]
    return ssh.command(host, words)


def agent_command(host: str, address: str) -> Command:
    """The words that start the agent of a host."""
    return on_host(host, address, [sys.executable, "-I", "-S", "-c", PROGRAM])


def show(places: Sequence[tuple[Slots, str]], command: Command, hostfile: Path | None) -> str:
    """The commands of a dry run. The agents get the ranks' command on standard input."""
    lines = [shlex.join(agent_command(slots.host, address)) for slots, address in places]
    lines.append(f"# each starts its ranks of: {shlex.join(command)}")
    return "\n".join([*lines, *([f"# hosts that are added to {hostfile} join the job"] if hostfile else [])])


class Rank:
    """A rank of this host."""

    def __init__(self, job: dict[str, Any], number: int, local_rank: int) -> None:
        ours, theirs = socket.socketpair()
        variables = {
            "HVDTRAIN_ELASTIC_RANK": number,
            "HVDTRAIN_ELASTIC_SIZE": job["size"],
            "HVDTRAIN_ELASTIC_LOCAL_RANK": local_rank,
            "HVDTRAIN_ELASTIC_LOCAL_SIZE": len(job["ranks"]),
            FD: theirs.fileno(),
        }
        self.number, self._socket = number, ours
        self.process = subprocess.Popen(
            job["command"],
            env={**os.environ, **job["environment"], **{name: str(value) for name, value in variables.items()}},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
        theirs.close()
        self.line = Line(ours.fileno(), ours.fileno(), dict, f"rank {number}")
        self.line.send({**job["hello"], "rank": number, "local_rank": local_rank, "local_size": len(job["ranks"])})
        self.ended = False
        self.pid = self.process.pid
        """The process that trains, which the command may have started"""
        self.stopped_since: float | None = None
        self.used_s = 0.0
        """Processor time when it was last found stopped"""


class Agent:
    """Passes messages between the launcher and the ranks of this host until all of them have ended."""

    def __init__(self, job: dict[str, Any], launcher: Line) -> None:
        """Raises OSError if the command cannot be started."""
        self._launcher = launcher
        self._ranks = [Rank(job, number, local) for local, number in enumerate(job["ranks"])]
        self._ready = selectors.DefaultSelector()
        self._ready.register(launcher.source, selectors.EVENT_READ, None)
        for rank in self._ranks:
            assert rank.process.stdout is not None
            self._ready.register(rank.line.source, selectors.EVENT_READ, rank.line)
            self._ready.register(rank.process.stdout, selectors.EVENT_READ, rank)
        self._heard_at = time.monotonic()
        self._host, self._limit_s = job["host"], 0.0
        self._stalls = stalls.Stalls(0.0, self._host, {}, self._heard_at)
        self._others: list[dict[str, Any]] | None = None
        """The summaries of the other members, if the launcher asks for this host's"""

    def run(self) -> None:
        next_beat = next_look = 0.0
        while not all(rank.ended for rank in self._ranks):
            if time.monotonic() >= next_beat:
                self._launcher.send({"beat": 1})
                next_beat = time.monotonic() + BEAT_S
            if time.monotonic() >= next_look:
                self._look(time.monotonic())
                next_look = time.monotonic() + LOOK_S
            for line in (self._launcher, *(rank.line for rank in self._ranks)):
                line.flush()
            for key, _ in self._ready.select(BEAT_S / 10):
                self._take(key.fileobj, key.data)
            if time.monotonic() - self._heard_at > ALONE_S:
                self.kill()
            self._reap()
        deadline = time.monotonic() + LAST_S
        while time.monotonic() < deadline and any(isinstance(key.data, Rank) for key in self._ready.get_map().values()):
            for key, _ in self._ready.select(BEAT_S / 10):  # the last output of the ranks
                self._take(key.fileobj, key.data)
        while time.monotonic() < deadline and not self._launcher.flush():
            time.sleep(BEAT_S / 10)

    def _take(self, source: Any, data: Line | Rank | None) -> None:
        if isinstance(data, Rank):
            text = os.read(source.fileno(), CHUNK)
            if text:
                self._launcher.send({"stdout": text.decode("utf-8", "surrogateescape")})
            else:
                self._ready.unregister(source)
            return
        line = self._launcher if data is None else data
        messages = line.receive()
        if messages is None:
            self._ready.unregister(source)
            if data is None:
                self.kill()
            return
        for message in messages:
            if data is None:
                self._obey(message)
            else:
                self._pass_on(next(rank for rank in self._ranks if rank.line is data), message)

    def _pass_on(self, rank: Rank, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if fits(message, WATCHED):
            rank.pid, self._limit_s = message["pid"], message["limit_s"]
            pids = {each.number: each.pid for each in self._ranks}
            self._stalls = stalls.Stalls(self._limit_s, self._host, pids, now)
        elif fits(message, REPORT):
            self._stalls.receive(rank.number, message["report"].encode(), now)
        else:
            self._launcher.send({"from": rank.number, "message": message})

    def _look(self, now: float) -> None:
        """Look for ranks that wait for others or are stopped. Report them, also if the launcher asks."""
        for rank in self._ranks:
            state = proc.stat(rank.pid).state
            used_s = proc.used(rank.pid)[0] if state == "T" else 0.0
            if state != "T" or used_s != rank.used_s:  # or it runs now and then
                rank.stopped_since = None
            rank.used_s = used_s
            if state == "T":
                rank.stopped_since = rank.stopped_since or now
            if state in "Tt":
                self._stalls.resume(now, [rank.number])
        stopped_s = max(0.0 if rank.stopped_since is None else now - rank.stopped_since for rank in self._ranks)
        summary = self._stalls.summary(now)
        if self._others is not None:
            self._stalls.judge(self._others)
        self._stalls.report(lambda line: print(line, file=sys.stderr, flush=True))
        waits = bool(summary) and summary["wait_s"] >= self._limit_s / 2
        if waits or stopped_s or self._others is not None:
            self._launcher.send({"stall": summary, "limit_s": self._limit_s, "stopped_s": stopped_s})
        self._others = None

    def _obey(self, order: dict[str, Any]) -> None:
        self._heard_at = time.monotonic()
        if "message" in order:
            for rank in self._ranks:
                if rank.number in order["to"]:
                    rank.line.send(order["message"])
        elif "signal" in order:
            for rank in self._ranks:
                if not rank.ended:
                    rank.process.send_signal(order["signal"])
        elif "stalls" in order:
            self._others = order["stalls"]
        elif "end" in order:
            self.kill()

    def _reap(self) -> None:
        for rank in self._ranks:
            if not rank.ended and (code := rank.process.poll()) is not None:
                rank.ended = True
                self._launcher.send({"ended": rank.number, "code": code})
                if code < 0:
                    self.kill()

    def kill(self) -> None:
        for rank in self._ranks:
            if not rank.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # signals for the ranks come from the launcher
    try:
        serve()
    except BrokenLine as broken:
        print(f"hvdtrain: host {socket.gethostname()}: {broken}", file=sys.stderr, flush=True)


def serve() -> None:
    """Read the job, and run it to its end. Raises BrokenLine."""
    first = os.fdopen(0, "rb", buffering=0, closefd=False).readline()
    if (job := decoded(first, JOB, LAUNCHER)) is None:
        return
    launcher = Line(0, 1, TO_AGENT, LAUNCHER)
    if Path(job["folder"]).is_dir():
        os.chdir(job["folder"])
    try:
        agent = Agent(job, launcher)
    except OSError as error:
        what = f"{job['command'][0]} on {socket.gethostname()}: {error.strerror}"
        print(f"hvdtrain: {what}; hint: name a program that this host has", file=sys.stderr, flush=True)
        sys.exit(69)
    try:
        agent.run()
    finally:
        agent.kill()
