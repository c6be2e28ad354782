# SPDX-License-Identifier: MIT
"""Looking at what the library does: records of calls, their differences, timelines, pictures of a cache."""
