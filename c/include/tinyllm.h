/* SPDX-License-Identifier: MIT */
/* libtinyllm: the attention step of LLM inference on CPUs over a paged KV cache, with the same bits
 * always.
 * This header includes the others in reading order. ABI.md holds the rules (R1, R2, ...) they
 * cite. */
#ifndef TINYLLM_H
#define TINYLLM_H

#include "tinyllm/abi.h"
#include "tinyllm/isa.h"
#include "tinyllm/arena.h"
#include "tinyllm/pool.h"
#include "tinyllm/kv_pool.h"
#include "tinyllm/prefix.h"
#include "tinyllm/kv_view.h"
#include "tinyllm/numerics.h"
#include "tinyllm/softmax.h"
#include "tinyllm/observe.h"
#include "tinyllm/attention.h"

#endif
