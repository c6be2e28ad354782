# SPDX-License-Identifier: MIT
"""The colours and letters that tell sequences apart.

A sequence has those of its place, in every picture and whatever part of them is shown: in a cache
the place among its sequences, in a call the place in its batch.
"""

from __future__ import annotations

from math import lcm
from typing import Final, NamedTuple

INK: Final = "#1f2933"
PAPER: Final = "#ffffff"


class Colour(NamedTuple):
    """fill, and ink that reads on it, for SVG; ansi: the nearest of a terminal's 256 colours, on
    which black reads; dark: a darker one of that hue, on which white does."""

    fill: str
    ink: str
    ansi: int
    dark: int


# The palette of Okabe and Ito, which colour-blind eyes tell apart.
PALETTE: Final = (
    Colour("#56b4e9", INK, 75, 24),
    Colour("#e69f00", INK, 214, 94),
    Colour("#0072b2", PAPER, 32, 18),
    Colour("#f0e442", INK, 227, 58),
    Colour("#cc79a7", INK, 175, 89),
    Colour("#d55e00", PAPER, 202, 88),
    Colour("#009e73", PAPER, 36, 22),
)
KEYS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
N_PAIRS: Final = lcm(len(PALETTE), len(KEYS))  # of a letter and a colour, before the first returns


def colour_of(i: int) -> Colour:
    """The colour of the i-th sequence, from the first again after the last."""
    return PALETTE[i % len(PALETTE)]


def key_of(i: int) -> str:
    """The letter of the i-th sequence, likewise."""
    return KEYS[i % len(KEYS)]
