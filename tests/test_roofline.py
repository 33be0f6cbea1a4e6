"""The network roofline: the script's methods on two ranks, and the records of `tools/bench_roofline.py`."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, document, launch

from hvdtrain.data import idx
from hvdtrain.lab.topology import check_cluster_name

SCRIPT = str(ROOT / "examples" / "byte_gpt.py")
BENCH = [sys.executable, str(ROOT / "tools" / "bench.py"), "roofline"]
needs_text = pytest.mark.skipif(not shutil.which("bible"), reason="needs Debian's bible-kjv-text (apt-get install)")


def trained(
    *words: str, launcher: str = "forks", strategy: str = "", script: str = SCRIPT, **more: str
) -> dict[str, Any]:
    ours = ["-m", "hvdtrain.ddp", "--strategy", strategy] if strategy else []
    extra = {"HVDTRAIN_RECORD": "0", "OMP_NUM_THREADS": "1"} | more
    done = launch(2, ["-W", "ignore", *ours, script, "--warm-up", "4", *words], launcher, extra)
    return dict(document(done))


@needs_text
@pytest.mark.slow
def test_accumulation_and_exact_sums_equal_ddp_with_the_larger_batch() -> None:
    pytest.importorskip("horovod")
    exact = ["--batch", "24", "--steps", "2", "--evaluate", "2", "--lr", "1e-3", "--warm-up", "1"]
    accumulated = ["--method", "accumulate:3", "--steps", "6", "--evaluate", "6", "--lr", "1e-3", "--warm-up", "1"]
    expected, other = (trained(*exact, "--seed", seed)["curve"][0][1] for seed in ("1", "2"))
    losses = [trained(*accumulated), trained(*exact, strategy="hierarchical")]
    horovod = ["--method", "horovod+accumulate:3", *accumulated[2:]]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    losses.append(trained(*horovod, launcher="mpirun", MASTER_ADDR="127.0.0.1", MASTER_PORT=port))
    assert [each["curve"][0][1] for each in losses] == pytest.approx([expected] * 3, rel=1e-5)
    assert other != pytest.approx(expected, rel=1e-5), "another seed"


@needs_text
@pytest.mark.parametrize(
    "method", ["powersgd:2", "postlocal:4", pytest.param("accelerate:4", marks=pytest.mark.slow), "local-sgd:every=4"]
)
def test_ranks_have_equal_weights_after_an_exchange_and_only_then(method: str) -> None:
    strategy, how = (method, []) if "every" in method else ("", ["--method", method])
    if trainers := method.startswith("accelerate"):
        pytest.importorskip("accelerate")
    apart = []
    for steps, half in (("8", "4"), ("10", "5")):
        words = [*how, "--steps", steps, "--evaluate", half]
        found = trained(*words, launcher="forks-trainers" if trainers else "forks", strategy=strategy)
        assert found["curve"][1][1] < found["curve"][0][1], "it learns"
        apart.append(found["apart"])
    assert apart[0] < 1e-7
    assert (apart[1] > 1e-5) == (method != "powersgd:2")


@pytest.mark.skipif(not idx.FASHION.is_dir(), reason="needs Debian's dataset-fashion-mnist (apt-get install)")
@pytest.mark.slow
def test_resnet_learns_the_same_with_exact_sums_and_with_ddp() -> None:
    words, script = ["--steps", "4", "--evaluate", "4", "--lr", "0.03"], str(ROOT / "examples" / "fashion_resnet.py")
    ddp, ours = (trained(*words, strategy=how, script=script)["curve"][0][1] for how in ("", "hierarchical"))
    assert ours == pytest.approx(ddp, abs=0.005) and ddp < 0.85


@needs_text
@pytest.mark.slow
def test_scaled_local_steps_equal_those_with_a_larger_learning_rate() -> None:
    """With the same bits, in a script with AdamW. SGD's are not scaled (own_optimizer.py)."""
    words, local = ["--steps", "6", "--evaluate", "6", "--lr"], "local-sgd:every=2,staleness=1,parts=2"
    larger = trained(*words, str(1e-3 * 2**0.5), strategy=f"{local}+int2")
    assert trained(*words, "1e-3", strategy=f"{local},lr_scaling=sqrt+int2")["curve"][0][1] == larger["curve"][0][1]


def test_a_missing_text_is_one_line() -> None:
    done = launch(1, [SCRIPT], "forks", {"PATH": "/nowhere"})
    assert done.returncode == 1
    assert "hint: apt-get install bible-kjv-text " in done.stderr and done.stderr.count("\n") == 1


def test_a_kept_measurement_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has not arrived is repeated only with more steps. It also tells the steps to a target on its way."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    import bench_roofline

    lines = [
        {"kind": "quality", "method": "ddp", "target": 1.5, "seed": 1, "lr": lr, "most": 96, "curve": curve}
        for lr, curve in ((4e-3, [[32, 2.25, 3.0], [48, 1.75, 5.0]]), (2e-3, [[32, 2.25, 3.0], [96, 2.1, 9.0]]))
    ]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    left = []
    for out in (tmp_path / "none", tmp_path):
        shown = subprocess.run([*BENCH, "--out", str(out), "--dry-run", "--json"], capture_output=True, check=True)
        left.append(json.loads(shown.stdout)["rows"][0]["runs"])
    assert left[0] - left[1] == 2
    model = bench_roofline.MODELS["gpt"]
    options = argparse.Namespace(records=lines, name="none", out=tmp_path, start=None, text=None, model=model)
    assert bench_roofline.arrived(options, "ddp", 2.0, 1, 4e-3, 1000) == 40
    assert bench_roofline.arrived(options, "ddp", 2.0, 1, 2e-3, 96) == float("inf")
    with pytest.raises(bench_roofline.Failure, match="ddp has failed"):  # it would train, but there is no such cluster
        bench_roofline.arrived(options, "ddp", 2.0, 1, 2e-3, 97)


def test_the_clusters_of_benchmarks_have_names_that_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import bench

    for name in ["chaos", *re.findall(r"^  ([a-z]+) ", bench.__doc__ or "", re.MULTILINE)]:
        check_cluster_name(bench.options_of("", name).parse_args([]).name)


def test_the_speed_up_is_a_ratio_of_seconds_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import bench_roofline

    assert bench_roofline.crossing([[10, 3.0], [20, 2.0], [30, 1.0]], 1.5) == 25
    assert bench_roofline.crossing([[10, 3.0], [20, 2.0]], 1.5) is None
    time = {"kind": "time", "parameters": 1000, "step_bytes": 100.0}
    one = [time | {"method": "one host", "rate": "10mbit", "first_s": 1.6, "step_s": step_s} for step_s in (0.08, 0.12)]
    four = time | {"method": "ddp", "rate": "10mbit", "first_s": 3.2, "step_s": 0.2}
    model = bench_roofline.MODELS["gpt"]
    options = argparse.Namespace(records=[*one, four], rates=["10mbit"], methods=["ddp"], model=model)
    found = {"one host": (4e-3, {3: 400.0, 4: 600.0}), "ddp": (4e-3, {3: 100.0, 4: 100.0})}
    (row,) = bench_roofline.table(options, found)
    assert (row["least"], row["gain"], row["most"]) == pytest.approx((2.0, 2.5, 3.0))
