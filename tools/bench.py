#!/usr/bin/env python3
"""Run a benchmark: `make bench-NAME`, or tools/bench.py NAME. --help after the name lists its options.

  loop      the training loop against a bare Horovod loop
  network   Horovod's all-reduce over slow links, under three launchers (root)
  backends  the TCP backend, Gloo and Open MPI (root)
  plan      predictions of `hvdtrain plan` against runs (root)
  scripts   a user's script and the workload, in turn (root)
  roofline  time to equal quality, ours and what people write by hand (root)
  stages    pipeline stages and data parallelism (root)
  coding    processor time of the reducers' coding, compared with a copy

Those marked (root) create virtual hosts. Each is a file, bench_NAME.py. Run bench_gpu.py directly: it needs no
environment of hvdtrain.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from hvdtrain.sweep.process import run_uninterrupted  # noqa: E402
from hvdtrain.system import exits  # noqa: E402
from hvdtrain.system.arguments import Parser  # noqa: E402
from hvdtrain.system.commands import need_root  # noqa: E402
from hvdtrain.system.exits import Failure  # noqa: E402
from hvdtrain.system.rates import all_reduce_s, goodput_both_ways, parse_rate, show_rate  # noqa: E402

NAMES, UNLIMITED = "abcdefgh", "unlimited"
QUEUED_UP_TO_BYTES = 1_000_000
"""Smaller transfers may pass through a link's queue faster than the rate"""
T = TypeVar("T")

# --- virtual hosts ----------------------------------------------------------------------------------------------------


def cluster(*arguments: str) -> None:
    run_uninterrupted([f"{ROOT}/tools/cluster.sh", *arguments], os.environ)


@contextlib.contextmanager
def hosts_up(name: str, count: int, cores: float | None = None, *more: str) -> Iterator[None]:
    """Virtual hosts a, b ..., each with `cores` or all cores. Raises Failure (77) without root."""
    need_root("the benchmark's virtual cluster")
    share = [] if cores is None else ["--cpu-share", f"{min(cores, os.cpu_count() or 1):g}"]
    cluster("up", "--name", name, "--hosts", ",".join(NAMES[:count]), *share, *more)
    try:
        yield
    finally:
        cluster("down", "--name", name)


def throttle(name: str, rate: str, host: str = "") -> None:
    """Set the rate of all links, or of one host's, such as 10mbit; UNLIMITED removes it."""
    words = ["clear" if rate == UNLIMITED else rate, "--name", name, *(["--host", host] if host else [])]
    run_uninterrupted([f"{ROOT}/tools/throttle.sh", *words], os.environ)


def on_host(name: str, words: Sequence[object], host: str = "a") -> list[str]:
    """The command that runs another one on a host."""
    return [f"{ROOT}/tools/cluster.sh", "exec", "--name", name, host, "--", *map(str, words)]


def listed(count: int, ranks: int = 1) -> str:
    """The hosts as launchers take them: a:1,b:1."""
    return ",".join(f"{host}:{ranks}" for host in NAMES[:count])


def document(words: Sequence[str], **variables: str) -> Any:
    """Run a command, and return the last JSON object that it printed. Raises Failure."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1"} | variables
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = re.findall(r"\{.*\}", done.stdout)
    if done.returncode or not found:
        errors = [line for line in done.stderr.splitlines() if "Error" in line or "hvdtrain:" in line]
        reason = errors[0] if errors else done.stderr[-600:]
        raise Failure(f"{' '.join(words)[-200:]} ended with {done.returncode}: {reason}")
    return json.loads(found[-1])


def limit_s(hosts: int, nbytes: int, rate_bit_s: float) -> float:
    """Seconds that the network needs for an all-reduce over `hosts` hosts."""
    return all_reduce_s(nbytes, hosts, goodput_both_ways(rate_bit_s))


def check_throttle(what: str, seconds: float, nbytes: int, limit: float) -> None:
    """Raises Failure for a transfer that was faster than its links."""
    if nbytes >= QUEUED_UP_TO_BYTES and seconds < limit / 1.2:
        reason = f"{what} took {seconds:.4f} s, but the network needs {limit:.4f} s"
        raise Failure(f"{reason}; hint: another program may have removed the throttle")


# --- options, repeats and results -------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(part) for part in words(text)]


def rates(text: str) -> list[str]:
    return [word if word == UNLIMITED else show_rate(parse_rate(word)) for word in words(text)]


def options_of(about: str | None, name: str, **defaults: Any) -> Parser:
    """A parser with an option for each default, and with --name (of the virtual cluster) and --json."""
    kinds = {"rates": rates, "hosts": numbers, "ranks_per_host": numbers, "out": Path}
    top = Parser(prog=f"bench.py {name}", description=about)
    for key, default in {"name": name[:8], **defaults}.items():
        kind = kinds.get(key, words if isinstance(default, list) else type(default))
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        top.add_argument(f"--{key.replace('_', '-')}", type=kind, default=default, help=f"(default: {shown})")
    top.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    return top


def known(top: Parser, given: Sequence[object], choices: Sequence[object]) -> None:
    """Exit with 2 for a word that is not among the choices."""
    if unknown := [each for each in given if each not in choices]:
        top.error(f"unknown {unknown[0]}; hint: choose from {', '.join(map(str, choices))}")


def say(row: object) -> None:
    print(json.dumps(row) if isinstance(row, dict) else row, file=sys.stderr, flush=True)


def in_turn(variants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run all variants `rounds` times, every second time in reverse order, so that drift favours none."""
    results: dict[str, list[T]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in list(variants)[:: 1 - 2 * (number % 2)]:
            results[name].append(variants[name]())
            say(f"round {number + 1}/{rounds}: {name} done")
    return results


def spread(values: Sequence[float], digits: int = 3) -> str:
    median, least, most = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} [{least:.{digits}f} .. {most:.{digits}f}]"


def show(options: Any, rows: Sequence[Mapping[str, Any]]) -> int:
    """Print the rows as a table or JSON document, and return the exit code."""
    if options.json:
        print(json.dumps({"schema": "hvdtrain/bench/4", "rows": rows}))
    else:
        print(pd.DataFrame(rows).to_string(index=False, na_rep="-", float_format="{:.4g}".format))
    return exits.OK


def main(arguments: list[str]) -> int:
    names = re.findall(r"^  ([a-z]+) ", __doc__ or "", re.MULTILINE)
    top = Parser(prog="bench.py", description=__doc__)
    top.add_argument("bench", metavar="NAME", choices=names)
    name = top.parse_args(arguments[:1]).bench
    code: int = importlib.import_module(f"bench_{name}").main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.modules["bench"] = sys.modules[__name__]
    exits.end(main, sys.argv[1:], "bench")
