"""The wcsr system: when it can serve, what it builds, what its runner launches and copies."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.engines.request import BuiltSystem, Request
from sparsetile.engines.tiles.short_runner import ShortWindowRunner
from sparsetile.engines.tiles.tile_runner import TileRunner
from sparsetile.formats import WCSR as Windows
from sparsetile.kernels.wcsr import (
    JOIN_WCSR,
    REDO_WCSR,
    REDO_WINDOWS,
    SPMM_WCSR,
    STAGED_COLUMNS,
    choose_window_tile,
    window_tiles,
)
from sparsetile.launch.interface import Epilogue
from sparsetile.reorder import Permutation
from sparsetile.systems import SYSTEMS, runner
from sparsetile.systems.wcsr import system as wcsr
from sparsetile.systems.wcsr.cost import HEIGHT, tall_windows_pay
from sparsetile.systems.wcsr.runner import WCSRRunner
from tests.contracts.cases import MATRICES, csr_of, random_matrix, tf32
from tests.kernels.decoding import with_tiles
from tests.systems.requests import OnGPU, check_plan_file, request_for

WCSR = SYSTEMS["wcsr"]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


request = functools.partial(request_for, F32)


def windows(tiles: list[int], dtype: torch.dtype = F32, pattern: bool = False) -> st.CSR:
    return with_tiles(tiles, dtype, pattern, stack=8, last=13)


def build(**changes) -> BuiltSystem:
    """Tall windows, which small matrices would not lead the system to."""
    return WCSR.build(request(**{"ablation": "tall", **changes}))


def meta_of(wanted: Request) -> dict[str, object]:
    return json.loads(WCSR.build(wanted).recipe.partition(":")[2])


# -- reasons


@pytest.mark.parametrize("other", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_than_hopper_are_refused(capability, other):
    capability.append(other)
    assert WCSR.reasons(request(OnGPU, dtype=F16)) == [
        f"needs a Hopper GPU (sm_90a), this GPU is sm_{other[0]}{other[1]}"
    ]


def test_float32_waits_until_torch_allows_tf32_and_16_bits_do_not(capability):
    with tf32(False):
        assert WCSR.reasons(request(OnGPU)) == [
            "rounds float32 to TF32, which torch does not allow now: set "
            "torch.backends.cuda.matmul.allow_tf32 = True"
        ]
        assert WCSR.reasons(request(OnGPU, dtype=F16)) == []
        assert WCSR.reasons(request(OnGPU, dtype=BF16)) == []
    with tf32(True):
        assert WCSR.reasons(request(OnGPU)) == []


def test_float64_and_the_cpu_are_refused_and_determinism_is_no_reason(capability):
    (reason,) = WCSR.reasons(request(OnGPU, dtype=torch.float64))
    assert reason == "takes float32, float16, bfloat16, not float64"
    assert WCSR.reasons(request()) == ["runs on cuda, A is on cpu"]
    assert WCSR.reasons(request(OnGPU, dtype=F16, deterministic=True)) == []


def test_all_reasons_are_given_at_once(capability):
    class Large(st.CSR):
        @property
        def nnz(self) -> int:
            return 2**31

    capability.append((8, 0))
    csr = csr_of(random_matrix(3, 3, 0.5))
    large = Large(csr.indptr, csr.indices, None, csr.shape)
    with tf32(False):
        found = WCSR.reasons(request(OnGPU, csr=large))
    assert [reason.split()[0] for reason in found] == ["holds", "rounds", "needs"]
    assert found[0] == "holds under 2^31 entries, A has 2147483648"


def test_the_summary_names_the_heights_there_are():
    heights = {tile.height for tile in window_tiles()}
    assert heights == {HEIGHT} and f"windows of {HEIGHT} rows" in WCSR.summary


# -- which windows


def shared_columns(rows: int, columns: int) -> st.CSR:
    """Every 64 rows have ``columns`` columns of their own, each row an eighth of them."""
    row = np.repeat(np.arange(rows), columns // 8)
    place = np.tile(np.arange(columns // 8) * 8, rows) + row % 8
    matrix = sp.csr_array((np.ones(row.size), (row, row // 64 * columns + place)))
    return csr_of(matrix)


def test_windows_are_tall_if_their_rows_share_columns():
    """In eight rows every column is met once, in 64 eight times."""
    assert tall_windows_pay(request(csr=shared_columns(640, 800), n=512))
    assert not tall_windows_pay(request(csr=shared_columns(640, 16), n=512)), "windows cost"
    apart = csr_of(random_matrix(640, 8000, 0.003))
    assert not tall_windows_pay(request(csr=apart, n=512))
    many = shared_columns(6400, 160)
    assert tall_windows_pay(request(csr=many, n=512))
    moved = request(csr=many, n=512, permutation=Permutation("given", torch.randperm(6400)))
    assert not tall_windows_pay(moved), "counted in the plan's order"


def test_narrow_b_and_16_bits_need_more_sharing_before_windows_are_tall():
    """What tall windows wait for takes as long there; short ones are faster."""
    csr = shared_columns(640, 320)  # tiles by height: 1 to 8
    assert tall_windows_pay(request(csr=csr, n=256))
    assert not tall_windows_pay(request(csr=csr, n=32))
    assert tall_windows_pay(request(csr=csr, n=256, dtype=F16))
    assert not tall_windows_pay(request(csr=csr, n=64, dtype=F16))
    assert tall_windows_pay(request(csr=csr, n=64))


def test_short_windows_are_what_acc_builds_under_another_name():
    csr = csr_of(random_matrix(640, 8000, 0.003))
    built, other = WCSR.build(request(csr=csr)), SYSTEMS["acc"].build(request(csr=csr))
    assert built.recipe == other.recipe.replace("acc:", "wcsr:", 1)
    assert all(torch.equal(t, other.tensors[k]) for k, t in built.tensors.items())
    assert built.choices == other.choices
    assert isinstance(runner(built.recipe), ShortWindowRunner)
    tall = WCSR.build(request(csr=shared_columns(640, 800), n=512))
    assert isinstance(runner(tall.recipe), WCSRRunner)


@pytest.mark.parametrize("height, kind", [("tall", WCSRRunner), ("short", ShortWindowRunner)])
def test_an_ablation_fixes_the_height_of_windows(height, kind):
    for csr in (shared_columns(640, 800), csr_of(random_matrix(64, 800, 0.03))):
        built = WCSR.build(request(csr=csr, ablation=height))
        assert isinstance(runner(built.recipe), kind) and built.choices["ablation"] == height


# -- build


def test_parts_are_those_of_the_format_with_room_behind_them():
    csr = windows([3, 0, 5])
    stage = build(csr=csr)
    ptr, strips, columns, bits, entries, order, indptr, items, first, cuts = stage.tensors.values()
    packed = Windows.pack(csr)
    assert torch.equal(ptr, packed.window_row_ptr) and indptr is csr.indptr
    assert torch.equal(entries, packed.entries) and order.numel() == 0
    tiles, margin = packed.tile_count, wcsr.MARGIN
    assert columns.shape == (tiles + margin, 8) and bits.shape == (tiles + margin, 8)
    by_tile = packed.window_col_idx.reshape(-1, 8)
    assert torch.equal(columns[:tiles], by_tile[:, list(STAGED_COLUMNS)])
    assert torch.equal(bits[:tiles], packed.bitmaps)
    assert not bool(columns[tiles:].any()) and not bool(bits[tiles:].any())
    assert strips.numel() == (tiles + margin) * 4 + 1
    of_tile = torch.bincount(packed.places // (64 * 8), minlength=tiles)
    assert strips[: 4 * tiles + 1 : 4].diff().tolist() == of_tile.tolist()
    assert bool((strips[4 * tiles :] == csr.nnz).all())
    assert all(part.dtype is torch.int32 for part in (strips, columns, order, items, first))
    assert all(part.is_contiguous() for part in stage.tensors.values())
    assert len(cuts) == 0


def test_a_strip_begins_with_the_values_of_its_sixteen_rows():
    csr = csr_of(random_matrix(64, 40, 0.3))
    strips = build(csr=csr).tensors["strip_value_ptr"]
    packed = Windows.pack(csr)
    bits = packed.bitmaps.numpy().view(np.uint64).reshape(-1, 2)  # of sixteen rows
    counts = np.bitwise_count(bits).sum(1)
    assert strips[: counts.size + 1].tolist() == [0, *np.cumsum(counts).tolist()]


def test_the_margin_is_what_the_longest_step_may_read_past_the_last_tile():
    """A step whose first tile is the last one, and sixteen bytes of offsets more."""
    longest = max(tile.step_tiles(dtype) for tile in window_tiles() for dtype in WCSR.dtypes)
    assert longest - 1 + 1 <= wcsr.MARGIN


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_every_worker_knows_where_its_items_begin(gpu_facts, workers):
    gpu_facts(processors=workers)
    stage = build(csr=windows([30, 2, 50, 0, 41, 40]))
    meta = json.loads(stage.recipe.partition(":")[2])
    assert meta["workers"] == workers
    assert stage.tensors["items"].shape == (meta["items"], 4)
    first = stage.tensors["first_items"].tolist()
    assert len(first) == workers + 1 and first == sorted(first)
    assert (first[0], first[-1]) == (0, meta["items"])


def test_rows_are_cut_in_the_order_asked_for():
    csr = csr_of(random_matrix(150, 130, 0.2))
    order = torch.randperm(150)
    stage = build(csr=csr, permutation=Permutation("given", order))
    assert torch.equal(stage.tensors["order"], order.int())
    assert torch.equal(stage.tensors["entries"], Windows.pack(csr, order).entries)


def test_recipe_and_choices_say_what_was_built(gpu_facts):
    gpu_facts(processors=3)
    csr = windows([30, 1, 2])
    stage = build(csr=csr)
    meta = json.loads(stage.recipe.partition(":")[2])
    assert meta == {
        "rows": 141, "cols": csr.shape[1], "nnz": csr.nnz, "items": 4, "slots": 2, "nodes": 1,
        "height": 64, "workers": 3, "positions": 141, "tensors": list(stage.tensors), "tiles": 33,
        "longest": 30,
    }  # fmt: skip
    per_column = csr.nnz / (33 * 8)
    assert stage.choices == {
        "format": f"WCSR, windows of 64 rows, 33 tiles of 8 columns, {per_column:.1f} entries a "
        f"column, {4 * (3 + 1 + 8 * 33)} bytes",
        "schedule": "4 items for 3 thread blocks a slab, 1 windows in 2 pieces",
        "ablation": "tall",
    }
    assert stage.tensors["cuts"].tolist() == [[0, 0, 2, 0]], "window, first slot, slots"


def workers_of(csr: st.CSR, n: int) -> int:
    return int(meta_of(request(csr=csr, n=n, ablation="tall"))["workers"])


def test_slabs_share_the_gpu_where_B_fits_its_cache_and_follow_each_other_where_not(gpu_facts):
    csr = windows([40] * 30)
    assert [workers_of(csr, n) for n in (128, 256, 257, 512, 768)] == [90, 90, 66, 66, 44]
    assert choose_window_tile(64, 768).slabs(768) == 3
    gpu_facts(l2_bytes=2**20)
    assert [workers_of(csr, n) for n in (8, 768)] == [90, 90], "as many as have enough tiles"


def test_no_worker_is_started_for_less_than_its_share_of_tiles():
    assert workers_of(windows([1]), 16) == 1
    assert workers_of(windows([24]), 16) == 2
    assert workers_of(csr_of(sp.csr_array((640, 5))), 16) == 5, "C is written, too"
    assert workers_of(csr_of(sp.csr_array((0, 5))), 16) == 1


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_of_every_kind_are_built_and_packed(name):
    csr = csr_of(MATRICES[name]())
    stage = build(csr=csr)
    work = runner(stage.recipe)
    assert isinstance(work, WCSRRunner) and isinstance(work, TileRunner)
    packed = work.pack(stage.tensors, csr.values, F16)["values"]
    assert packed.numel() == -(-csr.nnz // 8) * 8 and packed.dtype is F16
    assert torch.equal(packed[: csr.nnz], csr.values.half()[stage.tensors["entries"].long()])
    assert work.pack(stage.tensors, None, F16)["values"].numel() == 0


# -- runner


@pytest.mark.parametrize("n, columns, slabs", [(7, 128, 1), (128, 128, 1), (200, 256, 1),
                                               (512, 256, 2)])  # fmt: skip
def test_a_plan_compiles_its_kernel_and_knows_its_grid(loads, gpu_facts, n, columns, slabs):
    gpu_facts()
    wanted = request(csr=windows([40] * 30, F16), n=n, dtype=F16, ablation="tall")
    work = runner(WCSR.build(wanted).recipe)
    for _ in range(2):
        work.prepare(n, F16, True, torch.device("cuda", 0))
    (name, config, device, shared), (join, its_config, its_device), (redo, last_config, _) = loads
    assert (name, device, config["kCols"]) == ("spmm_wcsr", 0, columns)
    assert config in list(SPMM_WCSR.configs()) and shared == config["kSharedBytes"]
    (launch,) = work._launches.values()
    assert (launch.threads, launch.blocks, launch.slabs) == (384, meta_of(wanted)["workers"], slabs)
    assert launch.slot_bytes == 64 * columns * 4, "a window's sums"
    assert (join, its_device, its_config["kCols"]) == ("join_wcsr", 0, columns)
    assert its_config in list(JOIN_WCSR.configs())
    joined, again = launch.later
    assert (joined.threads, joined.blocks) == (128, work._nodes * columns // 32)
    assert redo == "redo_wcsr" and last_config in list(REDO_WCSR.configs())
    assert launch.flags == 30 * 4 * (columns // 128), "strips of 256 bytes"
    assert (again.threads, again.blocks) == (256, min(launch.flags, 264 // slabs))


@pytest.mark.parametrize(
    "lengths, dtype, n, name",
    [
        ([40] * 30, F32, 1024, "redo_windows"),  # 36 tiles for each SM: twice that is enough
        ([40] * 30, F16, 1024, "redo_wcsr"),
        ([40] * 30, F32, 256, "redo_wcsr"),
        ([40] * 30, F32, 128, "redo_wcsr"),
        ([40] * 80, F32, 512, "redo_windows"),
        ([40] * 80, F16, 512, "redo_windows"),
        ([40] * 80 + [60], F32, 512, "redo_windows"),
        ([40] * 80 + [60], F16, 512, "redo_wcsr"),
        ([40] * 80 + [400], F32, 512, "redo_wcsr"),
    ],
)
def test_windows_are_computed_again_as_a_whole_unless_one_would_take_longer_than_all(
    loads, gpu_facts, lengths, dtype, n, name
):
    gpu_facts()
    wanted = request(csr=windows(lengths, dtype), n=n, dtype=dtype, ablation="tall")
    work = runner(WCSR.build(wanted).recipe)
    work.prepare(n, dtype, True, torch.device("cuda", 0))
    (launch,) = work._launches.values()
    assert loads[-1][0] == name
    if name == "redo_windows":
        assert loads[-1][1] in list(REDO_WINDOWS.configs())
        slabs = n // 256
        assert launch.later[-1].threads == 512
        assert launch.later[-1].blocks == min(len(lengths), 264 // slabs)


def test_plans_from_before_know_no_longest_window(loads, gpu_facts):
    gpu_facts()
    wanted = request(csr=windows([40] * 80), n=512, ablation="tall")
    meta = {k: v for k, v in meta_of(wanted).items() if k not in ("tiles", "longest")}
    WCSRRunner(meta).prepare(512, F32, True, torch.device("cuda", 0))
    assert loads[-1][0] == "redo_wcsr"


def test_whole_windows_need_no_second_kernel(loads):
    wanted = request(csr=windows([3, 2], F16), dtype=F16, ablation="tall")
    work = runner(WCSR.build(wanted).recipe)
    work.prepare(16, F16, True, torch.device("cuda", 0))
    assert [name for name, *_ in loads] == ["spmm_wcsr"]
    (launch,) = work._launches.values()
    assert launch.later == () and launch.flags == 0


def test_nothing_is_launched_for_nothing():
    for name in ("no rows", "odd sizes"):
        csr = csr_of(MATRICES[name]())
        stage = build(csr=csr)
        work = runner(stage.recipe)
        n = 4 if name == "no rows" else 0
        B, out = torch.ones(csr.shape[1], n), torch.empty(csr.shape[0], n)
        assert work.spmm(stage.tensors, csr.values, None, B, out) is None
        assert work.prepare(n, F32, True, torch.device("cuda", 0)) is None
        assert name == "odd sizes" or work.bind(stage.tensors, csr.values, None) is None


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What the shared part of the runners is given; C becomes all 3."""
    found: list[SimpleNamespace] = []

    def spmm(self, tensors, values, packed, B, out, epilogue):
        found.append(SimpleNamespace(B=B, out=out, before=out.clone(), epilogue=epilogue))
        out.fill_(3)

    monkeypatch.setattr(TileRunner, "spmm", spmm)
    return found


def run(B: torch.Tensor, out: torch.Tensor, epilogue: Epilogue) -> None:
    stage = build()
    WCSR.make_runner(json.loads(stage.recipe.partition(":")[2])).spmm(
        stage.tensors, None, None, B, out, epilogue
    )


@pytest.mark.parametrize("dtype, out_dtype", [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16)])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["matrix", "batch"])
def test_odd_widths_go_through_copies_of_whole_accesses(multiplied, dtype, out_dtype, batch):
    B = torch.ones(*batch, 130, 7, dtype=dtype)
    out = torch.full((*batch, 150, 7), 5.0, dtype=out_dtype)
    run(B, out, Epilogue(beta=2.0, bias=torch.arange(7.0)))
    (given,) = multiplied
    width = 8  # two accesses of float32, one of 16 bits
    assert given.B.shape == B.shape and given.B.stride(-2) == width
    whole = given.B.as_strided((*batch, 130, width), given.B.stride())
    assert torch.equal(whole[..., :7], B) and not bool(whole[..., 7:].any()), "zeros behind it"
    assert given.out is not out and given.out.stride(-2) == width
    assert torch.equal(given.before, torch.full_like(out, 5.0)), "beta finds what C held"
    assert given.epilogue.bias.tolist() == [*range(7), 0], "stores of whole accesses add it whole"
    assert given.epilogue.beta == 2.0
    assert bool((out == 3).all()), "and it comes back"


def test_without_beta_the_old_c_is_not_copied(multiplied):
    out = torch.full((150, 7), float("nan"))
    run(torch.ones(130, 7), out, Epilogue())
    assert bool((out == 3).all())


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_aligned_operands_are_taken_as_they_are(multiplied, dtype):
    B, out = torch.ones(130, 24, dtype=dtype)[:, :16], torch.ones(150, 24, dtype=dtype)[:, 8:]
    bias = torch.ones(16)
    run(B, out, Epilogue(bias=bias))
    (given,) = multiplied
    assert given.B is B and given.out is out and given.epilogue.bias is bias


def test_either_operand_is_copied_for_itself(multiplied):
    B, out = torch.ones(130, 17)[:, :16], torch.ones(150, 16)
    run(B, out, Epilogue())
    assert multiplied[-1].B.stride(0) == 16 and multiplied[-1].out is out
    B, out = torch.ones(130, 16), torch.ones(150 * 16 + 1)[1:].view(150, 16)
    run(B, out, Epilogue())
    assert multiplied[-1].B is B and multiplied[-1].out.data_ptr() % 16 == 0


def test_prepared_launches_are_for_aligned_operands():
    stage = build(csr=windows([3, 2]))
    work = runner(stage.recipe)
    assert work.prepare_launches(stage.tensors, None, None, torch.ones(42, 7)) is None
    flat = torch.ones(42 * 8 + 1)[1:].view(42, 8)
    assert work.prepare_launches(stage.tensors, None, None, flat) is None


# -- plan files


def test_a_plan_file_keeps_parts_and_recipe_and_names_the_reason_if_it_cannot_run(tmp_path):
    check_plan_file(WCSR, F32, tmp_path)
