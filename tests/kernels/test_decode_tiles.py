"""The tile kernel's ring, bitmaps and values, replayed: all configurations, and mistakes seen.

A replay that passes says something only if it fails where a rule is broken: each barrier and wait
of the ring, each word of a tile, each number of the schedule is left out or changed here once.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparsetile import CSR
from sparsetile.core import device as processors
from sparsetile.jit.source import DEVICE_TREE
from sparsetile.kernels import bittcf as kernel_module
from sparsetile.kernels.bittcf import STACKS
from sparsetile.systems.acc import runner as acc_runner
from tests.contracts.cases import MATRICES, csr_of
from tests.kernels.replay import Machine
from tests.kernels.replay_bittcf import REPLAYS, Product
from tests.kernels.replay_cases import TileCase, stack_windows, with_tiles
from tests.kernels.replay_mma import TRAITS
from tests.kernels.replay_ring import Ring
from tests.kernels.replay_tile import TileStore
from tests.kernels.whole_numbers import operand, reference, whole_numbers

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(REPLAYS)
    made.install(monkeypatch)
    return made


@pytest.fixture(params=[1, 2], ids=["eight rows", "sixteen rows"])
def stack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles that share their columns, in every window."""
    stack_windows(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_every_configuration_that_is_compiled_is_replayed(machine, monkeypatch, dtype):
    """Wider and narrower slabs than the host would choose, with one slab and with several."""
    full = 16 // dtype.itemsize
    csr = whole_numbers("odd sizes", dtype)
    ways = [(full, None), (full, "cache"), (full // 2, None), (1, None)]
    for stack in STACKS:
        stack_windows(monkeypatch, stack)
        for vector, ablation in ways:
            if ablation and stack > 1:
                continue  # the ladder has windows of eight rows
            for slab in kernel_module.slabs(dtype, vector, stack):
                monkeypatch.setattr(acc_runner, "choose_slab", lambda *_, slab=slab, **__: slab)
                for n in (vector, slab.columns, 3 * full * 8 + vector):
                    B = operand(csr, n, dtype)
                    case = TileCase(machine, csr, n, dtype, ablation=ablation)
                    assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))
    keys = ("kSpan", "kPieces", "kVec", "kStages", "kStack")
    seen = {tuple(c[key] for key in keys) for c in machine.configs}
    listed = {
        tuple(c[key] for key in keys)
        for c in kernel_module.SPMM_BITTCF.configs()
        if c["ELEMENT"] == kernel_module.ELEMENTS[dtype]
    }
    assert seen == listed


def test_windows_of_sixteen_rows_are_launched_where_the_system_chooses_them(machine, monkeypatch):
    monkeypatch.setattr(processors, "PROCESSORS", 1)
    csr = csr_of(sp.csr_array(np.tile(MATRICES["equal rows"]().toarray(), (20, 1))))
    csr = csr.with_values(csr.values % 3 + 1)
    B = operand(csr, 128, F32)
    case = TileCase(machine, csr, 128, F32)
    assert torch.equal(case.spmm(B), reference(csr, B).to(F32))
    assert case.meta["stack"] == machine.configs[-1]["kStack"] == 2
    narrow = operand(csr, 7, F32)  # no plan is bound to its width
    assert torch.equal(case.spmm(narrow), reference(csr, narrow).to(F32))
    assert (machine.configs[-1]["kStack"], machine.configs[-1]["kStages"]) == (2, 0)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("n", [7, 64, 256, 512])
def test_a_float32_plan_of_sixteen_rows_serves_16_bit_operands(machine, monkeypatch, dtype, n):
    """Autocast: B and the values come in 16 bits, the tiles stay what they are."""
    stack_windows(monkeypatch, 2)
    machine.install(monkeypatch, processors=1)  # so that wide slabs fill it
    csr = with_tiles([2, 1, 3, 1, 1, 2, 4, 1, 1] * 12, F32, stack=2)
    case = TileCase(machine, csr, n, F32)
    values = csr.values.to(dtype)
    B = operand(csr, n, dtype)
    out = torch.full((csr.shape[0], n), float("nan"), dtype=dtype)
    machine.hold(values, B, out)
    case.runner.spmm(case.stage.parts, values, case.pack(values, dtype), B, out)
    case.check_writes(out)
    assert torch.equal(out, reference(csr, B).to(dtype))


def test_a_patterns_one_is_that_of_the_device():
    text = (DEVICE_TREE / "mma.cuh").read_text()
    ones = re.findall(r"struct Mma<(\w+)> {.*?kOne = (0x[0-9a-f]+)u", text, re.DOTALL)
    assert {name: int(one, 16) for name, one in ones} == {
        name: element.one for name, element in TRAITS.items()
    }


# -- values in words


def begins(case: TileCase, stack: int) -> list[int]:
    return case.stage.parts[1][::stack].tolist()


@pytest.mark.parametrize("n", [16, 7], ids=["ring", "direct"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_values_of_16_bits_may_begin_and_end_in_the_middle_of_a_word(machine, stack, dtype, n):
    for drop in (0, 1):  # the number of entries is odd once
        csr = with_tiles([3, 1, 2, 0, 45, 1], dtype, stack=stack)
        keep = csr.nnz - drop
        indptr = csr.indptr.clamp(max=keep)
        csr = CSR(indptr, csr.indices[:keep], csr.values[:keep], csr.shape)
        case = TileCase(machine, csr, n, dtype)
        assert {begin % 2 for begin in begins(case, stack)[:-1]} == {0, 1}
        assert case.meta["slots"] > 0, "pieces of cut windows begin anywhere, too"
        assert case.packed.numel() == -(-csr.nnz // 8) * 8
        case.packed[csr.nnz :] = float("nan")  # what fills the last piece is never used
        B = operand(csr, n, dtype)
        assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_full_tile_fills_the_store_wherever_its_values_begin(machine, stack, dtype, before):
    rows = 8 * stack
    dense = np.zeros((2 * rows, 24))
    dense[0, :before] = 1
    dense[rows:, 8:] = np.random.default_rng(1).integers(1, 4, (rows, 16))
    csr = csr_of(sp.csr_array(dense), dtype=dtype)
    case = TileCase(machine, csr, 16, dtype)
    assert begins(case, stack)[-3:] == [before, before + 8 * rows, before + 16 * rows]
    B = operand(csr, 16, dtype)
    assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_without_its_padding_the_last_word_would_be_read_past_the_end(machine, stack, dtype):
    csr = csr_of(sp.csr_array(np.ones((3, 5))), dtype=dtype)
    case = TileCase(machine, csr, 8, dtype)
    case.packed = case.packed[:15].clone()
    machine.hold(case.packed)
    with pytest.raises(AssertionError, match="access to elements 0 to 8 of 7"):
        case.spmm(operand(csr, 8, dtype))
    B = operand(csr, 7, dtype)
    assert torch.equal(case.spmm(B), reference(csr, B).to(dtype)), "plain loads need none"


# -- mistakes are seen


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("stages", ["one", "two"])
def test_the_ring_needs_each_of_its_waits_and_barriers(
    machine, stack, monkeypatch, stages, pattern
):
    csr = with_tiles([9, 7], F32, pattern, stack=stack)
    case = TileCase(machine, csr, 8, F32, ablation="cache" if stages == "one" else None)
    B = operand(csr, 8, F32)
    assert torch.equal(case.spmm(B), reference(csr, B).to(F32))
    for rule in ("sync", "wait", "commit"):
        with monkeypatch.context() as without, pytest.raises(AssertionError):
            without.setattr(Ring, rule, lambda *_: None)
            case.spmm(B)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_a_tile_needs_each_of_its_words_in_a_place_of_its_own(machine, stack, monkeypatch, dtype):
    csr = with_tiles([9, 7], dtype, stack=stack)
    case = TileCase(machine, csr, 8, dtype)
    B = operand(csr, 8, dtype)
    copy, read, make = TileStore.copy, TileStore.read, Product.__init__

    def without_last_value(self, bitmaps, values, tile, begin, end, *rest):
        copy(self, bitmaps, values, tile, begin, end - 4 // dtype.itemsize, *rest)

    def without_bitmaps(self, bitmaps, *rest):
        copy(self, type(bitmaps)(bitmaps.address, bitmaps.data * 0), *rest)

    def one_begin_for_all(self, ring, warp, at, begin):
        weights, count = read(self, ring, warp, at, begin)
        return weights, count * 0 + 1

    def rows_alone(self, *given):
        make(self, *given)
        self.stage_bytes, self.ring_bytes = self.tile_at, self.stages * self.tile_at

    def a_later_stage(self, ring, warp, at, begin):
        return read(self, ring, warp, (at + ring.size // 2) % ring.size, begin)

    broken = [
        (TileStore, "copy", without_last_value),
        (TileStore, "copy", without_bitmaps),
        (TileStore, "read", a_later_stage),
        (Product, "__init__", rows_alone),
    ]
    if dtype is F16:
        broken.append((TileStore, "read", one_begin_for_all))
    for owner, name, mistake in broken:
        with monkeypatch.context() as wrong, pytest.raises(AssertionError):
            wrong.setattr(owner, name, mistake)
            assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))
    assert torch.equal(case.spmm(B), reference(csr, B).to(dtype))


@pytest.mark.parametrize("field, change", [(0, 1), (1, 1), (2, -1), (3, 1), (3, -1)])
@pytest.mark.parametrize("n", [8, 7], ids=["ring", "direct"])
def test_a_wrong_schedule_does_not_pass(machine, stack, field, change, n):
    csr = with_tiles([3, 2, 3, 1, 4, 2, 2, 1], F32, stack=stack)
    case = TileCase(machine, csr, n, F32)
    items = case.stage.parts[7]
    assert len(items) > 1 and int(items[0, 3]) < -1
    B = operand(csr, n, F32) + 1
    expected = reference(csr, B).to(F32)
    assert torch.equal(case.spmm(B), expected)
    items[0, field] += change
    with pytest.raises(AssertionError):
        assert torch.equal(case.spmm(B), expected)


@pytest.mark.parametrize("n", [8, 7], ids=["ring", "direct"])
@pytest.mark.parametrize("part, change", [("tc_offset", 1), ("column", 1), ("bit", 1)])
def test_a_wrong_number_of_the_format_does_not_pass(machine, stack, part, change, n):
    csr = with_tiles([3, 2, 3, 1], F32, stack=stack)
    case = TileCase(machine, csr, n, F32)
    B = operand(csr, n, F32)
    B[:, 0] = torch.arange(len(B))  # no two rows are equal
    expected = reference(csr, B).to(F32)
    assert torch.equal(case.spmm(B), expected)
    if part == "tc_offset":
        case.stage.parts[1][:-1] += change
    elif part == "column":
        case.stage.parts[2][5] += change
    else:
        case.stage.parts[3][stack - 1] ^= change
    with pytest.raises(AssertionError):
        assert torch.equal(case.spmm(B), expected)
