"""Memory of a GPU that the ranks of one host share, in which they sum vectors that are on this GPU.

The leader allocates a slot for each rank, and the others open it through CUDA's inter-process communication. Each rank
copies its vector into its slot, the leader adds them, and each rank copies the result. Before a rank sends the token
that another one waits for, it waits until the GPU has done its part.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.arrays import Array, finish, is_numpy
from hvdtrain.comm.backends.shared_memory import send_token, wait_for_token
from hvdtrain.comm.stream import Stream, swap

ALIGNMENT = 64
"""Bytes; slots begin at multiples of it, so that they can hold numbers of any type"""
OFFER_BYTES = 4096


class SharedGpu:
    """The slots of one host's ranks, of which the leader is rank 0: see `SharedMemory`."""

    def __init__(self, slots: Any, index: int, leader: Stream | None, members: Sequence[Stream]) -> None:
        """`slots`: a uint8 tensor of shape (ranks, bytes)."""
        self._slots, self._index, self._leader, self._members = slots, index, leader, members

    def _slot(self, rank: int, vector: Array) -> Array:
        return self._slots[rank][: vector.nbytes].view(vector.dtype)

    def reduce(self, vector: Array) -> None:
        """Sum a vector over the ranks into the leader's, in rank order. Other ranks' vectors do not change."""
        if self._leader is not None:
            self._slot(self._index, vector)[...] = vector
            finish(vector)
            send_token(self._leader, vector)
        for member in self._members:
            wait_for_token(member, vector)
        for rank in range(1, 1 + len(self._members)):
            vector += self._slot(rank, vector)

    def broadcast(self, vector: Array) -> None:
        """Copy the leader's vector to all ranks, in place."""
        if self._leader is not None:
            wait_for_token(self._leader, vector)
            vector[...] = self._slot(0, vector)
            return
        self._slot(0, vector)[...] = vector
        finish(vector)
        for member in self._members:
            send_token(member, vector)


def share_gpu(leader: Stream | None, members: Sequence[Stream], vector: Array) -> SharedGpu | None:
    """Open slots for vectors up to the size of this one in all ranks of a host. Collective.

    None if the vectors are not all on the same GPU, or if CUDA cannot share its memory.
    """
    identity = "" if is_numpy(vector) or not vector.is_cuda else _identity(vector)
    if leader is not None:
        send_token(leader, vector)
        swap(leader, np.frombuffer(identity.encode(), np.uint8), None)
        offer = swap(None, None, leader, max_bytes=OFFER_BYTES).tobytes()
        opened = None
        with contextlib.suppress(RuntimeError):
            opened = _opened(json.loads(offer), vector) if offer else None
        swap(leader, np.array([opened is not None]), None)
        (all_opened,) = swap(None, None, leader, np.empty(1, bool))
        return SharedGpu(opened[1], opened[0], leader, ()) if opened and all_opened else None
    for member in members:
        wait_for_token(member, vector)
    theirs = {swap(None, None, member, max_bytes=OFFER_BYTES).tobytes().decode() for member in members}
    slots, offers = None, [b""] * len(members)
    if identity and theirs == {identity}:
        with contextlib.suppress(RuntimeError):
            slots = _allocated(1 + len(members), vector)
            offers = [_offer(slots, index) for index in range(1, 1 + len(members))]
    for member, offer in zip(members, offers, strict=True):
        swap(member, np.frombuffer(offer, np.uint8), None)
    answers = [swap(None, None, member, np.empty(1, bool)) for member in members]
    all_opened = np.array([np.all(answers)])
    for member in members:
        swap(member, all_opened, None)
    return SharedGpu(slots, 0, None, members) if all_opened else None


def _identity(vector: Array) -> str:
    """Equal for ranks whose vectors are on the same GPU."""
    import torch

    return str(torch.cuda.get_device_properties(vector.device).uuid)


def _allocated(ranks: int, vector: Array) -> Any:
    import torch

    nbytes = -(-vector.nbytes // ALIGNMENT) * ALIGNMENT
    return torch.empty((ranks, nbytes), dtype=torch.uint8, device=vector.device)


def _offer(slots: Any, index: int) -> bytes:
    """The message from which a member opens the slots: see torch.multiprocessing.reductions.reduce_tensor."""
    _, *handle = slots.untyped_storage()._share_cuda_()
    fields = [field.hex() if isinstance(field, bytes) else field for field in handle]
    return json.dumps({"index": index, "shape": list(slots.shape), "handle": fields}).encode()


def _opened(offer: dict[str, Any], vector: Array) -> tuple[int, Any]:
    """The member's index and the slots. Raises RuntimeError."""
    import torch

    handle = [bytes.fromhex(field) if isinstance(field, str) else field for field in offer["handle"]]
    storage = torch.UntypedStorage._new_shared_cuda(vector.device.index, *handle)
    slots: Any = torch.empty(0, dtype=torch.uint8, device=vector.device).set_(storage)
    return offer["index"], slots[: offer["shape"][0] * offer["shape"][1]].view(offer["shape"])
