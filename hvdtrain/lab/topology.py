"""Topology of a virtual cluster: its hosts, their CPU shares and the rates of their links.

The topology comes from the flags of `hvdtrain cluster up`, or from a TOML file if the hosts differ:

    name = "lab"
    slots = 2                # defaults for every host
    cpu_share = 0.5
    rate = "100mbit"

    [hosts.a]                # hosts in this order
    [hosts.b]
    cpus = "1"               # only this core
    up = "5mbit"             # asymmetric, like an ADSL line
    down = "20mbit"
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import check_name
from hvdtrain.system.rates import parse_rate

MAX_HOSTS = 64
NETWORK = "10.77.0.0/24"
LEAST_SHARE = 0.05
"""Smallest CPU share, in cores: the kernel grants at least 1 ms per period of 20 ms."""
CORES = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.ASCII)
HOST_KEYS = ("slots", "cpu_share", "cpus", "rate", "up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """One virtual host."""

    name: str
    slots: int = 2
    """Number of ranks in the hostfile."""
    cpu_share: float | None = None
    """Number of cores that the host may use (0.5: half a core). None: all."""
    cpus: str | None = None
    """Cores that the host may run on, in taskset's notation (`0-1,3`). None: all."""
    up: str | None = None
    """Rate at which the host sends, in tc's notation (`10mbit`). None: unlimited."""
    down: str | None = None
    """Rate at which the host receives."""

    def __post_init__(self) -> None:
        check_name(self.name, "host: ")
        if len(self.name) > 32:
            raise Failure(f"host {self.name}: the name has more than 32 characters", exits.USAGE)
        if not 1 <= self.slots <= 1024:
            raise Failure(f"host {self.name}: slots is {self.slots}; hint: give 1 to 1024", exits.USAGE)
        if self.cpu_share is not None and not LEAST_SHARE <= self.cpu_share <= 1024:
            hint = f"give the number of cores that it may use, at least {LEAST_SHARE}"
            raise Failure(f"host {self.name}: CPU share is {self.cpu_share:g}; hint: {hint}", exits.USAGE)
        if self.cpus is not None and not CORES.fullmatch(self.cpus):
            raise Failure(f"host {self.name}: cpus is {self.cpus[:40]!r}; hint: give cores as 0-1,3", exits.USAGE)
        for rate in (self.up, self.down):
            if rate is not None:
                parse_rate(rate)


def check_cluster_name(name: str) -> None:
    """Raises Failure (2) if the name cannot be part of the names of namespaces and folders."""
    if not re.fullmatch(r"[a-z0-9]{1,8}", name) or name in {"self", "pins"}:
        hint = "give 1 to 8 lower-case letters and digits (not self, pins)"
        raise Failure(f"{name!r} is not a valid cluster name; hint: {hint}", exits.USAGE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A virtual cluster: hosts on one switch, in a separate network."""

    name: str = "lab"
    hosts: tuple[Host, ...]
    user: str = "root"
    """The user who created the cluster. Only this user can log in to its hosts."""
    own_files: bool = False
    """Whether what a host writes below the home folder and beside the checkout stays on that host."""

    def __post_init__(self) -> None:
        check_cluster_name(self.name)
        if not 1 <= len(self.hosts) <= MAX_HOSTS:
            message = f"{len(self.hosts)} hosts requested"
            raise Failure(f"{message}; hint: give 1 to {MAX_HOSTS}: --hosts a,b,c,d", exits.USAGE)
        names = [host.name for host in self.hosts]
        for name in names:
            if names.count(name) > 1:
                raise Failure(f"host {name} is listed twice", exits.USAGE)
            if name == "localhost":
                raise Failure("a virtual host cannot be called localhost; hint: use a, b, ...", exits.USAGE)

    @property
    def switch(self) -> str:
        """The network namespace that holds the bridge."""
        return f"hvd-{self.name}"

    def netns(self, host: str) -> str:
        """The host's network namespace. Its interface is always eth0."""
        return f"hvd-{self.name}-{host}"

    def host(self, name: str) -> Host:
        """The host of this name. Raises Failure (2) if there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise Failure(f"cluster {self.name} has no host {name!r}; hint: its hosts are {known}", exits.USAGE)

    def number(self, name: str) -> int:
        """Number of the host, from 1. It ends the host's address and the name of its port."""
        return self.hosts.index(self.host(name)) + 1

    def address(self, name: str) -> str:
        return f"10.77.0.{self.number(name)}"

    def port(self, name: str) -> str:
        """The switch's end of the host's cable."""
        return f"p{self.number(name)}"


def from_names(
    names: str, *, cluster: str, user: str, slots: int, cpu_share: float | None, cpus: str | None, rate: str | None
) -> Cluster:
    """Create a cluster of equal hosts from names `a,b,c`. Raises Failure (2)."""
    hosts = tuple(
        Host(name=name.strip(), slots=slots, cpu_share=cpu_share, cpus=cpus, up=rate, down=rate)
        for name in names.split(",")
    )
    return Cluster(name=cluster, hosts=hosts, user=user)


def from_toml(path: Path, *, cluster: str | None, user: str) -> Cluster:
    """Read a cluster from a TOML file. Raises Failure (2, 78) that names the file and the key."""
    try:
        document = files.from_toml(files.read(path, files.SETTINGS_BYTES))
    except OSError as error:
        raise files.refused(path, error, exits.USAGE, "name another with --topology") from error
    except ValueError as error:
        raise Failure(f"{path}: {error}", exits.BAD_CONFIG) from error
    tables = document.pop("hosts", None)
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise Failure(f"{path}: no hosts; hint: add a table for each, e.g. [hosts.a]", exits.BAD_CONFIG)
    name = document.pop("name", "lab")
    defaults = _host_keys(document, str(path))
    try:
        hosts = tuple(
            Host(name=host, **_rates({**defaults, **_host_keys(table, f"{path}: hosts.{host}")}))
            for host, table in tables.items()
        )
        return Cluster(name=name if cluster is None else cluster, hosts=hosts, user=user)
    except Failure as failure:
        raise Failure(f"{path}: {failure}", exits.BAD_CONFIG) from failure
    except TypeError as error:
        raise Failure(f"{path}: a value has the wrong type ({error})", exits.BAD_CONFIG) from error


def _host_keys(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    kinds = {"slots": int, "cpu_share": (int, float), "cpus": str, "rate": str, "up": str, "down": str}
    for key, value in table.items():
        if key not in HOST_KEYS:
            raise Failure(f"{where}: unknown key {key!r}; hint: use {', '.join(HOST_KEYS)}", exits.BAD_CONFIG)
        if not isinstance(value, kinds[key]) or isinstance(value, bool):  # type: ignore[arg-type]
            raise Failure(f"{where}: {key} = {value!r} has the wrong type", exits.BAD_CONFIG)
    return dict(table)


def _rates(keys: dict[str, Any]) -> dict[str, Any]:
    """Expand `rate` to both directions, unless `up` or `down` is given."""
    rate = keys.pop("rate", None)
    return {"up": rate, "down": rate, **keys}


def from_json(document: Mapping[str, Any]) -> Cluster:
    """Read a cluster from a document made by dataclasses.asdict."""
    hosts = tuple(Host(**host) for host in document["hosts"])
    return Cluster(**{**document, "hosts": hosts})
