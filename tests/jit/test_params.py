"""Parameter structs: layout as C makes it, packing by name, patches."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace

import pytest

from sparsetile.core.errors import CompileError
from sparsetile.jit import KernelSource, ParamStruct, compile_source
from sparsetile.jit.params import Field, f64, i32, i32_array, i64, pointer, tensor_map
from sparsetile.jit.tensor_map import map_bytes
from sparsetile.kernels import KERNELS

_CTYPES = {"Q": ctypes.c_uint64, "q": ctypes.c_int64, "d": ctypes.c_double, "i": ctypes.c_int32}

MIXED = ParamStruct.of(
    pointer("items", "const int4*"),
    i32("n"),
    pointer("b", "const float*"),
    pointer("c", "float*"),
    f64("alpha"),
    i32_array("ends", 3),
    i64("stride"),
    i32("last"),
)
VALUES = {
    "items": 4096, "n": -7, "b": 2**40, "c": 2**63, "alpha": 0.25, "ends": (1, 2, 3),
    "stride": -(2**40), "last": True,
}  # fmt: skip


def structure(fields: tuple[Field, ...]) -> type[ctypes.Structure]:
    """The same struct as ctypes lays it out, which knows nothing of 64-byte alignment."""
    kinds = [(f.name, _CTYPES[f.letter] * f.count if f.count > 1 else _CTYPES[f.letter])
             for f in fields]  # fmt: skip
    return type("Params", (ctypes.Structure,), {"_fields_": kinds})


def plain(name: str) -> bool:
    return all(field.alignment <= 8 for field in KERNELS[name].params.fields)


@pytest.mark.parametrize(
    "params",
    [MIXED, *(KERNELS[name].params for name in sorted(KERNELS) if plain(name))],
    ids=["mixed", *filter(plain, sorted(KERNELS))],
)
def test_size_and_offsets_are_those_of_c(params):
    same = structure(params.fields)
    assert params.size == ctypes.sizeof(same)
    assert params.offsets == {f.name: getattr(same, f.name).offset for f in params.fields}


@pytest.mark.parametrize(
    "fields, size, last",
    [
        ((tensor_map("a"), tensor_map("b")), 256, 128),
        ((tensor_map("a"), pointer("c", "char*")), 192, 128),
        ((pointer("c", "char*"), tensor_map("a")), 192, 64),
        ((i32("n"), tensor_map("a"), i32("m")), 256, 192),
    ],
)
def test_tensor_maps_lie_at_multiples_of_64_bytes(fields, size, last):
    params = ParamStruct.of(*fields)
    assert (params.size, params.offsets[fields[-1].name]) == (size, last)


def test_values_are_packed_by_name_in_any_order():
    buffer = ctypes.create_string_buffer(MIXED.size)
    MIXED.pack_into(buffer, dict(reversed(VALUES.items())))
    found = structure(MIXED.fields).from_buffer(buffer)
    got = {f.name: getattr(found, f.name) for f in MIXED.fields}
    assert {**got, "ends": tuple(got["ends"])} == {**VALUES, "last": 1}


def test_a_struct_of_one_field_is_packed_too():
    buffer = ctypes.create_string_buffer(8)
    ParamStruct.of(pointer("c", "char*")).pack_into(buffer, {"c": 99})
    assert struct.unpack("=Q", buffer.raw) == (99,)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"b": None, "n": None}, "missing: n, b; unknown: none"),
        ({"beta": 1.0}, "missing: none; unknown: beta"),
        ({"alpha": None, "Alpha": 1.0}, "missing: alpha; unknown: Alpha"),
    ],
)
def test_missing_and_unknown_names_are_one_error(change, said):
    values = {name: value for name, value in {**VALUES, **change}.items() if value is not None}
    with pytest.raises(ValueError) as caught:
        MIXED.pack_into(ctypes.create_string_buffer(MIXED.size), values)
    assert str(caught.value) == (
        f"launch: params must be a value for each of the kernel's fields, got {said}. "
        "Name each field once."
    )


@pytest.mark.parametrize(
    "name, value, declaration",
    [
        ("n", 2**31, "int n"),
        ("n", 0.5, "int n"),
        ("items", None, "const int4* items"),
        ("ends", (1, 2), "int ends[3]"),
        ("ends", 7, "int ends[3]"),
        ("b", -1, "const float* b"),
    ],
)
def test_a_value_that_its_field_does_not_hold_is_named(name, value, declaration):
    with pytest.raises(ValueError) as caught:
        MIXED.pack_into(ctypes.create_string_buffer(MIXED.size), {**VALUES, name: value})
    assert str(caught.value) == (
        f"launch: {name} must be what `{declaration}` holds, got {value!r}. "
        "Give a number of that type, or as many as it has."
    )


def test_declaring_a_name_twice_or_no_field_is_refused():
    with pytest.raises(ValueError, match="each name once, got n repeatedly"):
        ParamStruct.of(i32("n"), i64("n"))
    with pytest.raises(ValueError, match="at least one, each name once, got none"):
        ParamStruct.of()


@pytest.mark.parametrize(
    "names, runs",
    [
        (("b", "c"), 1),
        (("n", "b"), 1),  # padding between them stays as it is
        (("c", "b"), 2),
        (("ends", "stride", "items"), 2),
        (("last",), 1),
    ],
)
def test_a_patch_writes_its_fields_in_the_order_of_their_names(names, runs):
    changed = {**VALUES, "b": 11, "c": 12, "n": 13, "ends": (4, 5, 6), "stride": 14, "items": 15,
               "last": 16}  # fmt: skip
    expected, patched = (ctypes.create_string_buffer(MIXED.size) for _ in range(2))
    MIXED.pack_into(expected, {**VALUES, **{name: changed[name] for name in names}})
    changed["ends"] = struct.pack("=3i", *changed["ends"])
    patch = MIXED.patch(*names)
    assert len(patch.runs) == runs
    MIXED.pack_into(patched, VALUES)
    patch.bind(patched)(*(changed[name] for name in names))
    assert patched.raw == expected.raw


def test_a_tensor_map_is_patched_as_its_bytes():
    params = ParamStruct.of(tensor_map("a"), tensor_map("b"), pointer("c", "char*"))
    buffer = ctypes.create_string_buffer(params.size)
    patch = params.patch("b", "c")
    assert len(patch.runs) == 1
    patch.bind(buffer)(map_bytes(tuple(range(1, 17))), 99)
    assert struct.unpack_from("=33Q", buffer) == (*[0] * 16, *range(1, 17), 99)


@pytest.mark.parametrize("names, said", [(("b", "d"), "got d."), ((), "got none.")])
def test_a_patch_of_unknown_fields_is_refused(names, said):
    with pytest.raises(ValueError) as caught:
        MIXED.patch(*names)
    assert said in str(caught.value)
    assert "Choose from alpha, b, c, ends, items, last, n, stride." in str(caught.value)


KERNEL = """struct Params {
  PARAMS_FIELDS
  EXTRA
};
static_assert(PARAMS_LAYOUT_MATCHES, "host and device disagree");
extern "C" __global__ void toy(const __grid_constant__ Params p) { p.c[p.n] = p.b[p.ends[2]]; }
"""


@pytest.mark.parametrize("extra, agrees", [("", True), ("long long more;", False)])
def test_the_device_compiler_checks_the_layout(tmp_path, extra, agrees):
    (tmp_path / "toy.cu").write_text(KERNEL)
    source = KernelSource.make("toy.cu", "toy", {"EXTRA": extra}, MIXED).in_folder(tmp_path)
    if agrees:
        assert compile_source(source, "sm_80", use_cache=False).cubin
    else:
        with pytest.raises(CompileError, match="host and device disagree"):
            compile_source(source, "sm_80", use_cache=False)


def test_a_type_of_another_width_does_not_compile(tmp_path):
    """Padding hides it from the struct's size."""
    (tmp_path / "toy.cu").write_text(KERNEL)
    fields = [replace(f, declaration="short n") if f.name == "n" else f for f in MIXED.fields]
    source = KernelSource.make("toy.cu", "toy", {"EXTRA": ""}, ParamStruct.of(*fields))
    with pytest.raises(CompileError, match="host and device disagree"):
        compile_source(source.in_folder(tmp_path), "sm_80", use_cache=False)


def test_fields_without_a_value_are_zero_or_null():
    params = ParamStruct.of(pointer("address", "int*"), i32_array("sizes", 3), f64("scale"))
    assert params.zeros == {"address": 0, "sizes": (0, 0, 0), "scale": 0}
    packed = ctypes.create_string_buffer(b"x" * params.size, params.size)
    params.pack_into(packed, params.zeros)
    assert packed.raw.strip(b"x") == bytes(params.size)
