"""The throttle on other machines: the same checkout's throttle.sh there, through ssh, as root or with `sudo -n`.

First every host is asked for a dry run, so that a wrong name, a missing interface or a missing permission on one of
them changes nothing on any.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import shlex
import subprocess
import sys

from hvdtrain.system import exits, hosts
from hvdtrain.system.commands import CHECKOUT, Command, as_calling_user, find
from hvdtrain.system.exits import Failure

ANSWER_S = 120.0
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=5", "-o", "LogLevel=ERROR"]
AS_ROOT = 'test -x "$0" || { echo "throttle: no $0 here; put the checkout at the same place" >&2; exit 69; }; '
AS_ROOT += 'test "$(id -u)" = 0 && exec "$0" "$@"; exec sudo -n "$0" "$@"'


def command(host: str, arguments: list[str]) -> Command:
    """The command that runs the throttle on a host, in any login shell."""
    return [*SSH, "--", host, shlex.join(["sh", "-c", AS_ROOT, str(CHECKOUT / "tools" / "throttle.sh"), *arguments])]


def local_arguments(arguments: list[str]) -> list[str]:
    """The command line without its hosts, which each host gets."""
    result: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in {"--hosts", "--hostfile"}:
            next(words, None)
        elif not word.startswith(("--hosts=", "--hostfile=")):
            result.append(word)
    return result


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """Does on every host what the arguments ask for; returns the highest of their exit codes."""
    with as_calling_user():
        slots = hosts.parse_hosts(options.hosts) if options.hosts else hosts.read_hostfile(options.hostfile)
    names = [slot.host for slot in slots]
    told = local_arguments(arguments)
    find("ssh")
    if options.what in {"show", "verify"} or options.dry_run:
        return _report(_everywhere(names, told), as_json=options.json)
    tried = _everywhere(names, [*told, "--dry-run"] if options.what != "keep" else ["show", "--dev", options.dev])
    failed = {host: done for host, done in tried.items() if done.returncode}
    if failed:
        _report(failed, as_json=False)
        raise Failure(f"nothing changed on any host, because of {', '.join(failed)}", _worst(failed))
    done = _everywhere(names, told)
    code = _report(done, as_json=False)
    if code:
        good = [host for host, one in done.items() if not one.returncode]
        if good:
            which = f"--hosts {','.join(good)} --dev {options.dev}"
            print(
                f"throttle: it is done on {', '.join(good)}; to put these back: throttle.sh clear {which}",
                file=sys.stderr,
            )
    return code


def _everywhere(names: list[str], arguments: list[str]) -> dict[str, subprocess.CompletedProcess[str]]:
    limit_s = None if "verify" in arguments else ANSWER_S  # it measures as long as it is asked to

    def one(host: str) -> subprocess.CompletedProcess[str]:
        words = command(host, arguments)
        try:
            return subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(words, exits.UNREACHABLE, "", f"no answer in {ANSWER_S:g} s")

    with concurrent.futures.ThreadPoolExecutor(max_workers=16) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _code(done: subprocess.CompletedProcess[str]) -> int:
    if done.returncode == 255:  # ssh's own
        return exits.UNREACHABLE
    if done.returncode and "sudo:" in done.stderr:
        return exits.NO_PERMISSION
    return done.returncode


def _worst(results: dict[str, subprocess.CompletedProcess[str]]) -> int:
    return max(_code(done) for done in results.values())


def _report(results: dict[str, subprocess.CompletedProcess[str]], *, as_json: bool) -> int:
    """Prints the output of each host under its name."""
    documents = []
    for host, done in results.items():
        # A login shell may have said something before the document.
        before, brace, rest = done.stdout.partition("{\n") if as_json else (done.stdout, "", "")
        if brace:
            documents.append({"host": host, **json.loads(brace + rest)})
        for line in before.splitlines():
            print(f"{host}: {line}", file=sys.stderr if as_json else sys.stdout)
        said = done.stderr.strip()
        if _code(done) == exits.NO_PERMISSION and "sudo:" in said:
            said = f"{said.splitlines()[-1]}; let sudo run throttle.sh there without a password (sudoers(5), NOPASSWD)"
        for line in said.splitlines():
            print(f"{host}: {line.removeprefix('throttle: ')}", file=sys.stderr)
    if as_json:
        print(json.dumps({"schema": "hvdtrain/throttle-hosts/1", "hosts": documents}, indent=2))
    return _worst(results)
