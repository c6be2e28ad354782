# SPDX-License-Identifier: MIT
"""The C library as Python sees it: ``libtinyllm`` mirrors the headers, ``handle`` owns what a
constructor made."""
