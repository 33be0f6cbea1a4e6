"""The run folder of a user's script, with the same files as a workload's.

The first optimizer calls `begin`, each step `Steps.done`, the script `log`, and the end of the script `finish`.
Rank 0's environment counts: HVDTRAIN_RUN_DIR names the folder, HVDTRAIN_RECORD=0 turns recording off, and
HVDTRAIN_MONITOR is the workloads' option. Values that the script does not log stay empty: the samples of a step, the
wait for its batch (part of compute_s), the batch arithmetic.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.comm import lifecycle
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.options import TrainConfig
from hvdtrain.horovod_api import exit_status, script
from hvdtrain.horovod_api.recorder import Gather, Recorder
from hvdtrain.strategies import Spec
from hvdtrain.strategies.cost import Shape, elements
from hvdtrain.system.exits import Failure
from hvdtrain.training import manifest as run_manifest
from hvdtrain.training import run_folder

VARIABLES = ("RECORD", "RUN_DIR", "RESUME", "MONITOR")

_recorder: Recorder | None = None
begun = False
"""Whether `begin` was called in this process"""
samples: int | None = None
"""The last logged number of samples in a step of this rank"""


def begin(
    world: Communicator,
    exchange: Spec,
    *,
    shapes: Sequence[Shape],
    device: str,
    threads: int,
    gather: Callable[[], Gather],
) -> Steps | None:
    """Opens the run folder, measures the links and writes the manifest, once in a process. Collective.

    Args:
        shapes: Shapes of the parameters that the optimizer trains.
        device: This rank's device.
        threads: Number of threads that this rank computes with.
        gather: Returns a function for the end of the script, which gives rank 0 the bytes of all ranks. Collective.

    Returns None if the script is not recorded. Raises Failure (73) if HVDTRAIN_RUN_DIR cannot be created or holds a
    run, and Failure (78) for unknown monitors.
    """
    global begun, _recorder
    begun = True
    options = world.gather({name: os.environ.get(f"HVDTRAIN_{name}") for name in VARIABLES})[0]
    if options["RECORD"] == "0":
        return None
    config = TrainConfig(
        framework=world.framework,  # type: ignore[arg-type]
        strategy=str(exchange),
        run_dir=script.new_folder(options["RUN_DIR"], restarted=options["RESUME"] not in (None, "", "0", "false")),
        monitor=options["MONITOR"] or "none",
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(sys.argv[0]).stem) or "script"
    try:
        folder = run_folder.open_folder(config, name, world).resolve()  # the script may change its folder
    except Failure as failure:
        message = str(failure).replace("add --resume to continue it, or ", "").replace("--run-dir", "HVDTRAIN_RUN_DIR")
        if options["RUN_DIR"]:
            raise Failure(message, failure.code) from None
        if world.rank == 0:
            print(f"hvdtrain: this run is not recorded: {message}", file=sys.stderr, flush=True)
        return None
    if world.sentinel:
        world.sentinel.set_run_folder(str(folder), "")
    world.measure_links()
    seed, rest = script.seed_and_rest(sys.argv)
    manifest = records.Manifest(
        workload=name,
        argv=sys.argv,
        config={
            "framework": world.framework,
            "strategy": str(exchange),
            "seed": seed,
            "monitor": config.monitor,
            "arguments": rest,
        },
        exchange=exchange.facts(buckets=False),
        plan={"ranks": world.size},
        data={},
        model={"parameters": elements(shapes)},
        shapes=[list(shape) for shape in shapes],
        metric={},
        **run_manifest.surroundings(device, threads, world),
    )
    run_manifest.keep(manifest, folder, {}, world)
    _recorder = Recorder(world, config, manifest, folder, device, gather())
    exit_status.watch()
    lifecycle.at_exit(_at_exit, _recorder)
    return steps()


def steps() -> Steps | None:
    """Records the steps of one more optimizer; None if the script is not recorded."""
    return None if _recorder is None or _recorder.ended else Steps(_recorder)


def log(**values: Any) -> None:
    """Logs numbers by name, on all ranks or on rank 0 only. Sends nothing; does nothing if the run is not recorded.

        hvd.log(loss=loss.item(), samples=len(batch))     # after optimizer.step(): for that step
        hvd.log(epoch=3, accuracy=0.91, val_loss=0.4)     # after an evaluation: for the epoch that has ended
        hvd.log(test_accuracy=0.93)                       # at the end

    `loss` is the mean training loss, `samples` this rank's number of samples. Other names are scores, by default of the
    validation; the prefixes train_, val_, validation_ and test_ name the split. Raises ValueError for invalid values.
    """
    global samples
    numbers = {name: script.number(name, value) for name, value in values.items()}
    if "samples" in numbers:
        samples = int(numbers["samples"])
    if _recorder is not None:
        _recorder.log(numbers)


def choosing(pending: bool, exchange: Spec | None = None, reason: str = "") -> None:
    """Tells the records whether `auto` has yet to choose. Until then steps count as warm-up.

    `exchange` and `reason`: what `auto` has chosen, and why.
    """
    if _recorder is not None:
        _recorder.choosing = pending
        if exchange is not None:
            _recorder.chose(exchange, reason)


def interrupted(reason: str) -> None:
    """The records describe a job whose ranks have changed, for this `reason`, so the run stays unfinished."""
    if _recorder is not None:
        _recorder.interruption = _recorder.interruption or reason


def finish() -> None:
    """Writes the end of the run, for which rank 0 waits for the others. Never raises; a second call does nothing.

    A script that is handling an exception has failed. COMPLETE is written later, if the process ends normally.
    """
    if _recorder is not None:
        _recorder.end(exit_status.handled_failure())


def _at_exit(recorder: Recorder) -> None:
    failure = exit_status.failure()
    recorder.end(failure)
    recorder.mark(failure)


class Steps:
    """The steps of one optimizer or tape."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def done(
        self, *, lr: float | None, exchange_s: float | None, sent_bytes: int, local_sent_bytes: int | None
    ) -> None:
        """Records a step that has just ended.

        `exchange_s` is the wait for the exchange; None if it cannot be separated from computation. `local_sent_bytes`
        is None if `sent_bytes` is computed rather than counted.
        """
        self._recorder.step(self, lr, exchange_s, sent_bytes, local_sent_bytes)

    def exchanged(self, waited_s: float, sent_bytes: int, local_sent_bytes: int) -> None:
        """Adds an exchange of weights that has just ended to the step before it, as in a workload."""
        self._recorder.step(None, None, waited_s, sent_bytes, local_sent_bytes)
