"""Horovod's calls for TensorFlow: hvdtrain's own on the TCP backend, or Horovod's while Horovod carries them.

Names, arguments and gradients equal Horovod 0.28's (horovod.readthedocs.io, API). Optimizers of tf.compat.v1 need
Horovod.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from hvdtrain.horovod_api import functions, job
from hvdtrain.horovod_api.arguments import compressors
from hvdtrain.horovod_api.arithmetic import Op
from hvdtrain.horovod_api.calls import needs_horovod
from hvdtrain.horovod_api.functions import Average, Sum, operator
from hvdtrain.horovod_api.process_sets import global_process_set
from hvdtrain.tensorflow import operations

FRONT = job.Front("tensorflow", "horovod.tensorflow", "horovod.tensorflow.mpi_ops")

(
    is_initialized,
    rank,
    size,
    local_rank,
    local_size,
    cross_rank,
    cross_size,
    is_homogeneous,
    mpi_threads_supported,
    mpi_enabled,
    gloo_enabled,
    start_timeline,
    stop_timeline,
) = map(FRONT.or_own, functions.INITIALISED)
mpi_built, gloo_built, cuda_built, rocm_built, ddl_built, nccl_built, ccl_built = map(
    FRONT.or_own_if_missing, functions.BUILT
)


def public(own: Any) -> Any:
    """Horovod's function or `own`, see `Horovod.or_own`. AutoGraph would take seconds to convert it."""
    return tf.autograph.experimental.do_not_convert(FRONT.or_own(own))


Compression = compressors(
    lambda tensor: (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor, tensor.dtype), tf.cast
)


# --- collectives ------------------------------------------------------------------------------------------------------


def _reduced(
    kind: str, tensors: Sequence[Any], compression: Any, grouped: bool, device: str, name: Any, set_: Any, scales: Any
) -> list[Any]:
    settings = {"op": Op(scales["reduce_op"]), "prescale": scales["prescale_factor"]}
    settings["postscale"] = scales["postscale_factor"]

    def backward(inputs: list[Any], outputs: list[Any], gradients: list[Any]) -> list[Any]:
        if kind == "allreduce":
            return operations.collective(kind, gradients, backward, None, set_, grouped=grouped, **settings)
        factor = settings["prescale"] * settings["postscale"] * (set_.size() if settings["op"] == Sum else 1)
        return [allgather(gradient * factor, process_set=set_) for gradient in gradients]

    with tf.device(device):
        pairs = [compression.compress(tf.convert_to_tensor(each)) for each in tensors]
        inputs = [each for each, _ in pairs]
        results = operations.collective(kind, inputs, backward, name, set_, grouped=grouped, **settings)
        return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


@public
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


@public
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


@public
def allgather(
    tensor: Any, name: str | None = None, process_set: Any = global_process_set, ignore_name_scope: bool = False
) -> Any:
    return operations.collective("allgather", [tensor], _own_rows(process_set), name, process_set)[0]


@public
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    return operations.collective("allgather", tensors, _own_rows(process_set), name, process_set, grouped=True)


def _own_rows(process_set: Any) -> operations.Backward:
    def backward(inputs: list[Any], outputs: list[Any], gradients: list[Any]) -> list[Any]:
        """This rank's rows of the means."""
        results = []
        for source, gradient in zip(inputs, gradients, strict=True):
            mean = allreduce(gradient, op=Average, process_set=process_set)
            counts = tf.reshape(allgather(tf.shape(source)[:1], process_set=process_set), [process_set.size()])
            results.append(tf.split(mean, counts, axis=0)[process_set.rank()])
        return results

    return backward


@public
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    def backward(inputs: list[Any], outputs: list[Any], gradients: list[Any]) -> list[Any]:
        mean = allreduce(gradients[0], op=Average, process_set=process_set)
        return [mean if rank() == root_rank else mean * 0]

    return operations.collective("broadcast", [tensor], backward, name, process_set, root=root_rank)[0]


@public
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Broadcast variables in place, and return their values."""
    for number, each in enumerate(variables):
        label = f"{name or 'broadcast'}.{each.name}.{number}"
        each.assign(broadcast(each, root_rank, label, process_set=process_set))
    return [each.read_value() for each in variables]


@public
def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Broadcast variables in place."""
    for number, each in enumerate(variables):
        each.assign(broadcast(each, root_rank, f"broadcast_variables.{number}", process_set=process_set))


@public
def broadcast_global_variables(root_rank: int) -> NoReturn:
    if tf.executing_eagerly():
        hint = "use hvd.broadcast_variables(<model/optimizer variables>)"
        raise RuntimeError(f"hvd.broadcast_global_variables() does not support eager execution; hint: {hint}")
    raise needs_horovod("hvd.broadcast_global_variables")


@public
def broadcast_object_fn(*arguments: Any, **named: Any) -> NoReturn:
    raise needs_horovod("hvd.broadcast_object_fn")


@public
def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return `root_rank`'s object on all ranks. Collective."""
    return functions.broadcast_object(obj, root_rank, name, process_set)


@public
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective."""
    return functions.allgather_object(obj, name, process_set)


@public
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    def backward(inputs: list[Any], outputs: list[Any], gradients: list[Any]) -> list[Any]:
        return [alltoall(gradients[0], splits=outputs[1], process_set=process_set)[0]]

    given = tf.constant([], tf.int32) if splits is None else splits
    output, received = operations.collective("alltoall", [tensor], backward, name, process_set, splits=given)
    return output if splits is None else (output, received)


@public
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


@public
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


@public
def join() -> Any:
    """This rank has no more batches: take part in the others' allreduces with zeros. Return the rank that joined last.

    Collective: every rank calls it once.
    """
    return tf.constant(job.job().join(), tf.int32)


# --- sizes as operations ----------------------------------------------------------------------------------------------


@public
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    current = job.job()
    if current.elastic is None or tf.executing_eagerly():
        return tf.constant(len(current.sets[process_set_id]), name=name)
    size = tf.numpy_function(lambda: np.int32(len(current.sets[process_set_id])), [], tf.int32)
    size.set_shape([])
    return size


@public
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    return tf.constant(int(job.job().rank in job.job().sets[process_set_id]), name=name)


@public
def local_size_op(name: str | None = None) -> Any:
    return tf.constant(job.job().local_size, name=name)


@public
def rank_op(name: str | None = None) -> Any:
    return tf.constant(job.job().rank, name=name)


@public
def local_rank_op(name: str | None = None) -> Any:
    return tf.constant(job.job().local_rank, name=name)
