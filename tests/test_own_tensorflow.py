"""hvdtrain.tensorflow and hvdtrain.keras on two ranks, with Horovod and with hvdtrain's TCP backend."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, document, launch

from hvdtrain import records

on_each_backend = pytest.mark.parametrize(
    "strategy", [pytest.param("", marks=pytest.mark.slow, id="Horovod"), pytest.param("hierarchical", id="tcp")]
)
"""HVDTRAIN_STRATEGY by backend"""


@functools.cache
def script(strategy: str) -> Any:
    """Return the report of own_tensorflow.py."""
    with tempfile.TemporaryDirectory() as folder:
        extra = {"HVDTRAIN_RUN_DIR": f"{folder}/run"} | ({"HVDTRAIN_STRATEGY": strategy} if strategy else {})
        report = document(launch(2, [str(PROGRAMS / "own_tensorflow.py"), folder], extra=extra))
        for name, kind, rank in (("steps", records.Step, 1), ("epochs", records.Epoch, 0)):
            written = records.read(Path(folder, "run", "metrics", f"rank000{rank}.jsonl"))
            report[name] = [each for each in written if isinstance(each, kind)]
    return report


def weights(fit: Any) -> np.ndarray:
    """Return one row for each rank."""
    return np.array(fit["weights"])


def assert_equal_weights(fits: Any, pairs: dict[str, str]) -> None:
    """Compare weights up to the order of sums."""
    for name, expected in pairs.items():
        np.testing.assert_allclose(weights(fits[name]), weights(fits[expected]), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_calls_return_the_same_results_on_both_backends() -> None:
    assert script("hierarchical")["calls"] == script("")["calls"]


@on_each_backend
def test_two_ranks_with_half_the_batch_train_as_one_process(strategy: str) -> None:
    fits = script(strategy)["fits"]
    assert_equal_weights(fits, {"fit": "alone", "two passes": "alone", "tape": "alone"})
    for metric in ("loss", "accuracy", "Top-2"):
        np.testing.assert_allclose(fits["fit"][metric], fits["alone"][metric], rtol=1e-4)
    assert fits["fit"]["each"] == [[0.5, 1.0]] * 3


@pytest.mark.parametrize(
    ("strategy", "program"),
    [pytest.param("", [], marks=pytest.mark.slow), ("hierarchical", [str(PROGRAMS / "without_horovod.py")])],
    ids=["Horovod", "without Horovod"],
)
def test_a_single_step_moves_the_weights_by_the_sum(strategy: str, program: list[str]) -> None:
    extra = {"HVDTRAIN_STRATEGY": strategy} if strategy else {}
    report = document(launch(2, [*program, str(PROGRAMS / "own_keras_steps.py")], extra=extra))
    validated, evaluated = report.pop("validated", (0, 0))
    assert validated == pytest.approx(evaluated, rel=1e-5), "an epoch that ends between two exchanges"
    assert report == {
        "sum": [3, 1],
        "predivided": [1.5, 1],
        "two passes": [4.5, 2],
        "two passes, resumed between": [4.5, 1],
        "rolled back": [4.5, 4.5],
        "in a group and in none": [1.5, 1.5],
        "one layer local": [3, 2],
        "on a tape": [[0.5], [1.5]],
        "sum on a tape": [[0.5], [3]],
        "velocity at half the rate, local, broadcast": [0.5, 1, 2],
    }


@pytest.mark.slow
def test_buckets_are_sent_while_backward_computes_with_the_sums_of_one_process() -> None:
    """The program compares, and raises if a check fails."""
    done = launch(2, [str(PROGRAMS / "own_overlap_keras.py")], "mpirun", {"HVDTRAIN_STRATEGY": "hierarchical"})
    assert done.returncode == 0, done.stderr


@on_each_backend
def test_steps_of_the_first_optimizer_are_recorded(strategy: str) -> None:
    """Those of the tape that trains after it are counted. Only metrics that are single numbers become scores."""
    report = script(strategy)
    assert set(report["epochs"][0].train_scores) == {"accuracy", "top_2"}
    assert [step.step for step in report["steps"]] == list(range(len(report["steps"])))
    assert [step.lr is None for step in report["steps"]] == [False] * 12


@pytest.mark.slow
def test_checkpoints_batch_normalisation_and_schedules_equal_one_process() -> None:
    fits = script("")["fits"]
    assert_equal_weights(fits, dict.fromkeys(("resumed", "rank 0 resumed", "late change"), "alone"))
    assert_equal_weights(fits, {"adam": "alone, adam", "muon": "alone, muon", "norm": "alone, norm"})
    assert fits["resumed"]["kinds"] == [True, "SGD", "keras.src.optimizers.sgd"]  # the saved model is Keras' own
    warmup = [0.2 / 2 * ((step + 1) / 8 + 1) for step in range(8)]
    np.testing.assert_allclose(fits["rates"]["rates"], [*warmup, *[0.2] * 4, *[0.02] * 4], rtol=1e-6)
    np.testing.assert_allclose(fits["rates"]["lr"], [warmup[3], 0.2, 0.2, 0.02], rtol=1e-6)


def test_strategies_in_fit() -> None:
    fits = script("hierarchical")["fits"]
    assert_equal_weights(
        fits, dict.fromkeys(("averaged", "scaled sgd"), "alone, plain") | {"adam, scaled": "adam, larger"}
    )
    for name in ("stale", "stale, built by fit"):
        assert (weights(fits[name]) == weights(fits[name])[0]).all(), name
        assert fits[name]["loss"][-1] < fits[name]["loss"][0]
    assert fits["stale, resumed"]["weights"] == fits["stale"]["weights"]


@on_each_backend
def test_unsupported_calls_raise(strategy: str) -> None:
    failures = {name: error.partition(":")[0] for name, error in script(strategy)["errors"].items()}
    expected = dict.fromkeys(("unknown", "native"), "Failure")
    expected |= dict.fromkeys(("compression", "tape", "op", "twice", "xla", "half", "half tape"), "ValueError")
    expected["shapes"] = "FailedPreconditionError"
    assert {name: failures.get(name) for name in expected} == expected
    if strategy:
        assert {"session", "adasum", "weights"} <= failures.keys()
