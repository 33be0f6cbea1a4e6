"""Decides which call runs next: rank 0 collects requests and responds once all members of a call have asked for it.

This is bookkeeping only; `calls` transports the messages. Ranks may start calls in different orders. They all carry
them out in the order of rank 0's responses, so two ranks never wait for each other in two different calls.

A rank that has joined takes part in allreduces of all ranks with zeros, until all ranks have joined.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from hvdtrain.horovod_api.arithmetic import Op


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One rank's request for a call."""

    kind: str
    """allreduce, allgather, broadcast, alltoall, reducescatter, barrier or join"""
    name: str
    ranks: list[int]
    """The members of the call, in ascending order"""
    types: list[str] = dataclasses.field(default_factory=list)
    shapes: list[list[int]] = dataclasses.field(default_factory=list)
    op: int = Op.AVERAGE
    scales: list[float] = dataclasses.field(default_factory=lambda: [1.0, 1.0])
    root: int = 0
    """Index of the broadcasting rank among the members"""
    splits: list[int] | None = None
    inline: bool = False
    """Whether the array's bytes travel with the request"""

    @property
    def key(self) -> str:
        return f"{format_ranks(self.ranks)} {self.name}"

    @property
    def label(self) -> str:
        """The call's name in messages."""
        return self.name if self.name.startswith(self.kind) else f"{self.kind}.{self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Response:
    """Rank 0's response to the members of a call, or the reason why there will be no more calls (`shutdown`)."""

    key: str = ""
    error: str = ""
    shutdown: str = ""
    sizes: list[Any] = dataclasses.field(default_factory=list)
    """For each member: the first dimension of each array (allgather), or its splits (alltoall). For join, the rank that
    joined last"""
    lengths: list[int] = dataclasses.field(default_factory=list)
    """Bytes from each member, if they travel with the response"""
    joined: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What members that have joined need to know of the call: its fields that differ from a `Request`'s"""


EMPTY_REQUEST, EMPTY_RESPONSE = Request(kind="", name="", ranks=[]), Response()


def changed(message: Request | Response) -> dict[str, Any]:
    """The fields that do not have their default values."""
    defaults = vars(EMPTY_REQUEST if isinstance(message, Request) else EMPTY_RESPONSE)
    return {key: value for key, value in vars(message).items() if value != defaults[key]}


def pack(message: Request | Response, payload: bytes = b"") -> bytes:
    """A message as JSON without default values, a zero byte, and the payload."""
    fields = changed(message)
    if "ranks" in fields:
        fields["ranks"] = format_ranks(fields["ranks"])
    return json.dumps(fields, separators=(",", ":")).encode() + b"\0" + payload


def unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    """The fields and the payload of a packed message."""
    header, _, payload = message.partition(b"\0")
    fields = json.loads(header)
    if "ranks" in fields:
        first, is_range, last = fields["ranks"].partition("-")
        fields["ranks"] = [*range(int(first), int(last) + 1)] if is_range else [int(rank) for rank in first.split(",")]
    return fields, payload


def format_ranks(ranks: Sequence[int]) -> str:
    """`0-511` for consecutive ranks, `0,2,5` for others."""
    first, last = ranks[0], ranks[-1]
    return f"{first}-{last}" if [*ranks] == [*range(first, last + 1)] else ",".join(map(str, ranks))


class PendingCall:
    """A call that not all members have asked for yet."""

    def __init__(self) -> None:
        self.requests: dict[int, tuple[Request, bytes]] = {}
        self.since, self.reported = time.monotonic(), False


Complete = tuple[list[int], Response, bytes]
"""The members of a call that all of them have asked for, the response to them, and its payload"""


class Coordinator:
    def __init__(self, stall_limit_s: float) -> None:
        """A call that some ranks have not made after `stall_limit_s` is reported once; 0 turns the reports off."""
        self._limit_s = stall_limit_s or math.inf
        self._pending: dict[str, PendingCall] = {}
        self._joins: Request | None = None
        """The request of the ranks that have joined"""
        self._joined: list[int] = []
        """These ranks, in the order of their requests"""

    def add(self, rank: int, request: Request, payload: bytes) -> list[Complete]:
        """Adds one rank's request. Returns the calls for which no other request is missing."""
        if request.kind != "join":
            call = self._pending.setdefault(request.key, PendingCall())
            call.requests[rank] = request, payload
            return [self._complete(request.key)] if not self._absent(call) else []
        self._joins = request
        self._joined.append(rank)
        complete = [self._complete(key) for key in list(self._pending) if not self._absent(self._pending[key])]
        if len(self._joined) == len(request.ranks):
            complete.append((request.ranks, Response(key=request.key, sizes=[rank]), b""))
            self._joins, self._joined = None, []
        return complete

    def _absent(self, call: PendingCall) -> list[int]:
        """The members that have not asked for a call. Ranks that have joined need not ask for calls of all ranks."""
        ranks = next(iter(call.requests.values()))[0].ranks
        absent = [rank for rank in ranks if rank not in call.requests]
        if self._joins is not None and self._joins.ranks == ranks:
            absent = [rank for rank in absent if rank not in self._joined]
        return absent

    def _complete(self, key: str) -> Complete:
        requests = self._pending.pop(key).requests
        by_rank = {rank: requests[rank][0] for rank in sorted(requests)}
        first = next(iter(by_rank.values()))
        absent = [rank for rank in first.ranks if rank not in requests]
        response = Response(
            key=key,
            error=find_disagreement(by_rank) or find_unsupported(first, joined=bool(absent)),
            sizes=[_sizes(each) for each in by_rank.values()] if first.kind in ("allgather", "alltoall") else [],
            joined=changed(first) if absent else {},
        )
        payload = b""
        senders = {first.ranks[first.root]} if first.kind == "broadcast" else set(by_rank)
        if not response.error and all(by_rank[rank].inline for rank in senders):
            zeros = bytes(len(requests[min(senders)][1]))  # of ranks that have joined
            payloads = [
                requests[rank][1] if rank in senders else zeros if rank in absent else b"" for rank in first.ranks
            ]
            response = dataclasses.replace(response, lengths=[len(each) for each in payloads])
            payload = b"".join(payloads)
        return first.ranks, response, payload

    def seconds_to_next_report(self) -> float | None:
        """Seconds until a stalled call may have to be reported; None if no call is pending."""
        starts = [call.since for call in self._pending.values() if not call.reported]
        if not starts or self._limit_s == math.inf:
            return None
        return max(0.0, min(starts) + self._limit_s - time.monotonic())

    def report_stalled(self) -> list[str]:
        """One line for each call that has waited longer than the limit. A call is reported once."""
        lines = []
        for call in self._pending.values():
            if not call.reported and call.since + self._limit_s <= time.monotonic():
                call.reported = True
                request = next(iter(call.requests.values()))[0]
                absent = ", ".join(map(str, self._absent(call)))
                waited = f"{request.label} has waited {self._limit_s:g} s for rank {absent}"
                lines.append(f"{waited}; hint: every rank must make the same calls")
        return lines


def _sizes(request: Request) -> Any:
    if request.kind == "alltoall":
        return request.splits
    return [shape[0] if shape else 1 for shape in request.shapes]


def _properties(request: Request) -> dict[str, Any]:
    """Everything that all members must agree on, by its name in error messages."""
    rows_may_differ = request.kind in ("allgather", "alltoall")
    return {
        "operation": request.kind,
        "number of arrays": len(request.shapes),
        "data type": request.types,
        "number of dimensions": [len(shape) for shape in request.shapes],
        "shape after the first dimension" if rows_may_differ else "shape": (
            [shape[1:] for shape in request.shapes] if rows_may_differ else request.shapes
        ),
        "reduction": Op(request.op).name.lower(),
        "prescale and postscale factor": request.scales,
        "root rank": request.ranks[request.root],
    }


def find_disagreement(requests: dict[int, Request]) -> str:
    """Describes the first difference between the ranks' requests; empty if they agree."""
    (first, request), *others = requests.items()
    expected = _properties(request)
    for rank, other in others:
        actual = _properties(other)
        for name, value in expected.items():
            if actual.get(name, value) != value:
                return (
                    f"ranks do not agree about {request.label}: {name} is {_format(value)} on rank {first} and "
                    f"{_format(actual[name])} on rank {rank}"
                )
    return ""


def _format(value: Any) -> str:
    return str(value[0] if isinstance(value, list) and len(value) == 1 else value)


def find_unsupported(request: Request, *, joined: bool) -> str:
    """The reason why no rank can have this call; empty if it is possible. `joined`: whether a member has joined."""
    if joined and request.kind not in ("allreduce", "barrier"):
        return f"{request.kind} is not supported with join at this time; hint: call join after it on all ranks"
    if request.kind in ("allgather", "alltoall", "reducescatter") and [] in request.shapes:
        return f"{request.label}: a scalar has no first dimension; hint: reshape it to (1,)"
    return ""
