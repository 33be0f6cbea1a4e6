"""No ratio and no mean of runs that are not alike, in any table, figure or sentence; and what is said in its place."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
from test_results import json_of

from hvdtrain.results import alike, groups, plots, report_words
from hvdtrain.results.__main__ import main
from hvdtrain.results.figures import panels
from hvdtrain.results.load import load
from hvdtrain.results.scaling_table import scaling
from hvdtrain.results.strategies import strategies
from hvdtrain.system.exits import Failure

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
ARGV = ("--width", "0.25", "--seed=1", "--run-dir", "results/mine", "--threads", "7", "--json")


def pair(folder: Path, **one: Any) -> Path:
    """One host nine times as slow as two, which differ from it as `one` says; both reach 95 %, both measured power."""
    for hosts, changes in ((1, {"rank_batch": 32} | one), (2, {"rank_batch": 16})):
        for seed in range(2):
            runs.make(
                folder / f"h{hosts}-s{seed}",
                hosts=hosts,
                seed=seed,
                argv=ARGV,
                energy_w={"cpu0": 10.0},
                train_s=900.0 / hosts**3 + seed,
                test_accuracy=0.96,
                **changes,
            )
    return folder


@pytest.mark.parametrize("name", UNLIKE)
def test_runs_that_are_not_alike_give_no_ratio_anywhere(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = pair(tmp_path / "runs", **UNLIKE[name])
    label = {"cores": "cores per host", "threads": "threads per rank", "batch": "batch per rank"}.get(name, name)
    found = json_of(capsys, "scaling", str(root))
    assert all(row["speedup"] is row["efficiency"] is None for row in found["rows"])
    assert all(text.startswith("Nothing to compare with: ") and label in text for text in found["readings"].values())
    ways = json_of(capsys, "strategies", str(root))
    assert {row["speedup"] for row in ways["rows"] if row["hosts"] == 2} == {None}
    what = "batch" if name == "batch" else label  # the global one
    assert any(what in text for text in ways["readings"].values())
    joules, _ = json_of(capsys, "energy", str(root))["tables"]
    ours = [row for row in joules["rows"] if row["edp"] is None]
    assert bool(ours) == (name != "device"), "energy compares devices"
    assert any(note.startswith("no EDP of") and label in note for note in joules["notes"]) == (name != "device")
    with pytest.raises(Failure, match=rf"nothing to compare: .* differ in .*{label}"):
        main(["compare", str(root / "h1-s0"), str(root / "h2-s0")])
    loaded = load([root])
    for kind in ("speedup", "efficiency"):
        with pytest.raises(Failure, match="results scaling"):
            plots.draw(kind, loaded)
    said = [report_words.answers(table) for table in (scaling(loaded)[0], strategies(loaded))]
    assert all("Nothing to compare with" in repr(sentences) for sentences in said)
    text = repr([said, report_words.findings(loaded.runs)])
    assert not any(words in text for words in ("x as fast", "times as", "makes training"))


def test_alike_runs_are_compared_and_an_efficiency_above_110_percent_is_suspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = pair(tmp_path, threads=1)
    found = json_of(capsys, "scaling", str(root))
    assert [row["suspect"] for row in found["rows"]] == [False, True]
    ((title, reading),) = found["readings"].items()
    assert "strong scaling: equal global batch" in title
    assert reading.startswith("Suspect: an efficiency of 398 % with 2 hosts")
    assert all(cause in reading for cause in ("spin", "busy", "not equal", "cache"))
    for kind in ("speedup", "efficiency"):
        (words,) = [text.get_text() for axis in plots.draw(kind, load([root])).axes for text in axis.texts]
        assert words.endswith("suspect")
    assert "suspect" in next(iter(json_of(capsys, "strategies", str(root))["readings"].values()))


def test_the_command_makes_the_run_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its flags are those of the run that it is to be like, on the first of its hosts."""
    root = pair(tmp_path, threads=2)
    for text in json_of(capsys, "scaling", str(root))["readings"].values():
        (command,) = (line for line in text.splitlines() if line.startswith("    "))
        start, _, flags = command.strip().partition(" python -m hvdtrain.resnet ")
        assert shlex.split(start) == ["launch/mpirun.sh", "-H", "h0:1"]
        assert shlex.split(flags) == ["--width", "0.25", "--seed=1", "--threads", "1"]
    with pytest.raises(Failure, match=r"missing is B like A: `.*-H h0:1,h1:1 .* --threads 2"):
        main(["compare", str(root / "h1-s0"), str(root / "h2-s0")])
    made = runs.make(tmp_path / "made", rank_batch=32)
    readings = json_of(capsys, "scaling", str(root))["readings"].values()
    assert not any("Missing" in text for text in readings), "it is there now"
    shutil.rmtree(made)
    for path in root.glob("h1-*"):
        path.rename(tmp_path.parent / f"{tmp_path.name}-{path.name}")
    (text,) = json_of(capsys, "scaling", str(root))["readings"].values()
    assert "only one number of hosts was timed. Missing: 1 host like h2-s0" in text


def test_the_command_of_a_larger_run_asks_for_another_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two hosts like one that ran, and the same batch on both sides of a comparison."""
    one, other = (
        runs.make(
            tmp_path / f"{batch}", rank_batch=batch, argv=("--batch-size", f"{batch}"), steps_per_epoch=640 // batch
        )
        for batch in (32, 64)
    )
    (text,) = json_of(capsys, "scaling", str(one))["readings"].values()
    command = "launch/mpirun.sh -H h0:1,SECOND_HOST:1 python -m hvdtrain.resnet --batch-size 32 --threads 1"
    assert text.splitlines()[1].strip() == command
    with pytest.raises(Failure) as failure:
        main(["compare", str(one), str(other)])
    like = "python -m hvdtrain.resnet --threads 1 --global-batch-size 32"
    assert f"missing is B like A: `{like}`" in str(failure.value)


def test_what_older_records_lack_makes_no_difference_but_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = pair(tmp_path, threads=None, config={"precision": None})
    found = json_of(capsys, "scaling", str(root))
    assert found["rows"][1]["speedup"] is not None
    assert any("precision, threads per rank not recorded" in note for note in found["notes"])


def test_a_baseline_may_differ_in_what_the_user_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = pair(tmp_path, threads=2)
    for test, compared in (("hosts=1", False), ("hosts=1 and threads=2", True)):
        found = json_of(capsys, "scaling", str(root), "--baseline", test)
        assert any(row["speedup"] and row["count"] == 2 for row in found["rows"]) is compared


def test_hosts_that_are_not_equal_are_like_no_single_one(tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "two", hosts=2, cores=0.5)
    document = json.loads((folder / "manifest.json").read_text())
    document["ranks"][1]["cores"] = 2.0
    (folder / "manifest.json").write_text(json.dumps(document))
    runs.make(tmp_path / "one", cores=0.5, rank_batch=64)
    one, two = groups.by(load([tmp_path]).runs)
    assert alike.differing(one, two, alike.SAME) == ["cores"]


@pytest.fixture(scope="module")
def otherwise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One config, started by three launchers over two carriers, and on one host beside busy or idle ones."""
    root = tmp_path_factory.mktemp("otherwise")
    for hosts, launcher, carrier, fill, train_s in (
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
                collectives=carrier,
                rank_batch=128 // hosts,
                train_s=train_s,
                accuracies=(0.5, 0.96),
                seed=seed,
                kind="timing",
                asked={"launcher": launcher, "cluster": {"fill": fill} if fill else {}},
            )
    return root


def test_what_was_started_otherwise_is_never_averaged(otherwise: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In no table, no figure and no sentence; of two equal baselines it is the one beside busy hosts."""
    found = json_of(capsys, "table", str(otherwise))["rows"]
    assert sorted(row["train_s"]["mean"] for row in found) == [10, 12, 13, 17, 30, 31]
    assert all(row["train_s"]["min"] == row["train_s"]["max"] and row["n"] == 2 for row in found)
    assert len({(row["launcher"], row["fill"], row["hosts"]) for row in found}) == 6
    curves: dict[str, list[float]] = {}
    for row in json_of(capsys, "scaling", str(otherwise))["rows"]:
        curves.setdefault(row["curve"], []).append(row["train_s"]["mean"])
    assert sorted(curves.values()) == [[10], [12, 13], [12, 17], [12, 30, 31]]
    assert sum("baseline 1 host beside 3 busy ones" in title for title in curves) == 3
    loaded = load([otherwise])
    drawn = [(one.title, mbit) for one in panels.compare(loaded.runs, "hosts", "speedup", "") for mbit, _ in one.curves]
    assert len(drawn) == len(set(drawn)) == 3
    parts = list(panels.split(groups.usable(loaded.runs)))
    assert len({title for title, _ in parts}) == len(parts)
    assert all(same["train_s"].nunique() == 1 for _, part in parts for _, same in part.groupby("hosts"))
    for table in (scaling(loaded)[0], strategies(loaded)):
        assert all(said.count("two hosts") < 2 for said in report_words.answers(table))


def test_a_group_of_energy_runs_is_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for hosts, kind in ((1, "energy"), (2, "timing"), (4, "timing")):
        runs.make(tmp_path / str(hosts), hosts=hosts, rank_batch=32 // hosts, kind=kind, rate_mbit=10.0)
    found = json_of(capsys, "scaling", str(tmp_path))["rows"]
    assert [row["count"] for row in found if row["speedup"]] == [2, 4]


def test_gpus_have_no_cores_and_unlike_processors_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for hosts, device, cpu in ((1, "cpu", "new"), (2, "cpu", "new"), (1, "cuda:0", "new"), (2, "cuda:0", "old")):
        cores = 1.0 if device == "cpu" else None
        made = runs.Made(hosts=hosts, device=device, cpu=cpu, cores=cores, rank_batch=32 // hosts)
        runs.make(tmp_path / f"{hosts}{device}", made)
    found = json_of(capsys, "scaling", str(tmp_path))
    assert not any("None" in row["curve"] for row in found["rows"])
    assert "careful: not all on one processor: new; old" in found["notes"]
    same = json_of(capsys, "scaling", str(tmp_path), "--where", "device=cpu")
    assert not any("careful" in note for note in same["notes"])
    runs.make(tmp_path / "other", hosts=2, cpu="old", rank_batch=16)
    assert main(["compare", str(tmp_path / "2cpu"), str(tmp_path / "other")]) == 0
    assert "careful: not all on one processor: new; old" in capsys.readouterr().out


def test_a_resumed_run_is_put_with_its_repeats(tmp_path: Path) -> None:
    """Its config names the micro-batches that the others' leave to the default."""
    for seed, parts in enumerate((None, 1)):
        path = runs.make(tmp_path / str(seed), seed=seed, config={"micro_batches": parts}) / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["plan"]["micro_batches"] = 1
        path.write_text(json.dumps(manifest))
    (group,) = groups.by(load([tmp_path]).runs)
    assert group.n == 2
