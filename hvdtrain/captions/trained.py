"""Opens the trained model of a captioning run's folder, on the CPU.

The folder's manifest holds the model's sizes, vocabulary.json the words, the best checkpoint the parameters. Either
framework can load them, whichever trained them. Only the weights of a frozen encoder are elsewhere; the manifest names
their file and its digest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.captions import frozen, generation
from hvdtrain.captions.vocabulary import Vocabulary
from hvdtrain.models import captioner
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure
from hvdtrain.training import trained

TRAINED_BY = "captioning"
WORDS_BYTES = 64 * files.MIB
FEATURES_BATCH = 16
"""Pictures that VGG16 sees together"""

Pixels = NDArray[np.uint8]
Encode = Callable[[Pixels], NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run's trained model."""

    config: dict[str, Any]
    spec: captioner.CaptionerSpec
    encoder: str | None
    """Digest of the frozen encoder's weights, None for an encoder that the checkpoint holds"""
    vocabulary: Vocabulary
    parameters: Arrays

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, 3) of the pictures it was trained on."""
        width, height = self.spec.image_size
        return height, width, 3


def open_run(folder: Path) -> Trained:
    """The trained model of a run's folder. Raises Failure (65, 74, 77) for anything else."""
    manifest, parameters = trained.opened(folder, TRAINED_BY)
    spec = trained.spec(folder, manifest, captioner.CaptionerSpec)
    words = folder / "vocabulary.json"
    try:
        vocabulary = Vocabulary.from_json(files.from_json(files.read(words, WORDS_BYTES)), words)
    except OSError as error:
        raise files.refused(words, error, exits.BAD_DATA, "the run's folder is not whole") from None
    except ValueError as error:
        raise Failure(f"{words}: no JSON ({error})", exits.BAD_DATA) from None
    found = {name: array.shape for name, array in parameters.items()}
    if found != captioner.parameters(spec) or len(vocabulary) != spec.vocabulary:
        raise Failure(f"{folder}: manifest, vocabulary and checkpoint are not of one model", exits.BAD_DATA)
    return Trained(
        config=manifest.config,
        spec=spec,
        encoder=manifest.model.get("encoder"),
        vocabulary=vocabulary,
        parameters=parameters,
    )


def model(run: Trained, framework: str, weights: str | None) -> tuple[generation.Writer, Encode]:
    """The trained model on the CPU, and the function that makes its inputs of pictures (N, height, width, 3) uint8."""
    trained.begin(framework)
    writer: Any
    if framework == "torch":
        from hvdtrain.models.captioner_torch import CaptionerTorch

        writer = CaptionerTorch(run.spec)
    else:
        from hvdtrain.models.captioner_tf import CaptionerTF

        writer = CaptionerTF(run.spec)
    trained.fill(writer, run.parameters, framework)
    return writer, (vgg16(run, framework, weights) if run.spec.encoder == "vgg16" else lambda seen: seen)


def vgg16(run: Trained, framework: str, weights: str | None) -> Encode:
    """The frozen encoder whose features the model was trained on. Raises Failure (65) for other weights."""
    path = weights or run.config["weights"]
    if frozen.digest(path, run.spec.image_size) != run.encoder:
        raise Failure(f"{path}: not the weights that the run was trained with; name those by --weights", exits.BAD_DATA)
    network = frozen.encoder(path, framework)

    def encode(seen: Pixels) -> NDArray[Any]:
        parts = range(0, len(seen), FEATURES_BATCH)
        return np.concatenate([network(seen[start : start + FEATURES_BATCH]) for start in parts])

    return encode
