# SPDX-License-Identifier: MIT
"""Derives the constants of exp, log and tanh and prints c/src/numerics/coef.h.

    python3 tools/fit_coef.py > c/src/numerics/coef.h

Needs numpy and mpmath. A fit is minimax: Lawson's reweighted least squares on a dense grid, against
targets computed in 100 bits. Coefficients are rounded to f32 one at a time, lowest power first, and
the rest fitted anew around them, so that the others make good what one loses.

exp has one hard case: e^10 lies 0.013 ulp off the middle between two floats, and the roundings
before the last push the plain minimax polynomial's result across. So the fit asks for an error of
EXP_BIAS ulp at r = 10 - 14 ln 2 and spreads the cost over the interval. EXP_BIAS, EXP_WEIGHT (how
much more an error below r = 0 weighs, where the other roundings already cost most) and EXP_NUDGE
(C2 moved by so many of its ulp before the rest is fitted) come from a small search for the least
error over every float with e, 1/e and e^10 correctly rounded. The worst inputs named in the header
are what tests/L9.4/numerics/sweep_expf.c finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpmath import exp, log, mp, mpf, sqrt, tanh  # type: ignore[import-untyped]
from numpy.typing import NDArray

Array = NDArray[np.float64]

EXP_BIAS, EXP_WEIGHT, EXP_NUDGE = -0.154, 12, -1
EXP_ULP = 2.0**23  # of p in [1, 2); p below 1 has twice as many
R_OF_TEN = float(10 - 14 * log(mpf(2)))

TANH_SMALL = 0.625

mp.prec = 100


def nodes(lo: float, hi: float, n: int, hole: float) -> Array:
    """n Chebyshev nodes of [lo, hi] without those near 0, where every fit here is exact."""
    x: Array = (lo + hi) / 2 + (hi - lo) / 2 * np.cos(np.pi * (np.arange(n) + 0.5) / n)
    return x[np.abs(x) > hole]


def values(f: Callable[[mpf], mpf], x: Array) -> Array:
    return np.array([float(f(mpf(float(t)))) for t in x])


def polynomial(c: Sequence[float], x: Array | float) -> Array:
    return np.asarray(
        np.polynomial.polynomial.polyval(x, np.array([*c, 0.0]))
    )  # the 0: c may be empty


def minimax(basis: Array, target: Array, weight: Array) -> Array:
    """The combination of the basis' columns whose largest weighted error is least."""
    scale = np.abs(basis).max(axis=0)
    w = np.ones_like(target)
    for _ in range(400):
        row = np.sqrt(w) * weight
        c = np.linalg.lstsq(basis / scale * row[:, None], target * row, rcond=None)[0]
        error = np.abs((basis / scale @ c - target) * weight)
        w *= error / error.max() + 1e-9
        w /= w.sum()
    return np.asarray(c / scale)


def next_coefficient(
    fixed: Sequence[float],
    n: int,
    x: Array,
    target: Array,
    weight: Array,
    through: tuple[float, float] | None,
) -> float:
    """The first free coefficient of the best polynomial that begins with `fixed`."""
    k = len(fixed)
    rest, basis = target - polynomial(fixed, x), x[:, None] ** np.arange(k, n)
    if through is None:
        return float(minimax(basis, rest, weight)[0])
    x0, y0 = through
    first = (y0 - float(polynomial(fixed, x0))) / x0**k  # were all others 0
    if k == n - 1:
        return first
    powers = x0 ** np.arange(1.0, n - k)
    c = minimax(basis[:, 1:] - basis[:, :1] * powers, rest - basis[:, 0] * first, weight)
    return first - float(powers @ c)


def fit(
    n: int,
    x: Array,
    target: Array,
    weight: Array,
    through: tuple[float, float] | None = None,
    nudge: int = 0,
) -> tuple[list[float], float]:
    """n coefficients, each an f32, and the largest weighted error."""
    fixed: list[float] = []
    for k in range(n):
        c = np.float32(next_coefficient(fixed, n, x, target, weight, through))
        for _ in range(abs(nudge) if k == 0 else 0):
            c = np.nextafter(c, np.float32(np.copysign(np.inf, nudge)))
        fixed.append(float(c))
    return fixed, float(np.abs((polynomial(fixed, x) - target) * weight).max())


def fit_exp() -> tuple[list[float], float]:
    """Q of e^r = 1 + r + r^2 Q(r) on |r| <= ln 2 / 2 and a hair; the error in ulp of the result."""

    def q(r: mpf) -> mpf:
        return (exp(r) - 1 - r) / r**2

    half = float(log(mpf(2))) / 2 * 1.0002
    x = nodes(-half, half, 801, 1e-3)
    ulps = x * x * EXP_ULP * np.where(x < 0, 2, 1)
    through = R_OF_TEN, float(q(mpf(R_OF_TEN))) + EXP_BIAS / EXP_ULP / R_OF_TEN**2
    target = values(q, x)
    c, _ = fit(5, x, target, ulps * np.where(x < 0, EXP_WEIGHT, 1), through, EXP_NUDGE)
    return c, float(np.abs((polynomial(c, x) - target) * ulps).max())


def fit_log() -> tuple[list[float], float]:
    """P of log(1 + g) = g + g^2 P(g), 1 + g in [sqrt(1/2), sqrt(2)]; the error in 2^-24."""
    x = nodes(np.sqrt(0.5) - 1, np.sqrt(2.0) - 1, 1201, 2e-3)
    return fit(
        9, x, values(lambda g: (log(1 + g) - g) / g**2, x), x * x / np.abs(np.log1p(x)) * 2.0**24
    )


def fit_tanh() -> tuple[list[float], float]:
    """P of tanh(a) = a + a z P(z), z = a^2, a up to TANH_SMALL; the relative error in 2^-24."""
    x = nodes(0, TANH_SMALL**2, 801, 1e-4)

    def p(z: mpf) -> mpf:
        return (tanh(sqrt(z)) / sqrt(z) - 1) / z

    return fit(5, x, values(p, x), x / np.tanh(np.sqrt(x)) * np.sqrt(x) * 2.0**24)


def c_float(c: float) -> str:
    mantissa, exponent = float(np.float32(c)).hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}f"


def split_ln2() -> tuple[float, float]:
    """ln 2 in two f32, the first of 15 bits so that its product with k (9 bits) is exact."""
    hi = float(np.rint(float(log(mpf(2))) * 2**15)) / 2**15
    return hi, float(np.float32(float(log(mpf(2)) - mpf(hi))))


def defines(prefix: str, c: Sequence[float]) -> str:
    return "\n".join(f"#define {prefix}_C{k} {c_float(v)}" for k, v in enumerate(c, 2))


HEADER = """\
/* SPDX-License-Identifier: MIT */
/* coef.h: the constants of exp, log and tanh and the exact order in which they are used. Printed by
 * tools/fit_coef.py.
 *
 * Words: add, sub, mul and fma are f32 operations with one rounding each, to nearest even; bits(x)
 * is the word of a float, float(w) its inverse; words add modulo 2^32; everything else is integer
 * arithmetic.
 *
 * exp(x):
 *     0x7FC00000 where x is NaN; +inf where x > EXP_OVERFLOW; c = x, or EXP_LOWEST where x is less
 *     t = fma(c, EXP_LOG2E, EXP_MAGIC)   bits(t) = bits(EXP_MAGIC) + k, k the integer that
 *                                        c * log2(e) is rounded to
 *     n = sub(t, EXP_MAGIC)              k as a float, exact
 *     r = fma(n, -EXP_LN2_HI, c)         exact
 *     r = fma(n, -EXP_LN2_LO, r)         |r| <= ln 2 / 2 and a hair; the one rounding of the
 *                                        reduction
 *     p = EXP_C6
 *     p = fma(p, r, EXP_C5); ... ; p = fma(p, r, EXP_C2)
 *     p = fma(p, r, 1)
 *     p = fma(p, r, 1)
 *     w = bits(p) + (bits(t) << 23)      p * 2^k: the low nine bits of bits(EXP_MAGIC) are zero
 *     +0 where w, read as signed, is < 0x00800000 (p * 2^k < 2^-126), else float(w)
 *
 * log(x), x positive and normal:
 *     e = (bits(x) - LOG_SQRT_HALF) >> 23  signed; x = 2^e * f with f from sqrt(1/2) up to sqrt(2)
 *     g = sub(float(bits(x) - (e << 23)), 1)   f - 1, exact
 *     n = e as a float, exact
 *     p = LOG_C10; p = fma(p, g, LOG_C9); ... ; p = fma(p, g, LOG_C2)
 *     h = mul(g, g)
 *     s = mul(h, p)
 *     s = fma(n, LOG_LN2_LO, s)
 *     s = add(g, s)
 *     result = fma(n, LOG_LN2_HI, s)
 *     +-0: -inf; +inf: +inf; NaN and below 0: 0x7FC00000; log(1) is +0. Not for subnormal x.
 *
 * tanh(x): a = |x|, and the result has the sign of x; 0x7FC00000 where x is NaN
 *     where a < TANH_SMALL:
 *         z = mul(a, a)
 *         p = TANH_C0; p = fma(p, z, TANH_C1); ... ; p = fma(p, z, TANH_C4)
 *         result = fma(a, mul(p, z), a)
 *     else:
 *         e = add(exp(add(a, a)), 1)
 *         result = sub(1, 2 / e)   one rounded division; 1 from a = 9.011 on, +inf included */
#ifndef TL_COEF_H
#define TL_COEF_H

/* exp: within 0.9889 ulp wherever e^x is a normal float (worst: x = 0x1.86e35p+5, the word
 * 0x424371A8); the polynomial alone within <exp_error>. e, 1/e and e^10 are correctly rounded.
 * EXP_OVERFLOW, 0x42B17217: beyond it e^x rounds to more than the largest float. EXP_LOWEST: far
 * below where results become +0; k stays within nine bits. */
#define EXP_OVERFLOW 0x1.62e42ep+6f
#define EXP_LOWEST -104.0f
#define EXP_LOG2E <log2e>
#define EXP_MAGIC 0x1.8p23f
#define EXP_LN2_HI <hi> /* fifteen bits: its product with k is exact */
#define EXP_LN2_LO <lo>
<exp_c>

/* log: within 0.8868 ulp for every positive normal float (worst: x = 0x1.69919p-1, the word
 * 0x3F34C8C8); the polynomial alone within <log_error>. */
#define LOG_SQRT_HALF 0x3F3504F3 /* the word of the float nearest to sqrt(1/2) */
#define LOG_LN2_HI EXP_LN2_HI
#define LOG_LN2_LO EXP_LN2_LO
<log_c>

/* tanh: within 1.371 ulp for every float (worst: x = 0x1.42ac4ep-1, the word 0x3F215627); the
 * polynomial alone within <tanh_error>. */
#define TANH_SMALL <tanh_small>
<tanh_c>

#endif
"""


def main() -> None:
    exp_c, exp_error = fit_exp()
    log_c, log_error = fit_log()
    tanh_c, tanh_error = fit_tanh()
    hi, lo = split_ln2()
    fields = {
        "log2e": c_float(float(1 / log(mpf(2)))),
        "hi": c_float(hi),
        "lo": c_float(lo),
        "exp_c": defines("EXP", exp_c),
        "exp_error": f"{exp_error:.2f}",
        "log_c": defines("LOG", log_c),
        "log_error": f"{log_error:.2f}",
        "tanh_small": c_float(TANH_SMALL),
        "tanh_error": f"{tanh_error:.2f}",
        "tanh_c": "\n".join(
            f"#define TANH_C{k} {c_float(v)}" for k, v in enumerate(reversed(tanh_c))
        ),
    }
    text = HEADER
    for name, value in fields.items():
        text = text.replace(f"<{name}>", value)
    print(text, end="")


if __name__ == "__main__":
    main()
