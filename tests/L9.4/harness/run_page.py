# SPDX-License-Identifier: MIT
"""Runs the blocks of one page, in order, in one namespace and the current directory; test_docs.py
starts it.

On standard input, as JSON: the name of the page, and for each block its language, its text, its
line in the page, and what the page says it prints, or null.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from typing import Any


def matches(expected: str, printed: str) -> bool:
    """Whether a page shows what was printed: "..." stands for anything in a line, and a line that
    is nothing else for any number of lines."""
    parts = re.split(r"^\.\.\.\n", expected, flags=re.M)
    patterns = (re.escape(part).replace(r"\.\.\.", ".*") for part in parts)
    return re.fullmatch(r"(?:.*\n)*?".join(patterns), printed) is not None


def run(page: str, blocks: list[tuple[str, str, int, str | None]]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for language, text, line, expected in blocks:
        if language == "sh":
            printed = run_shell(text, f"{page}:{line}")
        else:
            code = compile("\n" * (line - 1) + text, page, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names)
            printed = out.getvalue()
        if expected is not None and not matches(expected, printed):
            sys.exit(f"{page}:{line}: the page says it prints\n{expected}it prints\n{printed}")


def run_shell(text: str, where: str) -> str:
    done = subprocess.run(["sh", "-eu", "-c", text], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{where}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    run(*json.load(sys.stdin))
