"""The output of a run: its arithmetic before step 0, and its results after the last step."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain import records, strategies
from hvdtrain.config.batch_plan import BatchPlan
from hvdtrain.config.options import TrainConfig
from hvdtrain.records.metrics import Metric
from hvdtrain.training.run_folder import Run


def arithmetic(config: TrainConfig, plan: BatchPlan, facts: Mapping[str, Any]) -> str:
    """Return the facts, batch size, steps and learning rate of a run as text, for people to check before step 0."""
    warmup = f", warm-up over {plan.warmup_steps} steps" if plan.warmup_steps else ""
    replica = "rank" if plan.stages == 1 else "replica"
    each = f"{plan.rank_batch - 1} or {plan.rank_batch}" if plan.global_batch % plan.ranks else plan.rank_batch
    return _columns(
        {
            **facts,
            "batch": f"{each} samples per {replica}{' on average' if plan.shares else ''} x {plan.ranks} {replica}s = "
            f"{plan.global_batch} per step",
            "steps": f"{plan.steps_per_epoch} per epoch x {config.epochs} epochs = {plan.steps}",
            "learning rate": f"{plan.base_lr:g} = {plan.scaling}; {plan.schedule}{warmup}",
        }
    )


def show_dry_run(run: Run, facts: Mapping[str, Any], cost: strategies.Cost) -> None:
    """Print the resolved config and the arithmetic on stdout. `cost`: cost of a step's exchange."""
    if run.config.json:
        document = {"schema": records.SCHEMA, **dataclasses.asdict(run), "cost": cost.as_json(), "facts": dict(facts)}
        emit(json.dumps(document))
        return
    settings = "\n".join(f"{name} = {value}" for name, value in dataclasses.asdict(run.config).items())
    emit(f"{settings}\n\n{arithmetic(run.config, run.plan, facts)}")


def show_summary(summary: records.Summary, metric: Metric, *, as_json: bool) -> None:
    """Print the results of a run on stdout: one line of JSON, or tables."""
    if as_json:
        emit(json.dumps(records.as_json(summary) | records.by_score(summary)))
        return
    report = metric.report(summary.test_sums) if summary.test_sums else []
    names = [name for name in summary.test_scores if metric.scores[name].shown or not report] or [metric.primary]
    rows = [["epoch", *(metric.scores[name].label for name in names)]]
    for epoch, scores in enumerate(summary.validation_scores, start=1):
        rows.append([str(epoch), *(f"{scores[name]:.4f}" if name in scores else "none" for name in names)])
    scored = metric.scores[names[0]].label if len(names) == 1 else "scores"
    _table(f"Validation {scored} after each epoch", rows)
    phases = ("train", "validation", "test", "checkpoint")
    seconds = [[phase, f"{getattr(summary, phase + '_s'):.2f}"] for phase in phases]
    _table("Time by phase (loading and initialisation are outside)", [["phase", "seconds"], *seconds])
    for title, table in report:
        _table(f"{title}, test", table)
    rate = "too few steps to measure"
    if summary.samples_per_s is not None and summary.samples_per_s_per_rank is not None:
        rate = f"{summary.samples_per_s:.1f} samples/s in all, {summary.samples_per_s_per_rank:.1f} per rank"
    loss = "" if summary.test_loss is None else f" (loss {summary.test_loss:.4f})"
    after = f" (weights after step {summary.tested_step})"
    lines = {
        f"test {metric.scores[name].label}": metric.number(name, summary.test_scores.get(name))
        + (loss if name == names[0] else after)
        for name in names
    }
    lines |= {"throughput": rate, "run folder": summary.run_dir}
    if summary.hosts > 1 and (shares := summary.step_shares):
        lines["mean step"] = (
            f"{shares['exchange']:.0%} waiting for the exchange, {shares['data']:.0%} for data, "
            f"{shares['compute']:.0%} computing"
        )
    emit(_columns(lines))


def show_shares(shares: Sequence[float] | None, rank_samples: Sequence[int]) -> str:
    """Describe shares as --shares takes them, and the samples: `0.75:0.25: 48 + 16 samples of a step`."""
    if shares is None:
        return "measured before step 0"
    return f"{':'.join(f'{share:g}' for share in shares)}: {' + '.join(map(str, rank_samples))} samples of a step"


def show_links(links: Sequence[Mapping[str, Any]]) -> str:
    """Describe the goodput from each host to the next: `a -> b 9.36 Mbit/s, b -> a 9.35 Mbit/s`."""

    def goodput(link: Mapping[str, Any]) -> str:
        measured = link["goodput_mbit"]
        return f"not measured ({link['reason']})" if measured is None else f"{measured:.4g} Mbit/s"

    return ", ".join(f"{link['host']} -> {link['goodput_to']} {goodput(link)}" for link in links)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as right-aligned lines. Columns that do not fit the terminal follow below, with the first column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = shutil.get_terminal_size().columns
    blocks: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        if sum(widths[each] + 2 for each in (*blocks[-1], column)) > room and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(column)
    return ["  " + "  ".join(row[each].rjust(widths[each]) for each in block) for block in blocks for row in rows]


def _table(title: str, rows: Sequence[Sequence[str]]) -> None:
    emit("\n".join([title, *aligned(rows)]))


def _columns(lines: Mapping[str, Any]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def emit(text: str) -> None:
    """Print in one write, so that a launcher that merges the output of ranks cannot split it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
