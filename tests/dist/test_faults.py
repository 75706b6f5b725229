"""What is wrong on one rank is one error on every rank; a rank that dies ends the others."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from sparsetile import dist as st_dist
from tests.dist.test_products import operand, whole_numbers
from tests.dist.workers import spare, started


def said(call) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return str(caught.value)


def differing_plans(group, argument: str) -> str:
    rank = dist.get_rank(group)
    csr = whole_numbers(90, 90, 0.06)
    options: dict = {"n": 8}
    if argument == "n":
        options["n"] = 8 + rank // 2
    elif argument == "dtype":
        options["dtype"] = torch.float32 if rank == 2 else torch.float64
    elif argument == "partition":
        options["partition"] = torch.tensor([0, 10 + rank, 40, 90])
    elif argument == "partition's name":
        options["partition"] = "even" if rank else "auto"
    elif argument == "A":
        csr = csr.with_values(csr.values + rank)
    elif argument == "shape":
        csr = whole_numbers(90, 90 + rank, 0.06)
    elif argument == "values":
        csr = csr.with_values(None if rank == 1 else csr.values.float())
    return said(lambda: st_dist.plan(csr, group=group, **options))


@pytest.mark.parametrize(
    "argument, text",
    [
        ("n", "plan: n must be the same on every rank, got 8 on rank 0 and 9 on rank 2."),
        ("dtype", "got torch.float64 on rank 0 and torch.float32 on rank 2."),
        ("partition", "got [0, 10, 40, 90] on rank 0 and [0, 11, 40, 90] on rank 1."),
        ("partition's name", "plan: partition must be the same on every rank, got auto on rank 0"),
        ("A", "plan: A must be the same on every rank, got 90x90"),
        ("shape", "plan: A must be the same on every rank, got 90x90"),
        ("values", "plan: A must be the same on every rank"),
    ],
)
def test_plans_that_differ_are_one_error_on_every_rank(workers, argument, text):
    texts = workers.run(differing_plans, 3, argument=argument)
    assert len(set(texts)) == 1
    assert text in texts[0] and texts[0].endswith("Call it with the same arguments on every rank.")


def wrong_on_one(group, what: str) -> str:
    csr = whole_numbers(90, 90, 0.06)
    bad = dist.get_rank(group) == 1
    calls = {
        "A": lambda: st_dist.plan(object() if bad else csr, 8, group),
        "n": lambda: st_dist.plan(csr, "8" if bad else 8, group),
        "system": lambda: st_dist.plan(csr, 8, group, system="none" if bad else "auto"),
        "file": lambda: st_dist.plan("missing.mtx" if bad else csr, 8, group),
        "None": lambda: st_dist.plan(None if bad else csr, 8, group),
    }
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as caught:
        calls[what]()
    return str(caught.value)


@pytest.mark.parametrize("what", ["A", "n", "system", "file"])
def test_a_mistake_on_one_rank_is_quoted_by_the_others(workers, what):
    texts = workers.run(wrong_on_one, 3, what=what)
    assert "rank 1" not in texts[1]
    assert texts[0] == texts[2]
    assert f"an error on rank 1 ({texts[0].split('(')[1][:9]}" in texts[0]
    assert texts[1].rstrip(".")[:60] in texts[0]


def test_a_matrix_missing_on_one_rank_is_named(workers):
    texts = workers.run(wrong_on_one, 3, what="None")
    assert set(texts) == {
        "plan: A must be a sparse matrix on every rank, or on one alone, got None on rank 1. Pass "
        "it on all ranks, or None on all but one."
    }


def differing_products(group, what: str) -> list[str]:
    rank = dist.get_rank(group)
    made = st_dist.plan(whole_numbers(90, 90, 0.06), 8, group)
    B = made.shard(operand(90, 8))
    made @ B
    options: dict = {}
    if what == "width":
        B = made.shard(operand(90, 8 + rank))
    elif what == "rows":
        B = B[:-1] if rank == 2 else B
    elif what == "batches":
        B = B.expand(2 + rank, *B.shape)
    elif what == "grad":
        B = B.clone().requires_grad_(rank == 0)
    elif what == "reduce":
        options["reduce"] = "mean" if rank else "sum"
    elif what == "type":
        B = B.float() if rank == 2 else B
    elif what == "values":
        options["values"] = torch.ones(made.local_nnz + (rank == 2), dtype=torch.float64)
    text = said(lambda: made.run(B, **options))
    # The group is as it was: the next product is right.
    assert made.gather(made @ made.shard(operand(90, 8))).shape == (90, 8)
    return text


@pytest.mark.parametrize(
    "what, text",
    [
        ("width", "run: the width of B must be the same on every rank, got 8 on rank 0 and 9"),
        ("batches", "run: the batches of B must be the same on every rank"),
        ("grad", "run: whether B requires grad must be the same on every rank, got True on rank 0"),
        ("reduce", "run: reduce must be the same on every rank, got sum on rank 0 and mean"),
    ],
)
def test_products_that_differ_are_one_error_on_every_rank(workers, what, text):
    texts = workers.run(differing_products, 3, what=what)
    assert len(set(texts)) == 1 and texts[0].startswith(text)


@pytest.mark.parametrize(
    "what, text",
    [
        ("rows", "run: B must be of shape [..., 28, N] on rank 2, got (27, 8)."),
        ("type", "run: B must be torch.float64 like the plan, got torch.float32."),
        ("values", "run: values must be of shape"),
    ],
)
def test_an_operand_wrong_on_one_rank_stops_all(workers, what, text):
    texts = workers.run(differing_products, 3, what=what)
    assert texts[2].startswith(text)
    assert texts[0] == texts[1]
    assert texts[0].startswith("run: the arguments must be valid on every rank, got an error on ra")
    assert text.rstrip(".") in texts[0] and texts[0].endswith(". Correct it on rank 2.")


def test_plan_without_a_group_says_what_to_call():
    if dist.is_initialized():
        pytest.skip("this process has a group")
    with pytest.raises(ValueError) as caught:
        st_dist.plan(whole_numbers(9, 9, 0.5), 8)
    assert str(caught.value) == (
        "plan: group must be an initialised process group, got none. Call "
        "torch.distributed.init_process_group first, and launch with torchrun."
    )


def silent(group) -> tuple[str, float]:
    """The last rank never calls; the others wait as long as their group allows."""
    made = st_dist.plan(whole_numbers(90, 90, 0.06), 8, spare["to break"])
    B = made.shard(operand(90, 8))
    made @ B
    _set_pg_timeout(timedelta(seconds=1), spare["to break"])
    began = time.monotonic()
    if made.rank == 2:
        return "", 0.0
    with pytest.raises(RuntimeError) as caught:
        made @ B
    return str(caught.value), time.monotonic() - began


def check_message(text: str) -> None:
    assert ": every rank must take part in the exchange, got an error from" in text
    assert "A rank has died or did not call within the group's timeout: look for its own" in text


def test_a_rank_that_does_not_call_ends_the_others_within_the_timeout(workers):
    for text, seconds in workers.run(silent, 3)[:2]:
        check_message(text)
        assert seconds < 10


def left_alone(rank: int, store: str, pipe) -> None:
    """Two ranks, of which the second dies. The first sends the error of every call after that.

    The group's own timeout is torch's half an hour: that a rank is gone is noticed.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    csr = whole_numbers(90, 90, 0.06)
    made = st_dist.plan(csr, 8)
    B = made.shard(operand(90, 8))
    C = made @ B.requires_grad_()
    torch.manual_seed(0)
    layer = torch.nn.Linear(128, 128)
    columns = st_dist.ColumnParallelSparseLinear.from_linear(layer)
    rows = st_dist.RowParallelSparseLinear.from_linear(layer, check="first")
    x = torch.ones(3, 64)
    with torch.no_grad():
        rows(x)
    y = columns(torch.ones(3, 128, requires_grad=True))
    if rank == 1:
        os._exit(7)
    calls = {
        "run": lambda: made @ B.detach(),
        "gather": lambda: made.gather(C),
        "ColumnParallelSparseLinear": lambda: columns(torch.ones(3, 128)),
        "RowParallelSparseLinear": lambda: torch.no_grad()(rows)(x),
        "ColumnParallelSparseLinear.gather": lambda: columns.gather(),
        "plan": lambda: st_dist.plan(csr, 8),
        "backward": lambda: C.sum().backward(),
        "backward of a layer": lambda: y.sum().backward(),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            found[name] = str(error)
    pipe.send((list(calls), found))
    os._exit(3)  # leaving in order would wait for the other rank


def test_a_rank_that_dies_ends_the_other_with_a_message(tmp_path):
    (alone, pipe), (dies, _) = (
        started(left_alone, rank, str(tmp_path / "store")) for rank in range(2)
    )
    try:
        assert pipe.poll(60)
        names, found = pipe.recv()
        assert list(found) == names
        for name, text in found.items():
            assert text.startswith(name.removesuffix(" of a layer") + ": every rank must take part")
            check_message(text)
        for process, code in ((alone, 3), (dies, 7)):
            process.join(10)
            assert process.exitcode == code
    finally:
        for process in (alone, dies):
            process.kill()
