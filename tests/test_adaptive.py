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


@pytest.mark.parametrize(("stops", "chooses"), [(0, 0), (0, 3), (2, 0), (3, 4096), (5000, 1), (0, 1 << 24)])
def test_requests_of_many_ranks_stay_apart(stops: int, chooses: int) -> None:
    exchanged = Exchanged.of(np.array([1, 1, stops * STOP + chooses * CHOOSE], np.float32), 0)
    assert (exchanged.stop, exchanged.choose) == (stops > 0, chooses > 0 and not stops)


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


def saved(folder: Path, step: int) -> Any:
    return json.loads((folder / "checkpoints" / f"step-{step:08d}" / "checkpoint.json").read_text())


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.slow
def test_a_change_of_strategy_carries_everything_over(tmp_path: Path, framework: str) -> None:
    """From exact sums to local steps and back. A resume before or after a change equals the uninterrupted run."""

    def run(name: str, at: list[int], *more: str, **keys: Any) -> dict[str, Any]:
        flags = [*COMMON, "--framework", framework, "--run-dir", str(tmp_path / name), *more]
        return {"flags": flags, "choices": [EXACT, LOCAL], "choose_at": at, **keys}

    folder = tmp_path / "whole"
    todo = [run("whole", [5, 10])]
    for step, at in ((4, [1, 6]), (8, [2])) if framework == "torch" else ():
        todo.append(run(f"resumed-{step}", at, "--resume", from_step=step, folder=str(folder)))
    codes, output = trainings(2, todo, framework)
    assert codes == [0] * len(todo), output
    ranks = [read_run(folder, rank) for rank in (0, 1)]
    assert [(each.step, each.strategy) for each in ranks[0]["chosen"]] == [(6, LOCAL), (13, EXACT)]
    for rank in ranks:
        assert [step.step for step in rank["step"] if step.warmup] == [0, 1, 2, 6, 7, 8, 13, 14, 15]
    sent = [[step.bytes_sent for step in rank["step"]] for rank in ranks]
    assert sent[0] == sent[1] and sent[0][5] == sent[0][13] > 5 * max(sent[0][6:12])
    assert f"{LOCAL} from step 6, instead of {EXACT}: " in output
    around = [json.loads((folder / f"around-{rank}.json").read_text()) for rank in (0, 1)]
    for to_local, to_exact in around:
        assert to_local[0] == to_local[1], "bit by bit"
        assert to_exact[0][1] == to_exact[1][1], "running statistics"
    assert around[0][1][1][0] == around[1][1][1][0], "after local steps all ranks have the same optimizer state"
    facts = {row["what"]: row["value"] for row in results("show", folder)["tables"][0]["rows"]}
    assert facts["marked"] == f"its strategy changed: {EXACT}, {LOCAL} from step 6, {EXACT} from step 13"
    assert [saved(folder, step)["progress"]["strategy"] for step in (4, 8, 16)] == [EXACT, LOCAL, EXACT]
    for step, strategy in ((4, EXACT), (8, LOCAL)) if framework == "torch" else ():
        assert f"resumed at step {step} of 16, strategy {strategy}" in output
        again = tmp_path / f"resumed-{step}"
        assert saved(again, 16)["files"] == saved(folder, 16)["files"], "resumed equals uninterrupted"


@pytest.mark.root
@pytest.mark.slow
def test_a_link_that_becomes_slow_makes_all_ranks_choose_in_the_same_step(cluster: Cluster, tmp_path: Path) -> None:
    """Exact sums of 1.3 MB need 0.5 s at 20 Mbit/s. `auto` measures the links again when they slow down and recover."""
    folder = tmp_path / "run"
    tmp_path.chmod(0o755)
    words = ["launch/mpirun.sh", "-H", "a:1,b:1", sys.executable, "-m", "hvdtrain.resnet", *SMALL[:4]]
    words += ["--batch-size", "16", "--epochs", "10", "--strategy", "auto:exact", "--run-dir", str(folder)]
    words += ["--epoch-samples", "1280", "--evaluate-samples", "32", "--checkpoint-steps", "0"]
    throttle = [str(ROOT / "tools" / "throttle.sh")]
    path = folder / "metrics" / "rank0000.jsonl"
    running = subprocess.Popen(
        cluster.command("exec", "a", "--", *words), env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: path.exists() and path.read_text().count("\n") > WINDOW + 5, LIMIT_S)
        assert finished([*throttle, "20mbit", "--name", cluster.name]).returncode == 0
        until(lambda: '"chosen"' in path.read_text() or running.poll() is not None, LIMIT_S)
        assert finished([*throttle, "clear", "--name", cluster.name]).returncode == 0
        _, output = running.communicate(timeout=LIMIT_S)
    finally:
        running.kill()
        assert finished([*throttle, "clear", "--name", cluster.name]).returncode == 0
    assert running.returncode == 0, output
    ranks = [read_run(folder, rank) for rank in (0, 1)]
    slow, *fast = ranks[0]["chosen"]
    assert learning.RECORDED[slow.strategy].exact
    assert 0 < slow.links[0]["goodput_mbit"] < 20 < fast[0].links[0]["goodput_mbit"]
    warm = [[step.step for step in rank["step"] if step.warmup] for rank in ranks]
    assert warm[0] == warm[1]
    assert all(len(rank["step"]) == 400 for rank in ranks)
