"""Runs that are not comparable give no ratio and no mean in any table, figure or sentence; a reason is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs

from hvdtrain.results import comparability, groups
from hvdtrain.results.figures import panels
from hvdtrain.results.read.frame import load
from hvdtrain.results.report import document

UNLIKE: dict[str, dict[str, Any]] = {
    "threads": {"threads": 2},
    "cores": {"cores": 2.0},
    "device": {"device": "cuda:0"},
    "precision": {"config": {"precision": "bf16"}},
    "batch": {"rank_batch": 128},
    "parameters": {"parameters": 2000},
    "data set": {"fingerprint": "0ff1"},
    "training samples": {"steps_per_epoch": 6},
    "epochs": {"epochs": 3},
}


def pair(folder: Path, **one: Any) -> Path:
    """Two hosts that train eight times as fast as one, which differs in `one`. All reach 95 %, with power sampling."""
    for hosts, changes in ((1, {"rank_batch": 32} | one), (2, {"rank_batch": 16})):
        for seed in range(2):
            runs.make(
                folder / f"h{hosts}-s{seed}",
                hosts=hosts,
                seed=seed,
                energy_w={"cpu0": 10.0},
                train_s=900.0 / hosts**3 + seed,
                test_accuracy=0.96,
                **changes,
            )
    return folder


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_runs_give_no_ratio_anywhere(name: str, tmp_path: Path) -> None:
    root = pair(tmp_path / "runs", **UNLIKE[name])
    label = {"cores": "cores per host", "threads": "threads per rank", "batch": "batch per rank"}.get(name, name)
    scaling = runs.results("scaling", root)
    assert all(row["speedup"] is row["efficiency"] is None for row in scaling["rows"])
    assert all(text.startswith("Nothing to compare with: ") for text in scaling["readings"].values())
    assert all(label in text for text in scaling["readings"].values())
    strategies = runs.results("strategies", root)
    assert {row["speedup"] for row in strategies["rows"] if row["hosts"] == 2} == {None}
    what = "batch" if name == "batch" else label  # the global batch
    assert any(what in text for text in strategies["readings"].values())
    energy = runs.results("energy", root)
    refused = [row for row in energy["rows"] if row["edp"] is None]
    assert bool(refused) == (name != "device"), "energy compares devices"
    assert any(note.startswith("no EDP of") and label in note for note in energy["notes"]) == (name != "device")
    readings = repr([table.readings for table in document.tables(load([root]))])
    assert "Nothing to compare with" in readings
    assert not any(words in readings for words in ("x as fast", "x as long", "makes training"))


def test_an_efficiency_above_110_percent_is_suspect(tmp_path: Path) -> None:
    root = pair(tmp_path, threads=1)
    table = runs.results("scaling", root)
    assert [row["suspect"] for row in table["rows"]] == [False, True]
    ((title, reading),) = table["readings"].items()
    assert "strong scaling: equal global batch" in title
    assert reading.startswith("Suspect: an efficiency of 398 % with 2 hosts")
    assert all(cause in reading for cause in ("spin", "busy", "unequal", "cache"))
    assert "suspect" in next(iter(runs.results("strategies", root)["readings"].values()))


def test_a_missing_run_is_named(tmp_path: Path) -> None:
    runs.make(tmp_path / "two", hosts=2)
    (text,) = runs.results("scaling", tmp_path)["readings"].values()
    assert "only one number of hosts was timed. Missing: 1 host like two." in text
    asked = ("--lr", "2", "--run-dir", "r", "--password", "secret")
    runs.make(tmp_path / "other", hosts=3, strategy="int4", argv=asked)
    (text,) = runs.results("scaling", tmp_path)["readings"].values()
    assert text.count("`hvdtrain launch mpirun -H h0:1 python -m hvdtrain.resnet`") == 1, "once for all"
    runs.make(tmp_path / "one", threads=9, steps_per_epoch=9, argv=asked)
    (text,) = runs.results("scaling", tmp_path, "--where", "hosts=1")["readings"].values()
    assert text.endswith("`hvdtrain launch mpirun -H h0:1,OTHER:1 python -m hvdtrain.resnet --lr 2 --password '***'`")


def test_values_that_one_side_did_not_record_are_assumed_equal_with_a_note(tmp_path: Path) -> None:
    root = pair(tmp_path, threads=None, config={"precision": None})
    table = runs.results("scaling", root)
    assert table["rows"][1]["speedup"] is not None
    assert any("did not record precision, threads per rank" in note for note in table["notes"])


def test_unequal_hosts_are_not_comparable_with_a_single_one(tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "two", hosts=2, cores=0.5)
    with runs.edited(folder / "manifest.json") as manifest:
        manifest["ranks"][1]["cores"] = 2.0
    runs.make(tmp_path / "one", cores=0.5, rank_batch=64)
    one, two = groups.by(load([tmp_path]).runs)
    assert comparability.differing(one, two, comparability.SAME) == ["cores"]


def test_hosts_with_different_cores_have_their_own_baselines(tmp_path: Path) -> None:
    for hosts, cores in ((1, 2.0), (1, 0.5), (2, 0.5)):
        runs.make(tmp_path / f"{hosts}-{cores}", hosts=hosts, cores=cores, rank_batch=32 // hosts)
    rows = runs.results("scaling", tmp_path)["rows"]
    compared = [row for row in rows if row["count"] == 2]
    assert [row["count"] for row in rows].count(1) == 1 + len(compared) == 2
    assert all("cores per host 0.5" in row["curve"] for row in compared)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One config with three launchers and two backends, and on one host with busy and with idle neighbours."""
    root = tmp_path_factory.mktemp("launched")
    for hosts, launcher, backend, fill, train_s in (
        (1, "launch/mpirun.sh", "none", 3, 12.0),
        (1, "launch/mpirun.sh", "none", None, 10.0),
        (2, "launch/mpirun.sh", "mpi", None, 13.0),
        (2, "horovodrun", "mpi", None, 17.0),
        (2, "horovodrun --gloo", "gloo", None, 30.0),
        (4, "horovodrun --gloo", "gloo", None, 31.0),
    ):
        for seed in range(2):
            runs.make(
                root / f"{train_s}-{seed}",
                hosts=hosts,
                rate_mbit=10.0 if hosts > 1 else None,
                backend=backend,
                rank_batch=128 // hosts,
                train_s=train_s,
                accuracies=(0.5, 0.96),
                seed=seed,
                kind="timing",
                settings={"launcher": launcher, "cluster": {"fill": fill} if fill else {}},
            )
    return root


def test_runs_of_different_launchers_are_never_averaged(launched: Path) -> None:
    """Neither in a table nor in a figure. Of two equal baselines, the one with busy neighbours is used."""
    table = runs.results("table", launched)["rows"]
    assert sorted(row["train_s"]["mean"] for row in table) == [10, 12, 13, 17, 30, 31]
    assert all(row["train_s"]["min"] == row["train_s"]["max"] and row["n"] == 2 for row in table)
    assert len({(row["launcher"], row["fill"], row["hosts"]) for row in table}) == 6
    curves: dict[str, list[float]] = {}
    for row in runs.results("scaling", launched)["rows"]:
        curves.setdefault(row["curve"], []).append(row["train_s"]["mean"])
    assert sorted(curves.values()) == [[10], [12, 13], [12, 17], [12, 30, 31]]
    assert sum("baseline 1 host with 3 busy neighbours" in title for title in curves) == 3
    loaded = load([launched])
    split = panels.curves(loaded, "hosts", "").items()
    drawn = [(title, rows[-1].group.key["rate_mbit"]) for title, panel in split for rows in panel]
    assert len(drawn) == len(set(drawn)) == 4
    keys = [
        (title, group.key["hosts"], group.key["rate_mbit"])
        for title, members in panels.split(loaded, "step_s", "").items()
        for group in members
    ]
    assert len(keys) == len(set(keys)) == 6


def test_energy_runs_alone_are_not_a_baseline(tmp_path: Path) -> None:
    for hosts, kind in ((1, "energy"), (2, "timing"), (4, "timing")):
        runs.make(tmp_path / str(hosts), hosts=hosts, rank_batch=32 // hosts, kind=kind, rate_mbit=10.0)
    rows = runs.results("scaling", tmp_path)["rows"]
    assert [row["count"] for row in rows if row["speedup"]] == [2, 4]


def test_a_resumed_run_is_a_repeat(tmp_path: Path) -> None:
    """Its config contains the micro-batches that the other run leaves to the default."""
    for seed, micro_batches in enumerate((None, 1)):
        folder = runs.make(tmp_path / str(seed), seed=seed, config={"micro_batches": micro_batches})
        with runs.edited(folder / "manifest.json") as manifest:
            manifest["plan"]["micro_batches"] = 1
    (group,) = groups.by(load([tmp_path]).runs)
    assert group.n == 2


NETWORK: dict[str, list[dict[str, Any]]] = {
    "delay": [{"throttle": {"up_mbit": 10.0, "down_mbit": 10.0, "delay_ms": delay}} for delay in (0.0, 50.0)],
    "loss": [{"throttle": {"up_mbit": 10.0, "down_mbit": 10.0, "loss_percent": loss}} for loss in (None, 2.0)],
    "direction": [{"throttle": {"up_mbit": up, "down_mbit": 10.0}} for up in (10.0, 1000.0)],
    "goodput": [{"throttle": None, "goodput_mbit": goodput} for goodput in (9400.0, 940.0, 94.0)],
}


def two_hosts(folder: Path, changes: list[dict[str, Any]], where: str = "links", **more: Any) -> Path:
    """Three runs of two hosts for each change of the manifest's links, or of the manifest, and three of one host."""
    for number, change in enumerate(changes):
        for seed in range(3):
            made = runs.make(folder / f"{number}-{seed}", hosts=2, rank_batch=16, seed=seed, train_s=10 + seed, **more)
            with runs.edited(made / "manifest.json") as manifest:
                for each in manifest["links"] if where == "links" else [manifest]:
                    near = {"goodput_mbit": (1 + seed / 20) * change.get("goodput_mbit", 9)} if where == "links" else {}
                    each |= change | near
            if not number:
                runs.make(folder / f"one-{seed}", hosts=1, rank_batch=32, seed=seed, train_s=15 + seed)
    return folder


@pytest.mark.parametrize("what", NETWORK)
def test_runs_on_other_networks_are_no_repeats_and_the_single_host_is_the_baseline_of_each(
    what: str, tmp_path: Path
) -> None:
    root = two_hosts(tmp_path / "runs", NETWORK[what])
    found = groups.by(groups.usable(load([root]).runs))
    assert sorted((group.key["hosts"], group.n) for group in found) == [(1, 3)] + [(2, 3)] * len(NETWORK[what])
    table = runs.results("scaling", root)
    assert len(table["readings"]) == len(NETWORK[what]), "their titles tell them apart"
    assert sum(row["count"] == 2 and row["speedup"] is not None for row in table["rows"]) == len(NETWORK[what])
    strategies = runs.results("strategies", root)
    assert len(strategies["readings"]) == len(NETWORK[what])


@pytest.mark.parametrize("name", ["framework version", "git commit"])
def test_runs_of_other_software_are_no_repeats_and_their_means_are_next_to_each_other(
    name: str, tmp_path: Path
) -> None:
    change = {"versions": {"torch": "2.4.0"}} if name == "framework version" else {"git_commit": "beef" * 10}
    root = two_hosts(tmp_path / "runs", [{}, change], "manifest")
    found = groups.by(groups.usable(load([root]).runs))
    assert sorted((group.key["hosts"], group.n) for group in found) == [(1, 3), (2, 3), (2, 3)]
    readings = runs.results("scaling", root)["readings"].values()
    assert any(text.startswith("Nothing to compare with: ") and name in text for text in readings)
    before, after = two_hosts(tmp_path / "a", [{}], "manifest"), two_hosts(tmp_path / "b", [change], "manifest")
    rows = runs.results("table", before, after, "--where", "hosts=2")["rows"]
    assert len({row[name.replace(" ", "_")] for row in rows}) == len(rows) == 2
    assert {(row["n"], row["train_s"]["mean"]) for row in rows} == {(3, 11.0)}


def test_a_goodput_that_varies_as_measurements_do_divides_no_repeats(tmp_path: Path) -> None:
    root = two_hosts(tmp_path / "runs", [{"throttle": None, "goodput_mbit": 90.0}])
    assert sorted(group.n for group in groups.by(groups.usable(load([root]).runs))) == [3, 3]


@pytest.mark.parametrize(("accuracy", "equal"), [(0.2, False), (0.6, True), (0.595, True), (0.9, True)])
def test_more_hosts_are_not_faster_if_the_same_epochs_learn_less(accuracy: float, equal: bool, tmp_path: Path) -> None:
    for hosts, score in ((1, 0.6), (2, accuracy)):
        for seed in range(3):
            made = {"steps_per_epoch": 8 // hosts, "train_s": 1.2 / hosts + seed / 100, "test_accuracy": score}
            runs.make(tmp_path / f"{hosts}-{seed}", hosts=hosts, seed=seed, **made)
    (reading,) = runs.results("scaling", tmp_path)["readings"].values()
    assert ("makes training faster" in reading) == equal
    assert ("test accuracy 60 % with 1 host, test accuracy 20 % with 2 hosts" in reading) == (not equal)
