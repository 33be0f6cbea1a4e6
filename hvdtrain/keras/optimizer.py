"""Keras 3 optimizers whose gradients are those of all ranks. Horovod's own wrapper fits Keras 2 only.

`DistributedOptimizer` makes an optimizer of a subclass of the given one's class, under the same name: schedules,
`get_config`, `model.save` and `isinstance` work, and a saved model loads without Horovod. Gradients are exchanged in
`apply`, through which `fit`, `train_on_batch` and `apply_gradients` all go.
"""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as horovod
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvdtrain.horovod_api import job
from hvdtrain.strategies import Exchange
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.tensorflow.recorded import Recorded
from hvdtrain.tensorflow.step import Step, apart, tensor

_numbers = itertools.count()
"""Of the optimizers: Keras' own names for them differ between a rank that loads a model and those that build it"""


class State:
    """What an optimizer keeps of its exchange; no variable of Keras, so that a saved model is an ordinary one."""

    def __init__(self, settings: types.SimpleNamespace) -> None:
        self.local: set[int] = set()
        """Ids of variables that are this rank's own"""
        self.passes = tf.Variable(0, trainable=False)
        self.sums: list[Any] = []
        """Of the gradients of the backward passes since the last exchange"""
        self.step = Step(settings.exchange, average=settings.op == horovod.Average) if settings.exchange else None
        self.recorded: Recorded | None = None


class Distributed:
    """What is put in front of an optimizer's class."""

    restored = False
    """Whether `load_exchange_state` was called"""
    _hvd_settings: types.SimpleNamespace
    """`name`, `exchange` (None: by Horovod's calls, whatever carries them), `carried`, which these calls are given, and
    arguments of `DistributedOptimizer`"""
    _hvd_state: State
    _trainable_variables: list[Any]
    _iterations: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._hvd_state = State(self._hvd_settings)

    def register_local_var(self, variable: Any) -> None:
        """Leaves a variable's gradients out of the exchange."""
        self._hvd_state.local.add(id(tensor(variable)))

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Exchanges the gradients and updates the variables. Collective."""
        gradients = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not gradients:
            return
        if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError(
                "XLA cannot compile an exchange with other ranks: give model.compile(..., jit_compile=False)"
            )
        if not self.built:  # type: ignore[has-type]
            with keras.name_scope(self.name):  # type: ignore[attr-defined]
                self.build(variables)  # type: ignore[attr-defined]
            self.built = True
        state, passes = self._hvd_state, self._hvd_settings.backward_passes_per_step
        if passes == 1:
            self._hvd_update(gradients, variables)
            return
        # Horovod's LocalGradientAggregationHelper sums dense gradients too
        gradients = [each if each is None else tf.convert_to_tensor(each) for each in gradients]
        if not state.sums:
            with tf.init_scope():
                state.sums = [
                    None
                    if each is None
                    else tf.Variable(np.zeros(each.shape, each.dtype.as_numpy_dtype), trainable=False)
                    for each in gradients
                ]
        for total, gradient in zip(state.sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(gradient)
        state.passes.assign_add(1)
        tf.cond(tf.equal(state.passes, passes), lambda: self._hvd_together(variables), lambda: self._hvd_pass())

    def _hvd_pass(self) -> bool:
        self._iterations.assign_add(1)
        return False

    def _hvd_together(self, variables: list[Any]) -> bool:
        """Exchanges and uses what several backward passes have summed."""
        state, settings = self._hvd_state, self._hvd_settings
        share = 1.0 / settings.backward_passes_per_step if settings.average_aggregated_gradients else 1.0
        self._hvd_update(
            [each if each is None else each * tf.cast(share, each.dtype) for each in state.sums], variables
        )
        for total in state.sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
        state.passes.assign(0)
        return True

    def _hvd_update(self, gradients: list[Any], variables: list[Any]) -> None:
        state, base = self._hvd_state, super().apply  # type: ignore[misc]
        doubles = any(tensor(variable).dtype == tf.float64 for variable in variables)
        if state.step is None or (doubles and str(self._hvd_settings.exchange) == DEFAULT_REDUCER):
            base(self._hvd_reduced(gradients, variables), variables)  # which keeps float64
            return
        if doubles:
            told = f"{self._hvd_settings.exchange} exchanges float64 rounded to float32; {DEFAULT_REDUCER} does not"
            warnings.warn(told, stacklevel=2)
        used, own = self._hvd_apart(gradients, variables)

        def update(summed: list[Any]) -> None:
            for index, gradient in zip(used, summed, strict=True):
                own[index] = gradient
            base(own, variables)

        dense = [tf.convert_to_tensor(gradients[index]) for index in used]
        state.step.in_graph(dense, [variables[index] for index in used], update)

    def _hvd_apart(self, gradients: list[Any], variables: list[Any]) -> tuple[list[int], list[Any]]:
        settings = self._hvd_settings
        ranks = settings.process_set.size() if settings.scale_local_gradients else None
        return apart(gradients, variables, self._hvd_state.local, ranks)

    def _hvd_reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients of all ranks by Horovod's own exchange, in the given order."""
        settings = self._hvd_settings
        shared, reduced = self._hvd_apart(gradients, variables)
        if not settings.process_set.included() or settings.process_set.size() == 1:
            return reduced
        exchanged = {}
        for index in shared:
            sparse = isinstance(gradients[index], tf.IndexedSlices) and settings.sparse_as_dense
            exchanged[index] = tf.convert_to_tensor(gradients[index]) if sparse else gradients[index]
        for members in grouped(list(exchanged), variables, settings.groups):
            first = f"{settings.name}_{members[0]}"
            if settings.groups:
                group = [exchanged[index] for index in members]
                summed = horovod.grouped_allreduce(group, name=first, **settings.carried)
            else:
                summed = [horovod.allreduce(exchanged[members[0]], name=first, **settings.carried)]
            for index, gradient in zip(members, summed, strict=True):
                reduced[index] = gradient
        return reduced

    # --- exchanges that keep something from step to step --------------------------------------------------------

    def synchronize_weights(self) -> None:
        """Makes the weights the same on all ranks, where a strategy let them differ. Collective."""
        if self._hvd_state.step is not None:
            self._hvd_state.step.synchronize()
            if self._hvd_state.recorded is not None:
                self._hvd_state.recorded.exchanged()

    def postpone_exchange(self, postponed: bool) -> None:
        """Whether steps update this rank's weights by its own gradients for now, because the weights that all ranks
        begin with are broadcast later. Changes nothing with strategies that exchange gradients."""
        if self._hvd_state.step is not None:
            self._hvd_state.step.postponed = postponed

    def exchange_state(self) -> dict[str, np.ndarray]:
        """What this rank's exchange needs to go on after the very step: each rank saves and loads its own."""
        state = self._hvd_state
        arrays = {"passes": state.passes.numpy()}
        arrays |= {f"sum.{index}": each.numpy() for index, each in enumerate(state.sums) if each is not None}
        if state.step is not None:
            arrays |= {f"strategy.{name}": array for name, array in state.step.state().items()}
        return arrays

    def load_exchange_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes what `exchange_state` gave."""
        state, self.restored = self._hvd_state, True
        state.passes.assign(arrays["passes"])
        sums = {int(name.removeprefix("sum.")): array for name, array in arrays.items() if name.startswith("sum.")}
        if state.sums:  # which a compiled step holds
            for index, total in enumerate(state.sums):
                if total is not None:
                    total.assign(sums.get(index, tf.zeros_like(total)))
        elif sums:
            state.sums = [
                tf.Variable(sums[index], trainable=False) if index in sums else None
                for index in range(max(max(sums) + 1, len(self._trainable_variables)))
            ]
        kept = {name.removeprefix("strategy."): array for name, array in arrays.items() if name.startswith("strategy.")}
        if kept and state.step is not None:
            state.step.load(kept)


def grouped(indices: list[int], variables: list[Any], groups: Any) -> list[list[int]]:
    """Which gradients travel together: one by one, in so many groups of about the same number, or as lists of
    variables say; those in no list by themselves."""
    if isinstance(groups, list):
        place = {id(tensor(variables[index])): index for index in indices}
        named = [[place.pop(id(tensor(each))) for each in group if id(tensor(each)) in place] for group in groups]
        return [group for group in named if group] + [[index] for index in place.values()]
    if not groups:
        return [[index] for index in indices]
    parts = [part.tolist() for part in np.array_split(indices, min(groups, len(indices)))]
    return [part for part in parts if part]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = horovod.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = horovod.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = horovod.global_process_set,
    scale_local_gradients: bool = True,
    *,
    strategy: str | None = None,
) -> Any:
    """A Keras 3 optimizer like the given one, with the gradients of all ranks: for `model.compile`.

    The arguments are Horovod's. `strategy`: a --strategy string, else HVDTRAIN_STRATEGY, else Horovod's own exchange.
    Raises Failure (78) for a strategy that a script cannot have, ValueError for what does not go with it.
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow, or use hvdtrain.torch"
        )
    if isinstance(optimizer, Distributed):
        raise ValueError("DistributedOptimizer: this one is distributed already, give it one of keras.optimizers")
    if op not in (horovod.Average, horovod.Sum):
        raise ValueError("op: an optimizer of Keras takes Average or Sum")
    if gradient_predivide_factor != 1.0 and op != horovod.Average:
        raise ValueError("gradient_predivide_factor goes with op=Average only")
    if num_groups:
        warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=2)
        groups = groups or num_groups
    if groups is not None and not (isinstance(groups, list) or groups > 0):
        raise ValueError("groups: a number above 0, or a list of lists of variables")
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    ):
        # As compile() would, but outside: the ranks have to agree on whether a gradient is infinite.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    asked = job.wanted(strategy)
    why = unfit(asked, optimizer, compression, op, process_set) if asked else ""
    if why and str(asked) != DEFAULT_REDUCER:
        raise ValueError(f"DistributedOptimizer, strategy {asked}: {why}")
    exchange = job.exchange(strategy)
    kind = type(optimizer)
    settings = types.SimpleNamespace(
        name=f"{name or f'Distributed{kind.__name__}'}_{next(_numbers)}",
        exchange=None if why else exchange,  # Horovod's calls give what the default reducer would
        carried={
            "op": op,
            "compression": compression,
            "device_dense": device_dense,
            "device_sparse": device_sparse,
            "prescale_factor": 1.0 / gradient_predivide_factor,
            "postscale_factor": gradient_predivide_factor,
            "process_set": process_set,
            "ignore_name_scope": True,
        },
        op=op,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    module = keras.optimizers.serialize(optimizer)["module"]  # so that it is saved as the given one would be
    made = type(kind.__name__, (Distributed, kind), {"_hvd_settings": settings, "__module__": module})
    return copied(made, optimizer)


def copied(kind: Callable[..., Any], optimizer: Any) -> Any:
    """An optimizer of another class with the same settings and, if it was built, the same state."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    own = {each.__name__: each for each in (type(inner), type(inner._learning_rate))}  # a script's, unregistered
    with keras.saving.custom_object_scope(own):
        new = kind.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    if optimizer.built:
        new.build(optimizer._trainable_variables)
        for mine, theirs in zip(new.variables, optimizer.variables, strict=True):
            mine.assign(theirs)
    return new


def unfit(exchange: Exchange, optimizer: Any, compression: Any, op: int, process_set: Any) -> str:
    """Why a strategy does not go with the arguments; empty if it does."""
    if compression is not horovod.Compression.none:
        return "compression= is part of the strategy: name a reducer of few bits (--strategy help), and leave it out"
    if op == horovod.Sum and exchange.capabilities.local_updates:
        return "it averages the ranks' weights, so op=hvd.Sum means nothing: leave it out"
    if process_set.process_set_id != 0:
        return "it works on all ranks together, not on a process_set: leave that out"
    if exchange.capabilities.has_residual and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return "it keeps gradients from step to step, which loss scaling makes infinite: take mixed_bfloat16"
    return ""
