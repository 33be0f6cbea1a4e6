"""Memory that the ranks of one host share, in which they sum long vectors.

A vector passes through the memory in blocks that fit into the processor's cache. Each rank copies its block into its
own slot. Then all ranks add at the same time, each its share of the block over all slots. There are two sets of slots,
so that ranks write one block while others still add the previous one. Ranks wait for tokens that arrive over their
streams: they sleep meanwhile, and notice a dead rank as in any other exchange.

The memory is a memfd (memfd_create(2)), which has no name in any folder. It ends with its last rank, however that rank
dies, and the size of /dev/shm does not limit it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvdtrain.comm.stream import Stream, swap

SHARED_FROM_BYTES = 1 << 20
"""Shorter vectors are summed as fast or faster over TCP, with fewer messages"""
BLOCK_BYTES = 1 << 21
"""Size of a slot. Slots of 1 MiB took 1.3 times as long (messages), of 8 MiB 1.2 times (cache)"""
SETS = 2
OFFER_BYTES = 4096


class SharedMemory:
    """Shared memory of one host's ranks, of which the leader is rank 0.

    `memory` has SETS x ranks x BLOCK_BYTES. `leader` is the stream to the leader, None in the leader itself; `members`
    are the leader's streams to the other ranks. All ranks call the same methods in the same order. The methods raise
    PeerLost, and RuntimeError if the ranks' vectors differ in length.
    """

    def __init__(self, memory: mmap.mmap, index: int, leader: Stream | None, members: Sequence[Stream]) -> None:
        self._slots = np.frombuffer(memory, np.uint8).reshape(SETS, -1, BLOCK_BYTES)
        self._index, self._leader, self._members = index, leader, members
        self._passed = 0
        """Blocks so far. Consecutive blocks use different sets, also if the next call follows at once"""

    def reduce(self, vector: np.ndarray) -> None:
        """Sum a vector over the ranks into the leader's, in rank order. Other ranks' vectors do not change."""
        blocks = self._blocks(vector)
        for step in range(len(blocks) + 1):
            if step < len(blocks):
                block, slots = blocks[step]
                slots[self._index] = block
            self._arrive(vector)  # this block is written, and the previous one is added
            if step < len(blocks):
                self._release(vector)
            if self._leader is None and step:
                block, slots = blocks[step - 1]
                block[:] = slots[0]
            if step < len(blocks):
                self._add_share(blocks[step][1])

    def broadcast(self, vector: np.ndarray) -> None:
        """Copy the leader's vector to all ranks, in place."""
        blocks = self._blocks(vector)
        for step, (block, slots) in enumerate(blocks):
            if self._leader is None:
                if step >= SETS:
                    self._arrive(vector)  # the block before the previous one is copied, so its slot is free
                slots[0] = block
                self._release(vector)
            else:
                self._release(vector)
                block[:] = slots[0]
                self._arrive(vector)
        if self._leader is None:
            for _ in blocks[-SETS:]:
                self._arrive(vector)

    def _blocks(self, vector: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each block of a vector with its slots, of shape (ranks, block's length)."""
        blocks = []
        for begin in range(0, vector.size, BLOCK_BYTES // vector.itemsize):
            block = vector[begin : begin + BLOCK_BYTES // vector.itemsize]
            blocks.append((block, self._slots[self._passed % SETS].view(vector.dtype)[:, : block.size]))
            self._passed += 1
        return blocks

    def _add_share(self, slots: np.ndarray) -> None:
        """Add this rank's share of a block over all slots, into the leader's slot."""
        ranks, size = slots.shape
        share = slots[:, size * self._index // ranks : size * (self._index + 1) // ranks]
        for other in share[1:]:
            share[0] += other

    def _arrive(self, vector: np.ndarray) -> None:
        """The leader waits for a token from each member."""
        if self._leader is not None:
            send_token(self._leader, vector)
        for member in self._members:
            wait_for_token(member, vector)

    def _release(self, vector: np.ndarray) -> None:
        """Each member waits for a token from the leader."""
        if self._leader is not None:
            wait_for_token(self._leader, vector)
        for member in self._members:
            send_token(member, vector)


def send_token(target: Stream, vector: np.ndarray) -> None:
    swap(target, np.array([vector.nbytes]), None)


def wait_for_token(source: Stream, vector: np.ndarray) -> None:
    length = int(swap(None, None, source, np.empty(1, np.int64))[0])
    if length != vector.nbytes:
        raise RuntimeError(f"rank {source.rank} sums {length} bytes where {vector.nbytes} were expected")


# --- how the ranks get the same memory --------------------------------------------------------------------------------


def share_memory(leader: Stream | None, members: Sequence[Stream]) -> SharedMemory | None:
    """Map the same memory in all ranks of a host. Collective. None if a rank cannot, or if there is one rank only.

    Members open the leader's file descriptor through /proc, which the kernel allows to the same user only, and only
    until all have mapped it. It fails if each rank has a container of its own, or without memfd_create.
    """
    if leader is not None:
        offer = swap(None, None, leader, max_bytes=OFFER_BYTES).tobytes().decode().split()
        memory = _mapped(*offer[1:]) if offer else None
        swap(leader, np.array([memory is not None]), None)
        (all_mapped,) = swap(None, None, leader, np.empty(1, bool))
        return SharedMemory(memory, int(offer[0]), leader, ()) if memory is not None and all_mapped else None
    if not members:
        return None
    name = f"hvdtrain-{secrets.token_hex(16)}"
    memory, descriptor = None, -1
    with contextlib.ExitStack() as until_mapped:
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create(name)
            until_mapped.callback(os.close, descriptor)
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, SETS * (1 + len(members)) * BLOCK_BYTES)
            memory = mmap.mmap(descriptor, 0)
        for index, member in enumerate(members, 1):
            offer_text = f"{index} /proc/{os.getpid()}/fd/{descriptor} {name}" if memory is not None else ""
            swap(member, np.frombuffer(offer_text.encode(), np.uint8), None)
        answers = [swap(None, None, member, np.empty(1, bool)) for member in members]
    all_mapped = np.array([np.all(answers)])
    for member in members:
        swap(member, all_mapped, None)
    return SharedMemory(memory, 0, None, members) if memory is not None and all_mapped else None


def _mapped(path: str, name: str) -> mmap.mmap | None:
    """The leader's memory; None if this rank cannot open it, or if in this container the path is another file's."""
    with contextlib.suppress(OSError):
        if Path(path).readlink() != Path(f"/memfd:{name} (deleted)"):
            return None
        descriptor = os.open(path, os.O_RDWR)
        try:
            return mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
    return None
