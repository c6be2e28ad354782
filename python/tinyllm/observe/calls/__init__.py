# SPDX-License-Identifier: MIT
"""Calls of paged attention: recordings of them, what differs between two, and timelines."""
