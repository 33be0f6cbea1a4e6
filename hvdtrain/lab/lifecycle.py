"""Create and remove virtual clusters, also after either command was killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pwd
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.lab import topology, virtual
from hvdtrain.lab.topology import Cluster
from hvdtrain.lab.virtual import PINS, SELF, STATE
from hvdtrain.system import exits, files
from hvdtrain.system.commands import find, need_root, run, run_all
from hvdtrain.system.exits import Failure
from hvdtrain.system.proc import stat

PATIENCE_S = 3.0


def up(cluster: Cluster, *, dry_run: bool = False) -> None:
    """Create the cluster. Raises Failure: 77 without root, 69 if a program is missing, 1 for other errors.

    After an error, removes the parts that exist. After a kill, `down` does that.
    """
    commands = [*virtual.key_commands(cluster), *virtual.share_commands(cluster), *virtual.switch_commands(cluster)]
    for host in cluster.hosts:
        commands += virtual.host_commands(cluster, host.name)
    if dry_run:
        for path in virtual.files(cluster):
            print(f"# writes {path}")
        run_all([*virtual.pin_commands(), *commands], dry_run=True)
        return
    need_root("making a virtual cluster")
    os.umask(0o022)  # the cluster's user must be able to read root's files; sudo adds the caller's own umask
    for program in ("ip", "tc", "nsenter", "unshare", "ssh", "ssh-keygen", "sshd", "taskset"):
        find(program)
    _check(cluster)
    with _alone():
        if leftovers(cluster.name):
            hint = f"remove it (hvdtrain cluster down --name {cluster.name}), or choose another --name"
            raise Failure(f"cluster {cluster.name} already exists, at least in part; hint: {hint}")
        try:
            virtual.folder(cluster.name).mkdir(mode=0o711)  # a user who may list the folder could lock it
            if virtual.cgroup_version() == 2 and virtual.share_commands(cluster) and not virtual.shares_cpu():
                virtual.SHARED.touch()
            _prepare(cluster)
            run_all(commands)
            _await_sshd(cluster)
            # Last, and in one step: a listed cluster is complete.
            topology_file = virtual.folder(cluster.name) / "cluster.json"
            files.replace_text(topology_file, json.dumps(dataclasses.asdict(cluster), indent=2) + "\n")
        except BaseException:
            with contextlib.suppress(Failure):  # the user should read the first error
                _remove(cluster.name)
            raise


def _check(cluster: Cluster) -> None:
    """Reject a cluster whose creation would fail half-way, or hang later. Raises Failure."""
    for path in ("/etc/hosts", "/etc/resolv.conf", "/etc/ssh/ssh_config", "/etc/pam.d/sshd"):
        if not Path(path).exists():
            below = path.removeprefix("/etc")  # openSUSE has it elsewhere; an empty file in /etc would hide it
            real = next((top + below for top in ("/usr/lib", "/usr/etc") if Path(top + below).exists()), None)
            hint = f"sudo install -D {real} {path}" if real else "create an empty file"
            raise Failure(f"{path} does not exist, so hosts cannot have their own version; hint: {hint}", exits.FAILED)
    cores = os.cpu_count() or 1
    for host in cluster.hosts:
        wanted = [int(n) for part in (host.cpus or "0").split(",") for n in part.split("-")]
        if max(wanted) >= cores:
            message = f"host {host.name}: cpus is {host.cpus}, but this machine has cores 0 to {cores - 1}"
            raise Failure(message, exits.USAGE)
    if any(host.cpu_share is not None for host in cluster.hosts):
        _check_cgroup()
    with contextlib.suppress(KeyError, PermissionError, ImportError):
        pwd.getpwnam(cluster.user)
        return
    raise Failure(f"this machine has no user {cluster.user!r}", exits.USAGE)


def _check_cgroup() -> None:
    """Raises Failure (77, 69) if no control group can limit a host's CPU share."""
    top, newer = virtual.CGROUPS, virtual.cgroup_version() == 2
    base = top if newer else top / "cpu"
    if not os.access(base, os.W_OK):
        raise Failure(f"no writable CPU control group at {base}; hint: omit --cpu-share", exits.NO_PERMISSION)
    if not newer or virtual.shares_cpu():
        return
    # The top group of a container or of WSL is not the kernel's: with processes in it, its groups cannot share the CPU.
    taken = (top / "cgroup.type").exists() and (top / "cgroup.procs").read_text().strip()
    if taken or "cpu" not in (top / "cgroup.controllers").read_text().split():
        what = f"the control group {top} of this container {'holds processes' if taken else 'has no CPU controller'}"
        hint = "omit --cpu-share, or give cores with --cpus"
        raise Failure(f"{what}, so hosts cannot get CPU shares; hint: {hint}", exits.UNREACHABLE)


def _prepare(cluster: Cluster) -> None:
    """Create folders and files, and the mount that holds the pins."""
    here = virtual.folder(cluster.name)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd requires it; shared with the system's sshd
    for path in (PINS, SELF, here / "etc", here / "ssh", *(here / "hosts" / host.name for host in cluster.hosts)):
        path.mkdir(mode=0o711, parents=True, exist_ok=True)
    for host in cluster.hosts:
        (here / "hosts" / host.name / "cgroup").mkdir()
    if not is_mount(PINS):
        run_all(virtual.pin_commands())
    for path, text in virtual.files(cluster).items():
        path.write_text(text)
        path.chmod(0o644)


def _await_sshd(cluster: Cluster) -> None:
    """Add the cluster's host key to known_hosts, and wait until every sshd runs."""
    ssh = virtual.folder(cluster.name) / "ssh"
    public = (ssh / "host_key.pub").read_text().strip()
    names = ",".join(name for host in cluster.hosts for name in (host.name, cluster.address(host.name)))
    (ssh / "known_hosts").write_text(f"{names} {public}\n")
    for host in cluster.hosts:
        deadline = time.monotonic() + PATIENCE_S
        while not (virtual.folder(cluster.name) / "hosts" / host.name / "sshd.pid").exists():
            if time.monotonic() > deadline:
                raise Failure(f"sshd of host {host.name} did not start; hint: run sudo {find('sshd')} -t")
            time.sleep(0.01)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Allow one `up` or `down` at a time. Raises Failure (69) inside a virtual host."""
    if is_mount(SELF):  # the host's own folder
        message = "this is a virtual host; hint: create and remove clusters outside of it"
        raise Failure(message, exits.UNREACHABLE)
    while True:
        with contextlib.suppress(FileExistsError):
            STATE.mkdir(mode=0o755)
        with contextlib.ExitStack() as stack:
            try:  # a file with mode 0600, because other users could lock the folder
                handle = stack.enter_context(files.locked(STATE / ".lock", mode=0o600))
            except FileNotFoundError:  # a `down` has just removed the folder
                continue
            if os.fstat(handle).st_nlink:  # 0: a `down` that held the lock has removed the file
                yield
                return


def mounts() -> list[str]:
    """Mount points of this mount namespace, in order of mounting (proc(5), mountinfo)."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4].encode().decode("unicode_escape") for line in lines]


def is_mount(path: Path) -> bool:
    """Whether a mount begins at the folder, by the id of the mount that it is on (proc(5), fdinfo).

    Unlike os.path.ismount, this is right for a folder that is bound to itself. It is also right if another mount covers
    one at the same path.
    """
    if not path.is_dir():
        return False
    handle = os.open(path, os.O_PATH)
    try:
        facts = Path(f"/proc/self/fdinfo/{handle}").read_text().split()
        number = facts[facts.index("mnt_id:") + 1]
    finally:
        os.close(handle)
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(words[0] == number and words[4] == str(path) for words in lines)


def namespaces(cluster: str) -> list[str]:
    """The cluster's existing network namespaces, its switch last."""
    paths = Path("/run/netns").glob(f"hvd-{cluster}*") if Path("/run/netns").is_dir() else ()
    names = sorted(
        path.name for path in paths if path.name == f"hvd-{cluster}" or path.name.startswith(f"hvd-{cluster}-")
    )
    return names[1:] + names[:1]


def leftovers(cluster: str) -> list[str]:
    """All existing parts of the cluster: namespaces, pins, control groups, files."""
    paths = [*PINS.glob(f"{cluster}.*"), virtual.cgroup(cluster), virtual.folder(cluster)]
    return namespaces(cluster) + [str(path) for path in paths if path.exists()]


def processes(netns: str) -> list[int]:
    """Processes in the network namespace."""
    try:
        return [int(pid) for pid in run(["ip", "netns", "pids", netns]).split()]
    except Failure:  # it no longer exists
        return []


def groups(cluster: str) -> list[Path]:
    """The cluster's control groups, outermost last. A program on a host may have created further ones."""
    top = virtual.cgroup(cluster)
    return [*sorted(top.rglob("*/"), reverse=True), top] if top.is_dir() else []


def members(cluster: str) -> set[int]:
    """Processes in the cluster's network namespaces or control groups: a process may have left one of them."""
    pids = {pid for netns in namespaces(cluster) for pid in processes(netns)}
    for group in groups(cluster):
        with contextlib.suppress(OSError):  # it no longer exists
            pids.update(map(int, (group / "cgroup.procs").read_text().split()))
    return pids - {0}  # 0 is a process outside this PID namespace, and kill(0) would end this process


def down(cluster: str, *, dry_run: bool = False) -> bool:
    """Remove a cluster, complete or not, with every process on its hosts. False if nothing of it existed.

    Raises Failure (1) that names the parts that could not be removed. The next `down` tries them again.
    """
    topology.check_cluster_name(cluster)
    if dry_run:
        print(f"# ends the processes {' '.join(map(str, sorted(members(cluster)))) or '(none)'}")
        for path in leftovers(cluster):
            print(f"# removes {path}")
        return bool(leftovers(cluster))
    need_root("removing a virtual cluster")
    if not STATE.is_dir() and not leftovers(cluster):
        return False
    with _alone():
        virtual.choose(cluster)  # check the owner again: another user's `up` may have finished before the lock was free
        existed = bool(leftovers(cluster))
        _remove(cluster)
        if left := leftovers(cluster):
            message = f"cluster {cluster} is not down: could not remove {', '.join(left)}"
            raise Failure(f"{message}; hint: run this command again")
    return existed


def _remove(cluster: str) -> None:
    here = virtual.folder(cluster)
    with contextlib.suppress(FileNotFoundError):
        (here / "cluster.json").unlink()  # first: without it the cluster is not up
    _end_processes(cluster)
    for mount in reversed([mount for mount in mounts() if mount.startswith((f"{PINS}/{cluster}.", f"{here}/"))]):
        run(["umount", "--lazy", mount])
    for pin in PINS.glob(f"{cluster}.*"):
        pin.unlink()
    for netns in namespaces(cluster):
        run(["ip", "netns", "delete", netns])
    for group in (*groups(cluster), virtual.cgroup("")):
        _remove_group(group)
    shutil.rmtree(here, ignore_errors=True)
    if not any(path.is_dir() and path not in (PINS, SELF) for path in STATE.iterdir()):
        if is_mount(PINS):
            run(["umount", "--lazy", str(PINS)])
        _stop_sharing()
        (STATE / ".lock").unlink()
        for path in (PINS, SELF, STATE):
            with contextlib.suppress(OSError):  # a throttle of this machine may keep its files in self/
                path.rmdir()


def _stop_sharing() -> None:
    """Undo what the first cluster with CPU shares has set in the top control group of cgroup v2."""
    if virtual.SHARED.exists():
        with contextlib.suppress(OSError):  # groups of another program share the CPU by now
            virtual.CONTROL.write_text("-cpu")
        virtual.SHARED.unlink()


def _end_processes(cluster: str) -> None:
    """Send SIGTERM, then SIGKILL to the processes that remain. Raises Failure (1) if some survive.

    In that case the namespaces and groups stay, because the next `down` needs them to find these processes.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline, sent = time.monotonic() + PATIENCE_S, set[int]()
        while (left := members(cluster)) and time.monotonic() < deadline:
            for pid in left - sent:  # including those that a shell starts when its command is killed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)
            sent |= left
            time.sleep(0.02)
    if left:
        names = ", ".join(f"{pid} ({stat(pid).name})" for pid in sorted(left))
        message = f"cluster {cluster} is not down: SIGKILL did not end process {names}"
        raise Failure(f"{message}; hint: check if it is frozen or waits for a disk, then run this command again")


def _remove_group(group: Path) -> None:
    """Remove a control group as soon as its last process is reaped. Other clusters may still need the parent group."""
    deadline = time.monotonic() + PATIENCE_S
    while group.is_dir():
        try:
            group.rmdir()
        except OSError:
            if any(group.glob("*/")) or time.monotonic() > deadline:
                return
            time.sleep(0.02)
