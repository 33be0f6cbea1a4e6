"""Compare two ranks that share one GPU with one rank alone: samples per second over all ranks.

    python tools/bench_gpu.py

Trains ResNet-34 at full width (21.3 M parameters) on digits of 80x80, 64 samples per rank, bf16, under torchrun. The
ranks are on one host, or (root) each on a host, which encode and decode: UTS namespaces and loopback. Then a user's
script (`bare_loop.py`, 32 samples per rank, fp32) and the same workload. `--source DIR` runs another checkout in turn
with this one. `make gpu-check` runs this after the tests, on one host.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = ("int8", "powersgd:rank=4", "local-sgd:every=8", "local-sgd:every=2,staleness=1+powersgd:rank=12,bits=4")
WORKLOAD = ["-m", "hvdtrain.resnet", "--json", "--evaluate-samples", "64", "--checkpoint-steps", "0"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node"]
SAME = {"gpu": ["--image-size", "80"], "cpu": ["--width", "0.0625"]}
"""Options of workload and script"""
LIMIT_S = 120


def samples_per_s(source: Path, hosts: int, ranks: int, program: list[str], strategy: str = "") -> float | str:
    """Train, and return samples per second without evaluations, or the error message."""
    port = str(29500 + os.getpid() % 500)
    commands = []
    for host in range(hosts):
        nodes = ["--nnodes", str(hosts), "--node-rank", str(host), "--master-addr", "127.0.0.1", "--master-port", port]
        commands.append([sys.executable, *TORCHRUN, str(ranks // hosts), *nodes, "--no-python", sys.executable])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hosts").write_text("127.0.0.1 localhost gpu-0 gpu-1\n")
        if hosts > 1:
            enter = 'hostname gpu-$0 && mount --bind $1/hosts /etc/hosts && shift && exec "$@"'
            inside = ["unshare", "--uts", "--mount", "--", "sh", "-c", enter]
            commands = [[*inside, str(host), folder, *command] for host, command in enumerate(commands)]
        if ranks == 1:
            commands = [[sys.executable]]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
        environment |= {"HVDTRAIN_RECORD": "0", "HVDTRAIN_STRATEGY": strategy or "hierarchical"}
        if program[0] == "-m":
            program = [*program, "--run-dir", f"{folder}/run", *(["--strategy", strategy] if strategy else [])]
        processes = [
            subprocess.Popen(
                [*command, *program],
                env=environment,
                cwd=source,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for command in commands
        ]
        said = ["", ""]
        for process in processes:
            try:
                said = [*process.communicate(timeout=LIMIT_S)] if process is processes[0] else said
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                for each in processes:
                    each.kill()
                return f"more than {LIMIT_S} s"
        if any(process.returncode for process in processes):
            return "\n".join(line for line in said[1].splitlines() if "hvdtrain" in line or "Error" in line)[-900:]
    figures = json.loads(said[0].splitlines()[-1] if program[0] != "-m" else said[0])
    return float(figures["samples_per_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"), help="cpu: a small model, to try this out")
    parser.add_argument("--epochs", type=int, default=8, help="default: 8")
    parser.add_argument("--source", type=Path, help="another checkout")
    known = ["1", "2", "1,2"]
    parser.add_argument("--hosts", choices=known, default=known[-1 if os.geteuid() == 0 else 0], help="2 needs root")
    options = parser.parse_args()
    if options.source and not (options.source / "hvdtrain").is_dir():
        parser.error(f"--source {options.source}: no hvdtrain there; hint: git worktree add DIR COMMIT")
    options.epochs = str(options.epochs)
    model = ["--image-size", "80", "--batch-size", "64", "--precision", "bf16", "--epochs", options.epochs]
    if options.device == "cpu":
        model = ["--width", "0.0625", "--epoch-samples", "256", "--epochs", "1"]
    flags = ["--device", options.device, *model]
    sources = {"this": ROOT} | ({"other": options.source.resolve()} if options.source else {})
    workload = [*WORKLOAD, *flags]
    alone = samples_per_s(ROOT, 1, 1, workload)
    print(f"one rank alone: {alone} samples/s", flush=True)
    for strategy in STRATEGIES:
        for hosts in map(int, options.hosts.split(",")):
            for name, source in sources.items():
                got = samples_per_s(source, hosts, 2, workload, strategy)
                print(f"{strategy}  {hosts} hosts  {name}: {got} samples/s  {ratio(got, alone)}", flush=True)
    device = "cuda" if options.device == "gpu" else "cpu"
    script = [str(ROOT / "tools" / "bare_loop.py"), "torch", "--library", "hvdtrain", "--device", device]
    script += ["--warmup", "40", "--epochs", options.epochs, *SAME[options.device]]
    workload = [*WORKLOAD, "--device", options.device, "--epochs", options.epochs, *SAME[options.device]]
    for strategy in STRATEGIES:
        ours, theirs = (samples_per_s(ROOT, 1, 2, each, strategy) for each in (workload, script))
        print(f"{strategy}: workload {ours}, script {theirs} samples/s  {ratio(ours, theirs)}", flush=True)
    return 0


def ratio(one: float | str, other: float | str) -> str:
    return f"{one / other:.2f}" if isinstance(one, float) and isinstance(other, float) else ""


if __name__ == "__main__":
    sys.exit(main())
