"""An optimizer that times its own steps: for `hvdtrain plan` of a script, and for `strategy="auto"`.

It times computations and updates, not exchanges. So `auto` exchanges by the smallest sums that it may choose: at 10
Mbit/s some exact sums would take longer than many steps afterwards.
"""

from __future__ import annotations

import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from hvdtrain.comm.arrays import to_host
from hvdtrain.comm.world import alone
from hvdtrain.config.options import TrainConfig
from hvdtrain.horovod_api import record
from hvdtrain.horovod_api.arguments import conflict
from hvdtrain.observe.timing import Clock
from hvdtrain.plan import choice, coding, profile
from hvdtrain.plan.choice import Chosen
from hvdtrain.plan.prediction import EXACT_REDUCER, reducers
from hvdtrain.plan.profile import Profile
from hvdtrain.plan.steps import Script, Steps
from hvdtrain.strategies import Layout, Spec, automatic, parse, presets
from hvdtrain.strategies.algorithms.synchronous import buckets
from hvdtrain.strategies.automatic import Rule
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.torch import api as horovod
from hvdtrain.torch.exchanging import Exchanging
from hvdtrain.torch.vectors import Parameters
from hvdtrain.training import profiled

PLAN_STEPS, AUTO_STEPS = 20, 12
"""Steps that are timed"""


class Measuring(Exchanging):
    """Times its steps until there are enough.

    Then all ranks choose a strategy together, and the optimizer continues with it; under `hvdtrain plan`, the observer
    ends the script.
    """

    _steps: Steps | None = None
    """None: the strategy is final"""
    _overlaps = False

    def measure(self, rule: Rule | None, op: int) -> None:
        """Start to time steps. Collective.

        `rule`: what `auto` may choose; None under `hvdtrain plan`. `op`: how gradients are combined.
        """
        self._rule, self._op, self._watch = rule or Rule(), op, None
        cuda = next(iter(self._named.values())).device.type == "cuda"
        wait = torch.cuda.synchronize if cuda else lambda: None
        if profiled.observer():
            self._watch = Watch(self._named, on_cpu=not cuda)
            self._steps = Steps(PLAN_STEPS, profile.STEPS_S, wait)
        elif self._world.hosts_count == 1:
            self._choose(Chosen(EXACT_REDUCER, "one host: nothing is sent over the network"))
        else:
            self._steps = Steps(AUTO_STEPS, profiled.AUTO_STEPS_S, wait)
            self._use(self._smallest(), set())
            self._exchange_name = automatic.NAME
            record.choosing(True)

    def step(self, closure: Any = None) -> Any:
        """Make a step like `Exchanging`, and choose after the last one that is timed. Collective."""
        loss = super().step(closure)
        if self._steps is not None and self._steps.ended(self._waited_s):
            self._continue(self._steps)
        return loss

    step.hooked = True  # type: ignore[attr-defined] # as in the base class

    def _run_exchange(self) -> None:
        if self._steps is not None:
            self._steps.computed()
            if self._watch:
                self._watch.computed(self._steps)
        super()._run_exchange()

    def _continue(self, steps: Steps) -> None:
        if observer := profiled.observer():
            if steps.timed:
                observer.stepped(Script(steps, "torch", self._profile))
        elif steps.made > 1:
            ranks = self._world.gather([steps.timed, steps.are_enough])  # ranks may differ in speed
            if all(timed for timed, _ in ranks) and any(enough for _, enough in ranks):
                self._choose(self._chosen())
                # Different processors may have rounded their updates differently.
                if (
                    self._local
                    and len(set(self._world.gather(zlib.crc32(to_host(self._parameters.weights()).data)))) > 1
                ):
                    horovod.broadcast_parameters(self._named, root_rank=0)

    # --- the choice ---------------------------------------------------------------------------------------------

    def _candidates(self) -> list[Spec]:
        exchanges = choice.candidates(self._rule, TrainConfig(framework="torch", optimizer=presets.family(type(self))))
        return [each for each in exchanges if not conflict(each, op=self._op, compressed=False, all_ranks=True)]

    def _smallest(self) -> Spec:
        """Return the candidate that sends the fewest bytes in each step, of those that sum gradients."""
        shapes = [tuple(weight.shape) for weight in self._named.values()]
        layout = Layout(ranks=self._world.size, hosts=self._world.hosts_count)
        sums = [each for each in self._candidates() if not each.capabilities.local_updates]
        return min(sums, key=lambda each: each.cost(shapes, layout).sent_bytes)

    def _chosen(self) -> Chosen:
        """Return the strategy that is predicted to be fastest, equal on all ranks. Collective."""
        own, exchanges = self._profile(), self._candidates()
        names = reducers(exchanges) if self._world.local_rank == 0 else []
        coding_s = coding.measure(names, own.shapes, profiled.AUTO_CODING_S)
        if not self._world.links:
            self._world.measure_links()
        return choice.choose(profile.with_coding(own, coding_s), self._world, exchanges, self._world.size)

    def _choose(self, chosen: Chosen) -> None:
        """Continue with a strategy. Collective."""
        self._steps, self._overlaps = None, True
        exchange = parse(chosen.strategy)
        self._use(exchange, set() if exchange.capabilities.local_updates else set(self._sparse))
        record.choosing(False, exchange, chosen.reason)
        if self._world.rank == 0:
            hint = "; call optimizer.synchronize_weights() before evaluations and checkpoints" if self._local else ""
            print(f"hvdtrain: strategy {exchange}: {chosen.reason}{hint}", file=sys.stderr, flush=True)

    def _compare(self) -> None:
        if self._steps is not None and any(each.capabilities.local_updates for each in self._candidates()):
            self._check_weights()
        super()._compare()

    def _profile(self) -> Profile:
        assert self._steps is not None
        watch, device = self._watch, str(next(iter(self._named.values())).device)
        return self._steps.profile(
            script=Path(sys.argv[0]).name,
            setup={"framework": "torch", "device": device, "optimizer": presets.family(type(self))},
            shapes=[tuple(weight.shape) for weight in self._named.values()],
            batch=watch.batch() if watch else 1,
            accumulation=watch.accumulation() if watch else 1,
            threads=torch.get_num_threads(),
            averaging_s=averaging_s(self._named),
            ready=watch.ready() if watch else (),
        )

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _accepts(self, strategy: str) -> bool:
        return self._steps is not None or super()._accepts(strategy)

    def _resume(self, strategy: str) -> None:
        if self._steps is not None and strategy != automatic.NAME:
            self._choose(Chosen(strategy, "as in the state that was loaded"))


class Watch:
    """Records the batch of a script that is planned, and when its gradients are ready during backward."""

    def __init__(self, named: dict[str, torch.nn.Parameter], *, on_cpu: bool) -> None:
        """`on_cpu`: whether gradients are ready when backward has called their hooks."""
        self._shapes = [tuple(weight.shape) for weight in named.values()]
        self._times: dict[int, float] = {}
        self._shares: list[list[float]] = []
        self._samples: list[int] = []
        """Samples in each step, as the inputs of the model show"""
        self._module: Any = None
        self._counted = self._passed = 0
        self._passes: list[int] = []
        """Backward passes in each step, as the first parameter shows"""
        self._hooks: list[Any] = [register_module_forward_pre_hook(self._count)]
        self._hooks.append(next(iter(named.values())).register_post_accumulate_grad_hook(self._pass))
        for index, weight in enumerate(named.values() if on_cpu else ()):
            self._hooks.append(weight.register_post_accumulate_grad_hook(lambda _, index=index: self._note(index)))

    def _pass(self, _: torch.Tensor) -> None:
        self._passed += 1

    def _note(self, index: int) -> None:
        self._times[index] = time.perf_counter()

    def _count(self, module: Any, inputs: tuple[Any, ...]) -> None:
        """Count the samples of a training step: the rows of the first tensor with which a module is called."""
        rows = next((len(each) for each in inputs if isinstance(each, torch.Tensor) and each.ndim), 0)
        if not rows or not torch.is_grad_enabled():
            return
        if self._module is None:
            self._module = module
        if module is self._module:
            self._counted += rows

    def computed(self, steps: Steps) -> None:
        """The gradients of a step are ready."""
        if self._counted:
            self._samples.append(self._counted)
        self._passes.append(self._passed)
        self._counted, self._passed, times = 0, 0, self._times
        self._times = {}
        if steps.is_warming_up or steps.began is None or not times:
            return
        now = time.perf_counter()
        last = [max((times[i] for i in each if i in times), default=now) for each in buckets(self._shapes)]
        self._shares.append([(at - steps.began) / (now - steps.began) for at in last])

    def batch(self) -> int:
        """Return this rank's samples of a step. Raises Failure (78) if neither the script nor its model shows them."""
        if record.samples or self._samples:
            return record.samples or round(statistics.median(self._samples))
        raise Failure(
            "hvdtrain plan does not know the batch: no module was called with a tensor; hint: call "
            "hvd.log(samples=len(batch)) after optimizer.step()",
            exits.BAD_CONFIG,
        )

    def accumulation(self) -> int:
        """Return how many batches are accumulated for a step: its backward passes, but at least one."""
        return max(1, round(statistics.median(self._passes)))

    def ready(self) -> list[float]:
        """Return `Profile.ready`."""
        return [statistics.median(each) for each in zip(*self._shares, strict=True)]


def averaging_s(named: dict[str, torch.nn.Parameter]) -> float:
    """Return the processor seconds of averaging weights in a single process. The weights do not change."""
    single = alone("torch")
    local = parse(profiled.AVERAGING).make(TrainConfig(), single, [tuple(each.shape) for each in named.values()])
    vectors = Parameters(named, lambda _: None, local, ranks=1, divided=False, careful=False)
    before, spent = [weight.detach().clone() for weight in named.values()], []
    for _ in range(profile.AVERAGINGS):
        began = time.process_time()
        local.step(vectors, 1.0, Clock())
        spent.append(time.process_time() - began)
    with torch.no_grad():
        torch._foreach_copy_(list(named.values()), before)  # averaging one rank rounds
    return statistics.median(spent[1:])
