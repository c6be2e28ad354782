# SPDX-License-Identifier: MIT
"""Remakes the pictures of look.md by running the page.

PYTHONPATH=python python docs/look_pictures.py
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

PAGE = Path(__file__).with_name("look.md")


def remake(directory: Path) -> None:
    """Runs the Python of the page in ``directory``, where its pictures then are."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S))
    before = Path.cwd()
    os.chdir(directory)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, PAGE.name, "exec"), {})
    finally:
        os.chdir(before)


if __name__ == "__main__":
    remake(PAGE.parent)
    PAGE.with_name("cache.json").unlink()  # the page's, and no picture
