# SPDX-License-Identifier: MIT
"""A small llama-type language model in numpy: what surrounds tinyllm's attention in the
demonstration.

Import this package before numpy. It asks the BLAS behind numpy for a single thread, which is only
heard when numpy loads: rows.Crew shares out matrix products itself, in a way that no bit depends
on. In a checkout it also finds tinyllm.
"""

import os
import sys
from pathlib import Path

for _name in (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
):
    os.environ[_name] = "1"

_checkout = Path(__file__).resolve().parents[2] / "python"
if (_checkout / "tinyllm").is_dir() and str(_checkout) not in sys.path:
    sys.path.insert(0, str(_checkout))
