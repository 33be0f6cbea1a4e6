"""What `tools/bench_strategies.py` runs: the cell, its rows, and what a run of each is expected to take."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from hvdtrain import strategies
from hvdtrain.cluster.rates import goodput_both_ways, show_rate
from hvdtrain.config import TrainConfig, flag
from hvdtrain.exits import Failure
from hvdtrain.models import resnet

# --- the cell: the same for all rows --------------------------------------------------------------------------------

EPOCHS = 10
SCHEDULE: dict[str, Any] = {"lr": 0.4, "schedule": "cosine", "warmup_epochs": 1.0, "momentum": 0.9, "precise_bn": 4}
"""Running BatchNorm statistics lag behind at this rate, and would decide when 0.95 is reached (docs/LOG.md)"""
TARGET = 0.95
WIDTH = 0.25
CELL: dict[str, Any] = {
    "framework": "torch",
    "image_size": 128,
    "global_batch_size": 128,
    "evaluate_on": "test",
    "checkpoint_epochs": 0,
    "threads": 1,
}
"""One thread everywhere: a host has half a core"""
HOSTS, CPU_SHARE = 4, 0.5
RATES = (10_000_000, 100_000_000, 1_000_000_000)
SEEDS = (1, 2, 3)
LONGEST_EPOCH_S = 30.0
"""A row whose wire needs longer for an epoch is projected: run for an epoch at that rate, to its end at a faster one"""
SHORT_EPOCHS = 1

# --- the rows -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    starter: str
    """alone, horovodrun, mpirun (both plain), or ours (launch/mpirun.sh)"""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Of the TrainConfig"""
    ranks_per_host: int = 1
    hosts: int | None = None
    """None: those of the benchmark"""
    quick: bool = False

    @property
    def strategy(self) -> str:
        """The name that `hvdtrain results` gives it."""
        return str(self.settings.get("strategy", "allreduce"))


ALONE, HOROVODRUN, MPIRUN = "1 host", "plain horovodrun", "plain mpirun"
UNCOMPRESSED = "hierarchical"
TWO_BY_TWO = "hierarchical a:2,b:2"


def _ours(strategy: str, quick: bool = False) -> Row:
    return Row(name=strategy, starter="ours", settings={"strategy": strategy}, quick=quick)


def _ddp(rank: int) -> Row:
    settings = {"strategy": f"native:hook=powersgd,rank={rank}"}
    return Row(name=f"DDP + powerSGD_hook r{rank}", starter="ours", settings=settings, quick=rank == 2)


ROWS = (
    Row(name=ALONE, starter="alone", hosts=1, quick=True),
    Row(name=HOROVODRUN, starter="horovodrun", quick=True),
    Row(name=MPIRUN, starter="mpirun"),
    Row(name="DDP", starter="ours", settings={"strategy": "native"}),
    *map(_ddp, (1, 2, 4)),
    _ours("allreduce"),
    _ours(UNCOMPRESSED),
    _ours("fp16"),
    _ours("bf16"),
    _ours("int8"),
    _ours("int4"),
    _ours("powersgd:rank=1"),
    _ours("powersgd", quick=True),
    _ours("powersgd:rank=4", quick=True),
    _ours("powersgd:bits=32"),
    _ours("topk"),
    _ours("onebit"),
    _ours("local-sgd:every=4"),
    _ours("local-sgd:every=4+int8"),
    _ours("local-sgd:every=6+powersgd:rank=12,bits=4", quick=True),
    _ours("local-sgd:every=2+powersgd:rank=4,bits=4"),
    _ours("local-sgd:every=6,staleness=1+powersgd:rank=12,bits=4", quick=True),
    _ours("delayed+powersgd"),
    _ours("async-ps"),
)
DDP_HOOKS = tuple(row.name for row in ROWS if row.name.startswith("DDP +"))
OTHERS = (ALONE, HOROVODRUN, MPIRUN, "DDP", *DDP_HOOKS, "allreduce")
"""Rows that are no strategy of ours"""
REPLAY_ONLY = Row(
    name=TWO_BY_TWO, starter="ours", settings={"strategy": UNCOMPRESSED}, ranks_per_host=2, hosts=2, quick=True
)


def known(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows that this hvdtrain can run, and why not the others."""
    found, problems = [], []
    for row in rows:
        try:
            strategies.chosen(TrainConfig(**row.settings))
            found.append(row)
        except (Failure, TypeError) as error:
            problems.append(f"{row.name}: left out ({error})")
    return found, problems


# --- what is expected -----------------------------------------------------------------------------------------------

TRAINING_SAMPLES = 1437
ALONE_STEP_S = {0.25: 0.82, 1.0: 12.0}
"""About, of one host of half a core: for the estimate only"""
START_S = {"alone": 12.0, "horovodrun": 30.0, "mpirun": 25.0, "ours": 25.0}
PLAIN_MPI = 2.0
"""Open MPI out of the box takes about twice what the wire needs (docs/LOG.md)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a row at a rate with a seed, whole or (`short`) only to time its steps."""

    row: Row
    rate: int
    """bit/s"""
    seed: int
    short: bool
    hosts: int
    epochs: int
    width: float = WIDTH
    extra: tuple[str, ...] = ()
    """Further flags of every run"""

    def flags(self) -> list[str]:
        """Of `python -m hvdtrain.resnet`, but --run-dir."""
        epochs = min(SHORT_EPOCHS, self.epochs) if self.short else self.epochs
        values = CELL | SCHEDULE | {"width": self.width, "epochs": epochs, "seed": self.seed} | self.row.settings
        return [*(word for name, value in values.items() for word in (flag(name), str(value))), *self.extra, "--json"]

    @property
    def name(self) -> str:
        """Of its folder: another cell, another name."""
        words = [show_rate(self.rate), re.sub(r"[^\w.]+", "-", self.row.name), f"s{self.seed}"]
        made = f"{self.row.starter} {self.hosts}x{self.row.ranks_per_host} {self.flags()}"
        return "-".join([*words, *(["short"] if self.short else []), hashlib.sha256(made.encode()).hexdigest()[:6]])

    @property
    def steps(self) -> int:
        return self.epochs_run * steps_per_epoch()

    @property
    def epochs_run(self) -> int:
        return min(SHORT_EPOCHS, self.epochs) if self.short else self.epochs

    @property
    def estimate_s(self) -> float:
        """Seconds that the run will take, about."""
        start = 10 * wire_s(Row(name="", starter="ours"), self.hosts, self.rate, self.width)
        begins_whole = start if "hook=" in self.row.strategy else 0.0
        evaluated = 0.5 * ALONE_STEP_S[self.width] / self.hosts * (self.epochs_run + 1)
        step_s = expected_step_s(self.row, self.hosts, self.rate, self.width)
        return START_S[self.row.starter] + begins_whole + evaluated + self.steps * step_s


def steps_per_epoch() -> int:
    return -(-TRAINING_SAMPLES // int(CELL["global_batch_size"]))


def payload_bytes(row: Row, hosts: int, width: float) -> float:
    """What one host gives to the wire per step, the strategy in its stride."""
    if hosts == 1:
        return 0.0
    config = TrainConfig(**row.settings)
    shapes = list(resnet.parameters(resnet.ResNetSpec(channels=1, classes=10, width=width)).values())
    layout = strategies.Layout(ranks=hosts * row.ranks_per_host, hosts=hosts)
    return strategies.chosen(config).cost(shapes, layout).sent_bytes


def wire_s(row: Row, hosts: int, rate: int, width: float) -> float:
    """Seconds that the wire needs for that."""
    return 8 * payload_bytes(row, hosts, width) / goodput_both_ways(rate)


def expected_step_s(row: Row, hosts: int, rate: int, width: float) -> float:
    compute_s, wire = ALONE_STEP_S[width] / hosts, wire_s(row, hosts, rate, width)
    if row.strategy.startswith("delayed"):
        return max(compute_s, wire)
    return compute_s + wire * (PLAIN_MPI if row.starter == "mpirun" else 1.0)


def is_projected(row: Row, hosts: int, rate: int) -> bool:
    """Whether its runs at this rate are timed only: what they learn per step, they learn at any rate."""
    return steps_per_epoch() * wire_s(row, hosts, rate, WIDTH) > LONGEST_EPOCH_S


def reference_rate(row: Row, hosts: int, rates: Sequence[int]) -> int:
    """Where a projected row is run to its end."""
    fastest = max(rates)
    return max(RATES) if is_projected(row, hosts, fastest) else fastest


def rate_of(row: Row, rate: int, rates: Sequence[int]) -> int:
    """At which rate its run for the table's `rate` is made: one host sends nothing and is run once."""
    return rates[0] if row.hosts == 1 else rate


def cells(
    rows: Sequence[Row],
    rates: Sequence[int],
    seeds: Sequence[int],
    hosts: int,
    epochs: int = EPOCHS,
    extra: tuple[str, ...] = (),
) -> list[Cell]:
    """All runs in order: a round is one seed of every row at each rate; every other round goes backwards."""
    found: list[Cell] = []
    for turn, seed in enumerate(seeds):
        wanted: dict[tuple[int, str], Cell] = {}
        for rate in rates:
            for row in rows:
                count = row.hosts or hosts
                short = is_projected(row, count, rate)
                measured_at = rate_of(row, rate, rates)
                for at, whole in (
                    (measured_at, not short),
                    *([(reference_rate(row, count, rates), True)] if short else []),
                ):
                    cell = Cell(
                        row=row, rate=at, seed=seed, short=not whole, hosts=count, epochs=epochs, extra=tuple(extra)
                    )
                    wanted.setdefault((at, cell.name), cell)
        ordered = sorted(wanted.values(), key=lambda cell: ([*rates, *RATES].index(cell.rate), rows.index(cell.row)))
        found += ordered if turn % 2 == 0 else reversed(ordered)
    return found
