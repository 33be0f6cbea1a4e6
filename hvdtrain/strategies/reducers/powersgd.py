"""Low-rank gradients: two thin factors of each matrix are sent in its place, and what they miss is sent later.

A gradient of several dimensions is a matrix M, short side x long side. Each host i adds to its own M_i what earlier
rounds left out of it. With Q from the round before (long side x rank):

    P = sum over hosts of M_i Q       first sum over hosts, together with all that is sent whole
    P made orthonormal                by each host for itself, the same bits on all
    Q_i = M_i^T P, Q = sum of Q_i     second sum
    out = P Q^T                       the approximation of the sum of M_i: its projection on the span of P
    kept by host i: M_i - P Q_i^T     error feedback; summed over hosts exactly what `out` misses

So a round is one step of subspace iteration on the sum, begun where the last one ended (warm start). A round makes two
sums over hosts whatever the number of arrays: of all P with the vectors and with the matrices whose factors would not
be smaller, and of all Q.

Both sums are rounded to `bits` (see `rounded`). Q_i is then what of host i's is in Q, and of what is sent whole each
keeps what is not in the sum; P needs no such care: M_i - P Q_i^T is right whatever it spans. The columns of Q are
scaled to a largest number of 1 before they are used: P spans the same, and has columns of like magnitudes, which share
scales well. ResNet-34 at width 0.25 on digits of 128x128 pixels, 4 hosts, steps 12 to 40: the momentum (0.9) of what
arrives is off by 8.1 % of its norm at rank 2 with 32 bits (147 kB), by 8.2 % with 8 (39 kB), by 10.9 % with 4 (21 kB);
at rank 4 with 4 bits by 6.4 % (38 kB).

The error is that of the host's own share, as in the paper's algorithm, and not M_i - out / h, though both add up to the
same: the latter would also keep how host i differs from the mean inside the span of P, which nobody lacks, but which
grows from round to round as a random walk does and costs digits. When other ranks go on with a run, rank 0 gets the sum
of all errors, and all get the same Q: P and `out` are linear in the M_i, so it does not matter who has what.

Unlike in the paper, small matrices have a higher rank than large ones: see `matrices`.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019
(arXiv:1905.13727).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.strategies.cost import Cost, Shape, elements, two_phases
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.matrices import Cut, payload, plan
from hvdtrain.strategies.reducers.orthonormal import arranged, orthonormalise
from hvdtrain.strategies.reducers.quantize import total, total_bytes
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

SEED = 1905
"""Of the first Q: all hosts draw the same without asking"""


class Matrix(NamedTuple):
    """Views of the reducer's arrays: M (short side x long side), scratch like it, and, transposed (rank x side), P, Q
    and this host's part of Q."""

    cut: Cut
    m: np.ndarray
    term: np.ndarray
    p: np.ndarray
    q: np.ndarray
    mine: np.ndarray


class PowerSGD(Reducer):
    """The sum, projected on a few directions. Its memory: what was left out, one float32 per number, and Q."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        rank: int = bounded(2, least=1, example=4)
        """Rank of the factors that a matrix of mean size is sent as; smaller ones get a higher, larger ones a lower"""
        bits: Literal[32, 8, 4] = 8
        """Of each number sent; 8 or 4: rounded, what is lost goes into the next round"""

    remembers = "error"
    divisible = True
    rung = 1

    def __init__(self, shapes: Sequence[Shape], settings: Any = None, among: Sequence[Shape] | None = None) -> None:
        """`among`: all arrays of the model, if `shapes` are a part of them; the ranks are those that the whole would
        get (see `matrices`)."""
        super().__init__(shapes, settings)
        self._bits = self.settings.bits
        cuts, whole = plan(self.shapes, self.settings.rank, among)
        first, second = payload(cuts, whole)
        self._first, self._second, self._mine = (np.zeros(n, np.float32) for n in (first, second, second))
        """All P and what is sent whole; all Q; this host's part of all Q"""
        self._error = np.zeros(elements(self.shapes), np.float32)
        self._matrices = self._views(cuts)
        self._whole = np.concatenate([np.arange(0), *(np.arange(span.start, span.stop) for span in whole)])
        self._dense = slice(first - self._whole.size, first)
        self._columns = arranged([matrix.p.shape for matrix in self._matrices])
        self._sides = np.array([max(cut.rows, cut.columns) for cut in cuts for _ in range(cut.rank)], int)
        """Length of each column of Q"""
        for matrix in self._matrices:
            matrix.q[:] = random_q(matrix)

    def cut(self, parts: Sequence[range]) -> list[Reducer]:
        return [type(self)([self.shapes[i] for i in part], self.settings, among=self.shapes) for part in parts]

    def _views(self, cuts: Sequence[Cut]) -> list[Matrix]:
        scratch = np.empty(max((cut.rows * cut.columns for cut in cuts), default=0), np.float32)
        matrices, first, second = [], 0, 0
        for cut in cuts:
            short, long = sorted((cut.rows, cut.columns))
            p, q = slice(first, first + cut.rank * short), slice(second, second + cut.rank * long)
            first, second = p.stop, q.stop
            factors = (array.reshape(cut.rank, -1) for array in (self._first[p], self._second[q], self._mine[q]))
            m, term = (
                array.reshape(cut.rows, cut.columns) for array in (self._error[cut.span], scratch[: short * long])
            )
            if cut.rows > cut.columns:
                m, term = m.T, term.T
            matrices.append(Matrix(cut, m, term, *factors))
        return matrices

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        """Work: four products of each matrix with a factor, and what is rounded of the two sums."""
        asked = settings or cls.Settings()
        cuts, whole = plan(shapes, asked.rank)
        sent = payload(cuts, whole)
        sums = [two_phases(numbers, hosts, total_bytes(numbers, hosts, asked.bits)) for numbers in sent if numbers]
        products = 4 * sum(cut.rank * cut.rows * cut.columns for cut in cuts) * (hosts > 1)
        coded = 0 if asked.bits == 32 else sum(each.work for each in sums)
        return Cost(
            sent_bytes=sum(each.sent_bytes for each in sums),
            rounds=sum(each.rounds for each in sums) * (hosts - 1 if asked.bits == 32 else 1),
            work=products + coded,
        )

    @np.errstate(invalid="ignore", over="ignore")  # NaN in, NaN out: the loop stops there, and says why
    def sum_between_hosts(self, values: np.ndarray, hosts: LeaderGroup) -> None:
        self._error += values
        self._multiply()
        included = total(self._first, hosts, self._bits)
        values[self._whole] = self._first[self._dense]
        self._error[self._whole] -= included[self._dense]
        if not self._matrices:
            return
        lost = orthonormalise(self._first, self._columns)
        for matrix in self._matrices:
            np.matmul(matrix.p, matrix.m, out=matrix.q)
        self._mine[:] = total(self._second, hosts, self._bits)
        for matrix in self._matrices:
            unpack(matrix, values[matrix.cut.span])
        for number, column in lost:  # its Q is 0 and would stay so
            self._matrices[number].q[column] = random_q(self._matrices[number])[column]

    def _multiply(self) -> None:
        """This host's part of the first sum."""
        if self._matrices:
            largest = np.maximum.reduceat(np.abs(self._second), np.cumsum(self._sides) - self._sides)
            largest[largest == 0] = 1
            self._second /= np.repeat(largest, self._sides)
        for matrix in self._matrices:
            np.matmul(matrix.q, matrix.m.T, out=matrix.p)
        self._first[self._dense] = self._error[self._whole]

    def state(self) -> dict[str, np.ndarray]:
        return {"error": self._error.copy(), "q": self._second.copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Raises Failure (78) for the state of another rank or model."""
        super().load(state)
        for name, mine in (("error", self._error), ("q", self._second)):
            if state[name].shape != mine.shape:
                raise Failure(
                    f"checkpoint: powersgd's {name} has {state[name].size} numbers, this run's {mine.size}: resume "
                    "with the rank and the model that it was made with",
                    exits.BAD_CONFIG,
                )
            mine[:] = state[name]


def random_q(matrix: Matrix) -> np.ndarray:
    """Uniform, which takes no logarithm: the same bits on every machine."""
    return np.random.default_rng((SEED, matrix.cut.number)).random(matrix.q.shape, np.float32) - np.float32(0.5)


def unpack(matrix: Matrix, out: np.ndarray) -> None:
    """The sum into its span of the vector; of M stays what this host's part of it misses.

    The sum not by matmul, whose last bits depend on the processor: the hosts' may differ.
    """
    cut, m, term, p, q, mine = matrix
    if cut.rank == 1:  # matmul has no fast way for it
        m -= np.multiply(p[0, :, None], mine[0], out=term)
    else:
        m -= np.matmul(p.T, mine, out=term)
    whole = out.reshape(cut.rows, cut.columns)
    whole = whole if cut.rows <= cut.columns else whole.T
    np.multiply(p[0, :, None], q[0], out=whole)
    for row, column in zip(p[1:], q[1:], strict=True):
        whole += np.multiply(row[:, None], column, out=term)
