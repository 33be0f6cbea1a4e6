"""The sampler process, compared with the clock and the CPUs of this machine; see test_monitors.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_monitors import TICK_S, watched

from hvdtrain import records

pytestmark = pytest.mark.alone


def test_samples_tile_the_time_and_agree_with_the_kernel(tmp_path: Path) -> None:
    words = ("busy=0.5", "child", "allocate=200000000", "write=3000000", "sleep=0.25")
    facts, found, stderr = watched(tmp_path, *words)
    assert stderr == ""
    sensors, *rest = found
    assert isinstance(sensors, records.Sensors)
    assert [type(record) for record in rest] == [records.Sample] * len(rest)
    ready, began, ended, after = (facts[name] for name in ("ready", "began", "ended", "after"))

    seconds = sum(sample.seconds for sample in rest)
    assert ended["s"] - began["s"] <= seconds <= after["s"] - ready["s"]
    assert ready["unix_s"] <= sensors.unix_s <= began["unix_s"]
    assert ended["unix_s"] <= rest[-1].unix_s <= after["unix_s"]
    # absolute deadlines: a late sample does not shift the next ones
    assert len(rest) <= seconds / 0.1 + 1
    assert all(sample.seconds > 0 for sample in rest)

    # this process, and a grandchild that ended meanwhile
    busy_s = sum(sample.ranks[0]["cpu_percent"] * sample.seconds for sample in rest) / 100
    true_s = ended["cpu_s"] - began["cpu_s"]
    assert true_s > 1.1
    assert true_s - 4 * TICK_S <= busy_s <= after["cpu_s"] - ready["cpu_s"] + 4 * TICK_S
    assert rest[-1].ranks[0]["rss_bytes"] == pytest.approx(ended["rss_bytes"], abs=5e6)  # not the sampler's 20 MB
    machine_s = sum((sample.cpu_percent or 0) * sample.seconds for sample in rest) / 100 * (os.cpu_count() or 1)
    if sensors.resources["cpu"] == "machine":
        assert machine_s >= true_s - 4 * TICK_S

    for nic in {nic["nic"] for nic in rest[-1].nics}:
        received = sum(one["received_bytes"] for sample in rest for one in sample.nics if one["nic"] == nic)
        inner, outer = (b["nics"][nic] - a["nics"][nic] for a, b in ((began, ended), (ready, after)))
        assert inner <= received <= outer
    assert "lo" not in {nic["nic"] for nic in rest[-1].nics}
    disks = sensors.resources["disks"]
    if disks:
        written = sum(sample.disk_written_bytes or 0 for sample in rest)
        inner, outer = (sum(b["disks"][d] - a["disks"][d] for d in disks) for a, b in ((began, ended), (ready, after)))
        assert inner <= written <= outer


def test_a_full_disk_stops_only_the_samples(tmp_path: Path) -> None:
    """A limit on file sizes acts like a full disk and needs no root."""
    facts, _, stderr = watched(tmp_path, "busy=0.4", before=("sh", "-c", 'ulimit -f 0; exec "$@"', "sh"))
    assert stderr.count("\n") == 1
    assert "File too large; sampling stops, the run continues" in stderr
    assert set(facts["children"].values()) == {"S"}, "a zombie"


@pytest.mark.root
def test_cpu_percent_of_a_host_with_a_cpu_share(tmp_path: Path, half_core: tuple[Path, list[str]]) -> None:
    """100 % is that share, and only processes on that host count, while another process keeps the machine busy."""
    group, joining = half_core
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            words = ("busy=0.3", "sleep=1")
            facts, (sensors, *rest), _ = watched(tmp_path, *words, before=joining, names="resources")
        finally:
            other.kill()
    assert sensors.resources["cores"] == 0.5
    assert sensors.resources["cpu"] == str(group)
    used_s = sum((sample.cpu_percent or 0) * sample.seconds for sample in rest) / 100 * 0.5
    true_s = facts["ended"]["cpu_s"] - facts["began"]["cpu_s"]
    with_sampler_s = facts["after"]["cpu_s"] - facts["before"]["cpu_s"]  # the sampler runs on that host
    assert true_s - 4 * TICK_S <= used_s <= with_sampler_s + 4 * TICK_S
