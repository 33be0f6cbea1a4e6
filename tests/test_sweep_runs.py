"""Real sweeps: ranks on this machine, and virtual hosts with throttled links."""

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
# Two runs that succeed, and one with valid settings that diverges.
LOCAL = f"""{SMALL}checkpoint_steps = 0
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
    """Runs `hvdtrain sweep` on a file, with its own lock files."""

    def __init__(self, folder: Path, text: str) -> None:
        self.file, self.root = folder / "tried.toml", folder / "results"
        self.file.write_text(text)
        self.locks = tempfile.mkdtemp(prefix="hs", dir="/tmp")  # Open MPI needs a short path

    def start(self, *flags: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "hvdtrain.sweep", str(self.file), "--root", str(self.root), *flags]
        variables = environment({"TMPDIR": self.locks})
        for name in [name for name in variables if name.startswith("HVDTRAIN_")]:  # a sweep prints a line about them
            del variables[name]
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
        """Whether its virtual cluster is running."""
        sweep = file.Sweep(path=self.file, name="tried", grids=[])
        return cluster_name(sweep, self.root / "tried") in virtual.clusters()

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
def test_under_sudo_runs_and_records_belong_to_the_calling_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "nobody")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # other users cannot enter pytest's folder
        shutil.chown(folder, "nobody")
        sweep = Command(Path(folder), '[[grid]]\nlabel = "who"\nlauncher = "none"\ncommand = "id -un"\n')
        code, _, _ = sweep.run()
        shutil.rmtree(sweep.locks)
        assert code == 1, "id records nothing"
        for log in sweep.root.glob("tried/who-*/logs/launch.log"):
            assert log.read_text() == "nobody\n"
        assert {path.owner() for path in (sweep.root, *sweep.root.rglob("*"))} == {"nobody"}


@pytest.mark.slow
def test_a_continued_sweep_repeats_no_finished_run_and_reports_failures(sweep: Command) -> None:
    process = sweep.start()
    await_file("tried/ranks-*/logs/launch.log", sweep.root, process)
    code, _, err = sweep.run()
    assert code == 1
    assert f"process {process.pid}" in err, "a second sweep at the same time"
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
    assert "the loss is" in out  # the last lines of the log, followed by its path
    log = Path(next(line.split()[1] for line in out.splitlines() if line.strip().startswith("log: ")))
    assert "the loss is" in log.read_text()
    names = sweep.folders()
    kinds = Counter(name.rpartition("-")[2] for name in names)
    assert kinds == {"r1": 2, "failed1": 1, "failed2": 1, "unfinished1": 1}
    assert [name for name in sweep.complete() if name in before] == before
    assert len(sweep.complete()) == 2
    requests = [json.loads((sweep.root / "tried" / name / "experiment.json").read_text()) for name in names]
    assert {request["attempt"] for request, name in zip(requests, names, strict=True) if "failed2" in name} == {2}
    assert all(request["kind"] == "timing" and request["rate_mbit"] is None for request in requests)

    # A run whose records do not match is repeated; the other one is kept.
    manifest = sweep.root / "tried" / before[0] / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"momentum": 0.9', '"momentum": 0.8'))
    both = ["--only", "alone-*", "--only", "ranks-*"]
    _, document = sweep.document("--dry-run", *both)
    assert [run["state"] for run in document["runs"]] == ["waiting", "kept"]
    assert "momentum is 0.8" in document["runs"][0]["reason"]
    code, document = sweep.document(*both)
    assert (code, document["counts"]["done"], document["counts"]["kept"]) == (0, 1, 1)
    assert sweep.folders() == sorted([*names, f"{before[0]}-other1"])


@pytest.mark.slow
def test_a_sweep_of_a_command_passes_flags_and_variables_and_hides_secrets(tmp_path: Path) -> None:
    text = f"""protocol = "E"
[[grid]]
command = "{ROOT / "tests" / "programs" / "own_recorded.py"} --private-key hunter2"
ranks_per_host = 2
strategy = "allreduce"
seed = 7
quiet = true
wandb-key = "hunter2"
HUB_TOKEN = "hunter2"
SHADE = 3
begin = "assert os.environ['SHADE'] == '3'"
"""
    sweep = Command(tmp_path, text)
    try:
        code, out, err = sweep.run()
        assert code == 0, out + err
        [name] = sweep.complete()
        manifest = json.loads((sweep.root / "tried" / name / "manifest.json").read_text())
        secret = ["--private-key", "***", "--seed", "7", "--quiet", "--wandb-key", "***", "--begin"]
        assert manifest["argv"][1:-1] == secret
        report = tmp_path / "results" / "report.html"
        done = finished([sys.executable, "-m", "hvdtrain.results", "report", str(sweep.root), "-o", str(report)])
        assert done.returncode == 0, done.stderr
        kept = [path for path in sweep.root.rglob("*") if path.is_file()]
        assert [path for path in kept if b"hunter2" in path.read_bytes()] == []
        assert "HUB_TOKEN=" in report.read_text(), "the report shows the command without its secrets"
        assert (len(manifest["ranks"]), manifest["config"]["strategy"]) == (2, "allreduce")
        assert manifest["config"]["monitor"] == "power,resources"
        code, document = sweep.document()
    finally:
        shutil.rmtree(sweep.locks, ignore_errors=True)
    assert code == 0 and "hunter2" not in json.dumps(document)
    assert [run["state"] for run in document["runs"]] == ["kept"]


@pytest.mark.slow
def test_runs_of_an_older_script_are_set_aside_and_a_script_has_the_sweeps_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "mine")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "beside.py").write_text("")
    recorded = (ROOT / "tests" / "programs" / "own_recorded.py").read_text()
    check = 'import os\nassert os.environ["HF_HOME"] == "mine"\n'
    future, rest = recorded.split("from __future__ import annotations\n")
    (programs / "train.py").write_text(f"{future}from __future__ import annotations\n{check}{rest}")
    sweep = Command(tmp_path, f'[[grid]]\nlauncher = "none"\ncommand = "{programs / "train.py"} --quiet"\n')
    try:
        for changed in (None, "beside.py", "train.py"):
            if changed:
                with (programs / changed).open("a") as script:
                    script.write("# changed\n")
            code, document = sweep.document()
            assert (code, document["counts"]["done"]) == (0, 1), document
        code, document = sweep.document()
        assert (code, document["counts"]["kept"]) == (0, 1), document
        (name,) = {name.partition("-other")[0] for name in sweep.folders()}
        assert sweep.folders() == [name, f"{name}-other1", f"{name}-other2"]
    finally:
        shutil.rmtree(sweep.locks, ignore_errors=True)


@pytest.mark.slow
def test_energy_runs_use_sensors_and_experiments_without_gpus_are_skipped(sweep: Command) -> None:
    sweep.file.write_text(
        f'protocol = "T,E"\ncooldown_s = 0.2\norder = "as-written"\n{SMALL}'
        '[[grid]]\nlauncher = "none"\nimage_size = 16\n'
        '[[grid]]\nlabel = "gpu"\ndevice = "gpu"\nranks_per_host = 99\n'
    )
    code, document = sweep.document()
    assert code == 0
    assert [(run["kind"], run["state"]) for run in document["runs"]] == [
        *(("timing", "done"), ("energy", "done")),
        *(("timing", "skipped"), ("energy", "skipped")),
    ]
    assert "99 are needed" in document["runs"][2]["reason"]
    monitors = [
        json.loads((Path(run["run_dir"]) / "manifest.json").read_text())["config"]["monitor"]
        for run in document["runs"][:2]
    ]
    assert monitors == ["none", "power,resources"]
    code, document = sweep.document("--only", "gpu-*")
    assert code == 69, "all runs were skipped"


@pytest.mark.parametrize(
    ("change", "code", "expected"),
    [
        ("[[grid]]\nranks_per_host = 3\nglobal_batch_size = 2\n", 78, "hint: use at most 2"),
        ("[[grid]]\ncolour = 1\n", 78, ":1: unrecognized arguments: --colour"),
        ("", 2, "No such file"),
        ("[[grid]]\n", 73, "choose another --root"),
    ],
)
def test_errors_are_found_before_the_first_run(sweep: Command, change: str, code: int, expected: str) -> None:
    sweep.file.write_text(change)
    if not change:
        sweep.file.unlink()
    if code == 73:
        sweep.root.write_text("a file where the folder should be")
    done, out, err = sweep.run()
    assert (done, out) == (code, "")
    assert err.startswith("sweep: ")
    assert len(err.splitlines()) == 1
    assert expected in err
    assert not sweep.root.is_dir()


@pytest.mark.root
@pytest.mark.slow
def test_a_full_disk_stops_the_sweep_and_it_continues_when_there_is_space(sweep: Command) -> None:
    sweep.root.mkdir()
    sweep.file.write_text(f'{SMALL}[[grid]]\nlauncher = "none"\n')
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", sweep.root], check=False).returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        code, _, err = sweep.run()
        assert code in (73, 74)
        assert "run the same command again" in err.splitlines()[-1] or "--root" in err.splitlines()[-1]
        subprocess.run(["mount", "-o", "remount,size=200m", sweep.root], check=True)
        assert sweep.run()[0] == 0
    finally:
        subprocess.run(["umount", sweep.root], check=True)


@pytest.mark.root
@pytest.mark.slow
def test_a_sweep_starts_hosts_throttles_their_links_and_removes_them(sweep: Command) -> None:
    """A run on a link with another rate than the file allows is marked, and repeated by the next sweep."""
    sweep.file.write_text(
        f'off_percent = 50\n{SMALL}checkpoint_steps = 0\n[cluster]\nvirtual = ["a", "b"]\n'
        '[[grid]]\nhosts = 2\nrate = ["20mbit", "unlimited"]\nbatch_size = 360\nlauncher = "launch/horovodrun.sh"\n'
    )
    code, document = sweep.document("--set", "off_percent=0.00001")  # no link is so exact
    assert (code, Counter(run["state"] for run in document["runs"])) == (1, {"marked": 1, "done": 1}), document
    (marked,) = (run for run in document["runs"] if run["state"] == "marked")
    assert "Mbit/s instead of" in marked["reason"]
    assert not sweep.has_hosts()
    code, document = sweep.document()
    assert code == 0, document
    assert Counter(run["state"] for run in document["runs"]) == {"kept": 1, "done": 1}
    repeated = sum(name.startswith(Path(marked["run_dir"]).name) for name in sweep.folders())
    assert repeated == 2, "the marked run is renamed and kept"
    assert not sweep.has_hosts()
    throttled = {}
    for run in document["runs"]:
        folder = Path(run["run_dir"])
        request, manifest = (json.loads((folder / name).read_text()) for name in ("experiment.json", "manifest.json"))
        throttles = {json.dumps((link["throttle"] or {}).get("up_mbit")) for link in manifest["links"]}
        throttled[request["rate_mbit"]] = throttles
        assert {rank["host"] for rank in manifest["ranks"]} == {"a", "b"}
        if request["rate_mbit"]:
            assert request["marked"] is None and abs(request["rate_off_percent"]) <= 50
    assert throttled == {20.0: {"20.0"}, None: {"null"}}
    assert sweep.document("--only", "*20mbit*")[1]["counts"]["kept"] == 1


@pytest.mark.root
@pytest.mark.slow
def test_fill_keeps_the_other_hosts_busy_and_a_stopped_sweep_removes_all_hosts(sweep: Command) -> None:
    text = SMALL.replace("epochs = 1", "epochs = 50") + '[cluster]\nvirtual = ["a", "b"]\nfill = true\n'
    sweep.file.write_text(text + "[[grid]]\nhosts = 1\n")
    process = sweep.start()
    await_file("tried/*/metrics/rank0000.jsonl", sweep.root, process)
    await_file("hvdtrain-sweep-*/b/metrics/rank0000.jsonl", Path(sweep.locks), process)
    (manifest,) = Path(sweep.locks).glob("hvdtrain-sweep-*/b/manifest.json")
    assert [rank["host"] for rank in json.loads(manifest.read_text())["ranks"]] == ["b"]
    assert sweep.has_hosts()
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75
    assert not sweep.has_hosts()
    assert processes_on(sweep.root) == processes_on(Path(sweep.locks)) == []


def test_the_cluster_of_a_sweep_must_be_named_explicitly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "STATE", tmp_path)
    (tmp_path / "s.toml").write_text('[cluster]\nvirtual = ["a", "b"]\n[[grid]]\n')
    own = cluster_name(file.read(tmp_path / "s.toml"), tmp_path)
    for name, chosen in ((own, None), ("lab", "lab")):
        made = topology.from_names(
            "a,b", cluster=name, user=calling_user(), slots=1, cpu_share=None, cpus=None, rate=None
        )
        (tmp_path / name).mkdir()
        (tmp_path / name / "cluster.json").write_text(json.dumps(dataclasses.asdict(made)))
        with contextlib.nullcontext() if chosen else failing(2, rf"\({own} is a sweep's\); hint: choose"):
            assert virtual.choose() == chosen
        assert virtual.choose(own) == own
