# SPDX-License-Identifier: MIT
"""One torch thread but where a test says otherwise; threads that wait sleep."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded

import pytest
import torch
from tiny import register_references

torch.set_num_threads(1)
register_references()


@pytest.fixture(autouse=True)
def _grad_mode() -> None:
    """An interrupt in the test before may have landed in torch's own way out of ``no_grad``."""
    torch.set_grad_enabled(True)
