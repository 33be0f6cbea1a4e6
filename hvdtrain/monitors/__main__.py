"""Shows what the monitors can measure on this host: `hvdtrain monitors`."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from hvdtrain import monitors
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure

PURPOSE = """Show which sensors this host has, what their readings come from, and what keeps the others from being read.

examples:
  hvdtrain monitors
  hvdtrain monitors --seconds 10 --json
  python -m hvdtrain.resnet --monitor power,resources --monitor-idle-s 30
"""
FOR_GOOD = """To let every user read RAPL after each boot, write this line to /etc/udev/rules.d/90-rapl.rules
(it has been root's alone since CVE-2020-8694, because it can betray what other users compute):
SUBSYSTEM=="powercap", ACTION=="add", RUN+="/bin/chmod a+r /sys%p/energy_uj"
"""


def parser() -> Parser:
    top = Parser(prog="hvdtrain monitors", description=PURPOSE)
    top.add_argument("--json", action="store_true", help="one JSON document")
    top.add_argument("--seconds", type=float, default=1.0, help="how long to measure the power shown (default: 1)")
    return top


def sensors(root: Path, seconds: float) -> dict[str, Any]:
    """The document of `--json`. Power is the mean over `seconds`, null where there is no reading."""
    from hvdtrain.monitors import rapl
    from hvdtrain.monitors.nvml import Nvml
    from hvdtrain.monitors.resources import Resources

    nvml = Nvml()
    found = [*rapl.sensors(root, seconds), *nvml.sensors()]
    began_s = time.monotonic()
    for sensor in found:
        sensor.take(began_s)
    time.sleep(seconds)
    ended_s = time.monotonic()
    devices = []
    for sensor in found:
        joules = sensor.take(ended_s)
        about = {"device": sensor.device, "name": sensor.name, "source": sensor.source, "reason": sensor.reason}
        devices.append({**about, "power_w": None if joules is None else joules / (ended_s - began_s)})
    resources = Resources([], nvml)
    counts = resources.take(0.0)
    return {
        "schema": "hvdtrain/monitors/1",
        "host": socket.gethostname(),
        "devices": devices,
        "zones_left_out": [
            {"zone": zone.path.name, "name": zone.name, "reason": zone.left_out}
            for zone in rapl.zones(root)
            if zone.left_out
        ],
        "resources": {
            **resources.describe(),
            "nics": [nic["nic"] for nic in counts["nics"]],
            "gpus": [gpu["device"] for gpu in counts["gpus"]],
        },
    }


def say(text: str, head: str) -> None:
    """A line that begins with `head`; on a narrow terminal several, whose words are whole."""
    width = shutil.get_terminal_size((sys.maxsize, 0)).columns
    wrapper = textwrap.TextWrapper(width, head, " " * len(head), break_long_words=False, break_on_hyphens=False)
    print(wrapper.fill(text) or head.rstrip())


def show(document: dict[str, Any]) -> None:
    rows = [("device", "source", "power", "name; what keeps it from being read")]
    for device in document["devices"]:
        power = "-" if device["power_w"] is None else f"{device['power_w']:.1f} W"
        text = "; ".join(part for part in (device["name"], device["reason"]) if part)
        rows.append((device["device"], device["source"] or "absent", power, text))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    print(f"--monitor power on {document['host']}: energy, each device once")
    for row in rows:
        head = "  " + "".join(f"{cell.ljust(width)}  " for cell, width in zip(row, widths, strict=False))
        say(row[3], head)
    for zone in document["zones_left_out"]:
        say(f"{zone['zone']} ({zone['name']}): {zone['reason']}", "  not counted: ")
    if any("chmod" in (device["reason"] or "") for device in document["devices"]):
        print(FOR_GOOD, end="")
    counted = document["resources"]
    of = "the machine's" if counted["cpu"] == "machine" else f"by the CPU quota of {counted['cpu']}"
    print("--monitor resources")
    say(f"CPU percent of {counted['cores']:g} cores, {of}; of each rank with its threads and children", "  ")
    print(f"  RAM of {counted['ram_bytes'] / 2**30:.1f} GiB, the machine's")
    for what, names in (("NICs", counted["nics"]), ("disks", counted["disks"]), ("GPUs", counted["gpus"])):
        say(", ".join(names) or "none", f"  {what}: ")


def main(arguments: list[str]) -> int:
    """Returns the exit code; raises Failure, whose message is for the user."""
    asked = parser().parse_args(arguments)
    if not 0 < asked.seconds <= 60:  # within that no counter starts again twice
        raise Failure(f"--seconds {asked.seconds:g}: give a number above 0, at most 60", exits.USAGE)
    document = sensors(Path(monitors.powercap_root()), asked.seconds)
    print(json.dumps(document, indent=2)) if asked.json else show(document)
    return exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
