"""`hvdtrain results`: what is chosen, what is said of it, in which form, and when it fails."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import runs
from conftest import failing
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.records.metrics import Regression
from hvdtrain.results import energy, reference, scores
from hvdtrain.results.__main__ import main
from hvdtrain.results.compare import judge
from hvdtrain.results.load import load
from hvdtrain.results.output import latex_text, terminal
from hvdtrain.results.statistics import Interval, Statistic, summary
from hvdtrain.results.table import Column, Table, cell
from hvdtrain.results.where import Where
from hvdtrain.system.exits import Failure

SEEDS = 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow links make every added host slower, fast ones faster: 1, 2, 4 hosts at 10 and 1000 Mbit/s, three seeds."""
    found = tmp_path_factory.mktemp("results")
    for seed in range(SEEDS):
        for hosts, rate in ((1, None), (2, 10.0), (4, 10.0), (2, 1000.0), (4, 1000.0)):
            runs.make(
                found / f"h{hosts}-r{rate}-s{seed}",
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
    return found


def json_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


# --- what a student reads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((2, 100, 80), "Any number of hosts above 1 makes training slower"),
        ((2, 4, 1), "Training is fastest with 4 hosts:"),
        ((2, 1, 4), "Training is fastest with 2 hosts; from 4 hosts on an added host makes it slower"),
        ((2, 2, 2), "No added host makes a difference that the spread of the runs does not explain"),
    ],
)
def test_scaling_in_words_where_hosts_help_and_hinder(
    times: tuple[float, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for hosts, step_s in zip((1, 2, 4), times, strict=True):
        for seed in range(SEEDS):
            runs.make(
                tmp_path / f"{hosts}-{seed}",
                hosts=hosts,
                rate_mbit=None if hosts == 1 else 10.0,
                rank_batch=32 // hosts,
                seed=seed,
                compute_s=step_s * (1 + seed / 100),
                communication_s=0.0,
            )
    (reading,) = json_of(capsys, "scaling", str(tmp_path))["readings"].values()
    assert reading.startswith(said)


def test_hosts_of_different_cores_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on the whole machine is no baseline for virtual hosts that have half a core each."""
    for hosts, cores in ((1, 2.0), (1, 0.5), (2, 0.5)):
        runs.make(tmp_path / f"{hosts}-{cores}", hosts=hosts, cores=cores, compute_s=1 / cores)
    found = json_of(capsys, "scaling", str(tmp_path))
    compared = [row for row in found["rows"] if row["count"] == 2]
    assert [row["count"] for row in found["rows"]].count(1) == 1 + len(compared)
    assert all("cores per host 0.5" in row["curve"] for row in compared)


def test_scaling_says_whether_each_added_host_helps_and_by_how_much(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json_of(capsys, "scaling", str(root))
    slow, fast = (found["readings"][title] for title in sorted(found["readings"]))
    assert slow.startswith("Each added host makes training slower: 2 hosts take 2.07 x as long (+11 s")
    assert fast.startswith("Each added host makes training faster: 2 hosts are 1.9")
    assert [row["count"] for row in found["rows"]] == [1, 2, 4, 1, 2, 4]
    assert all(row["n"] == SEEDS for row in found["rows"])
    assert any("baseline 1 host" in row["curve"] for row in found["rows"])
    four = found["rows"][2]
    assert four["speedup"]["low"] < four["speedup"]["mean"] < four["speedup"]["high"] < 1
    assert four["efficiency"]["mean"] == pytest.approx(four["speedup"]["mean"] / 4)
    assert four["wire_bytes_per_step"]["mean"] == pytest.approx(1.05 * four["limit_bytes_per_step"])


def test_a_terminal_that_cannot_show_a_letter_is_no_reason_to_fail(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.results", "scaling", str(root)],
        capture_output=True,
        text=True,
        env={"COLUMNS": "100", "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_time_to_accuracy_is_the_end_of_the_first_epoch_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(capsys, "accuracy", str(root), "--where", "hosts=1", "--target", "95%")["rows"]
    assert [row["reached"] for row in rows] == ["3 of 3"]
    seconds = summary(10 * (1 + seed / 100 + 0.01) for seed in range(SEEDS))
    assert seconds is not None
    assert rows[0]["train_to_target_s"]["mean"] == pytest.approx(seconds.mean)
    assert rows[0]["end_to_end_to_target_s"]["mean"] == pytest.approx(seconds.mean + 2 * 0.1 + 0.05)
    assert rows[0]["epochs_to_target"]["mean"] == 2
    rows = json_of(capsys, "accuracy", str(root), "--where", "hosts=1", "--target", "0.957")["rows"]
    assert rows[0]["reached"] == "1 of 3"
    for asked in ("95", "accuracy=95"):
        with failing(2, "--target 95: give a value of accuracy from 0 to 1"):
            main(["accuracy", str(root), "--target", asked])


def test_a_target_of_several_primary_metrics_names_none(root: Path) -> None:
    frame = load([root]).runs
    mae = Regression("W/m2").as_json()
    other = frame.assign(primary_metric="mae", scores=json.dumps(mae), best_validation_mae=60.0)
    both = pd.concat([other, frame])
    assert scores.goal(frame, 0.95) == "95 % validation accuracy"
    assert scores.goal(other, 61.5) == "validation MAE 61.5 W/m2"
    assert (scores.target(both, 0.95), scores.goal(both, 1)) == ("primary metric 0.95", "validation primary metric 1")
    assert scores.best(both) == "MAE 60 W/m2 and 96 %"
    scores.check_target(both, 61.5)


def test_energy_counts_idle_devices_apart_and_names_the_baseline(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json_of(capsys, "energy", str(root), "--baseline", "hosts=2 and rate_mbit=10", "--reference", "cruz2021")
    energy, devices, beside = found["tables"]
    for row in energy["rows"]:
        assert row["energy_j"]["mean"] == pytest.approx(row["energy_used_j"]["mean"] * 4 / 3)
    assert next(row["edp"]["mean"] for row in energy["rows"] if row["hosts"] == 2) == 1
    assert any("hosts 2" in note for note in energy["notes"])
    assert {(row["host_device"][3:], row["use"]) for row in devices["rows"]} == {("cpu0", "used"), ("gpu0", "idle")}
    assert beside["rows"][0]["environment"] == "CPU"
    assert beside["rows"][0]["published_energy_j"] == 8.48e6
    assert beside["rows"][0]["edp"] is None  # ours is relative to something else


def test_edp_is_relative_to_a_gpu_if_there_is_one_and_to_the_fewest_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    js = {}
    for device, hosts, watts in (("cpu", 1, 10.0), ("cuda:0", 2, 30.0), ("cuda:0", 4, 20.0)):
        made = runs.Made(device=device, hosts=hosts, rank_batch=64 // hosts, train_s=100.0 / hosts)
        runs.make(tmp_path / str(hosts), made, energy_w={"cpu0": watts})
        js[hosts] = hosts * watts * (100 / hosts + 0.5) ** 2
    rows = json_of(capsys, "energy", str(tmp_path))["tables"][0]["rows"]
    found = {row["hosts"]: row["edp"]["mean"] for row in rows}
    assert found == pytest.approx({hosts: value / js[2] for hosts, value in js.items()})


def test_energy_runs_and_marked_runs_stay_out_of_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.make(tmp_path / "a", kind="timing", train_s=10.0)
    runs.make(tmp_path / "b", kind="timing", train_s=99.0, marked="the rate was off by 9 %")
    runs.make(tmp_path / "c", kind="energy", train_s=99.0, energy_w={"cpu0": 10.0})
    rows = json_of(capsys, "table", str(tmp_path))
    assert rows["rows"][0]["train_s"]["mean"] == 10.0
    assert rows["rows"][0]["energy_j"]["n"] == 1
    assert any("b, marked: the rate was off by 9 %" in note for note in rows["notes"])
    edp = json_of(capsys, "energy", str(tmp_path))["tables"][0]["rows"][0]["edp_used"]
    assert edp["mean"] == 1


def test_energy_runs_give_no_time_to_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They count among those that got there, in their epochs and steps, and in no seconds."""
    runs.make(tmp_path / "a", kind="timing", train_s=10.0)
    runs.make(tmp_path / "b", kind="energy", train_s=99.0, energy_w={"cpu0": 10.0})
    for command in ("accuracy", "strategies"):
        (row,) = json_of(capsys, command, str(tmp_path), "--target", "90%")["rows"]
        assert row["reached"] == "2 of 2"
        assert (row["train_to_target_s"]["n"], row["train_to_target_s"]["mean"]) == (1, 10.0)


def test_a_reading_of_single_runs_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where only one of the points is a single run."""
    for hosts, seed in ((1, 0), (1, 1), (2, 0)):
        runs.make(tmp_path / f"{hosts}-{seed}", hosts=hosts, rank_batch=32 // hosts, seed=seed, compute_s=1 / hosts)
    (reading,) = json_of(capsys, "scaling", str(tmp_path))["readings"].values()
    assert reading.endswith("Single runs: how far they spread is not known.")


@pytest.mark.parametrize(("watts", "said"), [(12.34, "1,234 (J)"), (234.0, "23.4 (kJ)"), (23_400.0, "2.34 (MJ)")])
def test_joules_are_printed_in_a_unit_of_their_size(watts: float, said: str, tmp_path: Path) -> None:
    """Each of the run's 100 s takes so many watts."""
    runs.make(tmp_path / "r", train_s=99.5, energy_w={"cpu0": watts}, interval_s=5.0)
    table, by_device = energy.energy(load([tmp_path]))
    for each in (table, by_device):
        (place,) = [n for n, column in enumerate(each.columns) if column.key == "energy_j"]
        assert f"{each.text()[0][place]} ({each.columns[place].unit})" == said


def test_different_settings_are_never_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.make(tmp_path / "a", config={"lr": 0.05})
    runs.make(tmp_path / "b", config={"lr": 0.1})
    runs.make(tmp_path / "c", config={"lr": 0.1, "run_dir": "elsewhere", "monitor_ms": 100, "verify_data": True})
    rows = json_of(capsys, "table", str(tmp_path))["rows"]
    assert [(row["lr"], row["n"]) for row in rows] == [(0.05, 1), (0.1, 2)]
    assert [row["n"] for row in json_of(capsys, "table", str(tmp_path), "--where", "lr>0.05")["rows"]] == [2]
    chosen = json_of(capsys, "table", str(tmp_path), "--group-by", "hosts")
    assert chosen["rows"][0]["n"] == 3
    assert any("careful" in note and "settings" in note for note in chosen["notes"])


def test_no_runs_and_no_folder_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"no runs in .*: start one with"):
        main(["list", str(tmp_path)])
    with failing(2, "no such folder"):
        main(["table", str(tmp_path / "nowhere")])


# --- compare ----------------------------------------------------------------------------------------------------------


def test_compare_is_worse_only_beyond_threshold_and_spread() -> None:
    def verdict(before: list[float], after: list[float], less_is_better: bool = True) -> str:
        a, b = summary(before), summary(after)
        assert a is not None
        assert b is not None
        return judge(a, b, 0.05, less_is_better=less_is_better)[1]

    assert verdict([10, 10.1, 9.9], [10.4, 10.5, 10.3]) == "same"
    assert verdict([10, 10.1, 9.9], [11, 11.1, 10.9]) == "worse"
    assert verdict([10, 10.1, 9.9], [11, 11.1, 10.9], less_is_better=False) == "better"
    assert verdict([10, 14, 6], [11, 15, 7]) == "unclear"
    assert verdict([10], [11]) == "worse"
    assert verdict([0], [1]) == "unclear"
    assert verdict([0], [0]) == "same"
    below, above = summary([-10.0]), summary([-9.0])
    assert below is not None and above is not None
    assert judge(below, above, 0.05, less_is_better=True) == (pytest.approx(0.1), "worse"), "more, below 0 too"


def test_compare_ends_with_1_when_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        runs.make(tmp_path / "a" / str(seed), compute_s=0.5 + seed / 1000, seed=seed)
        runs.make(tmp_path / "b" / str(seed), compute_s=0.6 + seed / 1000, seed=seed)
        runs.make(tmp_path / "c" / str(seed), hosts=2, seed=seed)
        runs.make(tmp_path / "c" / f"{seed}-10mbit", hosts=2, rate_mbit=10.0, seed=seed)
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["compare", a, b]) == 1
    assert "worse" in capsys.readouterr().out
    assert main(["compare", a, b, "--threshold", "50%"]) == 0
    assert main(["compare", b, a]) == 0
    with failing(65, "nothing to compare"):
        main(["compare", a, c])
    (tmp_path / "empty").mkdir()
    for command in (["compare", a, str(tmp_path / "empty")], ["compare", a, b, "--where", "hosts>7"]):
        with failing(65, "no runs? in "):
            main(command)


def test_compare_knows_which_way_each_figure_is_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run on each side: B takes more time and energy and learns less, and the exit code says so."""
    runs.make(tmp_path / "a", compute_s=0.5, energy_w={"cpu0": 10.0}, test_accuracy=0.9)
    runs.make(tmp_path / "b", compute_s=0.6, energy_w={"cpu0": 15.0}, test_accuracy=0.7)
    figures = ("train (s)", "end to end (s)", "samples (1/s)", "energy (J)", "test accuracy (%)")
    for order, verdict in (("ab", "worse"), ("ba", "better")):
        code = main(["compare", *(str(tmp_path / side) for side in order), "--format", "json"])
        rows = json.loads(capsys.readouterr().out)["rows"]
        found = {row["figure"]: row["verdict"] for row in rows if row["figure"] in figures}
        assert found == dict.fromkeys(figures, f"{verdict} (single run)")
        assert code == (verdict == "worse")


def test_a_score_of_either_sign_is_the_better_the_nearer_to_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also on the line to a target, which is reached from the side where the run was."""
    for name, bias in (("near", 5.0), ("far", -80.0)):
        runs.make(tmp_path / name, train_s=20.0, accuracies=(-80.0, bias), test_accuracy=bias)
        path = tmp_path / name / "manifest.json"
        told = json.loads(path.read_text())
        told["metric"]["scores"]["accuracy"] |= {"least": None, "most": None, "higher_is_better": None}
        path.write_text(json.dumps(told))
    for order, verdict in ((("far", "near"), "better"), (("near", "far"), "worse")):
        code = main(["compare", *(str(tmp_path / side) for side in order), "--format", "json"])
        rows = json.loads(capsys.readouterr().out)["rows"]
        (found,) = (row["verdict"] for row in rows if row["figure"].startswith("test accuracy"))
        assert (found, code) == (f"{verdict} (single run)", verdict == "worse")
    row = json_of(capsys, "strategies", str(tmp_path / "near"), "--target", "30")["rows"][0]
    assert row["crossed_s"]["mean"] == pytest.approx(10 + 10 * (80 - 30) / (80 + 5))


def test_compare_counts_the_groups_that_it_did_not_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of A are compared with the only one of B, which has not recorded in what they differ."""
    for number, precision in enumerate(("fp32", "bf16")):
        runs.make(tmp_path / "a" / precision, config={"precision": precision}, seed=number)
    for number, lr in enumerate((None, 0.5)):
        config = {"precision": None} | ({"lr": lr} if lr else {})
        runs.make(tmp_path / "b" / str(number), config=config, seed=number)
    main(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "1 groups are in B only" in capsys.readouterr().out


# --- forms ------------------------------------------------------------------------------------------------------------


def test_every_form_of_every_table_has_the_same_figures(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, "table", str(root))
    assert main(["table", str(root), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    for row, expected in zip(rows, found["rows"], strict=True):
        for name, value in expected["train_s"].items():
            assert float(row[f"train_s_{name}"]) == value
    texts = {}
    for form in ("table", "markdown", "latex"):
        assert main(["table", str(root), "--format", form]) == 0
        texts[form] = re.findall(r"\d+\.\d+ (?:±|\$\\pm\$) \d+\.\d+", capsys.readouterr().out)
    assert texts["table"] == texts["markdown"] == [text.replace(r"$\pm$", "±") for text in texts["latex"]] != []
    assert main(["table", str(root), "--detail"]) == 0
    assert "median" in capsys.readouterr().out


def test_columns_are_as_wide_as_their_cells() -> None:
    table = Table("t", "T", [Column("a", "a"), Column("b", "b")], [{"a": "走る", "b": "x"}, {"a": "abc", "b": "y"}])
    wide, narrow = terminal(table).splitlines()[-2:]
    assert (wide, narrow) == ("走る  x", "abc   y")


def test_export_has_all_columns_in_every_form(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = []
    for form in ("csv", "parquet"):
        path = tmp_path / f"runs.{form}"
        assert main(["export", str(root), "--format", form, "-o", str(path)]) == 0
        frames.append(pd.read_csv(path) if form == "csv" else pd.read_parquet(path))
    exported = json_of(capsys, "export", str(root))["rows"]
    assert {len(frame) for frame in frames} == {len(exported)} == {5 * SEEDS}
    for frame in frames:
        assert list(frame.columns) == list(exported[0])
        assert frame["train_s"].tolist() == [row["train_s"] for row in exported]
    with pytest.raises(Failure, match=r"-o runs\.parquet"):
        main(["export", str(root), "--format", "parquet"])


@given(st.text(max_size=30))
def test_latex_text_has_no_command_but_ours(text: str) -> None:
    ours = r"\\(text(backslash|ascii(tilde|circum)|less|greater)\{\}|[&%$#_{}])|\$\\(pm|times)\$"
    left = re.sub(ours, "", latex_text(text))
    assert not set(left) & set("\\&%$#_{}~^")


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
def test_figures_have_the_digits_that_their_spread_deserves(value: Any, text: str) -> None:
    assert cell(value, Column("x", "x")) == text


# --- the reference ----------------------------------------------------------------------------------------------------


def test_the_published_figures_agree_with_each_other() -> None:
    """EDP = t e, so each study's normalised EDP must follow from its energies and speed-ups (to its two digits)."""
    study = reference.load("cruz2021")
    rows = {figures["environment"]: figures for _, figures in study.rows}
    one, two, cpu = rows["1 GPU"], rows["2 GPUs"], rows["CPU"]
    for row in (two, cpu):
        assert row["energy_j"] / one["energy_j"] / row["speedup_end_to_end"] == pytest.approx(row["edp"], rel=0.03)
    assert two["speedup"] / 2 == pytest.approx(two["efficiency"])
    with pytest.raises(Failure, match="unknown; known: cruz2021"):
        reference.load("nobody1999")


# --- expressions ------------------------------------------------------------------------------------------------------

KINDS = {"hosts": "number", "rate_mbit": "number", "strategy": "text", "resumed": "flag", "lr": "any"}
ROWS = [
    {"hosts": 1.0, "rate_mbit": None, "strategy": "allreduce", "resumed": True, "lr": None},
    {"hosts": 2.0, "rate_mbit": 10.0, "strategy": "native+fp16", "resumed": False, "lr": 0.1},
    {"hosts": 4.0, "rate_mbit": float("nan"), "strategy": None, "resumed": None, "lr": "x"},
]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("hosts=1", [0]),
        ("rate_mbit=10 and hosts>1", [1]),
        ("rate_mbit!=10", [0, 2]),
        ("rate_mbit=null", [0, 2]),
        ("rate_mbit>0 or rate_mbit<=0", [1]),
        ("not (hosts=1 or strategy=native+fp16)", [2]),
        ("not hosts=1 and hosts<4", [1]),
        ("strategy='allreduce' or stategy", None),
        ('strategy>="b"', [1]),
        ("resumed=true", [0]),
        ("lr=0.1", [1]),
        ("lr=x", [2]),
        ("hosts >= 2e0 AND NOT hosts == 4", [1]),
    ],
)
def test_expressions_choose(text: str, chosen: list[int] | None) -> None:
    if chosen is None:
        with pytest.raises(Failure, match="column 25: no column 'stategy', did you mean strategy"):
            Where(text, KINDS)
        return
    where = Where(text, KINDS)
    assert [place for place, row in enumerate(ROWS) if where.test(row)] == chosen


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
def test_expressions_mean_what_python_would(tree: tuple[str, str], a: int, b: int) -> None:
    where = Where(tree[0], {"a": "number", "b": "number"})
    assert where.test({"a": float(a), "b": float(b)}) == eval(tree[1], {"a": a, "b": b})


@given(st.text(alphabet="ab ()=!<>'\"0.1-andotrul\u00e9\n", max_size=40))
def test_any_expression_is_understood_or_pointed_at(text: str) -> None:
    try:
        where = Where(text, {"a": "number", "b": "text"})
    except Failure as failure:
        place = re.match(r"--where, column (\d+): ", str(failure))
        assert place is not None
        assert 1 <= int(place[1]) <= len(text) + 1
        assert "known columns: a, b" in str(failure)
        return
    where.test({"a": 1.0, "b": "x"})
