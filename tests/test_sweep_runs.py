"""Sweeps for real: on ranks of this machine, and on virtual hosts with a throttle."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT_S, ROOT, environment, failing, finished, until

from hvdtrain.lab import topology, virtual
from hvdtrain.sweep import file
from hvdtrain.sweep.network import cluster_name
from hvdtrain.system.commands import calling_user

SMALL = '[defaults]\nframework = "torch"\nwidth = 0.125\nimage_size = "16"\nbatch_size = 96\nepochs = 1\nthreads = 1\n'
# Two runs that end well, and one that no workload refuses but that cannot end well.
LOCAL = f"""{SMALL}checkpoint_epochs = 0
[[grid]]
label = "alone"
launcher = "none"
[[grid]]
label = "ranks"
ranks_per_host = 2
[[grid]]
label = "bad"
launcher = "none"
lr = 1e30
"""


class Command:
    """`hvdtrain sweep` on a file, with locks of its own."""

    def __init__(self, folder: Path, text: str) -> None:
        self.file, self.root = folder / "tried.toml", folder / "results"
        self.file.write_text(text)
        self.locks = tempfile.mkdtemp(prefix="hs", dir="/tmp")  # Open MPI wants a short one

    def start(self, *flags: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "hvdtrain.sweep", str(self.file), "--root", str(self.root), *flags]
        variables = environment({"TMPDIR": self.locks})
        del variables["HVDTRAIN_RECORD"]  # a sweep says that it does not pass it on
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *flags: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        process = self.start(*flags)
        out, err = process.communicate(timeout=2 * LIMIT_S)
        assert "Traceback" not in err
        return process.returncode, out, err

    def document(self, *flags: str) -> tuple[int, Any]:
        code, out, _ = self.run("--json", *flags)
        return code, json.loads(out)

    def has_hosts(self) -> bool:
        """Whether its virtual cluster is up."""
        about = file.Sweep(path=self.file, name="tried", grids=[])
        return cluster_name(about, self.root / "tried") in virtual.clusters()

    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.root / "tried").iterdir())

    def complete(self) -> list[str]:
        return [name for name in self.folders() if (self.root / "tried" / name / "COMPLETE").exists()]


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path, LOCAL)
    yield made
    shutil.rmtree(made.locks, ignore_errors=True)


def processes_on(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def await_file(pattern: str, root: Path, process: subprocess.Popen[str]) -> None:
    until(lambda: list(root.glob(pattern)) or process.poll() is not None, what=lambda: f"no {pattern}")
    assert process.poll() is None, process.communicate()


@pytest.mark.root
def test_under_sudo_it_trains_as_its_caller_who_owns_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "nobody")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to others
        Path(folder).chmod(0o755)
        sweep = Command(Path(folder), '[[grid]]\nlabel = "who"\nlauncher = "none"\ncommand = "id -un"\n')
        code, _, _ = sweep.run()
        shutil.rmtree(sweep.locks)
        assert code == 1, "it records nothing"
        for log in sweep.root.glob("tried/who-*/logs/launch.log"):
            assert log.read_text() == "nobody\n"
        assert {path.owner() for path in (sweep.root, *sweep.root.rglob("*"))} == {"nobody"}


def test_stopped_and_continued_each_point_is_run_once_and_a_failure_is_told(sweep: Command) -> None:
    process = sweep.start()
    await_file("tried/ranks-*/logs/launch.log", sweep.root, process)
    code, _, said = sweep.run()
    assert code == 1
    assert f"process {process.pid}" in said, "two sweeps at once"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75
    assert "2 not run" in out
    assert processes_on(sweep.root) == []
    before = sweep.complete()
    assert len(before) == 1

    code, out, _ = sweep.run()
    assert code == 1
    assert "1 done, 1 done before, 1 FAILED" in out
    assert "the loss is" in out  # the last lines of its log, and where that is
    log = Path(next(line.split()[1] for line in out.splitlines() if line.strip().startswith("log: ")))
    assert "the loss is" in log.read_text()
    names = sweep.folders()
    kinds = Counter(name.rpartition("-")[2] for name in names)
    assert kinds == {"r1": 2, "failed1": 1, "failed2": 1, "unfinished1": 1}
    assert [name for name in sweep.complete() if name in before] == before
    assert len(sweep.complete()) == 2
    points = [json.loads((sweep.root / "tried" / name / "point.json").read_text()) for name in names]
    assert {point["attempt"] for point in points if "failed2" in names[points.index(point)]} == {2}
    assert all(point["kind"] == "timing" and point["rate_mbit"] is None for point in points)

    # A record that does not fit is not taken for the point's; what is done and fits is not run again.
    manifest = sweep.root / "tried" / before[0] / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"momentum": 0.9', '"momentum": 0.8'))
    both = ["--only", "alone-*", "--only", "ranks-*"]
    _, document = sweep.document("--dry-run", *both)
    assert [run["state"] for run in document["runs"]] == ["waiting", "kept"]
    assert "momentum is 0.8" in document["runs"][0]["reason"]
    code, document = sweep.document(*both)
    assert (code, document["counts"]["done"], document["counts"]["kept"]) == (0, 1, 1)
    assert sweep.folders() == sorted([*names, f"{before[0]}-other1"])


def test_a_command_of_ones_own_is_swept_like_a_workload(tmp_path: Path) -> None:
    """Its flags as they are written, its variables on every rank; what is done is not done again."""
    text = f"""protocol = "E"
[[grid]]
command = "{ROOT / "tests" / "programs" / "own_recorded.py"} --private-key hunter2"
ranks_per_host = 2
strategy = "allreduce"
seed = 7
quiet = true
wandb-key = "hunter2"
HUB_TOKEN = "hunter2"
HVDTRAIN_MONITOR_MS = 100
"""
    sweep = Command(tmp_path, text)
    try:
        code, out, err = sweep.run()
        assert code == 0, out + err
        [name] = sweep.complete()
        manifest = json.loads((sweep.root / "tried" / name / "manifest.json").read_text())
        secret = ["--private-key", "***", "--seed", "7", "--quiet", "--wandb-key", "***"]
        assert manifest["argv"][1:] == secret
        report = tmp_path / "results" / "report.html"
        done = finished([sys.executable, "-m", "hvdtrain.results", "report", str(sweep.root), "-o", str(report)])
        assert done.returncode == 0, done.stderr
        kept = [path for path in sweep.root.rglob("*") if path.is_file()]
        assert [path for path in kept if b"hunter2" in path.read_bytes()] == []
        assert "HUB_TOKEN=" in report.read_text(), "the command stands there, without its secrets"
        assert (len(manifest["ranks"]), manifest["config"]["strategy"]) == (2, "allreduce")
        assert manifest["config"]["monitor"] == "power,resources"
        [sensors, *_] = (sweep.root / "tried" / name / "monitors").glob("*.jsonl")
        assert json.loads(sensors.read_text().splitlines()[0])["interval_s"] == 0.1
        code, told = sweep.document()
    finally:
        shutil.rmtree(sweep.locks, ignore_errors=True)
    assert code == 0 and "hunter2" not in json.dumps(told)
    assert [run["state"] for run in told["runs"]] == ["kept"]


def test_energy_runs_have_sensors_on_and_what_is_lacking_is_told(sweep: Command) -> None:
    sweep.file.write_text(
        f'protocol = "T,E"\ncooldown_s = 0.2\norder = "as-written"\n{SMALL}'
        '[[grid]]\nlauncher = "none"\nmonitor_idle_s = 0.3\nimage_size = 16\n'
        '[[grid]]\nlabel = "gpu"\ndevice = "gpu"\nranks_per_host = 99\n'
    )
    code, document = sweep.document()
    assert code == 0
    assert [(run["kind"], run["state"]) for run in document["runs"]] == [
        *(("timing", "done"), ("energy", "done")),
        *(("timing", "lacking"), ("energy", "lacking")),
    ]
    assert "this needs 99" in document["runs"][2]["reason"]
    monitors = [
        json.loads((Path(run["run_dir"]) / "manifest.json").read_text())["config"]["monitor"]
        for run in document["runs"][:2]
    ]
    assert monitors == ["none", "power,resources"]
    code, document = sweep.document("--only", "gpu-*")
    assert code == 69, "nothing of it could be run"


@pytest.mark.parametrize(
    ("change", "code", "expected"),
    [
        ('[[grid]]\nstrategy = "telepathy"\n', 78, "unknown strategy 'telepathy'; known: allreduce"),
        ("[[grid]]\nlr = -1.0\n", 78, "--lr is -1.0"),
        ("[[grid]]\nranks_per_host = 3\nglobal_batch_size = 2\n", 78, "too few for 3 ranks: use at most 2"),
        ("[[grid]]\ncolour = 1\n", 78, ":1: unknown key 'colour'"),
        ("", 2, "No such file"),
        ("[[grid]]\n", 73, "choose another --root"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_run(sweep: Command, change: str, code: int, expected: str) -> None:
    sweep.file.write_text(change)
    if not change:
        sweep.file.unlink()
    if code == 73:
        sweep.root.write_text("a file where the folder should be")
    done, out, err = sweep.run()
    assert (done, out) == (code, "")
    assert err.startswith("sweep: ")
    assert len(err.splitlines()) == 1
    assert expected.replace(":1:", ":2:") in err
    assert not sweep.root.is_dir()


@pytest.mark.root
def test_a_full_disk_ends_the_sweep_in_one_line_and_it_goes_on_when_there_is_room(sweep: Command) -> None:
    sweep.root.mkdir()
    sweep.file.write_text(f'{SMALL}[[grid]]\nlauncher = "none"\n')
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", sweep.root], check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        code, _, err = sweep.run()
        assert code in (73, 74)
        assert "the same command goes on" in err.splitlines()[-1] or "--root" in err.splitlines()[-1]
        subprocess.run(["mount", "-o", "remount,size=200m", sweep.root], check=True)
        assert sweep.run()[0] == 0
    finally:
        subprocess.run(["umount", sweep.root], check=True)


@pytest.mark.root
def test_a_sweep_brings_hosts_up_throttles_them_and_leaves_nothing(sweep: Command) -> None:
    sweep.file.write_text(
        f'off_percent = 50\n{SMALL}checkpoint_epochs = 0\n[cluster]\nvirtual = ["a", "b"]\n'
        '[[grid]]\nhosts = 2\nrate = ["20mbit", "unlimited"]\nbatch_size = 360\nlauncher = "launch/horovodrun.sh"\n'
    )
    code, document = sweep.document()
    assert code == 0, document
    assert Counter(run["state"] for run in document["runs"]) == {"done": 2}
    assert not sweep.has_hosts()
    asked = {}
    for run in document["runs"]:
        folder = Path(run["run_dir"])
        point, manifest = (json.loads((folder / name).read_text()) for name in ("point.json", "manifest.json"))
        throttles = {json.dumps((link["throttle"] or {}).get("up_mbit")) for link in manifest["links"]}
        asked[point["rate_mbit"]] = throttles
        assert {rank["host"] for rank in manifest["ranks"]} == {"a", "b"}
        if point["rate_mbit"]:
            assert point["marked"] is None and abs(point["rate_off_percent"]) <= 50
    assert asked == {20.0: {"20.0"}, None: {"null"}}

    one = ["--set", "seed=1", "--only", "*20mbit*"]
    strict = [*one, "--set", "off_percent=0.00001"]  # no link is that exact
    refusing = [*strict, "--set", "when_off=refuse"]
    folders = []
    for flags, state in ((strict, "marked"), (refusing, "refused"), (one, "done")):
        code, document = sweep.document(*flags)
        assert (code, document["runs"][0]["state"]) == (int(state != "done"), state)
        about = document["runs"][0]["reason"] if state == "refused" else document["runs"][0]["marked"]
        assert about is None if state == "done" else "Mbit/s instead of" in about
        folders.append(sum(name.startswith(Path(document["runs"][0]["run_dir"]).name) for name in sweep.folders()))
    assert folders == [1, 1, 2], "the marked run is kept beside the one that replaced it"
    assert sweep.document(*one)[1]["counts"]["kept"] == 1
    assert not sweep.has_hosts()


@pytest.mark.root
def test_one_host_is_run_among_busy_ones_and_a_stopped_sweep_takes_all_down(sweep: Command) -> None:
    text = SMALL.replace("epochs = 1", "epochs = 50") + '[cluster]\nvirtual = ["a", "b"]\nfill = true\n'
    sweep.file.write_text(text + "[[grid]]\nhosts = 1\n")
    process = sweep.start()
    await_file("tried/*/metrics/rank0000.jsonl", sweep.root, process)
    await_file("hvdtrain-sweep-*/b/metrics/rank0000.jsonl", Path(sweep.locks), process)
    (beside,) = Path(sweep.locks).glob("hvdtrain-sweep-*/b/manifest.json")
    assert [rank["host"] for rank in json.loads(beside.read_text())["ranks"]] == ["b"]
    assert sweep.has_hosts()
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75
    assert not sweep.has_hosts()
    assert processes_on(sweep.root) == processes_on(Path(sweep.locks)) == []


def test_a_sweeps_own_cluster_is_taken_by_its_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "STATE", tmp_path)
    (tmp_path / "s.toml").write_text('[cluster]\nvirtual = ["a", "b"]\n[[grid]]\n')
    own = cluster_name(file.read(tmp_path / "s.toml"), tmp_path)
    for name, chosen in ((own, None), ("lab", "lab")):
        made = topology.from_names(
            "a,b", cluster=name, user=calling_user(), slots=1, cpu_share=None, cpus=None, rate=None
        )
        (tmp_path / name).mkdir()
        (tmp_path / name / "cluster.json").write_text(json.dumps(dataclasses.asdict(made)))
        with contextlib.nullcontext() if chosen else failing(2, rf"\({own} is a sweep's\); choose with --name"):
            assert virtual.choose() == chosen
        assert virtual.choose(own) == own
