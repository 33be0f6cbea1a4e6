"""Is a JSON value one of our records? Every field's type and bounds, fast enough for millions of lines."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, get_args

from hvdtrain.records.types import READ, RECORDS, SCHEMA, Record, Saved, Step
from hvdtrain.records.version1 import brought_up
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

_LARGEST = 1e18
"""Of any count, size or time; what is larger would only spoil sums"""

_Check = tuple[str, bool, frozenset[type], float, float, frozenset[type]]
"""A field's name, whether it is required, its types, least and greatest number, and the types of its items if a list
or dict"""


_TYPES: dict[str, set[type]] = {kind.__name__: {kind} for kind in (int, str, bool, list, dict)}
_TYPES |= {"float": {int, float}, "None": {type(None)}}


def _types(annotation: str) -> frozenset[type]:
    """The Python types that JSON values of that annotation have; `bool` is no number."""
    return frozenset().union(*(_TYPES[part.partition("[")[0]] for part in annotation.split(" | ")))


def _check(field: dataclasses.Field[Any]) -> _Check:
    annotation = str(field.type)
    items = annotation.partition("[")[2].removesuffix("]")
    if annotation.startswith("dict"):
        items = items.partition(", ")[2]
    outer = annotation.partition("[")[0] if items else annotation
    signed = "loss" in field.name or "scores" in field.name or field.name == "rate_off_percent"
    most = sys.float_info.max if "loss" in field.name else _LARGEST
    return (
        field.name,
        field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        _types(outer),
        -most if signed else 0.0,
        most,
        frozenset() if items in ("", "Any") else _types(items),
    )


_CHECKS: dict[type, list[_Check]] = {
    cls: [_check(field) for field in dataclasses.fields(cls)] for cls in get_args(Record)
}
_NUMBERS = frozenset({int, float})
_SHAPES: dict[tuple[Any, ...], list[tuple[str, float, float]]] = {}
"""Keys and types of flat records that were right -> the bounds of their numbers: what is left to check of the next"""


def _wrong(value: Any, types: frozenset[type], least: float, most: float) -> bool:
    kind = type(value)
    return kind not in types or (kind in _NUMBERS and not least <= value <= most)  # a NaN is not between


def checked(value: Any) -> tuple[type[Record], dict[str, Any]]:
    """The type of the record that `value` is, and its value in this version; raises ValueError that names the field if
    it is none.

    Every field is checked: types, finite numbers, nothing negative but losses and scores.
    """
    name = value.get("type") if isinstance(value, dict) else None
    cls = RECORDS.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"not a record of {SCHEMA}; known types: {', '.join(RECORDS)}")
    shape = (name, *value, *map(type, value.values()))
    known = _SHAPES.get(shape)
    if known is not None and all(least <= value[field] <= most for field, least, most in known):
        return cls, value
    value = brought_up(value)
    for field, required, types, least, most, items in _CHECKS[cls]:
        if field not in value:
            if required:
                raise ValueError(f"{cls.type} record without {field!r}")
            continue
        found = value[field]
        wrong = _wrong(found, types, least, most)
        if items and not wrong and found is not None:
            inner = found.values() if isinstance(found, dict) else found
            wrong = any(_wrong(item, items, least, most) for item in inner)
        if wrong:
            raise ValueError(
                f"{cls.type} record: {field} is {_short(found)}, not {_expected(types, least, most, items)}"
            )
        if field == "schema" and found not in READ:
            raise ValueError(f"written as {_short(found)}, and this hvdtrain reads {', '.join(READ)}; update hvdtrain")
    if cls in (Step, Saved) and len(_SHAPES) < 100:
        numbers = {check[0]: check[3:5] for check in _CHECKS[cls] if type(value.get(check[0])) in _NUMBERS}
        _SHAPES[shape] = [(field, *between) for field, between in numbers.items()]
    return cls, value


def _expected(types: frozenset[type], least: float, most: float, items: frozenset[type]) -> str:
    names = {str: "text", bool: "true or false", list: "a list", dict: "an object", type(None): "null"}
    number = "a number" if float in types else "a whole number"
    bounds = "" if least < 0 else " of 0 or more"
    words = [number + bounds] if types & _NUMBERS else []
    words += [name for kind, name in names.items() if kind in types]
    return " or ".join(words) + (f" of {_expected(items, least, most, frozenset())}" if items else "")


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def from_json(value: Any, where: str) -> Any:
    """The record that `value` describes; raises Failure (65) naming `where` if it is none. Unknown keys are ignored."""
    try:
        return make(*checked(value))
    except ValueError as error:
        raise Failure(f"{where}: {error}", exits.BAD_DATA) from error


def make(cls: type[Record], value: dict[str, Any]) -> Any:
    """The record of a value that `checked` has passed."""
    return cls(**{name: value[name] for name, *_ in _CHECKS[cls] if name in value})
