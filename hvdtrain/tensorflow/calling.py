"""Horovod's tape and optimizer on the TCP backend. The tape reduces gradients by calls, one for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from hvdtrain.horovod_api.calls import needs_horovod
from hvdtrain.horovod_api.functions import Average
from hvdtrain.horovod_api.process_sets import global_process_set
from hvdtrain.tensorflow.collectives import Compression, allreduce, public, size_op
from hvdtrain.tensorflow.step import split_local, tensor


class _Tape(tf.GradientTape):
    """A tape whose `gradient` reduces each gradient by a call."""

    def __init__(self, tape: Any, reduce: Callable[[Any], Any], sparse_as_dense: bool, ranks: Any) -> None:
        super().__init__(tape._persistent, tape._watch_accessed_variables)
        self._tape, self._reduce, self._sparse_as_dense, self._ranks = tape._tape, reduce, sparse_as_dense, ranks
        self._local: set[int] = set()

    def register_local_source(self, source: Any) -> None:
        """Exclude a variable's gradients from the exchange."""
        self._local.add(id(tensor(source)))

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False) -> Any:
        """Return the gradients of all ranks. Collective."""
        gradients = tf.nest.flatten(super().gradient(target, sources, output_gradients))
        variables = tf.nest.flatten(sources)
        if all(isinstance(each, tf.Variable) for each in variables):
            shared, gradients = split_local(gradients, variables, self._local, self._ranks)
        else:
            shared = [index for index, gradient in enumerate(gradients) if gradient is not None]
        for index in shared:
            dense = self._sparse_as_dense and isinstance(gradients[index], tf.IndexedSlices)
            gradients[index] = self._reduce(tf.convert_to_tensor(gradients[index]) if dense else gradients[index])
        return tf.nest.pack_sequence_as(sources, gradients)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return (source, gradient) pairs: those registered as local, and the others."""
        pairs = [*zip(sources, self.gradient(target, sources, output_gradients), strict=True)]
        local = [pair for pair in pairs if id(tensor(pair[0])) in self._local]
        return local, [pair for pair in pairs if id(tensor(pair[0])) not in self._local]


@public
def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape with the gradients of all ranks. Groups have no effect."""

    def reduce(gradient: Any) -> Any:
        scales = {"prescale_factor": 1 / gradient_predivide_factor, "postscale_factor": gradient_predivide_factor}
        devices = {"device_dense": device_dense, "device_sparse": device_sparse}
        rest: dict[str, Any] = {"compression": compression, "process_set": process_set, **scales, **devices}
        return allreduce(gradient, op=op, **rest)

    ranks = size_op(process_set.process_set_id) if scale_local_gradients else None
    return _Tape(gradtape, reduce, sparse_as_dense, ranks)


@public
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> NoReturn:
    """Horovod's wrapper of tf.compat.v1's optimizers, which needs Horovod."""
    raise needs_horovod("an optimizer of tf.compat.v1")
