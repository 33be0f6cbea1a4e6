"""Run the throttle on other machines: throttle.sh of the same checkout, over ssh, as root or with `sudo -n`.

Each command is first tried as a dry run on every host. A wrong name, a missing interface or a missing permission on one
host then changes nothing on any host.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import subprocess
import sys

from hvdtrain.system import exits, hosts, ssh
from hvdtrain.system.commands import CHECKOUT, Command, as_caller, as_calling_user, find
from hvdtrain.system.exits import Failure

ANSWER_S = 120.0
AS_ROOT = 'test -x "$0" || { echo "throttle: no $0 on this host; hint: put the checkout at the same path" >&2; '
AS_ROOT += 'exit 69; }; test "$(id -u)" = 0 && exec "$0" "$@"; exec sudo -n "$0" "$@"'

Results = dict[str, subprocess.CompletedProcess[str]]


def command(host: str, arguments: list[str]) -> Command:
    """The command that runs the throttle on a host, whatever the login shell. ssh has the calling user's keys."""
    return as_caller() + ssh.command(host, ["sh", "-c", AS_ROOT, str(CHECKOUT / "tools" / "throttle.sh"), *arguments])


def local_arguments(arguments: list[str]) -> list[str]:
    """The command line for each host: without the options that list the hosts."""
    result: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in {"--hosts", "--hostfile"}:
            next(words, None)
        elif not word.startswith(("--hosts=", "--hostfile=")):
            result.append(word)
    return result


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run the command on every host. Returns the highest of their exit codes."""
    with as_calling_user():
        slots = hosts.parse_hosts(options.hosts) if options.hosts else hosts.read_hostfile(options.hostfile)
    names = [slot.host for slot in slots]
    words = local_arguments(arguments)
    find("ssh")
    if options.what == "verify" or options.dry_run:
        return _report(_run_everywhere(names, words), as_json=options.json)
    trial = _run_everywhere(names, [*words, "--dry-run"])
    failed = {host: done for host, done in trial.items() if done.returncode}
    if failed:
        _report(failed, as_json=False)
        raise Failure(f"nothing changed on any host, because of {', '.join(failed)}", _worst(failed))
    results = _run_everywhere(names, words)
    code = _report(results, as_json=False)
    succeeded = ",".join(host for host, done in results.items() if not done.returncode)
    if code and succeeded:
        undo = f"throttle.sh clear --hosts {succeeded} --dev {options.dev}"
        print(f"throttle: succeeded on {succeeded} only; hint: undo it with {undo}", file=sys.stderr)
    return code


def _run_everywhere(names: list[str], arguments: list[str]) -> Results:
    limit_s = None if "verify" in arguments else ANSWER_S  # its duration depends on its options

    def run(host: str) -> subprocess.CompletedProcess[str]:
        words = command(host, arguments)
        try:
            return subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(words, exits.UNREACHABLE, "", f"no answer in {ANSWER_S:g} s")

    with concurrent.futures.ThreadPoolExecutor(max_workers=16) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def _code(done: subprocess.CompletedProcess[str]) -> int:
    if done.returncode == 255:  # an error of ssh itself
        return exits.UNREACHABLE
    if done.returncode and "sudo:" in done.stderr:
        return exits.NO_PERMISSION
    return done.returncode


def _worst(results: Results) -> int:
    return max(_code(done) for done in results.values())


def _report(results: Results, *, as_json: bool) -> int:
    """Print each host's output under its name. Returns the highest exit code."""
    documents = []
    for host, done in results.items():
        # A login shell may have printed something before the document.
        before, brace, rest = done.stdout.partition("{\n") if as_json else (done.stdout, "", "")
        if brace:
            documents.append({"host": host, **json.loads(brace + rest)})
        for line in before.splitlines():
            print(f"{host}: {line}", file=sys.stderr if as_json else sys.stdout)
        errors = done.stderr.strip()
        if _code(done) == exits.NO_PERMISSION and "sudo:" in errors:
            hint = "let sudo run throttle.sh there without a password (sudoers(5), NOPASSWD)"
            errors = f"{errors.splitlines()[-1]}; hint: {hint}"
        for line in errors.splitlines():
            print(f"{host}: {line.removeprefix('throttle: ')}", file=sys.stderr)
    if as_json:
        print(json.dumps({"schema": "hvdtrain/throttle-hosts/1", "hosts": documents}, indent=2))
    return _worst(results)
