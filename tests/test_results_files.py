"""Every file of a run folder is read, ignored, or refused with file and line. It is never averaged in if damaged, and
never causes a traceback."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
from conftest import LIMIT_S, failing
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain import records
from hvdtrain.results import groups
from hvdtrain.results.__main__ import main
from hvdtrain.results.read import folders, frame
from hvdtrain.results.read.frame import load
from hvdtrain.system.exits import Failure

METRICS = Path("metrics") / "rank0000.jsonl"
GOOD = runs.Made(hosts=2, rate_mbit=10.0, energy_w={"cpu0": 30.0}, kind="timing")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return runs.make(tmp_path / "runs" / "r", GOOD)


def lines(folder: Path, name: Path = METRICS) -> list[str]:
    return (folder / name).read_text().splitlines(keepends=True)


def put(folder: Path, text: list[str] | bytes, name: Path = METRICS) -> None:
    (folder / name).write_bytes(text if isinstance(text, bytes) else "".join(text).encode())


def change(folder: Path, line: int, **fields: Any) -> None:
    """Changes fields of the record in that line (from 1; -1: the last one) of the metrics."""
    with runs.edited(folder / METRICS) as found:
        found[line - (line > 0)].update(fields)


def state(folder: Path) -> tuple[str, str]:
    """The run's state and the problems of its files."""
    loaded = load([folder.parent])
    return str(loaded.runs.iloc[0]["state"]), "\n".join(map(str, loaded.problems))


# --- one damage each --------------------------------------------------------------------------------------------------


FIELDS = ("data_s", -0.001), ("compute_s", float("nan")), ("bytes_sent", 10**400), ("step", True), ("type", "stap")
NO_RECORDS = "[1]\n", "null\n", "7\n", '"step"\n', "{}\n", '{"type":"step"}\n', "[" * 5000 + "\n"


@pytest.mark.parametrize("damage", [*FIELDS, ("type", None), *NO_RECORDS])
def test_a_line_that_is_no_valid_record_refuses_the_run(folder: Path, damage: str | tuple[str, Any]) -> None:
    found = lines(folder)
    wrong = damage if isinstance(damage, str) else json.dumps(json.loads(found[3]) | dict([damage])) + "\n"
    put(folder, [*found[:3], wrong, *found[3:]])
    found_state, problems = state(folder)
    assert found_state == "refused"
    assert f"{METRICS}:4: " in problems
    assert load([folder]).runs["train_s"].isna().all()


@pytest.mark.parametrize("text", [b'{"type":"st', b"\x00\x00", b"\xff\xfe{", b'{"type":"step","st{"type":"step"}'])
def test_an_incomplete_line_costs_only_its_own_record(folder: Path, text: bytes) -> None:
    """Here a step is missing, so the summary counts, but times per step do not."""
    found = [line.encode() for line in lines(folder)]
    put(folder, b"".join(found[:3]) + text + b"\n" + b"".join(found[4:]))
    loaded = load([folder])
    row = loaded.runs.iloc[0]
    assert row["state"] == "complete"
    assert row["train_s"] > 0
    assert loaded.runs["step_s"].isna().all()
    problems = "\n".join(map(str, loaded.problems))
    assert f"{METRICS}:4: incomplete" in problems
    assert "9 of 10 steps" in problems


def test_byte_order_marks_and_carriage_returns_are_accepted(folder: Path) -> None:
    before = load([folder]).runs
    put(folder, b"\xef\xbb\xbf" + "".join(lines(folder)).replace("\n", "\r\n").encode() + b"\r\n\r\n")
    manifest = folder / "manifest.json"
    manifest.write_bytes(b"\xef\xbb\xbf" + manifest.read_bytes().replace(b"\n", b"\r\n"))
    loaded = load([folder])
    assert loaded.problems == []
    assert loaded.runs.equals(before)


def test_unknown_fields_are_ignored_and_other_schemas_are_refused(folder: Path) -> None:
    change(folder, 4, of="the future")
    assert state(folder)[0] == "complete"
    change(folder, -1, schema="hvdtrain/99")
    found, problems = state(folder)
    assert found == "refused"
    assert "'hvdtrain/99'" in problems


def test_unfinished_runs_are_listed_but_do_not_count(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "COMPLETE").unlink()
    assert state(folder)[0] == "unfinished"
    assert main(["table", str(folder), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == []
    assert main(["list", str(folder)]) == 0
    assert "unfinished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda at: (at / "manifest.json").write_text('{"name": "a web app", "icons": []}'), "not a record"),
        (lambda at: (at / "manifest.json").write_text("{\n\n  oops"), "manifest.json:3: not JSON"),
        (lambda at: (at / "manifest.json").write_text("[" * 10_000), "not JSON"),
        (lambda at: (at / "manifest.json").write_text(lines(at)[0]), "Invalid value 'step'"),
        (lambda at: (at / METRICS).unlink(), "No such file"),
        (lambda at: put(at, lines(at)[:-1]), "summary"),
        (lambda at: _replace(at / METRICS, os.mkdir), "not a plain file"),
        (lambda at: _replace(at / METRICS, lambda path: path.symlink_to(path)), "symbolic links"),
    ],
)
def test_a_damaged_file_refuses_the_run(folder: Path, damage: Callable[[Path], None], problem: str) -> None:
    damage(folder)
    found, problems = state(folder)
    assert found == "refused"
    assert problem in problems


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def test_links_and_overlapping_roots_give_each_run_once(folder: Path) -> None:
    root = folder.parent
    (root / "loop").symlink_to(root)
    (root / "damaged" / "metrics").mkdir(parents=True)
    (root / "damaged" / METRICS).touch()
    inner = runs.make(root / "project" / "inner")
    (root / "project" / "metrics").mkdir()  # of somebody else
    (root / "also").symlink_to(folder)
    (root / "best").mkdir()
    (root / "best" / "one").symlink_to(folder)
    assert list(folders.find([root], [])) == [inner, folder], "under its own name"
    loaded = load([root, folder, root])
    assert len(loaded.runs) == 2
    assert [problem.path for problem in loaded.problems] == [str(root / "damaged")]
    for wrong in (root / "nowhere", folder / "manifest.json"):
        with failing(2):
            load([wrong])


def test_control_characters_in_names_are_escaped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.rename(folder.with_name(os.fsdecode(b"no\xfftext")))
    runs.make(folder.with_name("red\x1b[31m\n"), GOOD)
    assert main(["list", str(folder.parent)]) == 0
    printed = capsys.readouterr()
    assert "red\\x1b[31m\\n" in printed.out
    assert "not UTF-8" in printed.err
    assert "\x1b" not in printed.out + printed.err
    for command in ("scaling", "accuracy", "energy", "export"):
        assert main([command, str(folder.parent)]) == 0
    assert main(["show", str(folder.with_name("red\x1b[31m\n"))]) == 0


def test_a_copy_of_a_run_is_refused(folder: Path) -> None:
    subprocess.run(["cp", "-r", folder, folder.with_name("s")], check=True)
    loaded = load([folder.parent])
    assert sorted(loaded.runs["state"]) == ["complete", "refused"]
    assert "copy" in str(loaded.problems[0])


def test_a_huge_line_is_refused_with_little_memory(folder: Path) -> None:
    """The file has 1 GB (sparse), the process may use half of it."""
    with (folder / METRICS).open("r+b") as stream:
        stream.seek(0, os.SEEK_END)
        stream.truncate(stream.tell() + (1 << 30))
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.results", "list", str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (1 << 29, 1 << 29)),
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert "refused" in done.stdout, done.stderr
    assert f"{METRICS}:16: a line of more than 64 MiB" in done.stderr


def test_memory_does_not_grow_with_the_length_of_a_run(folder: Path) -> None:
    def peak_bytes(steps: int) -> int:
        step = json.loads(lines(folder)[2])
        put(folder, [json.dumps(step | {"step": number}) + "\n" for number in range(steps)])
        tracemalloc.start()
        try:
            load([folder])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(10)  # imports modules
    assert peak_bytes(20_000) < 1.5 * peak_bytes(200)


# --- repeated and missing records ---------------------------------------------------------------------------


def test_of_a_resumed_run_the_later_record_counts(folder: Path) -> None:
    """Steps 4 to 9 are repeated from the checkpoint of step 4, twice as fast."""
    whole = lines(folder)
    again = [json.loads(line) for line in whole]
    steps = [record for record in again if record["type"] == "step"]
    saved = records.Saved(step=4, checkpoint_s=3.0, best=False)
    whole.insert(again.index(steps[4]), json.dumps(records.as_json(saved)) + "\n")
    put(folder, whole)
    for record in steps:
        record["compute_s"] /= 2
    resumed = records.as_json(records.Resumed(step=4, utc="2026-01-01T00:00:00Z"))
    later = [resumed, *(r for r in again if r["type"] != "step" or r["step"] >= 4)]
    before = frame.epochs(load([folder]), str(folder))
    put(folder, [*whole[:-1], *(json.dumps(record) + "\n" for record in later)])
    row = load([folder]).runs.iloc[0]
    timed = [0.5 if step < 4 else 0.25 for step in range(2, 10)]  # the first two are warm-up
    assert row["compute_s"] == pytest.approx(sum(timed) / len(timed), rel=1e-12)
    assert row["resumed"] is True
    assert row["checkpoint_s"] == pytest.approx(2 * GOOD.checkpoint_s + 3.0)
    assert row["network_bytes_per_step"] == pytest.approx(1.05 * GOOD.limit_bytes * 10 / 6)  # counters of 6 steps
    assert frame.epochs(load([folder]), str(folder)).equals(before)
    for ranks, hosts in ((2, 2), (1, 1), (2, 1)):
        resumed |= {"ranks": ranks, "hosts": hosts}
        put(folder, [*whole[:-1], *(json.dumps(record) + "\n" for record in [resumed, *later[1:]])])
        loaded = load([folder])
        row = loaded.runs.iloc[0]
        if (ranks, hosts) == (2, 2):
            assert (row["ranks"], row["hosts"], row["marked"]) == (2, 2, None)
            continue
        marked = f"its ranks changed: 2 on 2 hosts, {ranks} on {hosts} from step 4"
        assert (row["state"], row["marked"]) == ("complete", marked)
        assert row[["ranks", "hosts", "ranks_per_host"]].isna().all()
        assert groups.usable(loaded.runs).empty


def test_a_script_that_starts_again_in_its_folder_counts_from_the_last_start(folder: Path) -> None:
    """It was killed in its second epoch and has no checkpoints, so it wrote no `resumed` record."""
    whole = lines(folder)
    row, before = load([folder]).runs.iloc[0], frame.epochs(load([folder]), str(folder))
    first = [json.loads(line) for line in whole[:9]]
    slower = [json.dumps(each | {"compute_s": 9.0} if each["type"] == "step" else each) + "\n" for each in first]
    put(folder, slower + whole)
    again = load([folder]).runs.iloc[0]
    names = ["state", "steps", "compute_s", "step_s", "bytes_per_step", "checkpoint_s", "train_s"]
    assert again[names].equals(row[names])
    assert (again["resumed"], again["bytes_per_step"]) == (True, 4000)
    assert frame.epochs(load([folder]), str(folder)).equals(before)


def test_the_slowest_link_and_the_busiest_nic_count(folder: Path) -> None:
    with runs.edited(folder / "manifest.json") as manifest:
        manifest["links"][0] |= {"goodput_mbit": 9.1, "throttle": {"up_mbit": 10.0, "down_mbit": 8.0}}
    nics = [{"nic": "eth0", "sent_bytes": 1000, "received_bytes": 7000}, {"nic": "eth1", "sent_bytes": 6000}]
    change(folder, -1, nic_bytes=nics)
    (folder / "experiment.json").unlink()
    row = load([folder]).runs.iloc[0]
    assert (row["goodput_mbit"], row["rate_mbit"]) == (9.1, 8.0)
    assert row["network_bytes_per_step"] == 7000 / row["steps"]


def test_partial_epochs_and_pipeline_stages(folder: Path) -> None:
    assert load([folder]).runs.iloc[0]["limit_bytes_per_step"] == GOOD.limit_bytes
    with runs.edited(folder / "manifest.json") as manifest:
        manifest["config"]["epoch_samples"] = 96
        manifest["plan"]["stages"] = 2
    found = load([folder]).runs
    assert found.iloc[0]["train_samples"] == 96
    assert found[["limit_bytes_per_step", "limit_s_per_step"]].isna().all(axis=None)


def test_runs_that_a_sweep_set_aside_do_not_count(tmp_path: Path) -> None:
    for name in ("p-timing-r1", "p-timing-r1-failed1", "p-timing-r1-unfinished2"):
        runs.make(tmp_path / name, kind="timing")
    found = load([tmp_path]).runs
    assert groups.usable(found)["run"].tolist() == ["p-timing-r1"]
    assert set(found["marked"].dropna()) == {"set aside by its sweep"}


@pytest.mark.parametrize(
    ("accuracies", "best"), [((0.5, 0.9, 0.7), (0.9, 2)), ((0.5, 0.9, 0.9), (0.9, 3)), ((0.9, None, 0.7), (0.9, 1))]
)
def test_the_best_epoch_is_the_last_of_equals(
    accuracies: tuple[float | None, ...], best: tuple[float, int], tmp_path: Path
) -> None:
    folder = runs.make(tmp_path / "r", epochs=3, accuracies=accuracies)
    with runs.edited(folder / "manifest.json") as manifest:
        scores = manifest["metric"]["scores"]
        scores["epoch"] = scores["accuracy"] | {"label": "epoch", "most": None}
    values = [{"epoch": n} | ({} if a is None else {"accuracy": a}) for n, a in enumerate(accuracies, start=1)]
    change(folder, -1, validation_scores=values)
    row = load([folder]).runs.iloc[0]
    assert (row["best_validation_accuracy"], row["best_validation_epoch"]) == best


def test_energy_of_hosts_that_share_a_machine_counts_once(folder: Path) -> None:
    """The first of two hosts on one machine records its counters. A GPU that no rank uses needs no counter."""
    first, second = (folder / "monitors" / f"h{host}.jsonl" for host in range(2))
    row = load([folder]).runs.iloc[0]
    assert row["power_w"] == pytest.approx(60.0)
    unread = {"source": None, "name": "", "reason": "no counter", "used": False}
    here = {"source": "nvml-energy", "name": "", "reason": None, "used": True}
    with runs.edited(second) as (sensors, *samples):
        sensors["devices"][0] |= {"source": None, "reason": "recorded by host h0, on the same machine"}
        for sample in samples:
            sample["energy_j"] = {}
    loaded = load([folder])
    assert loaded.runs.iloc[0]["energy_j"] == pytest.approx(row["energy_j"] / 2)
    assert loaded.runs["energy_absent"].isna().all(), "nothing is missing"
    with runs.edited(first) as (sensors, *samples):
        sensors["devices"] += [{"device": "gpu0"} | here, {"device": "dram0"} | here]
        for sample in samples:
            sample["energy_j"] = {"cpu0": 1.0, "gpu0": 2.0, "dram0": 3.0}
    with runs.edited(second) as (sensors, *_):
        sensors["devices"] += [{"device": "gpu0"} | unread, {"device": "dram0"} | unread]
    row = load([folder]).runs.iloc[0]
    assert row["energy_j"] == pytest.approx(6.0 * len(samples))
    assert row["energy_absent"] == "gpu0, dram0: no counter"
    with runs.edited(second) as (sensors, *_):
        sensors["devices"][1]["used"] = True
    assert load([folder]).runs["energy_j"].isna().all(), "a GPU that a rank uses is missing"


def test_a_device_with_unknown_use_counts_as_used(tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "r", energy_w={"cpu0": 30.0, "gpu0": 10.0, "dram0": 5.0}, used=("cpu0",))
    with runs.edited(folder / "monitors" / "h0.jsonl") as (sensors, *_):
        sensors["devices"][2]["used"] = None
    row = load([folder]).runs.iloc[0]
    assert (row["energy_used_j"], row["idle_devices"]) == (pytest.approx(35 / 45 * row["energy_j"]), "h0:gpu0")


def test_energy_with_gaps_is_ignored(folder: Path) -> None:
    path = folder / "monitors" / "h1.jsonl"
    whole = path.read_bytes()
    seconds = 2 * (5 * 0.71 + 0.1 + 0.05) + 0.2
    assert load([folder]).runs.iloc[0]["energy_j"] == pytest.approx(2 * 30 * seconds)

    def damaged(change: Callable[[list[Any]], Any]) -> str:
        path.write_bytes(whole)
        with runs.edited(path) as records:
            change(records)
        loaded = load([folder])
        assert loaded.runs["energy_j"].isna().all()
        assert loaded.runs.iloc[0]["state"] == "complete"
        return str(loaded.problems[-1])

    assert "energy ignored" in damaged(lambda records: records.__delitem__(slice(5, None)))
    assert "has energy in" in damaged(lambda records: records[3].update(energy_j={"cpu1": 1.0}))
    absent = {"device": "cpu0", "name": "", "source": None, "reason": "only root may read it"}
    assert "was not measured" in damaged(
        lambda records: [records[0].update(devices=[absent]), *(each.pop("energy_j", 0) for each in records[1:])]
    )
    path.unlink()
    assert "no samples of host h1" in str(load([folder]).problems[-1])
    path.write_bytes(whole)
    with runs.edited(folder / METRICS) as records:
        records[-1]["began_unix_s"] = records[-1]["ended_unix_s"] - 1  # shorter than the phases
    damaged(lambda records: records.__delitem__(slice(5, None)))


@pytest.mark.parametrize(("kept", "counts"), [(0.96, True), (0.94, False)])
def test_samples_must_cover_95_percent_of_the_run(kept: float, counts: bool, tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "r", energy_w={"cpu0": 30.0}, interval_s=0.05)
    samples = lines(folder, path := Path("monitors") / "h0.jsonl")
    put(folder, samples[: 1 + round(kept * (len(samples) - 1))], path)
    assert load([folder]).runs["energy_j"].notna().all() == counts


def test_a_zero_baseline_gives_no_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.make(tmp_path / "one", train_s=0.0, energy_w={"cpu0": 0.0})
    runs.make(tmp_path / "two", hosts=2, rank_batch=16, train_s=10.0, energy_w={"cpu0": 3.0})
    for command in ("scaling", "energy", "phases", "accuracy"):
        assert main([command, str(tmp_path), "--format", "json"]) == 0
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


# --- arbitrary values -------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["step", "cpu0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FILES = [Path("manifest.json"), Path("experiment.json"), METRICS, Path("monitors/h0.jsonl")]


@settings(max_examples=20)
@given(data=st.data())
def test_any_value_in_any_field_ends_without_a_traceback(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """One field of one record is replaced."""
    folder = runs.make(tmp_path_factory.mktemp("any") / "r", GOOD)
    runs.make(folder.parent / "one", energy_w={"cpu0": 10.0})
    name = data.draw(st.sampled_from(FILES))
    whole = [(folder / name).read_text()] if name.suffix == ".json" else lines(folder, name)
    line = data.draw(st.integers(0, len(whole) - 1))
    record = json.loads(whole[line])
    at = record
    while True:  # some field, at any depth
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not at[key] or not isinstance(at[key], dict | list) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(VALUES)
    whole[line] = json.dumps(record) + "\n"
    put(folder, whole, name)
    for command in ("list", "scaling", "energy", "accuracy", "export"):
        assert main([command, str(folder.parent)]) == 0
        assert "nan" not in capsys.readouterr().out.replace("nano", "")
    assert main(["table", str(folder.parent), "--format", "json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@settings(max_examples=40)
@given(content=st.binary(max_size=200), cut=st.integers(0, 3000), name=st.sampled_from(FILES))
def test_any_bytes_in_any_file_end_without_a_traceback(
    content: bytes, cut: int, name: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.make(tmp_path_factory.mktemp("bytes") / "r", GOOD)
    found = (folder / name).read_bytes()
    put(folder, found[:cut] + content + found[cut:], name)
    for command in ("list", "accuracy"):
        assert main([command, str(folder)]) == 0
    capsys.readouterr()


@given(st.dictionaries(st.sampled_from(records.Step.__struct_fields__), VALUES))
def test_a_record_is_valid_or_refused(fields: dict[str, Any]) -> None:
    value = records.as_json(runs.step(GOOD, 3, 0)) | fields
    try:
        found = records.from_json(value, "x.jsonl:7", records.Step)
    except Failure as failure:
        assert str(failure).startswith("x.jsonl:7: ")
        return
    assert found.data_s is None or found.data_s >= 0
    assert found.compute_s < 1e19
    assert isinstance(found.step, int)
