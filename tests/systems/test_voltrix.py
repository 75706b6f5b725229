"""The voltrix system: when it can serve, what it builds, what its runner launches and copies."""

from __future__ import annotations

import functools
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparsetile.balance import CostModel, l2_reloads
from sparsetile.engines.request import BuiltSystem
from sparsetile.engines.tiles import tile_runner as module
from sparsetile.formats import BMat
from sparsetile.kernels.bmat import (
    REDO_BMAT,
    SPMM_BMAT,
    choose_pipe,
    most_shared_bytes,
    slab_width,
)
from sparsetile.launch.interface import Epilogue
from sparsetile.systems import SYSTEMS, runner
from sparsetile.systems.voltrix import cost
from tests.contracts.cases import csr_of, random_matrix, tf32
from tests.host import answer_on_host, unread_scratch
from tests.systems.requests import OnGPU, check_plan_file, request_for

VOLTRIX = SYSTEMS["voltrix"]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

request = functools.partial(request_for, F32)


def build(**changes) -> BuiltSystem:
    return VOLTRIX.build(request(**changes))


def meta_of(**changes) -> dict[str, object]:
    return json.loads(build(**changes).recipe.partition(":")[2])


@pytest.mark.parametrize("other", [(8, 0), (8, 9)])
def test_gpus_without_bulk_copies_are_refused(capability, other):
    capability.append(other)
    assert VOLTRIX.reasons(request(OnGPU, dtype=F16)) == [
        f"needs sm_90 or newer, this GPU is sm_{other[0]}{other[1]}"
    ]


@pytest.mark.parametrize("other", [(9, 0), (10, 0), (10, 3)])
def test_newer_gpus_with_as_much_shared_memory_run_it(capability, other):
    capability.append(other)
    assert VOLTRIX.reasons(request(OnGPU, dtype=F16)) == []
    assert [a for a in ("sm_89", "sm_90", "sm_90a", "sm_120a") if SPMM_BMAT.runs_on(a)] == [
        "sm_90", "sm_90a", "sm_120a"
    ]  # fmt: skip


@pytest.mark.parametrize("n", [8, 512])
def test_a_gpu_with_little_shared_memory_is_refused(capability, n):
    capability.append((12, 0))
    assert VOLTRIX.reasons(request(OnGPU, dtype=F16, n=n)) == [
        f"takes {most_shared_bytes(F16, n) // 1024} KB of shared memory per thread block, this GPU "
        "gives 99"
    ]
    pipe = choose_pipe(F16, slab_width(F16, n))
    assert most_shared_bytes(F16, n) >= pipe.shared_bytes(F16, True)


def test_float32_waits_until_torch_allows_tf32_and_16_bits_do_not(capability):
    with tf32(False):
        (reason,) = VOLTRIX.reasons(request(OnGPU))
        assert reason.startswith("rounds float32 to TF32")
        assert VOLTRIX.reasons(request(OnGPU, dtype=BF16, deterministic=True)) == []
    with tf32(True):
        assert VOLTRIX.reasons(request(OnGPU)) == []


def test_parts_are_those_of_the_format_and_items_say_where_values_begin():
    csr = csr_of(random_matrix(150, 130, 0.2))
    built, tiles = build(csr=csr, ablation="windows of 16"), BMat.pack(csr)
    for name in ("window_tile_ptr", "columns", "bitmaps", "entries"):
        assert torch.equal(built.tensors[name], getattr(tiles, name))
    every = torch.arange(0, tiles.tile_count + 1, 2)
    assert torch.equal(built.tensors["pair_values"].long(), tiles.first_values(every))
    items = built.tensors["items"]
    assert torch.equal(items[:, 6].long(), tiles.first_values(items[:, 1]))
    assert all(part.is_contiguous() for part in built.tensors.values())
    assert built.tensors["indptr"] is csr.indptr and built.tensors["order"].numel() == 0


def test_as_many_blocks_as_fit_share_the_slabs_of_a_small_b(gpu_facts):
    gpu_facts(processors=10)
    csr = csr_of(random_matrix(3000, 100, 0.05))
    blocks = choose_pipe(F32, 16).blocks
    short = {"csr": csr, "ablation": "windows of 16"}
    assert meta_of(**short, n=512)["workers"] == 10 * blocks
    assert meta_of(**short, n=1024)["workers"] == 10 * blocks // 2
    gpu_facts(processors=10, l2_bytes=1000)
    assert meta_of(**short, n=1024)["workers"] == 10 * blocks, "slabs one after the other"


def test_windows_go_to_blocks_in_turn_unless_the_paper_s_way_is_asked_for(gpu_facts):
    csr = csr_of(random_matrix(3000, 100, 0.05))
    gpu_facts(processors=10)
    found = {
        ablation: build(csr=csr, n=512, ablation=ablation).tensors["items"][:3, 0].tolist()
        for ablation in ("windows of 16", "contiguous", "greedy")
    }
    far = found.pop("windows of 16")
    assert set(map(tuple, found.values())) == {(0, 1, 2)}
    assert all(later - before >= 10 for before, later in itertools.pairwise(far))


def test_windows_have_32_rows_if_those_read_less_of_b():
    apart = csr_of(random_matrix(3000, 3000, 0.001))
    assert meta_of(csr=apart)["stack"] == 1
    alike = csr_of(sp.csr_array(np.repeat(random_matrix(100, 3000, 0.01).toarray(), 32, axis=0)))
    assert meta_of(csr=alike)["stack"] == 2
    for ablation in ("bits", "multitier", "windows of 16"):
        assert meta_of(csr=alike, ablation=ablation)["stack"] == 1
    assert meta_of(csr=apart, ablation="windows of 32")["stack"] == 2
    assert meta_of(csr=alike, dtype=F16, n=1024)["width"] == 8, "registers for no more"


def test_windows_have_32_rows_for_fewer_savings_if_rows_of_b_are_wide():
    # Pairs of windows of 16 share a third of their columns: 32 rows read 5/6 of B's rows.
    blocks = np.zeros((32, 96), dtype=np.float32)
    blocks[:16, :48], blocks[16:, 32:80] = 1, 1
    third = csr_of(sp.csr_array(np.tile(blocks, (20, 1))))
    stacks = {n: meta_of(csr=third, n=n)["stack"] for n in (128, 512)}
    assert stacks == {128: 1, 512: 2}
    assert meta_of(csr=third, dtype=F16, n=128)["stack"] == 2, "two tiles an MMA"


def test_slabs_are_narrower_where_scattered_rows_of_b_then_fit_l2(gpu_facts, constants):
    csr = csr_of(random_matrix(400, 3000, 0.01))
    room = 3000 * 8 * 128 / 0.85 + 1  # for slabs of 8 pieces, not of 16
    constants(l2_reloads, CACHE_BYTES=100_000)
    gpu_facts(l2_bytes=int(room))
    assert meta_of(csr=csr, n=512)["width"] == 8
    assert meta_of(csr=csr, n=300)["width"] == 5, "two even slabs"
    assert meta_of(csr=csr, n=256)["width"] == 8
    gpu_facts(l2_bytes=1000)
    assert meta_of(csr=csr, n=512)["width"] == 16, "no slab fits"
    gpu_facts(l2_bytes=int(room))
    local = csr_of(sp.diags_array(np.ones(3000), format="csr"))
    assert meta_of(csr=local, n=512)["width"] == 16, "each row of B comes once"


def test_steps_of_the_breakdown_turn_parts_on():
    csr = csr_of(random_matrix(100, 60, 0.1))
    for name in ("sync", "tma", "bmat", "multitier"):
        meta = meta_of(csr=csr, ablation=name)
        assert meta["workers"] == 7, "a thread block for each window"
        assert meta["pipe"] == ("bits" if name == "multitier" else name)
    assert meta_of(csr=csr, ablation="greedy")["pipe"] is None
    assert meta_of(csr=csr.with_values(None))["pipe"] == "bits", "nothing but bits to decode"
    built = build(csr=csr, ablation="bits")
    assert built.choices["ablation"] == "bits" and set(VOLTRIX.ablations) >= {"sync", "unbalanced"}


def test_without_balance_each_block_has_as_many_windows(gpu_facts):
    gpu_facts(processors=5)
    csr = csr_of(random_matrix(16 * 300, 200, 0.05))
    first = build(csr=csr, n=512, ablation="unbalanced").tensors["first_of_worker"]
    workers = 5 * choose_pipe(F32, 16).blocks
    assert (first[1:] - first[:-1]).tolist() == [300 // workers] * workers


@pytest.mark.parametrize(
    "n, said",
    [
        (64, "as they are where rows are 16-byte aligned; else B or C is copied once"),
        (65, "B and C are copied once: rows are no multiple of 16 bytes"),
    ],
)
def test_explain_says_where_operands_are_copied(n, said):
    choices = build(n=n).choices
    assert choices["operands"] == said
    assert choices["format"].startswith("BMat, ") and "partial sums" in choices["schedule"]
    assert "producers" in choices["pipeline"]


def test_a_plan_file_keeps_parts_and_recipe(tmp_path):
    check_plan_file(VOLTRIX, F32, tmp_path)


# -- runner


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, fresh_runners: None, gpu_facts) -> list[tuple]:
    """(configuration, shared bytes, grid, threads, parameters) of launches on a pretended GPU."""
    gpu_facts()
    found: list[tuple] = []

    def load(spec, config, device, shared=0):
        assert spec in (SPMM_BMAT, REDO_BMAT)
        return SimpleNamespace(
            launch=lambda grid, threads, stream, params, **_: found.append(
                (config, shared, grid, threads, dict(params))
            )
        )

    answer_on_host(monkeypatch, module, stream=7, load=load, scratch=unread_scratch)
    return found


def test_a_launch_has_a_grid_of_workers_and_slabs(launched):
    csr = csr_of(random_matrix(500, 100, 0.1))
    built = build(csr=csr, n=1024, ablation="windows of 16")
    work = runner(built.recipe)
    B, out = torch.ones(100, 1024), torch.empty(500, 1024)
    work.spmm(built.tensors, csr.values, None, B, out, Epilogue(alpha=2.0))
    ((config, shared, grid, threads, params),) = launched
    pipe = choose_pipe(F32, 16)
    assert grid == (work.meta["workers"], 2, 1) and threads == pipe.threads
    assert shared == pipe.shared_bytes(F32, True) == config["kSharedBytes"]
    assert params["slab_pieces"] == 16 and params["n"] == 1024 and params["alpha"] == 2.0
    assert params["b"] == B.data_ptr() and params["c"] == out.data_ptr()
    assert params["items"] == built.tensors["items"].data_ptr()
    assert params["first_items"] == built.tensors["first_of_worker"].data_ptr()


def test_a_plan_serves_other_widths_and_types_with_its_own_slabs(launched):
    csr = csr_of(random_matrix(500, 100, 0.1))
    built = build(csr=csr, n=256)
    work = runner(built.recipe)
    for dtype, n, slabs in ((F32, 64, 1), (F32, 1000, 4), (F16, 512, 1), (F16, 1024, 2)):
        B, out = torch.ones(100, n, dtype=dtype), torch.empty(500, n, dtype=dtype)
        work.spmm(built.tensors, csr.values.to(dtype), None, B, out)
        config, _, grid, _, params = launched[-1]
        assert grid[1] == slabs and params["slab_pieces"] == 8
        assert config["kPieces"] * config["kConsumers"] == 8


def test_types_with_less_room_for_sums_take_narrower_slabs_of_the_same_items(launched):
    csr = csr_of(random_matrix(500, 100, 0.1))
    for n, width in ((260, 9), (512, 16)):
        built = build(csr=csr, n=n, ablation="windows of 32")
        work = runner(built.recipe)
        for dtype, slabs, pieces in ((F32, 1, width), (F16, -(-n * 2 // 1024), 8)):
            B, out = torch.ones(100, n, dtype=dtype), torch.empty(500, n, dtype=dtype)
            work.spmm(built.tensors, csr.values.to(dtype), None, B, out)
            config, _, grid, _, params = launched[0 if work.meta["redo"] else -1]
            assert grid[1] == slabs and params["slab_pieces"] == pieces
            assert config["kPieces"] * config["kConsumers"] >= pieces
            assert int(built.tensors["items"][:, 5].max()) == width
            launched.clear()


def test_each_piece_of_columns_of_cut_windows_has_slots_and_counters(launched, calls_of):
    csr = csr_of(random_matrix(16, 6000, 0.4))
    built = build(csr=csr, n=32)
    work = runner(built.recipe)
    asked = calls_of(module, "scratch")
    B, out = torch.ones(2, 6000, 100), torch.empty(2, 16, 100)
    work.spmm(built.tensors, csr.values, None, B, out)
    slots, nodes = work.meta["slots"], work.meta["nodes"]
    slabs, sums = 4, 16 * 32 * 4  # of one piece: sixteen rows of 32 columns
    (call,) = asked
    _, _, size, counters, _ = call.given
    flags = 1 if work.meta["redo"] else 0  # one part of a window, one pair of pieces
    assert flags and size == 2 * slabs * slots * sums
    assert counters == 2 * slabs * (nodes + flags)
    first = launched[-1][4]
    assert first["redo"] == first["arrivals"] + 4 * 2 * slabs * nodes, "flags behind the counters"
    assert launched[-1][4]["slot_count"] == slots > 0 and launched[-1][4]["node_count"] == nodes


def test_operands_that_are_not_aligned_go_through_copies(launched):
    csr = csr_of(random_matrix(40, 30, 0.2))
    built = build(csr=csr, n=33)
    work = runner(built.recipe)
    B, out = torch.ones(30, 33), torch.empty(40, 33)
    work.spmm(built.tensors, csr.values, None, B, out, Epilogue(bias=torch.ones(33)))
    params = launched[-1][4]
    assert params["b"] != B.data_ptr() and params["b_row_bytes"] == 36 * 4
    assert params["c"] != out.data_ptr() and params["c_row_stride"] == 36
    assert work.prepare_launches(built.tensors, csr.values, None, B) is None


def test_dense_operands_are_packed_for_a_pattern_that_nobody_packed(launched):
    csr = csr_of(random_matrix(40, 30, 0.2), pattern=True)
    built = build(csr=csr, n=32, ablation="tma")
    work = runner(built.recipe)
    B, out = torch.ones(30, 32), torch.empty(40, 32)
    work.spmm(built.tensors, None, None, B, out)
    assert launched[-1][4]["values"] != 0 and launched[-1][0]["kDense"]
    assert work.prepare_launches(built.tensors, None, None, B) is None


# -- cost


def test_wider_rows_of_b_are_predicted_to_come_faster():
    csr = csr_of(random_matrix(2000, 2000, 0.02))
    by_width = {n: VOLTRIX.predict(request(csr=csr, n=n)) - cost.START for n in (32, 128, 512)}
    assert by_width[128] / 128 < by_width[32] / 32
    assert by_width[512] / 512 < by_width[128] / 128


def test_shares_of_the_copy_rate_lie_between_those_that_were_measured():
    shares = [cost._copy_share(size) for size in (64, 128, 384, 2048, 8192)]
    assert shares[0] == cost.COPY_SHARE[128] / 2 and shares[1] == cost.COPY_SHARE[128]
    assert cost.COPY_SHARE[256] < shares[2] < cost.COPY_SHARE[512]
    assert shares[3] == shares[4] == cost.COPY_SHARE[2048]


def test_fitted_coefficients_are_those_of_the_gpu(constants):
    assert cost.schedule_costs("a GPU that nobody fitted") == cost.ESTIMATE
    fitted = CostModel(2.0, 3.0, 4.0)
    constants(cost, SCHEDULE_COSTS={"some GPU": fitted})
    assert cost.schedule_costs("some GPU") is fitted


def test_large_products_and_long_windows_have_a_launch_for_what_is_not_finite():
    small, wide = csr_of(random_matrix(150, 130, 0.2)), csr_of(random_matrix(16, 900, 0.7))
    assert not meta_of(csr=small)["redo"]
    assert meta_of(csr=wide)["redo"], "a window of more than 64 tiles"
    assert meta_of(csr=small, n=500_000)["redo"], "64 MB of rows of B"
    assert not meta_of(csr=wide, ablation="tma")["redo"], "the paper's steps"
