"""Distributed evaluation that equals that of one process: sums are added over ranks and divided once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.batch_plan import BatchPlan
from hvdtrain.data import Batch, Split
from hvdtrain.data.loader import Loader, shard
from hvdtrain.frameworks import Replica
from hvdtrain.records.metrics import Metric
from hvdtrain.training.connected import Connected

Judge = Callable[[Any], dict[str, float]]
"""Computes the scores of a whole split that are not sums over samples, such as BLEU. Collective, with equal results"""
Result = tuple[float | None, dict[str, float], dict[str, np.ndarray]]
WARM_PASSES, LEAST_PASSES, TIMED_S = 2, 5, 0.5
"""For timed inference: warm-up passes, minimum timed passes, and minimum seconds of all passes"""


class Evaluator:
    """Evaluates a job's replica by its metric and by a judge."""

    def __init__(self, job: Connected, replica: Replica, judge: Judge | None, precise_bn: int) -> None:
        """`precise_bn`: steps of an epoch from whose batches running statistics are renewed before its evaluation."""
        self._job, self._replica, self._judge, self._precise_bn = job, replica, judge, precise_bn

    def split(self, split: Split, plan: BatchPlan, most: int | None = None) -> Result:
        """Return what `evaluate` does, with the scores of the judge. Collective."""
        job = self._job
        metric, batch = job.workload.metric, plan.rank_batch
        loss, scores, sums = evaluate(self._replica, metric, split, batch, job.ranks, job.data, plan.shares, most)
        return loss, scores | self._judge(split) if self._judge and len(split) else scores, sums

    def after_epoch(self, epoch: int, loader: Loader, plan: BatchPlan) -> Result:
        """Evaluate at the end of an epoch, with the averaged weights if there are any. Collective."""
        config = self._job.run.config
        if config.ema:
            self._replica.swap_average()
        try:
            if self._precise_bn:
                first = [0, *loader.ends()][max(0, plan.steps_per_epoch - self._precise_bn)]
                renew_statistics(self._replica, loader.epoch(epoch, start=first))
            return self.split(getattr(self._job.dataset, config.evaluate_on), plan, config.evaluate_samples)
        finally:
            if config.ema:
                self._replica.swap_average()


def evaluate(
    replica: Replica,
    metric: Metric,
    split: Split,
    batch_size: int,
    world: Communicator,
    data: Communicator,
    shares: Sequence[float] | None = None,
    most: int | None = None,
) -> Result:
    """Return mean loss, scores and the metric's sums over the split, or its first `most` samples. Collective.

    All ranks get the same result: None, {} and {} for an empty split, without values that are not finite.

    `data`: the ranks that share out the split; each evaluates its part, equal or by `shares`, in batches of
    `batch_size`. All use the mean of the running statistics over ranks, weighted by `shares`, so the result does not
    depend on which rank evaluates which sample.
    """
    average_statistics(replica, data, shares)
    totals = np.zeros(metric.size)
    for batch in shard(split, batch_size=batch_size, rank=data.rank, size=data.size, shares=shares, most=most):
        totals += replica.evaluate(batch)
    totals = world.sum(totals, "evaluate.totals")
    if not totals[-1]:
        return None, {}, {}
    loss, scores = metric.means(totals)
    scores = {name: score for name, score in scores.items() if np.isfinite(score)}
    sums = {name: sum_ for name, sum_ in metric.by_name(totals).items() if np.all(np.isfinite(sum_))}
    return loss if np.isfinite(loss) else None, scores, sums


def timed_inference(replica: Replica, split: Split, sizes: Sequence[int]) -> list[dict[str, float]]:
    """Time the inference of batches of these sizes; see `records.Summary.inference`. A short split is repeated."""
    results = []
    for size in sizes:
        samples = np.resize(np.arange(len(split)), size)
        batch, spent_s = split.batch(samples, samples, None), list[float]()
        while len(spent_s) < WARM_PASSES + LEAST_PASSES or sum(spent_s) < TIMED_S:
            began = time.perf_counter()
            replica.evaluate(batch)
            spent_s.append(time.perf_counter() - began)
        timed = spent_s[WARM_PASSES:]
        times = {"median_s": float(np.median(timed)), "least_s": min(timed), "most_s": max(timed)}
        results.append({"samples": size, "passes": len(timed), **times})
    return results


def renew_statistics(replica: Replica, batches: Iterable[Batch]) -> None:
    """Compute the running statistics of the current weights from these training batches, with equal weights.

    This is precise BN (Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021). Statistics that start at zero are,
    after a batch of n micro-batches, their mean with weights that sum to 1 - (1 - momentum)^n.
    """
    if not replica.statistics:
        return
    zeros = {name: np.zeros_like(array) for name, array in _statistics(replica).items()}
    sums, count = {name: array.copy() for name, array in zeros.items()}, 0
    for batch in batches:
        replica.load_local(zeros)
        replica.observe(batch)
        count += 1
        for name, array in _statistics(replica).items():
            sums[name] += array / np.float32(1 - (1 - replica.statistics[name]) ** (len(batch.parts) or 1))
    replica.load_local({name: array / np.float32(count) for name, array in sums.items()})


def average_statistics(replica: Replica, world: Communicator, shares: Sequence[float] | None = None) -> None:
    """Replace the running statistics on every rank by their mean over ranks, in one message. Collective."""
    local = _statistics(replica)
    if world.size == 1 or not local:
        return
    flat = np.concatenate([array.ravel() for array in local.values()])
    if shares is None:
        mean = world.sum(flat, "evaluate.statistics") / world.size
    else:
        mean = world.sum(flat * flat.dtype.type(shares[world.rank] / sum(shares)), "evaluate.statistics")
    parts = np.split(mean, np.cumsum([array.size for array in local.values()])[:-1])
    replica.load_local(
        {name: part.reshape(array.shape) for (name, array), part in zip(local.items(), parts, strict=True)}
    )


def _statistics(replica: Replica) -> dict[str, np.ndarray]:
    local = replica.local_state()
    return {name: local[name] for name in replica.statistics}
