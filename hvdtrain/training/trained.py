"""Load the model that a run has trained, of any workload, on the CPU. Either framework loads models of both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import checkpoint_files, threads
from hvdtrain.training.framework import prepare


def opened(folder: Path, workload: str) -> tuple[records.Manifest, Arrays]:
    """The manifest and the best checkpoint's parameters of a run folder. Raises Failure (65, 74, 77) if it is not the
    folder of a run of this workload."""
    if not folder.is_dir():
        raise Failure(f"--run {folder} does not exist; hint: give a folder made by hvdtrain.{workload}", exits.BAD_DATA)
    path = folder / "manifest.json"
    manifest = records.read_document(path, records.Manifest)
    if manifest.workload != workload:
        raise Failure(f"{path} is not the manifest of a run of hvdtrain.{workload}", exits.BAD_DATA)
    return manifest, best_parameters(folder / "checkpoints")


def best_parameters(folder: Path) -> Arrays:
    """The parameters, by name, of the best checkpoint in a `checkpoints` folder, or of the newest if none is the best.

    With --ema they are the averaged weights. One process reads them, whatever number of ranks saved them. Raises
    Failure (65) if no checkpoint is valid.
    """
    candidates: list[tuple[bool, Path, dict[str, Any]]] = []
    reasons = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            manifest = checkpoint_files.read_manifest(path)
            candidates.append((not manifest["best"], path, manifest))
        except (ValueError, OSError) as error:
            reasons.append(f"{path.name}: {checkpoint_files.reason(error)}")
    for _, path, manifest in sorted(candidates, key=lambda candidate: candidate[0]):
        try:
            arrays = checkpoint_files.common(path, manifest)
            prefix = "average." if any(name.startswith("average.") for name in arrays) else "parameter."
            return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        except (ValueError, OSError, KeyError) as error:
            reasons.append(f"{path.name}: {checkpoint_files.reason(error)}")
    why = f": {'; '.join(reasons)}" if reasons else ", or the run saved none (--checkpoint-epochs 0)"
    raise Failure(f"{folder} contains no valid checkpoint{why}", exits.BAD_DATA)


def spec(folder: Path, manifest: records.Manifest, cls: type) -> Any:
    """The model's sizes, as an instance of `cls`. Raises Failure (65) if another version of hvdtrain wrote them."""
    try:
        return cls(**manifest.model["spec"])
    except (KeyError, TypeError) as error:
        message = f"its model was saved by another version ({error})"
        raise Failure(f"{folder / 'manifest.json'}: {message}", exits.BAD_DATA) from None


def begin(framework: str) -> None:
    """Imports the framework, with the number of threads that this host allows."""
    used = threads.per_rank(0, launch_env(), math.inf)
    prepare(framework, used)


def fill(model: Any, parameters: Arrays, framework: str) -> None:
    """Copies trained parameters into the model."""
    if framework == "torch":
        for name, array in parameters.items():
            model.get_parameter(name).detach().numpy()[...] = array  # writes into the parameter's memory
    else:
        from hvdtrain.models.layers_tf import to_tensorflow

        for name, array in parameters.items():
            model.weights[name].assign(to_tensorflow(array))
