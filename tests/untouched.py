"""The suite leaves the machine as it was: a difference in queues, links, namespaces, mounts, control groups or the
user's files fails it.

Other programs change a machine too. So links count that are there before and after, and what is left counts if it has
the names of these tests.
"""

from __future__ import annotations

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
        state[f"the MTU of {path.parent.name}"] = path.read_text().strip()
    return state


def left(mark: str) -> set[str]:
    """Namespaces, links, mounts, folders of clusters and control groups with `mark` in their names."""
    cgroups = Path("/sys/fs/cgroup")
    folders = [
        *(Path("/run/netns"), Path("/run/hvdtrain"), Path("/run/hvdtrain/pins"), Path("/sys/class/net"), cgroups),
        *cgroups.glob("*/"),
    ]
    entries = [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()]
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return {name for name in (*entries, *mounts) if mark in Path(name).name}


def files() -> State:
    """When the user's files were changed, and new files in the checkout."""
    untracked = _output("git", "-C", str(ROOT), "ls-files", "--others", "--exclude-standard")
    paths = [path for folder in FILES for path in folder.rglob("*") if path.name not in EXPECTED]
    paths += [ROOT / name for name in untracked]
    return {str(path): f"of {path.lstat().st_mtime_ns} ns" for path in paths if not path.is_dir()}


class Untouched:
    """A pytest plug-in, for the process that starts the workers."""

    def __init__(self, mark: str) -> None:
        self._mark = f"t{mark}"
        self._links, self._files = links(), files()
        self._found: list[str] = []

    def _differences(self) -> Iterator[str]:
        yield from (f"{name} was left" for name in left(self._mark))
        for before, after, new in (self._links, links(), False), (self._files, files(), True):
            for name in before.keys() | after.keys():
                if (was := before.get(name)) != (now := after.get(name)) and (new or (was and now)):
                    yield f"{name} was {was or 'not there'} and is {now or 'not there'}"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._found = sorted(self._differences())
        if self._found:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._found:
            terminalreporter.write_line(f"the tests changed this machine: {line}", red=True)
