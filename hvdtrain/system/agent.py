"""An ssh connection to a host that runs `probe` there and sends it questions.

The user's own ssh settings apply, with two exceptions: ssh must not prompt (BatchMode), and it must not use a shared
connection, because an open one would hide that a new one fails. Nothing is written to known_hosts or to the host.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

from hvdtrain.system import cgroup, link_probe, probe, ssh
from hvdtrain.system.probe import MARK

LOGIN_S = 20.0
"""Limit for a login. It is generous: a host may be busy, or may look up its users in a directory service."""
BOOT = "import sys, json; [exec(text, globals()) for text in json.loads(sys.stdin.readline())]"
LOCAL = [sys.executable, "-ISuc", BOOT]
"""Command that starts a probe on this machine."""
ANSWER_S = 30.0


class Unreachable(Exception):
    """A host did not answer. `reason` says why in a few words, `fix` what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix


# Words in ssh's message, reason, fix. The first match counts; {host} is the host.
SSH_ERRORS = [
    (
        "could not resolve hostname",
        "its name is unknown on this machine",
        "check the spelling, or add it to /etc/hosts",
    ),
    (
        "remote host identification has changed",
        "its host key has changed",
        "if the host was reinstalled: ssh-keygen -R {host}; ssh {host} true. If not, this may be an attack",
    ),
    (
        "host key verification failed",
        "its host key is unknown on this machine, so ssh would prompt",
        "run ssh {host} true, compare the fingerprint, answer yes",
    ),
    (
        "permission denied",
        "it requires a password",
        "ssh-copy-id {host} (create a key first with ssh-keygen; one with a passphrase needs ssh-add)",
    ),
    (
        "too many authentication failures",
        "it rejected the login after too many keys",
        "set IdentitiesOnly yes in ~/.ssh/config",
    ),
    (
        "connection refused",
        "no server answers at its ssh port",
        "start sshd there (systemctl start ssh), or set its port in ~/.ssh/config",
    ),
    ("no route to host", "there is no route to it", "check that it is on and on this network: ping {host}"),
    ("network is unreachable", "there is no route to it", "check this machine's network: ip route"),
    ("timed out", "no answer in 5 s", "check that it is on and that no firewall drops TCP port 22: ping {host}"),
    ("syntaxerror", "its python3 is older than 3.7", "create the same environment at the same path there: make setup"),
    ("python3: not found", "it has no Python 3", "install python3 there, or create the same environment as here"),
    (
        "connection closed by",
        "it closed the connection before the login",
        "see sshd's log there (MaxStartups, hosts.deny)",
    ),
    ("connection reset by", "it closed the connection before the login", "see sshd's log there (MaxStartups)"),
]


def explain(host: str, message: str) -> Unreachable:
    """Translate ssh's own message for the user."""
    lower = message.lower()
    for words, reason, fix in SSH_ERRORS:
        if words in lower:
            return Unreachable(reason, fix.format(host=host))
    last = next((line for line in reversed(message.splitlines()) if line.strip()), "no message")
    return Unreachable(f"ssh failed: {last.strip()}", f"try: ssh -o BatchMode=yes {host} true")


def ssh_command(host: str, python: str) -> list[str]:
    """Command that starts `probe` on a host, with this environment's Python or else python3, in any login shell."""
    # -I -S: without the user's settings and site-packages
    script = 'test -x "$0" && exec "$0" -ISuc "$1"; exec python3 -ISuc "$1"'
    words = ["exec", "sh", "-c", script, python, BOOT]
    return ssh.command(host, words, "-T", "-x", "-o", "ControlPath=none")


class Agent:
    """A running probe. `hello` waits until it answers, `ask` may be called from several threads, `with` ends it."""

    def __init__(self, host: str, command: list[str]) -> None:
        self.host = host
        self.noise: list[str] = []
        """Lines that the login shell printed before the probe's first answer."""
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
        for thread in self._threads:  # in this order, because the second waits for the first
            thread.start()
        texts = [inspect.getsource(module) for module in (cgroup, link_probe, probe)]
        self._send(json.dumps([*texts, "answer_questions()"]))

    def hello(self) -> None:
        """Wait until the probe runs. Raises Unreachable with the reason if that takes more than LOGIN_S."""
        left_s = self._started_s + LOGIN_S - time.monotonic()
        try:
            self._waiting[0].result(timeout=max(left_s, 0.1))
        except TimeoutError:
            fix = f"find out where it waits: ssh -v -o BatchMode=yes {self.host} true (DNS, GSSAPI, the login shell?)"
            raise Unreachable(f"no login within {LOGIN_S:g} s", fix) from None

    def ask(self, question: str, *, within_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Return the answer. Raises Unreachable if the host reports an error or does not answer in time."""
        future = self.start(question, **arguments)
        try:
            return future.result(timeout=within_s)
        except TimeoutError:
            raise Unreachable(f"no answer in {within_s:g} s ({question})", "check the host's load") from None

    def start(self, question: str, **arguments: Any) -> Future[Any]:
        """Send a question without waiting for the answer."""
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
        with contextlib.suppress(OSError):  # the probe has ended; _listen fails the waiting futures
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            before, mark, answer = line.partition(MARK)
            if before.strip():
                self.noise.append(before.rstrip())
            if not mark:
                continue
            message = json.loads(answer)
            if message["id"] == 0:
                self.login_s = time.monotonic() - self._started_s
            future = self._waiting[message["id"]]
            if "error" in message:
                future.set_exception(Unreachable(message["error"], ""))
            else:
                future.set_result(message["answer"])
        self._threads[0].join(timeout=2)  # wait for all of ssh's error messages
        with self._lock:
            self._ended = explain(self.host, "".join(self._errors))
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._ended)

    def _listen_to_errors(self) -> None:
        for line in self._process.stderr or ():
            self._errors.append(line)

    def __exit__(self, *_: object) -> None:
        """End the probe by closing its input. It then ends its own threads."""
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
