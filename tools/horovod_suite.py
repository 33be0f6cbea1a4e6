"""Run Horovod's own tests of PyTorch (test/parallel/test_torch.py of Horovod 0.28.1) on hvdtrain.torch.

    python tools/horovod_suite.py --source CHECKOUT                    # on Horovod, on TCP, and without Horovod
    python tools/horovod_suite.py --source CHECKOUT without -k join    # some tests in one of the three ways

The tests are not part of Horovod's package, so a checkout of its version 0.28.1 is needed. The only change is the
import: `import hvdtrain.torch as hvd`. Prints a line for each way, from rank 0. Exits with 1 if fewer tests pass than
should, or if the ranks do not end in time.
"""

import argparse
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import types
import unittest.mock
from pathlib import Path
from xml.etree import ElementTree

VERSION, LEAST = "0.28.1", {"horovod": 100, "tcp": 97, "without": 97}
"""Horovod's version, and how many of its 115 tests should pass. 12 are skipped (GPUs, MPI), and 3 fail of age, also
with Horovod itself."""


def copied(source: Path, folder: Path) -> Path:
    """Copy the tests to `folder` with the import changed, and return the file."""
    for name in ("parallel/test_torch.py", "utils/common.py"):
        text = (source / "test" / name).read_text()
        target = folder / name
        target.parent.mkdir()
        target.write_text(text.replace("import horovod.torch as hvd", "import hvdtrain.torch as hvd"))
    return folder / "parallel" / "test_torch.py"


def passed(way: str, tests: Path, folder: Path, options: argparse.Namespace) -> int:
    """Run the tests on two ranks, print rank 0's counts, and return how many passed; 0 if they did not end."""
    environment = os.environ | {"HVDTRAIN_RECORD": "0", "OMPI_MCA_mpi_yield_when_idle": "1"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    environment |= {} if way == "horovod" else {"HVDTRAIN_STRATEGY": "hierarchical"}
    command = ["mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe", sys.executable, __file__, "--rank"]
    command += [way, "--source", str(tests), "--reports", str(folder), *(["-k", options.k] if options.k else [])]
    log = (options.log or folder) / f"{way}.log"
    with log.open("w") as output:
        job = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            job.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            print(f"{way}: not done after {options.limit_s:g} s; the last lines of {log}:")
            print(*log.read_text(errors="replace").splitlines()[-30:], sep="\n", flush=True)
            return 0
    report = folder / f"{way}.0.xml"
    if not report.exists():
        print(f"{way}: rank 0 has no report; the last lines of {log}:")
        print(*log.read_text(errors="replace").splitlines()[-30:], sep="\n", flush=True)
        return 0
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case.get("name", "") for case in cases if {each.tag for each in case} & {"failure", "error"}]
    skipped = sum(any(each.tag == "skipped" for each in case) for case in cases)
    good = len(cases) - len(failed) - skipped
    print(f"{way}: {good} passed, {len(failed)} failed, {skipped} skipped; failed: {', '.join(failed)}", flush=True)
    return good


def hide_horovod(tests: Path) -> None:
    """Make `import horovod` fail, except in the tests' module of helpers, for a function that they do not use."""
    names = ("horovod", "horovod.runner", "horovod.runner.util", "horovod.runner.util.threads")
    sys.modules |= {name: types.ModuleType(name) for name in names}
    sys.modules[names[-1]].in_thread = None  # type: ignore[attr-defined]
    sys.path.append(str(tests.parent.parent / "utils"))
    importlib.import_module("common")
    for name in names:
        del sys.modules[name]
    sys.modules["horovod"] = None  # type: ignore[assignment]


def run_rank(way: str, options: argparse.Namespace) -> int:
    """Run the tests on this rank."""
    import pytest

    from hvdtrain.comm.launch_env import launch_env

    sys.modules["mock"] = unittest.mock
    if way == "without":
        hide_horovod(options.source)
    report = options.reports / f"{way}.{launch_env().rank}.xml"
    words = ["-q", "-p", "no:cacheprovider", "--rootdir", str(options.source.parent), f"--junitxml={report}"]
    words += ["-o", "faulthandler_timeout=120", *(["-k", options.k] if options.k else [])]
    return int(pytest.main([*words, str(options.source)]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"{', '.join(LEAST)}; all if none is given")
    parser.add_argument("-k", metavar="EXPRESSION", help="only these tests, as for pytest")
    parser.add_argument("--source", type=Path, required=True, help=f"a checkout of Horovod {VERSION}")
    parser.add_argument("--log", type=Path, help="keep the ranks' output in this folder")
    parser.add_argument("--limit-s", type=float, default=900, help="seconds for each way; default: %(default)s")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--reports", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return run_rank(options.rank, options)
    if not (options.source / "test" / "parallel" / "test_torch.py").exists():
        parser.error(f"--source {options.source}: no test/parallel/test_torch.py there; hint: git checkout v{VERSION}")
    if unknown := set(options.ways) - LEAST.keys():
        parser.error(f"unknown: {', '.join(unknown)}; choose from {', '.join(LEAST)}")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-suite-") as name:
        folder = Path(name)
        tests = copied(options.source, folder)
        short = [way for way in options.ways or LEAST if passed(way, tests, folder, options) < LEAST[way]]
    return 1 if short and not options.k else 0


if __name__ == "__main__":
    sys.exit(main())
