"""`hvdtrain results strategies`: names, times to a target, bytes and wire against an independent calculation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs

from hvdtrain.config import TrainConfig
from hvdtrain.results.__main__ import main
from hvdtrain.results.runs import WIRE_SHARE, beside, strategy_name
from hvdtrain.results.statistics import ratio, summary

STEPS, PARAMETERS, RATE = 5, 1000, 10.0


def table(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["strategies", *words, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def by_strategy(found: Any) -> dict[str, Any]:
    rows = {row["strategy"]: row for row in found["rows"]}
    assert len(rows) == len(found["rows"])
    return rows


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"strategy": "allreduce", "rank": 4}, "allreduce"),
        ({"strategy": "native", "ddp_hook": "fp16"}, "native+fp16"),
        ({"strategy": "native", "ddp_hook": "powersgd"}, "native+powersgd r2"),
        ({"strategy": "native", "ddp_hook": "powersgd", "rank": 4}, "native+powersgd r4"),
        ({"strategy": "powersgd", "rank": 1, "inner": "topk"}, "powersgd r1"),
        ({"strategy": "powersgd", "rank": 2, "bits": 8}, "powersgd r2"),
        ({"strategy": "delayed", "inner": "powersgd", "rank": 2, "bits": 4}, "delayed+powersgd r2 b4"),
        ({"strategy": "topk", "density": 0.005}, "topk 0.5%"),
        ({"strategy": "local-sgd", "every": 8, "inner": "hierarchical"}, "local-sgd H8"),
        (
            {"strategy": "local-sgd", "every": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "local_start": 40}
            | {"inner": "powersgd", "rank": 4},
            "local-sgd H4 start40 outer0.7/0.9+powersgd r4",
        ),
        ({"strategy": "local-sgd", "every": 4, "outer_lr": 1.0, "outer_momentum": 0.0}, "local-sgd H4"),
        ({"strategy": "delayed", "inner": "powersgd", "rank": 2, "staleness": 1}, "delayed+powersgd r2"),
        ({"strategy": "delayed", "inner": "onebit", "staleness": 2}, "delayed s2+onebit"),
        ({"strategy": "async-ps", "servers": 2}, "async-ps x2"),
        ({"strategy": "a new one", "inner": "topk"}, "a new one"),
        ({"strategy": "x\x1b[2J"}, "x\\x1b[2J"),
        ({}, None),
    ],
)
def test_a_name_says_what_is_set_and_what_is_inside(config: dict[str, Any], name: str | None) -> None:
    assert strategy_name(config) == name


def test_the_defaults_of_today_are_those_of_a_config_without_them() -> None:
    for strategy in ("native", "powersgd", "local-sgd", "delayed", "async-ps"):
        today = {
            key: getattr(TrainConfig(), key, None)
            for key in ("rank", "bits", "every", "staleness", "servers", "outer_lr")
        }
        assert strategy_name({"strategy": strategy} | today) == strategy_name({"strategy": strategy})


def test_whose_exchange_runs_beside_the_computation() -> None:
    apart = ("hierarchical", "powersgd r2", "fp16", "local-sgd H8+powersgd r2", "topk 1%")
    assert not any(map(beside, apart))
    assert all(map(beside, ("allreduce", "native+fp16", "delayed s2+topk 1%", "async-ps", "local-sgd H8 s1")))


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
            strategy="powersgd",
            config={"rank": 2},
            collectives="streams",
            compute_s=four[seed],
            communication_s=0.02,
            wire_bytes_per_step=7000.0,
            accuracies=(0.5, 0.9, 0.95 if seed < 2 else 0.949),
            **same,
        )
    rows = by_strategy(table(capsys, str(tmp_path), "--target", "95%"))
    one, found = rows["allreduce"], rows["powersgd r2"]
    times = [3 * STEPS * (0.01 + four[seed] + 0.02) for seed in (0, 1)]
    base = [2 * STEPS * (0.01 + alone[seed] + 0.2) for seed in range(3)]
    assert one["train_to_target_s"]["mean"] == pytest.approx(sum(base) / 3)
    assert (one["reached"], found["reached"], found["n"]) == ("3 of 3", "2 of 3", 3)
    assert found["train_to_target_s"]["mean"] == pytest.approx(sum(times) / 2)
    assert found["steps_to_target"]["mean"] == 3 * STEPS
    expected = ratio(summary(base), summary(times))
    assert expected is not None
    assert found["speedup"] == pytest.approx({"mean": expected.mean, "low": expected.low, "high": expected.high})
    assert one["speedup"]["mean"] == pytest.approx(1)
    assert found["bytes_to_target"]["mean"] == pytest.approx(7000 * 3 * STEPS)
    assert one["bytes_to_target"] is None, "one host sends nothing"
    limit_s = 2 * 3 * 4 * PARAMETERS // 4 * 8 / (WIRE_SHARE * RATE * 1e6)
    assert found["own_limit_s_per_step"]["mean"] == pytest.approx(limit_s)
    assert found["wire_efficiency"]["mean"] == pytest.approx(limit_s / 0.02), "it waits for all of its exchange"
    shares = [0.02 / (0.03 + four[seed]) for seed in range(3)]
    assert found["communication_share"]["mean"] == pytest.approx(sum(shares) / 3)


def test_wire_is_a_bound_where_the_exchange_runs_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit_s = 8 * PARAMETERS * 4 / (WIRE_SHARE * RATE * 1e6)  # two hosts: 2(h-1)/h is 1
    same = {"hosts": 2, "rate_mbit": RATE, "parameters": PARAMETERS, "compute_s": 0.1, "communication_s": 0.02}
    runs.make(tmp_path / "beside", strategy="delayed", config={"inner": "hierarchical"}, **same)
    runs.make(tmp_path / "after", strategy="hierarchical", **same)
    runs.make(tmp_path / "null", strategy="hierarchical", framework="tensorflow", **same | {"communication_s": None})
    two = {"collectives": "streams", "ranks_per_host": 2, **same}
    runs.make(tmp_path / "two", strategy="hierarchical", config={"check_replicas": 7}, **two)
    runs.make(tmp_path / "unknown", strategy="onebit", **two)
    assert main(["export", str(tmp_path), "--format", "json"]) == 0
    found = {row["run"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert found["beside"]["wire_efficiency"] == pytest.approx(limit_s / 0.13)
    for name in ("after", "two"):
        assert found[name]["wire_efficiency"] == pytest.approx(limit_s / 0.02), name
    assert found["null"]["wire_efficiency"] is None
    assert found["null"]["own_limit_s_per_step"] == pytest.approx(limit_s)
    assert found["unknown"]["own_limit_s_per_step"] is None, "the leader's bytes are not those on the wire"


def test_settings_of_a_strategy_are_never_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, config in enumerate(({"rank": 1}, {"rank": 2}, {"rank": 4})):
        for seed in range(2):
            runs.make(
                tmp_path / f"{number}-{seed}", hosts=2, rate_mbit=RATE, strategy="powersgd", config=config, seed=seed
            )
    rows = by_strategy(table(capsys, str(tmp_path)))
    assert {name: row["n"] for name, row in rows.items()} == {f"powersgd r{rank}": 2 for rank in (1, 2, 4)}


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
    found = table(capsys, str(tmp_path))
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
            folder = runs.make(tmp_path / f"{hosts}{launcher}", hosts=hosts, rate_mbit=RATE, kind="timing")
            point = json.loads((folder / "point.json").read_text())
            (folder / "point.json").write_text(json.dumps(point | {"settings": {"launcher": f"by {launcher}"}}))
    runs.make(tmp_path / "tuned", hosts=4, rate_mbit=RATE, kind="timing")
    rows = table(capsys, str(tmp_path))["rows"]
    named = sorted((row["hosts"], row["strategy"]) for row in rows)
    twice = [(hosts, f"allreduce (by {launcher})") for hosts in (2, 3) for launcher in "ab"]
    assert named == [*twice, (4, "allreduce")]
