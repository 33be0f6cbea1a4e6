"""Figures show the tables' numbers, are the same to the byte each time, and say what is lacking to draw them."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pandas as pd
import pytest
import runs
from conftest import failing
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hvdtrain.results import plots
from hvdtrain.results.figures import machines, style
from hvdtrain.results.load import Loaded, load
from hvdtrain.results.strategies import strategies
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

T_2 = 4.302652729911275  # Student's t at 97.5 % for 2 degrees of freedom
SEEDS = range(3)


def train_s(hosts: int, rate_mbit: float | None, seed: int) -> float:
    """Computing is shared by the hosts; the wire takes longer the slower it is."""
    wire_s = 0.0 if rate_mbit is None else 2 * (hosts - 1) / hosts * 1000 / rate_mbit
    return (100 / hosts + wire_s) * (1 + 0.01 * seed)


def make(folder: Path, strategy: str = "allreduce", seeds: Sequence[int] = SEEDS, **changes: Any) -> Path:
    """1, 2 and 4 hosts at 10 and 1000 Mbit/s, at a global batch of 64."""
    for hosts, rate_mbit in ((1, None), (2, 10.0), (2, 1000.0), (4, 10.0), (4, 1000.0)):
        for seed in seeds:
            runs.make(
                folder / f"{strategy}-h{hosts}-{rate_mbit}-s{seed}",
                hosts=hosts,
                rate_mbit=rate_mbit,
                seed=seed,
                strategy=strategy,
                rank_batch=64 // hosts,
                steps_per_epoch=4,
                train_s=train_s(hosts, rate_mbit, seed),
                compute_s=0.5 / hosts + 0.01 * seed,
                communication_s=0.0 if hosts == 1 else 5 / (rate_mbit or 1),
                test_accuracy=0.97 - 0.01 * seed,
                **changes,
            )
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Two strategies, three seeds, monitors: every figure has its data."""
    folder = tmp_path_factory.mktemp("runs")
    make(folder, energy_w={"cpu0": 30.0, "dram0": 4.0}, interval_s=5.0, inference={2: 0.01, 64: 0.02})
    make(folder, "native")
    return load([folder])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A single run on one host without monitors."""
    return load([runs.make(tmp_path_factory.mktemp("runs") / "one")])


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, low and high of three values, calculated apart from the product."""
    mean = statistics.fmean(values)
    half = T_2 * statistics.stdev(values) / math.sqrt(3)
    return mean, mean - half, mean + half


def curves(axis: Any) -> dict[str, tuple[list[float], list[float], list[tuple[float, float]]]]:
    """Label -> x, y and ends of the error bars of each curve drawn with them."""
    found = {}
    for container in axis.containers:
        line, _, (bars,) = container.lines
        ends = [(float(bar[0][1]), float(bar[1][1])) for bar in bars.get_segments()]
        found[container.get_label()] = (list(line.get_xdata()), list(map(float, line.get_ydata())), ends)
    return found


# --- every kind -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", plots.KINDS)
def test_equal_runs_give_equal_bytes_and_the_users_own_settings_do_not_matter(kind: str, loaded: Loaded) -> None:
    first = style.encode(plots.draw(kind, loaded), "svg")
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "savefig.bbox": "tight"}):
        before = dict(matplotlib.rcParams)
        second = style.encode(plots.draw(kind, loaded), "svg")
        assert dict(matplotlib.rcParams) == before
    assert first == second
    ElementTree.fromstring(first)
    assert not re.search(rb"<dc:date>|Matplotlib v|matplotlib.org", first)


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_files_are_the_same_each_time_in_every_format(ending: str, loaded: Loaded, tmp_path: Path) -> None:
    for name in ("a", "b"):
        plots.save(plots.draw("time", loaded), tmp_path / f"{name}.{ending}")
    content = (tmp_path / f"a.{ending}").read_bytes()
    assert content == (tmp_path / f"b.{ending}").read_bytes()
    assert content.startswith({"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[ending])
    assert b"Software" not in content and b"CreationDate" not in content
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{ending}", f"b.{ending}"]


@pytest.mark.parametrize("kind", plots.KINDS)
def test_axes_have_labels_with_units_and_letters_are_legible(kind: str, loaded: Loaded) -> None:
    figure = plots.draw(kind, loaded)
    assert figure.get_figwidth() <= 7  # the text of an A4 page
    for axis in figure.axes:
        if axis.get_visible():
            assert axis.get_subplotspec().is_last_row() <= bool(axis.get_xlabel())
        assert all(text.get_fontsize() >= 7 for text in axis.texts)
    labels = " ".join(axis.get_xlabel() + axis.get_ylabel() for axis in figure.axes)
    assert re.search(r"hosts|epoch|\(m?s\)|MB|%|s per", labels)


@pytest.mark.parametrize("kind", ["time", "speedup", "accuracy", "power", "resources"])
def test_curves_differ_in_more_than_colour(kind: str, loaded: Loaded) -> None:
    handles, _ = zip(
        *((handle, label) for axis in plots.draw(kind, loaded).axes[:1] for handle, label in labelled(axis)),
        strict=True,
    )
    looks = [(str(line.get_marker()), str(line.get_linestyle()), str(line._unscaled_dash_pattern)) for line in handles]
    assert len(set(looks)) == len(looks)


def labelled(axis: Any) -> list[tuple[Any, str]]:
    handles, labels = axis.get_legend_handles_labels()
    return [(getattr(handle, "lines", [handle])[0], label) for handle, label in zip(handles, labels, strict=True)]


@pytest.mark.parametrize("kind", plots.KINDS)
def test_one_run_is_drawn_or_the_failure_says_what_is_lacking(kind: str, one: Loaded) -> None:
    lacking = {
        "speedup": "one host and on more",
        "efficiency": "one host and on more",
        "wire": "two or more hosts",
        "strategies": "no run reached 95 % validation accuracy; the best reached 90 %: try --target",
        "crossover": "trained with --inference",
        "power": "--monitor power",
        "resources": "--monitor resources",
    }
    if kind not in lacking:
        assert style.encode(plots.draw(kind, one), "svg")
        return
    with failing(exits.BAD_DATA, lacking[kind]):
        plots.draw(kind, one)


@pytest.mark.parametrize("kind", plots.KINDS)
def test_runs_that_did_not_finish_enter_no_figure(kind: str, tmp_path: Path) -> None:
    runs.make(tmp_path / "run", complete=False, hosts=2, rate_mbit=10.0, energy_w={"cpu0": 30.0})
    with failing(exits.BAD_DATA):
        plots.draw(kind, load([tmp_path]))


@pytest.mark.parametrize("kind", plots.KINDS)
def test_what_was_not_measured_leaves_a_gap_and_no_traceback(kind: str, tmp_path: Path) -> None:
    for hosts in (1, 2):
        runs.make(
            tmp_path / f"h{hosts}",
            hosts=hosts,
            rate_mbit=10.0 if hosts > 1 else None,
            rank_batch=32 // hosts,
            steps_per_epoch=4,
            communication_s=None,
            accuracies=[None, None],
            test_accuracy=None,
            wire_bytes_per_step=0.0,
        )
    found = load([tmp_path])
    found.runs.loc[found.runs["hosts"] == 2, ["global_batch", "ranks_per_host", "goodput_mbit"]] = math.nan
    try:
        style.encode(plots.draw(kind, found), "svg")
    except Failure as failure:
        assert failure.code == exits.BAD_DATA


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_time_shows_mean_and_interval_of_each_group_and_one_host_opens_every_curve(loaded: Loaded) -> None:
    axes = plots.draw("time", loaded).axes
    assert [axis.get_title("left") for axis in axes] == ["torch allreduce", "torch native"]
    for axis in axes:
        drawn = curves(axis)
        assert list(drawn) == ["10 Mbit/s", "1000 Mbit/s"]
        for rate_mbit in (10.0, 1000.0):
            x, y, bars = drawn[f"{rate_mbit:g} Mbit/s"]
            assert x == [1, 2, 4]
            for hosts, mean, ends in zip(x, y, bars, strict=True):
                rate = None if hosts == 1 else rate_mbit
                expected = interval([train_s(int(hosts), rate, seed) for seed in SEEDS])
                assert (mean, *ends) == pytest.approx(expected, rel=1e-9)


def test_speedup_has_the_ideal_line_and_the_ratio_of_the_means(loaded: Loaded) -> None:
    axis = plots.draw("speedup", loaded).axes[0]
    base = statistics.fmean(train_s(1, None, seed) for seed in SEEDS)
    for rate_mbit in (10.0, 1000.0):
        _, y, _ = curves(axis)[f"{rate_mbit:g} Mbit/s"]
        expected = [base / statistics.fmean(train_s(h, rate_mbit, s) for s in SEEDS) for h in (2, 4)]
        assert y == pytest.approx([1, *expected], rel=1e-9)
    ideal = next(line for line in axis.lines if line.get_label() == "ideal")
    assert list(ideal.get_xdata()) == list(ideal.get_ydata()) == [1, 4]


def test_efficiency_writes_in_each_cell_what_its_colour_shows(loaded: Loaded) -> None:
    axis = plots.draw("efficiency", loaded).axes[0]
    base = statistics.fmean(train_s(1, None, seed) for seed in SEEDS)
    mesh = axis.collections[0].get_array()
    written = {(round(t.get_position()[1] - 0.5), round(t.get_position()[0] - 0.5)): t.get_text() for t in axis.texts}
    for row, rate_mbit in enumerate((10.0, 1000.0)):
        for column, hosts in enumerate((2, 4)):
            expected = base / statistics.fmean(train_s(hosts, rate_mbit, seed) for seed in SEEDS) / hosts
            assert float(mesh[row][column]) == pytest.approx(expected, rel=1e-9)
            assert written[row, column].split("\n")[0] == f"{expected:.2f}"


def test_phases_stack_up_to_the_step_and_to_the_run(loaded: Loaded) -> None:
    figure = plots.draw("phases", loaded)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    place = labels.index("torch native, 4 hosts")
    frame = loaded.runs
    same = frame[(frame["strategy"] == "native") & (frame["hosts"] == 4) & (frame["rate_mbit"] == 10)]
    above, below = (next(a for a in figure.axes if a.get_xlabel() == label) for label in ("s per step", "s per run"))
    for axis, column in ((above, "step_s"), (below, "end_to_end_s")):
        parts = [bar.patches[place].get_width() for bar in axis.containers]
        assert sum(parts) == pytest.approx(same[column].mean(), rel=1e-9)


def test_wire_shows_the_busiest_nic_beside_the_limit(loaded: Loaded) -> None:
    left, right = plots.draw("wire", loaded).axes
    labels = [label.get_text() for label in left.get_yticklabels()]
    place = labels.index("torch allreduce, 4 hosts, 10 Mbit/s")
    limit_mb = 2 * 3 / 4 * 4 * 1000 / 1e6
    assert left.containers[2 * place + 1].patches[0].get_width() == pytest.approx(1.05 * limit_mb, rel=1e-3)
    least = next(line for line in left.lines if line.get_label() == "least of any allreduce")
    assert least.get_xdata()[place] == pytest.approx(limit_mb)
    step_s = statistics.fmean(0.01 + 0.5 / 4 + 0.01 * seed + 0.5 for seed in SEEDS)
    share = right.containers[2 * place + 1].patches[0].get_width()
    assert share == pytest.approx(100 * limit_mb * 8 / (0.936 * 10) / step_s, rel=1e-3)


def test_accuracy_is_the_mean_of_the_repeats_after_each_epoch(loaded: Loaded) -> None:
    for kind in ("accuracy", "accuracy-time"):
        axis = plots.draw(kind, loaded).axes[0]
        line = axis.lines[0]
        finals = [0.97 - 0.01 * seed for seed in SEEDS]
        assert list(line.get_ydata()) == pytest.approx(
            [100 * statistics.fmean(finals) / 2, 100 * statistics.fmean(finals)]
        )
        if kind == "accuracy-time":  # two epochs, each with validation (0.1 s) and, between them, a checkpoint (0.05 s)
            trained = statistics.fmean(train_s(1, None, seed) for seed in SEEDS)
            assert list(line.get_xdata()) == pytest.approx([trained / 2 + 0.1, trained + 0.25])


def test_strategies_draws_the_times_of_the_table_on_one_axis(loaded: Loaded) -> None:
    rows = strategies(loaded).rows
    axes = plots.draw("strategies", loaded).axes
    assert [axis.get_title("left") for axis in axes] == ["10 Mbit/s", "1000 Mbit/s"]
    assert len({axis.get_xlim() for axis in axes}) == 1
    drawn = sorted(float(container.lines[0].get_xdata()[0]) for axis in axes for container in axis.containers)
    assert drawn == sorted(row["train_to_target_s"].mean for row in rows)
    assert {text.get_text() for text in axes[0].texts} == {"allreduce", "native"}


def test_a_rate_and_a_number_of_hosts_look_the_same_in_all_figures(loaded: Loaded) -> None:
    """A rate has its colour in each legend that names it, a number of hosts its marker."""
    looks: dict[str, set[str]] = {}
    for kind in ("time", "speedup", "accuracy", "accuracy-time", "strategies"):
        for axis in plots.draw(kind, loaded).axes[:1]:
            for line, label in labelled(axis):
                look = line.get_marker() if "host" in label and label != "one host" else line.get_color()
                looks.setdefault(label, set()).add(str(look))
    assert {"1 host", "2 hosts", "4 hosts", "10 Mbit/s", "1000 Mbit/s"} <= set(looks)
    assert {len(found) for found in looks.values()} == {1}, looks


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Longer names, more numbers of hosts and more rates than usual."""
    folder = tmp_path_factory.mktemp("runs")
    config = {"every": 16, "outer_lr": 0.7, "outer_momentum": 0.9, "inner": "powersgd", "rank": 12, "bits": 4}
    more: dict[str, Any] = {"config": config, "test_accuracy": 0.96, "energy_w": {"cpu0": 9.0}, "interval_s": 20.0}
    more["inference"] = {2: 0.01, 1024: 0.5}
    for strategy in ("local-sgd", "powersgd"):
        for hosts, rate in ((1, None), *itertools.product((2, 3, 4), (10.0, 50.0, 100.0, 1000.0))):
            name = f"{strategy}-{hosts}-{rate}"
            runs.make(folder / name, hosts=hosts, rate_mbit=rate, strategy=strategy, rank_batch=48 // hosts, **more)
    return load([folder])


@pytest.mark.parametrize("kind", plots.KINDS)
def test_titles_stay_above_their_own_panels_whatever_they_say(kind: str, crowded: Loaded) -> None:
    figure = plots.draw(kind, crowded)
    with style.settings():
        FigureCanvasAgg(figure).draw()
    boxes = [axis._left_title.get_window_extent() for axis in figure.axes if axis.get_title("left")]
    for index, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[index + 1 :])
        assert not any(box.overlaps(axis.bbox) for axis in figure.axes)


def test_layers_gives_unlike_runs_curves_of_their_own(tmp_path: Path) -> None:
    for strategy, seed in itertools.product(("allreduce", "central"), SEEDS):
        step = {"compute_s": 0.1 if strategy == "central" else 0.9, "communication_s": 0.0, "data_s": 0.0}
        runs.make(tmp_path / f"{strategy}{seed}", strategy=strategy, seed=seed, **step)
    (axis,) = plots.draw("layers", load([tmp_path])).axes
    found = {name: times[0] for name, (_, times, _) in curves(axis).items()}
    assert found == {"resnet34, allreduce": pytest.approx(0.9), "resnet34, central": pytest.approx(0.1)}


def test_power_is_energy_by_time_and_hosts_have_lines_of_their_own(loaded: Loaded) -> None:
    figure = plots.draw("power", loaded)
    assert [axis.get_title("left").splitlines()[1] for axis in figure.axes] == [
        "1 host",
        "2 hosts, 10 Mbit/s",
        "4 hosts, 10 Mbit/s",
    ]
    lines = {line.get_label(): line for line in figure.axes[1].lines}
    assert list(lines) == ["h0: cpu0", "h0: dram0", "h1: cpu0", "h1: dram0"]
    assert list(lines["h1: dram0"].get_ydata()) == pytest.approx([4.0] * len(lines["h1: dram0"].get_ydata()))
    chosen = plots.draw("power", loaded, plots.Options(runs=("allreduce-h2-1000.0-s1",)))
    assert [axis.get_title("left") for axis in chosen.axes] == ["torch allreduce\n2 hosts, 1000 Mbit/s"]
    with failing(exits.USAGE, "no such run"):
        plots.draw("power", loaded, plots.Options(runs=("nothing",)))


@given(
    st.lists(st.tuples(st.floats(0.1, 2), st.floats(0, 100), st.none() | st.floats(0, 100)), min_size=1, max_size=2000)
)
def test_thinning_keeps_time_energy_and_weighted_means(rows: list[tuple[float, float, float | None]]) -> None:
    seconds, energy_j, percent = zip(*rows, strict=True)
    samples = pd.DataFrame({"seconds": seconds, "energy_j": energy_j, "cpu_percent": pd.Series(percent, dtype=float)})
    samples["unix_s"] = samples["seconds"].cumsum()
    thin = machines.thinned(samples)
    assert len(thin) <= machines.POINTS
    assert thin["seconds"].sum() == pytest.approx(sum(seconds))
    assert thin["energy_j"].sum() == pytest.approx(sum(energy_j))
    assert thin["unix_s"].iloc[-1] == samples["unix_s"].iloc[-1]
    if all(value is not None for value in percent):
        whole = (samples["cpu_percent"] * samples["seconds"]).sum()
        assert (thin["cpu_percent"] * thin["seconds"]).sum() == pytest.approx(whole)


# --- at the edges -----------------------------------------------------------------------------------------------------


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    hostile = "$x^{<b>&\x1b[31m"
    runs.make(tmp_path / "run", strategy=hostile, energy_w={hostile: 3.0})
    for kind in ("time", "phases", "accuracy", "power"):
        svg = style.encode(plots.draw(kind, load([tmp_path])), "svg", letters="none")
        assert r"$x^{<b>&\x1b[31m" in "".join(ElementTree.fromstring(svg).itertext())


def test_files_that_cannot_be_written_are_one_line(loaded: Loaded, tmp_path: Path) -> None:
    figure = plots.draw("time", loaded)
    for name, code in (("x.jpg", exits.USAGE), ("x", exits.USAGE), ("missing/x.svg", exits.CANNOT_WRITE)):
        with failing(code):
            plots.save(figure, tmp_path / name)
    with pytest.raises(Failure, match="no figure 'pie'"):
        plots.draw("pie", loaded)


def test_pyplot_is_never_loaded(one: Loaded) -> None:
    code = """
import sys
from pathlib import Path
from hvdtrain.results import plots
assert "matplotlib" not in sys.modules and "pandas" not in sys.modules
from hvdtrain.results.load import load
plots.draw("time", load([Path(sys.argv[1])]))
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(one.roots[0])], check=True, cwd=Path(__file__).parent.parent)


def test_more_settings_than_a_figure_can_show_is_a_failure_that_says_what_to_do(tmp_path: Path) -> None:
    for number in range(13):
        runs.make(tmp_path / str(number), hosts=2, rate_mbit=10.0, config={"lr": number / 10})
    for kind in ("time", "phases", "wire", "accuracy"):
        with failing(exits.USAGE, r"13 settings are too many for one figure .* --where"):
            plots.draw(kind, load([tmp_path]))
