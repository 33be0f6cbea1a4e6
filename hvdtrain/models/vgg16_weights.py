"""Import published weights of VGG16: `hvdtrain data vgg16 WEIGHTS DST`.

**Input** (recognized by content, not by name):
  torchvision   its state dict, a file of `torch.save`; or safetensors with the same names
  Keras         safetensors with the arrays of `keras.applications.VGG16` under their paths in the model, such as
                `block1_conv1/kernel`; Keras 2 appended `:0`

**Output**: safetensors with torchvision's names and shapes, float32, without the last layer. Its metadata contains the
preprocessing of the training and a digest of the arrays, which does not depend on the kind of source.

Keras flattens images with channels last and torchvision with channels first, so the inputs of the first linear layer
are reordered. Both kinds of weights expect their own preprocessing (see `vgg16.PREPROCESSING`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.making import check_destination
from hvdtrain.models.layers import Arrays
from hvdtrain.models.vgg16 import LAYERS, LINEAR, POOL, PREPROCESSING, STAGES, parameters
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, IO_ERROR, Failure

SCHEMA = "hvdtrain.vgg16/1"
SUMMARY = "hvdtrain.data.vgg16/1"
MOST_BYTES = 2 * 10**9  # limit for weights; VGG16 in float64 has 1.1
HEAD_BYTES = 2**20  # larger than any header written here
CONVOLUTIONS = tuple(name for name in LAYERS if name != POOL)
KERAS_LAYERS = {
    **dict(
        zip((f"block{i + 1}_conv{j + 1}" for i in range(5) for j in range(STAGES[i][1])), CONVOLUTIONS, strict=True)
    ),
    **dict(zip(("fc1", "fc2"), LINEAR, strict=True)),
}
KERAS_NAME = re.compile(r"(block\d_conv\d|fc\d|predictions)/(kernel|bias)(?::0)?$")
IGNORED = ("classifier.6.", "predictions")  # the last layer
FROM_KERAS = (
    "import keras; from safetensors.numpy import save_file; model = keras.applications.VGG16(weights={path!r});"
    " save_file({{w.path: w.numpy() for w in model.weights}}, 'vgg16.safetensors')"
)


@dataclass(frozen=True, kw_only=True)
class Vgg16Config:
    """Options of `hvdtrain data vgg16`."""

    source: str
    """File with published weights: torchvision's .pth, or torchvision's or Keras' arrays as .safetensors."""
    destination: str
    """File to create, for example vgg16.safetensors; must not exist."""
    dry_run: bool = False
    """Only read and check the source."""


# --- 1. import --------------------------------------------------------------------------------------------------------


def import_weights(config: Vgg16Config) -> dict[str, Any]:
    """Imports the weights and returns a summary fit for JSON.

    Raises Failure: BAD_DATA for a missing, foreign, damaged or incomplete source, CANNOT_WRITE or IO_ERROR if the
    destination exists or cannot be written.
    """
    check_destination(config.source, config.destination)
    source, destination = Path(config.source), Path(config.destination).absolute()
    try:
        with files.open_plain(source) as file:
            if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
                raise Failure(f"{source}: {size / 1e9:.1f} GB, more than the weights of VGG16", BAD_DATA)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        arrays, preprocessing = convert(_read(source), source)
    except OSError as error:
        raise files.refused(source, error, BAD_DATA, "give a file of published weights") from None
    about = {
        "schema": SCHEMA,
        "preprocessing": preprocessing,
        "digest": _digest(arrays, preprocessing),
        "source": source.name,
        "source_sha256": sha256,
    }
    if not config.dry_run:
        _write(destination, arrays, about)
    values = sum(array.size for array in arrays.values())
    return {
        **about,
        "schema": SUMMARY,
        "destination": str(destination),
        "arrays": len(arrays),
        "values": values,
        "dry_run": config.dry_run,
    }


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays in a file of any supported format. Raises Failure (BAD_DATA) for any other file."""
    with path.open("rb") as file:
        head = file.read(9)
    if head.startswith(b"\x89HDF"):
        command = FROM_KERAS.format(path=str(path))
        raise Failure(f'{path} is HDF5; hint: where Keras is installed, run `python -c "{command}"`', BAD_DATA)
    try:
        if head[8:9] == b"{":
            return _safetensors(path)
    except ValueError as error:
        raise Failure(f"{path} is damaged ({error}); hint: download it again", BAD_DATA) from None
    if not head.startswith((b"PK", b"\x80")):  # torch.save writes a zip of tensors, or a plain pickle for torchvision
        raise Failure(f"{path} is not a file of torch.save or safetensors", BAD_DATA)
    try:
        from hvdtrain.models.vgg16_torch import read_state_dict
    except ImportError:
        hint = "`pip install torch`, or give safetensors"
        raise Failure(f"{path} is a file of torch.save, which needs PyTorch; hint: {hint}", BAD_DATA) from None
    return read_state_dict(path)


def _safetensors(path: Path) -> Arrays:
    """The arrays of a safetensors file. Raises ValueError, also for types that NumPy does not have (BF16)."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (SafetensorError, TypeError, KeyError) as error:
        raise ValueError(error) from None


# --- 2. convert published names and shapes ----------------------------------------------------------------------------


def convert(published: Mapping[str, NDArray[Any]], source: Path) -> tuple[Arrays, str]:
    """Arrays with torchvision's names and shapes, and the name of their preprocessing.

    Raises Failure (BAD_DATA), naming `source` and the array, for one that is missing, unknown, of the wrong shape or
    not finite.
    """
    keras = any(KERAS_NAME.search(name) for name in published)
    arrays = _from_keras(published) if keras else {n: a for n, a in published.items() if not n.startswith(IGNORED)}
    shapes = parameters()
    missing = [name for name in shapes if name not in arrays]
    if missing and all(name.startswith("classifier.") for name in missing):
        message = f"{source} does not contain the fully connected layers ('notop')"
        raise Failure(f"{message}; hint: get the file with the top", BAD_DATA)
    unknown = [name for name in arrays if name not in shapes]
    if missing or unknown:
        what = f"{missing[0]} is missing" if missing else f"{unknown[0]} is unknown"
        raise Failure(f"{source} is not VGG16 without batch normalization: {what}", BAD_DATA)
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise Failure(f"{source}: {name} has shape {arrays[name].shape}, not {shape}", BAD_DATA)
        arrays[name] = np.ascontiguousarray(arrays[name], np.float32)
        if not np.isfinite(arrays[name]).all():
            hint = "get weights that were trained with the top"
            raise Failure(f"{source}: {name} contains infinite values or NaN; hint: {hint}", BAD_DATA)
    return {name: arrays[name] for name in shapes}, "caffe" if keras else "torchvision"


def _from_keras(published: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Keras' arrays with torchvision's names and layout; unknown arrays keep their names."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, array in published.items():
        match = KERAS_NAME.search(name)
        if match is None or match[1] not in KERAS_LAYERS:
            if match is None or match[1] not in IGNORED:
                arrays[name] = array
            continue
        layer = KERAS_LAYERS[match[1]]
        leaf = "bias" if match[2] == "bias" else "weight"
        if array.ndim == 4:
            array = array.transpose(3, 2, 0, 1)
        elif array.ndim == 2:
            array = (_channels_first(array) if layer == LINEAR[0] else array).T
        arrays[f"{layer}.{leaf}"] = array
    return arrays


def _channels_first(matrix: NDArray[Any]) -> NDArray[Any]:
    """Reorders the rows from images flattened as (height, width, channels) to (channels, height, width)."""
    channels, positions = STAGES[-1][0], matrix.shape[0] // STAGES[-1][0]
    if matrix.shape[0] != channels * positions:
        return matrix  # its wrong shape is reported later
    return matrix.reshape(positions, channels, -1).transpose(1, 0, 2).reshape(matrix.shape)


# --- 3. hvdtrain's file -----------------------------------------------------------------------------------------------


def _write(destination: Path, arrays: Arrays, about: dict[str, str]) -> None:
    """Writes the complete file, or none. Raises Failure (CANNOT_WRITE, IO_ERROR)."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    unfinished = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.unfinished")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        save_file(arrays, unfinished, about)
        files.sync(unfinished)
        unfinished.rename(destination)
    except OSError as error:
        raise files.unwritable(destination, error, "choose another destination") from None
    except SafetensorError as error:
        raise Failure(f"{destination}: {error}; hint: free some space", IO_ERROR) from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def read_head(path: str | Path) -> dict[str, str]:
    """The metadata of a file made by `import_weights`, without reading its arrays: preprocessing, digest, source.

    This is enough to look up cached features. Raises Failure (BAD_DATA) for any other file.
    """
    path = Path(path)
    hint = "import published weights with `hvdtrain data vgg16`"
    try:
        with files.open_plain(path) as file:
            length = int.from_bytes(file.read(8), "little")
            about = files.from_json(file.read(length))["__metadata__"] if length <= HEAD_BYTES else {}
    except OSError as error:
        raise files.refused(path, error, BAD_DATA, hint) from None
    except (ValueError, KeyError, TypeError):
        about = {}
    if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
        about = {}
    if about.get("schema") != SCHEMA or about.get("preprocessing") not in PREPROCESSING:
        raise Failure(f"{path} was not made by this version of `hvdtrain data vgg16`; hint: {hint}", BAD_DATA)
    return about


def open_weights(path: str | Path) -> tuple[Arrays, str, str]:
    """(arrays, name of their preprocessing, digest) of a file made by `import_weights`, fully verified.

    Raises Failure (BAD_DATA) for a missing, foreign or damaged file.
    """
    about = read_head(path)
    preprocessing = about["preprocessing"]
    try:
        arrays = _safetensors(Path(path))
        digest = _digest(arrays, preprocessing)
    except (OSError, ValueError) as error:
        raise Failure(f"{path} is damaged ({error}); hint: import or copy it again", BAD_DATA) from None
    if digest != about.get("digest"):
        message = f"{path} is damaged (its digest differs from its metadata)"
        raise Failure(f"{message}; hint: import or copy it again", BAD_DATA)
    return arrays, preprocessing, digest


def _digest(arrays: Arrays, preprocessing: str) -> str:
    """SHA-256 of everything that features depend on. Raises ValueError for BF16, which some packages add to NumPy."""
    sha256 = hashlib.sha256(f"{SCHEMA} {preprocessing}".encode())
    for name in sorted(arrays):
        array = arrays[name]
        sha256.update(f" {name} {array.dtype} {array.shape} ".encode())
        sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()
