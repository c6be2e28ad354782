/* SPDX-License-Identifier: MIT */
/* prefix_inner.h: what the block pool tells the prefix index, and asks it. Blocks are in the index
 * of the pool that calls. */
#ifndef TL_PREFIX_INNER_H
#define TL_PREFIX_INNER_H

#include "tinyllm/prefix.h"

/* The last reference on a block is gone: it becomes cached where every block behind it is, and so
 * do those in front that waited for it alone. */
void tl_prefix_retire(tl_prefix *px, uint32_t id);

/* An allocation takes a block, which has left the list of cached ones. */
void tl_prefix_evict(tl_prefix *px, uint32_t id);

/* How many of a block's references are pins. */
uint32_t tl_prefix_pins(const tl_prefix *px, uint32_t id);

/* The pool goes. */
void tl_prefix_detach(tl_prefix *px);

#endif
