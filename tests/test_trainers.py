"""The examples with transformers' Trainer and peft, Accelerate and Lightning, unmodified, on two ranks or hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS, ROOT, Cluster, document, launch

LORA = "hf_lora.py --layers 2 --width 64 --length 32"
EXAMPLES = {
    "hf_lora": f"{LORA} --steps 8 --output",
    "lightning_mnist": "lightning_mnist.py --epochs 1 --output",
    "accelerate_digits": "accelerate_digits.py --epochs 1 --save",
}
pytestmark = pytest.mark.slow


def weights(words: str, folder: Path, strategy: str = "", hosts: Cluster | None = None) -> list[Any]:
    """Run an example, whose ranks have to end with equal weights. Returns the norms of the arrays."""
    pytest.importorskip("transformers"), pytest.importorskip("lightning")
    name, *rest = words.split()
    program = [str(PROGRAMS / "own_trainers.py"), str(ROOT / "examples" / name), *rest]
    ddp = ["-m", "hvdtrain.ddp", "--strategy", strategy] if strategy else []
    if hosts:
        done = hosts.on("a", "hvdtrain", "launch", "torchrun", "-H", "a:1,b:1", "--strategy", strategy, *program)
    else:
        extra = {"HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        done = launch(2, ["-W", "ignore", *ddp, *program], "forks-trainers", extra)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(text) for text in re.findall(r"WEIGHTS (\{.*\})", done.stdout)]
    assert len({each["checksum"] for each in found}) == 1 and len(found) == 2
    return next(each["norms"] for each in found if each["norms"])


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_train_alike_with_exact_sums_and_end_with_equal_weights(example: str, tmp_path: Path) -> None:
    """Clipping and accumulation are the trainer's own, as with plain DistributedDataParallel. No step is lost at the
    end, although no average was due."""
    words = EXAMPLES[example]
    plain = weights(f"{words} {tmp_path / 'plain'}", tmp_path)
    assert weights(f"{words} {tmp_path / 'exact'}", tmp_path, "hierarchical") == pytest.approx(plain, rel=1e-3)
    local = weights(f"{words} {tmp_path / 'local'}", tmp_path, "local-sgd:every=3+int8")
    assert local != plain
    assert local == pytest.approx(plain, rel=0.2, abs=0.5)
    kept = weights(f"{words} {tmp_path / 'kept'}", tmp_path, "local-sgd:every=1000")
    assert kept != plain
    assert kept == pytest.approx(plain, rel=0.1, abs=0.05)


@pytest.mark.parametrize("example", ["hf_lora", "lightning_mnist"])
def test_a_plan_times_the_steps_of_an_example(example: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers"), pytest.importorskip("lightning")
    name, *rest = EXAMPLES[example].replace("--steps 8", "--steps 60").split()
    words = ["plan", str(ROOT / "examples" / name), *rest, str(tmp_path), "--strategy", "int8", "--json"]
    found = document(launch(0, ["-m", "hvdtrain.cli", *words]))
    assert found["one_host"]["global_batch"] == {"hf_lora": 16}.get(example, 32), "with accumulation"
    assert len(found["shapes"]) == {"hf_lora": 16}.get(example, 4), "what is trained"


def test_a_trainer_saves_the_last_average_and_resumes_from_it(tmp_path: Path) -> None:
    """A checkpoint in the middle of a round is one file for all ranks."""
    folder = tmp_path / "lora"
    weights(f"{LORA} --steps 10 --output {folder}", tmp_path, "local-sgd:every=4")
    assert (folder / "adapter_model.safetensors").exists()
    weights(f"{LORA} --steps 14 --output {folder} --resume", tmp_path, "local-sgd:every=4")
    assert (folder / "checkpoint-14").is_dir()


@pytest.mark.root
def test_an_example_on_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    weights(f"{EXAMPLES['hf_lora']} {tmp_path}", tmp_path, "local-sgd:every=3,staleness=1,parts=3+int8", cluster)
