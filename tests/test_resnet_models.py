"""ResNet-34: its published sizes, and equal results of both frameworks.

The frameworks are compared at odd image sizes and on tiny maps, where a wrong padding or BatchNorm convention shows.

Two float32 implementations with equal weights agree in logits and losses to about 1e-6. Their gradients agree except
for ReLU inputs within rounding of 0, which only one of them may cut. One such unit changes a gradient by up to a few
percent, and training multiplies a difference by up to 50 per step. PyTorch compared with itself, with weights changed
by one unit in the last place, differs by 0.3 in loss after ten steps. Therefore gradients are compared over several
batches, the optimizers' steps in test_muon.py, and separate runs in a small net.
"""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, failing
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import Arrays, Found, Model, tensorflow_gradients, tf, told, torch, torch_gradients
from twins import one_thread as one_thread

from hvdtrain import strategies
from hvdtrain.comm.world import connect
from hvdtrain.config.options import TrainConfig
from hvdtrain.data import Batch
from hvdtrain.frameworks import in_vector
from hvdtrain.models import layers_tf, layers_torch
from hvdtrain.models.resnet import ResNetSpec, buffers, initial_state, parameters
from hvdtrain.models.resnet_tf import ResNetTF
from hvdtrain.models.resnet_torch import ResNetTorch
from hvdtrain.observe.timing import Clock
from hvdtrain.records.metrics import Accuracy
from hvdtrain.strategies.algorithms.synchronous import MAX_BUCKETS, Synchronous, buckets
from hvdtrain.strategies.reducers.exact import Hierarchical
from hvdtrain.system.exits import BAD_CONFIG, Failure
from hvdtrain.training.framework import load_first, make_replica

SMALL = ResNetSpec(channels=1, classes=10, width=0.25)


def batch(spec: ResNetSpec, size: tuple[int, int], count: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    images = random.random((count, *size, spec.channels), dtype=np.float32)
    return images, random.integers(0, spec.classes, count)


class Torch(Model):
    def __init__(self, spec: ResNetSpec, state: Arrays) -> None:
        super().__init__(ResNetTorch(spec), state)

    def logits(self, images: np.ndarray, training: bool = False) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(self.model.train(training)(torch.from_numpy(images)))

    def gradients(self, images: np.ndarray, labels: np.ndarray) -> Found:
        return torch_gradients(self.model, (images, labels), mean_of=len(labels))


class TensorFlow(Model):
    def __init__(self, spec: ResNetSpec, state: Arrays, dtype: Any = tf.float32) -> None:
        super().__init__(ResNetTF(spec, dtype), state)
        self._gradients = tf.function(self._gradients_eager)  # for each shape one, as kernels are chosen by it

    def _gradients_eager(self, images: Any, labels: Any) -> Any:
        return tensorflow_gradients(self.model, (images, labels), mean_of=tf.cast(tf.shape(labels)[0], tf.float32))

    def logits(self, images: np.ndarray, training: bool = False) -> np.ndarray:
        return np.asarray(self.model(images, training=training))

    def gradients(self, images: np.ndarray, labels: np.ndarray) -> Found:
        return told(self._gradients(images, labels))


def twins(spec: ResNetSpec = SMALL, seed: int = 0) -> tuple[Torch, TensorFlow]:
    state = initial_state(spec, seed)
    return Torch(spec, state), TensorFlow(spec, state)


# ---------------------------------------------------------------------------------------------------------------------
# The neutral file.


def test_resnet34_has_its_published_size_and_torchvision_s_names() -> None:
    shapes = parameters(ResNetSpec())
    assert sum(map(math.prod, shapes.values())) == 21_797_672
    assert (len(shapes), len(buffers(ResNetSpec()))) == (110, 72)
    assert list(shapes)[:4] == ["conv1.weight", "bn1.weight", "bn1.bias", "layer1.0.conv1.weight"]
    assert shapes["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)
    assert buffers(ResNetSpec())["layer3.5.bn2.running_var"] == (256,)


@pytest.mark.parametrize(
    ("field", "value"), [("channels", 0), ("classes", 0), ("width", 0.001), ("width", float("nan"))]
)
def test_a_bad_spec_or_seed_is_refused_by_name(field: str, value: float) -> None:
    with failing(BAD_CONFIG, f"{field} is {value}"):
        ResNetSpec(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(Failure, match="seed is -1"):
        initial_state(SMALL, seed=-1)


def test_initial_values_follow_their_distributions() -> None:
    state = initial_state(ResNetSpec(width=0.5), seed=3)
    kernel = state["layer4.1.conv1.weight"]  # 256 x 256 x 3 x 3, so 1 % is over ten standard errors
    assert abs(kernel.mean()) < 0.01 * kernel.std()
    assert kernel.std() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)
    assert np.abs(state["fc.weight"]).max() == pytest.approx(256**-0.5, rel=0.01)
    assert all(array.dtype == np.float32 for array in state.values())
    assert all((array == 1).all() for name, array in state.items() if name.endswith(("bn1.weight", "running_var")))
    other = initial_state(ResNetSpec(channels=3, classes=5, width=0.5), 3)
    np.testing.assert_array_equal(state["layer3.2.conv1.weight"], other["layer3.2.conv1.weight"])


# ---------------------------------------------------------------------------------------------------------------------
# The twins are one network.


def test_both_twins_hold_exactly_the_neutral_arrays() -> None:
    expected = parameters(SMALL) | buffers(SMALL)
    for twin in twins():
        state = twin.state()
        assert {name: array.shape for name, array in state.items()} == expected
        for name, array in initial_state(SMALL, 0).items():
            np.testing.assert_array_equal(state[name], array)
    assert list(dict(ResNetTorch(SMALL).named_parameters())) == list(parameters(SMALL))
    in_memory = [tuple(variable.shape) for variable in ResNetTF(SMALL).weights.values()]
    assert in_vector("tensorflow", parameters(SMALL).values()) == in_memory, "what strategies cut into matrices"


@settings(max_examples=6)
@given(
    size=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    channels=st.integers(1, 4),
    classes=st.integers(1, 12),
    width=st.floats(1 / 64, 0.2),
)
def test_same_logits_for_any_shape(size: tuple[int, int], channels: int, classes: int, width: float) -> None:
    spec = ResNetSpec(channels=channels, classes=classes, width=width)
    images, _ = batch(spec, size, count=3)
    one, other = twins(spec)
    assert one.logits(images).shape == (3, classes)
    np.testing.assert_allclose(one.logits(images), other.logits(images), atol=1e-4)


@settings(max_examples=25)
@given(
    size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    side=st.sampled_from([1, 3, 7]),
    stride=st.sampled_from([1, 2]),
    channels=st.tuples(st.sampled_from([1, 5, 16]), st.integers(1, 5)),
)
def test_small_maps_are_convolved_like_any(
    size: tuple[int, int], side: int, stride: int, channels: tuple[int, int]
) -> None:
    """Outputs and both gradients, in double precision, whatever they are computed by."""
    random = np.random.default_rng(0)
    images, kernel = (
        random.normal(size=(3, *size, channels[0])),
        random.normal(size=(channels[1], channels[0], side, side)),
    )
    found = []
    for convolution in (torch.nn.functional.conv2d, lambda x, w, _, *how: layers_torch.convolved(x, w, *how)):
        x, weight = (torch.from_numpy(array).requires_grad_() for array in (images, kernel))
        y = convolution(x.permute(0, 3, 1, 2), weight, None, stride, side // 2)
        (y**2).sum().backward()
        found.append([y.permute(0, 2, 3, 1).detach().numpy(), x.grad.numpy(), weight.grad.numpy()])
    x, weight = (tf.constant(array) for array in (images, layers_tf.to_tensorflow(kernel)))
    with tf.GradientTape() as tape:
        tape.watch([x, weight])
        y = layers_tf.convolved(x, weight, stride)
        loss = tf.reduce_sum(y**2)
    of_images, of_kernel = (tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(loss, [x, weight]))
    found.append([y.numpy(), of_images, layers_tf.to_pytorch(of_kernel)])
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            np.testing.assert_allclose(one, another, atol=1e-9)


def test_same_loss_hits_gradients_and_running_statistics() -> None:
    """A wrong convention shows in every batch, a ReLU at the edge in few."""
    closest = dict.fromkeys(parameters(SMALL), np.inf)
    one, other = twins()
    for seed in range(3):
        images, labels = batch(SMALL, (49, 37), seed=seed)
        loss, sums, gradients = one.gradients(images, labels)
        other_loss, other_sums, other_gradients = other.gradients(images, labels)
        assert loss == pytest.approx(other_loss, abs=1e-4)
        assert sums == other_sums
        ours, theirs = one.state(), other.state()
        for name in buffers(SMALL):
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4, err_msg=name)
        for name, gradient in gradients.items():
            distance = np.linalg.norm(other_gradients[name] - gradient) / np.linalg.norm(gradient)
            closest[name] = min(closest[name], float(distance))
    assert max(closest.values()) < 1e-3, closest


def test_few_channels_get_right_gradients_on_processors_with_avx2() -> None:
    """Of all shortcuts, compared with PyTorch's own kernels, without oneDNN."""
    program = """
import torch
from hvdtrain.models.resnet import ResNetSpec, initial_state
from hvdtrain.models.resnet_torch import ResNetTorch

torch.set_num_threads(1)
torch.manual_seed(5)
spec, images = ResNetSpec(channels=1, classes=10, width=1 / 16), torch.rand(16, 64, 64, 1)
found = []
for enabled in (False, True):
    model = ResNetTorch(spec)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in initial_state(spec, 0).items()})
    with torch.backends.mkldnn.flags(enabled=enabled):
        model.train().loss(images, torch.arange(16) % 10)[0].backward()
    found.append({name: p.grad for name, p in model.named_parameters() if "downsample.0" in name})
assert len(found[0]) == 3
for name, right in found[0].items():
    assert (found[1][name] - right).norm() < 0.1 * right.norm(), name  # rounding may flip a ReLU: 0.03 in 1 of 12 draws
"""
    checked = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "MALLOC_CHECK_": "3"}
    subprocess.run([sys.executable, "-c", program], env=checked, check=True)


def test_zero_gamma_starts_every_block_as_its_shortcut() -> None:
    spec = ResNetSpec(channels=1, classes=10, width=0.25, zero_gamma=True)
    images, _ = batch(spec, (32, 32))
    state = initial_state(spec, 0)
    assert sum((array == 0).all() for name, array in state.items() if name.endswith("bn2.weight")) == 16
    other = state | {name: 2 * array for name, array in state.items() if ".conv2." in name}
    np.testing.assert_array_equal(Torch(spec, state).logits(images), Torch(spec, other).logits(images))


# ---------------------------------------------------------------------------------------------------------------------
# Half precision: close to float32, with float32 logits and statistics.


def test_bfloat16_stays_close() -> None:
    images, labels = batch(SMALL, (32, 32))
    state = initial_state(SMALL, 0)
    exact = Torch(SMALL, state).logits(images)
    one, other = Torch(SMALL, state), TensorFlow(SMALL, state, tf.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        ours = one.logits(images)
        _, _, our_gradients = one.gradients(images, labels)
    theirs = other.logits(images)
    _, _, their_gradients = other.gradients(images, labels)
    for logits in (ours, theirs):
        assert logits.dtype == np.float32
        assert np.linalg.norm(logits - exact) < 0.05 * np.linalg.norm(exact)
    for arrays in (our_gradients, their_gradients, one.state(), other.state()):
        assert all(array.dtype == np.float32 and np.isfinite(array).all() for array in arrays.values())


def test_bfloat16_sets_every_gradient_of_an_image_of_one_pixel() -> None:
    """16x16 images are one pixel wide before the last group; memory was full of NaN before each gradient."""
    images, labels = batch(SMALL, (16, 16))
    model = Torch(SMALL, initial_state(SMALL, 0))
    for _ in range(5):
        garbage = [torch.full((2**power,), float("nan")) for power in range(4, 20) for _ in range(10)]
        del garbage
        with torch.autocast("cpu", torch.bfloat16):
            _, _, gradients = model.gradients(images, labels)
        assert all(np.isfinite(array).all() for array in gradients.values())


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_loss_scale_doubles_after_2000_good_steps_and_halves_after_an_overflow(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PROGRAMS)
    exchange = importlib.import_module("exchange")
    config = TrainConfig(precision="fp16", strategy="hierarchical", framework=framework)
    world = connect(framework, backend="tcp")
    strategy = strategies.resolve(config).make(config, world, [exchange.problem()[2].shape])
    module = importlib.import_module(f"hvdtrain.frameworks.{'pytorch' if framework == 'torch' else framework}")
    model = getattr(exchange, f"{framework}_model")()
    kind = module.TorchReplica if framework == "torch" else module.TensorFlowReplica
    replica = kind(model, device="cpu", config=config, world=world, strategy=strategy, metric=Accuracy())
    inputs, labels, weight = exchange.problem()
    replica.load({**replica.state(), "parameter.weight": weight, "loss_scale": np.array([2.0**16, 1999.0])})

    def weight_after(inputs: np.ndarray) -> np.ndarray:
        replica.backward(Batch(arrays=(inputs, labels), weight=11, total_weight=11), 0.1, stop=False)
        strategy.step(replica, 0.1, Clock())
        return replica.state()["parameter.weight"].copy()

    trained = weight_after(inputs)
    assert not np.array_equal(trained, weight)
    assert replica.state()["loss_scale"].tolist() == [2.0**17, 0]
    before = weight_after(inputs)
    np.testing.assert_array_equal(weight_after(inputs * np.float32(1e38)), before)
    assert replica.state()["loss_scale"].tolist() == [2.0**16, 0]


class Recording(Synchronous):
    """Records the buckets that a replica reports, instead of summing them."""

    def buckets(self, *, late_tail: bool = False) -> list[range]:
        self.begins = [0, *np.cumsum([int(np.prod(shape)) for shape in self._shapes])]
        self.ranges = buckets(self._shapes)
        self.reported: list[tuple[int, np.ndarray, bool]] = []
        self.backward_done = False
        return self.ranges

    def on_bucket_ready(self, bucket: int, vector: np.ndarray, ready: Any = None) -> None:
        here = slice(self.begins[self.ranges[bucket].start], self.begins[self.ranges[bucket].stop] if bucket else None)
        self.reported.append((bucket, vector[here].copy(), self.backward_done))


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_each_bucket_is_reported_during_backward_when_its_gradients_are_final(framework: str) -> None:
    spec = SMALL
    images, labels = batch(spec, (8, 8))
    config = TrainConfig(framework=framework, device="cpu")
    world = connect(framework, backend="tcp")
    shapes = in_vector(framework, list(parameters(spec).values()))
    strategy = Recording(world, shapes, config, None, Hierarchical(shapes))
    model: Any = (ResNetTorch if framework == "torch" else ResNetTF)(spec)
    replica = make_replica(model, config, world, strategy, "cpu", Accuracy())
    for _ in range(2):
        strategy.reported.clear()
        strategy.backward_done = False
        replica.backward(Batch(arrays=(images, labels), weight=16, total_weight=16), 0.1, stop=False)
        strategy.backward_done = True
        assert [(bucket, late) for bucket, _, late in strategy.reported] == [
            (bucket, False) for bucket in range(MAX_BUCKETS)
        ]
        whole = np.concatenate([piece for _, piece, _ in reversed(strategy.reported)])
        np.testing.assert_array_equal(whole, replica.vector())
        assert whole[-2] == 16 and np.abs(whole[: strategy.begins[-1]]).sum() > 0


@pytest.mark.parametrize(
    ("framework", "optimizer"),
    [
        *(("torch", each) for each in ("sgd", "adam", "muon")),
        ("tensorflow", "sgd"),
        *(pytest.param("tensorflow", each, marks=pytest.mark.slow) for each in ("adam", "muon")),
    ],
)
def test_updating_parts_equals_updating_all(framework: str, optimizer: Any) -> None:
    spec, arrays = SMALL, batch(SMALL, (8, 8))
    config = TrainConfig(framework=framework, device="cpu", optimizer=optimizer, weight_decay=0.1, threads=1)
    world = connect(framework, backend="tcp")
    shapes = in_vector(framework, list(parameters(spec).values()))
    whole, divided = (cls(world, shapes, config, None, Hierarchical(shapes)) for cls in (Synchronous, Recording))
    results = []
    for strategy, parts in ((whole, [None]), (divided, [None]), (divided, divided.buckets())):
        model: Any = (ResNetTorch if framework == "torch" else ResNetTF)(spec)
        replica = make_replica(model, config, world, strategy, "cpu", Accuracy())
        load_first(replica, initial_state(spec, 1))
        for step in range(3):
            replica.backward(Batch(arrays=arrays, weight=16, total_weight=16), 0.1, stop=False)
            vector = replica.vector()
            vector[:] = np.random.default_rng(step).normal(size=vector.size)
            assert replica.updates_parts or strategy is whole
            for part in parts:
                replica.apply(0.1, part)
        results.append(replica.state())
    one, *others = results
    assert len(parts) == MAX_BUCKETS
    for other in others:
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_allclose(other[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_arrays_that_the_loss_does_not_use_are_reported_with_the_others() -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = (torch.nn.Parameter(torch.ones(100, 100)) for _ in range(2))

        def loss(self, inputs: Any, labels: Any) -> Any:
            return (inputs @ self.used).sum(), {"correct": torch.zeros(())}

    config = TrainConfig(framework="torch", device="cpu")
    world = connect("torch", backend="tcp")
    strategy = Recording(world, [(100, 100)] * 2, config, None, Hierarchical([(100, 100)] * 2))
    replica = make_replica(Half(), config, world, strategy, "cpu", Accuracy())
    ones = np.ones((1, 100), np.float32)
    replica.backward(Batch(arrays=(ones, ones), weight=1, total_weight=1), 0.1, stop=False)
    (first, unused, _), (second, used, _) = strategy.reported
    assert (first, second, unused[: 100 * 100].any(), used.all()) == (0, 1, False, True)
