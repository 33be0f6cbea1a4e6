"""Compute the features of images with a frozen encoder, once on all ranks, and keep them on disk.

**The cache file** is named after the SHA-256 of the encoder's key (weights, preprocessing) and of the images. It is an
.npy file (N, features) float32 followed by its SHA-256, so that a damaged or foreign file is detected and replaced.

**Work distribution**: if every rank finds the file, nothing is computed. If only some hosts have it, their ranks read
equal parts from it. Otherwise each rank computes a part of the images. Each rank writes its part to its host's cache.
Then one rank per disk joins all parts that it can see. Parts that a disk is missing are sent over the network: a bit
per value says whether it is zero, followed by the others, 54 % of the size with random weights.

**Interruptions** are safe at any time: the file gets its name when it is complete. Leftovers of a killed run are
removed by another run a day later.
"""

import collections
import hashlib
import json
import os
import secrets
import shutil
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
from hvdtrain.models.layers import Arrays
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
    """A digest of the weights and their preprocessing. Raises Failure: 65 for a missing or foreign file, 78 for an
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
    arrays, preprocessing = encoder_arrays(weights)
    return cast(Encoder, network("vgg16.Vgg16", framework, arrays, preprocessing, device))


def encoder_arrays(weights: str) -> tuple[Arrays, str]:
    """The network's arrays and the name of their preprocessing. Raises Failure (65) for a damaged file."""
    if weights == RANDOM:
        return vgg16.random_weights(0), "torchvision"
    arrays, preprocessing, _ = vgg16_weights.open_weights(weights)
    return arrays, preprocessing


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
    everything besides the images that features depend on: the weights' digest, the preprocessing.
    Raises Failure: BAD_DATA if hosts have different images, CANNOT_WRITE or IO_ERROR if the cache cannot be written.
    """
    path = cache_folder("features") / f"{_name(images, key, world)}.npy"
    whole = _opened(path, len(images))
    holders = [rank for rank, has in enumerate(world.gather(whole is not None)) if has]
    if len(holders) == world.size and whole is not None:
        _log(world, f"features of {len(images):,} images: read from {path}")
        return whole
    parts = _parts(len(images), holders or list(range(world.size)), world.size)
    token = world.gather(secrets.token_hex(4))[0]
    with caching(path.parent), _own_part(path, token, world) as files:
        part = parts[world.rank]
        encode = make() if whole is None and part.stop > part.start else None
        started_s = time.monotonic()
        if encode is not None:
            _write_part(files[world.rank], _computed(images, part, encode, batch_size, world))
        elif whole is not None:
            _write_part(files[world.rank], iter([whole[part]]))
        computed_s = max(world.gather(time.monotonic() - started_s))
        _join(path, len(images), whole is not None, files, parts, world)
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


# --- 3. each rank's part ----------------------------------------------------------------------------------------------


def _computed(
    images: NDArray[np.uint8], part: slice, encode: Encoder, batch_size: int, world: Communicator
) -> Iterator[NDArray[np.float32]]:
    """Features of this rank's images, batch by batch. Rank 0 shows progress, assuming that other ranks are as fast."""
    count = part.stop - part.start
    with Progress("features", len(images), "images", world.rank == 0) as progress:
        for first in range(part.start, part.stop, batch_size):
            last = min(first + batch_size, part.stop)
            yield encode(images[first:last])
            before, done = first - part.start, last - part.start
            progress.advance(done * len(images) // count - before * len(images) // count)


@contextmanager
def _own_part(path: Path, token: str, world: Communicator) -> Iterator[list[Path]]:
    """Paths of all ranks' part files in this rank's cache folder. Each rank creates its own file, so it sees the files
    of all ranks that share its disk. At the end each rank removes its own file."""
    for left in path.parent.glob(f".{path.stem}.*.part"):
        with suppress(FileNotFoundError):  # another rank with this disk was faster
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                left.unlink()
    files = [path.with_name(f".{path.stem}.{token}.{rank}.part") for rank in range(world.size)]
    try:
        files[world.rank].touch()
        world.gather(None)
        yield files
        world.gather(None)  # other ranks with this disk may still read it
    finally:
        files[world.rank].unlink(missing_ok=True)


def _write_part(file: Path, batches: Iterator[NDArray[np.float32]]) -> None:
    with file.open("wb") as out:
        for batch in batches:
            if batch.shape[1:] != (FEATURES,) or batch.dtype != np.float32:
                raise ValueError(f"the encoder returned {batch.dtype} {batch.shape}, not float32 (n, {FEATURES})")
            out.write(np.ascontiguousarray(batch).data)


# --- 4. each disk's complete file -------------------------------------------------------------------------------------


def _join(
    path: Path, count: int, has: bool, files: Sequence[Path], parts: Sequence[slice], world: Communicator
) -> None:
    """One rank per disk without the file creates it. Collective; all parts have been written."""
    seen = [rank for rank, file in enumerate(files) if file.exists()]
    joins = not has and seen[0] == world.rank
    missing = [rank for rank in range(world.size) if rank not in seen] if joins else []
    wanted = sorted({rank for ranks in world.gather(missing) for rank in ranks})
    chunks = _sent(wanted, files, parts, world)
    if joins:
        unfinished = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.part")
        try:
            with unfinished.open("wb+") as out:
                head = npy_header(count, (FEATURES,), "float32")
                out.write(head)
                os.posix_fallocate(out.fileno(), 0, len(head) + count * ROW_BYTES + DIGEST_BYTES)
                for rank in seen:
                    out.seek(len(head) + parts[rank].start * ROW_BYTES)
                    with files[rank].open("rb") as part:
                        shutil.copyfileobj(part, out, CHUNK_BYTES)
                for rank, first, rows in chunks:
                    if rank in missing:
                        out.seek(len(head) + first * ROW_BYTES)
                        out.write(rows.data)
                out.seek(0)
                out.write(_digest(out, len(head) + count * ROW_BYTES))
                out.flush()
                os.fsync(out.fileno())
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
    collections.deque(chunks, maxlen=0)  # a rank that does not join may still have to send its part
    world.gather(None)  # other ranks may open the file from now on


def _sent(
    wanted: Sequence[int], files: Sequence[Path], parts: Sequence[slice], world: Communicator
) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Sends the parts of the ranks `wanted` to all ranks: (rank, index of the first row, rows). Collective."""
    step = CHUNK_BYTES // ROW_BYTES
    with files[world.rank].open("rb") as part:
        for done in range(0, max((parts[rank].stop - parts[rank].start for rank in wanted), default=0), step):
            data = part.read(step * ROW_BYTES) if world.rank in wanted else b""
            packed = world.gather_bytes(_packed(np.frombuffer(data, np.float32)))
            for rank in wanted:
                first, last = parts[rank].start + done, min(parts[rank].start + done + step, parts[rank].stop)
                if first < last:
                    yield rank, first, _unpacked(packed[rank], (last - first) * FEATURES)


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
