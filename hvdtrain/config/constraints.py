"""Values of a settings class and their bounds: declared with the field, checked when made, shown in help."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import re
import textwrap
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

LARGEST = 1 << 53
"""The largest whole number of a setting: up to here floats and every reader of JSON keep whole numbers exactly"""
SIGNS = {
    "least": (">=", float.__ge__),
    "above": (">", float.__gt__),
    "most": ("<=", float.__le__),
    "below": ("<", float.__lt__),
}


def bounded(default: Any, *, example: Any = None, **bounds: float) -> Any:
    """A dataclass field for a finite number within `bounds`: least, above, most, below. `example` is shown in help."""
    return dataclasses.field(default=default, metadata={"bounds": bounds, "example": example})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Settings that cannot be made with a number out of its bounds: Failure (78)."""

    def __post_init__(self) -> None:
        if wrong := problem(self):
            raise Failure(wrong, exits.BAD_CONFIG)


def problem(settings: Any, name: Any = str) -> str | None:
    """What is wrong with the first field that is out of its bounds or is none of its choices (Literal), as `NAME is
    VALUE: give KIND`; None if none is.

    `name` makes what the user types of a field's name. A field that is None, an optional one, is left out.
    """
    types_ = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        bounds, value = field.metadata.get("bounds"), getattr(settings, field.name)
        if get_origin(types_[field.name]) is Literal and value not in get_args(types_[field.name]):
            return f"{name(field.name)} is {value}: {wanted(field, types_[field.name])}"
        if bounds is None or value is None:
            continue
        if isinstance(value, int) and abs(value) > LARGEST:
            return f"{name(field.name)}: give a whole number of at most {LARGEST:,}"
        if not (math.isfinite(value) and all(SIGNS[key][1](float(value), bounds[key]) for key in bounds)):
            return f"{name(field.name)} is {value}: {wanted(field, types_[field.name])}"
    return None


def counts(text: str, separator: str = ",") -> tuple[int, ...]:
    """The numbers of `30,10`, each from 1 to 999,999,999; none for any other text."""
    parts = [part.strip() for part in text.split(separator)]
    return tuple(map(int, parts)) if all(re.fullmatch(r"0{0,8}[1-9]\d{0,8}", part, re.ASCII) for part in parts) else ()


def wanted(field: dataclasses.Field[Any], hint: Any) -> str:
    """What to give for the field, in words: `give a whole number >= 1`."""
    return f"give {'' if get_origin(hint) is Literal else 'a '}{kind(field, hint)}"


def kind(field: dataclasses.Field[Any], hint: Any) -> str:
    """What a value of the field is, in words: `whole number >= 1`."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        *some, last = map(str, choices)
        return f"{', '.join(some)} or {last}"
    if origin in (Union, types.UnionType):
        return kind(field, next(each for each in choices if each is not type(None)))
    word = {int: "whole number", float: "number"}.get(hint, "text")
    limits = [f"{SIGNS[key][0]} {limit:g}" for key, limit in field.metadata.get("bounds", {}).items()]
    return " ".join([word, " and ".join(limits)]).strip()


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal under it, base classes included."""
    docs: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(part):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body  # type: ignore[attr-defined]
        for line, following in itertools.pairwise(body):
            if isinstance(line, ast.AnnAssign) and isinstance(following, ast.Expr):
                docs[line.target.id] = ast.literal_eval(following.value)  # type: ignore[union-attr]
    return docs
