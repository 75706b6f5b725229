"""The CPU kernels take any dtype and stride, touch nothing outside their output, and refuse the
rest by name."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsetile.kernels.cpu import api as cpu_api
from sparsetile.kernels.cpu import memory
from tests.kernels.cpu.chunks import row_chunks

INDPTR = torch.tensor([0, 2, 2, 5])
INDICES = torch.tensor([0, 3, 1, 2, 3], dtype=torch.int32)
VALUES = torch.tensor([1.0, -2.0, 3.0, 0.5, 4.0])
BOUNDS = row_chunks(INDPTR, 2)


def dense(dtype: torch.dtype) -> Tensor:
    A = torch.zeros(3, 4, dtype=dtype)
    A[[0, 0, 2, 2, 2], INDICES.long()] = VALUES.to(dtype)
    return A


def integers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(3)).float()


def product(B: Tensor, out: Tensor | None = None, **options: Any) -> Tensor:
    out = torch.empty(3, B.shape[1], dtype=B.dtype) if out is None else out
    settings = {"alpha": 1.0, "beta": 0.0, "values": VALUES, **options}
    cpu_api.spmm_sum(
        INDPTR, INDICES, settings["values"], B, out, settings["alpha"], settings["beta"], BOUNDS
    )
    return out


STRIDED = {
    "transposed": lambda n: integers(n, 4).T,
    "wide_rows": lambda n: integers(4, n + 9)[:, 3 : n + 3],
    "every_other_row": lambda n: integers(8, n)[::2],
    "every_other_column": lambda n: integers(4, 2 * n)[:, ::2],
    "one_row_repeated": lambda n: integers(1, n).expand(4, n),
    "one_column_repeated": lambda n: integers(4, 1).expand(4, n),
    "misaligned": lambda n: integers(4 * n + 1)[1:].view(4, n),
    "negated_view": lambda n: torch.complex(integers(4, n), integers(4, n)).conj().imag,
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("n", [1, 7, 48])
def test_every_stride_of_B_gives_the_same_product(name: str, n: int) -> None:
    B = STRIDED[name](n)
    assert torch.equal(product(B), dense(torch.float32) @ B)


@pytest.mark.parametrize("name", STRIDED)
def test_every_stride_of_G_and_B_gives_the_same_sampled_product(name: str) -> None:
    B = STRIDED[name](21)
    G = B[:3]
    out = torch.empty(10)[::2]
    cpu_api.sddmm(INDPTR, INDICES, G, B, out, BOUNDS)
    assert torch.equal(out, (G @ B.T)[[0, 0, 2, 2, 2], INDICES.long()])


@pytest.mark.parametrize("n", [1, 7, 48])
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_every_stride_of_out_is_written_and_nothing_beside_it(n: int, beta: float) -> None:
    B = integers(4, n)
    for view in (lambda x: x[:3, 2 : n + 2], lambda x: x[::2, : 2 * n : 2], lambda x: x.T[:3, :n]):
        memory = torch.full((120, 120), 7.0)
        untouched = torch.ones(120, 120, dtype=torch.bool)
        out = view(memory)[:3]
        view(untouched)[:3] = False
        product(B, out, beta=beta)
        assert torch.equal(out, dense(torch.float32) @ B + beta * 7)
        assert (memory[untouched] == 7).all()


@pytest.mark.parametrize("n", [1, 7, 48])
def test_extremum_writes_strided_outputs_and_nothing_beside_them(n: int) -> None:
    B = integers(4, n)
    plain, winners = torch.empty(3, n), torch.empty(3, n, dtype=torch.int32)
    cpu_api.spmm_extremum(INDPTR, INDICES, VALUES, B, plain, winners, True, BOUNDS)
    for view in (lambda x: x[:, 2 : n + 2], lambda x: x[:, : 2 * n : 2]):
        out, arg = torch.full((3, 120), 7.0), torch.full((3, 120), 7, dtype=torch.int32)
        cpu_api.spmm_extremum(INDPTR, INDICES, VALUES, B, view(out), view(arg), True, BOUNDS)
        assert torch.equal(view(out), plain)
        assert torch.equal(view(arg), winners)
        view(out)[:] = 7
        view(arg)[:] = 7
        assert (out == 7).all()
        assert (arg == 7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    # 2048 ones and a half: a sum kept in half precision would stick at 2048 or at 256.
    indptr = torch.tensor([0, 2100])
    indices = torch.arange(2100, dtype=torch.int32)
    B = torch.ones(2100, 20, dtype=dtype)
    bounds = row_chunks(indptr, 1)
    out = torch.empty(1, 20, dtype=dtype)
    cpu_api.spmm_sum(indptr, indices, None, B, out, 1.0, 0.0, bounds)
    assert torch.equal(out, torch.full((1, 20), 2100.0).to(dtype))
    grad = torch.empty(1, dtype=dtype)
    wide = torch.ones(1, 2100, dtype=dtype)
    cpu_api.sddmm(torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int32), wide, wide, grad, bounds)
    assert grad == torch.tensor(2100.0).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_scale_and_accumulate_onto_out(dtype: torch.dtype) -> None:
    B, old = integers(4, 19).to(dtype), integers(3, 19).to(dtype)
    out = product(B, old.clone(), alpha=0.5, beta=2.0, values=VALUES.to(dtype))
    expected = 0.5 * (dense(torch.float32) @ B.float()) + 2 * old.float()
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_have_extrema(dtype: torch.dtype) -> None:
    B = integers(4, 19).to(dtype)
    out, arg = torch.empty(3, 19, dtype=dtype), torch.empty(3, 19, dtype=torch.int32)
    cpu_api.spmm_extremum(INDPTR, INDICES, None, B, out, arg, False, BOUNDS)
    expected = torch.stack([B[[0, 3]].amin(0), torch.zeros(19, dtype=dtype), B[1:].amin(0)])
    assert torch.equal(out, expected)
    assert (arg[1] == -1).all()


def test_values_of_another_dtype_are_brought_to_the_one_of_B() -> None:
    B = integers(4, 9).double()
    assert torch.equal(product(B, values=VALUES.bfloat16()), dense(torch.float64) @ B)


def test_large_outputs_are_aligned_and_small_ones_too() -> None:
    for rows, columns in ((3, 5), (0, 4), (2000, 1000)):
        for dtype in (torch.float16, torch.float32, torch.int64):
            out = memory.empty_output(rows, columns, dtype)
            assert out.shape == (rows, columns)
            assert out.dtype == dtype
            assert out.is_contiguous()
            assert out.data_ptr() % 64 == 0


def test_the_tail_of_a_row_does_not_read_past_the_end_of_memory(interpreter) -> None:
    # B and G end where a page without read permission begins: one byte too far is a crash.
    script = """
import ctypes, mmap, numpy as np, torch
from sparsetile.kernels.cpu import api as cpu_api
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if protect(base + page, page, 0) != 0:
    raise OSError(ctypes.get_errno(), "mprotect")
for n in (1, 7, 15, 17, 33, 100):
    whole = torch.from_numpy(np.frombuffer(memory, np.float32, page // 4))
    B = whole[page // 4 - 2 * n:].view(2, n)
    B.fill_(1.0)
    indptr, indices = torch.tensor([0, 2]), torch.tensor([0, 1], dtype=torch.int32)
    bounds, out = torch.tensor([0, 1]), torch.empty(1, n)
    cpu_api.spmm_sum(indptr, indices, None, B, out, 1.0, 0.0, bounds)
    print(int(out.sum()), end=" ")
    cpu_api.spmm_sum(indptr, indices, None, B.clone(), B[1:], 1.0, 1.0, bounds)
    cpu_api.spmm_extremum(indptr, indices, None, B, out, out.int(), True, bounds)
    grad = torch.empty(2)
    cpu_api.sddmm(indptr, indices, B[1:], B, grad, bounds)
    print(int(grad[1]), end=" ")
"""
    done = interpreter(script)
    assert done.returncode == 0, done.stderr
    sizes = (1, 7, 15, 17, 33, 100)
    assert done.stdout.split() == [str(x) for n in sizes for x in (2 * n, 9 * n)]


GOOD: dict[str, Any] = {
    "indptr": INDPTR, "indices": INDICES, "values": VALUES, "B": torch.ones(4, 6),
    "out": torch.ones(3, 6), "bounds": BOUNDS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        (
            {"B": [[1.0]]},
            TypeError,
            "spmm_sum: B must be a tensor, got list. Convert it with torch.as_tensor.",
        ),
        (
            {"B": torch.ones(4, 6, dtype=torch.int32)},
            TypeError,
            "spmm_sum: B must be float16 or bfloat16 or float32 or float64, got int32. "
            "Convert it with .to().",
        ),
        (
            {"out": torch.ones(3, 6, dtype=torch.float64)},
            TypeError,
            "spmm_sum: out must be float32, got float64. Convert it with .to().",
        ),
        (
            {"B": torch.ones(4, 6, device="meta")},
            ValueError,
            "spmm_sum: B must be a dense tensor on the CPU, got torch.strided on meta. "
            "Convert it with .cpu().",
        ),
        (
            {"out": torch.ones(2, 6)},
            ValueError,
            "spmm_sum: out must be of shape [3, 6], got [2, 6]. Match it to A and B.",
        ),
        (
            {"B": torch.ones(2, 4, 6)},
            ValueError,
            "spmm_sum: B must be two-dimensional, got shape [2, 4, 6]. "
            "Call once for each matrix of a batch.",
        ),
        (
            {"values": torch.ones(4)},
            ValueError,
            "spmm_sum: values must be of shape [5], got [4]. Match it to A and B.",
        ),
        (
            {"indices": INDICES.long()},
            TypeError,
            "spmm_sum: indices must be int32, got int64. Convert it with .to().",
        ),
        (
            {"indptr": INDPTR.repeat_interleave(2)[::2]},
            ValueError,
            "spmm_sum: indptr must be contiguous, one-dimensional, with 1 elements or more, "
            "got shape [4], strides [2]. Pass what intake and balance.row_chunks made.",
        ),
        (
            {"bounds": torch.zeros(1, dtype=torch.int64)},
            ValueError,
            "spmm_sum: bounds must be contiguous, one-dimensional, with 2 elements or more, "
            "got shape [1], strides [1]. Pass what intake and balance.row_chunks made.",
        ),
    ],
)
def test_a_wrong_argument_is_named(
    changed: dict[str, Any], error: type[Exception], text: str
) -> None:
    given = {**GOOD, **changed}
    with pytest.raises(error) as caught:
        cpu_api.spmm_sum(**given, alpha=1.0, beta=0.0)
    assert str(caught.value) == text


def test_the_other_kernels_name_their_own_arguments() -> None:
    B, out = torch.ones(4, 6), torch.ones(3, 6)
    with pytest.raises(TypeError, match=r"^spmm_extremum: arg must be int32, got float32\."):
        cpu_api.spmm_extremum(INDPTR, INDICES, None, B, out, out, True, BOUNDS)
    with pytest.raises(ValueError, match=r"^sddmm: G must be of shape \[3, 6\], got \[4, 6\]\."):
        cpu_api.sddmm(INDPTR, INDICES, B, B, torch.ones(5), BOUNDS)
    with pytest.raises(ValueError, match=r"^sddmm: out must be of shape \[5\], got \[3, 6\]\."):
        cpu_api.sddmm(INDPTR, INDICES, out, B, out, BOUNDS)


# -- memory of large results


@pytest.fixture
def none_kept(monkeypatch):
    monkeypatch.setattr(memory, "_kept", deque(maxlen=memory._KEPT))


def large(rows: int = 1 << 15, columns: int = 40) -> torch.Tensor:
    return memory.empty_output(rows, columns, torch.float32)


def test_memory_of_a_dropped_result_is_used_again(none_kept):
    first = large()
    assert first.data_ptr() % 64 == 0 and first.is_contiguous()
    place = first.data_ptr()
    other = large()
    assert other.data_ptr() != place, "two at a time"
    del first
    assert large(columns=41).data_ptr() != place, "another size"
    again = large()
    assert again.data_ptr() == place and again.shape == (1 << 15, 40)


def test_memory_is_not_used_again_while_anything_looks_at_it(none_kept):
    first = large()
    first.fill_(1.0)
    part, array = first[5:7].T, first.numpy()
    del first
    for _ in range(3):
        large().fill_(2.0)
    assert bool((part == 1.0).all())
    del part
    for _ in range(3):
        large().fill_(2.0)
    assert (array == 1.0).all()


def test_little_memory_is_kept(none_kept, constants):
    several = [large() for _ in range(5)]
    several.clear()
    assert len(memory._kept) == 2
    constants(memory, KEPT_BYTES=6 << 20)
    memory._kept.clear()
    kept, too_large = large(), large(1 << 16)
    del too_large
    assert not memory._kept
    del kept
    assert len(memory._kept) == 1


def test_threads_share_what_is_kept(none_kept):
    def use(number: int) -> bool:
        for _ in range(50):
            mine = large()
            mine[::4096] = number
            time.sleep(0)
            if not bool((mine[::4096] == number).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(4)))
