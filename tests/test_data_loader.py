"""The laws of the loader: every epoch is complete, disjoint and reproducible; the prefetch thread overlaps and ends."""

from __future__ import annotations

import itertools
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hvdtrain.data import Batch, ImageSplit
from hvdtrain.data.loader import Loader, _prefetch, shard
from hvdtrain.system.exits import BAD_CONFIG, Failure


def numbered(samples: int) -> ImageSplit:
    """A split whose images and labels both say which sample they are."""
    labels = np.arange(samples, dtype=np.int64)
    return ImageSplit(samples=labels.astype(np.float32).reshape(-1, 1, 1, 1), labels=labels)


def loaders(
    samples: int, batch_size: int, size: int, seed: int = 0, shares: Sequence[float] | None = None
) -> list[Loader]:
    split, whole = numbered(samples), batch_size * size
    return [Loader(split, global_batch=whole, rank=r, size=size, seed=seed, shares=shares) for r in range(size)]


def seen(batches: Iterator[Batch]) -> list[list[int]]:
    rows = []
    for batch in batches:
        images, labels = batch.arrays
        assert images.dtype == np.float32 and labels.dtype == np.int64
        assert np.array_equal(images.ravel(), labels) and batch.weight == len(labels) == len(images)
        rows.append(labels.tolist())
    return rows


shapes = st.tuples(st.integers(1, 8), st.integers(1, 9)).flatmap(
    lambda pair: st.tuples(st.integers(min(2, pair[1]) * pair[0], 150), st.just(pair[1]), st.just(pair[0]))
)


uneven = shapes.flatmap(
    lambda shape: st.tuples(
        st.just(shape), st.lists(st.floats(0.01, 100, allow_subnormal=False), min_size=shape[2], max_size=shape[2])
    )
)


@settings(max_examples=80)
@given(uneven, st.integers(0, 5))
def test_epoch_laws(shape: tuple[tuple[int, int, int], list[float]], epoch: int) -> None:
    (samples, batch_size, size), shares = shape
    ranks = loaders(samples, batch_size, size, 3, shares)
    runs, even = ([list(each.epoch(epoch)) for each in these] for these in (ranks, loaders(*shape[0], 3)))
    drawn = np.concatenate([batch.arrays[1] for run in runs for batch in run])
    assert np.array_equal(np.sort(drawn), np.arange(samples)), "disjoint and covering"
    assert {len(run) for run in runs} == {ranks[0].steps_per_epoch}, "equal step counts"
    assert [batch.weight for batch in next(zip(*runs, strict=True))] == ranks[0].rank_samples
    least = min(2, batch_size)
    for step, other in zip(zip(*runs, strict=True), zip(*even, strict=True), strict=True):
        labels, evenly = (np.concatenate([batch.arrays[1] for batch in each]) for each in (step, other))
        assert np.array_equal(labels, evenly), "the same global batch"
        sizes = [batch.weight for batch in other]
        assert max(sizes) - min(sizes) <= 1 and least <= min(sizes) and max(sizes) <= batch_size + 2, "even"
        weights, total = [batch.weight for batch in step], len(labels)
        assert {batch.total_weight for batch in step} == {total}
        assert min(weights) >= least, "never too small for BatchNorm"
        fair = [total * share / sum(shares) for share in shares]
        if min(fair) >= least + 1:
            assert max(abs(weight - part) for weight, part in zip(weights, fair, strict=True)) < 1 + 1e-9


@settings(max_examples=25)
@given(shapes, st.integers(0, 2**32), st.data())
def test_an_epoch_is_a_pure_function_and_start_is_its_tail(
    shape: tuple[int, int, int], seed: int, data: st.DataObject
) -> None:
    loader = loaders(*shape, seed)[-1]
    whole = seen(loader.epoch(3))
    step, ends = data.draw(st.integers(0, len(whole))), [0, *loader.ends()]
    assert seen(loader.epoch(3)) == whole
    assert seen(loader.epoch(3, ends[step])) == whole[step:]
    assert loader.ends(ends[step]) == ends[step + 1 :] and loader.step_at(ends[step]) == step


@settings(max_examples=80)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 40), st.integers(1, 150), st.data())
def test_others_go_on_where_some_stopped(before: int, now: int, batch: int, samples: int, data: st.DataObject) -> None:
    """Whatever both numbers of ranks and the global batch, which neither has to divide: an epoch has each sample once,
    in the same order, and only the last two steps may be cut in another way."""

    def ranks(count: int) -> list[Loader]:
        return [Loader(numbered(samples), global_batch=batch, rank=r, size=count, seed=1) for r in range(count)]

    def drawn(loaders: list[Loader], start: int) -> list[list[int]]:
        """The labels of each step, over all ranks."""
        steps = zip(*(seen(loader.epoch(2, start)) for loader in loaders), strict=True)
        return [[label for rank in step for label in rank] for step in steps]

    if min(samples // 2, batch) < max(before, now):
        return
    alone, first, others = ranks(1), ranks(before), ranks(now)
    order = [label for step in drawn(alone, 0) for label in step]
    stop = data.draw(st.sampled_from(first[0].ends()))
    room = first[0].has_room(stop, now, batch)
    try:
        rest = drawn(others, stop)
        assert room
    except Failure as failure:
        assert not room
        left, fewer = samples - stop, int(str(failure).rsplit(" or fewer")[0].rsplit(maxsplit=1)[-1])
        assert f"{left} samples left in the epoch are too few for {now} ranks" in str(failure)
        assert 0 < left < 2 * now and fewer < now
        rest = drawn(ranks(fewer), stop)
    done = [label for step in drawn(first, 0) for label in step][:stop]
    assert done + [label for step in rest for label in step] == order
    assert all(len(step) == batch for step in rest[:-2])


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(2, 9), st.integers(2, 150), st.data())
def test_short_epochs_are_a_pass_cut_into_pieces(size: int, batch: int, samples: int, data: st.DataObject) -> None:
    """Without repeats, of equal numbers of steps, and what is left over is another part in the next pass."""
    if samples < 2 * size:
        return
    epoch, split = data.draw(st.integers(2 * size, samples)), numbered(samples)
    count, whole = samples // epoch, batch * size
    ranks = [Loader(split, global_batch=whole, rank=r, size=size, seed=1, epoch_samples=epoch) for r in range(size)]

    def drawn(loaders: list[Loader], number: int) -> list[int]:
        """The labels of an epoch, in order, over all ranks."""
        steps = zip(*(seen(loader.epoch(number)) for loader in loaders), strict=True)
        return [label for step in steps for rank in step for label in rank]

    pieces = [drawn(ranks, number) for number in range(2 * count)]
    for through in range(2):
        order = drawn(loaders(samples, batch, size, seed=1), through)
        assert [*itertools.chain(*pieces[through * count :][:count])] == order[: count * epoch]
    assert {len(piece) for piece in pieces} == {epoch}
    ends = ranks[0].ends()
    stop = data.draw(st.sampled_from([0, *ends[:-1]]))
    assert seen(ranks[0].epoch(1, stop)) == seen(ranks[0].epoch(1))[ranks[0].step_at(stop) :]


@pytest.mark.parametrize(
    ("samples", "batch_size", "size", "totals"),
    [
        (64, 8, 2, [16, 16, 16, 16]),
        (68, 8, 2, [16, 16, 16, 16, 4]),  # short, but two for each rank
        (67, 8, 2, [16, 16, 16, 10, 9]),  # three for two ranks: joined and halved
        (7, 8, 2, [7]),
        (9, 2, 2, [4, 5]),  # halves would be too small: joined only
        (3, 1, 2, [3]),
    ],
)
def test_tiny_last_batches_are_joined(samples: int, batch_size: int, size: int, totals: list[int]) -> None:
    assert [batch.total_weight for batch in loaders(samples, batch_size, size)[0].epoch(0)] == totals


def test_too_few_samples_is_a_failure() -> None:
    with failing(BAD_CONFIG, "too few for 4 ranks"):
        loaders(7, 8, 4)
    with pytest.raises(Failure, match="an epoch of 8 samples is longer than the training set of 7"):
        Loader(numbered(7), global_batch=2, rank=0, size=1, seed=0, epoch_samples=8)


@settings(max_examples=40)
@given(st.integers(0, 60), st.integers(1, 9), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shards_by_shares_cover_in_order(samples: int, batch_size: int, shares: list[float]) -> None:
    split, size = numbered(samples), len(shares)
    runs = [list(shard(split, batch_size=batch_size, rank=r, size=size, shares=shares)) for r in range(size)]
    assert [label for run in runs for labels in seen(iter(run)) for label in labels] == list(range(samples))
    first = (shard(split, batch_size=batch_size, rank=rank, size=size, most=batch_size) for rank in range(size))
    expected = list(range(min(batch_size, samples)))
    assert [label for run in first for labels in seen(run) for label in labels] == expected
    for run, share in zip(runs, shares, strict=True):
        assert abs(sum(batch.weight for batch in run) - samples * share / sum(shares)) < 1 + 1e-9
    for step in range(max(map(len, runs))):
        here = [run[step] for run in runs if step < len(run)]
        assert {batch.total_weight for batch in here} == {sum(batch.weight for batch in here)}


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_every_stored_value_becomes_its_float(dtype: str) -> None:
    if dtype == "uint8":
        stored = np.arange(256, dtype=np.uint8)
        expected = stored / np.float32(255)
    else:  # every float16 in 0..1, subnormals included
        stored = np.arange(0x3C01, dtype=np.uint16).view(np.float16).astype(dtype)
        expected = stored.astype(np.float32)
    split = ImageSplit(samples=stored.reshape(1, 1, -1, 1), labels=np.zeros(1, np.int64))
    (batch,) = Loader(split, global_batch=1, rank=0, size=1, seed=0).epoch(0)
    assert np.allclose(batch.arrays[0].ravel(), expected, rtol=2e-7 if dtype == "uint8" else 0, atol=0)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_gathering_allocates_the_batch_and_no_more(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "samples.npy", np.zeros((256, 64, 64, 1), dtype))
    samples: NDArray[np.generic] = np.asarray(np.load(tmp_path / "samples.npy", mmap_mode="r"))
    split = ImageSplit(samples=samples, labels=np.zeros(256, np.int64))
    batches = Loader(split, global_batch=128, rank=0, size=1, seed=0)._batches(0, 0)
    tracemalloc.start()
    try:
        batch = next(batches)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < batch.arrays[0].nbytes + 64 * 1024


def prefetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hvdtrain-prefetch"]


def test_prefetch_overlaps() -> None:
    """While one batch is in use, the next one is made."""
    made = [threading.Event() for _ in range(8)]

    def batches() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    for number in _prefetch(batches()):
        assert all(event.wait(60) for event in made[number + 1 : number + 2])


def test_prefetch_stays_two_ahead_and_ends_when_closed() -> None:
    produced = []
    batches = _prefetch(produced.append(n) or n for n in range(10**9))  # type: ignore[func-returns-value]
    assert next(batches) == 0
    time.sleep(0.05)
    assert len(produced) <= 4, "one taken, two ready, one in hand"
    batches.close()  # type: ignore[attr-defined]
    assert not prefetchers()


def test_prefetch_hands_exceptions_over() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    batches = _prefetch(broken())
    assert next(batches) == 1
    with pytest.raises(OSError, match="disk gone"):
        next(batches)
    assert not prefetchers()


class Keyed(ImageSplit):
    """A split whose batches are their keys."""

    def batch(self, mine: NDArray[np.int64], everyones: NDArray[np.int64], key: int | None) -> Batch:
        return Batch(arrays=(np.array(key),), weight=len(mine), total_weight=len(everyones))


def test_no_two_batches_of_a_run_draw_from_one_key_and_a_resumed_one_draws_from_the_same() -> None:
    split = Keyed(samples=np.zeros((64, 1, 1, 1), np.float32), labels=np.zeros(64, np.int64))

    def keys(seed: int, rank: int, epoch: int, start: int = 0) -> list[int]:
        loader = Loader(split, global_batch=16, rank=rank, size=2, seed=seed, micro_batches=2)
        return [int(part.arrays[0]) for batch in loader.epoch(epoch, start) for part in batch.parts]

    every = [key for which in itertools.product(range(2), repeat=3) for key in keys(*which)]
    assert len(set(every)) == len(every) == 8 * 4 * 2
    assert keys(0, 1, 1, start=32) == keys(0, 1, 1)[4:]


@pytest.mark.parametrize(("micro_batches", "parts"), [(3, [2, 3, 3]), (5, [2, 2, 2, 2])])
def test_micro_batches_are_their_batch_in_order_and_know_how_many_samples_the_step_has(
    micro_batches: int, parts: list[int]
) -> None:
    """On all ranks: each part's loss is divided by that."""
    whole, cut = (
        Loader(numbered(48), global_batch=16, rank=1, size=2, seed=1, micro_batches=count)
        for count in (1, micro_batches)
    )
    for batch, other in zip(whole.epoch(0), cut.epoch(0), strict=True):
        assert [part.weight for part in other.parts] == parts
        assert (other.weight, other.total_weight) == (batch.weight, batch.total_weight) == (8, 16)
        assert {part.total_weight for part in (other, *other.parts)} == {16}
        assert [label for rows in seen(iter(other.parts or [other])) for label in rows] == seen(iter([batch]))[0]
