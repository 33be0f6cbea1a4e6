"""Runs the cells of `tools/bench_strategies.py` on virtual hosts, keeps what they leave, and tells how far it is."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import bench_strategies_table as table
from bench_strategies_rows import CPU_SHARE, TARGET, Cell, Row

from hvdtrain import records
from hvdtrain.cluster import tuning
from hvdtrain.cluster.rates import show_rate
from hvdtrain.exits import Failure

ROOT = Path(__file__).resolve().parent.parent
NAMES = "abcdefgh"
ATTEMPTS = 2
T = TypeVar("T")


# --- the cluster ----------------------------------------------------------------------------------------------------


class Cluster:
    """The virtual hosts, made when entered and removed when left."""

    def __init__(self, name: str, hosts: int) -> None:
        self._name, self._hosts = name, hosts
        self._rate: int | None = None

    def __enter__(self) -> Cluster:
        words = ["--hosts", ",".join(NAMES[: self._hosts]), "--cpu-share", f"{CPU_SHARE}"]
        try:
            self._tool("cluster.sh", "up", *words)
        except Failure:  # it is as it was
            raise
        except BaseException:  # a signal
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._tool("cluster.sh", "down")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def again(self) -> None:
        """Ends whatever a failed run left behind."""
        self.__exit__()
        self.__enter__()
        self._rate = None

    def throttle(self, rate: int) -> None:
        if rate != self._rate:
            self._tool("throttle.sh", show_rate(rate))
            self._rate = rate

    def run(self, words: Sequence[str], log: Path, timeout_s: float) -> str:
        """A command on host a: its standard output. Raises Failure with the end of its errors, which `log` keeps."""
        with log.open("w") as errors:
            process = self._started("a", words, subprocess.PIPE, errors)
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except BaseException as error:
                _end(process)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise Failure(f"not done after {timeout_s:.0f} s; see {log}") from error
                raise
        if process.returncode:
            raise Failure(f"exit code {process.returncode}: {log.read_text()[-800:].strip()}")
        return output

    @contextlib.contextmanager
    def others_at(self, command: Callable[[str], Sequence[str]]) -> Iterator[None]:
        """Meanwhile every host but a runs `command(its folder for it)`; what comes of it is thrown away."""
        with tempfile.TemporaryDirectory() as folder:
            names = NAMES[1 : self._hosts]
            null = subprocess.DEVNULL
            processes = [self._started(name, command(f"{folder}/{name}"), null, null) for name in names]
            try:
                yield
            finally:
                for process in processes:
                    _end(process)

    def _started(self, host: str, words: Sequence[str], output: Any, errors: Any) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HVDTRAIN_", "OMPI_"))}
        return subprocess.Popen(
            ["tools/cluster.sh", "exec", "--name", self._name, host, "--", *words],
            cwd=ROOT,
            env=inherited | {"PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "VIRTUAL_ENV": f"{ROOT}/.venv"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

    def _tool(self, tool: str, first: str, *words: str) -> None:
        command = [f"tools/{tool}", first, "--name", self._name, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, start_new_session=True)
        if done.returncode:
            raise Failure(f"{' '.join(command)}: {done.stderr.strip()}", done.returncode)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the command and whatever it started in its session."""
    for number, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=patience_s)
            return


def starter(row: Row, hosts: int) -> list[str]:
    """The words before `python`. The plain ones have what they need to run at all, and nothing to tune."""
    listed = ",".join(f"{host}:{row.ranks_per_host}" for host in NAMES[:hosts])
    ranks = str(hosts * row.ranks_per_host)
    if row.starter == "alone":  # with what launch/mpirun.sh sets of a host
        link = tuning.Link(hosts=1, ranks=1, most_ranks=1, cores=CPU_SHARE, rate_bit_s=None)
        return ["env", *(f"{setting.name}={setting.value}" for setting in tuning.host_settings(link))]
    if row.starter == "horovodrun":
        # Gloo's own timeout of 30 s would end the long transfers; it changes no speed.
        return ["env", "HOROVOD_GLOO_TIMEOUT_SECONDS=1800", "horovodrun", "--gloo", "-np", ranks, "-H", listed]
    if row.starter == "mpirun":
        interface = ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
        return [
            "mpirun",
            "-np",
            ranks,
            "-H",
            listed,
            "--bind-to",
            "none",
            *interface,
            "-x",
            "PATH",
            "-x",
            "OPAL_PREFIX",
        ]
    return ["launch/mpirun.sh", "-np", ranks, "-H", listed]


# --- runs -------------------------------------------------------------------------------------------------------------


class Bench:
    """Runs cells, keeps their folders in `keep`, and tells how far it is."""

    def __init__(self, cluster: Cluster, keep: Path, estimate_s: float) -> None:
        self.cluster, self.keep = cluster, keep
        self._left_s, self._expected_s, self._took_s = estimate_s, 0.0, 0.0
        self.failed: list[str] = []

    def run(self, cell: Cell, order: int) -> Path | None:
        """The folder of the cell's run, made now or earlier; None if it failed each time."""
        folder = self.keep / cell.name
        if complete(folder):
            self.tell(cell.name, "kept", cell.estimate_s)
            return folder
        program = [*starter(cell.row, cell.hosts), sys.executable, "-m", "hvdtrain.resnet", *cell.flags(), "--run-dir"]
        words = [*program, str(folder)]

        def beside() -> contextlib.AbstractContextManager[None]:
            """One host alone would have caches, memory and clock of the whole machine, which four have to share."""
            alone = cell.hosts == 1
            return self.cluster.others_at(lambda other: [*program, other]) if alone else contextlib.nullcontext()

        def once(attempt: int) -> Path:
            shutil.rmtree(folder, ignore_errors=True)  # an attempt that did not end
            folder.mkdir(parents=True)
            records.write_document(folder / "point.json", records.as_json(point(cell, order, attempt, words)))
            hand_over(folder)
            with beside():
                self.cluster.run(words, self.keep / f"{cell.name}.log", patience_s(cell.estimate_s))
            trusted(cell, folder)
            return folder

        return self.attempts(cell.name, cell.rate, cell.estimate_s, once)

    def attempts(self, name: str, rate: int, estimate_s: float, once: Callable[[int], T]) -> T | None:
        """What `once(attempt)` returns at that rate; after a Failure again on a new cluster; None if each fails."""
        for attempt in range(1, ATTEMPTS + 1):
            began = time.monotonic()
            try:
                self.cluster.throttle(rate)
                found = once(attempt)
            except Failure as failure:
                self.tell(name, f"attempt {attempt} failed: {failure}", 0.0)
                self.cluster.again()
                continue
            self.tell(name, "done", estimate_s, time.monotonic() - began)
            return found
        self.failed.append(name)
        self._left_s -= estimate_s
        return None

    def tell(self, name: str, what: str, estimate_s: float, took_s: float | None = None) -> None:
        """A line on stderr; the estimate of what is left learns from how long runs took."""
        self._left_s -= estimate_s
        if took_s is not None:
            self._expected_s, self._took_s = self._expected_s + estimate_s, self._took_s + took_s
        factor = self._took_s / self._expected_s if self._expected_s else 1.0
        took = f" in {took_s:.0f} s" if took_s is not None else ""
        print(f"bench: {name}: {what}{took}; about {minutes(self._left_s * factor)} left", file=sys.stderr, flush=True)


def patience_s(estimate_s: float) -> float:
    """After which a run is taken to hang."""
    return 180 + 6 * estimate_s


def hand_over(folder: Path) -> None:
    """Gives a folder to who called sudo: the ranks run as that user."""
    if os.geteuid() == 0 and "SUDO_UID" in os.environ:
        os.chown(folder, int(os.environ["SUDO_UID"]), int(os.environ.get("SUDO_GID", -1)))


def minutes(seconds: float) -> str:
    whole = max(0, round(seconds / 60))
    return f"{whole // 60} h {whole % 60} min" if whole >= 60 else f"{whole} min"


def complete(folder: Path) -> bool:
    """Whether a run ended there: the folder's name says which, its manifest and COMPLETE that it is whole."""
    if not (folder / "COMPLETE").exists():
        return False
    try:
        return isinstance(records.read_document(folder / "manifest.json"), records.Manifest)
    except Failure:
        return False


def trusted(cell: Cell, folder: Path) -> None:
    """Raises Failure if a run of several hosts had a faster network than asked."""
    goodput = table.seen(folder, TARGET).goodput_mbit
    if goodput is not None and goodput > 1.2 * cell.rate / 1e6:
        raise Failure(f"{goodput:.4g} Mbit/s were measured at {show_rate(cell.rate)}: who took the throttle?")


def point(cell: Cell, order: int, attempt: int, words: Sequence[str]) -> records.Point:
    """Tells `hvdtrain results` which row it was: two starters may lead to the same config."""
    return records.Point(
        sweep="bench-strategies",
        point=cell.row.name,
        repeat=cell.seed,
        kind="timing",
        attempt=attempt,
        order=order,
        settings=cell.row.settings,
        command=list(words),
        rate_mbit=cell.rate / 1e6 if cell.hosts > 1 else None,
        rate_off_percent=None,
        marked="one epoch only, to time its steps" if cell.short else None,
    )
