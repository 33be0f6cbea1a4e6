"""`hvdtrain results strategies`: names, times to a target, bytes and wire against an independent calculation."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import runs
from test_results import json_of

from hvdtrain.results.__main__ import main
from hvdtrain.results.runs import WIRE_SHARE, exchange
from hvdtrain.results.statistics import ratio, summary

STEPS, PARAMETERS, RATE = 5, 1000, 10.0


def by_strategy(found: Any) -> dict[str, Any]:
    rows = {row["strategy"]: row for row in found["rows"]}
    assert len(rows) == len(found["rows"])
    return rows


@pytest.mark.parametrize(
    ("config", "facts", "expected"),
    [
        ({"strategy": "delayed+int8"}, {"behind": "the next step", "exact": False}, ("delayed+int8", True, False)),
        ({"strategy": "elsewhere"}, {"behind": "", "exact": True}, ("elsewhere", False, True)),
        ({"strategy": "native", "ddp_hook": "fp16"}, {}, ("native:hook=fp16", True, False)),
        ({"strategy": "allreduce", "rank": 2}, {}, ("allreduce", True, True)),
        ({"strategy": "async-ps", "servers": 0}, {}, ("async-ps", True, False)),
        ({"strategy": "local-sgd", "inner": "powersgd"}, {}, ("local-sgd+powersgd", False, False)),
        ({"strategy": "local-sgd", "staleness": 1}, {}, ("local-sgd:staleness=1", True, False)),
        ({"strategy": "a new one", "inner": "topk"}, {}, ("a new one", None, None)),
        ({"strategy": "x\x1b[2J"}, {}, ("x\\x1b[2J", None, None)),
        ({}, {}, (None, None, None)),
    ],
)
def test_a_record_tells_its_exchange_or_an_older_one_is_asked_by_name(
    config: dict[str, Any], facts: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert tuple(exchange(config, facts).values()) == expected


def test_each_figure_equals_an_independent_calculation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three epochs; one host reaches 95 % after the second, powersgd after the third, one of its seeds never."""
    alone, four = {}, {}
    for seed in range(3):
        alone[seed], four[seed] = 0.5 + seed / 10, 0.05 + seed / 100
        same = {"epochs": 3, "seed": seed, "steps_per_epoch": STEPS, "parameters": PARAMETERS}
        runs.make(tmp_path / f"one-{seed}", rank_batch=32, compute_s=alone[seed], accuracies=(0.5, 0.96, 0.97), **same)
        runs.make(
            tmp_path / f"four-{seed}",
            hosts=4,
            rank_batch=8,
            rate_mbit=RATE,
            strategy="powersgd:rank=4",
            collectives="tcp",
            compute_s=four[seed],
            communication_s=0.02,
            wire_bytes_per_step=7000.0,
            accuracies=(0.5, 0.9, 0.95 if seed < 2 else 0.949),
            **same,
        )
    rows = by_strategy(json_of(capsys, "strategies", str(tmp_path), "--target", "95%"))
    one, found = rows["allreduce"], rows["powersgd:rank=4"]
    times = [3 * STEPS * (0.01 + four[seed] + 0.02) for seed in (0, 1)]
    base = [2 * STEPS * (0.01 + alone[seed] + 0.2) for seed in range(3)]
    assert one["train_to_target_s"]["mean"] == pytest.approx(sum(base) / 3)
    assert (one["reached"], found["reached"], found["n"]) == ("3 of 3", "2 of 3", 3)
    assert found["train_to_target_s"]["mean"] == pytest.approx(sum(times) / 2)
    assert found["steps_to_target"]["mean"] == 3 * STEPS
    assert found["crossed_s"]["mean"] == pytest.approx(found["train_to_target_s"]["mean"]), "0.95 on the point"
    assert one["crossed_s"]["mean"] == pytest.approx(one["train_to_target_s"]["mean"] / 2 * (1 + 0.45 / 0.46))
    expected = ratio(summary(base), summary(times))
    assert expected is not None
    assert found["speedup"] == pytest.approx({"mean": expected.mean, "low": expected.low, "high": expected.high})
    assert one["speedup"]["mean"] == pytest.approx(1)
    assert found["bytes_to_target"]["mean"] == pytest.approx(7000 * 3 * STEPS)
    assert one["bytes_to_target"] is None, "one host sends nothing"
    limit_s = 2 * 3 * 4 * PARAMETERS // 4 * 8 / (WIRE_SHARE * RATE * 1e6)
    assert found["own_limit_s_per_step"]["mean"] == pytest.approx(limit_s)
    assert found["wire_efficiency"]["mean"] == pytest.approx(limit_s / 0.02), "it waits for all of its exchange"
    ratios = [limit_s / four[seed] for seed in range(3)]
    assert found["plain_wire_ratio"]["mean"] == pytest.approx(sum(ratios) / 3)
    assert one["plain_wire_ratio"] is None, "one host has no wire"
    shares = [0.02 / (0.03 + four[seed]) for seed in range(3)]
    assert found["communication_share"]["mean"] == pytest.approx(sum(shares) / 3)


def test_wire_is_a_bound_where_the_exchange_runs_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit_s = 8 * PARAMETERS * 4 / (WIRE_SHARE * RATE * 1e6)  # two hosts: 2(h-1)/h is 1
    same = {"hosts": 2, "rate_mbit": RATE, "parameters": PARAMETERS, "compute_s": 0.1, "communication_s": 0.02}
    runs.make(tmp_path / "beside", strategy="delayed", **same)
    runs.make(tmp_path / "after", strategy="hierarchical", **same)
    runs.make(tmp_path / "null", strategy="hierarchical", framework="tensorflow", **same | {"communication_s": None})
    two = {"collectives": "tcp", "ranks_per_host": 2, **same}
    runs.make(tmp_path / "two", strategy="hierarchical", config={"check_replicas": 7}, **two)
    for name in ("onebit", "central", "factors"):
        runs.make(tmp_path / name, strategy=name, **two)
    assert main(["export", str(tmp_path), "--format", "json"]) == 0
    found = {row["run"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert found["beside"]["wire_efficiency"] == pytest.approx(limit_s / 0.13)
    for name in ("after", "two"):
        assert found[name]["wire_efficiency"] == pytest.approx(limit_s / 0.02), name
    assert found["null"]["wire_efficiency"] is None
    assert found["null"]["own_limit_s_per_step"] == pytest.approx(limit_s)
    ways = by_strategy(json_of(capsys, "strategies", str(tmp_path), "--where", "ranks_per_host=2"))
    for name in ("onebit", "central", "factors"):
        assert ways[name]["plain_wire_ratio"]["mean"] == pytest.approx(limit_s / 0.1), "how hard it is for any exchange"
        assert found[name]["own_limit_s_per_step"] is None, "rank 0's bytes are not its host's, nor an allreduce's"


def test_settings_of_a_strategy_are_never_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of an earlier version, with flags of their own, are repeats of today's."""
    for rank in (1, 3, 4):
        then = {"strategy": "powersgd", "rank": rank, "bits": 8, "inner": "hierarchical", "shares": None}
        for seed, config in enumerate(({}, then)):
            folder = tmp_path / f"{rank}-{seed}"
            runs.make(folder, hosts=2, rate_mbit=RATE, strategy=f"powersgd:rank={rank}", config=config, seed=seed)
    rows = by_strategy(json_of(capsys, "strategies", str(tmp_path)))
    assert {name: row["n"] for name, row in rows.items()} == {f"powersgd:rank={rank}": 2 for rank in (1, 3, 4)}


def test_each_at_its_best_may_have_another_batch_and_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every (batch, learning rate) the soonest that all seeds reached, on each side by itself."""
    times: dict[tuple[int, int, float], list[float]] = {}
    for hosts, batch, lr, seed in itertools.product((1, 4), (32, 64), (0.1, 0.2), (1, 2)):
        step_s = batch / 1000 / hosts + lr * (1 if hosts == 4 else 2) + seed / 1000
        missed = hosts == 4 and (batch, lr, seed) == (32, 0.1, 2)  # a seed of what is soonest never gets there
        runs.make(
            tmp_path / f"{hosts}-{batch}-{lr}-{seed}",
            hosts=hosts,
            rank_batch=batch // hosts,
            steps_per_epoch=640 // batch,
            rate_mbit=RATE if hosts == 4 else None,
            strategy="powersgd" if hosts == 4 else "allreduce",
            data_s=0.0,
            compute_s=step_s,
            communication_s=0.0,
            seed=seed,
            config={"lr": lr},
            accuracies=(0.5, 0.94 if missed else 0.98),
        )
        times.setdefault((hosts, batch, lr), []).append(640 // batch * step_s * (1 + 0.45 / 0.48))
    rows = by_strategy(json_of(capsys, "strategies", str(tmp_path), "--best"))
    chosen = {row["hosts"]: (row["hosts"], row["global_batch"], row["lr"]) for row in rows.values()}
    fit = [each for each in times if each != (4, 32, 0.1)]
    assert chosen == {
        hosts: min((each for each in fit if each[0] == hosts), key=lambda each: sum(times[each])) for hosts in (1, 4)
    }
    base, best = (summary(times[chosen[hosts]]) for hosts in (1, 4))
    expected = ratio(base, best)
    assert base and best and expected
    assert rows["powersgd"]["crossed_s"]["mean"] == pytest.approx(best.mean)
    assert rows["powersgd"]["speedup"]["mean"] == pytest.approx(expected.mean)
    assert rows["allreduce"]["speedup"] == {"mean": 1, "low": None, "high": None}


def test_rates_are_sections_the_soonest_first_and_the_baseline_in_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.make(tmp_path / "one", rank_batch=32, accuracies=(0.9, 0.96))
    for rate in (10.0, 100.0):
        for strategy, wait_s, last in (("allreduce", 9.0, 0.97), ("hierarchical", 5.0, 0.97), ("onebit", 0.1, 0.9)):
            runs.make(
                tmp_path / f"{strategy}-{rate}",
                hosts=4,
                rank_batch=8,
                rate_mbit=rate,
                strategy=strategy,
                compute_s=0.1,
                communication_s=wait_s / rate,
                accuracies=(0.5, last),
            )
    found = json_of(capsys, "strategies", str(tmp_path))
    order = [(row["rate"], row["hosts"], row["strategy"]) for row in found["rows"]]
    names = [(1, "allreduce"), (4, "hierarchical"), (4, "allreduce"), (4, "onebit")]
    assert order == [(rate, *name) for rate in ("10 Mbit/s", "100 Mbit/s") for name in names]
    assert found["rows"][3]["train_to_target_s"] is None
    assert found["rows"][3]["speedup"] is None
    assert found["readings"]["10 Mbit/s"].startswith("Soonest: hierarchical, ")
    assert main(["strategies", str(tmp_path), "--target", "0.99"]) == 0
    assert "No run over several hosts reached 99 %." in capsys.readouterr().out


def test_two_launchers_of_one_config_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for hosts in (2, 3):
        for launcher in ("a", "b"):
            asked = {"launcher": f"by {launcher}"}
            runs.make(tmp_path / f"{hosts}{launcher}", hosts=hosts, rate_mbit=RATE, kind="timing", asked=asked)
    runs.make(tmp_path / "tuned", hosts=4, rate_mbit=RATE, kind="timing")
    twice = [(hosts, f"allreduce (by {launcher})") for hosts in (2, 3) for launcher in "ab"]
    for more in ((), ("--best",)):
        rows = json_of(capsys, "strategies", str(tmp_path), *more)["rows"]
        assert sorted((row["hosts"], row["strategy"]) for row in rows) == [*twice, (4, "allreduce")]


def test_each_rate_has_its_own_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rate, lr in ((10.0, 0.1), (100.0, 0.1), (10.0, 0.2), (100.0, 0.2)):
        wait_s = 10 / rate * (1 if (rate == 10.0) == (lr == 0.1) else 3)
        config = {"lr": lr}
        runs.make(tmp_path / f"{rate}{lr}", hosts=2, rate_mbit=rate, communication_s=wait_s, config=config)
    rows = json_of(capsys, "strategies", str(tmp_path), "--best", "--target", "0.9")["rows"]
    assert [(row["rate"], row["lr"]) for row in rows] == [("10 Mbit/s", 0.1), ("100 Mbit/s", 0.2)]


def test_an_epoch_that_was_not_evaluated_is_a_part_of_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between epochs: from the last epoch that has a score, 0 among them, to the one that is good enough."""
    runs.make(tmp_path / "r", epochs=4, train_s=40.0, accuracies=(0.0, 0.5, None, 1.0))
    (row,) = json_of(capsys, "strategies", str(tmp_path), "--target", "0.75")["rows"]
    assert (row["train_to_target_s"]["mean"], row["crossed_s"]["mean"]) == (40.0, pytest.approx(30.0))
