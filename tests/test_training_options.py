"""`--clip-norm` and `--ema`: their definitions, and the laws of runs that use both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import here, refused, trainings
from runs import read_run
from test_resnet_train import assert_same_arrays
from twins import torch

from hvdtrain.inference import trained
from hvdtrain.models import mlp, network
from hvdtrain.training import checkpoint_files

pytestmark = pytest.mark.slow  # all tests share runs that take a minute

FRAMEWORKS = ("torch", "tensorflow")
LOCAL = "local-sgd:every=2,staleness=1+powersgd"
# With a small learning rate equal programs stay equal (see test_strategies.py). There are two epochs of eight steps.
CALM = ["--image-size", "8", "--width", "0.125", "--global-batch-size", "192", "--lr", "0.005", "--epochs", "2"]
SHARED = ["--clip-norm", "1", "--ema", "0.5"]
RESNET = [*CALM, *SHARED, "--checkpoint-steps", "3", "--keep-checkpoints", "9"]
RESNET += ["--check-replicas", "1", "--optimizer", "muon"]
CUT = 9
"""Step of the checkpoint from which the runs resume, in the middle of a round of LOCAL"""
# Without BatchNorm any number of ranks trains alike.
TABULAR = ["--data", "wine", "--epochs", "2", "--global-batch-size", "16", "--optimizer", "sgd", "--lr", "0.05"]
TABLES = [*TABULAR, *SHARED, "--clip-norm", "0.25", "--checkpoint-steps", "1", "--keep-checkpoints", "99"]


def losses(folder: Path) -> list[float]:
    return [step.loss for step in read_run(folder)["step"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two hosts with all options in FRAMEWORK/STRATEGY, and ResNet's, with Muon, killed and resumed, in -cut.

    Those on tables have a checkpoint after every step. Their names begin with table-.
    """
    folder = tmp_path_factory.mktemp("runs")
    for framework, strategies in (("torch", ("hierarchical", LOCAL)), ("tensorflow", (LOCAL,))):
        todo: list[dict[str, Any]] = []
        for strategy in strategies:
            whole, cut = folder / framework / strategy, folder / framework / f"{strategy}-cut"
            flags = [*RESNET, "--framework", framework, "--strategy", strategy, "--run-dir"]
            todo.append({"flags": [*flags, str(whole)]})
            todo.append({"flags": [*flags, str(cut), "--resume"], "folder": str(whole), "from_step": CUT})
        for strategy in ("hierarchical", "allreduce", LOCAL):
            flags = [*TABLES, "--framework", framework, "--strategy", strategy, "--run-dir"]
            todo.append({"flags": [*flags, str(folder / framework / f"table-{strategy}")], "workload": "tabular"})
        codes, errors = trainings(2, todo, framework)
        assert set(codes) == {0}, errors
    here("tabular", *TABLES, "--framework", "torch", "--run-dir", str(folder / "table"))
    return folder


@pytest.mark.parametrize(
    ("framework", "strategy"), [("torch", "hierarchical"), *((each, LOCAL) for each in FRAMEWORKS)]
)
def test_resumed_equals_uninterrupted(framework: str, strategy: str, runs: Path) -> None:
    whole, cut = runs / framework / strategy, runs / framework / f"{strategy}-cut"
    assert [each.step for each in read_run(cut)["resumed"]] == [CUT]
    arrays = assert_same_arrays(whole, cut)
    assert any("/average." in name for name in arrays)
    assert losses(cut)[-5:] == losses(whole)[-5:]
    one, other = (read_run(folder)["summary"][-1] for folder in (whole, cut))
    assert (other.test_loss, other.validation_scores) == (one.test_loss, one.validation_scores)
    config = json.loads((whole / "manifest.json").read_text())["config"]
    assert (config["clip_norm"], config["ema"]) == (1.0, 0.5)


def test_both_frameworks_agree(runs: Path) -> None:
    one, other = (losses(runs / framework / LOCAL) for framework in FRAMEWORKS)
    np.testing.assert_allclose(one[:8], other[:8], rtol=1e-4)


@pytest.mark.parametrize("strategy", ["hierarchical", "allreduce"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_process_equals_two_ranks(framework: str, strategy: str, runs: Path) -> None:
    alone, pair = runs / "table", runs / framework / f"table-{strategy}"
    np.testing.assert_allclose(losses(pair), losses(alone), rtol=2e-4)
    (one,), (other,) = (read_run(folder)["summary"] for folder in (alone, pair))
    assert other.test_loss == pytest.approx(one.test_loss, rel=1e-3)
    expected, got = (trained.best_arrays(folder / "checkpoints", statistics=False) for folder in (alone, pair))
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def saved(folder: Path, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The progress and the common arrays of a checkpoint."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    manifest = checkpoint_files.read_manifest(path)
    return manifest["progress"], checkpoint_files.common(path, manifest)


@pytest.mark.parametrize("strategy", ["allreduce", LOCAL])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_average_follows_the_weights_that_all_ranks_know(framework: str, strategy: str, runs: Path) -> None:
    folder, before, average, moved = runs / framework / f"table-{strategy}", 0, dict[str, Any](), []
    for step in range(1, len(losses(folder)) + 1):
        progress, arrays = saved(folder, step)
        if not average:  # it starts at the weights, and checkpoints hold none before the first step
            spec = mlp.MLPSpec(**json.loads((folder / "manifest.json").read_text())["model"]["spec"])
            average = mlp.initial_state(spec, 0, None)
        if progress["averaged_step"] == step:
            decay = min(0.5, step / (step + 9)) ** (step - before)
            average = {name: decay * each + (1 - decay) * arrays[f"parameter.{name}"] for name, each in average.items()}
            before = step
            moved.append(step)
        for name, each in average.items():
            np.testing.assert_allclose(arrays[f"average.{name}"], each, rtol=1e-4, atol=1e-6, err_msg=f"{name} {step}")
    # A round of two steps arrives one step later, or at the end of the epoch.
    assert moved == ([3, 5, 7, 8, 11, 13, 15, 16] if strategy == LOCAL else [*range(1, 17)])


def test_averages_are_evaluated_and_used_for_predictions(runs: Path) -> None:
    parameters = trained.best_arrays(runs / "table" / "checkpoints", statistics=False)
    _, arrays = saved(runs / "table", 16)
    assert all(np.array_equal(array, arrays[f"average.{name}"]) for name, array in parameters.items())
    assert not all(np.array_equal(array, arrays[f"parameter.{name}"]) for name, array in parameters.items())
    from hvdtrain.data import tabular

    test = tabular.load("wine").test
    everything = np.arange(len(test))
    inputs, labels = map(torch.from_numpy, test.batch(everything, everything, None).arrays)
    model = network("mlp.MLP", "torch", mlp.MLPSpec(inputs=13, hidden=(30, 10), outputs=3), loss="cross_entropy")
    trained.fill(model, parameters, "torch")
    loss = torch.nn.functional.cross_entropy(model(inputs), labels).item()
    assert read_run(runs / "table")["summary"][0].test_loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_clipping_equals_pytorchs(framework: str, tmp_path: Path) -> None:
    flags = [*TABULAR, "--framework", framework, "--epochs", "1", "--epoch-samples", "16", "--momentum", "0"]
    flags += ["--warmup-epochs", "0", "--schedule", "constant", "--run-dir"]
    lr, begun = 0.05, mlp.initial_state(mlp.MLPSpec(inputs=13, hidden=(30, 10), outputs=3), 0, None)
    after = {}
    for name, more in (("plain", []), ("clipped", ["--clip-norm", "0.25"]), ("long", ["--clip-norm", "99"])):
        here("tabular", *flags, str(tmp_path / name), *more)
        after[name] = trained.best_arrays(tmp_path / name / "checkpoints", statistics=False)
    parameters = [torch.nn.Parameter(torch.from_numpy(begun[name])) for name in after["plain"]]
    for name, parameter in zip(after["plain"], parameters, strict=True):
        parameter.grad = (parameter.detach() - torch.from_numpy(after["plain"][name])) / lr
    assert torch.nn.utils.clip_grad_norm_(parameters, 0.25) > 0.3
    for name, parameter in zip(after["plain"], parameters, strict=True):
        expected = (parameter - lr * parameter.grad).detach().numpy()
        np.testing.assert_allclose(after["clipped"][name], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(after["long"][name], after["plain"][name])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ema", "1"], "give a number >= 0 and < 1"),
        (
            ["--ema", "0.9", "--strategy", "async-ps"],
            "--strategy async-ps: --ema 0.9: ranks have the same weights only",
        ),
        (["--clip-norm", "1", "--stages", "2"], "no rank knows the norm over all stages; hint: "),
    ],
)
def test_what_cannot_be_combined_is_one_line(flags: list[str], text: str) -> None:
    refused("resnet", *flags, "--dry-run", code=78, said=text)
