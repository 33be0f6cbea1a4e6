"""tools/chaos.py: real faults on virtual hosts, and records in which something is lost."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, finished, unique

CHAOS = [sys.executable, "tools/chaos.py"]
Records = dict[str, list[dict[str, Any]]]


def of(files: Records, name: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in files[name] if each["type"] == kind]


def lose_a_step(files: Records) -> None:
    files["rank0000.jsonl"].remove(of(files, "rank0000.jsonl", "step")[7])


def repeat_a_step(files: Records) -> None:
    files["rank0000.jsonl"].insert(0, of(files, "rank0000.jsonl", "step")[7])


def lose_a_sample(files: Records) -> None:
    of(files, "rank0000.jsonl", "epoch")[1]["samples"] -= 1


def continue_on_both_sides(files: Records) -> None:
    of(files, "rank0000.jsonl", "view")[0]["members"].pop()


def return_as_a_ghost(files: Records) -> None:
    files["rank0003.jsonl"].append(of(files, "rank0000.jsonl", "view")[0])


def train_as_a_ghost(files: Records) -> None:
    files["rank0003.jsonl"].append(of(files, "rank0000.jsonl", "step")[-1])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"left": ["7 on c"]}, "process 7 on c is left"),
    ({"started_later": 1}, "1 ranks were started again"),
    ({"code": 1}, "it ended with 1"),
    ({"ranks": 3}, "3 ranks ran at the time of the fault"),
]
SPOILED = {
    lose_a_step: "steps are recorded instead of",
    repeat_a_step: "steps are recorded instead of",
    lose_a_sample: "samples",
    continue_on_both_sides: "has two lists of members",
    return_as_a_ghost: "d continued in view 1",
    train_as_a_ghost: "d recorded step",
}


@pytest.mark.root
@pytest.mark.slow
def test_survivors_lose_nothing_and_each_broken_law_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--faults", "2", "--seed", "14", "--kinds", "host,rank-0", "--rates", "unlimited", "--out", str(tmp_path)]
    done = finished([*CHAOS, *words, "--json", "--name", unique()])
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [run["finished"] for run in runs] == [True, True]
    assert all(run["continued_s"] > 0 for run in runs)

    monkeypatch.syspath_prepend(ROOT / "tools")
    import chaos
    import chaos_faults

    (stored,) = tmp_path.glob("14-host-*.json")
    result, folder = json.loads(stored.read_text()), stored.with_suffix("")
    case = chaos_faults.Case(**result["case"])
    assert case.victims == ["d"]
    for wrong, law in WRONG:
        assert law in "; ".join(chaos.broken(case, result | wrong, folder))
    records = {path.name: chaos.read(path) for path in folder.glob("run/metrics/*.jsonl")}
    for spoil, law in SPOILED.items():
        spoiled = copy.deepcopy(records)
        spoil(spoiled)
        assert law in "; ".join(chaos.broken_records(case, spoiled)), spoil.__name__
    stored.write_text(json.dumps(result | {"code": None}))
    again = finished([*CHAOS, *words])  # stored runs are not repeated
    assert (again.returncode, again.stderr.count("repeat it: make chaos CHAOS_ARGS='--faults 1 --seed")) == (1, 1), (
        again.stderr
    )


def test_wrong_options_are_one_line() -> None:
    done = finished([*CHAOS, "--kinds", "fire"])
    assert done.returncode == 2 and "unknown fire; hint: choose from" in done.stderr and done.stderr.count("\n") == 1
