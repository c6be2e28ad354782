# SPDX-License-Identifier: MIT
"""The table against the C headers, the structs against the C compiler; finding, loading and calling
a library."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import re
import shutil
import subprocess
import sys
import weakref
from ctypes import (
    POINTER,
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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyllm
from tinyllm.errors import ClosedError, OutOfBlocks
from tinyllm.ffi import libtinyllm as ffi
from tinyllm.ffi.libtinyllm import (
    AbiMismatch,
    Lib,
    TlError,
    f32_ptr,
    i32_ptr,
    library_path,
    load,
    u32_ptr,
)

# --- the headers, read as text
# ------------------------------------------------------------------------------

SCALARS = {
    "float": c_float, "int": c_int, "size_t": c_size_t, "int32_t": c_int32, "int64_t": c_int64,
    "uint8_t": c_uint8, "uint16_t": c_uint16, "uint32_t": c_uint32, "uint64_t": c_uint64,
    "int8_t": c_int8, "tl_status": c_int32, "tl_dtype": c_int32,
}  # fmt: skip


def header_names(root: Path) -> list[str]:
    """The public headers in the order tinyllm.h includes them."""
    umbrella = (root / "c/include/tinyllm.h").read_text()
    return re.findall(r'#include "(tinyllm/\w+\.h)"', umbrella)


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.S)


def headers(root: Path) -> str:
    return without_comments(
        "\n".join((root / "c/include" / name).read_text() for name in header_names(root))
    )


def c_type(declaration: str, is_result: bool = False) -> Any:
    """The ctypes form of "const float *q": the last word is the parameter's name unless this is a
    result."""
    words = re.findall(r"\w+|\*", declaration)
    if not is_result:
        assert len(words) > 1, declaration
        words.pop()
    stars = words.count("*")
    (base,) = [word for word in words if word not in ("const", "*")]
    if stars == 0:
        if base == "void":
            return None
        if base == "tl_status" and is_result:
            return ffi.STATUS
        return (
            ffi.RangeFn
            if base == "tl_range_fn"
            else ffi.STRUCTS[base]
            if base in ffi.STRUCTS
            else SCALARS[base]
        )
    if stars == 1 and base == "char":
        return c_char_p
    target = SCALARS.get(base) or ffi.STRUCTS.get(base)
    if stars == 1:
        return (
            POINTER(target) if target else c_void_p
        )  # void * and pointers to opaque structs are addresses
    assert stars == 2, declaration
    assert target is None, declaration
    return POINTER(c_void_p)


def declared_functions(root: Path) -> list[tuple[str, Any, tuple[Any, ...]]]:
    found = []
    for result, name, parameters in re.findall(
        r"TL_API\s+([\w\s*]+?)\b(tl_\w+)\s*\(([^)]*)\)\s*;", headers(root)
    ):
        arguments = [] if parameters.strip() == "void" else parameters.split(",")
        found.append(
            (name, c_type(result, is_result=True), tuple(c_type(p) for p in named(arguments)))
        )
    return found


def named(arguments: list[str]) -> list[str]:
    """Gives a name to a parameter that has none ("const char *")."""
    return [
        a if re.search(r"\w\s*$", a) and not re.fullmatch(r"\s*(const\s+)?\w+\s*", a) else a + " x"
        for a in arguments
    ]


def test_every_function_of_the_headers_is_a_row_in_header_order_with_its_types(root: Path) -> None:
    declared = declared_functions(root)
    assert len(declared) > 50, "the parser lost its way"
    assert len(re.findall(r"^TL_API ", headers(root), flags=re.M)) == len(declared), (
        "a declaration the parser did not understand"
    )
    assert [row[0] for row in ffi.PROTOTYPES] == [row[0] for row in declared]
    for row, wanted in zip(ffi.PROTOTYPES, declared, strict=True):
        assert row == wanted
    assert list(ffi.signatures().items()) == [
        (name, (result, arguments)) for name, result, arguments in declared
    ]


def enumerators(root: Path, macro: str) -> dict[int, str]:
    text = without_comments((root / "c/include/tinyllm/abi.h").read_text()).replace("\\\n", " ")
    (line,) = re.findall(rf"#define {macro}\(X\)(.*)", text)
    return {int(value): name for name, value in re.findall(r"X\((\w+),\s*(\d+)\)", line)}


def test_status_codes_and_element_types_are_those_of_the_headers(root: Path, lib: Lib) -> None:
    assert enumerators(root, "TL_STATUS_LIST") == ffi.STATUS_NAMES
    assert enumerators(root, "TL_DTYPE_LIST") == ffi.DTYPE_NAMES
    for names in (ffi.STATUS_NAMES, ffi.DTYPE_NAMES):
        for value, name in names.items():
            assert getattr(ffi, name) == value
    for value, name in ffi.STATUS_NAMES.items():
        assert lib.status_str(value) == name
    assert lib.status_str(len(ffi.STATUS_NAMES)) == lib.status_str(-1) == "TL_UNKNOWN"


def test_constants_are_those_of_the_headers(root: Path) -> None:
    text = headers(root)
    names = {**vars(ffi), "UINT32_MAX": 2**32 - 1, "UINT64_MAX": 2**64 - 1}
    for name in [n for n in dir(ffi) if n.startswith("TL_")]:
        if name in (*ffi.STATUS_NAMES.values(), *ffi.DTYPE_NAMES.values()):
            continue
        (value,) = re.findall(rf"#define {name} (.+)", text)
        literal = re.sub(r"\(size_t\)|(?<=\d)u\b", "", value).strip()
        expected = literal.strip('"').encode() if literal.startswith('"') else eval(literal, names)
        assert getattr(ffi, name) == expected, name
    assert re.findall(r"#define TL_ABI_VERSION (\d+)", text) == [str(ffi.ABI_VERSION)]


def test_the_package_has_the_version_of_the_headers(root: Path) -> None:
    assert re.findall(r'#define TL_VERSION "(.+)"', headers(root)) == [tinyllm.__version__]


def test_structs_have_the_names_sizes_and_offsets_the_c_compiler_gives_them(
    root: Path, tmp_path: Path
) -> None:
    fields = [(c, name) for c, struct in ffi.STRUCTS.items() for name, *_ in struct._fields_]
    source = tmp_path / "layout.c"
    source.write_text(
        '#include <stdio.h>\n#include "tinyllm.h"\nint main(void)\n{\n'
        + "".join(f'    printf("{c} %zu\\n", sizeof({c}));\n' for c in ffi.STRUCTS)
        + "".join(
            f'    printf("{c}.{f} %zu %zu\\n", offsetof({c}, {f}), sizeof((({c} *)0)->{f}));\n'
            for c, f in fields
        )
        + "    return 0;\n}\n"
    )
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run(
        [*compiler, "-I", root / "c/include", "-o", tmp_path / "layout", source], check=True
    )
    said = subprocess.run(
        [tmp_path / "layout"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    mirror = [f"{c} {ctypes.sizeof(struct)}" for c, struct in ffi.STRUCTS.items()]
    for c, name in fields:
        field = getattr(ffi.STRUCTS[c], name)
        mirror.append(f"{c}.{name} {field.offset} {field.size}")
    assert said == mirror

    declared = re.findall(r"typedef struct (?:\w+ )?\{(.*?)\} (tl_\w+);", headers(root), flags=re.S)
    assert [name for _, name in declared] == list(ffi.STRUCTS)
    for body, c in declared:
        plain = re.sub(
            r"\(\*(\w+)\)\([^)]*\)", r"\1", body
        )  # a function pointer is called by its name
        names = [
            re.findall(r"\w+", part)[-1]
            for line in plain.split(";")
            if line.strip()
            for part in line.split(",")
        ]
        assert names == [name for name, *_ in ffi.STRUCTS[c]._fields_]


def test_struct_sizes_are_the_documented_ones() -> None:
    sizes = {c: ctypes.sizeof(struct) for c, struct in ffi.STRUCTS.items()}
    assert sizes == {
        "tl_allocator": 24, "tl_arena_mark": 16, "tl_arena_stats": 32, "tl_kv_cfg": 28,
        "tl_kv_stats": 24, "tl_kv_block": 16, "tl_kv_needs": 8,
        "tl_prefix_stats": 72, "tl_prefix_block": 40,
        "tl_kv_view": 184, "tl_trace_event": 72, "tl_trace": 24, "tl_paged_attn_args": 200,
        "tl_attn_part": 32,
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_the_library_exports_the_functions_of_the_headers_and_nothing_else(
    root: Path, lib: Lib
) -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", lib.path], check=True, capture_output=True, text=True
    ).stdout
    exported = {line.split()[-1] for line in listing.splitlines()}
    assert exported == {name for name, _, _ in declared_functions(root)}


def test_every_function_is_exported_and_binds_with_explicit_types(lib: Lib) -> None:
    for name, restype, argtypes in ffi.PROTOTYPES:
        function = getattr(lib, name)
        assert (function.restype, function.argtypes) == (restype, argtypes)


def test_only_the_ffi_module_imports_ctypes(root: Path) -> None:
    importers = {
        path.relative_to(root / "python/tinyllm").as_posix()
        for path in (root / "python/tinyllm").rglob("*.py")
        if re.search(r"^\s*(from|import) ctypes", path.read_text(), flags=re.M)
    }
    assert importers == {"ffi/libtinyllm.py"}


# --- calls
# --------------------------------------------------------------------------------------------------


def test_symbols_are_bound_on_first_use_and_once(lib: Lib) -> None:
    fresh = Lib(lib.path)
    assert "tl_crc32c" not in vars(fresh)
    first = fresh.tl_crc32c
    assert vars(fresh)["tl_crc32c"] is first is fresh.tl_crc32c
    assert first(b"123456789", 9, 0) == 0xE3069283


def test_each_calls_row_by_row_and_stops_at_the_first_refusal(lib: Lib) -> None:
    with tinyllm.PagedKVCache(lib, 4, 8, 1, 1, 1) as cache:
        cache.add_seq("a")
        cache.append("a", 0, *np.zeros((2, 1, 3 * 8, 1), np.float32))
        blocks = cache.block_table("a").tolist()
        lib.tl_kv_set_fill.each(cache.pool, blocks, [5, 6, 7])
        assert [lib.tl_kv_fill(cache.pool, block) for block in blocks] == [5, 6, 7]
        with pytest.raises(TlError, match=r"tl_kv_set_fill: .*9") as caught:
            lib.tl_kv_set_fill.each(cache.pool, reversed(blocks), [1, 9, 3])
        assert (caught.value.fn, caught.value.status) == ("tl_kv_set_fill", ffi.TL_EINVAL)
        assert [lib.tl_kv_fill(cache.pool, block) for block in blocks] == [5, 6, 1]
        cache.free("a")


def test_a_status_becomes_an_exception_that_carries_all_of_it(lib: Lib) -> None:
    out = c_void_p()
    with pytest.raises(TlError) as caught:
        lib.tl_pool_create(-1, ctypes.byref(out))
    error = caught.value
    assert (error.fn, error.status, error.name) == ("tl_pool_create", ffi.TL_EINVAL, "TL_EINVAL")
    assert error.message == lib.last_error()
    assert error.message.startswith("tl_pool_create: ")
    assert "-1" in error.message
    assert "TL_EINVAL" in str(error)
    assert error.message in str(error)
    assert isinstance(error, RuntimeError)
    assert lib.tl_pool_create(1, ctypes.byref(out)) == ffi.TL_OK
    lib.tl_pool_destroy(out)


def test_a_lookup_miss_raises_not_found(lib: Lib) -> None:
    with tinyllm.PagedKVCache(lib, 1, 1, 1, 1, 1) as cache, pytest.raises(TlError) as caught:
        lib.tl_kv_lookup(cache.pool, 7, u32_ptr(np.zeros(1, np.uint32)))
    assert caught.value.status == ffi.TL_ENOTFOUND


@pytest.mark.parametrize(
    "error",
    [
        TlError("tl_x", 1, "TL_EINVAL", "tl_x: n = -1"),
        AbiMismatch(Path("x.so"), 2, 1),
        OutOfBlocks("no"),
        ClosedError("closed"),
    ],
)
def test_exceptions_survive_pickling(error: Exception) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))


def test_declare_takes_effect_on_the_next_use(lib: Lib) -> None:
    fresh = Lib(lib.path)
    assert fresh.tl_abi_version() == ffi.ABI_VERSION
    fresh.declare("tl_abi_version", ffi.STATUS, [])  # 1 is then the status TL_EINVAL
    with pytest.raises(TlError, match="TL_EINVAL"):
        fresh.tl_abi_version()
    fresh.declare("tl_no_such_function", None, [c_int64])  # nothing is looked up yet
    with pytest.raises(AttributeError, match="does not export tl_no_such_function"):
        fresh.tl_no_such_function(1)
    with pytest.raises(AttributeError, match="tl_never_declared"):
        fresh.tl_never_declared()
    assert lib.tl_abi_version() == ffi.ABI_VERSION  # another Lib of the same file is another table


RANGES = [
    (c_int32, -(2**31), 2**31 - 1),
    (c_int64, -(2**63), 2**63 - 1),
    (c_uint32, 0, 2**32 - 1),
    (c_uint64, 0, 2**64 - 1),
    (c_uint16, 0, 2**16 - 1),
    (c_uint8, 0, 2**8 - 1),
    (c_size_t, 0, 2 ** (8 * ctypes.sizeof(c_size_t)) - 1),
]


@pytest.mark.parametrize(
    ("ctype", "low", "high"), RANGES, ids=lambda x: getattr(x, "__name__", None)
)
def test_an_integer_its_c_type_cannot_hold_raises_and_the_last_one_that_fits_does_not(
    lib: Lib, ctype: Any, low: int, high: int
) -> None:
    function = ffi.Function(
        lib, ctypes.PYFUNCTYPE(ctype, ctype)(lambda x: x), "identity", ctype, (ctype,)
    )
    for value in (low, high, 0, np.uint8(7), np.int64(7), True, ctype(7)):
        assert function(value) == (value.value if isinstance(value, ctype) else int(value))
    for value in (low - 1, high + 1, 2**64, 2**70, -(2**70)):
        with pytest.raises(OverflowError, match=re.escape(f"identity: argument 1 = {value}")):
            function(value)
    for wrong in (1.0, "1", None, np.float32(1), b"1"):
        with pytest.raises(TypeError, match="identity"):
            function(wrong)


def test_every_integer_argument_of_every_function_is_checked(lib: Lib) -> None:
    checked = 0
    for name, _, argtypes in ffi.PROTOTYPES:
        for i, argtype in enumerate(argtypes):
            if argtype not in SCALARS.values() or argtype is c_float:
                continue
            zeros: list[Any] = [
                0 if t in SCALARS.values() else t() if t in ffi.STRUCTS.values() else None
                for t in argtypes
            ]
            zeros[i] = 2**64
            with pytest.raises(OverflowError, match=f"{name}: argument {i + 1} "):
                getattr(lib, name)(*zeros)
            checked += 1
    assert checked > 60


@pytest.mark.parametrize("address", [-1, 2**64, 2**64 + 4096])
def test_an_address_that_is_none_raises(lib: Lib, address: int) -> None:
    with pytest.raises(OverflowError, match="argument 1"):
        lib.tl_pool_threads(address)


def test_wrong_numbers_and_kinds_of_arguments_raise_type_error(lib: Lib) -> None:
    with pytest.raises(TypeError, match="tl_crc32c takes 3 arguments, 2 given"):
        lib.tl_crc32c(b"", 0)
    with pytest.raises(TypeError, match="tl_crc32c takes 3 arguments, 4 given"):
        lib.tl_crc32c(b"", 0, 0, 0)
    with pytest.raises(TypeError, match="tl_exp_f32"):
        lib.tl_exp_f32(u32_ptr(np.zeros(1, np.uint32)), None, 0)
    with pytest.raises(TypeError, match="tl_expf"):
        lib.tl_expf("1")


def test_the_error_slot_belongs_to_the_calling_thread(lib: Lib) -> None:
    import threading

    lib.tl_set_last_error(b"mine")
    theirs: list[str] = []
    thread = threading.Thread(target=lambda: theirs.append(lib.last_error()))
    thread.start()
    thread.join()
    assert theirs == [""]
    assert lib.last_error() == "mine"
    lib.tl_set_last_error("\u00e9\udcff".encode("utf-8", "surrogateescape"))
    assert lib.last_error() == "\u00e9\ufffd"  # bytes that are no UTF-8 do not hide the rest
    lib.tl_set_last_error(None)
    assert lib.last_error() == ""


# --- pointers to arrays
# -------------------------------------------------------------------------------------


def test_f32_ptr_points_at_the_first_element_in_any_layout_with_a_contiguous_last_axis() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    for a in (
        base,
        base[1:],
        base[::-1],
        base[:, 2:5],
        base[0, 0:1],
        np.broadcast_to(base[1], (3, 6)),
        base[2:3, ::6],
    ):
        assert f32_ptr(a)[0] == a.flat[0]
    assert f32_ptr(base[::-1])[-6] == 12.0
    assert f32_ptr(np.float32([7]).reshape(()))[0] == 7.0  # no axis at all
    base.flags.writeable = False
    assert f32_ptr(base)[5] == 5.0
    assert f32_ptr(np.empty((0, 4), np.float32)) is not None
    assert f32_ptr(None) is None


@pytest.mark.parametrize("readonly", [False, True])
def test_f32_ptr_keeps_its_array_alive(readonly: bool) -> None:
    class Array(np.ndarray[Any, Any]):
        """One that can be referred to weakly."""

    a = np.full(3, 5, np.float32).view(Array)
    a.flags.writeable = not readonly
    alive, pointer = weakref.ref(a), f32_ptr(a)
    del a
    gc.collect()
    assert alive() is not None
    assert pointer[2] == 5.0
    del pointer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(2), np.zeros(2, np.float16), np.zeros(2, np.int32), np.zeros(2, ">f4"),
        np.zeros(2, bool), [1.0, 2.0], 1.0, np.float32(1), b"1234", "x",
    ],
    ids=repr,
)  # fmt: skip
def test_f32_ptr_refuses_what_is_no_native_float32_array(wrong: Any) -> None:
    with pytest.raises(TypeError, match="f32_ptr"):
        f32_ptr(wrong)


def test_f32_ptr_refuses_a_last_axis_without_unit_stride_and_misaligned_memory() -> None:
    base = np.zeros((4, 6), np.float32)
    for a in (base[:, ::2], base[:, ::-1], base.T, np.broadcast_to(np.float32(0), (3,))):
        with pytest.raises(ValueError, match="stride"):
            f32_ptr(a)
    with pytest.raises(ValueError, match="aligned"):
        f32_ptr(np.frombuffer(bytes(9), np.float32, count=2, offset=1))


def test_the_integer_pointers_take_their_own_type_only() -> None:
    assert u32_ptr(np.array([2**32 - 1], np.uint32))[0] == 2**32 - 1
    assert i32_ptr(np.array([-5], np.int32))[0] == -5
    for pointer, dtype in (
        (u32_ptr, np.int32),
        (i32_ptr, np.uint32),
        (u32_ptr, np.int64),
        (i32_ptr, np.int64),
    ):
        with pytest.raises(TypeError, match="32_ptr"):
            pointer(np.zeros(1, dtype))


# --- finding and loading
# ------------------------------------------------------------------------------------


def test_the_argument_comes_before_the_variable_and_the_variable_before_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.so", tmp_path / "second.so"
    first.touch()
    second.touch()
    monkeypatch.setenv("TINYLLM_LIB", str(second))
    assert library_path(first) == library_path(str(first)) == first
    assert library_path() == second
    for place in ("package", "beside", "checkout"):
        (tmp_path / place).mkdir()
    monkeypatch.setattr(ffi, "_PACKAGE", tmp_path / "beside/package")
    monkeypatch.setattr(ffi, "_CHECKOUT", tmp_path / "checkout")
    monkeypatch.setenv("TINYLLM_LIB", "")  # empty is unset
    places = [
        tmp_path / p / "libtinyllm.so" for p in ("checkout/c/build", "beside", "beside/package")
    ]
    for place in places:  # each later one comes before those already there
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
        assert library_path() == place


def test_a_missing_library_names_every_place_tried_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ffi, "_PACKAGE", tmp_path / "site/tinyllm")
    monkeypatch.setattr(ffi, "_CHECKOUT", tmp_path / "checkout")
    monkeypatch.delenv("TINYLLM_LIB", raising=False)
    with pytest.raises(FileNotFoundError) as caught:
        load()
    for place in (
        "site/tinyllm/libtinyllm.so",
        "site/libtinyllm.so",
        "checkout/c/build/libtinyllm.so",
    ):
        assert str(tmp_path / place) in str(caught.value)
    assert "`pip install --force-reinstall .` in a checkout" in str(caught.value)
    monkeypatch.setenv("TINYLLM_LIB", str(tmp_path / "elsewhere.so"))
    with pytest.raises(FileNotFoundError, match=r"elsewhere\.so .*TINYLLM_LIB.*`make`"):
        load()
    with pytest.raises(FileNotFoundError, match=r"given\.so .*`make`"):
        load(tmp_path / "given.so")
    with pytest.raises(FileNotFoundError):
        load(tmp_path)  # a folder is no library


def test_one_lib_per_resolved_file(lib: Lib, tmp_path: Path) -> None:
    link = tmp_path / "link.so"
    link.symlink_to(lib.path)
    assert load(link) is load(str(lib.path)) is load(os.path.relpath(lib.path)) is lib
    twin = tmp_path / "copy.so"
    shutil.copy(lib.path, twin)
    assert load(twin) is not lib
    assert load(twin).path == twin.resolve()


def compiled(tmp_path: Path, name: str, code: str) -> Path:
    source, target = tmp_path / f"{name}.c", tmp_path / f"{name}.so"
    source.write_text(code)
    subprocess.run(
        [*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-o", target, source], check=True
    )
    return target


def test_another_abi_version_is_refused(tmp_path: Path) -> None:
    other = compiled(tmp_path, "other", "unsigned tl_abi_version(void) { return 2; }\n")
    for opened in (load, load, Lib):  # the second time too: a refused library is not kept
        with pytest.raises(AbiMismatch) as caught:
            opened(other.resolve())
        assert (caught.value.path, caught.value.found, caught.value.expected) == (
            other.resolve(),
            2,
            ffi.ABI_VERSION,
        )
        assert isinstance(caught.value, RuntimeError)


def test_a_file_that_is_no_such_library_is_a_clear_os_error(tmp_path: Path, lib: Lib) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(OSError, match=r"text\.so cannot be loaded.*`make`"):
        load(text)
    foreign = tmp_path / "foreign.so"
    image = bytearray(lib.path.read_bytes())
    image[18:20] = b"\x16\x00"  # e_machine: an IBM mainframe
    foreign.write_bytes(image)
    with pytest.raises(OSError, match=r"foreign\.so cannot be loaded.*another machine"):
        load(foreign)
    stranger = compiled(tmp_path, "stranger", "int answer(void) { return 42; }\n")
    with pytest.raises(OSError, match=r"stranger\.so .*not libtinyllm"):
        load(stranger)


def test_importing_the_package_loads_no_library(run_silently: Any) -> None:
    program = "import tinyllm\nprint('libtinyllm' in open('/proc/self/maps').read())\n"
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    assert run_silently(program, TINYLLM_LIB="/nonexistent") == "False\n"
