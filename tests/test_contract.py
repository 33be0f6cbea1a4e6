"""The contract of all commands: help, exit codes, errors on one line, hostile paths, --json and --dry-run.

The commands come from the registry in cli.py, which includes the workloads.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import forked
from PIL import Image
from programs import first_hour
from runs import make

from hvdtrain import cli
from hvdtrain.system import exits

CODES = {0, 1, 2, 65, 69, 73, 74, 77, 78}
TIMEOUT_S = 60
HERE = "@"
"""In a command line: the path under test. @NAME is a folder that contains it as NAME"""


COMMANDS: dict[str, Any] = {
    **{" ".join(words): command for words, (_, command) in {**cli.COMMANDS, **cli.commands("train")}.items()}
}


def run(line: str, folder: Path, *, prepare: Callable[[], object] = bool) -> subprocess.CompletedProcess[str]:
    """Runs a command line in a fork of this process, which has imported its modules."""
    name = next(name for name in COMMANDS if f"{line} ".startswith(f"{name} "))
    words = shlex.split(line[len(name) :])

    def program() -> None:
        signal.alarm(TIMEOUT_S)
        for variable in [variable for variable in os.environ if variable.startswith(("HVDTRAIN_", "SLURM_"))]:
            del os.environ[variable]
        prepare()
        exits.end(COMMANDS[name].run, words)

    return forked(program, folder)


def test_a_user_runs_every_command_in_the_first_hour() -> None:
    names = {f"hvdtrain {' '.join(words)}" for words in cli.COMMANDS}
    assert not {name for name in names if not any(f"{line} ".startswith(f"{name} ") for line in first_hour.COMMANDS)}


def parsers(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(words, parser) of a command and its subcommands."""
    yield " ".join(words), parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from parsers(inner, (*words, word))


def with_flag(flag: str) -> set[str]:
    """All commands and subcommands that have a flag."""
    every = ((f"{name} {words}".strip(), one) for name in COMMANDS for words, one in parsers(COMMANDS[name].parser()))
    return {name for name, one in every if flag in one._option_string_actions}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Imports the modules that commands import late, so that the forks need not."""
    results = ("export", "tables.energy", "tables.overview", "tables.strategies", "report.document")
    others = (
        "plan.command",
        "strategies.catalog",
        "data.images",
        "captions.prepare",
        "models.vgg16_weights",
        "sweep.__main__",
        "lab.__main__",
    )
    for name in (*(f"results.{each}" for each in results), *others):
        importlib.import_module(f"hvdtrain.{name}")
    for command in COMMANDS.values():
        command.parser()


@pytest.fixture
def furnished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the other arguments of the command lines."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make(tmp_path / "run")
    for label in ("a", "b"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(tmp_path / "photos" / label / f"{number}.png")
    (tmp_path / "captioned").mkdir()
    names = [f"{number}.png" for number in range(4)]
    for name in names:
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "captioned" / name)
    captions = "".join(f"{name},a black square\n" for name in names)
    (tmp_path / "captioned" / "captions.txt").write_text(f"image,caption\n{captions}")
    (tmp_path / "weights").write_text("no weights")
    (tmp_path / "sweep.toml").write_text("[[grid]]\nseed = [1, 2]\n")
    return tmp_path


# --- help and usage ---------------------------------------------------------------------------------------------------


PROGRAMS = r"hvdtrain|tools/|launch/|python -m|horovodrun|mpirun|\w+=\S+ \w"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_purpose_and_examples(name: str, tmp_path: Path) -> None:
    done = run(f"{name} --help", tmp_path)
    assert (done.returncode, done.stderr) == (exits.OK, "")
    assert not done.stdout.startswith("usage")
    assert re.search(rf"\n  ({PROGRAMS})", done.stdout)
    wide = [line for line in done.stdout.splitlines() if len(line) > 80]
    assert all(re.match(rf"  ({PROGRAMS})", line) for line in wide), wide  # a command stays on its line


MISTAKES = [
    *((f"{name} --no-such-flag", exits.USAGE, "") for name in COMMANDS),
    ("results lst", 2, "did you mean list?"),
    ("launch mpirun -H localhost -x MY-TOKEN=s3cret python", 2, "-x MY-TOKEN=... is not NAME"),
    ("cluster up --dry-run --hosts a,-x", 2, "not a host name"),
    ("throttle 10mbit --hosts -oProxyCommand=x --dev eth1 --dry-run", 2, "--hosts"),
    ("doctor -H=-oProxyCommand=x", 2, "not a host name"),
    ("train resnet --batchsize 3", 2, "did you mean --batch-size?"),
    ("hosts prepare --instal -H a:1", 2, "did you mean --install?"),
    ("launch mpirun python x.py", 2, "no hosts"),
    ("launch mpirun -np 0 python", 2, "-np is 0"),
    ("launch mpirun -H localhost --set X python", 2, "NAME=VALUE"),
    ("launch mpirun -np 2 -H '' python", 2, "hosts ''"),
    ("cluster up --dry-run --hosts a,a", 2, "twice"),
    ("cluster up --dry-run --hosts a --name toolongname", 2, "1 to 8"),
    ("cluster up --dry-run --hosts a --cpus x", 2, "cores"),
    ("cluster up --dry-run --topology x.toml --rate 10mbit", 2, "cannot be combined with --topology"),
    ("throttle 10 --dev lo --dry-run", 2, "has no unit"),
    ("throttle clear --for 5m", 2, "--for needs a rate"),
    ("throttle 10mbit --for 0s --dry-run", 2, "from 1s to a week"),
    ("throttle 10mbit --hosts 'a;b' --dev eth1 --dry-run", 2, "not a host name"),
    ("throttle 10mbit --dev eth0 --name tnone --dry-run", 2, "give one"),
    ("slurm -N 2", 2, "no command after --"),
    ("doctor -H a:x", 2, "not HOST or HOST:SLOTS"),
    ("doctor -H a --hostfile b", 2, "not allowed with"),
]


@pytest.mark.parametrize(("line", "code", "words"), MISTAKES)
def test_mistakes_are_one_line_with_an_exit_code(line: str, code: int, words: str, tmp_path: Path) -> None:
    done = run(line, tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert words in done.stderr
    assert not any(tmp_path.iterdir())


# --- --json and --dry-run ---------------------------------------------------------------------------------------------

RESULTS = ("list", "table", "scaling", "energy", "accuracy", "strategies", "phases", "export")
WORKLOADS = [name for name in COMMANDS if name.startswith("train ")]
JSON = {
    "data list": "",
    "monitors": "",
    "strategies": "",
    "doctor": "--quick",
    "sweep": "sweep.toml --dry-run",
    "plan": "--parameters 1M --step-seconds 0.1 --hosts 2 --rates 10mbit --strategy hierarchical",
    "results show": "run .",
    **{f"results {name}": "." for name in RESULTS},
    **dict.fromkeys(WORKLOADS, "--dry-run"),
}
JSON_ELSEWHERE = {"predict", "cluster status", "throttle"}
"""These need a trained model or a cluster; their own tests read the documents"""


def test_all_json_flags_are_tested() -> None:
    assert with_flag("--json") == JSON.keys() | JSON_ELSEWHERE


@pytest.mark.parametrize("name", JSON)
def test_json_prints_one_document_with_a_schema(name: str, furnished: Path) -> None:
    done = run(f"{name} {JSON[name]} --json", furnished)
    assert done.returncode in (exits.OK, exits.FAILED if name == "doctor" else exits.OK), done.stderr
    assert json.loads(done.stdout)["schema"].startswith("hvdtrain/")


DRY_RUN = {
    "slurm": "-N 2 -- touch made",
    "data images": "photos new --size 4x4",
    "data captions": "captioned new --split 50/25/25",
    "cluster up": "--hosts a,b --rate 10mbit",
    "cluster down": "--name tnone",
    "throttle": "10mbit --dev lo --force",
    "sweep": "sweep.toml",
    "launch mpirun": "-np 1 touch made",
    "launch horovodrun": "-np 1 touch made",
    "launch torchrun": "-H localhost:1 touch made",
    "hosts prepare": "-H localhost:1",
    "measure": "-H a:1,b:1",
    **dict.fromkeys(WORKLOADS, "--run-dir new"),
}
DRY_RUN_ELSEWHERE = {"data solar", "data vgg16", "cluster exec", "cluster shell"}
"""These need measured data, published weights or a cluster; see test_solar_data, test_vgg16_weights and test_cluster"""


def test_all_dry_run_flags_are_tested() -> None:
    assert with_flag("--dry-run") == DRY_RUN.keys() | DRY_RUN_ELSEWHERE


@pytest.mark.parametrize("name", DRY_RUN)
def test_a_dry_run_changes_nothing(name: str, furnished: Path) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in furnished.rglob("*") if "cache" not in path.parts}

    before = files()
    words = f"--dry-run {DRY_RUN[name]}" if name.startswith(("launch ", "slurm")) else f"{DRY_RUN[name]} --dry-run"
    done = run(f"{name} {words}", furnished)
    assert done.returncode == exits.OK, done.stderr
    assert files() == before


# --- hostile paths ----------------------------------------------------------------------------------------------------

# command -> command lines that together use every path argument
PATHS: dict[str, list[str]] = {
    "train resnet": ["--dry-run --config @", "--dry-run --data @", "--dry-run --data @index.json"],
    "train captioning": [
        "--dry-run --config @",
        "--dry-run --data @",
        "--dry-run --data @index.json",
        "--dry-run --weights @",
    ],
    "predict": ["run @", "@ x.png"],
    "data images": [
        "@ new --size 4x4 --workers 1",
        "photos @ --size 4x4 --workers 1",
        "photos new --size 4x4 --config @",
    ],
    "data captions": ["@ new --workers 1", "captioned @ --workers 1", "captioned new --config @"],
    "data vgg16": ["@ new --dry-run", "weights @", "weights new --config @"],
    "cluster": ["up --topology @ --dry-run"],
    "throttle": ["10mbit --dev lo --hostfile @ --dry-run"],
    "doctor": ["--quick --hostfile @"],
    "sweep": ["@ --dry-run"],
    "results": [
        *("list @", "measured @", "show @", "show @manifest.json", "show run @"),
        *(f"{name} @" for name in RESULTS[1:]),
        *("plot time @ -o new.svg", "report @ -o new.html", "compare @ run", "compare run @"),
        "export run -o @",
        *("plot time run -o @.svg", "report run -o @"),
    ],
    "launch mpirun": ["--dry-run --hostfile @ true"],
    "launch horovodrun": ["--dry-run --hostfile @ true"],
    "hosts prepare": ["--dry-run --hostfile @"],
}
PATHS_ELSEWHERE = {("predict", "--weights"), ("predict", "--out"), ("doctor", "--run-dir"), ("sweep", "--root")}
PATHS_ELSEWHERE |= {("launch mpirun", "--logs"), ("launch horovodrun", "--logs"), ("train resnet", "--run-dir")}
PATHS_ELSEWHERE |= {("train captioning", "--run-dir")}
"""These need a trained model, or are read when a run begins; see test_caption, test_resnet_train and test_launch"""
FEW = ("missing", "closed", "pipe", "zeros", "control characters")
"""For commands that read their paths like another command, or that are slow"""


def is_alike(name: str, line: str) -> bool:
    if name == "results":
        return line.split()[0] not in ("list", "show") or line == "show run @"
    return name == "train captioning" and "weights" in line


def path_arguments(name: str) -> Iterator[tuple[str, str]]:
    """Subcommand and flags of each argument that takes a path, by its type or its name."""
    for words, one in parsers(COMMANDS[name].parser()):
        for action in one._actions:
            if action.type is Path or action.dest in ("config", "data", "weights", "source", "destination"):
                yield words, " ".join(action.option_strings)


@pytest.mark.parametrize("name", PATHS)
def test_all_path_arguments_are_tested(name: str) -> None:
    lines = [line.split() for line in PATHS[name]]
    for words, flags in path_arguments(name):
        if (name, flags) in PATHS_ELSEWHERE:
            continue
        matching = [line for line in lines if words.split() == line[: len(words.split())]]
        values = [line[line.index(flag) + 1] for flag in flags.split() for line in matching if flag in line]
        assert any(HERE in word for word in (values if flags else itertools.chain(*matching))), (words, flags)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        os.chdir(path.parent)  # a socket's path has at most 107 bytes
        end.bind(path.name)


def unreadable(path: Path) -> None:
    path.write_text("x")
    path.chmod(0)


def folder_with_mode(mode: int) -> Callable[[Path], None]:
    def create(path: Path) -> None:
        path.mkdir()
        (path / "file").write_text("x")
        path.chmod(mode)

    return create


FILES: dict[str, Callable[[Path], object]] = {
    "empty": Path.touch,
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 16),
    "escapes": lambda path: path.write_bytes(b"\x1b]0;owned\x07\x1b[2J\r"),
    "deep": lambda path: path.write_bytes(b"[" * 500_000),
    "deep table": lambda path: path.write_text("a = " + "{a = " * 60_000),
    "dotted": lambda path: path.write_text("a." * 300_000 + "a = 1\n"),
    "sparse": sparse,
    "pipe": os.mkfifo,
    "socket": bind,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "kernel messages": lambda path: path.symlink_to("/proc/kmsg"),  # a plain file of 0 bytes that never ends
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "unreadable": unreadable,
    "folder": Path.mkdir,
    "closed": folder_with_mode(0),
    "locked": folder_with_mode(0o555),
}
NAMES = {
    "missing": "missing",
    "below nothing": "no/such/thing",
    "control characters": "\x1b]0;owned\x07\n\x1b[2J",
    "too long": "x" * 300,
    "below a file": "empty/x",
    "in a closed folder": "closed/file",
    "new in a locked folder": "locked/new",
}


def drop_capabilities() -> None:
    """Makes permission bits count for root too (capset(2) with empty sets)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, empty = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, empty):
        raise OSError(ctypes.get_errno(), "capset")


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in PATHS.items() for line in lines])
def test_hostile_paths_give_one_line(name: str, line: str, furnished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that fails prints one line without control characters, and exits with a documented code."""
    monkeypatch.chdir(furnished)
    nested = next((word.partition(HERE)[2] for word in line.split() if HERE in word and word.endswith(".json")), "")
    paths = {} if nested else NAMES.copy()
    for kind, create in FILES.items():
        path = furnished / (f"{kind}.d/{nested}" if nested else kind)
        path.parent.mkdir(exist_ok=True)
        create(path)
        paths[kind] = f"{kind}.d" if nested else kind
    wrong = []
    for kind in FEW if is_alike(name, line) else paths:
        words = shlex.join(word.replace(HERE + nested, paths[kind]) if HERE in word else word for word in line.split())
        done = run(f"{name} {words}", furnished, prepare=drop_capabilities)
        lines = [line for line in done.stderr.splitlines() if not line.endswith(": cannot be read: Permission denied")]
        fine = done.returncode in CODES and "Traceback" not in done.stderr and "\x1b" not in done.stderr
        if not fine or (done.returncode and (len(lines) != 1 or not lines[0].strip())):
            wrong.append(f"{kind}: exit {done.returncode}: {done.stderr[-1500:]}")
    assert not wrong, "\n".join(wrong)
