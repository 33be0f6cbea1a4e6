"""How the doctor parses the output of programs and judges facts. Needs no hosts and no root."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from hvdtrain.doctor import checks, host_checks, link_checks
from hvdtrain.system import launchers

OPEN_MPI_5 = "mpirun (Open MPI) 5.0.5\n\nReport bugs to https://www.open-mpi.org/community/help/"
MPICH = """HYDRA build details:
    Version:                                 4.0.2
    Release Date:                            Thu Apr  7 12:34:45 CDT 2022
    Process Manager:                         pmi
"""
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e19c2f3e)\nCopyright 2003-2023"


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs", ("Open MPI", "4.1.8")),
        (OPEN_MPI_5, ("Open MPI", "5.0.5")),
        (MPICH, ("MPICH", "4.0.2")),
        (INTEL, ("Intel MPI", "2021.10")),
        ("mpirun (IBM Spectrum MPI) 10.3.1.00rtm0", ("Spectrum MPI", "10.3.1.00rtm0")),
        ("mpirun: something else 1.0", None),
    ],
)
def test_mpi_versions(text: str, known: tuple[str, str] | None) -> None:
    assert launchers.mpi_version(text) == known


@pytest.mark.parametrize(
    ("flavour", "version", "libmpi", "status"),
    [
        ("Open MPI", "4.1", "/usr/lib/libmpi.so.40.30.4", "ok"),
        ("Open MPI", "4.1", "/usr/lib/libmpi.so.12", "fail"),
        ("MPICH", "4.1", "/usr/lib/libmpi.so.40", "fail"),
        ("MPICH", "4.1", "/usr/lib/libmpi.so.12.2.3", "warn"),
        ("Intel MPI", "2021", "/opt/intel/lib/libmpi.so.12", "warn"),
        ("Open MPI", "4.1", None, "ok"),
        ("Open MPI", "5.0.11", None, "warn"),  # horovodrun cannot start it
        ("Open MPI", "5.0.11", "/usr/lib/libmpi.so.12", "fail"),
    ],
)
def test_mpirun_must_be_of_the_same_family_as_horovods_library(
    flavour: str, version: str, libmpi: str | None, status: str
) -> None:
    loaded = {"torch": {"mpi": True, "gloo": True, "nccl": False, "libmpi": libmpi}}
    assert checks.judge_mpi("a", "/bin/mpirun", flavour, version, loaded, {}).status == status


@pytest.mark.parametrize(
    ("needs_mpi", "several", "status"),
    [(True, False, "fail"), (True, True, "fail"), (False, True, "warn"), (False, False, "ok")],
)
def test_without_mpirun_only_what_needs_it_is_reported(needs_mpi: bool, several: bool, status: str) -> None:
    """An environment without MPI and Horovod (HVDTRAIN_MPI=none) is whole on one machine."""
    environment = {"horovod_needs_mpi": needs_mpi}
    assert checks.without_mpirun("a", environment, several=several).status == status


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 10, 33])
def test_links_are_measured_once_and_each_host_once_at_a_time(count: int) -> None:
    """All pairs of up to eight hosts are measured, and a ring of more hosts."""
    hosts = [f"n{i}" for i in range(count)]
    turns = link_checks.rounds(hosts)
    measured = sorted(tuple(sorted(pair)) for turn in turns for pair in turn)
    ring = [(hosts[i], hosts[(i + 1) % count]) for i in range(count)]
    expected = list(itertools.combinations(hosts, 2)) if count <= 8 else ring
    assert measured == sorted(tuple(sorted(pair)) for pair in expected)
    assert all(len({host for pair in turn for host in pair}) == 2 * len(turn) for turn in turns)


def test_a_pair_that_looks_slow_or_uneven_is_measured_again_and_the_best_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scripted rates: one host was busy during the first try, and the link between the other two is really slow."""
    rates: dict[tuple[str, str], list[float | str]] = {
        ("a", "b"): [940.0],
        ("b", "a"): [930.0],
        ("a", "c"): [200.0, 950.0],
        ("c", "a"): [910.0, 300.0],
        ("b", "c"): [9.5, 9.4],
        ("c", "b"): ["no answer in 30 s (measure_stream)", 9.6],
    }
    monkeypatch.setattr(link_checks, "measure", lambda one, other, address: rates[one, address].pop(0))
    names = "abc"
    tried = {
        (one, other): [{"result": "open", "round_trip_ms": 0.2, "slow_round_trip_ms": 0.3}]
        for one in names
        for other in names
    }
    results: list[checks.Check] = []
    said = {"a": 1000, "b": 1000, "c": None}
    link_checks.speeds({name: name for name in names}, {name: name for name in names}, tried, said, str, results.append)
    assert not any(rates.values())
    assert {check.where: (check.status, check.facts["there_mbit"], check.facts["back_mbit"]) for check in results} == {
        "a <-> b": ("ok", 940.0, 930.0),
        "a <-> c": ("ok", 950.0, 910.0),
        "b <-> c": ("warn", 9.5, 9.6),
    }


def test_the_clock_offset_is_that_of_the_quickest_answer() -> None:
    samples = [(100.0, 105.9, 101.0), (200.0, 205.01, 200.02), (300.0, 305.3, 300.5)]
    offset_s, error_s = host_checks.clock_offset(samples)
    assert (offset_s, error_s) == (pytest.approx(5.0), pytest.approx(0.01))
    assert host_checks.clock("b", samples).status == "warn"
    assert host_checks.clock("b", [(100.0, 101.5, 102.0)]).status == "ok"  # half a second, plus or minus one


def facts(**other: Any) -> dict[str, Any]:
    """Facts of a host without problems."""
    eth0 = {"name": "eth0", "address": "10.0.0.2", "up": True, "carrier": True}
    return {
        "host": "b",
        "resolves_to": ["10.0.0.2"],
        "interfaces": [eth0],
        "ssh_connection": ["10.0.0.1", "40000", "10.0.0.2", "22"],
        "throttle": None,
        **other,
    }


NICS = [
    {"name": "docker0", "address": "172.17.0.1", "up": True, "carrier": False},
    {"name": "eth0", "address": "10.0.0.2", "up": True, "carrier": True},
    {"name": "ib0", "address": "10.1.0.2", "up": True, "carrier": True},
]


def test_the_interface_is_the_given_one_or_the_one_that_ssh_uses() -> None:
    host = facts(interfaces=NICS)
    pick: Callable[..., dict[str, Any] | None] = host_checks.data_nic
    assert pick(host, None, None) == NICS[1]
    assert pick(host, "ib0", None) == NICS[2]
    assert pick(host, "docker0", None) is None  # no cable
    assert pick(facts(interfaces=NICS, ssh_connection=[]), None, "10.1.0.2") == NICS[2]
    assert pick(facts(interfaces=[]), None, None) is None


def test_what_interfaces_say_is_compared_with_the_rate_and_with_other_interfaces() -> None:
    slow = link_checks.judge_speed("a", "b", 410.0, 420.0, (0.2, 0.3), 2, 1000)
    assert (slow.status, slow.facts["nic_mbit"]) == ("warn", 1000) and "1.0 Gbit/s" in slow.what
    assert link_checks.judge_speed("a", "b", 930.0, 935.0, (0.2, 0.3), 2, 1000).status == "ok"
    unsteady = link_checks.judge_speed("a", "b", 930.0, 935.0, (2.0, 45.0), 2, 1000)
    assert unsteady.status == "warn" and "45 ms" in unsteady.what and "cable" in unsteady.fix
    speeds = {"docker0": None, "eth0": 1000, "ib0": 10_000}
    host = facts(interfaces=[{**each, "speed_mbit": speeds[each["name"]]} for each in NICS])
    eth0, ib0 = host["interfaces"][1:]
    assert "--nic ib0" in host_checks.interfaces("b", host, eth0, None, True).fix
    assert "--nic" not in host_checks.interfaces("b", host, ib0, None, True).fix


def test_a_laptop_is_kept_awake() -> None:
    (found,) = host_checks.sleeping("b", facts(battery=True))
    assert found.status == "warn" and "systemd-inhibit --what=" in found.fix
    assert not host_checks.sleeping("b", facts(battery=False))


def test_wifi_a_vpn_and_wsl_are_named_with_what_to_do() -> None:
    def found(wsl: bool = False, **other: Any) -> list[tuple[str, str, str]]:
        nics = [{**each, "mtu_bytes": 1280, "kind": "cable"} for each in NICS]
        nics[1] |= other
        host = facts(interfaces=nics, wsl=wsl)
        return [(each.name, each.status, each.fix) for each in host_checks.medium("b", host, nics[1])]

    assert found() == []
    assert found(kind="wifi") == [("medium", "warn", "choose the cable with --nic ib0")]
    assert found(kind="vpn") == [("medium", "ok", "")]
    assert found(wsl=True) == []  # 10.0.0.2: mirrored
    ((name, status, fix),) = found(wsl=True, address="172.29.3.4")
    assert (name, status) == ("wsl", "warn") and "networkingMode=mirrored" in fix
