"""Rows of a CSV file, features first and the class last: read in blocks, so that a file may be larger than memory.

How the file is written is found out from its head: separator (comma, semicolon, tab or spaces), decimal point or comma,
and whether the first line names the columns, which it does if none of its features is a number. (scikit-learn's own
files begin with the number of rows, that of features, and the names of classes 0, 1 ...) UTF-8, with or without
a byte order mark; lines end in LF or CRLF; empty lines are skipped; a field may stand in double quotes.

What is wrong is told as file:line:column, both counted from 1.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, Failure

Missing = Literal["refuse", "mean", "drop"]
Line = tuple[int, str]

BLOCK_BYTES = 1 << 18  # small enough that a block's numbers stay in the processor's cache
LINE_BYTES = 16 * files.MIB
MOST_COLUMNS = 100_000
LARGEST = 1e150  # whose square is finite
HEAD_BYTES = 1 << 14
MISSING = {"", "?", "na", "n/a", "nan", "null", "none"}
NO_CLASS = {"", "?"}
SWAPPED = str.maketrans(",.", ".,")
SPACES = " "
KINDS = [(";", "."), (";", ","), ("\t", "."), ("\t", ","), (",", "."), (SPACES, "."), (SPACES, ",")]
"""Separators and decimal signs that go together; of two that fit equally well the first is taken"""
NAMES = {";": "semicolons", "\t": "tabs", ",": "commas", SPACES: "spaces"}


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a file is written."""

    separator: str
    decimal: str
    columns: int
    """The class included, where there is one"""
    names: tuple[str, ...] | None
    """Of all columns, if the first line has them"""
    first: int
    """The first line that holds a row"""
    classes: tuple[str, ...] = ()
    """Names that classes 0, 1 ... have, from a first line as scikit-learn's own files have it"""

    def __str__(self) -> str:
        point = "decimal commas" if self.decimal == "," else "decimal points"
        return f"separated by {NAMES[self.separator]}, {point}, {'a' if self.names else 'no'} header"


@dataclass(frozen=True)
class Block:
    """Some rows in a row."""

    lines: NDArray[np.int64]
    """(n,), where each stands in the file"""
    features: NDArray[np.float64]
    """(n, features); NaN where a value is missing"""
    classes: list[str]
    """n names; empty ones if features alone are read"""


def form(path: Path) -> Form:
    """Raises Failure (65, 77) for a file that is no such table."""
    head = list(_block(_lines(path), HEAD_BYTES, least=2))
    if not head:
        raise Failure(f"{path}: empty; give rows of features and their class", BAD_DATA)
    for number, text in head:
        if (most := max(map(text.count, NAMES)) + 1) > MOST_COLUMNS:
            told = f"{path}:{number}: {most:,} columns are more than the {MOST_COLUMNS:,} that are read"
            raise Failure(f"{told}; keep the features that matter", BAD_DATA)
    separator, decimal = max(KINDS, key=functools.partial(_fit, [text for _, text in head]))
    (first, text), *_ = head
    fields = _split(path, first, text, separator)
    texts = [not _is_number(each, decimal) for each in fields]
    found = functools.partial(Form, separator=separator, decimal=decimal)
    classes = tuple(fields[2:])
    if len(head) > 1 and len(classes) > 1 and fields[0].isdecimal() and all(texts[2:]):
        row = _split(path, *head[1], separator)  # scikit-learn's own files begin so; their classes number the names
        if fields[1] == str(len(row) - 1) and row[-1] in map(str, range(len(classes))):
            return found(columns=len(row), names=None, first=first + 1, classes=classes)
    features = max(1, len(fields) - 1)
    named = all(texts[:features]) and not MISSING.issuperset(each.lower() for each in fields[:features])
    if named and len(set(fields)) < len(fields):
        column, name = next((n, name) for n, name in enumerate(fields) if name in fields[:n])
        raise Failure(f"{path}:{first}:{column + 1}: two columns are named {name!r}; rename one", BAD_DATA)
    return found(columns=len(fields), names=tuple(fields) if named else None, first=first + named)


def rows(path: Path, form: Form, missing: Missing, *, features: int | None = None) -> Iterator[Block]:
    """The rows of a file of this form, whose last column is the class; or as many `features` of each alone, whatever
    stands behind them. Those that lack a value are kept with `mean` and left out with `drop`. Raises Failure (65, 77)
    for anything that is no such row."""
    lines = (line for line in _lines(path) if line[0] >= form.first)
    count = features or form.columns - 1
    by_number = {str(number): name for number, name in enumerate(form.classes)}
    while some := list(_block(lines)):
        numbers = np.array([number for number, _ in some])
        found = _quick(some, form, count)
        values, names = _careful(path, some, form, count) if found is None else found
        if features:
            names = [""] * len(names)
        names = [by_number.get(name, name) for name in names]
        lacks = np.isnan(values)
        for row, column in _first(lacks) if missing == "refuse" else ():
            what = "no value; give one, or train with --missing mean or drop"
            raise Failure(f"{path}:{numbers[row]}:{column + 1}: {what}", BAD_DATA)
        unknown = np.array([not features and name in NO_CLASS for name in names])
        for (row,) in _first(unknown) if missing != "drop" else ():
            what = "no class; give it one, or train with --missing drop"
            raise Failure(f"{path}:{numbers[row]}:{form.columns}: {what}", BAD_DATA)
        if missing == "drop":
            whole = ~(lacks.any(axis=1) | unknown)
            numbers, values = numbers[whole], values[whole]
            names = list(itertools.compress(names, whole))
        yield Block(numbers, values, names)


def _first(wrong: NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """The place of the first True, if there is one."""
    return [tuple(map(int, np.argwhere(wrong)[0]))] if wrong.any() else []


def _block(lines: Iterator[Line], most_bytes: int = BLOCK_BYTES, least: int = 1) -> Iterator[Line]:
    """The next lines, of so many bytes or a little more in all, and at least so many."""
    size = 0
    for count, line in enumerate(lines, start=1):
        yield line
        size += len(line[1])
        if size > most_bytes and count >= least:
            return


def _quick(lines: list[Line], form: Form, count: int) -> tuple[NDArray[np.float64], list[str]] | None:
    """Features and last fields by NumPy's own reader; None for what it does not take, which `_careful` looks into."""
    if form.separator == SPACES:
        texts = [" ".join(text.split()) for _, text in lines]
    else:
        texts = [text for _, text in lines]
    if any(text.count(form.separator) != form.columns - 1 or '"' in text for text in texts):
        return None
    names = [text.rpartition(form.separator)[2].strip() for text in texts]
    if form.decimal == ",":
        texts = [text.translate(SWAPPED) for text in texts]  # so that 1.234 is no number here either
    try:
        features = np.loadtxt(texts, delimiter=form.separator, comments=None, usecols=range(count), ndmin=2)
    except ValueError:
        return None
    return None if (np.abs(features) > LARGEST).any() else (features, names)


def _careful(path: Path, lines: list[Line], form: Form, count: int) -> tuple[NDArray[np.float64], list[str]]:
    """The same field by field. Raises Failure (65) at the first one that is wrong."""
    features, names = np.empty((len(lines), count)), []
    for row, (line, text) in enumerate(lines):
        fields = _split(path, line, text, form.separator)
        if len(fields) != form.columns:
            told = f"{path}:{line}: {len(fields)} fields, and the first line has {form.columns}"
            raise Failure(f"{told} ({form}); give all rows as many", BAD_DATA)
        for column, field in enumerate(fields[:count]):
            word = field.strip().lower()
            if word not in MISSING and not _is_number(word, form.decimal):
                hint = f"the class stands last, numbers have decimal {'commas' if form.decimal == ',' else 'points'}"
                infinite = word.lstrip("+-").startswith("inf")
                told = "is infinite" if infinite else f"is no number ({hint})"
                raise Failure(f"{path}:{line}:{column + 1}: {field:.40} {told}", BAD_DATA)
            value = math.nan if word in MISSING else float(word.replace(",", "."))
            if abs(value) > LARGEST:
                raise Failure(f"{path}:{line}:{column + 1}: {field:.40} is beyond {LARGEST:g}", BAD_DATA)
            features[row, column] = value
        names.append(fields[-1].strip())
    return features, names


_POINT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_COMMA = re.compile(_POINT.pattern.replace(r"\.", ","), re.ASCII | re.IGNORECASE)


def _is_number(word: str, decimal: str) -> bool:
    return (_COMMA if decimal == "," else _POINT).fullmatch(word.strip()) is not None


def _fit(head: list[str], kind: tuple[str, str]) -> tuple[float, bool, int]:
    """How well a separator and a decimal sign suit: the share of features that are numbers, whether the first line has
    as many fields as the last, and how many that are."""
    rows = []
    for text in head:
        with contextlib.suppress(csv.Error):
            rows.append(_fields(text, kind[0]))
    features = [field.strip() for row in rows[len(rows) > 1 :] for field in row[:-1]]
    good = sum(field.lower() in MISSING or _is_number(field, kind[1]) for field in features)
    first, last = (len(rows[0]), len(rows[-1])) if rows else (0, 0)
    return good / max(1, len(features)), first == last > 1, last


def _fields(text: str, separator: str) -> list[str]:
    """Raises csv.Error for quotes that do not match."""
    if separator == SPACES:
        text = " ".join(text.split())
    if '"' not in text:
        return text.split(separator)
    return next(csv.reader([text], delimiter=separator, skipinitialspace=True, strict=True))


def _split(path: Path, line: int, text: str, separator: str) -> list[str]:
    try:
        return [field.strip() for field in _fields(text, separator)]
    except csv.Error as error:
        raise Failure(f"{path}:{line}: quotes that do not match ({error}); close each on its line", BAD_DATA) from None


def _lines(path: Path) -> Iterator[Line]:
    """Number and text of every line that is not empty."""
    try:
        with files.open_plain(path) as file:
            number, rest = 1, file.read(BLOCK_BYTES).removeprefix(codecs.BOM_UTF8)
            more = True
            while more or rest:
                if b"\0" in rest:
                    raise Failure(f"{path}: a binary file, or one in UTF-16; give a CSV file in UTF-8", BAD_DATA)
                *whole, rest = rest.split(b"\n") if more else (rest, b"")
                if len(rest) > LINE_BYTES:
                    raise Failure(
                        f"{path}:{number + len(whole)}: a line of more than {LINE_BYTES >> 20} MiB; is it a CSV file?",
                        BAD_DATA,
                    )
                for line in whole:
                    if (text := _text(path, number, line)).strip(" "):
                        yield number, text
                    number += 1
                more_bytes = file.read(BLOCK_BYTES)
                more, rest = bool(more_bytes), rest + more_bytes
    except OSError as error:
        raise files.refused(path, error, BAD_DATA, "give a CSV file") from None


def _text(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode().strip("\r\n")
    except UnicodeDecodeError as error:
        told = f"{path}:{number}: byte {line[error.start]:#04x} is not UTF-8"
        raise Failure(f"{told}; convert it, e.g. with iconv -f latin1 -t utf-8", BAD_DATA) from None
