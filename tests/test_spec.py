"""One string names an exchange: how it is read and spelt, what is refused, and how it replaces the flags of before."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from conftest import ROOT, SMALL, alone, document, failing, finished, here, installed
from hypothesis import given
from hypothesis import strategies as some

from hvdtrain.comm.world import BACKENDS
from hvdtrain.config import constraints, workloads
from hvdtrain.config.options import TrainConfig
from hvdtrain.strategies import REDUCERS, SCHEDULES, Layout, parse
from hvdtrain.strategies.algorithms.local_sgd import LocalSGD
from hvdtrain.strategies.algorithms.native import Native

KNOWN: dict[str, Any] = {**SCHEDULES, **REDUCERS}
LONG = "local-sgd:every=6,staleness=1+powersgd:rank=12,bits=4"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (LONG, LONG),
        ("local-sgd:staleness=1,every=6+powersgd:bits=4,rank=12", LONG),
        ("local-sgd:every=8+hierarchical", "local-sgd"),
        ("powersgd:rank=2,bits=32", "powersgd:bits=32"),
        ("topk:density=0.0100", "topk"),
        ("local-sgd:outer_lr=0.7,outer_momentum=1e-1", "local-sgd:outer_lr=0.7,outer_momentum=0.1"),
        ("hybrid:shares=3:1.5+int8", "hybrid:shares=3:1.5+int8"),
        ("native:rank=4,hook=powersgd", "native:hook=powersgd,rank=4"),
    ],
)
def test_only_what_differs_is_spelt_in_the_order_of_the_fields(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical
    assert parse(canonical) == parse(text)


def values(cls: Any) -> some.SearchStrategy[dict[str, Any]]:
    """Settings of a class within their bounds."""
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
            several = some.lists(numbers, min_size=1).map(tuple)
            drawn[field.name] = several if "tuple" in str(hint) else some.sampled_from(get_args(hint))
    return some.fixed_dictionaries({}, optional=drawn)


@given(some.data())
def test_what_is_spelt_is_read_as_it_was(data: some.DataObject) -> None:
    name = data.draw(some.sampled_from(list(KNOWN)))
    holds = name in SCHEDULES and SCHEDULES[name].holds_reducer
    words = [name, data.draw(some.sampled_from([*REDUCERS]))] if holds else [name]
    asked = [data.draw(values(KNOWN[word])) for word in words]
    exchange = parse("+".join(map(typed, words, asked)))
    assert parse(str(exchange)) == exchange
    assert not re.search(r"[^A-Za-z0-9:=,+._-]", str(exchange)), "no shell needs quotes for it"
    held = [part for part in (exchange.schedule, exchange.reducer) if part]
    for part, expected in zip(held, asked, strict=True):
        assert {key: getattr(part.settings, key) for key in expected} == expected


def typed(name: str, asked: dict[str, Any]) -> str:
    words = [
        f"{key}={':'.join(map(repr, value)) if isinstance(value, tuple) else value}" for key, value in asked.items()
    ]
    return f"{name}:{','.join(words)}".replace("e+", "e") if words else name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", f"unknown strategy 'nonsense'; known: {', '.join(KNOWN)} (see --strategy help)"),
        ("powersdg", "did you mean powersgd?"),
        ("delayed+nonsense", f"unknown reducer 'nonsense'; known: {', '.join(REDUCERS)}"),
        ("local-sgd+delayed", f"known: {', '.join(REDUCERS)}"),
        ("allreduce+int8", "allreduce takes no reducer behind a plus; these do: local-sgd, delayed, hybrid"),
        ("int8+powersgd", "int8 is a reducer, which stands alone or behind the plus of a schedule"),
        ("delayed+int8+int4", "one reducer goes behind a schedule"),
        (
            "powersgd:rnak=3",
            "no setting 'rnak' of powersgd, did you mean rank?; it has: rank (whole number >= 1, default 2)",
        ),
        ("powersgd:rank", "rank of powersgd is '': give a whole number >= 1"),
        ("powersgd:rank=1,rank=2", "rank of powersgd is given twice"),
        ("powersgd:bits=16", "bits of powersgd is '16': give 32, 8 or 4"),
        ("powersgd:rank=1.5", "rank of powersgd is '1.5': give a whole number >= 1"),
        ("powersgd:rank=0", "rank is 0: give a whole number >= 1"),
        ("topk:density=0", "density is 0.0: give a number > 0 and <= 1"),
        ("topk:density=1.5", "density is 1.5"),
        ("topk:density=nan", "density is nan"),
        ("local-sgd:every=0", "every is 0"),
        ("local-sgd:start=-1", "start is -1"),
        ("local-sgd:outer_momentum=1", "outer_momentum is 1.0: give a number >= 0 and < 1"),
        ("local-sgd:outer_lr=0", "outer_lr is 0.0"),
        ("delayed:staleness=-1", "staleness is -1"),
        ("async-ps:servers=-1", "servers is -1"),
        ("allreduce:rank=2", "no setting 'rank' of allreduce; it has: nothing to set"),
        ("", "unknown strategy ''"),
    ],
)
def test_what_is_refused_says_what_there_is(text: str, told: str) -> None:
    with failing(78) as refused:
        parse(text)
    assert str(refused.value).startswith(f"--strategy {text}: ")
    assert told in str(refused.value)


def test_help_about_one_tells_its_purpose_settings_and_an_example() -> None:
    done = alone("resnet", "--strategy", "help:powersgd", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("powersgd: Low-rank gradients")
    for said in ("rank=whole number >= 1, default 2", "bits=32, 8 or 4, default 8", "MB in 16 rounds, behind backward"):
        assert said in done.stdout
    parse(done.stdout.rpartition("example: --strategy ")[2].strip())
    asked = alone("resnet", "--strategy", "help:powersgd:rank=4", *SMALL)
    assert (asked.returncode, asked.stderr) == (0, "") and asked.stdout.startswith("powersgd:rank=4: Low-rank")
    assert alone("resnet", "--strategy", "help:nonsense").returncode == 78


def test_every_strategy_tells_what_it_costs_and_every_setting_what_it_is() -> None:
    layout, shapes = Layout(ranks=4, hosts=4), [(64, 32, 3, 3), (64,), (10, 64)]
    for name, cls in KNOWN.items():
        cost = parse(name).cost(shapes, layout)
        assert cost.sent_bytes > 0 and cost.rounds > 0 and cost.work >= 0, name
        docs = constraints.field_docs(cls.Settings)
        assert all(docs.get(field.name) for field in dataclasses.fields(cls.Settings)), name
        alone = parse(name).cost(shapes, Layout(ranks=1, hosts=1))
        assert (alone.sent_bytes, alone.rounds, alone.work) == (0, 0, 0), name
    assert parse("local-sgd:every=4,staleness=2").cost(shapes, layout).behind == "the next 2 steps"
    assert [name for name in KNOWN if parse(name).facts(in_parts=True)["exact"]] == [
        *("allreduce", "native", "delayed", "hybrid", "hierarchical")
    ], "whose limit is that of an allreduce"


@pytest.mark.parametrize(
    ("text", "ranks", "hosts", "sent", "rounds", "work"),
    [
        ("allreduce", 4, 4, 600, 6, 0),
        ("hierarchical", 8, 4, 600, 6, 0),
        ("central", 4, 4, 1200, 2, 0),
        ("central", 4, 2, 800, 2, 0),
        ("async-ps", 4, 2, 800, 2, 0),
        ("bf16", 4, 4, 300, 2, 100 * 11 / 4),
        ("local-sgd:every=4+bf16", 4, 4, 75, 0.5, 100 * 11 / 16),
    ],
)
def test_what_an_exchange_of_a_hundred_numbers_costs(
    text: str, ranks: int, hosts: int, sent: float, rounds: float, work: float
) -> None:
    cost = parse(text).cost([(10, 10)], Layout(ranks=ranks, hosts=hosts))
    assert (cost.sent_bytes, cost.rounds, cost.work) == (sent, rounds, work)


def test_factors_are_sent_where_they_are_smaller() -> None:
    """Of a matrix of 100 x 50: a row and a column for each sample of a rank, of all ranks of a host."""
    for rows, ranks, numbers in ((4, 2, 4 * 150), (4, 4, 8 * 150), (32, 4, 5000), (0, 4, 5000)):
        cost = parse("factors").cost([(100, 50)], Layout(ranks=ranks, hosts=2, rows=[rows]))
        assert cost.sent_bytes == 4 * numbers


def test_a_run_is_resumed_with_its_own_strategy_only(tmp_path: Path) -> None:
    flags = [*SMALL, "--framework", "torch", "--run-dir", str(tmp_path)]
    asked = "local-sgd:every=3,outer_momentum=0.6"
    here("resnet", *flags, "--epochs", "1", "--strategy", asked)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["config"]["strategy"] == asked
    assert manifest["exchange"] == {"overlaps_with": "", "exact": False}
    with failing(78, f"strategy: '{asked}' there, 'local-sgd:every=3' here"):
        here("resnet", *flags, "--epochs", "2", "--resume", "--strategy", "local-sgd:every=3")
    with failing(78, "was last trained with torch, in whose order"):
        here("resnet", *flags, "--epochs", "2", "--resume", "--framework", "tensorflow")
    again = here("resnet", *flags, "--epochs", "2", "--resume")
    assert (again["strategy"], again["epochs"]) == (asked, 2)


def test_the_momentum_of_rounds_is_never_switched_off_by_a_checkpoint() -> None:
    """Were its identity to pass, as that of a version which did not note it, the state itself tells."""

    def made(text: str) -> Any:
        return parse(text).make(TrainConfig(), None, [(3,)])  # type: ignore[arg-type]

    without, with_ = made("local-sgd"), made("local-sgd:outer_momentum=0.9")
    assert isinstance(with_, LocalSGD)
    with failing(78, "made without outer_momentum"):
        with_.load(without.state())


# --- who knows the names ----------------------------------------------------------------------------------------------

PLUGIN = '''"""Sums as they are, and doubles them where asked."""

import dataclasses

from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.strategies.cost import Cost, elements
from hvdtrain.strategies.reducer import Reducer


class Mine(Reducer):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        times: int = bounded(1, least=1, most=9, example=2)
        """How often"""

    @classmethod
    def cost(cls, shapes, hosts, settings=None):
        return Cost(sent_bytes=4 * elements(shapes), rounds=1)

    def sum_between_hosts(self, values, hosts):
        hosts.all_reduce(values)
        values *= self.settings.times
'''


def test_a_strategy_made_outside_the_package_registers_itself(tmp_path: Path) -> None:
    """As an installed package does: a module, and metadata that name it."""
    (tmp_path / "mine_strategies.py").write_text(PLUGIN)
    extra = installed(tmp_path, "mine = mine_strategies:Mine", "hvdtrain.strategies")

    def trained(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hvdtrain.resnet", "--framework", "torch", *SMALL, *words]
        return finished([*command, "--run-dir", str(tmp_path / "run")], extra=extra)

    assert re.search(r"^  mine +\d", trained("--strategy", "help").stdout, re.MULTILINE)
    assert "times=whole number >= 1 and <= 9, default 1" in trained("--strategy", "help:mine").stdout
    told = trained("--strategy", "mine:tims=2").stderr
    assert "no setting 'tims' of mine, did you mean times?" in told
    summary = document(trained("--strategy", "local-sgd:every=3+mine:times=2", "--epochs", "1", "--json"))
    assert summary["strategy"] == "local-sgd:every=3+mine:times=2"
    for value, why in (("mine_strategies:Nothing", "cannot be loaded"), ("json:dumps", "neither a Strategy nor")):
        installed(tmp_path, f"mine = {value}", "hvdtrain.strategies")
        done = trained("--strategy", "mine")
        assert (done.returncode, why in done.stderr) == (78, True), done.stderr


ELSEWHERE = {*BACKENDS, *get_args(get_type_hints(TrainConfig)["precision"])}
"""Names that are those of a carrier or a precision too"""


def strings(path: Path) -> list[str]:
    """All text of a module but its docstrings and those of its fields."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]


def test_only_its_own_file_and_the_table_know_a_strategys_name() -> None:
    package, found = ROOT / "hvdtrain", []
    for path in sorted(package.rglob("*.py")):
        own = {name for name, cls in KNOWN.items() if sys.modules[cls.__module__].__file__ == str(path)}
        if path.name == "table.py":
            continue
        excused = {*own, *ELSEWHERE}
        if path.name in ("ddp.py", "native.py"):  # a hook of PyTorch's has a reducer's name
            excused |= set(get_args(get_type_hints(Native.Settings)["hook"]))
        if path.parent.name in ("horovod_api", "torch", "tensorflow"):  # the call of Horovod's of that name
            excused.add("allreduce")
        if path.name == "options.py" or path.parent.name == "pipeline":  # so has a form of activations on their way
            excused |= set(get_args(get_type_hints(TrainConfig)["activations"]))
        for text in strings(path):
            names = "|".join(KNOWN.keys() - excused)
            known = re.fullmatch(rf"(.*\+)?({names})([:+].*)?", text) or re.search(rf"--strategy .*\b({names})\b", text)
            known = known or next((name for name in KNOWN.keys() - excused if "-" in name and name in text), None)
            if known and (path.name, text) != ("config.py", TrainConfig.strategy):
                found.append(f"{path.relative_to(ROOT)}: {text!r}")
        imported = re.findall(r"hvdtrain\.strategies\.(\w+)", path.read_text())
        outside = path.parent.name != "strategies"
        modules = {cls.__module__.rpartition(".")[2] for cls in KNOWN.values()}
        found += [f"{path.relative_to(ROOT)} imports {name}" for name in imported if outside and name in modules]
    assert not found


def test_only_its_own_file_and_the_table_know_a_workloads_name() -> None:
    """And what is one workload's own: captioning's room, the command that asks tabular's runs, the names of commands
    and the list of data sets."""
    own = ("workloads.py", "cli.py", "answers.py", "listed.py")
    for path in (ROOT / "hvdtrain").rglob("*.py"):
        known = set() if path.name in own else workloads.OURS.keys() - {path.stem}
        assert not known & set(strings(path)) or path.parent.name == "captions", path
