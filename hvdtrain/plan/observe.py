"""Runs a workload, or a user's script, until `hvdtrain plan` has its profile."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib.util
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain.comm.lifecycle import StopSignal
from hvdtrain.config import workloads
from hvdtrain.config.options import TrainConfig
from hvdtrain.launch.agent import on_host
from hvdtrain.launch.tuning import MMAP_THRESHOLD_BYTES
from hvdtrain.plan import coding, pilot, profile
from hvdtrain.plan.profile import Profile
from hvdtrain.plan.steps import WARM_UP_STEPS, Script
from hvdtrain.system import cgroup, exits, proc
from hvdtrain.system.arguments import near
from hvdtrain.system.environment import FOR_RANKS, passes
from hvdtrain.system.exits import Failure
from hvdtrain.training import profiled
from hvdtrain.training.connected import Connected

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
ENVIRONMENT = {
    "HVDTRAIN_RECORD": "0",
    "HVDTRAIN_STRATEGY": "hierarchical",
    **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""What a script sees that was written for torchrun, as its only rank"""
USES_HVDTRAIN = re.compile(rb"^\s*(from|import) hvdtrain", re.M)
"""In the text of a script. In others all optimizers of PyTorch are timed."""
ROOT = str(Path(__file__).parents[2])


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What profiling has found, or why it failed."""

    profile: Profile | None = None
    config: TrainConfig | None = None
    notes: list[str] = []
    failure: str = ""
    code: int = 0


ELSEWHERE = f"import sys; sys.path.append({ROOT!r}); from hvdtrain.plan import observe; observe.elsewhere()"


class Profiler(profiled.Observer):
    """Profiles a model for some batches and reducers, and ends the workload or the script."""

    found: Found | None = None
    _script: Script | None = None
    """The steps of a script that may end before they are enough"""

    def __init__(
        self,
        options: Any,
        counts: Sequence[int],
        names: Sequence[str],
        answer: Callable[[Found], None] = lambda found: None,
    ) -> None:
        """`counts`: numbers of hosts. `names`: reducers. `answer`: called at once with what was found."""
        self._options, self._counts, self._names, self._answer = options, counts, names, answer
        self._is_script = is_script(options.workload)

    def modelled(self, job: Connected, model: profiled.Maker, initial: profiled.Maker) -> None:
        ranks = self._options.ranks_per_host
        config, key = self._with_batch(job.run.config), profiled.key(job)
        batches = [global_batch(config, count * ranks) // (count * ranks) for count in {1, *self._counts}]
        sizes = profile.sizes_of(batches, len(job.dataset.train))
        kept = None if self._options.fresh or self._is_script else profile.cached(key)
        if kept is None or kept.points[0].batch > min(sizes) or kept.points[-1].batch < max(sizes):
            print(f"profiling {job.workload.model.title} with {sizes} samples per step", file=sys.stderr, flush=True)
            keep_heap()
            kept = profiled.measured(job, model, sizes, self._names, profile.STEPS_S, profile.CODING_S)
            self._keep(kept, key)
        elif missing := [name for name in self._names if name not in kept.coding_s]:
            kept = profile.with_coding(kept, coding.measure(missing, kept.shapes, profile.CODING_S))
            self._keep(kept, key)
        settings = profiled.pilot_key(job)
        grows = global_batch(config, 1) != global_batch(config, 2)
        if self._options.pilot and grows and kept.pilot != settings:
            longest = f"{3 * pilot.PILOT_S:.0f} s"
            print(
                f"training for at most {longest} to see how many more epochs a larger batch needs",
                file=sys.stderr,
                flush=True,
            )
            kept = msgspec.structs.replace(kept, noise_scale=profiled.noise_scale(job, model, initial), pilot=settings)
            self._keep(kept, key)
        self._end(kept, self._with_batch(job.workload.config))
        raise profiled.Done

    def _end(self, made: Profile, config: TrainConfig, *notes: str) -> None:
        self.found = Found(profile=made, config=config, notes=list(notes))
        self._answer(self.found)

    def _keep(self, made: Profile, key: Mapping[str, Any]) -> None:
        """Keep the profile of a workload, if the cache can be written; a script may change."""
        try:
            if not self._is_script:
                profile.keep(made, key)
        except Failure as failure:
            print(f"hvdtrain: warning: the profile is not kept: {failure}", file=sys.stderr, flush=True)

    def stepped(self, script: Script) -> None:
        self._script = script
        if self.found is None and script.steps.are_enough:
            self._take(script)
        if self.found is not None:
            raise profiled.Done

    def ended(self) -> None:
        """The script has ended on its own."""
        if self.found is None and self._script is not None:
            self._take(self._script)

    def _take(self, script: Script) -> None:
        made = script.profiled()
        batch = made.points[0].batch
        config = self._with_batch(TrainConfig(framework=script.framework, batch_size=batch))  # type: ignore[arg-type]
        self._end(
            profile.with_coding(made, coding.measure(self._names, made.shapes, profile.CODING_S)),
            config,
            f"profiled in {script.steps.timed} steps of {made.workload} with its {batch} samples per rank; "
            f"{profile.ASSUMED_FIXED}",
        )

    def _with_batch(self, config: TrainConfig) -> TrainConfig:
        """Return the config with the plan's --global-batch-size, which a script does not know."""
        size = self._options.global_batch_size
        return dataclasses.replace(config, global_batch_size=size, batch_size=None) if size else config


def keep_heap() -> None:
    """Keep freed memory in the heap, as launch/*.sh make glibc do for ranks, which makes steps faster."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in ((M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES), (M_TRIM_THRESHOLD, 2**31 - 1)):
            libc.mallopt(parameter, value)


def global_batch(config: TrainConfig, ranks: int) -> int:
    return config.global_batch_size or (config.batch_size or 32) * ranks


def is_script(name: str) -> bool:
    """Whether a plan's argument names a file and not a workload."""
    return name not in workloads.known() and (name.endswith(".py") or Path(name).is_file())


def observed(options: Any, counts: Sequence[int], names: Sequence[str]) -> Found:
    """Run a workload or a script until it is profiled. Raises Failure like `workload` and `script`."""
    return (script if is_script(options.workload) else workload)(options, counts, names)


def on_hosts(
    addresses: Mapping[str, str], options: Any, counts: Sequence[int], names: Sequence[str]
) -> dict[str, Found]:
    """Profile on all hosts at the same time, with the pilot on the first. `addresses`: host -> address.

    Raises Failure as `observed` does, with the host's name, and (69) if a host does not answer.
    """
    passed = [f"{name}={value}" for name, value in os.environ.items() if passes(name, FOR_RANKS)]
    python = ["env", "-C", str(Path.cwd()), *passed, sys.executable, "-P", "-c", ELSEWHERE]
    results = {}
    with contextlib.ExitStack() as stack:
        started: dict[str, tuple[subprocess.Popen[bytes], io.BufferedRandom]] = {}
        for host, address in addresses.items():
            request = json.dumps([vars(options) | {"pilot": not started}, list(counts), names], default=str)
            messages = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                on_host(host, address, [*python, request]),
                stdin=subprocess.PIPE,  # its end ends the host's part
                stdout=subprocess.PIPE,
                stderr=messages if started else None,
            )
            started[host] = stack.enter_context(process), messages
        for host, (process, messages) in started.items():
            assert process.stdout
            try:
                found = msgspec.json.decode(process.stdout.read(), type=Found)
            except msgspec.DecodeError:
                messages.seek(0)
                *_, said = [f"exit code {process.wait()}".encode(), *messages.read().splitlines()]
                what = exits.printable(said.decode(errors="replace"))
                raise Failure(
                    f"{host}: {what}; hint: each host needs hvdtrain in {sys.prefix}", exits.UNREACHABLE
                ) from None
            if found.failure:
                raise Failure(f"{host}: {found.failure}", found.code)
            results[host] = found
            if late := ", ".join(list(started)[len(results) :]):
                print(f"{host} has been profiled; waiting for {late}", file=sys.stderr, flush=True)
    return results


def elsewhere() -> None:
    """Profile on this host for `on_hosts`, and end if its process does."""
    options, counts, names = json.loads(sys.argv[1])
    caller, answer, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    def watch() -> None:
        os.read(caller, 1)  # returns when the caller has closed its end
        os._exit(exits.FAILED)

    threading.Thread(target=watch, daemon=True).start()
    try:
        found = observed(argparse.Namespace(**options), counts, names)
    except Failure as failure:
        found = Found(failure=str(failure), code=failure.code)
    with os.fdopen(answer, "wb") as stream:
        stream.write(msgspec.json.encode(found))
    os._exit(exits.OK)  # the caller waits for this, and the threads of frameworks can delay the end of Python


def workload(options: Any, counts: Sequence[int], names: Sequence[str]) -> Found:
    """Run a workload until it is profiled; see `Profiler`. Raises Failure (2, 65, 78) as the workload does."""
    name = options.workload
    if name not in workloads.known():
        known = ", ".join(workloads.known())
        raise Failure(
            f"unknown workload {name!r}{near(name, workloads.known())} (known: {known}); hint: name the workload or "
            "the script first, without a launcher: hvdtrain plan train.py --lr 0.1",
            exits.USAGE,
        )
    module, profiler = workloads.module(name), Profiler(options, counts, names)
    size = [f"--global-batch-size={options.global_batch_size}"] if options.global_batch_size else []
    with _arguments(str(module.__file__), [*options.flags, *size]):
        stop = StopSignal()
        try:
            with profiled.observing(profiler), contextlib.redirect_stdout(sys.stderr):
                module.main(stop)
        finally:
            stop.restore()
    if profiler.found is None:
        raise Failure(f"{name} made no model; hint: leave out --dry-run and --strategy help", exits.USAGE)
    return profiler.found


def script(options: Any, counts: Sequence[int], names: Sequence[str]) -> Found:
    """Run a script in its own process, as the only rank, until it is profiled; see `Profiler`.

    Raises Failure (1, 2, 78) if the script fails, makes no steps or ends the process.
    """
    path = Path(options.workload)
    if not path.is_file():
        raise Failure(f"{path}: no such script; hint: name a file, or a workload (see --help)", exits.USAGE)
    print(f"running {path} until it is profiled", file=sys.stderr, flush=True)
    with tempfile.TemporaryFile() as answer:
        request = json.dumps([answer.fileno(), vars(options), counts, names], default=str)
        program = f"import sys; sys.path.append({ROOT!r}); from hvdtrain.plan import observe; observe.child()"
        command = [sys.executable, "-P", "-c", program, request]
        # As the launchers do: PyTorch counts the machine's cores, whatever the quota.
        threads = str(cgroup.threads(cgroup.host_cores(), options.ranks_per_host))
        environment = {"OMP_NUM_THREADS": threads, **os.environ, **ENVIRONMENT}
        code = subprocess.run(
            command, env=environment, stdout=2, pass_fds=[answer.fileno()], preexec_fn=proc.end_with_parent, check=False
        ).returncode
        answer.seek(0)
        content = answer.read()
    if not content:
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        raise Failure(
            f"{path} ended its process ({how}) before it was profiled; hint: try `python {path}` without plan",
            exits.FAILED,
        )
    found = msgspec.json.decode(content, type=Found)
    if found.failure:
        raise Failure(found.failure, found.code)
    return found


def child() -> None:
    """Run a script for the process that called `script`, and write what was found to its file."""
    descriptor, options, counts, names = json.loads(sys.argv[1])

    def answer(found: Found) -> None:
        os.write(descriptor, msgspec.json.encode(found))

    profiler, path = Profiler(argparse.Namespace(**options), counts, names, answer), Path(options["workload"])
    keep_heap()
    try:
        with _arguments(str(path), options["flags"]), profiled.observing(profiler):
            if not USES_HVDTRAIN.search(path.read_bytes()) and importlib.util.find_spec("torch"):
                importlib.import_module("hvdtrain.torch.attached").watch_script(ENVIRONMENT["HVDTRAIN_STRATEGY"])
            _run(path)
        profiler.ended()
        if profiler.found is None:
            raise Failure(
                f"{path} ended before an optimizer of PyTorch made {WARM_UP_STEPS + 1} steps; "
                " hint: train for more steps, or use hvd.DistributedOptimizer if it imports hvdtrain",
                exits.USAGE,
            )
    except Failure as failure:
        if profiler.found is None:  # otherwise the script reports how it was ended
            answer(Found(failure=str(failure), code=failure.code))


def _run(path: Path) -> None:
    """Run a script like `python PATH`. Raises Failure (1) if it fails."""
    sys.path.insert(0, str(path.resolve().parent))
    problem: BaseException
    try:
        runpy.run_path(str(path), run_name="__main__")
        return
    except Failure:
        raise
    except SystemExit as ended:
        if ended.code in (None, 0):
            return
        problem, reason = ended, f"it ended with exit code {ended.code}"
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        message = exits.printable(str(error).partition("\n")[0])
        problem, reason = error, f"line {lines[-1] if lines else 1}: {type(error).__name__}: {message}"
    finally:
        sys.path.pop(0)
    hint = f"try `python {path}` without plan; options of plan itself are in --help"
    raise Failure(f"{path} failed, {reason}; hint: {hint}", exits.FAILED) from problem


@contextlib.contextmanager
def _arguments(program: str, flags: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [program, *flags]
    try:
        yield
    finally:
        sys.argv = before
