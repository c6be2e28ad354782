# SPDX-License-Identifier: MIT
"""14_same_bits.py: one row alone, in batches, on threads, in other blocks, on each instruction set.
Each line ends in a digest of its bits: all are equal. Run it with python."""

import hashlib
import os
import subprocess
import sys

import numpy as np
from tinyllm import PagedKVCache, ThreadPool, paged_attention_decode
from tinyllm.ffi.libtinyllm import load

SHAPE = {"n_layers": 1, "n_kv_heads": 2, "d_head": 64}
rng = np.random.default_rng(2)
k, v = rng.standard_normal((2, 2, 2500, 64), np.float32)
others = rng.standard_normal((7, 2, 2, 300, 64), np.float32)
q = rng.standard_normal((8, 8, 64), np.float32)


def row(
    batch: int = 1, threads: "int | ThreadPool" = 1, block_size: int = 16, window: int = 0
) -> str:
    """A digest of the row of sequence 0, computed beside ``batch - 1`` other sequences."""
    with PagedKVCache(None, num_blocks=5000, block_size=block_size, **SHAPE) as cache:
        for s in range(batch):
            cache.add_seq(s)
            cache.append(s, 0, *((k, v) if s == 0 else others[s - 1]))
        order = [*range(1, batch), 0]  # sequence 0 comes last
        out = paged_attention_decode(
            q[order], cache, order, layer=0, threads=threads, window=window
        )
    return hashlib.sha256(out[-1].tobytes()).hexdigest()[:16]


if sys.argv[1:] == ["--row"]:  # this program, started again below
    print(row())
    sys.exit()

print(f"alone                {row()}")
print(f"in a batch of 3      {row(batch=3)}")
print(f"in a batch of 8      {row(batch=8)}")
with ThreadPool(4) as pool:
    print(f"on 4 threads         {row(batch=8, threads=pool)}")
print(f"in blocks of 1       {row(block_size=1)}")
print(f"in blocks of 256     {row(block_size=256)}")
print(f"window past the end  {row(window=2500)}")
for isa in load().tl_isa_names().decode().split():
    environment = {**os.environ, "TINYLLM_ISA": isa}  # is read once, when a process first needs it
    command = [sys.executable, __file__, "--row"]
    print(f"{isa:20} {subprocess.check_output(command, env=environment, text=True).strip()}")
