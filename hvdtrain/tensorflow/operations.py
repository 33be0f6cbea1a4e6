"""Carries out the TCP backend's calls for tensors, eagerly and in graphs.

An eager operation runs at once. In a graph it is a `numpy_function`; TensorFlow runs these one at a time, in program
order.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.comm.backends.horovod import internal_error
from hvdtrain.horovod_api.calls import needs_horovod
from hvdtrain.horovod_api.process_sets import members
from hvdtrain.horovod_api.ranks import job

Backward = Callable[[list[Any], list[Any], list[Any]], list[Any]]
"""From the inputs, the outputs and the gradients of the outputs to the gradients of the inputs"""


def collective(
    kind: str,
    tensors: Sequence[Any],
    backward: Backward,
    name: str | None,
    process_set: Any,
    *,
    grouped: bool = False,
    splits: Any = None,
    **settings: Any,
) -> list[Any]:
    """Return the results of a call of `calls.Calls`, which can be differentiated. With `splits`, also the rows of each.

    Errors between ranks are TensorFlow's FailedPreconditionError, or UnknownError inside a graph. Wrong arguments raise
    InvalidArgumentError. Raises ValueError before `init`.
    """
    current, inputs = job(), [tf.convert_to_tensor(tensor) for tensor in tensors]
    if name is None and not tf.executing_eagerly():
        operation = f"grouped_{kind}" if grouped else kind
        name = f"{operation}_{re.sub('[^a-zA-Z0-9_]', '_', inputs[0].name)}"
    try:
        ranks = members(process_set)
    except ValueError as error:
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from error

    def call(*arrays: np.ndarray) -> Sequence[Any]:
        if kind == "allreduce" and name:
            current.exchanging(name)
        given = [np.asarray(array) for array in arrays]  # a graph passes scalars as Python numbers
        if splits is not None:
            settings["splits"] = given.pop().tolist() or None
        result = current.calls.call(kind, given if grouped else given[0], name=name, ranks=ranks, **settings)
        return result if grouped or splits is not None else [result]

    def specs() -> list[Any]:
        if kind in ("allreduce", "broadcast"):
            return [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
        rows = [  # their number is known only when the call has run
            tf.TensorSpec([None, *each.shape[1:]] if each.shape.rank else each.shape, each.dtype) for each in inputs
        ]
        return rows if splits is None else [*rows, tf.TensorSpec([None], tf.int32)]

    @tf.custom_gradient
    def operation_of(*given: Any) -> Any:
        outputs = _run(call, given, specs())
        count = len(inputs)

        def gradient(*upstream: Any) -> list[Any]:
            return backward(list(given[:count]), outputs, list(upstream)) + [None] * (len(given) - count)

        return outputs, gradient

    return list(operation_of(*inputs, *([] if splits is None else [tf.convert_to_tensor(splits)])))


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


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: Any) -> None:
    """Broadcast variables from one rank, unless checksums show that all ranks hold the same bytes. Eager only."""
    arrays, digest = [np.array(variable) for variable in variables], hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    calls, ranks = job().calls, members(process_set)
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
