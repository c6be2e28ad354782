# SPDX-License-Identifier: MIT
"""13_your_arrays.py: attention over an engine's own arrays, written through its slot mapping.
Anything that numpy reads by DLPack or the buffer protocol will do. Run it with python."""

import numpy as np
from tinyllm import KVView, paged_attention, windowed_attention

BLOCKS, SLOTS, KV_HEADS, HEADS, WIDTH = 12, 16, 2, 4, 64
cache = np.zeros((2, BLOCKS, SLOTS, KV_HEADS, WIDTH), np.float16)  # all of K, then all of V
view = KVView.from_arrays(cache[0], cache[1], layout="NHD")

rng = np.random.default_rng(1)
tables = np.array(
    [[7, 2, 9], [4, 11, 0]]
)  # the engine's block tables: sequences of 40 and of 19 positions
lengths = [40, 19]

for table, length in zip(tables, lengths, strict=True):
    position = np.arange(length)
    slots = table[position // SLOTS] * SLOTS + position % SLOTS
    k, v = rng.standard_normal((2, length, KV_HEADS, WIDTH), np.float32)
    view.write_slots(slots, k, v)  # rounded to float16

q = rng.standard_normal((2, HEADS, WIDTH), np.float32)
out, lse = paged_attention(q, view, tables, lengths, window=32, return_lse=True)

for s, length in enumerate(lengths):  # the same from gathered copies, in float64
    k, v = (
        side[tables[s]].reshape(-1, KV_HEADS, WIDTH)[:length].transpose(1, 0, 2)[None]
        for side in cache
    )
    expected, _ = windowed_attention(q[s][None, :, None], k, v, window=32, q_offset=length - 1)
    print(
        f"sequence {s}: off by {np.abs(out[s] - expected[0, :, 0]).max():.0e} from float64 at most"
    )
print(f"{np.count_nonzero(cache) // (2 * KV_HEADS * WIDTH)} slots written, none copied to be read")
