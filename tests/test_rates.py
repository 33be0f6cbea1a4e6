"""Rates: what is read, what is refused and why, and what TCP gets of them."""

from __future__ import annotations

import pytest
from conftest import failing
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.system.rates import HIGHEST_BIT_S, LOWEST_BIT_S, goodput_both_ways, goodput_one_way, parse_rate, show_rate


@pytest.mark.parametrize(
    ("text", "bit_s"),
    [
        ("10mbit", 10_000_000),
        ("10Mbit", 10_000_000),
        ("2.5gbit", 2_500_000_000),
        ("500kbit", 500_000),
        ("64000bit", 64_000),
        ("1mibit", 1_048_576),
        ("1tbit", 10**12),
    ],
)
def test_rates_as_tc_writes_them(text: str, bit_s: int) -> None:
    assert parse_rate(text) == bit_s


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10mbps", "counts bytes, 1mbps = 8mbit per second; hint: write 10mbit for bits, or 80mbit if you mean bytes"),
        ("10bps", "counts bytes"),
        ("10Mbit/s", "write for example 10mbit"),
        ("10parsec", "write for example 10mbit"),
        ("-5mbit", "not a rate"),
        ("", "not a rate"),
        ("0mbit", "give 8kbit to 1tbit"),
        ("2tbit", "give 8kbit to 1tbit"),
    ],
)
def test_anything_else_is_refused_in_one_line_that_says_what_to_write(text: str, reason: str) -> None:
    with failing(2) as refused:
        parse_rate(text)
    assert reason in str(refused.value) and f"'{text}'" in str(refused.value) and "\n" not in str(refused.value)


@given(st.integers(LOWEST_BIT_S, HIGHEST_BIT_S))
def test_a_rate_shown_reads_back_as_itself(bit_s: int) -> None:
    assert parse_rate(show_rate(bit_s)) == bit_s


def test_a_rate_is_shown_in_its_largest_unit() -> None:
    assert [show_rate(rate) for rate in (10**7, 10**9, 2_500_000, 8000, 1_000_001)] == [
        *("10mbit", "1gbit", "2.5mbit", "8kbit", "1.000001mbit")
    ]


def test_what_is_left_for_data() -> None:
    assert goodput_one_way(10e6) == pytest.approx(9.564e6, rel=1e-4)
    assert goodput_one_way(9015, 8949) == pytest.approx(8949), "a frame at MTU 9001"
    assert goodput_both_ways(10e6) == pytest.approx(9.36e6)
