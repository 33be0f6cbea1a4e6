"""The `hvdtrain` command: groups, unknown commands, workloads of other packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import alone, document, failing, finished, installed

from hvdtrain import cli
from hvdtrain.system import exits


@pytest.mark.parametrize("group", ["", "train", "data"])
def test_groups_list_their_commands(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [group] if group else []
    assert cli.command(words) == exits.USAGE
    assert cli.command([*words, "--help"]) == exits.OK
    text = capsys.readouterr().out
    assert all(f"  hvdtrain {' '.join(command)} " in text for command in cli.commands(group))


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [("swep", "sweep"), ("trian", "train"), ("train resnt", "train resnet"), ("data imags", "data images")],
)
def test_unknown_commands_get_a_suggestion(line: str, suggestion: str) -> None:
    with failing(exits.USAGE, rf"did you mean {suggestion}\?"):
        cli.command(line.split())


def test_train_is_the_workloads_entry_point() -> None:
    flags = ["--epochs", "1", "--width", "0.0625", "--lr-scaling", "linear", "--dry-run", "--json"]
    by_module, by_command = (document(alone(*start, *flags)) for start in (["resnet"], ["cli", "train", "resnet"]))
    assert by_module == by_command


@pytest.mark.parametrize(
    ("entry", "source", "message"),
    [
        ("mine = mine", "import nothing_of_the_kind", "mine cannot be imported: No module named 'nothing_of_the_kind'"),
        ("mine = mine", "def main(stop) return 0", "mine cannot be imported: expected ':' (mine.py, line 1)"),
        ("mine = mine", "WORKLOAD = 'mine'", "workload mine: mine has no main(stop)"),
        ("mine = gone", "", "workload mine: gone cannot be imported: No module named 'gone'"),
        ("resnet = mine", "", "two workloads are named resnet: hvdtrain.resnet and mine"),
    ],
)
def test_invalid_workloads_of_other_packages(tmp_path: Path, entry: str, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    name, variables = entry.partition(" ")[0], installed(tmp_path, entry)
    command = [sys.executable, "-m", "hvdtrain.cli", "train", name, "--dry-run"]
    done = finished(command, extra=variables)
    assert (done.returncode, done.stderr.count("\n")) == (exits.BAD_CONFIG, 1), done.stderr
    assert message in done.stderr
    if entry == "mine = gone":  # other workloads still run
        assert finished([*command[:-2], "resnet", "--dry-run"], extra=variables).returncode == 0
