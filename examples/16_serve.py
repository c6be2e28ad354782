# SPDX-License-Identifier: MIT
"""16_serve.py: a serving loop: arrivals, prefixes, chunks beside decode, a pool that is too small,
cancelled requests; each answer is the one it has alone. Run it with python."""

from dataclasses import dataclass, field

import numpy as np
from smollm2.model import Config, Model, random_model
from smollm2.rows import Crew
from tinyllm import PagedKVCache


@dataclass(eq=False)
class Request:
    """What is asked, and what has been answered; ``dice`` are its own, so that company, chunks and
    pauses change nothing."""

    name: str
    prompt: "list[int]"
    n_new: int
    seed: int = 0
    temperature: float = 0.0
    answer: "list[int]" = field(default_factory=list)
    todo: "list[int]" = field(default_factory=list)  # tokens whose K and V are to be computed

    def __post_init__(self) -> None:
        self.dice = np.random.default_rng(self.seed)

    def choose(self, logits: np.ndarray) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        weights = np.exp((logits - logits.max()).astype(np.float64) / self.temperature)
        return int(np.searchsorted(weights.cumsum(), self.dice.random() * weights.sum()))


class Server:
    """One model and one cache. A step computes at most ``budget`` tokens: whoever writes has one,
    and what is left goes to prompts."""

    def __init__(self, model: Model, cache: PagedKVCache, crew: Crew, budget: int = 32) -> None:
        self.model, self.cache, self.crew, self.budget = model, cache, crew, budget
        self.waiting: list[Request] = []  # first come, first served
        self.running: list[Request] = []  # those that have a sequence in the cache, oldest first
        self.found = self.computed = self.put_off = 0

    def submit(self, request: Request) -> None:
        blocks = -(-(len(request.prompt) + request.n_new) // self.cache.block_size)
        if blocks > self.cache.num_blocks:
            raise ValueError(f"a request of {blocks} blocks, and there are {self.cache.num_blocks}")
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        if request in self.running:
            self.leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def step(self) -> "list[Request]":
        """One forward; the requests that it finished."""
        self.admit()
        work = self.plan()
        logits = self.model.forward(
            self.cache, [(request.name, new) for request, new in work.items()], self.crew
        )
        self.computed += sum(map(len, work.values()))
        finished = []
        for request, row in zip(work, logits, strict=True):
            del request.todo[: len(work[request])]
            if request.todo:
                continue  # more of the prompt is to come
            request.answer.append(request.choose(row))
            if len(request.answer) == request.n_new:
                self.leave(request)
                finished.append(request)
            else:
                request.todo = request.answer[-1:]
                self.cache.extend(request.name, request.todo)
        return finished

    def admit(self) -> None:
        """Begins who waits, with what is there of its text, while the pool has a block to spare."""
        while self.waiting and self.cache.num_free_blocks() > len(self.running):
            request = self.waiting.pop(0)
            text = request.prompt + request.answer  # some of it, where it was put off
            n = self.cache.add_seq(request.name, text, leave=1)
            request.todo = text[n:]
            self.found += n
            self.running.append(request)

    def plan(self) -> "dict[Request, list[int]]":
        """Who brings which tokens. Where the pool cannot hold them the youngest is put off."""
        while True:
            work, room = {}, self.budget
            for request in sorted(self.running, key=lambda r: len(r.todo) > 1):
                if room:
                    work[request] = request.todo[:room]
                    room -= len(work[request])
            needs = self.cache.needs({request.name: len(new) for request, new in work.items()})
            if needs.total <= needs.available:
                return work
            self.waiting.insert(0, self.running[-1])
            self.leave(self.running[-1])
            self.put_off += 1

    def leave(self, request: Request) -> None:
        """Gives its blocks up; what it computed can be found until others need the room."""
        self.running.remove(request)
        self.cache.free(request.name)


TINY = Config(
    layers=2, width=48, heads=6, kv_heads=2, head_dim=8, ffn=80, vocabulary=101, context=200
)


def main() -> None:
    model, system = random_model(TINY, seed=1), [7, 3, 9, 4] * 10  # a prompt that all begin with
    requests = [
        Request(f"chat {n}", system + [n] * (3 + 5 * n), n_new=12, seed=n, temperature=n % 2)
        for n in range(8)
    ]
    with Crew(1) as crew, model.new_cache(18, block_tokens=8) as cache:
        server = Server(model, cache, crew)
        for n, request in enumerate(requests):
            server.submit(request)
            server.step()
            if n == 4:
                server.cancel(request)
        print(cache.look())
        while server.running or server.waiting:
            server.step()
        print(f"{server.computed} tokens computed, {server.found} found, "
              f"{server.put_off} times put off")  # fmt: skip
    for n, request in enumerate(requests):
        with Crew(1) as crew, model.new_cache(40, block_tokens=8) as cache:
            server = Server(model, cache, crew)
            alone = Request(
                "alone", request.prompt, request.n_new, request.seed, request.temperature
            )
            server.submit(alone)
            while server.running or server.waiting:
                server.step()
        same = "as alone" if request.answer == alone.answer else "cancelled"
        print(f"request {n}: {len(request.prompt)} + {len(request.answer)} tokens, {same}")


if __name__ == "__main__":
    main()
