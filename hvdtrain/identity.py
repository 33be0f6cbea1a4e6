"""In what two descriptions of a run differ, for people."""

from __future__ import annotations

from typing import Any


def differing(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """`width: 0.125 there, 1.0 here` for each setting in which two descriptions differ, nested ones included."""
    found = []
    for name in there | here:
        old, new = there.get(name), here.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differing(old, new)
        elif old != new:
            found.append(f"{name}: {old!a:.80} there, {new!a:.80} here")
    return found
