# SPDX-License-Identifier: MIT
"""What the package cannot do without, said in a sentence. Any Python 3 can read this file."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  pip sees to it, but a folder on PYTHONPATH has no pip
    raise ImportError("tinyllm needs Python 3.10 or newer, and this is " + sys.version.split()[0])
try:
    import numpy  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise
    raise ImportError(
        "tinyllm needs numpy: run `" + sys.executable + " -m pip install numpy`"
    ) from None
