"""A cluster of virtual hosts on this machine, made of Linux namespaces (namespaces(7), veth(4)).

A host has a network namespace with one cable (eth0) to the cluster's switch, and a UTS namespace with its own name. Its
mount namespace shows the cluster's /etc/hosts, /etc/resolv.conf and /etc/ssh/ssh_config, so `ssh b` works on host a
without a prompt or a flag. Processes and users are the machine's, and so are files unless the cluster has `own_files`.

The switch is a bridge in another network namespace. The cluster is therefore invisible in the machine's own network,
clusters do not see each other, and removing the namespaces removes every interface, address and queue.

Files under /run/hvdtrain, all removed by `down` or a reboot:

    <cluster>/cluster.json         the topology          <cluster>/ssh/              keys and settings
    <cluster>/hosts/<host>/        sshd, throttle        self/                       where a host finds its own folder
    pins/<cluster>.<host>.{uts,mnt}  mounts that keep a host's namespaces without a process in them
    .cpu                           groups share the CPU because of a cluster (cgroup v2)

`down` uses these names only, so it also cleans up after a killed `up`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pwd
import re
import shutil
from pathlib import Path

from hvdtrain.lab import topology
from hvdtrain.lab.topology import NETWORK, Cluster
from hvdtrain.system import exits
from hvdtrain.system.commands import CHECKOUT, Command, calling_user
from hvdtrain.system.exits import Failure

OF_SWEEP = re.compile("s[0-9a-f]{7}")
"""Names of clusters that a sweep creates and owns."""
STATE = Path("/run/hvdtrain")
PINS = STATE / "pins"
SELF = STATE / "self"
CGROUPS = Path("/sys/fs/cgroup")
CONTROL = CGROUPS / "cgroup.subtree_control"
"""With cgroup v2, the resources that the groups below the top share (cgroups(7))"""
SHARED = STATE / ".cpu"
"""Exists if `up` has added the CPU to them, so that the last `down` removes it again"""
CONGESTION = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
PERIOD_US = 20_000
"""Period of the CPU share. It is short, so that half a core is not 50 ms of work followed by 50 ms of waiting."""


def folder(cluster: str) -> Path:
    return STATE / cluster


def pins(cluster: str, host: str) -> tuple[Path, Path]:
    """The files that keep the host's UTS and mount namespaces alive."""
    return PINS / f"{cluster}.{host}.uts", PINS / f"{cluster}.{host}.mnt"


def clusters() -> dict[str, Cluster]:
    """The running clusters of all users, by name."""
    result = {}
    for path in sorted(STATE.glob("*/cluster.json")):
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            result[path.parent.name] = topology.from_json(json.loads(path.read_text()))
    return result


def owners() -> dict[str, str]:
    """The owner of each running cluster: its user, or "a sweep"."""
    return {name: "a sweep" if OF_SWEEP.fullmatch(name) else one.user for name, one in clusters().items()}


def choose(name: str | None = None) -> str | None:
    """The name of the cluster that a command uses: `name`, or the calling user's only cluster. None if none is up.

    Raises Failure: 2 if the user has several clusters, or none while other users have some; 77 if the named cluster
    belongs to another user. Root may use any cluster by its name.
    """
    user = calling_user()
    if name is not None:
        topology.check_cluster_name(name)
        cluster = clusters().get(name)
        if cluster and user not in ("root", cluster.user):
            message = f"cluster {name} is {cluster.user}'s; hint: make your own with another --name"
            raise Failure(message, exits.NO_PERMISSION)
        return name
    everyone = owners()
    own = [known for known, owner in everyone.items() if owner == user]
    if len(own) > 1:
        raise Failure(f"several clusters are up ({', '.join(own)}); hint: choose one with --name", exits.USAGE)
    if everyone and not own:
        others = ", ".join(f"{known} is {owner}'s" for known, owner in everyone.items())
        message = f"{user} has no running cluster ({others}); hint: choose one with --name"
        raise Failure(message, exits.USAGE)
    return own[0] if own else None


def load(name: str | None = None) -> Cluster:
    """The cluster that `choose` names. Raises Failure as `choose` does, and 69 if it is not up."""
    chosen = choose(name)
    cluster = clusters().get(chosen or "")
    if cluster is None:
        message = f"cluster {chosen} is not up" if chosen else "no virtual cluster is up"
        raise Failure(f"{message}; hint: make one: sudo hvdtrain cluster up --hosts a,b", exits.UNREACHABLE)
    return cluster


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction of a host's link, and the device whose queue limits it."""

    host: str
    netns: str | None
    """Network namespace of `dev`. None: this machine's own."""
    dev: str
    direction: str
    """up: packets that the host sends; down: packets that it receives."""

    @property
    def key(self) -> str:
        return f"{self.netns or ''}/{self.dev}/{self.direction}"


def links(cluster: Cluster) -> list[Link]:
    """Both directions of every host's cable."""
    result = []
    for host in cluster.hosts:
        result.append(Link(host.name, cluster.netns(host.name), "eth0", "up"))
        result.append(Link(host.name, cluster.switch, cluster.port(host.name), "down"))
    return result


# --- commands as data ------------------------------------------------------------------------------------------------


def inside(cluster: Cluster, host: str, *, share: bool = True) -> Command:
    """Words that run the command after them on the host, as root, in the same process.

    With `share`, the process first joins the host's CPU share and cores.
    """
    uts, mnt = pins(cluster.name, host)
    enter = ["nsenter", f"--net=/run/netns/{cluster.netns(host)}", f"--uts={uts}", f"--mount={mnt}", "--"]
    about = cluster.host(host)
    if share and about.cpus:
        enter = ["taskset", "-c", about.cpus, *enter]
    if share and about.cpu_share is not None:
        joining = 'echo 0 >"$1" && shift && exec "$@"'  # 0 is the writing process (cgroups(7))
        enter = ["sh", "-c", joining, "sh", str(cgroup(cluster.name, host) / "cgroup.procs"), *enter]
    return enter


def cgroup_version() -> int:
    return 2 if (CGROUPS / "cgroup.controllers").exists() else 1


def shares_cpu() -> bool:
    """Whether the groups below the top of cgroup v2 share the CPU already."""
    return "cpu" in CONTROL.read_text().split()


def cgroup(cluster: str, host: str = "") -> Path:
    """The control group of a host, or of the whole cluster."""
    return CGROUPS / ("" if cgroup_version() == 2 else "cpu") / "hvdtrain" / cluster / host


def _write(path: Path, text: str) -> Command:
    return ["sh", "-c", 'printf %s "$1" >"$2"', "sh", text, str(path)]


def share_commands(cluster: Cluster) -> list[Command]:
    """Commands that limit each host to its CPU share, for the machine's version of cgroups."""
    shared = [host for host in cluster.hosts if host.cpu_share is not None]
    if not shared:
        return []
    commands: list[Command] = [["mkdir", "-p", str(cgroup(cluster.name))]]
    if cgroup_version() == 2:
        top = cgroup(cluster.name)
        commands += [_write(path / "cgroup.subtree_control", "+cpu") for path in (CGROUPS, top.parent, top)]
    for host in shared:
        path, quota = cgroup(cluster.name, host.name), round((host.cpu_share or 0) * PERIOD_US)
        commands.append(["mkdir", "-p", str(path)])
        if cgroup_version() == 2:
            commands.append(_write(path / "cpu.max", f"{quota} {PERIOD_US}"))
        else:
            commands.append(_write(path / "cpu.cfs_period_us", str(PERIOD_US)))
            commands.append(_write(path / "cpu.cfs_quota_us", str(quota)))
    return commands


def switch_commands(cluster: Cluster) -> list[Command]:
    switch = cluster.switch
    bridge = ["ip", "-n", switch, "link"]
    return [
        ["ip", "netns", "add", switch],
        [*bridge, "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0", "mcast_snooping", "0"],
        [*bridge, "set", "br0", "addrgenmode", "none", "up"],  # no IPv6 messages on the links to measure
    ]


def host_commands(cluster: Cluster, host: str) -> list[Command]:
    """Commands that create one host and start its sshd."""
    switch, netns, port, here = cluster.switch, cluster.netns(host), cluster.port(host), folder(cluster.name)
    uts, mnt = pins(cluster.name, host)
    cable = ["ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", netns]
    enter = inside(cluster, host, share=False)
    spare = here / "hosts" / host / "cgroup"
    sshd = [shutil.which("sshd") or "/usr/sbin/sshd", "-f", str(here / "hosts" / host / "sshd_config")]
    # Linux's default congestion control, even if this machine's administrator chose another (ip-route(8)).
    route = f"ip -n {netns} route change {NETWORK} dev eth0 proto kernel scope link src {cluster.address(host)}"
    cubic = [[*route.split(), "congctl", "cubic"]] if "cubic" in CONGESTION.read_text().split() else []
    return [
        ["ip", "netns", "add", netns],
        cable,
        ["ip", "-n", switch, "link", "set", port, "master", "br0", "addrgenmode", "none", "up"],
        ["ip", "-n", netns, "link", "set", "lo", "up"],
        ["ip", "-n", netns, "link", "set", "eth0", "addrgenmode", "none", "up"],
        ["ip", "-n", netns, "address", "add", f"{cluster.address(host)}/24", "dev", "eth0"],
        *cubic,
        ["touch", str(uts), str(mnt)],
        ["unshare", f"--uts={uts}", f"--mount={mnt}", "--propagation", "slave", "true"],
        [*enter, "hostname", host],
        # A host must not hold the mounts that keep other hosts alive.
        [*enter, "umount", "--lazy", str(PINS), "/run/netns"],
        # /sys shows the interfaces of the namespace that mounted it. The cgroup mounts below it are kept.
        [*enter, "mount", "--rbind", str(CGROUPS), str(spare)],
        [*enter, "mount", "-t", "sysfs", "sysfs", "/sys"],
        [*enter, "mount", "--rbind", str(spare), str(CGROUPS)],
        [*enter, "umount", "--lazy", str(spare)],
        [*enter, "mount", "--bind", str(here / "etc" / "hosts"), "/etc/hosts"],
        [*enter, "mount", "--bind", str(here / "etc" / "resolv.conf"), "/etc/resolv.conf"],
        [*enter, "mount", "--bind", str(here / "ssh" / "ssh_config"), "/etc/ssh/ssh_config"],
        [*enter, "mount", "--bind", str(here / "etc" / "pam"), "/etc/pam.d/sshd"],
        [*enter, "mount", "--bind", str(here / "hosts" / host), str(SELF)],
        *([*enter, *words] for words in (file_commands(cluster, host) if cluster.own_files else [])),
        [*inside(cluster, host), *sshd],
    ]


def file_commands(cluster: Cluster, host: str) -> list[Command]:
    """Commands that give the host its own home folder and checkout's folder: the machine's, until it writes there.

    It is a file system that keeps all changes in the host's folder (overlayfs, in the kernel's documentation).
    """
    home, beside = Path(pwd.getpwnam(cluster.user).pw_dir).resolve(), CHECKOUT.parent
    places = [home] if beside.is_relative_to(home) else [home, beside]
    commands: list[Command] = []
    for number, place in enumerate(places):
        changed, work = (folder(cluster.name) / "hosts" / host / "files" / str(number) / name for name in "cw")
        commands += [
            ["mkdir", "-p", str(changed), str(work)],
            *([program, f"--reference={place}", str(changed)] for program in ("chown", "chmod")),
            [
                "mount",
                "-t",
                "overlay",
                "overlay",
                "-o",
                f"lowerdir={place},upperdir={changed},workdir={work}",
                str(place),
            ],
        ]
    return commands


def files(cluster: Cluster) -> dict[Path, str]:
    """Configuration files of the hosts (ssh_config(5), sshd_config(5)), by path."""
    here = folder(cluster.name)
    names = [host.name for host in cluster.hosts]
    table = "".join(f"{cluster.address(name)} {name}\n" for name in names)
    written = {
        here / "etc" / "hosts": f"127.0.0.1 localhost\n{table}",
        here / "etc" / "resolv.conf": "# no name server: unknown names fail at once\n",
        # The key is sufficient. A systemd session would leave the host's CPU share, and accounts without a password (as
        # on cloud images) must be able to log in.
        here / "etc" / "pam": "".join(f"{kind} required pam_permit.so\n" for kind in ("account", "session")),
        here / "ssh" / "ssh_config": (
            f"Host *\n  IdentityFile {here}/ssh/key\n  IdentitiesOnly yes\n"
            f"  GlobalKnownHostsFile {here}/ssh/known_hosts\n"
            "  UserKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n  UpdateHostKeys no\n  LogLevel ERROR\n"
        ),
    }
    for name in names:
        # StrictModes rejects keys if "/" does not belong to root, as in a user namespace. These keys are protected by
        # the cluster's own folder.
        written[here / "hosts" / name / "sshd_config"] = (
            f"ListenAddress {cluster.address(name)}:22\nHostKey {here}/ssh/host_key\n"
            f"AuthorizedKeysFile {here}/ssh/authorized_keys\nPidFile {here}/hosts/{name}/sshd.pid\n"
            "UsePAM yes\nStrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"PermitRootLogin {'prohibit-password' if cluster.user == 'root' else 'no'}\n"
            f"AllowUsers {cluster.user}@*\nUseDNS no\nMaxStartups 200\nX11Forwarding no\n"
            "PrintMotd no\nPrintLastLog no\nLogLevel ERROR\n"
        )
    return written


def key_commands(cluster: Cluster) -> list[Command]:
    """Commands that create one key for all hosts, readable by the cluster's user only, and one common host key."""
    ssh = folder(cluster.name) / "ssh"
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"hvdtrain cluster {cluster.name}", "-f"]
    return [
        *([*make, str(ssh / name)] for name in ("key", "host_key")),
        ["cp", str(ssh / "key.pub"), str(ssh / "authorized_keys")],
        ["chown", cluster.user, str(ssh / "key")],
    ]


def pin_commands() -> list[Command]:
    """Commands that create a private mount, which unshare(1) requires for keeping a mount namespace."""
    return [["mount", "--bind", str(PINS), str(PINS)], ["mount", "--make-private", str(PINS)]]
