"""Checkpoints of plans and models: saved by some ranks, loaded by another number of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import sparsetile as st
from sparsetile import dist as st_dist
from tests.dist.test_products import operand, whole_numbers

ROWS, WIDTH = 90, 4


def planned(group, folder: str, exchange: str = "auto") -> st_dist.DistributedPlan:
    return st_dist.plan(folder, WIDTH, group, exchange=exchange)


def trained(csr: st.CSR) -> st.CSR:
    """What training made of the values, the same whatever the ranks."""
    return csr.with_values(csr.values * 2 + 1)


def model() -> torch.nn.Linear:
    return torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def save(group, folder: str, path: str, exchange: str, follows: bool) -> None:
    made = planned(group, folder, exchange)
    values = made.values * 2 + 1
    made.update_values(values.requires_grad_() if follows else values)
    torch.manual_seed(1)
    state = {"plan": made.state_dict(), "model": model().state_dict()}
    dcp.save(state, checkpoint_id=path, process_group=group)


def load(group, folder: str, path: str, exchange: str, follows: bool) -> None:
    csr, B = trained(whole_numbers(ROWS, ROWS, 0.1)), operand(ROWS, WIDTH)
    made, layer = planned(group, folder, exchange), model()
    own = made.values.clone().requires_grad_()
    if follows:
        made.update_values(own)
    state = {"plan": made.state_dict(), "model": layer.state_dict()}
    dcp.load(state, checkpoint_id=path, process_group=group)
    made.load_state_dict(state["plan"])
    layer.load_state_dict(state["model"])
    C = made.gather(made @ made.shard(B))
    assert torch.equal(C, st.plan(csr, WIDTH) @ B)
    if follows:
        assert torch.equal(own, made.values)
    torch.manual_seed(1)
    assert torch.equal(layer.weight, model().weight)


@pytest.mark.parametrize("follows", [False, True], ids=["copied", "trained"])
@pytest.mark.parametrize("exchange", ["auto", "fewest"])
@pytest.mark.parametrize("order", ["auto", "rcm"])
@pytest.mark.parametrize("before, after", [(4, 2), (1, 4), (3, 3)])
def test_a_job_restarts_on_another_number_of_ranks(
    workers, tmp_path: Path, before, after, order, exchange, follows
):
    folder, path = str(tmp_path / "parts"), str(tmp_path / "checkpoint")
    st_dist.write_folder(whole_numbers(ROWS, ROWS, 0.1), 12, folder, partition=order)
    options = {"folder": folder, "path": path, "exchange": exchange, "follows": follows}
    workers.run(save, before, **options)
    workers.run(load, after, **options)


def foreign(group) -> list[str]:
    csr = whole_numbers(ROWS, ROWS, 0.1)
    state = st_dist.plan(csr, WIDTH, group).state_dict()
    others = [
        st_dist.plan(whole_numbers(ROWS, ROWS, 0.2), WIDTH, group),
        st_dist.plan(csr, WIDTH, group, "rcm"),
    ]
    texts = []
    for other in others:
        with pytest.raises(ValueError) as caught:
            other.load_state_dict(state)
        texts.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        st_dist.plan(csr, WIDTH, group).load_state_dict({"pattern": state["pattern"]})
    return [*texts, str(caught.value)]


def test_a_state_of_another_matrix_or_order_is_refused(workers):
    for first, second, third in workers.run(foreign, 2):
        assert first == second
        assert first == (
            "load_state_dict: state must be of this matrix in the partition's order, got another. "
            "Plan the same A, with the same partition= or folder, on any number of ranks."
        )
        assert third == (
            "load_state_dict: state must be with values, got none. "
            "Load a checkpoint of a plan that is weighted alike."
        )


def shared(group) -> str:
    rank = dist.get_rank(group)
    rows = torch.tensor([0, 0, 0]), torch.tensor([2, 0, 2])
    weights = torch.tensor([1.0, 2.0, 3.0]) + rank
    share = st_dist.Share((torch.stack(rows), weights, (1, 3)), rank, (2, 3))
    made = st_dist.plan(share, WIDTH, group)
    with pytest.raises(ValueError) as caught:
        made.load_state_dict(made.state_dict())
    return str(caught.value)


def test_values_of_several_entries_of_one_place_are_not_told_apart(workers):
    assert set(workers.run(shared, 2)) == {
        "load_state_dict: A must be without several entries of one place, got 3 entries at 2 "
        "places. Add them up first."
    }


def pattern(group) -> None:
    csr = whole_numbers(ROWS, ROWS, 0.1).with_values(None)
    made = st_dist.plan(csr, WIDTH, group, dtype=torch.float64)
    state = made.state_dict()
    assert list(state) == ["pattern"]
    made.load_state_dict(state)


def test_a_pattern_has_no_values_to_save(workers):
    workers.run(pattern, 2)
