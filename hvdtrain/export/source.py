"""The source of an exported model: the arrays of a run, and the meaning of its inputs and outputs.

All formats have the same input, in the unit in which the data were recorded: pixels from 0 to 255, the numbers of a CSV
file, readings in W/m2. Everything after that belongs to the model, except in a safetensors file, which has arrays only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import __version__
from hvdtrain.captions import features
from hvdtrain.captions.generation import UNWRITTEN, WORDS_LIMIT
from hvdtrain.captions.vocabulary import END, PAD, START
from hvdtrain.inference import runs
from hvdtrain.inference.runs import Run
from hvdtrain.models import vgg16
from hvdtrain.records import Manifest
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

SCHEMA = "hvdtrain/model/1"
BRIGHTEST_W_M2 = 1000.0


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An input or an output of an exported model."""

    name: str
    shape: tuple[int, ...]
    """Shape without the first dimension, whose size is free"""
    dtype: str
    meaning: str

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "shape": ["batch", *self.shape]}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trained model, ready to be written in any format."""

    workload: str
    spec: Any
    """Sizes of the model, such as `resnet.ResNetSpec`"""
    arrays: Arrays
    """Parameters and running statistics, with PyTorch's names and shapes"""
    input: Tensor
    outputs: tuple[Tensor, ...]
    preprocessing: Mapping[str, Any]
    """What happens to the input before the first layer; fit for JSON"""
    labels: Mapping[str, Any]
    """Names of classes, words or columns; fit for JSON"""
    made: Mapping[str, Any]
    """Versions, framework and data of the run; fit for JSON"""

    def about(self, *, complete: bool = True) -> dict[str, Any]:
        """A JSON document about the model. `complete`: whether the preprocessing belongs to the file's model."""
        return {
            "schema": SCHEMA,
            "workload": self.workload,
            "spec": dataclasses.asdict(self.spec),
            "input": self.input.as_json(),
            "outputs": [output.as_json() for output in self.outputs],
            "preprocessing": {"inside_the_model": complete, **self.preprocessing},
            **self.labels,
            "made": dict(self.made),
        }

    def example(self, count: int, seed: int = 0) -> NDArray[Any]:
        """Random inputs of a plausible size."""
        draw, shape = np.random.default_rng(seed), (count, *self.input.shape)
        if self.input.dtype == "uint8":
            return draw.integers(256, size=shape, dtype=np.uint8)
        if self.workload == "tabular":
            return draw.normal(self.preprocessing["mean"], self.preprocessing["scale"], shape)
        return draw.uniform(0, BRIGHTEST_W_M2, shape).astype(np.float32)


def open_run(folder: Path, weights: str | None = None) -> Source:
    """The trained model of a run of any workload. `weights`: the file with VGG16's weights, if it has moved.

    Raises Failure: 65 for a damaged or incomplete run, 78 for a model of another program.
    """
    run = runs.open_run(folder)
    return SOURCES[run.manifest.workload](folder, run, weights)


def _made(manifest: Manifest) -> dict[str, Any]:
    data = {name: manifest.data.get(name) for name in ("name", "fingerprint")}
    return {"hvdtrain": __version__, "framework": manifest.config.get("framework"), "data": data}


def _logits(count: int, meaning: str) -> tuple[Tensor, ...]:
    return (Tensor(name="logits", shape=(count,), dtype="float32", meaning=meaning),)


def _resnet(folder: Path, run: Run, weights: str | None) -> Source:
    shape, dtype, classes = run.facts.image_shape, run.facts.pixel_dtype, run.facts.class_names
    height, width, channels = shape
    colours = "gray" if channels == 1 else "RGB" if channels == 3 else f"{channels} channels"
    rounding = {} if dtype == "uint8" else {"rounded_to": dtype}
    return Source(
        workload="resnet",
        spec=run.spec,
        arrays=run.arrays,
        input=Tensor(
            name="images",
            shape=shape,
            dtype="uint8",
            meaning=f"{colours} pixels from 0 to 255, resized to {width}x{height} with Pillow's bilinear filter",
        ),
        outputs=_logits(len(classes), "logits of the classes; softmax makes probabilities of them"),
        preprocessing={"operation": "pixels / 255", "scale": 1 / 255, **rounding},
        labels={"classes": classes},
        made=_made(run.manifest),
    )


def _tabular(folder: Path, run: Run, weights: str | None) -> Source:
    spec, columns = run.spec, run.facts
    treatment = "; NaN becomes the mean" if columns.missing == "mean" else ""
    return Source(
        workload="tabular",
        spec=spec,
        arrays=run.arrays,
        input=Tensor(
            name="features",
            shape=(spec.inputs,),
            dtype="float64",
            meaning=f"the numbers of the file's columns, in the order of the training data{treatment}",
        ),
        outputs=_logits(spec.outputs, "logits of the classes; softmax makes probabilities of them"),
        preprocessing={
            "operation": "(features - mean) / scale in float64, then float32",
            "mean": columns.mean.tolist(),
            "scale": columns.scale.tolist(),
            "missing": columns.missing,
        },
        labels={"classes": columns.classes, "columns": columns.names},
        made=_made(run.manifest),
    )


def _solar(folder: Path, run: Run, weights: str | None) -> Source:
    facts = run.facts
    look, places = facts.look, facts.places if facts.look == "map" else ()
    if look == "map":
        meaning = "one reading of each station at the same moment, in the order of `stations`"
    else:
        meaning = f"consecutive readings of station {facts.station}, {facts.step_s} s apart, the oldest first"
    return Source(
        workload="solar",
        spec=run.spec,
        arrays=run.arrays,
        input=Tensor(name="readings", shape=(run.readings,), dtype="float32", meaning=f"W/m2, {meaning}"),
        outputs=(
            Tensor(
                name="forecast",
                shape=(1,),
                dtype="float32",
                meaning=f"W/m2 at station {facts.station}, {facts.ahead * facts.step_s} s after the last reading",
            ),
        ),
        preprocessing={
            "operation": "(readings - mean) / deviation; forecast = output * deviation + mean",
            "mean": facts.mean_w_m2,
            "deviation": facts.deviation_w_m2,
            "look": look,
            **({"places": places} if places else {}),
        },
        labels={"stations": facts.stations if places else [facts.station]},
        made=_made(run.manifest),
    )


def _captioning(folder: Path, run: Run, weights: str | None) -> Source:
    if run.spec.encoder == "none":
        message = f"{folder}: its model uses no images (--encoder none)"
        raise Failure(f"{message}; hint: export a run with another encoder", exits.BAD_CONFIG)
    preprocessing: dict[str, Any] = {"operation": "pixels / 255", "scale": 1 / 255}
    arrays = dict(run.arrays)
    if run.spec.encoder == "vgg16":
        encoder, name = features.encoder_arrays(runs.encoder_weights(run, weights))
        arrays |= {f"encoder.{array_name}": array for array_name, array in encoder.items()}
        numbers = dataclasses.asdict(vgg16.PREPROCESSING[name])
        preprocessing = {"operation": "pixels * scale + shift; reverse: BGR instead of RGB", "name": name, **numbers}
    height, width, _ = run.image_shape
    return Source(
        workload="captioning",
        spec=run.spec,
        arrays=arrays,
        input=Tensor(
            name="images",
            shape=run.image_shape,
            dtype="uint8",
            meaning=f"RGB pixels from 0 to 255, resized to {width}x{height} with Pillow's bilinear filter",
        ),
        outputs=(
            Tensor(
                name="words",
                shape=(WORDS_LIMIT,),
                dtype="int64",
                meaning=f"greedy caption as numbers into `vocabulary`, up to {END} (end); {PAD} after it",
            ),
            Tensor(
                name="logits",
                shape=(WORDS_LIMIT, run.spec.vocabulary),
                dtype="float32",
                meaning="logits of each word given the words before it",
            ),
        ),
        preprocessing=preprocessing,
        labels={
            "vocabulary": run.facts.words,
            "special_words": {"padding": PAD, "start": START, "end": END, "never_written": list(UNWRITTEN)},
        },
        made=_made(run.manifest),
    )


SOURCES = {"resnet": _resnet, "tabular": _tabular, "solar": _solar, "captioning": _captioning}
"""Function that describes the run of each workload"""
