"""What the commands say of themselves: help, what was meant, and completion in a real shell."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import alone, document, finished, installed

from hvdtrain import cli
from hvdtrain.config import options, parser
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure


def hvdtrain(*words: str) -> subprocess.CompletedProcess[str]:
    return alone("cli", *words)


@pytest.mark.parametrize("words", cli.COMMANDS)
def test_help_starts_with_the_purpose_and_shows_commands_to_copy(words: tuple[str, ...]) -> None:
    text = cli.COMMANDS[words][1].parser().format_help()
    assert not text.startswith("usage")
    assert "\n  hvdtrain " in text or "\n  tools/throttle.sh " in text


def test_a_group_of_commands_tells_its_purpose_and_commands() -> None:
    done = hvdtrain("data", "--help")
    assert done.returncode == exits.OK
    assert done.stdout.startswith("Prepare ")
    assert all(f"hvdtrain data {name}" in done.stdout for name in ("images", "captions", "vgg16"))


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("swep", "sweep"),
        ("trian", "train"),
        ("train resnt", "train resnet"),
        ("data imags", "data images"),
        ("results lst", "list"),
        ("doctor --hostfil x --quik", "--quick"),
        ("monitors --format json", "--json"),
        ("sweep x.toml --dryrun", "--dry-run"),
        ("data images a b --size 1x1 --splitt 1", "--split"),
        ("throttle --hosfile x", "--hostfile"),
    ],
)
def test_what_was_meant(line: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["hvdtrain", *line.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == exits.USAGE
    assert f"did you mean {meant}?" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("quote", ["'", ""])  # without: Python 3.14
def test_choices_with_and_without_quotes(quote: str) -> None:
    choices = ", ".join(f"{quote}{word}{quote}" for word in ("list", "table"))
    with pytest.raises(Failure, match=r"did you mean list\?"):
        Parser().error(f"argument command: invalid choice: {quote}lst{quote} (choose from {choices})")


@pytest.mark.parametrize(
    ("line", "told"),
    [("--print-completion", "--print-completion: give one of bash, zsh"), ("data images a b", "--size is missing")],
)
def test_what_is_missing(line: str, told: str) -> None:
    assert told in hvdtrain(*line.split()).stderr


def test_train_is_the_workload_s_entry_point() -> None:
    """The same run, told in the same words."""
    flags = ["--epochs", "1", "--width", "0.0625", "--lr-scaling", "linear", "--dry-run", "--json"]
    by_module, by_command = (document(alone(*start, *flags)) for start in (["resnet"], ["cli", "train", "resnet"]))
    assert by_module == by_command
    listed = [
        line.split()[2]
        for line in hvdtrain("train", "--help").stdout.splitlines()
        if line.startswith("  hvdtrain train")
    ]
    assert {"captioning", "resnet"} <= set(listed)
    assert "did you mean --batch-size?" in hvdtrain("train", "resnet", "--batchsize", "3").stderr


@pytest.mark.parametrize(
    ("entry", "source", "told"),
    [
        ("mine = mine", "import nothing_of_the_kind", "mine cannot be imported: No module named 'nothing_of_the_kind'"),
        ("mine = mine", "def main(stop) return 0", "mine cannot be imported: expected ':' (mine.py, line 1)"),
        ("mine = mine", "WORKLOAD = 'mine'", "workload mine: mine has no main(stop)"),
        ("mine = gone", "", "workload mine: gone cannot be imported: No module named 'gone'"),
        ("resnet = mine", "", "two workloads are named resnet: hvdtrain.resnet and mine; hint: rename an entry"),
    ],
)
def test_a_bad_workload_of_another_package_is_told_in_a_line(
    tmp_path: Path, entry: str, source: str, told: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    name, variables = entry.partition(" ")[0], installed(tmp_path, entry)
    command = [sys.executable, "-m", "hvdtrain.cli", "train", name, "--dry-run"]
    done = finished(command, extra=variables)
    assert (done.returncode, told in done.stderr, done.stderr.count("\n")) == (exits.BAD_CONFIG, True, 1), done.stderr
    if entry == "mine = gone":  # which harms no other
        assert finished([*command[:-2], "resnet", "--dry-run"], extra=variables).returncode == 0


def test_training_s_help_groups_flags() -> None:
    told = hvdtrain("train", "resnet", "--help").stdout
    groups = dict(re.findall(r"^(\w+):\n((?:  .*\n|\n)*)", told, re.MULTILINE))
    assert list(groups)[-6:] == ["data", "model", "optimization", "communication", "run", "measurement"]
    for title, word in {
        "data": "image-size",
        "model": "width",
        "communication": "strategy",
        "measurement": "monitor",
    }.items():
        assert f"--{word} " in groups[title]


def test_what_was_meant_by_a_flag_of_training() -> None:
    with pytest.raises(Failure, match=r"did you mean --batch-size\?"):
        parser.parse(options.TrainConfig, ["--batchsize", "3"], prog="x", purpose="")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("swe", "sweep"),
        ("data im", "images"),
        ("results compare --thr", "--threshold"),
        ("train resnet --bat", "--batch-size"),
    ],
)
def test_bash_completes(typed: str, offered: str) -> None:
    script = hvdtrain("--print-completion", "bash")
    assert script.returncode == exits.OK, script.stderr
    words = ["hvdtrain", *typed.split()]
    ask = (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; COMP_LINE='{' '.join(words)}'\n"
        "completer=$(complete -p hvdtrain); completer=${completer##*-F }\n"
        '${completer%% *} hvdtrain "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; echo "${COMPREPLY[@]}"\n'
    )
    done = finished(["bash", "--norc", "-c", script.stdout + "\n" + ask])
    assert offered in done.stdout.split(), done.stderr


def test_a_package_that_is_not_installed_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packages may be missing."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    for name in [name for name in sys.modules if name.startswith("hvdtrain.results")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "results", "list"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 69
    assert capsys.readouterr().err == "hvdtrain: this command needs the package pandas; hint: run `make setup`\n"
