"""Load the model that a run has trained, of any workload, on the CPU. Either framework loads models of both."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from hvdtrain import records
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.records import arrays_file
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import checkpoint_files, threads
from hvdtrain.training.framework import prepare

T = TypeVar("T")


def read_manifest(folder: Path) -> records.Manifest:
    """The manifest of a run folder of any workload. Raises Failure (65, 74, 77) if it is not a run folder."""
    if not folder.is_dir():
        raise Failure(f"{folder} does not exist; hint: give the folder of a run", exits.BAD_DATA)
    return records.read_document(folder / "manifest.json", records.Manifest)


def facts(folder: Path, values: Any, cls: type[T]) -> T:
    """A part of the run's manifest, of type `cls`. Raises Failure (65) if a value is missing, of another type or out of
    bounds: another version of hvdtrain may have made the run, and anybody may have made the folder."""
    try:
        return msgspec.convert(values, cls)
    except (ValueError, Failure) as error:
        problem, hint = str(error).partition("; hint:")[0], "copy the run folder again, or train the model again"
        raise Failure(f"{folder / 'manifest.json'}: {problem}; hint: {hint}", exits.BAD_DATA) from None


def best_arrays(folder: Path, *, statistics: bool) -> Arrays:
    """The parameters, by name, of the best checkpoint in a `checkpoints` folder, or of the newest if none is the best.
    With `statistics` also the running statistics, as evaluation uses them.

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
            common = checkpoint_files.common(path, manifest)
            averaged = _of_kind("average.", common)
            arrays = averaged or _of_kind("parameter.", common)
            return arrays | (_statistics(path, manifest) if statistics else {})
        except (ValueError, OSError, KeyError) as error:
            reasons.append(f"{path.name}: {checkpoint_files.reason(error)}")
    why = f": {'; '.join(reasons)}" if reasons else ", or the run saved none (--checkpoint-steps 0)"
    raise Failure(f"{folder} contains no valid checkpoint{why}", exits.BAD_DATA)


def _of_kind(prefix: str, arrays: Arrays) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _statistics(path: Path, manifest: dict[str, Any]) -> Arrays:
    """The mean of the ranks' running statistics in a checkpoint. Raises ValueError or OSError."""
    owned = sorted(name for name in manifest["files"] if not checkpoint_files.COMMON.fullmatch(name))
    here = [name for name in owned if (path / name).exists()]
    if manifest["progress"].get("consumed") == 0:
        # Saved after an evaluation, which gave all ranks of a stage the same statistics. One file of each is enough.
        stages = dict(zip(owned, manifest.get("stages") or [0] * len(owned), strict=False))
        here = list({stages[name]: name for name in reversed(here)}.values())
    elif missing := sorted({*owned} - {*here}):
        raise ValueError(f"{missing[0]} is on another host: only a folder that all hosts share has all statistics")
    kept: dict[str, list[Any]] = {}
    for name in here:
        for array_name, array in _of_kind("buffer.", arrays_file.read(path / name, manifest["files"][name])).items():
            kept.setdefault(array_name, []).append(array)
    return {name: np.mean(arrays, axis=0, dtype=arrays[0].dtype) for name, arrays in kept.items()}


def spec(folder: Path, manifest: records.Manifest, cls: type) -> Any:
    """The model's sizes, as an instance of `cls`. Raises Failure (65) like `facts`."""
    sizes: Any = manifest.model.get("spec")
    made: Any = facts(folder, sizes, cls)
    if unknown := {*sizes} - {field.name for field in dataclasses.fields(cls)}:
        message = f"its model was saved by another version (unknown field {min(unknown)})"
        raise Failure(f"{folder / 'manifest.json'}: {message}", exits.BAD_DATA)
    return made


def begin(framework: str) -> None:
    """Imports the framework, with the number of threads that this host allows."""
    used = threads.per_rank(0, launch_env(), math.inf)
    prepare(framework, used)


def fill(model: Any, parameters: Arrays, framework: str) -> None:
    """Copies trained parameters and running statistics into the model."""
    if framework == "torch":
        state = model.state_dict()
        for name, array in parameters.items():
            state[name].numpy()[...] = array  # writes into the model's memory
    else:
        from hvdtrain.models.layers_tf import to_tensorflow

        state = {**model.weights, **getattr(model, "buffers", {})}
        for name, array in parameters.items():
            state[name].assign(to_tensorflow(array))
