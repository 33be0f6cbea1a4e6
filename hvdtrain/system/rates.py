"""Link rates: parse them, format them, and compute the TCP payload that they leave.

Rates use tc's notation (tc(8), "RATES"): `10mbit` is 10 x 10^6 bit/s, `1gibit` is 2^30 bit/s. In tc, `mbps` means
megabytes per second. Most people read it as megabits, so it is rejected with an explanation.

TCP delivers less than the rate, because tc counts whole Ethernet frames. A frame has 1514 bytes (1500 and the 14-byte
Ethernet header). 1448 of them are data: the IPv4 and TCP headers take 40 bytes (RFC 791, RFC 9293) and time stamps take
12 (RFC 7323).
"""

from __future__ import annotations

import re
from decimal import Decimal

from hvdtrain.system.exits import USAGE, Failure

_BITS = {"bit": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _BITS |= {f"{_prefix}bit": 1000**_power, f"{_prefix}ibit": 1024**_power}

LOWEST_BIT_S = 8_000  # a full frame takes 1.5 s; at lower rates TCP cannot connect in time
HIGHEST_BIT_S = 1_000_000_000_000

FRAME_BYTES = 1514
"""A full Ethernet frame as tc counts it: 1500 bytes and the header, without preamble, checksum and gap."""
PAYLOAD_BYTES = 1448
"""TCP data in a full frame."""


def parse_rate(text: str) -> int:
    """Parse a rate such as `10mbit`, `2.5gbit` or `500kbit`, in any case, to bit/s.

    Raises Failure (2) for anything else: a missing number or unit, tc's byte units (`mbps`), and rates outside
    8 kbit/s to 1 Tbit/s.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z/]*)", text.strip().lower(), re.ASCII)
    if match is None:
        raise Failure(f"'{text}' is not a rate; hint: write a number and a unit, such as 10mbit", USAGE)
    number, unit = match.groups()
    if re.fullmatch(r"[kmgt]?i?bps", unit):
        right = unit.replace("bps", "bit")
        prefix = unit.removesuffix("bps")
        raise Failure(
            f"'{text}': in tc {unit} counts bytes, 1{unit} = 8{prefix}bit per second; "
            f"hint: write {number}{right} for bits, or {_plain(Decimal(number) * 8)}{right} if you mean bytes",
            USAGE,
        )
    if unit not in _BITS:
        meant = re.fullmatch(r"([kmgt]?)(?:b|bits?/s|bits|bit/sec)?", unit)
        hint = f"{number}{(meant[1] if meant and unit else 'm')}bit"
        problem = f"has the unknown unit '{unit}'" if unit else "has no unit"
        raise Failure(f"'{text}' {problem}; hint: write for example {hint} (bit, kbit, mbit, gbit)", USAGE)
    rate = int(Decimal(number) * _BITS[unit])
    if not LOWEST_BIT_S <= rate <= HIGHEST_BIT_S:
        limits = f"{show_rate(LOWEST_BIT_S)} to {show_rate(HIGHEST_BIT_S)}"
        raise Failure(f"'{text}' is {rate} bit/s; hint: give {limits}", USAGE)
    return rate


def show_rate(rate_bit_s: int) -> str:
    """Format a rate exactly in its largest decimal unit: 10_000_000 -> `10mbit`. parse_rate returns the same number."""
    for unit in ("tbit", "gbit", "mbit", "kbit"):
        if rate_bit_s >= _BITS[unit]:
            return f"{_plain(Decimal(rate_bit_s) / _BITS[unit])}{unit}"
    return f"{rate_bit_s}bit"


def goodput_one_way(rate_bit_s: float, payload_bytes: int = PAYLOAD_BYTES) -> float:
    """TCP payload in bit/s if only acknowledgements go the other way: 95.6 % of the rate, more with larger frames."""
    return rate_bit_s * payload_bytes / (payload_bytes + FRAME_BYTES - PAYLOAD_BYTES)


def goodput_both_ways(rate_bit_s: float) -> float:
    """TCP payload in bit/s per direction if both carry data: 93.6 % of the rate.

    Each direction also carries the other one's acknowledgements. The share is measured, because the number of
    acknowledgements depends on the kernel.
    """
    return rate_bit_s * 0.936


def ring_bytes(nbytes: int, hosts: int) -> int:
    """Return the bytes that each of p hosts sends in a ring all-reduce: 2(p-1)/p of the vector."""
    return 2 * (hosts - 1) * nbytes // hosts


def all_reduce_s(nbytes: int, hosts: int, goodput_bit_s: float) -> float:
    """Return the shortest time of a ring all-reduce. `hvdtrain.plan` predicts the time of a whole step."""
    return ring_bytes(nbytes, hosts) * 8 / goodput_bit_s


def _plain(number: Decimal) -> str:
    """Format without an exponent and without trailing zeros."""
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
