"""Compute the features of images with a frozen encoder, once on all ranks, and keep them on disk.

**The cache file** is named after the SHA-256 of the encoder's key (weights, preprocessing) and of the images. It is an
.npy file (N, features) float32 followed by its SHA-256, so that a damaged or foreign file is detected and replaced.

**Work distribution**: if every rank finds the file, nothing is computed. If only some hosts have it, their ranks read
equal parts from it. Otherwise each rank computes a part of the images. Each rank sends its rows to all others, a batch
at a time, and one rank per disk without the file writes them: a bit per value says whether it is zero, followed by the
others, 54 % of the size with random weights.

**Interruptions** are safe at any time: the file gets its name when it is complete. Leftovers of a killed run are
removed by another run a day later.
"""

import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.data.pixels import npy_header
from hvdtrain.data.prepared import cache_folder, caching
from hvdtrain.models import network, vgg16, vgg16_weights
from hvdtrain.models.vgg16 import FEATURES
from hvdtrain.observe.progress import Progress
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, IO_ERROR, Failure
from hvdtrain.system.files import open_plain

SCHEMA = "hvdtrain.features/1"
RANDOM = "random"
"""Instead of a file of weights: random weights, for testing"""
CHUNK_BYTES = 4 * 2**20  # bytes of features that a rank sends, and bytes that are hashed, at a time
ROW_BYTES = 4 * FEATURES
DIGEST_BYTES = hashlib.sha256().digest_size
ABANDONED_S = 86400.0  # a part not modified for this time was left by a killed run

Encoder = Callable[[NDArray[np.uint8]], NDArray[np.float32]]  # images (n, height, width, 3) -> features (n, 4096)


# --- 1. the encoder: VGG16 --------------------------------------------------------------------------------------------


def digest(weights: str, image_size: tuple[int, int]) -> str:
    """A digest of the weights. Raises Failure: 65 for a missing or foreign file, 78 for an
    image size (width, height) that VGG16 does not support."""
    if image_size != vgg16.IMAGE_SIZE:
        wanted, size = ("{}x{}".format(*pair) for pair in (vgg16.IMAGE_SIZE, image_size))
        raise Failure(
            f"--encoder vgg16 needs images of {wanted}, not {size}; hint: prepare them with "
            f"`hvdtrain data captions ... --size {wanted}`, or use --encoder small",
            BAD_CONFIG,
        )
    return RANDOM if weights == RANDOM else vgg16_weights.read_head(weights)["digest"]


def encoder(weights: str, framework: str, device: str = "cpu") -> Encoder:
    """Features (n, 4096) float32 of images (n, 224, 224, 3) uint8. Raises Failure (65) for a damaged file."""
    arrays = vgg16.random_weights(0) if weights == RANDOM else vgg16_weights.open_weights(weights)
    return cast(Encoder, network("vgg16.Vgg16", framework, arrays, device))


# --- 2. all steps -----------------------------------------------------------------------------------------------------


def extract(
    images: NDArray[np.uint8],
    make: Callable[[], Encoder],
    *,
    key: dict[str, Any],
    world: Communicator,
    batch_size: int = 16,
) -> NDArray[np.float32]:
    """Features (N, 4096) of images (N, height, width, 3), a read-only memory map of the cache file. Collective.

    `make` makes the encoder; only ranks that compute something call it. `key` (JSON-serializable) identifies
    everything besides the images that features depend on: the weights' digest.
    Raises Failure: BAD_DATA if hosts have different images, CANNOT_WRITE or IO_ERROR if the cache cannot be written.
    """
    path = cache_folder("features") / f"{_name(images, key, world)}.npy"
    whole = _opened(path, len(images))
    holders = [rank for rank, has in enumerate(world.gather(whole is not None)) if has]
    if len(holders) == world.size and whole is not None:
        _log(world, f"features of {len(images):,} images: read from {path}")
        return whole
    parts = _parts(len(images), holders or list(range(world.size)), world.size)
    part, token = parts[world.rank], world.gather(secrets.token_hex(4))[0]
    encode = make() if whole is None and part.stop > part.start else None
    started_s, head_bytes = time.monotonic(), len(npy_header(len(images), (FEATURES,), "float32"))
    with (
        caching(path.parent),
        _written(path, len(images), token, has=whole is not None) as out,
        Progress("features", len(images), "images", world.rank == 0 and not holders) as progress,
    ):
        for done in range(0, max(each.stop - each.start for each in parts), batch_size):
            begins = [each.start + done for each in parts]
            rows = slice(begins[world.rank], min(begins[world.rank] + batch_size, part.stop))
            own = np.empty((0, FEATURES), np.float32)
            if rows.start < rows.stop:
                own = _checked(encode(images[rows])) if encode else np.asarray(whole)[rows]
            messages = world.gather_bytes(_packed(own))
            for begin, each, message in zip(begins, parts, messages, strict=True):
                if out and begin < each.stop:
                    out.seek(head_bytes + begin * ROW_BYTES)
                    out.write(_unpacked(message, (min(begin + batch_size, each.stop) - begin) * FEATURES).data)
            progress.advance(sum(max(0, min(batch_size, each.stop - each.start - done)) for each in parts))
    world.gather(None)  # every disk has the file
    computed_s = max(world.gather(time.monotonic() - started_s))
    if (whole := _opened(path, len(images))) is None:
        raise Failure(f"{path} disappeared or changed while it was made; hint: start again", IO_ERROR)
    source = "copied from another host" if holders else f"{len(images) / computed_s:,.1f} images/s"
    _log(world, f"features of {len(images):,} images: made in {computed_s:,.1f} s, {source}, stored in {path}")
    return whole


def _parts(count: int, workers: Sequence[int], size: int) -> list[slice]:
    """The rows of each of `size` ranks: contiguous, balanced over `workers`, none for other ranks."""
    parts = [slice(0, 0)] * size
    for index, rank in enumerate(workers):
        parts[rank] = slice(index * count // len(workers), (index + 1) * count // len(workers))
    return parts


def _name(images: NDArray[np.uint8], key: dict[str, Any], world: Communicator) -> str:
    """The file's name, equal on all ranks. The first rank of each host hashes all images, at 1.5 GB per second."""
    fingerprint = _fingerprint(images) if world.local_rank == 0 else None
    hosts = {digest: host for host, digest in world.gather([world.host, fingerprint]) if digest}
    if len(hosts) > 1:
        one, other = list(hosts.values())[:2]
        raise Failure(f"{one} and {other} have different images; hint: copy the same data to all hosts", BAD_DATA)
    content = json.dumps([SCHEMA, key, next(iter(hosts))], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _fingerprint(images: NDArray[np.uint8]) -> str:
    sha256 = hashlib.sha256(f"{images.dtype} {images.shape} ".encode())
    step = max(1, CHUNK_BYTES // max(1, images[:1].nbytes))
    for first in range(0, len(images), step):
        sha256.update(np.ascontiguousarray(images[first : first + step]).data)
    return sha256.hexdigest()


def _log(world: Communicator, line: str) -> None:
    if world.rank == 0:
        print(line, file=sys.stderr, flush=True)


# --- 3. each disk's file ----------------------------------------------------------------------------------------------


def _checked(features: NDArray[np.float32]) -> NDArray[np.float32]:
    if features.shape[1:] != (FEATURES,) or features.dtype != np.float32:
        raise ValueError(f"the encoder returned {features.dtype} {features.shape}, not float32 (n, {FEATURES})")
    return np.ascontiguousarray(features)


@contextmanager
def _written(path: Path, count: int, token: str, *, has: bool) -> Iterator[BinaryIO | None]:
    """The file to write the features to, with its header, which gets its name and digest at the end of the block. None
    if this disk has it, or another rank with this disk writes it."""
    for left in path.parent.glob(f".{path.stem}.*.part"):
        with suppress(FileNotFoundError):  # another rank with this disk was faster
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                left.unlink()
    unfinished = path.with_name(f".{path.stem}.{token}.part")
    out: BinaryIO | None = None
    with suppress(FileExistsError):  # another rank with this disk was faster; it waits for the first rows of all ranks
        out = None if has else unfinished.open("xb+")
    if out is None:
        yield None
        return
    head = npy_header(count, (FEATURES,), "float32")
    try:
        with out:
            out.write(head)
            os.posix_fallocate(out.fileno(), 0, len(head) + count * ROW_BYTES + DIGEST_BYTES)
            yield out
            out.seek(0)
            out.write(_digest(out, len(head) + count * ROW_BYTES))
            out.flush()
            os.fsync(out.fileno())
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _packed(values: NDArray[np.float32]) -> bytes:
    """A bit for each value, followed by the values that are not zero."""
    nonzero = values != 0
    return np.packbits(nonzero).tobytes() + values[nonzero].tobytes()


def _unpacked(packed: bytes, count: int) -> NDArray[np.float32]:
    bits = np.frombuffer(packed, np.uint8, -(-count // 8))
    values = np.zeros(count, np.float32)
    values[np.unpackbits(bits, count=count).view(bool)] = np.frombuffer(packed, np.float32, offset=bits.size)
    return values


def _opened(path: Path, count: int) -> NDArray[np.float32] | None:
    """The features in the cache file; None if there is no intact file."""
    head = npy_header(count, (FEATURES,), "float32")
    size = len(head) + count * ROW_BYTES
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size != size + DIGEST_BYTES or file.read(len(head)) != head:
                return None
            file.seek(0)
            if _digest(file, size) != file.read():
                return None
            mapped = np.memmap(file, np.float32, "r", len(head), (count, FEATURES))
    except OSError:
        return None
    return np.asarray(mapped)  # a plain array indexes faster than np.memmap


def _digest(file: BinaryIO, size: int) -> bytes:
    """SHA-256 of the next `size` bytes."""
    sha256 = hashlib.sha256()
    while size and (chunk := file.read(min(size, CHUNK_BYTES))):
        sha256.update(chunk)
        size -= len(chunk)
    return sha256.digest()
