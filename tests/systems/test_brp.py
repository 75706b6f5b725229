"""The brp system: how it chooses f, g and windows, what it builds and what it refuses."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import sparsetile as st
from sparsetile.core.device import H200
from sparsetile.engines.request import BuiltSystem
from sparsetile.engines.rows.cost import predict_rows
from sparsetile.engines.rows.runner import RowRunner
from sparsetile.formats.values import round_tf32
from sparsetile.systems import SYSTEMS, runner
from sparsetile.systems.brp import windows
from sparsetile.systems.brp.cost import (
    CHOICES,
    best_groups,
    bound,
    every_group,
    groups_of,
    predict_brp,
)
from sparsetile.systems.brp.runner import BRPRunner
from tests.contracts.cases import MATRICES, csr_of, random_matrix, tf32
from tests.systems.requests import OnGPU, check_plan_file, request_for

BRP = SYSTEMS["brp"]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
request = functools.partial(request_for, F32, ceilings=H200)  # predicted as for that GPU


def build(csr: st.CSR | None = None, ablation: str | None = "2x2", **changes: Any) -> BuiltSystem:
    return BRP.build(request(csr=csr, ablation=ablation, **changes))


def meta_of(built: BuiltSystem) -> dict[str, Any]:
    return json.loads(built.recipe.partition(":")[2])


def in_columns(rows: int, columns: int, together: int) -> st.CSR:
    """Every window of sixteen rows has as many entries in each of its columns."""
    dense = np.zeros((rows, columns))
    for window in range(rows // 16):
        for column in range(columns):
            places = (np.arange(together) * (16 // together) + column) % 16
            dense[16 * window + places, column] = 1.0 + column % 5
    return csr_of(sp.csr_array(dense))


def test_rejects_unsupported_requests(capability):
    with tf32(False):
        assert "rounds float32 to TF32" in BRP.reasons(request(OnGPU))[0]
        assert BRP.reasons(request(OnGPU, dtype=F16, deterministic=True)) == []
    assert BRP.reasons(request()) == ["runs on cuda, A is on cpu"]
    assert BRP.reasons(request(OnGPU, dtype=torch.float64)) == [
        "takes float32, float16, bfloat16, not float64"
    ]


@pytest.mark.parametrize("together", [4, 8])
def test_the_f_that_leaves_no_entry_outside_is_chosen(together):
    split = best_groups(request(csr=in_columns(320, 256, together), n=128))
    assert split.fixed == together and bool(split.kept.all())
    built = build(in_columns(320, 256, together), "mixed", n=128)
    assert meta_of(built)["fixed"] == together
    assert built.choices["split"].startswith("100.0 % of the entries in groups, 0.0 % beside")


def test_the_paper_s_f_and_g_win_if_nothing_is_shared():
    csr = csr_of(sp.csr_array(np.eye(64)))
    assert CHOICES[0] == (1, 4)
    split = best_groups(request(csr=csr))
    assert (split.fixed, split.group) == (1, 4) and not bool(split.kept.any())
    built = BRP.build(request(csr=csr))
    assert built.choices["split"] == "all rows on CUDA cores, as csr"
    assert isinstance(runner(built.recipe), RowRunner)


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_predictions_are_positive_and_no_worse_than_rows_alone(name, dtype):
    asked = request(csr=csr_of(MATRICES[name](), dtype=dtype), dtype=dtype)
    split, seconds = predict_brp(asked)
    assert 0 < seconds <= predict_rows(asked)
    assert seconds <= BRP.predict(asked) <= predict_rows(asked)
    assert split is None or bool(split.kept.any())


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("n", [32, 512])
def test_no_choice_is_predicted_below_the_bound(name, n):
    asked = request(csr=csr_of(MATRICES[name]()), n=n)
    for choice in CHOICES:
        assert groups_of(asked, *choice).seconds >= bound(asked) * (1 - 1e-9)


@pytest.mark.parametrize("together", [1, 2, 4, 8])
def test_the_bound_is_met_if_columns_are_all_of_one_f(together):
    asked = request(csr=in_columns(320, 256, together), n=512)
    least = min(groups_of(asked, together, group).seconds for group in (2, 4, 8))
    assert least == pytest.approx(bound(asked)) or together < 4  # rows, or other f, are cheaper


def test_entries_are_not_sorted_if_the_bound_says_enough(calls_of):
    sorts = calls_of(windows, "sort_windows")
    asked = request(csr=csr_of(random_matrix(640, 500, 0.02)))
    assert predict_brp(asked) == (None, predict_rows(asked)) and BRP.predict(asked) > 0
    assert not sorts
    best_groups(asked)
    assert sorts


def test_groups_are_taken_if_columns_are_full():
    wide = in_columns(16 * 2000, 128, 8)
    split, seconds = predict_brp(request(csr=wide, n=512))
    assert split is not None and split.fixed == 8 and bool(split.kept.all())
    assert seconds < 0.95 * predict_rows(request(csr=wide, n=512))


def test_windows_of_many_entries_outside_are_left_to_rows():
    # The first window has 16 columns of two entries and 600 of one; the second has no other.
    dense = np.zeros((32, 700))
    dense[:2, :16] = dense[16:18, :16] = 1.0
    dense[3, 16:616] = 1.0
    kept = every_group(request(csr=csr_of(sp.csr_array(dense))), 2, 2)
    assert kept.tolist() == [False, True]


def test_an_ablation_keeps_the_groups_of_every_window_that_has_one():
    csr = csr_of(random_matrix(150, 130, 0.2))
    kept = every_group(request(csr=csr), 1, 4)
    lengths = torch.diff(csr.indptr)
    entries = [int(lengths[16 * w : 16 * w + 16].sum()) for w in range(10)]
    assert kept.tolist() == [count >= 32 for count in entries]
    built = build(csr, "1x4")
    meta = meta_of(built)
    assert (meta["fixed"], meta["tiles"] % 4) == (1, 0) and built.choices["ablation"] == "1x4"
    assert isinstance(runner(built.recipe), BRPRunner)


def test_values_are_packed_by_slots_rounded_if_tensor_cores_read_them():
    csr = csr_of(random_matrix(64, 50, 0.5))
    built = build(csr)
    values = torch.randn(csr.nnz)
    packed = runner(built.recipe).pack(built.tensors, values, F32)
    assert torch.equal(packed["slots"], round_tf32(values[built.tensors["slot_entries"]]))
    assert torch.equal(packed["rest"], values[built.tensors["rest_entries"]])
    assert packed["slots"].numel() + packed["rest"].numel() <= csr.nnz
    pattern = runner(built.recipe).pack(built.tensors, None, F16)
    assert all(part.numel() == 0 and part.dtype is F16 for part in pattern.values())


@pytest.mark.parametrize("ablation", [None, *BRP.ablations])
def test_a_plan_of_no_columns_is_built(ablation):
    assert build(in_columns(64, 64, 4), ablation, n=0).recipe.startswith("brp:")


def test_a_plan_file_keeps_what_was_built(tmp_path: Path):
    check_plan_file(BRP, F16, tmp_path)


def test_atomics_are_the_paper_s_groups_a_piece_each_without_partial_sums():
    csr = csr_of(random_matrix(150, 130, 0.2))
    built, fixed_order = build(csr, "atomic"), build(csr, "1x4")
    meta, other = meta_of(built), meta_of(fixed_order)
    assert meta["atomic"] and not other["atomic"]
    assert (meta["fixed"], meta["tiles"]) == (1, other["tiles"])
    assert meta["items"] == meta["tiles"] // 4 and meta["slots"] == meta["nodes"] == 0
    assert built.choices["write-back"] == "a warp a group, added to C by atomics"
    assert "write-back" not in fixed_order.choices
    names = ("tile_columns", "slot_ids", "rest_columns", "order")
    assert all(torch.equal(built.tensors[name], fixed_order.tensors[name]) for name in names)


def test_atomics_are_refused_if_determinism_is_asked_for(capability):
    asked = functools.partial(request, OnGPU, dtype=F16, ablation="atomic")
    assert BRP.reasons(asked()) == []
    said = ["is not bit-reproducible, and determinism was asked for"]
    assert BRP.reasons(asked(deterministic=True)) == said
    assert BRP.repeats(None) and BRP.repeats("1x4") and not BRP.repeats("atomic")
    assert not SYSTEMS["cusparse"].repeats(None)


def test_a_recipe_from_before_there_were_atomics_is_of_the_fixed_order():
    csr = csr_of(random_matrix(150, 130, 0.2))
    meta = meta_of(build(csr, "1x4"))
    del meta["atomic"]
    assert not BRPRunner(meta)._atomic
