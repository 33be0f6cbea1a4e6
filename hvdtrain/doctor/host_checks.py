"""Checks of each host: pure functions from facts (`probe.facts`) to checks."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.doctor.checks import FAIL, OK, WARN, Check

Facts = Mapping[str, Any]

DISK_LEAST_BYTES = 200e6
DISK_ENOUGH_BYTES = 2e9
"""Enough for a run of ResNet-34 with its checkpoints."""
SKEW_MOST_S = 1.0
NAT_OF_WSL = ipaddress.ip_network("172.16.0.0/12")
OWN_LAUNCHERS = "`hvdtrain launch torchrun` and launch/mpirun.sh"


def disk(where: str, facts: Facts) -> Check:
    """Check that there is space for a run folder."""
    disk = facts["disk"]
    free, folder = disk["free_bytes"], disk["folder"]
    what = f"{free / 1e9:.1f} GB free in {folder}" if free >= 1e9 else f"{free / 1e6:.0f} MB free in {folder}"
    status, fix = OK, ""
    if not disk["writable"]:
        status, what = FAIL, f"{folder} is not writable"
        fix = "choose another folder with --run-dir, or change its owner"
    elif free < DISK_LEAST_BYTES:
        status, what = FAIL, f"{what}: a run would end with the disk full"
        fix = "free some space, or choose another folder with --run-dir"
    elif free < DISK_ENOUGH_BYTES:
        status, what = WARN, f"{what}: enough for a few runs only"
        fix = "free some space, or choose another folder with --run-dir"
    return Check(name="disk", status=status, where=where, what=what, fix=fix, facts=dict(disk))


# --- names and interfaces --------------------------------------------------------------------------------------------


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def candidates(facts: Facts) -> list[dict[str, Any]]:
    """Interfaces that are up and have an address, except loopback. Open MPI also tries those without a cable."""
    return [entry for entry in facts["interfaces"] if entry["up"]]


def data_nic(facts: Facts, nic: str | None, towards: str | None) -> dict[str, Any] | None:
    """The interface that a job's data uses: `nic` if given, else the one that ssh uses, else the first.

    `towards` is the host's address as the other hosts see it. Over ssh, the connection itself has this address.
    """
    connected = [entry for entry in candidates(facts) if entry["carrier"]]
    if nic:
        return next((entry for entry in connected if entry["name"] == nic), None)
    seen = [towards, *facts["ssh_connection"][2:3]]
    return next((entry for entry in connected if entry["address"] in seen), connected[0] if connected else None)


def name_resolution(where: str, facts: Facts, used: Mapping[str, Any] | None, several: bool) -> Check:
    """Check that the host's own name resolves to its network address: Gloo sends the result to the other hosts."""
    name, addresses = facts["host"], facts["resolves_to"]
    data = {"name": name, "addresses": addresses}
    right = used["address"] if used else "ITS-ADDRESS"
    status, fix = OK, ""
    what = f"its own name {name} resolves to {addresses[0] if addresses else 'nothing'}"
    if not addresses:
        status, what = FAIL if several else WARN, f"the host does not know its own name {name}"
        fix = f"add `{right} {name}` to its /etc/hosts"
    elif is_loopback(addresses[0]) and several:
        status, what = FAIL, f"{what}: Gloo would tell the other hosts to connect to themselves"
        fix = f"in its /etc/hosts replace `{addresses[0]} {name}` with `{right} {name}`"
    elif is_loopback(addresses[0]):
        what += ": correct for a single host"
    elif used and used["address"] not in addresses:
        status, what = WARN, f"{what}, but data goes over {used['name']} ({used['address']})"
        fix = f"add `{right} {name}` to its /etc/hosts: Gloo's process sets use the name, not HOROVOD_GLOO_IFACE"
    return Check(name="own-name", status=status, where=where, what=what, fix=fix, facts=data)


def interfaces(where: str, facts: Facts, used: Mapping[str, Any] | None, nic: str | None, several: bool) -> Check:
    """Check which interface will be used, and which others MPI may try."""
    possible = candidates(facts)
    data = {"candidates": possible, "used": used["name"] if used else None}
    listed = ", ".join(f"{entry['name']} ({entry['address']})" for entry in possible)
    if used is None:
        if nic:
            what = f"no interface {nic} with a cable and an IPv4 address is up; the host has {listed or 'none'}"
            fix = f"choose one of these with --nic, or run ip link set {nic} up"
        else:
            what = "no interface with an IPv4 address is up"
            fix = "bring one up: ip link set DEV up; ip address add ..."
        return Check(name="nic", status=FAIL if several or nic else OK, where=where, what=what, fix=fix, facts=data)
    name = used["name"]
    what = f"data goes over {name} ({used['address']})"
    if len(possible) == 1 or nic or not several:
        return Check(name="nic", status=OK, where=where, what=what, facts=data)
    if used["speed_mbit"] and (fast := [each for each in possible if (each["speed_mbit"] or 0) > used["speed_mbit"]]):
        faster = max(fast, key=lambda each: each["speed_mbit"])
        what += f" with {used['speed_mbit']} Mbit/s, although {faster['name']} has {faster['speed_mbit']}"
        fix = f"name its address in -H, or choose it with --nic {faster['name']}"
        return Check(name="nic", status=WARN, where=where, what=what, fix=fix, facts=data)
    others = ", ".join(f"{entry['name']} ({entry['address']})" for entry in possible if entry is not used)
    pin = f"horovodrun --network-interfaces {name}, mpirun --mca btl_tcp_if_include {name}"
    pin += f", torchrun with GLOO_SOCKET_IFNAME={name} and NCCL_SOCKET_IFNAME={name}"
    what += f", but Open MPI also tries {others}"
    return Check(name="nic", status=WARN, where=where, what=what, fix=f"pin it: {pin}", facts=data)


def medium(where: str, facts: Facts, used: Mapping[str, Any] | None) -> list[Check]:
    """Find what a computer at home may have instead of a cable to the others: Wi-Fi, a VPN, WSL2's own network."""
    if used is None:
        return []
    name, kind, checks = used["name"], used.get("kind"), []
    data = {"used": name, "kind": kind}
    if kind == "wifi":
        cabled = [entry for entry in candidates(facts) if entry["carrier"] and entry.get("kind") == "cable"]
        what = f"data goes over Wi-Fi ({name}), whose rate changes and which both directions share"
        fix = (
            f"choose the cable with --nic {cabled[0]['name']}"
            if cabled
            else "use a cable, or a strategy that sends seldom"
        )
        checks.append(Check(name="medium", status=WARN, where=where, what=what, fix=fix, facts=data))
    elif kind == "vpn":
        what = f"data goes through a VPN ({name}, MTU {used['mtu_bytes']}), which encrypts it on the processor"
        checks.append(Check(name="medium", status=OK, where=where, what=what, facts=data))
    if facts.get("wsl") and ipaddress.ip_address(used["address"]) in NAT_OF_WSL:
        what = f"WSL2 has a network of its own ({used['address']}), which other machines cannot reach"
        fix = "in Windows add networkingMode=mirrored below [wsl2] in %UserProfile%\\.wslconfig, then: wsl --shutdown"
        checks.append(Check(name="wsl", status=WARN, where=where, what=what, fix=fix, facts=data))
    return checks


def same_mtu(used: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Compare the MTUs of the interfaces that carry the data, by host: a link drops frames that one end cannot take."""
    sizes = {host: nic["mtu_bytes"] for host, nic in used.items() if nic["mtu_bytes"]}
    if len(set(sizes.values())) < 2:
        return []
    least, facts = min(sizes.values()), {"mtu_bytes": sizes}
    what = "MTUs differ: " + ", ".join(f"{used[host]['name']} on {host} {size}" for host, size in sizes.items())
    fix = f"use the same on all, unless a router lies between them: ip link set DEV mtu {least}"
    return [Check(name="mtu", status=WARN, where=", ".join(sizes), what=what, fix=fix, facts=facts)]


def same_names(used: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Compare the names of the interfaces that carry the data, by host: GLOO_SOCKET_IFNAME names one for all hosts."""
    names = {host: nic["name"] for host, nic in used.items()}
    if len(set(names.values())) < 2:
        return []
    what = "data goes over " + ", ".join(f"{name} on {host}" for host, name in names.items())
    fix = f"{OWN_LAUNCHERS} look it up on each host; with torchrun set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME there"
    return [Check(name="nic-names", status=WARN, where=", ".join(names), what=what, fix=fix, facts={"names": names})]


def known_names(facts: Mapping[str, Facts], resolved: Mapping[str, Mapping[str, Sequence[str]]]) -> list[Check]:
    """Find hosts whose own names the others cannot resolve: torchrun tells them to connect to such a name.

    `resolved`: by host, the addresses of the others' own names there.
    """
    own = {host: {entry["address"] for entry in candidates(of_host)} for host, of_host in facts.items()}
    unknown = {
        there: name
        for host, answers in resolved.items()
        for there, of_host in facts.items()
        if there != host and (name := of_host["host"]) in answers and not own[there] & set(answers[name])
    }
    if not unknown:
        return []
    what = "other hosts cannot resolve " + ", ".join(
        f"{name}, the own name of {host}" for host, name in unknown.items()
    )
    fix = f"{OWN_LAUNCHERS} do without; for torchrun and horovodrun --gloo add the names to /etc/hosts everywhere"
    return [Check(name="names", status=WARN, where=", ".join(unknown), what=what, fix=fix, facts={"unknown": unknown})]


def same_addresses(facts: Mapping[str, Facts], nic: str | None) -> list[Check]:
    """Find addresses that two hosts share (docker0's 172.17.0.1): Open MPI connects to itself there and hangs."""
    if nic:
        return []
    owners: dict[str, list[tuple[str, str]]] = {}
    for host, of_host in facts.items():
        for entry in candidates(of_host):
            owners.setdefault(entry["address"], []).append((host, entry["name"]))
    checks = []
    for address, places in owners.items():
        if len(places) > 1:
            what = f"{address} is the address of " + " and ".join(f"{name} on {host}" for host, name in places)
            fix = "pin the data interface: horovodrun --network-interfaces DEV, mpirun --mca btl_tcp_if_include DEV"
            where = ", ".join(host for host, _ in places)
            data = {"address": address, "places": places}
            checks.append(Check(name="same-address", status=WARN, where=where, what=what, fix=fix, facts=data))
    return checks


# --- equal environments ----------------------------------------------------------------------------------------------


def same_environment(where: str, facts: Facts, here: Facts, python: str) -> Check:
    """Compare Python and package versions with this machine's."""
    remote, local = facts["environment"], here["environment"]
    if remote is None:
        what = f"{python} does not exist or does not run"
        return Check(name="versions", status=FAIL, where=where, what=what, fix=_prepare(where))
    local_versions = {"python": local["python"], **local["packages"]} if local else {}
    remote_versions = {"python": remote["python"], **remote["packages"]}
    differ = {
        name: {"there": remote_versions.get(name), "here": local_versions.get(name)}
        for name in dict.fromkeys([*local_versions, *remote_versions])
        if remote_versions.get(name) != local_versions.get(name)
    }
    if remote["horovod_for"] != (local or remote)["horovod_for"]:
        differ["horovod built for"] = {
            "there": ", ".join(remote["horovod_for"]),
            "here": ", ".join(local["horovod_for"]),
        }
    if differ:
        what = "; ".join(
            f"{name} {v['there'] or 'missing'} there, {v['here'] or 'missing'} here" for name, v in differ.items()
        )
        fix = f"{_prepare(where)}, or make setup there, in the same checkout"
        return Check(name="versions", status=FAIL, where=where, what=what, fix=fix, facts=differ)
    return Check(name="versions", status=OK, where=where, what="Python and packages are the same as here", facts={})


def same_code(where: str, facts: Facts, here: Facts, folder: str) -> Check:
    """Compare the checkout with this machine's, by file content, because a host may not have git."""
    if facts["folder"] is None:
        what = f"no folder {folder}, but the job starts in the same folder on every host"
        return Check(name="code", status=FAIL, where=where, what=what, fix=_prepare(where))
    remote, local = facts["code"], here["code"]
    if remote is None:
        what = "the package hvdtrain is not installed"
        return Check(name="code", status=FAIL, where=where, what=what, fix=_prepare(where))
    data = {"there": remote, "here": local}
    if local and remote["sha256"] != local["sha256"]:
        what = f"the code differs: {_commit(remote)} there, {_commit(local)} here"
        fix = f"{_prepare(where)}, or bring both to the same commit (git pull, git stash)"
        return Check(name="code", status=FAIL, where=where, what=what, fix=fix, facts=data)
    return Check(name="code", status=OK, where=where, what=f"same code as here ({_commit(remote)})", facts=data)


def same_paths(where: str, facts: Facts, here: Facts) -> list[Check]:
    """Check that the files of a job are there, and compare them with this machine's, by number and bytes."""
    checks = []
    for path, there in facts["paths"].items():
        own, top = here["paths"][path], "/" if path.startswith("/") else here["folder"]
        data = {"path": path, "there": there, "here": own}
        status, fix = OK, ""
        what = f"{path} is missing" if there is None else f"{path}: {there[0]:,} bytes in {there[1]:,} files"
        if own is None:
            status, fix = FAIL if there is None else OK, "check the path" if there is None else ""
        elif there != own:
            status, fix = FAIL if there is None else WARN, shlex.join(["rsync", "-aR", path, f"{where}:{top}"])
            what += f"; on this machine {own[0]:,} bytes in {own[1]:,}" if there else ""
        checks.append(Check(name="path", status=status, where=where, what=what, fix=fix, facts=data))
    return checks


def sleeping(where: str, facts: Facts) -> list[Check]:
    """Find laptops, which sleep when they are left alone or their lid is closed: the others then wait."""
    if not facts["battery"]:
        return []
    what, fix = "it has a battery: a laptop that falls asleep stops the job", "start the job with systemd-inhibit"
    fix += " --what=idle:sleep:handle-lid-switch on the first host, and run it with `sleep infinity` on others"
    return [Check(name="sleep", status=WARN, where=where, what=what, fix=fix)]


def _prepare(where: str) -> str:
    return f"hvdtrain hosts prepare -H {where}:1"


def _commit(code: Mapping[str, Any]) -> str:
    commit = f"commit {code['commit']}" if code["commit"] else f"no git, files {code['sha256'][:12]}"
    return commit + (" with changes" if code["changed"] else "")


def needed_programs(where: str, facts: Facts) -> list[Check]:
    """Check for the programs that launchers start on this host."""
    if not facts["missing"]:
        return []
    what = f"mpirun starts ranks with {', '.join(facts['missing'])}, which ssh does not find"
    fix = "install the same Open MPI there, at the same path or in the PATH of ssh"
    return [Check(name="programs", status=FAIL, where=where, what=what, fix=fix, facts={"missing": facts["missing"]})]


# --- clock, slots, shell ---------------------------------------------------------------------------------------------


def clock_offset(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(offset of the other clock, maximum error), both in seconds.

    A sample is (local time of the question, remote time, local time of the answer). The one with the shortest round
    trip gives the best bound (F. Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989): the
    remote clock was read within it, so the error is at most half the round trip.
    """
    asked, remote, answered = min(samples, key=lambda sample: sample[2] - sample[0])
    return remote - (asked + answered) / 2, (answered - asked) / 2


def clock(where: str, samples: Sequence[tuple[float, float, float]]) -> Check:
    """Check the clock's offset, because records of several hosts are joined by time."""
    offset_s, error_s = clock_offset(samples)
    data = {"offset_s": offset_s, "error_s": error_s}
    if abs(offset_s) - error_s > SKEW_MOST_S:
        what = f"its clock is {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} this machine's"
        fix = "start a time service on both: timedatectl set-ntp true, or chronyd"
        return Check(name="clock", status=WARN, where=where, what=what, fix=fix, facts=data)
    what = f"clock within {max(abs(offset_s) + error_s, 1e-3) * 1e3:.0f} ms of this machine's"
    return Check(name="clock", status=OK, where=where, what=what, facts=data)


def slots(where: str, facts: Facts, wanted: int) -> Check:
    """Compare the host's ranks with the cores that this user may use there."""
    cores = facts["cores"]
    most = max(1, int(cores))
    data = {"slots": wanted, "cores": cores}
    if wanted > most:
        what = f"{wanted} slots on {cores:g} core{'s' * (cores != 1)}: ranks will wait for a core"
        fix = f"use {most} (-H {where}:{most})"
        return Check(name="slots", status=WARN, where=where, what=what, fix=fix, facts=data)
    return Check(name="slots", status=OK, where=where, what=f"{wanted} slots on {cores:g} cores", facts=data)


def shell(where: str, noise: Sequence[str]) -> list[Check]:
    """Warn of a login shell that prints text: this breaks scp, rsync and programs that read the ranks' output."""
    lines = [line for line in noise if line.strip()]
    if not lines:
        return []
    what = f"its login shell also prints {len(lines)} line{'s' * (len(lines) != 1)} for commands: {lines[0][:60]!r}"
    fix = "in its ~/.bashrc (or ~/.profile) print only if the shell is interactive: [[ $- == *i* ]] && ..."
    return [Check(name="shell", status=WARN, where=where, what=what, fix=fix, facts={"lines": lines[:5]})]


def throttled(where: str, facts: Facts) -> list[Check]:
    """Warn of a throttle left by an earlier experiment, which looks like a slow network."""
    throttle = facts["throttle"]
    if not throttle:
        return []
    parts = [f"{way} {throttle[f'{way}_mbit']:g} Mbit/s" for way in ("up", "down") if throttle.get(f"{way}_mbit")]
    what = f"a throttle is set on {throttle.get('dev', 'its interface')}: {', '.join(parts) or 'no limits'}"
    fix = "if you do not need it any more: tools/throttle.sh clear"
    return [Check(name="throttle", status=WARN, where=where, what=what, fix=fix, facts=dict(throttle))]


def listed_name(where: str, addresses: Sequence[str]) -> Check | None:
    """Find a listed host name that resolves to this machine, although this machine has another name."""
    if not addresses or not is_loopback(addresses[0]):
        return None
    what = f"{where} resolves to {addresses[0]} here, so its ranks would be started on this machine"
    fix = f"add the address of {where} to /etc/hosts of this machine"
    return Check(name="ssh", status=FAIL, where=where, what=what, fix=fix, facts={"addresses": list(addresses)})
