# SPDX-License-Identifier: MIT
"""15_prefix_cache.py: blocks are found again by their tokens; a prompt computes what is new to it.
The engine keeps block tables, the library an index, by functions of C. Run it with python."""

import numpy as np
from tinyllm import PagedKVCache, TlError
from tinyllm.ffi.libtinyllm import TL_ENOTFOUND, f32_ptr, u32_ptr

BLOCK, KV_HEADS, WIDTH = 4, 1, 8


def key_and_value(tokens: list[int]) -> "tuple[np.ndarray, np.ndarray]":
    """Stands for a model: K and V [KV_HEADS, T, WIDTH] of some tokens."""
    rows = np.array(tokens, np.float32)[None, :, None] + np.zeros((KV_HEADS, 1, WIDTH), np.float32)
    return rows, -rows


def find(lib, pool: int, name: int) -> "int | None":
    """The block of that name, with one reference taken on it."""
    found = np.empty(1, np.uint32)
    try:
        lib.tl_kv_lookup(pool, name, u32_ptr(found))
        return int(found[0])
    except TlError as error:
        if error.status != TL_ENOTFOUND:
            raise
        return None


def prefill(lib, pool: int, tokens: list[int]) -> np.ndarray:
    """A block table for ``tokens``: known full blocks are shared, the others are registered."""
    n_blocks, n_full = -(-len(tokens) // BLOCK), len(tokens) // BLOCK
    names, parent = [], 0
    for i in range(n_full):
        chunk = np.array(tokens[i * BLOCK : (i + 1) * BLOCK], np.uint32)
        parent = lib.tl_kv_block_hash(
            parent, u32_ptr(chunk), BLOCK
        )  # names the whole prefix up to here
        names.append(parent)
    table = np.empty(n_blocks, np.uint32)
    known = 0
    while known < n_full and (block := find(lib, pool, names[known])) is not None:
        table[known] = block
        known += 1
    begin = known * BLOCK
    if begin < len(tokens):
        fresh = np.empty(n_blocks - known, np.uint32)
        lib.tl_kv_alloc(pool, len(fresh), u32_ptr(fresh))
        table[known:] = fresh
        k, v = key_and_value(tokens[begin:])
        lib.tl_kv_append_f32(
            pool, 0, u32_ptr(table), n_blocks, begin, len(tokens) - begin,
            f32_ptr(k), f32_ptr(v), k.strides[0] // 4, k.strides[1] // 4,
        )  # fmt: skip
        for i in range(known, n_blocks):
            lib.tl_kv_set_fill(pool, int(table[i]), min(BLOCK, len(tokens) - i * BLOCK))
            if i < n_full:
                lib.tl_kv_register(pool, int(table[i]), names[i])
    print(f"{begin} tokens were there, {len(tokens) - begin} computed: blocks {table.tolist()}")
    return table


with PagedKVCache(None, 8, BLOCK, 1, KV_HEADS, WIDTH) as cache:
    first = prefill(cache.lib, cache.pool, [5, 6, 7, 8, 9, 10, 11, 12, 13])
    second = prefill(cache.lib, cache.pool, [5, 6, 7, 8, 9, 10, 11, 12, 20, 21])
    print(f"both live:     {cache.stats()}")
    for table in (first, second):
        for block in reversed(table.tolist()):  # the front of a chain is to be evicted last
            cache.lib.tl_kv_unref(cache.pool, block)
    print(f"both finished: {cache.stats()}")
    prefill(cache.lib, cache.pool, [5, 6, 7, 8, 9, 10, 99])
