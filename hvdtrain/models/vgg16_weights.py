"""Import published weights of VGG16: `hvdtrain data vgg16 WEIGHTS DST`.

**Input**: torchvision's state dict, a file of `torch.save`.

**Output**: safetensors with torchvision's names and shapes, float32, without the last layer. Its metadata contains a
digest of the arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.making import check_destination
from hvdtrain.models.layers import Arrays
from hvdtrain.models.vgg16 import parameters
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, IO_ERROR, Failure

SCHEMA = "hvdtrain.vgg16/1"
SUMMARY = "hvdtrain.data.vgg16/1"
MOST_BYTES = 2 * 10**9  # limit for weights; VGG16 in float64 has 1.1
HEAD_BYTES = 2**20  # larger than any header written here
IGNORED = "classifier.6."  # the last layer
PREPROCESSING = "torchvision"  # part of the digest; files with other weights (Keras') are refused


@dataclass(frozen=True, kw_only=True)
class Vgg16Config:
    """Options of `hvdtrain data vgg16`."""

    source: str
    """File with torchvision's published weights, such as vgg16-397923af.pth."""
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
        arrays = convert(_read(source), source)
    except OSError as error:
        raise files.refused(source, error, BAD_DATA, "give a file of published weights") from None
    about = {
        "schema": SCHEMA,
        "preprocessing": PREPROCESSING,
        "digest": _digest(arrays),
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
    """The arrays in torchvision's file. Raises Failure (BAD_DATA) for any other file."""
    with path.open("rb") as file:
        head = file.read(2)
    if not head.startswith((b"PK", b"\x80")):  # torch.save writes a zip of tensors, or a plain pickle for torchvision
        raise Failure(f"{path} is not a file of torch.save; hint: get torchvision's vgg16-397923af.pth", BAD_DATA)
    try:
        from hvdtrain.models.vgg16_torch import read_state_dict
    except ImportError:
        raise Failure(f"{path}: reading it needs PyTorch; hint: pip install torch", BAD_DATA) from None
    return read_state_dict(path)


def _safetensors(path: Path) -> Arrays:
    """The arrays of a safetensors file. Raises ValueError, also for types that NumPy does not have (BF16)."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (SafetensorError, TypeError, KeyError) as error:
        raise ValueError(error) from None


def convert(published: Mapping[str, NDArray[Any]], source: Path) -> Arrays:
    """The arrays without the last layer, in order.

    Raises Failure (BAD_DATA), naming `source` and the array, for one that is missing, unknown, of the wrong shape or
    not finite.
    """
    arrays, shapes = {n: a for n, a in published.items() if not n.startswith(IGNORED)}, parameters()
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
    return {name: arrays[name] for name in shapes}


# --- 2. hvdtrain's file -----------------------------------------------------------------------------------------------


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
    """The metadata of a file made by `import_weights`, without reading its arrays: digest, source.

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
    if about.get("schema") != SCHEMA or about.get("preprocessing") != PREPROCESSING:
        raise Failure(f"{path} was not made by this version of `hvdtrain data vgg16`; hint: {hint}", BAD_DATA)
    return about


def open_weights(path: str | Path) -> Arrays:
    """The arrays of a file made by `import_weights`, fully verified.

    Raises Failure (BAD_DATA) for a missing, foreign or damaged file.
    """
    about = read_head(path)
    try:
        arrays = _safetensors(Path(path))
        digest = _digest(arrays)
    except (OSError, ValueError) as error:
        raise Failure(f"{path} is damaged ({error}); hint: import or copy it again", BAD_DATA) from None
    if digest != about.get("digest"):
        message = f"{path} is damaged (its digest differs from its metadata)"
        raise Failure(f"{message}; hint: import or copy it again", BAD_DATA)
    return arrays


def _digest(arrays: Arrays) -> str:
    """SHA-256 of everything that features depend on. Raises ValueError for BF16, which some packages add to NumPy."""
    sha256 = hashlib.sha256(f"{SCHEMA} {PREPROCESSING}".encode())
    for name in sorted(arrays):
        array = arrays[name]
        sha256.update(f" {name} {array.dtype} {array.shape} ".encode())
        sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()
