"""The captioning model: the two twins are one model, and one pass over a caption is the study's one row per word.

The reference is written here in NumPy the long way round: for each word of each caption a row with the words before
it, padded on the left with masked zeros, read word by word.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import failing
from test_stages import stepped
from twins import Arrays, Found, Model, tensorflow_gradients, tf, told, torch, torch_gradients
from twins import one_thread as one_thread

from hvdtrain.data import Batch
from hvdtrain.models.captioner import CaptionerSpec, initial_state, layers, parameters
from hvdtrain.models.captioner_tf import CaptionerTF
from hvdtrain.models.captioner_torch import CaptionerTorch
from hvdtrain.records import metrics
from hvdtrain.system.exits import BAD_CONFIG, Failure

Sample = tuple[np.ndarray, np.ndarray, np.ndarray]

LENGTHS = (3, 7, 1, 5, 7)  # of captions, in words
WORDLESS = CaptionerSpec(vocabulary=11, encoder="none", embedding=6, hidden=9)
FEATURES = CaptionerSpec(vocabulary=11, encoder="vgg16", features=13, embedding=6, hidden=9)
SMALL = CaptionerSpec(vocabulary=11, encoder="small", image_size=(40, 24), embedding=6, hidden=9)
SPECS = pytest.mark.parametrize("spec", [WORDLESS, FEATURES, SMALL], ids=lambda spec: spec.encoder)


def input_shape(spec: CaptionerSpec) -> tuple[int, ...]:
    """Of one image as the model takes it: (height, width, 3) uint8, (features,) float32; () means any."""
    width, height = spec.image_size
    return {"small": (height, width, 3), "vgg16": (spec.features,), "none": ()}[spec.encoder]


def sample(spec: CaptionerSpec, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Sample:
    """Images, captions of these lengths and a dropout key."""
    random = np.random.default_rng(seed)
    shape = (len(lengths), *input_shape(spec))
    if spec.encoder == "small":
        inputs = random.integers(0, 256, shape).astype(np.uint8)
    else:
        inputs = random.random(shape, np.float32)
    tokens = np.zeros((len(lengths), max(lengths) + 2), np.int64)
    for row, length in zip(tokens, lengths, strict=True):
        row[: length + 2] = [1, *random.integers(3, spec.vocabulary, length), 2]
    return inputs, tokens, random.integers(0, 2**32, 2)


def worn(spec: CaptionerSpec) -> Arrays:
    """A state without any zeros, and large enough that a gate or a bias in the wrong place shows."""
    random, state = np.random.default_rng(7), {}
    for name, shape in parameters(spec).items():
        bound = min(0.6, (6 / np.prod(shape[1:])) ** 0.5)  # He's: what goes through many layers keeps its size
        state[name] = random.uniform(-bound, bound, shape).astype(np.float32)
    return state


class Torch(Model):
    def __init__(self, spec: CaptionerSpec, state: Arrays, stage: range | None = None) -> None:
        super().__init__(CaptionerTorch(spec, stage), state)
        self.encode, self.step = self.model.encode, self.model.step

    def logits(self, drawn: Sample, training: bool = False) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(self.model.train(training)(*map(torch.from_numpy, drawn))[0])

    def gradients(self, drawn: Sample, training: bool = True) -> Found:
        return torch_gradients(self.model, drawn, training)


class TensorFlow(Model):
    def __init__(self, spec: CaptionerSpec, state: Arrays, dtype: Any = tf.float32, stage: range | None = None) -> None:
        super().__init__(CaptionerTF(spec, dtype, stage=stage), state)
        self.encode, self.step = self.model.encode, self.model.step
        shape = None if spec.encoder == "none" else (None, *input_shape(spec))
        inputs = tf.TensorSpec(shape, tf.uint8 if spec.encoder == "small" else tf.float32)
        arrays = [inputs, tf.TensorSpec((None, None), tf.int64), tf.TensorSpec((None,), tf.int64)]
        self.graphs = {
            training: tf.function(lambda *a, training=training: self._gradients(a, training), input_signature=arrays)
            for training in (False, True)
        }

    def _gradients(self, arrays: Any, training: bool) -> Any:
        return tensorflow_gradients(self.model, arrays, training)

    def logits(self, drawn: Sample, training: bool = False) -> np.ndarray:
        return np.asarray(self.model(*map(tf.constant, drawn), training)[0])

    def gradients(self, drawn: Sample, training: bool = True) -> Found:
        return told(self.graphs[training](*map(tf.constant, drawn)))


Twin = Torch | TensorFlow
TWINS = pytest.mark.parametrize("twin", [Torch, TensorFlow])


# ---------------------------------------------------------------------------------------------------------------------
# The reference.


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def reference_image(spec: CaptionerSpec, w: Arrays, image: np.ndarray) -> np.ndarray:
    if spec.encoder == "none":
        return np.zeros(spec.hidden)
    values = image / (255 if spec.encoder == "small" else 1)
    for number in itertools.count(1) if spec.encoder == "small" else ():
        if f"encoder.conv{number}.weight" not in w:
            break
        padded = np.pad(values, [(1, 1), (1, 1), (0, 0)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (0, 1))[::2, ::2]
        products = np.einsum("hwcyx,ocyx->hwo", windows, w[f"encoder.conv{number}.weight"])
        values = relu(products + w[f"encoder.conv{number}.bias"])
    return relu(w["image.weight"] @ values.reshape(-1) + w["image.bias"])


def reference_row(spec: CaptionerSpec, w: Arrays, image: np.ndarray, row: list[int]) -> np.ndarray:
    """Probabilities of the next word after the row's; a word 0 is masked: it leaves the state as it is."""
    hidden, cell = np.zeros(spec.hidden), np.zeros(spec.hidden)
    for word in row:
        if word == 0:
            continue
        gates = w["lstm.weight_ih"] @ w["embedding.weight"][word] + w["lstm.weight_hh"] @ hidden + w["lstm.bias"]
        enter, forget, new, leave = gates.reshape(4, -1)
        cell = sigmoid(forget) * cell + sigmoid(enter) * np.tanh(new)
        hidden = sigmoid(leave) * np.tanh(cell)
    merged = relu(w["merge.weight"] @ (hidden + reference_image(spec, w, image)) + w["merge.bias"])
    chances = np.exp(w["words.weight"] @ merged + w["words.bias"])
    return np.asarray(chances / chances.sum())


def reference(spec: CaptionerSpec, w: Arrays, drawn: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (rows, vocabulary) and the words that were said, a row for each word of each caption."""
    exact = {name: array.astype(np.float64) for name, array in w.items()}
    inputs, tokens, _ = drawn
    chances, said = [], []
    for image, caption in zip(inputs, tokens.tolist(), strict=True):
        words = [word for word in caption if word]
        for place in range(1, len(words)):
            row = [0] * (len(caption) - place) + words[:place]
            chances.append(reference_row(spec, exact, image, row))
            said.append(words[place])
    return np.array(chances), np.array(said)


def softmax(logits: np.ndarray) -> np.ndarray:
    chances = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(chances / chances.sum(1, keepdims=True))


# ---------------------------------------------------------------------------------------------------------------------
# The neutral file.


def test_the_study_s_model_has_its_sizes() -> None:
    spec = CaptionerSpec(vocabulary=8000, encoder="vgg16")
    shapes = parameters(spec)
    assert shapes["embedding.weight"] == (8000, 256)
    assert shapes["lstm.weight_ih"] == shapes["lstm.weight_hh"] == (1024, 256)
    assert shapes["image.weight"] == (256, 4096)
    assert shapes["merge.weight"] == (256, 256)
    assert shapes["words.weight"] == (8000, 256)
    assert sum(map(math.prod, parameters(spec).values())) == 5_743_936


@pytest.mark.parametrize(
    ("field", "value"), [("vocabulary", 4), ("encoder", "vgg19"), ("image_size", (64, 0)), ("dropout", float("nan"))]
)
def test_a_bad_spec_is_refused_by_name(field: str, value: Any) -> None:
    with failing(BAD_CONFIG, field):
        replace(SMALL, **{field: value})
    with pytest.raises(Failure, match="seed is -1"):
        initial_state(SMALL, seed=-1)


def test_initial_values_follow_their_distributions() -> None:
    state = initial_state(CaptionerSpec(vocabulary=500, encoder="small"), 3)
    assert {name: array.shape for name, array in state.items()} == parameters(
        CaptionerSpec(vocabulary=500, encoder="small")
    )
    assert all(array.dtype == np.float32 for array in state.values())
    assert np.abs(state["embedding.weight"]).max() == pytest.approx(0.05, rel=0.01)
    assert np.abs(state["merge.weight"]).max() == pytest.approx((6 / 512) ** 0.5, rel=0.01)
    assert np.abs(state["encoder.conv2.weight"]).max() == pytest.approx((6 / (9 * 48)) ** 0.5, rel=0.01)
    assert abs(state["lstm.weight_hh"].mean()) < 0.001
    assert state["lstm.bias"].tolist() == [0.0] * 256 + [1.0] * 256 + [0.0] * 512


# ---------------------------------------------------------------------------------------------------------------------
# The twins are one model, and it is the study's.


@SPECS
@TWINS
def test_one_pass_is_a_row_for_each_word(spec: CaptionerSpec, twin: type[Twin]) -> None:
    drawn, state = sample(spec), worn(spec)
    chances, said = reference(spec, state, drawn)
    model = twin(spec, state)
    np.testing.assert_allclose(softmax(model.logits(drawn)), chances, atol=1e-5)
    loss, sums, _ = model.gradients(drawn, training=False)
    assert loss == pytest.approx(-np.log(chances[np.arange(len(said)), said]).sum(), rel=1e-5)
    assert sums["correct"] == (chances.argmax(1) == said).sum()


@SPECS
def test_same_weights_same_loss_hits_and_gradients(spec: CaptionerSpec) -> None:
    drawn, state = sample(spec), worn(spec)
    loss, sums, gradients = Torch(spec, state).gradients(drawn, training=False)
    other_loss, other_sums, other_gradients = TensorFlow(spec, state).gradients(drawn, training=False)
    assert (loss, sums) == (pytest.approx(other_loss, abs=1e-4), other_sums)
    assert other_gradients.keys() == gradients.keys() == state.keys()
    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient) > 0, f"{name} learns nothing"
        np.testing.assert_allclose(other_gradients[name], gradient, atol=1e-4 * np.abs(gradient).max(), err_msg=name)


@SPECS
@TWINS
def test_word_by_word_is_the_one_pass(spec: CaptionerSpec, twin: type[Twin]) -> None:
    drawn, state = sample(spec), worn(spec)
    inputs, tokens, _ = drawn
    model = twin(spec, state)
    encoded = model.encode(inputs)
    assert encoded.dtype == np.float32
    hidden = cell = np.zeros_like(encoded)
    steps = []
    for words in tokens[:, :-1].T:
        chances, hidden, cell = model.step(encoded, words, hidden, cell)
        assert chances.dtype == hidden.dtype == cell.dtype == np.float32
        steps.append(np.exp(chances))
    said = tokens[:, 1:] != 0
    np.testing.assert_allclose(np.stack(steps, 1)[said], softmax(model.logits(drawn)), atol=1e-5)


@TWINS
def test_padding_and_neighbours_change_nothing(twin: type[Twin]) -> None:
    model, (inputs, tokens, key) = twin(SMALL, worn(SMALL)), sample(SMALL)
    loss, sums, gradients = model.gradients((inputs, tokens, key), training=False)
    wider = np.pad(tokens, [(0, 0), (0, 4)])
    padded_loss, padded_sums, padded = model.gradients((inputs, wider, key), training=False)
    assert (padded_loss, padded_sums) == (pytest.approx(loss, rel=1e-5), sums)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(padded[name], gradient, atol=1e-4)
    alone = [model.gradients((inputs[i : i + 1], tokens[i : i + 1], key), training=False) for i in range(len(tokens))]
    assert sum(each[0] for each in alone) == pytest.approx(loss, rel=1e-5)
    assert sum(each[1]["correct"] for each in alone) == sums["correct"]


def test_tensorflow_compiles_once_for_all_lengths_and_batches() -> None:
    model = TensorFlow(FEATURES, worn(FEATURES))
    for lengths in [(3,), (5, 2), (9, 9, 1)]:
        model.gradients(sample(FEATURES, lengths))
        encoded = model.encode(sample(FEATURES, lengths)[0])
        model.step(encoded, np.ones(len(encoded), np.int64), encoded, encoded)
    graphs = (model.graphs[True], model.model._step_graph, model.model._encode_graph)
    assert [graph.experimental_get_tracing_count() for graph in graphs] == [1, 1, 1]


def caption_batch(drawn: Sample, first: int = 0, last: int = len(LENGTHS)) -> Batch:
    """Some captions of a step, as wide as their longest."""
    inputs, tokens, key = drawn
    some, words = tokens[first:last], LENGTHS[first:last]
    arrays = inputs[first:last], some[:, : max(words) + 2], key
    return Batch(arrays=arrays, weight=sum(words) + len(words), total_weight=sum(LENGTHS) + len(LENGTHS))


def parted(drawn: Sample) -> Batch:
    """All of them in two micro-batches."""
    return replace(caption_batch(drawn), arrays=(), parts=(caption_batch(drawn, 0, 1), caption_batch(drawn, 1)))


def test_tensorflow_s_parts_are_the_whole() -> None:
    """At every cut, with dropout. PyTorch's are in test_stages.py."""
    row, batch = layers(SMALL, 5), parted(sample(SMALL))

    def make(stage: range | None) -> Any:
        return TensorFlow(SMALL, worn(SMALL), stage=stage).model

    known, *others = [stepped("tensorflow", make, row, at, batch, metrics.Accuracy()) for at in range(len(row))]
    for found in others:
        np.testing.assert_allclose(found, known, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Dropout.


@TWINS
def test_dropout_is_a_function_of_the_key(twin: type[Twin]) -> None:
    state, (inputs, tokens, key) = worn(SMALL), sample(SMALL)
    model = twin(SMALL, state)
    loss, _, gradients = model.gradients((inputs, tokens, key))
    others = {model.gradients((inputs, tokens, key ^ flip))[0] for flip in ([1, 0], [0, 1], [2**31, 0], [0, 2**30])}
    assert len(others | {loss}) == 5
    again, _, same = twin(SMALL, state).gradients((inputs, tokens, key))
    assert again == loss
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(same[name], gradient)


# ---------------------------------------------------------------------------------------------------------------------
# In half precision it stays close.
