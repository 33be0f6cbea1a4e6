"""Horovod's gradient tape, and the same on a strategy.

A tape gives gradients and does not see what becomes of them, so only strategies that sum the gradients of each step can
stand behind one. It is made anew for each step; what the exchange keeps belongs to the variables and lives here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvdtrain.horovod_api import job
from hvdtrain.strategies import Exchange
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.tensorflow import recorded
from hvdtrain.tensorflow.step import Step, apart, tensor

_steps: dict[tuple[Any, ...], Step] = {}
"""By strategy, averaging, and the variables"""


class ExchangingTape(tf.GradientTape):
    """A tape whose `gradient` exchanges by a strategy. Its first argument was recorded by another tape."""

    def __init__(self, recorded: Any, plain: Any, exchange: Exchange, average: bool, scale_local: bool) -> None:
        """`plain`: Horovod's tape, for what a strategy does not take."""
        super().__init__(recorded._persistent, recorded._watch_accessed_variables)
        self._tape, self._plain = recorded._tape, plain
        self._exchange, self._average, self._scale_local = exchange, average, scale_local
        self._own: set[int] = set()

    def register_local_source(self, source: Any) -> None:
        """Leaves a variable's gradients out of the exchange."""
        self._own.add(id(tensor(source)))
        self._plain.register_local_source(tensor(source))

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> list[Any]:
        """The gradients of all ranks, for a list of variables. Collective."""
        variables = [tensor(each) if hasattr(each, "value") else each for each in sources]
        if not all(isinstance(each, tf.Variable) and each.dtype == tf.float32 for each in variables):
            if str(self._exchange) != DEFAULT_REDUCER:
                why = "a tape's sources have to be float32 variables for it"
                raise ValueError(f"strategy {self._exchange}: {why}; give {DEFAULT_REDUCER}")
            return list(self._plain.gradient(target, variables, output_gradients, use_generic_names))
        gradients = super().gradient(target, variables, output_gradients)
        ranks = horovod.size() if self._scale_local else None
        shared, gradients = apart(gradients, variables, self._own, ranks)
        used = [variables[index] for index in shared]
        key = (job.job(), str(self._exchange), self._average, *map(id, used))
        if key not in _steps:
            _steps[key] = Step(self._exchange, average=self._average)
        found: list[Any] = []
        _steps[key].in_graph([tf.convert_to_tensor(gradients[index]) for index in shared], used, found.extend)
        for index, summed in zip(shared, found, strict=True):
            gradients[index] = summed
        recorded.tape(_steps[key], used, found)
        return list(gradients)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Sources with their gradients: those that were registered as local, and the others."""
        own: list[tuple[Any, Any]] = []
        others: list[tuple[Any, Any]] = []
        for pair in zip(sources, self.gradient(target, sources, output_gradients), strict=True):
            (own if id(tensor(pair[0])) in self._own else others).append(pair)
        return own, others


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
    """A tape with the gradients of all ranks. The arguments are Horovod's.

    `strategy`: a --strategy string, else HVDTRAIN_STRATEGY, else Horovod's own exchange. Raises Failure (78) for one
    that a script cannot have, ValueError if it does not sum the gradients of each step, or an argument does not go
    with it.
    """
    asked, why = job.wanted(strategy), ""
    if asked is not None and asked.algorithm is not None:
        why = (
            "a tape does not see the update, and this strategy is part of it: use hvd.DistributedOptimizer of a Keras "
            "optimizer, or a strategy that sums gradients (the part behind the plus)"
        )
    elif op not in (horovod.Average, horovod.Sum):
        why = "op: it averages or sums"
    elif compression is not horovod.Compression.none:
        why = "compression= is part of the strategy: name a reducer of few bits (--strategy help), and leave it out"
    elif process_set.process_set_id != 0:
        why = "a strategy exchanges among all ranks: leave process_set out"
    elif (
        asked is not None and asked.capabilities.has_residual and tf.keras.config.dtype_policy().name == "mixed_float16"
    ):
        why = "it keeps gradients from step to step, which loss scaling makes infinite: take mixed_bfloat16"
    if asked is not None and why and str(asked) != DEFAULT_REDUCER:
        raise ValueError(f"DistributedGradientTape, strategy {asked}: {why}")
    with tf.init_scope():  # that ranks meet, or change over, is no part of a graph
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
    if exchange is None or why:  # the calls of Horovod's tape give what the default reducer would
        return plain if process_set.process_set_id else _watched(plain)
    return ExchangingTape(gradtape, plain, exchange, op == horovod.Average, scale_local_gradients)


def _watched(tape: Any) -> Any:
    """Horovod's tape, which takes Keras 3's variables too, and whose steps are recorded."""
    gradient = tape.gradient

    @tf.autograph.experimental.do_not_convert
    def watched(target: Any, sources: Any, *arguments: Any, **named: Any) -> Any:
        given = tf.nest.map_structure(lambda each: tensor(each) if hasattr(each, "value") else each, sources)
        gradients = gradient(target, given, *arguments, **named)
        variables = [each for each in tf.nest.flatten(given) if isinstance(each, tf.Variable)]
        if variables:
            recorded.tape(None, variables, gradients)
        return gradients

    tape.gradient = watched
    return tape


def PartialDistributedGradientTape(gradtape: Any, *arguments: Any, local_layers: Any = None, **named: Any) -> Any:
    """`DistributedGradientTape` that leaves the gradients of these layers' weights to each rank.

    Raises ValueError for local layers that are none of Keras.
    """
    layers: Sequence[Any] = [local_layers] if isinstance(local_layers, tf.keras.layers.Layer) else local_layers or ()
    if not all(isinstance(layer, tf.keras.layers.Layer) for layer in layers):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    tape = DistributedGradientTape(gradtape, *arguments, **named)
    for variable in (variable for layer in layers for variable in layer.trainable_weights):
        tape.register_local_source(tensor(variable))
    return tape
