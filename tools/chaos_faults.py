"""The faults of tools/chaos.py: four virtual hosts, and an elastic training on them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench import UNLIMITED, cluster, on_host, throttle  # noqa: E402

from hvdtrain.lab import virtual  # noqa: E402
from hvdtrain.system import proc  # noqa: E402
from hvdtrain.system.commands import run  # noqa: E402
from hvdtrain.system.rates import parse_rate, show_rate  # noqa: E402

NAMES, BATCH = "abcd", 48
STRATEGIES = ("powersgd", "hierarchical", "local-sgd:every=2,staleness=1+powersgd:rank=4")
TRAIN = ["-m", "hvdtrain.resnet", "--image-size", "8", "--width", "0.125", "--threads", "1"]
NOWHERE = "02:00:00:00:00:01"
"""A hardware address that no host has"""
LIMIT_S = 150.0
"""Time for a run, after which it counts as hanging"""
LEFT_S = 14.0
"""Time for the processes of a host that was cut off to end: agents wait 10 s for the launcher"""
HELD_S = 0.5
"""A fault is undone this long after the others have continued, while they still train"""


@dataclasses.dataclass(frozen=True)
class Case:
    """What happens in one run."""

    seed: int
    kind: str
    rate: str
    strategy: str
    framework: str
    launcher: str
    """Host of the launcher"""
    victims: list[str]
    """Hosts that the fault hits"""
    step: int
    """The fault follows the record of this step"""
    samples: int
    """Samples of an epoch"""
    flags: list[str]

    @property
    def hosts(self) -> list[str]:
        """The host of each rank. The host that loses one of its ranks has two."""
        return [name for name in NAMES for _ in range(1 + (self.kind == "rank" and name in self.victims))]

    @property
    def survivors(self) -> list[str] | None:
        """The host of each rank that takes part in the end; None if the job ends."""
        if self.kind in ENDS:
            return None
        if self.kind in RETURNS:
            return [*(name for name in self.hosts if name not in self.victims), *self.victims]
        return [name for name in self.hosts if self.kind in HARMLESS or name not in self.victims]

    def __str__(self) -> str:
        where = f"{', '.join(self.victims)} after step {self.step}, launcher on {self.launcher}"
        return f"seed {self.seed}: {self.kind} of {where}, {self.strategy}, {self.framework}, {self.rate}"


def drawn(seed: int, rates: Sequence[str], kinds: Sequence[str]) -> Case:
    """Draw the case of a seed."""
    draw = random.Random(seed)
    kind, rate, launcher = kinds[seed % len(kinds)], draw.choice(rates), draw.choice(NAMES)
    is_slow = rate != UNLIMITED and parse_rate(rate) <= 10_000_000  # an exact sum takes 2 s
    dense = not is_slow or kind not in ("slow", *RETURNS)
    strategy = draw.choice([name for name in STRATEGIES if name != "hierarchical" or dense])
    others = [name for name in NAMES if name != launcher]
    victims = draw.sample(others, 2 if kind in ("two", "split", "pair") else 1)
    if kind == "join":
        victims = draw.sample(NAMES, 2)
    elif kind in ("rank", "evaluation", "checkpoint"):
        victims = [draw.choice(NAMES)]
    elif kind in ("rank-0", "return-0", "launcher", "launcher-cut", "launcher-stop"):
        victims = ["a" if kind in ("rank-0", "return-0") else launcher]
    elif kind == "disk":  # the records of rank 0 are read later
        victims = [draw.choice([name for name in others if name != "a"])]
    per_epoch, epochs = (
        (1, 30) if kind == "evaluation" else (6, 80 if kind in RETURNS else 40 if kind in HARMLESS else 10)
    )
    if strategy == "hierarchical" and is_slow:
        per_epoch, epochs = min(3, per_epoch), 12 // min(3, per_epoch)
    step, samples = draw.randint(3, min(20, per_epoch * epochs // 2)), per_epoch * BATCH * len(NAMES)
    if kind == "disk":  # the checkpoint of the first epoch does not fit; the training set has 7 steps
        step, samples = 3 + step % 4, (4 + step % 4) * BATCH * len(NAMES)
    framework = "tensorflow" if draw.random() < 0.15 else "torch"
    flags = ["--framework", framework, "--strategy", strategy, "--epochs", str(epochs), "--epoch-samples", str(samples)]
    flags += draw.choice([["--global-batch-size", str(BATCH * len(NAMES))], ["--batch-size", str(BATCH)]])
    flags += [] if kind == "evaluation" else ["--evaluate-samples", "64"]
    flags += ["--checkpoint-steps", "1"] if kind == "checkpoint" else []
    flags += ["--check-replicas", "1"]
    return Case(seed, kind, rate, strategy, framework, launcher, victims, step, samples, flags)


# --- the hosts --------------------------------------------------------------------------------------------------------


class Lab:
    """Four virtual hosts, their links, and the processes on them."""

    def __init__(self, name: str) -> None:
        cluster("up", "--name", name, "--hosts", ",".join(NAMES))
        self._name, self._cluster = name, virtual.load(name)
        self._netns = {name: self._cluster.netns(name) for name in NAMES}
        self._inodes = {Path("/run/netns", netns).stat().st_ino: name for name, netns in self._netns.items()}
        self._idle: dict[int, str] = {}
        self._idle = self.processes()
        self._rate = UNLIMITED
        self._disks: list[tuple[str, Path]] = []

    def processes(self) -> dict[int, str]:
        """The host of each process that a job has started."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if host := self._inodes.get((path / "ns" / "net").stat().st_ino):
                    found[int(path.name)] = host
        return {pid: host for pid, host in found.items() if pid not in self._idle}

    def ranks(self) -> dict[int, str]:
        """The host of each rank."""
        return {pid: host for pid, host in self.processes().items() if proc.strings(pid, "cmdline")[1:3] == TRAIN[:2]}

    def set_rate(self, rate: str, host: str | None = None) -> None:
        """Set the rate of all links, or of one host's."""
        if host or rate != self._rate:
            throttle(self._name, rate, host or "")
        self._rate = "" if host else rate

    def set_link(self, host: str, state: str) -> None:
        """Cut the link of a host (down), or connect it again (up)."""
        run(["ip", "-n", self._cluster.switch, "link", "set", self._cluster.port(host), state])

    def block(self, sender: str, receiver: str) -> None:
        """Lose all packets from one host to another. Neither of them gets an error."""
        to = [self._cluster.address(receiver), "lladdr", NOWHERE, "nud", "permanent", "dev", "eth0"]
        run(["ip", "-n", self._netns[sender], "neigh", "replace", *to])

    def limit_disk(self, host: str, folder: Path) -> None:
        """Mount a file system of 1 MiB at `folder` on one host only."""
        inside = virtual.inside(self._cluster, host, share=False)
        run([*inside, "mount", "-t", "tmpfs", "-o", "size=1m", "hvdtrain-chaos", str(folder)])
        self._disks.append((host, folder))

    def heal(self) -> None:
        """Connect all links again."""
        for host in NAMES:
            self.set_link(host, "up")
            run(["ip", "-n", self._netns[host], "neigh", "flush", "dev", "eth0", "nud", "permanent"])

    def clean(self) -> None:
        """Undo all faults, and end the processes that are left."""
        self.heal()
        while left := self.processes():
            send(left, signal.SIGKILL)
            time.sleep(0.1)
        for host, folder in self._disks:
            run([*virtual.inside(self._cluster, host, share=False), "umount", str(folder)])
        self._disks.clear()

    def start(self, host: str, *words: str, output: Path) -> subprocess.Popen[bytes]:
        """Start a launcher on a host."""
        command = on_host(self._name, ["launch/mpirun.sh", "--quiet", *words], host)
        with output.open("w") as stream:
            return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# --- one run ----------------------------------------------------------------------------------------------------------


class Run:
    """An elastic training in `folder`/run, with the fault of a case."""

    def __init__(self, lab: Lab, case: Case, folder: Path) -> None:
        self.lab, self.case, self._folder = lab, case, folder / "run"
        self.random = random.Random(f"{case.seed} fault")
        if case.kind == "disk":
            lab.limit_disk(case.victims[0], folder)
        hosts = ",".join(f"{name}:{case.hosts.count(name)}" for name in NAMES)
        words = ["--elastic", *([] if case.kind in RETURNS else ["--no-return"]), "-H", hosts]
        words += ["-x", "HVDTRAIN_STALL_LIMIT=2"] if case.kind == "pair" else []
        words += [sys.executable, *TRAIN, "--run-dir", str(self._folder), *case.flags]
        self.launcher: subprocess.Popen[bytes] = lab.start(case.launcher, *words, output=folder / "output.txt")
        self._ranks: dict[int, str] = {}

    def ranks(self) -> list[int]:
        """The processes of the ranks that the fault hits."""
        return [pid for pid, host in self._ranks.items() if host in self.case.victims]

    def ranks_on(self, host: str) -> list[int]:
        return [pid for pid, where in self._ranks.items() if where == host]

    def processes(self) -> list[int]:
        """All processes of the job on the hosts that the fault hits."""
        return [pid for pid, host in self.lab.processes().items() if host in self.case.victims]

    def wait(self, seconds: float, until: Callable[[], object] = lambda: False, every_s: float = 0.01) -> bool:
        """Wait until the condition is true or the launcher has ended. Returns False after the time limit."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.launcher.poll() is not None or until():
                return True
            time.sleep(every_s)
        return False

    def wait_for_view(self) -> None:
        """Wait until the other ranks continue without the lost ones."""

        def continued() -> bool:
            return any(b'"type":"view"' in path.read_bytes() for path in self._folder.glob("metrics/*.jsonl"))

        self.wait(30, continued)
        self.wait(HELD_S)

    def wait_for_return(self) -> None:
        """Wait until all lost hosts take part again."""
        path = self._folder / "metrics" / "rank0000.jsonl"

        def complete() -> bool:
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
            views = [json.loads(line) for line in lines if line.startswith(b'{"type":"view"')]
            return bool(views) and views[-1]["ranks"] == len(self.case.hosts)

        self.wait(60, complete)

    def finished(self) -> dict[str, Any]:
        """Wait for the step of the case, let the fault happen, and return the facts that are not in the records."""
        began, seen = time.monotonic(), set[int]()
        first, wanted = self._folder / "metrics" / "rank0000.jsonl", f'"type":"step","step":{self.case.step},'.encode()
        self.wait(LIMIT_S, lambda: first.exists() and wanted in first.read_bytes())
        self._ranks = self.lab.ranks()
        time.sleep(self.random.uniform(0, 0.05))  # anywhere in a step
        injected_unix_s = time.time()
        if self.launcher.poll() is None:
            KINDS[self.case.kind](self)
        ended = self.wait(LIMIT_S + began - time.monotonic(), lambda: seen.update(self.lab.ranks()), 0.2)
        self.launcher.send_signal(signal.SIGCONT if ended else signal.SIGKILL)
        code = self.launcher.wait()
        until = time.monotonic() + LEFT_S
        while (left := self.lab.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        return {
            "case": dataclasses.asdict(self.case),
            "code": code if ended else None,
            "injected_unix_s": injected_unix_s,
            "ranks": len(self._ranks),
            "started_later": len(seen - self._ranks.keys()),
            "left": [f"{pid} on {host} ({' '.join(proc.strings(pid, 'cmdline'))[-80:]})" for pid, host in left.items()],
            "run_s": time.monotonic() - began,
        }


# --- faults -----------------------------------------------------------------------------------------------------------


def kill_rank(run: Run) -> None:
    """kill -9 of one rank."""
    send([run.random.choice(run.ranks())], signal.SIGKILL)


def kill_hosts(run: Run) -> None:
    send(run.processes(), signal.SIGKILL)


def cut(run: Run) -> None:
    for host in run.case.victims:
        run.lab.set_link(host, "down")
    run.wait_for_view()
    run.lab.heal()


def two(run: Run) -> None:
    """Two hosts at once: one is cut off, the other one too, or everything on it is killed."""
    if run.random.random() < 0.5:
        send([pid for pid, host in run.lab.processes().items() if host == run.case.victims[0]], signal.SIGKILL)
    cut(run)


def flap(run: Run) -> None:
    for state, seconds in 4 * (("down", 1), ("up", 2)):
        run.lab.set_link(run.case.victims[0], state)
        run.wait(seconds)


def blocked(*ways: str) -> Callable[[Run], None]:
    """Lose packets of the hosts: `out` to the others, `in` from the others, `between` each other."""

    def block(run: Run) -> None:
        victims = run.case.victims
        others = [name for name in NAMES if name not in victims]
        out = [*itertools.product(victims, others)]
        pairs = {"out": out, "in": [way[::-1] for way in out], "between": [*itertools.permutations(victims, 2)]}
        for sender, receiver in itertools.chain.from_iterable(pairs[way] for way in ways):
            run.lab.block(sender, receiver)
        if "between" not in ways:  # otherwise the fault lasts until the job ends
            run.wait_for_view()
            run.lab.heal()

    return block


def slow(run: Run) -> None:
    """A tenth of the rate; 100 Mbit/s instead of an unlimited link."""
    rate = 1_000_000_000 if run.case.rate == UNLIMITED else parse_rate(run.case.rate)
    run.lab.set_rate(show_rate(rate // 10), run.case.victims[0])


def freeze(run: Run) -> None:
    """SIGSTOP of everything on the host, and SIGCONT when the others have gone on."""
    stopped = run.processes()
    send(stopped, signal.SIGSTOP)
    run.wait_for_view()
    send(stopped, signal.SIGCONT)


def return_later(run: Run) -> None:
    """kill -9 of the host's ranks, or a cut link that is connected again; the launcher then starts the host again."""
    if run.case.launcher in run.case.victims or run.random.random() < 0.5:
        send(run.ranks(), signal.SIGKILL)
    else:
        cut(run)
    run.wait_for_return()


def lose_during_return(run: Run) -> None:
    """kill -9 of a host's ranks, and of another one's while the first one starts, catches up, or takes part again."""
    first, second = run.case.victims
    send(run.ranks_on(first), signal.SIGKILL)
    run.wait(run.random.uniform(5, 12))
    send(run.ranks_on(second), signal.SIGKILL)
    run.wait_for_return()


def stop_launcher(run: Run) -> None:
    """SIGSTOP of the launcher until the agents have given it up after 10 s."""
    run.launcher.send_signal(signal.SIGSTOP)
    time.sleep(13)
    run.launcher.send_signal(signal.SIGCONT)


KINDS: dict[str, Callable[[Run], None]] = {
    "rank": kill_rank,
    "deaf": blocked("in"),
    "host": kill_hosts,
    "cut": cut,
    "rank-0": kill_rank,
    "mute": blocked("out"),
    "flap": flap,
    "freeze": freeze,
    "split": blocked("in", "out"),
    "two": two,
    "slow": slow,
    "evaluation": kill_rank,
    "checkpoint": kill_rank,
    "stop": lambda run: send(run.ranks(), signal.SIGSTOP),
    "launcher": lambda run: run.launcher.kill(),
    "disk": lambda run: None,
    "launcher-cut": cut,
    "launcher-stop": stop_launcher,
    "pair": blocked("between"),
    "return": return_later,
    "return-0": return_later,
    "join": lose_during_return,
}
"""Faults by name"""
RETURNS = ("return", "return-0", "join")
"""The lost hosts come back"""
HARMLESS = ("flap", "slow")
"""No host is put out"""
ENDS = {
    "launcher": "",
    "launcher-stop": "",
    "launcher-cut": "1 of 4 hosts are left, less than half",
    "disk": "No space left on device",
    "pair": "no rank has made progress",
}
"""The job ends, and prints this"""
