"""What a run does when its members change: it divides the work again, and rank 0's files move to the new rank 0."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from hvdtrain import records
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.elastic import Aborted, ElasticCommunicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.config import batch_plan
from hvdtrain.config.batch_plan import BatchPlan
from hvdtrain.config.options import TrainConfig
from hvdtrain.data.loader import Loader
from hvdtrain.frameworks import Replica
from hvdtrain.strategies import Exchange, Strategy
from hvdtrain.system import exits, files, locks
from hvdtrain.system.exits import Failure
from hvdtrain.training import manifest, resume
from hvdtrain.training.train_state import Position

if TYPE_CHECKING:
    from hvdtrain.training.job import Job

T = TypeVar("T")
LOST = (PeerLost, Aborted)
"""What collective work raises if a host was lost"""


def check(launcher: str, exchange: Exchange, config: TrainConfig) -> None:
    """Raise Failure (78) if the launcher expects the job to continue without lost hosts, and it cannot."""
    if launcher != "elastic":
        return
    capabilities, what, hint = exchange.capabilities, "", "use --strategy hierarchical, powersgd or local-sgd"
    if not capabilities.elastic:
        what = f"--strategy {exchange}"
    elif config.stages > 1:
        what, hint = f"--stages {config.stages}", "use --stages 1"
    elif config.ema and capabilities.local_updates:
        what, hint = f"--ema and --strategy {exchange}", "leave --ema out, or use --strategy powersgd"
    if what:
        message = f"--elastic: a job with {what} cannot continue without a lost host"
        raise Failure(f"{message}; hint: {hint}", exits.BAD_CONFIG)


def divided(job: Job, world: Communicator) -> tuple[Loader, BatchPlan]:
    """Return the loader and the plan of a job for its present members.

    A global batch that was given stays, and each rank takes more of it. Otherwise each rank keeps its batch, so the
    global batch shrinks, and --lr-scaling applies.
    """
    config, shares = job.run.config, job.run.plan.shares
    if shares is not None and isinstance(world, ElasticCommunicator):
        shares = tuple(shares[rank] for rank in world.view.ranks)
    batch = resume.global_batch(config, world.size)
    loader = job.loader.among(world.rank, world.size, batch, shares)
    plan = batch_plan.batch_plan(config, world.size, batch, loader.steps_per_epoch, shares)
    return loader, plan


def keep_count(folder: Path, world: Communicator) -> None:
    """Write into the manifest on each host how many ranks save checkpoints from now on. Collective."""
    for first in (True, False):  # rank 0 first, then hosts that do not share its folder
        if world.local_rank == 0 and first == (world.rank == 0):
            path = folder / manifest.NAME
            kept = records.read_document(path, records.Manifest)
            if kept.plan.get("ranks") != world.size:
                plan = kept.plan | {"ranks": world.size}
                records.write_document(path, records.as_json(msgspec.structs.replace(kept, plan=plan)))
        world.gather(None)


def take_over(folder: Path, rank: int) -> None:
    """Make a copy of the records of this process, which started as rank `rank`, the records of rank 0, which is lost.

    The records of the lost rank 0 are kept under another name. Raises Failure (73, 74).
    """
    if not locks.holds():  # rank 0 held the lock of a folder that all hosts share
        locks.take_over(folder, records.utc_now())
    first = folder / "metrics" / "rank0000.jsonl"
    own = first.with_name(f"rank{rank:04d}.jsonl")
    copy = first.with_name(f".rank0000-{os.getpid()}")
    try:
        shutil.copyfile(own, copy)
        if first.exists():
            first.rename(first.with_name(f"lost-{time.time_ns()}.jsonl"))
        copy.rename(first)
    except OSError as error:
        raise files.unwritable(first, error, "choose another --run-dir") from error


class Transactions:
    """Repeats the collective work of a loop until it counts on all members. Without --elastic it only does the work."""

    def __init__(
        self,
        world: Communicator,
        replica: Replica,
        strategy: Strategy,
        adopt: Callable[[float], None],
        learn: Callable[[np.ndarray], None],
    ) -> None:
        """`adopt(lost_s)` divides the work among the new members. Collective; it is repeated after PeerLost.

        `learn` takes the totals of exchanges in the background that count.
        """
        self._world, self._replica, self._strategy = world, replica, strategy
        self._adopt, self._learn = adopt, learn
        self._noticed_s: float | None = None
        self._began_s = 0.0
        """Start of the current step"""

    def until_done(self, work: Callable[[], T]) -> T:
        """Do collective work that changes nothing but running statistics, however many hosts are lost meanwhile."""
        while True:
            done, result = self.attempt(work)
            if done:
                return result  # type: ignore[return-value]

    def attempt(self, work: Callable[[], T]) -> tuple[bool, T | None]:
        """Do collective work, or return False if a host was lost. Then running statistics are as before."""
        if not self._world.elastic:
            return True, work()
        before, done, result = self.statistics(), False, None
        try:
            result = work()
            self._world.commit()
            done = True
        except LOST:
            self._interrupt()
            self._replica.load_local(before)
        self.regroup()
        return done, result

    def statistics(self) -> dict[str, np.ndarray]:
        """Return a copy of the running statistics before a step, which changes them before its exchange.

        Empty if not elastic.
        """
        self._began_s = time.perf_counter()
        if not self._world.elastic:
            return {}
        return {name: array.copy() for name, array in self._replica.local_state().items()}

    def _interrupt(self) -> None:
        """Use the present connections no more, unless they are new: `commit` may have recovered before it failed."""
        if not self._world.suspended:
            self._world.lost()

    def abandon(self, statistics: dict[str, np.ndarray]) -> None:
        """Undo an interrupted step. `statistics`: those before it."""
        self._noticed_s = self._noticed_s or self._began_s
        self._interrupt()
        self._strategy.abandon()
        self._replica.load_local(statistics)
        self.regroup()

    def regroup(self) -> bool:
        """After a loss, continue with the new members. Returns False if other ranks have done more steps."""
        while self._world.suspended:
            self._noticed_s = self._noticed_s or time.perf_counter()
            try:
                if self._world.broken:
                    self._world.lost()
                    self._strategy.wait_idle()
                    counts = self._world.recover()
                    settled = self._strategy.settle(self._replica, counts)
                    if settled.totals is not None:
                        self._learn(settled.totals)
                if self._world.step < self._world.target:
                    return False
                self._strategy.regroup()
                assert self._noticed_s is not None
                self._adopt(time.perf_counter() - self._noticed_s)
            except PeerLost:
                self._world.lost()
                continue
            self._noticed_s = None
            self._world.resume()
        return True


def view_record(world: ElasticCommunicator, at: Position, plan: BatchPlan, lost_s: float) -> records.View:
    return records.View(
        view=world.view.number,
        step=at.step,
        epoch=at.epoch,
        sample=at.consumed,
        members=list(world.view.hosts),
        ranks=world.size,
        hosts=len(set(world.view.hosts)),
        global_batch=plan.global_batch,
        reason=world.view.reason,
        unix_s=time.time(),
        lost_s=lost_s,
    )


def described(view: records.View, plan: BatchPlan) -> str:
    """Describe a view and its batch for people."""
    return (
        f"view {view.view}         {view.hosts} hosts, {view.ranks} ranks from step {view.step} on, "
        f"{view.lost_s:.1f} s after the loss; {plan.global_batch} samples per step, learning rate {plan.base_lr:g}"
    )
