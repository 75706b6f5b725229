"""Ranks agree on arguments before they exchange anything: one error on every rank, no waiting."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.distributed as dist

import sparsetile as st
from sparsetile import dist as st_dist
from sparsetile.intake import write_npz
from tests.dist.test_products import operand, whole_numbers


def said(call) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return str(caught.value)


def still_right(made, group) -> None:
    """The group is as it was: the next product is right."""
    csr = whole_numbers(90, 90, 0.06)
    C = made.gather(made @ made.shard(operand(90, 8)))
    assert torch.equal(C, st.plan(csr, 8) @ operand(90, 8))


# -- gather ---------------------------------------------------------------------------------------


def differing_results(group) -> dict[str, str]:
    made, last = st_dist.plan(whole_numbers(90, 90, 0.06), 8, group), dist.get_rank(group) == 2
    C = made @ made.shard(operand(90, 8))
    found = {
        "width": said(lambda: made.gather(C[:, :5] if last else C)),
        "dtype": said(lambda: made.gather(C.float() if last else C)),
        "batches": said(lambda: made.gather(C.expand(2 + last, *C.shape))),
        "dimensions": said(lambda: made.gather(C[None] if last else C)),
        "rows": said(lambda: made.gather(C[:-1] if last else C)),
        "type": said(lambda: made.gather([1.0] if last else C)),
        "device": said(lambda: made.gather(C.to("meta") if last else C)),
        "layout": said(lambda: made.gather(C.to_sparse() if last else C)),
    }
    still_right(made, group)
    return found


def test_gather_compares_what_ranks_pass(workers):
    found = workers.run(differing_results, 3)
    same = "must be the same on every rank, got"
    for texts in found:
        assert texts["width"].startswith(f"gather: the width of C {same} 8 on rank 0 and 5 on rank")
        assert texts["dtype"].startswith(f"gather: the dtype of C {same} torch.float64 on rank 0")
        assert texts["batches"].startswith(f"gather: the batches of C {same} (2,) on rank 0 and (3")
        assert texts["dimensions"].startswith(f"gather: the batches of C {same} () on rank 0 and (")
    alone = {
        "rows": "gather: C must be a tensor of shape [..., 28, N], got (27, 8).",
        "type": "gather: C must be a tensor of shape [..., 28, N], got list.",
        "device": "gather: C must be a dense tensor on cpu like the plan, got torch.strided on",
        "layout": "gather: C must be a dense tensor on cpu like the plan, got torch.sparse_coo",
    }
    for name, text in alone.items():
        assert found[2][name].startswith(text)
        assert found[0][name] == found[1][name]
        assert found[0][name].startswith("gather: C must be valid on every rank, got an error on r")
        assert text.rstrip(".") in found[0][name]


# -- run ------------------------------------------------------------------------------------------


class Unreadable(torch.Tensor):
    """A tensor whose shape cannot be read."""

    @property
    def shape(self):
        raise AttributeError("no shape")


def differing_arguments(group, check: str) -> dict[str, str]:
    csr = whole_numbers(90, 90, 0.06)
    made = st_dist.plan(csr, 8, group, check=check)
    last, B = dist.get_rank(group) == made.world_size - 1, made.shard(operand(90, 8))
    bias = torch.arange(8).double()

    def run(**options) -> str:
        return said(lambda: made.run(B, **options))

    found = {
        "text": run(alpha="x" if last else 1.0),
        "alpha": run(alpha=2.5 if last else 1.0),
        "relu": run(relu=bool(last)),
        "bias": run(bias=bias if last else None),
        "out_dtype": run(out_dtype=torch.float64 if last else None),
    }
    if check == "always":
        still_right(made, group)
    return found


def test_arguments_that_differ_are_one_error_on_every_rank(workers):
    """Also where only new operands are compared, as long as ranks have agreed on none."""
    for check in ("always", "first"):
        found = workers.run(differing_arguments, 3, check=check)
        last = 2
        for texts in found:
            for name, text in {
                "alpha": f"got 1.0 on rank 0 and 2.5 on rank {last}.",
                "relu": f"got False on rank 0 and True on rank {last}.",
                "bias": f"got False on rank 0 and True on rank {last}.",
                "out_dtype": f"got None on rank 0 and torch.float64 on rank {last}.",
            }.items():
                given = "whether bias is given" if name == "bias" else name
                assert texts[name] == (
                    f"run: {given} must be the same on every rank, {text} Call it with the same "
                    "arguments on every rank."
                )
        assert found[last]["text"] == "run: alpha must be a number, got 'x'. Pass a float."
        assert found[0]["text"] == (
            f"run: the arguments must be valid on every rank, got an error on rank {last} "
            "(TypeError: run: alpha must be a number, got 'x'. Pass a float). Correct it on rank "
            f"{last}."
        )


def batches(group) -> list[str]:
    made, rank = st_dist.plan(whole_numbers(90, 90, 0.06), 8, group), dist.get_rank(group)
    B = made.shard(operand(90, 8))
    leads = ((2 + rank,), (2, 3 + rank), (rank, 2), (0, 1 + rank))
    return [said(lambda lead=lead: made @ B.expand(*lead, *B.shape)) for lead in leads]


def test_batches_that_differ_are_told_as_they_are(workers):
    sizes = (("2", "3"), ("2x3", "2x4"), ("0x2", "1x2"), ("0x1", "0x2"))
    for texts in workers.run(batches, 2):
        for text, (zero, one) in zip(texts, sizes, strict=True):
            assert f"the batches of B must be the same on every rank, got {zero} on rank 0" in text
            assert f" and {one} on rank 1." in text


def unexpected(group) -> str:
    made, last = st_dist.plan(whole_numbers(90, 90, 0.06), 8, group), dist.get_rank(group) == 1
    B = made.shard(operand(90, 8))
    with pytest.raises((ValueError, AttributeError)) as caught:
        made.run(B.as_subclass(Unreadable) if last else B)
    still_right(made, group)
    return str(caught.value)


def test_an_error_of_any_kind_stops_all(workers):
    first, second = workers.run(unexpected, 2)
    assert second == "no shape"
    assert "got an error on rank 1 (AttributeError: no shape)" in first


def alone(group) -> str:
    """The second rank calls, the first does not: it would be in the exchange."""
    made = st_dist.plan(whole_numbers(90, 90, 0.06), 8, group, check="first")
    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 128)
    columns = st_dist.ColumnParallelSparseLinear.from_linear(layer, group, check="first")
    still_right(made, group)
    columns(torch.ones(3, 128))
    text = ""
    if dist.get_rank(group) == 1:
        text = said(lambda: made.run(made.shard(operand(90, 8)), alpha="x"))
        text += said(lambda: columns(torch.ones(3, 127)))
    still_right(made, group)
    return text


def test_a_mistake_does_not_wait_for_ranks_that_compare_only_new_operands(workers):
    text = workers.run(alone, 2)[1]
    assert text.startswith("run: alpha must be a number, got 'x'. Pass a float.")
    assert "ColumnParallelSparseLinear: x must be of shape [..., 128] on rank 1" in text


def alpha_changes(group) -> int:
    made = st_dist.plan(whole_numbers(90, 90, 0.06), 8, group, check="first")
    counted, objects = [0], made._ranks.objects

    def counting(*arguments):
        counted[0] += 1
        return objects(*arguments)

    made._ranks.objects = counting
    for alpha in (1.0, 0.5, 2, 1.0):
        made.run(made.shard(operand(90, 8)), alpha=alpha)
    return counted[0]


def test_another_alpha_needs_no_new_comparison(workers):
    assert workers.run(alpha_changes, 2) == [1, 1]


# -- plan and styles ------------------------------------------------------------------------------


def differing_files(group, paths: list[str], partition: str) -> str:
    return said(lambda: st_dist.plan(paths[dist.get_rank(group)], 8, group, partition))


def test_files_read_in_different_ways_are_one_error(workers, tmp_path):
    csr = whole_numbers(90, 90, 0.06)
    write_npz(tmp_path / "ours.npz", csr)
    scipy = sp.csr_array((csr.values, csr.indices, csr.indptr), shape=csr.shape)
    sp.save_npz(tmp_path / "scipy.npz", scipy)
    paths = [str(tmp_path / "ours.npz"), str(tmp_path / "scipy.npz")]
    texts = workers.run(differing_files, 2, paths=paths, partition="auto")
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        "plan: whether A is read by parts must be the same on every rank, got True on rank 0 and"
    )


def test_a_file_damaged_on_one_rank_stops_all(workers, tmp_path):
    csr = whole_numbers(90, 90, 0.06)
    write_npz(tmp_path / "whole.npz", csr)
    np.savez(
        tmp_path / "short.npz", indptr=csr.indptr.numpy(), indices=csr.indices.numpy()[:-9],
        shape=np.array(csr.shape),
    )  # fmt: skip
    paths = [str(tmp_path / "whole.npz"), str(tmp_path / "short.npz")]
    texts = workers.run(differing_files, 2, paths=paths, partition="rcm")
    assert "got an error on rank 1 (" in texts[0] and texts[1].split(".")[0] in texts[0]


def partition_on_one(group) -> str:
    given = torch.tensor([0, 40, 90])
    given = given.to("meta") if dist.get_rank(group) == 1 else given
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)) as caught:
        st_dist.plan(whole_numbers(90, 90, 0.06), 8, group, given)
    return str(caught.value)


def test_a_partition_that_cannot_be_read_on_one_rank_stops_all(workers):
    assert "got an error on rank 1 (" in workers.run(partition_on_one, 2)[0]


def styled_on_one(group) -> str:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    from sparsetile.nn import SparseLinear, SparseSwiGLU

    torch.manual_seed(0)
    kept = torch.ones(2, 2, dtype=torch.bool)
    parts = [SparseLinear(128, 128, kept) for _ in range(3)]
    model = torch.nn.ReLU() if dist.get_rank(group) == 1 else SparseSwiGLU(*parts)
    mesh = DeviceMesh.from_group(group, "cpu")
    return said(lambda: parallelize_module(model, mesh, {"": st_dist.SparseSwiGLUParallel()}))


def test_a_module_of_another_kind_on_one_rank_stops_all(workers):
    first, second = workers.run(styled_on_one, 2)
    assert second.startswith("SparseSwiGLUParallel: module must be a SparseSwiGLU, got ReLU.")
    assert "module must be valid on every rank, got an error on rank 1 (TypeError" in first
