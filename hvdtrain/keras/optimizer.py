"""Keras 3 optimizers that exchange gradients between ranks. Horovod's wrapper requires Keras 2.

`DistributedOptimizer` returns an optimizer of a subclass with the same name, so that schedules, `get_config`,
`model.save` and `isinstance` work, and saved models load without Horovod. Gradients are exchanged in `apply`, which
`fit`, `train_on_batch` and `apply_gradients` call.
"""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvdtrain.horovod_api import job
from hvdtrain.horovod_api.arguments import conflict
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.tensorflow import api as horovod
from hvdtrain.tensorflow.recorded import Recorded
from hvdtrain.tensorflow.step import Step, split_local, tensor
from hvdtrain.tensorflow.tape import present_size

_numbers = itertools.count()
"""Numbers of the optimizers. Keras' names differ between ranks if only some of them load a model."""


class State:
    """The state of an optimizer's exchange. It contains no Keras variables, which would be saved with the model."""

    def __init__(self, settings: types.SimpleNamespace, optimizer: type) -> None:
        self.local: set[int] = set()
        """Ids of variables that are not exchanged"""
        self.passes = tf.Variable(0, trainable=False)
        self.sums: list[Any] = []
        """Sums of the gradients of the backward passes since the last exchange"""
        average = settings.op == horovod.Average
        self.step = Step(settings.exchange, average=average, optimizer=optimizer) if settings.exchange else None
        self.recorded: Recorded | None = None


class Distributed:
    """Mix-in class that makes an optimizer exchange."""

    restored = False
    """Whether `load_exchange_state` was called"""
    _hvd_settings: types.SimpleNamespace
    """`exchange` (None for Horovod's calls), `name`, arguments for Horovod's `calls`, and further arguments"""
    _hvd_state: State
    _trainable_variables: list[Any]
    _iterations: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._hvd_state = State(self._hvd_settings, type(self))

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable's gradients from the exchange."""
        self._hvd_state.local.add(id(tensor(variable)))

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Exchange the gradients and update the variables. Collective."""
        gradients = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not gradients:
            return
        if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError("XLA cannot compile an exchange; hint: model.compile(..., jit_compile=False)")
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
        tf.cond(tf.equal(state.passes, passes), lambda: self._hvd_update_with_sums(variables), lambda: self._hvd_pass())

    def _hvd_pass(self) -> bool:
        self._iterations.assign_add(1)
        return False

    def _hvd_update_with_sums(self, variables: list[Any]) -> bool:
        """Exchange the sums of several backward passes and update the variables."""
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
            base(self._hvd_reduced(gradients, variables), variables)  # Horovod's calls keep float64
            return
        if doubles:
            name = self._hvd_settings.exchange
            warnings.warn(f"{name} exchanges float64 as float32; {DEFAULT_REDUCER} keeps float64", stacklevel=2)
        shared, reduced = self._hvd_split(gradients, variables)

        def update(sums: list[Any]) -> None:
            for index, gradient in zip(shared, sums, strict=True):
                reduced[index] = gradient
            base(reduced, variables)

        dense = [tf.convert_to_tensor(gradients[index]) for index in shared]
        state.step.in_graph(dense, [variables[index] for index in shared], update)

    def _hvd_split(self, gradients: list[Any], variables: list[Any]) -> tuple[list[int], list[Any]]:
        settings = self._hvd_settings
        ranks = present_size(settings.process_set) if settings.scale_local_gradients else None
        return split_local(gradients, variables, self._hvd_state.local, ranks)

    def _hvd_reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the gradients of all ranks, exchanged by Horovod's calls."""
        settings = self._hvd_settings
        shared, reduced = self._hvd_split(gradients, variables)
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
                sums = horovod.grouped_allreduce(group, name=first, **settings.calls)
            else:
                sums = [horovod.allreduce(exchanged[members[0]], name=first, **settings.calls)]
            for index, gradient in zip(members, sums, strict=True):
                reduced[index] = gradient
        return reduced

    # --- the state of exchanges ---------------------------------------------------------------------------------

    def synchronize_weights(self) -> None:
        """Give all ranks the same weights. Collective."""
        if self._hvd_state.step is not None:
            self._hvd_state.step.synchronize()
            if self._hvd_state.recorded is not None:
                self._hvd_state.recorded.exchanged()

    def postpone_exchange(self, postponed: bool) -> None:
        """Choose whether each rank makes its steps alone, until the initial weights are broadcast.

        Has no effect with strategies that exchange gradients.
        """
        if self._hvd_state.step is not None:
            self._hvd_state.step.postponed = postponed

    def exchange_state(self) -> dict[str, np.ndarray]:
        """Return the exchange's state on this rank, to resume exactly. Each rank saves and loads its own."""
        state = self._hvd_state
        arrays = {"passes": state.passes.numpy()}
        arrays |= {f"sum.{index}": each.numpy() for index, each in enumerate(state.sums) if each is not None}
        if state.step is not None:
            arrays |= {f"strategy.{name}": array for name, array in state.step.state().items()}
        return arrays

    def load_exchange_state(self, arrays: dict[str, np.ndarray]) -> None:
        """Load what `exchange_state` returned."""
        state, self.restored = self._hvd_state, True
        state.passes.assign(arrays["passes"])
        sums = {int(name.removeprefix("sum.")): array for name, array in arrays.items() if name.startswith("sum.")}
        if state.sums:  # a compiled step uses these variables
            for index, total in enumerate(state.sums):
                if total is not None:
                    total.assign(sums.get(index, tf.zeros_like(total)))
        elif sums:
            state.sums = [
                tf.Variable(sums[index], trainable=False) if index in sums else None
                for index in range(max(max(sums) + 1, len(self._trainable_variables)))
            ]
        exchange = {
            name.removeprefix("strategy."): array for name, array in arrays.items() if name.startswith("strategy.")
        }
        if exchange and state.step is not None:
            state.step.load(exchange)


def grouped(indices: list[int], variables: list[Any], groups: Any) -> list[list[int]]:
    """Return which gradients travel together.

    `groups` is their number, or has lists of variables; variables that are in none travel alone, and so do all without
    `groups`.
    """
    if isinstance(groups, list):
        left = {id(tensor(variables[index])): index for index in indices}
        named = [[left.pop(id(tensor(each))) for each in group if id(tensor(each)) in left] for group in groups]
        return [group for group in named if group] + [[index] for index in left.values()]
    count = min(groups or len(indices), len(indices))
    return [group.tolist() for group in np.array_split(indices, count)] if count else []


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
    """Return a Keras 3 optimizer like the given one that exchanges gradients between ranks.

    The arguments are Horovod's, and `strategy`, a --strategy string. It defaults to HVDTRAIN_STRATEGY or, if that is
    not set, to Horovod's own exchange.

    Raises Failure (78) for a strategy that scripts cannot use, ValueError for arguments that cannot be combined.
    """
    if keras.backend.backend() != "tensorflow":
        hint = "set KERAS_BACKEND=tensorflow, or use hvdtrain.torch"
        raise ValueError(f"Keras runs on {keras.backend.backend()}; hint: {hint}")
    if isinstance(optimizer, Distributed):
        raise ValueError("the optimizer is distributed already; hint: wrap a new one of keras.optimizers")
    if op not in (horovod.Average, horovod.Sum):
        raise ValueError("op must be hvd.Average or hvd.Sum")
    if gradient_predivide_factor != 1.0 and op != horovod.Average:
        raise ValueError("gradient_predivide_factor requires op=hvd.Average")
    if num_groups:
        warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=2)
        groups = groups or num_groups
    if groups is not None and not (isinstance(groups, list) or groups > 0):
        raise ValueError("groups must be a number above 0 or a list of lists of variables")
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    ):
        # compile() would wrap it inside ours, but the ranks must agree on whether a gradient is infinite.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    wanted, problem = job.wanted(strategy), ""
    if wanted is not None:
        compressed, all_ranks = compression is not horovod.Compression.none, process_set.process_set_id == 0
        loss_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        problem = conflict(wanted, op=op, compressed=compressed, all_ranks=all_ranks, loss_scaling=loss_scaling)
    if problem and str(wanted) != DEFAULT_REDUCER:
        raise ValueError(f"DistributedOptimizer, strategy {wanted}: {problem}")
    exchange = job.exchange(strategy)
    kind = type(optimizer)
    settings = types.SimpleNamespace(
        name=f"{name or f'Distributed{kind.__name__}'}_{next(_numbers)}",
        exchange=None if problem else exchange,  # Horovod's calls have the same results as the default reducer
        calls={
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
    module = keras.optimizers.serialize(optimizer)["module"]  # saved models contain the original class
    attributes = {"_hvd_settings": settings, "__module__": module}
    return copied(type(kind.__name__, (Distributed, kind), attributes), optimizer)


def copied(kind: Callable[..., Any], optimizer: Any) -> Any:
    """Return an optimizer of another class with the same settings and, if it was built, the same state."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    unregistered = {each.__name__: each for each in (type(inner), type(inner._learning_rate))}
    with keras.saving.custom_object_scope(unregistered):
        new = kind.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    if optimizer.built:
        new.build(optimizer._trainable_variables)
        for variable, original in zip(new.variables, optimizer.variables, strict=True):
            variable.assign(original)
    return new
