"""Whatever a path flag meets, the command ends with a documented code and, if it failed, one line that says why.

Each command runs in a child of this process, made by fork after everything was imported: hundreds of them take
seconds. For root, whom permission bits do not stop, the child first gives up its capabilities.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from conftest import forked
from PIL import Image
from runs import make

from hvdtrain import captioning, cli, resnet
from hvdtrain.comm import lifecycle
from hvdtrain.config.parser import OptionParser
from hvdtrain.lab.throttle import request
from hvdtrain.launch import __main__ as launch
from hvdtrain.system import exits

HERE = "@"
"""In a command line: where the path under test goes"""
CODES = {0, 1, 2, 65, 69, 73, 74, 77, 78}
PATIENCE_S = 30

# what runs -> its words before the flags, and command lines that between them have every path flag
COMMANDS: dict[str, list[str]] = {
    "resnet": ["--dry-run --config @", "--dry-run --data @"],
    "captioning": [
        "--dry-run --config @",
        "--dry-run --data @",
        "--dry-run --data flickr8k:@",
        "--dry-run --weights @",
    ],
    "caption": ["@ --run run", "x.png --run @"],
    "data images": [
        "@ new --size 4x4 --workers 1",
        "photos @ --size 4x4 --workers 1",
        "photos new --size 4x4 --config @",
    ],
    "data captions": ["@ new --workers 1", "told @ --workers 1", "told new --config @"],
    "data vgg16": ["@ new --dry-run", "weights @", "weights new --config @"],
    "cluster": ["up --topology @ --dry-run"],
    "throttle": ["10mbit --dev lo --hostfile @ --dry-run"],
    "doctor": ["--quick --hostfile @"],
    "sweep": ["@ --dry-run"],
    "results": [
        *(
            f"{name} @"
            for name in ("list", "show", "table", "scaling", "energy", "accuracy", "strategies", "phases", "inference")
        ),
        *("export @", "plot time @ -o new.svg", "report @ -o new.html", "show run @"),
        *("compare @ run", "compare run @", "energy run --reference @.json", "scaling run --reference @.json"),
        *("export run -o @", "plot time run -o @.svg", "report run -o @"),
    ],
    "mpirun": ["--dry-run --hostfile @ true"],
    "horovodrun": ["--dry-run --hostfile @ true"],
}
# These need a trained model, or are looked at when a run begins (test_caption.py, test_resnet_train.py, test_launch).
ELSEWHERE = {("caption", "--weights"), ("resnet", "--run-dir"), ("captioning", "--run-dir"), ("doctor", "--run-dir")}
ELSEWHERE |= {("sweep", "--root"), ("mpirun", "--logs"), ("horovodrun", "--logs")}
ALIKE = ("table", "scaling", "energy", "accuracy", "strategies", "phases", "inference")
ALIKE += ("export", "plot", "report", "compare")
"""Commands of results that read their roots as `list` does: they meet the most telling things only"""
TELLING = ("missing", "closed", "pipe", "zeros", "control characters")
CASES = [(name, line) for name, lines in COMMANDS.items() for line in lines]


def command(name: str) -> Callable[[list[str]], NoReturn]:
    """What the process does that is started so."""

    def training(words: list[str]) -> NoReturn:
        sys.argv = [name, *words]
        lifecycle.run({"resnet": resnet, "captioning": captioning}[name].main, debug=False)
        raise AssertionError

    if name in ("resnet", "captioning"):
        return training
    if name in ("mpirun", "horovodrun"):
        return lambda words: exits.end(launch.main, [name, *words])
    return lambda words: exits.end(cli.COMMANDS[tuple(name.split())][1].run, words)


def parser(name: str) -> argparse.ArgumentParser:
    if name in ("mpirun", "horovodrun"):
        return launch.parser(name)
    if name in ("resnet", "captioning"):
        cls = {"resnet": resnet.ResNetConfig, "captioning": captioning.CaptioningConfig}[name]
        return OptionParser(cls, prog=name, purpose="")
    if name == "throttle":
        return request.parser()
    return cli.COMMANDS[tuple(name.split())][1].parser()


def path_flags(one: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Subcommands and name of each argument that takes a path: by its type, or by a name that training uses."""
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from path_flags(inner, (*words, word))
        elif action.type is Path or action.dest in ("config", "data", "weights", "source", "destination", "reference"):
            yield *words, " ".join(action.option_strings)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_path_flag_is_tried(name: str) -> None:
    """Of subcommands, flags by their name; of positional arguments, as many lines as there are arguments."""
    tried = [line.split() for line in COMMANDS[name]]
    for *words, flags in path_flags(parser(name)):
        if (name, flags) in ELSEWHERE:
            continue
        there = [line for line in tried if words == line[: len(words)]]
        followed = [line[line.index(flag) + 1] for flag in flags.split() for line in there if flag in line]
        assert any(HERE in word for word in (followed if flags else itertools.chain(*there))), (words, flags)


def hostile(folder: Path) -> dict[str, str]:
    """What a path may lead to, all of it made in the folder. A lone name is relative to it."""
    (folder / "empty").touch()
    (folder / "empty.json").touch()
    (folder / "garbage").write_bytes(bytes(range(256)) * 16)
    (folder / "folder").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    (folder / "zeros").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as end:
        os.chdir(folder)
        end.bind("socket")
    (folder / "unreadable").write_text("x")
    (folder / "unreadable").chmod(0)
    for name in ("closed", "locked"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    (folder / "closed").chmod(0)
    (folder / "locked").chmod(0o555)
    return {
        "missing": "missing",
        "below nothing": "no/such/thing",
        "control characters": "\x1b]0;owned\x07\n\x1b[2J",
        "too long": "x" * 300,
        "below a file": "empty/x",
        "in a closed folder": "closed/file",
        "new in a locked folder": "locked/new",
        **{name: name for name in ("empty", "garbage", "folder", "dangling", "loop", "pipe", "zeros", "socket")},
        **{name: name for name in ("unreadable", "closed", "locked")},
    }


def furnish(folder: Path) -> None:
    """What the other arguments of the command lines name."""
    make(folder / "run")
    for label in ("a", "b"):
        (folder / "photos" / label).mkdir(parents=True)
        for number in range(4):
            picture = np.full((4, 4, 3), number, np.uint8)
            Image.fromarray(picture).save(folder / "photos" / label / f"{number}.png")
    (folder / "told").mkdir()
    (folder / "told" / "captions.txt").write_text("image,caption\n")
    (folder / "weights").write_text("no weights")


def give_up_capabilities() -> None:
    """So that permission bits count for root too (capset(2), with none in any of the three sets)."""
    libc = ctypes.CDLL(None, use_errno=True)
    head, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(head, none):
        raise OSError(ctypes.get_errno(), "capset")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Modules that commands import late: once here, and not in each child."""
    results = ("accuracy", "energy", "reference", "scaling_table", "strategies", "tables", "export", "report", "show")
    others = ("data.images", "captions.prepare", "models.vgg16_weights", "sweep.__main__", "lab.__main__")
    for name in (*(f"results.{each}" for each in results), *others):
        importlib.import_module(f"hvdtrain.{name}")
    for name in COMMANDS:
        parser(name)


@pytest.mark.parametrize(("name", "line"), CASES, ids=[f"{name} {line}" for name, line in CASES])
def test_whatever_a_path_meets_is_told_in_one_line(tmp_path: Path, name: str, line: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    run, wrong = command(name), []
    meetings = hostile(tmp_path)
    furnish(tmp_path)
    slow = name == "captioning" and "--weights" in line  # it draws the scenes, or a figure, each time
    if slow or (name == "results" and line.startswith(ALIKE) and "reference" not in line):
        meetings = {kind: meetings[kind] for kind in TELLING}
    for kind, path in meetings.items():
        words = [word.replace(HERE, path) for word in line.split()]
        done = forked(lambda words=words: (signal.alarm(PATIENCE_S), give_up_capabilities(), run(words)), tmp_path)
        code, text = done.returncode, done.stderr
        fine = code in CODES and "Traceback" not in text and "\x1b" not in text
        lines = [line for line in text.splitlines() if not line.endswith(": not read: Permission denied")]
        if not fine or (code and (len(lines) != 1 or not lines[0].strip())):
            wrong.append(f"{kind}: exit {code}: {text[-1500:]}")
    assert not wrong, "\n".join(wrong)
