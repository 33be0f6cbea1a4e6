"""Atomic changes to links: all of a command's changes are made, or none, whichever process is killed.

A change is recorded before it is made, in a journal as databases use. The journal holds the previous state of every
link. A watchdog process reads from a pipe; the command and every `tc` that it starts hold the other end. The watchdog
has its own session (it forks twice), so killing the command's process group does not reach it. When the command and its
children are gone, the kernel closes the pipe. If the journal still exists, the change was not finished, and the
watchdog undoes it, last step first. If the watchdog is killed as well, the next command (`clear` or a new rate) finds
the journal and undoes it.

The same process ends a throttle whose time is up (`--for`).

Two kinds of file in /run/hvdtrain, mode 0644, so that any user may read them:

    throttle-state.json    the original queues, the current shapes, the journal
    throttle.json          the requested rates, one file per host (`net.requested_throttle` reads it)

A lock (flock(2)) on the folder allows one change at a time. The kernel releases it when its holder ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.lab.throttle.links import Link, difference, plan
from hvdtrain.lab.throttle.qdisc import Shape
from hvdtrain.system import exits, files
from hvdtrain.system.commands import Command, run
from hvdtrain.system.exits import Failure

SCHEMA = "hvdtrain/throttle-state/1"
PATIENCE_S = 15.0
POLL_S = 0.5
"""How often a waiting watchdog checks whether it is still needed."""

State = dict[str, Any]
"""{"schema", "links": {key: link}, "files": {path: text before the first throttle}, "change": journal or None}"""


# --- recorded state --------------------------------------------------------------------------------------------------


def _remove(path: Path) -> None:
    """Remove a file, and the temporary file of a killed writer."""
    path.unlink(missing_ok=True)
    files.part_of(path).unlink(missing_ok=True)


def _put(path: Path, text: str | None) -> None:
    if text is None:
        _remove(path)
    elif path.parent.is_dir():
        files.replace_text(path, text)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


@dataclasses.dataclass(frozen=True)
class Store:
    """The folder with the state of the links of a cluster, or of this machine."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "throttle-state.json"

    def load(self) -> State:
        """Raises Failure (65) if the file is not a valid state."""
        try:
            state: State = files.from_json(files.read(self.path, files.SETTINGS_BYTES))
            journal = state["change"] or {"token": "", "links": [], "files": {}}
            for link in (*state["links"].values(), *journal["links"]):
                Link.from_json(link)
            texts = [*state["files"].values(), *journal["files"].values(), journal["token"]]
            if not all(text is None or isinstance(text, str) for text in texts):
                raise ValueError("a file's text is not a string")
        except FileNotFoundError:
            return {"schema": SCHEMA, "links": {}, "files": {}, "change": None}
        except OSError as error:
            raise files.refused(self.path, error, exits.IO_ERROR, "check the path") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            hint = "hint: check the queues with `tc qdisc show`, then remove the file"
            raise Failure(f"{self.path} is damaged ({error}); {hint}", exits.BAD_DATA) from None
        return state

    def save(self, state: State) -> None:
        if state["links"] or state["change"]:
            files.replace_text(self.path, json.dumps(state, indent=1) + "\n")
        else:
            _remove(self.path)

    def links(self) -> dict[str, Link]:
        """The throttled links, by key."""
        return {key: Link.from_json(link) for key, link in self.load()["links"].items()}

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock until the block ends, or until a watchdog that was started inside it closes the lock."""
        handle = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        message = f"another throttle command has held the lock of {self.folder} for {PATIENCE_S:.0f} s"
                        raise Failure(f"{message}; hint: wait until it ends, or stop it") from None
                    time.sleep(0.02)
            yield handle
        finally:
            os.close(handle)


# --- changes ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LinkChange:
    """A link and its new shape. None restores the original queue."""

    link: Link
    shape: Shape | None


def change(
    store: Store, lock: int, changes: list[LinkChange], files: Mapping[Path, str | None], for_s: float | None
) -> None:
    """Make all changes and write the files, or leave everything unchanged. A file's text None restores the original.

    After `for_s` seconds the original state is restored. The caller holds the store's lock (`lock`) and has undone an
    interrupted change (`undo`). Raises Failure with tc's own message; nothing is changed then.
    """
    state, token = store.load(), secrets.token_hex(8)
    until = (datetime.now(UTC) + timedelta(seconds=for_s)).isoformat(timespec="seconds") if for_s else None
    after, originals = dict(state["links"]), dict(state["files"])
    for one in changes:
        after.pop(one.link.key, None)
        if one.shape:
            new = dataclasses.replace(one.link, shape=one.shape, token=token, until_utc=until)
            after[new.key] = dataclasses.asdict(new)
    texts: dict[Path, str | None] = {}
    for path, text in files.items():
        if text is None:
            texts[path] = originals.pop(str(path), None)
        else:
            originals.setdefault(str(path), _text(path))
            texts[path] = text
    shapes = {key: link["shape"] for key, link in state["links"].items()}
    journal = {
        "links": [{**dataclasses.asdict(one.link), "shape": shapes.get(one.link.key)} for one in changes],
        "files": {str(path): _text(path) for path in texts},
    }
    pipe = _start_watchdog(store, lock, token, for_s)
    try:
        store.save({**state, "change": {"token": token, **journal}})
        for one in changes:
            for command in plan(one.link, one.shape):
                _run_with_pipe(command, pipe)
        for path, text in texts.items():
            _put(path, text)
        store.save({**state, "links": after, "files": originals, "change": None})
    except BaseException:
        undo(store)
        raise
    finally:
        os.close(pipe)


def undo(store: Store) -> bool:
    """Undo an unfinished change, last step first. False if there is none. The caller holds the lock."""
    state = store.load()
    journal = state["change"]
    if not journal:
        return False
    for document in reversed(journal["links"]):
        link = Link.from_json(document)
        for command in plan(link, link.shape):
            run(command)
    for path, text in journal["files"].items():
        _put(Path(path), text)
    store.save({**state, "change": None})
    return True


MODULES = {
    "tbf": "sch_tbf",
    "ingress": "sch_ingress",
    "u32": "cls_u32 and act_mirred",
    "ifb": "ifb",
}
"""Kernel module that each word of a tc command needs."""
UNKNOWN = ("kind is unknown", "TC classifier not found", "Unknown device type", "not supported")


def _run_with_pipe(command: Command, pipe: int) -> None:
    """Run a command that inherits the pipe, so that the watchdog waits for it even if this process is gone."""
    try:
        run(command, pass_fds=(pipe,))
    except Failure as failure:
        if not any(words in str(failure) for words in UNKNOWN):
            raise
        module = next((MODULES[word] for word in reversed(command) if word in MODULES), "its module")
        load = f"sudo modprobe -a {module.replace(' and', '')}"
        raise Failure(f"this kernel has no {module} ({failure}); hint: try {load}", failure.code) from None


# --- the watchdog ----------------------------------------------------------------------------------------------------


def _start_watchdog(store: Store, lock: int, token: str, for_s: float | None) -> int:
    """Start the watchdog and return the pipe's write end. It keeps the lock until the change is made or undone."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()  # before the command continues: killing its process group must not reach the watchdog
            if os.fork() == 0:
                os.close(write_end)
                _watch(store, lock, read_end, token, for_s)
        finally:
            os._exit(0)
    os.close(read_end)
    os.waitpid(child, 0)
    return write_end


def _watch(store: Store, lock: int, read_end: int, token: str, for_s: float | None) -> NoReturn:
    """Wait for the command's end, undo an unfinished change, and remove the throttle when its time is up."""
    until = time.clock_gettime(time.CLOCK_BOOTTIME) + for_s if for_s else None  # also counts while a laptop sleeps
    code = 1
    try:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _detach(keep={lock, read_end})
        os.read(read_end, 1)
        journal = store.load()["change"]
        if journal and journal["token"] == token:
            undo(store)
        os.close(lock)
        if until is not None:
            _expire(store, token, until)
        code = 0
    finally:
        os._exit(code)  # skips the handlers and buffers copied from the command
    raise AssertionError


def _detach(keep: set[int]) -> None:
    """Close the command's streams and files, because a shell that reads the command's output waits for their end."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers, not paths
        if number > 2 and number not in keep:
            with contextlib.suppress(OSError):
                os.close(number)


def _expire(store: Store, token: str, until: float) -> None:
    while (left := until - time.clock_gettime(time.CLOCK_BOOTTIME)) > 0:
        time.sleep(min(left, POLL_S))
        if not any(link.token == token and link.until_utc for link in store.links().values()):
            return  # another command cleared it, made it permanent or replaced it
    with store.locked() as lock:
        undo(store)
        clear(store, lock, [link for link in store.links().values() if link.token == token and link.until_utc])


def clear(store: Store, lock: int, links: list[Link]) -> list[str]:
    """Restore links. Returns a line for each device whose queues differ from the original ones.

    A host's throttle.json is removed, or restored, when none of its links remains throttled. The caller holds the lock.
    """
    state = store.load()
    cleared = {link.key for link in links}
    throttled = {link["host"] for key, link in state["links"].items() if key not in cleared}
    hosts = {link.host for link in links} - throttled
    files: dict[Path, str | None] = {Path(path): None for path in state["files"] if Path(path).parent.name in hosts}
    if not throttled:
        files = {Path(path): None for path in state["files"]}
    change(store, lock, [LinkChange(link, None) for link in links], files, None)
    return [line for link in links if (line := difference(link))]
