"""List the data sets that the workloads know: contents, licence, source and how to get them.

examples:
  hvdtrain data list
  hvdtrain data list --json

"""

from __future__ import annotations

import importlib.util
import json
import shutil
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.data import SHIPPED
from hvdtrain.system import exits, files
from hvdtrain.system.arguments import Parser

SCHEMA = "hvdtrain/data/1"
OWN = "bring your own; nothing is downloaded"


@dataclass(frozen=True, kw_only=True)
class Known:
    """A data set, or a kind of data set."""

    name: str
    """Value of --data"""
    workload: str
    holds: str
    """Contents and size"""
    licence: str = "yours"
    source: str = "yours"
    get: str = OWN
    """Command that installs or prepares the data set"""
    needs: str | None = None
    """Python package or folder that must exist; None if nothing is needed or the user brings the data"""

    @property
    def here(self) -> bool | None:
        """Whether it can be used now; None for data that users bring."""
        if self.get == OWN or self.get.startswith("hvdtrain data"):
            return None
        if self.needs is None:
            return True
        return Path(self.needs).is_dir() if "/" in self.needs else importlib.util.find_spec(self.needs) is not None


DATA = tuple(Known(**entry) for entry in files.from_toml((SHIPPED / "list.toml").read_bytes())["data"])


def how_to_get(name: str) -> str:
    return next(known.get for known in DATA if known.name == name)


def parser() -> Parser:
    one = Parser(prog="hvdtrain data list", description=__doc__)
    one.add_argument("--json", action="store_true", help="print one JSON document")
    return one


def main(arguments: list[str]) -> int:
    """Prints the list; returns the exit code."""
    if parser().parse_args(arguments).json:
        print(json.dumps({"schema": SCHEMA, "data": [{**asdict(known), "here": known.here} for known in DATA]}))
        return exits.OK
    width = min(shutil.get_terminal_size().columns, 120)
    for known in DATA:
        print(f"{known.workload} --data {known.name}{'' if known.here is not False else ' (not here)'}")
        lines = {"holds": known.holds, "licence": known.licence, "source": known.source, "get it": known.get}
        for name, text in lines.items():
            print(textwrap.fill(text, width, initial_indent=f"  {name:<9}", subsequent_indent=" " * 11))
    return exits.OK
