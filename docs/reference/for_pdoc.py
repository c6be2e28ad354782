# SPDX-License-Identifier: MIT
"""The Python reference: ``python docs/reference/for_pdoc.py DIRECTORY`` writes it, from the
docstrings.

The docstrings are plain text: "name: what it is" begins a parameter, "Raises:" the errors, and what
is indented stands as it is. Here that becomes the Markdown that pdoc sets.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pdoc
import pdoc.doc
import pdoc.docstrings
import pdoc.render
import tinyllm

MODULES = ("tinyllm", "tinyllm.reference", "tinyllm.ffi.libtinyllm")
_formatted = inspect.formatannotation
PARAMETER = re.compile(r"(\w+(?:, \w+)*)((?: \([^)]*\))?): (?=\S)")


def as_markdown(docstring: str, *_: object) -> str:
    lines: list[str] = []
    opens = False  # whether a line may begin a parameter: the sentence before it has ended
    for line in docstring.splitlines():
        begins = PARAMETER.match(line) if opens else None
        if begins and begins[1] == "Raises":
            lines += ["", f"**Raises**: {plain(line[begins.end() :])}"]
        elif begins:
            names = ", ".join(f"`{name}`" for name in begins[1].split(", "))
            lines += ["", f"- {names}{begins[2]}: {plain(line[begins.end() :])}"]
        else:
            lines.append(line if line.startswith(("    ", ">>> ", "... ")) else plain(line))
        opens = not line.strip() or line.endswith((".", ":"))
    return "\n".join(lines)


def plain(text: str) -> str:
    """Words in which a star is a star; what stands in `` is code already, and **so** is bold."""
    parts = re.split(r"(`+.+?`+|\*\*\w+\*\*)", re.sub(r":(?:func|class):(?=`)", "", text))
    parts[::2] = (re.sub(r"([*<])", r"\\\1", part) for part in parts[::2])
    return "".join(parts)


def annotation(value: object, *args: Any, **kwargs: Any) -> str:
    """An annotation as the sources write it."""
    whole: str = _formatted(value, *args, **kwargs)
    array = re.sub(
        r"numpy\.ndarray\[tuple\[typing\.Any, \.\.\.\], numpy\.dtype\[(.*?)\]\]",
        r"NDArray[\1]",
        whole,
    )
    return re.sub(r"\b(numpy|typing|collections\.abc|contextlib|pathlib)\.", "", array)


def main(directory: Path) -> None:
    pdoc.docstrings.convert = as_markdown
    inspect.formatannotation = pdoc.doc.formatannotation = annotation
    pdoc.render.configure(
        docformat="markdown",
        show_source=False,
        footer_text=f"libtinyllm {tinyllm.__version__}",
        template_directory=Path(__file__).with_name("pdoc"),
    )
    pdoc.pdoc(*MODULES, output_directory=directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
