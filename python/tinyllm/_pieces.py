# SPDX-License-Identifier: MIT
"""Long calls in pieces of about a second, so that Python hears Ctrl-C between them.

A row's bits depend on no other row, so rows can be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# Work is counted in elements of q times the positions they see: some 4e9 a second on one thread
# with AVX2, a tenth of it without.
LONG: Final = 1 << 31  # a call of no more than this is not cut
_FIRST: Final = 1 << 29
_SECONDS: Final = 1.0


def in_pieces(work: NDArray[Any], call: Callable[[int, int], None]) -> None:
    """``call(begin, end)`` for all rows in rising order; ``work`` is what each of them costs."""
    total = np.cumsum(work, dtype=np.float64)
    begin, done, budget = 0, 0.0, float(_FIRST)
    while begin < len(total):
        end = max(begin + 1, int(np.searchsorted(total, done + budget, "right")))
        started = monotonic()
        call(begin, end)
        elapsed = max(monotonic() - started, 1e-3)
        budget = (total[end - 1] - done) / elapsed * _SECONDS
        begin, done = end, total[end - 1]


def positions_seen(
    rows: NDArray[np.int64], n_keys: Any, window: int, causal: bool = True
) -> NDArray[np.int64]:
    """How many of ``n_keys`` keys each row sees that stands at position ``rows``; some more where
    there is no need to know."""
    seen = np.minimum(rows + 1, n_keys) if causal else np.full(len(rows), n_keys)
    return np.minimum(seen, window) if window > 0 and causal else seen
