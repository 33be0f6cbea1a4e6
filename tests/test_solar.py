"""`python -m hvdtrain.solar`: the study's networks, and runs in both frameworks, on one process and on many ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import document, failing, here, launch
from runs import cut_off, read_run
from sklearn import metrics
from test_resnet_train import assert_same_arrays
from test_stages import stepped
from twins import Found, load, tensorflow_gradients, tf, told, torch, torch_gradients

from hvdtrain import data, models, solar
from hvdtrain.inference import runs
from hvdtrain.models import mlp
from hvdtrain.models import solar as nets
from hvdtrain.models.solar import CNNSpec
from hvdtrain.system.exits import BAD_CONFIG

FRAMEWORKS = ("torch", "tensorflow")
SMALL = CNNSpec(side=11)


def test_the_networks_have_the_sizes_of_the_study() -> None:
    """Thirty pyramids, whose third layers are 13, 26 ... 6656, and a CNN of 4,352,641 parameters."""
    names = [f"p{depth}-k{k}" for depth in (1, 2, 3) for k in range(10)]
    assert len({nets.pyramid(name) for name in names}) == 30
    assert nets.pyramid("p1-k0") == (50,) and nets.pyramid("p2-k5") == (1600, 800)
    assert [nets.pyramid(f"p3-k{k}")[2] for k in (0, 1, 2, 9)] == [13, 26, 52, 6656]
    assert nets.pyramid("p3-k9") == (25600, 12800, 6656)
    spec = mlp.MLPSpec(inputs=50, hidden=nets.pyramid("p2-k5"), outputs=1)
    assert sum(map(math.prod, mlp.parameters(spec).values())) == 51 * 1600 + 1601 * 800 + 801
    assert sum(map(math.prod, nets.parameters(CNNSpec()).values())) == 4_352_641
    for name in ("p4-k0", "p1-k10", "cnn2", "p1"):
        with failing(BAD_CONFIG, f"--net {name} is unknown; hint: give p1, p2 or p3"):
            nets.pyramid(name)


def test_inference_is_timed_with_sample_counts_and_a_whole_model() -> None:
    for wrong in ("2,0", "x", "9" * 5000):
        with failing(BAD_CONFIG, "not a list of sample counts; hint: "):
            solar.SolarConfig(inference=wrong)
    with failing(BAD_CONFIG, "only a part of the model; hint: "):
        solar.SolarConfig(inference="2", stages=2)


def drawn(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(1)
    maps = draw.normal(size=(count, SMALL.side, SMALL.side)).astype(np.float32)
    return maps, draw.normal(size=(count, 2)).astype(np.float32), np.array([3, 2**31 + 5])


def loss_and_gradients(framework: str, arrays: tuple[np.ndarray, ...], *, training: bool) -> Found:
    """Of the CNN with fixed initial values; gradients in PyTorch's layout."""
    state = nets.initial_state(SMALL, 1)
    state |= {name: array + np.float32(0.01) for name, array in state.items() if name.endswith("bias")}
    model = models.network("solar.CNN", framework, SMALL)
    load(model, state)
    if framework == "torch":
        assert {name: tuple(each.shape) for name, each in model.named_parameters()} == nets.parameters(SMALL)
        return torch_gradients(model, arrays, training)
    return told(tensorflow_gradients(model, list(map(tf.constant, arrays)), training))


def test_both_frameworks_compute_the_same_cnn() -> None:
    one, other = (loss_and_gradients(framework, drawn(6), training=False) for framework in FRAMEWORKS)
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1] == pytest.approx(other[1], rel=1e-5)
    assert one[2].keys() == other[2].keys() == nets.parameters(SMALL).keys()
    for name, slope in one[2].items():
        np.testing.assert_allclose(other[2][name], slope, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropout_is_a_function_of_the_key_and_only_in_training(framework: str) -> None:
    maps, targets, key = drawn(6)
    losses = [
        loss_and_gradients(framework, (maps, targets, key + more), training=training)[0]
        for training, more in ((True, 0), (True, 0), (True, 1), (False, 0), (False, 1))
    ]
    assert losses[0] == losses[1] != losses[2] != losses[3] == losses[4] != losses[0]


def test_scores_are_scikit_learns_in_the_unit_of_the_readings() -> None:
    draw = np.random.default_rng(2)
    truth, last, outputs = draw.normal(300, 100, (3, 500))
    mean, deviation = 290.0, 80.0
    scaled = [torch.from_numpy(((each - mean) / deviation).astype(np.float32)) for each in (outputs, truth, last)]
    from hvdtrain.models.mlp_torch import forecast_error

    loss, sums = forecast_error(scaled[0][:, None], torch.stack(scaled[1:], 1))
    totals = np.array([float(loss), *(float(sums[name]) for name in solar.Forecast.sums), len(truth)])
    _, found = solar.Forecast(deviation).means(totals)
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(truth, outputs), rel=1e-5)
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(truth, outputs), rel=1e-5)
    assert found["bias"] == pytest.approx((outputs - truth).mean(), rel=1e-4)
    assert found["r2"] == pytest.approx(metrics.r2_score(truth, outputs), rel=1e-4)
    persistence = metrics.root_mean_squared_error(truth, last)
    assert found["skill"] == pytest.approx(1 - found["rmse"] / persistence, rel=1e-4)


FLAGS = ["-m", "hvdtrain.solar", "--hidden", "16,8", "--global-batch-size", "4000", "--epochs", "2", "--json"]
FLAGS += ["--warmup-epochs", "0", "--lr", "0.01", "--checkpoint-steps", "9", "--keep-checkpoints", "9"]
FLAGS += ["--inference", "2,64"]


@pytest.mark.slow
def test_ranks_frameworks_and_a_resumed_run_learn_the_same(tmp_path: Path) -> None:
    """The forecasts beat persistence on readings that no training window contains."""
    losses = {}
    for framework, launcher, ranks in (("torch", "", 0), ("torch", "horovodrun", 2), ("tensorflow", "mpirun", 2)):
        folder = tmp_path / f"{framework}{ranks}"
        words = [*FLAGS, "--framework", framework, "--run-dir", str(folder)]
        summary = document(launch(ranks, words, launcher)) if ranks else here("solar", *words[2:])
        assert set(summary["test_scores"]) == {"mae", "rmse", "bias", "r2", "skill"}
        assert 0.1 < summary["test_scores"]["skill"] < 1
        assert 50 < summary["test_scores"]["mae"] < summary["test_scores"]["rmse"] < 250, "W/m2"
        few, many = summary["inference"]
        assert (few["samples"], many["samples"]) == (2, 64)
        assert 0 < many["least_s"] <= many["median_s"] <= many["most_s"] and many["passes"] >= 5
        losses[framework, ranks] = [step.loss for step in read_run(folder)["step"]]
    alone, cut = tmp_path / "torch0", tmp_path / "cut"
    for others in (("torch", 2), ("tensorflow", 2)):
        np.testing.assert_allclose(losses[others], losses["torch", 0], rtol=1e-3)
    cut_off(alone, cut, 18)
    here("solar", *FLAGS[2:], "--framework", "torch", "--run-dir", str(cut), "--resume")
    assert [each.step for each in read_run(cut)["resumed"]] == [18]
    assert_same_arrays(alone, cut)
    some, found = np.arange(500), {}
    for framework in FRAMEWORKS:
        seen, targets = solar.opened(solar.SolarConfig()).test.batch(some, some, None).arrays
        found[framework] = runs.open_run(alone).model(framework).outputs(seen)[:, 0]
    np.testing.assert_allclose(found["tensorflow"], found["torch"], atol=1e-4)
    assert np.square(found["torch"] - targets[:, 0]).mean() < np.square(targets[:, 1] - targets[:, 0]).mean()


def test_tensorflow_s_stages_equal_the_whole_cnn() -> None:
    """PyTorch's stages are tested in test_stages.py."""
    row, state, metric = nets.layers(SMALL), nets.initial_state(SMALL, 1), solar.Forecast(1.0)
    batch = data.Batch(arrays=drawn(6), weight=6, total_weight=6)

    def make(part: range | None) -> Any:
        model = models.network("solar.CNN", "tensorflow", SMALL, stage=part)
        load(model, state)
        return model

    known, *others = [stepped("tensorflow", make, row, border, batch, metric) for border in range(len(row))]
    for found in others:
        np.testing.assert_allclose(found, known, rtol=1e-5, atol=1e-6)
