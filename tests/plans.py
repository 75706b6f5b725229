"""A small matrix, its plan and an operand, for the tests of planning and of plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsetile as st
from tests.contracts.cases import csr_of, random_matrix

MATRIX = random_matrix(30, 20, 0.2)


def made(n: int = 4, **kwargs) -> st.Plan:
    return st.plan(csr_of(MATRIX), n, **kwargs)


def dense(rows: int = 20, cols: int = 4, **kwargs) -> torch.Tensor:
    return torch.randn(rows, cols, **kwargs)


def variant_of(plan: st.Plan) -> Any:
    """The built system of a plan: tests stand something else in for one part of it."""
    return plan._variant


def said(error: type[Exception], call) -> str:
    """The text of the error that ``call`` raises, which must be of exactly this class."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)
