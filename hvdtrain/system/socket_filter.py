"""Keeps strangers from a socket by the sender's address: classic BPF in the kernel (socket(7)), which needs no root.

For sockets whose own address does not keep strangers out: TensorFlow's server listens on every address of a host, and a
flood of datagrams would crowd out the few that matter. A sender's address can be forged on the same network: for a
datagram that is all it takes, for TCP the forger would have to see the answers as well.

A socket filter (SO_ATTACH_FILTER) drops datagrams. On TCP sockets newer kernels allow one only with CAP_NET_ADMIN, so a
TCP port is shared between two sockets of one process instead (SO_REUSEPORT), and a program chooses between them.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterable

SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF = 26, 51  # asm-generic/socket.h
# linux/bpf_common.h and linux/filter.h
LOAD_WORD, LOAD_HALF, LOAD_BYTE, AND, EQUAL, RETURN = 0x20, 0x28, 0x30, 0x54, 0x15, 0x06
NETWORK_HEADER = 0xFFF00000
"""SKF_NET_OFF: what follows counts from the IP header; otherwise from the UDP or TCP header"""
PASS, DROP = (RETURN, 0, 0, 0xFFFFFFFF), (RETURN, 0, 0, 0)
FIRST, SECOND = (RETURN, 0, 0, 0), (RETURN, 0, 0, 1)
"""Of the sockets that share a port, in the order in which they began to listen"""
SOURCE_ADDRESS, SOURCE_PORT = 12, 0

Instruction = tuple[int, int, int, int]
"""Operation, how many to skip if true, if false, constant"""


def only_strangers(decoy: socket.socket, friends: Iterable[str]) -> None:
    """Of the TCP sockets that will share this one's port, the second that listens gets connections from these IPv4
    addresses, and this one, which must listen first, all others. Raises OSError if the kernel refuses."""
    decoy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    program = [*_ipv4(), (LOAD_WORD, 0, 0, NETWORK_HEADER + SOURCE_ADDRESS)]
    for address in friends:
        program += [(EQUAL, 0, 1, _number(address)), SECOND]
    _attach(decoy, [*program, FIRST], SO_ATTACH_REUSEPORT_CBPF)


def only_senders(door: socket.socket, senders: Iterable[tuple[str, int]]) -> None:
    """From now on only packets from these IPv4 addresses and ports reach this UDP socket. Raises OSError if the kernel
    refuses."""
    program = _ipv4()
    for address, port in senders:
        program += [(LOAD_WORD, 0, 0, NETWORK_HEADER + SOURCE_ADDRESS), (EQUAL, 0, 3, _number(address))]
        program += [(LOAD_HALF, 0, 0, SOURCE_PORT), (EQUAL, 0, 1, port), PASS]
    _attach(door, [*program, DROP], SO_ATTACH_FILTER)


def _ipv4() -> list[Instruction]:
    """A socket of IPv6 may take IPv4 as well: the version is the first half byte."""
    return [(LOAD_BYTE, 0, 0, NETWORK_HEADER), (AND, 0, 0, 0xF0), (EQUAL, 1, 0, 0x40), DROP]


def _number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def _attach(door: socket.socket, program: list[Instruction], option: int) -> None:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    door.setsockopt(socket.SOL_SOCKET, option, struct.pack("HP", len(program), ctypes.addressof(held)))
