"""The doctor's ear on a host: one ssh connection that runs `probe` there and asks it things.

The user's own ssh settings hold, with two exceptions: nothing may ask (BatchMode), and no shared connection is used,
because an open one would hide that a new one fails. Nothing is written to known_hosts or to the host.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

from hvdtrain.doctor import probe
from hvdtrain.doctor.probe import MARK
from hvdtrain.system import link_probe

SSH_PATIENCE_S = 5.0
"""A host's sshd must answer within this time"""
LOGIN_S = 20.0
"""And let us in within this one: a busy host, or one that looks up its users elsewhere, takes its time"""
BOOT = "import sys, json; [exec(text, globals()) for text in json.loads(sys.stdin.readline())]"
LOCAL = [sys.executable, "-ISuc", BOOT]
"""Starts a probe on this machine"""
ANSWER_S = 30.0


class Unreachable(Exception):
    """A host did not answer: `reason` says why in a few words, `fix` what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


# what ssh says -> reason, fix. The first that fits; {host} is the host.
SSH_SAYS = [
    (
        "could not resolve hostname",
        "its name is not known here",
        "check the spelling, or add it to /etc/hosts",
    ),
    (
        "remote host identification has changed",
        "its host key is not the one known here",
        "if the host was set up anew: ssh-keygen -R {host}; ssh {host} true. If not, someone may be in between",
    ),
    (
        "host key verification failed",
        "its host key is not known here, so ssh would ask",
        "ssh {host} true, compare the fingerprint, answer yes",
    ),
    (
        "permission denied",
        "it does not let us in without a password",
        "ssh-copy-id {host} (make a key first with ssh-keygen; one with a passphrase needs ssh-add)",
    ),
    ("too many authentication failures", "it refused after too many keys", "set IdentitiesOnly yes in ~/.ssh/config"),
    (
        "connection refused",
        "nothing answers at its ssh port",
        "start sshd there (systemctl start ssh), or name its port in ~/.ssh/config or with --ssh-port",
    ),
    ("no route to host", "there is no route to it", "check that it is on and on this network: ping {host}"),
    ("network is unreachable", "there is no route to it", "check this machine's network: ip route"),
    ("timed out", "no answer in 5 s", "check that it is on and that no firewall drops TCP port 22: ping {host}"),
    ("syntaxerror", "its python3 is older than 3.7", "make the same environment at the same path there: make setup"),
    ("python3: not found", "no Python 3 found there", "install python3 there, or make the same environment as here"),
    (
        "connection closed by",
        "it closed the connection before the login",
        "see sshd's log there (MaxStartups, hosts.deny)",
    ),
    ("connection reset by", "it closed the connection before the login", "see sshd's log there (MaxStartups)"),
]


def why(host: str, said: str) -> Unreachable:
    """Translates ssh's own message for the user."""
    lower = said.lower()
    for words, reason, fix in SSH_SAYS:
        if words in lower:
            return Unreachable(reason, fix.format(host=host))
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
    return Unreachable(f"ssh failed: {last.strip()}", f"try: ssh -o BatchMode=yes {host} true")


def ssh_command(host: str, python: str, options: list[str]) -> list[str]:
    """Starts `probe` on a host with the Python of this environment, or else its python3; any login shell will do."""
    # -I -S: no user's settings, no site-packages
    inner = f'p={shlex.quote(python)}; test -x "$p" || p=python3; exec "$p" -ISuc {shlex.quote(BOOT)}'
    fixed = ["-T", "-x", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_PATIENCE_S:g}", "-o", "ControlPath=none"]
    alive = ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR"]
    return ["ssh", *fixed, *alive, *options, "--", host, f"exec sh -c {shlex.quote(inner)}"]


class Agent:
    """A running probe; `hello` waits for it. `ask` may be called from several threads; `with` ends it."""

    def __init__(self, host: str, command: list[str]) -> None:
        self.host = host
        self.noise: list[str] = []
        """What the login shell printed before the probe spoke"""
        self.login_s = 0.0
        self._errors: list[str] = []
        self._ended: Unreachable | None = None
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self._lock = threading.Lock()
        self._started_s = time.monotonic()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", bufsize=1
        )
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._listen_to_errors, self._listen)]
        for thread in self._threads:  # in this order: the second waits for the end of the first
            thread.start()
        texts = [inspect.getsource(module) for module in (link_probe, probe)]
        self._send(json.dumps([*texts, "answer_questions()"]))

    def hello(self) -> None:
        """Waits until the probe runs. Raises Unreachable, with the reason, if it does not within LOGIN_S."""
        left_s = self._started_s + LOGIN_S - time.monotonic()
        try:
            self._waiting[0].result(timeout=max(left_s, 0.1))
        except TimeoutError:
            fix = f"see where it waits: ssh -v -o BatchMode=yes {self.host} true (slow DNS, GSSAPI, the login shell?)"
            raise Unreachable(f"no login within {LOGIN_S:g} s", fix) from None

    def ask(self, question: str, *, within_s: float = ANSWER_S, **arguments: Any) -> Any:
        """The answer. Raises Unreachable if the host says that it failed or says nothing in time."""
        future = self.start(question, **arguments)
        try:
            return future.result(timeout=within_s)
        except TimeoutError:
            raise Unreachable(f"no answer in {within_s:g} s ({question})", "look at the host's load") from None

    def start(self, question: str, **arguments: Any) -> Future[Any]:
        """Sends a question; returns at once."""
        future: Future[Any] = Future()
        with self._lock:
            number = len(self._waiting)
            self._waiting[number] = future
            if self._ended:
                future.set_exception(self._ended)
                return future
            self._send(json.dumps({"id": number, "do": question, "with": arguments}))
        return future

    def _send(self, line: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError):  # it is gone; _listen tells those who wait
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            before, mark, answer = line.partition(MARK)
            if before.strip():
                self.noise.append(before.rstrip())
            if not mark:
                continue
            said = json.loads(answer)
            if said["id"] == 0:
                self.login_s = time.monotonic() - self._started_s
            future = self._waiting[said["id"]]
            if "error" in said:
                future.set_exception(Unreachable(said["error"], ""))
            else:
                future.set_result(said["answer"])
        self._threads[0].join(timeout=2)  # all that ssh has to say about its end
        with self._lock:
            self._ended = why(self.host, "".join(self._errors))
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._ended)

    def _listen_to_errors(self) -> None:
        for line in self._process.stderr or ():
            self._errors.append(line)

    def __exit__(self, *_: object) -> None:
        """Ends the probe: its input ends, and it ends what it started."""
        with contextlib.suppress(OSError):
            assert self._process.stdin
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(timeout=2)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe and not pipe.closed and not any(thread.is_alive() for thread in self._threads):
                pipe.close()

    def __enter__(self) -> Agent:
        return self
