# SPDX-License-Identifier: MIT
"""A cache at one moment: snapshots, their pictures and metrics, and where a query's attention
lies."""
