"""Running other programs: lists of words, never a shell line, and failures as one line."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

Command = list[str]

CHECKOUT = Path(__file__).resolve().parents[2]
"""Where this package's tools/ and .venv are, if it is run from a checkout"""

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "taskset": "util-linux",
}
"""Debian's package of each program that this room starts"""

SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where root looks for programs while it acts for a user"""

PATIENCE_S = 60
_DENIED = ("operation not permitted", "permission denied")


def find(program: str) -> str:
    """Its path; also looks in the sbin folders, which a user's PATH often leaves out. Raises Failure (69)."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    found = shutil.which(program, path=path)
    if found is None:
        package = PACKAGES.get(program, program)
        raise Failure(
            f"no {program} on this machine; install it (Debian: apt-get install {package})", exits.UNREACHABLE
        )
    return found


def run(command: Command, *, stdin: str | None = None, pass_fds: Sequence[int] = ()) -> str:
    """Its standard output. Raises Failure with the command and its own message: 77 if not permitted, 69 if missing."""
    words = [find(command[0]), *command[1:]]
    source = subprocess.DEVNULL if stdin is None else None
    try:
        done = subprocess.run(
            words, input=stdin, stdin=source, pass_fds=pass_fds, capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"`{shlex.join(command)}` gave no answer in {PATIENCE_S} s", exits.UNREACHABLE) from error
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").split())
        denied = any(word in said.lower() for word in _DENIED)
        raise Failure(f"`{shlex.join(command)}`: {said}", exits.NO_PERMISSION if denied else exits.FAILED)
    return done.stdout


def succeeds(command: Command) -> bool:
    """Whether the command exits with 0; its output is thrown away."""
    try:
        run(command)
    except Failure:
        return False
    return True


def run_all(commands: Iterable[Command], *, dry_run: bool = False) -> None:
    """Runs the commands in order, or only prints them on stdout. Raises Failure at the first that fails."""
    for command in commands:
        if dry_run:
            print(shlex.join(command))
        else:
            run(command)


def caller() -> str:
    """The user who called: under sudo, whoever called sudo."""
    if os.geteuid() == 0 and os.environ.get("SUDO_USER"):
        return os.environ["SUDO_USER"]
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in a container that runs as any number
        return str(os.geteuid())


def as_user(user: pwd.struct_passwd) -> Command:
    """The words with which root runs a command as that user; none for root."""
    if user.pw_uid == 0:
        return []
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups", "--"]


@contextlib.contextmanager
def rights_of_caller() -> Iterator[None]:
    """Within it root opens files as the caller would: an error may quote one that only root may read."""
    if os.geteuid() or caller() == "root":
        yield
        return
    user, groups, group = pwd.getpwnam(caller()), os.getgroups(), os.getegid()
    try:
        os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
        os.setegid(user.pw_gid)
        os.seteuid(user.pw_uid)
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


def need_root(purpose: str) -> None:
    """Raises Failure (77) unless this process is root."""
    if os.geteuid():
        raise Failure(f"{purpose} needs root: run it with sudo", exits.NO_PERMISSION)


def become_root(refusal: str, script: str, arguments: Sequence[str], *options: str) -> NoReturn:
    """Turns this process into the checkout's script, through sudo. Raises Failure (77) if that asks for a password."""
    if not succeeds(["sudo", "-n", "true"]):
        raise Failure(refusal, exits.NO_PERMISSION)
    tool, module = CHECKOUT / "tools" / script, {"cluster.sh": "lab", "throttle.sh": "lab.throttle"}[script]
    words = [str(tool)] if tool.is_file() else [sys.executable, "-I", "-m", f"hvdtrain.{module}"]
    os.execv(find("sudo"), ["sudo", "-n", *options, *words, *arguments])
