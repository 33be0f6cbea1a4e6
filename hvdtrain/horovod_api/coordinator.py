"""Which call comes next: rank 0 hears what each rank asks for and answers when all members of a call have asked.

Pure bookkeeping: `calls` carries the messages. Ranks may ask in different orders; all carry out their calls in the
order of the answers, so no two ranks ever wait for each other in two calls.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Collection, Sequence
from typing import Any

from hvdtrain.horovod_api.arithmetic import Op


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A call, as a rank asks for it."""

    kind: str
    """allreduce, allgather, broadcast, alltoall, reducescatter, barrier or join"""
    name: str
    ranks: list[int]
    """The members, in order"""
    types: list[str] = dataclasses.field(default_factory=list)
    shapes: list[list[int]] = dataclasses.field(default_factory=list)
    op: int = Op.AVERAGE
    scales: list[float] = dataclasses.field(default_factory=lambda: [1.0, 1.0])
    root: int = 0
    splits: list[int] | None = None
    short: bool = False
    """Whether its array's bytes come with it"""
    unnamed: int = 0
    """Of a join: how many unnamed calls this rank has made"""

    @property
    def key(self) -> str:
        return f"{spelt(self.ranks)} {self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """To the members of a call, or of why there will be none any more (`ended`)."""

    key: str = ""
    error: str = ""
    ended: str = ""
    call: dict[str, Any] | None = None
    """What was asked for, for those who have joined"""
    sizes: list[Any] = dataclasses.field(default_factory=list)
    """Of each member: its first dimensions (allgather), its splits (alltoall)"""
    lengths: list[int] = dataclasses.field(default_factory=list)
    """Of each member's bytes, if they come with this"""
    last: int = 0
    """Of a join: who came last"""
    unnamed: int = 0


ASKED, ANSWER = Asked(kind="", name="", ranks=[]), Answer()


def packed(message: Asked | Answer, payload: bytes = b"") -> bytes:
    usual = vars(ASKED if isinstance(message, Asked) else ANSWER)
    told = {key: value for key, value in vars(message).items() if value != usual[key]}
    if "ranks" in told:
        told["ranks"] = spelt(told["ranks"])
    return json.dumps(told, separators=(",", ":")).encode() + b"\0" + payload


def unpacked(message: bytes) -> tuple[dict[str, Any], bytes]:
    said, _, payload = message.partition(b"\0")
    told = json.loads(said)
    if "ranks" in told:
        first, row, last = told["ranks"].partition("-")
        told["ranks"] = [*range(int(first), int(last) + 1)] if row else [int(each) for each in first.split(",")]
    return told, payload


def spelt(ranks: Sequence[int]) -> str:
    """`0-511` of ranks in a row, `0,2,5` of others."""
    first, last = ranks[0], ranks[-1]
    return f"{first}-{last}" if [*ranks] == [*range(first, last + 1)] else ",".join(map(str, ranks))


Outcome = tuple[list[int], Answer, bytes]
"""To whom, what, and the bytes with it"""


class Waiting:
    """A call that not all members have asked for yet."""

    def __init__(self) -> None:
        self.asked: dict[int, tuple[Asked, bytes]] = {}
        self.since, self.told = time.monotonic(), False


class Coordinator:
    def __init__(self, stall_limit_s: float) -> None:
        """A call that some ranks have not made after `stall_limit_s` is reported, once; 0: never."""
        self._limit_s = stall_limit_s or math.inf
        self._waiting: dict[str, Waiting] = {}
        self._joined: dict[tuple[int, ...], dict[int, Asked]] = {}

    def heard(self, rank: int, asked: Asked, payload: bytes) -> list[Outcome]:
        """What follows from a rank's call."""
        members = tuple(asked.ranks)
        joined = self._joined.setdefault(members, {})
        if asked.kind == "join":
            joined[rank] = asked
            possible = [key for key, call in self._waiting.items() if key != asked.key and _members(call) == members]
            self._waiting.setdefault(asked.key, Waiting()).asked[rank] = asked, payload  # only to be told
            outcomes = [outcome for key in possible for outcome in self._answered(key, joined)]
            if set(joined) == set(members):
                unnamed = max(each.unnamed for each in joined.values())
                outcomes.append((asked.ranks, Answer(key=asked.key, last=rank, unnamed=unnamed), b""))
                del self._joined[members], self._waiting[asked.key]
            return outcomes
        self._waiting.setdefault(asked.key, Waiting()).asked[rank] = asked, payload
        return self._answered(asked.key, joined)

    def _answered(self, key: str, joined: Collection[int]) -> list[Outcome]:
        waiting = self._waiting[key].asked
        first = next(iter(waiting.values()))[0]
        if len(waiting) + len(joined) < len(first.ranks):
            return []
        absent = [rank for rank in first.ranks if rank not in waiting]
        if not set(absent) <= set(joined):
            return []
        del self._waiting[key]
        calls = {rank: asked for rank, (asked, _) in sorted(waiting.items())}
        error = disagreement(calls) or unsupported(first, absent)
        answer = Answer(
            key=key,
            error=error,
            call={**vars(first), "short": False} if absent else None,
            sizes=[_sizes(asked) for asked in calls.values()] if first.kind in ("allgather", "alltoall") else [],
        )
        payload = b""
        sender = {first.ranks[first.root]} if first.kind == "broadcast" else set(first.ranks)
        if not error and not absent and all(calls[rank].short for rank in sender):
            parts = [waiting[rank][1] if rank in sender else b"" for rank in first.ranks]
            answer = dataclasses.replace(answer, lengths=[len(part) for part in parts])
            payload = b"".join(parts)
        return [(first.ranks, answer, payload)]

    def due_s(self) -> float | None:
        """Seconds until there may be something to tell; None if nothing waits."""
        untold = [waiting.since for waiting in self._waiting.values() if not waiting.told]
        if not untold or self._limit_s == math.inf:
            return None
        return max(0.0, min(untold) + self._limit_s - time.monotonic())

    def stalled(self) -> list[str]:
        """Lines about calls that some ranks have waited long for; each is told once."""
        lines = []
        for waiting in self._waiting.values():
            if not waiting.told and waiting.since + self._limit_s <= time.monotonic():
                waiting.told = True
                first = next(iter(waiting.asked.values()))[0]
                absent = [rank for rank in first.ranks if rank not in waiting.asked]
                why = "every rank must make the same calls"
                if first.kind == "join":
                    why = "make as many steps on every rank: those of a strategy wait for ranks that have joined"
                ranks = ", ".join(map(str, absent))
                lines.append(f"{said(first)} has waited {self._limit_s:g} s for rank {ranks}: {why}")
        return lines


def _members(waiting: Waiting) -> tuple[int, ...]:
    return tuple(next(iter(waiting.asked.values()))[0].ranks)


def _sizes(asked: Asked) -> Any:
    if asked.kind == "alltoall":
        return asked.splits
    return [shape[0] if shape else 1 for shape in asked.shapes]


def said(asked: Asked) -> str:
    """A call's name for people."""
    return asked.name if asked.name.startswith(asked.kind) else f"{asked.kind}.{asked.name}"


def _compared(asked: Asked) -> dict[str, Any]:
    """What all members must agree about, in words."""
    free_first = asked.kind in ("allgather", "alltoall")
    return {
        "operation": asked.kind,
        "number of arrays": len(asked.shapes),
        "data type": asked.types,
        "number of dimensions": [len(shape) for shape in asked.shapes],
        "shape after the first dimension" if free_first else "shape": (
            [shape[1:] for shape in asked.shapes] if free_first else asked.shapes
        ),
        "reduction": Op(asked.op).name.lower(),
        "prescale and postscale factor": asked.scales,
        "root rank": asked.ranks[asked.root],
    }


def disagreement(calls: dict[int, Asked]) -> str:
    """The first thing in which the ranks' calls differ; empty if there is none."""
    (first, asked), *others = calls.items()
    mine = _compared(asked)
    for rank, other in others:
        theirs = _compared(other)
        for what, value in mine.items():
            if theirs.get(what, value) != value:
                return (
                    f"ranks do not agree about {said(asked)}: {what} is {_plain(value)} on rank {first} and "
                    f"{_plain(theirs[what])} on rank {rank}"
                )
    return ""


def _plain(value: Any) -> str:
    return str(value[0] if isinstance(value, list) and len(value) == 1 else value)


def unsupported(asked: Asked, joined: list[int]) -> str:
    """Why all members together cannot have it; empty if they can."""
    if asked.kind in ("allgather", "alltoall", "reducescatter") and [] in asked.shapes:
        return f"{said(asked)}: a scalar has no first dimension to put together or cut; reshape it to (1,)"
    additive = asked.kind == "allreduce" and asked.op in (Op.SUM, Op.AVERAGE, Op.ADASUM)
    if joined and not additive and asked.kind != "barrier":
        what = f"allreduce with {Op(asked.op).name.lower()}" if asked.kind == "allreduce" else asked.kind
        return f"{said(asked)}: {what} is not supported while rank {', '.join(map(str, joined))} has joined"
    return ""
