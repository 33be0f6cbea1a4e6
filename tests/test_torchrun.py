"""`hvdtrain launch torchrun`: how hosts find each other, what environment ranks have, and how a job ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import LIMIT_S, ROOT, Cluster, environment, failing, finished, refused, unique, until

from hvdtrain.system import proc
from hvdtrain.system.environment import left_out
from hvdtrain.torchrun import key
from hvdtrain.torchrun.host import outcome

LAUNCH = [sys.executable, "-m", "hvdtrain.cli", "launch", "torchrun"]

# --- the job's end ---------------------------------------------------------------------------------------------------

ENDLESS = """import os, signal, sys, time
folder, codes = sys.argv[1], [code for code in sys.argv[2].split(",")]
rank = int(os.environ["RANK"])
caught = 0
def save(number, frame):
    global caught
    caught += 1
    if caught > 1:
        return
    until = time.monotonic() + float(sys.argv[3])
    while (left := until - time.monotonic()) > 0:
        time.sleep(left)
    with open(f"{folder}/saved.{rank}", "w") as file:
        file.write(str(caught))
    os._exit(int(codes[rank]))
if codes[rank]:
    signal.signal(signal.SIGTERM, save)
with open(f"{folder}/pid.{rank}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, f"{folder}/pid.{rank}")
while True:
    time.sleep(1)
"""
"""A script of two ranks that saves at SIGTERM and ends with a code; without a code for its rank it has no handler"""


class Job:
    """The script on two ranks, which have begun."""

    def __init__(self, folder: Path, start: list[str], codes: str, save_s: float, *options: str) -> None:
        self._folder = folder
        script = folder / "endless.py"
        script.write_text(ENDLESS)
        words = [*start, *options, str(script), str(folder), codes, str(save_s)]
        with (folder / "stderr").open("w") as stderr:
            self.launcher = subprocess.Popen(words, cwd=ROOT, env=environment(), stderr=stderr)
        pids = [folder / f"pid.{rank}" for rank in (0, 1)]
        until(lambda: all(path.exists() for path in pids), what=(folder / "stderr").read_text)
        self.ranks = [int(path.read_text()) for path in pids]

    def end(self, number: signal.Signals) -> tuple[int, dict[int, int]]:
        """(exit code after the signal, how often each rank that saved had been signalled)."""
        self.launcher.send_signal(number)
        code = self.launcher.wait(LIMIT_S)
        assert all(map(proc.ended, self.ranks)), "a rank outlives the launcher"
        return code, {int(path.suffix[1:]): int(path.read_text()) for path in self._folder.glob("saved.*")}


@pytest.mark.parametrize(
    ("number", "codes", "save_s", "code", "saved"),
    [
        (signal.SIGUSR1, "75,75", 6.5, 75, [0, 1]),  # longer than it takes the launcher to repeat its own signal
        (signal.SIGTERM, ",", 0.1, 143, []),
        pytest.param(signal.SIGINT, "3,0", 0.1, 3, [0, 1], marks=pytest.mark.slow),
    ],
)
def test_a_signal_reaches_each_rank_once_as_sigterm_and_ranks_have_the_grace_to_save(
    tmp_path: Path, number: signal.Signals, codes: str, save_s: float, code: int, saved: list[int]
) -> None:
    job = Job(tmp_path, [*LAUNCH, "-H", "localhost:2"], codes, save_s, "--grace", "200")
    assert job.end(number) == (code, dict.fromkeys(saved, 1)), (tmp_path / "stderr").read_text()


@pytest.mark.slow
def test_ranks_that_save_for_longer_than_the_grace_are_ended(tmp_path: Path) -> None:
    job = Job(tmp_path, [*LAUNCH, "-H", "localhost:2"], "75,75", LIMIT_S, "--grace", "1")
    assert job.end(signal.SIGTERM) == (143, {})


@pytest.mark.slow
def test_ranks_of_a_killed_launcher_still_save(tmp_path: Path) -> None:
    job = Job(tmp_path, [*LAUNCH, "-H", "localhost:2"], "75,75", 1, "--grace", "200")
    job.launcher.kill()
    job.launcher.wait()
    until(lambda: all(map(proc.ended, job.ranks)))
    assert len([*tmp_path.glob("saved.*")]) == 2


def test_a_failure_of_one_rank_is_the_jobs_and_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(1000)\n")
    done = finished([*LAUNCH, "-H", "localhost:2", script])
    assert done.returncode == 7, done.stderr


@pytest.mark.root
@pytest.mark.slow
def test_a_rank_on_another_host_saves_although_those_here_end_at_once(cluster: Cluster, tmp_path: Path) -> None:
    start = cluster.command("exec", "a", "--", "hvdtrain", "launch", "torchrun", "-H", "b:1,a:1")
    job = Job(tmp_path, start, "0,", 6.5, "--grace", "200")
    assert job.end(signal.SIGTERM) == (75, {0: 1}), (tmp_path / "stderr").read_text()


@pytest.mark.root
@pytest.mark.slow
def test_a_host_that_is_lost_after_the_others_have_ended_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(
        "import os, sys, time\n"
        "path = os.path.join(sys.argv[1], os.environ['RANK'])\n"
        "open(path + '.new', 'w').write(str(os.getpid()))\n"
        "os.rename(path + '.new', path)\n"
        "time.sleep(1000 * int(os.environ['RANK']))\n"
    )
    start = cluster.command("exec", "a", "--", "hvdtrain", "launch", "torchrun", "-H", "a:1,b:1")
    link = ["ip", "-n", f"hvd-{cluster.name}-b", "link", "set", "eth0"]
    job = subprocess.Popen([*start, script, tmp_path], env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    first, second = (int((tmp_path / name).read_text()) for name in "01")
    until(lambda: proc.ended(first))
    subprocess.run([*link, "down"], check=True)
    try:
        _, errors = job.communicate(timeout=LIMIT_S)
    finally:
        subprocess.run([*link, "up"], check=True)
    assert job.returncode == 1 and "host b does not answer" in errors, errors
    until(lambda: proc.ended(second))


@pytest.mark.parametrize(
    ("codes", "stopped", "code"),
    [
        ([0, 0], False, 0),
        ([0, 7], False, 7),
        ([0, -9], False, 137),
        ([0, 0], True, 75),
        ([75, -15], True, 75),
        ([-15, -15], True, 143),
        ([-15, 1], True, 143),
        ([75, 1, -15], True, 1),
        ([1, 1], True, 1),
    ],
)
def test_the_exit_code_follows_from_those_of_all_ranks(codes: list[int], stopped: bool, code: int) -> None:
    assert outcome(codes, stopped=stopped) == code


# --- hosts that find each other --------------------------------------------------------------------------------------

MEET = """import json, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(value)
print(json.dumps({"rank": dist.get_rank(), "sum": float(value[0]), "host": socket.gethostname()}))
dist.destroy_process_group()
"""


@contextlib.contextmanager
def renamed(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Hosts vm1 and vm2, which know each other as a and b only; vm2's interface is ens9. ssh knows b as `alias`."""
    config = Path("/run/hvdtrain", cluster.name, "ssh", "ssh_config")
    before = config.read_text()
    config.write_text(f"{before}Host alias\n  HostName 10.77.0.2\n  HostKeyAlias b\n")
    for host, name in (("a", "vm1"), ("b", "vm2")):
        table = folder / f"hosts.{host}"
        table.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n10.77.0.1 a\n10.77.0.2 b\n")
        for words in (["mount", "--bind", str(table), "/etc/hosts"], ["hostname", name]):
            assert cluster.on(host, *words).returncode == 0
    try:
        rename(cluster, "eth0", "ens9")
        yield
    finally:
        rename(cluster, "ens9", "eth0")
        config.write_text(before)
        for host in "ab":
            cluster.on(host, "umount", "/etc/hosts")
            cluster.on(host, "hostname", host)


def rename(cluster: Cluster, old: str, new: str) -> None:
    namespace = ["ip", "-n", f"hvd-{cluster.name}-b", "link", "set"]
    for words in ([old, "down"], [old, "name", new], [new, "up"]):
        subprocess.run([*namespace, *words], check=True)


@pytest.mark.root
@pytest.mark.slow
def test_hosts_find_each_other_whatever_they_call_themselves_and_their_interfaces(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    with renamed(cluster, tmp_path):
        for hosts in ("vm1:1,10.77.0.2:1", "localhost:1,alias:1", "b:1,a:1"):
            done = cluster.on("a", "hvdtrain", "launch", "torchrun", "-H", hosts, str(script), timeout_s=100)
            assert done.returncode == 0, f"{hosts}: {done.stderr}"
            lines = [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]
            first = "vm2" if hosts.startswith("b") else "vm1"
            assert {line["rank"]: line["host"] for line in lines}[0] == first, "ranks are numbered in the hosts' order"
            assert {line["sum"] for line in lines} == {3.0} and len({line["host"] for line in lines}) == 2


def test_a_host_that_is_given_twice_is_refused() -> None:
    refused("cli", "launch", "torchrun", "-H", "localhost:1,127.0.0.1:1", "-m", "x", code=2, said="the same host")


# --- what ranks get --------------------------------------------------------------------------------------------------

SHOW = """import json, os
names = ("MYVAR", "HF_HOME", "HF_TOKEN", "WANDB_MODE", "OTHER", "OMP_NUM_THREADS", "HVDTRAIN_LAUNCHED_WITH")
print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)
for process in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{process}/cmdline") as words:
            line = words.read()
    except OSError:
        continue
    assert "hushmoney" not in line or "HF_TOKEN=" in line, line  # that is the test's own command
"""
SET = {"MYVAR": "one two", "HF_HOME": "/x", "HF_TOKEN": "hushmoney", "WANDB_MODE": "offline", "OTHER": "1"}


def shown(text: str) -> list[dict[str, str | None]]:
    return [json.loads(line) for line in text.replace("}{", "}\n{").splitlines() if line]


def test_ranks_on_this_machine_inherit_everything(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    words = [*LAUNCH, "-H", "localhost:2", "--strategy", "int8", "-x", "NEW=1", "--", script]
    done = finished(words, extra=SET)
    assert done.returncode == 0, done.stderr
    ranks = shown(done.stdout)
    assert [rank | SET for rank in ranks] == ranks and len(ranks) == 2
    launched = json.loads(ranks[0]["HVDTRAIN_LAUNCHED_WITH"] or "")
    assert launched["launcher"] == "hvdtrain launch torchrun -H localhost:2 --strategy int8 -x NEW"
    assert (launched["ranks"], launched["hosts"]) == (2, 1)
    assert len(done.stderr.splitlines()) == 1 and len(done.stderr) <= 100, done.stderr


@pytest.mark.root
def test_ranks_on_other_hosts_get_known_variables_and_those_that_are_named(tmp_path: Path) -> None:
    """A line names the rest. Each host counts its own cores."""
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    lab = Cluster(unique())
    topology = tmp_path / "lab.toml"
    topology.write_text("[hosts.a]\ncpu_share = 0.5\n[hosts.b]\n")
    assert lab.run("up", "--topology", str(topology)).returncode == 0
    try:
        given = [f"{name}={value}" for name, value in SET.items()]
        launch = ["hvdtrain", "launch", "torchrun", "-H", "a:1,b:1", "-x", "HF_TOKEN", "-x", "MYVAR", str(script)]
        done = lab.on("a", "env", "-u", "OMP_NUM_THREADS", *given, *launch)
    finally:
        assert lab.run("down").returncode == 0
    assert done.returncode == 0, done.stderr
    ranks = shown(done.stdout)
    assert [rank | SET | {"OTHER": None} for rank in ranks] == ranks and len(ranks) == 2
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {"1", None}, "PyTorch uses all cores of b by itself"
    lines = [line for line in done.stderr.splitlines() if line.startswith("launch torchrun: ")]
    assert "OTHER" in lines[1] and "hushmoney" not in done.stderr and max(map(len, lines)) <= 100


def test_variables_that_are_left_out_are_the_users() -> None:
    session = {"PWD", "SHLVL", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "BASH_FUNC_which%%", "PS1", "LS_COLORS"}
    assert left_out([*SET, *session]) == ["HF_TOKEN", "MYVAR", "OTHER"]
    assert left_out([*SET, *session], ["MYVAR", "HF_TOKEN"]) == ["OTHER"]


def test_a_module_is_a_script_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv[1:])\n")
    done = finished([*LAUNCH, "-H", "localhost:1", "-m", "mine", "-m", "x y"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['-m', 'x y']\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-H", "localhost:2", "--strategy", "bogus", "-m", "x"], 78, "bogus"),
        (["-H", "nowhere:1", "--strategy", "powersgd:rnk=2", "-m", "x"], 78, "rnk"),
        (["-H", "localhost:2", "--grace", "-5", "-m", "x"], 2, "--grace"),
        (["-H", "localhost:2", "--grace", "nan", "-m", "x"], 2, "--grace"),
        (["-H", "localhost:2", "--", "none.py"], 2, "none.py: no such script"),
        (["-H", "localhost:2"], 2, "no script"),
        (["-m", "x"], 2, "-H localhost:2"),
        (["-H", "localhost:1,nowhere:2", "-m", "x"], 2, "same number of ranks"),
    ],
)
def test_what_cannot_start_is_refused_before_any_login(words: list[str], code: int, said: str) -> None:
    refused("cli", "launch", "torchrun", *words, code=code, said=said, extra={"SLURM_JOB_NODELIST": ""})


# --- the job's key ---------------------------------------------------------------------------------------------------

SECRET = """import json, os, pathlib, socket, torch
import hvdtrain.torch as hvd
from hvdtrain.comm import signed_store
hvd.init()
key = signed_store.launchers_key()
places = [*pathlib.Path("/proc").glob("[0-9]*/cmdline"), *pathlib.Path("/proc").glob("[0-9]*/environ")]
seen = []
for place in places:
    try:
        text = place.read_bytes()
    except OSError:
        continue
    seen += [str(place)] if key in text or key.hex().encode() in text else []
print(json.dumps({"sum": float(hvd.allreduce(torch.ones(1), op=hvd.Sum)), "key": key.hex(), "seen": seen,
                  "host": socket.gethostname()}), flush=True)
"""


@pytest.mark.root
@pytest.mark.slow
def test_hosts_with_homes_of_their_own_get_a_key_for_the_job_that_nobody_sees(apart: Cluster, tmp_path: Path) -> None:
    (script := tmp_path / "secret.py").write_text(SECRET)
    keys = []
    for _ in range(2):
        done = apart.on("a", "hvdtrain", "launch", "torchrun", "-H", "a:1,b:1", "--strategy", "int8", str(script))
        assert done.returncode == 0, done.stderr
        ranks = [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]
        assert sorted(rank["host"] for rank in ranks) == ["a", "b"] and {rank["sum"] for rank in ranks} == {2.0}
        assert [rank["seen"] for rank in ranks] == [[], []] and ranks[0]["key"] not in done.stderr
        keys += {rank["key"] for rank in ranks}
    assert len({*keys}) == 2, "a key per job, the same on both hosts"
    for host in "ab":
        assert apart.on(host, "ls", "-A", str(Path.home() / ".config/hvdtrain")).returncode, "no file stays"
        assert not apart.on(host, "grep", "-l", "hvdtrain-0-", "/proc/net/unix").stdout, "nothing listens any more"


@pytest.mark.root
def test_what_a_host_with_files_of_its_own_writes_stays_there(apart: Cluster) -> None:
    for place in (Path.home() / unique(), ROOT.parent / unique()):
        assert apart.on("b", "touch", str(place)).returncode == 0
        assert not place.exists() and apart.on("a", "ls", str(place)).returncode


ASK = """import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("\\0hvdtrain-0-" + sys.argv[1])
    print(len(connection.recv(64)))
"""
SQUAT = """import socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\\0hvdtrain-0-" + sys.argv[1])
    listener.listen()
    print("bound", flush=True)
    while True:
        listener.accept()[0].sendall(bytes(32))
"""
OTHER_USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c"]


@contextlib.contextmanager
def serving(job: str, secret: bytes) -> Iterator[subprocess.Popen[bytes]]:
    server = subprocess.Popen([sys.executable, "-I", "-S", "-c", key.PROGRAM], stdin=subprocess.PIPE)
    assert server.stdin is not None
    try:
        server.stdin.write(json.dumps({"job": job, "key": secret.hex()}).encode() + b"\n")
        server.stdin.flush()
        yield server
    finally:
        server.kill()
        server.wait()
        server.stdin.close()


@pytest.mark.root
def test_a_key_is_for_one_process_of_the_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user gets nothing, and cannot replace the key. Nothing serves a job whose launcher is gone."""
    job, secret = unique(), bytes(range(32))
    with serving(job, secret) as server:
        until(lambda: f"@hvdtrain-0-{job}" in Path("/proc/net/unix").read_text())
        assert finished([*OTHER_USER, ASK, job]).stdout == "0\n"
        assert key.receive(job) == secret
        assert server.wait(LIMIT_S) == 0
    with serving(job, secret) as server:
        until(lambda: f"@hvdtrain-0-{job}" in Path("/proc/net/unix").read_text())
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait(LIMIT_S) == 0
    monkeypatch.setattr(key, "PATIENCE_S", 0.5)
    squatter = subprocess.Popen([*OTHER_USER, SQUAT, job], stdout=subprocess.PIPE)
    try:
        assert squatter.stdout is not None and squatter.stdout.readline() == b"bound\n"
        with failing(69, "did not get the job's key"):
            key.receive(job)
    finally:
        squatter.kill()
        squatter.communicate()
