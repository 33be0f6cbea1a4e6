"""The documentation: links, commands, generated pages and figures. programs/first_hour.py runs the README's session."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from hvdtrain import cli, strategies
from hvdtrain.config import parser
from hvdtrain.strategies import automatic

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("*/README.md")])


def anchors(page: Path) -> set[str]:
    """Anchors of a page: its headings as GitHub writes them, and the `<a id>` in it."""
    text = page.read_text()
    headings = (re.sub(r"[`*]", "", line).strip().lower() for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", line).replace(" ", "-") for line in headings} | set(
        re.findall(r'<a id="([^"]+)">', text)
    )


def broken(page: Path) -> list[str]:
    """Links and images of the page that lead to no file of the checkout, or to no anchor in it."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", page.read_text()):
        link = "".join(link)
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors(page: Path) -> None:
    assert broken(page) == []


STARTERS = r"(\$ )?(sudo|hvdtrain|python|(launch/)?(mpirun|horovodrun)(\.sh)?|torchrun|srun|sbatch|tools/\w+\.sh) "
SCRIPTS = {"tools/cluster.sh": "cluster", "tools/throttle.sh": "throttle"}


def commands(page: Path) -> Iterator[list[str]]:
    """hvdtrain's commands in the page's code blocks, as words, without launchers, sudo and prompts."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:bash|text)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}(.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.MULTILINE)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if not re.match(STARTERS, line) or line.endswith("..."):
            continue
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("|&;>"):
                words.append(word)
                continue
            # The last one: `hvdtrain cluster exec a -- horovodrun python -m hvdtrain.resnet` starts another command.
            for at in reversed(range(len(words))):
                if words[at] == "hvdtrain" or (words[at].startswith("hvdtrain.") and words[at - 1] == "-m"):
                    yield words[at:]
                    break
                if words[at] in SCRIPTS:
                    yield ["hvdtrain", SCRIPTS[words[at]], *words[at + 1 :]]
                    break
            words = []


def parse(words: list[str]) -> object:
    """Parses a command as its program does, without running it; raises what it raises."""
    program, *arguments = words
    if program == "hvdtrain":
        if not arguments or arguments == ["train"]:  # these list the commands
            return None
        known = cli.commands("train" if arguments[0] == "train" else "")
        name = next(name for name in known if tuple(arguments[: len(name)]) == name)
        return known[name][1].parser().parse_args(arguments[len(name) :])
    module = importlib.import_module(program)
    if program == "hvdtrain.ddp":
        strategy = module.parser().parse_args(arguments).strategy
        return None if automatic.rule(strategy) else strategies.parse(strategy)
    made = next(value for name, value in vars(module).items() if name.endswith("Config") and name != "TrainConfig")
    asked: Any = parser.parse(made, arguments, prog=program, purpose="")
    return None if asked.strategy.startswith("help") else strategies.resolve(asked)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CONTRIBUTING.md" and [*commands(page)]], ids=lambda page: page.name
)
def test_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wrong = {}
    for words in commands(page):
        try:
            parse(words)
        except SystemExit as ended:  # --help
            if ended.code:
                wrong[shlex.join(words)] = str(ended)
        except Exception as error:
            wrong[shlex.join(words)] = f"{type(error).__name__}: {error}"
    assert wrong == {}


@pytest.mark.parametrize("script", ["docs_reference.py", "docs_figures.py"])
def test_generated_pages_and_figures_are_up_to_date(script: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
