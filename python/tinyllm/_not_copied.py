# SPDX-License-Identifier: MIT
"""NotCopied: what stands for one thing outside Python, which a copy of the object would share."""

from __future__ import annotations

from typing import ClassVar, NoReturn


class NotCopied:
    """``copy.copy``, ``copy.deepcopy`` and ``pickle`` raise TypeError, which says ``_instead``."""

    __slots__ = ()
    _instead: ClassVar[str]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} cannot be copied or pickled: {self._instead}")
