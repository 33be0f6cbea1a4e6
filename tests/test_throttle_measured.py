"""Measured rates of throttled links, and the throttle on other machines over ssh. All tests need root."""

from __future__ import annotations

import json
import subprocess

import pytest
from conftest import ROOT, Cluster, finished

from hvdtrain.lab import virtual
from hvdtrain.lab.throttle import qdisc
from hvdtrain.system.commands import run
from hvdtrain.system.rates import goodput_one_way

pytestmark = pytest.mark.root
THROTTLE = str(ROOT / "tools" / "throttle.sh")


def on_cluster(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return finished([THROTTLE, *arguments, "--name", cluster.name], cwd="/")


@pytest.mark.slow
def test_verify_measures_every_link_and_judges_by_its_tolerance(cluster: Cluster) -> None:
    """The measured rate depends on other load, but no message may arrive sooner than the rate allows."""
    assert on_cluster(cluster, "10mbit").returncode == 0
    done = on_cluster(cluster, "verify", "--json", "--seconds", "1")
    document = json.loads(done.stdout)
    assert [link["link"] for link in document["links"]] == ["a -> b", "b -> a"]
    for link in document["links"]:
        assert link["expected_mbit"] == goodput_one_way(10**7) / 1e6
        assert [(message["bytes"], message["ok"]) for message in link["messages"]] == [(64_000, True), (256_000, True)]
        assert link["ok"] == (abs(link["off_percent"]) <= 2)
    good = all(link["ok"] for link in document["links"])
    assert (document["ok"], done.returncode, "the machine may be busy" in done.stderr) == (good, not good, not good)
    assert on_cluster(cluster, "clear").returncode == 0


def test_a_virtual_host_can_neither_clear_its_links_nor_remove_its_cluster(cluster: Cluster) -> None:
    """It sees the names of the cluster's namespaces, but cannot enter them."""
    assert on_cluster(cluster, "10mbit").returncode == 0
    inside = cluster.on("a", THROTTLE, "clear")
    assert inside.returncode == 69 and "cannot reach its cluster's links" in inside.stderr
    tool = str(ROOT / "tools" / "cluster.sh")
    listed = json.loads(cluster.on("a", tool, "status", "--name", cluster.name, "--json").stdout)["hosts"]
    assert [(host["rates_asked"]["up_mbit"], host["rates_set"]) for host in listed] == [(10.0, None)] * 2
    gone = cluster.on("a", tool, "down", "--name", cluster.name)
    assert gone.returncode == 69 and "this is a virtual host" in gone.stderr
    listed = json.loads(cluster.run("status", "--json").stdout)["hosts"]
    assert [host["rates_set"] for host in listed] == [{"up_mbit": 10.0, "down_mbit": 10.0}] * 2
    assert on_cluster(cluster, "clear").returncode == 0


def test_verify_finds_a_link_that_lets_short_messages_through(cluster: Cluster) -> None:
    """The bucket holds a second of data. A long transfer may pass, but 256 kB after a pause are too fast."""
    assert on_cluster(cluster, "10mbit").returncode == 0
    for link in virtual.links(virtual.load(cluster.name)):
        wide = ["handle", "4876:", "tbf", "rate", "10mbit", "burst", "1250kb", "limit", "1mb"]
        run(["tc", "-n", link.netns, "qdisc", "replace", "dev", link.dev, "root", *wide])
    done = on_cluster(cluster, "verify", "--json", "--seconds", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert not all(message["ok"] for link in json.loads(done.stdout)["links"] for message in link["messages"])
    assert on_cluster(cluster, "clear").returncode == 0


@pytest.mark.slow
def test_other_machines_through_ssh(cluster: Cluster) -> None:
    """Virtual hosts stand for machines: a runs b's throttle.sh, which shapes both directions of eth0.

    The links have jumbo frames, which carry more payload.
    """
    for link in virtual.links(virtual.load(cluster.name)):
        run(["ip", "-n", link.netns, "link", "set", "dev", link.dev, "mtu", "9001"])
    peer = ["--hosts", "b", "--dev", "eth0"]

    def from_a(*arguments: str) -> subprocess.CompletedProcess[str]:
        return cluster.on("a", THROTTLE, *arguments)

    def rate_of_b() -> int | None:
        return qdisc.rate_of(qdisc.read(virtual.load(cluster.name).netns("b"), "eth0"))

    refused = from_a("10mbit", *peer)
    assert refused.returncode == 1 and "carries the ssh session" in refused.stderr
    halted = from_a("10mbit", "--hosts", "b,nowhere", "--dev", "eth0", "--force")
    assert halted.returncode == 69 and "nothing changed on any host" in halted.stderr
    assert rate_of_b() is None
    assert from_a("10mbit", *peer, "--force").returncode == 0
    assert rate_of_b() == 10_000_000
    done = cluster.on("b", THROTTLE, "verify", "--dev", "eth0", "--peer", "a", "--seconds", "1", "--json")
    assert [link["link"] for link in json.loads(done.stdout)["links"]] == ["here -> a", "a -> here"], done.stderr
    assert {link["expected_mbit"] for link in json.loads(done.stdout)["links"]} == {goodput_one_way(10**7, 8949) / 1e6}
    assert from_a("clear", *peer).returncode == 0
    assert rate_of_b() is None
