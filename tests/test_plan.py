"""Laws of predictions: closed forms, monotony, and agreement with real exchanges and recorded runs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import document, fails, finished, trainings
from runs import make, read_run
from thread_ranks import at_once, meetings, reach

from hvdtrain import cli, strategies
from hvdtrain.comm.backends.base import RankGroup
from hvdtrain.comm.world import alone, connect
from hvdtrain.config.options import TrainConfig
from hvdtrain.data import Batch
from hvdtrain.models.resnet import ResNetSpec, parameters
from hvdtrain.plan import choice, coding, command, learning, pilot, prediction, profile, recorded, report
from hvdtrain.plan.network import Link, measured
from hvdtrain.plan.prediction import Host
from hvdtrain.plan.profile import Point, Profile
from hvdtrain.plan.simulation import Message, Node, Traffic, simulate
from hvdtrain.records.metrics import Accuracy
from hvdtrain.strategies.automatic import rule
from hvdtrain.strategies.cost import Layout, elements
from hvdtrain.strategies.spec import parse
from hvdtrain.training.framework import make_replica

SLOW, FAST = Link.of_rate(10e6), Link.of_rate(1e9)
SHAPES = [list(shape) for shape in parameters(ResNetSpec(channels=1, classes=10, width=0.125)).values()]
CODING = {"hierarchical": 0.002, "bf16": 0.003, "int8": 0.01, "int4": 0.012, "int2": 0.012, "powersgd:rank=16": 0.02}
CODING |= {"powersgd:rank=4": 0.008, "powersgd:rank=12,bits=4": 0.02, "powersgd:rank=16,bits=4": 0.02}
STRATEGIES = [*learning.SHOWN, "allreduce", "native", "central", "async-ps"]


def made(variation: float = 0.0, **changes: Any) -> Profile:
    points = [
        Point(batch=batch, backward_s=0.01 + 0.002 * batch, update_s=0.003, variation=variation, steps=9)
        for batch in (8, 32, 128)
    ]
    fields: dict[str, Any] = {
        "machine": {"processor": "x", "cores": 2.0},
        "workload": "resnet",
        "model": "m",
        "setup": {},
        "shapes": SHAPES,
        "epoch_samples": 1000,
        "threads": 1,
        "points": points,
        "ready": [0.5, 0.7, 0.9, 1.0],
        "coding_s": CODING,
    }
    return Profile(**fields | changes)


def hosts(*links: Link) -> list[Host]:
    return [Host(name=f"h{number}", link=link) for number, link in enumerate(links)]


def step_s(strategy: str, *links: Link, batch: int = 128, using: Profile | None = None) -> float:
    return prediction.predict(using or made(), parse(strategy), hosts(*links), batch).step_s


# --- the simulation ---------------------------------------------------------------------------------------------------


def nodes(count: int, link: Link = SLOW, **changes: Any) -> list[Node]:
    fields = {"backward_s": 0.1, "update_s": 0.01} | changes
    return [Node(name=str(number), link=link, **fields) for number in range(count)]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_ring_after_backward_takes_the_closed_form(count: int) -> None:
    sent, hops = 2 * (count - 1) / count * 4e5, 2 * (count - 1)
    message = Message(ready=1.0, sent=sent, received=sent, hops=hops, coding_s=0.02)
    waited = 0.02 + sent * 8 / (0.936 * 10e6) + hops * SLOW.latency_s
    assert simulate(nodes(count), Traffic(messages=(message,))) == pytest.approx(0.11 + waited)


def test_gradients_that_are_ready_early_are_sent_during_backward() -> None:
    half = Message(ready=0.5, sent=5e4, received=5e4, hops=0)
    alone_s = SLOW.seconds(5e4, 5e4)
    assert 0.5 * alone_s < 0.05, "the first half is sent during backward"
    traffic = Traffic(messages=(half, dataclasses.replace(half, ready=1.0)))
    waited_s = max(alone_s, 2 * alone_s - 0.05)
    assert simulate(nodes(2), traffic) == pytest.approx(0.11 + waited_s)
    traffic = dataclasses.replace(traffic, in_parts=True)
    assert simulate(nodes(2), traffic) == pytest.approx(0.1 + waited_s + 0.005), "half of the update is hidden"


def test_local_steps_divide_and_hide_the_exchange() -> None:
    message = Message(ready=1.0, sent=2e5, received=2e5, hops=0)
    whole_s = SLOW.seconds(2e5, 2e5)  # 0.17 s
    local = Traffic(messages=(message,), every=4, after_update=True)
    assert simulate(nodes(2), local) == pytest.approx(0.11 + whole_s / 4)
    stale = dataclasses.replace(local, staleness=2)
    assert simulate(nodes(2), stale) == pytest.approx(0.11)


def test_coding_shares_the_processor_with_the_computation() -> None:
    message = Message(ready=0.5, sent=0, received=0, hops=0, coding_s=0.02)
    traffic = Traffic(messages=(message,))
    assert simulate(nodes(2, cores=2.0), traffic) == pytest.approx(0.11)
    assert simulate(nodes(2, cores=1.0), traffic) == pytest.approx(0.13), "one core does both"
    half = nodes(2, cores=0.5, backward_s=0.2, update_s=0.02)
    assert simulate(half, traffic) == pytest.approx(0.26), "20 ms of a core take 40 ms of half a core"


def test_the_slowest_host_decides_and_hosts_alone_do_not_wait() -> None:
    message = Message(ready=1.0, sent=1e5, received=1e5, hops=0)
    traffic = Traffic(messages=(message,))
    slow_s = simulate(nodes(3), traffic)
    mixed = [*nodes(2, FAST), *nodes(1, SLOW)]
    assert simulate(mixed, traffic) == pytest.approx(slow_s)
    slower = [*nodes(2), *nodes(1, backward_s=0.3)]
    assert simulate(slower, traffic) == pytest.approx(slow_s + 0.2)
    assert simulate(nodes(1), traffic) == pytest.approx(0.11)


def test_a_central_host_gathers_and_answers() -> None:
    sent = 3e5
    gather = Message(ready=1.0, sent=0, received=sent, hops=1, central=True)
    answer = Message(ready=1.0, sent=sent, received=0, hops=1, central=True)
    assert simulate(nodes(4), Traffic(messages=(gather, answer))) == pytest.approx(
        0.11 + 2 * (sent * 8 / 9.564e6 + SLOW.latency_s), rel=1e-3
    )


@pytest.mark.parametrize("variation", [0.1, 0.3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_is_not_shorter_than_its_computation(strategy: str, variation: float) -> None:
    """Although steps differ, and hosts by their links, cores and ranks."""
    equal, slow, full = (
        Host(name="a", link=FAST),
        Host(name="b", link=FAST, cores=0.5),
        Host(name="c", link=SLOW, ranks=2),
    )
    for unequal in ([equal, slow], [equal, slow, full]):
        found = prediction.predict(made(variation), parse(strategy), unequal, 128)
        assert found.step_s >= found.computing_s * (1 - 1e-9)


# --- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_faster_links_and_processors_never_make_steps_longer(strategy: str) -> None:
    for using in (made(), made(variation=0.05)):
        times = [step_s(strategy, *[Link.of_rate(rate)] * 4, using=using) for rate in (1e6, 1e7, 1e8, 1e9)]
        assert times == sorted(times, reverse=True)
        mixed = step_s(strategy, FAST, FAST, FAST, SLOW, using=using)
        assert step_s(strategy, *[FAST] * 4, using=using) <= mixed
    assert step_s(strategy, SLOW) == pytest.approx(0.003 + 0.01 + 0.256), "one host sends nothing"


@pytest.mark.parametrize("strategy", ["hierarchical", "powersgd:rank=4", "int8"])
def test_one_slow_link_is_as_bad_as_only_slow_links(strategy: str) -> None:
    assert step_s(strategy, FAST, FAST, SLOW) == pytest.approx(step_s(strategy, SLOW, SLOW, SLOW), rel=0.01)
    found = prediction.predict(made(), parse(strategy), hosts(FAST, FAST, SLOW), 96)
    assert found.bottleneck == "the link of host h2"


def test_two_ranks_on_a_core_compute_half_as_fast() -> None:
    single = made(machine={"processor": "x", "cores": 1.0})
    one, two = (prediction.nodes_of(single, [Host(name="a", link=FAST, ranks=r), *hosts(FAST)], 32)[0] for r in (1, 2))
    assert two.backward_s == pytest.approx(2 * one.backward_s)


def test_between_measured_batches_times_lie_on_lines() -> None:
    found = made()
    assert found.backward_s(20) == pytest.approx(0.05)
    assert found.backward_s(256) == pytest.approx(0.522)
    assert found.line() == pytest.approx((0.013, 0.002))
    assert profile.sizes_of([128, 64, 8], 1000) == [8, 32, 128]
    assert profile.sizes_of([32], 40) == [16, 25, 40]


def ring(*rates: float | None) -> list[dict[str, Any]]:
    names = "abcd"[: len(rates)]
    following = names[1:] + names[0]
    return [{"host": a, "goodput_to": b, "goodput_mbit": r} for a, b, r in zip(names, following, rates, strict=True)]


def test_links_are_inferred_from_the_goodput_around_a_ring() -> None:
    slow_c = measured(ring(80.0, 8.0, 8.0))
    assert {host: (8e-6 * link.up, 8e-6 * link.down) for host, link in slow_c.items()} == {
        "a": (80.0, 80.0),
        "b": (80.0, 80.0),
        "c": (8.0, 8.0),
    }
    adsl_c = measured(ring(80.0, 8.0, 1.0))
    assert (8e-6 * adsl_c["c"].up, 8e-6 * adsl_c["c"].down, 8e-6 * adsl_c["a"].down) == (1.0, 8.0, 80.0)
    unknown = measured(ring(80.0, None, None))
    assert 8e-6 * unknown["c"].up == 80.0, "no goodput says that it is slow"
    assert measured([]) == {} == measured(ring(None, None))


def test_reducers_are_measured_by_running_them() -> None:
    found = coding.measure(["hierarchical", "powersgd:rank=4", "int8"], SHAPES, 120.0)
    assert all(0 < seconds < 5 for seconds in found.values()) and len(found) == 3
    assert coding.measure(["int8"], SHAPES, -1.0) == {}


@pytest.mark.parametrize("rate", [1e6, 1e8, 1e10])
def test_accumulation_adds_computations_before_one_exchange(rate: float) -> None:
    using, four = made(noise_scale=(100.0, 1000.0)), hosts(*[Link.of_rate(rate)] * 4)
    exact, needed = prediction.predict(using, parse("hierarchical"), four, 128), [(1.0, 1.0)]
    for count in (1, *learning.ACCUMULATED):
        found = prediction.predict(using, parse("hierarchical"), four, 128, accumulation=count)
        assert count * found.step_s == pytest.approx(exact.step_s + (count - 1) * using.backward_s(32))
        most_s = count * found.computing_s + exact.step_s - exact.computing_s
        assert count * found.computing_s <= count * found.step_s * (1 + 1e-9) <= most_s * (1 + 2e-9)
        assert found.sent_bytes == pytest.approx(exact.sent_bytes / count)
        assert (found == exact) == (count == 1)
        needed.append(found.steps_factor or (0.0, 0.0))
        assert found.steps_factor == learning.epochs_factor(128 * count, 128, (100.0, 1000.0))
    assert needed == sorted(needed)
    uneven = prediction.predict(made(0.2), parse("hierarchical"), four, 128, accumulation=4)
    assert uneven.step_s >= uneven.computing_s


def test_a_script_that_accumulates_computes_fewer_batches_on_more_hosts() -> None:
    point = Point(batch=64, backward_s=0.8, update_s=0.0, variation=0.0, steps=9)
    one, eight = made(points=[point]), made(points=[point], accumulation=8)
    assert one.backward_s(64) == eight.backward_s(64) == pytest.approx(0.8)
    assert [eight.backward_s(64 / n) for n in (2, 4, 8)] == pytest.approx([0.4, 0.2, 0.1])
    assert eight.backward_s(4) > 0.05 and one.backward_s(16) > 0.2, "what does not depend on samples stays"


# --- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
def test_intervals_contain_the_prediction_and_widen_with_fewer_and_less_regular_steps(count: int) -> None:
    def relative(variation: float, steps: int) -> tuple[float, float]:
        points = [msgspec.structs.replace(each, steps=steps) for each in made(variation).points]
        using = msgspec.structs.replace(made(), points=points)  # the variation of all hosts is that of `made`
        found = prediction.predict(using, parse("int8"), hosts(*[FAST] * count), 128)
        assert found.interval_s and found.interval_s[0] < found.step_s < found.interval_s[1]
        return found.interval_s[0] / found.step_s, found.interval_s[1] / found.step_s

    often, seldom, uneven = relative(0.05, 40), relative(0.05, 4), relative(0.2, 40)
    assert seldom[0] < often[0] and often[1] < seldom[1]
    assert uneven[0] < often[0] and often[1] < uneven[1]
    assert relative(0.0, 4)[1] > seldom[1], "an unknown variation is taken to be a large one"


def test_time_to_accuracy_is_less_certain_than_both_of_its_factors() -> None:
    one = prediction.predict(made(), parse("int8"), hosts(FAST), 128)
    names = ("hierarchical", "int8", "allreduce")
    exact, coarse, plain = (prediction.predict(made(), parse(name), hosts(FAST, FAST), 128) for name in names)
    least, most = exact.speedup_to_target(one) or (0.0, 0.0)
    assert exact.interval_s and least < exact.step_s / exact.interval_s[1] * exact.speedup(one)
    assert least < exact.speedup(one) < most
    least, most = coarse.speedup_to_target(one) or (0.0, 0.0)
    fewest, steps = learning.RECORDED["int8"].steps
    assert least < coarse.speedup(one) / steps and most > coarse.speedup(one) / fewest
    assert plain.interval_s is None, "no run of Horovod was compared with a prediction"
    script = prediction.predict(made(drop_in=True), parse("hierarchical"), hosts(FAST, FAST), 32)
    assert script.interval_s is None, "no run of a script was either"


# --- --strategy auto --------------------------------------------------------------------------------------------------


def test_rules_limit_what_auto_may_choose() -> None:
    def names(text: str, optimizer: str = "sgd") -> list[str]:
        found = choice.candidates(rule(text), TrainConfig(optimizer=optimizer))  # type: ignore[arg-type]
        return [str(each) for each in found]

    assert names("auto") == learning.candidates("sgd")
    assert [str(parse(name)) for name in learning.SHOWN] == [*learning.SHOWN], "or a prediction finds no record"
    assert names("auto:exact") == ["hierarchical"]
    allowed = ["powersgd:rank=4", "local-sgd:every=2,staleness=1+powersgd:rank=12,bits=4"]
    assert names("auto:within=0.3") == ["hierarchical", *allowed]
    assert names("auto", "muon") == ["hierarchical", "powersgd:rank=16,bits=4"]
    assert rule("hierarchical") is None
    for text in ("auto:exakt", "auto:within=", "auto:within=-1", "auto:within=nan"):
        fails(lambda text=text: rule(text), 78, "auto:within=0.3")  # type: ignore[misc]
    fails(lambda: parse("auto"), 78, "name a strategy")


def test_exact_sums_stay_unless_another_strategy_is_clearly_faster() -> None:
    def chosen(link: Link, text: str = "auto", optimizer: str = "sgd") -> str:
        found = [
            prediction.predict(made(setup={"optimizer": optimizer}), each, hosts(*[link] * 4), 128)
            for each in choice.candidates(rule(text), TrainConfig(optimizer=optimizer))  # type: ignore[arg-type]
        ]
        return choice.decide(found).strategy

    assert chosen(Link.of_rate(100e9)) == "hierarchical"
    assert chosen(SLOW).startswith("local-sgd:")
    assert chosen(SLOW, "auto:exact") == "hierarchical"
    adam = [parse(chosen(Link.of_rate(rate), optimizer="adam")) for rate in (1e6, 1e7, 5e7, 1e8, 1e9, 1e11)]
    sent = [each.cost(SHAPES, Layout(ranks=4, hosts=4)).sent_bytes for each in adam]
    assert sent == sorted(sent) and len(set(sent)) > 3, "a faster link is used for more bytes"


@pytest.mark.slow
def test_all_ranks_choose_alike_and_bytes_are_as_predicted(tmp_path: Path) -> None:
    flags = ["--width", "0.125", "--epochs", "1", "--epoch-samples", "384", "--batch-size", "16"]
    names = ["hierarchical", "int8", "powersgd:rank=4"]
    todo = [
        {"flags": [*flags, "--strategy", name, "--run-dir", str(tmp_path / str(i))]} for i, name in enumerate(names)
    ]
    todo.append({"flags": [*flags, "--strategy", "auto", "--run-dir", str(tmp_path / "auto")]})
    codes, output = trainings(2, todo)
    assert codes == [0] * 4, output
    for number, name in enumerate(names):
        steps = read_run(tmp_path / str(number))["step"]
        predicted = parse(name).cost(SHAPES, Layout(ranks=2, hosts=2)).sent_bytes
        assert steps[1].bytes_sent == pytest.approx(predicted, abs=64)
    manifest = json.loads((tmp_path / "auto" / "manifest.json").read_text())
    assert manifest["config"]["strategy"] in learning.candidates("sgd")
    assert "per step predicted" in manifest["exchange"]["chosen"]
    assert output.count("per step predicted") >= 1
    assert profile.read(tmp_path / "auto" / profile.NAME).points[0].batch == 16
    a, b = (read_run(tmp_path / "auto", rank)["step"] for rank in (0, 1))
    assert [step.bytes_sent for step in a] == [step.bytes_sent for step in b]


# --- the command ------------------------------------------------------------------------------------------------------


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli.command(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "STEPS_S", 1.0)
    return tmp_path / "cache" / "hvdtrain" / "plan"


def test_a_plan_profiles_once_and_says_what_limits(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["resnet", "--width", "0.125", "--hosts", "1..3", "--rates", "1mbit,10gbit", "--strategy", "hierarchical"]
    words += ["--global-batch-size", "24"]
    first = plan(capsys, *words)
    assert [each["network"] for each in first["networks"]] == ["1mbit", "10gbit"]
    assert "do not add hosts" in first["networks"][0]["advice"]
    slow = first["networks"][0]["hosts"][-1]["predictions"][0]
    assert slow["hosts"] == 3 and slow["bottleneck"] == "the link of all hosts"
    assert slow["step_s"] > first["one_host"]["step_s"] > 0
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.command(["plan", *words]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= width
    (path,) = cache.glob("*.json")
    before = path.stat().st_mtime_ns
    assert plan(capsys, *words)["networks"] == first["networks"]
    assert path.stat().st_mtime_ns == before
    assert cli.command(["plan", *words]) == 0
    assert "an epoch takes" in capsys.readouterr().out
    other = msgspec.structs.replace(profile.read(path), machine={"processor": "other", "cores": 1.0})
    path.write_text(json.dumps(profile.as_json(other)))
    fails(lambda: cli.command(["plan", *words]), 65, "another machine", "remove it")


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("resnt", 2, "did you mean resnet?"),
        ("resnet --parameters 1M --step-seconds 1", 2, "hint: name a workload"),
        ("resnet --hosts 4..2", 2, "1..16"),
        ("resnet --rates 10mbps", 2, "counts bytes"),
        ("resnet --latency -1", 2, "--latency"),
        ("resnet --cores 1e-300", 2, "--cores"),
        ("resnet --global-batch-size -1", 2, "--global-batch-size"),
        ("resnet --hosts ''", 2, "--hosts"),
        ("resnet -H ''", 2, "a:2,b:2"),
        ("resnet -H a:1,b:1 --slow 0mbit", 2, "8kbit"),
        ("resnet -H a:1,b:1 --slow 1gbit", 2, "-H cannot be combined"),
        ("resnet --no-such-flag", 2, "--no-such-flag"),
        ("--lr 0.1 train.py", 2, "the script first"),
        ("--parameters 25M --step-seconds 0.8 -H no-such-host:1,b:1", 69, "no-such-host"),
        ("resnet --dry-run", 2, "--dry-run"),
    ],
)
def test_mistakes_are_one_line(line: str, code: int, words: str) -> None:
    fails(lambda: cli.command(["plan", *shlex.split(line)]), code, words)


def learner(scale: float, seed: int, samples: int = 8000) -> pilot.Train:
    """A model whose batches of `scale` samples need twice the samples of tiny ones."""
    random = np.random.default_rng(seed)

    def train(batch: int, seconds: float, steps: int, goal: float) -> list[float]:
        most = round(samples * seconds / pilot.PILOT_S)
        done = batch * np.arange(most // batch) / (1 + batch / scale)
        noise = 1 + 0.3 * random.standard_normal(len(done)) / batch**0.5
        losses = ((2 * np.exp(-done / 4000) + 0.2) * noise).tolist()
        ends = range(steps, len(losses) + 1, steps)
        return losses[: next((end for end in ends if np.mean(losses[end - steps : end]) <= goal), len(losses))]

    return train


@pytest.mark.parametrize("scale", [10.0, 100.0, 1e6])
def test_a_pilot_finds_the_noise_scale_of_known_losses(scale: float) -> None:
    for seed in range(20):
        found = pilot.noise_scale(learner(scale, seed), 16, 64)
        assert found is not None
        least, most = found
        assert least <= scale <= (math.inf if most is None else most), seed
        assert least > scale / 4 or scale != 100


@pytest.mark.parametrize("values", [[2.0] * 500, [math.nan] * 500, [2.0, 1.0, 0.5]])
def test_a_pilot_that_learned_too_little_says_nothing(values: list[float]) -> None:
    assert pilot.noise_scale(lambda *_: values, 16, 64) is None


def test_a_larger_batch_needs_more_epochs() -> None:
    assert learning.epochs_factor(128, 128, (10.0, None)) == (1.0, 1.0)
    least, most = learning.epochs_factor(128, 32, (32.0, None))
    assert (least, most) == (1.0, pytest.approx(2.5))

    def speedups(scale: float) -> tuple[float, float]:
        using = made(noise_scale=(scale, None))
        one, four = (
            prediction.predict(using, parse("hierarchical"), hosts(*[FAST] * count), 32 * count) for count in (1, 4)
        )
        found = four.speedup_to_target(one)
        assert found
        return found

    slowest, fastest = speedups(1e12)
    assert speedups(32.0) == (pytest.approx(slowest / 2.5), pytest.approx(fastest))


def edited(document: dict[str, Any], keys: str, value: Any) -> dict[str, Any]:
    """Return the document with another value at `a/0/b`."""
    copy = json.loads(json.dumps(document))
    at = copy
    *outer, last = [int(key) if key.isdigit() else key for key in keys.split("/")]
    for key in outer:
        at = at[key]
    at[last] = value
    return copy


def test_profiles_and_runs_with_impossible_values_are_one_line(tmp_path: Path) -> None:
    path, document = tmp_path / "profile.json", profile.as_json(made())
    path.write_text(json.dumps(document))
    assert profile.read(path) == made()
    for keys, value in {
        "points/0/backward_s": -2.5,
        "points/1/update_s": 1e308,
        "points/2/batch": 8,
        "points/0/variation": math.nan,
        "machine/cores": math.nan,
        "threads": 0,
        "shapes": [],
        "shapes/0": [-3],
        "ready/0": 7.0,
        "coding_s/int8": math.inf,
        "points": [],
    }.items():
        path.write_text(json.dumps(edited(document, keys, value)))
        fails(lambda: profile.read(path), 65, "profile.json", "hint: remove it")
    run = make(tmp_path / "run", hosts=2, rate_mbit=10.0, strategy="powersgd:rank=4", data_s=0.0)
    manifest = run / "manifest.json"
    document = json.loads(manifest.read_text())
    for keys, value in {
        "ranks/0/cores": math.nan,
        "ranks/1/threads": "two",
        "ranks": [],
        "plan/global_batch": -64,
        "config/strategy": 5,
        "config/batch_size": -1,
        "links/0/goodput_mbit": "fast",
        "shapes": [[10**12, 10**12]],
    }.items():
        manifest.write_text(json.dumps(edited(document, keys, value)))
        fails(lambda: recorded.read(run), 65, "cannot be planned from")


def test_hosts_of_one_name_are_several_hosts() -> None:
    """As cloned machines are. They share this test's host name and have their own addresses."""
    room, places = meetings(2), [reach(rank) for rank in range(2)]
    name = socket.gethostname()
    links = [{"host": name, "address": each.address, "goodput_to": name, "goodput_mbit": 9.0} for each in places]

    def chosen(rank: int) -> choice.Chosen:
        ranks = connect("torch", backend="tcp", group=RankGroup(room[rank], None, places[rank]))
        found = choice.choose(made(), ranks, [parse("hierarchical"), parse("powersgd:rank=4")], 64, None, links)
        ranks.shutdown()
        return found

    one, other = at_once([functools.partial(chosen, rank) for rank in range(2)])
    assert one == other and one.strategy == "powersgd:rank=4" and "of all hosts" in one.reason


def test_a_strategy_that_cannot_run_is_not_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["int8", "hierarchical", "native:hook=fp16"]
    config = TrainConfig(framework="torch", precision="fp16", device="cpu")
    able, refused = command.exchanges_of(argparse.Namespace(strategy=names), config, made())
    assert (able, list(refused)) == ([parse("hierarchical")], ["int8", "native:hook=fp16"])
    words = [word for name in ("native", "hierarchical") for word in ("--strategy", name)]
    found = plan(capsys, *["--parameters", "9M", "--step-seconds", "1", "--hosts", "2", "--rates", "1gbit"], *words)
    assert list(found["refused"]) == ["native"]
    assert [each["strategy"] for each in found["networks"][0]["hosts"][0]["predictions"]] == ["hierarchical"]
    assert strategies.resolve(TrainConfig(strategy="auto")) == parse("hierarchical")


def test_sizes_alone_make_a_plan_without_a_framework() -> None:
    """`--parameters` needs neither PyTorch nor a measurement, and its exact bytes are the trained parameters'."""
    program = (
        "import sys; sys.modules['torch'] = sys.modules['horovod'] = None\n"
        "from hvdtrain.plan import command\n"
        "words = '--parameters 124M --trainable 2M --step-seconds 0.8 --hosts 1..4 --rates 30mbit,1gbit --json'\n"
        "command.main(words.split())"
    )
    plan = document(finished([sys.executable, "-c", program]))
    assert plan["schema"] == "hvdtrain/plan/1"
    assert [each["network"] for each in plan["networks"]] == ["30mbit", "1gbit"]
    assert elements(plan["shapes"]) == pytest.approx(2e6, rel=0.01)
    assert any("LoRA" in note for note in plan["notes"])
    for words, said in (("--parameters 124M", "belong together"), ("--parameters x --step-seconds 1", "124M")):
        done = finished([sys.executable, "-m", "hvdtrain.cli", "plan", *words.split()])
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and said in done.stderr


def test_a_model_can_be_put_into_one_replica_after_another() -> None:
    """As a plan does with a script's model: hooks of earlier replicas must not act in backward."""
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Sequential):
        def loss(self, inputs: Any) -> Any:
            return self(inputs).square().sum(), {"correct": torch.zeros(())}

    net, batch = Net(*(torch.nn.Linear(160, 160) for _ in range(3))), np.ones((4, 160), np.float32)
    shapes = [tuple(each.shape) for each in net.parameters()]
    config = TrainConfig(framework="torch")
    for _ in range(3):
        probe = profile.Probe(alone("torch"), shapes, config, None, None)
        replica = make_replica(net, config, probe.ranks, probe, "cpu", Accuracy())
        assert len(probe.buckets()) > 1
        replica.backward(Batch(arrays=(batch,), weight=4, total_weight=4), 0.0, False)
        assert len(probe.ready_s) > 1
        del replica


def test_a_pilot_is_kept(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pilot, "PILOT_S", 1.0)
    words = ["plan", "resnet", "--width", "0.125", "--image-size", "8", "--batch-size", "16", "--threads", "1"]
    for trained in (1, 0):
        assert cli.command([*words, "--lr", "0.0511", "--hosts", "1,2", "--rates", "1gbit", "--json"]) == 0
        out, err = capfd.readouterr()
        assert err.count("training for at most 3 s") == trained
        assert "noise_scale" in json.loads(out)["one_host"]


@pytest.mark.parametrize(("size", "ranks"), [(None, 1), (None, 4), (64, 1), (64, 4)])
def test_one_host_takes_the_time_that_was_given(
    size: int | None, ranks: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the batch, the ranks and this machine."""
    words = f"--parameters 25M --step-seconds 0.8 --ranks-per-host {ranks} --hosts 1,4 --rates 10gbit"
    more = f" --global-batch-size {size}" if size else ""
    found = plan(capsys, *(words + more).split())
    assert found["one_host"]["step_s"] == pytest.approx(0.8)
    computing = {each["computing_s"] for each in found["networks"][0]["hosts"][-1]["predictions"]}
    assert all(each < 0.5 if size else 0.5 < each <= 0.8 for each in computing), "hosts share a batch, or each has one"
    monkeypatch.setattr(profile, "machine", lambda: {"processor": "other", "cores": 64.0})
    assert plan(capsys, *(words + more).split())["networks"] == found["networks"]


def faster(times: float) -> Profile:
    points = [
        msgspec.structs.replace(each, backward_s=each.backward_s / times, update_s=each.update_s / times)
        for each in made().points
    ]
    return made(points=points)


def test_the_slowest_of_the_measured_hosts_decides_and_is_named_with_what_it_costs() -> None:
    config, exchange = TrainConfig(framework="torch", batch_size=32), parse("hierarchical")

    def planned(*speeds: float) -> Any:
        cluster = [
            dataclasses.replace(host, profile=faster(speed))
            for host, speed in zip(hosts(*[FAST] * len(speeds)), speeds, strict=True)
        ]
        return command._measured_hosts(faster(speeds[0]), config, cluster, [exchange])

    slow, equal, unequal = planned(1, 1, 1), planned(3, 3, 3), planned(3, 1, 3)

    def last(each: Any) -> prediction.Prediction:
        return each.networks["measured links"][3][0]

    assert last(equal).step_s < last(unequal).step_s == pytest.approx(last(slow).step_s, rel=0.02)
    assert not any("slowest" in note for each in (slow, equal) for note in each.notes)
    (said,) = (note for note in unequal.notes if "slowest" in note)
    without = planned(3, 3).networks["measured links"][2][0].samples_per_s / last(unequal).samples_per_s
    assert said.startswith("host h1 is the slowest") and f"{without:.2f} times as fast" in said


def test_advice_against_hosts_that_make_steps_faster_says_that_learning_decides() -> None:
    one = prediction.predict(made(), parse("hierarchical"), hosts(FAST), 128)
    more = dataclasses.replace(one, hosts=2, step_s=one.step_s / 1.2, steps_factor=(1.0, 1.6))
    said = report.advice(report.Plan(profile=made(), one=one, networks={"n": {2: [more]}}, accumulated={}), "n")
    assert "do not add hosts" in said and "(1.20 in samples per second)" in said and "to the same accuracy" in said


@pytest.mark.parametrize("rate", [1e6, 1e7, 1e8, 1e10])
@pytest.mark.parametrize("scale", [None, (1e3, None)])
def test_the_answer_comes_first_with_the_numbers_of_the_tables(
    rate: float, scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    using = made(noise_scale=scale, setup={"optimizer": "adam"}, coding_s=dict.fromkeys(CODING, 0.001))
    exchanges = [parse(name) for name in ("hierarchical", "int8", "int4")]
    cases = {n: (hosts(*[Link.of_rate(rate)] * n), 32 * n) for n in (1, 2, 4)}
    found = command._plan(using, exchanges, cases[1], {"a": cases, "b": cases})
    first, second, *rest = report.text(found).splitlines()
    assert first == report.as_json(found)["networks"][0]["advice"] and second == first.replace("a:", "b:", 1)
    assert not any("--strategy" in line for line in rest), "it is said once"
    (count, name), *_ = re.findall(r"(\d+) hosts with --strategy (\w+) are", first)
    table = rest[rest.index("a: the best strategy") + 2 :]
    (row,) = (line.split() for line in table[:3] if line.split()[0] == count)
    assert row[-1] == str(parse(name, "adam")), "the preset can be pasted"
    assert all(each.accumulation == 1 for each in found.best("a").values()), "it is shown only"
    assert sum("(script accumulates" in line for line in rest) == 2 * len(learning.ACCUMULATED)
    assert row[5] in first.split() or f"({row[5]}" in first.split()
    assert (row[6] == "-") == (scale is None) == ("to an accuracy: not known" in first)
    assert scale is None or row[6].replace("..", " to ") in first


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc")
def test_a_profile_that_cannot_be_kept_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-such-folder")
    words = ["plan", "resnet", "--width", "0.125", "--image-size", "8", "--hosts", "2", "--global-batch-size", "8"]
    assert cli.command([*words, "--rates", "1gbit", "--strategy", "hierarchical"]) == 0
    out, err = capfd.readouterr()
    assert "1gbit: 2 hosts" in out or "do not add hosts" in out
    assert err.count("warning: the profile is not kept: /proc/no-such-folder") == 1
