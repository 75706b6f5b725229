"""The dense copy of a SparseLinear's weight: when it is kept, and what makes it stale."""

from __future__ import annotations

import copy

import pytest
import torch

import sparsetile as st
from sparsetile.nn import MaskedLinear, SparseLinear
from tests.locks import Slow, at_once


@pytest.fixture
def layer() -> SparseLinear:
    made = SparseLinear.from_linear(torch.nn.Linear(128, 192), sparsity=0.5, method="random")
    return made.eval()


def fused_step(layer: SparseLinear) -> None:
    step = torch.optim.AdamW([layer.weight], lr=0.1, fused=True)
    layer.weight.grad = torch.rand_like(layer.weight)
    step.step()


def write_through_data(layer: SparseLinear) -> None:
    layer.weight.data.mul_(2)
    st.changed()


def new_memory(layer: SparseLinear) -> None:
    layer.weight.data = layer.weight.detach() * 2
    layer.weight.data = layer.weight.detach() * 2


def other_state(layer: SparseLinear) -> None:
    layer.load_state_dict({name: part * 2 if part.is_floating_point() else part
                           for name, part in layer.state_dict().items()})  # fmt: skip


EDITS = [fused_step, write_through_data, new_memory, other_state]


@pytest.mark.parametrize("edit", EDITS)
def test_it_is_made_again_after_the_weight_was_written(layer, edit):
    for _ in range(10):
        assert torch.equal(layer._dense_copy(), layer.to_dense())
        edit(layer)
    assert torch.equal(layer._dense_copy(), layer.to_dense())


def other_blocks(layer: SparseLinear) -> None:
    kept = torch.ones(layer.pattern.grid, dtype=torch.bool)
    kept.view(-1)[torch.randperm(kept.numel())[layer.block_col_idx.numel() :]] = False
    pointers = torch.zeros_like(layer.block_row_ptr)
    pointers[1:] = kept.sum(1).cumsum(0)
    layer.block_row_ptr.data, layer.block_col_idx.data = pointers, kept.nonzero()[:, 1].int()


def test_it_is_made_again_after_the_blocks_were_exchanged(layer):
    torch.manual_seed(0)
    before = layer._dense_copy().clone()
    other_blocks(layer)
    assert not torch.equal(layer.to_dense(), before)
    torch.testing.assert_close(layer._dense_copy(), layer.to_dense())


@pytest.mark.parametrize("in_place", [False, True])
def test_single_weights_are_read_again_after_the_mask_was_exchanged(in_place):
    layer = MaskedLinear.from_linear(torch.nn.Linear(128, 192), sparsity=0.5).eval()
    x = torch.randn(3, 128)
    with torch.no_grad():
        layer(x)
        turned = layer.mask_bits.flip(1)
        if in_place:
            layer.mask_bits.copy_(turned)
        else:
            layer.mask_bits.data = turned
        expected = torch.nn.functional.linear(x, layer.to_dense(), layer.bias)
        torch.testing.assert_close(layer(x), expected)


def test_it_is_kept_while_nothing_changes(layer):
    assert layer._dense_copy() is layer._dense_copy()
    assert layer.memory()["dense copy"] == 128 * 192 * 4


def test_threads_that_ask_together_get_the_same_copy(layer):
    layer.to_dense = slow = Slow(layer.to_dense)
    one, other = at_once(layer._dense_copy)
    assert one is other and slow.calls == 1


def test_it_is_neither_kept_nor_used_in_training_mode(layer):
    layer._dense_copy()
    layer.train()
    assert layer.memory()["dense copy"] == 0
    assert layer._dense_copy() is not layer._dense_copy()
    layer.weight.data.mul_(2)
    assert torch.equal(layer._dense_copy(), layer.to_dense())


def test_one_that_prefers_memory_keeps_none(layer):
    layer.prefer = "memory"
    layer._dense_copy()
    assert layer.memory()["dense copy"] == 0


def test_weights_whose_writes_torch_does_not_count_have_none():
    with torch.inference_mode():
        layer = SparseLinear.from_linear(torch.nn.Linear(128, 64), sparsity=0.5).eval()
        assert torch.equal(layer._dense_copy(), layer.to_dense())
        layer.weight.mul_(2)
        assert torch.equal(layer._dense_copy(), layer.to_dense())
    assert layer.memory()["dense copy"] == 0


def test_what_a_captured_graph_writes_is_kept_and_not_taken_for_filled(layer, monkeypatch):
    monkeypatch.setattr("sparsetile.nn.dense_copy.capturing", lambda device: True)
    captured = layer._dense_copy()
    monkeypatch.undo()
    layer.train()
    layer.eval()
    captured.fill_(torch.nan)  # as memory that no replay has filled
    again = layer._dense_copy()
    assert again is captured, "graphs have its address"
    assert torch.equal(again, layer.to_dense())


def test_a_copied_layer_has_its_own(layer):
    layer._dense_copy()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.mul_(2)
    assert torch.equal(other._dense_copy(), other.to_dense())
    assert torch.equal(layer._dense_copy(), layer.to_dense())
