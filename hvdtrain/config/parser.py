"""Turn an options dataclass into command line flags, environment variables and the keys of a TOML file.

A field `batch_size` is the flag `--batch-size`, the variable `HVDTRAIN_BATCH_SIZE` and the key `batch_size` of a
`--config FILE.toml`. Flags take precedence over the file, the file over variables, and variables over defaults. The
docstring below a field is its help: `--help` shows the first line, `--help NAME` all of it. If the class has `COMMON`,
`--help` shows only these options and those that a class without its own `COMMON` adds; `--help-all` shows all.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from hvdtrain.config import constraints
from hvdtrain.config.constraints import field_docs
from hvdtrain.system import exits, files
from hvdtrain.system.arguments import Parser, fitted, near
from hvdtrain.system.exits import Failure

C = TypeVar("C")
SHIPPED = Path(__file__).with_name("settings")
"""hvdtrain's own files for --config, which can be given by name"""
PREFIX = "HVDTRAIN_"
SWITCH = {"true": True, "false": False, "1": True, "0": False}
EPILOG = (
    "--help NAME explains an option in full. HVDTRAIN_BATCH_SIZE=64 sets --batch-size 64, too.\n"
    "Precedence: flags, then the file of --config, then variables, then defaults."
)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return PREFIX + name.upper()


class OptionParser(Parser):
    """A flag per field of an options class. Parsed values contain only the flags that were given."""

    def __init__(self, cls: type, *, prog: str, purpose: str, positionals: Sequence[str] = ()) -> None:
        super().__init__(
            prog=prog,
            usage=argparse.SUPPRESS,  # the help starts with the purpose
            description=purpose,
            epilog=EPILOG,
            argument_default=argparse.SUPPRESS,
            add_help=False,
        )
        self.cls, self.positionals = cls, positionals
        self.names = [field.name for field in dataclasses.fields(cls)]
        shown = {*getattr(cls, "COMMON", self.names), *(() if "COMMON" in vars(cls) else inspect.get_annotations(cls))}
        self.rare = [name for name in self.names if name not in shown]
        hints = get_type_hints(cls)
        self.add_argument("-h", "--help", nargs="?", const="")
        if self.rare:
            self.add_argument("--help-all", action="store_true")
        self.add_argument("--config", action="append")
        for field in dataclasses.fields(cls):
            _add(self, field, hints[field.name], positional=field.name in positionals)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        for number, word in enumerate(arguments):
            if word == "--help-all":
                self._help("all")
            if word.split("=")[0] in ("-h", "--help"):
                name = word.partition("=")[2] or "".join(arguments[number + 1 : number + 2])
                self._help(name.lstrip("-").replace("-", "_"))
        return super().parse_args(arguments, namespace)

    def _help(self, name: str) -> NoReturn:
        if name in self.names:
            print(f"{flag(name)}\n\n{inspect.cleandoc(field_docs(self.cls)[name])}")
        else:
            self.rare = [] if name == "all" else self.rare
            self.print_help()
        raise SystemExit(exits.OK)

    def format_help(self) -> str:
        """One line per flag, with its default; without rare ones."""
        docs, hints = field_docs(self.cls), get_type_hints(self.cls)
        lines = [(self.description or "").rstrip()]
        sections: dict[str, list[tuple[str, str]]] = {}
        for title, fields in _groups(self.cls).items():
            sections[title or "options"] = [
                (_usage(field, hints[field.name], field.name in self.positionals), _summary(field, docs, hints))
                for field in fields
                if field.name not in self.rare
            ]
        general = [("-h, --help [NAME]", "show this help, or all about one option")]
        if self.rare:
            general.append(("--help-all", f"show the other {len(self.rare)} options too"))
        general.append(("--config FILE", "TOML file with options, or the name of a study"))
        sections.setdefault("run" if "run" in sections else "options", []).extend(general)
        sections = {title: rows for title, rows in sections.items() if rows}
        left = max(len(usage) for rows in sections.values() for usage, _ in rows if len(usage) < 34)
        for title, rows in sections.items():
            lines += ["", f"{title}:"]
            for usage, summary in rows:
                if len(usage) > left:
                    lines.append(f"  {usage}  {summary}")
                else:
                    lines.append(f"  {usage:<{left}}  {summary}")
        return fitted("\n".join([*lines, "", self.epilog or "", ""]))

    def error(self, message: str) -> NoReturn:
        super().error(message.removeprefix("argument "))


def _add(parser: OptionParser, field: dataclasses.Field[Any], hint: Any, *, positional: bool) -> None:
    if positional:
        parser.add_argument(field.name, type=converter(field, hint))
    elif hint is bool and field.default is False:
        parser.add_argument(flag(field.name), action="store_true")
    else:
        optional_value: dict[str, Any] = {"nargs": "?", "const": True} if hint == bool | str else {}
        parser.add_argument(flag(field.name), type=converter(field, hint), **optional_value)


def _usage(field: dataclasses.Field[Any], hint: Any, positional: bool) -> str:
    if positional:
        return field.name
    if hint is bool and field.default is False:
        return flag(field.name)
    if get_origin(hint) is Literal:
        return f"{flag(field.name)} {'|'.join(get_args(hint))}"
    words = {bool: "true|false", bool | str: "[DIR]", int: "N", int | None: "N", float: "X", float | None: "X"}
    return f"{flag(field.name)} {words.get(hint, 'TEXT')}"


def _summary(field: dataclasses.Field[Any], docs: Mapping[str, str], hints: Mapping[str, Any]) -> str:
    """The first line of a field's documentation, and its default."""
    text = inspect.cleandoc(docs.get(field.name, "")).partition("\n")[0]
    default = field.default
    if default is dataclasses.MISSING or default is None or default is False or default == "":
        return text
    shown = f"{default:g}" if isinstance(default, float) else str(default).lower() if default is True else str(default)
    return f"{text} ({shown})"


def _groups(cls: type) -> dict[str, list[dataclasses.Field[Any]]]:
    """Fields by the title of their group in the help: `GROUP` of the class that declares them."""
    groups: dict[str, list[dataclasses.Field[Any]]] = {}
    for field in dataclasses.fields(cls):
        declared = next(base for base in reversed(cls.__mro__) if field.name in inspect.get_annotations(base))
        groups.setdefault(getattr(declared, "GROUP", ""), []).append(field)
    order = ("data", "model", "optimization", "communication", "run", "measurement")
    return dict(sorted(groups.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1))


def converter(field: dataclasses.Field[Any], hint: Any) -> Callable[[str], Any]:
    """Turns the text of a flag or a variable into a value. Raises argparse.ArgumentTypeError."""

    def convert(text: str) -> Any:
        if text == "null" and type(None) in get_args(hint):
            return None
        if bool in (hint, *get_args(hint)):
            value: Any = SWITCH.get(text.lower(), text)
            if type(value) is str and str not in get_args(hint):
                raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
            return value
        if get_origin(hint) is Literal:
            value = text
        else:
            kind = next((each for each in (get_args(hint) or (hint,)) if each in (int, float)), str)
            try:
                value = kind(text)
            except ValueError:
                raise argparse.ArgumentTypeError(f"{text!r} is not a {constraints.kind(field, hint)}") from None
        return _checked(field, hint, value)

    return convert


def _checked(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """A value of a file, a record or a converted text, if its type fits. Raises argparse.ArgumentTypeError."""
    allowed = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        if value in allowed and isinstance(value, str):
            return value
        choices = ", ".join(map(str, allowed))
        raise argparse.ArgumentTypeError(f"unknown value {value!r}{near(str(value), allowed)} (choose from {choices})")
    if type(value) is int and float in allowed:
        value = float(value)
    if type(value) not in allowed:
        raise argparse.ArgumentTypeError(f"{value!r} is not a {constraints.kind(field, hint)}")
    return value


def checked(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a file or a record by field name. Raises ValueError for a wrong type, KeyError for an unknown name."""
    fields, hints = {field.name: field for field in dataclasses.fields(cls)}, get_type_hints(cls)
    result = {}
    for name, value in values.items():
        try:
            result[name] = _checked(fields[name], hints[name], value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name}: {error}") from None
    return result


def parse(
    cls: type[C],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    purpose: str,
    positionals: Sequence[str] = (),
    earlier: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> C:
    """The options that flags, file, variables and defaults add up to.

    `earlier` gets these values and returns other defaults, those of a run that is resumed.

    Raises Failure (2) for a flag, key or value that is not accepted, Failure (78) for values that cannot be combined.
    """
    parser = OptionParser(cls, prog=prog, purpose=purpose, positionals=positionals)
    given = vars(parser.parse_args(argv))
    names = given.pop("config", []) or [value for name, value in os.environ.items() if name == PREFIX + "CONFIG"]
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    try:
        for field in fields:
            if (text := os.environ.get(variable(field.name))) is not None:
                values |= _from_variable(cls, field, text)
        for name in names:
            values |= from_file(cls, name)
    except ValueError as error:
        raise Failure(f"{error} (see `{prog} --help`)", exits.USAGE) from None
    values |= given
    if earlier is not None:
        defaults = {field.name: field.default for field in fields}
        values = {**earlier({**defaults, **values}), **values}
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in values:
            raise Failure(f"{flag(field.name)} is missing (see `{prog} --help`)", exits.USAGE)
    return cls(**values)


def _from_variable(cls: type, field: dataclasses.Field[Any], text: str) -> dict[str, Any]:
    try:
        return {field.name: converter(field, get_type_hints(cls)[field.name])(text)}
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{variable(field.name)}={text}: {error}") from None


def from_file(cls: type, name: str) -> dict[str, Any]:
    """The values of a TOML file. Raises ValueError for a key or value that is not accepted, Failure for the file."""
    try:
        table = files.from_toml(files.read(files.shipped(name, SHIPPED), files.SETTINGS_BYTES))
    except OSError as error:
        hint = f"give a TOML file, or one of {', '.join(sorted(path.stem for path in SHIPPED.glob('*.toml')))}"
        raise files.refused(f"--config {name}", error, exits.USAGE, hint) from error
    except ValueError as error:
        raise Failure(f"--config {name}: not a TOML file ({error})", exits.BAD_CONFIG) from error
    known = [field.name for field in dataclasses.fields(cls)]
    for key, value in table.items():
        if isinstance(value, dict):
            raise ValueError(
                f"--config {name}: tables such as [{key}] are not accepted; write the keys at the top level"
            )
        if key not in known:
            raise ValueError(f"--config {name}: unknown key {key!r}{near(key, known)}")
    try:
        return checked(cls, table)
    except ValueError as error:
        raise ValueError(f"--config {name}: {error}") from None


def misspelled_variables(cls: type) -> list[str]:
    """Variables that resemble an option of `cls`, each as `HVDTRAIN_EPOCH, did you mean HVDTRAIN_EPOCHS?`.

    Other workloads may have options that `cls` does not have, so a variable that resembles none is not reported.
    """
    names = {variable(field.name) for field in dataclasses.fields(cls)}
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in names)
    # Without the prefix, which makes all short names similar.
    known = [name.removeprefix(PREFIX) for name in names]
    similar = [(name, difflib.get_close_matches(name.removeprefix(PREFIX), known, 1, 0.8)) for name in unknown]
    return [f"{name}, did you mean {PREFIX}{matches[0]}?" for name, matches in similar if matches]
