"""The options with which hvdtrain calls ssh."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence

from hvdtrain.system.commands import Command, run
from hvdtrain.system.exits import Failure

CONNECT_S = 5
"""Seconds in which a host's sshd must accept a connection."""
ALIVE_S = 5
"""Seconds between keep-alive messages. A connection ends after three unanswered ones."""

FIXED = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", f"ServerAliveInterval={ALIVE_S}", "LogLevel=ERROR")
PROGRAM = ("ssh", *(part for option in FIXED for part in ("-o", option)))


def command(host: str, words: Sequence[str], *options: str) -> Command:
    """Words that run a command on `host` without a prompt. `options` are further options of ssh.

    sshd passes the command to the user's login shell, so each word is quoted.
    """
    return [*PROGRAM, *options, "--", host, shlex.join(words)]


def endpoint(host: str) -> tuple[str, int] | None:
    """(host name, port) to which ssh would connect, from the user's ssh settings. None if it goes through a proxy."""
    with contextlib.suppress(Failure):
        settings = dict(line.partition(" ")[::2] for line in run(["ssh", "-G", host]).splitlines())
        if any(settings.get(name, "none") != "none" for name in ("proxyjump", "proxycommand")):
            return None
        return settings["hostname"], int(settings["port"])
    return host, 22
