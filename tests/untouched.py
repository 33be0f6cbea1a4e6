"""The suite leaves the machine as it was: a difference in queues, links, namespaces, mounts, control groups or the
user's files fails it.

Other programs change a machine too. So links count that are there before and after, and what is left counts if it has
the names of these tests.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = (Path.home() / ".ssh", Path.home() / ".config/hvdtrain", Path.home() / ".cache/hvdtrain", ROOT / "results")
EXPECTED = {"key", "known_hosts"}
"""Any job may make the user's key; the user's other ssh sessions write the other file."""

State = dict[str, str]


def _output(*command: str) -> list[str]:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path})
    except OSError:  # no such program
        return []
    return done.stdout.splitlines()


def links() -> State:
    """The queues and the size of packets of each link."""
    state: State = {}
    for line in _output("tc", "qdisc", "show"):
        name = f"the queue of {line.split(' dev ')[-1].split()[0]}"
        state[name] = state.get(name, "") + re.sub(r" refcnt \d+", "", line)
    for path in Path("/sys/class/net").glob("*/mtu"):
        with contextlib.suppress(OSError):  # another program has just removed it
            state[f"the MTU of {path.parent.name}"] = path.read_text().strip()
    return state


def below(folder: Path, unread: set[str], depth: int = 1) -> Iterator[Path]:
    """What the folder and its folders hold, `depth` levels of them. Notes in `unread` what this user may not list."""
    try:
        entries = [*os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        unread.add(f"{folder}: {error.strerror}")
        return
    for entry in entries:
        yield Path(entry)
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            yield from below(Path(entry), unread, depth - 1)


def left(mark: str, unread: set[str]) -> set[str]:
    """Namespaces, links, mounts, folders of clusters and control groups with `mark` in their names."""
    folders = {"/run/netns": 1, "/run/hvdtrain": 1, "/run/hvdtrain/pins": 1, "/sys/class/net": 1, "/sys/fs/cgroup": 2}
    entries = [str(path) for folder, depth in folders.items() for path in below(Path(folder), unread, depth)]
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return {name for name in (*entries, *mounts) if mark in Path(name).name}


def files(unread: set[str]) -> State:
    """When the user's files were changed, and new files in the checkout."""
    untracked = _output("git", "-C", str(ROOT), "ls-files", "--others", "--exclude-standard")
    paths = [path for folder in FILES for path in below(folder, unread, 99) if path.name not in EXPECTED]
    state: State = {}
    for path in [*paths, *(ROOT / name for name in untracked)]:
        with contextlib.suppress(OSError):  # another program has just removed it
            state |= {} if path.is_dir() else {str(path): f"of {path.lstat().st_mtime_ns} ns"}
    return state


class Untouched:
    """A pytest plug-in, for the process that starts the workers."""

    def __init__(self, mark: str) -> None:
        self._mark = f"t{mark}"
        self._unread: set[str] = set()
        """Folders that this user may not list"""
        self._links, self._files = links(), files(self._unread)
        self._found: list[str] = []

    def _differences(self) -> Iterator[str]:
        yield from (f"{name} was left" for name in left(self._mark, self._unread))
        for before, after, new in (self._links, links(), False), (self._files, files(self._unread), True):
            for name in before.keys() | after.keys():
                if (was := before.get(name)) != (now := after.get(name)) and (new or (was and now)):
                    yield f"{name} was {was or 'not there'} and is {now or 'not there'}"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        try:
            self._found = [f"the tests changed this machine: {line}" for line in sorted(self._differences())]
        except Exception as error:  # raised here, it would cost pytest's summary
            self._found = [f"whether the tests changed this machine is unknown: {error!r}"]
        if self._found:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._found:
            terminalreporter.write_line(line, red=True)
        for line in sorted(self._unread):
            terminalreporter.write_line(f"not checked for changes by the tests: {line}")
