"""Power and resource monitors: one sampler process per host, whatever the number of ranks.

This front is all that a rank loads: it starts the sampler, tells it on its standard input what to watch, and ends it.
The sampler (`sampler.py`) reads sensors (`rapl.py`, `nvml.py`) and counters (`resources.py`) and writes
`monitors/<host>.jsonl`. It is a process of its own, so that training shares neither thread nor interpreter lock with
it; whatever goes wrong in it costs samples, never the run. `python -m hvdtrain.monitors` shows what can be measured.
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
"""How long the sampler may take to find its sensors: without its persistence daemon an NVIDIA driver needs seconds"""
END_S = 5.0
ROOT = str(Path(__file__).resolve().parent.parent.parent)


def powercap_root() -> str:
    """Where the kernel's power zones are: HVDTRAIN_POWERCAP for containers that have them elsewhere."""
    return os.environ.get("HVDTRAIN_POWERCAP") or POWERCAP


def offer(rank: int, device: str) -> dict[str, Any]:
    """What a sampler must know of this rank. `device` is as its framework names it: `cpu`, `cuda:0`, `gpu:0`."""
    return {
        "host": socket.gethostname(),
        "rank": rank,
        "pid": os.getpid(),
        "device": device,
        # what the device's number counts
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
        # whose energy it is: hosts may be parts of one machine, and containers there have GPUs of their own
        "machine": _boot_id(),
        "gpus": _gpus(),
    }


def _boot_id() -> str:
    """Tells machines apart; equal for all virtual hosts and containers on one."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _gpus() -> list[str]:
    """The NVIDIA GPUs that this host sees, by PCI address."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in Path("/proc/driver/nvidia/gpus").iterdir())
    return []


def parts(host: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the sampler of `host` has to do with `ranks`, the offers of the whole job in rank order.

    `ranks` of this host, `neighbours` on its machine and `sharing` its GPUs, both with themselves; and which host's
    sampler records the energy of the CPUs and of the GPUs, the first that has them, so that each joule is counted once.
    """
    mine = [rank for rank in ranks if rank["host"] == host]
    neighbours = [rank for rank in ranks if rank["machine"] == mine[0]["machine"]]
    sharing = [rank for rank in neighbours if rank["gpus"] == mine[0]["gpus"]]
    recorder = {"cpu": neighbours[0]["host"], "gpu": sharing[0]["host"]}
    return {"ranks": mine, "neighbours": neighbours, "sharing": sharing, "recorder": recorder}


class Monitor:
    """The sampler of this host, told by one of its ranks; a context manager whose block is what is measured.

    Making it starts the sampler and, with `idle_s`, waits so many seconds while it measures the idle power: the ranks
    should do nothing then. The first reading is taken when the block is entered, the last one when it is left, so the
    samples tile the block. `ranks`: the offers of all ranks of the job, in order.
    """

    def __init__(
        self, names: str, folder: Path, *, interval_ms: int, idle_s: float, ranks: Sequence[dict[str, Any]]
    ) -> None:
        self._host = socket.gethostname()
        order = {
            "monitors": [name for name in ("power", "resources") if name in names.split(",")],
            "path": str((folder / "monitors" / f"{self._host}.jsonl").absolute()),
            "host": self._host,
            "interval_s": interval_ms / 1000,
            "idle_s": idle_s,
            "powercap": powercap_root(),
            **parts(self._host, ranks),
        }
        program = f"import sys; sys.path.append({ROOT!r}); from hvdtrain.monitors.sampler import main; main()"
        command = [sys.executable, "-P", "-c", program, f"hvdtrain-monitor of process {os.getpid()}"]
        self.nothing: str | None = None
        """What was asked for and cannot be measured here at all, and why: a line for people"""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            # In a session of its own, since launchers and terminals signal a rank's whole process group.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
            )
        except OSError as error:
            say(self._host, f"cannot start: {error.strerror}")
            return
        self._tell(json.dumps(order))
        self.nothing = self._await("ready", START_S + idle_s) or None

    def __enter__(self) -> Monitor:
        self._tell("begin")
        self._await("began", END_S)
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the last reading and ends the sampler; waits 5 s at most."""
        self._tell("end")
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            say(self._host, f"did not end within {END_S:g} s; its last samples are missing")
            _kill(process)
        else:
            if process.returncode:  # the kernel's out-of-memory killer, say
                say(self._host, f"ended early ({process.returncode}); samples are missing from then on")
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def _tell(self, word: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(word.encode() + b"\n")

    def _await(self, word: str, patience_s: float) -> str:
        """Waits for the sampler's word; what it adds. One that has failed has said so on stderr and closed its end."""
        if self._process is None or self._process.stdout is None:
            return ""
        stream, deadline_s, heard = self._process.stdout, time.monotonic() + patience_s, b""
        while not heard.endswith(b"\n"):
            if not select.select([stream], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                late = f"not {word} within {patience_s:g} s (a sensor's driver hangs?)"
                say(self._host, f"{late}; the run goes on without it")
                _kill(self._process)
                self._process = None
                return ""
            part = stream.read(4096)
            if not part:
                return ""
            heard += part
        return heard.decode().removeprefix(word).strip()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs holds it even then
        process.wait(1.0)


def say(host: str, message: str) -> None:
    with contextlib.suppress(OSError):  # stderr may have gone with the rank
        print(f"hvdtrain: monitor on {host}: {message}", file=sys.stderr, flush=True)
