"""The batch arithmetic of a run: samples per step, steps and learning rates, fixed before step 0."""

from __future__ import annotations

import dataclasses
import math

from hvdtrain.config.options import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Batches, steps and learning rates of a run. Learning rates are per step of the global batch."""

    ranks: int
    """Replicas of the model: ranks divided by `stages`"""
    rank_batch: int
    """Samples per replica and step; if the global batch is not divisible, some replicas have one fewer"""
    global_batch: int
    """Samples per step over all replicas"""
    steps_per_epoch: int
    steps: int
    """Steps of the whole run"""
    base_lr: float
    """Learning rate after scaling, before warm-up and schedule"""
    scaling: str
    """How base_lr was computed from --lr, for people"""
    warmup_steps: int
    schedule: str
    shares: tuple[float, ...] | None = None
    """Relative share of each replica in a global batch; rank_batch is then the mean. None: equal shares"""
    stages: int = 1
    """Ranks that hold one replica together"""
    micro_batches: int = 1
    """Parts of a replica's batch"""
    cut: tuple[str, ...] = ()
    """The first layer of each stage except the first stage"""

    def learning_rate(self, step: int) -> float:
        """Learning rate of step `step` (counted from 0 over the whole run)."""
        if step < self.warmup_steps:
            return self.base_lr * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.schedule == "cosine":
            return self.base_lr * 0.5 * (1 + math.cos(math.pi * done))
        if self.schedule == "linear":
            return self.base_lr * (1 - done)
        if self.schedule == "step":
            return self.base_lr * 0.1 ** ((step >= self.steps / 2) + (step >= self.steps * 3 / 4))
        return self.base_lr


def global_batch(config: TrainConfig, ranks: int) -> int:
    """Samples per step over all replicas."""
    return config.global_batch_size or (config.batch_size or 32) * ranks


def batch_plan(
    config: TrainConfig, ranks: int, global_batch: int, steps_per_epoch: int, shares: tuple[float, ...] | None = None
) -> BatchPlan:
    """Make the plan for `ranks` replicas with these shares of a step."""
    ratio = global_batch / (config.global_batch_size or config.batch_size or 32)
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]
    return BatchPlan(
        ranks=ranks,
        rank_batch=-(-global_batch // ranks),
        global_batch=global_batch,
        steps_per_epoch=steps_per_epoch,
        steps=steps_per_epoch * config.epochs,
        base_lr=config.lr * factor,
        scaling=f"--lr {config.lr:g} x {factor:g} (--lr-scaling {config.lr_scaling}, batch ratio {ratio:g})",
        warmup_steps=round(config.warmup_epochs * steps_per_epoch),
        schedule=config.schedule,
        shares=shares,
        stages=config.stages,
        micro_batches=micro_batches(config),
    )


def micro_batches(config: TrainConfig) -> int:
    """Parts of a replica's batch."""
    return config.micro_batches or (1 if config.stages == 1 else 4)
