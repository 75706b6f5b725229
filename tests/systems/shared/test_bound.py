"""Bound products: what they prepare once, and operands that they hand on or copy."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from sparsetile.systems.base import PLAIN
from sparsetile.systems.shared import bound as module
from sparsetile.systems.shared.bound import BoundProduct


class Notes:
    """A runner that notes what it is asked for."""

    rows = 3

    def __init__(self, done: list[str]) -> None:
        self.done = done
        self.given: list[Tensor] = []

    def prepare_launches(self, tensors, values, packed, B):
        self.done.append("prepare")

    def spmm(self, tensors, values, packed, B, out, epilogue=PLAIN):
        self.given.append(B)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Notes:
    done: list[str] = []
    monkeypatch.setattr(module, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(module, "ensure_cuda_context", lambda device: done.append("context"))
    return Notes(done)


def test_launches_are_prepared_once_and_in_a_thread_with_a_context(runner):
    product = BoundProduct(runner, {"indptr": torch.zeros(4)}, None, None)
    B = torch.ones(2, 4)
    for _ in range(2):
        product(B)
    assert runner.done == ["context", "prepare"]
    assert all(given is B for given in runner.given)


def test_rows_farther_apart_than_kernels_can_address_are_copied(runner):
    product = BoundProduct(runner, {"indptr": torch.zeros(4)}, None, None)
    for _ in range(2):
        product(torch.empty(2, 2**30, device="meta")[:, :4])
    assert runner.done == [], "no launch is prepared for such rows"
    assert [given.stride() for given in runner.given] == [(4, 1)] * 2
