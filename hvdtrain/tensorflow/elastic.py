"""`hvd.elastic` for TensorFlow; see `horovod_api.elastic`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.horovod_api.elastic import State
from hvdtrain.horovod_api.elastic import run as run
from hvdtrain.tensorflow import api as horovod
from hvdtrain.tensorflow.broadcasts import broadcast_variables
from hvdtrain.tensorflow.step import tensor


class ObjectState(State):
    """Plain objects."""

    _holders: tuple[str, ...] = ()
    """Names of the values that have variables"""

    def _variables(self, value: Any) -> list[Any]:
        return [tensor(each) for each in getattr(value, "variables", value)]

    def _copy(self, value: Any) -> Any:
        if not any(value is getattr(self, name) for name in self._holders):
            return super()._copy(value)
        exchange = value.exchange_state() if hasattr(value, "exchange_state") else None
        return [variable.numpy() for variable in self._variables(value)], exchange

    def _put(self, name: str, saved: Any) -> None:
        if name not in self._holders:
            super()._put(name, saved)
            return
        value, (arrays, exchange) = getattr(self, name), saved
        for variable, array in zip(self._variables(value), arrays, strict=True):
            variable.assign(array)
        if exchange is not None:
            value.load_exchange_state(exchange)

    def _share(self) -> None:
        variables = [each for name in self._holders for each in self._variables(getattr(self, name))]
        if variables:
            broadcast_variables(variables, root_rank=0)
        own = {name: getattr(self, name) for name in self._names if name not in self._holders}
        for name, value in horovod.broadcast_object(own, root_rank=0, name="elastic").items():
            setattr(self, name, value)


class TensorFlowState(ObjectState):
    """Variables and other values."""

    _holders = ("variables",)

    def __init__(self, variables: Sequence[Any], **values: Any) -> None:
        super().__init__(variables=list(variables), **values)


class TensorFlowKerasState(ObjectState):
    """A Keras model, its optimizer and other values, such as counters."""

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        """`optimizer`: None for the one with which the model was compiled. Raises ValueError if it is not built."""
        if not model.built:
            raise ValueError("the state needs the model's variables; hint: call model.build(input_shape) before")
        optimizer = optimizer or model.optimizer
        self._holders = ("model",) if optimizer is None else ("model", "optimizer")
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **values)
