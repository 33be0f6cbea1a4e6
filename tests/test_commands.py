"""The `hvdtrain` command: groups, unknown commands, workloads of other packages, completion in a shell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import alone, document, failing, finished, installed

from hvdtrain import cli
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser


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


@pytest.mark.parametrize(
    "line", ["caption x.jpg --run r", "tabular test --run r --data x.csv", "resnet predict r x.jpg"]
)
def test_moved_commands_name_their_place(line: str) -> None:
    with failing(exits.USAGE, "hint: `hvdtrain predict RUN"):
        cli.command(line.split())


@pytest.mark.parametrize("quote", ["'", ""])  # Python 3.14 omits the quotes
def test_choices_with_and_without_quotes(quote: str) -> None:
    choices = ", ".join(f"{quote}{word}{quote}" for word in ("list", "table"))
    with failing(exits.USAGE, r"did you mean list\?"):
        Parser().error(f"argument command: invalid choice: {quote}lst{quote} (choose from {choices})")


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


@pytest.mark.parametrize(
    ("typed", "completion"),
    [
        ("swe", "sweep"),
        ("data im", "images"),
        ("results compare --thr", "--threshold"),
        ("train resnet --bat", "--batch-size"),
    ],
)
def test_bash_completes(typed: str, completion: str) -> None:
    script = alone("cli", "--print-completion", "bash")
    assert script.returncode == exits.OK, script.stderr
    words = ["hvdtrain", *typed.split()]
    ask = (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; COMP_LINE='{' '.join(words)}'\n"
        "completer=$(complete -p hvdtrain); completer=${completer##*-F }\n"
        '${completer%% *} hvdtrain "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; echo "${COMPREPLY[@]}"\n'
    )
    done = finished(["bash", "--norc", "-c", script.stdout + "\n" + ask])
    assert completion in done.stdout.split(), done.stderr


def test_a_missing_package_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for name in [name for name in sys.modules if name.startswith("hvdtrain.results")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "results", "list"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == exits.UNREACHABLE
    hint = "run `make setup` in a checkout, or `pip install pandas`"
    assert capsys.readouterr().err == f"hvdtrain: this command needs the package pandas; hint: {hint}\n"
