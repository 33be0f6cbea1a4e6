"""The kinds of data that `hvdtrain.train` takes: each sample is used once per epoch, on any number of ranks."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, launch
from programs import own_inputs, own_train
from runs import cut_off

from hvdtrain.data import own
from hvdtrain.data.loader import Loader, shard
from hvdtrain.system.exits import Failure

torch = pytest.importorskip("torch")
DataLoader = torch.utils.data.DataLoader
COUNT = own_inputs.COUNT
BATCH = 24
"""The last global batch has 5 samples, too few for 3 ranks with 2 each, so it is merged and split"""


@pytest.fixture(autouse=True)
def separate_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["script.py"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def opened(kind: str, named: bool) -> own.Own:
    if kind == "tensorflow":
        pytest.importorskip("tensorflow")
    make = own_inputs.KINDS[kind]
    return own.opened(make(0, COUNT, named), None, make(COUNT, COUNT + own_inputs.TEST, named), stream=True)


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def numbers(batches: Any) -> list[list[float]]:
    """The samples of each batch. Alphabetical order puts `number` before `x`."""
    return [batch.arrays[0].tolist() for batch in batches]


@pytest.mark.parametrize("kind", own_inputs.KINDS)
def test_each_sample_is_used_once_per_epoch(kind: str) -> None:
    """On 1, 2 and 3 ranks, also if another number of ranks resumes the epoch; the ranks agree on the steps."""
    data = opened(kind, named=True)
    for size in (1, 2, 3):
        ranks = [Loader(data.train, global_batch=BATCH, rank=rank, size=size, seed=5) for rank in range(size)]
        for number in (0, 1):
            epoch = [numbers(loader.epoch(number)) for loader in ranks]
            assert {len(batches) for batches in epoch} == {ranks[0].steps_per_epoch}
            assert min(len(batch) for batches in epoch for batch in batches) >= 2
            assert sorted(joined(map(joined, epoch))) == list(range(COUNT))
        first = joined(joined(batches[:2]) for batches in epoch)
        others = [Loader(data.train, global_batch=BATCH, rank=rank, size=4 - size, seed=5) for rank in range(4 - size)]
        rest = [number for loader in others for batch in numbers(loader.epoch(1, 2 * BATCH)) for number in batch]
        assert sorted(first + rest) == list(range(COUNT))
        shards = [numbers(shard(data.test, batch_size=6, rank=rank, size=size)) for rank in range(size)]
        assert sorted(joined(map(joined, shards))) == list(range(COUNT, COUNT + own_inputs.TEST))
    assert data.streamed == (["train", "test"] if kind in own_inputs.STREAMS else [])


@pytest.mark.parametrize("kind", own_inputs.KINDS)
def test_dicts_and_tuples_are_the_same_samples(kind: str) -> None:
    named, plain = (
        [
            array
            for batch in Loader(opened(kind, dicts).train, global_batch=9, rank=0, size=2, seed=1).epoch(0)
            for array in batch.arrays
        ]
        for dicts in (True, False)
    )
    assert all(map(np.array_equal, named, plain))
    assert [array.dtype.name for array in plain[:3]] == ["float32", "float32", "int64"]


@pytest.mark.parametrize(("kind", "ranks", "launcher"), [("loader", 2, "torchrun"), ("sharded", 3, "mpirun")])
def test_ranks_train_as_one_process(kind: str, ranks: int, launcher: str, tmp_path: Path) -> None:
    """The ranks get dicts, and the process gets tuples. It can also resume their run."""
    settings = json.dumps(
        {"run_dir": str(tmp_path / "run"), "checkpoint_steps": 3, "keep_checkpoints": 9, "global_batch_size": 23}
    )
    program = str(PROGRAMS / "own_inputs.py")
    done = launch(ranks, [program, kind, str(tmp_path), settings], launcher, {"HVDTRAIN_STRATEGY": "hierarchical"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("drop_last has no effect" in done.stderr) == (kind == "loader")
    sys.argv = ["own_inputs.py"]
    model, summary = own_inputs.trained(kind, False, global_batch_size=23)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert sorted(joined(each["numbers"] for each in results)) == sorted([*range(COUNT)] * 2) == sorted(model.numbers)
    for each in results:
        np.testing.assert_allclose(each["weights"], model.line.weight.tolist(), rtol=1e-4, atol=1e-6)
        assert each["scores"] == summary.test_scores
    cut_off(tmp_path / "run", tmp_path / "cut", 6)
    resumed, again = own_inputs.trained(kind, False, resume=str(tmp_path / "cut"), global_batch_size=23)
    assert (again.test_scores, len(resumed.numbers)) == (summary.test_scores, COUNT - 23)
    np.testing.assert_allclose(resumed.line.weight.tolist(), model.line.weight.tolist(), rtol=1e-4, atol=1e-6)


def test_a_keras_model_gets_the_dict() -> None:
    """And equals one that gets a list."""
    keras = pytest.importorskip("keras")
    import hvdtrain

    def model(named: bool) -> Any:
        keras.utils.set_random_seed(1)
        inputs = {"number": keras.Input((), name="number"), "x": keras.Input((5,), name="x")}
        outputs = keras.layers.Dense(5)(inputs["x"]) + 0 * inputs["number"][:, None]
        return keras.Model(inputs if named else [*inputs.values()], outputs)

    loss, weights = keras.losses.SparseCategoricalCrossentropy(from_logits=True), []
    for named in (True, False):
        network, data = model(named), own_inputs.tensorflow(0, COUNT, named)
        hvdtrain.train(network, loss=loss, train=data, epochs=1, batch_size=16, stream=True)
        weights.append(network.get_weights())
    assert all(map(np.array_equal, *weights))
    wrong = np.ones(8, np.float32), np.ones((8, 5), np.float32), np.full(8, 7)
    with pytest.raises(Failure, match="label value of 7"):
        hvdtrain.train(network, loss=loss, train=wrong, epochs=1)


def test_a_data_loader_sets_the_batch_size_and_collates() -> None:
    def collate(samples: list[Any]) -> Any:
        """Pads to the longest."""
        tensors = [torch.full((int(sample["number"]) % 3 + 2,), sample["number"]) for sample in samples]
        labels = torch.tensor([sample["label"] for sample in samples])
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), labels

    data = DataLoader(own_inputs.Indexed(0, COUNT, True), batch_size=7, collate_fn=collate)
    opened = own.opened(data, DataLoader(own_inputs.Indexed(0, 4, True), collate_fn=collate), None)
    assert (opened.batch_size, [len(opened.notes), "shuffled" in opened.notes[0]]) == (7, [1, True])
    batches = list(Loader(opened.train, global_batch=7, rank=0, size=1, seed=0).epoch(0))
    assert {batch.arrays[0].shape for batch in batches} >= {(7, 4)}
    assert sorted(number for batch in batches for number in batch.arrays[0][:, 0]) == list(range(COUNT))
    indexed = own_inputs.Indexed(0, COUNT, False)
    _, summary = own_inputs.trained("loader", False, train=DataLoader(indexed, batch_size=20), global_batch_size=None)
    assert summary.steps == 2 * -(-COUNT // 20)


class Unsteady(own_inputs.Read):
    """Declares another length than it has."""

    def __init__(self, length: int) -> None:
        super().__init__(0, COUNT, False)
        self.length = length

    def __len__(self) -> int:
        return self.length


class More(own_inputs.Indexed):
    def __getitem__(self, at: int) -> Any:
        return {**super().__getitem__(at), **({"more": 1.0} if self.range.start or at > 2 else {})}


class Faulty(own_inputs.Indexed):
    """Its 60th sample has another shape or a class that the model does not have, or ends the process that reads it."""

    def __init__(self, fault: str) -> None:
        super().__init__(0, COUNT, True)
        self.fault = fault

    def __getitem__(self, at: int) -> Any:
        found = super().__getitem__(at)
        if at == 60 and self.fault == "dies":
            os._exit(3)
        if at == 60:
            found |= {"label": 5} if self.fault == "class" else {"x": found["x"][:4]}
        return found


INDEXED = own_inputs.Indexed(0, COUNT, True)
BATCHES = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(INDEXED), 4, False)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (DataLoader(INDEXED, batch_sampler=BATCHES), "batch_sampler"),
        (DataLoader(INDEXED, sampler=torch.utils.data.DistributedSampler(INDEXED, 2, 0)), "DistributedSampler"),
        (Unsteady(COUNT - 1), "continues after the expected 100"),
        (own_inputs.Read(0, 0, True), "no samples"),
        (DataLoader(INDEXED, collate_fn=lambda samples: (torch.zeros(3, 2), torch.zeros(3))), "first axis"),
        (More(0, COUNT, True), "same keys"),
        ([{"x": 1.0}], "inside"),
        (Faulty("shape"), "same shape"),
        (DataLoader(Faulty("dies"), num_workers=1), "worker process"),
    ],
    ids=lambda value: re.sub(r"\W", "-", value) if isinstance(value, str) else "",
)
def test_errors_are_one_line(train: Any, message: str) -> None:
    with pytest.raises(Failure, match=re.escape(message)) as error:
        own_inputs.trained("indexed", True, train=train, test=None)
    assert "\n" not in str(error.value)


def test_a_shuffled_stream_must_have_one_order() -> None:
    tf = pytest.importorskip("tensorflow")
    x, y = own_train.PARTS["train"]
    data = tf.data.Dataset.from_tensor_slices((x, y))
    tf.random.set_seed(None)
    for shuffled in (data.shuffle(9), data.shuffle(9, seed=1), data.shuffle(9, reshuffle_each_iteration=False)):
        with pytest.raises(Failure, match="order"):
            own.opened(shuffled.prefetch(1), None, None, stream=True)
    steady = data.shuffle(9, seed=1, reshuffle_each_iteration=False)
    assert len(own.opened(steady, None, None, stream=True).train) == len(x)
    with pytest.raises(Failure, match="never ends"):
        own.opened(data.repeat(), None, None, stream=True)
    with pytest.raises(Failure, match="--shares"):
        own_inputs.trained("read", True, shares="1")
