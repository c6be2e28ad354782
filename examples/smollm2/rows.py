# SPDX-License-Identifier: MIT
"""Arithmetic on rows in which no row can see its neighbours.

tinyllm's attention gives a row the same bits in any batch and with any number of threads. A model
keeps that promise only if everything around attention does, and that is less than plain numpy
offers: a BLAS picks its kernel by the shape of the whole matrix, a vector loop may treat its last
few elements in another way than the rest, and a sum may be taken in an order that depends on the
shape. So here

- a matrix product always has one shape: a **panel** of 96 rows of the weights times a **tile** of
  16 rows of x, transposed. The rows of x are then what a BLAS kernel holds in its registers, and 16
  of them fill those evenly. (Taken the other way round, x times weights, kernels for AVX2 pass over
  the 16 rows as 6, 6 and 4 and sum up each part in another way.) The last tile is filled with zero
  rows; a job is some tiles times one panel, and threads only share out jobs. A layer tries all
  places of a tile when it is made, and if they still differ on some BLAS it gives every row a tile
  of its own: slow, and right;
- a sum over a row is made of additions of whole columns, in an order that the row's length alone
  decides;
- exp is tinyllm's own; all else is +, -, *, / and sqrt, which IEEE 754 rounds correctly, wherever
  an element stands.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt
import tinyllm
from tinyllm.ffi.libtinyllm import f32_ptr, load

Floats = npt.NDArray[np.float32]

TILE: Final = 16  # rows of every matrix product
PANEL: Final = 96  # columns of every matrix product: 96 x 576 floats stay in the cache of a core
_JOB_ROWS: Final = (
    256  # rows of a job: fixed, so that jobs do not depend on the threads that share them
)


class Crew:
    """The threads of a run: a tinyllm pool for attention, and as many Python threads for the matrix
    products.

    A context manager; ``share(jobs, run)`` calls ``run(j)`` once for every j in ``range(jobs)``.
    """

    def __init__(self, threads: int = 0) -> None:
        self.pool = tinyllm.ThreadPool(threads)
        self.threads: int = self.pool.threads
        self._helpers = ThreadPoolExecutor(self.threads - 1) if self.threads > 1 else None

    def share(self, jobs: int, run: Callable[[int], None]) -> None:
        if self._helpers is None or jobs < 2:
            for job in range(jobs):
                run(job)
            return
        bounds = [jobs * i // self.threads for i in range(self.threads + 1)]

        def piece(i: int) -> None:
            for job in range(bounds[i], bounds[i + 1]):
                run(job)

        pending = [self._helpers.submit(piece, i) for i in range(1, self.threads)]
        piece(0)
        for future in pending:
            future.result()

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown()
        self.pool.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def whole_tiles(n: int) -> int:
    """n rows, rounded up to whole tiles."""
    return -(-n // TILE) * TILE


class FixedTileLinear:
    """y = x W^T, each row of y a function of the same row of x alone.

    Made from W [columns, width], which is kept as it is; called with x [n, width], any n.
    """

    def __init__(self, weight: Floats) -> None:
        self.weight = np.ascontiguousarray(weight)
        self.columns, self.width = weight.shape
        self._starts = range(0, self.columns, PANEL)
        ends = {0, self._starts[-1]}  # the last panel may be narrower
        self.places_agree = all(_places_agree(self.weight[start : start + PANEL]) for start in ends)

    def __call__(self, x: Floats, crew: Crew) -> Floats:
        n = len(x)
        step = 1 if self.places_agree else TILE  # from row to row
        rows = whole_tiles(n * step)
        if rows != n or not x.flags.c_contiguous:
            padded = np.zeros((rows, self.width), np.float32)
            padded[: n * step : step] = x
            x = padded
        y = np.empty((rows, self.columns), np.float32)
        groups = -(-rows // _JOB_ROWS)

        def run(job: int) -> None:
            panel, group = divmod(
                job, groups
            )  # a panel's groups follow each other, while it is in the cache
            first = group * _JOB_ROWS
            self._tiles_by_panel(x, y, self._starts[panel], first, min(rows, first + _JOB_ROWS))

        crew.share(len(self._starts) * groups, run)
        return y[: n * step : step]

    def _tiles_by_panel(self, x: Floats, y: Floats, start: int, first: int, end: int) -> None:
        panel = self.weight[start : start + PANEL]
        product = np.empty((len(panel), TILE), np.float32)
        for row in range(first, end, TILE):
            multiply(panel, x[row : row + TILE], product)
            y[row : row + TILE, start : start + PANEL] = product.T


def multiply(panel: Floats, tile: Floats, out: Floats) -> None:
    """out = panel tile^T: the one call of the BLAS."""
    np.matmul(panel, tile.T, out=out)


def _places_agree(panel: Floats) -> bool:
    """Whether a row has the same bits at every place of a tile, among other rows."""
    rng = np.random.default_rng(0)
    row, others = (rng.standard_normal((n, panel.shape[1]), np.float32) for n in (1, TILE))
    seen = set()
    for place in range(TILE):
        tile, product = others.copy(), np.empty((len(panel), TILE), np.float32)
        tile[place] = row
        multiply(panel, tile, product)
        seen.add(product[:, place].tobytes())
    return len(seen) == 1


def row_sums(x: Floats) -> Floats:
    """The sum of each row, [n, 1]: the right half of the columns is added to the left half until
    one is left."""
    width = x.shape[1]
    x = x.copy()
    while width > 1:
        half = (width + 1) // 2
        x[:, : width - half] += x[:, half:width]
        width = half
    return x[:, :1]


def rms_norm(x: Floats, weight: Floats, eps: np.float32) -> Floats:
    """Each row divided by the root of its mean square, then scaled column by column."""
    mean = row_sums(x * x) / np.float32(x.shape[1])
    y: Floats = x / np.sqrt(mean + eps) * weight
    return y


def silu(x: Floats) -> Floats:
    """x / (1 + exp(-x))."""
    e: Floats = np.negative(x, order="C")
    load().tl_exp_f32(f32_ptr(e), f32_ptr(e), e.size)
    e += np.float32(1)
    return np.divide(x, e, out=e)


def rotation_table(positions: int, head_dim: int, base: float) -> tuple[Floats, Floats]:
    """cos and sin of the angle of each position and pair, [positions, head_dim / 2]; made once,
    looked up ever after."""
    rate = base ** (-np.arange(0, head_dim, 2) / head_dim)
    angle = np.arange(positions)[:, None] * rate
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate_pairs(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotary positions for x [n, heads, D]: 2i and 2i + 1 turn together by their row's angle i."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    y = np.empty(x.shape, np.float32)
    y[..., 0::2] = even * cos - odd * sin
    y[..., 1::2] = even * sin + odd * cos
    return y
