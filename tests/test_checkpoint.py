"""Laws of checkpoints: arrays survive a save unchanged, a valid checkpoint always exists, and all ranks agree on it.

Ranks are processes connected by pipes. A folder stands for the disk of a host.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT_S, failing
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

from hvdtrain.records import arrays_file
from hvdtrain.system.exits import CANNOT_WRITE, FAILED, IO_ERROR, NO_PERMISSION, Failure
from hvdtrain.training.checkpoint import Checkpoints, Loaded
from hvdtrain.training.checkpoint_files import digest
from hvdtrain.training.train_state import Position

IDENTITY = {"workload": "resnet", "framework": "torch", "parameters": "ab12", "width": 0.25}
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Faster than a disk, for laws with many examples"""


class Pipes:
    """A group of processes, each connected with rank 0 by pipes."""

    def __init__(self, rank: int, size: int, pipes: list[tuple[Connection, Connection]]) -> None:
        self.rank, self.size, self._pipes = rank, size, pipes

    def gather(self, value: Any) -> list[Any]:
        text = json.dumps(value)
        if self.rank > 0:
            end = self._pipes[self.rank][1]
            end.send(text)
            assert end.poll(LIMIT_S)
            return json.loads(end.recv())
        texts = [text]
        for end, _ in self._pipes[1:]:
            assert end.poll(LIMIT_S)
            texts.append(end.recv())
        whole = f"[{','.join(texts)}]"
        for end, _ in self._pipes[1:]:
            end.send(whole)
        return json.loads(whole)


@pytest.fixture
def memory_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


ALONE = Pipes(0, 1, [])


def run(size: int, work: Callable[[Pipes], Any]) -> list[Any]:
    """Call work(group) in `size` processes. Results are (code, text) for a Failure and None for a killed process.

    As under a launcher, the death of one process kills the others.
    """
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(size)]
    answers = [fork.Pipe(duplex=False) for _ in range(size)]

    def rank(number: int) -> None:
        try:
            answer = ("done", work(Pipes(number, size, pipes)))
        except Failure as failure:
            answer = ("done", (failure.code, str(failure)))
        except BaseException:
            answer = ("broken", traceback.format_exc())
        answers[number][1].send(answer)

    processes = [fork.Process(target=rank, args=(number,), daemon=True) for number in range(size)]
    for process in processes:
        process.start()
    alive: dict[Any, Any] = {process.sentinel: process for process in processes}
    while alive:
        for sentinel in wait(list(alive)):
            process = alive.pop(sentinel)
            process.join()
            if process.exitcode:
                for other in alive.values():
                    other.kill()
    results = [end.recv() if end.poll() else ("done", None) for end, _ in answers]
    for end in [end for pair in pipes + answers for end in pair]:
        end.close()
    for kind, result in results:
        assert kind == "done", result
    return [result for _, result in results]


def state(step: int, rank: int = 0, version: int = 0) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    shared = {"weight": np.full((7, 100), step + version / 8, np.float32), "steps": np.array(step)}
    return shared, {"mean": np.full(50, 1000 * step + rank, np.float64)}, {"epoch": step // 10, "version": version}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].tobytes() == right[name].tobytes()
        for name in left
    )


def whole(loaded: Loaded, rank: int = 0) -> bool:
    shared, local, progress = state(loaded.step, rank, loaded.progress["version"])
    return same(loaded.shared, shared) and same(loaded.local, local) and loaded.progress == progress


def make(folder: Path, group: Any = ALONE, keep: int = 2, **more: Any) -> Checkpoints:
    settings_: dict[str, Any] = {"identity": IDENTITY, "report": lambda line: None} | more
    return Checkpoints(folder, group, keep=keep, **settings_)


def save(folder: Path, *steps: int, group: Any = ALONE, **more: Any) -> Path:
    for step in steps:
        path = make(folder, group, **more).save(step, *state(step, group.rank))
    return path


def found(checkpoints: Checkpoints) -> Loaded:
    loaded = checkpoints.newest()
    assert loaded is not None
    return loaded


def present(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


# --- arrays survive unchanged ---------------------------------------------------------------------------------------

DTYPES = [np.float32, np.float64, np.float16, np.int64, np.uint8, np.uint16, np.bool_, np.complex64, np.int8, np.uint64]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8)
    array = (raw % 2 if dtype.kind == "b" else raw).view(dtype).reshape(shape)  # any bits, including NaN
    if array.ndim and draw(st.booleans()):
        array = array.transpose(draw(st.permutations(range(array.ndim))))
        array = array[(slice(None, None, draw(st.sampled_from([1, 2, -1]))),)]
    return array


@settings(max_examples=30)
@given(
    st.dictionaries(st.text(max_size=8), arrays(), max_size=5),
    st.dictionaries(st.text(max_size=8), arrays(), max_size=2),
    st.dictionaries(st.text(max_size=8), st.integers() | st.floats(allow_nan=False) | st.text() | st.lists(st.none())),
    st.integers(0, 10**10),
)
def test_load_returns_what_was_saved(shared: Any, local: Any, progress: Any, step: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = make(Path(folder) / "checkpoints").save(step, shared, local, progress)
        loaded = found(make(Path(folder) / "checkpoints"))
        assert (loaded.step, loaded.progress) == (step, progress)
        assert same(loaded.shared, shared)
        assert same(loaded.local, local)
        assert all(array.flags.writeable and array.flags.aligned for array in loaded.shared.values())
        library = load_file(path / "shared.safetensors")
        assert same({name: library[name] for name in shared}, shared)


def test_files_written_by_the_safetensors_library_can_be_read(tmp_path: Path) -> None:
    shared = {"b": np.arange(6.0).reshape(2, 3), "a": np.array(3, np.int16)}
    save_file(shared, tmp_path / "x")
    digest = hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    loaded = arrays_file.read(tmp_path / "x", {"bytes": (tmp_path / "x").stat().st_size, "sha256": digest})
    assert same({name: loaded[name] for name in shared}, shared)


def test_saving_and_loading_make_no_second_copy_in_memory(tmp_path: Path) -> None:
    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))

    def peak(work: Callable[[], Any]) -> float:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, result = status("VmRSS"), work()
        assert result
        return (status("VmHWM") - before) / 1024

    def child(group: Pipes) -> tuple[float, float]:
        shared = {str(i): np.full((1024, 1024), i, np.float32) for i in range(16)}  # 64 MiB
        save_mib = peak(lambda: make(tmp_path).save(1, shared, {}, {}))
        return save_mib, peak(lambda: found(make(tmp_path)))

    ((save_mib, load_mib),) = run(1, child)
    assert save_mib < 8
    assert load_mib < 64 + 8


# --- which checkpoints are kept --------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 3))
def test_the_last_k_and_the_best_are_kept(bests: list[bool], keep: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for step, best in enumerate(bests):
            make(Path(folder), keep=keep).save(step, *state(step), best=best)
        last = range(len(bests))[-keep:]
        best_steps = [step for step, best in enumerate(bests) if best][-1:]
        assert present(Path(folder)) == names(*sorted({*last, *best_steps}))


def test_only_old_checkpoints_and_leftovers_of_this_run_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, identity={"workload": "captioning"})
    others = [*names(1, 2), ".saving-notes", ".saving-step-00000001-short", "step-1", "notes"]
    for name in [*others[2:], *(f".{kind}-step-00000003-0123456789abcdef" for kind in ("saving", "removing"))]:
        (tmp_path / name).mkdir()
    assert make(tmp_path).newest() is None
    assert present(tmp_path) == sorted(others)
    save(tmp_path, 3, 4, 5)
    assert present(tmp_path) == sorted([*others, *names(4, 5)])


def test_rejected_and_later_checkpoints_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30, keep=3)
    for step in (20, 30):
        os.truncate(tmp_path / names(step)[0] / "shared.safetensors", 99)
    checkpoints = make(tmp_path, keep=1)
    assert found(checkpoints).step == 10
    checkpoints.save(25, *state(25))
    assert present(tmp_path) == names(20, 25, 30)
    assert found(make(tmp_path)).step == 25
    checkpoints.save(30, *state(30))
    assert present(tmp_path) == names(20, 30), "step 30 is no longer a rejected one"


# --- invalid checkpoints are rejected with a reason, and the previous one is used ------------------------------------


def edit(path: Path, **fields: Any) -> None:
    """Change fields of checkpoint.json, with a digest that fits."""
    manifest = json.loads(path.read_text()) | fields
    del manifest["digest"]
    path.write_text(json.dumps(manifest | {"digest": digest(manifest)}))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def into_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def into_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def forged(folder: Path, head: Any, data: bytes = bytes(8), head_bytes: int | None = None) -> None:
    """Replace shared.safetensors, with its size and SHA-256 in checkpoint.json."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    whole = (len(text) if head_bytes is None else head_bytes).to_bytes(8, "little") + text + data
    (folder / "shared.safetensors").write_bytes(whole)
    stated = json.loads((folder / "checkpoint.json").read_text())["files"]
    stated["shared.safetensors"] = {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    edit(folder / "checkpoint.json", files=stated)


def array(shape: Any, start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


FORGED: dict[str, tuple[Any, str]] = {
    "beyond": ({"a": array([4], 0, 16)}, "arrays end at byte 16 of 8"),
    "gap": ({"a": array([1], 4, 8)}, "does not match its offsets"),
    "huge": ({"a": array([2**40, 2**40], 0, 8)}, "does not match its offsets"),
    "negative": ({"a": array([-2, -1], 0, 8)}, "are not whole numbers"),
    "dtype": ({"a": array([2], 0, 8, "object")}, "KeyError: 'object'"),
    "list": ([1, 2], "is not a valid safetensors file"),
    "nesting": (b"[" * 100_000, "nested more than"),
    "escapes": ({"\x1b]0;x\x07": array([1], 4, 8)}, r"\x1b]0;x"),
}
SHARED, OWN, JSON = "shared.safetensors", "rank0000.safetensors", "checkpoint.json"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shorter file": (lambda f: os.truncate(f / SHARED, 100), f"{SHARED} has 100 bytes instead of"),
    "bit in array": (lambda f: flip(f / SHARED, -1), f"{SHARED} is damaged (SHA-256 differs)"),
    "missing file": (lambda f: (f / OWN).unlink(), f"{OWN} is missing"),
    "foreign folder": (lambda f: (f / JSON).unlink(), f"{JSON} is missing"),
    "foreign file": (into_a_file, f"{JSON}: Not a directory"),
    "not text": (lambda f: (f / JSON).write_bytes(b"\xff\xfe\x00"), f"{JSON} is not JSON"),
    "nested JSON": (lambda f: (f / JSON).write_text("[" * 10**6), f"{JSON} is not JSON"),
    "edited JSON": (
        lambda f: (f / JSON).write_text((f / JSON).read_text().replace('"epoch": 2', '"epoch": 3')),
        f"{JSON} is damaged",
    ),
    "schema": (lambda f: edit(f / JSON, schema="hvdtrain/checkpoint/9"), "has schema 'hvdtrain/checkpoint/9'"),
    "other model": (lambda f: edit(f / JSON, identity=IDENTITY | {"width": 1.0}), "width: 1.0 there, 0.25 here"),
    "renamed": (lambda f: f.rename(f.with_name("step-00000077")), f"disagrees with the step in its {JSON}, 20"),
    "pipe": (lambda f: into_a_pipe(f / SHARED), f"{SHARED}: a pipe, not a plain file"),
    "JSON pipe": (lambda f: into_a_pipe(f / JSON), f"{JSON}: a pipe, not a plain file"),
    "other folder": (lambda f: edit(f / JSON, files={f"../step-00000010/{SHARED}": {}}), "not a file of a checkpoint"),
    "no size": (lambda f: edit(f / JSON, files={SHARED: {"bytes": "1"}}), "no valid size and SHA-256"),
    "long head": (lambda f: forged(f, b"{}", head_bytes=2**63), "a header of 9223372036854775808 bytes"),
    **{name: (lambda f, head=head: forged(f, head), reason) for name, (head, reason) in FORGED.items()},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_rejected_and_the_previous_one_is_used(tmp_path: Path, damage: str) -> None:
    harm, reason = DAMAGES[damage]
    save(tmp_path, 10, 20)
    harm(tmp_path / names(20)[0])
    lines: list[str] = []
    loaded = found(make(tmp_path, report=lines.append))
    assert loaded.step == 10 and whole(loaded)
    (line,) = lines
    assert "rejected: " in line and reason in line and "\n" not in line


POSITION = {"epoch": 2, "consumed": 8, "totals": [0.5, 8.0], "validation_scores": [{"accuracy": 0.5}, {}]}
IMPOSSIBLE: list[dict[str, Any]] = [
    {"step": 19},
    {"step": "20"},
    {"epoch": 10**400},
    {"epoch": 0, "validation_scores": []},
    {"consumed": 17},
    {"rated_s": math.nan},
    {"train_s": -1.0},
    {"best_step": 21},
    {"totals": ["1"]},
    {"validation_scores": [{"accuracy": "high"}, {}]},
    {"unknown": 1},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_impossible_progress_is_rejected(tmp_path: Path, changes: dict[str, Any]) -> None:
    lines: list[str] = []
    check = partial(Position.loaded, epoch_samples=16)
    checkpoints = make(tmp_path, check=check, report=lines.append)
    for step in (10, 20):
        progress = dataclasses.asdict(Position(step=step, best_step=10, **POSITION))
        checkpoints.save(step, {}, {}, progress)
    assert found(checkpoints).step == 20
    edit(tmp_path / names(20)[0] / "checkpoint.json", progress=progress | changes)
    assert found(checkpoints).step == 10
    assert ["its progress " in line for line in lines] == [True]


def test_without_a_valid_checkpoint_the_reasons_are_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    save(tmp_path, 1, 2)
    assert make(tmp_path, report=lines.append, identity=IDENTITY | {"framework": "tensorflow"}).newest() is None
    assert names(2)[0] in lines[0] and names(1)[0] in lines[1]
    assert "framework: 'torch' there, 'tensorflow' here" in lines[0]
    assert lines[2] == f"no valid checkpoint in {tmp_path}"


def test_the_best_checkpoint_may_be_older_than_the_newest(tmp_path: Path) -> None:
    for step, best in ((1, True), (2, True), (3, False)):
        make(tmp_path).save(step, *state(step), best=best)
    loaded = make(tmp_path).newest(best=True)
    assert loaded is not None and loaded.step == 2 and found(make(tmp_path)).step == 3


@pytest.mark.parametrize("name", ["parameter.weight", "drift.weights"])
def test_infinite_weights_are_not_saved(name: str, tmp_path: Path) -> None:
    """An optimizer's state may be infinite."""
    infinite = np.array([1, np.inf], np.float32)
    with failing(FAILED, f"{name} contains infinity or NaN"):
        make(tmp_path).save(1, {}, {name: infinite}, {})
    make(tmp_path).save(2, {"momentum.weight": infinite}, {}, {})


# --- several ranks, on one disk or on several ------------------------------------------------------------------------

DISKS: dict[str, Callable[[int], str]] = {
    "one disk": lambda rank: "all",
    "a disk per host": lambda rank: f"host{rank // 2}",
    "a disk each": str,
}


@pytest.mark.parametrize("disk", DISKS)
def test_each_disk_has_one_shared_file_and_each_rank_loads_its_own(tmp_path: Path, disk: str) -> None:
    def work(group: Pipes) -> tuple[int, bool]:
        folder = tmp_path / DISKS[disk](group.rank) / "run" / "checkpoints"
        save(folder, 10, 20, 30, group=group)
        loaded = found(make(folder, group))
        return loaded.step, whole(loaded, group.rank)

    assert run(4, work) == [(30, True)] * 4
    for host in {DISKS[disk](rank) for rank in range(4)}:
        folder = tmp_path / host / "run" / "checkpoints"
        here = [f"rank{rank:04d}.safetensors" for rank in range(4) if DISKS[disk](rank) == host]
        assert present(folder) == names(20, 30)
        assert present(folder / names(30)[0]) == ["checkpoint.json", *here, "shared.safetensors"]


@pytest.mark.parametrize("now", [[0, 1], [0, 1, 0], [0, 1, 2], [0, 1, 2, 3]], ids=str)
def test_after_a_change_of_ranks_each_loads_the_state_of_all_earlier_ranks(tmp_path: Path, now: list[int]) -> None:
    """`now`: the new local ranks. With the same ranks on the same hosts each loads only its own state."""
    before = [0, 1, 0]
    run(3, lambda group: str(save(tmp_path, 10, group=group, layout=before)))

    def load(group: Pipes) -> bool:
        loaded = found(make(tmp_path, group, layout=now))
        own = [state(10, rank)[1] for rank in range(3)]
        all_others = len(loaded.others) == 3 and all(map(same, loaded.others, own))
        local = same(loaded.local, own[group.rank]) if len(now) == 3 else not loaded.local
        return local and (not loaded.others if now == before else all_others) and same(loaded.shared, state(10)[0])

    assert all(run(len(now), load))
    (tmp_path / names(10)[0] / "rank0001.safetensors").unlink()
    assert not any(run(len(now), lambda group: make(tmp_path, group, layout=now).newest() is not None))


def test_fewer_ranks_load_the_state_of_all_earlier_ranks_of_their_stage(tmp_path: Path) -> None:
    run(4, lambda group: str(save(tmp_path, 10, group=group, stages=[0, 0, 1, 1], cut=["fc"])))

    def load(group: Pipes) -> bool:
        loaded = found(make(tmp_path, group, stages=[0, 1], cut=["fc"]))
        earlier = [state(10, rank)[1] for rank in (2 * group.rank, 2 * group.rank + 1)]
        return not loaded.local and all(map(same, loaded.others, earlier)) and len(loaded.others) == 2

    assert all(run(2, load))


def test_hosts_that_differ_in_the_last_bit_load_their_own_bits(tmp_path: Path) -> None:
    def work(group: Pipes) -> float:
        run_ = make(tmp_path / str(group.rank), group)
        run_.save(1, {"weight": np.array(0.1) + group.rank * 2**-53}, {}, {})
        return float(found(run_).shared["weight"])

    assert run(2, work) == [0.1, 0.1 + 2**-53]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda f: flip(f / "rank0001.safetensors", -1), "rank0001.safetensors is damaged (SHA-256 differs) (rank 1)"),
        (shutil.rmtree, "it is missing (rank 1)"),
        (lambda f: edit(f / "checkpoint.json", save="another"), "the hosts hold different saves of this step"),
    ],
    ids=["damaged", "missing", "different"],
)
def test_all_ranks_load_the_newest_checkpoint_that_is_valid_everywhere(
    tmp_path: Path, harm: Callable[[Path], Any], reason: str
) -> None:
    def work(group: Pipes) -> tuple[list[str], bool, int]:
        lines: list[str] = []
        folder = tmp_path / str(group.rank)
        save(folder, 10, 20, group=group)
        if group.rank == 1:
            harm(folder / names(20)[0])
        loaded = found(make(folder, group, report=lines.append))
        return lines, whole(loaded, group.rank), loaded.step

    (lines, *first), *others = run(3, work)
    assert first == [True, 10] and others == [([], True, 10)] * 2
    assert len(lines) == 1 and lines[0].endswith(f"rejected: {reason}")


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


FAULTS: dict[str, tuple[int, str]] = {
    "no room": (IO_ERROR, f"{os.strerror(errno.EFBIG)} on {os.uname().nodename}; hint: raise the limit"),
    "folder is a file": (CANNOT_WRITE, f"{os.strerror(errno.EEXIST)} on {os.uname().nodename}; hint: check the path"),
    "dtype": (FAILED, "TypeError: array 'big' of object cannot be stored"),
    "nan": (FAILED, "parameter.w contains infinity or NaN"),
    "progress": (FAILED, "TypeError: Object of type float32"),
    "step": (FAILED, "the ranks are at different steps, [20, 21]"),
}


@pytest.mark.parametrize(("disk", "fault"), [("one disk", "no room"), *(("a disk each", fault) for fault in FAULTS)])
def test_if_one_rank_fails_all_raise_the_same_failure_and_keep_the_previous_checkpoint(
    tmp_path: Path, disk: str, fault: str
) -> None:
    culprit, (code, reason) = 0 if fault == "progress" else 2, FAULTS[fault]

    def work(group: Pipes) -> Any:
        folder = usual = tmp_path / DISKS[disk](group.rank)
        save(folder, 10, group=group)
        (shared, local, progress), step = state(20, group.rank), 20
        if group.rank == culprit:
            if fault == "no room":
                limit_files(2000)
                local["big"] = np.zeros(9999)
            elif fault == "folder is a file":
                folder = tmp_path / "file"
                folder.write_text("")
            elif fault == "dtype":
                local["big"] = np.zeros(3, object)
            elif fault == "nan":
                local["parameter.w"] = np.array([1, np.nan], np.float16)
            elif fault == "progress":
                progress["loss"] = np.float32(3)
            else:
                step = 21
        with pytest.raises(Failure) as failure:
            make(folder, group).save(step, shared, local, progress)
        limit_files(resource.RLIM_INFINITY)
        loaded, text = found(make(usual, group)), str(failure.value)
        group.gather(None)
        return failure.value.code, text[text.index(": ") :], loaded.step, present(usual)

    (first, *others) = run(3, work)
    assert others == [first] * 2 and first[0] == code and first[2:] == (10, names(10))
    assert reason in first[1] and "\n" not in first[1]
    assert fault == "step" or f"(rank {culprit})" in first[1]


@pytest.mark.parametrize("step", [10, 20], ids=["same step", "next step"])
def test_a_failure_on_one_host_is_undone_on_hosts_that_were_done(tmp_path: Path, step: int) -> None:
    identity = {"long": "x" * 9000}  # makes checkpoint.json the only file over the limit

    def work(group: Pipes) -> Any:
        folder = tmp_path / str(group.rank)
        save(folder, 10, group=group, identity=identity)
        if group.rank == 1:
            limit_files(6000)
        with pytest.raises(Failure, match=r"\(rank 1\)") as failure:
            make(folder, group, identity=identity).save(step, *state(step, group.rank, version=1))
        loaded = found(make(folder, group, identity=identity))
        return failure.value.code, loaded.step, whole(loaded, group.rank), loaded.progress["version"], present(folder)

    assert run(3, work) == [(IO_ERROR, 10, True, 0, names(10))] * 3


# --- killed processes, full and read-only disks ----------------------------------------------------------------------

CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir", "scandir", "listdir")


def watch(before: Callable[[str, tuple[Any, ...]], None]) -> None:
    """In this process, call before(name, arguments) before each call of a file function of `os`."""

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before(name, args)
            return function(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))


def die_at(number: int) -> Callable[[], int]:
    """Kill this process at its `number`-th call, with a write half done. The result returns the number of calls."""
    real_write, count = os.write, 0

    def before(name: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        count += 1
        if count == number:
            if name == "write":
                real_write(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    watch(before)
    return lambda: count


def after(folder: Path, group: Any) -> tuple[int, int, bool, list[str], int]:
    """Load in a new process, and save again: (step, version, whether it was intact, folders, last step)."""
    first = found(make(folder, group, keep=1))
    good = whole(first, group.rank)
    save(folder, 30, group=group, keep=1)
    final = found(make(folder, group))
    assert whole(final, group.rank)
    return first.step, first.progress["version"], good, present(folder), final.step


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_a_valid_checkpoint_survives_a_kill_at_any_call_of_a_save(
    memory_path: Path, again: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(arrays_file, "_CHUNK_BYTES", 256)
    step, seen, number = 10 if again else 20, [], 0
    while True:
        number += 2 if again else 1
        folder = memory_path / str(number)
        save(folder, 10)

        def work(group: Pipes, folder: Path = folder, number: int = number) -> int:
            calls = die_at(number)
            make(folder, group, keep=1).save(step, *state(step, version=1))
            return calls()

        (calls,) = run(1, work)
        ((first, version, good, entries, final),) = run(1, partial(after, folder))
        seen.append((first, version))
        assert good
        assert (entries, final) == (names(30), 30)
        if calls is not None:
            break
    assert number > 40
    old, new = (10, 0), (step, 1)
    assert seen == [old] * seen.count(old) + [new] * seen.count(new)  # the change happens at one moment
    assert min(seen.count(old), seen.count(new)) > 1


@pytest.mark.parametrize(("disk", "again"), [("one disk", False), ("a disk each", True)])
def test_all_ranks_agree_on_a_valid_checkpoint_after_one_is_killed(memory_path: Path, disk: str, again: bool) -> None:
    step, seen = 10 if again else 20, set()
    for victim, number in [(number % 2, number) for number in range(1, 44, 5)]:

        def place(group: Pipes, number: int = number) -> Path:
            return memory_path / str(number) / DISKS[disk](group.rank)

        def work(group: Pipes, victim: int = victim, number: int = number) -> None:
            save(place(group, number), 10, group=group)
            if group.rank == victim:
                die_at(number)
            make(place(group, number), group, keep=1).save(step, *state(step, group.rank, version=1))

        run(2, work)
        results = run(2, lambda group: after(place(group), group))
        assert len({result[:2] for result in results}) == 1
        assert all(good and entries == names(30) and final == 30 for _, _, good, entries, final in results)
        seen.add(results[0][:2])
    assert (10, 0) in seen
    assert seen <= {(10, 0), (step, 1)}


def test_a_save_is_durable_before_it_is_renamed_and_before_old_ones_are_removed(tmp_path: Path) -> None:
    def work(group: Pipes) -> list[str]:
        save(tmp_path, 10)
        unsynced: set[str] = set()  # files and folders whose content a loss of power may destroy
        opened: dict[int, str] = {}
        story: list[str] = []
        real_open = os.open

        def before(name: str, args: tuple[Any, ...]) -> None:
            if name == "write":
                unsynced.update((opened[args[0]], os.path.dirname(opened[args[0]])))  # noqa: PTH120
            elif name == "fsync":
                unsynced.discard(opened[args[0]])
            elif name == "rename":
                story.append(f"{Path(args[1]).name[:8]} {len(unsynced - {str(tmp_path)})}{str(tmp_path) in unsynced}")
                unsynced.add(str(tmp_path))
            elif name in ("unlink", "rmdir"):
                story.append("removal")

        watch(before)
        counting_open = os.open

        def open_(path: Any, *args: Any, **kwargs: Any) -> int:
            file = counting_open(path, *args, **kwargs)
            opened[file] = str(path)
            return file

        assert real_open is not counting_open
        os.open = open_
        make(tmp_path, keep=1).save(20, *state(20))
        return story

    ((new_name, old_goes, *rest),) = run(1, work)
    assert new_name == "step-000 0False"
    assert old_goes == ".removin 0False"
    assert set(rest) == {"removal"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint folder on a disk of 2 MiB, or with a limit of 1 MiB for each file if this process may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    mounted = os.geteuid() == 0 and not subprocess.run(mount, capture_output=True).returncode
    if not mounted:
        limit_files(1 << 20)
    save(folder / "checkpoints", 10)
    yield folder / "checkpoints"
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_io_error_and_the_previous_checkpoint_is_kept(small_disk: Path) -> None:
    for _ in range(2):  # leftovers of the first attempt would fill the disk
        with failing(IO_ERROR, r"(No space left on device|File too large) on .*; "):
            make(small_disk).save(20, {"big": np.zeros(1 << 19)}, {}, {})
        assert present(small_disk) == names(10)
    assert whole(found(make(small_disk)))
    save(small_disk, 20)


def test_a_read_only_folder_can_still_be_read(small_disk: Path) -> None:
    if small_disk.parent.is_mount():
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk.parent)], check=True)
    elif os.geteuid() == 0:
        pytest.skip("root can write anywhere and cannot mount here")
    else:
        small_disk.chmod(0o555)
    with failing(CANNOT_WRITE, "check the path and its permissions"):
        save(small_disk, 20)
    assert whole(found(make(small_disk)))
    assert present(small_disk) == names(10)


def test_a_folder_that_cannot_be_listed_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with failing(NO_PERMISSION, "cannot list"):
        found(make(tmp_path / "file"))
