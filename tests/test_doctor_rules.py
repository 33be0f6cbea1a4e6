"""How the doctor parses the output of programs and judges facts. Needs no hosts and no root."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from hvdtrain.doctor import checks, host_checks, link_checks
from hvdtrain.system import agent, launchers

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


@pytest.mark.parametrize(
    ("there", "back", "delay_ms", "status", "words"),
    [
        (940.0, 935.0, 0.2, "ok", "940 Mbit/s there"),
        (9400.0, 9350.0, 0.2, "ok", "9.4 Gbit/s there"),
        (94.0, 94.0, 0.2, "warn", "take at least 7.25 s per step"),
        (940.0, 400.0, 0.2, "warn", "b to a is 2.4 times slower"),
        (940.0, 940.0, 40.0, "warn", "round trips"),
        ("ConnectionRefusedError: refused", 940.0, 0.2, "warn", "from a to b could not be measured"),
    ],
)
def test_judging_a_link(there: Any, back: Any, delay_ms: float, status: str, words: str) -> None:
    check = link_checks.judge_speed("a", "b", there, back, delay_ms, 2)
    assert check.status == status and words in check.what
    assert bool(check.fix) == (status != "ok")


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
    tried = {(one, other): [{"result": "open", "round_trip_ms": 0.2}] for one in names for other in names}
    results: list[checks.Check] = []
    link_checks.speeds({name: name for name in names}, {name: name for name in names}, tried, str, results.append)
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


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "name is unknown"),
        ("ssh: connect to host b port 22: Connection refused", "ssh port"),
        ("ssh: connect to host b port 22: Connection timed out", "no answer in 5 s"),
        ("Connection timed out during banner exchange", "no answer in 5 s"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "has changed"),
        ("No ED25519 host key is known for b\nHost key verification failed.", "key is unknown"),
        ("me@b: Permission denied (publickey,password).", "requires a password"),
        ("kex_exchange_identification: read: Connection reset by peer", "before the login"),
        ("sh: 1: exec: python3: not found", "no Python 3"),
        ("Bad owner or permissions on /home/me/.ssh/config", "Bad owner or permissions on /home/me/.ssh/config"),
    ],
)
def test_sshs_errors_are_explained(message: str, reason: str) -> None:
    problem = agent.explain("b", message)
    assert reason in problem.reason and problem.fix and "{" not in problem.fix


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


@pytest.mark.parametrize(
    ("resolves_to", "several", "status"),
    [
        (["10.0.0.2"], True, "ok"),
        (["127.0.1.1"], True, "fail"),
        (["127.0.1.1"], False, "ok"),
        ([], True, "fail"),
        ([], False, "warn"),
        (["10.1.0.2"], True, "warn"),
    ],
)
def test_a_hosts_own_name(resolves_to: list[str], several: bool, status: str) -> None:
    host = facts(resolves_to=resolves_to)
    check = host_checks.name_resolution("b", host, host["interfaces"][0], several)
    assert check.status == status and bool(check.fix) == (status != "ok")


def test_a_throttle_from_an_earlier_run() -> None:
    throttle = {"dev": "eth0", "up_mbit": 10.0, "down_mbit": None, "delay_ms": None, "loss_percent": 1.0}
    (check,) = host_checks.throttled("b", facts(throttle=throttle))
    assert check.status == "warn" and "up 10 Mbit/s, 1 % loss" in check.what
    assert host_checks.throttled("b", facts()) == []
