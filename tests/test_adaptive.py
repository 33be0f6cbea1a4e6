"""`--strategy auto` during a run: when it chooses again, and that all ranks carry on alike with another strategy."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT_S, ROOT, SMALL, Cluster, environment, finished, trainings, until
from runs import read_run, results

from hvdtrain.plan import choice, learning
from hvdtrain.plan.prediction import Prediction
from hvdtrain.strategies import CHOOSE, STOP, Exchanged
from hvdtrain.training.adaptive import DEPARTURE, GROUP, GROUPS, Pace

WINDOW = GROUP * GROUPS
EXACT, LOCAL = "hierarchical", "local-sgd:every=2,staleness=1+powersgd:rank=4"
COMMON = [*SMALL[:4], "--batch-size", "24", "--epochs", "1", "--epoch-samples", "768", "--evaluate-samples", "48"]
COMMON += ["--checkpoint-steps", "4", "--keep-checkpoints", "9", "--strategy", "auto"]


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_only_twenty_steps_that_all_departed_make_a_rank_ask(factor: float) -> None:
    pace, period = Pace(), itertools.cycle([1.0, 1.0, 1.0, 5.0])  # as local steps with an exchange in every fourth
    for _ in range(WINDOW):
        pace.add(next(period), 0.5)
    assert pace.usual == (2.0, 0.5)
    for step in range(WINDOW):
        pace.add(100.0 if step == 9 else 2.0, 0.5)
    assert not pace.departed(), "one slow step"
    for step in range(WINDOW):
        assert not pace.departed()
        pace.add(factor * next(period), 0.5 + step % 2)
    assert pace.departed()
    assert pace.recent() == (2.0 * factor, 1.0)
    pace.settle()
    for _ in range(WINDOW):
        pace.add(factor * (1 + DEPARTURE / 2) * next(period), 0.5)
    assert not pace.departed()


@pytest.mark.parametrize(("stops", "chooses"), [(0, 0), (0, 3), (2, 0), (3, 4095), (4095, 1)])
def test_requests_of_many_ranks_stay_apart(stops: int, chooses: int) -> None:
    exchanged = Exchanged.of(np.array([1, 1, stops * STOP + chooses * CHOOSE], np.float32), 0)
    assert (exchanged.stop, exchanged.choose) == (stops > 0, chooses > 0)


def test_a_running_strategy_stays_unless_another_gains_enough() -> None:
    def chosen(current: str, exact_s: float, local_s: float) -> str:
        rest: Any = {"hosts": 2, "ranks": 2, "global_batch": 8, "computing_s": 0.1, "coding_s": 0.0, "waiting_s": 0.0}
        rest |= {"sent_bytes": 1.0, "bottleneck": "the link", "steps_factor": (1.0, 1.0)}
        found = [Prediction(strategy=EXACT, step_s=exact_s, **rest), Prediction(strategy=LOCAL, step_s=local_s, **rest)]
        return choice.decide(found, current).strategy

    assert chosen(EXACT, 1.05, 1.0) == EXACT
    assert chosen(EXACT, 1.2, 1.0) == LOCAL
    assert chosen(LOCAL, 1.0, 1.05) == LOCAL
    assert chosen(LOCAL, 1.0, 1.2) == EXACT


def carried(folder: Path, ranks: int = 2) -> list[Any]:
    """Digests of [parameters and optimizer, running statistics] before and after a change, of each rank."""
    return [json.loads((folder / f"around-{rank}.json").read_text()) for rank in range(ranks)]


def saved(folder: Path, step: int) -> Any:
    return json.loads((folder / "checkpoints" / f"step-{step:08d}" / "checkpoint.json").read_text())


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_change_of_strategy_carries_everything_over(tmp_path: Path, framework: str) -> None:
    """Also with a resume after the change, and one before it."""

    def run(name: str, choices: list[str], *more: str, at: int = 5, **keys: Any) -> dict[str, Any]:
        flags = [*COMMON, "--framework", framework, "--run-dir", str(tmp_path / name), *more]
        return {"flags": flags, "choices": choices, "choose_at": at, **keys}

    todo = [run("exact", [EXACT, LOCAL]), run("local", [LOCAL, EXACT])]
    for step in (8, 4):
        keys = {"from_step": step, "folder": str(tmp_path / "exact")}
        todo.append(run(f"resumed-{step}", [EXACT, LOCAL], "--resume", at=5 if step == 8 else 1, **keys))
    todo[2]["choose_at"] = 99
    codes, output = trainings(2, todo, framework)
    assert codes == [0] * 4, output
    for name, first, second in (("exact", EXACT, LOCAL), ("local", LOCAL, EXACT)):
        folder, ranks = tmp_path / name, [read_run(tmp_path / name, rank)["step"] for rank in (0, 1)]
        (choice,) = read_run(folder)["chosen"]
        assert choice.strategy == second and 5 < choice.step <= 9
        for steps in ranks:
            assert len(steps) == 16
            assert [step.step for step in steps if step.warmup] == [0, 1, 2, *range(choice.step, choice.step + 3)]
        assert [step.bytes_sent for step in ranks[0]] == [step.bytes_sent for step in ranks[1]]
        manifest, summary = json.loads((folder / "manifest.json").read_text()), read_run(folder)["summary"][0]
        assert (manifest["config"]["strategy"], manifest["exchange"]["auto"], summary.strategy) == (
            first,
            "auto",
            second,
        )
        assert f"{second} from step {choice.step}, instead of {first}: " in output
        (zero, one) = carried(folder)
        assert zero[1][0] == one[1][0], "parameters and optimizer are equal on all ranks"
        assert all(before[1] == after[1] for before, after in (zero, one)), "running statistics"
        if first == EXACT:
            assert zero[0] == zero[1] and one[0] == one[1], "bit by bit"
        facts = {row["what"]: row["value"] for row in results("show", folder)["tables"][0]["rows"]}
        assert facts["marked"] == f"its strategy changed: {first}, {second} from step {choice.step}"
    resumed = read_run(tmp_path / "resumed-8")
    assert resumed["summary"][0].strategy == LOCAL and len(resumed["chosen"]) == 1
    assert f"resumed at step 8 of 16, strategy {LOCAL}" in output
    assert f"resumed at step 4 of 16, strategy {EXACT}" in output
    whole = saved(tmp_path / "exact", 16)
    for name in ("resumed-8", "resumed-4") if framework == "torch" else ():
        again = saved(tmp_path / name, 16)
        assert again["progress"]["strategy"] == LOCAL
        assert again["files"] == whole["files"], "resumed equals uninterrupted"


@pytest.mark.root
def test_a_link_that_becomes_slow_makes_all_ranks_choose_in_the_same_step(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tmp_path.chmod(0o755)
    words = ["launch/mpirun.sh", "-H", "a:1,b:1", sys.executable, "-m", "hvdtrain.resnet", *SMALL[:4]]
    words += ["--batch-size", "16", "--epochs", "2", "--strategy", "auto", "--run-dir", str(folder)]
    words += ["--epoch-samples", "1280", "--evaluate-samples", "32", "--checkpoint-epochs", "0"]
    throttle = [str(ROOT / "tools" / "throttle.sh")]
    running = subprocess.Popen(
        cluster.command("exec", "a", "--", *words), env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        path = folder / "metrics" / "rank0000.jsonl"
        until(lambda: path.exists() and path.read_text().count("\n") > WINDOW + 5, LIMIT_S)
        assert finished([*throttle, "20mbit", "--name", cluster.name]).returncode == 0
        _, output = running.communicate(timeout=LIMIT_S)
    finally:
        running.kill()
        finished([*throttle, "off", "--name", cluster.name])
    assert running.returncode == 0, output
    ranks = [read_run(folder, rank) for rank in (0, 1)]
    choices = ranks[0]["chosen"]
    assert choices and all(each.strategy in learning.CANDIDATES for each in choices), output
    assert 0 < choices[0].links[0]["goodput_mbit"] < 20
    warm = [[step.step for step in rank["step"] if step.warmup] for rank in ranks]
    assert warm[0] == warm[1]
    first = json.loads((folder / "manifest.json").read_text())["config"]["strategy"]
    assert (choices[0].strategy != first) == (warm[0] != [0, 1, 2])
    assert first != EXACT or choices[0].strategy != EXACT, "exact sums take ten times as long at this rate"
    assert all(len(rank["step"]) == 80 for rank in ranks)
