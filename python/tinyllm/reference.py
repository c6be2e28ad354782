# SPDX-License-Identifier: MIT
"""The arithmetic of libtinyllm, numerics version 2, as runnable numpy: the definition of every bit.

It shares no code with the C library, which must equal it bit for bit on every instruction set. Read
it from top to bottom: one rounding (:func:`fma32`), exp, log and tanh, sixteen lanes, a row of
attention, and then what the library exports.

Words:

- **lane**: one of sixteen float32, whatever the registers of the machine. ``fold`` makes one number
  of them.
- **tile**: sixteen consecutive positions, [16 t, 16 t + 16); **split**: 1024 of them; **stretch**:
  sixteen splits. All are anchored at absolute position 0 and depend on nothing else: no block size,
  batch, thread count or length reaches them.
- **state**: what some positions contribute to a row, unnormalised: the largest score m, the sum L
  of exp(s - m), and a[D], the sum of exp(s - m) * v.

Every operation is one IEEE float32 operation rounded to nearest even, with subnormals kept; a
multiply-add rounds once. Positions a row does not see and lanes past the head width are skipped,
never multiplied by zero.
A NaN result is written as 0x7FC00000.
K and V of eight bits are computed with as the codes they are, and a scale beside each row (see
:func:`absorb_tile`, :func:`store_i8`).
Arrays are float32 unless said otherwise; the exported
functions raise TypeError for another dtype, nothing is cast.

Everything works on many rows at once, in the leading axes: no row ever looks at another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
Scales = tuple[F32 | None, F32 | None]  # of K, of V
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

NUMERICS_VERSION: Final = 2
LANES: Final = 16
TILE: Final = 16
SPLIT: Final = 1024
STRETCH: Final = 16 * SPLIT

NAN: Final = np.uint32(0x7FC00000).view(np.float32)
ZERO: Final = np.float32(0)
E4M3_SHIFT: Final = np.float32(256)  # attention computes with values of e4m3 divided by it
ONE: Final = np.float32(1)
INF: Final = np.float32(np.inf)

# Where a function below ignores floating-point errors, inf - inf and the like are part of the
# arithmetic.


def _hex(text: str) -> np.float32:
    value: np.float32 = np.float32(
        float.fromhex(text)
    )  # each of them is a float32: no rounding happens here
    return value


# exp, log and tanh: the constants of c/src/numerics/coef.h, where the bounds they reach are stated.
EXP_OVERFLOW: Final = _hex("0x1.62e42ep+6")  # the largest x whose e^x rounds to a finite float
EXP_LOWEST: Final = np.float32(-104)  # far below where results become +0
EXP_LOG2E: Final = _hex("0x1.715476p+0")
EXP_LN2_HI: Final = _hex("0x1.62e4p-1")
EXP_LN2_LO: Final = _hex("0x1.7f7d1cp-20")
EXP_C2: Final = _hex("0x1.ffffe6p-2")
EXP_C3: Final = _hex("0x1.5553e2p-3")
EXP_C4: Final = _hex("0x1.555e46p-5")
EXP_C5: Final = _hex("0x1.128b74p-7")
EXP_C6: Final = _hex("0x1.6969eap-10")

LOG_SQRT_HALF: Final = np.uint32(0x3F3504F3).view(np.float32)
LOG_LN2_HI: Final = EXP_LN2_HI
LOG_LN2_LO: Final = EXP_LN2_LO
LOG_C2: Final = _hex("-0x1.fffff8p-2")
LOG_C3: Final = _hex("0x1.55555p-2")
LOG_C4: Final = _hex("-0x1.000438p-2")
LOG_C5: Final = _hex("0x1.99a428p-3")
LOG_C6: Final = _hex("-0x1.542402p-3")
LOG_C7: Final = _hex("0x1.226b2ap-3")
LOG_C8: Final = _hex("-0x1.0f4f0ep-3")
LOG_C9: Final = _hex("0x1.087e6p-3")
LOG_C10: Final = _hex("-0x1.383ebcp-4")

TANH_SMALL: Final = _hex("0x1.4p-1")
TANH_C0: Final = _hex("-0x1.750ce2p-8")  # of the highest power
TANH_C1: Final = _hex("0x1.51f8cep-6")
TANH_C2: Final = _hex("-0x1.b835a4p-5")
TANH_C3: Final = _hex("0x1.1106f6p-3")
TANH_C4: Final = _hex("-0x1.555532p-2")


def require(x: npt.ArrayLike, dtype: type[np.generic], name: str) -> Array:
    """``x`` as an array of exactly ``dtype``, or TypeError."""
    array = np.asarray(x)
    if array.dtype != dtype:
        raise TypeError(f"{name}: expected {np.dtype(dtype)}, got {array.dtype}")
    return array


def canonical(x: F32) -> F32:
    """The same values with every NaN written as 0x7FC00000."""
    return np.where(np.isnan(x), NAN, x)


# --- one rounding
# -------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def fma32(a: F32 | np.float32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """a * b + c with one rounding to float32, elementwise with broadcasting.

    The product of two float32 is exact in float64. Adding c may not be, but the error of that
    addition is a float64 itself (TwoSum), so the sum can be rounded to odd: cut towards zero, with
    the last bit set where anything was cut. Rounding that once more, to float32, gives what
    rounding the exact sum would: the last bit keeps it off every tie that is not one, and float64
    has more than the two spare bits this takes.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, dtype=np.float64)
    total = np.asarray(product + addend)
    part = total - product
    error = (product - (total - part)) + (
        addend - part
    )  # product + addend == total + error, exactly

    inexact = np.isfinite(total) & (error != 0)  # an infinity or NaN is already the result
    rounded_away = inexact & ((error < 0) != (total < 0))
    bits = total.view(np.int64)
    odd = np.where(inexact, (bits - rounded_away) | 1, bits)
    return odd.view(np.float64).astype(np.float32)


def maximum(x: F32, y: F32) -> F32:
    """The larger of two, NaN if either is; the first where they are equal (+0 and -0 are)."""
    return np.where(np.isnan(x) | (y <= x), x, y)


# --- exp, log and tanh
# --------------------------------------------------------------------------------------


def _polynomial(x: F32, *coefficients: np.float32) -> F32:
    """Horner's scheme by fma; the coefficient of the highest power comes first."""
    p = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = fma32(p, x, c)
    return p


@np.errstate(all="ignore")
def exp32(x: F32) -> F32:
    """e^x = 2^k * e^r with k = x * log2(e) rounded to an integer, ties to even, r the rest.

    +inf above EXP_OVERFLOW; +0 wherever p * 2^k < 2^-126, p being the rounded polynomial; 1 at both
    zeros; NaN at NaN.
    """
    y = np.where((x >= EXP_LOWEST) & (x <= EXP_OVERFLOW), x, ZERO)
    k = np.rint(np.multiply(y, EXP_LOG2E, dtype=np.float64))  # the product is exact: one rounding
    n = k.astype(np.float32)
    r = fma32(n, -EXP_LN2_HI, y)
    r = fma32(n, -EXP_LN2_LO, r)
    p = _polynomial(r, EXP_C6, EXP_C5, EXP_C4, EXP_C3, EXP_C2, ONE, ONE)
    scaled = np.ldexp(
        p.astype(np.float64), k.astype(np.int32)
    )  # exact, and a float32 unless below 2^-126
    result = np.where(scaled < 2.0**-126, ZERO, scaled.astype(np.float32))

    result = np.where(x < EXP_LOWEST, ZERO, result)
    result = np.where(x > EXP_OVERFLOW, INF, result)
    return np.where(np.isnan(x), NAN, result)


@np.errstate(all="ignore")
def log32(x: F32) -> F32:
    """The natural logarithm: x = 2^e * f with f in [sqrt(1/2), sqrt(2)), log x = e * ln 2 + log f.

    -inf at both zeros, +inf at +inf, NaN below zero and at NaN. (A row's L is never below 1, unless
    it is 0.)
    """
    ordinary = (x > 0) & (x < INF)
    y = np.where(ordinary, x, ONE)
    f, e = np.frexp(y)  # f in [1/2, 1), exact
    low = f < LOG_SQRT_HALF
    g = np.where(low, f + f, f) - ONE  # exact
    n = (e - low).astype(np.float32)
    p = _polynomial(g, LOG_C10, LOG_C9, LOG_C8, LOG_C7, LOG_C6, LOG_C5, LOG_C4, LOG_C3, LOG_C2)
    s = (g * g) * p
    s = fma32(n, LOG_LN2_LO, s)
    s = g + s
    result = fma32(n, LOG_LN2_HI, s)

    result = np.where(x == 0, -INF, result)
    result = np.where(x == INF, INF, result)
    return np.where(np.isnan(x) | (x < 0), NAN, result)


@np.errstate(all="ignore")
def tanh32(x: F32) -> F32:
    """The hyperbolic tangent: an odd polynomial below TANH_SMALL, from there on 1 - 2 / (e^2a + 1),
    a = |x|.

    The sign is that of x, zeros included; 1 for large x and +inf; NaN at NaN.
    """
    a = np.abs(x)
    z = a * a
    p = _polynomial(z, TANH_C0, TANH_C1, TANH_C2, TANH_C3, TANH_C4)
    small = fma32(a, p * z, a)
    large = ONE - np.float32(2) / (exp32(a + a) + ONE)
    return np.where(np.isnan(x), NAN, np.copysign(np.where(a < TANH_SMALL, small, large), x))


# --- sixteen lanes
# ------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def fold(lanes: F32) -> F32:
    """[..., 16] to [...], by halves: lane i + lane i+8, then i + i+4, i + i+2, i + i+1."""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def dot(a: F32, b: F32) -> F32:
    """[..., D] twice to [...]: lane i sums a[d] * b[d], d = i, i+16, ..., by fma from +0; fold."""
    width = a.shape[-1]
    lanes = np.zeros((*np.broadcast_shapes(a.shape[:-1], b.shape[:-1]), LANES), np.float32)
    for d in range(0, width, LANES):
        n = min(LANES, width - d)
        lanes[..., :n] = fma32(a[..., d : d + n], b[..., d : d + n], lanes[..., :n])
    return fold(lanes)


@np.errstate(all="ignore")
def scores(q: F32, k: F32, scale: np.float32, k_scale: F32 | None = None) -> F32:
    """Rows q [R, D] against keys k [n, D]: scale * dot, [R, n]; of keys that have scales [n]:
    scale * (k_scale * dot), rounded twice."""
    s: F32 = dot(q[:, None, :], k[None, :, :])
    if k_scale is not None:
        s = k_scale * s
    s = scale * s
    return s


@np.errstate(all="ignore")
def soft_cap(s: F32, cap: np.float32) -> F32:
    """cap * tanh(s / cap): scores that stay within -cap .. cap."""
    capped: F32 = cap * tanh32(np.divide(s, cap, dtype=np.float32))
    return capped


@np.errstate(all="ignore")
def add_alibi(s: F32, slope: F32, position: I64, j: I64) -> F32:
    """s + slope * (j - position): scores s [R, n] of rows at ``position`` [R] with keys at j [n] of
    one tile.

    The distance is that of the tile's first position, rounded to float32, plus the key's place in
    the tile.
    """
    first = j[0] - j[0] % TILE
    to_tile = (first - position).astype(np.float32)
    distance = to_tile[:, None] + (j - first).astype(np.float32)
    return fma32(slope[:, None], distance, s)


# --- a row of attention
# -------------------------------------------------------------------------------------


@dataclass
class Running:
    """A split in the making, for R rows: m [R], sums of exp(s - m) [R, 16], a [R, D]."""

    m: F32
    lanes: F32
    a: F32

    @classmethod
    def empty(cls, rows: int, width: int) -> Running:
        lanes, a = np.zeros((rows, LANES), np.float32), np.zeros((rows, width), np.float32)
        return cls(np.full(rows, -INF), lanes, a)


@dataclass
class State:
    """A finished split, or several merged, for R rows: m [R], L [R], a [R, D].

    m = -inf: nothing was seen.
    """

    m: F32
    L: F32
    a: F32

    @classmethod
    def empty(cls, rows: int, width: int) -> State:
        return cls(
            np.full(rows, -INF), np.zeros(rows, np.float32), np.zeros((rows, width), np.float32)
        )


@np.errstate(all="ignore")
def absorb_tile(run: Running, s: F32, seen: Bool, v: F32, v_scale: F32 | None = None) -> None:
    """Take in n positions of one tile: scores s [R, n], who sees what [R, n], values v [n, D].

    Where values have scales [n], what multiplies them is exp(s - m) * v_scale, rounded once.
    """
    columns = range(s.shape[1])
    m = run.m
    for j in columns:
        m = np.where(seen[:, j], maximum(m, s[:, j]), m)
    seen = (
        seen & (m != -INF)[:, None]
    )  # nothing but -inf so far: the tile leaves the state as it is

    rises = (m > run.m) | np.isnan(m)
    alpha = exp32(run.m - m)[:, None]
    run.lanes = np.where(rises[:, None], run.lanes * alpha, run.lanes)
    run.a = np.where(rises[:, None], run.a * alpha, run.a)
    run.m = m

    p = exp32(s - m[:, None])
    weight = p if v_scale is None else p * v_scale
    for j in columns:
        sees = seen[:, j]
        run.lanes[:, j] = np.where(sees, run.lanes[:, j] + p[:, j], run.lanes[:, j])
        run.a = np.where(sees[:, None], fma32(weight[:, j, None], v[j], run.a), run.a)


@np.errstate(all="ignore")
def merge(x: State, y: State) -> State:
    """Two states of the same rows, x of earlier positions; one that saw nothing gives the other."""
    m = maximum(x.m, y.m)
    alpha_x, alpha_y = exp32(x.m - m), exp32(y.m - m)
    total = fma32(alpha_x, x.L, alpha_y * y.L)
    a = fma32(alpha_x[:, None], x.a, alpha_y[:, None] * y.a)
    return choose(x.m == -INF, y, choose(y.m == -INF, x, State(m, total, a)))


def choose(row: Bool, yes: State, no: State) -> State:
    """Row by row, one state or the other."""
    return State(
        np.where(row, yes.m, no.m), np.where(row, yes.L, no.L), np.where(row[:, None], yes.a, no.a)
    )


@np.errstate(all="ignore")
def add_sink(state: State, sink: F32) -> State:
    """One more logit per row, sink [R], in the denominator, without a value: after the last merge.

    -inf is no sink; NaN or +inf makes the row NaN, even one that sees no key.
    """
    m = maximum(state.m, sink)
    alpha = exp32(state.m - m)
    total = fma32(alpha, state.L, exp32(sink - m))
    a = np.where((m > state.m)[:, None], alpha[:, None] * state.a, state.a)

    alone = State(sink, np.ones_like(sink), np.zeros_like(state.a))
    result = choose(state.m == -INF, alone, State(m, total, a))
    result.L = np.where(np.isnan(sink) | (sink == INF), NAN, result.L)
    return choose(sink == -INF, state, result)


@np.errstate(all="ignore")
def finish(state: State) -> tuple[F32, F32]:
    """(out [R, D], lse [R]): a * (1 / L), one division, and m + log L; +0 and -inf without keys."""
    none = state.L == 0
    r = ONE / state.L
    out = np.where(none[:, None], ZERO, state.a * r[:, None])
    lse = np.where(none, -INF, state.m + log32(state.L))
    return canonical(out), canonical(lse)


ScoreTile = Callable[[int, int], F32]
"""``score_tile(j, end)``: the scores [R, end - j] of R rows with positions j .. end - 1 of a tile.
What it says of positions a row does not see is ignored."""


def attend(score_tile: ScoreTile, v: F32, low: I64, high: I64, v_scale: F32 | None = None) -> State:
    """R rows over one KV head: row i sees positions low[i] .. high[i] - 1; v [n, D], v[j] at j, and
    v_scale [n] where values have scales.

    The states of stretches, merged left to right.
    """
    state = State.empty(len(low), v.shape[1])
    for stretch in _pieces(low, high, STRETCH):
        state = merge(state, stretch_state(score_tile, v, low, high, stretch, v_scale))
    return state


def stretch_state(
    score_tile: ScoreTile, v: F32, low: I64, high: I64, first: int, v_scale: F32 | None = None
) -> State:
    """What positions first .. first + STRETCH - 1 leave: split states, merged left to right."""
    low, high = np.maximum(low, first), np.minimum(high, first + STRETCH)
    state = State.empty(len(low), v.shape[1])
    for split in _pieces(low, high, SPLIT):
        state = merge(state, split_state(score_tile, v, low, high, split, v_scale))
    return state


def split_state(
    score_tile: ScoreTile, v: F32, low: I64, high: I64, first: int, v_scale: F32 | None = None
) -> State:
    """What positions first .. first + SPLIT - 1 leave: tiles in rising order."""
    low, high = np.maximum(low, first), np.minimum(high, first + SPLIT)
    run = Running.empty(len(low), v.shape[1])
    for tile in _pieces(low, high, TILE):
        end = min(tile + TILE, int(high.max()))
        j = np.arange(tile, end)
        seen = (j >= low[:, None]) & (j < high[:, None])
        scale = None if v_scale is None else v_scale[tile:end]
        absorb_tile(run, score_tile(tile, end), seen, v[tile:end], scale)
    return State(run.m, fold(run.lanes), run.a)


def _pieces(low: I64, high: I64, span: int) -> range:
    """Where pieces of ``span`` positions begin, from the first to the last that any row sees."""
    some = low < high
    if not some.any():
        return range(0)
    first, last = int(low[some].min()), int(high[some].max())
    return range(first - first % span, last, span)


def visible(position: int, n_keys: int, causal: bool, window: int) -> tuple[int, int]:
    """The keys low .. high - 1 that a row at ``position`` sees, which the window counts too."""
    low = max(0, position - window + 1) if window > 0 else 0
    high = min(position + 1, n_keys) if causal else n_keys
    return min(low, n_keys), high


# --- attention, as exported
# ---------------------------------------------------------------------------------


@dataclass
class Rows:
    """R rows of any heads that read the same KV head: q [R, D], what each sees, a sink logit each
    or none.

    slope: what alibi multiplies the distance to a key by, each or none; ``position`` is where the
    rows stand.
    """

    q: F32
    low: I64
    high: I64
    sink: F32 | None = None
    slope: F32 | None = None
    position: I64 | None = None

    def scored(
        self, k: F32, scale: float, softcap: float = 0.0, k_scale: F32 | None = None
    ) -> ScoreTile:
        """How these rows score keys [n, D], with scales [n] or none; both numbers are rounded to
        float32."""
        cap = np.float32(softcap)

        def score_tile(j: int, end: int) -> F32:
            own = None if k_scale is None else k_scale[j:end]
            s = scores(self.q, k[j:end], np.float32(scale), own)
            if cap > 0:
                s = soft_cap(s, cap)
            if self.slope is not None and self.position is not None:
                s = add_alibi(s, self.slope, self.position, np.arange(j, end))
            return s

        return score_tile

    def over(
        self,
        k: F32,
        v: F32,
        scale: float,
        softcap: float = 0.0,
        scales: Scales = (None, None),
    ) -> tuple[F32, F32]:
        """(out [R, Dv], lse [R]) over keys [n, D] and values [n, Dv], each with scales [n] or
        none."""
        k_scale, v_scale = scales
        score_tile = self.scored(k, scale, softcap, k_scale)
        state = attend(score_tile, v, self.low, self.high, v_scale)
        return finish(state if self.sink is None else add_sink(state, self.sink))


def widened(stored: Array) -> F32:
    """What attention computes with, as float32: the values of float16, of float32, and of bfloat16
    as its codes in uint16; of int8 the integers that its codes are; of e4m3, in uint8, its values
    times 2^-8, which a shift of bits into float16 gives."""
    if stored.dtype == np.float16:
        return f16_to_f32(stored.view(np.uint16))
    if stored.dtype == np.uint16:
        return bf16_to_f32(stored)
    if stored.dtype == np.int8:
        return stored.astype(np.float32)
    if stored.dtype == np.uint8:
        value: F32 = e4m3_to_f32(stored) / E4M3_SHIFT  # exact
        return value
    return require(stored, np.float32, "k, v")


@np.errstate(all="ignore")
def widened_scale(scale: F32, stored: Array) -> F32:
    """The scale of what ``widened`` gives: that of the values, times 2^8 where they are e4m3."""
    return E4M3_SHIFT * scale if stored.dtype == np.uint8 else scale


def per_head(values: F32 | None, heads: int, name: str) -> F32 | None:
    """float32 [H] or None, or ValueError."""
    if values is not None and require(values, np.float32, name).shape != (heads,):
        raise ValueError(f"{name}: expected shape ({heads},), got {values.shape}")
    return values


def require_scales(stored: Array, scale: F32 | None, name: str) -> F32 | None:
    """The scales of blocks [n_blocks, Hkv, b, D] as float32 [n_blocks, Hkv, b], None where they
    have none; or ValueError, TypeError."""
    if (stored.dtype in (np.int8, np.uint8)) != (scale is not None):
        raise ValueError(
            f"{name}: {'given for' if scale is not None else 'none of'} {stored.dtype}"
        )
    if scale is None:
        return None
    return np.broadcast_to(require(scale, np.float32, name), stored.shape[:3])


@dataclass
class Step:
    """The arguments of a paged call, checked: see :func:`paged_attn`, :func:`paged_attn_states`.

    Walking it gives the rows of each sequence and KV head, with the K and V that they see.
    """

    q: F32
    k_blocks: Array
    v_blocks: Array
    block_tables: npt.NDArray[np.integer[Any]]
    ctx_lens: npt.NDArray[np.integer[Any]]
    cu_seqlens_q: npt.NDArray[np.integer[Any]] | None
    window: int
    alibi_slopes: F32 | None
    sink_logits: F32 | None = None
    first_block: int = 0
    within: tuple[int, int] | None = None  # positions that are looked at; None: all
    scales: Scales = (None, None)

    def __post_init__(self) -> None:
        q, k, v = require(self.q, np.float32, "q"), self.k_blocks, self.v_blocks
        heads, kv_heads = q.shape[1], k.shape[1]
        if q.shape[2] != k.shape[3] or v.shape[:3] != k.shape[:3] or heads % kv_heads:
            raise ValueError(f"shapes disagree: q {q.shape}, k {k.shape}, v {v.shape}")
        per_head(self.sink_logits, heads, "sink_logits")
        per_head(self.alibi_slopes, heads, "alibi_slopes")
        self.scales = (
            require_scales(k, self.scales[0], "k_scale"),
            require_scales(v, self.scales[1], "v_scale"),
        )
        batch, given = len(self.ctx_lens), self.cu_seqlens_q
        starts = np.arange(batch + 1) if given is None else np.asarray(given, np.int64)
        ends_right = len(starts) == batch + 1 and starts[0] == 0 and starts[-1] == len(q)
        if not ends_right or (np.diff(starts) < 0).any():
            raise ValueError(f"cu_seqlens_q: {starts} for {batch} sequences and {len(q)} rows")
        self.starts = starts

    def __iter__(self) -> Iterator[tuple[slice, slice, Rows, F32, F32, Scales]]:
        """(rows, heads, the rows one by one and each head by head, k [n, Dk], v [n, Dv], their
        scales [n] or none)."""
        kv_heads, group = self.k_blocks.shape[1], self.q.shape[1] // self.k_blocks.shape[1]
        for s in range(len(self.ctx_lens)):
            rows = slice(int(self.starts[s]), int(self.starts[s + 1]))
            n_rows, n = rows.stop - rows.start, int(self.ctx_lens[s])
            if n < n_rows or (self.cu_seqlens_q is None and n < 1):
                raise ValueError(f"sequence {s}: {n_rows} rows of {n} positions")
            if n_rows == 0:
                continue
            position = np.arange(n - n_rows, n)
            low, high = np.array([visible(int(p), n, True, self.window) for p in position]).T
            k, v, (k_scale, v_scale) = self._gathered(s, int(low[0]), n)
            for g in range(kv_heads):
                own = slice(g * group, (g + 1) * group)
                sinks, slopes = (
                    None if a is None else np.tile(a[own], n_rows)
                    for a in (self.sink_logits, self.alibi_slopes)
                )
                q = self.q[rows, own].reshape(n_rows * group, -1)
                low_each, high_each, position_each = (
                    np.repeat(a, group) for a in (low, high, position)
                )
                tall = Rows(q, low_each, high_each, sinks, slopes, position_each)
                scales = (
                    None if k_scale is None else k_scale[:, g],
                    None if v_scale is None else v_scale[:, g],
                )
                yield rows, own, tall, k[:, g], v[:, g], scales

    def _gathered(self, s: int, low: int, high: int) -> tuple[F32, F32, Scales]:
        """K and V of sequence s by position, and their scales; what is not looked at stays 0."""
        n_blocks, kv_heads, b, width = self.k_blocks.shape
        table = np.asarray(self.block_tables[s])
        begin, end = (0, high) if self.within is None else self.within
        held = np.arange(max(low, begin), min(high, end))
        entry = held // b - self.first_block
        if len(held) and (entry[0] < 0 or entry[-1] >= len(table)):
            raise ValueError(
                f"sequence {s}: positions {held[0]} to {held[-1]} in {len(table)} blocks of {b} "
                f"from block {self.first_block} on"
            )
        block, slot = table[entry].astype(np.int64), held % b
        if not ((block >= 0) & (block < n_blocks)).all():
            raise ValueError(f"sequence {s}: blocks {np.unique(block)} of {n_blocks}")
        k = np.zeros((high, kv_heads, width), np.float32)
        v = np.zeros((high, kv_heads, self.v_blocks.shape[3]), np.float32)
        k[held] = widened(self.k_blocks[block, :, slot])
        v[held] = widened(self.v_blocks[block, :, slot])
        scales: list[F32 | None] = [None, None]
        for side, (stored, given) in enumerate(
            zip((self.k_blocks, self.v_blocks), self.scales, strict=True)
        ):
            if given is not None:
                own = np.zeros((high, kv_heads), np.float32)
                own[held] = widened_scale(given[block, :, slot], stored)
                scales[side] = own
        return k, v, (scales[0], scales[1])


def paged_attn(
    q: F32,
    k_blocks: Array,
    v_blocks: Array,
    block_tables: npt.NDArray[np.integer[Any]],
    ctx_lens: npt.NDArray[np.integer[Any]],
    *,
    scale: float,
    cu_seqlens_q: npt.NDArray[np.integer[Any]] | None = None,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: F32 | None = None,
    sink_logits: F32 | None = None,
    k_scale: F32 | None = None,
    v_scale: F32 | None = None,
) -> tuple[F32, F32]:
    """``tl_paged_attn_f32``: (out [total_q, H, Dv], lse [total_q, H]), float32.

    q: float32 [total_q, H, Dk]. k_blocks [n_blocks, Hkv, b, Dk] and v_blocks [n_blocks, Hkv, b,
    Dv]: float16, float32, bfloat16 as uint16, int8, or e4m3 as uint8. block_tables: integers
    [B, n]. ctx_lens: integers [B].
    k_scale, v_scale: of int8 and e4m3, float32 that broadcasts to [n_blocks, Hkv, b].
    cu_seqlens_q: integers [B + 1]; None is a row each. Row i of a sequence stands at ctx_len -
    q_len + i.
    Only table entries that hold a visible position are looked at. ValueError: shapes that disagree,
    a context or needed entry out of range.
    """
    step = Step(
        q, k_blocks, v_blocks, block_tables, ctx_lens, cu_seqlens_q, window, alibi_slopes,
        sink_logits, scales=(k_scale, v_scale),
    )  # fmt: skip
    out = np.empty((*q.shape[:2], v_blocks.shape[3]), np.float32)
    lse = np.empty(q.shape[:2], np.float32)
    for rows, own, tall, k, v, scales in step:
        out_rows, lse_rows = tall.over(k, v, scale, softcap, scales)
        out[rows, own] = out_rows.reshape(out[rows, own].shape)
        lse[rows, own] = lse_rows.reshape(lse[rows, own].shape)
    return out, lse


def paged_attn_states(
    q: F32,
    k_blocks: Array,
    v_blocks: Array,
    block_tables: npt.NDArray[np.integer[Any]],
    ctx_lens: npt.NDArray[np.integer[Any]],
    first_split: int,
    n_splits: int,
    *,
    scale: float,
    cu_seqlens_q: npt.NDArray[np.integer[Any]] | None = None,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: F32 | None = None,
    state_span: int = SPLIT,
    first_block: int = 0,
    k_scale: F32 | None = None,
    v_scale: F32 | None = None,
) -> F32:
    """``tl_paged_attn_states_f32``: what splits first_split .. first_split + n_splits - 1 leave.

    float32 [total_q, H, n, 2 + Dv] of (m, L, a), in order: a state for each split, or for each
    stretch, of which first_split and n_splits are then a whole number. Nothing seen is (-inf, 0,
    0). Arguments as :func:`paged_attn`'s; block_tables[s][i] holds block first_block + i of a
    sequence, and only entries that hold a visible position of those splits are looked at.
    ValueError also: a span that is neither, splits that are no stretches.
    """
    per_state = require_span(state_span) // SPLIT
    if first_split < 0 or n_splits < 1 or first_split % per_state or n_splits % per_state:
        raise ValueError(f"splits {first_split}, {n_splits} of them, states of {per_state}")
    begin, end = first_split * SPLIT, (first_split + n_splits) * SPLIT
    step = Step(
        q, k_blocks, v_blocks, block_tables, ctx_lens, cu_seqlens_q, window, alibi_slopes,
        first_block=first_block, within=(begin, end), scales=(k_scale, v_scale),
    )  # fmt: skip
    of_piece = split_state if per_state == 1 else stretch_state
    width = 2 + v_blocks.shape[3]
    states = np.empty((*q.shape[:2], n_splits // per_state, width), np.float32)
    for rows, own, tall, k, v, (k_each, v_each) in step:
        score_tile = tall.scored(k, scale, softcap, k_each)
        for i, first in enumerate(range(begin, end, state_span)):
            x = of_piece(score_tile, v, tall.low, tall.high, first, v_each)
            packed = np.concatenate([x.m[:, None], x.L[:, None], x.a], axis=1)
            states[rows, own, i] = packed.reshape(states[rows, own, i].shape)
    return states


def attn_merge(
    parts: Sequence[tuple[F32, int, int]], *, sink_logits: F32 | None = None
) -> tuple[F32, F32]:
    """``tl_attn_merge_f32``: (out [total_q, H, D], lse [total_q, H]) from parts of states.

    parts: (states float32 [total_q, H, n, 2 + D], first_split, span) in rising order, each of
    states of SPLIT or of STRETCH positions, that together hold every split from 0 on once.
    ValueError: a gap, an overlap, another span, stretches that do not begin at a multiple of
    sixteen splits.
    """
    total_q, heads, _, width = parts[0][0].shape
    whole = State.empty(total_q * heads, width - 2)
    stretch, at = whole, 0  # the stretch in the making; the split that comes next
    for states, first_split, span in parts:
        per_state = require_span(span) // SPLIT
        if first_split != at or at % per_state:
            raise ValueError(f"states of {per_state} splits from {first_split} on, behind {at}")
        for i in range(require(states, np.float32, "states").shape[2]):
            x = states[:, :, i].reshape(-1, width)
            stretch = merge(stretch, State(x[:, 0], x[:, 1], x[:, 2:]))
            at += per_state
            if at % (STRETCH // SPLIT) == 0:
                whole, stretch = merge(whole, stretch), State.empty(len(x), width - 2)
    whole = merge(whole, stretch)
    sinks = per_head(sink_logits, heads, "sink_logits")
    if sinks is not None:
        whole = add_sink(whole, np.tile(sinks, total_q))
    out, lse = finish(whole)
    return out.reshape(total_q, heads, -1), lse.reshape(total_q, heads)


def require_span(span: int) -> int:
    """SPLIT or STRETCH, or ValueError."""
    if span not in (SPLIT, STRETCH):
        raise ValueError(f"states of {span} positions: neither of {SPLIT} nor of {STRETCH}")
    return span


def paged_attn_decode(
    q: F32,
    k_blocks: F16,
    v_blocks: F16,
    block_tables: npt.NDArray[np.integer[Any]],
    ctx_lens: npt.NDArray[np.integer[Any]],
    *,
    scale: float,
    window: int = 0,
) -> F32:
    """``tl_paged_attn_decode_f32`` on one layer: out, float32 [B, H, D].

    q: float32 [B, H, D]; k_blocks, v_blocks: float16 [n_blocks, Hkv, b, D]; block_tables: integers
    [B, max_blocks]; ctx_lens: integers [B], the newest position included. Only table entries that
    hold a visible position are looked at. ValueError: shapes that disagree, a context or needed
    entry out of range.
    """
    require(k_blocks, np.float16, "k_blocks")
    require(v_blocks, np.float16, "v_blocks")
    if v_blocks.shape != k_blocks.shape:
        raise ValueError(f"shapes disagree: k {k_blocks.shape}, v {v_blocks.shape}")
    out, _ = paged_attn(q, k_blocks, v_blocks, block_tables, ctx_lens, scale=scale, window=window)
    return out


def flash_attn_fwd(
    q: F32,
    k: F32,
    v: F32,
    *,
    scale: float,
    q_offset: int = 0,
    causal: bool = True,
    window: int = 0,
    sink_logits: F32 | None = None,
) -> tuple[F32, F32]:
    """``tl_flash_attn_fwd_f32``: (o [B, H, Tq, D], lse [B, H, Tq]), float32.

    q: float32 [B, H, Tq, D], row i at position q_offset + i; k, v: float32 [B, Hkv, Tk, D], key j
    at position j; sink_logits: float32 [H] or None. ValueError: shapes that disagree.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        require(array, np.float32, name)
    batch, heads, n_rows, width = q.shape
    kv_batch, kv_heads, n_keys, kv_width = k.shape
    if (
        k.shape != v.shape
        or (kv_batch, kv_width) != (batch, width)
        or kv_heads < 1
        or heads % kv_heads
    ):
        raise ValueError(f"shapes disagree: q {q.shape}, k {k.shape}, v {v.shape}")
    per_head(sink_logits, heads, "sink_logits")
    group = heads // kv_heads
    seen = [visible(q_offset + i, n_keys, causal, window) for i in range(n_rows)] * group
    low, high = np.array(seen, np.int64).reshape(-1, 2).T

    o, lse = np.empty_like(q), np.empty((batch, heads, n_rows), np.float32)
    for b in range(batch):
        for g in range(kv_heads):
            own = slice(g * group, (g + 1) * group)
            sink = None if sink_logits is None else np.repeat(sink_logits[own], n_rows)
            rows = Rows(q[b, own].reshape(group * n_rows, width), low, high, sink)
            out_rows, lse_rows = rows.over(k[b, g], v[b, g], scale)
            o[b, own] = out_rows.reshape(group, n_rows, width)
            lse[b, own] = lse_rows.reshape(group, n_rows)
    return o, lse


# --- softmax and exp, as exported
# ---------------------------------------------------------------------------


@np.errstate(all="ignore")
def softmax(x: F32) -> F32:
    """``tl_softmax_f32`` on float32 [rows, cols]: maximum, sum in lanes by column mod 16, times 1 /
    sum.

    A row of -inf gives zeros; a row with NaN or +inf is NaN throughout.
    """
    require(x, np.float32, "x")
    rows, cols = x.shape
    m = np.max(
        x, axis=1, initial=-INF
    )  # NaN if any is; of two zeros either one, which no result shows
    p = exp32(x - m[:, None])
    lanes = np.zeros((rows, LANES), np.float32)
    for j in range(0, cols, LANES):
        lanes[:, : cols - j] += p[:, j : j + LANES]
    return _normalised(m, p, lanes)


@np.errstate(all="ignore")
def softmax_online(x: F32) -> F32:
    """``tl_softmax_online_f32`` on float32 [rows, cols]: maximum and sum in one pass."""
    require(x, np.float32, "x")
    rows, cols = x.shape
    run = Running.empty(rows, 0)
    for j in range(0, cols, TILE):
        tile = x[:, j : j + TILE]
        absorb_tile(
            run, tile, np.ones(tile.shape, np.bool_), np.zeros((tile.shape[1], 0), np.float32)
        )
    return _normalised(run.m, exp32(x - run.m[:, None]), run.lanes)


def _normalised(m: F32, p: F32, lanes: F32) -> F32:
    r = ONE / fold(lanes)
    return canonical(np.where((m == -INF)[:, None], ZERO, p * r[:, None]))


def expf(x: F32) -> F32:
    """``tl_expf`` elementwise on float32 of any shape."""
    return exp32(require(x, np.float32, "x"))


# --- small formats
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A binary float format whose codes are ``bits`` wide: a sign, an exponent field, ``fraction``
    bits.

    Numbers of exponent e are integers times the quantum 2^(e - fraction), and emin is the least e
    there is.
    Codes rise with the values, so a rounding that carries to the next exponent lands on the right
    code.
    """

    bits: int
    fraction: int
    emin: int  # exponent of the smallest normal number
    largest: int  # code of the largest finite number
    infinity: int | None  # None: the format has no infinity
    saturates: bool  # finite overflow gives the largest finite number, not infinity
    nan: int  # the code written for NaN
    code: type[np.unsignedinteger[Any]]

    def narrow(self, x: F32) -> Array:
        """Codes of float32 values, rounded to nearest, ties to even."""
        x = require(x, np.float32, "x")
        wide = np.abs(np.where(np.isfinite(x), x, ZERO)).astype(np.float64)
        exponent = np.where(wide > 0, np.maximum(np.frexp(wide)[1] - 1, self.emin), self.emin)
        quanta = np.rint(np.ldexp(wide, self.fraction - exponent)).astype(np.int64)
        magnitude = ((exponent.astype(np.int64) - self.emin) << self.fraction) + quanta

        infinite = self.largest if self.infinity is None else self.infinity
        beyond = self.largest if self.saturates else infinite
        magnitude = np.where(magnitude > self.largest, beyond, magnitude)
        magnitude = np.where(np.isinf(x), infinite, magnitude)
        signed = magnitude | (np.signbit(x).astype(np.int64) << (self.bits - 1))
        return np.where(np.isnan(x), self.nan, signed).astype(self.code)

    def widen(self, codes: Array) -> F32:
        """The float32 values of codes, exactly; NaN becomes 0x7FC00000."""
        codes = require(codes, self.code, "codes").astype(np.int64)
        sign = codes >> (self.bits - 1)
        magnitude = codes & ((1 << (self.bits - 1)) - 1)
        field = magnitude >> self.fraction
        quanta = (magnitude & ((1 << self.fraction) - 1)) + (np.minimum(field, 1) << self.fraction)
        exponent = self.emin + np.maximum(field, 1) - 1 - self.fraction
        value: F32 = np.ldexp(quanta.astype(np.float64), exponent.astype(np.int32)).astype(
            np.float32
        )
        value = np.where(magnitude > self.largest, NAN, value)
        if self.infinity is not None:
            value = np.where(magnitude == self.infinity, INF, value)
        value = np.where((sign == 1) & ~np.isnan(value), -value, value)
        return value


FORMAT_F16: Final = Format(16, 10, -14, 0x7BFF, 0x7C00, False, 0x7E00, np.uint16)
FORMAT_BF16: Final = Format(16, 7, -126, 0x7F7F, 0x7F80, False, 0x7FC0, np.uint16)
FORMAT_E4M3: Final = Format(8, 3, -6, 0x7E, None, True, 0x7F, np.uint8)
FORMAT_E5M2: Final = Format(8, 2, -14, 0x7B, 0x7C, True, 0x7F, np.uint8)


def f32_to_f16(x: F32) -> npt.NDArray[np.uint16]:
    """``tl_f32_to_f16``: codes, uint16."""
    return FORMAT_F16.narrow(x)


def f16_to_f32(codes: npt.NDArray[np.uint16]) -> F32:
    """``tl_f16_to_f32``."""
    return FORMAT_F16.widen(codes)


def f32_to_bf16(x: F32) -> npt.NDArray[np.uint16]:
    """``tl_f32_to_bf16``: codes, uint16."""
    return FORMAT_BF16.narrow(x)


def bf16_to_f32(codes: npt.NDArray[np.uint16]) -> F32:
    """``tl_bf16_to_f32``: the code is the upper half of the float32, NaN included."""
    return (require(codes, np.uint16, "codes").astype(np.uint32) << 16).view(np.float32)


def f32_to_e4m3(x: F32) -> npt.NDArray[np.uint8]:
    """``tl_f32_to_e4m3``: codes, uint8."""
    return FORMAT_E4M3.narrow(x)


def e4m3_to_f32(codes: npt.NDArray[np.uint8]) -> F32:
    """``tl_e4m3_to_f32``."""
    return FORMAT_E4M3.widen(codes)


def f32_to_e5m2(x: F32) -> npt.NDArray[np.uint8]:
    """``tl_f32_to_e5m2``: codes, uint8."""
    return FORMAT_E5M2.narrow(x)


def e5m2_to_f32(codes: npt.NDArray[np.uint8]) -> F32:
    """``tl_e5m2_to_f32``."""
    return FORMAT_E5M2.widen(codes)


# --- rows in eight bits
# -------------------------------------------------------------------------------------

STORED_LEAST: Final = np.float32(2.0**-100)  # a row that stays below it is stored as zeros


def store_i8(x: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """``tl_store_i8_f32``: rows [..., D] as codes, int8 [..., D], and scales, float32 [...]."""
    scale, y = _scaled(x, np.float32(127))
    return np.rint(y).astype(np.int8), scale


def store_e4m3(x: F32) -> tuple[npt.NDArray[np.uint8], F32]:
    """``tl_store_e4m3_f32``: rows [..., D] as codes, uint8 [..., D], and scales, float32 [...]."""
    scale, y = _scaled(x, np.float32(448))
    return f32_to_e4m3(y), scale


@np.errstate(all="ignore")
def _scaled(x: F32, top: np.float32) -> tuple[F32, F32]:
    """The scales of rows, and what is rounded to their codes: A being the largest |x| of a row,
    A / top and x * (top / A), each division and product rounded once. It is within -top .. top."""
    largest = np.max(np.abs(require(x, np.float32, "x")), axis=-1, initial=ZERO)
    broken, small = ~np.isfinite(largest), largest < STORED_LEAST  # NaN if any of a row is
    scale = np.where(broken, NAN, np.where(small, ZERO, largest / top))
    r = np.where(broken | small, ZERO, top / largest)[..., None]
    return scale, np.where(r == 0, ZERO, x * r)


@np.errstate(all="ignore")
def stored_to_f32(codes: Array, scales: F32) -> F32:
    """What ``tl_kv_gather_f32`` reads back of int8, or of e4m3 in uint8: scale * value."""
    values = codes.astype(np.float32) if codes.dtype == np.int8 else e4m3_to_f32(codes)
    return canonical(require(scales, np.float32, "scales")[..., None] * values)
