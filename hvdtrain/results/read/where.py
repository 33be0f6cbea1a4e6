"""The expressions of `--where` and `--baseline`: `rate_mbit=10 and (hosts>1 or strategy=native)`.

Comparisons are NAME OPERATOR VALUE, joined by and, or, not and brackets. A name is a column of the runs or a setting of
their configs. A value is a number, true, false, null, or text, which needs quotes if it contains blanks, brackets or
quotes. Missing values equal null and nothing else, and are neither less nor greater than anything. Python's parser
reads the structure, but nothing is evaluated by Python.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure

LONGEST = 1000
EXPECTED = "expected a comparison, or `and` or `or` between two"
COMPARISON = re.compile(
    r"(?P<name>[A-Za-z_]\w*)(?:\s*(?P<sign>==|!=|<=|>=|=|<|>)\s*(?P<value>'[^']*'|\"[^\"]*\"|[^\s()'\"]+)?)?"
)
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

    def __init__(self, text: str, kinds: Mapping[str, str], option: str = "--where") -> None:
        """`kinds`: column -> number, text, flag or any (a setting)."""
        self._text, self._kinds, self._option = text, kinds, option
        if len(text) > LONGEST:
            raise Failure(f"{option}: longer than {LONGEST} characters", exits.USAGE)
        self.names: set[str] = set()
        """The columns that it tests"""
        self._tests: dict[int, Test] = {}
        frame = self._frame()
        lead = len(frame) - len(frame.lstrip())
        try:
            self.test: Test = self._joined(ast.parse(frame.lstrip(), mode="eval").body, lead)
        except SyntaxError as error:
            unclosed = "never closed" in error.msg
            what = "the bracket is not closed" if unclosed else EXPECTED
            raise self._error(what, lead + error.offset - 1 if error.offset else len(text)) from None

    def _frame(self) -> str:
        """The text with `_` instead of each comparison. Its test is stored in `_tests` by position."""
        frame, place = [" "] * len(self._text), 0
        while place < len(self._text):
            found = COMPARISON.match(self._text, place)
            if found is None:
                if self._text[place] not in "()" and not self._text[place].isspace():
                    raise self._error("expected the name of a column", place)
                frame[place] = self._text[place] if self._text[place] in "()" else " "
                place += 1
                continue
            if found["sign"] is None and found["name"].lower() in ("and", "or", "not"):
                frame[place : found.end()] = found["name"].lower()
            else:
                frame[place] = "_"
                self._tests[place] = self._comparison(found)
            place = found.end()
        return "".join(frame)

    def _joined(self, node: ast.expr, lead: int) -> Test:
        if isinstance(node, ast.BoolOp):
            joined = any if isinstance(node.op, ast.Or) else all
            tests = [self._joined(one, lead) for one in node.values]
            return lambda row: joined(test(row) for test in tests)
        if isinstance(node, ast.UnaryOp):
            inner = self._joined(node.operand, lead)
            return lambda row: not inner(row)
        if isinstance(node, ast.Name):
            return self._tests[lead + node.col_offset]
        raise self._error(EXPECTED, lead + node.col_offset)

    def _error(self, what: str, place: int) -> Failure:
        shown = "".join(c if c.isprintable() else " " for c in self._text)
        known = ", ".join(sorted(self._kinds))
        return Failure(f"{self._option}, column {place + 1}: {what}, in `{shown}`; known columns: {known}", exits.USAGE)

    def _comparison(self, found: re.Match[str]) -> Test:
        """The test of one comparison. Raises Failure (2) if its value does not fit the column."""
        name, sign, text = found.group("name", "sign", "value")
        if name not in self._kinds:
            begun = [known for known in self._kinds if known.startswith(name.lower())]
            hint = f", did you mean {begun[0]}?" if begun else near(name, self._kinds)
            raise self._error(f"no column {name!r}{hint}", found.start())
        if sign is None:
            raise self._error(f"expected one of {' '.join(OPERATORS)} after {name}", found.end())
        if text is None:
            unclosed = self._text[found.end() : found.end() + 1] in ("'", '"')
            what = "the quote is not closed" if unclosed else "expected a number, 'text' or null"
            raise self._error(what, found.end())
        value: Any = text[1:-1] if text[0] in "'\"" else CONSTANTS.get(text.lower(), text)
        value = float(text) if NUMBER.fullmatch(text) else value
        if (value is None or isinstance(value, bool)) and sign not in ("=", "==", "!="):
            raise self._error(f"{text} needs = or !=", found.start("sign"))
        kind = self._kinds[name]
        if value is not None and kind not in ("any", {bool: "flag", float: "number", str: "text"}[type(value)]):
            wanted = {"flag": "true or false", "number": "a number", "text": "text, such as 'torch'"}[kind]
            raise self._error(f"{name} is {wanted}, but {text} is not", found.start("value"))
        self.names.add(name)
        return _comparison(name, sign, value)


def _comparison(name: str, sign: str, value: Any) -> Test:
    def test(row: Mapping[str, Any]) -> bool:
        found = None if row[name] != row[name] else row[name]  # NaN: missing
        comparable = isinstance(found, str) if isinstance(value, str) else isinstance(found, int | float)
        return (comparable or sign in ("=", "==", "!=")) and OPERATORS[sign](found, value)

    return test
