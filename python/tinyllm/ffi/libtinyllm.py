# SPDX-License-Identifier: MIT
"""The headers of libtinyllm as a table of prototypes, and the library. The only importer of ctypes.

``PROTOTYPES`` has one row per function in header order: name, result, arguments. ``Lib`` binds a
row on its first use and every call goes through ``Function``: integers must fit their C type
(ctypes alone would cut them), a result declared ``STATUS`` is 0 or raises TlError.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import partial
from itertools import repeat
from operator import index
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinyllm._not_copied import NotCopied
from tinyllm.errors import AbiMismatch, TlError
from tinyllm.ffi.elf import reason_not_to_load

__all__ = [
    "ABI_VERSION",
    "KV_VIEW_BYTES",
    "PAGED_ATTN_ARGS_BYTES",
    "PROTOTYPES",
    "STATUS",
    "STATUS_NAMES",
    "STRUCTS",
    "AbiMismatch",
    "AllocFn",
    "Allocator",
    "ArenaMark",
    "ArenaStats",
    "AttnPart",
    "FreeFn",
    "Function",
    "KvBlock",
    "KvConfig",
    "KvNeeds",
    "KvStats",
    "KvView",
    "Lib",
    "PagedAttnArgs",
    "PrefixBlock",
    "PrefixStats",
    "RangeFn",
    "Step",
    "TlError",
    "Trace",
    "TraceEvent",
    "address_cell",
    "all_at_once",
    "block_view",
    "export_blocks",
    "f32_ptr",
    "i8_ptr",
    "i32_ptr",
    "i64_ptr",
    "library_path",
    "load",
    "new_handle",
    "signatures",
    "step_for_all",
    "store_address",
    "struct_ptr",
    "u8_ptr",
    "u16_ptr",
    "u32_ptr",
    "u64_ptr",
]

# --- constants
# ----------------------------------------------------------------------------------------------

ABI_VERSION: Final = 1
TL_LAST_ERROR_CAP: Final = 256

STATUS_NAMES: Final[dict[int, str]] = {
    0: "TL_OK",
    1: "TL_EINVAL",
    2: "TL_ENOMEM",
    3: "TL_ESHAPE",
    4: "TL_EDTYPE",
    5: "TL_EFULL",
    6: "TL_ENOTFOUND",
    7: "TL_EFORMAT",
    8: "TL_EBUSY",
    9: "TL_EUNSUPPORTED",
    10: "TL_EIO",
}
(
    TL_OK, TL_EINVAL, TL_ENOMEM, TL_ESHAPE, TL_EDTYPE, TL_EFULL, TL_ENOTFOUND, TL_EFORMAT, TL_EBUSY,
    TL_EUNSUPPORTED, TL_EIO,
) = STATUS_NAMES  # fmt: skip

DTYPE_NAMES: Final[dict[int, str]] = {
    0: "TL_F32",
    1: "TL_F16",
    2: "TL_BF16",
    3: "TL_F8_E4M3",
    4: "TL_F8_E5M2",
    5: "TL_I8",
    6: "TL_U8",
    7: "TL_I32",
    8: "TL_Q4_G",
}
TL_F32, TL_F16, TL_BF16, TL_F8_E4M3, TL_F8_E5M2, TL_I8, TL_U8, TL_I32, TL_Q4_G = DTYPE_NAMES

TL_ARENA_DEFAULT_BLOCK: Final = 1 << 20
TL_ARENA_DEFAULT_ALIGN: Final = 64
TL_ARENA_MAX_ALIGN: Final = 4096
TL_POOL_MAX_THREADS: Final = 4096
TL_KV_FORMAT_F16: Final = 1
TL_KV_FORMAT_E4M3: Final = 2
TL_KV_FORMAT_I8: Final = 3
TL_KV_FORMAT_BF16: Final = 4
TL_KV_FORMAT_F32: Final = 5
TL_KV_FORMAT_V1: Final = TL_KV_FORMAT_F16
TL_KV_MAGIC: Final = b"TLKV"
TL_KV_ENVELOPE_HEADER: Final = 28
TL_KV_RECORD_HEADER: Final = 12
TL_KV_ALIGN: Final = 64
TL_KV_HASH_PREFIX: Final = (1 << 64) - 1
TL_PREFIX_NONE: Final = (1 << 32) - 1
TL_NUMERICS_VERSION: Final = 2
TL_ATTN_TILE: Final = 16
TL_ATTN_SPLIT: Final = 1024
TL_ATTN_STRETCH: Final = 16384
TL_MAX_HEAD_DIM: Final = 4096
TL_ATTN_WAVE_SPLITS: Final = 4
TL_TRACE_ROWS: Final = 0
TL_TRACE_SHARED: Final = 1
TL_TRACE_MERGE: Final = 2

# --- types
# --------------------------------------------------------------------------------------------------


class STATUS(c_int32):
    """As a result type: the function returns 0 or raises TlError."""


AllocFn = CFUNCTYPE(c_void_p, c_void_p, c_size_t, c_size_t)
FreeFn = CFUNCTYPE(None, c_void_p, c_void_p)
RangeFn = CFUNCTYPE(None, c_void_p, c_int64, c_int64, c_int)


class Allocator(Structure):
    """``tl_allocator``"""

    _fields_ = [("alloc", AllocFn), ("free", FreeFn), ("user", c_void_p)]


class ArenaMark(Structure):
    """``tl_arena_mark``"""

    _fields_ = [("offset", c_size_t), ("block", c_size_t)]


class ArenaStats(Structure):
    """``tl_arena_stats``"""

    _fields_ = [
        ("bytes_used", c_size_t),
        ("bytes_reserved", c_size_t),
        ("high_water", c_size_t),
        ("n_blocks", c_size_t),
    ]


class KvConfig(Structure):
    """``tl_kv_cfg``"""

    _fields_ = [
        ("n_blocks", c_uint32),
        ("block_tokens", c_uint32),
        ("n_layers", c_uint32),
        ("n_kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("dtype", c_int32),
        ("format", c_uint32),
    ]


class KvStats(Structure):
    """``tl_kv_stats``"""

    _fields_ = [
        ("free", c_uint32),
        ("used", c_uint32),
        ("cached", c_uint32),
        ("evictions", c_uint32),
        ("unrepresentable", c_uint64),
    ]


class KvBlock(Structure):
    """``tl_kv_block``"""

    _fields_ = [("hash", c_uint64), ("refs", c_uint32), ("fill", c_uint32)]


class PrefixStats(Structure):
    """``tl_prefix_stats``"""

    _fields_ = [
        ("queries", c_uint64),
        ("tokens_asked", c_uint64),
        ("tokens_found", c_uint64),
        ("blocks", c_uint64),
        ("namespaces", c_uint64),
        ("pins", c_uint64),
        ("evictions", c_uint64),
        ("age_ns", c_uint64),
        ("last_age_ns", c_uint64),
    ]


class PrefixBlock(Structure):
    """``tl_prefix_block``"""

    _fields_ = [
        ("ns", c_void_p),
        ("ns_bytes", c_size_t),
        ("tokens", POINTER(c_uint32)),
        ("depth", c_int64),
        ("parent", c_uint32),
        ("pins", c_uint32),
    ]


class KvNeeds(Structure):
    """``tl_kv_needs``"""

    _fields_ = [("fresh", c_uint32), ("copies", c_uint32)]


class KvView(Structure):
    """``tl_kv_view``"""

    _fields_ = [
        ("size", c_uint64),
        ("k", c_void_p),
        ("v", c_void_p),
        ("dtype", c_int32),
        ("reserved", c_uint32),
        ("n_blocks", c_int64),
        ("block_tokens", c_int64),
        ("n_kv_heads", c_int64),
        ("head_dim_k", c_int64),
        ("head_dim_v", c_int64),
        ("k_block_stride", c_int64),
        ("k_head_stride", c_int64),
        ("k_token_stride", c_int64),
        ("v_block_stride", c_int64),
        ("v_head_stride", c_int64),
        ("v_token_stride", c_int64),
        ("k_scale", POINTER(c_float)),
        ("v_scale", POINTER(c_float)),
        ("k_scale_block_stride", c_int64),
        ("k_scale_head_stride", c_int64),
        ("k_scale_token_stride", c_int64),
        ("v_scale_block_stride", c_int64),
        ("v_scale_head_stride", c_int64),
        ("v_scale_token_stride", c_int64),
    ]


KV_VIEW_BYTES: Final = ctypes.sizeof(KvView)  # what its member ``size`` says


class TraceEvent(Structure):
    """``tl_trace_event``"""

    _fields_ = [
        ("worker", c_int32),
        ("what", c_int32),
        ("seq", c_int64),
        ("kv_head", c_int64),
        ("first_token", c_int64),
        ("n_tokens", c_int64),
        ("first_split", c_int64),
        ("n_splits", c_int64),
        ("begin_ns", c_int64),
        ("end_ns", c_int64),
    ]


class Trace(Structure):
    """``tl_trace``"""

    _fields_ = [("events", POINTER(TraceEvent)), ("capacity", c_int64), ("n", c_int64)]


class PagedAttnArgs(Structure):
    """``tl_paged_attn_args``"""

    _fields_ = [
        ("size", c_uint64),
        ("view", POINTER(KvView)),
        ("q", POINTER(c_float)),
        ("out", POINTER(c_float)),
        ("lse", POINTER(c_float)),
        ("q_token_stride", c_int64),
        ("q_head_stride", c_int64),
        ("out_token_stride", c_int64),
        ("out_head_stride", c_int64),
        ("B", c_int64),
        ("H", c_int64),
        ("cu_seqlens_q", POINTER(c_int32)),
        ("ctx_lens", POINTER(c_int32)),
        ("block_tables", POINTER(c_uint32)),
        ("table_stride", c_int64),
        ("window", c_int64),
        ("alibi_slopes", POINTER(c_float)),
        ("sink_logits", POINTER(c_float)),
        ("scale", c_float),
        ("logits_softcap", c_float),
        ("tp", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("trace", POINTER(Trace)),
        ("first_block", c_int64),
        ("state_span", c_int64),
    ]


PAGED_ATTN_ARGS_BYTES: Final = ctypes.sizeof(PagedAttnArgs)  # what its member ``size`` says


class AttnPart(Structure):
    """``tl_attn_part``"""

    _fields_ = [
        ("states", POINTER(c_float)),
        ("first_split", c_int64),
        ("n_splits", c_int64),
        ("span", c_int64),
    ]


STRUCTS: Final[dict[str, type[Structure]]] = {
    "tl_allocator": Allocator,
    "tl_arena_mark": ArenaMark,
    "tl_arena_stats": ArenaStats,
    "tl_kv_cfg": KvConfig,
    "tl_kv_stats": KvStats,
    "tl_kv_block": KvBlock,
    "tl_kv_needs": KvNeeds,
    "tl_prefix_stats": PrefixStats,
    "tl_prefix_block": PrefixBlock,
    "tl_kv_view": KvView,
    "tl_trace_event": TraceEvent,
    "tl_trace": Trace,
    "tl_paged_attn_args": PagedAttnArgs,
    "tl_attn_part": AttnPart,
}

# --- prototypes
# ---------------------------------------------------------------------------------------------

_f32, _i32, _i64 = POINTER(c_float), POINTER(c_int32), POINTER(c_int64)
_i8, _u8, _u16, _u32 = POINTER(c_int8), POINTER(c_uint8), POINTER(c_uint16), POINTER(c_uint32)
_handle_out = POINTER(c_void_p)
_of_prefix = (c_void_p, c_void_p, c_size_t, _u32, c_int64)  # index, namespace, tokens

PROTOTYPES: Final[tuple[tuple[str, Any, tuple[Any, ...]], ...]] = (
    # tinyllm/abi.h
    ("tl_abi_version", c_uint32, ()),
    ("tl_version", c_char_p, ()),
    ("tl_status_str", c_char_p, (c_int32,)),
    ("tl_last_error", c_char_p, ()),
    ("tl_set_last_error", None, (c_char_p,)),
    ("tl_set_allocator", STATUS, (POINTER(Allocator),)),
    ("tl_alloc", c_void_p, (c_size_t, c_size_t)),
    ("tl_free", None, (c_void_p,)),
    # tinyllm/isa.h
    ("tl_isa_name", c_char_p, ()),
    ("tl_isa_names", c_char_p, ()),
    ("tl_numerics_version", c_uint32, ()),
    # tinyllm/arena.h
    ("tl_arena_create", STATUS, (c_size_t, _handle_out)),
    ("tl_arena_alloc", c_void_p, (c_void_p, c_size_t, c_size_t)),
    ("tl_arena_mark_get", ArenaMark, (c_void_p,)),
    ("tl_arena_reset_to", None, (c_void_p, ArenaMark)),
    ("tl_arena_stats_get", None, (c_void_p, POINTER(ArenaStats))),
    ("tl_arena_destroy", None, (c_void_p,)),
    # tinyllm/pool.h
    ("tl_pool_create", STATUS, (c_int, _handle_out)),
    ("tl_parallel_for", STATUS, (c_void_p, c_int64, c_int64, RangeFn, c_void_p)),
    ("tl_pool_threads", c_int, (c_void_p,)),
    ("tl_pool_destroy", None, (c_void_p,)),
    # tinyllm/kv_pool.h
    ("tl_kv_pool_create", STATUS, (POINTER(KvConfig), _handle_out)),
    ("tl_kv_pool_destroy", None, (c_void_p,)),
    ("tl_kv_alloc", STATUS, (c_void_p, c_uint32, _u32)),
    ("tl_kv_ref", None, (c_void_p, c_uint32)),
    ("tl_kv_unref", STATUS, (c_void_p, c_uint32)),
    ("tl_kv_cow", STATUS, (c_void_p, c_uint32, _u32)),
    ("tl_kv_set_fill", STATUS, (c_void_p, c_uint32, c_uint32)),
    ("tl_kv_set_length", STATUS, (c_void_p, _u32, c_int32, c_int64, c_int64)),
    ("tl_kv_fill", c_uint32, (c_void_p, c_uint32)),
    ("tl_kv_refs", c_uint32, (c_void_p, c_uint32)),
    ("tl_kv_block_hash", c_uint64, (c_uint64, _u32, c_uint32)),
    ("tl_kv_register", STATUS, (c_void_p, c_uint32, c_uint64)),
    ("tl_kv_lookup", STATUS, (c_void_p, c_uint64, _u32)),
    ("tl_kv_block_ptr", c_void_p, (c_void_p, c_uint32, c_uint32, c_int)),
    ("tl_kv_scale_ptr", _f32, (c_void_p, c_uint32, c_uint32, c_int)),
    ("tl_kv_pool_cfg", None, (c_void_p, POINTER(KvConfig))),
    ("tl_kv_block_bytes", c_size_t, (c_void_p,)),
    ("tl_kv_export_bytes", c_size_t, (c_void_p, c_uint32)),
    ("tl_kv_export", STATUS, (c_void_p, _u32, c_uint32, c_void_p, c_size_t, POINTER(c_size_t))),
    ("tl_kv_import", STATUS, (c_void_p, c_void_p, c_size_t, _u32)),
    ("tl_kv_stats_get", None, (c_void_p, POINTER(KvStats))),
    ("tl_kv_blocks_get", STATUS, (c_void_p, c_uint32, c_uint32, POINTER(KvBlock))),
    ("tl_crc32c", c_uint32, (c_void_p, c_size_t, c_uint32)),
    (
        "tl_kv_reserve",
        STATUS,
        (c_void_p, _u32, c_int64, _i32, _i32, c_int64, c_int, POINTER(KvNeeds)),
    ),
    ("tl_kv_oldest", STATUS, (c_void_p, c_uint32, _u32, _u32)),
    ("tl_kv_trim", STATUS, (c_void_p, c_uint32, POINTER(c_uint64))),
    (
        "tl_kv_append",
        STATUS,
        (
            *(c_void_p, c_uint32, _u32, c_int64, _i32, _i32, c_int64),
            *(c_void_p, c_void_p, c_int32, *(c_int64,) * 4, c_void_p),
        ),
    ),
    (
        "tl_kv_append_f32",
        STATUS,
        (c_void_p, c_uint32, _u32, c_int32, c_int64, c_int64, _f32, _f32, c_int64, c_int64),
    ),
    (
        "tl_kv_gather_f32",
        STATUS,
        (c_void_p, c_uint32, _u32, c_int32, c_int64, c_int64, _f32, _f32, c_int64, c_int64),
    ),
    # tinyllm/prefix.h
    ("tl_prefix_create", STATUS, (c_void_p, _handle_out)),
    ("tl_prefix_destroy", None, (c_void_p,)),
    ("tl_prefix_match", STATUS, (*_of_prefix, _u32, _i64)),
    ("tl_prefix_peek", STATUS, (*_of_prefix, _i64)),
    (
        "tl_prefix_insert",
        STATUS,
        (c_void_p, c_void_p, c_size_t, _u32, c_int64, c_int64, _u32, _u32),
    ),
    ("tl_prefix_pin", STATUS, _of_prefix),
    ("tl_prefix_unpin", STATUS, _of_prefix),
    ("tl_prefix_drop", STATUS, (c_void_p, c_void_p, c_size_t)),
    ("tl_prefix_block_get", STATUS, (c_void_p, c_uint32, POINTER(PrefixBlock))),
    ("tl_prefix_stats_get", None, (c_void_p, POINTER(PrefixStats))),
    # tinyllm/kv_view.h
    ("tl_kv_pool_view", STATUS, (c_void_p, c_uint32, POINTER(KvView))),
    (
        "tl_kv_write_slots",
        STATUS,
        (POINTER(KvView), _i64, c_int64, c_void_p, c_void_p, c_int32, *(c_int64,) * 4),
    ),
    # tinyllm/numerics.h
    ("tl_f32_to_f16", c_uint16, (c_float,)),
    ("tl_f16_to_f32", c_float, (c_uint16,)),
    ("tl_f32_to_bf16", c_uint16, (c_float,)),
    ("tl_bf16_to_f32", c_float, (c_uint16,)),
    ("tl_f32_to_e4m3", c_uint8, (c_float,)),
    ("tl_e4m3_to_f32", c_float, (c_uint8,)),
    ("tl_f32_to_e5m2", c_uint8, (c_float,)),
    ("tl_e5m2_to_f32", c_float, (c_uint8,)),
    ("tl_f32_to_f16_n", None, (_f32, _u16, c_int64)),
    ("tl_f16_to_f32_n", None, (_u16, _f32, c_int64)),
    ("tl_f32_to_bf16_n", None, (_f32, _u16, c_int64)),
    ("tl_bf16_to_f32_n", None, (_u16, _f32, c_int64)),
    ("tl_f32_to_e4m3_n", None, (_f32, _u8, c_int64)),
    ("tl_e4m3_to_f32_n", None, (_u8, _f32, c_int64)),
    ("tl_f32_to_e5m2_n", None, (_f32, _u8, c_int64)),
    ("tl_e5m2_to_f32_n", None, (_u8, _f32, c_int64)),
    ("tl_store_i8_f32", None, (_f32, _i8, _f32, c_int64, c_int64)),
    ("tl_store_e4m3_f32", None, (_f32, _u8, _f32, c_int64, c_int64)),
    ("tl_expf", c_float, (c_float,)),
    ("tl_exp_f32", None, (_f32, _f32, c_int64)),
    # tinyllm/softmax.h
    ("tl_softmax_f32", STATUS, (_f32, _f32, c_int64, c_int64)),
    ("tl_softmax_online_f32", STATUS, (_f32, _f32, c_int64, c_int64)),
    # tinyllm/observe.h
    (
        "tl_kv_read",
        STATUS,
        (POINTER(KvView), _u32, c_int64, _i32, c_int64, c_int64, c_void_p, POINTER(c_uint64)),
    ),
    # tinyllm/attention.h
    (
        "tl_flash_attn_fwd_f32",
        STATUS,
        (
            *(_f32,) * 5,
            *(c_int64,) * 6,
            c_float,
            c_int64,
            c_int,
            c_int64,
            _f32,
            *(c_int64,) * 2,
            *(c_void_p,) * 2,
        ),
    ),
    (
        "tl_paged_attn_decode_f32",
        STATUS,
        (
            _f32,
            c_void_p,
            c_uint32,
            _u32,
            c_int32,
            _i32,
            _f32,
            *(c_int64,) * 4,
            c_float,
            c_int64,
            c_void_p,
        ),
    ),
    ("tl_paged_attn_workspace", c_size_t, (POINTER(PagedAttnArgs),)),
    ("tl_paged_attn_f32", STATUS, (POINTER(PagedAttnArgs),)),
    ("tl_paged_attn_states_f32", STATUS, (POINTER(PagedAttnArgs), c_int64, c_int64, _f32)),
    (
        "tl_attn_merge_f32",
        STATUS,
        (POINTER(AttnPart), *(c_int64,) * 4, *(_f32,) * 3, c_void_p),
    ),
)


def signatures() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every exported function in header order: name to (result type, argument types)."""
    return {name: (restype, argtypes) for name, restype, argtypes in PROTOTYPES}


# --- calling
# ------------------------------------------------------------------------------------------------

_INTEGERS: Final = (
    ctypes.c_byte, ctypes.c_ubyte, ctypes.c_short, ctypes.c_ushort, ctypes.c_int, ctypes.c_uint,
    ctypes.c_long, ctypes.c_ulong, ctypes.c_longlong, ctypes.c_ulonglong,
)  # fmt: skip
_ADDRESS_END: Final = 1 << (8 * ctypes.sizeof(c_void_p))

Step: TypeAlias = "partial[Any]"  # of a function of C


def _range(ctype: Any) -> tuple[int, int]:
    bits = 8 * ctypes.sizeof(ctype)
    return (
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if ctype(-1).value < 0 else (0, (1 << bits) - 1)
    )


class Function(NotCopied):
    """One bound C function.

    Integers are taken from int, numpy integers and ctypes scalars. Raises: TypeError for a wrong
    number or kind of argument, OverflowError for an integer its C type cannot hold, TlError for a
    status other than 0 where the result is ``STATUS``.
    """

    __slots__ = (
        "_addresses", "_call", "_integers", "_lib", "_n", "_status", "argtypes", "name", "restype",
    )  # fmt: skip
    _instead = "it belongs to a Lib"

    def __init__(
        self, lib: Lib, call: Any, name: str, restype: Any, argtypes: tuple[Any, ...]
    ) -> None:
        self._lib, self._call, self.name, self.restype, self.argtypes = (
            lib,
            call,
            name,
            restype,
            argtypes,
        )
        self._status = restype is STATUS
        call.restype = c_int32 if self._status else restype
        call.argtypes = argtypes
        self._n = len(argtypes)
        self._integers = tuple(
            (i, *_range(t))
            for i, t in enumerate(argtypes)
            if isinstance(t, type) and issubclass(t, _INTEGERS)
        )
        self._addresses = tuple(i for i, t in enumerate(argtypes) if t is c_void_p)

    def __call__(self, *args: Any) -> Any:
        if len(args) != self._n:
            raise TypeError(f"{self.name} takes {self._n} arguments, {len(args)} given")
        values = list(args)
        for i, low, high in self._integers:
            value = values[i]
            if type(value) is not int:
                value = values[i] = self._integer(i, value)
            if not low <= value <= high:
                raise OverflowError(
                    f"{self.name}: argument {i + 1} = {value} is outside {low} .. {high}"
                )
        for i in self._addresses:
            value = values[i]
            if isinstance(value, int) and not 0 <= value < _ADDRESS_END:
                raise OverflowError(f"{self.name}: argument {i + 1} = {value} is no address")
        try:
            result = self._call(*values)
        except ctypes.ArgumentError as error:
            raise TypeError(f"{self.name}: {error}") from None
        if self._status and result != TL_OK:
            raise self._failure(result)
        return result

    def each(self, handle: int, *columns: Iterable[int]) -> None:
        """Calls a function that returns ``STATUS`` with ``handle`` and one of each column, row by
        row.

        For ids and counts that came from the library: that their C types can hold them is not
        looked at.

        Raises: TlError for the first status other than 0; the rows after it are not called.
        """
        for status in map(self._call, repeat(handle), *columns):
            if status != TL_OK:
                raise self._failure(status)

    def step(self, *args: Any) -> Step:
        """The call as a step of ``all_at_once``; its arguments as in ``each``, its status is for
        who looks."""
        return partial(self._call, *args)

    def steps(self, handle: int, *columns: Iterable[Any]) -> Step:
        """One step that calls the function with ``handle`` and one of each column, row by row; it
        gives their statuses."""
        return step_for_all(self._call, repeat(handle), *columns)

    def _failure(self, status: int) -> TlError:
        return self._lib.failure(self.name, status)

    def _integer(self, i: int, value: Any) -> int:
        try:
            return index(value.value if isinstance(value, _INTEGERS) else value)
        except TypeError:
            raise TypeError(
                f"{self.name}: argument {i + 1} must be an integer, not {value!r}"
            ) from None

    def __repr__(self) -> str:
        return f"<{self.name} of {self._lib.path}>"


class Lib(NotCopied):
    """A loaded library. Its functions are attributes, bound on first use.

    >>> hex(load().tl_crc32c(b"123456789", 9, 0))
    '0xe3069283'
    """

    _instead = "load(path) gives it in any process"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OSError, with the reason, where the file at ``path`` cannot be loaded into this
        process or is no libtinyllm; AbiMismatch."""
        self.path = Path(path)
        self._declared = signatures()
        self._cdll = self._open()
        try:
            found = self.abi_version()
        except AttributeError:
            raise OSError(
                f"{self.path} is a shared library but not libtinyllm: it has no tl_abi_version. "
                f"{_what_next(self.path)}"
            ) from None
        if found != ABI_VERSION:
            raise AbiMismatch(self.path, found, ABI_VERSION, _what_next(self.path))

    def _open(self) -> ctypes.CDLL:
        reason = reason_not_to_load(self.path)
        if reason is None:
            try:
                return ctypes.CDLL(os.fspath(self.path))
            except OSError as error:
                reason = f"the system says: {error}"
        raise OSError(f"{self.path} cannot be loaded: {reason}. {_what_next(self.path)}")

    def declare(self, name: str, restype: Any, argtypes: Any) -> None:
        """Says how ``name`` is called; it is looked up on its first use. ``restype`` may be
        ``STATUS``."""
        self._declared[name] = (restype, tuple(argtypes))
        self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Function:
        """Binds a function. AttributeError for one nobody declared or the library does not
        export."""
        declared = self.__dict__.get("_declared", {})
        if name not in declared:
            raise AttributeError(f"{name} is not a declared function of libtinyllm")
        try:
            call = self._cdll[
                name
            ]  # by index: a function object of our own, not the one CDLL shares
        except AttributeError:
            hint = (
                f": is it older than this package? {_what_next(self.path)}"
                if name in signatures()
                else ""
            )
            raise AttributeError(f"{self.path} does not export {name}{hint}") from None
        function = Function(self, call, name, *declared[name])
        self.__dict__[name] = function
        return function

    def abi_version(self) -> int:
        """``TL_ABI_VERSION`` of the library."""
        return int(self.tl_abi_version())

    def status_str(self, status: int) -> str:
        """The name of a status; ``"TL_UNKNOWN"`` for any other value."""
        return _text(self.tl_status_str(status))

    def last_error(self) -> str:
        """The calling thread's error slot; ``""`` before any error."""
        return _text(self.tl_last_error())

    def failure(self, fn: str, status: int) -> TlError:
        """The exception for what a function has just returned."""
        return TlError(fn, status, STATUS_NAMES.get(status, "TL_UNKNOWN"), self.last_error())

    def __repr__(self) -> str:
        return f"Lib({str(self.path)!r})"


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def new_handle(create: Function, *args: Any) -> int:
    """What ``create``, a ``*_create`` function, stores through its last parameter. Raises
    TlError."""
    out = c_void_p()
    create(*args, ctypes.byref(out))
    return out.value or 0


def all_at_once(steps: Iterable[Step]) -> list[Any]:
    """Calls every step, and gives what they returned. They are functions of C, and so is what calls
    them: Python runs none of its own code on the way, no signal handler either. What a
    KeyboardInterrupt finds is all of them done, or none."""
    return list(map(partial.__call__, steps))


def step_for_all(function: Any, *columns: Iterable[Any]) -> Step:
    """One step that calls a function of C with one of each column, row by row; it gives what they
    returned."""
    return partial(list, map(function, *columns))


def address_cell() -> Any:
    """Where the address of a C object will stand: its ``value``, None for none."""
    return c_void_p()


def store_address(cell: Any, create: Function, *args: Any) -> None:
    """``new_handle`` into ``cell``, where an interrupt behind the call cannot lose it."""
    create(*args, ctypes.byref(cell))


def export_blocks(lib: Lib, pool: int, blocks: NDArray[np.uint32]) -> bytearray:
    """The envelope of some blocks of a pool (tl_kv_export). Raises TlError."""
    envelope = bytearray(lib.tl_kv_export_bytes(pool, len(blocks)))
    memory, written = np.frombuffer(envelope, np.uint8), c_size_t()
    lib.tl_kv_export(
        pool, u32_ptr(blocks), len(blocks), memory.ctypes.data, len(envelope), ctypes.byref(written)
    )
    return envelope


# --- finding and loading
# ------------------------------------------------------------------------------------

_PACKAGE: Final = Path(__file__).resolve().parent.parent
_CHECKOUT: Final = _PACKAGE.parent.parent
_loaded: dict[Path, Lib] = {}


def library_path(path: str | os.PathLike[str] | None = None) -> Path:
    """Where the library is.

    That is ``path``, else ``$TINYLLM_LIB``, else in (``tinyllm/_lib``) or beside the installed
    package, else ``c/build/libtinyllm.so`` of a checkout. A place named by argument or variable is
    the only one tried.

    Raises: FileNotFoundError, naming every place tried and the command that builds the library.
    """
    named = path if path is not None else os.environ.get("TINYLLM_LIB") or None
    folders = (_PACKAGE / "_lib", _PACKAGE, _PACKAGE.parent, _CHECKOUT / "c/build")
    places = (
        [Path(named)] if named is not None else [folder / "libtinyllm.so" for folder in folders]
    )
    for place in places:
        if place.is_file():
            return place
    source = (
        "path" if path is not None else "TINYLLM_LIB" if named is not None else "default places"
    )
    tried = f"{', '.join(map(str, places))} ({source})"
    raise FileNotFoundError(f"no libtinyllm at {tried}. {_what_next(places[-1])}")


def _what_next(file: Path) -> str:
    """What brings a library that fits to where ``file`` is, or is not."""
    named, file = os.environ.get("TINYLLM_LIB"), file.resolve()
    if named and Path(named).resolve() == file:
        return "Unset TINYLLM_LIB, which names it, or run `make` in the checkout it comes from"
    if not file.is_relative_to(_PACKAGE.parent) and not file.is_relative_to(_CHECKOUT):
        return "`make` in a checkout builds c/build/libtinyllm.so"
    if (_CHECKOUT / "Makefile").is_file():
        return f"Run `make` in {_CHECKOUT}"
    return (
        "The installed package is not whole: run `pip install --force-reinstall .` in a checkout, "
        "or install its wheel again"
    )


def load(path: str | os.PathLike[str] | None = None) -> Lib:
    """The library at ``library_path(path)``, one ``Lib`` per resolved file.

    Raises: FileNotFoundError; OSError for a file that is no such library; AbiMismatch.
    """
    file = library_path(path).resolve()
    lib = _loaded.get(file)
    if lib is None:
        lib = _loaded.setdefault(file, Lib(file))
    return lib


# --- arrays
# -------------------------------------------------------------------------------------------------


def _pointer(fn: str, a: Any, dtype: np.dtype[Any], ctype: Any) -> Any:
    if a is None:
        return None
    if not isinstance(a, np.ndarray) or (a.dtype is not dtype and a.dtype != dtype):
        found = f"{a.dtype.str} array" if isinstance(a, np.ndarray) else type(a).__name__
        raise TypeError(f"{fn}: a {dtype.name} array in native byte order is needed, not {found}")
    flags = a.flags
    if flags.carray and a.size:  # contiguous, aligned and writable
        return ctypes.pointer(
            ctype.from_buffer(a)
        )  # several times faster than asking for the address
    if a.size > 1 and a.shape[-1] > 1 and a.strides[-1] != dtype.itemsize:
        raise ValueError(
            f"{fn}: the last axis has a stride of {a.strides[-1]} bytes, not {dtype.itemsize}"
        )
    if not flags.aligned:
        raise ValueError(
            f"{fn}: the array at {a.ctypes.data:#x} is not aligned to {dtype.itemsize} bytes"
        )
    pointer: Any = ctypes.pointer(ctype.from_address(a.ctypes.data))
    pointer._array = a  # the memory lives as long as the pointer
    return pointer


_F32, _U16, _U32 = np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.uint32)
_I32, _I64, _U64 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint64)
_I8, _U8 = np.dtype(np.int8), np.dtype(np.uint8)


def f32_ptr(a: NDArray[np.float32] | None) -> Any:
    """A ``float *`` to the first element of ``a``, which it keeps alive; NULL for None. Nothing is
    copied.

    Raises: TypeError for another dtype or byte order, or no array; ValueError for a last axis
    without unit stride.
    """
    return _pointer("f32_ptr", a, _F32, c_float)


def i8_ptr(a: NDArray[np.int8] | None) -> Any:
    """``f32_ptr`` for ``int8_t *``."""
    return _pointer("i8_ptr", a, _I8, c_int8)


def u8_ptr(a: NDArray[np.uint8] | None) -> Any:
    """``f32_ptr`` for ``uint8_t *``."""
    return _pointer("u8_ptr", a, _U8, c_uint8)


def u16_ptr(a: NDArray[np.uint16] | None) -> Any:
    """``f32_ptr`` for ``uint16_t *``."""
    return _pointer("u16_ptr", a, _U16, c_uint16)


def u32_ptr(a: NDArray[np.uint32] | None) -> Any:
    """``f32_ptr`` for ``uint32_t *``."""
    return _pointer("u32_ptr", a, _U32, c_uint32)


def i32_ptr(a: NDArray[np.int32] | None) -> Any:
    """``f32_ptr`` for ``int32_t *``."""
    return _pointer("i32_ptr", a, _I32, c_int32)


def i64_ptr(a: NDArray[np.int64] | None) -> Any:
    """``f32_ptr`` for ``int64_t *``."""
    return _pointer("i64_ptr", a, _I64, c_int64)


def u64_ptr(a: NDArray[np.uint64] | None) -> Any:
    """``f32_ptr`` for ``uint64_t *``."""
    return _pointer("u64_ptr", a, _U64, c_uint64)


def struct_ptr(struct: Structure) -> Any:
    """A pointer to ``struct``, for a member that is one; it keeps ``struct`` alive."""
    return ctypes.pointer(struct)


def memory_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """C memory as an array of bytes; valid as long as the memory is."""
    memory: Any = (c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)


def address_of_floats(pointer: Any) -> int:
    """The address that a member or a result of type ``float *`` is; 0 for NULL."""
    return ctypes.cast(pointer, c_void_p).value or 0


def float_pointer(address: int) -> Any:
    """A ``float *`` for a member of a struct."""
    return ctypes.cast(address, _f32)


def block_view(address: int, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """C memory of f16 codes as an array; valid as long as the memory is."""
    n = int(np.prod(shape, dtype=np.int64))
    return memory_at(address, 2 * n).view(np.float16).reshape(shape)
