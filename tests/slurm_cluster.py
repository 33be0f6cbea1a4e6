"""A real Slurm on virtual hosts: munged, slurmctld and one slurmd per host, with all files in one folder.

The daemons run in the foreground inside the hosts' namespaces. They end if the test process dies (prctl(2),
PR_SET_PDEATHSIG), and `cluster down` ends the remaining processes of jobs. Needs root and Debian's slurm-wlm and munge.
See slurm.conf(5), munged(8).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from conftest import LIMIT_S, until

from hvdtrain.lab import lifecycle, topology, virtual
from hvdtrain.lab.topology import Cluster
from hvdtrain.system.commands import calling_user

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STOP_S = 15
"""Time for daemons to end before they are killed"""


def missing() -> str | None:
    """The reason why Slurm cannot run here, or None."""
    if os.geteuid():
        return "needs root"
    absent = [program for program in PROGRAMS if shutil.which(program, path=SYSTEM_PATH) is None]
    return f"no {', '.join(absent)}: apt-get install slurm-wlm munge" if absent else None


def pmix_missing() -> str | None:
    """The reason why `srun --mpi=pmix` cannot work here, or None. Its plug-in opens libpmix.so."""
    library = next(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so"), None)
    return None if library else "no libpmix.so for Slurm's PMIx plug-in: apt-get install libpmix-dev"


class SlurmCluster:
    """Slurm with its controller on the first host. All hosts are nodes."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.nodes = [host.name for host in cluster.hosts]
        self._daemons: list[subprocess.Popen[bytes]] = []

    # --- daemons -----------------------------------------------------------------------------------------------------

    def settings(self) -> str:
        """The content of slurm.conf(5). Short waits let jobs start immediately, also after a requeue (cred_expire)."""
        here, first = self.folder, self.nodes[0]
        nodes = "".join(
            f"NodeName={node} NodeAddr={self.cluster.address(node)} CPUs=4 State=UNKNOWN\n" for node in self.nodes
        )
        return f"""\
ClusterName=hvdtrain
SlurmctldHost={first}({self.cluster.address(first)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={here}/munge.socket,cred_expire=5
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
TmpFS={here}/tmp-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=3
MinJobAge=600
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
{nodes}PartitionName=all Nodes={",".join(self.nodes)} Default=YES MaxTime=INFINITE State=UP
"""

    def start(self) -> None:
        """Starts the daemons. Raises AssertionError with the ends of the logs after a timeout."""
        for name in ("state", *(f"{kind}-{node}" for kind in ("spool", "tmp") for node in self.nodes)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        (self.folder / "slurm.conf").write_text(self.settings())
        first = self.nodes[0]
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        flags = [f"--{name}={self.folder / file}" for name, file in files.items()]
        self._daemon(first, ["munged", "--foreground", "--force", "--num-threads=1", *flags], "munged")
        until((self.folder / "munge.socket").exists, what=lambda: f"munged's socket; {self.logs()}")
        self._daemon(first, ["slurmctld", "-D"], "slurmctld")
        for node in self.nodes:
            self._daemon(node, ["slurmd", "-D", "-N", node], f"slurmd-{node}")
        idle = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
        until(lambda: self.run(idle).stdout.split() == self.nodes, what=lambda: f"idle nodes; {self.logs()}")

    def _daemon(self, node: str, words: Sequence[str], name: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [*virtual.inside(self.cluster, node), "setpriv", "--pdeathsig", "TERM", "--", *words],
                    env=self.environment(),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def clear(self) -> None:
        """Cancels all jobs and waits until they are gone."""
        assert self.run(["scancel", "--quiet", "--user=root"]).returncode == 0, self.logs()
        until(
            lambda: not self.run(["squeue", "--noheader"]).stdout.strip(), what=lambda: f"an empty queue {self.logs()}"
        )

    def stop(self) -> None:
        """Cancels all jobs and ends the daemons in reverse order."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.clear()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(STOP_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def logs(self) -> str:
        """The last lines of every log."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"== {path.name}\n" + "\n".join(_lines(path)[-15:]) for path in files)

    # --- commands of users -------------------------------------------------------------------------------------------

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """A login shell's environment. Jobs must activate their virtual environment themselves."""
        return {
            "PATH": SYSTEM_PATH,
            "HOME": os.environ.get("HOME", "/root"),
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # the ranks of all nodes share this machine's cores
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            **(extra or {}),
        }

    def run(
        self,
        words: Sequence[str],
        *,
        cwd: Path | None = None,
        extra: Mapping[str, str] | None = None,
        timeout: int = LIMIT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first node. After the timeout it is killed and the test fails."""
        return subprocess.run(
            [*virtual.inside(self.cluster, self.nodes[0]), "env", f"--chdir={cwd or self.folder}", "--", *words],
            env=self.environment(extra),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def submit(self, *words: str | Path, cwd: Path, output: Path) -> int:
        """Submits a job and returns its number."""
        done = self.run(["sbatch", "--parsable", f"--output={output}", *map(str, words)], cwd=cwd)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, number: int) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, ExitCode, Restarts ..."""
        text = self.run(["scontrol", "show", "job", str(number), "--oneliner"]).stdout
        return dict(re.findall(r"(\w[\w:/]*)=(\S*)", text))

    def ended(self, number: int, output: Path) -> dict[str, str]:
        """Waits until the job has ended and will not be requeued."""
        last = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        until(
            lambda: self.job(number)["JobState"] in last,
            what=lambda: f"the end of job {number} ({self.job(number)['JobState']})\n{tail(output)}\n{self.logs()}",
        )
        return self.job(number)

    def processes(self) -> set[int]:
        """Process ids on the nodes, including the daemons of Slurm and sshd."""
        return {pid for node in self.nodes for pid in lifecycle.processes(self.cluster.netns(node))}


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def tail(path: Path) -> str:
    """The last lines of a job's output."""
    return "\n".join(_lines(path)[-30:])


@contextlib.contextmanager
def slurm(folder: Path, *, name: str, nodes: str = "a,b") -> Iterator[SlurmCluster]:
    """A virtual cluster with Slurm, which is removed afterwards."""
    cluster = topology.from_names(
        nodes, cluster=name, user=calling_user(), slots=2, cpu_share=None, cpus=None, rate=None
    )
    lifecycle.up(cluster)
    try:
        daemons = SlurmCluster(cluster, folder)
        try:
            daemons.start()
            yield daemons
        finally:
            daemons.stop()
    finally:
        lifecycle.down(name)
