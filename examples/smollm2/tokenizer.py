# SPDX-License-Identifier: MIT
"""Text to token ids and back.

Two tokenizers with one face: :class:`BpeTokenizer`, the byte-pair encoding whose vocabulary and
merges a GGUF file carries (run by the `tokenizers` package), and :class:`AsciiTokenizer`, one token
per character, for a model that was never trained.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from .gguf import GGUF, GGUFError

_CONTROL: Final = 3  # token type of <|im_start|> and the like
_DIGIT_SPLITTING: Final = ("smollm",)  # pre-tokenizers that make every digit a token of its own
_BYTE_LEVEL: Final = ("smollm", "gpt-2", "default")


class MissingPackage(RuntimeError):
    """The `tokenizers` package is not installed."""


class Tokenizer(Protocol):
    """What the demonstration needs of a tokenizer. `end` is the id that ends an answer."""

    end: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def opening(self, role: str) -> str:
        """How a turn of a conversation begins: what stands before the words of `role`."""

    def turn(self, role: str, text: str) -> str:
        """A whole turn."""


class BpeTokenizer:
    """Byte-level BPE from a GGUF file's own vocabulary, with the ChatML turns of the model."""

    def __init__(self, file: GGUF) -> None:
        try:
            from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        except ImportError as error:
            raise MissingPackage(
                "the package 'tokenizers' is missing; run `make demo`, or pip install tokenizers"
            ) from error

        kind, split = (
            file.text("tokenizer.ggml.model"),
            file.metadata.get("tokenizer.ggml.pre", "default"),
        )
        if kind != "gpt2" or split not in _BYTE_LEVEL:
            raise GGUFError(
                f"{file.path}: tokenizer {kind!r} with pre-tokenizer {split!r} is not supported"
            )
        tokens = file.texts("tokenizer.ggml.tokens")
        merges = [self._pair(file, merge) for merge in file.texts("tokenizer.ggml.merges")]
        types = file.integers("tokenizer.ggml.token_type")
        if len(types) != len(tokens):
            raise GGUFError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types")
        self.end = file.integer("tokenizer.ggml.eos_token_id")
        self._chat = {"<|im_start|>", "<|im_end|>"} <= set(tokens)

        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if split in _DIGIT_SPLITTING:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        bpe: Any = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
        bpe.decoder = decoders.ByteLevel()
        bpe.add_special_tokens(
            [
                AddedToken(t, special=True)
                for t, k in zip(tokens, types, strict=True)
                if k == _CONTROL
            ]
        )
        self._bpe = bpe

    @staticmethod
    def _pair(file: GGUF, merge: str) -> tuple[str, str]:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise GGUFError(f"{file.path}: merge {merge!r} is not two tokens")
        return left, right

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._bpe.decode(ids, skip_special_tokens=True)
        return text

    def opening(self, role: str) -> str:
        return f"<|im_start|>{role}\n" if self._chat else f"{role}: "

    def turn(self, role: str, text: str) -> str:
        return self.opening(role) + text + ("<|im_end|>\n" if self._chat else "\n")


class AsciiTokenizer:
    """Token i is the i-th printable ASCII character; the last token ends an answer. Whatever else a
    text holds counts as a space."""

    end = 95
    vocabulary: Final = 96

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 32 if " " <= c <= "~" else 0 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(32 + i) for i in ids if i != self.end)

    def opening(self, role: str) -> str:
        return f"{role}: "

    def turn(self, role: str, text: str) -> str:
        return self.opening(role) + text + "\n"
