"""Filter the senders of a socket by address, with classic BPF in the kernel (socket(7)). Needs no root.

This protects sockets that other machines can reach: TensorFlow's server listens on every address of a host, and a flood
of datagrams would crowd out the few that matter. An attacker on the same network can forge a sender's address. That is
enough for a datagram; for TCP the attacker must also see the answers.

A socket filter (SO_ATTACH_FILTER) drops datagrams. On TCP sockets newer kernels allow it only with CAP_NET_ADMIN.
There, two sockets of the process share the port (SO_REUSEPORT), and a BPF program chooses between them.
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
"""SKF_NET_OFF: the offset counts from the IP header. Without it, from the UDP or TCP header."""
PASS, DROP = (RETURN, 0, 0, 0xFFFFFFFF), (RETURN, 0, 0, 0)
FIRST, SECOND = (RETURN, 0, 0, 0), (RETURN, 0, 0, 1)
"""Choose a socket among those that share a port, in the order in which they began to listen."""
SOURCE_ADDRESS, SOURCE_PORT = 12, 0

Instruction = tuple[int, int, int, int]
"""Operation, instructions to skip if true, instructions to skip if false, constant."""


def only_strangers(decoy: socket.socket, friends: Iterable[str]) -> None:
    """Direct unknown senders to the TCP socket `decoy`, and `friends` to the next socket on the same port.

    `friends` are IPv4 addresses. `decoy` must be the first socket that listens. Raises OSError if the kernel refuses.
    """
    decoy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    program = [*_ipv4(), (LOAD_WORD, 0, 0, NETWORK_HEADER + SOURCE_ADDRESS)]
    for address in friends:
        program += [(EQUAL, 0, 1, _number(address)), SECOND]
    _attach(decoy, [*program, FIRST], SO_ATTACH_REUSEPORT_CBPF)


def only_senders(receiver: socket.socket, senders: Iterable[tuple[str, int]]) -> None:
    """Drop all packets to a UDP socket but those from these IPv4 addresses and ports.

    Raises OSError if the kernel refuses.
    """
    program = _ipv4()
    for address, port in senders:
        program += [(LOAD_WORD, 0, 0, NETWORK_HEADER + SOURCE_ADDRESS), (EQUAL, 0, 3, _number(address))]
        program += [(LOAD_HALF, 0, 0, SOURCE_PORT), (EQUAL, 0, 1, port), PASS]
    _attach(receiver, [*program, DROP], SO_ATTACH_FILTER)


def _ipv4() -> list[Instruction]:
    """Drop packets that are not IPv4: an IPv6 socket may accept both. The version is the first half byte."""
    return [(LOAD_BYTE, 0, 0, NETWORK_HEADER), (AND, 0, 0, 0xF0), (EQUAL, 1, 0, 0x40), DROP]


def _number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


def _attach(target: socket.socket, program: list[Instruction], option: int) -> None:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    target.setsockopt(socket.SOL_SOCKET, option, struct.pack("HP", len(program), ctypes.addressof(buffer)))
