"""Opens the model that a run has trained: of any workload, in either framework whichever trained it, on the CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hvdtrain import checkpoint, exits, records, threads, world
from hvdtrain.arrays_file import Arrays
from hvdtrain.exits import Failure


def opened(folder: Path, workload: str) -> tuple[records.Manifest, Arrays]:
    """The manifest and the best checkpoint's parameters of a run's folder. Raises Failure (65, 74, 77) for anything but
    a run of this workload."""
    if not folder.is_dir():
        raise Failure(f"--run {folder}: no such folder; give one that hvdtrain.{workload} made", exits.BAD_DATA)
    path = folder / "manifest.json"
    manifest = records.read_document(path)
    if not isinstance(manifest, records.Manifest) or manifest.workload != workload:
        raise Failure(f"{path}: no manifest of a run of hvdtrain.{workload}", exits.BAD_DATA)
    return manifest, checkpoint.trained_parameters(folder / "checkpoints")


def spec(folder: Path, manifest: records.Manifest, cls: type) -> Any:
    """The model's sizes, as an instance of `cls`. Raises Failure (65) for those of another version."""
    try:
        return cls(**manifest.model["spec"])
    except (KeyError, TypeError) as error:
        told = f"its model is not of this version ({error})"
        raise Failure(f"{folder / 'manifest.json'}: {told}", exits.BAD_DATA) from None


def begin(framework: str) -> None:
    """Loads the framework, with the threads that this host allows."""
    used = threads.per_rank(0, world.place(), math.inf)
    used.use()
    if framework == "torch":
        from hvdtrain.frameworks.pytorch import prepare
    else:
        from hvdtrain.frameworks.tensorflow import prepare
    prepare("cpu", 0, used.count)


def fill(model: Any, parameters: Arrays, framework: str) -> None:
    """Gives the model its trained parameters."""
    if framework == "torch":
        for name, array in parameters.items():
            model.get_parameter(name).detach().numpy()[...] = array  # the parameter's own memory
    else:
        from hvdtrain.frameworks.tensorflow import turned

        for name, array in parameters.items():
            model.weights[name].assign(turned(array))
