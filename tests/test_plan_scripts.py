"""`hvdtrain plan` of users' own scripts, and `auto` in the drop-in modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROGRAMS, Cluster, document, fails, finished, launch, unique

from hvdtrain import cli
from hvdtrain.horovod_api import job
from hvdtrain.plan.steps import Steps
from hvdtrain.strategies import parse
from hvdtrain.strategies.cost import Layout
from hvdtrain.torch.automatic import Watch


def plan(script: Path, *words: str) -> Any:
    strategies = ["--strategy", "hierarchical", "--strategy", "allreduce", "--strategy", "native"]
    return document(launch(0, ["-m", "hvdtrain.cli", "plan", str(script), *words, *strategies, "--json"]))


@pytest.mark.slow
def test_a_plan_times_the_steps_of_a_script_and_changes_nothing(tmp_path: Path) -> None:
    planned, alone = tmp_path / "planned", tmp_path / "alone"
    for folder in (planned, alone):
        folder.mkdir()
    found = plan(PROGRAMS / "planned.py", str(planned), "--hosts", "1,2", "--rates", "1mbit", "--width", "310")
    assert launch(0, [str(PROGRAMS / "planned.py"), str(alone), "--width", "310"]).returncode == 0
    seen, whole = (json.loads((folder / "seen.json").read_text()) for folder in (planned, alone))
    assert whole["steps"] == 40 > seen["steps"], "the plan ends the script"
    assert found["shapes"] == seen["shapes"] == whole["shapes"] and found["shapes"][0] == [310, 20]
    weights = [torch.load(folder / "weights.pt", weights_only=True) for folder in (planned, alone)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1]), "weights differ"
    one = found["one_host"]
    assert one["global_batch"] == 24 and one["epoch_s"] is None
    assert 0.5 * seen["step_s"] < one["step_s"] < 2 * seen["step_s"], "both timed the same steps"
    assert list(found["refused"]) == ["native"], "scripts cannot use it"
    after, _ = found["networks"][0]["hosts"][-1]["predictions"]
    sent = parse("hierarchical").cost(found["shapes"], Layout(ranks=2, hosts=2), buckets=False).sent_bytes
    assert after["sent_bytes"] == sent


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (None, 2, "no such script"),
        ("import sys\nfor i in range(2):\n    1 / 0", 1, "line 3: ZeroDivisionError"),
        ("import os\nos._exit(0)", 1, "(exit code 0) before it was profiled"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", 1, "(SIGSEGV)"),
    ],
)
def test_scripts_that_cannot_be_planned_are_one_line(text: str | None, code: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    if text is not None:
        path.write_text(text)
    fails(lambda: cli.command(["plan", str(path), "--lr", "1"]), code, "script.py", words)
    fails(lambda: cli.command(["plan", "mpirun"]), 2, "without a launcher")


SHORT = """
import json, sys, time, torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("threads", torch.get_num_threads(), file=sys.stderr)
for step in range(200):
    model(torch.ones(8, 64)).sum().backward()
    ending = time.thread_time() + 0.005
    while time.thread_time() < ending:
        pass
    optimizer.step()
"""


@pytest.mark.root
@pytest.mark.slow
def test_a_script_under_a_quota_has_the_launchers_threads_and_steps_that_its_quota_allows(
    tmp_path: Path, half_core: tuple[Path, list[str]]
) -> None:
    """5 ms of a processor take 10 ms of half a core, also if most steps fall between the pauses."""
    (tmp_path / "short.py").write_text(SHORT)
    words = ["plan", str(tmp_path / "short.py"), "--hosts", "2", "--rates", "1gbit", "--strategy", "hierarchical"]
    unset = ["env", "-u", "OMP_NUM_THREADS"]
    done = finished([*half_core[1], *unset, sys.executable, "-m", "hvdtrain.cli", *words, "--json"])
    assert document(done)["one_host"]["step_s"] > 0.0095
    assert "threads 1\n" in done.stderr


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two virtual hosts, a and b, of 1 and 0.5 cores. Less of a core imports PyTorch for minutes."""
    topology, made = tmp_path_factory.mktemp("topology") / "t.toml", Cluster(unique())
    topology.write_text("slots = 1\n[hosts.a]\ncpu_share = 1\n[hosts.b]\ncpu_share = 0.5\n")
    assert (done := made.run("up", "--topology", str(topology))).returncode == 0, done.stderr
    try:
        yield made
    finally:
        assert made.run("down").returncode == 0


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.alone
def test_a_plan_times_the_step_on_every_host_and_the_slowest_decides(tmp_path: Path, unequal: Cluster) -> None:
    (tmp_path / "short.py").write_text(SHORT)
    hvdtrain = [sys.executable, "-m", "hvdtrain.cli", "plan"]
    words = ["-H", "a:1,b:1", "--strategy", "hierarchical", "--json"]
    small = ["--width", "0.125", "--image-size", "8", "--global-batch-size", "16"]
    for planned in (["resnet", *small], [str(tmp_path / "short.py")]):
        found = document(unequal.on("a", *hvdtrain, *planned, *words))
        two = found["networks"][0]["hosts"][-1]["predictions"][0]
        assert two["step_s"] > two["computing_s"] > 1.1 * found["one_host"]["step_s"]
        assert any(note.startswith("host b is the slowest") for note in found["notes"]), found["notes"]
    (tmp_path / "short.py").write_text("1 / 0")
    done = unequal.on("a", *hvdtrain, str(tmp_path / "short.py"), *words)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("hvdtrain: a: ")


@pytest.mark.parametrize("count", [1, 4])
def test_a_plan_counts_the_batches_that_a_script_accumulates(count: int) -> None:
    model = torch.nn.Linear(8, 8)
    watch, steps = Watch(dict(model.named_parameters()), on_cpu=True), Steps(20, 10.0)
    for _ in range(6):
        for _ in range(count):
            model(torch.ones(5, 8)).sum().backward()
        watch.computed(steps)
    assert (watch.accumulation(), watch.batch()) == (count, 5 * count)


def test_tensorflow_optimizers_refuse_auto() -> None:
    fails(lambda: job.wanted("auto:exact"), 78, "TensorFlow's optimizers", "name a strategy")


@pytest.mark.slow
def test_auto_in_a_script_equals_the_strategy_that_all_ranks_choose() -> None:
    """The program compares, and raises if a check fails."""
    done = launch(2, [str(PROGRAMS / "own_auto.py")], "forks")
    assert all(name != "hierarchical" for name in document(done)["chosen"])
    assert done.stderr.count("per step predicted") == 4, "one line for each choice"
