"""Gradient tapes that exchange by Horovod's calls or by a strategy.

A tape does not see the update, so it supports only strategies that sum the gradients of each step. Scripts create a
tape for each step, so the state of the exchange is stored in this module, by variables.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.horovod_api import job
from hvdtrain.horovod_api.arguments import conflict
from hvdtrain.strategies import Spec
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.tensorflow import api as horovod
from hvdtrain.tensorflow import recorded
from hvdtrain.tensorflow.step import Step, split_local, tensor

_steps: dict[tuple[Any, ...], Step] = {}
"""Steps by job, strategy, whether it averages, and the ids of the variables"""


class ExchangingTape(tf.GradientTape):
    """A tape whose `gradient` exchanges by a strategy."""

    def __init__(self, tape: Any, plain: Any, exchange: Spec, average: bool, scale_local: bool) -> None:
        """`tape` has recorded the operations. `plain` is Horovod's tape, for sources that strategies do not support."""
        super().__init__(tape._persistent, tape._watch_accessed_variables)
        self._tape, self._plain = tape._tape, plain
        self._exchange, self._average, self._scale_local = exchange, average, scale_local
        self._local: set[int] = set()

    def register_local_source(self, source: Any) -> None:
        """Exclude a variable's gradients from the exchange."""
        self._local.add(id(tensor(source)))
        self._plain.register_local_source(tensor(source))

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> list[Any]:
        """Return the gradients of all ranks for a list of variables. Collective."""
        variables = [tensor(each) if hasattr(each, "value") else each for each in sources]
        if not all(isinstance(each, tf.Variable) and each.dtype == tf.float32 for each in variables):
            if str(self._exchange) != DEFAULT_REDUCER:
                problem = f"a tape's sources must be float32 variables; hint: use {DEFAULT_REDUCER}"
                raise ValueError(f"strategy {self._exchange}: {problem}")
            return list(self._plain.gradient(target, variables, output_gradients, use_generic_names))
        gradients = super().gradient(target, variables, output_gradients)
        ranks = present_size(horovod.global_process_set) if self._scale_local else None
        shared, gradients = split_local(gradients, variables, self._local, ranks)
        exchanged = [variables[index] for index in shared]
        key = (job.job(), str(self._exchange), self._average, *map(id, exchanged))
        if key not in _steps:
            _steps[key] = Step(self._exchange, average=self._average)
        sums: list[Any] = []
        _steps[key].in_graph([tf.convert_to_tensor(gradients[index]) for index in shared], exchanged, sums.extend)
        for index, total in zip(shared, sums, strict=True):
            gradients[index] = total
        recorded.tape(_steps[key], exchanged, sums)
        return list(gradients)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return (source, gradient) pairs: those registered as local, and the others."""
        pairs = [*zip(sources, self.gradient(target, sources, output_gradients), strict=True)]
        is_local = [id(tensor(source)) in self._local for source, _ in pairs]
        local = [pair for pair, yes in zip(pairs, is_local, strict=True) if yes]
        return local, [pair for pair, yes in zip(pairs, is_local, strict=True) if not yes]


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = horovod.Compression.none,
    sparse_as_dense: bool = False,
    op: int = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = horovod.global_process_set,
    scale_local_gradients: bool = True,
    *,
    strategy: str | None = None,
) -> Any:
    """Return a tape with the gradients of all ranks.

    The arguments are Horovod's, and `strategy`, a --strategy string. It defaults to HVDTRAIN_STRATEGY or, if that is
    not set, to Horovod's own exchange.

    Raises Failure (78) for a strategy that scripts cannot use. Raises ValueError if it does not sum the gradients of
    each step or cannot be combined with an argument.
    """
    wanted, problem = job.wanted(strategy), ""
    if wanted is not None and wanted.algorithm is not None:
        problem = (
            "it includes the update, which a tape does not see; hint: name a reducer only, or use "
            "hvd.DistributedOptimizer of a Keras optimizer"
        )
    elif wanted is not None:
        compressed, all_ranks = compression is not horovod.Compression.none, process_set.process_set_id == 0
        loss_scaling = tf.keras.config.dtype_policy().name == "mixed_float16"
        problem = conflict(wanted, op=op, compressed=compressed, all_ranks=all_ranks, loss_scaling=loss_scaling)
    if problem and str(wanted) != DEFAULT_REDUCER:
        raise ValueError(f"DistributedGradientTape, strategy {wanted}: {problem}")
    with tf.init_scope():  # ranks may have to connect, which is not part of a graph
        exchange = job.exchange(strategy)
    plain = horovod.DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    if exchange is None or problem:  # the calls of Horovod's tape have the same results as the default reducer
        return plain if process_set.process_set_id else _recorded(plain, compression)
    return ExchangingTape(gradtape, plain, exchange, op == horovod.Average, scale_local_gradients)


def present_size(process_set: Any) -> Any:
    """The number of ranks; in an elastic job a tensor, so that a graph computes it in each step."""
    is_elastic = job.is_connected() and job.job().elastic is not None
    return horovod.size_op(process_set.process_set_id) if is_elastic else process_set.size()


def _recorded(tape: Any, compression: Any) -> Any:
    """Make Horovod's tape accept Keras 3's variables and record its steps, and return it."""
    gradient = tape.gradient

    @tf.autograph.experimental.do_not_convert
    def recorded_gradient(target: Any, sources: Any, *arguments: Any, **named: Any) -> Any:
        plain = tf.nest.map_structure(lambda each: tensor(each) if hasattr(each, "value") else each, sources)
        gradients = gradient(target, plain, *arguments, **named)
        variables = [each for each in tf.nest.flatten(plain) if isinstance(each, tf.Variable)]
        if variables:
            recorded.tape(None, variables, gradients, compression)
        return gradients

    tape.gradient = recorded_gradient
    return tape
