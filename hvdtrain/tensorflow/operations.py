"""A stand-in for Horovod's TensorFlow operations (`MPI_LIB`) while hvdtrain's TCP backend carries the calls.

Horovod's Python functions choose names, split sparse tensors, compress and average. They call one C++ operation per
call; the methods here take the same arguments. An eager operation runs at once. In a graph it is a `numpy_function`;
TensorFlow runs these one at a time, in program order. The gradients are Horovod's own functions.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import get_eager_safe_handle_data

from hvdtrain.comm.backends.horovod import internal_error
from hvdtrain.horovod_api.calls import needs_horovod
from hvdtrain.horovod_api.ranks import Job
from hvdtrain.tensorflow.api import mpi_ops

SETTINGS = {"reduce_op": "op", "root_rank": "root", "prescale_factor": "prescale", "postscale_factor": "postscale"}
"""Arguments of `Calls.start` by Horovod's names"""


def _operation(name: str) -> Any:
    """Makes the method `Operations.horovod_NAME`, which takes one tensor, or several if it is grouped."""
    kind, gradient = name.removeprefix("grouped_"), getattr(mpi_ops, f"_{name}_grad")
    grouped, specs = kind != name, _same_shapes if kind in ("allreduce", "broadcast") else _unknown_rows

    def operation(self: Operations, inputs: Any, **attributes: Any) -> Any:
        settings = {ours: attributes[horovods] for horovods, ours in SETTINGS.items() if horovods in attributes}
        call = self._as_function(kind, attributes, grouped=grouped, **settings)
        results = _with_gradient(call, inputs if grouped else [inputs], specs, attributes, gradient)
        return results if grouped else results[0]

    return operation


def _same_shapes(*tensors: Any) -> list[Any]:
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]


def _unknown_rows(*tensors: Any) -> list[Any]:
    """Specs whose number of rows is known only when the call has run."""
    return [
        tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else tensor.shape, tensor.dtype)
        for tensor in tensors
    ]


class Operations:
    """`horovod_<operation>` for the operations that Horovod's functions use.

    Errors between ranks are TensorFlow's FailedPreconditionError, or UnknownError inside a graph. Wrong arguments raise
    InvalidArgumentError.
    """

    def __init__(self, job: Job, real: Any) -> None:
        self._job = job

    # --- collectives --------------------------------------------------------------------------------------------

    horovod_allreduce = _operation("allreduce")
    horovod_grouped_allreduce = _operation("grouped_allreduce")
    horovod_allgather = _operation("allgather")
    horovod_grouped_allgather = _operation("grouped_allgather")
    horovod_broadcast = _operation("broadcast")
    horovod_reducescatter = _operation("reducescatter")
    horovod_grouped_reducescatter = _operation("grouped_reducescatter")

    def horovod_alltoall(self, tensor: Any, *, splits: Any, **attributes: Any) -> Any:
        def call(array: np.ndarray, splits: np.ndarray) -> Sequence[np.ndarray]:
            return self._as_function("alltoall", attributes, splits=splits.tolist() or None)(array)[0]

        def specs(tensor: Any, _: Any) -> list[Any]:
            return [*_unknown_rows(tensor), tf.TensorSpec([None], tf.int32)]

        return _with_gradient(call, [tensor, splits], specs, attributes, mpi_ops._alltoall_grad)

    def horovod_join(self) -> Any:
        raise needs_horovod("hvd.join")

    def horovod_broadcast_inplace_resource(self, handles: Any, *, variable_names: Any, name: Any, **rest: Any) -> Any:
        assignments = []
        for handle, variable in zip(handles, variable_names, strict=True):
            dtype = tf.as_dtype(get_eager_safe_handle_data(handle).shape_and_type[0].dtype)
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            result = self.horovod_broadcast(value, name=f"{name or 'broadcast'}.{variable}", **rest)
            assignments.append(tf.raw_ops.AssignVariableOp(resource=handle, value=result))
        return None if tf.executing_eagerly() else tf.group(*assignments)

    def horovod_broadcast_inplace(self, *_: Any, **__: Any) -> Any:
        raise needs_horovod("hvd.broadcast_ of reference variables (TensorFlow 2's resource variables are supported)")

    def broadcast_variables(self, variables: Sequence[Any], root_rank: int, process_set_id: int) -> None:
        """Broadcasts variables from one rank, unless checksums show that all ranks hold the same bytes. Eager only."""
        arrays, digest = [np.array(variable) for variable in variables], hashlib.sha256()
        for array in arrays:
            digest.update(array.tobytes())
        calls = self._job.calls
        ranks = self._job.sets[process_set_id] if process_set_id else None
        own = np.frombuffer(digest.digest(), np.uint8)[None]
        checksums = calls.call("allgather", own, name="broadcast_variables.checksum", ranks=ranks)
        if (checksums == checksums[0]).all():
            return
        handles = [
            calls.start("broadcast", array, name=f"broadcast_variables.{n}", out=array, root=root_rank, ranks=ranks)
            for n, array in enumerate(arrays)
        ]
        for variable, handle in zip(variables, handles, strict=True):
            variable.assign(calls.finish(handle))

    # --- sizes and ranks ----------------------------------------------------------------------------------------

    def horovod_size(self, process_set_id: int = 0, name: Any = None) -> Any:
        if self._job.elastic is None or tf.executing_eagerly():
            return tf.constant(len(self._job.sets[process_set_id]), name=name)
        size = tf.numpy_function(lambda: np.int32(len(self._job.sets[process_set_id])), [], tf.int32)
        size.set_shape([])
        return size

    def horovod_process_set_included(self, process_set_id: int = 0, name: Any = None) -> Any:
        return tf.constant(int(self._job.rank in self._job.sets[process_set_id]), name=name)

    def horovod_local_size(self, name: Any = None) -> Any:
        return tf.constant(self._job.local_size, name=name)

    def horovod_rank(self, name: Any = None) -> Any:
        return tf.constant(self._job.rank, name=name)

    def horovod_local_rank(self, name: Any = None) -> Any:
        return tf.constant(self._job.local_rank, name=name)

    # ------------------------------------------------------------------------------------------------------------

    def _as_function(
        self, kind: str, attributes: dict[str, Any], *, grouped: bool = False, **settings: Any
    ) -> Callable[..., Sequence[Any]]:
        """The call as a function from arrays to a list of results."""
        name, number = attributes["name"], attributes["process_set_id"]
        ranks = self._job.sets.get(number)
        if ranks is None:
            raise tf.errors.InvalidArgumentError(None, None, f"process set {number} does not exist")

        def call(*arrays: np.ndarray) -> Sequence[Any]:
            if kind == "allreduce" and name:
                self._job.exchanging(name)
            inputs = [np.asarray(array) for array in arrays]  # a graph passes scalars as Python numbers
            result = self._job.calls.call(
                kind, inputs if grouped else inputs[0], name=name, ranks=ranks if number else None, **settings
            )
            return result if grouped else [result]

        return call


for _name, _function in [*vars(Operations).items()]:
    if _name.startswith("horovod_"):  # AutoGraph would take seconds to convert them
        setattr(Operations, _name, tf.autograph.experimental.do_not_convert(_function))


def _with_gradient(
    call: Callable[..., Sequence[Any]],
    tensors: Sequence[Any],
    specs: Callable[..., list[Any]],
    attributes: dict[str, Any],
    gradient: Callable[..., Any],
) -> list[Any]:
    """The results of a call that can be differentiated. `specs` computes the outputs' specs from the inputs."""

    @tf.custom_gradient
    def operation(*inputs: Any) -> Any:
        outputs = _run(call, inputs, specs(*inputs))
        # Horovod's gradient functions read these attributes of an operation.
        op = types.SimpleNamespace(inputs=inputs, outputs=outputs, get_attr=attributes.__getitem__)
        return outputs, lambda *upstream: gradient(op, *upstream)

    return list(operation(*(tf.convert_to_tensor(tensor) for tensor in tensors)))


def _run(call: Callable[..., Sequence[Any]], inputs: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
    """Calls a function of arrays, now or when the graph runs. Returns tensors with these specs."""
    if not tf.executing_eagerly():
        if not tf.compat.v1.get_default_graph().building_function:
            # The ranks' sessions would run the operations in different orders and hang.
            raise needs_horovod("a call of hvd in a session of tf.compat.v1, not in a tf.function,")
        outputs = tf.numpy_function(call, list(inputs), [spec.dtype for spec in specs])
        for output, spec in zip(outputs, specs, strict=True):
            output.set_shape(spec.shape)
        return list(outputs)
    try:
        results = call(*(np.asarray(tensor) for tensor in inputs))
    except internal_error() as error:
        raise tf.errors.FailedPreconditionError(None, None, str(error)) from error
    except (ValueError, TypeError) as error:
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
    return [tf.convert_to_tensor(result) for result in results]
