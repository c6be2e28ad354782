# SPDX-License-Identifier: MIT
"""Numbers in words, and what a terminal is shown: three digits, no name that acts on it, colour
where it is wanted."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinyllm._terminal import columns, harmless, is_terminal, prints, wants_colour
from tinyllm._words import human_bytes, human_time, percent, plural

# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1000 B"), (1023, "1023 B"), (1024, "1 KiB"),
     (1536, "1.5 KiB"), (999 << 10, "999 KiB"), (1010 << 10, "0.986 MiB"), (5 << 40, "5 TiB")],
)  # fmt: skip
def test_bytes_have_three_digits_and_no_exponent(n: int, said: str) -> None:
    assert human_bytes(n) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 ns"), (3e-9, "3 ns"), (999e-9, "999 ns"), (999.6e-9, "1.00 us"), (1.23e-6, "1.23 us"),
     (45.67e-6, "45.7 us"), (999.4e-6, "999 us"), (999.6e-6, "1.00 ms"), (0.1, "100 ms"),
     (2.5, "2.50 s"), (999.6, "1000 s"), (86400, "86400 s")],
)  # fmt: skip
def test_times_have_three_digits_and_ascii_letters(seconds: float, said: str) -> None:
    assert human_time(seconds) == said


@pytest.mark.parametrize(
    ("n", "said"), [(0, "0 blocks"), (1, "1 block"), (2, "2 blocks"), (1234567, "1,234,567 blocks")]
)
def test_one_is_singular(n: int, said: str) -> None:
    assert plural(n, "block") == said


@pytest.mark.parametrize(
    ("part", "said"),
    [(0, "0 %"), (0.0004, "<0.1 %"), (0.125, "12.5 %"), (0.5, "50 %"), (1, "100 %")],
)
def test_shares_are_told_to_a_tenth(part: float, said: str) -> None:
    assert percent(part) == said


# --- terminals ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "terminal", "colour"),
    [
        (Terminal(), {}, True, True),
        (Terminal(), {"NO_COLOR": ""}, True, True),  # no-color.org: when not empty
        (Terminal(), {"NO_COLOR": "0"}, True, False),
        (Terminal(), {"TERM": "dumb"}, False, False),
        (io.StringIO(), {}, False, False),
        (None, {}, False, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(
    stream: io.StringIO | None,
    environment: dict[str, str],
    terminal: bool,
    colour: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (is_terminal(stream), wants_colour(stream)) == (terminal, colour)


@pytest.mark.parametrize(
    ("encoding", "can"), [("utf-8", True), ("ascii", False), ("latin-1", False), ("unheard", False)]
)
def test_what_an_encoding_has_no_letters_for_is_not_printed(encoding: str, can: bool) -> None:
    stream = type("Stream", (), {"encoding": encoding})
    assert prints(stream, "\u2588") == can
    assert not prints(None, "\u2588")


# --- names ----------------------------------------------------------------------------------------


def display_width(text: str) -> int:
    """Columns, counted the long way."""
    total = 0
    for c in text:
        assert unicodedata.category(c) not in ("Cc", "Cs", "Cf"), f"{c!r} would act on a terminal"
        zero = unicodedata.combining(c) or unicodedata.category(c) in ("Mn", "Me")
        total += 0 if zero else 2 if unicodedata.east_asian_width(c) in "WF" else 1
    return total


@given(name=st.text(), width=st.integers(2, 50))
def test_a_name_is_made_harmless_and_short(name: str, width: int) -> None:
    shown = harmless(name, width)
    assert shown.isprintable()
    assert display_width(shown) == columns(shown) <= width


@pytest.mark.parametrize("width", [3, 4, 18, 40])
@pytest.mark.parametrize(
    "name",
    ["\x1b]0;owned\x07\x1b[2J", "line\nbreak\ttab\rreturn\x00nul\x7f\x85", "\ud800 lone \udfff",
     "\u202eright to left\u2066", "\ufffe\uffff", "漢字" * 40, "e\u0301" * 30, "x" * 5000, ""],
)  # fmt: skip
def test_a_hostile_name_is_made_harmless_and_short(name: str, width: int) -> None:
    shown = harmless(name, width)
    assert shown.isprintable()
    assert 0 < display_width(shown) <= width


def test_a_name_that_fits_stays_as_it_is() -> None:
    assert harmless("chat 1", 6) == "chat 1"
    assert harmless("漢字", 4) == "漢字"
    assert harmless("\x1b[m", 18) == r"\x1b[m"


def test_a_long_name_is_cut_in_its_middle() -> None:
    assert harmless("chat 12", 6) == "ch...2"
    assert harmless("conversation-000117", 18) == "conversa...-000117"
    assert harmless("漢字" * 9 + "漢", 12) == "漢字...字漢"
    assert harmless("a" + "e\u0301" * 30 + "z", 7).startswith("ae")
    assert harmless("e\u0301" * 30 + "z", 30).endswith("z")
    assert [harmless("abcd", width) for width in range(-1, 4)] == ["", "", ".", "..", "..."]


@given(name=st.text("abc0123456789-_", min_size=19), at=st.integers(-7, 7))
def test_names_that_differ_near_an_end_are_told_apart(name: str, at: int) -> None:
    """Of 18 columns 8 show the beginning and 7 the end."""
    other = list(name)
    other[at] = "x"
    assert harmless(name, 18) != harmless("".join(other), 18)
