"""Power and resource monitors: one sampler process per host, for any number of ranks.

A rank loads only this module. It starts the sampler, sends commands to its standard input, and ends it. The sampler
(`sampler.py`) reads sensors (`rapl.py`, `nvml.py`) and counters (`resources.py`) and writes `monitors/<host>.jsonl`. It
is a separate process, so it shares neither a thread nor the interpreter lock with training. If it fails, samples are
missing, but the run continues. `python -m hvdtrain.monitors` shows what this host can measure.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

POWERCAP = "/sys/class/powercap"
START_S = 20.0
"""Time limit for the sampler to open its sensors. Without its persistence daemon, an NVIDIA driver needs seconds"""
END_S = 5.0
INTERVAL_S = 0.5
"""Between two samples"""
ROOT = str(Path(__file__).resolve().parent.parent.parent)


def powercap_root() -> str:
    """Folder of the kernel's power zones. Containers with another mount point set HVDTRAIN_POWERCAP."""
    return os.environ.get("HVDTRAIN_POWERCAP") or POWERCAP


def describe_rank(rank: int, device: str) -> dict[str, Any]:
    """Describes this rank to a sampler. `device` is the framework's name: `cpu`, `cuda:0`, `gpu:0`."""
    return {
        "host": socket.gethostname(),
        "rank": rank,
        "pid": os.getpid(),
        "device": device,
        # These variables map the device number to a GPU.
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
        # Several hosts may share one machine. Containers on it may have different GPUs.
        "machine": _boot_id(),
        "gpus": _gpus(),
    }


def _boot_id() -> str:
    """Identifies the machine. All virtual hosts and containers on a machine have the same ID."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _gpus() -> list[str]:
    """PCI addresses of the NVIDIA GPUs that this host sees."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in Path("/proc/driver/nvidia/gpus").iterdir())
    return []


def assign(host: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The tasks of the sampler on `host`. `ranks` has the description of every rank of the job, in order.

    Returns `ranks` on this host, `neighbours` on the same machine, and the neighbours `sharing` its GPUs. `recorder`
    names the hosts that record the energy of the CPUs and of the GPUs. This is the first host that sees them, so that
    each joule is counted once.
    """
    local = [rank for rank in ranks if rank["host"] == host]
    neighbours = [rank for rank in ranks if rank["machine"] == local[0]["machine"]]
    sharing = [rank for rank in neighbours if rank["gpus"] == local[0]["gpus"]]
    recorder = {"cpu": neighbours[0]["host"], "gpu": sharing[0]["host"]}
    return {"ranks": local, "neighbours": neighbours, "sharing": sharing, "recorder": recorder}


class Monitor:
    """Controls the sampler of this host. One rank per host uses it as a context manager around the measured code.

    The constructor starts the sampler. With `idle_s`, it also waits that many seconds while the sampler measures idle
    power; the ranks should do nothing during this time. The sampler takes its first reading when the block is entered
    and its last one when the block is left, so the samples cover the block without gaps. `ranks` has the descriptions
    of all ranks of the job, in order.
    """

    def __init__(
        self,
        names: str,
        folder: Path,
        *,
        idle_s: float,
        ranks: Sequence[dict[str, Any]],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._host = socket.gethostname()
        order = {
            "monitors": [name for name in ("power", "resources") if name in names.split(",")],
            "path": str((folder / "monitors" / f"{self._host}.jsonl").absolute()),
            "host": self._host,
            "interval_s": interval_s,
            "idle_s": idle_s,
            "powercap": powercap_root(),
            **assign(self._host, ranks),
        }
        program = f"import sys; sys.path.append({ROOT!r}); from hvdtrain.monitors.sampler import main; main()"
        command = [sys.executable, "-P", "-c", program, f"hvdtrain-monitor of process {os.getpid()}"]
        self.unavailable: str | None = None
        """One line for the user if a requested monitor has nothing to measure on this host"""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            # It has its own session, since launchers and terminals signal the whole process group of a rank.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
            )
        except OSError as error:
            say(self._host, f"cannot start: {error.strerror}")
            return
        self._send(json.dumps(order))
        self.unavailable = self._wait_for("ready", START_S + idle_s) or None

    def __enter__(self) -> Monitor:
        self._send("begin")
        self._wait_for("began", END_S)
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the last reading and ends the sampler. Waits at most 5 s."""
        self._send("end")
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            say(self._host, f"did not end within {END_S:g} s; its last samples are missing")
            _kill(process)
        else:
            if process.returncode:  # for example, killed when the machine ran out of memory
                say(self._host, f"ended early ({process.returncode}); later samples are missing")
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line.encode() + b"\n")

    def _wait_for(self, word: str, timeout_s: float) -> str:
        """Waits for a line that starts with `word` and returns its rest.

        A sampler that has failed has already printed the reason and closed its output.
        """
        if self._process is None or self._process.stdout is None:
            return ""
        stream, deadline_s, received = self._process.stdout, time.monotonic() + timeout_s, b""
        while not received.endswith(b"\n"):
            if not select.select([stream], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                problem = f"not {word} within {timeout_s:g} s (is the driver of a sensor blocked?)"
                say(self._host, f"{problem}; the run continues without it")
                _kill(self._process)
                self._process = None
                return ""
            part = stream.read(4096)
            if not part:
                return ""
            received += part
        return received.decode().removeprefix(word).strip()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a blocked driver delays even SIGKILL
        process.wait(1.0)


def say(host: str, message: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed if the rank has ended
        print(f"hvdtrain: monitor on {host}: {message}", file=sys.stderr, flush=True)
