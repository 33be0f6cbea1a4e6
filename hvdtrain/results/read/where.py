"""The expressions of `--where`: `rate_mbit=10 and (hosts>1 or strategy=native)`.

Comparisons are NAME OPERATOR VALUE, joined by and, or, not and brackets. A name is a column of the runs or a setting of
their configs. A value is a number, true, false, null, or text, which needs quotes if it contains blanks, brackets or
quotes. Missing values equal null and nothing else, and are neither less nor greater than anything.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure

LONGEST = 1000
DEEPEST = 50
NAME = re.compile(r"[A-Za-z_]\w*")
SIGN = re.compile(r"\s*(==|!=|<=|>=|=|<|>)\s*")
VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s()'\"]+")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
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
"""Whether a row (column -> value) is selected"""


class Where:
    """A parsed expression. Raises Failure (2) with the position of an error and the known columns."""

    def __init__(self, text: str, kinds: Mapping[str, str]) -> None:
        """`kinds`: column -> number, text, flag or any (a setting)."""
        self._text, self._kinds = text, kinds
        self._place = self._depth = 0
        if len(text) > LONGEST:
            raise Failure(f"--where: longer than {LONGEST} characters", exits.USAGE)
        self.names: set[str] = set()
        """The columns that it tests"""
        self.test = self._or()
        if self._place < len(text):
            raise self._error("expected `and` or `or`", self._place)

    def _or(self) -> Test:
        tests = [self._and()]
        while self._skip(r"or\b"):
            tests.append(self._and())
        return tests[0] if len(tests) == 1 else lambda row: any(test(row) for test in tests)

    def _and(self) -> Test:
        tests = [self._not()]
        while self._skip(r"and\b"):
            tests.append(self._not())
        return tests[0] if len(tests) == 1 else lambda row: all(test(row) for test in tests)

    def _not(self) -> Test:
        self._depth += 1
        start = self._place
        if self._depth > DEEPEST:
            raise self._error("nested too deeply", start)
        if self._skip(r"not\b"):
            negated = self._not()
            test: Test = lambda row: not negated(row)  # noqa: E731
        elif self._skip(r"\("):
            test = self._or()
            if not self._skip(r"\)"):
                what = "the bracket is not closed" if self._place == len(self._text) else "expected `)`"
                raise self._error(what, self._place)
        else:
            test = self._comparison()
        self._depth -= 1
        return test

    def _skip(self, pattern: str) -> bool:
        """Moves past a keyword or bracket and the blanks around it. A keyword before an operator is a name."""
        match = re.compile(rf"\s*{pattern}\s*(?![=<>!])", re.IGNORECASE).match(self._text, self._place)
        if match:
            self._place = match.end()
        return match is not None

    def _comparison(self) -> Test:
        self._skip_blanks()
        start, name = self._place, self._next(NAME, "expected the name of a column")
        if name not in self._kinds:
            begun = [known for known in self._kinds if known.startswith(name.lower())]
            hint = f", did you mean {begun[0]}?" if begun else near(name, self._kinds)
            raise self._error(f"no column {name!r}{hint}", start)
        place = self._place
        sign = self._next(SIGN, f"expected one of {' '.join(OPERATORS)} after {name}").strip()
        start, text = self._place, self._next(VALUE, "expected a number, 'text' or null")
        self._skip_blanks()
        value: Any = text[1:-1] if text[0] in "'\"" else CONSTANTS.get(text.lower(), text)
        value = float(text) if NUMBER.fullmatch(text) else value
        if (value is None or isinstance(value, bool)) and sign not in ("=", "==", "!="):
            raise self._error(f"{text} needs = or !=", place)
        kind = self._kinds[name]
        if value is not None and kind not in ("any", {bool: "flag", float: "number", str: "text"}[type(value)]):
            wanted = {"flag": "true or false", "number": "a number", "text": "text, such as 'torch'"}[kind]
            raise self._error(f"{name} is {wanted}, but {text} is not", start)
        self.names.add(name)
        return _comparison(name, sign, value)

    def _skip_blanks(self) -> None:
        self._place = len(self._text) - len(self._text[self._place :].lstrip())

    def _next(self, pattern: re.Pattern[str], expected: str) -> str:
        match = pattern.match(self._text, self._place)
        if match is None:
            raise self._error(expected, self._place)
        self._place = match.end()
        return match[0]

    def _error(self, what: str, place: int) -> Failure:
        shown = "".join(c if c.isprintable() else " " for c in self._text)
        known = ", ".join(sorted(self._kinds))
        return Failure(f"--where, column {place + 1}: {what}, in `{shown}`; known columns: {known}", exits.USAGE)


def _comparison(name: str, sign: str, value: Any) -> Test:
    def test(row: Mapping[str, Any]) -> bool:
        actual = None if row[name] != row[name] else row[name]  # NaN: missing
        comparable = isinstance(actual, str) if isinstance(value, str) else isinstance(actual, int | float)
        return (comparable or sign in ("=", "==", "!=")) and OPERATORS[sign](actual, value)

    return test
