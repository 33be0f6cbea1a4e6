"""Horovod's TensorFlow functions on the TCP backend, for an environment without Horovod.

Names, arguments and gradients equal Horovod 0.28's (horovod.readthedocs.io, API). `join`, and optimizers of
tf.compat.v1, raise NotImplementedError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from hvdtrain.horovod_api import job, standalone
from hvdtrain.horovod_api.arithmetic import Op
from hvdtrain.horovod_api.calls import needs_horovod
from hvdtrain.horovod_api.standalone import *  # noqa: F403
from hvdtrain.horovod_api.standalone import Average, Sum, global_process_set, numbered, operator
from hvdtrain.tensorflow.step import split_local, tensor

MPI_LIB: Any = None
"""The `Operations` of the current job"""


class Compression:
    """Compressors for `compression=`."""

    class none:
        """Sends tensors as they are."""

        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return tensor, None

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tensor

    class fp16:
        """Sends floating-point tensors as float16."""

        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tf.cast(tensor, ctx)


def _executing_eagerly() -> bool:
    eagerly: bool = tf.executing_eagerly()
    return eagerly


def _run(operation: str, inputs: Any, name: str | None, process_set: Any, **attributes: Any) -> Any:
    """Start and finish a call for a tensor or a list. Raises ValueError before `init`."""
    job.job()
    if name is None and not _executing_eagerly():
        first = inputs[0] if isinstance(inputs, list) else inputs
        name = f"{operation}_{re.sub('[^a-zA-Z0-9_]', '_', first.name)}"
    function = getattr(MPI_LIB, f"horovod_{operation}")
    return function(inputs, name=name, process_set_id=process_set.process_set_id, **attributes)


def _tensors(values: Sequence[Any]) -> list[Any]:
    return [tf.convert_to_tensor(value) for value in values]


# --- collectives ------------------------------------------------------------------------------------------------------


def _reduced(
    kind: str, tensors: Sequence[Any], compression: Any, grouped: bool, device: str, name: Any, set_: Any, scales: Any
) -> list[Any]:
    with tf.device(device):
        pairs = [compression.compress(each) for each in _tensors(tensors)]
        inputs = [each for each, _ in pairs]
        if grouped:
            results = _run(f"grouped_{kind}", inputs, name, set_, **scales)
        else:
            results = [_run(kind, inputs[0], name, set_, **scales)]
        return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    reduce_op = operator(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        with tf.device(device_sparse):
            return _sparse(tensor, reduce_op, prescale_factor * postscale_factor, process_set)
    scales = {"reduce_op": reduce_op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _reduced("allreduce", [tensor], compression, False, device_dense, name, process_set, scales)[0]


def _sparse(slices: Any, op: Op, scale: float, process_set: Any) -> Any:
    """The sum or mean of IndexedSlices, which has the rows of all ranks."""
    if op not in (Sum, Average) or scale != 1.0:
        raise NotImplementedError("IndexedSlices can be summed and averaged, without factors; hint: convert to dense")
    values, indices = allgather(slices.values, process_set=process_set), allgather(slices.indices, None, process_set)
    values = values / tf.cast(size_op(process_set.process_set_id), values.dtype) if op == Average else values
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    reduce_op, results = operator(op, average), list(tensors)
    scales = {"reduce_op": reduce_op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    dense = [index for index, each in enumerate(results) if not isinstance(each, tf.IndexedSlices)]
    for index, each in enumerate(results):
        if isinstance(each, tf.IndexedSlices):
            with tf.device(device_sparse):
                results[index] = _sparse(each, reduce_op, prescale_factor * postscale_factor, process_set)
    if dense:
        inputs = [results[index] for index in dense]
        sums = _reduced("allreduce", inputs, compression, True, device_dense, name, process_set, scales)
        for index, total in zip(dense, sums, strict=True):
            results[index] = total
    return results


def allgather(
    tensor: Any, name: str | None = None, process_set: Any = global_process_set, ignore_name_scope: bool = False
) -> Any:
    return _run("allgather", tf.convert_to_tensor(tensor), name, process_set)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    return _run("grouped_allgather", _tensors(tensors), name, process_set)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    return _run("broadcast", tf.convert_to_tensor(tensor), name, process_set, root_rank=root_rank)


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Broadcast variables in place, and return their values."""
    for number, each in enumerate(variables):
        label = f"{name or 'broadcast'}.{each.name}.{number}"
        each.assign(broadcast(each, root_rank, label, process_set=process_set))
    return [each.read_value() for each in variables]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Broadcast variables in place."""
    for number, each in enumerate(variables):
        each.assign(broadcast(each, root_rank, f"broadcast_variables.{number}", process_set=process_set))


def broadcast_global_variables(root_rank: int) -> NoReturn:
    if _executing_eagerly():
        hint = "use hvd.broadcast_variables(<model/optimizer variables>)"
        raise RuntimeError(f"hvd.broadcast_global_variables() does not support eager execution; hint: {hint}")
    raise needs_horovod("hvd.broadcast_global_variables")


def broadcast_object_fn(*arguments: Any, **named: Any) -> NoReturn:
    raise needs_horovod("hvd.broadcast_object_fn")


def broadcast_object(  # type: ignore[no-redef]
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return `root_rank`'s object on all ranks. Collective."""
    return standalone.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(  # type: ignore[no-redef]
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective."""
    return standalone.allgather_object(obj, name, process_set)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    given = tf.constant([], tf.int32) if splits is None else tf.convert_to_tensor(splits)
    output, received = _run("alltoall", tf.convert_to_tensor(tensor), name, process_set, splits=given)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    scales = {"reduce_op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _reduced("reducescatter", [tensor], compression, False, device_dense, name, process_set, scales)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    scales = {"reduce_op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _reduced("reducescatter", tensors, compression, True, device_dense, None, process_set, scales)


def join() -> NoReturn:
    raise needs_horovod("hvd.join")


# --- sizes as operations ----------------------------------------------------------------------------------------------


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    return MPI_LIB.horovod_size(process_set_id, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    return MPI_LIB.horovod_process_set_included(process_set_id, name)


def local_size_op(name: str | None = None) -> Any:
    return MPI_LIB.horovod_local_size(name)


def rank_op(name: str | None = None) -> Any:
    return MPI_LIB.horovod_rank(name)


def local_rank_op(name: str | None = None) -> Any:
    return MPI_LIB.horovod_local_rank(name)


# --- gradients of the operations, called by `Operations` --------------------------------------------------------------


def _scales(op: Any) -> dict[str, Any]:
    return {name: op.get_attr(name) for name in ("prescale_factor", "postscale_factor")}


def _allreduce_grad(op: Any, gradient: Any) -> Any:
    process_set = numbered(op.get_attr("process_set_id"))
    return allreduce(gradient, op=op.get_attr("reduce_op"), process_set=process_set, **_scales(op))


def _grouped_allreduce_grad(op: Any, *gradients: Any) -> list[Any]:
    process_set = numbered(op.get_attr("process_set_id"))
    return grouped_allreduce(list(gradients), op=op.get_attr("reduce_op"), process_set=process_set, **_scales(op))


def _grouped_allgather_grad(op: Any, *gradients: Any) -> list[Any]:
    """This rank's rows of the means."""
    process_set, results = numbered(op.get_attr("process_set_id")), []
    for source, gradient in zip(op.inputs, gradients, strict=True):
        mean = allreduce(gradient, op=Average, process_set=process_set)
        counts = tf.reshape(allgather(tf.shape(source)[:1], process_set=process_set), [process_set.size()])
        results.append(tf.split(mean, counts, axis=0)[process_set.rank()])
    return results


def _allgather_grad(op: Any, gradient: Any) -> Any:
    return _grouped_allgather_grad(op, gradient)[0]


def _broadcast_grad(op: Any, gradient: Any) -> Any:
    mean = allreduce(gradient, op=Average, process_set=numbered(op.get_attr("process_set_id")))
    return mean if standalone.rank() == op.get_attr("root_rank") else mean * 0


def _alltoall_grad(op: Any, gradient: Any, _: Any) -> list[Any]:
    process_set = numbered(op.get_attr("process_set_id"))
    return [alltoall(gradient, splits=op.outputs[1], process_set=process_set)[0], None]


def _grouped_reducescatter_grad(op: Any, *gradients: Any) -> list[Any]:
    process_set, factor = numbered(op.get_attr("process_set_id")), 1.0
    for scale in _scales(op).values():
        factor *= scale
    factor *= (process_set.size() or 1) if op.get_attr("reduce_op") == Sum else 1
    return [allgather(gradient * factor, process_set=process_set) for gradient in gradients]


def _reducescatter_grad(op: Any, gradient: Any) -> Any:
    return _grouped_reducescatter_grad(op, gradient)[0]


# --- tapes and optimizers ---------------------------------------------------------------------------------------------


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
    """Horovod's wrapper of tf.compat.v1's optimizers, which is not available."""
    raise needs_horovod("an optimizer of tf.compat.v1")
