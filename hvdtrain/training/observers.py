"""The optional observers of a run: the framework's profiler, monitors and TensorBoard scalars.

The profiler slows the steps that it observes, and in the next step the other ranks wait for rank 0 to write its trace.
So these steps are excluded from rates.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.options import TrainConfig
from hvdtrain.frameworks import Profiler, Replica
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

IDLE_S = 5.0
"""Seconds of idle power that are measured before step 0"""
UNOBSERVED: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def check(config: TrainConfig, steps: int) -> None:
    """Raise Failure (78) if the requested profiler or TensorBoard cannot work in a run of `steps` steps."""
    profiled_steps(config.profile, steps)
    if config.tensorboard:
        from hvdtrain.observe import tensorboard

        tensorboard.check()


def profiled_steps(text: str | None, steps: int) -> range:
    """Return the steps of `--profile N:M`, including M. Raises Failure (78) if a run of `steps` steps has none."""
    if text is None:
        return range(0)
    match = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        raise Failure(f"--profile {text}: not two steps; hint: give N:M, counted from 0, e.g. 10:12", exits.BAD_CONFIG)
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise Failure(f"--profile {text}: step {first} is after step {last}; hint: give N <= M", exits.BAD_CONFIG)
    if last >= steps:
        raise Failure(f"--profile {text}: the run has steps 0 to {steps - 1}; hint: lower M", exits.BAD_CONFIG)
    return range(first, last + 1)


def writer(config: TrainConfig, folder: Path, rank: int) -> records.Writer:
    """Return the writer of this rank's records."""
    path = folder / "metrics" / f"rank{rank:04d}.jsonl"
    if rank or not config.tensorboard:
        return records.Writer(path)
    from hvdtrain.observe.tensorboard import Scalars

    return Scalars(path, folder / "tensorboard")


def monitoring(
    config: TrainConfig, folder: Path, world: Communicator, device: str, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that samples monitors on each host. Collective.

    With power it first waits until all hosts have measured their idle power. `device`: this rank's device.
    """
    from hvdtrain import monitors

    monitor: Any = None
    idle_s = IDLE_S if "power" in config.monitor else 0.0
    offers = world.gather(monitors.describe_rank(world.rank, device))
    if world.local_rank == 0:
        monitor = monitors.Monitor(config.monitor, folder, idle_s=idle_s, ranks=offers)
    else:
        time.sleep(idle_s)
    for unavailable in world.gather(monitor and monitor.unavailable):
        if unavailable:
            say(f"warning: --monitor {unavailable}")
    return monitor or UNOBSERVED


class NicBytes:
    """The bytes that the NIC of the link between hosts has sent and received since this object was made."""

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._began = world.sentinel.nic_counters() if world.sentinel else None

    def entry(self) -> dict[str, Any] | None:
        """This host's entry of `records.Summary.nic_bytes`; None on all but its first rank, or without a link."""
        sentinel, began = self._world.sentinel, self._began
        if not (sentinel and began and (now := sentinel.nic_counters())):
            return None
        sent, received = (after - before for after, before in zip(now, began, strict=True))
        return {"host": self._world.host, "nic": sentinel.nic, "sent_bytes": sent, "received_bytes": received}


class Observers:
    """Runs one rank's monitors and profiler. Every rank makes one and calls the same methods."""

    def __init__(
        self,
        config: TrainConfig,
        steps: int,
        folder: Path,
        *,
        world: Communicator,
        replica: Replica,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._folder = config, folder
        self._world, self._replica, self._say = world, replica, say
        self._profiled = profiled_steps(config.profile, steps)
        self._profiler: Profiler | None = None
        self._first_profiled = self._last_profiled = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Run monitors until the run ends or stops."""
        with contextlib.ExitStack() as watching:
            if self._config.monitor != "none":
                watching.enter_context(
                    monitoring(self._config, self._folder, self._world, self._replica.device, self._say)
                )
            yield
            if self._profiler is not None:  # stopped by a signal between N and M
                self._write_profile(self._profiler)

    def distort(self, step: int) -> bool:
        """Whether the profiler changes this step's times."""
        return step in self._profiled or step - 1 in self._profiled

    def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Profile the step on rank 0 if --profile includes it."""
        return self._profile(number) if number in self._profiled and self._world.rank == 0 else UNOBSERVED

    @contextlib.contextmanager
    def _profile(self, number: int) -> Iterator[None]:
        if self._profiler is None:
            self._profiler, self._first_profiled = self._replica.profiler(), number
            self._profiler.start(self._outputs())
        with self._profiler.step(number):
            yield
        self._last_profiled = number
        if number == self._profiled[-1]:
            self._write_profile(self._profiler)

    def _write_profile(self, profiler: Profiler) -> None:
        steps, self._profiler = f"{self._first_profiled}-{self._last_profiled}", None
        try:
            self._say(f"profile of steps {steps}: {profiler.stop(f'steps-{steps}')}")
        except OSError as error:  # training continues
            self._say(f"warning: the profile of steps {steps} could not be written: {error}")

    def _outputs(self) -> Path:
        folder = self._folder / "profile"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise Failure(f"{folder}: {error.strerror}; hint: choose another --run-dir", exits.CANNOT_WRITE) from error
        return folder
