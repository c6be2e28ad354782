# SPDX-License-Identifier: MIT
"""The colours and letters that tell sequences apart, in every picture."""

from __future__ import annotations

from typing import Final, NamedTuple

INK: Final = "#1f2933"
PAPER: Final = "#ffffff"


class Colour(NamedTuple):
    """fill, and ink that reads on it, for SVG; ansi: the nearest of a terminal's 256 colours."""

    fill: str
    ink: str
    ansi: int


# The palette of Okabe and Ito, which colour-blind eyes tell apart.
PALETTE: Final = (
    Colour("#56b4e9", INK, 75),
    Colour("#e69f00", INK, 214),
    Colour("#0072b2", PAPER, 32),
    Colour("#f0e442", INK, 227),
    Colour("#cc79a7", INK, 175),
    Colour("#d55e00", PAPER, 202),
    Colour("#009e73", PAPER, 36),
)
KEYS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def colour_of(i: int) -> Colour:
    """The colour of the i-th sequence, from the first again after the last."""
    return PALETTE[i % len(PALETTE)]


def key_of(i: int) -> str:
    """The letter of the i-th sequence, likewise."""
    return KEYS[i % len(KEYS)]
