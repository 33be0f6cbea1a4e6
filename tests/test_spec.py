"""The strategy string: parsing, the canonical form, errors, help, costs, and plug-ins."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from conftest import SMALL, failing, finished, here, installed
from hypothesis import given
from hypothesis import strategies as some

from hvdtrain.config import constraints
from hvdtrain.config.options import TrainConfig
from hvdtrain.horovod_api import job
from hvdtrain.models.resnet import ResNetSpec, parameters
from hvdtrain.resnet import ResNetConfig
from hvdtrain.strategies import Layout, Reducer, Strategy, parse, presets, registry
from hvdtrain.strategies.algorithms.local_sgd import LocalSGD
from hvdtrain.training import resume

ALGORITHMS, REDUCERS = registry.names(Strategy), registry.names(Reducer)
KNOWN: dict[str, Any] = {name: registry.lookup(name) for name in [*ALGORITHMS, *REDUCERS]}
LONG = "local-sgd:every=6,staleness=1+powersgd:rank=12,bits=4"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (LONG, LONG),
        ("local-sgd:staleness=1,every=6+powersgd:bits=4,rank=12", LONG),
        ("local-sgd:every=8+hierarchical", "local-sgd"),
        ("powersgd:rank=2,bits=32", "powersgd:bits=32"),
        ("local-sgd:outer_lr=0.7,outer_momentum=1e-1", "local-sgd:outer_lr=0.7,outer_momentum=0.1"),
        ("native:hook=none", "native"),
    ],
)
def test_the_canonical_form_has_changed_settings_in_the_order_of_the_fields(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical
    assert parse(canonical) == parse(text)


def values(cls: Any) -> some.SearchStrategy[dict[str, Any]]:
    """Draw settings of a class within their bounds."""
    drawn: dict[str, some.SearchStrategy[Any]] = {}
    for field in dataclasses.fields(cls.Settings):
        hint, limits = get_type_hints(cls.Settings)[field.name], field.metadata.get("bounds", {})
        lowest = limits.get("least", limits.get("above", 0) + 1e-3)
        numbers = some.floats(lowest, min(limits.get("most", 1e6), limits.get("below", 1e6) - 1e-3))
        if hint is int:
            drawn[field.name] = some.integers(int(lowest), 10**6)
        elif hint is float:
            drawn[field.name] = numbers
        else:
            drawn[field.name] = some.sampled_from(get_args(hint))
    return some.fixed_dictionaries({}, optional=drawn)


@given(some.data())
def test_the_canonical_form_parses_to_the_same_exchange(data: some.DataObject) -> None:
    name = data.draw(some.sampled_from(list(KNOWN)))
    holds = name in ALGORITHMS and KNOWN[name].capabilities.takes_reducer
    words = [name, data.draw(some.sampled_from(REDUCERS))] if holds else [name]
    settings = [data.draw(values(KNOWN[word])) for word in words]
    exchange = parse("+".join(map(typed, words, settings)))
    assert parse(str(exchange)) == exchange
    assert not re.search(r"[^A-Za-z0-9:=,+._-]", str(exchange)), "a shell needs no quotes"
    components = [each for each in (exchange.algorithm, exchange.reducer) if each]
    for component, expected in zip(components, settings, strict=True):
        assert {key: getattr(component.settings, key) for key in expected} == expected


def typed(name: str, settings: dict[str, Any]) -> str:
    words = [f"{key}={value}" for key, value in settings.items()]
    return f"{name}:{','.join(words)}".replace("e+", "e") if words else name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", f"unknown strategy 'nonsense' (known: {', '.join(KNOWN)})"),
        ("local-sgd+nonsense", f"unknown reducer 'nonsense' (known: {', '.join(REDUCERS)})"),
        ("allreduce+int8", "allreduce takes no reducer; hint: these do: local-sgd"),
        ("local-sgd+int8+int4", "more than one reducer"),
        ("powersgd:rank", "rank of powersgd is ''; hint: give a whole number >= 1"),
        ("powersgd:bits=16", "bits of powersgd is '16'; hint: give 32, 8 or 4"),
        ("powersgd:rank=0", "rank is 0; hint: give a whole number >= 1"),
        ("local-sgd:outer_lr=nan", "outer_lr is nan"),
        ("allreduce:rank=2", "no setting 'rank' of allreduce; its settings: none"),
        ("fast:every=2", "a preset takes no options; hint: --strategy fast"),
        ("balanced+int8", "a preset takes no options"),
    ],
)
def test_errors_list_what_is_valid(text: str, message: str) -> None:
    with failing(78) as failure:
        parse(text)
    assert str(failure.value).startswith(f"--strategy {text}: ")
    assert message in str(failure.value)


@pytest.mark.parametrize("optimizer", presets.FAMILIES)
def test_presets_stand_for_strategies_whose_bytes_are_those_of_the_table(optimizer: Any) -> None:
    shapes, layout = list(parameters(ResNetSpec(channels=1, classes=10, width=0.25)).values()), Layout(ranks=4, hosts=4)
    exact = parse("exact", optimizer)
    assert exact.facts(buckets=True)["exact"]
    for name, preset in presets.FAMILIES[optimizer].presets.items():
        spec = parse(name, optimizer)
        assert str(spec) == preset.strategy
        spec.check(TrainConfig(optimizer=optimizer))
        ratio = exact.cost(shapes, layout).sent_bytes / spec.cost(shapes, layout).sent_bytes
        assert 1 / Fraction(preset.sent) == round(ratio)


def test_a_workload_resolves_a_preset_with_its_optimizer_and_a_script_says_that_it_does_not_know_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flags, optimizer in ((), "sgd"), (("--optimizer", "muon"), "muon"):
        config = resume.parse(ResNetConfig, "resnet", "", ["--strategy", "fast", *flags])
        assert parse(config.strategy) == parse("fast", optimizer)
    job.resolved.cache_clear()
    assert [str(job.wanted("fast")) for _ in range(2)] == [presets.strategy("fast", None)] * 2
    assert capsys.readouterr().err.count(f"fast is {presets.strategy('fast', None)}, as for Adam") == 1


def test_every_strategy_has_a_cost_and_every_setting_a_description() -> None:
    layout, shapes = Layout(ranks=4, hosts=4), [(64, 32, 3, 3), (64,), (10, 64)]
    for name, cls in KNOWN.items():
        cost = parse(name).cost(shapes, layout)
        assert cost.sent_bytes > 0 and cost.hops > 0 and cost.numbers >= 0, name
        docs = constraints.field_docs(cls.Settings)
        assert all(docs.get(field.name) for field in dataclasses.fields(cls.Settings)), name
        alone = parse(name).cost(shapes, Layout(ranks=1, hosts=1))
        assert (alone.sent_bytes, alone.hops, alone.numbers) == (0, 0, 0), name
    assert parse("local-sgd:every=4,staleness=2").cost(shapes, layout).overlaps_with == "the next 2 steps"
    exact = [name for name in KNOWN if parse(name).facts(buckets=True)["exact"]]
    assert exact == ["allreduce", "native", "hierarchical"], "they send the bytes of an all-reduce"


@pytest.mark.parametrize(
    ("text", "ranks", "hosts", "sent", "hops", "numbers"),
    [
        ("allreduce", 4, 4, 600, 6, 0),
        ("hierarchical", 8, 4, 1200, 2, 0),
        ("central", 4, 4, 1200, 2, 0),
        ("central", 4, 2, 800, 2, 0),
        ("async-ps", 4, 2, 800, 2, 0),
        ("bf16", 4, 4, 300, 3, 100 * 11 / 4),
        ("local-sgd:every=4+bf16", 4, 4, 75, 0.75, 100 * 11 / 16),
    ],
)
def test_the_cost_of_an_exchange_of_a_hundred_numbers(
    text: str, ranks: int, hosts: int, sent: float, hops: float, numbers: float
) -> None:
    cost = parse(text).cost([(10, 10)], Layout(ranks=ranks, hosts=hosts))
    assert (cost.sent_bytes, cost.hops, cost.numbers) == (sent, hops, numbers)


def test_the_latencies_of_a_sum_depend_on_the_length_of_its_messages() -> None:
    """Messages that fit a link's queue together take one latency, longer ones one per host, and those that do not fit
    alone two per host."""
    layout = Layout(ranks=4, hosts=4)
    for numbers, hops in ((1_000, 2), (20_000, 2), (40_000, 2 * 3), (200_000, 2 * 2 * 3)):
        cost = parse("bf16").cost([(numbers,)], layout, buckets=False)
        assert cost.hops == 1 + hops, "and one for the step's totals"
    assert parse("hierarchical").cost([(20_000,)], layout, buckets=False).hops == 1 + 6, "a ring"


def test_a_run_is_resumed_only_with_the_same_strategy(tmp_path: Path) -> None:
    flags = [*SMALL, "--framework", "torch", "--run-dir", str(tmp_path)]
    strategy = "local-sgd:every=3,outer_momentum=0.6"
    here("resnet", *flags, "--epochs", "1", "--strategy", strategy)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["config"]["strategy"] == strategy
    assert manifest["exchange"] == {"overlaps_with": "", "exact": False}
    with failing(78, f"strategy: '{strategy}' there, 'local-sgd:every=3' here"):
        here("resnet", *flags, "--epochs", "2", "--resume", "--strategy", "local-sgd:every=3")
    with failing(78, "was last trained with torch"):
        here("resnet", *flags, "--epochs", "2", "--resume", "--framework", "tensorflow")
    again = here("resnet", *flags, "--epochs", "2", "--resume")
    assert (again["strategy"], again["epochs"]) == (strategy, 2)


def test_a_checkpoint_with_outer_momentum_cannot_be_loaded_without_it() -> None:

    def made(text: str) -> Any:
        return parse(text).make(TrainConfig(), None, [(3,)])  # type: ignore[arg-type]

    without, with_ = made("local-sgd"), made("local-sgd:outer_momentum=0.9")
    assert isinstance(with_, LocalSGD)
    with failing(78, "made without outer_momentum"):
        with_.load(without.state())


# --- plug-ins ----------------------------------------------------------------------------------------------


def test_an_installed_strategy_that_is_none_is_an_error(tmp_path: Path) -> None:
    """test_recipes.py installs and uses a right one."""
    (tmp_path / "mine_strategies.py").touch()
    command = [sys.executable, "-m", "hvdtrain.resnet", *SMALL, "--dry-run", "--strategy", "mine"]
    for value, why in (("mine_strategies:Nothing", "cannot be loaded"), ("json:dumps", "neither a Strategy nor")):
        done = finished(command, extra=installed(tmp_path, f"mine = {value}", "hvdtrain.strategies"))
        assert (done.returncode, why in done.stderr) == (78, True), done.stderr
