"""Low-rank gradients: two thin factors of each matrix are sent instead, and their error is sent later.

A gradient with several dimensions is a matrix M, short side x long side. Each host i adds to its own M_i what earlier
all-reduces left out of it. With Q from the previous all-reduce (long side x rank):

    P = sum over hosts of M_i Q       first sum, together with everything that is sent whole
    P is made orthonormal             by each host for itself, with the same bits on all
    Q_i = M_i^T P, Q = sum of Q_i     second sum
    out = P Q^T                       the sum of the M_i, projected on the span of P
    host i keeps M_i - P Q_i^T        error feedback; over all hosts exactly what `out` misses

So one all-reduce is one step of subspace iteration on the sum, which starts where the previous one ended (warm start).
It makes two sums between hosts, however many arrays there are: one of all P together with vectors and with matrices
whose factors would not be smaller, and one of all Q.

Both sums are rounded to `bits` (see `quantize`). Then Q_i is the part of host i's numbers that Q includes, and each
host also keeps the rounding errors of arrays that are sent whole. Those of P do not matter, because M_i - P Q_i^T is
correct for any span. The columns of Q are scaled to a largest magnitude of 1 before use: P spans the same, and its
columns have similar magnitudes, which share scales well. Measured with ResNet-34 at width 0.25 on digits of 128x128
pixels, 4 hosts. In steps 12 to 40 the relative error of the output's momentum (0.9) is 8.1 % at rank 2 with 32 bits
(147 kB), 8.2 % with 8 bits (39 kB) and 10.9 % with 4 bits (21 kB). At rank 4 with 4 bits it is 6.4 % (38 kB).

As in the paper, each host keeps the error of its own part, not M_i - out / h, although both have the same sum. The
latter would also keep the difference of host i from the mean inside the span of P. That difference is useless, grows
like a random walk and costs digits. After a resume on other ranks, rank 0 gets the sum of all errors, and all get the
same Q: P and `out` are linear in the M_i, so it does not matter which host keeps what.

Unlike in the paper, small matrices have a higher rank than large ones: see `matrices`.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019
(arXiv:1905.13727).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from hvdtrain.comm.arrays import Array, empty, is_numpy, moved, placed_like, same_place, to_host
from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.strategies.cost import Cost, Phase, Shape, elements
from hvdtrain.strategies.reducers import compiled
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.matrices import Cut, payload, plan
from hvdtrain.strategies.reducers.orthonormal import arranged, orthonormalise
from hvdtrain.strategies.reducers.quantize import quantized_sum, sum_phases
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

SEED = 1905
"""Seed of the first Q, so that all hosts draw the same"""


class Matrix(NamedTuple):
    """Views of the reducer's arrays.

    M has shape (short side, long side), `term` is scratch of that shape. P, Q and this host's part of Q are stored
    transposed, with shape (rank, side).
    """

    cut: Cut
    m: Array
    term: Array
    p: Array
    q: Array
    own_q: Array


class PowerSGD(Reducer):
    """The sum, projected on a few directions. Its state is Q and the residual, one float32 per number."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        rank: int = bounded(2, least=1, example=4)
        """Rank of the factors of a matrix of mean size; smaller matrices get a higher rank, larger ones a lower"""
        bits: Literal[32, 8, 4] = 8
        """Bits of each number sent; with 8 or 4, rounding errors are added to the next vector"""

    residual_key = "error"
    takes_tensors = supports_buckets = True

    def __init__(self, shapes: Sequence[Shape], settings: Any = None, among: Sequence[Shape] | None = None) -> None:
        """`among`: the shapes of the whole model, if `shapes` is a bucket of it. The matrices then have the same ranks
        as in the whole model (see `matrices`)."""
        super().__init__(shapes, settings)
        self._bits = self.settings.bits
        cuts, whole = plan(self.shapes, self.settings.rank, among)
        first, second = payload(cuts, whole)
        self._first: Array
        self._second: Array
        self._own_p: Array
        self._own_q: Array
        self._first, self._second, self._own_p, self._own_q = (
            np.zeros(n, np.float32) for n in (first, second, first, second)
        )
        """All P and the arrays sent whole; all Q; this host's parts of both sums"""
        self._error: Array = np.zeros(elements(self.shapes), np.float32)
        self._matrices = self._views(cuts)
        self._whole: Array = np.concatenate([np.arange(0), *(np.arange(span.start, span.stop) for span in whole)])
        self._dense = slice(first - self._whole.size, first)
        self._columns = arranged([matrix.p.shape for matrix in self._matrices])
        self._sides = np.array([max(cut.rows, cut.columns) for cut in cuts for _ in range(cut.rank)], int)
        """Length of each column of all Q"""
        for matrix in self._matrices:
            matrix.q[:] = random_q(matrix)

    def split(self, buckets: Sequence[range]) -> list[Reducer]:
        return [type(self)([self.shapes[i] for i in bucket], self.settings, among=self.shapes) for bucket in buckets]

    def _views(self, cuts: Sequence[Cut]) -> list[Matrix]:
        scratch = empty(max((cut.rows * cut.columns for cut in cuts), default=0), self._error)
        matrices, first, second = [], 0, 0
        for cut in cuts:
            short, long = sorted((cut.rows, cut.columns))
            p, q = slice(first, first + cut.rank * short), slice(second, second + cut.rank * long)
            first, second = p.stop, q.stop
            factors = (array.reshape(cut.rank, -1) for array in (self._first[p], self._second[q], self._own_q[q]))
            m, term = (
                array.reshape(cut.rows, cut.columns) for array in (self._error[cut.span], scratch[: short * long])
            )
            if cut.rows > cut.columns:
                m, term = m.T, term.T
            matrices.append(Matrix(cut, m, term, *factors))
        return matrices

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        (cost,) = cls.bucket_costs(shapes, [range(len(shapes))], hosts, settings)
        return cost

    @classmethod
    def bucket_costs(
        cls, shapes: Sequence[Shape], buckets: Sequence[Sequence[int]], hosts: int, settings: Any
    ) -> list[Cost]:
        """Each of the two sums multiplies every matrix with a factor twice."""
        settings = settings or cls.Settings()
        costs = []
        for bucket in buckets:
            cuts, whole = plan([shapes[index] for index in bucket], settings.rank, among=shapes)
            products = 2 * sum(cut.rank * cut.rows * cut.columns for cut in cuts)
            phases: list[Phase] = []
            for numbers in payload(cuts, whole):
                first, *others = sum_phases(numbers, hosts, settings.bits) or [None]
                if first is not None:
                    phases += [dataclasses.replace(first, numbers=first.numbers + products), *others]
            costs.append(Cost(phases=tuple(phases)))
        return costs

    @np.errstate(invalid="ignore", over="ignore")  # NaN in, NaN out: the training loop then stops and reports it
    def all_reduce(self, values: Array, leaders: LeaderGroup) -> None:
        self._move(values)
        self._error += values
        self._multiply()
        self._own_p[:] = self._first
        quantized_sum(self._own_p, self._first, leaders, self._bits, rest=True)
        values[self._whole] = self._first[self._dense]
        self._error[self._whole] = self._own_p[self._dense]
        if not self._matrices:
            return
        factors = self._first[: self._dense.start]
        dependent = orthonormalise(host := to_host(factors), self._columns)  # as NumPy rounds on every host
        factors[:] = placed_like(host, factors)
        xp = array_namespace(values)
        for matrix in self._matrices:
            xp.matmul(matrix.p, matrix.m, out=matrix.q)
        self._own_q[:] = self._second
        quantized_sum(self._own_q, self._second, leaders, self._bits, rest=False)
        for matrix in self._matrices:
            unpack(matrix, values[matrix.cut.span])
        for number, column in dependent:  # their Q is 0 and would stay 0
            matrix = self._matrices[number]
            matrix.q[column] = placed_like(random_q(matrix)[column], values)

    def _move(self, like: Array) -> None:
        """Keep all arrays where the vector is."""
        if same_place(self._error, like):
            return
        self._first, self._second, self._own_p, self._own_q, self._error, self._whole = (
            moved(each, like)
            for each in (self._first, self._second, self._own_p, self._own_q, self._error, self._whole)
        )
        self._matrices = self._views([matrix.cut for matrix in self._matrices])

    def _multiply(self) -> None:
        """Compute this host's part of the first sum."""
        xp = array_namespace(self._second)
        if self._matrices:
            largest = np.maximum.reduceat(np.abs(to_host(self._second)), np.cumsum(self._sides) - self._sides)
            largest[largest == 0] = 1
            self._second /= placed_like(np.repeat(largest, self._sides), self._second)
        for matrix in self._matrices:
            xp.matmul(matrix.q, matrix.m.T, out=matrix.p)
        self._first[self._dense] = self._error[self._whole]

    def state(self) -> dict[str, np.ndarray]:
        return {"error": to_host(self._error).copy(), "q": to_host(self._second).copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Raises Failure (78) for the state of another model or of another rank setting."""
        super().load(state)
        for name, own in (("error", self._error), ("q", self._second)):
            if state[name].shape != own.shape:
                raise Failure(
                    f"checkpoint: {name} of powersgd has {state[name].size} numbers, this run needs {own.size}; hint: "
                    "resume with the settings and the model of the checkpoint",
                    exits.BAD_CONFIG,
                )
            own[:] = placed_like(state[name], own)


def random_q(matrix: Matrix) -> np.ndarray:
    """Draw a uniform Q. Without a logarithm the bits are the same on every machine."""
    shape = tuple(matrix.q.shape)
    return np.random.default_rng((SEED, matrix.cut.number)).random(shape, np.float32) - np.float32(0.5)


def unpack(matrix: Matrix, out: Array) -> None:
    """Write the sum into its span of the vector, and subtract from M this host's part of the sum.

    The sum is not computed by matmul, because matmul's last bits depend on the processor and hosts may differ.
    """
    cut, m, term, p, q, own_q = matrix
    if not is_numpy(m):  # matmul may round to TF32
        for number in range(cut.rank):
            m.addcmul_(p[number, :, None], own_q[number], value=-1)
    elif cut.rank == 1:  # matmul is slow for it
        m -= np.multiply(p[0, :, None], own_q[0], out=term)
    else:
        m -= np.matmul(p.T, own_q, out=term)
    whole = out.reshape(cut.rows, cut.columns)
    product(p, q, whole if cut.rows <= cut.columns else whole.T, term)


def product(p: Array, q: Array, out: Array, term: Array) -> None:
    """Compute p^T q for shapes (rank, rows) and (rank, columns), with the same bits on all machines.

    The terms are rounded and added one by one, if there are at least two rows and two columns. `term`: scratch.
    """
    if is_numpy(p) and (c := compiled.loops()):
        if not out.flags.c_contiguous:
            p, q, out = q, p, out.T
        c.add_products(p, q, len(p), p.shape[1], q.shape[1], out)
    elif is_numpy(p) and einsum_rounds():  # three times as fast
        np.einsum("ij,ik->jk", p, q, out=out)
    else:
        add_terms(p, q, out, term)


def add_terms(p: Array, q: Array, out: Array, term: Array) -> None:
    out[:] = 0
    for number in range(len(p)):
        out += array_namespace(p).multiply(p[number, :, None], q[number], out=term)


@functools.cache
def einsum_rounds() -> bool:
    """Whether einsum rounds each term before adding it. It does not where it is built with fused multiply-add."""
    p, q = np.random.default_rng(SEED).random((2, 12, 65), np.float32)
    slow, fast, term = np.empty((3, 65, 65), np.float32)
    add_terms(p, q, slow, term)
    np.einsum("ij,ik->jk", p, q, out=fast)
    return np.array_equal(slow, fast)
