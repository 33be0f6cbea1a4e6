"""tools/gpu_check.py as far as the CPU goes: its environment, what it asks for, limits, verdicts, one real check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS, ROOT, environment, finished
from packaging.requirements import Requirement

from hvdtrain import strategies

sys.path.insert(0, str(ROOT / "tools"))
import gpu_check
import gpu_check_parts as parts

GPU = {"name": "NVIDIA H200", "uuid": "GPU-1", "power_mw": 300_000, "utilisation": 50, "memory_bytes": 5}


def check(folder: Path, **facts: Any) -> parts.Check:
    return parts.Check(device="cpu", quick=True, python=Path(sys.executable), folder=folder, **facts)


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), *words]
    return finished(command, extra=variables)


def test_the_studys_environments_are_trained_and_their_energy_is_told(tmp_path: Path) -> None:
    """Two CPU ranks that torchrun starts stand for the hybrid; the GPU is idle, and is a stand-in's."""
    (tmp_path / "nvml.json").write_text(json.dumps({"gpus": [GPU]}))
    fake = {"PYTHONPATH": str(PROGRAMS / "fake_nvml"), "FAKE_NVML": str(tmp_path / "nvml.json")}
    words = ["--device", "cpu", "--quick", "--parts", "study", "--out", str(tmp_path / "out")]
    done = run(*words, **fake)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (tmp_path / "out" / "report.txt").read_text() == done.stdout
    (study,) = report["parts"]
    assert (report["ok"], study["status"], study["problems"]) == (True, "ok", [])
    energy = study["figures"]["energy"][0]["rows"]
    assert {row["strategy"].partition(":")[0] for row in energy} == {"allreduce", "native", "hybrid"}
    for row in energy:
        assert min(row["energy_j"]["mean"], row["edp"]["mean"]) > 0


def test_without_a_gpu_it_is_one_line(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (78, "")
    assert re.fullmatch(r"gpu-check: PyTorch .* sees no GPU; --device cpu tries without\n", done.stderr)


def test_every_strategy_is_tried_once() -> None:
    here = check(Path("nowhere"), machine={"gpus": [], "cores": 4, "mpirun": None})
    tried = [job.name for job in parts.strategies_jobs(here)]
    tried += [job.name for job in parts.horovod_jobs(here) if not job.needed]
    assert sorted(tried) == sorted([*strategies.SCHEDULES, *strategies.REDUCERS])


# --- what is missing --------------------------------------------------------------------------------------------------


def test_what_packages_need_in_turn_is_known() -> None:
    """Nobody can ask an index on that machine; here all is installed and can be asked."""
    named = {Requirement(line).name.lower() for line in gpu_check.requirements()}
    open_, closed = set(named), set()
    while open_:
        name = open_.pop()
        closed.add(name)
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                open_ |= {needed.name.lower()} - closed
    assert closed - named == set()


def test_what_is_missing_is_told_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    wanted = {"numpy>=2": "", "sacrebleu>=99": gpu_check.TRAINING, "no-such-package": gpu_check.HOROVOD}
    lacking = gpu_check.missing(wanted)
    assert lacking == {"sacrebleu": gpu_check.TRAINING, "no-such-package": gpu_check.HOROVOD}
    wheels, horovod = gpu_check.fetch_commands(lacking)
    assert re.search(r" --python-version 3\.\d+ .* no-such-package sacrebleu==\d", wheels)
    assert "--no-deps" in wheels and "--no-binary horovod" in horovod
    (tmp_path / "no_such_package-1.0-py3-none-any.whl").touch()
    assert gpu_check.brought(tmp_path) == {"no-such-package"}


def test_the_environment_has_what_its_python_has_and_the_wheels_on_top(tmp_path: Path) -> None:
    """Its Python is one of an environment itself, and has a newer `rich`."""
    wheel = tmp_path / "rich-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rich/__init__.py", "")
        archive.writestr("rich-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: rich\nVersion: 1.0\n")
        archive.writestr("rich-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("rich-1.0.dist-info/RECORD", "")
    python = gpu_check.make_environment(tmp_path / "venv", tmp_path)
    program = "import importlib.metadata as m, importlib.util as u; print(m.version('rich'), m.version('numpy'))"
    program += "; print(u.find_spec('hvdtrain').origin); import build_horovod as b; print(b.site_packages(['torch']))"
    variables = environment({"PYTHONPATH": str(ROOT / "tools")})
    words = [str(python), "-c", program]
    done = subprocess.run(words, cwd=tmp_path, env=variables, text=True, capture_output=True, check=True)
    here = [metadata.version("numpy"), str(ROOT / "hvdtrain" / "__init__.py"), sysconfig.get_path("purelib")]
    assert done.stdout.split() == ["1.0", *here], "torch and NCCL are looked for where they are"
    assert metadata.version("rich") != "1.0", "the Python itself is as it was"


# --- limits and verdicts ----------------------------------------------------------------------------------------------


def tried(folder: Path, *jobs: parts.Job, limit_s: float = 30.0, judge: Any = None) -> dict[str, Any]:
    part = parts.Part(
        "part", "a part", limit_s, lambda check: list(jobs), judge or (lambda check, done: parts.Verdict())
    )
    return gpu_check.try_part(part, check(folder), 100.0)


def test_a_job_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "ENDING_S", 0.1)
    seen = {}

    def judge(check: parts.Check, done: dict[str, parts.Done]) -> parts.Verdict:
        seen.update(done)
        raise KeyError("unforeseen")

    sh = ["/bin/sh", "-c"]
    found = tried(
        tmp_path,
        parts.Job("fails", [*sh, "echo hvdtrain: disk full >&2; echo bye >&2; exit 74"]),
        parts.Job("absent", ["/bin/false"], lacking="no such thing"),
        parts.Job("lacks", [*sh, "exit 69"], lacking_codes=(69,)),
        parts.Job("works", [*sh, "echo noise; echo '{\"a\": 1}'"]),
        parts.Job("hangs", [*sh, "trap '' TERM; sleep 60"]),
        parts.Job("late", [*sh, "exit 0"]),
        limit_s=5,
        judge=judge,
    )
    fails, hangs, late, unread = found["problems"]
    assert fails == "fails: exit code 74: hvdtrain: disk full"
    assert re.fullmatch(r"hangs: ended after \d s, its time limit", hangs)
    assert late == "late: no time was left"
    assert unread == "its results cannot be read: KeyError: 'unforeseen'"
    assert found["absent"] == ["absent: no such thing", "lacks: exit code 69: it said nothing"]
    assert found["status"] == "failed"
    assert list(seen) == ["works"] and seen["works"].document() == {"a": 1}


def test_what_is_needed_and_fails_ends_its_part(tmp_path: Path) -> None:
    found = tried(tmp_path, parts.Job("first", ["/bin/false"], needed=True), parts.Job("second", ["/bin/false"]))
    assert [problem.partition(":")[0] for problem in found["problems"]] == ["first"]


def test_a_part_of_which_nothing_could_be_tried_is_not_called_well(tmp_path: Path) -> None:
    found = tried(tmp_path, parts.Job("first", ["/bin/true"], lacking="no GPU"))
    assert found["status"] == "lacking"
    report = {"utc": "now", "device": "cpu", "quick": True, "machine": {}, "parts": [found], "seconds": 1.0}
    assert gpu_check.page(report).endswith("all well; not all could be tried in: part; 1 s in all")


def made(folder: Path, name: str, losses: list[float], device: str) -> None:
    run = folder / "losses" / name
    (run / "metrics").mkdir(parents=True)
    (run / "manifest.json").write_text(json.dumps({"ranks": [{"device": device}]}))
    steps = [json.dumps({"type": "step", "loss": loss}) for loss in losses]
    (run / "metrics" / "rank0000.jsonl").write_text("\n".join(steps))


@pytest.mark.parametrize(
    ("losses", "device", "problem"),
    [
        ([2.0, 1.0], "cuda:0", None),
        ([2.0, 1.004], "cuda:0", None),
        ([2.0, 1.006], "cuda:0", "fp32: a loss differs by 0.60% from the CPU's, more than 0.5%"),
        ([2.0, float("nan")], "cuda:0", "fp32: a loss differs by nan% from the CPU's, more than 0.5%"),
        ([2.0, 1.0], "cpu", "fp32: the ranks computed on cpu, not on a GPU"),
    ],
)
def test_losses_beyond_the_bound_and_runs_on_the_wrong_device_fail(
    losses: list[float], device: str, problem: str | None, tmp_path: Path
) -> None:
    made(tmp_path, "cpu", [2.0, 1.0], "cpu")
    made(tmp_path, "fp32", losses, device)
    output = json.dumps({"steps": 2, "test_loss": 1.0})
    done = {name: parts.Done(code=0, output=output, errors="", seconds=1.0) for name in ("cpu", "fp32")}
    about = parts.Check(device="gpu", quick=True, python=Path(sys.executable), folder=tmp_path)
    assert parts.losses_judge(about, done).problems == ([problem] if problem else [])
