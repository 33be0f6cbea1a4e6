"""Laws of files that others may have written: what is no plain file, too large or too deep is refused, in no time."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import failing
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain import records
from hvdtrain.captions.prepared import load
from hvdtrain.config import options, parser
from hvdtrain.data.prepared import open_images
from hvdtrain.lab import throttle, topology
from hvdtrain.lab.throttle.watchdog import Store
from hvdtrain.models.vgg16_weights import Vgg16Config, import_weights, read_head
from hvdtrain.sweep import execute
from hvdtrain.sweep import file as sweep_file
from hvdtrain.system import exits, files, hosts
from hvdtrain.system.exits import CANNOT_WRITE, Failure


class Hangs(BaseException):
    pass


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """A reader that hangs fails; one on a busy machine does not."""

    def rung(number: int, frame: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, rung)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def images(path: Path) -> Any:
    path.rename(path.with_name("index.json"))
    return open_images(path.parent)


def captioned(path: Path) -> Any:
    path.rename(path.with_name("index.json"))
    return load(str(path.parent))


def with_config(path: Path) -> Any:
    return parser.parse(options.TrainConfig, ["--config", str(path)], prog="x", purpose="")


def journal(path: Path) -> Any:
    path.rename(path.with_name("throttle-state.json"))
    return Store(path.parent).load()


READERS: dict[str, Callable[[Path], Any]] = {
    "sweep": sweep_file.read,
    "topology": lambda path: topology.from_toml(path, cluster=None, user=""),
    "hostfile": hosts.read_hostfile,
    "config": with_config,
    "images": images,
    "captions": captioned,
    "record": lambda path: records.read_document(path, records.Manifest),
    "weights": read_head,
    "published weights": lambda path: import_weights(Vgg16Config(source=str(path), destination=f"{path}.out")),
    "journal": journal,
}


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def kernels(path: Path) -> None:
    path.symlink_to("/proc/kmsg")  # calls itself a plain file of 0 bytes, and reading it does not end


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte of zeros


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 500_000)


def deep_object(path: Path) -> None:
    path.write_text("a = " + "{a = " * 60_000)


def dotted(path: Path) -> None:
    path.write_text("a." * 300_000 + "a = 1\n")


def escapes(path: Path) -> None:
    path.write_bytes(b"\x1b]0;owned\x07\x1b[2J\r")


HOSTILE = [a_pipe, a_socket, endless, kernels, large, deep, deep_object, dotted, escapes]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_file_that_is_not_what_it_claims_is_refused_in_one_line(tmp_path: Path, hostile: Any, reader: str) -> None:
    path = tmp_path / "\x1b[31mname.json"
    hostile(path)
    with pytest.raises(Failure) as refused:
        READERS[reader](path)
    assert str(refused.value).isprintable()
    codes = [exits.USAGE, exits.BAD_DATA, exits.UNREACHABLE, exits.IO_ERROR, exits.BAD_CONFIG]
    if hostile is kernels and os.geteuid():
        codes = [exits.NO_PERMISSION]
    assert refused.value.code in codes


@given(st.text())
def test_an_error_text_is_one_printable_line_and_printable_texts_stay(text: str) -> None:
    said = str(Failure(text))
    assert said.isprintable()
    assert said == text or not text.isprintable()


def test_the_lines_of_a_librarys_error_become_one() -> None:
    assert str(Failure("no MPI library:\n  libmpi.so: not found\n\x1b")) == "no MPI library: libmpi.so: not found \\x1b"


DOTS = "." * 70


@pytest.mark.parametrize(
    "text", [f"# {DOTS}", f'a = "\\"{DOTS}" # {DOTS}', f"a = '''\n{DOTS}'''", f'"{DOTS}" = """{DOTS}"""""']
)
def test_dots_in_comments_and_strings_of_toml_are_no_parts_of_a_key(text: str) -> None:
    assert files.from_toml(f"{text}\nlast = 1".encode())["last"] == 1


@pytest.mark.parametrize(
    "start", ["", '"a".', 'x = """\n # """""\n', "x = '''\n \" # '''\n", 'x = {k = """\n # """, ', '"" = "\\\\" #"\n']
)
def test_no_string_or_comment_hides_a_key_of_many_parts(start: str) -> None:
    with pytest.raises(ValueError, match="a key of more than 64 parts"):
        files.from_toml(f"{start}{'a.' * 300_000}a = 1".encode())


@pytest.mark.parametrize("text", ['"""\n' + '\\"""\n' * 150_000 + "\\", "'''\n" + "'' '\n" * 150_000, '"\n' * 400_000])
def test_strings_that_stay_open_are_refused_in_no_time(text: str) -> None:
    with pytest.raises(ValueError):
        files.from_toml(text.encode())


@given(st.recursive(st.none() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_documents_that_are_not_deep_are_read(value: Any) -> None:
    assert files.from_json(json.dumps(value)) == value


@pytest.mark.parametrize("levels", [files.DEEPEST, files.DEEPEST + 1])
def test_the_deepest_document(levels: int) -> None:
    text = "[" * levels + "]" * levels
    if levels == files.DEEPEST:
        assert files.from_json(text)
        return
    with pytest.raises(ValueError, match="more than 64 levels"):
        files.from_json(text)


def test_a_throttle_that_is_none_is_none(tmp_path: Path) -> None:
    for make in (a_pipe, endless, deep):
        path = tmp_path / make.__name__
        make(path)
        assert throttle.requested(path) is None


# --- locks ------------------------------------------------------------------------------------------------------------


def test_what_is_no_plain_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path()):
        with pytest.raises(Failure) as failed:
            files.put(path, b"x", "hint")
        assert failed.value.code == CANNOT_WRITE
    assert (tmp_path / "pipe").is_fifo() and [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    """A limit on file sizes is a full disk that needs no root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with failing(CANNOT_WRITE, "x: File too large; hint: hint$"):
            files.put(tmp_path / "x", b"x", "hint")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError, match="No space") as failed:
        full.write(b"x")
    told = files.unwritable("x", failed.value, "hint")
    assert (told.code, str(told)) == (exits.IO_ERROR, "x: No space left on device; hint: free some space")
    assert not any(tmp_path.iterdir())


def test_a_lock_file_is_made_and_locks(tmp_path: Path) -> None:
    with files.locked(tmp_path / "lock"), pytest.raises(BlockingIOError), files.locked(tmp_path / "lock", wait=False):
        raise AssertionError("two hold it")
    with files.locked(tmp_path / "lock", wait=False):
        pass


def a_link(path: Path, treasure: Path) -> None:
    path.symlink_to(treasure)


def a_second_name(path: Path, treasure: Path) -> None:
    path.hardlink_to(treasure)


def a_dangling_link(path: Path, treasure: Path) -> None:
    path.symlink_to(treasure.with_name("new"))


@pytest.mark.parametrize("plant", [a_link, a_second_name, a_dangling_link, lambda path, _: a_pipe(path)])
def test_a_sweeps_lock_follows_no_link_and_harms_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any
) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("process of law, years of work")
    plant(tmp_path / execute.MACHINE_LOCK, treasure)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(Failure, match=execute.MACHINE_LOCK) as refused, execute.exclusive(tmp_path / "root"):
        pass
    assert refused.value.code == exits.CANNOT_WRITE
    assert treasure.read_text() == "process of law, years of work"
    assert not (tmp_path / "new").exists()


def test_a_sweeps_lock_truncates_nothing_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = tmp_path / execute.MACHINE_LOCK
    lock.write_text("years of work")
    with execute.exclusive(tmp_path / "root"):
        assert lock.read_text() == "years of work"
    lock.unlink()
    for root in ("a-long-name", "short"):
        with execute.exclusive(tmp_path / root):
            assert lock.read_text() == f"process {os.getpid()}, {tmp_path / root}"


# --- npz --------------------------------------------------------------------------------------------------------------


def member(shape: tuple[int, ...], data: bytes, kind: str = "<f4") -> bytes:
    head = io.BytesIO()
    description = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, description)
    return head.getvalue() + data


def head(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


NO_HEADS = [b"nothing", *map(head, (b"(" * 65535, b"(" * 5000, b"-" * 8000 + b"1", b"{[]: 1}", b"0x" + b"f" * 8000))]
"""What Python's parser ends with errors of many types"""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (member((2**40,), bytes(16)), "does not match"),
        (member((2**70,), bytes(16)), "does not match"),
        (member((4,), bytes(16), "|O"), "does not match|Object"),
        (member((4,), bytes(32), "<i8"), "does not match"),
        *((content, "damaged .its header cannot be read.") for content in NO_HEADS),
    ],
)
def test_an_npz_that_claims_more_than_it_holds_is_refused_before_it_is_unpacked(
    tmp_path: Path, content: bytes, words: str
) -> None:
    with zipfile.ZipFile(tmp_path / "w.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", content)
    with failing(exits.BAD_DATA, words):
        import_weights(Vgg16Config(source=str(tmp_path / "w.npz"), destination=str(tmp_path / "out")))
