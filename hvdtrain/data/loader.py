"""Batches for training and evaluation: sharded over ranks, ordered by the seed, prepared while the step computes.

**The order of an epoch** is a pure function of (seed, epoch, global batch size). Every rank draws the same permutation
of all samples. Each step takes the next global batch of it, and each rank a contiguous part of that batch, equal to
within one sample, or proportional to `shares`. Neither the number of ranks nor their shares change the order or the
global batch, so a run resumed on other ranks sees the same remaining samples.

**Short epochs**: with `epoch_samples`, an epoch is that many samples of the permutation, and the next epoch takes the
following ones. The remainder of a permutation is not used if it is shorter than an epoch.

**The last global batch** is often short. BatchNorm needs two samples per rank. If the last batch has fewer, it is
merged with the batch before it and the result is split in half, unless the halves would be too short again.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np

from hvdtrain.data import Batch, Request, Split
from hvdtrain.system.exits import BAD_CONFIG, Failure

PREFETCHED = 2

T = TypeVar("T")


class Loader:
    """Training batches of one rank.

    `global_batch` is the number of samples per step over all `size` ranks. A merged short batch has up to two more per
    rank. An epoch is the whole split, or `epoch_samples`. `shares` has one positive number per rank; ranks get samples
    in proportion to their shares. Each batch is split into `micro_batches` parts, or into fewer if they would have less
    than two samples (BatchNorm). Raises Failure (BAD_CONFIG) if a step or the split has too few samples for the ranks,
    or the split too few for an epoch.
    """

    def __init__(
        self,
        split: Split,
        *,
        global_batch: int,
        rank: int,
        size: int,
        seed: int,
        shares: Sequence[float] | None = None,
        micro_batches: int = 1,
        epoch_samples: int | None = None,
    ) -> None:
        if global_batch < size:
            raise Failure(
                f"a global batch of {global_batch} is too small for {size} ranks; hint: use at most {global_batch}",
                BAD_CONFIG,
            )
        if epoch_samples is not None and epoch_samples > len(split):
            message = f"an epoch of {epoch_samples} samples is longer than the training set of {len(split)}"
            raise Failure(f"{message}; hint: give at most {len(split)}", BAD_CONFIG)
        self._split, self._rank, self._size, self._seed = split, rank, size, seed
        self._samples = epoch_samples or len(split)
        self._micro_batches = micro_batches
        self._global_batch = self._ordered_by = global_batch
        self._least = _least(global_batch, size)
        self._ends = self.ends()
        self._parts = _parts(size, shares)

    def divided(self, shares: Sequence[float] | None) -> Loader:
        """The same epochs with other shares."""
        other = copy.copy(self)
        other._parts = _parts(self._size, shares)
        return other

    def among(self, rank: int, size: int, global_batch: int, shares: Sequence[float] | None) -> Loader:
        """The same epochs, in the same order, for other ranks and another global batch.

        Raises Failure (BAD_CONFIG) if a step has too few samples for the ranks.
        """
        other = copy.copy(self)
        other._rank, other._size, other._global_batch = rank, size, global_batch
        other._least, other._parts = _least(global_batch, size), _parts(size, shares)
        other._ends = other.ends()
        return other

    def has_room(self, consumed: int, size: int, global_batch: int) -> bool:
        """Whether `size` ranks can continue an epoch after its first `consumed` samples."""
        least = _least(global_batch, size) * size
        return size <= global_batch and least <= (self._samples - consumed or self._samples)

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return self._samples

    def can_continue(self, consumed: int) -> bool:
        """Whether enough samples are left in an epoch for the ranks of this loader after the first `consumed` ones."""
        return self.has_room(consumed, self._size, self._global_batch)

    def over(self, split: Split) -> Loader:
        """The same epochs over another view of the same items."""
        other = copy.copy(self)
        other._split = split
        return other

    @property
    def steps_per_epoch(self) -> int:
        """Equal on every rank."""
        return len(self._ends)

    def ends(self, start: int = 0) -> list[int]:
        """The number of samples consumed at the end of each step after the first `start` samples of an epoch.

        Raises Failure (BAD_CONFIG) if too few samples remain for the ranks.
        """
        return _ends(self._samples, start, self._global_batch, self._size)

    def step_at(self, consumed: int) -> int:
        """The step that follows the first `consumed` samples of an epoch."""
        return bisect.bisect_right(self._ends, consumed)

    @property
    def rank_samples(self) -> list[int]:
        """Samples per rank in each step with a full global batch."""
        cuts = _cuts(self._ends[0], self._parts, self._least)
        return [end - begin for begin, end in itertools.pairwise(cuts)]

    def first_of(self, shares: Sequence[float] | None) -> Batch:
        """The first batch of epoch 0 with these shares."""
        return next(self.divided(shares)._batches(0, 0))

    def epoch(self, number: int, start: int = 0) -> Generator[Batch]:
        """The batches of epoch `number` after its first `start` samples. A thread prepares them and ends together with
        the iterator."""
        return _prefetch(self._batches(number, start))

    def _batches(self, number: int, start: int) -> Iterator[Batch]:
        steps, copies = itertools.tee(self._steps(number, start))
        batches = (self._split.batch(*request) for request in itertools.chain.from_iterable(copies))
        for requests in steps:
            parts = tuple(itertools.islice(batches, len(requests)))
            if len(parts) == 1:
                yield parts[0]
            else:
                weight = sum(part.weight for part in parts)
                yield Batch(arrays=(), weight=weight, total_weight=parts[0].total_weight, parts=parts)

    def _steps(self, number: int, start: int) -> Iterator[list[Request]]:
        """The micro-batches of each step, at least one."""
        whole, samples = len(self._split), self._samples
        permutation, part = divmod(number, whole // samples)
        stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, permutation])))
        steps = range(0, samples, self._ordered_by)
        borders = [begin + step for begin in range(0, whole - samples + 1, samples) for step in steps]
        order = self._split.order(stream, [*borders, whole])[part * samples : (part + 1) * samples]
        first = self.step_at(start)
        for step, (begin, end) in enumerate(itertools.pairwise([start, *self.ends(start)]), start=first):
            global_items = order[begin:end]
            cuts = _cuts(len(global_items), self._parts, self._least)
            items = global_items[cuts[self._rank] : cuts[self._rank + 1]]
            name = [self._seed, number, step, self._rank]
            count = max(1, min(self._micro_batches, len(items) // 2))
            borders = [len(items) * part // count for part in range(count + 1)]
            yield [
                Request(items[begin:end], global_items, _key(name if count == 1 else [*name, part]))
                for part, (begin, end) in enumerate(itertools.pairwise(borders))
            ]


def _key(name: Sequence[int]) -> int:
    """64 bits derived from these numbers."""
    return int(np.random.SeedSequence(name).generate_state(1, np.uint64)[0])


def shard(
    split: Split,
    *,
    batch_size: int,
    rank: int,
    size: int,
    shares: Sequence[float] | None = None,
    most: int | None = None,
) -> Iterator[Batch]:
    """Evaluation batches of one rank: a contiguous part of `split`, or of its first `most` samples, in order.

    Parts are disjoint, cover the split and differ by at most one sample, or follow `shares`. A rank may have fewer
    batches than another, or none, so add counts over ranks at the end and not in each step.
    """
    samples = len(split) if most is None else min(most, len(split))
    return _prefetch(_in_order(split, batch_size, rank, _cuts(samples, _parts(size, shares), 0)))


def _in_order(split: Split, batch_size: int, rank: int, cuts: Sequence[int]) -> Iterator[Batch]:
    size, samples = len(cuts) - 1, np.arange(cuts[-1])
    parts = [samples[cuts[each] : cuts[each + 1]] for each in range(size)]
    requests = (
        Request(items[rank], np.concatenate(items), None)
        for done in range(0, len(parts[rank]), batch_size)
        for items in [[part[done : done + batch_size] for part in parts]]
    )
    return (split.batch(*request) for request in requests)


def _ends(samples: int, start: int, global_batch: int, size: int) -> list[int]:
    """The end of each global batch after the first `start` samples, over `size` ranks."""
    left, least = samples - start, _least(global_batch, size) * size
    if left < least and (left or not start):
        enough = next((fewer for fewer in range(size, 1, -1) if _least(global_batch, fewer) * fewer <= left), 1)
        where = "left in the epoch" if start else "in the training set"
        hint = f"for {size} ranks; hint: use {enough} or fewer"
        if left < min(2, global_batch):
            hint = "for a step, since BatchNorm needs two; hint: give more samples, or --batch-size 1"
        raise Failure(f"{left} samples {where} are too few {hint}", BAD_CONFIG)
    ends = [*range(start + global_batch, samples, global_batch), *([samples] if left else [])]
    if len(ends) > 1 and samples - ends[-2] < least:
        begin = ends[-3] if len(ends) > 2 else start
        joined = samples - begin
        ends[-2:-1] = [begin + (joined + 1) // 2] if joined // 2 >= least else []
    return ends


def _least(global_batch: int, size: int) -> int:
    """The minimum number of samples per rank and step."""
    return min(2, global_batch // size)


def _parts(size: int, shares: Sequence[float] | None) -> list[int]:
    """Cumulative shares as integers, so that all results are exact."""
    exact = [Fraction(share) for share in shares or [1] * size]
    unit = math.lcm(*(share.denominator for share in exact))
    return [0, *itertools.accumulate(int(share * unit) for share in exact)]


def _cuts(samples: int, parts: Sequence[int], least: int) -> list[int]:
    """Borders between the ranks' parts of `samples` consecutive samples, both ends included.

    Each rank gets its share to within less than a sample, and at least `least` samples. There must be enough for all.
    """
    cuts, ranks = [0], len(parts) - 1
    for rank, part in enumerate(parts[1:], start=1):
        cut = max(samples * part // parts[-1], cuts[-1] + least)
        cuts.append(min(cut, samples - (ranks - rank) * least))
    return cuts


def _prefetch(items: Iterable[T]) -> Generator[T]:
    """Yields `items`, produced ahead by a thread.

    The thread starts with the first `next` and ends when the iterator is exhausted, closed or collected. Its exceptions
    are raised here.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(PREFETCHED)
    stop = threading.Event()

    def produce() -> None:
        error: BaseException | None = StopIteration()
        try:
            for item in items:
                ready.put((item, None))
                if stop.is_set():
                    return
        except BaseException as raised:
            error = raised
        ready.put((None, error))

    thread = threading.Thread(target=produce, name="hvdtrain-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
            del item  # otherwise the batch would stay in memory during the next step
    finally:
        stop.set()
        while thread.is_alive():  # make room for a waiting put
            try:
                ready.get(timeout=0.01)
            except queue.Empty:
                continue
        thread.join()
