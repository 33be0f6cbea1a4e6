"""Lists the sensors of this host: `hvdtrain monitors`."""

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

PURPOSE = """List the power sensors and resource counters of this host, and the reason if a sensor cannot be read.

examples:
  hvdtrain monitors
  python -m hvdtrain.resnet --monitor power,resources
"""
MEASURED_S = 1.0
UDEV_RULE = """To let all users read RAPL after every boot, add this line to /etc/udev/rules.d/90-rapl.rules.
Only root can read it since CVE-2020-8694, because it can reveal the computations of other users:
SUBSYSTEM=="powercap", ACTION=="add", RUN+="/bin/chmod a+r /sys%p/energy_uj"
"""


def parser() -> Parser:
    top = Parser(prog="hvdtrain monitors", description=PURPOSE)
    top.add_argument("--json", action="store_true", help="print one JSON document")
    return top


def measure(root: Path) -> dict[str, Any]:
    """The document of `--json`. Power is the mean over MEASURED_S, or null without a reading."""
    from hvdtrain.monitors import rapl
    from hvdtrain.monitors.nvml import Nvml
    from hvdtrain.monitors.resources import Resources

    nvml = Nvml()
    sensors = [*rapl.sensors(root), *nvml.sensors()]
    began_s = time.monotonic()
    for sensor in sensors:
        sensor.take(began_s)
    time.sleep(MEASURED_S)
    ended_s = time.monotonic()
    devices = []
    for sensor in sensors:
        joules = sensor.take(ended_s)
        facts = {"device": sensor.device, "name": sensor.name, "source": sensor.source, "reason": sensor.reason}
        devices.append({**facts, "power_w": None if joules is None else joules / (ended_s - began_s)})
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


def print_wrapped(text: str, head: str) -> None:
    """Prints `head` and `text`, wrapped at the width of the terminal."""
    width = shutil.get_terminal_size((sys.maxsize, 0)).columns
    wrapper = textwrap.TextWrapper(width, head, " " * len(head), break_long_words=False, break_on_hyphens=False)
    print(wrapper.fill(text) or head.rstrip())


def show(document: dict[str, Any]) -> None:
    rows = [("device", "source", "power", "name; why it cannot be read")]
    for device in document["devices"]:
        power = "-" if device["power_w"] is None else f"{device['power_w']:.1f} W"
        text = "; ".join(part for part in (device["name"], device["reason"]) if part)
        rows.append((device["device"], device["source"] or "absent", power, text))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    print(f"--monitor power on {document['host']}: energy of each device")
    for row in rows:
        head = "  " + "".join(f"{cell.ljust(width)}  " for cell, width in zip(row, widths, strict=False))
        print_wrapped(row[3], head)
    for zone in document["zones_left_out"]:
        print_wrapped(f"{zone['zone']} ({zone['name']}): {zone['reason']}", "  not counted: ")
    if any("chmod" in (device["reason"] or "") for device in document["devices"]):
        print(UDEV_RULE, end="")
    counters = document["resources"]
    scope = "the machine" if counters["cpu"] == "machine" else f"the CPU quota of {counters['cpu']}"
    print("--monitor resources")
    print_wrapped(
        f"CPU: percent of {counters['cores']:g} cores ({scope}), also per rank with its child processes", "  "
    )
    print(f"  RAM: {counters['ram_bytes'] / 2**30:.1f} GiB (the machine)")
    for what, names in (("NICs", counters["nics"]), ("disks", counters["disks"]), ("GPUs", counters["gpus"])):
        print_wrapped(", ".join(names) or "none", f"  {what}: ")


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises Failure, whose message is for the user."""
    options = parser().parse_args(arguments)
    document = measure(Path(monitors.powercap_root()))
    print(json.dumps(document, indent=2)) if options.json else show(document)
    return exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
