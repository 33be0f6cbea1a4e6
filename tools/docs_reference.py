#!/usr/bin/env python3
"""Writes the generated pages of docs/reference/, and sections of guides, from the code.

python tools/docs_reference.py            # write them
python tools/docs_reference.py --check    # exit code 1 if a page is stale
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain import cli
from hvdtrain.config import constraints, parser
from hvdtrain.config.options import TrainConfig
from hvdtrain.results import columns
from hvdtrain.strategies import presets, registry
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.spec import format_value
from hvdtrain.sweep import file as sweep

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = ("resnet", "captioning", "tabular", "solar")


def table(head: str, rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A Markdown table; `head` names the columns, separated by |."""
    body = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return [f"| {head} |", "|" + "---|" * (head.count("|") + 1), *body, ""] if body else []


def flat(text: str) -> str:
    """One line. The first line of a documentation becomes a sentence; characters of Markdown are escaped."""
    head, _, rest = (text or "").strip().partition("\n")
    if rest.strip() and head[-1] not in ".,;:" and rest.strip()[0].isupper() | rest.startswith("\n"):
        head += "."
    line = " ".join(f"{head} {rest}".split()).replace("%%", "%").replace("<", "&lt;")
    return re.sub(r"[\[\]*_](?=[^`]*(`[^`]*`[^`]*)*$)", r"\\\g<0>", line)


def first_paragraph(text: str | None) -> str:
    return flat((text or "").strip().partition("\n\n")[0])


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def flags(one: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """(usage, help) of each argument."""
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction) or "--help" in action.option_strings:
            continue
        if action.help == argparse.SUPPRESS:
            continue
        choices = "/".join(map(str, action.choices or ()))
        value = action.metavar or choices or action.dest.upper()
        value = value if isinstance(value, str) else " ".join(value)
        names = ", ".join(action.option_strings)
        yield (
            code(f"{names} {'' if action.nargs == 0 else value}".strip()),
            flat(one._get_formatter()._expand_help(action) if action.help else ""),
        )


def options(cls: type, skip: Iterable[str] = ()) -> Iterator[tuple[str, str, str]]:
    """(flag, default, documentation) of the fields of an options class."""
    hints, docs = get_type_hints(cls), constraints.field_docs(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        empty = field.default is None or field.default is False or field.default in (dataclasses.MISSING, "")
        default = "" if empty else format_value(field.default)
        usage = parser._usage(field, hints[field.name], False)
        yield code(usage), code(default), flat(docs.get(field.name, ""))


def commands(name: str, one: argparse.ArgumentParser, about: str) -> Iterator[str]:
    """The section of a command and of its subcommands."""
    yield from (f"## {name}", "", f"{about[:1].upper()}{about[1:]}.", "")
    groups = [action for action in one._actions if isinstance(action, argparse._SubParsersAction)]
    if isinstance(one, parser.OptionParser):
        yield from table("option | default | meaning", options(one.cls, one.positionals))
    else:
        yield from table("argument | meaning", flags(one))
    for group in groups:
        helps = {choice.dest: flat(choice.help or "").rstrip(".") for choice in group._choices_actions}
        rows = {word: list(flags(sub)) for word, sub in group.choices.items()}
        uses = collections.Counter(row for each in rows.values() for row in each)
        common = [row for row in uses if uses[row] >= max(3, len(rows) / 2)]
        yield from table("argument of most subcommands | meaning", common)
        for word, each in rows.items():
            yield from (f"### {name} {word}", "", f"{helps[word][:1].upper()}{helps[word][1:]}.", "")
            yield from table("argument | meaning", (row for row in each if row not in common))


def command_line() -> Iterator[str]:
    yield from (
        "# Command line",
        "",
        "`hvdtrain COMMAND --help` prints the same with examples. Options of training runs:",
    )
    yield from ("[Options](options.md).", "")
    for words, (about, command) in cli.COMMANDS.items():
        yield from commands(f"hvdtrain {' '.join(words)}", command.parser(), about)


def training_options() -> Iterator[str]:
    yield from ("# Options", "", "Options of every workload.")
    yield "`--batch-size 64` is also the variable `HVDTRAIN_BATCH_SIZE=64`, and the key `batch_size = 64` of a"
    yield from ("`--config` file. Precedence: flags, then the file, then variables, then defaults.", "")
    for title, fields in parser._groups(TrainConfig).items():
        names = {field.name for field in fields}
        yield from (f"## {title.capitalize()}", "")
        others = [field.name for field in dataclasses.fields(TrainConfig) if field.name not in names]
        yield from table("option | default | meaning", options(TrainConfig, others))
    shared = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    known = cli.commands("train")
    for workload in WORKLOADS:
        cls = known[("train", workload)][1].parser().cls  # type: ignore[attr-defined]
        same = [field.name for field in dataclasses.fields(cls) if shared.get(field.name, ...) == field.default]
        yield from (f"## {workload}", "", f"`python -m hvdtrain.{workload}` also has, or has with another default:", "")
        yield from table("option | default | meaning", options(cls, same))


def all_strategies() -> Iterator[str]:
    yield from (
        "# Strategies",
        "",
        "`--strategy PRESET`, or `ALGORITHM[:KEY=VALUE,...][+REDUCER[:KEY=VALUE,...]]`, or a reducer alone.",
    )
    yield "`hvdtrain strategies` prints this page, and `--strategy help` the cost for your model. Which one to use:"
    yield from ("[Choose a strategy](../guides/choose-a-strategy.md).", "")
    yield from ("## Presets", "", "Records contain the strategy. Scripts get that of Adam.", "")
    for optimizer, family in presets.FAMILIES.items():
        yield from (f"With {optimizer}. Measured on four hosts of half a core: {family.model}.", "")
        rows = ((code(name), code(one.strategy), *one[1:]) for name, one in family.presets.items())
        yield from table("preset | strategy | time of a step | bytes (exact sums: 1) | learning", rows)
    for title, base in (("Reducers", Reducer), ("Algorithms", Strategy)):
        yield from (f"## {title}", "")
        classes = {name: registry.lookup(name) for name in registry.names(base)}
        modules = [cls.__module__ for cls in classes.values()]
        for name, cls in classes.items():
            alone = modules.count(cls.__module__) == 1
            yield from (f"### {name}", "", first_paragraph((sys.modules[cls.__module__] if alone else cls).__doc__), "")
            hints, docs = get_type_hints(cls.Settings), constraints.field_docs(cls.Settings)
            yield from table(
                "setting | value | default | meaning",
                (
                    (
                        code(field.name),
                        constraints.kind(field, hints[field.name]).replace("<", "&lt;"),
                        code(format_value(field.default)),
                        flat(docs[field.name]),
                    )
                    for field in dataclasses.fields(cls.Settings)
                ),
            )


def sweep_keys() -> Iterator[str]:
    parts = {
        "At the top of the file": sweep.TOP,
        "[cluster]": sweep.CLUSTER,
        "[[grid]] and [defaults]": sweep.SETTINGS,
        "[[grid]] only": sweep.GRID,
    }
    for title, keys in parts.items():
        yield from (f"### {title}".replace("[", "\\[").replace("]", "\\]"), "")
        yield from table("key | meaning", ((code(key), flat(hint.__metadata__[-1])) for key, hint in keys.items()))
    yield from ("### Options that a sweep sets itself", "")
    yield from table("option | instead", ((code(key), flat(about)) for key, about in sweep.NEVER_FLAGS.items()))


def result_columns() -> Iterator[str]:
    yield from table(
        "column | unit | meaning", ((code(name), one.base, flat(one.meaning)) for name, one in columns.RUNS.items())
    )


PAGES = {
    "command-line": command_line,
    "options": training_options,
    "strategies": all_strategies,
}
SECTIONS = {"sweeps": sweep_keys, "reports": result_columns}
NOTE = "<!-- type: reference; generated by tools/docs_reference.py -->"
BEGIN, END = "<!-- generated: tools/docs_reference.py -->", "<!-- end -->"


def pages() -> dict[Path, str]:
    """Path -> text of each page that is generated, or has a generated section between BEGIN and END."""
    texts = {ROOT / "docs" / "reference" / f"{name}.md": "\n".join([*page(), NOTE, ""]) for name, page in PAGES.items()}
    for name, section in SECTIONS.items():
        path = ROOT / "docs" / "guides" / f"{name}.md"
        before, _, rest = path.read_text().partition(BEGIN)
        texts[path] = "\n".join([before + BEGIN, "", *section(), END]) + rest.partition(END)[2]
    return texts


def main() -> int:
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    if "--check" not in sys.argv:
        for path, text in stale.items():
            path.write_text(text)
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} is stale; hint: run python tools/docs_reference.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
