"""What all reducers share: one vector of each host becomes the sum over hosts, or nearly.

A reducer that leaves something out keeps it and adds it to a later vector (error feedback), so that over the rounds the
sum of what went in is the sum of what came out. Ranks that go on with the run of others keep to that: what all of those
left out is added up.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hvdtrain.comm.backends.base import Hosts
from hvdtrain.config.constraints import Checked
from hvdtrain.strategies.cost import Cost, Shape


class Reducer(abc.ABC):
    """Runs in the first rank of each host; the ranks of a host are summed before it sees them."""

    Settings: ClassVar[type[Any]] = Checked
    """What may be set of it"""
    remembers: ClassVar[str] = ""
    """What of its state a round leaves out and the next one adds (error feedback), by name; an infinite gradient would
    stay there for ever"""
    divisible: ClassVar[bool] = False
    """Whether a vector may be cut into parts that reducers of their own sum one after the other; not if it chooses what
    to send among all numbers. The arrays of its `state` must then have one dimension and the vector's order"""
    rung: ClassVar[int] = 0
    """See `strategy.Strategy.rung`"""

    def __init__(self, shapes: Sequence[Shape], settings: Any = None) -> None:
        """`shapes`: of the arrays in the vector, one after the other; `settings`: of `Settings`, None: its defaults."""
        self.shapes = [tuple(shape) for shape in shapes]
        self._owes = False
        self.settings = settings or self.Settings()

    def cut(self, parts: Sequence[range]) -> list[Reducer]:
        """A new reducer for each part of the arrays. Of a `divisible` one only."""
        return [type(self)([self.shapes[place] for place in part], self.settings) for part in parts]

    @classmethod
    @abc.abstractmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        """What a round costs one of `hosts` hosts."""

    def sum(self, values: np.ndarray, hosts: Hosts) -> None:
        """Replaces a flat float32 vector by its sum over hosts, or an approximation; the same bits on all hosts.

        A single host leaves nothing out; what was left out when there were more, before a resume, is added at once.
        """
        if hosts.count > 1:
            self.sum_between_hosts(values, hosts)
        elif self._owes:
            values += self.state()[self.remembers]
            self.drop_residual()

    def drop_residual(self) -> None:
        """Forgets what earlier rounds left out: the vectors to come are of another kind."""
        if self.remembers:
            state = self.state()
            self.load(state | {self.remembers: np.zeros_like(state[self.remembers])})
            self._owes = False

    @abc.abstractmethod
    def sum_between_hosts(self, values: np.ndarray, hosts: Hosts) -> None:
        """What `sum` does where there are two hosts or more."""

    def state(self) -> dict[str, np.ndarray]:
        """What this host must have to continue as if never interrupted."""
        return {}

    def handed_on(self, states: Sequence[dict[str, np.ndarray]], first: bool) -> dict[str, np.ndarray]:
        """What a rank goes on with after `states`, those of all ranks when they were others: what they left out is
        added up and the `first` rank has it, so that the sum over ranks stays the same; the rest is the old first's."""
        state = dict(states[0])
        if self.remembers:
            left_out = [each[self.remembers] for each in states]
            state[self.remembers] = np.sum(left_out, axis=0) if first else np.zeros_like(left_out[0])
        return state

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Takes what `state` gave."""
        self._owes = bool(self.remembers)
