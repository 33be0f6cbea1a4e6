"""Keeps the packets of strangers from a socket: a filter in the kernel, by the sender's address (socket(7)).

For sockets whose own address does not keep strangers out: TensorFlow's server listens on every address of a host, and a
flood of datagrams would crowd out the few that matter. Classic BPF, which every user may attach to his own sockets. A
sender's address can be forged on the same network: for a datagram that is all it takes, for TCP the forger would have
to see the answers as well.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterable

SO_ATTACH_FILTER = 26  # asm-generic/socket.h
# linux/bpf_common.h and linux/filter.h
LOAD_WORD, LOAD_HALF, LOAD_BYTE, AND, EQUAL, RETURN = 0x20, 0x28, 0x30, 0x54, 0x15, 0x06
NETWORK_HEADER = 0xFFF00000
"""SKF_NET_OFF: what follows counts from the IP header; otherwise from the UDP or TCP header"""
PASS, DROP = (RETURN, 0, 0, 0xFFFFFFFF), (RETURN, 0, 0, 0)
SOURCE_ADDRESS, SOURCE_PORT = 12, 0

Instruction = tuple[int, int, int, int]
"""Operation, how many to skip if true, if false, constant"""


def only_networks(door: socket.socket, networks: Iterable[tuple[str, str]]) -> None:
    """From now on only packets from these (IPv4 address, network mask) arrive. Raises OSError if the kernel refuses."""
    program = _ipv4()
    for address, mask in networks:
        wanted = _number(address) & _number(mask)
        program += [(LOAD_WORD, 0, 0, NETWORK_HEADER + SOURCE_ADDRESS), (AND, 0, 0, _number(mask))]
        program += [(EQUAL, 0, 1, wanted), PASS]
    _attach(door, [*program, DROP])


def only_senders(door: socket.socket, senders: Iterable[tuple[str, int]]) -> None:
    """The same for a UDP socket by IPv4 address and port."""
    program = _ipv4()
    for address, port in senders:
        program += [(LOAD_WORD, 0, 0, NETWORK_HEADER + SOURCE_ADDRESS), (EQUAL, 0, 3, _number(address))]
        program += [(LOAD_HALF, 0, 0, SOURCE_PORT), (EQUAL, 0, 1, port), PASS]
    _attach(door, [*program, DROP])


def _ipv4() -> list[Instruction]:
    """A socket of IPv6 may take IPv4 as well: the version is the first half byte."""
    return [(LOAD_BYTE, 0, 0, NETWORK_HEADER), (AND, 0, 0, 0xF0), (EQUAL, 1, 0, 0x40), DROP]


def _number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def _attach(door: socket.socket, program: list[Instruction]) -> None:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    door.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(held)))
