"""Profiles the model of a job on this rank, for `--strategy auto` and for `hvdtrain plan`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from hvdtrain.comm.world import alone
from hvdtrain.config import batch_plan
from hvdtrain.data import Batch
from hvdtrain.data.loader import Loader
from hvdtrain.plan import choice, coding, pilot, profile
from hvdtrain.plan.prediction import EXACT_REDUCER, reducers
from hvdtrain.plan.profile import Probe, Profile
from hvdtrain.strategies import Spec, automatic, parse
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.training import elastic, resume
from hvdtrain.training.connected import Connected, Described
from hvdtrain.training.framework import load_first, make_replica

if TYPE_CHECKING:
    from hvdtrain.plan.steps import Script

C = TypeVar("C", bound=Connected)
Maker = Callable[[range | None], Any]
AVERAGING = "local-sgd:every=1"
WAKING_S = 1.5
OUT_OF_MEMORY = ("OutOfMemoryError", "ResourceExhaustedError", "MemoryError")
"""Of PyTorch, TensorFlow and Python"""
AUTO_STEPS_S, AUTO_CODING_S = 6.0, 8.0
"""Times for measuring steps and reducers before step 0"""


class Observer:
    """What `hvdtrain plan` does when a workload has made its model.

    In a script with a drop-in module, `stepped` is called after each step of its optimizer.
    """

    def modelled(self, job: Connected, model: Maker, initial: Maker) -> None: ...

    def stepped(self, script: Script) -> None: ...


_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


class Done(BaseException):
    """An observer ends the workload. Not an Exception, so that no workload handles it."""


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let workloads that start inside the block call the observer, until it raises `Done`."""
    token = _observer.set(observer)
    try:
        yield
    except Done:
        pass
    finally:
        _observer.reset(token)


def observer() -> Observer | None:
    """Return the observer of this process; None if nothing is planned."""
    return _observer.get()


def key(job: Connected) -> dict[str, Any]:
    """Return everything besides the machine that a profile's times depend on."""
    config, run = job.run.config, job.run
    return {
        "workload": run.workload,
        "model": run.model,
        "data": {name: run.data.get(name) for name in ("image_shape", "pixel_dtype", "name")},
        **{name: getattr(config, name) for name in ("framework", "precision", "optimizer", "clip_norm")},
        "device": job.device,
        "threads": job.threads,
    }


def _replica(job: Connected, model: Maker) -> tuple[Any, Probe]:
    """Make a fresh model that exchanges nothing."""
    config = job.run.config
    single = alone(config.framework)
    probe = Probe(single, job.workload.model.vector_shapes(config.framework), config, None, None)
    return make_replica(model(None), config, single, probe, job.device, job.workload.metric), probe


def _batches(job: Connected, size: int, epoch: int = 0) -> Iterator[Batch]:
    """Yield an epoch's batches of `size` samples, without the last one, which may be short."""
    loader = Loader(job.dataset.train, global_batch=size, rank=0, size=1, seed=job.run.config.seed)
    whole = len(loader.ends()) - 1 or 1
    with contextlib.closing(loader.epoch(epoch)) as batches:
        for _, batch in zip(range(whole), batches, strict=False):
            yield batch


def measured(
    job: Connected, model: Maker, sizes: Iterable[int], names: Iterable[str], steps_s: float, coding_s: float
) -> Profile:
    """Profile a fresh model on this rank. Raises Failure (78) if it cannot be made.

    `sizes`: samples per step. `names`: reducers. `steps_s`, `coding_s`: times for measuring.
    """
    config, workload = job.run.config, job.workload
    replica, probe = _replica(job, model)
    shapes, batches = probe.shapes, functools.partial(_batches, job)
    points, ready = profile.timed(replica, probe, batches, sizes, steps_s)
    local, batch = parse(AVERAGING).make(config, probe.ranks, shapes), next(batches(points[0].batch))
    averaging_s = profile.averaging_s(replica, probe, local, batch)
    with profile.Waking() as waking:
        for _ in range(max(2, min(10, int(WAKING_S / points[0].backward_s)))):
            replica.backward(batch, 0.0, False)
            replica.synchronize()
    return Profile(
        machine=profile.machine(),
        workload=job.run.workload,
        model=workload.model.title,
        setup=key(job),
        shapes=[list(shape) for shape in shapes],
        epoch_samples=config.epoch_samples or len(job.dataset.train),
        threads=job.threads,
        points=points,
        averaging_s=averaging_s,
        waking_s=waking.late_s,
        ready=ready,
        coding_s=coding.measure(names, shapes, coding_s),
        peak_rss_bytes=profile.peak_rss_bytes(),
    )


def pilot_key(job: Connected) -> dict[str, Any]:
    """Return what a pilot's result depends on besides the times."""
    config, small = job.run.config, job.run.plan.global_batch
    names = "lr lr_scaling warmup_epochs schedule epochs epoch_samples momentum weight_decay"
    large = min(pilot.LARGER * small, len(job.dataset.train))
    return {"batches": [small, large], **{name: getattr(config, name, None) for name in names.split()}}


def noise_scale(job: Connected, model: Maker, initial: Maker) -> tuple[float, float | None] | None:
    """Train twice from the job's first state on this rank, for some seconds, and return `Profile.noise_scale`."""
    config, (small, large) = job.run.config, pilot_key(job)["batches"]
    samples = config.epoch_samples or len(job.dataset.train)

    def train(size: int, seconds: float, steps: int, goal: float) -> pilot.Losses:
        replica, probe = _replica(job, model)
        load_first(replica, initial(None))
        endless = itertools.chain.from_iterable(_batches(job, size, epoch) for epoch in itertools.count())
        plan = batch_plan.batch_plan(config, 1, size, -(-samples // size))

        def learning_rate(step: int) -> float:
            return plan.learning_rate(min(step, plan.steps - 1))

        return pilot.train(replica, probe, endless, learning_rate, seconds, steps, goal)

    if large < 2 * small:
        return None
    try:
        return pilot.noise_scale(train, small, large // small * small)
    except Exception as error:
        if type(error).__name__ not in OUT_OF_MEMORY:
            raise
        print(f"{large} samples per step do not fit into memory, so the epochs are not predicted", file=sys.stderr)
        return None


def candidates(job: Connected, rule: automatic.Rule) -> list[Spec]:
    """Return the strategies from which --strategy auto may choose for this job. Exact sums come first."""
    config, launcher = job.run.config, job.workload.environment.launcher
    return [each for each in choice.candidates(rule, config) if not elastic.obstacle(launcher, each, config)]


def with_strategy(job: C, model: Maker, initial: Maker) -> C:
    """Return the job with the strategy that `--strategy auto` chooses; otherwise the job itself. Collective.

    `model` and `initial`: see `Job.staged`.
    """
    if observer := _observer.get():
        observer.modelled(job, model, initial)
    config = job.run.config
    rule = automatic.rule(config.strategy)
    if rule is None:
        return _continued(job)
    exchanges = candidates(job, rule)
    own, chosen = None, choice.Chosen(EXACT_REDUCER, "one host: nothing is sent over the network")
    if job.ranks.joining:
        chosen = choice.Chosen(job.ranks.begun["identity"]["strategy"], "the run's strategy")
    elif job.ranks.hosts_count > 1 or job.ranks.elastic:
        plan, names = job.run.plan, reducers(exchanges) if job.ranks.local_rank == 0 else []
        own = measured(job, model, [plan.rank_batch], names, AUTO_STEPS_S, AUTO_CODING_S)
        chosen = choice.choose(own, job.ranks, exchanges, plan.global_batch)
    exchange = parse(chosen.strategy)
    if job.ranks.rank == 0:
        print(f"strategy       {chosen.strategy}: {chosen.reason}", file=sys.stderr, flush=True)
    shapes = job.workload.model.vector_shapes(config.framework)
    layout = job.stages.layout()
    return dataclasses.replace(
        job,
        run=dataclasses.replace(job.run, config=dataclasses.replace(config, strategy=str(exchange))),
        facts={**job.facts, "exchange": exchange.fact(shapes, layout), "chosen": chosen.reason},
        exchange=exchange,
        strategy=exchange.make(config, job.data, shapes),
        chosen=chosen.reason,
        auto=config.strategy,
        profile=own,
    )


def _continued(job: C) -> C:
    """Return the job with the option and rank 0's profile of an earlier start that chose its strategy. Collective.

    Raises Failure (65, 74, 77) if the profile is damaged.
    """
    config, kept = job.run.config, None
    if not config.resume or not config.run_dir:
        return job
    path = Path(config.run_dir) / profile.NAME
    if job.ranks.rank == 0 and (run := resume.kept(config)) and (auto := run.exchange.get("auto")):
        kept = [auto, profile.as_json(profile.read(path)) if path.exists() else None]
    kept = job.ranks.gather(kept)[0]
    if not kept:
        return job
    own = msgspec.convert(kept[1], Profile) if kept[1] else None
    return dataclasses.replace(job, auto=kept[0], profile=own)


def check(workload: Described) -> None:
    """Raise Failure (78) if `--strategy auto` cannot be combined with the other options."""
    config = workload.config
    if automatic.rule(config.strategy) and (config.stages > 1 or (config.micro_batches or 1) > 1 or config.shares):
        raise Failure(
            f"--strategy {config.strategy} cannot be combined with --stages, --micro-batches or --shares; hint: name a "
            "strategy",
            exits.BAD_CONFIG,
        )
