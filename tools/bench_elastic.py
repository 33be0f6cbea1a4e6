#!/usr/bin/env python3
"""Kill one of four ranks with hvdtrain, Horovod Elastic and torchrun in turn, and time until all ranks train again.

    sudo make bench-elastic BENCH_ARGS='--rounds 3 --rate 100mbit'

Creates four virtual hosts with a rank each (`elastic_loop.py`). Needs root. After the kill a library continues when
each host that it keeps has done a step: three hosts with hvdtrain and Horovod, all four with torchrun, which starts all
ranks again. hvdtrain takes back the lost host a few seconds later, which is not part of this time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_network import cluster  # noqa: E402
from chaos_faults import NAMES, UNLIMITED, Lab  # noqa: E402

from hvdtrain.system import exits, proc  # noqa: E402
from hvdtrain.system.arguments import Parser  # noqa: E402
from hvdtrain.system.commands import as_calling_user, need_root  # noqa: E402
from hvdtrain.system.exits import Failure  # noqa: E402
from hvdtrain.system.rates import parse_rate, show_rate  # noqa: E402

LIBRARIES = ("hvdtrain", "horovod", "torchrun")
LOOP = str(ROOT / "tools" / "elastic_loop.py")
STEPS, START_S, LIMIT_S = 20, 90.0, 120.0
"""Steps before the kill, and limits for the start and for the continuation"""
VICTIM = "c"


class Training:
    """A training on the four hosts, whose processes write the times of their steps."""

    def __init__(self, lab: Lab, name: str, library: str, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        with as_calling_user():
            folder.mkdir(parents=True)
        loop = [LOOP, library, str(folder), "--seconds", str(START_S + LIMIT_S)]
        python, bin_ = sys.executable, Path(sys.executable).parent
        commands: dict[str, list[str]] = {}
        if library == "hvdtrain":
            hosts = ",".join(f"{host}:1" for host in NAMES)
            commands["a"] = ["launch/mpirun.sh", "--quiet", "--elastic", "-H", hosts, python, *loop]
        elif library == "horovod":
            discovery = folder / "hosts.sh"
            discovery.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in NAMES))
            discovery.chmod(0o755)
            words = ["horovodrun", "-np", "4", "--min-np", "3", "--max-np", "4", "--network-interfaces", "eth0"]
            commands["a"] = [str(bin_ / words[0]), *words[1:], "--host-discovery-script", str(discovery), python, *loop]
        else:
            words = ["--nnodes", "4", "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-backend", "c10d"]
            words += ["--rdzv-endpoint", "a:29400", "--rdzv-id", "bench"]
            commands = {host: [str(bin_ / "torchrun"), *words, *loop] for host in NAMES}
        self._started = []
        for host, command in commands.items():
            inside = [f"{ROOT}/tools/cluster.sh", "exec", "--name", name, host, "--", *command]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            with (folder / f"{host}.log").open("w") as output:
                self._started.append(subprocess.Popen(inside, cwd=ROOT, env=environment, stdout=output, stderr=output))

    def ranks(self) -> dict[str, int]:
        """The process of the rank on each host that has done a step."""
        hosts = self._lab.processes()
        pids = {int(path.stem) for path in self._folder.glob("*.txt") if path.stat().st_size}
        return {host: pid for pid, host in hosts.items() if pid in pids and LOOP in proc.strings(pid, "cmdline")}

    def times(self, pid: int) -> list[float]:
        return [float(line) for line in (self._folder / f"{pid}.txt").read_text().split("\n")[:-1]]

    def wait_for_steps(self, least: int, hosts: int, after: float, seconds: float) -> float:
        """Wait until this many hosts have done `least` steps after a time. Return when the last of them had."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            late = [[at for at in self.times(pid) if at > after] for pid in self.ranks().values()]
            done = sorted(times[least - 1] for times in late if len(times) >= least)
            if len(done) >= hosts:
                return done[hosts - 1]
            if all(each.poll() is not None for each in self._started):
                break
            time.sleep(0.05)
        log = (self._folder / "a.log").read_text().splitlines()
        raise Failure(f"{self._folder}: no step of {hosts} hosts; {log[-1] if log else 'no output'}")


def seconds_to_continue(lab: Lab, name: str, library: str, folder: Path) -> float:
    training = Training(lab, name, library, folder)
    try:
        training.wait_for_steps(STEPS, len(NAMES), 0.0, START_S)
        killed_at = time.time()
        os.kill(training.ranks()[VICTIM], signal.SIGKILL)
        hosts = len(NAMES) if library == "torchrun" else len(NAMES) - 1
        return training.wait_for_steps(1, hosts, killed_at, LIMIT_S) - killed_at
    finally:
        lab.clean()


def main(arguments: list[str]) -> int:
    top = Parser(description=__doc__)
    top.add_argument("--rounds", type=int, default=3, help="kills per library (default: 3)")
    top.add_argument("--libraries", type=lambda text: text.split(","), default=list(LIBRARIES), help="default: all")
    top.add_argument("--rate", default=UNLIMITED, help="rate of the links (default: unlimited)")
    top.add_argument("--name", default="elastic", help="name of the virtual cluster (default: elastic)")
    top.add_argument("--out", type=Path, default=ROOT / "results" / "elastic", help="folder of the logs")
    top.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    options: argparse.Namespace = top.parse_args(arguments)
    if unknown := {*options.libraries} - {*LIBRARIES}:
        top.error(f"--libraries: unknown {', '.join(sorted(unknown))}; hint: choose from {', '.join(LIBRARIES)}")
    if options.rounds < 1:
        top.error(f"--rounds {options.rounds}; hint: give 1 or more")
    if options.rate != UNLIMITED:
        options.rate = show_rate(parse_rate(options.rate))
    need_root("the virtual cluster")
    shutil.rmtree(options.out, ignore_errors=True)
    found: dict[str, list[float]] = {library: [] for library in options.libraries}
    try:
        lab = Lab(options.name)
        lab.set_rate(options.rate)
        for number in range(options.rounds):
            for library in options.libraries:
                seconds = seconds_to_continue(lab, options.name, library, options.out.resolve() / f"{library}-{number}")
                found[library].append(seconds)
                print(f"round {number + 1}, {library}: {seconds:.1f} s", file=sys.stderr, flush=True)
    finally:
        cluster("down", "--name", options.name)
    rows: list[dict[str, Any]] = [
        {"library": library, "median_s": statistics.median(each), "least_s": min(each), "most_s": max(each)}
        for library, each in found.items()
    ]
    if options.json:
        print(json.dumps({"schema": "hvdtrain/bench-elastic/1", "rate": options.rate, "rows": rows}))
    else:
        print(pd.DataFrame(rows).to_string(index=False, float_format="{:.2f}".format))
    return exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "bench-elastic")
