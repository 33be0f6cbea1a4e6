"""Start torchrun on all hosts: `hvdtrain launch torchrun -H a:2,b:2 --strategy powersgd train.py`.

mpirun starts one torchrun on each host, so hosts, Slurm, interfaces, signals and the end of the job are as in
launch/mpirun.sh. The script runs under `hvdtrain.ddp` and needs no line of hvdtrain.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

from hvdtrain.launch import __main__ as launch
from hvdtrain.launch.link import choose_interface, find_hosts
from hvdtrain.system import cgroup, exits, hosts
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import Slots

PROGRAM = "hvdtrain launch torchrun"
FIRST_PORT, PORTS = 20_000, 10_000
"""Below the ephemeral ports, so that no connection has taken the port"""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Those at which torchrun ends its ranks: its own, and what the launcher makes of each"""


def parser() -> Parser:
    top = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] SCRIPT [ARGUMENT ...]",
        description="Start torchrun on all hosts with a script whose DistributedDataParallel exchanges by a strategy.",
        epilog=f"examples:\n  {PROGRAM} -H a:1,b:1 --strategy local-sgd:every=8+int8 examples/hf_lora.py",
        allow_abbrev=False,
    )
    add = top.add_argument
    add("-H", "--hosts", metavar="a:2,b:2", help="hosts and their ranks, the same number on each")
    add("--hostfile", type=Path, metavar="FILE", help="file with one `host slots=2` per line")
    add("--nic", metavar="DEVICE", help="network interface between the hosts (default: from the route to them)")
    add("--strategy", metavar="S", help="(default: HVDTRAIN_STRATEGY, or exact sums)")
    add("--grace", default="25", metavar="SECONDS", help="time for a checkpoint after SIGTERM (default: 25)")
    add("--dry-run", action="store_true", help="print the command and start nothing")
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments")
    return top


def main(arguments: list[str]) -> int:
    """Return the job's exit code. Raises Failure (2) for hosts with different numbers of ranks."""
    options = parser().parse_args(arguments)
    if not options.script:
        raise Failure(f"no script given; hint: {PROGRAM} -H a:1,b:1 train.py", exits.USAGE)
    if not options.dry_run and not Path(options.script[0]).is_file():
        raise Failure(f"{options.script[0]}: no such script; hint: {PROGRAM} -H a:1,b:1 train.py", exits.USAGE)
    options.np = None
    found, source = find_hosts(options, os.environ)
    if len({slot.slots for slot in found}) != 1:
        what = f"{source} {hosts.as_argument(found)}: torchrun needs the same number of ranks on each host"
        raise Failure(f"{what}; hint: -H a:2,b:2", exits.USAGE)
    names = [slot.host for slot in found]
    nic, _ = choose_interface(names, options.nic)
    store = f"{names[0]}:{FIRST_PORT + secrets.randbelow(PORTS)}"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(found)}"]
    command += [f"--nproc-per-node={found[0].slots}", "--rdzv-backend=c10d", f"--rdzv-endpoint={store}"]
    command += [f"--rdzv-id={secrets.token_hex(4)}", f"--signals-to-handle={SIGNALS}", "-m", "--", "hvdtrain.ddp"]
    command += ["--strategy", options.strategy] if options.strategy else []
    variables = {f"{library}_SOCKET_IFNAME": nic for library in ("GLOO", "NCCL")} if nic else {}
    if found[0].slots > 1 and "OMP_NUM_THREADS" not in os.environ:  # mpirun counts one process on each host
        variables["OMP_NUM_THREADS"] = str(cgroup.threads(cgroup.host_cores(), found[0].slots))
    words = ["mpirun", "-H", hosts.as_argument([Slots(host=name, slots=1) for name in names])]
    words += ["--grace", options.grace]
    words += ["--nic", nic] if nic else []
    words += [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    words += ["--dry-run"] if options.dry_run else []
    return launch.main([*words, *command, *options.script], PROGRAM)
