"""Pictures -> features of a frozen encoder, once: computed by all ranks together, then kept on disk.

**Keys**: a file of features is named after the SHA-256 of the encoder's key (weights, preprocessing) and of the
pictures themselves, so it can be read again whenever both are the same, whatever else a run does differently. It is a
.npy file (N, features) float32; behind the array stand the 32 bytes of its SHA-256, so that a file which is cut off,
damaged or not ours is noticed and made again.

**Who does what**: if every rank finds the file, nothing is computed, and the encoder is not even made. Else each rank
computes one contiguous part of the pictures; where some hosts have the file, their ranks read the parts from it and
nobody computes. Each writes its part to a file of its own in its host's cache. Then one rank of each disk joins the
parts it sees to the whole file: hosts that share a disk exchange nothing, and to a disk that lacks parts they are sent.

**On the wire** go a bit for each value that says whether it is zero, and the values that are not: exact, and 54 % of
the bytes with random weights, where half of what leaves a ReLU is zero.

**Safe at any moment**: the file appears under its name when it is whole. What a killed run leaves is removed by the
next one a day later, when no other run can be at work on it.
"""

from __future__ import annotations

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
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.data.pixels import npy_header
from hvdtrain.data.prepared import cache_folder, caching
from hvdtrain.models.vgg16 import FEATURES
from hvdtrain.observe.progress import Progress
from hvdtrain.system.exits import BAD_DATA, IO_ERROR, Failure
from hvdtrain.system.files import open_plain

SCHEMA = "hvdtrain.features/1"
CHUNK_BYTES = 4 * 2**20  # of features that a rank sends, and of anything that is hashed, at a time
ROW_BYTES = 4 * FEATURES
SEAL_BYTES = hashlib.sha256().digest_size
ABANDONED_S = 86400.0  # a part that nobody has written to for so long was left by a killed run

Encoder = Callable[[NDArray[np.uint8]], NDArray[np.float32]]  # pictures (n, height, width, 3) -> features (n, 4096)


# 1. The whole way.


def extract(
    pictures: NDArray[np.uint8],
    encoder: Callable[[], Encoder],
    *,
    key: dict[str, Any],
    world: Communicator,
    batch_size: int = 16,
) -> NDArray[np.float32]:
    """Features (N, 4096) of pictures (N, height, width, 3), a read-only map of the cache's file. Collective.

    `encoder` makes the encoder; it is called only on ranks that have something to compute. `key` (fit for JSON) says
    everything that features depend on but the pictures: the weights' digest, the preprocessing.
    Raises Failure: BAD_DATA if hosts hold different pictures, CANNOT_WRITE or IO_ERROR if the cache cannot be written.
    """
    path = cache_folder("features") / f"{_name(pictures, key, world)}.npy"
    whole = _opened(path, len(pictures))
    having = [rank for rank, has in enumerate(world.gather(whole is not None)) if has]
    if len(having) == world.size and whole is not None:
        _tell(world, f"features of {len(pictures):,} images: read from {path}")
        return whole
    parts = _parts(len(pictures), having or list(range(world.size)), world.size)
    token = world.gather(secrets.token_hex(4))[0]
    with caching(path.parent), _own_part(path, token, world) as files:
        mine = parts[world.rank]
        encode = encoder() if whole is None and mine.stop > mine.start else None
        started_s = time.monotonic()
        if encode is not None:
            _write_part(files[world.rank], _computed(pictures, mine, encode, batch_size, world))
        elif whole is not None:
            _write_part(files[world.rank], iter([whole[mine]]))
        computed_s = max(world.gather(time.monotonic() - started_s))
        _join(path, len(pictures), whole is not None, files, parts, world)
    if (whole := _opened(path, len(pictures))) is None:
        raise Failure(f"{path} vanished or changed while it was made: start again", IO_ERROR)
    how = "copied from another host" if having else f"{len(pictures) / computed_s:,.1f} images/s"
    _tell(world, f"features of {len(pictures):,} images: made in {computed_s:,.1f} s, {how}, kept in {path}")
    return whole


def _parts(count: int, workers: Sequence[int], size: int) -> list[slice]:
    """The rows of each of `size` ranks: contiguous, as even as can be for `workers`, none for the others."""
    parts = [slice(0, 0)] * size
    for index, rank in enumerate(workers):
        parts[rank] = slice(index * count // len(workers), (index + 1) * count // len(workers))
    return parts


def _name(pictures: NDArray[np.uint8], key: dict[str, Any], world: Communicator) -> str:
    """The file's name, the same on all ranks. The first rank of each host hashes all pictures: 1 s for each 1.5 GB."""
    mine = _fingerprint(pictures) if world.local_rank == 0 else None
    prints = {found: host for host, found in world.gather([world.host, mine]) if found}
    if len(prints) > 1:
        one, other = list(prints.values())[:2]
        raise Failure(f"{one} and {other} hold different pictures: give all hosts the same data", BAD_DATA)
    content = json.dumps([SCHEMA, key, next(iter(prints))], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _fingerprint(pictures: NDArray[np.uint8]) -> str:
    sha256 = hashlib.sha256(f"{pictures.dtype} {pictures.shape} ".encode())
    step = max(1, CHUNK_BYTES // max(1, pictures[:1].nbytes))
    for first in range(0, len(pictures), step):
        sha256.update(np.ascontiguousarray(pictures[first : first + step]).data)
    return sha256.hexdigest()


def _tell(world: Communicator, line: str) -> None:
    if world.rank == 0:
        print(line, file=sys.stderr, flush=True)


# 2. Each rank's part.


def _computed(
    pictures: NDArray[np.uint8], mine: slice, encode: Encoder, batch_size: int, world: Communicator
) -> Iterator[NDArray[np.float32]]:
    """Features of this rank's pictures, batch by batch. Rank 0 shows progress, taking the others to be as fast."""
    own = mine.stop - mine.start
    with Progress("features", len(pictures), "images", world.rank == 0) as progress:
        for first in range(mine.start, mine.stop, batch_size):
            last = min(first + batch_size, mine.stop)
            yield encode(pictures[first:last])
            before, done = first - mine.start, last - mine.start
            progress.advance(done * len(pictures) // own - before * len(pictures) // own)


@contextmanager
def _own_part(path: Path, token: str, world: Communicator) -> Iterator[list[Path]]:
    """The paths of all ranks' parts on this disk. Each rank creates its own file, so a rank sees the files of the ranks
    that share its disk. Each rank removes its own file at the end."""
    for left in path.parent.glob(f".{path.stem}.*.part"):
        with suppress(FileNotFoundError):  # another rank of this disk was faster
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                left.unlink()
    files = [path.with_name(f".{path.stem}.{token}.{rank}.part") for rank in range(world.size)]
    try:
        files[world.rank].touch()
        world.gather(None)
        yield files
        world.gather(None)  # others of this disk may still read it
    finally:
        files[world.rank].unlink(missing_ok=True)


def _write_part(file: Path, batches: Iterator[NDArray[np.float32]]) -> None:
    with file.open("wb") as out:
        for batch in batches:
            if batch.shape[1:] != (FEATURES,) or batch.dtype != np.float32:
                raise ValueError(f"the encoder gave {batch.dtype} {batch.shape}, not float32 (n, {FEATURES})")
            out.write(np.ascontiguousarray(batch).data)


# 3. Each disk's whole.


def _join(
    path: Path, count: int, has: bool, files: Sequence[Path], parts: Sequence[slice], world: Communicator
) -> None:
    """One rank of each disk that lacks the file makes it. Collective; all parts are written."""
    seen = [rank for rank, file in enumerate(files) if file.exists()]
    joins = not has and seen[0] == world.rank
    lacks = [rank for rank in range(world.size) if rank not in seen] if joins else []
    wanted = sorted({rank for each in world.gather(lacks) for rank in each})
    chunks = _sent(wanted, files, parts, world)
    if joins:
        unfinished = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.part")
        try:
            with unfinished.open("wb+") as out:
                head = npy_header(count, (FEATURES,), "float32")
                out.write(head)
                os.posix_fallocate(out.fileno(), 0, len(head) + count * ROW_BYTES + SEAL_BYTES)
                for rank in seen:
                    out.seek(len(head) + parts[rank].start * ROW_BYTES)
                    with files[rank].open("rb") as part:
                        shutil.copyfileobj(part, out, CHUNK_BYTES)
                for rank, first, rows in chunks:
                    if rank in lacks:
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
    world.gather(None)  # the others may open it now


def _sent(
    wanted: Sequence[int], files: Sequence[Path], parts: Sequence[slice], world: Communicator
) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Sends the parts of the ranks `wanted` to all: (rank, index of the first row, rows). Collective."""
    step = CHUNK_BYTES // ROW_BYTES
    with files[world.rank].open("rb") as part:
        for done in range(0, max((parts[rank].stop - parts[rank].start for rank in wanted), default=0), step):
            mine = part.read(step * ROW_BYTES) if world.rank in wanted else b""
            found = world.gather_bytes(_packed(np.frombuffer(mine, np.float32)))
            for rank in wanted:
                first, last = parts[rank].start + done, min(parts[rank].start + done + step, parts[rank].stop)
                if first < last:
                    yield rank, first, _unpacked(found[rank], (last - first) * FEATURES)


def _packed(values: NDArray[np.float32]) -> bytes:
    """A bit for each of the values, then those that are not zero."""
    there = values != 0
    return np.packbits(there).tobytes() + values[there].tobytes()


def _unpacked(packed: bytes, count: int) -> NDArray[np.float32]:
    bits = np.frombuffer(packed, np.uint8, -(-count // 8))
    values = np.zeros(count, np.float32)
    values[np.unpackbits(bits, count=count).view(bool)] = np.frombuffer(packed, np.float32, offset=bits.size)
    return values


def _opened(path: Path, count: int) -> NDArray[np.float32] | None:
    """The features in the cache's file; None if there is no intact file."""
    head = npy_header(count, (FEATURES,), "float32")
    size = len(head) + count * ROW_BYTES
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size != size + SEAL_BYTES or file.read(len(head)) != head:
                return None
            file.seek(0)
            if _digest(file, size) != file.read():
                return None
            mapped = np.memmap(file, np.float32, "r", len(head), (count, FEATURES))
    except OSError:
        return None
    return np.asarray(mapped)  # the same map without np.memmap's cost for each index


def _digest(file: BinaryIO, size: int) -> bytes:
    """SHA-256 of the next `size` bytes."""
    sha256 = hashlib.sha256()
    while size and (chunk := file.read(min(size, CHUNK_BYTES))):
        sha256.update(chunk)
        size -= len(chunk)
    return sha256.digest()
