"""The throttle without root: its commands and its errors. tests/test_throttle_links.py tests it on real links."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, WITHOUT_RIGHTS, failing, finished

from hvdtrain.lab.throttle import __main__ as command_line
from hvdtrain.lab.throttle import goodput, qdisc, remote
from hvdtrain.lab.throttle.qdisc import Shape
from hvdtrain.lab.throttle.request import parser, shapes
from hvdtrain.system import commands, net

TEN = Shape(rate_bit_s=10_000_000)


def words(commands: list[list[str]]) -> list[str]:
    return [" ".join(command) for command in commands]


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [8_000, 10**6, 10**7, 10**8, 10**9, 10**10, 10**11])
@pytest.mark.parametrize("mtu", [1500, 9000])
def test_burst_and_queue_follow_from_the_rate(rate: int, mtu: int) -> None:
    burst, limit = qdisc.burst_bytes(rate, mtu), qdisc.limit_bytes(rate, mtu)
    assert burst >= 2 * (mtu + 14), "a full frame must fit, or it never passes"
    assert burst <= max(rate * 0.002 / 8, 2 * (mtu + 14)), "a burst of more than 2 ms lets short messages through"
    assert burst < 256_000 or rate > 10**9
    assert limit >= max(burst, 32_000)
    assert limit < 2**32 and burst < 2**32, "tc's numbers have 32 bits"


def test_the_shortest_time_of_a_short_message() -> None:
    """64 kB are 45 frames. 3028 bytes pass at once, the rest at 10 Mbit/s."""
    size = 64_000
    frames = 45
    assert goodput.least_s(size, 10**7, 3028) == pytest.approx((size + frames * 66 - 3028) * 8 / 1e7)
    assert goodput.least_s(1000, 10**7, 3028) == 0


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "up", "down"),
    [
        ("10mbit", 10**7, 10**7),
        ("10mbit --up 5mbit", 5 * 10**6, 10**7),
        ("--down 1gbit", None, 10**9),
        ("10mbit --down none", 10**7, None),
    ],
)
def test_rates_of_both_directions(arguments: str, up: int | None, down: int | None) -> None:
    result = shapes(parser().parse_args(arguments.split()))
    assert {name: shape.rate_bit_s if shape else None for name, shape in result.items()} == {"up": up, "down": down}


def test_changes_need_root_and_a_dry_run_does_not(iproute2: None) -> None:
    module = [*WITHOUT_RIGHTS, sys.executable, "-B", "-m", "hvdtrain.lab.throttle"]

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return finished([*module, *arguments])

    done = call("10mbit", "--dev", "lo", "--force")
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr.startswith("throttle: changing queues needs root") and done.stderr.count("\n") == 1
    for arguments in (["10mbit", "--dev", "lo"], ["--up", "1gbit", "--dev", "lo", "--for", "2s"]):
        forbidden = call(*arguments)
        assert forbidden.returncode == 1 and "lo is the loopback" in forbidden.stderr, forbidden.stderr
    dry = call("10mbit", "--dev", "lo", "--dry-run", "--force")
    assert dry.returncode == 0
    assert "tc qdisc replace dev lo root handle 4876: tbf rate 10000000bit burst" in dry.stdout


def test_a_missing_tc_is_an_error_that_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.shutil, "which", lambda *_, **__: None)
    with failing(69, "iproute2"):
        command_line.main(["10mbit", "--dev", "lo", "--dry-run", "--force"])


def test_the_requested_throttle_is_none_if_nothing_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "throttle.json"
    assert net.requested_throttle(file) is None
    about = command_line.document("eth0", TEN, None)
    file.write_text(json.dumps(about))
    assert net.requested_throttle(file) == about
    assert (about["up_mbit"], about["down_mbit"]) == (10.0, None)


# --- other machines --------------------------------------------------------------------------------------------------


def test_other_machines_get_the_arguments_without_the_hosts() -> None:
    arguments = remote.local_arguments(["10mbit", "--hosts", "a,b", "--dev", "eth1", "--hostfile=x", "--for", "5m"])
    assert arguments == ["10mbit", "--dev", "eth1", "--for", "5m"]
    command = remote.command("node-1", arguments)
    assert command[0] == "ssh" and "BatchMode=yes" in command and command[-2] == "node-1" and command[-3] == "--"
    assert str(ROOT / "tools" / "throttle.sh") in command[-1]


def test_messages_of_a_login_shell_are_not_part_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {"b": 'Welcome to b\n{\n  "ok": true\n}\n', "c": "Welcome to c\n"}
    results = {host: subprocess.CompletedProcess([], 0, text, "") for host, text in outputs.items()}
    assert remote._report(results, as_json=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["hosts"] == [{"host": "b", "ok": True}]
    assert err == "b: Welcome to b\nc: Welcome to c\n"
