"""Load the trained model of a captioning run, on the CPU, in either framework.

The manifest contains the model's sizes and the frozen encoder's weights (path and digest), vocabulary.json the words,
and the best checkpoint the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.captions import features, generation
from hvdtrain.captions.vocabulary import Vocabulary
from hvdtrain.models import captioner, network
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure
from hvdtrain.training import trained

TRAINED_BY = "captioning"
WORDS_BYTES = 64 * files.MIB
FEATURES_BATCH = 16
"""Batch size of VGG16"""

Pixels = NDArray[np.uint8]
Encode = Callable[[Pixels], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run's trained model."""

    config: dict[str, Any]
    spec: captioner.CaptionerSpec
    encoder: str | None
    """Digest of the frozen encoder's weights; None for an encoder that is part of the checkpoint"""
    vocabulary: Vocabulary
    parameters: Arrays

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, 3) of the training images."""
        width, height = self.spec.image_size
        return height, width, 3


def open_run(folder: Path) -> Trained:
    """The trained model in a run folder. Raises Failure (65, 74, 77) for any other folder."""
    manifest, parameters = trained.opened(folder, TRAINED_BY)
    spec = trained.spec(folder, manifest, captioner.CaptionerSpec)
    words = folder / "vocabulary.json"
    try:
        vocabulary = Vocabulary.from_json(files.from_json(files.read(words, WORDS_BYTES)), words)
    except OSError as error:
        raise files.refused(words, error, exits.BAD_DATA, "the run folder is incomplete") from None
    except ValueError as error:
        raise Failure(f"{words} is not JSON ({error})", exits.BAD_DATA) from None
    trained.check_shapes(folder, parameters, captioner.parameters(spec), len(vocabulary) == spec.vocabulary)
    return Trained(
        config=manifest.config,
        spec=spec,
        encoder=manifest.model.get("encoder"),
        vocabulary=vocabulary,
        parameters=parameters,
    )


def model(run: Trained, framework: str, weights: str | None) -> tuple[generation.Writer, Encode]:
    """The trained model on the CPU, and the function that computes its inputs from images (N, height, width, 3)
    uint8."""
    trained.begin(framework)
    writer = network("captioner.Captioner", framework, run.spec)
    trained.fill(writer, run.parameters, framework)
    return writer, (vgg16(run, framework, weights) if run.spec.encoder == "vgg16" else lambda images: images)


def encoder_weights(run: Trained, weights: str | None) -> str:
    """The file with the frozen encoder's weights: `weights`, or the file that the run used. Raises Failure (65) for
    other weights."""
    path = str(weights or run.config["weights"])
    if features.digest(path, run.spec.image_size) != run.encoder:
        message = f"{path} does not contain the weights that the run was trained with"
        raise Failure(f"{message}; hint: give their file with --weights", exits.BAD_DATA)
    return path


def vgg16(run: Trained, framework: str, weights: str | None) -> Encode:
    """The frozen encoder that the model was trained with. Raises Failure (65) for other weights."""
    encoder = features.encoder(encoder_weights(run, weights), framework)

    def encode(images: Pixels) -> NDArray[Any]:
        parts = range(0, len(images), FEATURES_BATCH)
        return np.concatenate([encoder(images[start : start + FEATURES_BATCH]) for start in parts])

    return encode
