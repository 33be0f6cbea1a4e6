"""What the doctor runs on each host: answers questions about that host, one JSON line each, until its input ends.

`agent` sends this file's text through ssh to a bare `python3` (3.7 or newer, standard library), so nothing is
installed or written there. Requests are lines `{"id": 1, "do": "facts", "with": {...}}` on standard input; answers
are lines on standard output that begin with MARK, because login shells print things of their own. Each request has
a thread, so that a host can listen and connect at once. When the input ends (the doctor or the connection is gone)
everything started here is ended too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pathlib
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import typing

if typing.TYPE_CHECKING:  # its text comes before this one
    from hvdtrain.system.link_probe import ask, listening, serve

MARK = "@hvdtrain-doctor "
PORT_RANGES = ((1024, 32767), (32768, 60999), (61000, 65535))
"""Horovod's runner takes ports from 1024 up at random, Gloo and Open MPI what the kernel gives (the middle one)"""

VERSIONS = """
import importlib.metadata, importlib.util, json, pathlib, platform, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
sys.path.insert(0, "")  # where `python -m` looks first; all imports are done
def folder(name):
    spec = importlib.util.find_spec(name)
    return str(pathlib.Path(spec.origin).resolve().parent) if spec and spec.origin else None
horovod = folder("horovod")
built = sorted({p.parent.name for p in pathlib.Path(horovod).glob("*/mpi_lib*.so")}) if horovod else []
print(json.dumps({"python": platform.python_version(), "prefix": sys.prefix, "packages": found,
                  "horovod_for": built, "code": folder("hvdtrain")}))
"""
"""Asked of the environment's own Python: what is installed there. Imports none of it."""


def output(command: list[str], **options: typing.Any) -> str | None:
    """The command's standard output; None if it failed, is missing or took more than 10 s."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, **options)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def interfaces() -> list[dict[str, typing.Any]]:
    """Name, first IPv4 address and state of each interface but loopback, as the kernel's ioctls tell (netdevice(7))."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = struct.unpack("H", fcntl.ioctl(door, 0x8913, request)[16:18])[0]  # SIOCGIFFLAGS
                address = socket.inet_ntoa(fcntl.ioctl(door, 0x8915, request)[20:24])  # SIOCGIFADDR
            except OSError:
                continue  # no IPv4 address
            if not flags & 0x8:  # IFF_LOOPBACK
                found.append({"name": name, "address": address, "up": bool(flags & 0x1), "carrier": bool(flags & 0x40)})
    return found


def resolve(name: str) -> list[str]:
    """The IPv4 addresses of a name, in the resolver's order; empty if there are none."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]


def code(folder: str) -> dict[str, typing.Any]:
    """SHA-256 of the package's Python files, and the commit they come from where git knows it."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    commit = output(["git", "-C", folder, "rev-parse", "--short=12", "HEAD"])
    changed = output(["git", "-C", folder, "status", "--porcelain", "--", "."])
    return {"folder": folder, "sha256": digest.hexdigest(), "commit": (commit or "").strip(), "changed": bool(changed)}


def disk(folder: pathlib.Path) -> dict[str, typing.Any]:
    """Where a run folder would be made, and what is free there."""
    place = next(path for path in (folder, *folder.parents) if os.path.isdir(str(path)))  # noqa: PTH112 (is_dir raises)
    free = shutil.disk_usage(str(place)).free
    return {"folder": str(place), "free_bytes": free, "writable": os.access(str(place), os.W_OK)}


def facts(python: str, packages: list[str], folder: str, run_folder: str, needed: list[str]) -> dict[str, typing.Any]:
    """All that is judged about this host. `needed` are programs; `folder` is where the job starts."""
    here = folder if pathlib.Path(folder).is_dir() else None
    found = output([python, "-P", "-c", VERSIONS, *packages], cwd=here) if os.access(python, os.X_OK) else None
    environment = json.loads(found) if found else None
    try:
        throttle = json.loads(pathlib.Path("/run/hvdtrain/self/throttle.json").read_text())
    except (OSError, ValueError):
        throttle = None
    return {
        "host": socket.gethostname(),
        "resolves_to": resolve(socket.gethostname()),
        "interfaces": interfaces(),
        "ssh_connection": os.environ.get("SSH_CONNECTION", "").split(),
        "cores": len(os.sched_getaffinity(0)),
        "disk": disk(pathlib.Path(folder, run_folder)),
        "folder": here,
        "missing": [program for program in needed if shutil.which(program) is None],
        "environment": environment,
        "code": code(environment["code"]) if environment and environment["code"] else None,
        "throttle": throttle,
    }


# --- links -----------------------------------------------------------------------------------------------------------


MOST_VISITORS = 64
"""At once, on all ports: a host asks three of each other's, and a stranger must not cost a thread each"""
VISIT_S = 10.0
VISITORS = threading.BoundedSemaphore(MOST_VISITORS)


def listen(address: str) -> list[int]:
    """One listening port of each range on this address, open until the input ends; who connects gets his bytes back."""
    ports = []
    for low, high in PORT_RANGES:
        for _ in range(20):
            door = socket.socket()
            try:
                door.bind((address, random.randint(low, high)))
                door.listen(socket.SOMAXCONN)
            except OSError:
                door.close()
                continue
            ports.append(door.getsockname()[1])
            threading.Thread(target=_accept, args=(door,), daemon=True).start()
            break
    return ports


def _accept(door: socket.socket) -> None:
    while True:
        VISITORS.acquire()
        try:
            visitor, _ = door.accept()
        except OSError:  # no descriptor is left
            VISITORS.release()
            time.sleep(0.1)
            continue
        threading.Thread(target=_echo, args=(visitor,), daemon=True).start()


def _echo(visitor: socket.socket) -> None:
    """Echoes bytes to one visitor, then frees the place that `_accept` took for it."""
    until_s = time.monotonic() + VISIT_S
    try:
        with visitor:
            visitor.settimeout(5)  # an agent sends at once
            while time.monotonic() < until_s:
                byte = visitor.recv(1)
                if not byte:
                    return
                visitor.sendall(byte)
    except OSError:
        return
    finally:
        VISITORS.release()


def connect(targets: list[list[typing.Any]], patience_s: float) -> list[dict[str, typing.Any]]:
    """Tries each (address, port) at once: how it went, the median of 9 round trips of a byte in ms, TCP's control."""
    results: list[dict[str, typing.Any]] = [{} for _ in targets]
    threads = [
        threading.Thread(target=_try, args=(address, port, patience_s, result))
        for (address, port), result in zip(targets, results)  # noqa: B905  (strict is not known to Python 3.9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _try(address: str, port: int, patience_s: float, result: dict[str, typing.Any]) -> None:
    result["result"] = "no answer"
    try:
        with socket.create_connection((address, port), patience_s) as door:
            door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(9):
                start_s = time.perf_counter()
                door.sendall(b".")
                if not door.recv(1):
                    return
                times.append(time.perf_counter() - start_s)
            control = door.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)  # the route may say another
            result.update(
                result="open", round_trip_ms=sorted(times)[4] * 1e3, congestion=control.split(b"\0")[0].decode()
            )
    except ConnectionRefusedError:
        result["result"] = "refused"
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        result["result"] = "no answer" if "timed out" in said else said


def serve_stream(address: str) -> int:
    """Serves one measurement on that address; the port."""
    door = listening(address)
    threading.Thread(target=serve, args=(door,), daemon=True).start()
    return int(door.getsockname()[1])


# --- questions and answers -------------------------------------------------------------------------------------------

QUESTIONS: dict[str, typing.Callable[..., typing.Any]] = {
    "facts": facts,
    "clock": time.time,
    "listen": listen,
    "connect": connect,
    "serve_stream": serve_stream,
    "measure_stream": lambda **asked: ask(**asked),
}


def answer_questions() -> None:
    """Says hello and answers until the input ends."""
    lock = threading.Lock()

    def say(**answer: typing.Any) -> None:
        with lock:
            sys.stdout.write(MARK + json.dumps(answer) + "\n")
            sys.stdout.flush()

    def work(request: dict[str, typing.Any]) -> None:
        try:
            say(id=request["id"], answer=QUESTIONS[request["do"]](**request["with"]))
        except Exception as error:
            say(id=request["id"], error=type(error).__name__ + ": " + str(error))

    try:
        say(id=0, answer="hello")
        while True:
            line = sys.stdin.readline()
            if not line:
                break
            threading.Thread(target=work, args=(json.loads(line),), daemon=True).start()
    finally:
        os._exit(0)
