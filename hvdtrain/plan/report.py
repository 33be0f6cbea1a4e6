"""A plan for people: the advice, then the tables that it comes from."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.observe.progress import duration
from hvdtrain.observe.terminal import terminal_width, wrapped
from hvdtrain.plan.prediction import Prediction, best
from hvdtrain.plan.profile import Profile
from hvdtrain.strategies import presets

GAIN = 1.05
"""More hosts are worth advice if they make training this many times as fast"""
COLUMNS = ("s/step", "90 %", "coding", "wait", "speed-up", "to accuracy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Predictions for each network and number of hosts."""

    profile: Profile
    one: Prediction
    """One host, which needs no network"""
    networks: Mapping[str, Mapping[int, Sequence[Prediction]]]
    """Name of the network -> hosts -> predictions of all strategies"""
    accumulated: Mapping[str, Sequence[Prediction]]
    """Name of the network -> the most hosts with exact sums and a script that accumulates, to compare"""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Strategy -> why it cannot run"""
    notes: Sequence[str] = ()
    steps_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Host of -H -> seconds in which it computes its part of a step"""

    def best(self, network: str) -> dict[int, Prediction]:
        """Return the strategy to use for each number of hosts: the best one, or a preset that is hardly slower."""
        return {1: self.one, **{n: self._best(each) for n, each in self.networks[network].items() if n > 1}}

    def _best(self, predictions: Sequence[Prediction]) -> Prediction:
        worth = GAIN * best(predictions).ranking_s
        by_preset = [each for each in predictions if self.named(each) in presets.NAMES and each.ranking_s <= worth]
        return best(by_preset or predictions)

    def named(self, prediction: Prediction) -> str:
        """Return the preset of a prediction's strategy; the strategy itself if there is none."""
        return presets.named(prediction.strategy, self.profile.setup.get("optimizer"))


def text(plan: Plan) -> str:
    """Return the advice for each network, then tables and notes."""
    one, profile = plan.one, plan.profile
    fixed_s, sample_s = profile.line()
    epoch_s = (profile.epoch_samples or 0) / one.samples_per_s
    epoch = f"; an epoch takes {duration(epoch_s) if epoch_s > 60 else f'{epoch_s:.3g} s'}" if epoch_s else ""
    device = f"{profile.model}, {profile.setup.get('device', 'cpu')}, {profile.threads} threads"
    lines = [advice(plan, network) for network in plan.networks]
    lines += [
        *_batches(plan),
        "",
        f"{device}: a step computes {1e3 * fixed_s:.3g} ms + {1e3 * sample_s:.3g} ms per sample"
        if profile.machine["processor"]
        else profile.model,
        f"one host: {one.step_s:.3g} s per step of {one.global_batch} samples, {one.samples_per_s:.4g} samples/s"
        + epoch,
    ]
    for network in plan.networks:
        rows = [["hosts", *COLUMNS, "strategy"]]
        for count, each in plan.best(network).items():
            rows.append([str(count), *_numbers(each, one), each.strategy if count > 1 else ""])
        lines += ["", f"{network}: the best strategy", *_table(rows)]
    for network, counts in plan.networks.items():
        most = max(counts)
        if most > 1:
            order = sorted(counts[most], key=lambda each: each.ranking_s)
            names = [each.strategy for each in order]
            for each in plan.accumulated[network]:
                batches = each.accumulation * round(profile.passes(each.global_batch / each.ranks))
                names.append(f"(script accumulates {batches} batches)")
            rows = [[*COLUMNS, "points", "strategy"]]
            for name, each in zip(names, [*order, *plan.accumulated[network]], strict=True):
                points = "-" if each.loss_points is None else f"{each.loss_points:.2f}"
                rows.append([*_numbers(each, one), points, name])
            title = f"{network}: all strategies on {most} hosts, which compute {order[0].computing_s:.3g} s in a step"
            lines += ["", title, *_table(rows)]
    lines += ["", *(f"not predicted: {reason}" for reason in plan.refused.values())]
    if profile.peak_rss_bytes:
        lines.append(f"memory: up to {profile.peak_rss_bytes / 1e9:.2f} GB for each rank while profiling")
    width = terminal_width()
    return "\n".join(
        each for line in [*lines, *plan.notes] for each in [*wrapped(line, width), *([] if line else [""])]
    )


def _batches(plan: Plan) -> list[str]:
    """Say what a batch that grows with the hosts means for learning, and how a script keeps it."""
    predictions = itertools.chain.from_iterable(counts[max(counts)] for counts in plan.networks.values())
    largest, count = max(predictions, key=operator.attrgetter("global_batch")), plan.profile.accumulation
    shared = max((n for counts in plan.networks.values() for n in counts if count % n == 0), default=1)
    example = f", {count // shared} on each of {shared} before each exchange" if shared > 1 else ""
    what = f"the {count} batches that the script accumulates for a step" if count > 1 else "the batch"
    same = f"for the same result divide {what} by the hosts{example}"
    if largest.global_batch == plan.one.global_batch:
        return [same] if count > 1 else []
    epochs = largest.epochs_factor(plan.one)
    learns = (
        "{} to {} times the epochs, estimated early in training".format(*map(_short, epochs))
        if epochs
        else "more epochs"
    )
    return [
        f"the batch of a step grows with the hosts: {largest.global_batch} samples instead of {plan.one.global_batch} "
        f"need {learns}; {same} (--global-batch-size plans that), or keep it and raise the learning rate"
    ]


def _numbers(each: Prediction, one: Prediction) -> list[str]:
    target = each.speedup_to_target(one) if each.hosts > 1 else (1.0, 1.0)
    return [
        f"{each.step_s:.3g}",
        _range(each.interval_s),
        _short(each.coding_s),
        _short(round(each.waiting_s, 6)),
        f"{each.speedup(one):.2f}",
        _range(target),
    ]


def _range(ends: tuple[float, float] | None) -> str:
    return f"{_short(ends[0])}..{_short(ends[1])}" if ends else "-"


def _short(number: float) -> str:
    digits = "#.2g" if number > 1e-3 else "#.1g"
    return f"{number:{digits}}".removesuffix(".") if number < 99.5 else f"{number:.0f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align all columns but the strategy to the right. If one does not fit, all have a line below their numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    apart = sum(widths) + 2 * len(widths) > terminal_width()
    lines = []
    for *cells, strategy in rows:
        lines.append("  " + "  ".join([*map(str.rjust, cells, widths), "" if apart else strategy]).rstrip())
        lines += [f"    {strategy}"] if apart and strategy else []
    return lines


def advice(plan: Plan, network: str) -> str:
    """Say how many hosts are worth it, with which strategy, their speed-up and their bottleneck."""
    by_count = plan.best(network)
    if len(by_count) == 1:
        return f"{network}: one host"
    speeds = {
        count: each.global_batch / each.ranking_s / statistics.mean(each.epochs_factor(plan.one) or (1.0,))
        for count, each in by_count.items()
    }
    highest = max(speeds.values())
    enough = min(count for count, speed in speeds.items() if speed * GAIN >= highest)
    chosen = by_count[enough if enough > 1 else max(by_count)]
    sentence = (
        f"{chosen.hosts} hosts with --strategy {plan.named(chosen)} are {_gain(chosen, plan.one)}, "
        f"limited by {chosen.bottleneck}"
    )
    if enough == 1:
        return f"{network}: do not add hosts: {sentence}"
    return f"{network}: {sentence}" + ("; more hosts gain less than 5 %" if max(by_count) > enough else "")


def _gain(each: Prediction, one: Prediction) -> str:
    """Say how much faster than one host, to the same accuracy if that is known, in the numbers of the tables."""
    if (target := each.speedup_to_target(one)) is None:
        return f"{each.speedup(one):.2f} times as fast as one in samples per second (to an accuracy: not known)"
    ends = " to ".join(dict.fromkeys(map(_short, target)))
    return f"{ends} times as fast as one to the same accuracy ({each.speedup(one):.2f} in samples per second)"


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as one document."""
    samples = plan.profile.epoch_samples
    return {
        "schema": "hvdtrain/plan/1",
        "model": plan.profile.model,
        "machine": plan.profile.machine,
        "shapes": plan.profile.shapes,
        "one_host": {**plan.one.as_json(plan.one), "epoch_s": samples and samples / plan.one.samples_per_s},
        "networks": [
            {
                "network": network,
                "advice": advice(plan, network),
                "accumulated": [each.as_json(plan.one) for each in plan.accumulated[network]],
                "hosts": [
                    {"hosts": count, "predictions": [each.as_json(plan.one) for each in predictions]}
                    for count, predictions in counts.items()
                ],
            }
            for network, counts in plan.networks.items()
        ],
        "refused": dict(plan.refused),
        "steps_s": dict(plan.steps_s),
        "notes": list(plan.notes),
    }
