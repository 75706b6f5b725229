"""Arguments of a wrong type are refused with the type or value that is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsetile as st

A = (torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2), (2, 2))
B = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda plan: plan.run(B, reduce=None), "run: reduce must be a name"),
        (lambda plan: plan.update_values([1.0]), "update_values: values must be a torch tensor"),
        (
            lambda plan: plan.update_values(torch.ones(2, dtype=torch.int64)),
            "update_values: values must be a float tensor",
        ),
        (lambda plan: st.plan(A, 4, system=None), "plan: system must be a name"),
        (lambda plan: st.plan(A, 4, reorder=None), "plan: reorder must be a name"),
        (
            lambda plan: plan.run(B, bias=torch.ones(4, dtype=torch.complex64)),
            "run: bias must be a dense tensor of real numbers",
        ),
        (lambda plan: plan.run(B, out=B.clone(), beta="two"), "run: beta must be a number"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused(call: Callable[[Any], Any], text: str):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(st.plan(A, 4))
    assert str(caught.value).startswith(text)
