"""The script that the doctor runs on each host. It answers questions about that host until its input ends.

`agent` sends this file's text over ssh to a bare `python3` (3.7 or newer, standard library), so nothing is installed or
written there. Requests are lines `{"id": 1, "do": "facts", "with": {...}}` on standard input. Answers are lines on
standard output that begin with MARK, because a login shell may print other text. Each request has its own thread, so a
host can listen and connect at the same time. When the input ends (the doctor or the connection is gone), the script
and its threads end.
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

if typing.TYPE_CHECKING:  # the agent sends the text of both before this one
    from hvdtrain.system.cgroup import process_cores
    from hvdtrain.system.link_probe import ask, listening, serve

MARK = "@hvdtrain-doctor "
PORT_RANGES = ((1024, 32767), (32768, 60999), (61000, 65535))
"""Ranges of ports. Horovod's runner uses random ones from 1024; Gloo and Open MPI use the kernel's (the second)."""

VERSIONS = """
import importlib.metadata, importlib.util, json, pathlib, platform, sys
packages = {}
for name in sys.argv[1:]:
    try:
        packages[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
sys.path.insert(0, "")  # where `python -m` looks first; all imports are done
def folder(name):
    spec = importlib.util.find_spec(name)
    return str(pathlib.Path(spec.origin).resolve().parent) if spec and spec.origin else None
horovod = folder("horovod")
libraries = [*pathlib.Path(horovod).glob("*/mpi_lib*.so")] if horovod else []
built = sorted({p.parent.name for p in libraries})
needs_mpi = any(b"libmpi." in p.read_bytes() for p in libraries)
print(json.dumps({"python": platform.python_version(), "prefix": sys.prefix, "packages": packages,
                  "horovod_for": built, "horovod_needs_mpi": needs_mpi, "code": folder("hvdtrain")}))
"""
"""Program for the environment's own Python: prints the installed packages without importing them."""


def output(command: list[str], **options: typing.Any) -> str | None:
    """The command's standard output. None if it failed, is missing or took more than 10 s."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, **options)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def interfaces() -> list[dict[str, typing.Any]]:
    """Name, first IPv4 address, state, MTU and speed of each interface except loopback (netdevice(7))."""
    result = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                flags = struct.unpack("H", fcntl.ioctl(control, 0x8913, request)[16:18])[0]  # SIOCGIFFLAGS
                address = socket.inet_ntoa(fcntl.ioctl(control, 0x8915, request)[20:24])  # SIOCGIFADDR
            except OSError:
                continue  # no IPv4 address
            if not flags & 0x8:  # IFF_LOOPBACK
                state = {"up": bool(flags & 0x1), "carrier": bool(flags & 0x40)}
                about = pathlib.Path("/sys/class/net", name)
                hardware = (about / "device").exists()  # others claim any speed
                result.append(
                    {
                        "name": name,
                        "address": address,
                        **state,
                        "mtu_bytes": _number(name, "mtu"),
                        "speed_mbit": _number(name, "speed") if hardware else None,
                        "kind": _kind(about, hardware),
                    }
                )
    return result


def _kind(about: pathlib.Path, hardware: bool) -> str | None:
    """Return the kind of an interface: wifi, vpn (WireGuard, or a tunnel as Tailscale and OpenVPN make it) or cable."""
    if (about / "wireless").exists() or (about / "phy80211").exists():
        return "wifi"
    if (about / "tun_flags").exists() or "wireguard" in (about / "uevent").read_text():
        return "vpn"
    return "cable" if hardware else None


def _number(interface: str, name: str) -> int | None:
    """A number from sysfs. None if the kernel does not know it, as the speed of many virtual machines' interfaces."""
    try:
        number = int(pathlib.Path("/sys/class/net", interface, name).read_text())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def resolve(name: str) -> list[str]:
    """The IPv4 addresses of a name, in the resolver's order. Empty if the name is unknown."""
    try:
        entries = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in entries]


def code(folder: str) -> dict[str, typing.Any]:
    """SHA-256 of the package's Python files, and their commit if git knows it."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    commit = output(["git", "-C", folder, "rev-parse", "--short=12", "HEAD"])
    changed = output(["git", "-C", folder, "status", "--porcelain", "--", "."])
    return {"folder": folder, "sha256": digest.hexdigest(), "commit": (commit or "").strip(), "changed": bool(changed)}


def disk(folder: pathlib.Path) -> dict[str, typing.Any]:
    """The existing folder in which a run folder would be created, and its free space."""
    parent = next(path for path in (folder, *folder.parents) if os.path.isdir(str(path)))  # noqa: PTH112 (is_dir raises)
    free = shutil.disk_usage(str(parent)).free
    return {"folder": str(parent), "free_bytes": free, "writable": os.access(str(parent), os.W_OK)}


def size_of(path: str) -> list[int] | None:
    """Bytes and number of the files at a path, or None if nothing is there."""
    if os.path.isfile(path):  # noqa: PTH113 (is_file raises)
        return [os.path.getsize(path), 1]  # noqa: PTH202
    files = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names]  # noqa: PTH118
    sizes = [os.lstat(name).st_size for name in files]
    return [sum(sizes), len(sizes)] if os.path.isdir(path) else None  # noqa: PTH112


def has_battery() -> bool:
    """Whether a battery powers this computer. Batteries of mice and keyboards have a scope."""
    supplies = pathlib.Path("/sys/class/power_supply").glob("*/type")
    return any(kind.read_text() == "Battery\n" and not (kind.parent / "scope").exists() for kind in supplies)


def facts(
    python: str, packages: list[str], folder: str, run_folder: str, needed: list[str], paths: list[str]
) -> dict[str, typing.Any]:
    """Facts about this host. `needed`: names of programs. `folder`: where the job starts. `paths`: what it reads."""
    here = folder if pathlib.Path(folder).is_dir() else None
    versions = output([python, "-P", "-c", VERSIONS, *packages], cwd=here) if os.access(python, os.X_OK) else None
    environment = json.loads(versions) if versions else None
    try:
        throttle = json.loads(pathlib.Path("/run/hvdtrain/self/throttle.json").read_text())
    except (OSError, ValueError):
        throttle = None
    return {
        "host": socket.gethostname(),
        "resolves_to": resolve(socket.gethostname()),
        "interfaces": interfaces(),
        "ssh_connection": os.environ.get("SSH_CONNECTION", "").split(),
        "cores": process_cores(),
        "wsl": "microsoft" in os.uname().release.lower(),
        "disk": disk(pathlib.Path(folder, run_folder)),
        "folder": here,
        "paths": {path: size_of(os.path.join(folder, path)) for path in paths},  # noqa: PTH118
        "battery": has_battery(),
        "missing": [program for program in needed if shutil.which(program) is None],
        "environment": environment,
        "code": code(environment["code"]) if environment and environment["code"] else None,
        "throttle": throttle,
    }


# --- links -----------------------------------------------------------------------------------------------------------


def listen(address: str) -> list[int]:
    """Listen on one port of each range until the input ends, and close each connection. Returns the ports."""
    ports = []
    for low, high in PORT_RANGES:
        for _ in range(20):
            listener = socket.socket()
            try:
                listener.bind((address, random.randint(low, high)))
                listener.listen(socket.SOMAXCONN)
            except OSError:
                listener.close()
                continue
            ports.append(listener.getsockname()[1])
            threading.Thread(target=_accept, args=(listener,), daemon=True).start()
            break
    return ports


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:  # no file descriptor is free
            time.sleep(0.1)


def connect(targets: list[list[typing.Any]], patience_s: float) -> list[dict[str, typing.Any]]:
    """Connect to each (address, port) at the same time.

    A result has the outcome, and for an open port the median of 15 round trips (ms) and the time that 12 of them took
    at most: a handshake is one. They are spread over 0.3 s, because Wi-Fi delays some packets and not others.
    """
    results: list[dict[str, typing.Any]] = [{} for _ in targets]
    threads = [
        threading.Thread(target=_try, args=(address, port, patience_s, result))
        for (address, port), result in zip(targets, results)  # noqa: B905  (Python 3.9 has no `strict`)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _try(address: str, port: int, patience_s: float, result: dict[str, typing.Any]) -> None:
    result["result"] = "no answer"
    try:
        times = []
        for _ in range(15):
            start_s = time.perf_counter()
            socket.create_connection((address, port), patience_s).close()
            times.append(1e3 * (time.perf_counter() - start_s))
            time.sleep(0.02)
        times.sort()
        result.update(result="open", round_trip_ms=times[7], slow_round_trip_ms=times[11])
    except ConnectionRefusedError:
        result["result"] = "refused"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        result["result"] = "no answer" if "timed out" in reason else reason


def serve_stream(address: str) -> int:
    """Serve one measurement on this address. Returns the port."""
    listener = listening(address)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    return int(listener.getsockname()[1])


# --- questions and answers -------------------------------------------------------------------------------------------

QUESTIONS: dict[str, typing.Callable[..., typing.Any]] = {
    "facts": facts,
    "clock": time.time,
    "resolve": lambda names: {name: resolve(name) for name in names},
    "listen": listen,
    "connect": connect,
    "serve_stream": serve_stream,
    "measure_stream": lambda **arguments: ask(**arguments),
}


def answer_questions() -> None:
    """Announce that the probe runs, then answer until the input ends."""
    lock = threading.Lock()

    def send(**answer: typing.Any) -> None:
        with lock:
            sys.stdout.write(MARK + json.dumps(answer) + "\n")
            sys.stdout.flush()

    def handle(request: dict[str, typing.Any]) -> None:
        try:
            send(id=request["id"], answer=QUESTIONS[request["do"]](**request["with"]))
        except Exception as error:
            send(id=request["id"], error=type(error).__name__ + ": " + str(error))

    try:
        send(id=0, answer="hello")
        while True:
            line = sys.stdin.readline()
            if not line:
                break
            threading.Thread(target=handle, args=(json.loads(line),), daemon=True).start()
    finally:
        os._exit(0)
