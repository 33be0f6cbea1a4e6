"""Batch arithmetic and learning-rate rules, against the rules written out."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import failing
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.captioning import CaptioningConfig
from hvdtrain.comm.launch_env import LaunchEnv, launch_env
from hvdtrain.config.batch_plan import batch_plan, global_batch
from hvdtrain.config.options import TrainConfig
from hvdtrain.config.parser import misspelled_variables, parse
from hvdtrain.resnet import ResNetConfig
from hvdtrain.solar import SolarConfig
from hvdtrain.system.exits import Failure
from hvdtrain.tabular import TabularConfig
from hvdtrain.training import resume

CONFIGS = (ResNetConfig, CaptioningConfig, SolarConfig, TabularConfig)


@given(st.integers(1, 64), st.integers(1, 16), st.sampled_from(["none", "linear", "sqrt"]))
def test_the_learning_rate_depends_on_the_global_batch_only(batch: int, ranks: int, rule: str) -> None:
    sizes = {"batch_size": batch}, {"global_batch_size": batch * ranks}
    configs = [TrainConfig(lr=0.1, lr_scaling=rule, **each) for each in sizes]  # type: ignore[arg-type]
    per_rank, total = (batch_plan(each, ranks, global_batch(each, ranks), 10) for each in configs)
    assert per_rank.global_batch == total.global_batch == batch * ranks
    assert per_rank.base_lr == pytest.approx(0.1 * {"none": 1, "linear": ranks, "sqrt": math.sqrt(ranks)}[rule])
    assert total.base_lr == pytest.approx(0.1), "the rate belongs to the batch size given"
    assert batch_plan(TrainConfig(), 3, 16, 5).rank_batch == 6, "the largest share"


def test_warm_up_is_linear_and_schedules_reach_their_final_rates() -> None:
    common = {"epochs": 8, "warmup_epochs": 2, "lr": 0.4}
    plans = {s: batch_plan(TrainConfig(schedule=s, **common), 1, 32, 5) for s in ("constant", "cosine", "step")}
    for plan in plans.values():
        assert [plan.learning_rate(step) for step in range(10)] == pytest.approx([0.04 * (n + 1) for n in range(10)])
    assert {plans["constant"].learning_rate(step) for step in range(10, 40)} == {0.4}
    cosine = [plans["cosine"].learning_rate(step) for step in range(10, 40)]
    assert cosine[0] == 0.4
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[15] == pytest.approx(0.2)
    assert 0 < cosine[-1] < 0.01
    assert [plans["step"].learning_rate(n) for n in (19, 20, 29, 30)] == pytest.approx([0.4, 0.04, 0.04, 0.004])


@pytest.mark.parametrize(
    "wrong", [*({"lr": math.nan}, {"lr": 0.0}, {"momentum": 1.0}, {"epochs": 0}, {"seed": -1}), {"epochs": 10**400}]
)
def test_values_out_of_range_are_rejected(wrong: dict[str, Any]) -> None:
    with failing(78):
        TrainConfig(**wrong)


def test_run_dir_and_resume_name_one_folder() -> None:
    assert TrainConfig(run_dir="./x", resume="x/").run_dir == "x/"
    with failing(78, "name two folders"):
        TrainConfig(run_dir="y", resume="x")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("epoch = 3", "unknown key 'epoch', did you mean epochs?"),
        ("[optimization]\nepochs = 3", "tables such as [optimization] are not accepted"),
        ('lr = "x"', "lr: 'x' is not a number"),
        ("epochs = 1.5", "epochs: 1.5 is not a whole number"),
        ("json = 1", "json: 1 is not"),
        (None, ""),
    ],
)
def test_an_error_names_the_file_or_variable_of_an_invalid_value(
    line: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, source = tmp_path / "c.toml", "HVDTRAIN_LR=x: "
    if line:
        file.write_text(line)
        source = f"--config {file}: "
    else:
        monkeypatch.setenv("HVDTRAIN_LR", "x")
    with pytest.raises(Failure) as error:
        resume.parse(ResNetConfig, "resnet", "", ["--config", str(file)] if line else [])
    assert str(error.value).startswith(source) and problem in str(error.value)


def test_flags_cannot_be_abbreviated() -> None:
    """Launchers look for --resume in a command line."""
    for word, option in (("--run-d", "--run-dir"), ("--resum", "--resume")):
        with failing(2, f"{word} x, did you mean {option}?"):
            resume.parse(ResNetConfig, "resnet", "", [word, "x"])


def test_only_misspelled_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ("RECORD", "MPI", "LAUNCHED_WITH", "THREADS_BY_LAUNCHER", "POWERCAP", "LAYERS", "EPOCHS")
    options = [field.name.upper() for cls in CONFIGS for field in dataclasses.fields(cls)]
    for name in ("EPOCH", "BATCHSIZE", *others, *options):
        monkeypatch.setenv(f"HVDTRAIN_{name}", "3")
    expected = [
        "HVDTRAIN_BATCHSIZE, did you mean HVDTRAIN_BATCH_SIZE?",
        "HVDTRAIN_EPOCH, did you mean HVDTRAIN_EPOCHS?",
    ]
    assert [misspelled_variables(cls) for cls in CONFIGS] == [expected] * len(CONFIGS)


@pytest.mark.parametrize("cls", CONFIGS)
def test_flags_precede_the_file_the_file_variables_and_variables_defaults(
    cls: type[TrainConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text("epochs = 5\nseed = 6\n")
    for name, value in {"EPOCHS": "3", "SEED": "3", "BATCH_SIZE": "3"}.items():
        monkeypatch.setenv(f"HVDTRAIN_{name}", value)
    config = parse(cls, ["--epochs", "4", "--config", str(tmp_path / "c.toml")], prog="x", purpose="")
    assert (config.epochs, config.seed, config.batch_size, config.momentum) == (4, 6, 3, 0.9)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("False", False), ("0", False)])
def test_variables_of_switches_are_true_or_false_or_1_or_0(
    value: str, on: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RESUME", "JSON"):
        monkeypatch.setenv(f"HVDTRAIN_{name}", value)
    monkeypatch.setattr(sys, "argv", ["resnet", "--run-dir", str(tmp_path)])
    config = resume.parse(ResNetConfig, "resnet", "")
    assert (config.resume, config.json, config.run_dir) == (on, on, str(tmp_path))
    monkeypatch.setenv("HVDTRAIN_JSON", "folder")
    with failing(2, "HVDTRAIN_JSON=folder: 'folder' is neither true nor false"):
        resume.parse(ResNetConfig, "resnet", "", [])


def test_the_launch_environment_depends_on_the_launcher() -> None:
    assert launch_env({}) == LaunchEnv(launcher="alone")
    gloo = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
    assert launch_env(gloo) == LaunchEnv(launcher="horovodrun", rank=3, size=4, local_rank=1, local_size=2)
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert launch_env(mpi | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).local_size == 2
