"""Packing and decoding agree: the csr kernels, replayed in NumPy, against scipy.

Numbers are small and whole, so that every order of additions gives the same bits. Rows of B that
no entry of A refers to are NaN, C and the scratch memory are NaN before: whatever is read or left
out by mistake shows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sparsetile.balance import locality
from sparsetile.kernels import KERNELS
from sparsetile.kernels import csr as kernel_module
from sparsetile.systems.base import Epilogue
from sparsetile.systems.csr import runner as csr_runner
from sparsetile.systems.csr import system as system_module
from sparsetile.systems.shared import geometry as geometry
from tests.contracts.cases import MATRICES, csr_of, random_matrix, with_dense_row
from tests.kernels.replay import Array, Machine, device_fields, host_letters
from tests.kernels.replay_cases import RowCase, strided
from tests.kernels.replay_csr import REPLAYS
from tests.kernels.whole_numbers import operand, reference, whole_numbers

# Entries per distinct column from which four rows are bundled: none, all, some.
BUNDLING = {"rows": 1e9, "bundles": 0.0, "both": 1.3}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(REPLAYS)
    made.install(monkeypatch)
    return made


@pytest.fixture
def bundling(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def choose(kind: str) -> None:
        for name in vars(system_module):
            if name.startswith("MIN_"):
                least = {2: 0.0, 4: 0.0} if name == "MIN_MEAN_SHARING" else 0.0
                monkeypatch.setattr(system_module, name, least)
        monkeypatch.setattr(system_module, "MIN_SHARING", BUNDLING[kind])
        monkeypatch.setattr(system_module, "MIN_BUNDLED_SHARE", 1e-9)

    return choose


@pytest.mark.parametrize("name", KERNELS)
def test_host_and_device_name_the_same_kinds_of_parameters_in_the_same_order(name):
    assert [letter for _, letter in device_fields(KERNELS[name])] == host_letters(KERNELS[name])


F16, F32, F64 = torch.float16, torch.float32, torch.float64
WIDTHS = [(F32, 1), (F32, 36), (F32, 130), (F16, 24), (F16, 264), (F64, 33)]


@pytest.mark.parametrize("kind", BUNDLING)
@pytest.mark.parametrize("name", MATRICES)
def test_the_replay_of_every_matrix_is_its_product(machine, bundling, name, kind):
    bundling(kind)
    for dtype, n in WIDTHS:
        csr = whole_numbers(name, dtype)
        B = operand(csr, n, dtype)
        C = RowCase(machine, csr, n, dtype).spmm(B)
        assert torch.equal(C, reference(csr, B).to(dtype)), f"{dtype} of width {n}"
    bundled = {config["kRows"] for config in machine.configs}
    assert kind != "bundles" or not csr.nnz or 4 in bundled
    assert kind != "rows" or bundled <= {1}


@pytest.mark.parametrize("kind", BUNDLING)
@pytest.mark.parametrize("name", ["odd sizes", "one dense row", "equal rows"])
def test_a_pattern_counts_every_entry_as_one(machine, bundling, name, kind):
    bundling(kind)
    csr = whole_numbers(name, F32, pattern=True)
    B = operand(csr, 40, F32)
    assert torch.equal(RowCase(machine, csr, 40, F32).spmm(B), reference(csr, B).to(F32))


@pytest.mark.parametrize("kind", BUNDLING)
@pytest.mark.parametrize("name", ["odd sizes", "one dense column", "long shared rows"])
def test_an_order_of_the_rows_changes_nothing(machine, bundling, name, kind):
    bundling(kind)
    csr = whole_numbers(name, F32)
    order = torch.randperm(csr.shape[0])
    B = operand(csr, 40, F32)
    C = RowCase(machine, csr, 40, F32, order).spmm(B)
    assert torch.equal(C, reference(csr, B).to(F32))


@pytest.mark.parametrize("threads", [32, 64, 256])
def test_any_number_of_threads_a_block_does(machine, bundling, monkeypatch, threads):
    bundling("both")
    monkeypatch.setattr(kernel_module, "THREADS", threads)
    monkeypatch.setattr(csr_runner, "THREADS", threads)
    for name in ("odd sizes", "one dense row", "one dense column", "equal rows"):
        csr = whole_numbers(name, F32)
        for n in (5, 32, 132):
            B = operand(csr, n, F32)
            assert torch.equal(RowCase(machine, csr, n, F32).spmm(B), reference(csr, B).to(F32))


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
@pytest.mark.parametrize("kind", ["rows", "both"])
def test_any_number_of_lanes_a_group_does(machine, bundling, monkeypatch, lanes, kind):
    """Wider and narrower groups than the host would choose, with one slab and with several."""
    bundling(kind)
    tile = kernel_module.RowTile
    for name in ("choose_tile", "choose_bundle_tile"):
        monkeypatch.setattr(
            csr_runner, name, lambda dtype, n, vector, *_, **__: tile(vector, lanes)
        )
    for name in ("odd sizes", "one dense row", "tall"):
        csr = whole_numbers(name, F32)
        for n in (3, 36, 140):
            B = operand(csr, n, F32)
            assert torch.equal(RowCase(machine, csr, n, F32).spmm(B), reference(csr, B).to(F32))
    assert {config["kLanes"] for config in machine.configs} == {lanes}


@pytest.mark.parametrize(("lanes", "times"), [(4, 2), (8, 2), (8, 4), (16, 2), (32, 2)])
@pytest.mark.parametrize("kind", ["rows", "both"])
def test_lanes_with_several_vectors_read_and_write_each_once(
    machine, bundling, monkeypatch, lanes, times, kind
):
    bundling(kind)
    tile = kernel_module.RowTile
    for name in ("choose_tile", "choose_bundle_tile"):
        monkeypatch.setattr(
            csr_runner, name, lambda dtype, n, vector, *_, **__: tile(vector, lanes, times)
        )
    for name in ("odd sizes", "one dense row", "tall", "empty rows"):
        csr = whole_numbers(name, F32)
        for n in (lanes * times * 4, lanes * times * 8):
            B = operand(csr, n, F32)
            case = RowCase(machine, csr, n, F32)
            assert torch.equal(case.spmm(B), reference(csr, B).to(F32))
            best, none = torch.full((csr.shape[0], n), float("nan")), None
            machine.hold(best)
            case.runner.extremum(case.stage.parts, csr.values, B, best, none, True)
            case.check_writes(best)


def shape(**given) -> kernel_module.RowShape:
    return kernel_module.RowShape(**given)


def test_the_tile_follows_the_lengths_of_the_rows():
    tile, choose = kernel_module.RowTile, kernel_module.choose_tile
    many, long = shape(rows=10**6, mean=3.0), shape(long_share=0.9)
    assert choose(F32, 32, 4, shape()) == tile(4, 8)
    assert choose(F32, 32, 4, many) == tile(4, 4, 2)
    assert choose(F32, 128, 4, shape()) == tile(4, 16, 2)
    assert choose(F32, 128, 4, many) == tile(4, 8, 4)
    assert choose(F32, 128, 4, long) == tile(4, 32)
    assert choose(F32, 512, 4, long) == tile(4, 32, 2)
    assert choose(F16, 128, 8, shape()) == tile(8, 8, 2)
    assert choose(F32, 100, 4, many) == tile(4, 32), "25 vectors are no multiple of 32"
    assert choose(F32, 128, 4, many, args=True) == tile(4, 32)
    assert choose(F32, 7, 1, many) == tile(1, 8)


def test_a_small_cache_makes_slabs_narrow_and_the_product_stays(machine, bundling, monkeypatch):
    bundling("rows")
    csr = whole_numbers("wide", F32)
    B = operand(csr, 256, F32)
    monkeypatch.setattr(locality, "CACHE_BYTES", 512)  # one row of B: each entry reads anew
    monkeypatch.setattr(kernel_module, "SPREAD", 1.05)
    slabs = set()
    for l2 in (50 * 2**20, csr.shape[1] * 128 * 2):
        machine.install(monkeypatch, l2=l2)
        assert torch.equal(RowCase(machine, csr, 256, F32).spmm(B), reference(csr, B).to(F32))
        config = machine.configs[-1]
        slabs.add(config["kLanes"] * config["kTimes"] * config["kVec"])
    assert 32 in slabs and len(slabs) == 2


@pytest.mark.parametrize("batch", [(), (2,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("kind", BUNDLING)
def test_slabs_may_be_the_fast_dimension_of_the_grid(machine, bundling, monkeypatch, kind, batch):
    bundling(kind)
    monkeypatch.setattr(kernel_module.RowShape, "slabs_first", lambda shape, bundles: True)
    csr = whole_numbers("one dense row", F32)
    B = operand(csr, 640, F32, batch)
    case = RowCase(machine, csr, 640, F32)
    assert torch.equal(case.spmm(B), reference(csr, B).to(F32))
    (launch,) = case.runner._launches.values()
    assert launch.slabs > 1
    assert launch.grid(3) == (launch.slabs * launch.block_ends[-1], 1, 3)


@pytest.mark.parametrize("how", ["row stride", "misaligned", "same batch again"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("kind", BUNDLING)
def test_any_stride_and_batch_is_read_and_written_in_place(machine, bundling, how, batch, kind):
    bundling(kind)
    csr = whole_numbers("one dense row", F16)
    B = strided(operand(csr, 24, F16, batch), how)
    wide = torch.full((*batch, csr.shape[0], 40), 7.0, dtype=F16)
    C = RowCase(machine, csr, 24, F16).spmm(B, out=wide[..., :24])
    assert torch.equal(C, reference(csr, B).to(F16))
    assert bool((wide[..., 24:] == 7).all())


@pytest.mark.parametrize("kind", BUNDLING)
def test_alpha_beta_mean_bias_and_relu_act_on_the_right_elements(machine, bundling, kind):
    bundling(kind)
    csr = whole_numbers("one dense row", F64)
    csr = csr if kind == "rows" else csr.with_values(csr.values.float())
    dtype = csr.values.dtype
    B = operand(csr, 20, dtype)
    plain = reference(csr, B)
    case = RowCase(machine, csr, 20, dtype)
    before = torch.randint(-4, 4, plain.shape).to(dtype)
    C = case.spmm(B, out=before.clone(), alpha=2.0, beta=-0.5)
    assert torch.equal(C.double(), 2 * plain - 0.5 * before.double())
    lengths = csr.row_lengths().clamp(min=1).unsqueeze(1)
    assert torch.allclose(case.spmm(B, mean=True).double(), plain / lengths, rtol=1e-6)
    bias = torch.arange(20).to(dtype)
    machine.hold(bias)
    C = case.spmm(B, bias=bias, relu=True)
    assert torch.equal(C.double(), torch.relu(plain + bias.double()))


@pytest.mark.parametrize("maximum", [True, False], ids=["max", "min"])
@pytest.mark.parametrize("name", MATRICES)
def test_extrema_keep_the_first_of_equals_and_the_first_nan(machine, name, maximum):
    csr = whole_numbers(name, F32)
    for n in (5, 36):
        case = RowCase(machine, csr, n, F32)
        B = operand(csr, n, F32)
        if csr.nnz:
            B[int(csr.indices[csr.nnz // 2]), 1] = float("nan")
        size = (csr.shape[0], n)
        out, args = torch.full(size, float("nan")), torch.full(size, -7, dtype=torch.int64)
        alone = out.clone()
        machine.hold(B, out, args, alone)
        case.runner.extremum(case.stage.parts, csr.values, B, out, args, maximum)
        case.check_writes(out)
        case.runner.extremum(case.stage.parts, csr.values, B, alone, None, maximum)
        case.check_writes(alone)
        assert torch.equal(alone.nan_to_num(7e9), out.nan_to_num(7e9)), "with and without winners"
        products = csr.values.unsqueeze(1) * B[csr.indices.long()]
        for row, (begin, end) in enumerate(zip(csr.indptr[:-1], csr.indptr[1:], strict=True)):
            mine = products[begin:end]
            if not len(mine):
                assert not bool(out[row].any()) and bool((args[row] == -1).all())
                continue
            held = torch.where(mine.isnan(), float("inf"), mine if maximum else -mine)
            first = (held == held.amax(0)).int().argmax(0)
            assert torch.equal(args[row], first + begin)
            found = mine.gather(0, first.unsqueeze(0))[0]
            assert torch.equal(out[row].isnan(), found.isnan())
            assert torch.equal(out[row].nan_to_num(), found.nan_to_num())


@pytest.mark.parametrize("n", [3, 36, 260])
def test_a_repair_writes_what_is_not_finite_and_leaves_the_rest(machine, n):
    csr = whole_numbers("one dense row", F32)
    case = RowCase(machine, csr, n, F32)
    B = operand(csr, n, F32)
    exact = reference(csr, B).to(F32)
    out = exact + 0.25  # finite elements must keep what they hold
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[3, 0] = spoilt[17, n - 1] = spoilt[39, n // 2] = True
    out[spoilt] = float("nan")
    machine.hold(B, out)
    case.runner.repair(case.stage.parts, csr.values, B, out)
    assert torch.equal(out[spoilt], exact[spoilt])
    untouched = [row for row in range(40) if row not in (3, 17, 39)]
    assert torch.equal(out[untouched], exact[untouched] + 0.25)
    assert not any(bool(counters.any()) for counters in machine.arrivals)


@pytest.mark.parametrize("out_dtype", [F16, F32], ids=str)
def test_a_repair_may_carry_the_epilogue_and_write_float32(machine, out_dtype):
    csr = whole_numbers("one dense row", F16)
    case = RowCase(machine, csr, 24, F16)
    B, bias = operand(csr, 24, F16), torch.arange(24, dtype=F32)
    out = torch.full((40, 24), float("nan"), dtype=out_dtype)
    machine.hold(B, out, bias)
    epilogue = Epilogue(alpha=-0.5, bias=bias, relu=True)
    case.runner.repair(case.stage.parts, csr.values, B, out, epilogue)
    assert torch.equal(out, torch.relu(bias - reference(csr, B) / 2).to(out_dtype))
    assert machine.configs[-1]["kRepair"]
    assert machine.configs[-1] in list(KERNELS["spmm_csr"].configs())


@pytest.mark.parametrize("kind", BUNDLING)
@pytest.mark.parametrize("name", ["odd sizes", "tall", "one dense row"])
def test_the_quick_way_of_a_bound_product_is_the_same(machine, bundling, name, kind):
    bundling(kind)
    csr = whole_numbers(name, F32)
    case = RowCase(machine, csr, 32, F32)
    bound = case.runner.bind(case.stage.parts, csr.values, case.packed)
    for n in (32, 7):
        for _ in range(2):
            B = operand(csr, n, F32)
            machine.hold(B)
            C = bound(B)
            case.check_writes(C)
            assert torch.equal(C, reference(csr, B).to(F32))


@pytest.mark.parametrize("batch", [(), (2,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("name", ["odd sizes", "one dense row", "empty rows", "one by one"])
def test_sampled_products_are_those_of_every_entry(machine, monkeypatch, name, batch):
    csr = whole_numbers(name, F32)
    empty = torch.empty

    def held(*args, **kwargs):
        made = empty(*args, **kwargs)
        machine.hold(made)
        return made

    monkeypatch.setattr(csr_runner.torch, "empty", held)
    for dtype, n in ((F32, 36), (F32, 260), (F16, 7), (F64, 6)):
        case = RowCase(machine, csr.with_values(csr.values.to(dtype)), n, dtype)
        B = operand(csr, n, dtype, batch)
        G = torch.randint(0, 4, (*batch, csr.shape[0], n)).to(dtype)
        machine.hold(B, G)
        found = case.runner.sddmm(case.stage.parts, G, B)
        rows, columns = csr.row_ids(), csr.indices.long()
        expected = (G[..., rows, :].double() * B[..., columns, :].double()).sum(-1)
        expected = expected.sum(0) if batch else expected
        assert torch.equal(found, expected.to(dtype))


def test_batches_beyond_a_grid_are_launched_in_pieces(machine, bundling, monkeypatch):
    bundling("rows")
    monkeypatch.setattr(geometry, "MAX_BATCHES", 2)
    csr = whole_numbers("odd sizes", F32)
    B = operand(csr, 8, F32, (5,))
    case = RowCase(machine, csr, 8, F32)
    C = torch.full((5, csr.shape[0], 8), float("nan"))
    machine.hold(B, C)
    case.runner.spmm(case.stage.parts, csr.values, case.packed, B, C)
    assert torch.equal(C, reference(csr, B).to(F32))
    assert len(machine.configs) == 3
    empty = torch.empty

    def held(*args, **kwargs):
        made = empty(*args, **kwargs)
        machine.hold(made)
        return made

    monkeypatch.setattr(csr_runner.torch, "empty", held)
    G = torch.randint(0, 4, (5, csr.shape[0], 8)).to(F32)
    machine.hold(G)
    found = case.runner.sddmm(case.stage.parts, G, B)
    rows, columns = csr.row_ids(), csr.indices.long()
    assert torch.equal(found, (G[:, rows] * B[:, columns]).sum((0, -1)))
    assert len(machine.configs) == 6


def test_the_replay_notices_a_read_past_the_end_and_a_missed_column():
    """The checks of the replay itself can fail."""
    held = np.arange(8, dtype=np.float32)
    array = Array(held.ctypes.data, held)
    assert array.load(np.array([4]), 4).tolist() == [[4, 5, 6, 7]]
    with pytest.raises(AssertionError, match="access to elements 6 to 10 of 8"):
        array.load(np.array([6]), 4)
    with pytest.raises(AssertionError, match="misaligned"):
        array.load(np.array([2]), 4)


def test_a_wrong_schedule_does_not_pass(machine, bundling):
    bundling("rows")
    csr = csr_of(random_matrix(20, 30, 0.3))
    case = RowCase(machine, csr, 8, F32)
    case.stage.parts[2][3, 0] = case.stage.parts[2][4, 0]  # two items of one row, none of another
    with pytest.raises(AssertionError):
        case.spmm(operand(csr, 8, F32))


def test_the_long_row_is_cut_over_two_levels(machine, bundling):
    bundling("rows")
    csr = csr_of(with_dense_row(4, 9000, 2))
    csr.values[:] = 1
    case = RowCase(machine, csr, 8, F32)
    assert case.meta["plain"]["nodes"] > 1
    B = operand(csr, 8, F32)
    assert torch.equal(case.spmm(B), reference(csr, B).to(F32))
