"""Profiles and monitors of a run: traces contain exactly the requested steps, samples the whole loop."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT_S, SMALL, failing, launch, refused
from hypothesis import given
from hypothesis import strategies as st
from runs import read_run
from test_resnet_train import started, wait_for_steps

from hvdtrain import records
from hvdtrain.observe.timing import WARMUP_STEPS
from hvdtrain.system.exits import Failure
from hvdtrain.training.observers import profiled_steps

# The name of a step in the trace, and parts of the names of batch normalisation forward and backward.
NAMES = {
    "torch": ("ProfilerStep#{}", ("aten::native_batch_norm", "NativeBatchNormBackward0")),
    "tensorflow": ("step {}", ("FusedBatchNorm", "FusedBatchNormGrad")),
}
LAUNCHERS = {"torch": "mpirun", "tensorflow": "horovodrun --gloo"}


def spans(trace: Path) -> list[dict[str, Any]]:
    """Return the events of a Chrome trace that have a duration."""
    with gzip.open(trace, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def steps_in(events: list[dict[str, Any]], framework: str) -> dict[int, dict[str, Any]]:
    named = {NAMES[framework][0].format(step): step for step in range(2000)}
    return {named[event["name"]]: event for event in events if event["name"] in named}


@pytest.fixture(scope="module", params=["torch", "tensorflow"])
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Train 15 steps on two ranks with profiler, Horovod's timeline, monitors and TensorBoard."""
    framework = request.param
    pytest.importorskip(framework)
    run = tmp_path_factory.mktemp("runs") / framework
    flags = [*SMALL, "--framework", framework, "--epochs", "1", "--run-dir", str(run), "--json"]
    words = ["-m", "hvdtrain.resnet", *flags, "--monitor", "power,resources", "--profile", "5:7", "--tensorboard"]
    done = launch(2, words, LAUNCHERS[framework], {"HOROVOD_TIMELINE": str(run.with_suffix(".json"))})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "profile of steps 5-7: " in done.stderr
    assert "USDT" not in done.stderr and "profiler_session" not in done.stderr
    return framework, run


@pytest.mark.slow
def test_the_trace_contains_the_operations_of_the_requested_steps(observed: tuple[str, Path]) -> None:
    framework, run = observed
    if framework == "tensorflow":  # TensorBoard's plugin reads these files
        assert [*(run / "profile").glob("plugins/profile/*/*.xplane.pb")]
    (trace,) = (run / "profile").glob("*.trace.json.gz")
    events = spans(trace)
    steps = steps_in(events, framework)
    assert sorted(steps) == [5, 6, 7]
    for step in steps.values():
        inside = [e["name"] for e in events if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]]
        for operation in NAMES[framework][1]:
            assert sum(operation in name for name in inside) >= 36, f"ResNet-34 has 36 normalisations: {operation}"


def test_profiled_steps_are_excluded_from_rates_on_every_rank(observed: tuple[str, Path]) -> None:
    """So is the next step, in which the others wait for rank 0 to write the trace."""
    _, run = observed
    for rank in range(2):
        left_out = [step.step for step in read_run(run, rank)["step"] if step.warmup]
        assert left_out == [*range(WARMUP_STEPS), 5, 6, 7, 8]


def test_the_timeline_shows_the_models_tensors(observed: tuple[str, Path]) -> None:
    _, run = observed
    events = json.loads(run.with_suffix(".json").read_text())
    tensors = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name" and "name" in e["args"]}
    reduced = [tensors[e["pid"]] for e in events if e["ph"] == "B" and e.get("name") == "ALLREDUCE"]
    assert len(set(reduced)) >= 110, "ResNet-34 has 110 parameters"
    assert max(map(reduced.count, set(reduced))) >= 15, "one reduction in each step"
    opened = [e["ph"] for e in events if e["ph"] in "BE" and tensors[e["pid"]] in reduced]
    assert opened.count("B") == opened.count("E")


def test_samples_cover_the_loop_from_the_first_step_to_the_test_evaluation(observed: tuple[str, Path]) -> None:
    _, run = observed
    (file,) = (run / "monitors").iterdir()  # one sampler for both ranks
    sensors, *samples = records.read(file)
    by_type = read_run(run)
    (summary,) = by_type["summary"]
    epochs = [epoch.unix_s for epoch in by_type["epoch"]]
    times = [sensors.unix_s, summary.began_unix_s, *epochs, summary.ended_unix_s, samples[-1].unix_s]
    assert times == sorted(times)
    assert {tuple(rank["rank"] for rank in sample.ranks) for sample in samples} == {(0, 1)}
    assert all(device["used"] is (device["device"][:3] != "gpu") for device in sensors.devices)
    for rank in range(2):
        assert sum(sample.ranks[rank]["cpu_percent"] * sample.seconds for sample in samples[:-1]) > 0
        assert samples[0].ranks[rank]["rss_bytes"] > 50e6


@given(first=st.integers(0, 300), last=st.integers(0, 300), steps=st.integers(1, 300))
def test_profiled_steps(first: int, last: int, steps: int) -> None:
    if first <= last < steps:
        assert list(profiled_steps(f"{first}:{last}", steps)) == [s for s in range(steps) if first <= s <= last]
        return
    with failing(78, f"--profile {first}:{last}: "):
        profiled_steps(f"{first}:{last}", steps)


@pytest.mark.parametrize("text", ["", "5", ":5", "a:b", "-1:3", "1:2:3", "1.5:2", "٣:٤", "5:6\n"])
def test_invalid_ranges_are_rejected(text: str) -> None:
    with pytest.raises(Failure, match="N:M"):
        profiled_steps(text, 100)


def test_a_dry_run_rejects_steps_after_the_end() -> None:
    refused("resnet", *SMALL, "--profile", "3:500", "--epochs", "1", "--dry-run", code=78, said="--profile")


def test_a_signal_writes_the_trace_of_the_steps_so_far(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run = tmp_path / "run"
    flags = [*SMALL, "--framework", "torch", "--epochs", "60", "--profile", "4:1500"]
    with started(0, run, *flags) as process:
        wait_for_steps(process, run, 6)
        process.send_signal(signal.SIGUSR1)
        stderr = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 75, stderr[-3000:]
    steps = [step.step for step in read_run(run)["step"]]
    (trace,) = (run / "profile").glob("*.trace.json.gz")
    assert sorted(steps_in(spans(trace), "torch")) == steps[4:]
    assert trace.name == f"steps-4-{steps[-1]}.pt.trace.json.gz"
