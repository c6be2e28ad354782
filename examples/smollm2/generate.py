# SPDX-License-Identifier: MIT
"""Greedy answers to questions about one shared prompt, with a digest of all logits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tinyllm import PagedKVCache

from .model import Clock, Model
from .rows import Crew, Floats


@dataclass
class Answer:
    """The tokens of an answer, and for each the SHA-256 of the logits it was chosen from."""

    ids: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    ended: bool = False

    def take(self, logits: Floats, end: int) -> None:
        token = int(logits.argmax())
        self.digests.append(hashlib.sha256(logits.tobytes()).digest())
        self.ids.append(token)
        self.ended = token == end


def digest_of(answers: Sequence[Answer], tokens: int) -> str:
    """One digest for the logits of the first `tokens` tokens of some answers: equal if and only if
    every bit is."""
    whole = hashlib.sha256()
    for answer in answers:
        whole.update(len(answer.digests[:tokens]).to_bytes(4, "little"))
        whole.update(b"".join(answer.digests[:tokens]))
    return whole.hexdigest()


def prefill(
    model: Model,
    cache: PagedKVCache,
    name: str,
    tokens: Sequence[int],
    crew: Crew,
    chunk: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Store a new sequence's tokens, `chunk` of them a call; `progress` is called after each."""
    cache.add_seq(name)
    for begin in range(0, len(tokens), chunk):
        model.forward(cache, [(name, tokens[begin : begin + chunk])], crew)
        progress(min(begin + chunk, len(tokens)), len(tokens))


def ask(
    model: Model,
    cache: PagedKVCache,
    parent: str,
    questions: Mapping[str, Sequence[int]],
    crew: Crew,
    limit: int,
    end: int,
    listen: Callable[[Mapping[str, Answer]], None] = lambda answers: None,
    clock: Clock | None = None,
) -> dict[str, Answer]:
    """Fork `parent` once a question and answer all of them in one batch, up to `limit` tokens each.

    The forks stay in the cache, under the questions' names. An answer that ends leaves the batch.
    `listen` is called after every step; `clock` counts the decode steps and not the prefill of the
    questions.
    """
    for name in questions:
        cache.fork(parent, name)
    answers = {name: Answer() for name in questions}
    live = list(questions)
    logits = model.forward(cache, [(name, questions[name]) for name in live], crew)
    while True:
        for name, row in zip(live, logits, strict=True):
            answers[name].take(row, end)
        listen(answers)
        live = [name for name in live if not answers[name].ended and len(answers[name].ids) < limit]
        if not live:
            return answers
        logits = model.forward(
            cache, [(name, answers[name].ids[-1:]) for name in live], crew, clock
        )
