"""Where the ranks' output goes: into files by rank, and of some ranks only to the terminal.

    mpirun -np 4 python3 -m hvdtrain.launch.output --logs DIR --show 0,2 COMMAND

Each rank's is added to DIR/rank0000/stdout and DIR/rank0000/stderr on its own host, and goes to the launcher too if the
rank is one of those to show. This opens the files and then becomes COMMAND, so that launchers, signals and the sentinel
find the rank where it would have been. What goes to both passes through a process per stream, which ends with the rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import stat
import sys
from pathlib import Path

from hvdtrain.system import exits
from hvdtrain.system.commands import Command
from hvdtrain.system.environment import number
from hvdtrain.system.exits import Failure

PROGRAM = ("python3", "-P", "-m", "hvdtrain.launch.output")
RANKS = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")


def wrapped(command: Command, ranks: int, logs: Path | None, show: str | None) -> Command:
    """The command with this in front if anything is asked of it. Raises Failure (2) for ranks that there are not."""
    words: Command = []
    if logs is not None:
        words += ["--logs", str(logs.absolute())]
    if show is not None:
        for word in show.split(","):
            if not word.isdecimal() or int(word) >= ranks:
                raise Failure(f"--show-rank {show}: give ranks from 0 to {ranks - 1}, as in 0,2", exits.USAGE)
        words += ["--show", show]
    return [*PROGRAM, *words, *command] if words else command


def opened(path: Path) -> int:
    """A file to add to. Raises OSError, Failure (73) for what is no plain file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise Failure(f"{path}: no plain file; choose another --logs", exits.CANNOT_WRITE)
    return file


def to_both(file: int, stream: int) -> int:
    """A pipe whose content goes into the file and to the stream."""
    source, sink = os.pipe()
    if os.fork() == 0:
        os.setsid()  # launchers signal and end a rank's whole group
        if os.fork():  # and the rank must not find a child that it did not start
            os._exit(0)
        os.close(sink)
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        while data := os.read(source, 1 << 16):
            for target in (file, stream):
                with contextlib.suppress(OSError), open(target, "wb", buffering=0, closefd=False) as out:
                    out.write(data)
        os._exit(0)
    os.wait()
    os.close(source)
    return sink


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m hvdtrain.launch.output", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--logs", type=Path, metavar="DIR")
    parser.add_argument("--show", metavar="RANK,...", help="(default: all)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("no command")
    hint = "start it with launch/mpirun.sh or launch/horovodrun.sh"
    rank = next((number(name, os.environ[name], hint) for name in RANKS if name in os.environ), 0)
    shown = options.show is None or str(rank) in options.show.split(",")
    folder = options.logs and options.logs / f"rank{rank:04d}"
    try:
        targets = {}
        for stream, name in ((1, "stdout"), (2, "stderr")):
            file = opened(folder / name) if folder else os.open(os.devnull, os.O_WRONLY)
            targets[stream] = file if not shown else to_both(file, stream) if folder else stream
        os.environ.setdefault("PYTHONUNBUFFERED", "1")  # what is not a terminal gets output in blocks otherwise
        for stream, target in targets.items():
            os.dup2(target, stream)
        if shutil.which(options.command[0]) is None:
            print(f"hvdtrain: rank {rank}: no command {options.command[0]}; check the spelling", file=sys.stderr)
            return exits.USAGE
        os.execvp(options.command[0], options.command)
    except OSError as error:
        print(f"hvdtrain: rank {rank}: {error.filename or options.command[0]}: {error.strerror}", file=sys.stderr)
        return exits.CANNOT_WRITE


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
