"""`hvd.elastic` for PyTorch; see `horovod_api.elastic`."""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.horovod_api.elastic import State
from hvdtrain.horovod_api.elastic import run as run
from hvdtrain.torch import api as horovod
from hvdtrain.torch.exchanging import STATE, Exchanging
from hvdtrain.torch.optimizer import broadcast_optimizer_state

LARGE = torch.nn.Module, torch.optim.Optimizer
"""Values of these types are compared before they are sent"""


class ObjectState(State):
    """Plain objects, and objects with `state_dict` and `load_state_dict`."""

    def _copy(self, value: Any) -> Any:
        return copy.deepcopy(_contents(value))

    def _put(self, name: str, saved: Any) -> None:
        value = getattr(self, name)
        if not _is_stateful(value):
            setattr(self, name, saved)
            return
        if isinstance(value, Exchanging):  # this rank's own residual, although ranks have other numbers now
            saved[STATE] |= {"rank": horovod.rank(), "size": horovod.size()}
        value.load_state_dict(saved)

    def _share(self) -> None:
        values = {name: getattr(self, name) for name in self._names}
        for value in values.values():
            if isinstance(value, Exchanging):
                value.share_loaded_state()
        large = {name: value for name, value in values.items() if isinstance(value, LARGE)}
        own = {name: digest(value.state_dict()) for name, value in large.items()}
        ranks = horovod.allgather_object(own, name="elastic.digests")
        for name, value in values.items():
            if name not in large:
                self._put(name, horovod.broadcast_object(_contents(value), root_rank=0, name=f"elastic.{name}"))
            elif len({each[name] for each in ranks}) == 1:
                continue  # equal values need not cross a slow network
            elif isinstance(value, torch.nn.Module):
                horovod.broadcast_parameters(value.state_dict(), root_rank=0)
            else:
                broadcast_optimizer_state(value, root_rank=0)


class TorchState(ObjectState):
    """A model, its optimizer and other values, such as counters, a scheduler or an `ElasticSampler`."""

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **values)


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Shares the samples of an epoch that are left among the present ranks.

    Call `record_batch` after each step and `set_epoch` at the end of each epoch, and pass the sampler to the state. All
    ranks get the same number of samples. If the samples cannot be divided evenly, the first of them come twice.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        """`dataset` keeps its length. `seed` is equal on all ranks."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all samples in another order."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch, which has the same size on all ranks, as done."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share the samples that are left among the present ranks."""
        self.num_replicas, self.rank = horovod.size(), horovod.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(itertools.cycle(self.remaining_indices), self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _contents(value: Any) -> Any:
    return value.state_dict() if _is_stateful(value) else value


def digest(tree: Any) -> str:
    """SHA-256 of nested tensors and objects, without each rank's own state of the exchange."""
    sha256 = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sha256.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                if key != STATE:
                    sha256.update(repr(key).encode())
                    add(each)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            for each in value:
                add(each)
        else:
            sha256.update(pickle.dumps(value))

    add(tree)
    return sha256.hexdigest()
