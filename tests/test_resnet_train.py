"""`python -m hvdtrain.resnet` as users start it: alone, under mpirun, under horovodrun; stopped, killed and resumed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    ROOT,
    SMALL,
    alone,
    command,
    document,
    environment,
    failing,
    finished,
    here,
    launch,
    refused,
    resnet,
    trainings,
    until,
)
from PIL import Image
from runs import Made, cut_off, read_run
from runs import manifest as made_manifest
from safetensors.numpy import load_file
from sklearn.datasets import load_sample_image
from test_checkpoint import edit

from hvdtrain import records
from hvdtrain.training import evaluation

FRAMEWORKS = ("torch", "tensorflow")
SUMMARY_KEYS = {"schema", "run_dir", "framework", "strategy", "ranks", "hosts", "parameters", "epochs"}
SUMMARY_KEYS |= {"test_accuracy", "test_loss", "train_s", "validation_s", "test_s", "samples_per_s"}


def newest_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Everything in the newest checkpoint, file name and array name -> array."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return {
        f"{file.name}/{name}": array
        for file in sorted(newest.glob("*.safetensors"))
        for name, array in load_file(file).items()
    }


def assert_same_arrays(one: Path, other: Path, rtol: float = 0.0, atol: float = 0.0) -> dict[str, np.ndarray]:
    """Compares the newest checkpoints of two runs; returns the arrays of the first."""
    expected, got = newest_arrays(one), newest_arrays(other)
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=rtol, atol=atol, err_msg=name)
    return expected


@contextlib.contextmanager
def started(ranks: int, folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run in the background; killed with its children if it is still there at the end."""
    process = subprocess.Popen(
        command(ranks, ["-m", "hvdtrain.resnet", "--run-dir", str(folder), *flags]),
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_steps(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    """Returns once rank 0 has recorded this number of steps."""
    path = folder / "metrics" / "rank0000.jsonl"

    def recorded() -> bool:
        assert process.poll() is None, f"no {steps} steps: exit code {process.poll()}"
        return path.exists() and path.read_bytes().count(b'"type":"step"') >= steps

    until(recorded)


WHOLE = [*SMALL, "--epochs", "3", "--checkpoint-steps", "10", "--keep-checkpoints", "9", "--json"]
"""An epoch has 30 steps"""
Whole = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Folder and summary of one process's run with a framework and WHOLE, made once."""

    @functools.cache
    def made(framework: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("whole") / framework
        return folder, document(resnet(0, "--framework", framework, "--run-dir", str(folder), *WHOLE))

    return made


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.slow
def test_one_process_trains_and_leaves_a_whole_run_folder(framework: str, whole: Whole) -> None:
    folder, summary = whole(framework)
    assert set(summary) >= SUMMARY_KEYS
    assert (summary["framework"], summary["ranks"], summary["hosts"], summary["epochs"]) == (framework, 1, 1, 3)
    assert 0.2 < summary["test_accuracy"] <= 1, "it learns something in three epochs"
    manifest = records.from_json(json.loads((folder / "manifest.json").read_text()), "manifest.json")
    assert manifest.config["framework"] == framework
    assert manifest.model["parameters"] == summary["parameters"]
    assert (folder / "COMPLETE").exists()
    found = read_run(folder)
    assert [step.step for step in found["step"]] == list(range(summary["steps"]))
    assert sum(step.samples for step in found["step"]) == 3 * manifest.data["train"]
    assert [epoch.samples for epoch in found["epoch"]] == [manifest.data["train"]] * 3
    assert [step.warmup for step in found["step"][:5]] == [True] * 3 + [False] * 2
    assert found["epoch"][0].train_loss == pytest.approx(
        sum(s.loss * s.samples for s in found["step"] if s.epoch == 0) / manifest.data["train"]
    )
    timed = [s.data_s + s.compute_s + (s.communication_s or 0) for s in found["step"]]
    assert sum(timed) <= summary["train_s"]


def test_what_is_evaluated_after_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[int] = []
    monkeypatch.setattr(evaluation, "renew_statistics", lambda _, batches: renewed.append(len(list(batches))))
    flags = [*SMALL, "--framework", "torch", "--epochs", "9", "--epoch-samples", "240", "--evaluate-on", "test"]
    flags += ["--target", "accuracy=0.01", "--run-dir"]
    some = here("resnet", *flags, str(tmp_path / "some"), "--precise-bn", "2", "--evaluate-samples", "100")
    (scores,) = some["validation_scores"]  # the target is reached at once
    assert 100 * scores["accuracy"] == pytest.approx(round(100 * scores["accuracy"])), "of 100 samples"
    all_ = here("resnet", *flags, str(tmp_path / "all"), "--precise-bn", "99")
    assert all_["validation_scores"] == [all_["test_scores"]]
    assert renewed == [2, 5], "batches of an epoch's five"


def test_ranks_learn_the_digits_and_record_equal_losses_and_disjoint_samples(tmp_path: Path) -> None:
    ranks, flags = 2, ["--framework", "torch", "--epochs", "5", "--seed", "1", "--json", *SMALL]
    flags += ["--image-size", "16", "--run-dir", str(tmp_path / "run")]
    done = resnet(ranks, *flags, launcher="horovodrun --hostfile")
    summary = document(done)
    assert (summary["ranks"], summary["nic_bytes"]) == (ranks, [])
    assert summary["test_accuracy"] > 0.9
    assert "hvdtrain: " not in done.stderr, "the sentinel says nothing of an ordinary end"
    found = [read_run(tmp_path / "run", rank) for rank in range(ranks)]
    assert all([s.loss for s in each["step"]] == [s.loss for s in found[0]["step"]] for each in found)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["links"] == [], "a single host has none"
    assert sum(s.samples for each in found for s in each["step"]) == 5 * manifest["data"]["train"]
    assert sum(s.bytes_sent for s in found[0]["step"]) == summary["bytes_sent"] > 0
    arrays = newest_arrays(tmp_path / "run")
    assert {name.split("/")[0] for name in arrays} == {
        "shared.safetensors",
        *(f"rank{rank:04d}.safetensors" for rank in range(ranks)),
    }


@pytest.mark.parametrize(
    ("ranks", "extra", "before"),
    [
        (2, ["--epochs", "5", "--epoch-samples", "500", "--evaluate-samples", "100"], 15),
        # One step is a whole epoch, so that the signal arrives in an epoch's last step.
        (0, ["--epochs", "4", "--batch-size", "1500"], 1),
    ],
)
def test_resumed_equals_uninterrupted(ranks: int, extra: list[str], before: int, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    flags = ["--framework", "torch", *SMALL, *extra, "--run-dir"]
    runs = [{"flags": [*flags, str(whole)]}, {"flags": [*flags, str(cut)], "stop_before": before}]
    codes, errors = trainings(ranks, [*runs, {"flags": ["--resume", str(cut)]}])
    assert codes == [0, 75, 0], errors
    assert f"python -m hvdtrain.resnet --resume {cut}\n" in errors
    (resumed,) = read_run(cut)["resumed"]
    assert resumed.step == before + 1
    kinds = [json.loads(line)["type"] for line in (cut / "metrics" / "rank0000.jsonl").read_text().splitlines()]
    at = kinds.index("resumed")
    assert kinds[at - 2 : at] == ["step", "saved"], "a stop waits for no evaluation"
    assert_same_arrays(whole, cut)
    (one,), (other,) = (read_run(folder)["summary"] for folder in (whole, cut))
    assert other.test_loss == one.test_loss
    assert other.validation_scores == one.validation_scores
    first, second = ([e.train_loss for e in read_run(folder)["epoch"]] for folder in (cut, whole))
    assert first == second


@pytest.mark.slow
def test_a_prepared_folder_of_photographs_trains(tmp_path: Path) -> None:
    """Patches of the two photographs that scikit-learn ships, told apart after three epochs."""
    photographs = {"china": load_sample_image("china.jpg"), "flower": load_sample_image("flower.jpg")}
    for name, pixels in photographs.items():
        (tmp_path / "source" / name).mkdir(parents=True)
        for number in range(90):
            y, x = 40 * (number // 10), 58 * (number % 10)
            Image.fromarray(pixels[y : y + 60, x : x + 90]).save(tmp_path / "source" / name / f"{number}.jpg")
    source, prepared = str(tmp_path / "source"), str(tmp_path / "prepared")
    flags = ["--size", "36x24", "--split", "70/10/20", "--seed", "1"]
    done = alone("cli", "data", "images", source, prepared, *flags)
    assert done.returncode == 0, done.stderr
    flags = ["--data", prepared, "--width", "0.125", "--epochs", "3", "--batch-size", "8", "--json"]
    summary = document(resnet(2, "--run-dir", str(tmp_path / "run"), *flags))
    assert summary["test_accuracy"] > 0.7, summary
    study = ["--config", "launch/settings/cruz2021_resnet34.toml", "--data", prepared, "--dry-run", "--json"]
    refused = alone("resnet", *study)
    assert refused.returncode == 78
    (advice,) = re.findall(r"contains images of 36x24, not 197x148 .*; hint: use (--image-size \S+), ", refused.stderr)
    shown = document(alone("resnet", *study, *advice.split()))
    asked = [shown["config"][name] for name in ("batch_size", "lr", "epochs", "momentum", "schedule", "zero_gamma")]
    assert asked == [128, 0.05, 100, 0.0, "constant", False]


def test_killed_run_resumes_from_its_last_checkpoint_to_the_same_end(whole: Whole, tmp_path: Path) -> None:
    """No other process can resume the run while it is running."""
    cut, flags = tmp_path / "cut", ["--framework", "torch", *WHOLE]
    with started(0, cut, *flags) as process:
        wait_for_steps(process, cut, 13)
        process.send_signal(signal.SIGSTOP)
        with failing(73, rf"{re.escape(str(cut))} is in use by another job \(process {process.pid} on "):
            here("resnet", "--run-dir", str(cut), "--resume", *flags)
        process.kill()
    here("resnet", "--run-dir", str(cut), "--resume", *flags)
    assert_same_arrays(whole("torch")[0], cut)


def test_a_run_that_was_cut_off_goes_on_in_tensorflow(whole: Whole, tmp_path: Path) -> None:
    folder, summary = whole("tensorflow")
    cut_off(folder, tmp_path / "cut", 50)
    flags = ["--framework", "tensorflow", "--run-dir", str(tmp_path / "cut"), "--resume"]
    resumed = here("resnet", *flags, *WHOLE)
    assert [each.step for each in read_run(tmp_path / "cut")["resumed"]] == [50]
    assert_same_arrays(folder, tmp_path / "cut", rtol=1e-6, atol=1e-6)
    assert resumed["test_loss"] == pytest.approx(summary["test_loss"], abs=1e-6)


def test_a_run_with_other_settings_does_not_resume_and_loses_nothing(whole: Whole, tmp_path: Path) -> None:
    flags = ["--framework", "torch", "--run-dir", str(tmp_path), *WHOLE]
    shutil.copytree(whole("torch")[0], tmp_path, dirs_exist_ok=True)
    before, path = newest_arrays(tmp_path), tmp_path / "manifest.json"
    manifest = path.read_bytes()
    with failing(78, "global_batch: 48 there, 24 here"):
        here("resnet", *flags, "--resume", "--batch-size", "24")
    with failing(78, "; width: 0.125 there, 0.25 here") as other:
        here("resnet", "--resume", str(tmp_path), "--width", "0.25")
    assert "optimizer" not in str(other.value)
    with failing(78, r"\bdata: '"):
        here("resnet", "--resume", str(tmp_path), "--image-size", "9")
    with failing(78, re.escape(f"python -m hvdtrain.resnet --resume {tmp_path}")):
        here("captioning", "--resume", str(tmp_path))
    batch = int(SMALL[SMALL.index("--batch-size") + 1])
    same = here("resnet", "--resume", str(tmp_path), "--global-batch-size", str(batch), "--dry-run")
    assert (same["config"]["batch_size"], same["config"]["global_batch_size"]) == (None, batch)
    assert path.read_bytes() == manifest
    whole = json.loads(manifest)
    path.write_text(json.dumps(whole | {"config": whole["config"] | {"epochs": "abc"}}))
    with failing(65, re.escape(f"{path}: its settings are damaged")):
        here("resnet", "--resume", str(tmp_path))
    after = newest_arrays(tmp_path)
    assert all(np.array_equal(array, after[name]) for name, array in before.items())


def test_a_forged_checkpoint_gives_way_to_the_one_before(
    whole: Whole, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole("torch")[0], tmp_path, dirs_exist_ok=True)
    *older, newest = sorted(tmp_path.glob("checkpoints/step-*/checkpoint.json"))
    forge = {"step": 10**9}
    edit(newest, progress=json.loads(newest.read_text())["progress"] | forge)
    here("resnet", "--resume", str(tmp_path))
    said = capfd.readouterr().err
    assert said.count("rejected: ") == 1 and "resumed at step 80 of 90" in said
    for path in [*older, newest]:
        edit(path, progress=json.loads(path.read_text())["progress"] | forge)
    with failing(65, "no valid checkpoint .* hint: "):
        here("resnet", "--resume", str(tmp_path))


def test_torch_checkpoint_continues_in_tensorflow(whole: Whole, tmp_path: Path) -> None:
    folder, first = whole("torch")
    cut_off(folder, tmp_path / "cut", 30)
    flags = ["--framework", "tensorflow", "--run-dir", str(tmp_path / "cut"), "--resume"]
    second = here("resnet", *flags, *WHOLE)
    assert second["validation_accuracy"][0] == first["validation_accuracy"][0]
    assert second["validation_accuracy"][1] != first["validation_accuracy"][0], "it trained on"
    assert second["steps"] == first["steps"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fp16_starts_close_to_fp32(framework: str, whole: Whole, tmp_path: Path) -> None:
    expected = [step.loss for step in read_run(whole(framework)[0])["step"][:4]]
    # Five steps, with the rates of the whole run's first.
    flags = ["--framework", framework, "--precision", "fp16", "--epochs", "1", "--epoch-samples", "240"]
    here("resnet", *flags, "--lr", str(0.05 / 6), "--run-dir", str(tmp_path / "run"), *SMALL)
    losses = [step.loss for step in read_run(tmp_path / "run")["step"][:4]]
    np.testing.assert_allclose(losses, expected, rtol=0.05)


def test_a_loss_that_is_no_number_stops_the_run_with_step_and_rate(tmp_path: Path) -> None:
    flags = ["--lr", "1e18", "--warmup-epochs", "0", "--epochs", "1", "--run-dir", str(tmp_path / "run"), *SMALL]
    done = resnet(2, *flags)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "hvdtrain: " in line]
    assert re.search("the loss is .*at step .*learning rate", line)


@pytest.mark.slow
def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    """The loss of a step is that before its update: here the first update is too large."""
    flags = ["--lr", "1e39", "--warmup-epochs", "0", "--checkpoint-steps", "1", "--run-dir", str(tmp_path), *SMALL]
    done = resnet(2, "--strategy", "native", *flags)
    assert done.returncode == 1 and done.stderr.count("hvdtrain: ") == 1, done.stderr
    assert "contains infinity or NaN" in done.stderr
    assert not list((tmp_path / "checkpoints").glob("*"))


BAD = [
    (["--lr", "x"], 2, "--lr: 'x' is not a number"),
    (["--framework", "mxnet"], 2, "choose from torch, tensorflow, auto"),
    (["--config", "nowhere.toml"], 2, "nowhere.toml: No such file"),
    (["--batch-size", "1"], 78, "BatchNorm needs two values"),
    (["--batch-size", "8", "--global-batch-size", "8"], 78, "give one of them"),
    (["--strategy", "telepathy"], 78, "known: allreduce"),
    *((["--image-size", size], 78, "WIDTHxHEIGHT") for size in ("axb", "²", "999999999x999999999")),
    (["--data", "nowhere"], 65, "nowhere"),
    (["--resume"], 78, "--resume DIR"),
    (["--resume", "nowhere"], 65, "--resume nowhere: no run there"),
    (["--width", "0"], 78, "width is 0.0; hint: give a number >= "),
    (["--batch-size", "8", "--epochs", "1", "--warmup-epochs", "2"], 78, "--warmup-epochs"),
]


@pytest.mark.parametrize(("flags", "code", "text"), BAD, ids=lambda value: str(value)[:30])
def test_bad_input_is_one_line_and_its_exit_code(flags: list[str], code: int, text: str) -> None:
    refused("resnet", *flags, code=code, said=text)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_gpu_that_is_not_there_is_one_line(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if framework == "torch":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    else:
        monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: [])
    with failing(78, "--device gpu: .*no GPU.*"):
        here("resnet", "--framework", framework, "--device", "gpu")


def test_bad_input_under_a_launcher_is_said_once() -> None:
    done = resnet(2, "--global-batch-size", "1")
    assert done.returncode == 78
    assert done.stderr.count("hvdtrain: ") == 1
    assert "a global batch of 1 is too small for 2 ranks" in done.stderr


@pytest.mark.slow
def test_hosts_that_share_no_folder_one_of_which_has_a_run_there_do_not_begin(tmp_path: Path) -> None:
    """Old records would be among the new."""
    (tmp_path / "there" / "run").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    manifest = records.as_json(made_manifest(Made(config={"width": 0.125, "epochs": 3})))
    (tmp_path / "there" / "run" / "manifest.json").write_text(json.dumps(manifest))
    words = ["env", "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=1", sys.executable, "-m"]
    words += ["hvdtrain.resnet", "--strategy", "hierarchical", "--run-dir", "run", "--epochs", "3"]
    first, second = (["-np", "1", "-wdir", str(tmp_path / place), *words] for place in ("here", "there"))
    done = finished(["mpirun", *first, ":", *second])  # fmt: skip
    assert done.returncode == 73 and done.stderr.count("hvdtrain: ") == 1, done.stderr
    assert " already holds a run; hint: " in done.stderr, done.stderr
    assert not (tmp_path / "here" / "run" / "manifest.json").exists()


def test_a_folder_with_a_run_or_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    for folder, said in ((str(tmp_path), "--resume"), ("/proc/nothing", "choose another --run-dir")):
        with failing(73, said):
            here("resnet", "--run-dir", folder, *SMALL)


def test_dry_run_prints_the_arithmetic_and_loads_no_framework(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('global_batch_size = 64\nlr = 0.2\nlr_scaling = "linear"\nseed = 3\n')
    code = (
        "import sys; sys.argv = ['resnet', '--dry-run', '--json', '--config', sys.argv[1], '--seed', '4']\n"
        "from hvdtrain import resnet\nfrom hvdtrain.comm import lifecycle\n"
        "try: lifecycle.run(resnet.main, debug=False)\n"
        "finally: assert not {'torch', 'tensorflow', 'horovod'} & set(sys.modules)"
    )
    extra = {"HVDTRAIN_LR": "9", "HVDTRAIN_MOMENTUM": "0.5"}
    done = launch(0, ["-c", code, str(config)], extra=extra)
    shown = document(done)
    asked = {name: shown["config"][name] for name in ("seed", "lr", "momentum")}
    assert asked == {"seed": 4, "lr": 0.2, "momentum": 0.5}, "flag over file over variable over default"
    assert shown["plan"]["rank_batch"] == shown["plan"]["global_batch"] == 64
    assert "21,283,530" in shown["facts"]["model"]
