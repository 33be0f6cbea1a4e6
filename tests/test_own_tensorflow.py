"""hvdtrain.tensorflow and hvdtrain.keras on two real ranks, carried by Horovod and by our streams."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, ROOT, document, launch

from hvdtrain import records

CARRIERS = ["", "hierarchical"]


@functools.cache
def script(strategy: str) -> Any:
    """What own_tensorflow.py reports."""
    with tempfile.TemporaryDirectory() as folder:
        extra = {"HVDTRAIN_RUN_DIR": f"{folder}/run"} | ({"HVDTRAIN_STRATEGY": strategy} if strategy else {})
        done = launch(
            2,
            [str(PROGRAMS / "own_tensorflow.py"), folder],
            extra=extra,
        )
        report = document(done)
        for name, kind, rank in (("steps", records.Step, 1), ("epochs", records.Epoch, 0)):
            written = records.read(Path(folder, "run", "metrics", f"rank000{rank}.jsonl"))
            report[name] = [each for each in written if isinstance(each, kind)]
    return report


def weights(fit: Any) -> np.ndarray:
    """One row for each rank."""
    return np.array(fit["weights"])


def test_every_call_gives_on_streams_what_it_gives_on_horovod() -> None:
    theirs, ours = (script(carrier)["calls"] for carrier in CARRIERS)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours[name] == values, name


def test_the_page_lists_every_name_of_horovods_modules() -> None:
    page = (ROOT / "docs" / "reference" / "horovod-compatibility.md").read_text()
    rows = re.findall(r"^\| `horovod\.((?:tensorflow|keras)[.\w]*)` \| ([\w']+) \| (.*) \|$", page, re.M)
    told = {module: dict[str, str]() for module, *_ in rows}
    for module, state, listed in rows:
        told[module] |= dict.fromkeys(re.findall(r"`(\w+)`", listed), state)
    assert told == script("")["names"]


def alike(fits: Any, laws: dict[str, str]) -> None:
    """Each fit has the weights of its law, up to the order of sums."""
    for name, law in laws.items():
        np.testing.assert_allclose(weights(fits[name]), weights(fits[law]), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_two_ranks_with_half_the_batch_each_fit_as_one_process_with_the_whole(carrier: str) -> None:
    fits = script(carrier)["fits"]
    alike(fits, {"fit": "alone", "two passes": "alone", "tape": "alone"})
    for metric in ("loss", "accuracy", "Top-2"):
        np.testing.assert_allclose(fits["fit"][metric], fits["alone"][metric], rtol=1e-4)
    assert fits["fit"]["each"] == [[0.5, 1.0]] * 3


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_single_step_of_each_kind_is_its_sum(carrier: str) -> None:
    extra = {"HVDTRAIN_STRATEGY": carrier} if carrier else {}
    told = document(launch(2, [str(PROGRAMS / "own_keras_steps.py")], extra=extra))
    validated, evaluated = told.pop("validated", (0, 0))
    assert validated == pytest.approx(evaluated, rel=1e-5), "an epoch that ends between two exchanges"
    assert told == {
        "sum": [3, 1],
        "predivided": [1.5, 1],
        "two passes": [4.5, 2],
        "two passes, resumed between": [4.5, 1],
        "rolled back": [4.5, 4.5],
        "in a group and in none": [1.5, 1.5],
        "and then one is rank 0's own": [3, 2],
        "on a tape": [[0.5], [1.5]],
        "sum on a tape": [[0.5], [3]],
        "velocity at a quarter of the rate, own, rank 1's": [0.5, 1, 2],
    }


@pytest.mark.parametrize("carrier", CARRIERS)
def test_steps_of_fit_and_of_a_tape_in_a_graph_are_recorded(carrier: str) -> None:
    """A tape does not see the learning rate. Its first step counts as one of another optimizer beside that of fit. Of
    the metrics those are that can be scores."""
    assert set(script(carrier)["epochs"][0].train_scores) == {"accuracy", "top_2"}
    steps = script(carrier)["steps"]
    assert [step.step for step in steps] == list(range(len(steps)))
    assert [step.lr is None for step in steps[:24]] == [False] * 12 + [True] * 11 + [False]


def test_what_else_a_keras_script_has() -> None:
    fits = script("")["fits"]
    alike(fits, dict.fromkeys(("resumed", "rank 0 resumed", "late change"), "alone"))
    alike(fits, {"adam": "alone, adam", "norm": "alone, norm"})
    assert fits["resumed"]["kinds"] == [True, "SGD", "keras.src.optimizers.sgd"]  # without us an ordinary model
    rates = fits["rates"]
    warmup = [0.2 / 2 * ((step + 1) / 8 + 1) for step in range(8)]
    np.testing.assert_allclose(rates["rates"], [*warmup, *[0.2] * 4, *[0.02] * 4], rtol=1e-6)
    np.testing.assert_allclose(rates["lr"], [warmup[3], 0.2, 0.2, 0.02], rtol=1e-6)


def test_strategies_in_fit() -> None:
    fits = script("hierarchical")["fits"]
    # on one host powersgd compresses nothing
    alike(fits, {"powersgd:rank=2": "alone, plain", "local-sgd:every=1": "alone, plain"})
    for name in ("local-sgd:every=3,start=2,staleness=1", "kept", "built by fit"):
        assert (weights(fits[name]) == weights(fits[name])[0]).all(), name
        assert fits[name]["loss"][-1] < fits[name]["loss"][0]
    assert fits["kept, resumed"]["weights"] == fits["kept"]["weights"]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_cannot_be_had_says_why_and_what_to_take(carrier: str) -> None:
    told = script(carrier)["refusals"]
    words = {
        "unknown": "did you mean powersgd",
        "native": "hierarchical",
        "compression": "part of the strategy",
        "tape": "hvd.DistributedOptimizer",
        "elastic": "Save at the end of each epoch",
        "op": "Average or Sum",
        "twice": "distributed already",
        "xla": "jit_compile=False",
        "half": "take mixed_bfloat16",
        "half tape": "take mixed_bfloat16",
        "shapes": "FailedPreconditionError",
    }
    if carrier:
        words |= {"session": "in a tf.function", "weights": "hvd.broadcast_variables"}
        words |= dict.fromkeys(("adasum", "join"), "unset HVDTRAIN_STRATEGY")
    for name, word in words.items():
        assert word in told[name], told[name]
