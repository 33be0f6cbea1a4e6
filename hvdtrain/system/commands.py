"""Run other programs from lists of words, never from a shell line. A failed command becomes a one-line error."""

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
"""Folder that holds tools/ and .venv when the package runs from a checkout."""

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
"""Debian package of each program that hvdtrain starts."""

ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH in which root looks for programs while it acts for a user."""

TIMEOUT_S = 60
_DENIED = ("operation not permitted", "permission denied")


def find(program: str) -> str:
    """Return the program's path. Raises Failure (69) if it is not installed.

    Also looks in the sbin folders, which a user's PATH often omits.
    """
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    program_path = shutil.which(program, path=path)
    if program_path is None:
        package = PACKAGES.get(program, program)
        message = f"the program {program} is not installed; hint: install it (Debian: apt-get install {package})"
        raise Failure(message, exits.UNREACHABLE)
    return program_path


def run(command: Command, *, stdin: str | None = None, pass_fds: Sequence[int] = ()) -> str:
    """Return the command's standard output.

    Raises Failure with the command and its own message: 77 if it lacks permission, 69 if it is missing or too slow.
    """
    words = [find(command[0]), *command[1:]]
    source = subprocess.DEVNULL if stdin is None else None
    try:
        done = subprocess.run(
            words, input=stdin, stdin=source, pass_fds=pass_fds, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"`{shlex.join(command)}` did not finish within {TIMEOUT_S} s", exits.UNREACHABLE) from error
    if done.returncode:
        reason = " ".join((done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").split())
        denied = any(words in reason.lower() for words in _DENIED)
        raise Failure(f"`{shlex.join(command)}`: {reason}", exits.NO_PERMISSION if denied else exits.FAILED)
    return done.stdout


def succeeds(command: Command) -> bool:
    """Whether the command exits with 0. Its output is discarded."""
    try:
        run(command)
    except Failure:
        return False
    return True


def run_all(commands: Iterable[Command], *, dry_run: bool = False) -> None:
    """Run the commands in order, or only print them on stdout. Raises Failure at the first one that fails."""
    for command in commands:
        if dry_run:
            print(shlex.join(command))
        else:
            run(command)


# --- users -----------------------------------------------------------------------------------------------------------


def calling_user() -> str:
    """Name of the user who started this process. Under sudo, the user who called sudo."""
    if os.geteuid() == 0 and os.environ.get("SUDO_USER"):
        return os.environ["SUDO_USER"]
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container can run as a user id without a name
        return str(os.geteuid())


def as_user(user: pwd.struct_passwd) -> Command:
    """Words that make root run the command after them as `user`. Empty for root."""
    if user.pw_uid == 0:
        return []
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups", "--"]


def as_caller() -> Command:
    """Under sudo, the words that run a command as the calling user, with that user's ssh keys."""
    return as_user(pwd.getpwnam(calling_user())) if os.geteuid() == 0 else []


@contextlib.contextmanager
def as_calling_user() -> Iterator[None]:
    """Inside the block, root opens files with the calling user's rights.

    Otherwise an error message could quote a file that only root may read.
    """
    if os.geteuid() or calling_user() == "root":
        yield
        return
    user, groups, group = pwd.getpwnam(calling_user()), os.getgroups(), os.getegid()
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
    """Raise Failure (77) unless this process runs as root."""
    if os.geteuid():
        raise Failure(f"{purpose} needs root; hint: run it with sudo", exits.NO_PERMISSION)


def become_root(
    refusal: str, script: str, module: str, arguments: Sequence[str], *options: str, notice: str = ""
) -> NoReturn:
    """Replace this process with a script of tools/, run through sudo, after printing the `notice`.

    Without a checkout it is the `module` that the script runs. Raises Failure (77) with the message `refusal` if sudo
    asks for a password.
    """
    if not succeeds(["sudo", "-n", "true"]):
        raise Failure(refusal, exits.NO_PERMISSION)
    if notice:
        print(notice, file=sys.stderr, flush=True)
    tool = CHECKOUT / "tools" / script
    words = [str(tool)] if tool.is_file() else [sys.executable, "-I", "-m", module]
    os.execv(find("sudo"), ["sudo", "-n", *options, *words, *arguments])
