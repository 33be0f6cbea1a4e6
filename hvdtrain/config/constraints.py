"""Bounds of the fields of a settings class: declared with the field, checked at creation, shown in help."""

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
"""The largest whole number of a setting; up to here floats and JSON readers represent whole numbers exactly"""
SIGNS = {
    "least": (">=", float.__ge__),
    "above": (">", float.__gt__),
    "most": ("<=", float.__le__),
    "below": ("<", float.__lt__),
}


def bounded(default: Any, *, example: Any = None, **bounds: float) -> Any:
    """Return a dataclass field for a finite number within `bounds`: least, above, most, below.

    `example` is shown in help.
    """
    return dataclasses.field(default=default, metadata={"bounds": bounds, "example": example})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Settings whose numbers are within their bounds. Raises Failure (78) if one is not."""

    def __post_init__(self) -> None:
        if message := problem(self):
            raise Failure(message, exits.BAD_CONFIG)


def problem(settings: Any, name: Any = str) -> str | None:
    """Return the first problem, `NAME is VALUE; hint: give KIND`, or None if all fields are within their bounds.

    `name` turns a field's name into the name that users type. Optional fields that are None are skipped.
    """
    types_ = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        bounds, value = field.metadata.get("bounds"), getattr(settings, field.name)
        if get_origin(types_[field.name]) is Literal and value not in get_args(types_[field.name]):
            return f"{name(field.name)} is {value}; hint: {wanted(field, types_[field.name])}"
        if bounds is None or value is None:
            continue
        if isinstance(value, int) and abs(value) > LARGEST:
            return f"{name(field.name)} is too large; hint: give a whole number of at most {LARGEST:,}"
        if not (math.isfinite(value) and all(SIGNS[key][1](float(value), bounds[key]) for key in bounds)):
            return f"{name(field.name)} is {value}; hint: {wanted(field, types_[field.name])}"
    return None


def counts(text: str, separator: str = ",") -> tuple[int, ...]:
    """Return the numbers of `30,10`, each from 1 to 999,999,999; empty for any other text."""
    parts = [part.strip() for part in text.split(separator)]
    return tuple(map(int, parts)) if all(re.fullmatch(r"0{0,8}[1-9]\d{0,8}", part, re.ASCII) for part in parts) else ()


def wanted(field: dataclasses.Field[Any], hint: Any) -> str:
    """Return `give a whole number >= 1`, which describes valid values of a field."""
    return f"give {'' if get_origin(hint) is Literal else 'a '}{kind(field, hint)}"


def kind(field: dataclasses.Field[Any], hint: Any) -> str:
    """Return `whole number >= 1`, which describes the values of a field."""
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
    """Return the docstring below each field, including fields of base classes."""
    docs: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(part):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body  # type: ignore[attr-defined]
        for line, following in itertools.pairwise(body):
            if isinstance(line, ast.AnnAssign) and isinstance(following, ast.Expr):
                docs[line.target.id] = ast.literal_eval(following.value)  # type: ignore[union-attr]
    return docs
