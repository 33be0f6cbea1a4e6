"""The sentinel of one host: a small process that sees what a rank stuck in a collective cannot.

    each second:  look at the ranks of this host and at the launcher they hang on; tell the other hosts "I am here"
    a fault:      say it once, tell the other hosts, end the ranks, then what of the launcher would wait for ever

Faults are: a rank that died without a word, a rank that stays stopped while others run, a launcher that is gone, a host
that is silent, ranks that wait for one that makes no progress (`stalls`). A rank tells how it ends (`RankWords`), and a
signal sent to it is told by the kernel even while it is stuck in C++, so that an ordinary end is never taken for a
fault. Heartbeats are UDP: they pass a saturated link where they may lose some, and outlive a flap; a host is watched
only once it has been heard, so that a firewall costs the watch and not the job. They carry a code by the job's secret
and a number that only grows (`trust`). They have a socket on the link, and ranks' words one on loopback; the kernel
keeps both free of what no sentinel and no rank sent.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.sentinel import auth, ending, goodput, stalls
from hvdtrain.sentinel.processes import CHATTER, Process, launchers
from hvdtrain.sentinel.stalls import numbers
from hvdtrain.system import socket_filter

BEAT_S = 1.0
SILENCE_S = 15.0
"""Of a host: three times a cable pulled and put back (5 s); within 30 s the job must have ended"""
STOPPED_S = 15.0
"""Of a rank, while others run; when all are stopped somebody suspended the job"""
ASLEEP_S = 5.0
"""If this process itself did not run for so long (a suspended machine), the other deadlines start anew"""
REFUSED_S = 10.0
MOST_MESSAGES = 1000
"""Taken in one round: a flood must not keep this process from its other duties"""
PURPOSE = b"heartbeat"


class RankWords:
    """What a rank tells its sentinel, one byte each; signal numbers are below, and `stalls` has two more."""

    LEFT = 76
    """It ends as it should; nothing that comes from its port later counts, since others may bind that"""
    FAILED = 70
    """It ends with an error, which it has shown"""
    MAY_DIE = 77
    """The others can go on without it: however it ends is no fault"""


class Rank:
    """A rank of this host."""

    def __init__(self, number: int, pid: int) -> None:
        self.number = number
        self.process = Process(pid)
        self.launchers = launchers(pid)
        """Each outlives the rank in an ordinary end"""
        self.last_word: int | None = None
        self.stopped_since: float | None = None


class Peer:
    """The sentinel of another host."""

    def __init__(self, index: int, about: dict[str, Any], now: float) -> None:
        self.index = index
        self.name: str = about["name"]
        self.ranks: list[int] = about["ranks"]
        self.address: tuple[str, int] = (about["address"], about["udp"])
        self.number = 0
        """Of the last message heard from it"""
        self.heard: float | None = None
        self.known_since = now
        self.left = self.idle = self.knows = self.warned = False
        self.refused_since: float | None = None
        self.stall: dict[str, Any] = {}
        """See `Stalls.about`"""


class Watch:
    def __init__(self, table: dict[str, Any], words: socket.socket, door: socket.socket | None, now: float) -> None:
        """`words` hears the ranks of this host, `door` the other hosts; None if there are none, or no way to them."""
        self._secret: bytes = bytes.fromhex(table["secret"])
        self._index: int = table["host"]
        self._words, self._door = words, door
        self._beats = 0
        self._name: str = table["hosts"][self._index]["name"]
        self._peers = [Peer(i, about, now) for i, about in enumerate(table["hosts"]) if i != self._index]
        self._ranks = {("127.0.0.1", r["port"]): Rank(r["rank"], r["pid"]) for r in table["ranks"]}
        chains = [rank.launchers for rank in self._ranks.values()]
        self._launchers = list({p.pid: p for chain in chains for p in chain}.values())
        pids = {r["rank"]: r["pid"] for r in table["ranks"]}
        self._stalls = stalls.Stalls(table.get("stall_limit_s", 0.0), self._name, pids, now)
        self.folder: str | None = None
        self.command: str | None = None
        self._last_tick = self._next_beat = now
        self._fault: dict[str, Any] | None = None
        self._fault_at = 0.0
        self._said = False
        self._ending: ending.Ending | None = None

    # --- one round ----------------------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """What to wake up for: the end of a rank or launcher."""
        processes = [rank.process for rank in self._ranks.values()] + self._launchers
        return [p.ended for p in processes if p.ended is not None and not p.gone()]

    def round(self, now: float) -> bool:
        """Looks, tells, acts; False when there is nothing left to do."""
        self._hear(now)
        if now - self._last_tick > ASLEEP_S:
            self._start_anew(now)
        self._last_tick = now
        alive = [rank for rank in self._ranks.values() if not rank.process.gone()]
        if self._fault is None and (fault := self._look(now)):
            self._begin(fault, now)
        if self._fault is not None:
            self._say(now)
            assert self._ending is not None
            more = self._ending.go_on(now - self._fault_at)
            if not alive and (self._said or not self._fault["text"]):
                _let_go_of_stderr()  # launchers wait until nobody holds it
        else:
            more = bool(alive)
        if now >= self._next_beat or not more:
            self._beat(now, leaving=not more)
            self._stalls.show(write)
            self._next_beat = now + (BEAT_S if self._fault is None else BEAT_S / 5)
        return more

    def only_heard(self, now: float) -> bool:
        """Takes heartbeats; whether there is nothing else to do until the next beat of our own."""
        self._hear(now)
        return self._fault is None and now < self._next_beat

    def pause_s(self, now: float) -> float:
        return max(0.0, min(self._next_beat - now, BEAT_S))

    def _start_anew(self, now: float) -> None:
        for peer in self._peers:
            peer.heard = peer.heard and now
            peer.known_since = now
        for rank in self._ranks.values():
            rank.stopped_since = rank.stopped_since and now
        self._stalls.resume(now)

    # --- faults -------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> dict[str, Any] | None:
        """The first fault in sight: how to end (see ending.py) and what to say; nothing to say if a rank said it."""
        for rank in self._ranks.values():
            if rank.process.gone():
                self._hear(now)  # its last word may have come since
                if rank.last_word is None:
                    what = f"rank {rank.number} on {self._name} died without a word (stopped by its launcher, as after "
                    return {"kind": "died", "text": what + "Ctrl-C; out of memory or a crash: see dmesg there)"}
                if rank.last_word == RankWords.FAILED:
                    return {"kind": "failed", "text": ""}
            lost = next((p for p in rank.launchers if p.gone()), None)
            if lost is not None and not rank.process.gone():
                text = f"{lost.name} (process {lost.pid}) on {self._name}, which started rank {rank.number}, is gone"
                return {"kind": "launcher", "text": text}
        return self._stopped(now) or self._silent(now) or self._stalled()

    def _stopped(self, now: float) -> dict[str, Any] | None:
        here = [rank for rank in self._ranks.values() if not rank.process.gone()]
        for rank in here:
            rank.stopped_since = (rank.stopped_since or now) if rank.process.state() == "T" else None
            if rank.process.state() in "Tt":
                self._stalls.resume(now, [rank.number])
        if self._idle() and all(peer.idle or peer.left for peer in self._peers):  # somebody suspended the job
            for rank in here:
                rank.stopped_since = now
            return None
        still = [rank for rank in here if rank.stopped_since is not None and now - rank.stopped_since > STOPPED_S]
        if not still:
            return None
        who = numbers([rank.number for rank in still])
        text = f"{who} on {self._name}: stopped (SIGSTOP) for {STOPPED_S:g} s while others wait"
        return {"kind": "stopped", "text": text}

    def _stalled(self) -> dict[str, Any] | None:
        text = self._stalls.judge([peer.stall for peer in self._peers if not peer.left])
        return {"kind": "stopped", "text": text} if text else None

    def _idle(self) -> bool:
        """Whether all ranks here are stopped."""
        return all(rank.stopped_since is not None for rank in self._ranks.values())

    def _silent(self, now: float) -> dict[str, Any] | None:
        lost = [p for p in self._peers if p.heard is not None and not p.left and now - p.heard > SILENCE_S]
        for peer in self._peers:
            self._warn(peer, now)
        if not lost:
            return None
        if len(lost) == len(self._peers) > 1:
            text = f"{self._name} has heard none of the other hosts for {SILENCE_S:g} s (its link is down?)"
        else:
            names = " and ".join(f"{peer.name} ({numbers(peer.ranks)})" for peer in lost)
            text = f"host {names}: nothing heard for {SILENCE_S:g} s (host or link down, seen from {self._name})"
        return {"kind": "lost", "text": text}

    def _warn(self, peer: Peer, now: float) -> None:
        """Says once that a host is not watched: the first host tells about the others."""
        if self._index or peer.warned or peer.left:
            return
        if peer.heard is None and now - peer.known_since > SILENCE_S:
            why = f"its heartbeats (UDP port {peer.address[1]} and back) do not arrive: a firewall?"
        elif peer.refused_since is not None and now - peer.refused_since > REFUSED_S:
            why = "its sentinel is gone"
        else:
            return
        peer.warned = True
        write(f"hvdtrain: if {peer.name} or the link to it fails, this job will not notice: {why}")

    # --- what follows from a fault ------------------------------------------------------------------------------

    def _begin(self, fault: dict[str, Any], now: float) -> None:
        if self._fault is None:
            self._fault_at = now
            self._ending = ending.Ending(fault["kind"], [r.process for r in self._ranks.values()], self._launchers)
        self._fault = fault
        self._next_beat = now

    def _say(self, now: float) -> None:
        """Shows the fault, once per job: by the host of rank 0, by the finder if that one does not answer."""
        assert self._fault is not None
        if self._said or not self._fault["text"]:
            return
        if self._index:
            self._said = not self._fault.get("own", True) or any(p.knows for p in self._peers if p.index == 0)
            if self._said or now - self._fault_at < BEAT_S:
                return
        self._said = True
        advice = "no checkpoint was written yet"
        if self.folder and _has_checkpoint(self.folder):
            advice = f"continue {self.command}"
        if self.folder and not self.command:  # a user's script, which keeps its own
            advice = f"its records are in {self.folder}"
        write(f"hvdtrain: {self._fault['text']}; ending the job, {advice}")

    # --- messages -----------------------------------------------------------------------------------------------

    def _beat(self, now: float, leaving: bool) -> None:
        self._beats += 1
        message = {"number": self._beats, "host": self._index, "idle": self._idle(), "left": leaving}
        told = {"fault": self._fault, "stall": self._stalls.about(now)}
        data = auth.sealed(self._secret, PURPOSE, json.dumps({**message, **told}).encode())
        for peer in self._peers:
            if self._door is not None and not peer.left:
                for _ in range(3 if leaving else 1):
                    with contextlib.suppress(OSError):  # no route while a link is down; a refusal of the last one
                        self._door.sendto(data, peer.address)

    def _hear(self, now: float) -> None:
        for data, sender in _arrived(self._words):
            rank = self._ranks.get(sender)
            if rank and data[:1] in (stalls.WAITS, stalls.MOVES):
                self._stalls.heard(rank.number, data, now)
            elif rank and data and data[-1] not in CHATTER and rank.last_word != RankWords.LEFT:
                rank.last_word = data[-1]
        if self._door is not None:
            self._refused(self._door, now)
            for data, _ in _arrived(self._door):
                if (text := auth.opened(self._secret, PURPOSE, data)) is not None:
                    self._read(json.loads(text), now)

    def _refused(self, door: socket.socket, now: float) -> None:
        """Finds in the socket's error queue (ip(7), IP_RECVERR) who has no sentinel any more."""
        with contextlib.suppress(OSError):
            while True:
                _, about, _, address = door.recvmsg(4096, 4096, socket.MSG_ERRQUEUE)
                refused = any(struct.unpack_from("=I", data)[0] == errno.ECONNREFUSED for _, _, data in about)
                for peer in self._peers:
                    if refused and address == peer.address and peer.heard is not None:
                        # The machine lives, its sentinel does not: no silence to be judged.
                        peer.heard, peer.refused_since, peer.stall = None, now, {}
                        peer.known_since = float("inf")

    def _read(self, message: dict[str, Any], now: float) -> None:
        peer = next((peer for peer in self._peers if peer.index == message["host"]), None)
        if peer is None or message["number"] <= peer.number:  # sent again, by the network or by someone who heard it
            return
        peer.number, peer.heard, peer.refused_since = message["number"], now, None
        peer.idle, peer.left, peer.stall = message["idle"], message["left"], message.get("stall", {})
        fault = message["fault"]
        peer.knows = fault is not None and bool(fault["text"])
        if fault and self._fault is None:
            self._begin({**fault, "own": False}, now)


def _arrived(door: socket.socket) -> Iterator[tuple[bytes, tuple[str, int]]]:
    """The datagrams that wait, and who sent them; not too many at once."""
    for _ in range(MOST_MESSAGES):
        try:
            yield door.recvfrom(4096)
        except BlockingIOError:
            return
        except OSError:  # an earlier message was not delivered; the error queue says which
            continue


def _has_checkpoint(folder: str) -> bool:
    try:
        return any((Path(folder) / "checkpoints").glob("step-*"))
    except OSError:
        return False


def write(line: str, to: int = 2) -> None:
    """One line on standard error, or another descriptor, unless whoever read it is gone or stuck."""
    with contextlib.suppress(OSError):
        if select.select([], [to], [], 0)[1]:
            os.write(to, f"{line}\n".encode())


def _let_go_of_stderr() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


class Orders:
    """What the rank that started us sends on our standard input, one JSON object per line; answers go to stdout."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._hosts, self._index = table["hosts"], table["host"]
        self._me = auth.Party(bytes.fromhex(table["secret"]), goodput.PURPOSE, self._index)
        self._rest = b""

    def open(self, receiver: goodput.Receiver) -> None:
        receiver.open(self._me, (self._index - 1) % len(self._hosts))

    def read(self, watch: Watch) -> bool:
        """Obeys what has arrived; False at the end of the stream."""
        data = os.read(0, 4096)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            watch.folder = order.get("folder", watch.folder)
            watch.command = order.get("command", watch.command)
            if "measure" in order:
                threading.Thread(target=self._measure, daemon=True).start()
        return bool(data)

    def _measure(self) -> None:
        after = (self._index + 1) % len(self._hosts)
        to, source = self._hosts[after], self._hosts[self._index]["address"]
        try:
            if after == self._index:
                raise OSError("no sentinel there")
            rate = goodput.measure(to["address"], to["tcp"], self._me, after, source)
            answer: dict[str, Any] = {"goodput_to": to["name"], "goodput_mbit": round(rate, 3), "reason": None}
        except OSError as error:
            reason = f"TCP to {to['name']} ({to['address']}:{to['tcp']}): {error.strerror or error}"
            answer = {"goodput_mbit": None, "reason": reason}
        write(json.dumps(answer), 1)  # a print() that the end of this process interrupts would abort the interpreter


def main() -> None:
    """Tells its ports on stdout, reads the job's table on stdin, watches until the ranks of this host are gone.

    Argument 2, if there is one, is the address of the link to other hosts.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the job; this process ends with its ranks
    words, door, receiver = _datagrams("127.0.0.1"), None, None
    if len(sys.argv) > 2:
        door, receiver = _datagrams(sys.argv[2]), goodput.Receiver(sys.argv[2])
        door.setsockopt(socket.IPPROTO_IP, getattr(socket, "IP_RECVERR", 11), 1)
    ports = {"udp": door.getsockname()[1], "tcp": receiver.port} if door and receiver else {}
    print(json.dumps({"words": words.getsockname()[1], **ports}), flush=True)
    first = os.fdopen(0, "rb", buffering=0, closefd=False).readline()
    if not first.strip():
        return
    table = json.loads(first)
    with contextlib.suppress(OSError):  # without it other users of this host can crowd out a rank's words
        socket_filter.only_senders(words, [("127.0.0.1", rank["port"]) for rank in table["ranks"]])
    orders: Orders | None = Orders(table)
    if door and receiver and orders:
        with contextlib.suppress(OSError):  # without it strangers can crowd out others, but not pass for them
            socket_filter.only_senders(door, [(host["address"], host["udp"]) for host in table["hosts"]])
        orders.open(receiver)
    watch = Watch(table, words, door, time.monotonic())
    poll = select.poll()
    for one in (words, door, 0):
        if one is not None:
            poll.register(one, select.POLLIN)
    while watch.round(time.monotonic()):
        # The ends of processes wake us at once, but only once each.
        ends = watch.descriptors()
        for descriptor in ends:
            poll.register(descriptor, select.POLLIN)
        events = dict(poll.poll(1000 * watch.pause_s(time.monotonic())))
        while door and [*events] == [door.fileno()] and watch.only_heard(time.monotonic()):
            events = dict(poll.poll(1000 * watch.pause_s(time.monotonic())))
        for descriptor in ends:
            poll.unregister(descriptor)
        if orders and 0 in events and not orders.read(watch):
            poll.unregister(0)
            orders = None


def _datagrams(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((address, 0))
    made.setblocking(False)
    return made
