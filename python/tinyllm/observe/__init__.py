# SPDX-License-Identifier: MIT
"""What is seen of the library while it works: ``pool`` looks at a cache and its blocks, ``calls``
at calls of attention."""
