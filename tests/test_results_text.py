"""Tables on a terminal, and runs selected by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import runs
from rich.cells import cell_len

from hvdtrain.captioning import Captions
from hvdtrain.results import text
from hvdtrain.results.__main__ import main
from hvdtrain.results.read.frame import load
from hvdtrain.results.tables.model import Table
from hvdtrain.results.tables.overview import overview
from hvdtrain.system.exits import Failure
from hvdtrain.training.summary import show_summary

TABLES = ("list", "table", "scaling", "accuracy", "strategies", "energy", "phases", "show")
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long names, large numbers, several strategies, rates, settings, workloads and models."""
    folder = tmp_path_factory.mktemp("results")
    same: dict[str, Any] = {"energy_w": {"cpu0": 31234.5, "dram0": 4.0}, "accuracies": (0.5, 0.96)}
    for seed in range(2):
        for hosts, rate in ((1, None), (2, 10.0), (4, 1000.0)):
            for strategy in ("allreduce", "local-sgd:every=6+powersgd:rank=12,bits=4") if hosts > 1 else ("allreduce",):
                runs.make(
                    folder / f"20261121T16344{seed}Z-resnet-{strategy}-{hosts}-5f0c21",
                    hosts=hosts,
                    rate_mbit=rate,
                    rank_batch=32 // hosts,
                    strategy=strategy,
                    seed=seed,
                    parameters=21_283_530,
                    compute_s=(1 + seed / 100) / hosts,
                    **same,
                )
    for number in range(6):
        name = f"走る-{'x' * 90 * (number == 1)}{number}"
        other = runs.make(folder / name, hosts=number % 3 + 1, parameters=10**number)
        with runs.edited(other / "manifest.json") as manifest:
            manifest["workload"] = ("tabular", "a script of mine")[number % 2]
            manifest["config"] |= {"lr": number / 7, "hidden": number, "text": "=x " * number, "word": "w" * 99}
    return folder


def shown(command: str, root: Path, width: int, monkeypatch: Any, capsys: Any) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    names = sorted(map(str, root.iterdir()))
    assert main([command, names[0] if command == "show" else str(root)]) == 0
    return str(capsys.readouterr().out)


@pytest.mark.parametrize("command", TABLES)
def test_no_line_is_wider_than_the_terminal_and_all_results_are_there(
    command: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Table] = []
    monkeypatch.setitem(text.FORMATS, "table", lambda table: made.append(table) or text.terminal(table))
    for width in (40, 80, 100, 200):
        made.clear()
        lines = shown(command, root, width, monkeypatch, capsys).splitlines()
        assert [line for line in lines if cell_len(line) > width] == []
        words = {word.strip(",") for line in lines for word in line.split()}
        for part in (part for table in made for part in table.parts()):
            for column, *cells in zip(part.columns, *part.text(), strict=True):
                every = {word.strip(",") for cell in cells for word in cell.split()}
                numbers = {word for word in every if re.fullmatch(NUMBER, word)}
                if column.role == "result":
                    assert {*column.label.split(), *numbers} <= words, (width, column)


def test_only_settings_that_differ_are_columns_and_runs_of_other_work_are_apart(root: Path) -> None:
    table = overview(load([root]))
    for part in table.parts():
        columns = [column for column in part.columns if column.role == "setting"]
        assert all(len({str(row.get(column.key)) for row in part.rows}) > 1 for column in columns)
        assert len({(row["workload"], row["parameters"]) for row in part.rows}) == 1
        assert part.columns[-len(columns) :] == columns or not columns, "results come first"
    assert len(table.parts()) == 7
    assert "device cpu" in table.caption()


def test_a_summary_has_every_score(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{search}bleu{order}" for search in ("", "beam_") for order in range(1, 5)]
    scores = {name: 0.1234 + number / 1000 for number, name in enumerate(names)}
    fields = {"test_scores": scores, "validation_scores": [scores] * 2, "tested_step": 3}
    record = msgspec.structs.replace(runs.summary(runs.Made(), Path("r"), 0.0), **fields)
    show_summary(record, Captions(), as_json=False)
    text = capsys.readouterr().out
    for name, score in scores.items():
        assert re.search(rf"\b{name}\b", text)
        assert text.split().count(f"{score:.4f}") == 3
    assert max(map(len, text.splitlines())) <= 80


def test_a_run_is_found_by_the_start_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("alpha", "alpine", "beta"):
        runs.make(tmp_path / "results" / "sweep" / name, energy_w={"cpu0": 3.0})
    monkeypatch.chdir(tmp_path)
    for words in (["show", "beta"], ["show", "b"], ["show", "alpha", "results/sweep"], ["table", "alpi"]):
        assert main([*words, "--json"]) == 0
        json.loads(capsys.readouterr().out)
    assert main(["plot", "time", "beta", "-o", "beta.svg"]) == 0
    with pytest.raises(Failure, match=r"ambiguous, 2 runs match .*alpha.*alpine"):
        main(["show", "alp"])
    with pytest.raises(Failure, match=r"no such run in results, did you mean alpha\?"):
        main(["show", "alpho"])
