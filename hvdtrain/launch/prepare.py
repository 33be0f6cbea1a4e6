"""`hvdtrain hosts prepare`: copy this environment and a folder to the other hosts of a job, to the same paths.

A copied environment runs where the system, the C library and Python are alike, so `unlike` compares those first. Only
files that are missing or differ there are sent, by rsync or, without it, by tar. Nothing is deleted anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.launch.link import address_of, find_hosts
from hvdtrain.system import exits, net, ssh
from hvdtrain.system.agent import explain
from hvdtrain.system.arguments import Parser
from hvdtrain.system.commands import CHECKOUT
from hvdtrain.system.exits import Failure

PURPOSE = """Copy this environment (.venv) and the current folder to the other hosts, to the same paths.

Run it on the host that starts the jobs, with the environment active. It needs ssh to each host without a password, and
there the same system and the same Python, to which the environment refers. Of the folder it leaves out what git
ignores, results/ and files above 100 MB. It copies and overwrites what differs, and deletes nothing.

examples:
  hvdtrain hosts prepare -H a:1,b:1 --dry-run      # what each host lacks, and how much would be copied
  hvdtrain hosts prepare -H a:1,b:1
  hvdtrain hosts prepare -H a:1,b:1 --install      # where a copy would not run, make the environment there
  cd ~/project && hvdtrain hosts prepare --hostfile hosts.txt
"""
MOST_BYTES = 100e6
LEFT_OUT = ("results",)
MARK = b"@hvdtrain "
ABOUT = """echo "@system=$(uname -sm)"
echo "@libc=$(getconf GNU_LIBC_VERSION 2>/dev/null)"
echo "@python=$("$1" -c 'import platform; print(platform.python_version())' 2>/dev/null)"
model=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)
echo "@processor=${model:-processor}, $(getconf _NPROCESSORS_ONLN) cores"
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
echo "@gpu=${gpu:-no NVIDIA GPU}"
"""
"""Prints facts about a host, which may have no Python"""
LISTING = """path=$1
while [ ! -d "$path" ]; do path=$(dirname "$path"); done
tool=tar; command -v rsync >/dev/null && tool=rsync
printf '@hvdtrain %s %s\\0' "$tool" "$(df -Pk "$path" | awk 'NR == 2 { print $4 }')"
cd "$1" 2>/dev/null || exit 0
find . -type f -printf '%s %Ts %P\\0' -o -type l -printf '%l  %P\\0'
"""
"""Prints the program that receives files, the free space in KiB, and each file's size, time and name"""

State = tuple[str, str]
"""Size and time of a file; the target of a link, and nothing"""


def parser() -> Parser:
    top = Parser(prog="hvdtrain hosts prepare", description=PURPOSE)
    top.set_defaults(np=None)
    top.add_argument("-H", "--hosts", metavar="a:1,b:1", help="hosts, as for the launchers")
    top.add_argument("--hostfile", type=Path, metavar="FILE", help="file with one `host slots=2` per line")
    top.add_argument(
        "--install", action="store_true", help="run tools/setup.sh on hosts where this one's would not run"
    )
    top.add_argument("--dry-run", action="store_true", help="say what would be copied, and copy nothing")
    return top


# --- what is here ----------------------------------------------------------------------------------------------------


def walk(folder: Path) -> Iterator[Path]:
    for top, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != ".git" and not Path(top, name, "pyvenv.cfg").exists()]
        links = [name for name in folders if Path(top, name).is_symlink()]
        yield from (Path(top, name) for name in (*files, *links))


def everything(folder: Path) -> dict[str, State]:
    """The state of each file and link in a folder, by its name there."""
    return dict(_states(folder, walk(folder)))


def sources(folder: Path) -> tuple[dict[str, State], str]:
    """Return the files of a project, as `everything`, and a line that names the files that are left out.

    Raises Failure (2) for a folder that holds more than a project.
    """
    if Path.home().is_relative_to(folder):
        what = f"{folder} holds your whole home folder, which is not copied"
        raise Failure(f"{what}; hint: move the script into a separate folder", exits.USAGE)
    listed = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    paths, why = walk(folder), ""
    with contextlib.suppress(OSError):
        done = subprocess.run(listed, capture_output=True)
        if done.returncode == 0:
            paths, why = (folder / os.fsdecode(name) for name in done.stdout.split(b"\0") if name), "what git ignores, "
    found = {name: state for name, state in _states(folder, paths) if Path(name).parts[0] not in LEFT_OUT}
    big = [name for name, (size, time) in found.items() if time and int(size) > MOST_BYTES]
    line = f"{folder}: left out are {why}{LEFT_OUT[0]}/ and files above {MOST_BYTES / 1e6:.0f} MB"
    line += f" ({', '.join(big[:3])}{', ...' * (len(big) > 3)})" if big else ""
    return {name: state for name, state in found.items() if name not in big}, line


def _states(folder: Path, paths: Iterator[Path]) -> Iterator[tuple[str, State]]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # git knows it still
            about, name = path.lstat(), str(path.relative_to(folder))
            if stat.S_ISLNK(about.st_mode):
                yield name, (os.readlink(path), "")  # noqa: PTH115 (a Path drops ./)
            elif stat.S_ISREG(about.st_mode):
                yield name, (str(about.st_size), str(int(about.st_mtime)))


# --- other hosts -----------------------------------------------------------------------------------------------------


def on(host: str, script: str, *words: str) -> bytes:
    """The output of a shell script on a host. Raises Failure (69)."""
    done = subprocess.run(ssh.command(host, ["sh", "-c", script, "sh", *words], "-T"), input=b"", capture_output=True)
    if done.returncode:
        problem = explain(host, done.stderr.decode(errors="replace"))
        raise Failure(f"host {host}: {problem.reason}; hint: {problem.fix}", exits.UNREACHABLE)
    return done.stdout


def about(host: str) -> dict[str, str]:
    """What ABOUT prints on a host. Raises Failure (69)."""
    lines = on(host, ABOUT, str(Path(sys.executable).resolve())).decode(errors="replace").splitlines()
    return dict(line[1:].partition("=")[::2] for line in lines if line.startswith("@"))


def unlike(there: Mapping[str, str]) -> str | None:
    """Why this environment would not run on a host. None if it would. `there`: the result of `about`."""
    python = Path(sys.executable).resolve()
    system, version = f"{platform.system()} {platform.machine()}", platform.python_version()
    if there["system"] != system:
        return f"it is {there['system']}, not {system}"
    libc = " ".join(platform.libc_ver())
    if _numbers(there["libc"]) < _numbers(libc):
        return f"its C library is {there['libc'] or 'another'}, older than {libc}"
    own = python.is_relative_to(sys.prefix)  # an environment of conda is copied with its Python
    if not own and _numbers(there["python"])[:2] != _numbers(version)[:2]:
        return f"{python} is {there['python'] or 'missing'}, not Python {version}"
    return None


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.rpartition(" ")[2].split(".") if part.isdigit()]


def copy(host: str, folder: Path, here: Mapping[str, State], *, dry_run: bool = False) -> str:
    """Bring files of a folder to the same path on a host, if they differ there. Returns a line about it.

    Raises Failure: 69 if the host does not answer, 74 if it has too little space, 1 if rsync or tar fails.
    """
    _, _, listing = on(host, LISTING, str(folder)).partition(MARK)
    head, *entries = [os.fsdecode(entry) for entry in listing.split(b"\0") if entry]
    tool, free = head.split()
    there = {name: (size, time) for size, time, name in (entry.split(" ", 2) for entry in entries)}
    changed = [name for name, state in here.items() if there.get(name) != state]
    size = sum(int(here[name][0]) for name in changed if here[name][1])
    what = f"{_size(size)} in {len(changed):,} file{'s' * (len(changed) != 1)}"
    if not changed:
        return f"{host}: {folder} is the same as here"
    if dry_run:
        return f"{host}: {folder}: would copy {what}"
    if size > int(free) * 1024:
        hint = "free some space there"
        raise Failure(f"host {host}: {what} do not fit into {folder}; hint: {hint}", exits.IO_ERROR)
    print(f"{host}: {folder}: copying {what} ...", file=sys.stderr, flush=True)
    on(host, 'mkdir -p "$1"', str(folder))
    names = b"".join(os.fsencode(name) + b"\0" for name in changed)
    if tool == "rsync" and _has_rsync():
        shown = ["--info=progress2"] if sys.stderr.isatty() else []
        words = ["rsync", "-a", "-s", *shown, "--from0", "--files-from=-", "-e", shlex.join(ssh.PROGRAM)]
        done = subprocess.run([*words, f"{folder}/", f"{host}:{folder}/"], input=names, stdout=sys.stderr)
        code = done.returncode
    else:
        code = _by_tar(host, folder, names)
    if code:
        raise Failure(f"host {host}: {folder} was not copied completely; hint: see the lines above, and run this again")
    return f"{host}: {folder}: copied {what}"


def _has_rsync() -> bool:
    return any(Path(part, "rsync").exists() for part in os.get_exec_path())


def _by_tar(host: str, folder: Path, names: bytes) -> int:
    pack = ["tar", "-C", str(folder), "--no-recursion", "--null", "--verbatim-files-from", "--files-from=-", "-cf", "-"]
    unpack = ssh.command(host, ["tar", "-C", str(folder), "-xpf", "-"], "-T")
    with subprocess.Popen(unpack, stdin=subprocess.PIPE) as other:
        code = subprocess.run(pack, input=names, stdout=other.stdin).returncode
        assert other.stdin is not None
        other.stdin.close()
    return code or other.returncode


def _size(count: float) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def others(names: Sequence[str]) -> list[str]:
    """The hosts that are not this machine. Raises Failure (69)."""
    return [name for name in names if not net.is_own(address_of(name))]


def main(arguments: list[str]) -> int:
    """Run the command. Returns 1 if the environment would not run on some host. Raises Failure as `copy` does."""
    options: argparse.Namespace = parser().parse_args(arguments)
    folder = Path.cwd()
    found, _ = find_hosts(options, os.environ)
    names = others([slot.host for slot in found])
    if not names:
        print("all hosts are this machine: there is nothing to copy", file=sys.stderr)
        return exits.OK
    project, line = sources(folder)
    print(line, file=sys.stderr)
    places = {Path(sys.prefix): everything(Path(sys.prefix)), folder: project}
    package = Path(__file__).resolve().parents[1]
    if not any(package.is_relative_to(place) for place in places):  # the environment refers to a checkout elsewhere
        places[package] = everything(package)
    code = exits.OK
    checkout = CHECKOUT if Path(sys.prefix, "hvdtrain-setup").exists() else None
    for name in names:
        there = about(name)
        print(f"{name}: {there['processor']}; {there['gpu']}", file=sys.stderr, flush=True)
        chosen = places
        if problem := unlike(there):
            fix = f"make an environment with the same packages at {sys.prefix} there"
            fix = f"add --install, which runs {checkout}/tools/setup.sh there" if checkout else fix
            print(f"{name}: {problem}, so this environment would not run there", end="", flush=True)
            if not (options.install and checkout):
                code = exits.FAILED
                print(f"; hint: {fix}")
                continue
            print(": installing one there")
            chosen = {checkout: sources(checkout)[0], folder: project}
        for place, here in chosen.items():
            print(copy(name, place, here, dry_run=options.dry_run), flush=True)
        if problem and not options.dry_run:
            install(name)
    return code


def install(host: str) -> None:
    """Make the environment on a host, from the checkout that was copied there. Raises Failure (1)."""
    frameworks, _, extent, *_ = Path(sys.prefix, "hvdtrain-setup").read_text().split()
    like_here = ["--demo"] * (extent == "demo") + [frameworks] * (frameworks != "any")
    setup = [str(CHECKOUT / "tools" / "setup.sh"), *like_here]
    done = subprocess.run(ssh.command(host, setup, "-T"), stdin=subprocess.DEVNULL)
    if done.returncode:
        what = f"host {host}: tools/setup.sh ended with {done.returncode}"
        raise Failure(f"{what}; hint: see the lines above, and run this again")


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
