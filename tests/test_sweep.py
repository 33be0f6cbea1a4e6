"""Planning of sweeps: errors in files, the runs of a file and their order."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import runs
from conftest import ROOT, failing, finished, installed
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.sweep import command, dry_run, file, folder, gpus, grid, network
from hvdtrain.sweep.__main__ import main
from hvdtrain.system.exits import Failure

FLAGS = ["seed", "lr", "batch_size", "global_batch_size", "framework", "strategy", "config", "device"]
SHIPPED = sorted((ROOT / "launch" / "sweeps").glob("*.toml"))
CLUSTER = '[cluster]\nvirtual = ["a", "b", "c", "d"]\n'
TEN = {"up_mbit": 10.0, "down_mbit": 10.0}
DRY_RUN = {"config": {"framework": "torch"}, "data": {"fingerprint": "da4c"}}


def read(folder: Path, text: str, *overrides: str) -> file.Sweep:
    path = folder / "sweep.toml"
    path.write_text(text)
    return file.read(path, overrides)


def rejection(folder: Path, text: str, *overrides: str) -> Failure:
    """The error of a file that is rejected, either when it is read or when it is expanded."""
    with pytest.raises(Failure) as failure:
        grid.experiments(read(folder, text, *overrides))
    assert "\n" not in str(failure.value)
    return failure.value


def experiment(**changes: Any) -> grid.Experiment:
    settings = {"workload": "resnet", "hosts": 1, "ranks_per_host": 1, "rate": None, "launcher": "none"}
    return grid.Experiment(settings={**settings, "on": "machine", **changes}, kinds=("timing",), where="test")


def run_of(experiment: grid.Experiment) -> grid.Run:
    return grid.Run(experiment=experiment, kind="timing", repeat=1)


# --- product and zip -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(2, 4), st.integers(2, 3))
def test_a_grid_is_the_product_of_its_lists_and_zipped_keys_vary_together(
    lengths: list[int], zip_length: int, zipped: int
) -> None:
    free = {f"free{number}": list(range(length)) for number, length in enumerate(lengths)}
    tied = {f"tied{number}": [10 * number + value for value in range(zip_length)] for number in range(zipped)}
    table = file.Grid(values={**tied, **free}, zip=[list(tied)], where="")
    combinations = [tuple(sorted(one.items())) for one in grid.combinations(table)]
    expected = set()
    for index in range(zip_length):
        for rest in itertools.product(*free.values()):
            one = {key: values[index] for key, values in tied.items()} | dict(zip(free, rest, strict=True))
            expected.add(tuple(sorted(one.items())))
    assert len(combinations) == len(set(combinations))
    assert set(combinations) == expected


def test_a_single_host_runs_once_for_all_rates_and_several_hosts_run_at_each_rate(tmp_path: Path) -> None:
    sweep = read(tmp_path, CLUSTER + '[[grid]]\nhosts = [1, 2, 4]\nrate = ["10mbit", "1gbit"]\nseed = [1, 2]\n')
    counts = Counter((one.hosts, one.rate) for one in grid.experiments(sweep))
    assert counts == {(1, None): 2, **{(hosts, rate): 2 for hosts in (2, 4) for rate in ("10mbit", "1gbit")}}


def test_equal_settings_are_one_experiment_in_any_spelling(tmp_path: Path) -> None:
    text = CLUSTER + '[[grid]]\nhosts = 2\nrate = ["10mbit", "10000kbit"]\n[[grid]]\nrate = "0.01gbit"\nhosts = [2]\n'
    assert len(grid.experiments(read(tmp_path, text))) == 1


@given(st.dictionaries(st.sampled_from(FLAGS), st.integers(0, 5), min_size=1), st.integers(6, 9))
def test_a_changed_setting_makes_another_experiment_with_another_name(flags: dict[str, int], other: int) -> None:
    names = {experiment(**flags).name}
    for key in flags:
        names.add(experiment(**{**flags, key: other}).name)
    assert len(names) == 1 + len(flags)
    assert experiment(**dict(reversed(flags.items()))).name == experiment(**flags).name


def test_changed_contents_of_a_config_file_make_another_experiment(tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    names = set()
    for rate in (0.1, 0.2):
        preset.write_text(f"lr = {rate}\n")
        names |= {one.name for one in grid.experiments(read(tmp_path, f'[[grid]]\nconfig = "{preset}"\n'))}
    assert len(names) == 2


def test_keys_of_the_sweep_override_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "preset.toml").write_text("lr = 0.1\n")
    text = f"[defaults]\nlr = 0.3\n[[grid]]\nseed = 1\nconfig = '{tmp_path / 'preset.toml'}'\n"
    flags = [*grid.experiments(read(tmp_path, text))[0].flags]
    assert flags == ["config", "lr", "seed"], "flags after --config override the file"


# --- order -----------------------------------------------------------------------------------------------------------


def many_experiments(rates: int, hosts: int, seeds: int, repeats: int) -> list[grid.Experiment]:
    return [
        grid.Experiment(
            settings={**experiment().settings, "rate": f"{rate}mbit", "hosts": host, "seed": seed},
            kinds=("timing",) * repeats,
            where="",
        )
        for host in range(2, 2 + hosts)
        for rate in range(1, 1 + rates)
        for seed in range(seeds)
    ]


SIZES = (st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


@given(*SIZES, st.sampled_from(["as-written", "interleaved"]))
def test_every_order_contains_every_run_once(rates: int, hosts: int, seeds: int, repeats: int, order: str) -> None:
    experiments = many_experiments(rates, hosts, seeds, repeats)
    runs = grid.runs(experiments, order)
    assert Counter(run.name for run in runs) == {
        f"{one.name}-timing-r{repeat}": 1 for one in experiments for repeat in range(1, repeats + 1)
    }
    assert [run.order for run in runs] == list(range(len(runs)))
    assert runs == grid.runs(experiments, order)


def test_runs_follow_the_protocol_and_are_numbered_by_kind(tmp_path: Path) -> None:
    sweep = read(tmp_path, 'protocol = "E,5T,E,5T,E"\norder = "as-written"\n[[grid]]\nseed = 1\n')
    runs = grid.runs(grid.experiments(sweep), sweep.order)
    assert "".join(run.kind[0] for run in runs) == "ettttt" + "ettttt" + "e"
    assert [run.repeat for run in runs if run.kind == "timing"] == list(range(1, 11))
    assert [run.repeat for run in runs if run.kind == "energy"] == [1, 2, 3]


def test_an_experiment_in_two_grids_has_the_runs_of_both_protocols(tmp_path: Path) -> None:
    text = '[[grid]]\nseed = 1\nprotocol = "3T"\n[[grid]]\nseed = 1\nprotocol = "E,2T"\n'
    (merged,) = grid.experiments(read(tmp_path, text))
    assert Counter(merged.kinds) == {"timing": 3, "energy": 1}


# --- finished runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"data": {"fingerprint": "other"}}, "different data"),
        ({"ranks": [{"host": "a"}] * 2}, "number of hosts was 1, expected 2"),
        ({"ranks": [{"host": "a"}, {"host": "b"}, {"host": "b"}]}, "number of ranks was 3, expected 2"),
        ({"links": [{"host": "b", "throttle": None}]}, "throttle in Mbit/s was"),
        ({"links": [{"host": "b", "throttle": TEN | {"down_mbit": 100.0}}]}, "throttle in Mbit/s was"),
        ({"config": {"framework": "torch", "monitor": "power"}}, "monitor was power, expected none"),
        ({"config": {"framework": "tensorflow"}}, "framework is 'tensorflow' in the manifest"),
    ],
)
def test_a_finished_run_counts_only_if_its_records_match_the_settings(
    change: dict[str, Any], problem: str | None, tmp_path: Path
) -> None:
    made = runs.make(tmp_path / "run", hosts=2, rate_mbit=10.0)
    with runs.edited(made / "manifest.json") as manifest:
        manifest.update(change)
    run = run_of(experiment(hosts=2, rate="10mbit", on="cluster"))
    mismatch = folder.mismatch(made, run, DRY_RUN)
    assert mismatch == problem or (problem and problem in (mismatch or ""))


# --- rejected files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("naem = 'x'\n[[grid]]\n", ": unknown key 'naem', did you mean name?; known: name, protocol"),
        (
            "[cluster]\nvirtaul = ['a']\n[[grid]]\n",
            ": [cluster]: unknown key 'virtaul', did you mean virtual?; known: virtual",
        ),
        ("[cluster]\nvirtual = ['a', 'a']\n[[grid]]\n", "twice"),
        ("[cluster]\nhostfile = 'lab'\nfill = true\n[[grid]]\n", ": [cluster]: fill needs virtual"),
        ("[[grid]]\nhosts = 2\n", "there is no [cluster]"),
        (CLUSTER + "[[grid]]\nrate = '10mbps'\nhosts = 2\n", "counts bytes"),
        ("[[grid]]\nrun_dir = 'x'\n", "run_dir cannot be used in a sweep"),
        ("[[grid]]\ncommand = 'nowhere.py --lr 1'\n", ":1: command = 'nowhere.py --lr 1': no file nowhere.py"),
        ("[[grid]]\ncommand = 'true'\n'a b' = 1\n", "neither a flag of the command"),
        ("[[grid]]\nstrategy = 'powersdg'\n", ":1: --strategy powersdg: unknown strategy 'powersdg'"),
        (f"[[grid]]\nepochs = {10**24}\n", ":1: epochs: expected `int` <="),
        ("[[grid]]\nlauncher = 'none'\nranks_per_host = 2\n", "one process"),
        ("[[grid]]\nzip = ['seed']\n", "zip: expected `array`"),
        (f"[[grid]]\nseed = {[*range(200)]}\nlr = {[1.0 + n for n in range(200)]}\n", "more than 10,000 runs"),
        ("order = 'sorted'\n[[grid]]\n", ": order: invalid enum value"),
        ("[[grid]]\nconfig = 'nowhere.toml'\n", "No such file"),
        ("[[grid]]\nseed = \n", "not TOML"),
    ],
)
def test_an_error_in_a_file_names_its_place(tmp_path: Path, text: str, expected: str) -> None:
    failure = rejection(tmp_path, text)
    assert failure.code == 78
    assert str(failure).startswith(f"{tmp_path / 'sweep.toml'}")
    assert expected in str(failure)


@pytest.mark.parametrize("override", ["seed", "1=2", "label=/", "hosts=3"])
def test_a_bad_override_is_rejected(tmp_path: Path, override: str) -> None:
    text = CLUSTER + "[[grid]]\nhosts = [1, 2]\nglobal_batch_size = [8, 16]\nzip = [['hosts', 'global_batch_size']]\n"
    assert rejection(tmp_path, text, override).code in (2, 78)


def test_settings_of_the_command_line_override_the_file(tmp_path: Path) -> None:
    text = 'protocol = "T"\n[defaults]\nseed = 1\n[[grid]]\nlr = [0.1, 0.2]\nprotocol = "E"\n[[grid]]\nseed = 5\n'
    sweep = read(tmp_path, text, "seed=[7, 8]", "protocol=2T", "framework=torch", "cooldown_s=3")
    experiments = grid.experiments(sweep)
    assert sweep.cooldown_s == 3
    assert Counter((one.flags.get("lr"), one.flags["seed"]) for one in experiments) == {
        (lr, seed): 1 for lr in (0.1, 0.2, None) for seed in (7, 8)
    }
    assert all(one.kinds == ("timing", "timing") and one.flags["framework"] == "torch" for one in experiments)
    text = "[cluster]\nvirtual = ['a', 'b']\n[[grid]]\nhosts = [1, 2]\nseed = [1, 2]\n"
    experiments = grid.experiments(read(tmp_path, text, "label=x", 'zip=[["hosts", "seed"]]'))
    assert [(one.hosts, one.flags["seed"], one.settings["label"]) for one in experiments] == [(1, 1, "x"), (2, 2, "x")]


def test_flags_are_switches_or_take_a_value_as_in_the_workload() -> None:
    words = dry_run.run_flags(run_of(experiment(tensorboard=True, zero_gamma=False, lr=1e-3)))
    assert words == ["--tensorboard", "--zero-gamma", "false", "--lr", "0.001"]
    assert dry_run.run_flags(run_of(experiment(tensorboard=False))) == []
    with pytest.raises(Failure, match="tensorboard = 'False': not true or false"):
        dry_run.run_flags(run_of(experiment(tensorboard="False")))


# --- links -----------------------------------------------------------------------------------------------------------


def test_an_experiment_is_judged_by_the_links_of_its_own_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are measured once for all runs at a rate, and once more if one (from c) is off."""

    def link(peer: str, off: float) -> dict[str, Any]:
        about = {"link": f"here -> {peer}", "off_percent": off, "ok": off > -5}
        return about | {"goodput_mbit": 9 + off / 10, "expected_mbit": 9.36}

    ring = [("a", "b", 1.0), ("b", "c", -2.0), ("c", "there", -25.0), ("there", "a", -0.5)]
    measured = [{"host": host, "links": [link(peer, off)]} for host, peer, off in ring]
    (tmp_path / "measured").write_text(json.dumps({"hosts": measured}))
    (tmp_path / "times").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "verify", lambda *_: [["sh", "-c", "echo >>times; cat measured"]])
    for name in ("up", "down", "throttle"):
        monkeypatch.setattr(command, name, lambda *_: ["true"])
    cluster = CLUSTER.replace('"d"', '"there"')
    net = network.Network(read(tmp_path, cluster + "[[grid]]\n"), "s", os.environ)
    two, four = (experiment(hosts=hosts, rate="10mbit", on="cluster") for hosts in (2, 4))
    assert net.prepare(two) == network.LinkCheck(-2.0, None), "c does not send to a or b"
    check = net.prepare(four)
    assert (check.off_percent, check.marked) == (-25.0, "c -> there at 10mbit: 6.5 Mbit/s instead of 9.36 (-25.0 %)")
    assert (tmp_path / "times").read_text() == "\n" * 2
    assert net.prepare(experiment(hosts=4, rate="unlimited", on="cluster")) == network.LinkCheck()
    net.prepare(two)
    assert (tmp_path / "times").read_text() == "\n" * 4, "the rate was changed in between"
    assert net.close() == []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network, "succeeds", lambda *_: False)
    with failing(77, "virtual hosts need root"):
        net.prepare(two)


# --- dry runs --------------------------------------------------------------------------------------------------------


def test_a_dry_run_sees_the_ranks_and_changes_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_EPOCHS", "7")
    before, argv, handler = dict(os.environ), sys.argv, signal.getsignal(signal.SIGTERM)
    answer = dry_run.ask("resnet", ("--batch-size", "8"), 4, 2)
    assert answer["plan"]["global_batch"] == 32 and answer["config"]["epochs"] != 7
    with pytest.raises(Failure, match="'nowhere'"):
        dry_run.ask("nowhere", (), 1, 1)
    assert (dict(os.environ), sys.argv, signal.getsignal(signal.SIGTERM)) == (before, argv, handler)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.slow
def test_shipped_sweeps_pass_the_dry_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One experiment of each grid; reading the file has checked the keys and the strategies of all."""
    first = {one.settings.get("label"): one.name for one in reversed(grid.experiments(file.read(path)))}
    monkeypatch.setenv("HVDTRAIN_EPOCHS", "7")
    only = [word for name in first.values() for word in ("--only", name)]
    assert main([str(path), "--root", str(tmp_path), "--dry-run", "--json", *only]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sweep"] == path.stem
    for run in document["runs"]:
        assert run["state"] in ("waiting", "skipped")
        if run["state"] == "waiting":
            assert run["command"][-3] == "--run-dir"
    assert list(tmp_path.iterdir()) == []


def test_a_command_with_an_unknown_number_of_ranks_passes_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of ranks is the number of GPUs, of which this machine has none."""
    monkeypatch.setattr(gpus, "count", lambda *_: 0)
    path = tmp_path / "sweep.toml"
    path.write_text('[[grid]]\ncommand = "true"\nranks_per_host = "gpus"\n')
    assert main([str(path), "--root", str(tmp_path), "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise SystemExit('usage')", "broken: SystemExit: usage"),
        ("raise KeyError('x')", "broken: KeyError: 'x'"),
        ("print('no JSON')", "broken: JSONDecodeError"),
    ],
)
def test_a_broken_dry_run_is_a_one_line_error(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(f"def main(stop):\n    {body}\n")
    path = tmp_path / "sweep.toml"
    path.write_text('[[grid]]\nworkload = "broken"\nseed = [1, 2]\n')
    command = [sys.executable, "-m", "hvdtrain.sweep", str(path), "--dry-run"]
    done = finished(command, extra=installed(tmp_path, "broken = broken"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith(f"sweep: {path}:1: {message}")
