"""Published figures that ours are printed beside: one JSON file per study in this folder, or one that the user names.

A file has a source, and rows; each row names an environment, says with an expression of `where` which of our groups
it belongs to, and gives what was published of it. What a study did not give is absent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.results.groups import Group, fact_kinds, is_missing
from hvdtrain.results.table import Column, Table
from hvdtrain.results.where import Where
from hvdtrain.system import exits, files
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure

FOLDER = Path(__file__).parent
SCHEMA = "hvdtrain/reference/1"
FIGURES = (
    *("energy_j", "edp", "edp_with_idle", "speedup", "speedup_end_to_end"),
    *("efficiency", "efficiency_end_to_end", "test_accuracy"),
)

Figure = tuple[str, str, Column]


@dataclasses.dataclass(frozen=True)
class Reference:
    """One study. `rows` are the published figures, each with the test that says which group it belongs to."""

    name: str
    source: str
    baseline: str
    """The environment that its normalised figures are relative to"""
    sweep: str | None
    """The file of launch/sweeps/ that runs what it ran"""
    rows: list[tuple[Where, dict[str, Any]]]

    def row(self, group: Group) -> dict[str, Any]:
        """The study's figures for the environment that the group ran in; empty if it has none."""
        return next((figures for where, figures in self.rows if where.test(group.facts)), {})

    def beside(self, name: str, figures: Sequence[Figure], ours: Sequence[tuple[Group, dict[str, Any]]]) -> Table:
        """Our figures beside those published, for the groups that ran in one of the study's environments.

        `ours` are groups with their cells; a figure is (key of our cell, key there, column). If there is none, the
        published figures stand alone, with what to run.
        """
        rows: list[dict[str, Any]] = []
        for group, cells in ours:
            if not (there := self.row(group)):
                continue
            row = {"environment": there["environment"], "strategy": group.key["strategy"]}
            for mine, theirs, _ in figures:
                row |= {mine: cells.get(mine), f"published_{theirs}": there.get(theirs)}
            rows.append(row)
        notes = [f"theirs: {self.source}; relative to {self.baseline}. Another machine and model: compare ratios"]
        if not rows:
            rows = [
                {"environment": there["environment"]} | {f"published_{key}": there.get(key) for _, key, _ in figures}
                for _, there in self.rows
            ]
            makes = f"`hvdtrain sweep {self.sweep}`" if self.sweep else "runs in these environments"
            notes.append(
                f"ours: none of these runs is in an environment of {self.name}; {makes} (power: --monitor power, on a "
                "machine with sensors: `hvdtrain monitors`), then this command again, put ours beside"
            )
        columns = [Column("environment", "environment"), Column("strategy", "strategy")]
        for mine, theirs, column in figures:
            columns.append(dataclasses.replace(column, key=mine, label=f"{column.label}: ours"))
            columns.append(dataclasses.replace(column, key=f"published_{theirs}", label="theirs"))
        return Table(f"{name}_reference", f"Beside {self.name}", columns, rows, notes, spare=("strategy",))


def known() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> Reference:
    """A study by its name, or the file of that name. Raises Failure (2, 65, 74, 77)."""
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not name.endswith(".json") and name not in known():
        hint = near(name, known())
        raise Failure(
            f"--reference {name}: unknown{hint}; known: {', '.join(known())}, or give a .json file", exits.USAGE
        )
    with records.open_plain(path) as stream:
        text = stream.read(records.LONGEST_DOCUMENT_BYTES)
    try:
        document = files.from_json(text)
    except ValueError as error:
        raise Failure(f"{path}:{getattr(error, 'lineno', 1)}: no JSON ({error})", exits.BAD_DATA) from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise Failure(f"{path}:1: not a {SCHEMA} document; see {FOLDER / 'cruz2021.json'}", exits.BAD_DATA)
    texts: dict[str, Any] = {key: document.get(key) for key in ("name", "source", "baseline")}
    rows = document.get("rows")
    if not all(isinstance(text, str) for text in texts.values()) or not isinstance(rows, list):
        raise Failure(f"{path}:1: name, source and baseline must be text, and rows a list", exits.BAD_DATA)
    made = [_row(path, number, row) for number, row in enumerate(rows, start=1)]
    sweep = document.get("sweep")
    return Reference(**texts, sweep=sweep if isinstance(sweep, str) else None, rows=made)


def _row(path: Path, number: int, row: Any) -> tuple[Where, dict[str, Any]]:
    where = f"{path}: row {number}"
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("environment", "match")):
        raise Failure(f"{where}: needs the texts environment and match", exits.BAD_DATA)
    for key in FIGURES:
        value = row.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or is_missing(value)):
            raise Failure(f"{where}: {key} is no number", exits.BAD_DATA)
    return Where(row["match"], fact_kinds(), option=where), row
