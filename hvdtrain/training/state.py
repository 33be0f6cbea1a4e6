"""What changes during a run, on one rank: its position, its share of the work, its strategy and its files."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.frameworks import Replica
from hvdtrain.strategies import Exchanged, parse
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import elastic, observers, snapshot
from hvdtrain.training.checkpoint import Checkpoints, Loaded
from hvdtrain.training.connected import Connected
from hvdtrain.training.train_state import Position


@dataclasses.dataclass
class Due:
    """What all ranks are about to do between two steps. All of them set it in the same step."""

    check: bool = False
    """Compare the replicas"""
    save: bool = False
    """Save a checkpoint"""
    stop: bool = False
    """Save a checkpoint and stop"""
    choose: bool = False
    """Choose the strategy again"""


class RunState:
    """The loop advances it, and a change of members replaces parts of it."""

    def __init__(self, job: Connected, folder: Path, replica: Replica) -> None:
        """Collective."""
        assert job.strategy is not None
        self.job, self.folder, self.replica = job, folder, replica
        self.world, self.data, self.config = job.ranks, job.data, job.run.config
        self.loader, self.plan, self.strategy = job.loader, job.run.plan, job.strategy
        self.at, self.due = Position(strategy=str(job.exchange)), Due()
        self.stopped = False
        """Whether a checkpoint was saved after a signal to stop"""
        self.steps_of_strategy = 0
        """Steps of this process with the present strategy"""
        self.number = elastic.records_number(self.world, self.plan.ranks)
        """Number of the file that this rank writes; 0 from the time when it takes over from a lost rank 0"""
        self.writer = observers.writer(self.config, folder, self.number)
        self.checkpoints = self._new_checkpoints()

    def _new_checkpoints(self) -> Checkpoints:
        return Checkpoints(
            self.folder / "checkpoints",
            self.world,
            keep=self.config.keep_checkpoints,
            identity=self.job.run.identity(),
            layout=self.world.gather(self.world.local_rank),
            cut=[*self.job.run.plan.cut],
            stages=self.world.gather(self.job.stages.stage),
            check=self._position,
            report=self.say,
        )

    def renew_checkpoints(self) -> None:
        """Save the next checkpoints with the present ranks. Collective."""
        rejected = self.checkpoints.rejected
        self.checkpoints = self._new_checkpoints()
        self.checkpoints.rejected |= rejected

    def use(self, name: str) -> None:
        """Exchange by the strategy `name` from the next step on. Does nothing if it runs already. Collective."""
        if name == self.at.strategy:
            return
        shapes = self.job.workload.model.vector_shapes(self.config.framework)
        self.strategy = parse(name).make(self.config, self.data, shapes)
        self.replica.use(self.strategy)
        self.at.strategy, self.steps_of_strategy = name, 0

    def learn(self, done: Exchanged) -> None:
        """Take the totals and requests that an exchange brought."""
        if done.totals is not None:
            self.at.learn(done.totals)
        self.due.stop |= done.stop
        self.due.choose |= done.choose

    def record(self, record: records.Record) -> None:
        """Write a record that is the same on all ranks: once, or in every file if any rank may have to take over."""
        if self.world.rank == 0 or self.world.elastic:
            self.writer.write(record)

    def reopen_records(self, number: int) -> None:
        """Write to the file of another number from now on, or to the same file again."""
        self.writer.close()
        self.number = number
        self.writer = observers.writer(self.config, self.folder, number)

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one. Collective. Raises Failure (65, 78)."""
        world = self.world
        loaded = self.checkpoints.newest()
        if loaded is None:
            self.checkpoints.check_none()
            self.say("starting at step 0")
            return
        self.at = self.restore(loaded)
        hosts = len(set(world.gather(world.host)))
        self.writer.write(
            records.Resumed(step=self.at.step, utc=records.utc_now(), links=world.links, ranks=world.size, hosts=hosts)
        )
        self.say(f"resumed at step {self.at.step} of {self.plan.steps}, strategy {self.at.strategy}")

    def restore(self, loaded: Loaded) -> Position:
        """Restore a checkpoint, with its strategy. Returns its position. Raises Failure (65, 78)."""
        at = self._position(loaded.progress, loaded.step)
        if at.strategy != self.at.strategy:
            elastic.check(self.job.workload.environment.launcher, parse(at.strategy), self.config)
            self.use(at.strategy)
            if loaded.others and not loaded.local and (refusal := self.strategy.capabilities.reshard_refusal):
                raise Failure(
                    f"checkpoint of step {loaded.step}: its strategy is {at.strategy}, {refusal}; hint: start "
                    "as many ranks as before",
                    exits.BAD_CONFIG,
                )
        snapshot.restore(loaded, self.replica, self.strategy)
        return at

    def _position(self, progress: dict[str, Any], step: int) -> Position:
        samples = self.config.epoch_samples or len(self.job.dataset.train)
        return Position.loaded(progress, step, epoch_samples=samples)

    def say(self, message: str) -> None:
        if self.world.rank == 0:
            print(message, file=sys.stderr, flush=True)
