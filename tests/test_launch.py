"""The launchers: settings for a link, how users override them, the ranks' variables, and the end of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from conftest import LIMIT_S, ROOT, SMALL, Cluster, document, environment, finished, unique, until
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.launch import __main__ as launch
from hvdtrain.launch import launched_by, tuning
from hvdtrain.launch.link import network_of
from hvdtrain.launch.tuning import GLOO, MPI, Link
from hvdtrain.system import cgroup, net, proc

SLOW = Link(hosts=2, ranks=4, most_ranks=2, cores=8, rate_bit_s=10_000_000, network="10.77.0.0/24")


def values(link: Link, backend: str = MPI) -> dict[str, str]:
    return {setting.name: setting.value for setting in tuning.settings(link, backend)}


def linked(hosts: int, per_host: int, rate_bit_s: int | None = 10_000_000) -> Link:
    return Link(
        hosts=hosts, ranks=hosts * per_host, most_ranks=per_host, cores=8, rate_bit_s=rate_bit_s, network="eth0"
    )


# --- settings --------------------------------------------------------------------------------------------------------


@given(st.integers(2, 64), st.integers(1, 8), st.integers(100_000, 10_000_000_000), st.sampled_from([MPI, GLOO]))
def test_idle_control_traffic_stays_below_its_share_of_any_link(hosts: int, each: int, rate: int, backend: str) -> None:
    link = linked(hosts, each, rate)
    cycle_ms = tuning.cycle_ms(link, backend)
    bits_per_cycle = 8 * tuning.CONTROL_BYTES[backend] * (hosts - 1).bit_length() * each
    allowed_ms = 1000 * bits_per_cycle / (0.01 * rate)
    assert 1 <= cycle_ms <= tuning.LONGEST_CYCLE_MS
    assert cycle_ms >= min(allowed_ms, tuning.LONGEST_CYCLE_MS)
    reason = next(one for one in tuning.settings(link, backend) if one.name == "HOROVOD_CYCLE_TIME").reason
    assert ("under 1 %" in reason) == (cycle_ms < tuning.LONGEST_CYCLE_MS), reason
    assert cycle_ms <= 1.2 * allowed_ms + 1  # not longer than needed, because small all-reduces wait for it


def test_a_gloo_transfer_of_a_full_buffer_fits_its_timeout() -> None:
    for rate in (1_000_000, 10_000_000, 100_000_000):
        takes = 2 * tuning.FUSION_BYTES * 8 / (0.936 * rate)
        assert int(values(linked(4, 1, rate), GLOO)["HOROVOD_GLOO_TIMEOUT_SECONDS"]) > takes


def network_bytes(link: Link, number: str) -> float:
    """Bytes that one host's link carries in each direction per reduced byte, chosen by simulating the algorithm."""
    p, per = link.ranks, link.most_ranks
    if number == str(tuning.RING):
        return 2 * (p - 1) / p  # one rank of each host has its successor on another host
    sent, part, distance = 0.0, 0.5, 1
    while distance < p:
        sent += 2 * part * sum(1 for rank in range(per) if (rank ^ distance) // per)
        part, distance = part / 2, distance * 2
    return sent


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (4, 2), (2, 4), (3, 1), (3, 2), (4, 1), (8, 4)])
def test_the_algorithm_sends_the_least_over_the_network(hosts: int, per_host: int) -> None:
    link = linked(hosts, per_host)
    chosen = values(link)["coll_tuned_allreduce_algorithm"]
    others = [str(tuning.RING)]
    if link.ranks & (link.ranks - 1) == 0:
        others.append(str(tuning.RABENSEIFNER))
    assert chosen in others
    assert network_bytes(link, chosen) == min(network_bytes(link, other) for other in others)


def test_one_host_gets_no_settings_for_a_network() -> None:
    chosen = values(Link(hosts=1, ranks=2, most_ranks=2, cores=4, rate_bit_s=None))
    assert not [name for name in chosen if "tcp" in name or "CYCLE" in name]
    assert chosen["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("rate", "matters"), [(10_000_000, False), (100_000_000, True), (None, True)])
def test_waiting_ranks_sleep_under_a_cpu_quota(rate: int | None, matters: bool) -> None:
    whole = linked(2, 1, rate)
    quota = dataclasses.replace(whole, cores=0.5, quota=True)
    sleeping = dataclasses.replace(quota, sleeper="/x/sleep.so")
    assert values(sleeping)["LD_PRELOAD"] == "/x/sleep.so"
    assert "LD_PRELOAD" not in values(quota) | values(dataclasses.replace(sleeping, quota=False)) | values(
        sleeping, GLOO
    )
    advised = {backend: tuning.advice(sleeping, backend) for backend in (MPI, GLOO)}
    assert (advised[MPI], bool(advised[GLOO])) == (None, matters)
    assert bool(tuning.advice(quota, MPI)) == matters
    assert tuning.advice(whole, MPI) is tuning.advice(whole, GLOO) is None
    for line in (tuning.advice(quota, MPI), advised[GLOO]):
        assert line is None or ("--strategy native" in line and "  # " in line)


# --- the command -----------------------------------------------------------------------------------------------------


def dry(
    *arguments: str, launcher: str = "mpirun", extra: Mapping[str, str] | None = None, without: str = ""
) -> subprocess.CompletedProcess[str]:
    variables = environment(extra)
    variables.pop(without, None)
    return subprocess.run(
        [f"launch/{launcher}.sh", "--dry-run", *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def parts(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def test_a_dry_run_prints_the_command_and_reasons() -> None:
    done = dry("-H", "localhost:2", "python", "-m", "hvdtrain.resnet", "--epochs", "1", without="OMP_NUM_THREADS")
    words = parts(done)
    at = words.index("mpirun")
    assert words[0] == "env"
    assert any(word.startswith("OMP_NUM_THREADS=") for word in words[:at])
    assert f"{cgroup.LAUNCHERS_OWN}=1" in words[:at], "each rank counts its own host's cores"
    assert words[at : at + 5] == ["mpirun", "-np", "2", "-H", "localhost:2"]
    assert words[-5:] == ["python", "-m", "hvdtrain.resnet", "--epochs", "1"]
    lines = done.stderr.splitlines()
    assert all(line.startswith("mpirun.sh: ") and "=" in line and "  # " in line for line in lines), done.stderr
    assert any("OMP_NUM_THREADS=" in line for line in lines)


def test_np_without_hosts_uses_this_machine() -> None:
    done = dry("-np", "3", "--quiet", "--", "python", "x.py", extra={"SLURM_JOB_NODELIST": ""})
    words = parts(done)
    assert words[-2:] == ["python", "x.py"] and "--" not in words[-4:]
    assert words[words.index("-H") + 1] == "localhost:3" and done.stderr == ""
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2"}
    done = dry("-np", "3", "python", "x.py", extra=slurm)
    assert done.returncode == 2 and "has 2 slots" in done.stderr, "an allocation takes precedence"
    done = dry("-np", "0", "python", "x.py")
    assert done.returncode == 2 and "-np is 0" in done.stderr


SPEAKS = """import json, os, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"]
print(f"out {rank}"); print(f"err {rank}", file=sys.stderr)
print(json.loads(os.environ["HVDTRAIN_LAUNCHED_WITH"])["launcher"])"""


@pytest.mark.parametrize("launcher", ["mpirun.sh", "horovodrun.sh", "horovodrun.sh --gloo"])
def test_logs_have_each_ranks_output(launcher: str, tmp_path: Path) -> None:
    words = [
        *f"launch/{launcher} --quiet -np 3 --logs {tmp_path} -x THIS=s3cret".split(),
        *("--set", "MINE=m n", "--set", "MY_API_KEY=s3cret"),
        sys.executable,
        "-c",
        SPEAKS,
    ]
    done = finished(words)
    assert done.returncode == 0, done.stderr
    again = f"launch/{launcher} -H localhost:3 --logs {tmp_path}"
    again += " --set 'MINE=m n' -x MY_API_KEY -x THIS"
    folder = tmp_path if "--gloo" in launcher else tmp_path / "1"
    for rank in range(3):
        # horovodrun writes tags such as [1,0]<stdout>: to the files as well.
        files = [folder / f"rank.{rank}" / stream for stream in ("stdout", "stderr")]
        output, errors = (re.sub(r"\[[\d,]+\]<\w+>:", "", file.read_text()) for file in files)
        assert f"out {rank}\n" in output and f"{again}\n" in output
        assert f"err {rank}\n" in errors


def test_secrets_among_the_settings_are_not_in_the_manifest() -> None:
    about = launched_by.to_environment("launch/mpirun.sh", [], ranks=4, hosts=2)
    facts = {"launcher": "launch/mpirun.sh", "settings": [], "ranks": 4, "hosts": 2}
    assert launched_by.from_environment(about) == facts
    for text in ("[" * 100_000, "7"):
        assert launched_by.from_environment({launched_by.VARIABLE: text}) == {}
    show = f"{sys.executable} -c 'import os; print(os.environ[\"{launched_by.VARIABLE}\"])'"
    words = ["launch/mpirun.sh", "-np", "1", "--set", "MY_API_KEY=s3cret", "--set", "MINE=m", "-x", "URL=s3cret"]
    words += shlex.split(show)
    done = finished(words)
    assert '"MINE"' in done.stdout and "s3cret" not in done.stdout + done.stderr, done.stderr


def test_hosts_of_a_slurm_allocation() -> None:
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "7"}
    words = parts(dry("python", "x.py", extra=slurm))
    assert words[words.index("-H") + 1] == "localhost:2"
    options = launch.parser("mpirun").parse_args(["-np", "1", "x"])
    plan, _ = launch.make_plan("mpirun", options, slurm | {"SLURM_JOB_NODELIST": os.uname().nodename})
    assert launch.typed(plan, options) == "launch/mpirun.sh -np 1"


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["--set", "OMP_NUM_THREADS=7"], {}),
        (["-x", "OMP_NUM_THREADS=7"], {}),
        ([], {"OMP_NUM_THREADS": "7"}),
        (["--set", "OMP_NUM_THREADS=7"], {"OMP_NUM_THREADS": "3"}),
    ],
)
def test_the_users_value_takes_precedence(arguments: list[str], extra: dict[str, str]) -> None:
    done = dry(*arguments, "-H", "localhost:1", "python", "x.py", extra=extra)
    shown = "..." if "-x" in arguments else "7"  # values of -x may be secrets
    assert f"mpirun.sh: OMP_NUM_THREADS={shown}  # " in done.stderr
    assert done.returncode == 0
    plan, _ = launch.make_plan(
        "mpirun", launch.parser("mpirun").parse_args([*arguments, "-H", "localhost", "x"]), extra
    )
    assert launch.child_environment(plan, extra)["OMP_NUM_THREADS"] == "7"
    assert cgroup.LAUNCHERS_OWN not in launch.child_environment(plan, extra)


@pytest.mark.parametrize("by", ["--mca", "environment", "--set"])
def test_the_users_mca_parameter_takes_precedence(by: str) -> None:
    given = {"--mca": ["--mca", "mpi_yield_when_idle", "0"], "--set": ["--set", "mpi_yield_when_idle=0"]}.get(by, [])
    extra = {"OMPI_MCA_mpi_yield_when_idle": "0"} if by == "environment" else {}
    words = parts(dry(*given, "--mca", "btl", "self,tcp", "-H", "localhost:1", "python", "x.py", extra=extra))
    assert words[words.index("mpi_yield_when_idle") + 1] == "0"
    assert words.count("mpi_yield_when_idle") == 1
    assert words[words.index("btl") - 1 : words.index("btl") + 2] == ["--mca", "btl", "self,tcp"]


def test_ranks_get_an_allow_list_of_variables() -> None:
    hidden = ("AWS_SECRET_ACCESS_KEY", "HVDTRAIN_TOKEN", "HOROVOD_DB_PASS", "TF_PRIVATE", "HVDTRAIN_credentials")
    secret = {**dict.fromkeys(hidden, "s3cret"), "HVDTRAIN_SEED": "42", "MINE": "m"}
    known = {"PYTORCH_CUDA_ALLOC_CONF": "a:b", "KERAS_BACKEND": "torch", "OPENBLAS_NUM_THREADS": "1"}
    secret |= known
    done = dry("-x", "MINE", "-H", "localhost:1", "python", "x.py", extra=secret)
    words = parts(done)
    passed = [words[i + 1] for i, word in enumerate(words) if word == "-x"]
    assert {"PATH", "PYTHONPATH", "HVDTRAIN_SEED", "OMP_NUM_THREADS", "MINE", *known} <= set(passed)
    assert not set(hidden) & set(passed)
    assert not [name for name in passed if "=" in name]
    assert "s3cret" not in done.stdout + done.stderr
    options = launch.parser("mpirun").parse_args(["-H", "localhost", "x"])
    plan, _ = launch.make_plan("mpirun", options, secret)
    assert "s3cret" not in launch.child_environment(plan, secret).values()


def test_open_mpi_gets_the_network_instead_of_a_device(iproute2: None) -> None:
    for _, device in socket.if_nameindex():
        own = net.addresses().get(device)
        assert network_of(device, ["localhost"]) == (str(own.network) if own else device)


@pytest.mark.root
def test_a_virtual_interface_has_no_speed(cluster: Cluster) -> None:
    """The kernel reports 10000 Mbit/s for each, whatever its link carries."""
    program = "from hvdtrain.system import net; print(open('/sys/class/net/eth0/speed').read(), net.speed_mbit('eth0'))"
    assert cluster.on("a", sys.executable, "-c", program).stdout.split() == ["10000", "None"]


def test_an_unknown_interface_is_one_line_that_lists_the_known(iproute2: None) -> None:
    done = dry("-H", "localhost:2", "--nic", "eth77", "python")
    assert (done.returncode, done.stdout) == (78, ""), done.stderr
    assert "no network interface eth77 here" in done.stderr and "lo" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_mpirun_is_a_one_line_error() -> None:
    bare = environment({"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": "/"})
    words = [sys.executable, "-m", "hvdtrain.launch", "mpirun", "-H", "localhost", "true"]
    done = subprocess.run(words, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=LIMIT_S)
    if Path("/usr/bin/mpirun").exists():
        assert done.returncode == 0
        return
    assert done.returncode == 69
    assert done.stderr.splitlines()[-1].startswith("hvdtrain: no mpirun in PATH")


# --- the job's end ---------------------------------------------------------------------------------------------------

# Stands in for mpirun. Its children are "ranks", and USR1 ends all with 75, as after a checkpoint.
MPIRUN = """#!/bin/bash
if [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.8"; exit; fi
trap 'kill -USR1 $rank; wait $rank; exit $?' USR1
{rank} &
rank=$!
echo "$rank" >{pid}
{rest}
"""
FOREVER = "mkfifo $0.fifo; exec 3<>$0.fifo; read line <&3"  # without a child process
FOR_6_S = FOREVER.replace("read", "read -t 6") + "; exit 3"
RANK = (
    "{python} -c 'import signal, sys, time; signal.signal(10, lambda *_: time.sleep(1) or sys.exit(75));"
    ' open("{pid}.ready", "x"); time.sleep(600)\''
)


def starts(tmp_path: Path, *, rest: str = "wait $rank") -> tuple[subprocess.Popen[bytes], Path]:
    """Start mpirun.sh with a stand-in for mpirun, and wait until its rank runs."""
    fake, pid = tmp_path / "mpirun", tmp_path / "pid"
    fake.write_text(MPIRUN.format(rank=RANK.format(python=sys.executable, pid=pid), pid=pid, rest=rest))
    fake.chmod(0o755)
    variables = environment()
    variables |= {"PATH": f"{tmp_path}{os.pathsep}{variables['PATH']}"}
    words = [sys.executable, "-m", "hvdtrain.launch", "mpirun", "-H", "localhost:1", "true"]
    with (tmp_path / "stderr").open("w") as stderr:
        job = subprocess.Popen(words, cwd=ROOT, env=variables, stderr=stderr)
    until(lambda: Path(f"{pid}.ready").exists() and pid.exists() and pid.read_text().endswith("\n"))
    return job, pid


@pytest.mark.parametrize("name", ["TERM", "INT", "USR1", "USR1 TERM"])
def test_signals_become_usr1(tmp_path: Path, name: str) -> None:
    """Slurm sends USR1 before the time limit, and TERM at the limit."""
    job, pid = starts(tmp_path)
    for each in name.split():
        job.send_signal(signal.Signals[f"SIG{each}"])
        until(lambda: "the ranks save a checkpoint" in (tmp_path / "stderr").read_text())
    assert job.wait(timeout=LIMIT_S) == 75, (tmp_path / "stderr").read_text()
    assert proc.ended(int(pid.read_text()))


@pytest.mark.parametrize(
    ("launcher", "raised"),
    [(["mpirun.sh"], "Failure('no such data', 65)"), (["horovodrun.sh", "--gloo"], "ValueError('no such data')")],
)
def test_the_last_line_is_the_reason_of_a_rank(launcher: list[str], raised: str) -> None:
    """It follows the messages that mpirun and horovodrun print when a rank fails."""
    imports = "from hvdtrain.comm.lifecycle import guard\nfrom hvdtrain.system.exits import Failure\n"
    program = f"{imports}guard(debug=False)\nraise {raised}"
    done = finished([f"launch/{launcher[0]}", *launcher[1:], "--quiet", "-np", "2", sys.executable, "-c", program])
    assert done.returncode == (65 if "Failure" in raised else 1), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hvdtrain: ") and last.endswith("no such data"), done.stderr


def test_the_launcher_adds_no_other_reason(tmp_path: Path) -> None:
    done = finished(["launch/mpirun.sh", "--quiet", "-np", "2", sys.executable, "-c", "raise SystemExit(3)"])
    assert done.returncode == 3
    assert "hvdtrain: " not in done.stderr


def test_a_killed_launcher_leaves_a_checkpoint(tmp_path: Path) -> None:
    """As when a terminal is closed: the keeper asks the ranks for a checkpoint and waits for it."""
    folder = tmp_path / "run"
    words = ["launch/mpirun.sh", "-np", "2", sys.executable, "-m", "hvdtrain.resnet", *SMALL, "--epochs", "500"]
    with (tmp_path / "stderr").open("w") as stderr:
        job = subprocess.Popen([*words, "--run-dir", folder], cwd=ROOT, env=environment(), stdout=stderr, stderr=stderr)
        steps = folder / "metrics" / "rank0000.jsonl"
        until(lambda: steps.exists() and '"step"' in steps.read_text())
        job.kill()
        job.wait()
        until(lambda: list((folder / "checkpoints").glob("step-*")), what=(tmp_path / "stderr").read_text)
    until(lambda: not any(str(folder).encode() in line for line in command_lines()))


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def test_a_second_signal_ends_a_job_that_ignores_the_first(tmp_path: Path) -> None:
    job, pid = starts(tmp_path, rest=f"trap '' TERM USR1; {FOREVER}")
    # This stand-in ignores signals and does not forward them.
    job.send_signal(signal.SIGTERM)
    until(lambda: "a second SIGTERM or Ctrl-C ends them immediately" in (tmp_path / "stderr").read_text())
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=LIMIT_S) == 130
    assert proc.ended(int(pid.read_text()))


@pytest.mark.parametrize(("lost", "code"), [("'b'", 1), ("None", 3)])
def test_mpirun_is_ended_after_the_loss_of_a_host(tmp_path: Path, lost: str, code: int) -> None:
    fake, pid = tmp_path / "mpirun", tmp_path / "pid"
    late = f"wait $rank; {FOREVER if code == 1 else FOR_6_S}"
    fake.write_text(MPIRUN.format(rank="sleep 1", pid=pid, rest=late))
    fake.chmod(0o755)
    program = (
        "import os, sys; from hvdtrain.launch.supervise import Job;"
        f"raise SystemExit(Job([sys.argv[1]], os.environ, 5, lost=lambda: {lost}).wait())"
    )
    words = [sys.executable, "-c", program, str(fake)]
    done = finished(words)
    assert done.returncode == code, done.stderr
    assert ("host b does not answer" in done.stderr) == (code == 1)


WITHOUT_SIZE = ["env", "-u", "OMPI_COMM_WORLD_SIZE", "-u", "PMIX_RANK"]
"""A wrapper that loses variables, as a container runtime may: each rank then finds itself alone"""
ONE_HOST = "asked for 2 hosts, but this job has 1; hint: check that the names"


@pytest.mark.parametrize(
    ("hosts", "wrapper", "strategy", "reason"),
    [
        ("localhost:1,127.0.0.1:1", [], "powersgd", ONE_HOST),
        ("localhost:2", WITHOUT_SIZE, "allreduce", "asked for 2 ranks, but this job has 1; hint: pass the launcher's"),
    ],
)
def test_a_job_with_fewer_hosts_or_ranks_than_asked_for_is_an_error(
    hosts: str, wrapper: list[str], strategy: str, reason: str, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "hvdtrain.resnet", *SMALL, "--strategy", strategy, "--run-dir", str(tmp_path / "r")]
    done = finished([ROOT / "launch" / "mpirun.sh", "--quiet", "-H", hosts, *wrapper, *words])
    ours = {line for line in done.stderr.splitlines() if line.startswith("hvdtrain: ")}
    assert done.returncode == 69, done.stderr
    assert len(ours) == 1 and f"launch/mpirun.sh -H {hosts} {reason}" in ours.pop(), done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "r").exists()


@pytest.mark.root
def test_lost_hosts_do_not_answer(cluster: Cluster) -> None:
    """`hidden` can be reached through ssh's proxy only, and sshd does not run on the port of `closed`."""
    settings = Path("/run/hvdtrain", cluster.name, "ssh", "ssh_config")
    hidden = "Host hidden\n  HostName hidden.invalid\n  HostKeyAlias b\n  ProxyCommand ssh -W b:22 b\n"
    settings.write_text(f"{settings.read_text()}{hidden}Host closed\n  HostName b\n  Port 9\n")
    link = ["ip", "-n", f"hvd-{cluster.name}-b", "link", "set", "eth0"]

    def lost(*names: str) -> str:
        program = f"from hvdtrain.launch.supervise import lost_host; print(lost_host({names}))"
        return cluster.on("a", sys.executable, "-c", program).stdout.strip()

    assert lost("a", "b", "closed", "hidden") == "None"
    subprocess.run([*link, "down"], check=True)
    try:
        assert (lost("a", "b"), lost("a", "hidden")) == ("b", "hidden")
    finally:
        subprocess.run([*link, "up"], check=True)


@pytest.mark.root
def test_hosts_whose_short_names_are_equal_are_two_hosts(tmp_path: Path) -> None:
    lab = Cluster(unique())
    names = ("node.a.lab", "node.b.lab")
    assert lab.run("up", "--hosts", ",".join(names)).returncode == 0
    try:
        assert [lab.on(name, "hostname", "node").returncode for name in names] == [0, 0]
        words = [sys.executable, "-m", "hvdtrain.resnet", *SMALL, "--epochs", "1", "--strategy", "powersgd", "--json"]
        words += ["--run-dir", str(tmp_path / "run")]
        done = lab.on(names[0], "launch/mpirun.sh", "--quiet", "-H", ",".join(names), *words)
    finally:
        assert lab.run("down").returncode == 0
    assert document(done)["hosts"] == 2


@pytest.mark.root
def test_polling_ranks_sleep_on_a_host_with_a_cpu_quota() -> None:
    """Open MPI yields while it waits, and the library that the launcher preloads turns each yield into a sleep."""
    counted = "print(f' {r.getrusage(r.RUSAGE_SELF)[14]} ')"  # mpirun may join two ranks' lines: hence the spaces
    yields = f"import os, resource as r; [os.sched_yield() for _ in range(100)]; {counted}"
    lab = Cluster(unique())
    assert lab.run("up", "--hosts", "a,b", "--cpu-share", "0.5").returncode == 0
    try:
        done = lab.on("a", "launch/mpirun.sh", "-H", "a:1,b:1", sys.executable, "-c", yields)
    finally:
        assert lab.run("down").returncode == 0
    assert "LD_PRELOAD=" in done.stderr and "mpi_yield_when_idle=1" in done.stderr, done.stderr
    sleeps = [int(word) for word in done.stdout.split()]
    assert len(sleeps) == 2 and min(sleeps) >= 100, sleeps


@pytest.mark.root
@pytest.mark.parametrize(
    ("launcher", "number"),
    [(["mpirun.sh"], signal.SIGTERM), (["horovodrun.sh", "--gloo"], signal.SIGINT)],
    ids=["mpirun-term", "gloo-int"],
)
@pytest.mark.slow
def test_signals_save_a_checkpoint_on_two_hosts(
    cluster: Cluster, tmp_path: Path, launcher: list[str], number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    words = [f"launch/{launcher[0]}", *launcher[1:], "--grace", "60", "-H", "a:1,b:1", sys.executable]
    words += ["-m", "hvdtrain.resnet", *SMALL, "--epochs", "500", "--run-dir", str(folder)]
    with (tmp_path / "stderr").open("w+") as stderr:
        job = subprocess.Popen(
            cluster.command("exec", "a", "--", *words), cwd=ROOT, env=environment(), stdout=stderr, stderr=stderr
        )
        steps = folder / "metrics" / "rank0000.jsonl"
        until(lambda: steps.exists() and '"step"' in steps.read_text())
        job.send_signal(number)
        code = job.wait(timeout=LIMIT_S)
        stderr.seek(0)
        assert code == 75, stderr.read()[-3000:]
    assert list((folder / "checkpoints").glob("step-*"))
