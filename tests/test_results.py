"""The tables of `hvdtrain results`: the runs that count, the conclusions, and the formats."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import runs
from conftest import failing
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.results.__main__ import main
from hvdtrain.results.columns import Column
from hvdtrain.results.read.where import Where
from hvdtrain.results.statistics import Interval, Statistic, summary
from hvdtrain.results.tables.model import cell
from hvdtrain.system.exits import Failure

SEEDS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1, 2 and 4 hosts at 10 and 1000 Mbit/s with three seeds. Added hosts help only at 1000 Mbit/s."""
    folder = tmp_path_factory.mktemp("results")
    for seed in range(SEEDS):
        for hosts, rate in ((1, None), (2, 10.0), (4, 10.0), (2, 1000.0), (4, 1000.0)):
            runs.make(
                folder / f"h{hosts}-r{rate}-s{seed}",
                hosts=hosts,
                rate_mbit=rate,
                rank_batch=32 // hosts,
                seed=seed,
                compute_s=(1 + seed / 100) / hosts,
                communication_s=0.0 if hosts == 1 else 8.0 * hosts / (rate or 1),
                energy_w={"cpu0": 30.0, "gpu0": 10.0},
                used=("cpu0",),
                accuracies=(0.5, 0.96 - 0.005 * seed),
            )
    return folder


# --- scaling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "seeds", "conclusion"),
    [
        ((2, 100, 80), 3, "Any number of hosts above 1 makes training slower"),
        ((2, 4, 1), 3, "Training is fastest with 4 hosts:"),
        ((2, 1, 4), 3, "Training is fastest with 2 hosts; from 4 hosts, each added host makes it slower"),
        ((2, 1, 1.001), 3, "Training is fastest with 2 hosts, but 4 are not clearly slower"),
        ((2, 2, 2), 3, "No added host makes training faster"),
        ((10, 10.01, 10.02), 1, "It is unclear whether"),
    ],
)
def test_scaling_concludes_from_evidence_whether_hosts_help(
    times: tuple[float, ...], seeds: int, conclusion: str, tmp_path: Path
) -> None:
    for hosts, step_s in zip((1, 2, 4), times, strict=True):
        for seed in range(seeds):
            runs.make(
                tmp_path / f"{hosts}-{seed}",
                hosts=hosts,
                rate_mbit=None if hosts == 1 else 10.0,
                rank_batch=32 // hosts,
                seed=seed,
                compute_s=step_s * (1 + seed / 100),
                communication_s=0.0,
            )
    (reading,) = runs.results("scaling", tmp_path)["readings"].values()
    assert reading.startswith(conclusion)


@pytest.mark.parametrize(
    ("times", "spread", "change"),
    [(3, 0, "slower"), (3, 0.3, "slower"), (2, 0.95, ""), (1.15, 0, ""), (0.55, 0.1, "faster")],
)
@pytest.mark.parametrize("weak", [False, True])
def test_steps_of_single_runs_are_compared_per_sample_and_their_accuracy_is_not(
    times: float, spread: float, change: str, weak: bool, tmp_path: Path
) -> None:
    for hosts, ratio, score in ((1, 1.0, 0.9), (2, times * (1 + weak), 0.3)):
        batch = 32 if weak else 32 // hosts
        made = {"rank_batch": batch, "steps_per_epoch": 10 // (1 + weak * (hosts - 1)), "test_accuracy": score}
        folder = runs.make(tmp_path / str(hosts), hosts=hosts, data_s=0.0, communication_s=0.0, compute_s=ratio, **made)
        with runs.edited(folder / "metrics" / "rank0000.jsonl") as records:
            for number, record in enumerate(each for each in records if each["type"] == "step"):
                record["compute_s"] *= 1 + spread * (-1) ** number
    (reading,) = runs.results("scaling", tmp_path)["readings"].values()
    assert reading.startswith(f"Each added host makes steps {change}" if change else "It is unclear whether")
    assert "learn" not in reading and ("Accuracy is not compared" in reading) == bool(change)
    if change:
        low, high = map(float, re.findall(r"for each sample ([\d.]+) to ([\d.]+) x", reading)[0])
        assert low * 1.19 <= times <= high / 1.19 and (spread or high / low == pytest.approx(1.44, rel=0.02))


@pytest.mark.parametrize(("accuracies", "less"), [((0.4, 0.45), True), ((0.3, 0.85), False), ((0.9, 0.92), False)])
def test_hosts_learn_less_if_their_scores_are_lower_beyond_the_spread(
    accuracies: tuple[float, float], less: bool, tmp_path: Path
) -> None:
    for hosts, scores in ((1, (0.9, 0.91)), (2, accuracies)):
        for seed, score in enumerate(scores):
            made = {"rank_batch": 32 // hosts, "seed": seed, "test_accuracy": score, "compute_s": 1 + seed / 100}
            runs.make(tmp_path / f"{hosts}-{seed}", hosts=hosts, communication_s=0.0, **made)
    (reading,) = runs.results("scaling", tmp_path)["readings"].values()
    assert ("learn less: test accuracy 90.5 % with 1 host" in reading) == less


def test_scaling_has_a_curve_per_rate(root: Path) -> None:
    table = runs.results("scaling", root)
    slow, fast = (table["readings"][title] for title in sorted(table["readings"]))
    assert slow.startswith("Each added host makes training slower: 2 hosts take 2.07 x as long (+11 s")
    assert fast.startswith("Each added host makes training faster: 2 hosts are 1.9")
    assert [(row["count"], row["n"]) for row in table["rows"]] == [(hosts, SEEDS) for hosts in (1, 2, 4)] * 2
    four = table["rows"][2]
    assert four["speedup"]["low"] < four["speedup"]["mean"] < four["speedup"]["high"] < 1
    assert four["efficiency"]["mean"] == pytest.approx(four["speedup"]["mean"] / 4)
    assert four["network_bytes_per_step"]["mean"] == pytest.approx(1.05 * four["limit_bytes_per_step"])


# --- accuracy and energy ----------------------------------------------------------------------------------------------


def test_time_to_accuracy_is_the_end_of_the_first_epoch_that_reaches_it(root: Path) -> None:
    rows = runs.results("accuracy", root, "--where", "hosts=1", "--target", "95%")["rows"]
    seconds = summary(10 * (1 + seed / 100 + 0.01) for seed in range(SEEDS))
    assert seconds is not None
    assert rows[0]["reached"] == "3 of 3"
    assert rows[0]["train_to_target_s"]["mean"] == pytest.approx(seconds.mean)
    assert rows[0]["end_to_end_to_target_s"]["mean"] == pytest.approx(seconds.mean + 2 * 0.1 + 0.05)
    assert rows[0]["epochs_to_target"]["mean"] == 2
    rows = runs.results("accuracy", root, "--where", "hosts=1", "--target", "0.957")["rows"]
    assert rows[0]["reached"] == "1 of 3"
    for value in ("95", "accuracy=95"):
        with failing(2, "accuracy from 0 to 1"):
            main(["accuracy", str(root), "--target", value])


def test_energy_separates_idle_devices_and_names_the_baseline(root: Path) -> None:
    table = runs.results("energy", root, "--where", "hosts=4 or hosts=2 and rate_mbit=10")
    for row in table["rows"]:
        assert row["energy_j"]["mean"] == pytest.approx(row["energy_used_j"]["mean"] * 4 / 3)
    assert next(row["edp"]["mean"] for row in table["rows"] if row["hosts"] == 2) == 1
    assert any(note.startswith("baseline: hosts 2") for note in table["notes"])


def test_edp_is_relative_to_the_fewest_ranks_on_a_gpu(tmp_path: Path) -> None:
    js = {}
    for device, hosts, watts in (("cpu", 1, 10.0), ("cuda:0", 2, 30.0), ("cuda:0", 4, 20.0)):
        made = runs.Made(device=device, hosts=hosts, rank_batch=64 // hosts, train_s=100.0 / hosts)
        runs.make(tmp_path / str(hosts), made, energy_w={"cpu0": watts})
        js[hosts] = hosts * watts * (100 / hosts + 0.5) ** 2
    rows = runs.results("energy", tmp_path)["rows"]
    found = {row["hosts"]: row["edp"]["mean"] for row in rows}
    assert found == pytest.approx({hosts: value / js[2] for hosts, value in js.items()})


# --- which runs count -------------------------------------------------------------------------------------------------


def test_energy_runs_and_marked_runs_do_not_count_for_times(tmp_path: Path) -> None:
    runs.make(tmp_path / "a", kind="timing", train_s=10.0)
    runs.make(tmp_path / "b", kind="timing", train_s=99.0, marked="the rate was off by 9 %")
    runs.make(tmp_path / "c", kind="energy", train_s=99.0, energy_w={"cpu0": 10.0})
    table = runs.results("table", tmp_path)
    assert table["rows"][0]["train_s"]["mean"] == 10.0
    assert table["rows"][0]["energy_j"]["n"] == 1
    assert any("b, marked: the rate was off by 9 %" in note for note in table["notes"])
    assert runs.results("energy", tmp_path)["rows"][0]["edp_used"]["mean"] == 1
    for command in ("accuracy", "strategies"):
        (row,) = runs.results(command, tmp_path, "--target", "90%")["rows"]
        assert row["reached"] == "2 of 2"
        assert (row["train_to_target_s"]["n"], row["train_to_target_s"]["mean"]) == (1, 10.0)


def test_runs_with_different_settings_are_never_averaged(tmp_path: Path) -> None:
    runs.make(tmp_path / "a", config={"lr": 0.05})
    runs.make(tmp_path / "b", config={"lr": 0.1})
    runs.make(tmp_path / "c", config={"lr": 0.1, "run_dir": "elsewhere", "monitor_ms": 100})
    rows = runs.results("table", tmp_path)["rows"]
    assert [(row["lr"], row["n"]) for row in rows] == [(0.05, 1), (0.1, 2)]
    assert [row["n"] for row in runs.results("table", tmp_path, "--where", "lr>0.05")["rows"]] == [2]
    chosen = runs.results("table", tmp_path, "--group-by", "hosts")
    assert chosen["rows"][0]["n"] == 3
    assert "warning: these groups average over different lr" in chosen["notes"]


def test_missing_runs_are_errors_with_hints(tmp_path: Path) -> None:
    with failing(65, "no runs in .*hint: start one"):
        main(["list", str(tmp_path)])
    with failing(2, "no such folder"):
        main(["table", str(tmp_path / "nowhere")])


def test_the_time_to_a_signed_score_is_interpolated_from_the_side_of_the_run(tmp_path: Path) -> None:
    for seed in range(2):
        runs.make(tmp_path / str(seed), train_s=20.0, accuracies=(-80.0, 5.0), test_accuracy=5.0, seed=seed)
        with runs.edited(tmp_path / str(seed) / "manifest.json") as manifest:
            manifest["metric"]["scores"]["accuracy"] |= {"least": None, "most": None, "higher_is_better": None}
    row = runs.results("strategies", tmp_path, "--target", "30")["rows"][0]
    assert row["interpolated_s"]["mean"] == pytest.approx(10 + 10 * (80 - 30) / (80 + 5))


# --- formats ----------------------------------------------------------------------------------------------------------


def test_all_formats_have_the_same_numbers(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # in a narrow terminal the text leaves out columns
    table = runs.results("table", root)
    assert main(["table", str(root), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    for row, expected in zip(rows, table["rows"], strict=True):
        for name, value in expected["train_s"].items():
            assert float(row[f"train_s_{name}"]) == value
    header = set()
    for where in ("hosts=1", "hosts>1", "hosts=4 and rate_mbit=10 and seed=1"):
        assert main(["table", str(root), "--format", "csv", "--where", where]) == 0
        header.add(capsys.readouterr().out.partition("\n")[0])
    assert header == {",".join(rows[0])}, "the columns do not depend on the values"
    texts = {}
    for form in ("table", "markdown"):
        assert main(["table", str(root), "--format", form]) == 0
        texts[form] = re.findall(r"\d+\.\d+ ± \d+\.\d+", capsys.readouterr().out)
    assert texts["table"] == texts["markdown"] != []


def test_export_has_all_columns_in_every_format(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    assert main(["export", str(root), "-o", str(path)]) == 0
    frame, exported = pd.read_csv(path), runs.results("export", root)["rows"]
    assert len(frame) == len(exported) == 5 * SEEDS
    assert list(frame.columns) == list(exported[0])
    assert frame["train_s"].tolist() == [row["train_s"] for row in exported]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (59.4321, "59.4"),
        (0.123456, "0.123"),
        (12345.6, "12,346"),
        (Statistic(103.94, 104, 100, 107, 102.74, 105.14, 5, 1.0), "103.9 ± 1.2"),
        (Statistic(59.432, 59, 38, 80, -207.4, 326.3, 2, 1.0), "38 to 80"),
        (Statistic(59.432, 59.432, 59.432, 59.432, None, None, 1, None), "59.4"),
        (Interval(0.2291, 0.2190, 0.2396), "0.229 (0.219-0.240)"),
    ],
)
def test_digits_follow_from_the_spread(value: Any, text: str) -> None:
    assert cell(value, Column("x", "x")) == text


# --- expressions ------------------------------------------------------------------------------------------------------

KINDS = {"hosts": "number", "rate_mbit": "number", "strategy": "text", "resumed": "flag", "lr": "any"}
ROWS = [
    {"hosts": 1.0, "rate_mbit": None, "strategy": "allreduce", "resumed": True, "lr": None},
    {"hosts": 2.0, "rate_mbit": 10.0, "strategy": "native+bf16", "resumed": False, "lr": 0.1},
    {"hosts": 4.0, "rate_mbit": float("nan"), "strategy": None, "resumed": None, "lr": "x"},
]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("rate_mbit=10 and hosts>1", [1]),
        ("rate_mbit!=10", [0, 2]),
        ("rate_mbit=null", [0, 2]),
        ("rate_mbit>0 or rate_mbit<=0", [1]),
        ("not (hosts=1 or strategy=native+bf16)", [2]),
        ('strategy>="b"', [1]),
        ("resumed=true", [0]),
        ("lr=0.1", [1]),
        ("lr=x", [2]),
        ("hosts >= 2e0 AND NOT hosts == 4", [1]),
    ],
)
def test_an_expression_selects_runs(text: str, chosen: list[int]) -> None:
    where = Where(text, KINDS)
    assert [place for place, row in enumerate(ROWS) if where.test(row)] == chosen


def test_a_misspelt_column_is_an_error_with_its_position() -> None:
    with failing(2, "column 25: no column 'stategy', did you mean strategy"):
        Where("strategy='allreduce' or stategy", KINDS)


COMPARISONS = st.builds(
    lambda name, sign, value: (f"{name}{sign}{value}", f"({name} {'==' if sign == '=' else sign} {value})"),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["=", "!=", "<", "<=", ">", ">="]),
    st.integers(-3, 3),
)
TREES = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.tuples(inner, inner, st.sampled_from(["and", "or"])).map(
            lambda t: (f"({t[0][0]}) {t[2]} ({t[1][0]})", f"({t[0][1]} {t[2]} {t[1][1]})")
        ),
        inner.map(lambda t: (f"not ({t[0]})", f"(not {t[1]})")),
    ),
    max_leaves=8,
)


@given(TREES, st.integers(-3, 3), st.integers(-3, 3))
def test_expressions_have_the_meaning_of_python(tree: tuple[str, str], a: int, b: int) -> None:
    where = Where(tree[0], {"a": "number", "b": "number"})
    assert where.test({"a": float(a), "b": float(b)}) == eval(tree[1], {"a": a, "b": b})


@given(st.text(alphabet="ab ()=!<>'\"0.1-andotrul\u00e9\n", max_size=40))
def test_any_text_is_an_expression_or_an_error_with_a_position(text: str) -> None:
    try:
        where = Where(text, {"a": "number", "b": "text"})
    except Failure as failure:
        place = re.match(r"--where, column (\d+): ", str(failure))
        assert place is not None
        assert 1 <= int(place[1]) <= len(text) + 1
        assert "known columns: a, b" in str(failure)
        return
    where.test({"a": 1.0, "b": "x"})
