"""Run a command on a virtual host.

The calling process becomes the command (execve(2)), so streams, exit code and signals are the command's own. It runs as
the calling user (under sudo, the user who called sudo), in the same folder, with an allow-list of variables.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hvdtrain.lab import virtual
from hvdtrain.lab.topology import Cluster
from hvdtrain.system import exits
from hvdtrain.system.commands import CHECKOUT, ROOT_PATH, Command, as_user, become_root, calling_user, find
from hvdtrain.system.environment import ON_A_HOST, passes
from hvdtrain.system.exits import Failure

UNSAFE = {f"HVDTRAIN_KEPT_{name}": name for name in ("LD_LIBRARY_PATH", "TMPDIR")}
"""Aliases that carry variables through sudo which glibc removes from programs such as sudo (ld.so(8))."""


def environment(inherited: Mapping[str, str], user: pwd.struct_passwd, extra: Sequence[str] = ()) -> dict[str, str]:
    """The command's variables: the allow-list, `extra`, the user's own ones, and the checkout's .venv if it exists."""
    names = [name for name in inherited if passes(name, (*ON_A_HOST, *extra))]
    kept = {UNSAFE.get(name, name): inherited[name] for name in names}
    kept |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell or "/bin/sh"}
    kept.setdefault("PATH", ROOT_PATH)
    venv = Path(kept.get("VIRTUAL_ENV", CHECKOUT / ".venv"))
    if (venv / "bin" / "python").exists():  # sudo drops the variables that activate has set
        kept["VIRTUAL_ENV"] = str(venv)
        folders = kept["PATH"].split(os.pathsep)
        if str(venv / "bin") not in folders:
            kept["PATH"] = os.pathsep.join([str(venv / "bin"), *folders])
        if (venv / "bin" / "orted").exists():
            kept.setdefault("OPAL_PREFIX", str(venv))
            kept.setdefault("OMPI_MCA_orte_launch_agent", str(venv / "bin" / "orted"))
    if user.pw_uid == 0:
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept


def command(cluster: Cluster, host: str, words: Sequence[str], user: pwd.struct_passwd, directory: Path) -> Command:
    """The full command that runs `words` on the host as `user` in `directory`."""
    return [*virtual.inside(cluster, host), *as_user(user), "env", f"--chdir={directory}", "--", *words]


def become(cluster: Cluster, host: str, words: Sequence[str], *, extra: Sequence[str] = (), dry_run: bool) -> None:
    """Replace this process with the command. Returns only for a dry run. Raises Failure (2, 69)."""
    user = pwd.getpwnam(calling_user())
    kept = environment(os.environ, user, extra)
    # The user's PATH and library path must only apply after root's rights are dropped.
    late = {name: kept.pop(name) for name in list(kept) if name == "PATH" or name.startswith("LD_")}
    full = command(cluster, host, [*(f"{name}={value}" for name, value in late.items()), *words], user, Path.cwd())
    if dry_run:
        print(shlex.join(full))
        return
    if shutil.which(words[0], path=late["PATH"]) is None:
        raise Failure(f"host {host}: no command {words[0]!r} in PATH ({late['PATH']})", exits.USAGE)
    sys.stdout.flush()
    os.execve(shutil.which(full[0], path=ROOT_PATH) or find(full[0]), full, {**kept, "PATH": ROOT_PATH})


def through_sudo(arguments: Sequence[str], extra: Sequence[str] = ()) -> NoReturn:
    """Replace this process with `sudo tools/cluster.sh ARGUMENTS`. Raises Failure (77) if sudo asks for a password."""
    os.environ.update({kept: os.environ[name] for kept, name in UNSAFE.items() if name in os.environ})
    names = [name for name in os.environ if passes(name, (*ON_A_HOST, *extra)) and name != "PATH"]
    refusal = "entering a virtual host needs root; hint: run it with sudo (the command still runs as you)"
    become_root(refusal, "cluster.sh", "hvdtrain.lab", arguments, f"--preserve-env={','.join(names)}")
