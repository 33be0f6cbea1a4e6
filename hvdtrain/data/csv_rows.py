"""Read the rows of a CSV file, features first and the class last, in blocks, so the file may be larger than memory.

The format is detected from the start of the file: separator (comma, semicolon, tab, bar or spaces), decimal point or
comma, and whether the first line is a header. The encoding is UTF-8, with or without a byte order mark; lines end with
LF, CRLF or CR; fields may be in double quotes; the file may be compressed by gzip. A feature is a number, or `True` or
`False`, which are 1 and 0. Errors name file:line:column, counted from 1.

**A header** is a first line in which no feature is a number. A first line with numbers is data, as `5.1,3.5,setosa`,
unless its last field is the class of no other line and
  - its numbers are 0, 1, 2 and so on, as pandas names the columns of an array, or
  - its last field is text, and no two of its numbers are equal.

**Left out** are empty rows, empty columns at the end, the unnamed first columns of a header (pandas' index), and what
Excel users write above the table: a line `sep=;`, and titles, which are lines with text in their first field only.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import gzip
import io
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, Failure

Missing = Literal["refuse", "mean", "drop"]
Line = tuple[int, str]
"""Line number and text"""

BLOCK_BYTES = 1 << 18  # small enough that the numbers of a block stay in the processor's cache
LINE_BYTES = 16 * files.MIB
MOST_COLUMNS = 100_000
LARGEST = 1e150  # its square is finite
HEAD_BYTES = 1 << 14
MISSING = {"", "?", "na", "n/a", "nan", "null", "none"}
NO_CLASS = {"", "?"}
SWAPPED = str.maketrans(",.", ".,")
SPACES = " "
KINDS = [(";", "."), (";", ","), ("\t", "."), ("\t", ","), ("|", "."), (",", "."), (SPACES, "."), (SPACES, ",")]
"""Pairs of separator and decimal mark; if two fit equally well, the first one wins"""
NAMES = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas", SPACES: "spaces"}
EMPTY = ' "' + "".join(NAMES)
"""Characters of a line without values"""
TRUTH = {"true": 1.0, "false": 0.0}
"""How pandas writes the columns of get_dummies -> number"""
UNNAMED = re.compile(r"(Unnamed: \d+(\.\d+)*)?")
"""Name of a column that was pandas' index when the file was written"""


@dataclass(frozen=True, kw_only=True)
class Form:
    """Format of a file."""

    separator: str
    decimal: str
    columns: int
    """Number of columns that are read, including the class"""
    skipped: int
    """Number of columns before them that are left out"""
    names: tuple[str, ...] | None
    """Names of all columns, if the file has a header"""
    first: int
    """Line number of the first row"""
    titles: int
    """Number of lines above the table that are left out"""

    def __str__(self) -> str:
        point = "decimal commas" if self.decimal == "," else "decimal points"
        left_out = ", the unnamed first column left out" if self.skipped else ""
        left_out += ", the title above it left out" if self.titles else ""
        return f"separated by {NAMES[self.separator]}, {point}, {'a' if self.names else 'no'} header{left_out}"


@dataclass(frozen=True)
class Block:
    """Consecutive rows."""

    lines: NDArray[np.int64]
    """(n,), line number of each row"""
    features: NDArray[np.float64]
    """(n, features); NaN for a missing value"""
    classes: list[str]
    """n class names; empty strings if only features are read"""


def detect(path: Path, known: Sequence[str] = ()) -> Form:
    """The format of a file. A first line that ends with a `known` class is data.

    Raises Failure (65, 77) if the file is not a table.
    """
    head = list(_block(_lines(path), HEAD_BYTES, least=4))
    if stated := re.fullmatch(r'"?sep=(.)"?', head[0][1]) if head else None:
        head = head[1:]
    if not head:
        raise Failure(f"{path}: the file is empty; hint: give rows of features and their class", BAD_DATA)
    for number, text in head:
        if (most := max(map(text.count, NAMES)) + 1) > MOST_COLUMNS:
            message = f"{path}:{number}: {most:,} columns, more than the limit of {MOST_COLUMNS:,}"
            raise Failure(f"{message}; hint: keep only the features that matter", BAD_DATA)
    if not (kinds := [kind for kind in KINDS if not stated or kind[0] == stated[1]]):
        raise Failure(f"{path}:1: the separator {stated and stated[1]!r} is unknown; hint: use semicolons", BAD_DATA)
    separator, decimal = max(kinds, key=functools.partial(_fit, head))
    _split(path, *head[0], separator)  # raises if its quotes are unbalanced
    rows, titles = _table(head, separator)
    first, fields = rows[0]
    skipped = next((column for column, field in enumerate(fields) if not UNNAMED.fullmatch(field)), 0)
    skipped = skipped if skipped < len(fields) - 1 else 0
    later = functools.partial(_ends, path, separator, after=rows[-1][0])
    if not (has_header := _is_header([row[skipped:] for _, row in rows], decimal, known, later)):
        skipped = 0
    names = fields[skipped:]
    if has_header and len(set(names)) < len(names):
        column, name = next((n, name) for n, name in enumerate(names) if name in names[:n])
        message = f"{path}:{first}:{skipped + column + 1}: two columns are named {name!r}"
        raise Failure(f"{message}; hint: rename one of them", BAD_DATA)
    return Form(
        separator=separator,
        decimal=decimal,
        columns=len(names),
        skipped=skipped,
        names=tuple(names) if has_header else None,
        first=first + has_header,
        titles=titles,
    )


def _table(head: Sequence[Line], separator: str) -> tuple[list[tuple[int, list[str]]], int]:
    """The first rows with their line numbers, without empty columns at the end; and the number of titles above them."""
    rows, used = [], []
    for number, text in head:
        with contextlib.suppress(csv.Error):
            rows.append((number, [field.strip() for field in _fields(text, separator)]))
            used.append(max((n for n, field in enumerate(rows[-1][1], start=1) if field), default=0))
    titles = 0
    while titles + 1 < len(rows) and used[titles] == 1 < max(used) and not _is_value(rows[titles][1][0], ",."):
        titles += 1
    rows, used = rows[titles:], used[titles:]
    width = max(used[0], min(len(rows[0][1]), max(used))) if rows else 0
    return [(number, row[: max(width, last)]) for (number, row), last in zip(rows, used, strict=True)], titles


def _is_header(
    rows: Sequence[list[str]], decimal: str, known: Sequence[str], later: Callable[[], Iterator[str]]
) -> bool:
    """Whether the first row has names: see the module's documentation. `later` yields the classes of further rows."""
    (*features, last), *others = rows[0], *rows[1:]
    values = [field for field in features or [last] if _is_value(field, decimal)]
    if not values or not features or not others:
        return not values
    count = [str(number) for number in range(len(rows[0]))]
    if rows[0] == count and len(count) > 3:
        return True  # too regular to be data
    if last in NO_CLASS.union(known, (row[-1] for row in others)):
        return False
    differ = all(_is_number(field, decimal) for field in values) and len(set(values)) == len(values)
    named = values == count[: len(values)] or (differ and not _is_number(last, decimal))
    return named and last not in later()


def _ends(path: Path, separator: str, after: int) -> Iterator[str]:
    """The last word of each line after the one with this number."""
    for line, text in _lines(path):
        if line > after:
            yield text.rstrip(EMPTY).rpartition(separator)[2].strip(' "')


def rows(path: Path, form: Form, missing: Missing, *, features: int | None = None) -> Iterator[Block]:
    """The rows of a file. The last column is the class, unless only the first `features` columns are asked for.

    Rows with a missing value are kept if `missing` is 'mean' and left out if it is 'drop'. Raises Failure (65, 77).
    """
    lines = (line for line in _lines(path) if line[0] >= form.first)
    count = features or form.columns - 1
    while block := list(_block(lines)):
        numbers = np.array([number for number, _ in block])
        values, classes = _parse_fast(block, form, count) or _parse_slowly(path, block, form, count)
        if features:
            classes = [""] * len(classes)
        empty = np.isnan(values)
        no_class = np.array([not features and name in NO_CLASS for name in classes])
        if missing == "refuse" and empty.any():
            row, column = map(int, np.argwhere(empty)[0])
            hint = "fill it in, or train with --missing mean or drop"
            place = f"{path}:{numbers[row]}:{form.skipped + column + 1}"
            raise Failure(f"{place}: the value is missing; hint: {hint}", BAD_DATA)
        if missing != "drop" and no_class.any():
            place = f"{path}:{numbers[np.flatnonzero(no_class)[0]]}:{form.skipped + form.columns}"
            raise Failure(f"{place}: the class is missing; hint: fill it in, or train with --missing drop", BAD_DATA)
        if missing == "drop":
            complete = ~(empty.any(axis=1) | no_class)
            numbers, values = numbers[complete], values[complete]
            classes = list(itertools.compress(classes, complete))
        yield Block(numbers, values, classes)


def _block(lines: Iterator[Line], most_bytes: int = BLOCK_BYTES, least: int = 1) -> Iterator[Line]:
    """The next lines: at least `least` of them, and about `most_bytes` in total."""
    size = 0
    for count, line in enumerate(lines, start=1):
        yield line
        size += len(line[1])
        if size > most_bytes and count >= least:
            return


def _parse_fast(lines: list[Line], form: Form, count: int) -> tuple[NDArray[np.float64], list[str]] | None:
    """Features and classes, parsed by NumPy; None if a line needs `_parse_slowly`."""
    last = form.skipped + form.columns - 1
    chosen = range(form.skipped, form.skipped + count)
    if form.separator == SPACES:
        texts = [" ".join(text.split()) for _, text in lines]
    else:
        texts = [text.removesuffix(form.separator * (text.count(form.separator) - last)) for _, text in lines]
    if any(text.count(form.separator) != last or '"' in text for text in texts):
        return None
    classes = [text.rpartition(form.separator)[2].strip() for text in texts]
    if form.decimal == ",":
        texts = [text.translate(SWAPPED) for text in texts]  # a decimal point must not become a valid number
    try:
        features = np.loadtxt(texts, delimiter=form.separator, comments=None, usecols=chosen, ndmin=2)
    except ValueError:
        return None
    return None if (np.abs(features) > LARGEST).any() else (features, classes)


def _parse_slowly(path: Path, lines: list[Line], form: Form, count: int) -> tuple[NDArray[np.float64], list[str]]:
    """Features and classes, parsed field by field. Raises Failure (65) at the first bad field."""
    features, classes, columns = np.empty((len(lines), count)), [], form.skipped + form.columns
    for row, (line, text) in enumerate(lines):
        fields = _split(path, line, text, form.separator)
        while len(fields) > columns and not fields[-1]:
            fields.pop()
        if len(fields) != columns:
            message = f"{path}:{line}: {len(fields)} fields, but the first line has {columns} ({form})"
            raise Failure(f"{message}; hint: give all lines the same number of fields", BAD_DATA)
        for column, field in enumerate(fields[form.skipped :][:count]):
            place = f"{path}:{line}:{form.skipped + column + 1}: {field:.40}"
            features[row, column] = _number(place, field, form.decimal)
        classes.append(fields[-1].strip())
    return features, classes


def _number(place: str, field: str, decimal: str) -> float:
    """The value of a field; NaN if it is missing. Raises Failure (65), which begins with `place`."""
    word = field.strip().lower()
    if word in MISSING:
        return math.nan
    if word in TRUTH:
        return TRUTH[word]
    if word.lstrip("+-").startswith("inf"):
        raise Failure(f"{place} is infinite", BAD_DATA)
    if not _is_number(word, decimal):
        hint = f"the class must be the last column, and numbers use decimal {'commas' if decimal == ',' else 'points'}"
        raise Failure(f"{place} is not a number; hint: {hint}", BAD_DATA)
    value = float(word.replace(",", "."))
    if abs(value) > LARGEST:
        raise Failure(f"{place} is larger than {LARGEST:g}", BAD_DATA)
    return value


_POINT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_COMMA = re.compile(_POINT.pattern.replace(r"\.", ","), re.ASCII | re.IGNORECASE)


def _is_number(word: str, decimal: str) -> bool:
    return (_COMMA if decimal == "," else _POINT).fullmatch(word.strip()) is not None


def _is_value(field: str, decimal: str) -> bool:
    return field.lower() in MISSING | TRUTH.keys() or any(_is_number(field, mark) for mark in decimal)


def _fit(head: Sequence[Line], kind: tuple[str, str]) -> tuple[float, int, bool, int]:
    """How well a separator and a decimal mark fit: the share of features that are numbers, the number of titles (fewer
    are better), whether the first and the last row have equally many fields, and how many."""
    table, titles = _table(head, kind[0])
    rows = [row for _, row in table]
    features = [field for row in rows[len(rows) > 1 :] for field in row[:-1]]
    good = sum(_is_value(field, kind[1]) for field in features)
    first, last = (len(rows[0]), len(rows[-1])) if rows else (0, 0)
    return good / max(1, len(features)), -titles, first == last > 1, last


def _fields(text: str, separator: str) -> list[str]:
    """Raises csv.Error for an unbalanced quote."""
    if separator == SPACES:
        text = " ".join(text.split())
    if '"' not in text:
        return text.split(separator)
    return next(csv.reader([text], delimiter=separator, skipinitialspace=True, strict=True))


def _split(path: Path, line: int, text: str, separator: str) -> list[str]:
    try:
        return [field.strip() for field in _fields(text, separator)]
    except csv.Error as error:
        message = f"{path}:{line}: unbalanced quotes ({error})"
        raise Failure(f"{message}; hint: close each quote on its line", BAD_DATA) from None


def _lines(path: Path) -> Iterator[Line]:
    """Number and text of every line with values."""
    try:
        with _unpacked(path) as file:
            number, rest = 1, file.read(BLOCK_BYTES).removeprefix(codecs.BOM_UTF8)
            end, more = b"\r" if b"\r" in rest and b"\n" not in rest else b"\n", True
            while more or rest:
                if b"\0" in rest:
                    raise Failure(f"{path}: the file is binary or in UTF-16; hint: give a CSV file in UTF-8", BAD_DATA)
                *whole, rest = rest.split(end) if more else (rest, b"")
                if len(rest) > LINE_BYTES:
                    message = f"{path}:{number + len(whole)}: the line is longer than {LINE_BYTES >> 20} MiB"
                    raise Failure(f"{message}; hint: give a CSV file", BAD_DATA)
                for line in whole:
                    if (text := _text(path, number, line)).strip(EMPTY):
                        yield number, text
                    number += 1
                more_bytes = file.read(BLOCK_BYTES)
                more, rest = bool(more_bytes), rest + more_bytes
    except (EOFError, zlib.error) as error:
        raise Failure(f"{path}: {error}; hint: copy the file again, it is damaged", BAD_DATA) from None
    except OSError as error:
        raise files.refused(path, error, BAD_DATA, "give a CSV file") from None


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[io.BufferedIOBase]:
    """The file's contents, decompressed if it was compressed by gzip."""
    with files.open_plain(path) as file:
        yield gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file


def _text(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode().strip("\r\n")
    except UnicodeDecodeError as error:
        message = f"{path}:{number}: byte {line[error.start]:#04x} is not UTF-8"
        raise Failure(f"{message}; hint: convert the file, e.g. with iconv -f latin1 -t utf-8", BAD_DATA) from None
