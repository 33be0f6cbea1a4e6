"""The expressions of `--where` and `--baseline`: `rate_mbit=10 and (hosts>1 or strategy='native')`.

    or:      and ("or" and)*
    and:     not ("and" not)*
    not:     "not" not | "(" or ")" | NAME OPERATOR VALUE
    OPERATOR = == != < <= > >=
    VALUE    a number, 'text', "text", a bare word (text), true, false, null

A name is a column of the runs or a setting of their configs. What a run has not measured is `null`: it equals null
and nothing else, and is neither less nor greater than anything. Nothing is ever given to Python's own evaluation.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdtrain import exits
from hvdtrain.arguments import near
from hvdtrain.exits import Failure

LONGEST = 2000
DEEPEST = 50
TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<operator>==|!=|<=|>=|=|<|>)|(?P<bracket>[()])|(?P<word>[A-Za-z_][\w.+-]*))"
)
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
CONSTANTS: dict[str, Any] = {"null": None, "none": None, "true": True, "false": False}

Test = Callable[[Mapping[str, Any]], bool]
"""Whether a row (column -> value) is chosen"""


@dataclasses.dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    place: int
    """Its first character in the expression, from 0"""


class Where:
    """A parsed expression. Raises Failure (2) that points at the place in the text, and lists the known columns."""

    def __init__(self, text: str, kinds: Mapping[str, str], option: str = "--where") -> None:
        """`kinds`: known column -> number, text or flag (a setting: any)."""
        self._text, self._kinds, self._option = text, kinds, option
        if len(text) > LONGEST:
            raise Failure(f"{option}: longer than {LONGEST} characters", exits.USAGE)
        self._tokens = self._split()
        self._next = 0
        self.names: set[str] = set()
        """The columns it needs"""
        self.test: Test = self._or(0)
        if self._peek().kind != "end":
            raise self._error(f"{self._peek().text!r} is too much; join comparisons with and, or", self._peek())

    def choose(self, columns: Mapping[str, Sequence[Any]], rows: int) -> list[bool]:
        """For each of the rows of a table whether it is chosen; `columns` has those of `names`."""
        names = sorted(self.names)
        return [
            self.test(dict(zip(names, values, strict=True)))
            for values in (zip(*(columns[name] for name in names), strict=True) if names else [()] * rows)
        ]

    # --- words ------------------------------------------------------------------------------------------------------

    def _split(self) -> list[_Token]:
        found, place = [], 0
        end = len(self._text.rstrip())
        while place < end:
            match = TOKEN.match(self._text, place)
            if match is None:
                place += len(self._text[place:]) - len(self._text[place:].lstrip())
                wrong = "this text is never closed" if self._text[place] in "'\"" else "not understood"
                raise self._error(wrong, _Token("wrong", self._text[place], place))
            kind = str(match.lastgroup)
            found.append(_Token(kind, match[kind], match.start(kind)))
            place = match.end()
        return [*found, _Token("end", "", len(self._text))]

    def _error(self, what: str, token: _Token) -> Failure:
        shown = "".join(c if c.isprintable() else " " for c in self._text)
        return Failure(
            f"{self._option}, column {token.place + 1}: {what}, in `{shown}`; known columns: "
            f"{', '.join(sorted(self._kinds))}",
            exits.USAGE,
        )

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next += token.kind != "end"
        return token

    def _is(self, word: str) -> bool:
        token = self._peek()
        if token.kind == "word" and token.text.lower() == word:
            self._next += 1
            return True
        return False

    # --- grammar ----------------------------------------------------------------------------------------------------

    def _or(self, depth: int) -> Test:
        tests = [self._and(depth)]
        while self._is("or"):
            tests.append(self._and(depth))
        return tests[0] if len(tests) == 1 else lambda row: any(test(row) for test in tests)

    def _and(self, depth: int) -> Test:
        tests = [self._not(depth)]
        while self._is("and"):
            tests.append(self._not(depth))
        return tests[0] if len(tests) == 1 else lambda row: all(test(row) for test in tests)

    def _not(self, depth: int) -> Test:
        if depth > DEEPEST:
            raise self._error(f"nested more than {DEEPEST} deep", self._peek())
        if self._is("not"):
            inner = self._not(depth + 1)
            return lambda row: not inner(row)
        if self._peek().text == "(" and self._peek().kind == "bracket":
            opened = self._take()
            inner = self._or(depth + 1)
            if self._take().text != ")":
                raise self._error("this bracket is never closed", opened)
            return inner
        return self._comparison()

    def _comparison(self) -> Test:
        column = self._take()
        if column.kind != "word":
            found = repr(column.text) if column.text else "the end"
            raise self._error(f"a column's name belongs here, not {found}", column)
        if column.text not in self._kinds:
            begun = [name for name in self._kinds if name.startswith(column.text.lower())]
            hint = f", did you mean {begun[0]}?" if begun else near(column.text, self._kinds)
            raise self._error(f"no column {column.text!r}{hint}", column)
        sign = self._take()
        if sign.kind != "operator":
            raise self._error(f"one of {' '.join(OPERATORS)} belongs behind {column.text}", sign)
        at = self._peek()
        value = self._value()
        self._check(column, sign, value, at)
        self.names.add(column.text)
        return _comparison(column.text, sign.text, value)

    def _value(self) -> Any:
        token = self._take()
        if token.kind == "number":
            return float(token.text)
        if token.kind == "text":
            return token.text[1:-1]
        if token.kind == "word" and token.text.lower() not in ("and", "or", "not"):
            return CONSTANTS.get(token.text.lower(), token.text)
        found = repr(token.text) if token.text else "the end"
        raise self._error(f"a number, 'text' or null belongs here, not {found}", token)

    def _check(self, column: _Token, sign: _Token, value: Any, at: _Token) -> None:
        kind = self._kinds[column.text]
        if (value is None or isinstance(value, bool)) and sign.text not in ("=", "==", "!="):
            raise self._error(f"{at.text} can only be compared with = and !=", sign)
        if value is None or kind == "any":
            return
        if kind != {bool: "flag", float: "number", str: "text"}[type(value)]:
            wanted = {"flag": "true or false", "number": "a number", "text": "text, such as 'torch'"}[kind]
            raise self._error(f"{column.text} is {wanted}, and {at.text} is not", at)


def _comparison(name: str, sign: str, value: Any) -> Test:
    compare = OPERATORS[sign]
    if value is None or sign in ("=", "==", "!="):

        def equal(row: Mapping[str, Any]) -> bool:
            found = row[name]
            return compare(None if found != found else found, value)  # a NaN is a missing number

        return equal

    def ordered(row: Mapping[str, Any]) -> bool:
        found = row[name]
        comparable = isinstance(found, str) if isinstance(value, str) else isinstance(found, int | float)
        return comparable and compare(found, value)

    return ordered
