"""The command `hvdtrain measure`: what some computers and their links do for training, as one small file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.results import measured
from hvdtrain.strategies.presets import NAMES as PRESETS
from hvdtrain.system import exits, files
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import parse_hosts

PURPOSE = """Measure what these hosts and their links do for training, as one file that you can share.

It takes about five minutes: the doctor's checks, a plan, then some steps of ResNet-34 on the first host and on all
hosts, with each preset. The plan's predictions are made before the runs and are in the file, so each file tests
`hvdtrain plan`. The file has no names of hosts or users, no addresses and no paths.

examples:
  hvdtrain measure -H a:1,b:1 -o measured.json
  hvdtrain results measured measured.json
"""
MODEL = ["--framework", "torch", "--width", "0.25", "--image-size", "32", "--seed", "1"]
RANK_BATCH, SAMPLES = 32, 1437
"""Samples per rank on all hosts, and samples of hvdtrain's digits"""
RUN_S, LEAST_STEPS, MOST_STEPS = 20.0, 6, 60
PACKAGES = ("torch", "numpy", "hvdtrain")


def parser() -> Parser:
    top = Parser(prog="hvdtrain measure", description=PURPOSE)
    top.add_argument(
        "-H", "--hosts", required=True, metavar="A:1,B:1", help="the hosts and their ranks, this one first"
    )
    top.add_argument("-o", "--output", type=Path, default=Path("measured.json"), metavar="FILE", help="(%(default)s)")
    top.add_argument("--root", type=Path, default=Path("results"), metavar="DIR", help="for the run folders (results)")
    top.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    return top


def main(arguments: Sequence[str]) -> int:
    """Run the command. Raises Failure (2, 69, 73), or with the exit code of a command that fails."""
    options = parser().parse_args(list(arguments))
    slots = parse_hosts(options.hosts)
    if len(slots) < 2:
        raise Failure(f"-H {options.hosts}: one host has no link; hint: name two hosts", exits.USAGE)
    batch = str(RANK_BATCH * sum(slot.slots for slot in slots))
    model, hosts = [*MODEL, "--global-batch-size", batch], ["-H", options.hosts]
    strategies = [word for preset in PRESETS for word in ("--strategy", preset)]
    doctor, plan = ["doctor", *hosts, "--json"], ["plan", "resnet", *model, *hosts, *strategies, "--fresh", "--json"]
    root = options.root / time.strftime("measured-%Y%m%dT%H%M%SZ", time.gmtime())
    if options.dry_run:
        print(*(f"hvdtrain {' '.join(words)}" for words in (doctor, plan)), sep="\n")
        print(f"# then some steps on {slots[0].host} and on all hosts, with {', '.join(PRESETS)}, into {root}")
        return exits.OK
    if not os.access(options.output.resolve().parent, os.W_OK):
        raise Failure(f"{options.output}: its folder cannot be written; hint: -o FILE", exits.CANNOT_WRITE)
    _say("checking the hosts and measuring their links")
    checks = _asked(doctor, accepted=(exits.OK, exits.FAILED))["checks"]
    if failed := next((check for check in checks if check["status"] == "fail"), None):
        raise Failure(f"{failed['where']}: {failed['what']}; hint: {failed['fix']}", exits.UNREACHABLE)
    if any(link[key] is None for link in _links(checks) for key in ("there_mbit", "back_mbit", "round_trip_ms")):
        raise Failure(f"a link could not be measured; hint: hvdtrain doctor -H {options.hosts}", exits.UNREACHABLE)
    _say("predicting the steps")
    planned = _asked(plan)
    one, *_ = planned["networks"]
    predictions = one["hosts"][-1]["predictions"]

    def trained(host_words: str, strategy: str, name: str, step_s: float) -> dict[str, Any]:
        steps = max(LEAST_STEPS, min(MOST_STEPS, SAMPLES // int(batch), round(RUN_S / step_s)))
        _say(f"training {2 * steps} steps: {name}")
        sized = ["--epochs", "2", "--epoch-samples", str(steps * int(batch)), "--run-dir", str(root / name)]
        program = [sys.executable, "-m", "hvdtrain.resnet", *model, *sized, "--strategy", strategy]
        _run(["launch", "mpirun", "-H", host_words, *program])
        return _asked(["results", "export", str(root / name), "--to", "json"])["rows"][0]

    first = slots[0]
    alone = trained(f"{first.host}:1", "exact", "one-host", planned["one_host"]["step_s"])
    runs = [
        trained(options.hosts, preset, preset, each["step_s"])
        for preset, each in zip(PRESETS, predictions, strict=True)
    ]
    document = _document(checks, planned, alone, predictions, runs, [slot.host for slot in slots])
    files.put(options.output, json.dumps(document, indent=1).encode() + b"\n", "-o FILE")
    print(measured.text([document]), end="")
    _say(f"wrote {options.output}: it has no names; please attach it to an issue, so that others can compare")
    return exits.OK


def _document(
    checks: Sequence[dict[str, Any]],
    planned: dict[str, Any],
    alone: dict[str, Any],
    predictions: Sequence[dict[str, Any]],
    runs: Sequence[dict[str, Any]],
    names: Sequence[str],
) -> dict[str, Any]:
    """Return the file's content. Hosts are numbered, and only chosen facts are taken over."""
    facts = {(check["name"], check["where"]): check["facts"] for check in checks}
    packages = next(check["facts"] for check in checks if check["name"] == "packages")  # of this machine
    hosts = []
    for number, name in enumerate(names, start=1):
        nic = facts.get(("nic", name), {})
        used: dict[str, Any] = next((each for each in nic.get("candidates", ()) if each["name"] == nic["used"]), {})
        cores = facts.get(("slots", name), {}).get("cores")
        link = {key: used.get(key) for key in ("kind", "mtu_bytes", "speed_mbit")}
        hosts.append({"host": number, "cores": cores, "step_s": planned["steps_s"].get(name), **link})
    links = [{**link, "hosts": [1 + names.index(each) for each in link["hosts"]]} for link in _links(checks)]
    presets = [
        {
            "preset": preset,
            "strategy": run["strategy"],
            "predicted_s": each["step_s"],
            "interval_s": each["interval_s"],
            "step_s": run["step_s"],
            "waiting_s": run["communication_s"],
            "bytes_per_step": run["bytes_per_step"],
            "speedup": alone["step_s"] / run["step_s"],
        }
        for preset, each, run in zip(PRESETS, predictions, runs, strict=True)
    ]
    return {
        "schema": measured.SCHEMA,
        "version": __version__,
        "python": packages["python"],
        "packages": {name: packages["packages"].get(name) for name in PACKAGES},
        "processor": planned["machine"]["processor"],
        "warnings": sorted({check["name"] for check in checks if check["status"] == "warn"}),
        "hosts": hosts,
        "links": links,
        "model": planned["model"],
        "parameters": alone["parameters"],
        "global_batch": alone["global_batch"],
        "one_host": {"predicted_s": planned["one_host"]["step_s"], "step_s": alone["step_s"]},
        "presets": presets,
    }


def _links(checks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [check["facts"] for check in checks if check["name"] == "speed"]


def _say(words: str) -> None:
    print(f"measure: {words}", file=sys.stderr, flush=True)


def _run(words: Sequence[str], accepted: Sequence[int] = (exits.OK,)) -> str:
    """Run an hvdtrain command and return its output. Raises Failure with its exit code and its last line."""
    command = [sys.executable, "-m", "hvdtrain.cli", *words]
    environment = {name: value for name, value in os.environ.items() if name != "HVDTRAIN_STRATEGY"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode not in accepted:
        lines = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: ")]
        said = lines[-1].removeprefix("hvdtrain: ") if lines else f"it ended with {done.returncode}"
        raise Failure(f"{' '.join(words[:2])}: {said}", done.returncode)
    return done.stdout


def _asked(words: Sequence[str], accepted: Sequence[int] = (exits.OK,)) -> Any:
    return json.loads(_run(words, accepted))
