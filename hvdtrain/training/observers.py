"""What looks on while a run trains, each of it only if asked: the framework's profiler, Horovod's timeline, monitors
and TensorBoard scalars.

The profiler and the timeline see the run from inside and slow it, so profiled steps stay out of rates, and so does the
step after them, in which the other ranks wait for rank 0 to write its trace.
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
from hvdtrain.comm.launch_env import LaunchEnv
from hvdtrain.config.options import TrainConfig
from hvdtrain.frameworks import Profiler, Replica
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

UNSEEN: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def check(config: TrainConfig, steps: int, where: LaunchEnv) -> None:
    """Raises Failure (78) if the profiler, timeline or TensorBoard asked for cannot work in a run of so many steps."""
    profiled_steps(config.profile, steps)
    if config.horovod_timeline and where.launcher == "alone":
        raise Failure(
            "--horovod-timeline: without a launcher no Horovod runs; use horovodrun or mpirun", exits.BAD_CONFIG
        )
    if config.tensorboard:
        from hvdtrain.observe import tensorboard

        tensorboard.check()


def profiled_steps(asked: str | None, steps: int) -> range:
    """The steps of `--profile N:M`, both included. Raises Failure (78) if a run of `steps` steps does not have them."""
    if asked is None:
        return range(0)
    found = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", asked)
    if found is None:
        raise Failure(f"--profile {asked}: give N:M, two steps counted from 0, e.g. 10:12", exits.BAD_CONFIG)
    first, last = int(found[1]), int(found[2])
    if first > last:
        raise Failure(f"--profile {asked}: step {first} is after step {last}: give N:M with N <= M", exits.BAD_CONFIG)
    if last >= steps:
        raise Failure(f"--profile {asked}: the run's steps are 0 to {steps - 1}: lower M", exits.BAD_CONFIG)
    return range(first, last + 1)


def writer(config: TrainConfig, folder: Path, rank: int) -> records.Writer:
    """The writer of this rank's records."""
    path = folder / "metrics" / f"rank{rank:04d}.jsonl"
    if rank or not config.tensorboard:
        return records.Writer(path)
    from hvdtrain.observe.tensorboard import Scalars

    return Scalars(path, folder / "tensorboard")


def monitoring(
    config: TrainConfig, folder: Path, world: Communicator, device: str, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[Any]:
    """Starts a sampler on each host; with --monitor-idle-s waits until all have measured their idle power. Collective;
    the samples tile the block of what it returns. `device`: this rank's."""
    from hvdtrain import monitors

    monitor: Any = None
    offers = world.gather(monitors.offer(world.rank, device))
    if world.local_rank == 0:
        monitor = monitors.Monitor(
            config.monitor, folder, interval_ms=config.monitor_ms, idle_s=config.monitor_idle_s, ranks=offers
        )
    else:
        time.sleep(config.monitor_idle_s)
    for nothing in world.gather(monitor and monitor.nothing):
        if nothing:
            say(f"warning: --monitor {nothing}")
    return monitor or UNSEEN


class Observers:
    """Runs one rank's monitors, profiler and timeline. Collective: every rank makes them and calls the same methods."""

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
    def watching(self, start: int) -> Iterator[None]:
        """Runs monitors and timeline from `start`, the first step of this process, until the run ends or stops."""
        with contextlib.ExitStack() as watching:
            if self._config.monitor != "none":
                watching.enter_context(
                    monitoring(self._config, self._folder, self._world, self._replica.device, self._say)
                )
            if self._config.horovod_timeline:
                watching.enter_context(self._timeline(start))
            yield
            if self._profiler is not None:  # stopped by a signal between N and M
                self._write_profile(self._profiler)

    def distort(self, step: int) -> bool:
        """Whether the profiler changes this step's times."""
        return step in self._profiled or step - 1 in self._profiled

    def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Profiles the step if it is one of --profile, on rank 0."""
        return self._profile(number) if number in self._profiled and self._world.rank == 0 else UNSEEN

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
        except OSError as error:  # no reason to end the training
            self._say(f"warning: the profile of steps {steps} is not written: {error}")

    @contextlib.contextmanager
    def _timeline(self, start: int) -> Iterator[None]:
        """Rank 0 starts the timeline; the barrier after it keeps other ranks from offering a tensor before that."""
        if self._world.rank == 0:
            name = f"horovod_timeline{f'-from-{start}' if start else ''}.json"
            self._world.start_timeline(self._outputs() / name)
        self._world.gather("timeline")
        self._say("note: Horovod writes its timeline with a thread that never rests: this run is slower than others")
        yield
        if self._world.rank == 0:
            self._world.stop_timeline()

    def _outputs(self) -> Path:
        folder = self._folder / "profile"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise Failure(f"{folder}: {error.strerror}; choose another --run-dir", exits.CANNOT_WRITE) from error
        return folder
