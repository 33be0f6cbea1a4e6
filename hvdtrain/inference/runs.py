"""The trained model of a run of each workload, with the documents that say what its inputs and outputs mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdtrain import models, records
from hvdtrain.captions import features
from hvdtrain.captions.vocabulary import Vocabulary
from hvdtrain.data import MAX_PIXELS, tabular
from hvdtrain.data.solar import SIDE
from hvdtrain.inference import trained
from hvdtrain.models import captioner, mlp, resnet, solar
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure

WORDS_BYTES = 64 * files.MIB
FEATURES_BATCH = 16
"""Batch size of VGG16"""

Side = Annotated[int, msgspec.Meta(ge=1, le=MAX_PIXELS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
Degrees = Annotated[float, msgspec.Meta(ge=-360, le=360)]


class ImageFacts(msgspec.Struct, frozen=True):
    """What a manifest says about the images of its run."""

    class_names: tuple[str, ...]
    image_shape: tuple[Side, Side, Side]
    """(height, width, channels)"""
    pixel_dtype: Literal["uint8", "float16", "float32"]
    """Type in which the data set stored pixels: see `pixels.scaled`"""

    def __post_init__(self) -> None:
        if math.prod(self.image_shape[:2]) > MAX_PIXELS:
            raise ValueError(f"image_shape {self.image_shape} has more than {MAX_PIXELS:,} pixels")


class ReadingFacts(msgspec.Struct, frozen=True):
    """What a manifest says about the readings of its run."""

    look: Literal["window", "stack", "map"]
    ahead: Count
    step_s: Count
    station: str
    mean_w_m2: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
    deviation_w_m2: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    stations: tuple[str, ...] = ()
    places: Annotated[tuple[tuple[Degrees, Degrees], ...], msgspec.Meta(max_length=1000)] = ()

    def __post_init__(self) -> None:
        if self.look == "map" and not 0 < len(self.places) == len(self.stations):
            raise ValueError(f"{len(self.stations)} stations at {len(self.places)} places")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's trained model."""

    manifest: records.Manifest
    spec: Any
    """Sizes of the model, such as `resnet.ResNetSpec`"""
    arrays: Arrays
    """Parameters and running statistics, with PyTorch's names and shapes"""
    facts: Any
    """By workload: ImageFacts, `tabular.Columns`, ReadingFacts or a Vocabulary"""

    def model(self, framework: str) -> Any:
        """The model on the CPU, in evaluation mode."""
        name, options = NETWORKS[type(self.spec), self.manifest.workload]
        trained.begin(framework)
        model = models.network(name, framework, self.spec, **options)
        trained.fill(model, self.arrays, framework)
        return model.eval() if framework == "torch" else model

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of the training images of a classifier or a captioner."""
        if isinstance(self.facts, ImageFacts):
            return self.facts.image_shape
        width, height = self.spec.image_size
        return height, width, 3

    @property
    def readings(self) -> int:
        """The readings in one input of a forecaster."""
        return {"window": getattr(self.spec, "inputs", 0), "stack": 2 * SIDE - 1, "map": len(self.facts.places)}[
            self.facts.look
        ]


NETWORKS: Mapping[tuple[type, str], tuple[str, dict[str, str]]] = {
    (resnet.ResNetSpec, "resnet"): ("resnet.ResNet", {}),
    (mlp.MLPSpec, "tabular"): ("mlp.MLP", {"loss": "cross_entropy"}),
    (mlp.MLPSpec, "solar"): ("mlp.MLP", {"loss": "forecast_error"}),
    (solar.CNNSpec, "solar"): ("solar.CNN", {}),
    (captioner.CaptionerSpec, "captioning"): ("captioner.Captioner", {}),
}
"""Name and options of each model, for `models.network`"""


# --- one function for each workload -----------------------------------------------------------------------------------


def open_run(folder: Path) -> Run:
    """The model of a run of any workload. Raises Failure: 65 for a damaged or incomplete run, 78 for a model of another
    program."""
    manifest = trained.read_manifest(folder)
    if manifest.workload not in OPENERS:
        message = f"{folder} is a run of {manifest.workload!r:.80}, whose model hvdtrain does not know"
        hint = "export it from your own script, for example with torch.export"
        raise Failure(f"{message}; hint: {hint}", exits.BAD_CONFIG)
    return OPENERS[manifest.workload](folder, manifest)


def _images(folder: Path, manifest: records.Manifest) -> Run:
    spec = trained.spec(folder, manifest, resnet.ResNetSpec)
    facts = trained.facts(folder, manifest.data, ImageFacts)
    fits = (facts.image_shape[2], len(facts.class_names)) == (spec.channels, spec.classes)
    shapes = resnet.parameters(spec) | resnet.buffers(spec)
    return _checked(folder, manifest, spec, facts, shapes, fits, statistics=True)


def _table(folder: Path, manifest: records.Manifest) -> Run:
    spec = trained.spec(folder, manifest, mlp.MLPSpec)
    path = folder / tabular.COLUMNS_FILE
    try:
        columns = tabular.Columns.from_json(_document(path, tabular.INDEX_BYTES))
    except ValueError as error:
        raise Failure(f"{path} does not describe columns ({error})", exits.BAD_DATA) from None
    fits = (spec.inputs, spec.outputs) == (len(columns.mean), len(columns.classes))
    return _checked(folder, manifest, spec, columns, mlp.parameters(spec), fits)


def _readings(folder: Path, manifest: records.Manifest) -> Run:
    facts = trained.facts(folder, manifest.data | {"ahead": manifest.config.get("ahead")}, ReadingFacts)
    kind: Any = mlp if facts.look == "window" else solar
    spec = trained.spec(folder, manifest, mlp.MLPSpec if facts.look == "window" else solar.CNNSpec)
    fits = facts.look == "window" or spec.side == SIDE
    return _checked(folder, manifest, spec, facts, kind.parameters(spec), fits)


def _captions(folder: Path, manifest: records.Manifest) -> Run:
    spec, path = trained.spec(folder, manifest, captioner.CaptionerSpec), folder / "vocabulary.json"
    try:
        vocabulary = Vocabulary.from_json(_document(path, WORDS_BYTES), path)
    except ValueError as error:
        raise Failure(f"{path} is not JSON ({error})", exits.BAD_DATA) from None
    return _checked(folder, manifest, spec, vocabulary, captioner.parameters(spec), len(vocabulary) == spec.vocabulary)


OPENERS: Mapping[str, Callable[[Path, records.Manifest], Run]] = {
    "resnet": _images,
    "tabular": _table,
    "solar": _readings,
    "captioning": _captions,
}


def _checked(
    folder: Path,
    manifest: records.Manifest,
    spec: Any,
    facts: Any,
    shapes: Mapping[str, tuple[int, ...]],
    fits: bool,
    *,
    statistics: bool = False,
) -> Run:
    """The run with the arrays of its best checkpoint. Raises Failure (65) if they do not have these shapes, or the
    documents do not fit each other."""
    arrays = trained.best_arrays(folder / "checkpoints", statistics=statistics)
    if {name: array.shape for name, array in arrays.items()} != shapes or not fits:
        message = "the documents of the run and its checkpoint do not belong to the same model"
        raise Failure(f"{folder}: {message}; hint: copy the whole run folder again", exits.BAD_DATA)
    return Run(manifest=manifest, spec=spec, arrays=arrays, facts=facts)


def _document(path: Path, most_bytes: int) -> Any:
    """A JSON file of a run. Raises Failure (65), and ValueError if it is not JSON."""
    try:
        return files.from_json(files.read(path, most_bytes))
    except OSError as error:
        raise files.refused(path, error, exits.BAD_DATA, "the run folder is incomplete") from None


# --- the frozen encoder of a captioner --------------------------------------------------------------------------------


def encoder_weights(run: Run, weights: str | None) -> str:
    """The file with the frozen encoder's weights: `weights`, or the file that the run used. Raises Failure (65) for
    other weights."""
    path = str(weights or run.manifest.config["weights"])
    if features.digest(path, run.spec.image_size) != run.manifest.model.get("encoder"):
        message = f"{path} does not contain the weights that the run was trained with"
        raise Failure(f"{message}; hint: give their file with --weights", exits.BAD_DATA)
    return path


def encoder(run: Run, framework: str, weights: str | None) -> Callable[[NDArray[np.uint8]], NDArray[Any]]:
    """The function that computes a captioner's inputs from images (N, height, width, 3). Raises Failure (65) for
    weights other than those of the training."""
    if run.spec.encoder != "vgg16":
        return lambda images: images
    encode = features.encoder(encoder_weights(run, weights), framework)

    def encoded(images: NDArray[np.uint8]) -> NDArray[Any]:
        parts = range(0, len(images), FEATURES_BATCH)
        return np.concatenate([encode(images[start : start + FEATURES_BATCH]) for start in parts])

    return encoded
