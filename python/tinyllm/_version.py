# SPDX-License-Identifier: MIT
"""The version of this copy of the package: ``TL_VERSION`` of the C headers, which is written
nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["__version__"]

_SITE = Path(__file__).resolve().parent.parent


def _version() -> str:
    """From the header of the checkout this package lies in, else from the metadata installed beside
    it.

    Other copies on the path have no say. A package that was copied without its metadata is
    "0+unknown".
    """
    header = _SITE.parent / "c/include/tinyllm/abi.h"
    if header.is_file():
        (version,) = re.findall(r'^#define TL_VERSION "(.+)"$', header.read_text(), flags=re.M)
        return str(version)
    from importlib.metadata import (
        distributions,
    )  # here, for a checkout does without and it is slow to load

    return next(
        (d.version for d in distributions(name="libtinyllm", path=[str(_SITE)])), "0+unknown"
    )


__version__ = _version()
