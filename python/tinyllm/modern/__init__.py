# SPDX-License-Identifier: MIT
"""Attention as today's models use it: windows, sinks, grouped heads."""

from tinyllm.modern.window import windowed_attention

__all__ = ["windowed_attention"]
