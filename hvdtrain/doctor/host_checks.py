"""What the doctor thinks of each host: pure functions from facts (see `probe.facts`) to checks."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.doctor.checks import FAIL, OK, WARN, Check
from hvdtrain.system import socket_filter

Facts = Mapping[str, Any]

DISK_LEAST_BYTES = 200e6
DISK_ENOUGH_BYTES = 2e9
"""A run of ResNet-34 with its checkpoints stays under it"""
SKEW_MOST_S = 1.0


def disk(where: str, facts: Facts) -> Check:
    """Checks that there is room for a run folder."""
    found = facts["disk"]
    free, folder = found["free_bytes"], found["folder"]
    what = f"{free / 1e9:.1f} GB free in {folder}" if free >= 1e9 else f"{free / 1e6:.0f} MB free in {folder}"
    status, fix = OK, ""
    if not found["writable"]:
        status, what = FAIL, f"{folder} cannot be written"
        fix = "name another place with --run-dir, or change its owner"
    elif free < DISK_LEAST_BYTES:
        status, fix = FAIL, "free some space, or name another place with --run-dir: a run would end with the disk full"
    elif free < DISK_ENOUGH_BYTES:
        status, fix = WARN, "enough for a few runs; free some space, or name another place with --run-dir"
    return Check(name="disk", status=status, where=where, what=what, fix=fix, facts=dict(found))


def tensorflow_server(where: str, facts: Facts) -> list[Check]:
    """Whether the kernel can keep strangers from TensorFlow's gRPC server (see SECURITY.md)."""
    found = facts["environment"]
    if not found or not {"tensorflow", "tensorflow-cpu"} & set(found["packages"]):
        return []
    try:
        with socket.socket() as decoy:
            socket_filter.only_strangers(decoy, ["127.0.0.1"])
    except OSError as error:
        what = f"the kernel cannot keep strangers from TensorFlow's gRPC server ({error.strerror})"
        fix = "with TensorFlow use a --strategy other than native, which refuses to start here"
        return [Check(name="grpc-filter", status=WARN, where=where, what=what, fix=fix)]
    what = "TensorFlow's gRPC server (--strategy native) can be closed to strangers"
    return [Check(name="grpc-filter", status=OK, where=where, what=what)]


# --- names and interfaces --------------------------------------------------------------------------------------------


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def candidates(facts: Facts) -> list[dict[str, Any]]:
    """Interfaces that are up and have an address, loopback left out. Open MPI tries those without a cable too."""
    return [entry for entry in facts["interfaces"] if entry["up"]]


def data_nic(facts: Facts, nic: str | None, towards: str | None) -> dict[str, Any] | None:
    """The interface a job's data takes: the one asked for, else the one that ssh came in by, else the only or first.

    `towards` is this host's address as the others see it; over ssh the connection itself tells.
    """
    found = [entry for entry in candidates(facts) if entry["carrier"]]
    if nic:
        return next((entry for entry in found if entry["name"] == nic), None)
    seen = [towards, *facts["ssh_connection"][2:3]]
    return next((entry for entry in found if entry["address"] in seen), found[0] if found else None)


def name_resolution(where: str, facts: Facts, used: Mapping[str, Any] | None, several: bool) -> Check:
    """Whether the host's own name leads to its own network address: Gloo tells the others what it resolves to."""
    name, addresses = facts["host"], facts["resolves_to"]
    data = {"name": name, "addresses": addresses}
    right = used["address"] if used else "ITS-ADDRESS"
    status, fix = OK, ""
    what = f"its own name {name} resolves to {addresses[0] if addresses else 'nothing'}"
    if not addresses:
        status, what = FAIL if several else WARN, f"the host's own name {name} is not known to itself"
        fix = f"add `{right} {name}` to its /etc/hosts"
    elif is_loopback(addresses[0]) and several:
        status, what = FAIL, f"{what}: Gloo would tell the other hosts to connect to themselves"
        fix = f"in its /etc/hosts put `{right} {name}` in place of `{addresses[0]} {name}`"
    elif is_loopback(addresses[0]):
        what += ": fine on one host"
    elif used and used["address"] not in addresses:
        status, what = WARN, f"{what}, while data is to go over {used['name']} ({used['address']})"
        fix = f"put `{right} {name}` into its /etc/hosts: Gloo's process sets follow the name, not HOROVOD_GLOO_IFACE"
    return Check(name="own-name", status=status, where=where, what=what, fix=fix, facts=data)


def interfaces(where: str, facts: Facts, used: Mapping[str, Any] | None, nic: str | None, several: bool) -> Check:
    """Which interface will be used, and which others an MPI might try."""
    found = candidates(facts)
    data = {"candidates": found, "used": used["name"] if used else None}
    listed = ", ".join(f"{entry['name']} ({entry['address']})" for entry in found)
    if used is None:
        if nic:
            what = f"no interface {nic} that is up with a link and an IPv4 address; here: {listed or 'none'}"
            fix = f"name one of these with --nic, or ip link set {nic} up"
        else:
            what = "no interface is up with an IPv4 address"
            fix = "bring one up: ip link set DEV up; ip address add ..."
        return Check(name="nic", status=FAIL if several or nic else OK, where=where, what=what, fix=fix, facts=data)
    what = f"data goes over {used['name']} ({used['address']})"
    if len(found) == 1 or nic or not several:
        return Check(name="nic", status=OK, where=where, what=what, facts=data)
    others = ", ".join(f"{entry['name']} ({entry['address']})" for entry in found if entry is not used)
    pin = f"horovodrun --network-interfaces {used['name']}, mpirun --mca btl_tcp_if_include {used['name']}"
    what += f", but Open MPI would also try {others}"
    return Check(name="nic", status=WARN, where=where, what=what, fix=f"pin it: {pin}", facts=data)


def same_addresses(facts: Mapping[str, Facts], nic: str | None) -> list[Check]:
    """An address that two hosts have (docker0's 172.17.0.1): Open MPI connects to itself there and waits for ever."""
    if nic:
        return []
    owners: dict[str, list[tuple[str, str]]] = {}
    for host, found in facts.items():
        for entry in candidates(found):
            owners.setdefault(entry["address"], []).append((host, entry["name"]))
    checks = []
    for address, places in owners.items():
        if len(places) > 1:
            what = f"{address} is the address of " + " and of ".join(f"{name} on {host}" for host, name in places)
            fix = "pin the data interface: horovodrun --network-interfaces DEV, mpirun --mca btl_tcp_if_include DEV"
            where = ", ".join(host for host, _ in places)
            data = {"address": address, "places": places}
            checks.append(Check(name="same-address", status=WARN, where=where, what=what, fix=fix, facts=data))
    return checks


# --- the same everywhere ---------------------------------------------------------------------------------------------


def same_environment(where: str, facts: Facts, here: Facts, python: str) -> Check:
    """Python and package versions against this machine's."""
    found, ours = facts["environment"], here["environment"]
    if found is None:
        what = f"{python} is not there or does not run"
        fix = "make the same environment at the same path there: make setup in the same folder"
        return Check(name="versions", status=FAIL, where=where, what=what, fix=fix)
    mine = {"python": ours["python"], **ours["packages"]} if ours else {}
    theirs = {"python": found["python"], **found["packages"]}
    differ = {
        name: {"there": theirs.get(name), "here": mine.get(name)}
        for name in dict.fromkeys([*mine, *theirs])
        if theirs.get(name) != mine.get(name)
    }
    if found["horovod_for"] != (ours or found)["horovod_for"]:
        differ["horovod built for"] = {
            "there": ", ".join(found["horovod_for"]),
            "here": ", ".join(ours["horovod_for"]),
        }
    if differ:
        what = "; ".join(
            f"{name} {v['there'] or 'missing'} there, {v['here'] or 'missing'} here" for name, v in differ.items()
        )
        fix = "make setup there, from the same checkout"
        return Check(name="versions", status=FAIL, where=where, what=what, fix=fix, facts=differ)
    return Check(name="versions", status=OK, where=where, what="Python and packages are the same as here", facts={})


def same_code(where: str, facts: Facts, here: Facts, folder: str) -> Check:
    """The checkout: there, and of the same content. Compared by its files, so that it also holds without git."""
    if facts["folder"] is None:
        what = f"no folder {folder}"
        fix = "the job starts in the same folder everywhere: copy or mount the checkout there"
        return Check(name="code", status=FAIL, where=where, what=what, fix=fix)
    theirs, ours = facts["code"], here["code"]
    if theirs is None:
        fix = "copy the checkout there, or pip install it"
        return Check(name="code", status=FAIL, where=where, what="no hvdtrain package there", fix=fix)
    data = {"there": theirs, "here": ours}
    if ours and theirs["sha256"] != ours["sha256"]:
        what = f"other code than here: {_commit(theirs)} there, {_commit(ours)} here"
        fix = f"bring both to the same commit (git pull, git stash), or copy {folder} there"
        return Check(name="code", status=FAIL, where=where, what=what, fix=fix, facts=data)
    return Check(name="code", status=OK, where=where, what=f"same code as here ({_commit(theirs)})", facts=data)


def _commit(code: Mapping[str, Any]) -> str:
    commit = f"commit {code['commit']}" if code["commit"] else f"no git, files {code['sha256'][:12]}"
    return commit + (" with changes" if code["changed"] else "")


def needed_programs(where: str, facts: Facts) -> list[Check]:
    """Checks for the programs that launchers start on this host."""
    if not facts["missing"]:
        return []
    what = f"not found over ssh: {', '.join(facts['missing'])}"
    fix = "mpirun starts ranks through it: install the same Open MPI there, at the same path or in the PATH of ssh"
    return [Check(name="programs", status=FAIL, where=where, what=what, fix=fix, facts={"missing": facts["missing"]})]


# --- clock, slots, shell ---------------------------------------------------------------------------------------------


def clock_offset(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(offset of the other clock, how far that may be off) in s, from (asked, its clock, answered) by ours.

    The sample with the shortest way there and back bounds it best (F. Cristian, Probabilistic clock
    synchronization, Distributed Computing 3, 1989): its clock was read within, so half the way is the error.
    """
    asked, theirs, answered = min(samples, key=lambda sample: sample[2] - sample[0])
    return theirs - (asked + answered) / 2, (answered - asked) / 2


def clock(where: str, samples: Sequence[tuple[float, float, float]]) -> Check:
    """Checks clock skew, because records of several hosts are joined by time."""
    offset_s, error_s = clock_offset(samples)
    data = {"offset_s": offset_s, "error_s": error_s}
    if abs(offset_s) - error_s > SKEW_MOST_S:
        what = f"its clock is {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} the one here"
        fix = "start a time service on both: timedatectl set-ntp true, or chronyd"
        return Check(name="clock", status=WARN, where=where, what=what, fix=fix, facts=data)
    what = f"clock within {max(abs(offset_s) + error_s, 1e-3) * 1e3:.0f} ms of the one here"
    return Check(name="clock", status=OK, where=where, what=what, facts=data)


def slots(where: str, facts: Facts, wanted: int) -> Check:
    """Compares the host's ranks with the cores that this user may use there."""
    cores = facts["cores"]
    data = {"slots": wanted, "cores": cores}
    if wanted > cores:
        what = f"{wanted} slots on {cores} core{'s' * (cores != 1)}: ranks will wait for each other's turns"
        fix = f"give it {cores} (-H {where}:{cores})"
        return Check(name="slots", status=WARN, where=where, what=what, fix=fix, facts=data)
    return Check(name="slots", status=OK, where=where, what=f"{wanted} slots on {cores} cores", facts=data)


def shell(where: str, noise: Sequence[str]) -> list[Check]:
    """A login shell that prints: harmless for ssh, but it breaks scp, rsync and what reads ranks' output."""
    lines = [line for line in noise if line.strip()]
    if not lines:
        return []
    what = f"its login shell prints {len(lines)} line{'s' * (len(lines) != 1)} for commands too: {lines[0][:60]!r}"
    fix = "in its ~/.bashrc (or ~/.profile) print only if the shell is interactive: [[ $- == *i* ]] && ..."
    return [Check(name="shell", status=WARN, where=where, what=what, fix=fix, facts={"lines": lines[:5]})]


def throttled(where: str, facts: Facts) -> list[Check]:
    """Warns of a throttle left by an earlier experiment, which looks like a slow network."""
    asked = facts["throttle"]
    if not asked:
        return []
    parts = [f"{way} {asked[f'{way}_mbit']:g} Mbit/s" for way in ("up", "down") if asked.get(f"{way}_mbit")]
    parts += [f"{asked['delay_ms']:g} ms delay"] if asked.get("delay_ms") else []
    parts += [f"{asked['loss_percent']:g} % loss"] if asked.get("loss_percent") else []
    what = f"a throttle is set on {asked.get('dev', 'its interface')}: {', '.join(parts) or 'no limits'}"
    fix = "if that is left from an earlier run: tools/throttle.sh clear"
    return [Check(name="throttle", status=WARN, where=where, what=what, fix=fix, facts=dict(asked))]


def listed_name(where: str, addresses: Sequence[str]) -> Check | None:
    """A host's name in the list that leads back to this machine, while this machine has another name."""
    if not addresses or not is_loopback(addresses[0]):
        return None
    what = f"{where} resolves to {addresses[0]} here, so its ranks would be started on this machine"
    fix = f"put the address of {where} into /etc/hosts of this machine"
    return Check(name="ssh", status=FAIL, where=where, what=what, fix=fix, facts={"addresses": list(addresses)})
