"""The bundled digits, the table of data sets, and the cut into parts."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from conftest import failing
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from hvdtrain.data import apportion, digits, load, stratify
from hvdtrain.system.exits import BAD_CONFIG


def test_digits_are_scikit_learns() -> None:
    """At their own size, in some order, all of them and nothing else."""
    dataset, original = load("digits", (8, 8)), load_digits()
    parts = (dataset.train, dataset.validation, dataset.test)
    ours = np.concatenate([np.c_[part.samples.reshape(len(part), -1) * 16, part.labels] for part in parts])
    theirs = np.c_[original.data, original.target]
    assert np.array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])


def test_digits_split_is_fixed_and_stratified() -> None:
    dataset = load("digits", None)
    assert dataset.image_shape == (32, 32, 1) and dataset.classes == tuple("0123456789")
    assert [len(dataset.train), len(dataset.validation), len(dataset.test)] == [1437, 126, 234]
    for part, share in ((dataset.train, 0.80), (dataset.validation, 0.07), (dataset.test, 0.13)):
        assert part.samples.dtype == np.float32 and 0 <= part.samples.min() < part.samples.max() <= 1
        whole = np.bincount(load_digits().target)
        assert np.all(np.abs(np.bincount(part.labels) - share * whole) < 2)
    assert dataset.fingerprint == digits.load().fingerprint != digits.load((16, 16)).fingerprint


shares = st.tuples(st.integers(1, 100), st.integers(0, 99)).filter(lambda pair: sum(pair) <= 100)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), shares)
def test_apportion_is_exact(counts: list[int], pair: tuple[int, int]) -> None:
    percent = (*pair, 100 - sum(pair))
    table = apportion(counts, [Fraction(part, 100) for part in percent])
    assert table.min() >= 0 and table.sum(axis=1).tolist() == counts
    for given_, part in zip(table.sum(axis=0).tolist(), percent, strict=True):
        assert abs(given_ - sum(counts) * part / 100) < 2
        assert part or not given_, "nothing for a share of nothing"
    if all(sum(counts) * part % 100 == 0 for part in percent):
        assert table.sum(axis=0).tolist() == [sum(counts) * part // 100 for part in percent]


@given(st.lists(st.integers(0, 4), min_size=10, max_size=80), st.integers(0, 2**32), st.data())
def test_taking_a_sample_out_keeps_the_others_in_their_order(labels: list[int], seed: int, data: st.DataObject) -> None:
    lots = np.random.default_rng(seed).permutation(len(labels)).astype(np.uint64)
    cut = [Fraction(part, 100) for part in (60, 20, 20)]
    order, table = stratify(np.array(labels), lots, 5, cut)
    assert sorted(order) == list(range(len(labels)))
    borders = table.sum(axis=0).cumsum()
    for part in np.split(order, borders[:-1]):
        assert np.all(np.diff(lots[part].astype(int)) > 0)
    gone = data.draw(st.integers(0, len(labels) - 1))
    rest = np.delete(np.arange(len(labels)), gone)
    again, less = stratify(np.array(labels)[rest], lots[rest], 5, cut)
    before = np.repeat(range(3), table.sum(axis=0))[np.argsort(order)]
    after = np.repeat(range(3), less.sum(axis=0))[np.argsort(again)]
    assert np.sum(before[rest] != after) <= 2 * 5, "few change their part"


def test_a_size_the_folder_does_not_have(tmp_path_factory: pytest.TempPathFactory) -> None:
    from PIL import Image

    from hvdtrain.data.images import ImagesConfig, prepare

    folder = tmp_path_factory.mktemp("sizes")
    for name in "ab":
        (folder / "in" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (9, 9), number).save(folder / "in" / name / f"{number}.png")
    out = folder / "out"
    prepare(ImagesConfig(source=str(folder / "in"), destination=str(out), size="5x4", split="60/20/20", workers=1))
    assert load(str(out), None).image_shape == load(str(out), (5, 4)).image_shape == (4, 5, 3)
    with failing(BAD_CONFIG, "images of 5x4, not 8x8"):
        load(str(out), (8, 8))
