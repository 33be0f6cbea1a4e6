"""What a terminal shows of the tables: whole numbers and words at any width, runs by name, and what to do without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import runs

from hvdtrain.captioning import Captions
from hvdtrain.records import Summary
from hvdtrain.results import load, plots
from hvdtrain.results.__main__ import main
from hvdtrain.system.exits import Failure
from hvdtrain.training import run_folder

TABLES = ("list", "table", "scaling", "accuracy", "strategies", "energy", "phases", "show", "compare")
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long names, large numbers, several strategies, rates and devices: nothing fits into 60 columns."""
    found = tmp_path_factory.mktemp("results")
    same: dict[str, Any] = {"energy_w": {"cpu0": 31234.5, "dram0": 4.0}, "accuracies": (0.5, 0.96)}
    for seed in range(2):
        for hosts, rate in ((1, None), (2, 10.0), (4, 1000.0)):
            for strategy in ("allreduce", "local-sgd:every=6+powersgd:rank=12,bits=4") if hosts > 1 else ("allreduce",):
                runs.make(
                    found / f"20261121T16344{seed}Z-resnet-{strategy}-{hosts}-5f0c21",
                    hosts=hosts,
                    rate_mbit=rate,
                    rank_batch=32 // hosts,
                    strategy=strategy,
                    seed=seed,
                    parameters=21_283_530,
                    compute_s=(1 + seed / 100) / hosts,
                    **same,
                )
    return found


def shown(command: str, root: Path, width: int | None, monkeypatch: Any, capsys: Any) -> str:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    runs_ = sorted(map(str, root.iterdir()))
    words = {"show": runs_[:1], "compare": [runs_[0], runs_[1]]}.get(command, [str(root)])
    reference = ["--reference", "cruz2021"] if command in ("scaling", "energy") else []
    assert main([command, *words, *reference]) in (0, 1)
    return str(capsys.readouterr().out)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("command", TABLES)
def test_no_number_and_no_word_is_broken_or_lost_unsaid(
    command: str, width: int, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = shown(command, root, None, monkeypatch, capsys)
    text = shown(command, root, width, monkeypatch, capsys)
    assert "…" not in text
    for line in text.splitlines():
        assert len(line) <= width or " " not in line.strip() or line.startswith("    "), line
    words = wide.split()
    said = "left out at" in text
    dropped = {word for word in words if word not in text.split()}
    assert said or not dropped - {"─" * len(word) for word in dropped}
    assert not {word for word in text.split() if re.fullmatch(NUMBER, word)} - {*words, str(width), f"{width}:"}


def test_a_pipe_has_all_columns(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in TABLES:
        assert "left out at" not in shown(command, root, None, monkeypatch, capsys)


def test_a_block_per_row_where_nothing_can_be_spared(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown("compare", root, 30, monkeypatch, capsys)
    assert "one block per row" in text.replace("\n", " ")
    assert all(word in text for word in ("figure", "change (%)", "verdict"))


def test_scores_of_a_run_are_whole_in_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{search}bleu{order}" for search in ("", "beam_") for order in range(1, 5)]
    record = runs.summary(runs.Made(), Path("r"), 0.0)
    scores = {name: 0.1234 + number / 1000 for number, name in enumerate(names)}
    fields = {"test_scores": scores, "validation_scores": [scores] * 2, "tested_step": 3}
    run_folder.show_summary(Summary(**(vars(record) | fields)), Captions(), as_json=False)
    text = capsys.readouterr().out
    for name, score in scores.items():
        assert re.search(rf"\b{name}\b", text)
        assert text.split().count(f"{score:.4f}") == 3
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


# --- runs by name -----------------------------------------------------------------------------------------------------


def test_a_run_is_found_by_its_name_or_a_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("alpha", "alpine", "beta"):
        runs.make(tmp_path / "results" / "sweep" / name, energy_w={"cpu0": 3.0})
    monkeypatch.chdir(tmp_path)
    for words in (["show", "beta"], ["show", "b"], ["show", "alpha", "results/sweep"], ["table", "alpi"]):
        assert main([*words, "--json"]) == 0
        json.loads(capsys.readouterr().out)
    assert main(["compare", "alpha", "beta"]) == 0
    assert main(["plot", "resources", "beta", "-o", "beta.svg"]) == 0
    with pytest.raises(Failure, match=r"2 runs are named so .*alpha.*alpine"):
        main(["show", "alp"])
    with pytest.raises(Failure, match=r"no such folder, and no run of that name in results, did you mean alpha\?"):
        main(["show", "alpho"])
    with pytest.raises(Failure, match="did you mean strategy"):
        main(["table", "--group-by", "stategy"])


@pytest.mark.parametrize("changes", [{"complete": False}, {"kind": "timing", "marked": "the rate was off"}])
def test_a_figure_of_resources_shows_the_run_it_is_given(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "r", energy_w={"cpu0": 3.0}, **changes)
    assert plots.draw("resources", load.load([folder])).axes


# --- without runs -----------------------------------------------------------------------------------------------------


def test_a_study_is_shown_without_runs_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, key, value in (("energy", "energy_j", 8.48e6), ("scaling", "speedup_end_to_end", 0.0847)):
        assert main([command, "--reference", "cruz2021", "--json"]) == 0
        *_, beside = json.loads(capsys.readouterr().out)["tables"]
        assert beside["rows"][0][f"published_{key}"] == value
        ours = [name for name in beside["rows"][0] if name != "environment" and not name.startswith("published_")]
        assert {row[name] for row in beside["rows"] for name in ours} == {None}, "theirs, not ours"
        assert any("hvdtrain sweep launch/sweeps/cruz2021_devices.toml" in note for note in beside["notes"])
    for command in ("list", "scaling", "strategies", "export"):
        with pytest.raises(Failure, match=r"no runs in results: start one with `python -m hvdtrain.resnet"):
            main([command])
