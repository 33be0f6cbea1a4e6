"""Files from untrusted sources: special files, oversized and deeply nested content, locks."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import failing
from hypothesis import given
from hypothesis import strategies as st
from test_contract import FILES

from hvdtrain.lab.throttle.watchdog import Store
from hvdtrain.sweep import execute
from hvdtrain.system import exits, files, net
from hvdtrain.system.exits import CANNOT_WRITE, Failure

HOSTILE = ("pipe", "socket", "zeros", "kernel messages", "sparse", "deep")


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_throttle_files_are_rejected(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_contract.py tests the files that users name. These two are the throttle's own."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "throttle-state.json"
    FILES[kind](path)
    assert net.requested_throttle(path) is None
    with pytest.raises(Failure) as failure:
        Store(tmp_path).load()
    assert failure.value.code in (exits.BAD_DATA, exits.IO_ERROR, exits.NO_PERMISSION, exits.BAD_CONFIG)


@given(st.text())
def test_errors_are_one_printable_line(text: str) -> None:
    message = str(Failure(text))
    assert message.isprintable()
    assert message == text or not text.isprintable()


def test_the_lines_of_a_librarys_error_are_joined() -> None:
    assert str(Failure("no MPI library:\n  libmpi.so: not found\n\x1b")) == "no MPI library: libmpi.so: not found \\x1b"


DOTS = "." * 70


@pytest.mark.parametrize(
    "text", [f"# {DOTS}", f'a = "\\"{DOTS}" # {DOTS}', f"a = '''\n{DOTS}'''", f'"{DOTS}" = """{DOTS}"""""']
)
def test_dots_in_comments_and_strings_of_toml_are_not_counted(text: str) -> None:
    assert files.from_toml(f"{text}\nlast = 1".encode())["last"] == 1


@pytest.mark.parametrize(
    "start", ["", '"a".', 'x = """\n # """""\n', "x = '''\n \" # '''\n", 'x = {k = """\n # """, ', '"" = "\\\\" #"\n']
)
def test_toml_keys_with_many_parts_are_rejected(start: str) -> None:
    with pytest.raises(ValueError, match="a key of more than 64 parts"):
        files.from_toml(f"{start}{'a.' * 300_000}a = 1".encode())


@pytest.mark.parametrize("text", ['"""\n' + '\\"""\n' * 150_000 + "\\", "'''\n" + "'' '\n" * 150_000, '"\n' * 400_000])
def test_unclosed_strings_of_toml_are_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        files.from_toml(text.encode())


@given(st.recursive(st.none() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_documents_of_few_levels_are_read(value: Any) -> None:
    assert files.from_json(json.dumps(value)) == value


@pytest.mark.parametrize("levels", [files.DEEPEST, files.DEEPEST + 1])
def test_the_deepest_document(levels: int) -> None:
    text = "[" * levels + "]" * levels
    if levels == files.DEEPEST:
        assert files.from_json(text)
        return
    with pytest.raises(ValueError, match="more than 64 levels"):
        files.from_json(text)


# --- locks ------------------------------------------------------------------------------------------------------------


def test_special_files_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path()):
        with pytest.raises(Failure) as failed:
            files.put(path, b"x", "hint")
        assert failed.value.code == CANNOT_WRITE
    assert (tmp_path / "pipe").is_fifo() and [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    """A limit on file sizes acts like a full disk and needs no root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with failing(CANNOT_WRITE, "x: File too large; hint: hint$"):
            files.put(tmp_path / "x", b"x", "hint")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError, match="No space") as failed:
        full.write(b"x")
    failure = files.unwritable("x", failed.value, "hint")
    assert (failure.code, str(failure)) == (exits.IO_ERROR, "x: No space left on device; hint: free some space")
    assert not any(tmp_path.iterdir())


def test_a_lock_excludes_others(tmp_path: Path) -> None:
    with files.locked(tmp_path / "lock"), pytest.raises(BlockingIOError), files.locked(tmp_path / "lock", wait=False):
        raise AssertionError("two holders")
    with files.locked(tmp_path / "lock", wait=False):
        pass


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "symbolic link": lambda path, victim: path.symlink_to(victim),
    "hard link": lambda path, victim: path.hardlink_to(victim),
    "dangling link": lambda path, victim: path.symlink_to(victim.with_name("new")),
    "pipe": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_sweeps_lock_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("process of law, years of work")
    PLANTED[kind](tmp_path / execute.MACHINE_LOCK, victim)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(Failure, match=execute.MACHINE_LOCK) as refused, execute.exclusive(tmp_path / "root"):
        pass
    assert refused.value.code == exits.CANNOT_WRITE
    assert victim.read_text() == "process of law, years of work"
    assert not (tmp_path / "new").exists()


def test_a_sweeps_lock_does_not_overwrite_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = tmp_path / execute.MACHINE_LOCK
    lock.write_text("years of work")
    with execute.exclusive(tmp_path / "root"):
        assert lock.read_text() == "years of work"
    lock.unlink()
    for root in ("a-long-name", "short"):
        with execute.exclusive(tmp_path / root):
            assert lock.read_text() == f"process {os.getpid()}, {tmp_path / root}"
