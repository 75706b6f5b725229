"""Argument checks: what they let through, and the exact words of what they do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparsetile.core import errors
from sparsetile.core.checks import MAX_DIM, REDUCES, dimension, matrix_shape, one_of, reduce_name

WHOLE = "Give a whole number from 0 to 2147483647."


@pytest.mark.parametrize(
    "value, number",
    [(0, 0), (7, 7), (MAX_DIM, MAX_DIM), (3.0, 3), (np.int32(5), 5), (np.uint64(6), 6),
     (torch.tensor(8), 8), (np.float64(2.0), 2)],
)  # fmt: skip
def test_a_dimension_is_any_whole_number_however_it_is_stored(value, number):
    found = dimension("plan", "n", value)
    assert found == number and type(found) is int


@pytest.mark.parametrize(
    "value, got",
    [(True, "True"), (False, "False"), ("8", "'8'"), (None, "NoneType"), ([8], "list"),
     (8j, "complex"), (np.float32(8), "float32")],
)  # fmt: skip
def test_rejects_non_numbers_with_a_type_error(value, got):
    with pytest.raises(TypeError) as caught:
        dimension("plan", "n", value)
    assert str(caught.value) == f"plan: n must be a whole number, got {got}. {WHOLE}"


@pytest.mark.parametrize("value", [0.5, math.nan, math.inf, -math.inf, np.float64(1.5)])
def test_a_fraction_is_a_value_error(value):
    with pytest.raises(ValueError) as caught:
        dimension("plan", "n", value)
    assert str(caught.value) == f"plan: n must be a whole number, got {value}. {WHOLE}"


@pytest.mark.parametrize("value", [-1, MAX_DIM + 1, 2**63, -(2**70), float(2**31)])
def test_a_number_out_of_range_is_a_value_error(value):
    with pytest.raises(ValueError) as caught:
        dimension("spmm", "rows", value)
    assert str(caught.value) == (
        f"spmm: rows must be between 0 and 2147483647, got {int(value)}. {WHOLE}"
    )


@pytest.mark.parametrize("shape", [(3, 4), [3, 4], torch.Size([3, 4]), np.array([3, 4]), (3.0, 4)])
def test_a_shape_is_any_pair(shape):
    assert matrix_shape("plan", shape) == (3, 4)


@pytest.mark.parametrize("shape", [None, 5, "34", b"34"])
def test_rejects_a_shape_that_is_not_a_pair(shape):
    with pytest.raises(TypeError) as caught:
        matrix_shape("plan", shape)
    assert str(caught.value) == (
        f"plan: shape must be a pair (rows, columns), got {shape!r}. Pass shape=(M, K)."
    )


@pytest.mark.parametrize("shape", [(), (3,), (3, 4, 5)])
def test_a_shape_of_another_length_is_a_value_error(shape):
    with pytest.raises(ValueError) as caught:
        matrix_shape("plan", shape)
    assert str(caught.value) == (
        f"plan: shape must be a pair (rows, columns), got {len(shape)} numbers. Pass (M, K)."
    )


@pytest.mark.parametrize("shape, place", [((-1, 4), "shape[0]"), ((4, math.nan), "shape[1]")])
def test_a_bad_number_in_a_shape_is_named_by_its_place(shape, place):
    with pytest.raises(ValueError) as caught:
        matrix_shape("plan", shape)
    assert str(caught.value).startswith(f"plan: {place} must be ")


def test_a_name_from_the_list_is_returned():
    assert one_of("plan", "tune", "model", ("model", "measure")) == "model"


def test_a_name_not_on_the_list_is_a_value_error_with_the_list():
    with pytest.raises(ValueError) as caught:
        one_of("plan", "tune", "fast", ("model", "measure"))
    assert str(caught.value) == (
        "plan: tune must be one of ['model', 'measure'], got 'fast'. Choose a name from that list."
    )


@pytest.mark.parametrize("value", [None, 3, b"model"])
def test_rejects_non_strings_and_lists_the_names(value):
    with pytest.raises(TypeError) as caught:
        one_of("plan", "tune", value, ("model", "measure"))
    assert str(caught.value) == (
        f"plan: tune must be a name, got {type(value).__name__}. Use one of ['model', 'measure']."
    )


@pytest.mark.parametrize(
    "given, canonical",
    [*((name, name) for name in REDUCES), ("add", "sum"), ("amax", "max"), ("amin", "min")],
)
def test_reductions_have_the_names_torch_uses(given, canonical):
    assert reduce_name("run", given) == canonical


@pytest.mark.parametrize("value, kind", [("prod", ValueError), ("SUM", ValueError), (1, TypeError)])
def test_another_reduction_is_refused(value, kind):
    with pytest.raises(kind, match=r"run: reduce must be (one of|a name)"):
        reduce_name("run", value)


def test_every_error_class_is_what_callers_catch():
    assert issubclass(errors.UnsupportedError, NotImplementedError)
    assert issubclass(errors.CompileError, RuntimeError)
    assert issubclass(errors.DataError, ValueError)
    assert issubclass(errors.PlanFileError, ValueError)


def test_the_pattern_of_every_error():
    text = errors.describe("run", "B", "on cpu", "cuda:0", "Move it")
    assert text == "run: B must be on cpu, got cuda:0. Move it."
    built = errors.value_error("run", "B", "on cpu", "cuda:0", "Move it")
    assert type(built) is ValueError and str(built) == text
    built = errors.type_error("run", "B", "on cpu", "cuda:0", "Move it")
    assert type(built) is TypeError and str(built) == text


def test_a_compile_error_carries_log_and_source():
    error = errors.CompileError("compile: no", log="line 3", source_path="a.cu")
    assert (str(error), error.log, error.source_path) == ("compile: no", "line 3", "a.cu")
