"""Arguments of distributed plans: one clear error each, and reports as plain data."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

import sparsetile as st
from sparsetile import dist as st_dist
from sparsetile.dist.group import Ranks
from sparsetile.dist.partition import find_partition
from tests.dist.test_products import operand, whole_numbers


def csr(rows: int = 90, cols: int = 90) -> st.CSR:
    return whole_numbers(rows, cols, 0.06)


def found(rows: int, cols: int, partition, columns=None, parts: int = 3):
    return find_partition("plan", csr(rows, cols), parts, partition, 8, 4, columns)


@pytest.mark.parametrize(
    "partition, error, text",
    [
        ("best", ValueError, "plan: partition must be one of ['auto', 'even', 'metis', 'identity'"),
        (torch.rand(90), TypeError, "plan: partition must be a name or a 1-D tensor of whole"),
        (torch.ones(3, 3).long(), TypeError, "got torch.int64 of shape (3, 3)."),
        (
            torch.full((90,), 3),
            ValueError,
            "a part from 0 to 2 for each of 90 rows, got 90 numbers",
        ),
        (torch.tensor([0, 50, 40, 90]), ValueError, "the first row of each of 3 shares and 90 at"),
    ],
)
def test_wrong_partitions_are_named(partition, error, text):
    with pytest.raises(error) as caught:
        found(90, 90, partition)
    assert text in str(caught.value)


def test_an_order_needs_a_square_matrix():
    with pytest.raises(ValueError) as caught:
        found(50, 80, "rcm")
    assert str(caught.value).startswith(
        "plan: partition must be contiguous for a matrix of 50x80, got 'rcm'."
    )


@pytest.mark.parametrize("columns", [[0, 90], [0, 50, 40, 90], [1, 20, 40, 90], [0, 20, 40, 91]])
def test_wrong_shares_of_b_are_named(columns):
    with pytest.raises(ValueError, match="plan: columns must be the first row of B of each of 3"):
        found(90, 90, "auto", columns)


def test_shares_need_whole_numbers_and_a_shape():
    with pytest.raises(ValueError, match="Share: first_row must be between 0 and 2147483647"):
        st_dist.Share(csr(), -1, (90, 90))
    with pytest.raises(ValueError, match=r"Share: shape must be a pair \(rows, columns\)"):
        st_dist.Share(csr(), 0, (90, 90, 90))


def said(call) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return str(caught.value)


def refusals(group) -> dict[str, str]:
    made = st_dist.plan(csr(), 8, group)
    return {
        "shard": said(lambda: made.shard(torch.ones(7, 8))),
        "gather": said(lambda: made.gather(torch.ones(7, 8))),
        "operand": said(lambda: made.run([1.0])),
        "bias": said(lambda: made.run(made.shard(operand(90, 8)), bias=torch.ones(3))),
        "update": said(lambda: made.update_values(torch.ones(3))),
        "device": said(lambda: st_dist.plan(csr(), 8, group, device="nowhere")),
        "backend": said(lambda: st_dist.plan(csr(), 8, group, device="meta")),
        "dtype": said(lambda: st_dist.plan(csr(), 8, group, dtype=torch.int32)),
        "exchange": said(lambda: st_dist.plan(csr(), 8, group, exchange="mail")),
        "check": said(lambda: st_dist.plan(csr(), 8, group, check="never")),
    }


def test_wrong_arguments_are_named_on_every_rank(workers):
    expected = {
        "shard": "shard: B must be a tensor of shape [..., 90, N], got (7, 8).",
        "gather": "gather: C must be a tensor of shape [...,",
        "operand": "run: B must be a torch tensor, got list.",
        "bias": "run: bias must be of shape (8,) on cpu, got (3,) on cpu.",
        "update": "update_values: values must be of shape (",
        "device": "plan: device must be a device such as cpu or cuda:0, got 'nowhere'.",
        "backend": "plan: device must be cpu with the backend gloo, got meta.",
        "dtype": "plan: dtype must be one of torch.float16, torch.bfloat16,",
        "exchange": "plan: exchange must be one of ['auto', 'all_to_all', 'all_gather', 'fewest'],",
        "check": "plan: check must be one of ['auto', 'always', 'first'], got 'never'.",
    }
    for texts in workers.run(refusals, 2):
        for name, text in expected.items():
            assert texts[name].startswith(text), name


def outsider(group) -> str:
    """The group of two, asked by a rank that is not in it."""
    members = dist.get_process_group_ranks(group)
    if dist.get_rank() in members[:2]:
        return ""
    return said(lambda: Ranks(dist.GroupMember.NON_GROUP_MEMBER, "plan"))


def test_a_rank_outside_of_the_group_is_refused(workers):
    texts = workers.run(outsider, 3)
    assert texts[2].startswith("plan: group must be a group that this process belongs to")


def comparisons(group, check: str) -> list[int]:
    """How often ranks compare operands: after each of four products."""
    made = st_dist.plan(csr(), 8, group, check=check)
    counted, objects = [0], made._ranks.objects

    def counting(*arguments):
        counted[0] += 1
        return objects(*arguments)

    made._ranks.objects = counting
    after = []
    for width in (8, 8, 5, 8):
        made @ made.shard(operand(90, width))
        after.append(counted[0])
    return after


def test_operands_are_compared_always_or_where_they_are_new(workers):
    assert workers.run(comparisons, 2, check="always") == [[1, 2, 3, 4]] * 2
    assert workers.run(comparisons, 2, check="auto") == [[1, 2, 3, 4]] * 2
    assert workers.run(comparisons, 2, check="first") == [[1, 1, 2, 2]] * 2


def reports(group) -> tuple[str, str, str]:
    made = st_dist.plan(csr(), 8, group)
    return json.dumps(made.info), made.explain(), repr(made)


def test_reports_are_plain_data_and_say_what_was_chosen(workers):
    for rank, (info, text, name) in enumerate(workers.run(reports, 3)):
        data = json.loads(info)
        assert data["rank"] == rank and data["world_size"] == 3 and data["nnz"] == csr().nnz
        assert data["busiest_bytes"][data["exchange"]] > 0
        assert name.startswith(f"DistributedPlan(90x90, {csr().nnz} entries, rank {rank} of 3")
        lines = text.splitlines()
        assert lines[0] == name
        assert any(line.startswith("  halo      ") for line in lines)
        assert "  local product:" in lines and "  halo product:" in lines
        assert f"{data['exchange']} chosen: " in text
