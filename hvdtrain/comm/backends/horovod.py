"""Horovod as a backend, over MPI, Gloo or NCCL. Horovod's own optimizer and tape exchange the gradients."""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.backends.framework import FrameworkExchange, TorchStep
from hvdtrain.sentinel.auth import KEY_BYTES
from hvdtrain.system import exits, install
from hvdtrain.system.exits import Failure


class HorovodCommunicator(Communicator, FrameworkExchange):
    def __init__(self, framework: str, *, gpu: bool) -> None:
        """`framework`: torch or tensorflow.

        Raises Failure (69) if Horovod is missing or cannot connect the ranks.
        """
        try:
            if framework == "torch":
                import horovod.torch as hvd
            else:
                import horovod.tensorflow as hvd
        except ImportError as error:
            message = f"{error}; Horovod for {framework} is missing in {sys.prefix}; hint: {install.horovod(framework)}"
            raise Failure(
                f"{message}, or use torchrun with a strategy that needs no Horovod", exits.UNREACHABLE
            ) from error
        hvd.init()
        self._hvd: Any = hvd
        self.in_framework = self
        self.framework = framework
        self._optimizer: Any = None
        self.rank, self.size = hvd.rank(), hvd.size()
        self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()
        on_hosts = "gloo" if hvd.gloo_enabled() else "mpi"
        self.library = "nccl" if gpu and hvd.nccl_built() else on_hosts
        if self.size > 1:
            self.job_key = self.gather_bytes(secrets.token_bytes(KEY_BYTES) if self.rank == 0 else b"")[0]

    def _disconnect(self) -> None:
        self._hvd.shutdown()

    def gather_bytes(self, own: bytes) -> list[bytes]:
        part = np.frombuffer(own, dtype=np.uint8)
        lengths = self._numpy(self._hvd.allgather(self._tensor(np.array([part.size])), name="gather.lengths"))
        joined = self._numpy(self._hvd.allgather(self._tensor(part), name="gather.bytes")).tobytes()
        ends = np.cumsum(lengths)
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        return self._numpy(self._hvd.allreduce(self._tensor(values), op=self._hvd.Sum, name=name))

    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        return self._numpy(self._hvd.broadcast(self._tensor(values), root_rank=0, name=f"broadcast.{name}"))

    def _tensor(self, array: np.ndarray) -> Any:
        if self.framework == "torch":
            import torch

            return torch.from_numpy(np.array(array))
        import tensorflow as tf

        return tf.constant(array)

    @staticmethod
    def _numpy(tensor: Any) -> np.ndarray:
        return np.asarray(tensor.numpy())

    # --- PyTorch ------------------------------------------------------------------------------------------------

    def start_sum(self, tensor: Any, name: str) -> Any:
        return self._hvd.allreduce_async_(tensor, op=self._hvd.Sum, name=name)

    def finish_sum(self, handle: Any) -> Any:
        return self._hvd.synchronize(handle)

    def overlapped(self, model: Any, optimizer: Any, settings: Any) -> TorchStep:
        """Wraps `optimizer` in Horovod's: hooks in backward start the reductions, and `wait` waits for them once."""
        self._optimizer = self._hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), op=self._hvd.Sum
        )
        return HorovodStep(model, self._optimizer)

    def wait(self) -> None:
        if self._optimizer is not None:
            self._optimizer.synchronize()

    # --- TensorFlow ---------------------------------------------------------------------------------------------

    def graph_sum(self, tensor: Any, name: str) -> Any:
        return self._hvd.allreduce(tensor, op=self._hvd.Sum, name=name)

    def summed_gradients(self, tape: Any, loss: Any, weights: list[Any]) -> list[Any]:
        return list(
            self._hvd.DistributedGradientTape(tape, op=self._hvd.Sum, sparse_as_dense=True).gradient(loss, weights)
        )


class HorovodStep(TorchStep):
    def updating(self) -> contextlib.AbstractContextManager[None]:
        return self.optimizer.skip_synchronize()


@functools.cache
def internal_error() -> type[RuntimeError]:
    """Horovod's exception for a failed collective call; a class of the same name if Horovod is not installed."""
    try:
        from horovod.common.exceptions import HorovodInternalError
    except ImportError:

        class HorovodInternalError(RuntimeError):  # type: ignore[no-redef]
            """A collective call failed."""

    return HorovodInternalError
