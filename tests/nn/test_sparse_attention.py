"""Sparse attention: the blocks that are kept, the result over them, heads that differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sparsetile.nn import attention, attention_blocks, sparse_attention, use_sparse_attention_


def masked(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, block: int) -> Tensor:
    """Dense attention under the same mask."""
    tokens = q.shape[2]
    wide = kept.repeat_interleave(block, -1).repeat_interleave(block, -2)[..., :tokens, :tokens]
    wide = wide & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=wide, enable_gqa=True)


def inputs(heads: int = 4, kv: int = 2, tokens: int = 200, width: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, count, tokens, width) for count in (heads, kv, kv)]


@pytest.mark.parametrize("kind", ["auto", "local_sink", "vertical_slash"])
@pytest.mark.parametrize("tokens", [1, 64, 200])
@pytest.mark.parametrize("keep", [0.2, 1.0])
def test_results_are_those_of_dense_attention_under_the_same_mask(kind, tokens, keep):
    q, k, v = inputs(tokens=tokens)
    kept = attention_blocks(q, k, keep=keep, kind=kind, block=16)
    got = sparse_attention(q, k, v, keep=keep, kind=kind, block=16)
    torch.testing.assert_close(got, masked(q, k, v, kept, 16))
    if keep == 1.0:
        dense = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(got, dense)


@pytest.mark.parametrize("kind", ["auto", "local_sink", "vertical_slash"])
def test_masks_are_causal_keep_the_diagonal_and_the_first_block_and_stay_within_the_budget(kind):
    q, k, _ = inputs(tokens=640)
    kept = attention_blocks(q, k, keep=0.25, kind=kind, block=16)
    assert kept.shape == (2, 4, 40, 40)
    assert not kept.triu(1).any()
    assert kept.diagonal(dim1=-2, dim2=-1).all() and kept[..., 0].all()
    assert kept.sum(-1).max() <= 10 + 3  # and the first column, diagonal and its neighbour


def test_heads_choose_what_they_look_at():
    tokens, width, block = 512, 64, 16
    q, k = torch.zeros(1, 3, tokens, width), torch.zeros(1, 3, tokens, width)
    # Head 0: everyone looks at token 200. Head 1: everyone looks 100 back. Head 2: at neighbours.
    q[0, 0, :, 0], k[0, 0, 200, 0] = 30.0, 30.0
    place = torch.arange(tokens)
    codes = torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)) * 4
    k[0, 1], q[0, 1] = codes, codes[(place - 100).clamp(min=0)]
    angles = place[:, None] * torch.linspace(0.01, 0.1, width // 2)
    near = torch.cat([angles.cos(), angles.sin()], -1) * 6
    q[0, 2], k[0, 2] = near, near
    kept = attention_blocks(q, k, keep=0.2, block=block)
    assert kept[0, 0, 13:, 200 // block].all(), "a column"
    rows = torch.arange(8, 32)
    assert kept[0, 1, rows, rows - 100 // block].all(), "a diagonal"
    assert kept[0, 1, rows, rows - 100 // block - 1].all(), "which runs through two blocks"
    local = attention_blocks(q, k, keep=0.2, kind="local_sink", block=block)
    assert torch.equal(kept[0, 2], local[0, 2])


@pytest.mark.parametrize("tokens", [64, 200])
def test_block_lists_are_the_kept_blocks(tokens):
    q, k, _ = inputs(tokens=tokens)
    kept = attention_blocks(q, k, keep=0.3, block=16)
    listed = attention._block_mask(kept, tokens, 16)
    assert torch.equal(listed.to_dense().bool(), kept)
    assert listed.seq_lengths == (tokens, tokens)
    counts = listed.kv_num_blocks, listed.full_kv_num_blocks
    assert (counts[0] == 1).all(), "the diagonal alone is cut"
    assert torch.equal(counts[0] + counts[1], kept.sum(-1).int())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("tokens", [1024, 1000])
def test_the_fused_kernel_computes_the_same(tokens):
    q, k, v = (part.cuda().bfloat16() for part in inputs(tokens=tokens, width=64))
    got = sparse_attention(q, k, v, keep=0.3)
    kept = attention_blocks(q, k, keep=0.3)
    mask = attention._dense_mask(kept, tokens, 128)
    wide = [part.float() for part in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.02)


def test_gradients_flow():
    q, k, v = (part.requires_grad_() for part in inputs(tokens=64))
    got = torch.autograd.grad(sparse_attention(q, k, v, keep=0.3, block=16).sum(), [q, k, v])
    kept = attention_blocks(q, k, keep=0.3, block=16)
    expected = torch.autograd.grad(masked(q, k, v, kept, 16).sum(), [q, k, v])
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


Q = torch.zeros(1, 2, 8, 4)
BAD = [
    (lambda: sparse_attention(Q, Q, Q, keep=0.0), ValueError, "keep must be above 0 and at most 1"),
    (lambda: sparse_attention(Q, Q, Q, kind="grid"), ValueError, "kind must be"),
    (lambda: sparse_attention(Q, Q, Q, block=100), ValueError, "block must be a power of two"),
    (lambda: sparse_attention(Q[0], Q, Q), TypeError, r"tensors \[batch, heads, tokens, width\]"),
    (lambda: sparse_attention(Q[:, :, :1], Q, Q), ValueError, "of the same tokens"),
    (lambda: sparse_attention(Q, Q, Q[:, :, :3]), ValueError, "v must be of shape"),
    (lambda: attention_blocks(Q, Q, keep=True), ValueError, "attention_blocks: keep must be"),
]


@pytest.mark.parametrize("call, error, text", BAD)
def test_rejects_bad_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_no_tokens_give_nothing():
    assert sparse_attention(Q[:, :, :0], Q[:, :, :0], Q[:, :, :0]).shape == (1, 2, 0, 4)


@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])
def test_models_of_transformers_take_it_for_long_prompts(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    tokens = torch.arange(160)[None] % 100
    with torch.no_grad():
        dense = model(tokens).logits
        use_sparse_attention_(model, keep=1.0, block=16, least=100)
        torch.testing.assert_close(model(tokens).logits, dense, rtol=1e-4, atol=1e-5)
        use_sparse_attention_(model, keep=0.2, block=16, least=100)
        assert not torch.allclose(model(tokens).logits, dense)
        assert torch.allclose(model(tokens[:, :50]).logits, dense[:, :50], atol=1e-5)
        out = model.generate(tokens[:, :20], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 23)
