"""Changes to links that are made whole or not at all, whatever is killed in between.

A change is written down before it is made (a journal, as in databases): for every link what it was and what it becomes.
A process that no kill reaches by accident (its own session, started by fork(2) twice) holds one end of a pipe; the
command and every `tc` it starts hold the other. When all of them are gone, the kernel closes the pipe, and the watchdog
looks: a journal that is still there was not finished, so it is undone, last step first. If the watchdog is killed too,
the next command (`clear`, or a new rate) finds the journal and undoes it.

The same process ends a throttle whose time is up (`--for`).

In a folder of /run/hvdtrain, mode 0644, so that everybody may look:

    throttle-state.json    the queues that were there before the first throttle, what is set, the journal
    throttle.json          what was asked, one per host (`throttle.asked` reads it)

The folder itself is the lock (flock(2)): one change at a time. The kernel lets go of it when its holder dies.
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
LOOK_S = 0.5
"""How often a waiting watchdog looks whether it is still needed"""

State = dict[str, Any]
"""{"schema", "links": {key: link}, "files": {path: text before the first throttle}, "change": journal or None}"""


# --- what is written down --------------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    """Replaces the file in one step (rename(2)); all may read it, whatever the umask."""
    part = _part(path)
    part.write_text(text)
    part.chmod(0o644)
    part.rename(path)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _remove(path: Path) -> None:
    """Removes the file, and what a killed `write` may have left."""
    path.unlink(missing_ok=True)
    _part(path).unlink(missing_ok=True)


def _put(path: Path, text: str | None) -> None:
    if text is None:
        _remove(path)
    elif path.parent.is_dir():
        write(path, text)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


@dataclasses.dataclass(frozen=True)
class Store:
    """The folder that remembers the links of a cluster, or of this machine."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "throttle-state.json"

    def load(self) -> State:
        """Raises Failure (65) for a file that is no journal of ours."""
        try:
            state: State = files.from_json(files.read(self.path, files.SETTINGS_BYTES))
            journal = state["change"] or {"token": "", "links": [], "files": {}}
            for link in (*state["links"].values(), *journal["links"]):
                Link.from_json(link)
            texts = [*state["files"].values(), *journal["files"].values(), journal["token"]]
            if not all(text is None or isinstance(text, str) for text in texts):
                raise ValueError("a text is none")
        except FileNotFoundError:
            return {"schema": SCHEMA, "links": {}, "files": {}, "change": None}
        except OSError as error:
            raise files.refused(self.path, error, exits.IO_ERROR, "look at what is there") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            hint = "look at the queues with `tc qdisc show`, then remove the file"
            raise Failure(f"{self.path} is damaged ({error}): {hint}", exits.BAD_DATA) from None
        return state

    def save(self, state: State) -> None:
        if state["links"] or state["change"]:
            write(self.path, json.dumps(state, indent=1) + "\n")
        else:
            _remove(self.path)

    def links(self) -> dict[str, Link]:
        """The links that are set now, by key."""
        return {key: Link.from_json(link) for key, link in self.load()["links"].items()}

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Alone until the end of the block, or until a watchdog that was started in it lets go."""
        handle = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        what = f"another throttle command has been at work in {self.folder} for {PATIENCE_S:.0f} s"
                        raise Failure(f"{what}; wait for it, or end it") from None
                    time.sleep(0.02)
            yield handle
        finally:
            os.close(handle)


# --- changes ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wish:
    """A link and the shape that it is to have; None: what it was found with."""

    link: Link
    shape: Shape | None


def change(store: Store, lock: int, wishes: list[Wish], files: Mapping[Path, str | None], for_s: float | None) -> None:
    """Makes all wishes true and writes the files (None: as before the first throttle), or leaves everything as it was.

    After `for_s` seconds what was found is put back. The caller holds the store's lock (`lock`) and has undone what was
    interrupted (`undo`). Raises Failure with tc's own words; nothing is changed then.
    """
    state, token = store.load(), secrets.token_hex(8)
    until = (datetime.now(UTC) + timedelta(seconds=for_s)).isoformat(timespec="seconds") if for_s else None
    after, originals = dict(state["links"]), dict(state["files"])
    for wish in wishes:
        after.pop(wish.link.key, None)
        if wish.shape:
            new = dataclasses.replace(wish.link, shape=wish.shape, token=token, until_utc=until)
            after[new.key] = dataclasses.asdict(new)
    texts: dict[Path, str | None] = {}
    for path, text in files.items():
        if text is None:
            texts[path] = originals.pop(str(path), None)
        else:
            originals.setdefault(str(path), _text(path))
            texts[path] = text
    now = {key: link["shape"] for key, link in state["links"].items()}
    journal = {
        "links": [{**dataclasses.asdict(wish.link), "shape": now.get(wish.link.key)} for wish in wishes],
        "files": {str(path): _text(path) for path in texts},
    }
    held = _start_watchdog(store, lock, token, for_s)
    try:
        store.save({**state, "change": {"token": token, **journal}})
        for wish in wishes:
            for command in plan(wish.link, wish.shape):
                _run_held(command, held)
        for path, text in texts.items():
            _put(path, text)
        store.save({**state, "links": after, "files": originals, "change": None})
    except BaseException:
        undo(store)
        raise
    finally:
        os.close(held)


def undo(store: Store) -> bool:
    """Undoes a change that was not finished, last step first; False if there is none. The caller holds the lock."""
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
    "netem": "sch_netem",
    "ingress": "sch_ingress",
    "u32": "cls_u32 and act_mirred",
    "ifb": "ifb",
}
UNKNOWN = ("kind is unknown", "TC classifier not found", "Unknown device type", "not supported")


def _run_held(command: Command, held: int) -> None:
    """Runs it with the pipe's end open, so that the watchdog waits for it even if this process is gone."""
    try:
        run(command, pass_fds=(held,))
    except Failure as failure:
        if not any(words in str(failure) for words in UNKNOWN):
            raise
        missing = next((MODULES[word] for word in reversed(command) if word in MODULES), "its module")
        load = f"sudo modprobe -a {missing.replace(' and', '')}"
        raise Failure(f"this kernel lacks {missing}; try: {load} ({failure})", failure.code) from None


# --- the watchdog ----------------------------------------------------------------------------------------------------


def _start_watchdog(store: Store, lock: int, token: str, for_s: float | None) -> int:
    """Starts it and returns the pipe's end that it watches. It keeps the lock until the change is made or undone."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()  # before the command goes on: no kill of its process group reaches what follows
            if os.fork() == 0:
                os.close(write_end)
                _watch(store, lock, read_end, token, for_s)
        finally:
            os._exit(0)
    os.close(read_end)
    os.waitpid(child, 0)
    return write_end


def _watch(store: Store, lock: int, read_end: int, token: str, for_s: float | None) -> NoReturn:
    """Waits for the command's end, undoes what it left unfinished, and takes the throttle away when its time is up."""
    until = time.clock_gettime(time.CLOCK_BOOTTIME) + for_s if for_s else None  # goes on while a laptop sleeps
    code = 1
    try:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _let_go(keep={lock, read_end})
        os.read(read_end, 1)
        journal = store.load()["change"]
        if journal and journal["token"] == token:
            undo(store)
        os.close(lock)
        if until is not None:
            _expire(store, token, until)
        code = 0
    finally:
        os._exit(code)  # not through the command's own handlers and buffers, of which this is a copy
    raise AssertionError


def _let_go(keep: set[int]) -> None:
    """Closes the command's streams and files, because a shell that reads its output waits for their end."""
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
        time.sleep(min(left, LOOK_S))
        if not any(link.token == token and link.until_utc for link in store.links().values()):
            return  # cleared, kept, or set anew: another's business
    with store.locked() as lock:
        undo(store)
        clear(store, lock, [link for link in store.links().values() if link.token == token and link.until_utc])


def clear(store: Store, lock: int, links: list[Link]) -> list[str]:
    """Puts back what was found; returns a line for each device that is now not as it was found.

    The file of a host goes (or becomes what it was) when none of the host's links stays set. The caller holds the lock.
    """
    state = store.load()
    gone = {link.key for link in links}
    staying = {link["host"] for key, link in state["links"].items() if key not in gone}
    hosts = {link.host for link in links} - staying
    files: dict[Path, str | None] = {Path(path): None for path in state["files"] if Path(path).parent.name in hosts}
    if not staying:
        files = {Path(path): None for path in state["files"]}
    change(store, lock, [Wish(link, None) for link in links], files, None)
    return [line for link in links if (line := difference(link))]


def keep(store: Store) -> int:
    """Lets a throttle with an end (`--for`, `--force`) stay; returns the number of links. The caller holds the lock."""
    state = store.load()
    timed = [link for link in state["links"].values() if link["until_utc"]]
    for link in timed:
        link["until_utc"] = None
    store.save(state)
    return len(timed)
