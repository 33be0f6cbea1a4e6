"""What stands in for Horovod's TensorFlow operations (`MPI_LIB`) while streams carry: the engine does their work.

Horovod's Python functions choose names, take sparse tensors apart, compress and average; below them is one operation
for each call, whose arguments are those of Horovod's C++. Eagerly an operation runs at once; in a graph it is a
`numpy_function`, of which TensorFlow runs one at a time, in the program's order. Gradients are Horovod's own functions.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import mpi_ops
from tensorflow.python.ops.resource_variable_ops import get_eager_safe_handle_data

from hvdtrain.horovod_api.job import Job

SETTINGS = {"reduce_op": "op", "root_rank": "root", "prescale_factor": "prescale", "postscale_factor": "postscale"}
"""Horovod's names of what a call is given, and those of `Calls.start`"""


def _operation(name: str) -> Any:
    """`Operations.horovod_NAME`, of a tensor or, if it is grouped, of several."""
    kind, gradient = name.removeprefix("grouped_"), getattr(mpi_ops, f"_{name}_grad")
    grouped, shapes = kind != name, _same if kind in ("allreduce", "broadcast") else _rows

    def operation(self: Operations, given: Any, **attributes: Any) -> Any:
        settings = {ours: attributes[theirs] for theirs, ours in SETTINGS.items() if theirs in attributes}
        carried = self._carried(kind, attributes, grouped=grouped, **settings)
        found = _with_gradient(carried, given if grouped else [given], shapes, attributes, gradient)
        return found if grouped else found[0]

    return operation


def _same(*tensors: Any) -> list[Any]:
    return [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]


def _rows(*tensors: Any) -> list[Any]:
    """As many rows as there turn out to be."""
    return [
        tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else tensor.shape, tensor.dtype)
        for tensor in tensors
    ]


class Operations:
    """`horovod_<operation>` for what Horovod's functions use. Errors between ranks are TensorFlow's
    FailedPreconditionError, wrong arguments its InvalidArgumentError; from within a graph the former are its
    UnknownError."""

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
        def carried(array: np.ndarray, splits: np.ndarray) -> Sequence[np.ndarray]:
            return self._carried("alltoall", attributes, splits=splits.tolist() or None)(array)[0]

        def shapes(tensor: Any, _: Any) -> list[Any]:
            return [*_rows(tensor), tf.TensorSpec([None], tf.int32)]

        return _with_gradient(carried, [tensor, splits], shapes, attributes, mpi_ops._alltoall_grad)

    def horovod_join(self) -> Any:
        def carried() -> Sequence[Any]:
            return [np.int32(self._job.calls.call("join"))]

        return _run(carried, [], [tf.TensorSpec([], tf.int32)])[0]

    def horovod_broadcast_inplace_resource(self, handles: Any, *, variable_names: Any, name: Any, **rest: Any) -> Any:
        made = []
        for handle, variable in zip(handles, variable_names, strict=True):
            kind = tf.as_dtype(get_eager_safe_handle_data(handle).shape_and_type[0].dtype)
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=kind)
            found = self.horovod_broadcast(value, name=f"{name or 'broadcast'}.{variable}", **rest)
            made.append(tf.raw_ops.AssignVariableOp(resource=handle, value=found))
        return None if tf.executing_eagerly() else tf.group(*made)

    def horovod_broadcast_inplace(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "hvd.broadcast_ of reference variables: on streams give resource variables (TensorFlow 2's), or take "
            "Horovod's own exchange (HVDTRAIN_STRATEGY=allreduce)"
        )

    def broadcast_variables(self, variables: Sequence[Any], root_rank: int, process_set_id: int) -> None:
        """Variables of one rank to all, unless a checksum says that all have the same bytes. Eagerly only."""
        arrays, digest = [np.array(each) for each in variables], hashlib.sha256()
        for array in arrays:
            digest.update(array.tobytes())
        calls, ranks = self._job.calls, self._job.sets[process_set_id]
        of: dict[str, Any] = {"ranks": ranks if process_set_id else None}
        mine = np.frombuffer(digest.digest(), np.uint8)[None]
        every = calls.call("allgather", mine, name="broadcast_variables.checksum", **of)
        if (every == every[0]).all():
            return
        of["root"] = root_rank
        handles = [
            calls.start("broadcast", array, name=f"broadcast_variables.{number}", out=array, **of)
            for number, array in enumerate(arrays)
        ]
        for variable, handle in zip(variables, handles, strict=True):
            variable.assign(calls.finish(handle))

    # --- who is here --------------------------------------------------------------------------------------------

    def horovod_size(self, process_set_id: int = 0, name: Any = None) -> Any:
        return tf.constant(len(self._job.sets[process_set_id]), name=name)

    def horovod_process_set_included(self, process_set_id: int = 0, name: Any = None) -> Any:
        return tf.constant(int(self._job.rank in self._job.sets[process_set_id]), name=name)

    def horovod_local_size(self, name: Any = None) -> Any:
        return tf.constant(self._job.local_size, name=name)

    def horovod_rank(self, name: Any = None) -> Any:
        return tf.constant(self._job.rank, name=name)

    def horovod_local_rank(self, name: Any = None) -> Any:
        return tf.constant(self._job.local_rank, name=name)

    # ------------------------------------------------------------------------------------------------------------

    def _carried(
        self, kind: str, attributes: dict[str, Any], *, grouped: bool = False, **settings: Any
    ) -> Callable[..., Sequence[Any]]:
        """The call as a function of arrays."""
        name, number = attributes["name"], attributes["process_set_id"]
        ranks = self._job.sets.get(number)
        if ranks is None:
            raise tf.errors.InvalidArgumentError(None, None, f"there is no process set {number}")

        def carried(*arrays: np.ndarray) -> Sequence[Any]:
            given = [np.asarray(each) for each in arrays]  # from a graph scalars come as numbers
            found = self._job.calls.call(
                kind, given if grouped else given[0], name=name, ranks=ranks if number else None, **settings
            )
            return found if grouped else [found]

        return carried


for _name, _function in [*vars(Operations).items()]:
    if _name.startswith("horovod_"):  # AutoGraph would take seconds to translate them
        setattr(Operations, _name, tf.autograph.experimental.do_not_convert(_function))


def _with_gradient(
    carried: Callable[..., Sequence[Any]],
    tensors: Sequence[Any],
    shapes: Callable[..., list[Any]],
    attributes: dict[str, Any],
    gradient: Callable[..., Any],
) -> list[Any]:
    """What a call gives, as an operation that can be differentiated. `shapes`: of the inputs those of the outputs."""
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]

    @tf.custom_gradient
    def operation(*inputs: Any) -> Any:
        outputs = _run(carried, inputs, shapes(*inputs))
        # the operation as Horovod's gradient functions look at it
        made = types.SimpleNamespace(inputs=inputs, outputs=outputs, get_attr=attributes.__getitem__)
        return outputs, lambda *upstream: gradient(made, *upstream)

    return list(operation(*given))


def _run(carried: Callable[..., Sequence[Any]], inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """The results of a function of arrays, with these specs."""
    if not tf.executing_eagerly():
        if not tf.compat.v1.get_default_graph().building_function:
            raise NotImplementedError(
                "a session of tf.compat.v1 has an order of operations of its own on each rank and would hang: "
                "call hvd in a tf.function, or take Horovod's own exchange (HVDTRAIN_STRATEGY=allreduce)"
            )
        found = tf.numpy_function(carried, list(inputs), [each.dtype for each in outputs])
        for tensor, each in zip(found, outputs, strict=True):
            tensor.set_shape(each.shape)
        return list(found)
    try:
        results = carried(*(np.asarray(each) for each in inputs))
    except HorovodInternalError as error:
        raise tf.errors.FailedPreconditionError(None, None, str(error)) from error
    except (ValueError, TypeError) as error:
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
    return [tf.convert_to_tensor(each) for each in results]
