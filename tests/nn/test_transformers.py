"""Models of transformers, as they are: pruned, run, saved by save_pretrained, loaded, densified."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparsetile.nn import (
    SparseConfig,
    SparseLinear,
    SparseSwiGLU,
    densify_,
    load_sparse_,
    sparsify_,
)
from tests.nn.language_models import TOKENS, model_of, transformers


def in_ffn(module: nn.Module, name: str) -> bool:
    return ".mlp." in name


KINDS = ["Qwen2", "Llama", "Mistral"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filter_fn", [in_ffn, None], ids=["feed-forward", "all"])
def test_models_compute_what_the_masked_ones_do(kind, filter_fn):
    model = sparsify_(model_of(kind), SparseConfig(sparsity=0.5), filter_fn)
    assert isinstance(model.model.layers[0].mlp, SparseSwiGLU)
    attention = model.model.layers[0].self_attn.q_proj
    assert isinstance(attention, nn.Linear if filter_fn else SparseLinear)
    dense = densify_(copy.deepcopy(model))
    assert type(dense.model.layers[0].mlp).__name__ == f"{kind}MLP"
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, dense(TOKENS).logits, rtol=1e-4, atol=1e-5)
        out = model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert out.shape == (2, 9)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_save_pretrained_and_back(kind, tied, tmp_path):
    model = sparsify_(model_of(kind, tied), SparseConfig(sparsity=0.5), in_ffn)
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    load_sparse_(other, tmp_path)
    with torch.no_grad():
        assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
    pieces = tmp_path / "pieces"
    model.save_pretrained(pieces, max_shard_size="50KB")
    assert (pieces / "model.safetensors.index.json").is_file()
    third = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        assert torch.equal(load_sparse_(third, pieces)(TOKENS).logits, model(TOKENS).logits)


def test_fine_tuning_lowers_the_loss_on_kept_weights_alone():
    model = sparsify_(model_of("Qwen2"), SparseConfig(sparsity=0.5), in_ffn).train()
    before = model.model.layers[0].mlp.gate_up_proj.block_col_idx.clone()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(TOKENS, labels=TOKENS).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert torch.equal(model.model.layers[0].mlp.gate_up_proj.block_col_idx, before)
