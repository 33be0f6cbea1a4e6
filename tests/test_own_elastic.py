"""Scripts with Horovod's elastic API: they continue without lost hosts, and run unchanged without --elastic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS, launch
from test_elastic import on_one_machine

TORCH, KERAS = (["-W", "ignore", str(PROGRAMS / name)] for name in ("own_elastic.py", "own_elastic_keras.py"))


def reports(folder: Path) -> list[Any]:
    """The reports of the ranks that were left, in the order of their final numbers."""
    written = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return sorted(({**report, "first": int(name)} for name, report in written.items()), key=lambda each: each["rank"])


def check(found: list[Any], steps: int | None = None) -> None:
    """The ranks agree, and each sample of an `ElasticSampler` counted once per epoch."""
    assert [(each["rank"], each["size"]) for each in found] == [(rank, len(found)) for rank in range(len(found))]
    for report in found:
        assert report["digests"] == [found[0]["digests"][0]] * len(found)
        assert (report["steps"], report["lr"]) == (steps or found[0]["steps"], found[0]["lr"])
        assert [sorted(epoch) for epoch in report["seen"]] == [list(range(72))] * 3


@pytest.mark.parametrize(
    ("hosts", "strategy", "arguments", "kills"),
    [
        (4, "powersgd:rank=2", {}, [[1, 3, 1], [0, 8, 3]]),
        (3, "local-sgd:every=2", {}, [[0, 5, 5]]),
        (3, "hierarchical", {"late_s": 1}, [[0, -1, 0]]),
    ],
)
@pytest.mark.slow
def test_torch_continues_from_the_last_commit(
    hosts: int,
    strategy: str,
    arguments: dict[str, Any],
    kills: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HVDTRAIN_STRATEGY", strategy)
    words = [str(tmp_path), json.dumps(kills), json.dumps(arguments)]
    done = on_one_machine(hosts, *TORCH, *words)
    assert done.returncode == 0, done.stderr
    found = reports(tmp_path)
    assert {report["first"] for report in found} == {*range(hosts)} - {rank for rank, *_ in kills}, done.stderr
    check(found)
    for report in found:
        assert [size for *_, size in report["resets"]] == [hosts - 1 - each for each in range(len(kills))]
        assert all(steps >= committed for steps, committed, *_ in report["resets"]), "a commit was lost"


@pytest.mark.slow
def test_a_rank_that_comes_back_continues_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are sent in 16 bits, by calls, and it has no state of the optimizer."""
    monkeypatch.setenv("HVDTRAIN_STRATEGY", "hierarchical")
    words = [*TORCH, str(tmp_path), "[[0, 3, 2]]", '{"sleep_s": 1.0, "fp16": true}']
    done = on_one_machine(3, *words, launcher=[])
    assert done.returncode == 0, done.stderr
    found = reports(tmp_path)
    assert [report["first"] for report in found] == [1, 2, 0], "it is the last rank now"
    check(found)
    assert [[size for *_, size in report["resets"]] for report in found] == [[2, 3], [2, 3], [3]]


@pytest.mark.slow
def test_the_same_script_runs_on_horovod(tmp_path: Path) -> None:
    done = launch(2, [*TORCH, str(tmp_path), "[]"], "horovodrun")
    assert done.returncode == 0, done.stderr[-3000:]
    check(reports(tmp_path), 36)


@pytest.mark.slow
def test_keras_continues_from_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank dies in `fit` with local-sgd, another one in a loop with a gradient tape and powersgd."""
    monkeypatch.setenv("HVDTRAIN_STRATEGY", "powersgd")
    kills = json.dumps({"1": [3, None], "0": [None, 4]})
    done = on_one_machine(3, *KERAS, str(tmp_path), kills, "local-sgd:every=3")
    assert done.returncode == 0, done.stderr
    (report,) = reports(tmp_path)
    assert (report["first"], report["rank"], report["size"]) == (2, 0, 1), done.stderr
    assert report["fit"] == [report["fit"][0]] * 2
    assert (report["epoch"], report["steps of fit"], report["steps of the loop"]) == (2, 12, 6), "a step counts once"
    assert report["resets"] == [[0, 2, 1, 2], [4, 0, 0, 1]]


@pytest.mark.slow
def test_keras_runs_in_a_single_process(tmp_path: Path) -> None:
    done = launch(0, [*KERAS, str(tmp_path), "{}"])
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = reports(tmp_path)
    assert (report["steps of fit"], report["steps of the loop"], report["resets"]) == (12, 6, [])


def test_a_script_that_trains_outside_the_function_is_refused_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, hvdtrain.torch as hvd\n"
        "hvd.init()\n"
        "net = torch.nn.Linear(2, 2)\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())\n"
        "for step in range(9):\n"
        "    net(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    done = on_one_machine(2, str(script))
    assert done.returncode == 78
    assert "hint: call a function with the decorator @hvd.elastic.run" in done.stderr
    assert "Traceback" not in done.stderr
