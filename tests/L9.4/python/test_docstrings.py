# SPDX-License-Identifier: MIT
"""Whoever asks ``help`` is told: every public name says what it is, every parameter is named, and
headers do the same."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinyllm
from tinyllm.ffi import libtinyllm

ROOT = Path(__file__).resolve().parents[3]


MADE_ELSEWHERE = {"KVView", "Recording", "Snapshot"}  # their docstrings say by what
SAYS_ITSELF = {"path"}


def public_names() -> Iterator[tuple[str, Any, str]]:
    """Dotted name, object, and the texts in which its parameters may be named."""
    for name in tinyllm.__all__:
        value = getattr(tinyllm, name)
        if inspect.isclass(value):
            classes: list[Any] = [
                c for c in value.__mro__ if c.__module__.startswith("tinyllm")
            ] or [value]
            about = "\n".join(f"{c.__doc__}\n{c.__init__.__doc__}" for c in classes)
            yield name, value, about
            for member, attribute in vars(value).items():
                plain = getattr(attribute, "__func__", attribute)
                if not member.startswith("_") and (callable(plain) or isinstance(plain, property)):
                    inherited = [inspect.getdoc(getattr(c, member, None)) for c in classes]
                    yield f"{name}.{member}", plain, "\n".join([about, *filter(None, inherited)])
        elif callable(value):
            others = re.findall(r"arguments are those of\s+``(\w+)``", value.__doc__ or "")
            yield (
                name,
                value,
                "\n".join([f"{value.__doc__}", *(getattr(tinyllm, o).__doc__ for o in others)]),
            )


NAMES = {name: (value, about) for name, value, about in public_names()}


def parameters_of(value: Any) -> list[str]:
    if isinstance(value, property):
        return []
    try:
        named = inspect.signature(value).parameters
    except ValueError:  # an exception with Python's own constructor
        return []
    return [name for name in named if name not in ("self", "cls", "args", "kwargs", *SAYS_ITSELF)]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_is_and_names_its_parameters(name: str) -> None:
    value, about = NAMES[name]
    assert inspect.getdoc(value), f"{name} has no docstring"
    if name in MADE_ELSEWHERE:
        return
    missing = [p for p in parameters_of(value) if not re.search(rf"\b{re.escape(p)}\b", about)]
    assert not missing, f"{name} does not say what these are: {', '.join(missing)}"


def test_the_walk_finds_functions_methods_and_properties() -> None:
    expected = {
        "paged_attention",
        "PagedKVCache",
        "PagedKVCache.append",
        "PagedKVCache.pool",
        "KVView.from_arrays",
    }
    assert expected <= NAMES.keys() and len(NAMES) > 35


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_docstrings_are_python(name: str) -> None:
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(NAMES[name][0]) or ""):
        compile(example.source, name, "single")


HEADERS = sorted((ROOT / "c/include/tinyllm").glob("*.h"))


def for_doxygen(header: Path) -> str:
    """What `make docs` has doxygen read."""
    command = [sys.executable, str(ROOT / "docs/reference/for_doxygen.py"), str(header)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: str(header.name))
def test_every_function_of_a_header_is_described(header: Path) -> None:
    text, read = header.read_text(), for_doxygen(header)
    prototypes = re.findall(r"^TL_API [^;]*;", text, re.M)
    assert re.findall(r"^TL_API [^;]*;", read, re.M) == prototypes
    for prototype in prototypes:
        before = read[: read.index(prototype)]
        about = before[before.rindex("/**") :]
        assert re.fullmatch(r"/\*\* @brief \S.*\n\*/\n", about, re.S), (
            f"{header.name}: nothing is said of {prototype}"
        )
    for comment in re.findall(r"/\*.*?\*/", read, re.S):
        assert comment.count("@verbatim") == comment.count("@endverbatim")


def test_codes_of_the_reference_are_those_of_the_headers() -> None:
    read = for_doxygen(ROOT / "c/include/tinyllm/abi.h")
    for value, name in {**libtinyllm.STATUS_NAMES, **libtinyllm.DTYPE_NAMES}.items():
        assert f"    {name} = {value}, /**<" in read
    assert "TL_EFULL = 5, /**< a fixed-capacity thing is full */" in read


def test_the_headers_hold_every_function() -> None:
    declared = re.findall(r"^TL_API [^;(]*?(\w+)\(", "".join(h.read_text() for h in HEADERS), re.M)
    assert sorted(declared) == sorted(libtinyllm.signatures())
