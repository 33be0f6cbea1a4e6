"""A command on a virtual host: its streams, its exit code and its signals are the command's own.

The calling process becomes the command (execve(2)), so there is nothing in between that could lose any of them. It runs
as the calling user (under sudo: as the user who called sudo), in the same folder, with an environment by allow-list.
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
from hvdtrain.system.commands import CHECKOUT, SEARCHED, Command, as_user, become_root, caller, find
from hvdtrain.system.exits import Failure
from hvdtrain.system.variables import ON_A_HOST, passes

UNSAFE = {f"HVDTRAIN_KEPT_{name}": name for name in ("LD_LIBRARY_PATH", "TMPDIR")}
"""Names under which variables get through sudo that glibc removes from programs such as sudo (ld.so(8))"""


def environment(inherited: Mapping[str, str], user: pwd.struct_passwd, extra: Sequence[str] = ()) -> dict[str, str]:
    """What the command gets: the listed variables, `extra`, the user's own, and the checkout's .venv if it exists."""
    names = [name for name in inherited if passes(name, (*ON_A_HOST, *extra))]
    kept = {UNSAFE.get(name, name): inherited[name] for name in names}
    kept |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell or "/bin/sh"}
    kept.setdefault("PATH", SEARCHED)
    venv = Path(kept.get("VIRTUAL_ENV", CHECKOUT / ".venv"))
    if (venv / "bin" / "python").exists():  # sudo drops what activate has set
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
    """The whole command that runs `words` on the host as `user` in `directory`."""
    return [*virtual.inside(cluster, host), *as_user(user), "env", f"--chdir={directory}", "--", *words]


def become(cluster: Cluster, host: str, words: Sequence[str], *, extra: Sequence[str] = (), dry_run: bool) -> None:
    """Turns this process into the command. Returns only for a dry run. Raises Failure (2, 69)."""
    user = pwd.getpwnam(caller())
    kept = environment(os.environ, user, extra)
    # What decides which programs and libraries are loaded is the user's: it counts once root's rights are dropped.
    late = {name: kept.pop(name) for name in list(kept) if name == "PATH" or name.startswith("LD_")}
    full = command(cluster, host, [*(f"{name}={value}" for name, value in late.items()), *words], user, Path.cwd())
    if dry_run:
        print(shlex.join(full))
        return
    if shutil.which(words[0], path=late["PATH"]) is None:
        raise Failure(f"host {host}: no command {words[0]!r} in its PATH ({late['PATH']})", exits.USAGE)
    sys.stdout.flush()
    os.execve(shutil.which(full[0], path=SEARCHED) or find(full[0]), full, {**kept, "PATH": SEARCHED})


def through_sudo(arguments: Sequence[str], extra: Sequence[str] = ()) -> NoReturn:
    """`tools/cluster.sh ARGUMENTS` as root, where sudo asks nothing. Raises Failure (77) elsewhere."""
    os.environ.update({kept: os.environ[name] for kept, name in UNSAFE.items() if name in os.environ})
    names = [name for name in os.environ if passes(name, (*ON_A_HOST, *extra)) and name != "PATH"]
    refusal = "entering a virtual host needs root: run it with sudo (it changes back to you on the host)"
    become_root(refusal, "cluster.sh", arguments, f"--preserve-env={','.join(names)}")
