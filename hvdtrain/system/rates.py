"""Link rates: reading them, writing them, and what of them is left for the data.

A rate is written as tc writes it: `10mbit` is 10 x 10^6 bit/s, `1gibit` is 2^30 bit/s (tc(8), "RATES"). tc also knows
`mbps` and means megabytes per second by it; as nearly everybody reads it as megabits, it is refused with the reason.

What TCP delivers is less than the rate, because tc counts whole Ethernet frames: of 1514 bytes (1500 and 14 of Ethernet
header) 1448 are data (40 are the headers of IPv4 and TCP, RFC 791 and RFC 9293, and 12 time stamps, RFC 7323).
"""

from __future__ import annotations

import re
from decimal import Decimal

from hvdtrain.system.exits import USAGE, Failure

_BITS = {"bit": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _BITS |= {f"{_prefix}bit": 1000**_power, f"{_prefix}ibit": 1024**_power}

LOWEST_BIT_S = 8_000  # one full frame takes 1.5 s: below that TCP does not even connect in time
HIGHEST_BIT_S = 1_000_000_000_000

FRAME_BYTES = 1514
"""A full Ethernet frame as tc counts it: 1500 bytes and the header, without preamble, checksum and gap."""
PAYLOAD_BYTES = 1448
"""TCP data in a full frame."""


def parse_rate(text: str) -> int:
    """A rate in bit/s from text such as `10mbit`, `2.5gbit`, `500kbit`; upper and lower case alike, as in tc(8).

    Raises Failure (2) for anything else: no number, no unit, tc's byte units (`mbps`), outside 8 kbit/s to 1 Tbit/s.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z/]*)", text.strip().lower(), re.ASCII)
    if match is None:
        raise Failure(f"'{text}' is not a rate; write a number and a unit, such as 10mbit", USAGE)
    number, unit = match.groups()
    if re.fullmatch(r"[kmgt]?i?bps", unit):
        right = unit.replace("bps", "bit")
        prefix = unit.removesuffix("bps")
        raise Failure(
            f"'{text}': in tc {unit} counts bytes, 1{unit} = 8{prefix}bit per second; "
            f"write {number}{right} for bits, or {_plain(Decimal(number) * 8)}{right} if you mean bytes",
            USAGE,
        )
    if unit not in _BITS:
        meant = re.fullmatch(r"([kmgt]?)(?:b|bits?/s|bits|bit/sec)?", unit)
        hint = f"{number}{(meant[1] if meant and unit else 'm')}bit"
        problem = f"has no unit this tool knows ('{unit}')" if unit else "has no unit"
        raise Failure(f"'{text}' {problem}; write for example {hint} (bit, kbit, mbit, gbit)", USAGE)
    rate = int(Decimal(number) * _BITS[unit])
    if not LOWEST_BIT_S <= rate <= HIGHEST_BIT_S:
        raise Failure(
            f"'{text}' is {rate} bit/s; give {show_rate(LOWEST_BIT_S)} to {show_rate(HIGHEST_BIT_S)}",
            USAGE,
        )
    return rate


def show_rate(rate_bit_s: int) -> str:
    """The rate in the largest decimal unit, exactly: 10_000_000 -> `10mbit`; parse_rate reads back the same number."""
    for unit in ("tbit", "gbit", "mbit", "kbit"):
        if rate_bit_s >= _BITS[unit]:
            return f"{_plain(Decimal(rate_bit_s) / _BITS[unit])}{unit}"
    return f"{rate_bit_s}bit"


def goodput_one_way(rate_bit_s: float, payload_bytes: int = PAYLOAD_BYTES) -> float:
    """bit/s of TCP data through a link, only acknowledgements going the other way: 95.6 % of its rate, and more if
    larger frames carry more payload each."""
    return rate_bit_s * payload_bytes / (payload_bytes + FRAME_BYTES - PAYLOAD_BYTES)


def goodput_both_ways(rate_bit_s: float) -> float:
    """bit/s of TCP data each way with data both ways at once: 93.6 %, as each carries the other's acknowledgements.

    Measured, not derived: how many acknowledgements are sent depends on the kernel.
    """
    return rate_bit_s * 0.936


def _plain(number: Decimal) -> str:
    """Without exponent and without trailing zeros."""
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
