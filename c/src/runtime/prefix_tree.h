/* SPDX-License-Identifier: MIT */
/* prefix_tree.h: an ordered tree whose shape is random: a treap. Everything in the left of a node
 * comes before it, everything in the right after it, and no node has a higher priority than the one
 * above it. Priorities are secret random numbers, so n nodes are about 2 ln n deep whatever they
 * are and in whichever order they came. Nothing recurses. */
#ifndef TL_PREFIX_TREE_H
#define TL_PREFIX_TREE_H

#include <stddef.h>
#include <stdint.h>

struct tree {
    struct tree *left, *right;
    uint64_t priority;
};

/* Below 0 where the key comes before the node, 0 where it is the node's own, else above. */
typedef int tree_compare(const void *key, const struct tree *node);

/* Adds a node with a priority, whose key is not there yet. */
static inline void tree_insert(struct tree **link, struct tree *node, const void *key,
                               tree_compare *compare)
{
    while (*link && (*link)->priority >= node->priority)
        link = compare(key, *link) < 0 ? &(*link)->left : &(*link)->right;
    /* What stood here is split into those before the node and those after it. */
    struct tree *rest = *link, **before = &node->left, **after = &node->right;
    *link = node;
    while (rest) {
        if (compare(key, rest) < 0) {
            *after = rest;
            after = &rest->left;
            rest = rest->left;
        } else {
            *before = rest;
            before = &rest->right;
            rest = rest->right;
        }
    }
    *before = *after = NULL;
}

/* Takes out a node that is there; its own fields stay. */
static inline void tree_remove(struct tree **link, const struct tree *node, const void *key,
                               tree_compare *compare)
{
    while (*link != node)
        link = compare(key, *link) < 0 ? &(*link)->left : &(*link)->right;
    struct tree *before = node->left, *after = node->right;
    while (before && after) {
        if (before->priority > after->priority) {
            *link = before;
            link = &before->right;
            before = before->right;
        } else {
            *link = after;
            link = &after->left;
            after = after->left;
        }
    }
    *link = before ? before : after;
}

#endif
