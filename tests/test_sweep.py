"""Sweeps on paper: what a file may say, which runs follow from it, in which order, and how long they take."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import ROOT, finished, installed
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.sweep import command, estimate, execute, file, folder, network, plan, preview, show
from hvdtrain.sweep.__main__ import main
from hvdtrain.sweep.preview import Preview, previews, words
from hvdtrain.sweep.process import Children
from hvdtrain.system.exits import Failure

FLAGS = {"resnet": {"seed", "lr", "batch_size", "global_batch_size", "framework", "strategy", "config", "device"}}
SHIPPED = sorted((ROOT / "launch" / "sweeps").glob("*.toml"))
CLUSTER = '[cluster]\nvirtual = ["a", "b", "c", "d"]\n'


def read(folder: Path, text: str, *overrides: str) -> file.Sweep:
    path = folder / "sweep.toml"
    path.write_text(text)
    return file.read(path, overrides, FLAGS.__getitem__)


def refusal(folder: Path, text: str, *overrides: str) -> Failure:
    """What is said of a file that is refused, when it is read or when its points are made."""
    with pytest.raises(Failure) as failure:
        plan.points(read(folder, text, *overrides))
    assert "\n" not in str(failure.value)
    return failure.value


def point(**about: Any) -> plan.Point:
    given = {"workload": "resnet", "hosts": 1, "ranks_per_host": 1, "rate": None, "launcher": "none", "on": "machine"}
    return plan.Point(settings={**given, **about}, kinds=("timing",), where="test")


# --- product and zip -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(2, 4), st.integers(2, 3))
def test_a_grid_is_the_product_of_its_lists_and_zipped_keys_move_together(
    lengths: list[int], together: int, zipped: int
) -> None:
    free = {f"free{number}": list(range(length)) for number, length in enumerate(lengths)}
    tied = {f"tied{number}": [10 * number + value for value in range(together)] for number in range(zipped)}
    grid = file.Grid(values={**tied, **free}, zips=[list(tied)], label=None, protocol=None, repeats=1, where="")
    found = [tuple(sorted(one.items())) for one in plan.combinations(grid)]
    expected = set()
    for index in range(together):
        for rest in itertools.product(*free.values()):
            one = {key: values[index] for key, values in tied.items()} | dict(zip(free, rest, strict=True))
            expected.add(tuple(sorted(one.items())))
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_one_host_is_run_once_for_all_rates_and_several_hosts_for_each(tmp_path: Path) -> None:
    sweep = read(tmp_path, CLUSTER + '[[grid]]\nhosts = [1, 2, 4]\nrate = ["10mbit", "1gbit"]\nseed = [1, 2]\n')
    found, merged = plan.points(sweep)
    counts = Counter((one.hosts, one.rate) for one in found)
    assert counts == {(1, None): 2, **{(hosts, rate): 2 for hosts in (2, 4) for rate in ("10mbit", "1gbit")}}
    assert merged == 2


def test_equal_settings_are_one_point_however_they_are_written(tmp_path: Path) -> None:
    text = CLUSTER + '[[grid]]\nhosts = 2\nrate = ["10mbit", "10000kbit"]\n[[grid]]\nrate = "0.01gbit"\nhosts = [2]\n'
    found, merged = plan.points(read(tmp_path, text))
    assert (len(found), merged) == (1, 2)


@given(st.dictionaries(st.sampled_from(sorted(FLAGS["resnet"])), st.integers(0, 5), min_size=1), st.integers(6, 9))
def test_a_changed_setting_is_another_point_with_another_name(flags: dict[str, int], other: int) -> None:
    names = {point(**flags).name}
    for key in flags:
        names.add(point(**{**flags, key: other}).name)
    assert len(names) == 1 + len(flags)
    assert point(**dict(reversed(flags.items()))).name == point(**flags).name


def test_other_contents_of_a_config_file_are_another_point(tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    names = set()
    for rate in (0.1, 0.2):
        preset.write_text(f"lr = {rate}\n")
        names |= {one.name for one in plan.points(read(tmp_path, f'[[grid]]\nconfig = "{preset}"\n'))[0]}
    assert len(names) == 2


def test_the_sweeps_own_keys_win_over_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "preset.toml").write_text("lr = 0.1\n")
    text = f"[defaults]\nlr = 0.3\n[[grid]]\nseed = 1\nconfig = '{tmp_path / 'preset.toml'}'\n"
    assert list(plan.points(read(tmp_path, text))[0][0].flags) == ["config", "lr", "seed"], "flags behind it win"


# --- order -----------------------------------------------------------------------------------------------------------


def grid_points(rates: int, hosts: int, seeds: int, repeats: int) -> list[plan.Point]:
    return [
        plan.Point(
            settings={**point().settings, "rate": f"{rate}mbit", "hosts": host, "seed": seed},
            kinds=("timing",) * repeats,
            where="",
        )
        for host in range(2, 2 + hosts)
        for rate in range(1, 1 + rates)
        for seed in range(seeds)
    ]


SIZES = (st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


@given(*SIZES, st.sampled_from(file.ORDERS), st.integers(0, 99))
def test_every_order_has_every_run_once_and_numbers_them(
    rates: int, hosts: int, seeds: int, repeats: int, order: str, seed: int
) -> None:
    points = grid_points(rates, hosts, seeds, repeats)
    runs = plan.runs(points, order, seed)
    assert Counter(run.name for run in runs) == {
        f"{one.name}-timing-r{repeat}": 1 for one in points for repeat in range(1, repeats + 1)
    }
    assert [run.order for run in runs] == list(range(len(runs)))
    assert runs == plan.runs(points, order, seed)


@given(*SIZES)
def test_interleaved_gives_a_steady_drift_no_favourite(rates: int, hosts: int, seeds: int, repeats: int) -> None:
    """Over every two turns, the mean place in the order is the same for all settings."""
    runs = plan.runs(grid_points(rates, hosts, seeds, repeats), "interleaved")
    places = defaultdict(list)
    for run in runs:
        places[run.point.cell].append(run.order)
    even = (seeds * repeats) // 2 * 2
    assert len({sum(where[:even]) for where in places.values()}) == 1
    changes = sum(one.point.rate != other.point.rate for one, other in itertools.pairwise(runs))
    assert changes == (rates - 1) * seeds * repeats  # and no more changes of the rate than that takes


def test_the_protocol_of_the_study_is_kept_in_order_and_numbered(tmp_path: Path) -> None:
    sweep = read(tmp_path, 'protocol = "E,5T,E,5T,E"\norder = "as-written"\n[[grid]]\nseed = 1\n')
    found, _ = plan.points(sweep)
    runs = plan.runs(found, sweep.order)
    assert "".join(run.kind[0] for run in runs) == "ettttt" + "ettttt" + "e"
    assert [run.repeat for run in runs if run.kind == "timing"] == list(range(1, 11))
    assert [run.repeat for run in runs if run.kind == "energy"] == [1, 2, 3]


def test_two_protocols_of_one_point_make_the_runs_of_both(tmp_path: Path) -> None:
    text = '[[grid]]\nseed = 1\nprotocol = "3T"\n[[grid]]\nseed = 1\nprotocol = "E,2T"\n'
    (found,), merged = plan.points(read(tmp_path, text))
    assert (Counter(found.kinds), merged) == ({"timing": 3, "energy": 1}, 1)


def test_what_is_measured_before_step_0_is_no_other_plan_than_was_asked_for(tmp_path: Path) -> None:
    """Shares, and where a model is cut; but those that were asked for must be in the manifest."""
    run = plan.Run(point=point(), kind="timing", repeat=1)
    for name, found, default in (("cut", ["fc"], []), ("shares", [0.7, 0.3], None)):
        for wanted, fits in ((default, True), (["layer3.0"], False)):
            preview = dataclasses.replace(foretold(30), plan={"steps": 30, name: wanted})
            run_of(tmp_path, plan={"steps": 30, name: found}, ranks=[{"host": "a"}])
            assert (folder.unfit(tmp_path, run, preview) is None) == fits, name


def run_of(folder: Path, **manifest: Any) -> None:
    """Makes a run of two hosts at 10 Mbit/s, but for what is given."""
    hosts = {"ranks": [{"host": "a"}, {"host": "b"}], "links": [{"host": host, "throttle": TEN} for host in "ab"]}
    usual = {"plan": {"steps": 30}, "config": {"framework": "torch"}, "data": {"fingerprint": "0123"}} | hosts
    (folder / "metrics").mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(usual | manifest))
    (folder / "metrics" / "rank0000.jsonl").write_text('{"type": "summary"}\n')
    (folder / "COMPLETE").touch()


TEN = {"up_mbit": 10.0, "down_mbit": 10.0}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"data": {"fingerprint": "other"}}, "its data are not those"),
        ({"ranks": [{"host": "a"}] * 2}, "it ran 2 ranks on 1 hosts, asked were 2 on 2"),
        ({"ranks": [{"host": "a"}, {"host": "b"}, {"host": "b"}]}, "it ran 3 ranks on 2 hosts"),
        ({"links": [{"host": "b", "throttle": None}]}, "host b was throttled to"),
        ({"links": [{"host": "b", "throttle": TEN | {"down_mbit": 100.0}}]}, "host b was throttled to"),
        ({"config": {"framework": "torch", "monitor": "power"}}, "monitor is 'power' in its manifest"),
        ({"plan": {"steps": 31}}, "its batches and steps"),
    ],
)
def test_a_run_is_kept_only_if_it_was_made_as_it_is_asked_for(
    change: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    run_of(tmp_path, **change)
    one = plan.Run(point=point(hosts=2, rate="10mbit", on="cluster"), kind="timing", repeat=1)
    found = folder.unfit(tmp_path, one, dataclasses.replace(foretold(30), plan={"steps": 30}))
    assert found == why or (why and why in (found or ""))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("naem = 'x'\n[[grid]]\n", ":1: unknown key 'naem' at the top of the file; known: name, protocol"),
        (
            "\n[[grid]]\nseed = 1\n[[grid]]\nsede = 1\n",
            ":5: unknown key 'sede' in a grid; known: workload, command, hosts",
        ),
        ("[defaults]\nseeed = 1\n[[grid]]\n", ":2: unknown key 'seeed'"),
        ("[cluster]\nvirtaul = ['a']\n[[grid]]\n", ":2: unknown key 'virtaul' in [cluster]; known: virtual"),
        ("[cluster]\ncpu_share = 1\n[[grid]]\n", "give one of virtual, existing, hostfile"),
        ("[cluster]\nvirtual = ['a', 'a']\n[[grid]]\n", "twice"),
        ("[cluster]\nvirtual = ['a']\ndev = 'eth0'\n[[grid]]\n", ":3: dev goes with hostfile"),
        ("[cluster]\nexisting = 'lab'\nfill = true\n[[grid]]\n", ":3: fill goes with virtual"),
        ("[[grid]]\nhosts = 2\n", "this machine is one"),
        ("[[grid]]\non = 'cluster'\n", "has no [cluster]"),
        (CLUSTER + "[[grid]]\nhosts = [1, 5]\n", "hosts = 5: [cluster] has 4"),
        (CLUSTER + "[[grid]]\nrate = '10mbps'\nhosts = 2\n", "counts bytes"),
        (CLUSTER + "[[grid]]\nrate = 10\n", ":4: rate = 10: give a text"),
        ("[[grid]]\nrun_dir = 'x'\n", "run_dir is not for a sweep"),
        ("[[grid]]\nmonitor = 'power'\n", "protocol says"),
        ("[[grid]]\nworkload = 'resnte'\n", "unknown workload 'resnte'; known: captioning, resnet"),
        ("[[grid]]\ncommand = 'nowhere.py --lr 1'\n", ":2: command = 'nowhere.py --lr 1': there is no nowhere.py here"),
        ("[[grid]]\ncommand = ''\n", "it is empty"),
        ("[[grid]]\ncommand = 'true'\nworkload = 'resnet'\n", ":2: command and workload are both given"),
        ("[[grid]]\ncommand = 'true'\n'a b' = 1\n", "neither a flag of the command"),
        ("[[grid]]\nseed = []\n", "at least one value"),
        (
            "[[grid]]\nstrategy = 'powersdg'\n",
            ":2: --strategy powersdg: unknown strategy 'powersdg', did you mean powersgd?",
        ),
        (
            "[[grid]]\nstrategy = 'powersgd'\nrank = [1, 4]\n",
            ":3: rank = 1: the strategy's settings stand in its name now; give --strategy powersgd:rank=1",
        ),
        ("[[grid]]\nlr = nan\n", "lr = nan"),
        (f"[[grid]]\nepochs = {10**24}\n", ":2: epochs: give a whole number of at most"),
        (f"[[grid]]\nlabel = 0x{'f' * 5000}\n", ":2: label: give a whole number of at most"),
        ("[[grid]]\nhosts = true\n", "give a whole number"),
        ("[[grid]]\nlauncher = 'srun'\n", "give one of launch/mpirun.sh"),
        ("[[grid]]\nlauncher = 'none'\nranks_per_host = 2\n", "one process"),
        ("[[grid]]\nseed = [1, 2]\nlr = [1]\nzip = [['seed', 'lr']]\n", "seed has 2, lr has 1"),
        ("[[grid]]\nseed = 1\nzip = [['seed', 'lr']]\n", ":3: zip names 'lr'"),
        ("[[grid]]\nzip = ['seed']\n", "give lists of keys"),
        ("protocol = '0T'\n[[grid]]\n", "neither T nor E"),
        ("protocol = '99999999T'\n[[grid]]\n", "more than 10,000 runs"),
        ("[[grid]]\nrepeats = 200000\n", ":1: 200,000 runs up to here; a sweep has at most 10,000"),
        (f"[[grid]]\nseed = {[*range(200)]}\nlr = {[1.0 + n for n in range(200)]}\n", "40,000 runs"),
        ("[[grid]]\nseed = " + "[" * 5000 + "]" * 5000, "nested more than"),
        ("[[grid]]\n" + "a." * 5000 + "b = 1\n", "a key of more than 64 parts"),
        ("order = 'sorted'\n[[grid]]\n", ":1: order = 'sorted'"),
        ("name = '../x'\n[[grid]]\n", "name = '../x'"),
        ("[[grid]]\nconfig = 'nowhere.toml'\n", "No such file"),
        ("seed = 1\n", "no grid"),
        ("[grid]\nseed = 1\n", "no grid"),
        ("[[grid]]\nseed = \n", "not TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    failure = refusal(tmp_path, text)
    assert failure.code == 78
    assert str(failure).startswith(f"{tmp_path / 'sweep.toml'}")
    assert expected in str(failure)


@pytest.mark.parametrize("override", ["seed", "1=2", "label=/", "hosts=3", "colour=1"])
def test_a_setting_that_cannot_be_put_in_place_is_refused(tmp_path: Path, override: str) -> None:
    text = CLUSTER + "[[grid]]\nhosts = [1, 2]\nglobal_batch_size = [8, 16]\nzip = [['hosts', 'global_batch_size']]\n"
    assert refusal(tmp_path, text, override).code in (2, 78)


def test_what_is_set_on_the_command_line_wins(tmp_path: Path) -> None:
    text = 'protocol = "T"\n[defaults]\nseed = 1\n[[grid]]\nlr = [0.1, 0.2]\nprotocol = "E"\n[[grid]]\nseed = 5\n'
    sweep = read(tmp_path, text, "seed=[7, 8]", "protocol=2T", "framework=torch", "cooldown_s=3")
    found, _ = plan.points(sweep)
    assert sweep.cooldown_s == 3
    assert Counter((one.flags.get("lr"), one.flags["seed"]) for one in found) == {
        (lr, seed): 1 for lr in (0.1, 0.2, None) for seed in (7, 8)
    }
    assert all(one.kinds == ("timing", "timing") and one.flags["framework"] == "torch" for one in found)
    text = "[cluster]\nvirtual = [1, 2]\n[[grid]]\nhosts = [1, 2]\nseed = [1, 2]\n"
    found, _ = plan.points(read(tmp_path, text, "label=x", 'zip=[["hosts", "seed"]]'))
    assert [(one.hosts, one.flags["seed"], one.settings["label"]) for one in found] == [(1, 1, "x"), (2, 2, "x")]


@settings(max_examples=200)
@given(st.text(alphabet="ab[]{}=\"\n,.#1 '\\\x00é", max_size=60))
def test_no_text_at_all_is_met_with_a_traceback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.toml"
    path.write_bytes(text.encode())
    with pytest.raises(Failure):
        plan.points(file.read(path, (), FLAGS.__getitem__))


def test_flags_are_typed_as_the_workload_takes_them() -> None:
    defaults = {"timeline": False, "zero_gamma": True, "lr": 0.05}
    typed = words({"timeline": True, "zero_gamma": False, "lr": 1e-3}, defaults)
    assert typed == ["--timeline", "--zero-gamma", "false", "--lr", "0.001"]
    assert words({"timeline": False}, defaults) == []
    with pytest.raises(Failure, match="timeline = 'False': give true or false"):
        words({"timeline": "False"}, defaults)


# --- how long --------------------------------------------------------------------------------------------------------


def foretold(steps: int, pixels: int | None = 1024) -> Preview:
    return Preview(
        config={"framework": "torch"},
        plan={"steps": steps, "rank_batch": 32},
        parameters=1_334_970,
        sent_bytes=2e6,
        pixels=pixels,
        fingerprint="0123",
    )


@given(st.integers(2, 8), st.sampled_from([10, 100, 1000]))
def test_the_wire_takes_what_arithmetic_says(hosts: int, mbit: int) -> None:
    one = point(hosts=hosts, rate=f"{mbit}mbit", on="cluster")
    known = estimate.Estimator({one.name: foretold(1)}, None)
    bits = 2_000_000 * 8
    assert known.wire_s(one) == pytest.approx(float(bits / (Fraction(936, 1000) * mbit * 10**6)), rel=1e-12)


def test_a_strategy_is_estimated_by_what_it_sends() -> None:
    sent = {}
    for strategy in ("allreduce", "hierarchical", "powersgd", "local-sgd:every=4+powersgd"):
        one = point(hosts=4, rate="10mbit", on="cluster", launcher="horovodrun", strategy=strategy)
        told = previews([one])[one.name]
        assert isinstance(told, Preview), told
        sent[strategy] = told.sent_bytes
    assert sent["allreduce"] == sent["hierarchical"] == pytest.approx(1.5 * 4 * told.parameters, abs=4)
    assert sent["powersgd"] == 4 * sent["local-sgd:every=4+powersgd"] < sent["hierarchical"] / 100


def test_an_estimate_says_what_it_rests_on() -> None:
    slow, fast = (point(hosts=2, rate=rate, on="cluster", seed=1) for rate in ("10mbit", "1gbit"))
    other, unknown = point(hosts=2, rate="10mbit", on="cluster", seed=2), point(seed=3, device="gpu")
    told = {one.name: foretold(20) for one in (slow, fast, other)} | {unknown.name: foretold(20, None)}
    known = estimate.Estimator(told, None)
    runs = {one.name: plan.Run(point=one, kind="timing", repeat=1) for one in (slow, fast, other, unknown)}
    assert known.of(runs[slow.name]).basis == "guess"
    assert known.of(runs[unknown.name]) == estimate.Estimate(None, "unknown")
    known.learn(runs[slow.name], 150.0)
    assert known.of(runs[slow.name]) == known.of(runs[other.name]) == estimate.Estimate(150.0, "measured")
    near = known.of(runs[fast.name])
    assert near.basis == "near"
    assert near.seconds == pytest.approx(150.0 - 20 * (known.wire_s(slow) - known.wire_s(fast)))


class Model(NamedTuple):
    """A run, and what the model is told of it."""

    hosts: int
    rate: str
    steps: int
    rank_batch: int
    sent_bytes: float


MODELS = st.builds(
    Model,
    st.integers(1, 8),
    st.sampled_from(["10mbit", "100mbit", "unlimited"]),
    st.integers(1, 500),
    st.integers(1, 256),
    st.floats(1e5, 1e8),
)


@given(MODELS, MODELS, st.sampled_from(["torch", "tensorflow"]), st.integers(1, 2), st.sampled_from([0.0, 0.25, 0.5]))
def test_a_similar_run_tells_what_the_model_does_where_the_model_holds(
    one: Model, other: Model, framework: str, ranks: int, cpu_share: float
) -> None:
    virtual = file.ClusterSpec(virtual=tuple("abcdefgh"), cpu_share=cpu_share or None)
    previews, runs = {}, []
    for label, model in zip("ab", (one, other), strict=True):
        about = {"hosts": model.hosts, "rate": model.rate, "ranks_per_host": ranks, "label": label}
        runs.append(plan.Run(point=point(on="cluster", framework=framework, **about), kind="timing", repeat=1))
        previews[runs[-1].point.name] = dataclasses.replace(
            foretold(model.steps, pixels=4096),
            config={"framework": framework},
            plan={"steps": model.steps, "rank_batch": model.rank_batch},
            sent_bytes=model.sent_bytes,
        )
    first, second = (estimate.Estimator(previews, virtual).of(run) for run in runs)
    assert (first.basis, second.basis) == ("guess", "guess") and first.seconds
    known = estimate.Estimator(previews, virtual)
    known.learn(runs[0], first.seconds)
    near = known.of(runs[1])
    assert near.basis == "near" and near.seconds == pytest.approx(second.seconds)


def test_the_model_adds_up() -> None:
    """ResNet-34 at width 0.25 on two virtual hosts of half a core, one rank each, and a table of a perceptron."""
    images, table = point(hosts=2, rate="10mbit", on="cluster"), point(hosts=1, seed=2)
    told = {images.name: foretold(100), table.name: foretold(100, None)}
    known = estimate.Estimator(told, file.ClusterSpec(virtual=("a", "b"), cpu_share=0.5))
    start_s, sample_s, wire_s = 2 + 2.5 / 0.5 + 2, 0.65e-3 + 0.145e-9 * 1_334_970, 2e6 * 8 / 0.936e7
    seconds = known.of(plan.Run(point=images, kind="timing", repeat=1)).seconds
    assert seconds == pytest.approx(start_s + 100 * (32 * sample_s / 0.5 + wire_s))
    cores = len(os.sched_getaffinity(0))
    start_s, step_s = 2 + 2.5, (2e-3 + 3.5e-9 * 1_334_970 + 32 * 0.2e-9 * 1_334_970) / cores
    seconds = known.of(plan.Run(point=table, kind="timing", repeat=1)).seconds
    assert seconds == pytest.approx(start_s + 100 * step_s)


def test_what_is_left_takes_the_runs_the_rests_and_a_measurement_of_each_new_rate() -> None:
    asked = [(1, None), (2, "10mbit"), (1, None), (3, "10mbit"), (4, "1gbit"), (2, "unlimited")]
    runs = [
        plan.Run(point=point(hosts=hosts, rate=rate, on="cluster"), kind="timing", repeat=1) for hosts, rate in asked
    ]
    known = estimate.Estimator({}, None)
    for run in runs:
        known.learn(run, 100.0)
    about = file.Sweep(path=Path("s.toml"), name="s", cooldown_s=7.0, grids=[])
    task = execute.Task(sweep=about, root=Path(), outcomes=[], previews={}, estimator=known, flags={})
    left = [show.Outcome(run=run, folder=Path()) for run in runs]
    slow_s, fast_s = estimate.VERIFY_S * (2 + 1), estimate.VERIFY_S * (4 + 1)
    assert task.left_s(left) == pytest.approx(6 * 107 + estimate.CLUSTER_S + slow_s + fast_s)
    assert task.left_s(left[3:], "10mbit") == pytest.approx(3 * 107 + fast_s), "what is set is not set again"
    unknown = plan.Run(point=point(seed=1), kind="timing", repeat=1)
    assert task.left_s([*left, show.Outcome(run=unknown, folder=Path())]) is None
    assert execute.most_hosts(left[1:]) == 3, "whose links are measured at once: a run on one host needs none"


# --- links -----------------------------------------------------------------------------------------------------------


def test_a_point_is_judged_by_the_links_of_its_own_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are measured once for the runs of a rate, and once more if one is off; here it is that of c."""
    off = {"a -> b": 1.0, "b -> c": -2.0, "c -> d": -25.0, "d -> a": -0.5}
    links = [
        {"link": name, "off_percent": each, "ok": each > -5, "goodput_mbit": 9 + each / 10, "expected_mbit": 9.36}
        for name, each in off.items()
    ]
    (tmp_path / "measured").write_text(json.dumps({"links": links}))
    (tmp_path / "asked").touch()
    measure = ["sh", "-c", 'echo "$1" >>asked; cat measured', "sh"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "verify", lambda hosts, *_: [[*measure, " ".join(hosts)]])
    for name in ("up", "down", "throttle"):
        monkeypatch.setattr(command, name, lambda *_: ["true"])
    made = network.Network(read(tmp_path, CLUSTER + "[[grid]]\n"), "s", Children({"PATH": os.environ["PATH"]}))
    two, four = (point(hosts=hosts, rate="10mbit", on="cluster") for hosts in (2, 4))
    assert made.ready(two, most=4) == network.Verified(-2.0, None), "c sends to none of its hosts"
    told = made.ready(four, most=4)
    assert (told.off_percent, told.marked) == (-25.0, "c -> d at 10mbit: 6.5 Mbit/s instead of 9.36 (-25.0 %)")
    assert (tmp_path / "asked").read_text() == "a b c d\n" * 2
    assert made.ready(point(hosts=4, rate="unlimited", on="cluster"), most=4) == network.Verified()
    made.ready(two, most=2)
    assert (tmp_path / "asked").read_text().endswith("a b c d\na b\na b\n"), "another rate was set in between"
    assert made.close() == []


def test_answers_come_in_the_order_of_their_questions() -> None:
    """Though several processes share the questions out."""
    answers = preview.ask([(f"nowhere{number}", (), 1, 1) for number in range(5)])
    assert [f"'nowhere{number}'" in str(answer) for number, answer in enumerate(answers)] == [True] * 5


# --- shipped files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_sweep_can_be_planned_here(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hvdtrain.sweep", str(path), "--root", str(tmp_path), "--dry-run", "--json"]
    fewer = {"martin2019_pyramids": ["net=p3-k9"], "fair": ["lr=0.2", "global_batch_size=128"]}  # of 30, of 15
    command += [word for given in fewer.get(path.stem, []) for word in ("--set", given)]
    done = finished(command, extra={"HVDTRAIN_EPOCHS": "7"})
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["sweep"] == path.stem
    for run in document["runs"]:
        assert run["state"] in ("waiting", "lacking")
        if run["state"] == "waiting":
            assert run["command"][-3] == "--run-dir"
            assert run["estimate_s"] or "gpu" in run["point"]
    assert list(tmp_path.iterdir()) == []


def test_a_command_whose_number_of_ranks_is_not_known_here_can_be_planned(tmp_path: Path) -> None:
    """It is that of the GPUs, of which this machine may have none."""
    file = tmp_path / "sweep.toml"
    file.write_text('[[grid]]\ncommand = "true"\nranks_per_host = "gpus"\n')
    assert main([str(file), "--root", str(tmp_path), "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise SystemExit('usage')", "broken: SystemExit: usage"),
        ("raise KeyError('x')", "broken: KeyError: 'x'"),
        ("print('no JSON')", "broken: JSONDecodeError"),
        ("os._exit(3)", "a dry run of broken ended its process: exit code 3"),
    ],
)
def test_a_workload_whose_dry_run_is_broken_is_told_in_a_line(body: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(f"import os\n\n\ndef main(stop):\n    {body}\n")
    file = tmp_path / "sweep.toml"
    file.write_text('[[grid]]\nworkload = "broken"\nseed = [1, 2]\n')
    command = [sys.executable, "-m", "hvdtrain.sweep", str(file), "--dry-run"]
    done = finished(command, extra=installed(tmp_path, "broken = broken"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith(f"sweep: {told}")
