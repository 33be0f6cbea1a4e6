"""Opens the model that a run has trained: of any workload, in either framework whichever trained it, on the CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import checkpoint, threads


def opened(folder: Path, workload: str) -> tuple[records.Manifest, Arrays]:
    """The manifest and the best checkpoint's parameters of a run's folder. Raises Failure (65, 74, 77) for anything but
    a run of this workload."""
    if not folder.is_dir():
        raise Failure(f"--run {folder}: no such folder; give one that hvdtrain.{workload} made", exits.BAD_DATA)
    path = folder / "manifest.json"
    manifest = records.read_document(path, records.Manifest)
    if manifest.workload != workload:
        raise Failure(f"{path}: no manifest of a run of hvdtrain.{workload}", exits.BAD_DATA)
    return manifest, best_parameters(folder / "checkpoints")


def best_parameters(folder: Path) -> Arrays:
    """What a run has learnt: the parameters, by name, of the best of its `checkpoints` folder, or of the newest if
    none was saved as best. Read by one process, whatever ranks saved them. Raises Failure (65): none is valid.
    """
    candidates: list[tuple[bool, Path, dict[str, Any]]] = []
    reasons = []
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            manifest = checkpoint.read_manifest(path)
            candidates.append((not manifest["best"], path, manifest))
        except (ValueError, OSError) as error:
            reasons.append(f"{path.name}: {checkpoint.why(error)}")
    for _, path, manifest in sorted(candidates, key=lambda candidate: candidate[0]):
        try:
            arrays, prefix = checkpoint.common(path, manifest), "parameter."
            return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        except (ValueError, OSError, KeyError) as error:
            reasons.append(f"{path.name}: {checkpoint.why(error)}")
    told = f": {'; '.join(reasons)}" if reasons else ", or the run saved none (--checkpoint-epochs 0)"
    raise Failure(f"{folder}: no valid checkpoint there{told}", exits.BAD_DATA)


def spec(folder: Path, manifest: records.Manifest, cls: type) -> Any:
    """The model's sizes, as an instance of `cls`. Raises Failure (65) for those of another version."""
    try:
        return cls(**manifest.model["spec"])
    except (KeyError, TypeError) as error:
        told = f"its model is not of this version ({error})"
        raise Failure(f"{folder / 'manifest.json'}: {told}", exits.BAD_DATA) from None


def begin(framework: str) -> None:
    """Loads the framework, with the threads that this host allows."""
    used = threads.per_rank(0, launch_env(), math.inf)
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
        from hvdtrain.models.layers_tf import turned

        for name, array in parameters.items():
            model.weights[name].assign(turned(array))
