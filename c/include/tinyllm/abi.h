/* SPDX-License-Identifier: MIT */
/* abi.h: what every other header stands on: status codes, the error slot, element types, the
 * allocator hook.
 *
 * A function that fails sets the calling thread's error slot to one line, "<public function>:
 * <what, with the values>", and changes nothing else (ABI.md R5, R6). Success leaves the slot
 * alone. */
#ifndef TINYLLM_ABI_H
#define TINYLLM_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define TL_BEGIN_DECLS extern "C" {
#define TL_END_DECLS }
#else
#define TL_BEGIN_DECLS
#define TL_END_DECLS
#endif

#if defined(__GNUC__)
#define TL_API __attribute__((visibility("default")))
#else
#define TL_API
#endif

#define TL_VERSION "0.1.0"
#define TL_ABI_VERSION 1
#define TL_LAST_ERROR_CAP 256 /* bytes of the error slot, the closing NUL included */

/* The one list of status codes: name, value. Values are ABI: append, never renumber (R3). */
#define TL_STATUS_LIST(X)                                                         \
    X(TL_OK, 0)                                                                   \
    X(TL_EINVAL, 1)       /* bad argument: NULL, negative or zero size, out of range */ \
    X(TL_ENOMEM, 2)       /* the allocator hook returned NULL */                        \
    X(TL_ESHAPE, 3)       /* sizes that disagree with each other */                     \
    X(TL_EDTYPE, 4)       /* element type not accepted here */                          \
    X(TL_EFULL, 5)        /* a fixed-capacity thing is full */                           \
    X(TL_ENOTFOUND, 6)    /* lookup miss */                                          \
    X(TL_EFORMAT, 7)      /* bad bytes: magic, checksum, version, length */            \
    X(TL_EBUSY, 8)        /* in use */                                                   \
    X(TL_EUNSUPPORTED, 9) /* not in this build, or not on this CPU */             \
    X(TL_EIO, 10)         /* the operating system refused (a thread, a file) */

/* Element types: name, value. */
#define TL_DTYPE_LIST(X)                                                                 \
    X(TL_F32, 0)                                                                         \
    X(TL_F16, 1) X(TL_BF16, 2) X(TL_F8_E4M3, 3) X(TL_F8_E5M2, 4) X(TL_I8, 5) X(TL_U8, 6) \
        X(TL_I32, 7) X(TL_Q4_G, 8)

typedef int32_t tl_status;
typedef int32_t tl_dtype;

#define TL_ENUMERATOR_(name, value) name = value,
enum { TL_STATUS_LIST(TL_ENUMERATOR_) TL_STATUS_COUNT_ };
enum { TL_DTYPE_LIST(TL_ENUMERATOR_) TL_DTYPE_COUNT_ };
#undef TL_ENUMERATOR_

TL_BEGIN_DECLS

/* TL_ABI_VERSION of the library that was loaded. */
TL_API uint32_t tl_abi_version(void);

/* TL_VERSION of the library that was loaded. Static storage. */
TL_API const char *tl_version(void);

/* The name of a status, "TL_OK" .. "TL_EIO"; "TL_UNKNOWN" for any other value. Static storage. */
TL_API const char *tl_status_str(tl_status s);

/* The calling thread's error slot: never NULL, "" before any error. The text is the slot's own
 * storage, valid until the thread's next failure or tl_set_last_error, and until the thread
 * ends. */
TL_API const char *tl_last_error(void);

/* Copies `message` into the calling thread's slot, cut to TL_LAST_ERROR_CAP - 1 bytes; NULL is "".
 * The message may be the slot's own text. */
TL_API void tl_set_last_error(const char *message);

/* Where memory comes from. `alloc` returns n bytes aligned to `align` (a power of two), or NULL;
 * `free` takes what `alloc` returned, never NULL. Both get `user`. 24 bytes: alloc 0, free 8, user
 * 16. */
typedef struct {
    void *(*alloc)(void *user, size_t n, size_t align);
    void (*free)(void *user, void *p);
    void *user;
} tl_allocator;

/* Installs a hook for every later allocation of the process; NULL brings back the default, which
 * reserves large pieces lazily. The struct is copied. What an object already holds goes back to the
 * hook it came from. Not to be called while another thread is inside the library.
 *
 * Errors; the hook in force stays:
 *   TL_EINVAL   a member alloc or free that is NULL */
TL_API tl_status tl_set_allocator(const tl_allocator *a);

/* Memory from the hook in force, for the caller to give to tl_free. NULL with the slot set, the
 * first of these decides:
 *   n is 0
 *   align is no power of two
 *   the hook has none */
TL_API void *tl_alloc(size_t n, size_t align);

/* Gives memory of tl_alloc back to the hook in force, which must be the one it came from. NULL:
 * nothing happens and the slot stays. */
TL_API void tl_free(void *p);

TL_END_DECLS

#endif
