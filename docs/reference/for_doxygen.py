# SPDX-License-Identifier: MIT
"""A header as doxygen reads it: ``python3 for_doxygen.py HEADER`` prints it. INPUT_FILTER of
docs/Doxyfile.

The headers have plain comments. Here each becomes a comment of doxygen's, with the first sentence
as its brief, indented lines kept as they are, and one that stands before several prototypes
repeated before each. tinyllm.h becomes the front page, and the lists of codes the enumerators they
stand for.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from textwrap import dedent

COMMENT = re.compile(r"/\*.*?\*/", re.S)
CODES = re.compile(r"X\((TL_\w+), (\d+)\)[ \\]*(?:/\* (.*?) \*/)?")
CODE_LIST = re.compile(r"#define (TL_\w+_LIST)\(X\)(.*\\\n)*.*")
SUBJECT = r"(?:Errors|Threads|Bits|Cost|Checked|Only|TL_E[A-Z]+(?::| \()|NULL)"


def translated(path: Path) -> str:
    text = path.read_text()
    lists = {found[1]: CODES.findall(found[0]) for found in CODE_LIST.finditer(text)}
    pieces, end = [], 0
    for comment in COMMENT.finditer(text):
        pieces.append(text[end : comment.start()])
        end = comment.end()
        before = text[text.rfind("\n", 0, comment.start()) + 1 : comment.start()].strip()
        if "SPDX" in comment[0] or before.startswith("X("):
            pieces.append(comment[0])
        elif before:  # it stands behind what it is about
            pieces.append(f"/**< {prose(inside(comment[0]))} */")
        elif comment[0].startswith("/* libtinyllm: "):
            pieces.append(front_page(path, comment[0]))
        elif comment[0].startswith(f"/* {path.name}: "):
            pieces.append(file_comment(path, comment[0]))
        else:
            pieces.append(for_each_prototype(doxygen_comment(comment[0]), text[end:]))
            end += length_of_prototypes(text[end:])
    result = one_declarator_a_line("".join([*pieces, text[end:]]))
    return re.sub(r"enum \{ (TL_\w+_LIST)\(.*\};", lambda m: enumeration(m[1], lists[m[1]]), result)


# --- comments -------------------------------------------------------------------------------------


def inside(comment: str) -> str:
    """The text of a comment, without its frame."""
    return re.sub(r"^ \* ?", "", comment[2:-2].strip(" \n"), flags=re.M).strip()


def prose(text: str) -> str:
    """Words in which doxygen acts on no character (in quotes none does); `code` is set as code."""
    parts = re.split(r'("[^"]*")', text)
    parts[::2] = (escape(re.sub(r"([\\@#%])", r"\\\1", part), quote=False) for part in parts[::2])
    return re.sub(r"`([^`]*)`", r"<tt>\1</tt>", "".join(parts).replace(" ..", " &hellip;"))


def body(text: str) -> str:
    """Paragraphs; runs of indented lines, blank ones inside them too, are set as they stand."""
    pieces = re.split(r"((?:^(?:  .*)?\n)*^  .*(?:\n|\Z))", text, flags=re.M)
    return "\n".join(
        f"@verbatim\n{dedent(piece).strip(chr(10))}\n@endverbatim" if i % 2 else paragraphs(piece)
        for i, piece in enumerate(pieces)
    )


def paragraphs(text: str) -> str:
    """Prose, with a new paragraph where a line begins a subject of its own."""
    return prose(re.sub(rf"(?<=\.)\n(?={SUBJECT})", "\n\n", text))


def doxygen_comment(comment: str, command: str = "") -> str:
    text = inside(comment)
    brief = re.match(r".*?(?:(?<=[^\s.])\.(?=\s|$)|[:,]?(?=\n\n)|$(?!\n))", text, re.S)
    first = brief[0] if brief else text
    rest = text[len(first) :].lstrip(" ")
    return (
        f"/** {command}@brief {prose(' '.join(first.split()).rstrip(',:.'))}.\n\n{body(rest)}\n*/"
    )


def file_comment(path: Path, comment: str) -> str:
    text = inside(comment).removeprefix(f"{path.name}: ")
    return doxygen_comment(f"/* {text[0].upper()}{text[1:]} */", f"@file {path.name}\n")


def front_page(path: Path, comment: str) -> str:
    """The headers in reading order, each with its first sentence."""
    rows = ""
    for name in re.findall(r'#include "(.*?)"', path.read_text()):
        header = (path.parent / name).read_text()
        about = inside(COMMENT.findall(header)[1]).removeprefix(f"{Path(name).name}: ")
        first = " ".join(re.split(r"[.:](?=\s)", about)[0].split())
        rows += f'<tr><td>@ref {Path(name).name} "{name}"</td><td>{prose(first)}</td></tr>\n'
    about = inside(comment).removeprefix("libtinyllm: ")
    text = body(about[0].upper() + about[1:])
    return f"/** @mainpage libtinyllm in C\n{text}\n\n<table>{rows}</table>\n*/"


# --- code -----------------------------------------------------------------------------------------

PROTOTYPE = re.compile(r"\nTL_API [^;]*;")


def length_of_prototypes(after: str) -> int:
    end = 0
    while found := PROTOTYPE.match(after, end):
        end = found.end()
    return end


def for_each_prototype(comment: str, after: str) -> str:
    prototypes = PROTOTYPE.findall(after[: length_of_prototypes(after)])
    return "\n".join(comment + prototype for prototype in prototypes) if prototypes else comment


def one_declarator_a_line(text: str) -> str:
    """Members of a struct that share a line, and its comment, on lines of their own."""

    def split(m: re.Match[str]) -> str:
        return "\n".join(f"    {m[1]} {name};{m[3]}" for name in re.split(r", *", m[2]))

    return re.sub(r"^    ((?:const )?\w+) (\*?\w+(?:, \*?\w+)+);(.*)$", split, text, flags=re.M)


def enumeration(name: str, codes: list[tuple[str, str, str]]) -> str:
    lines = [f"    {code} = {value}, /**< {prose(about)} */" for code, value, about in codes]
    return "\n".join([f"/** @brief What {name} lists. */", "enum {", *lines, "};"])


if __name__ == "__main__":
    print(translated(Path(sys.argv[1])), end="")
