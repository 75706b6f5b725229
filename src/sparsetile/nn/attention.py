"""Sparse causal attention for long prompts, on block masks of torch's FlexAttention.

Two shapes of mask, one chosen for each head from a sample of its queries:

    local+sink        the last blocks before the query, and the first one
    vertical-slash    columns that every query looks at, and diagonals: distances that it looks back

Both keep about the same number of blocks in each row, so the one that covers more of the sampled
attention is used. Masks are made with tensor operations on the device, without synchronisation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error, value_error

__all__ = ["KINDS", "attention_blocks", "sparse_attention", "use_sparse_attention_"]

KINDS = ("auto", "local_sink", "vertical_slash")
# Queries at the end of the prompt that are sampled.
_SAMPLE = 64
# A diagonal of tokens runs through two blocks of each row.
_SLASH_WIDTH = 2


def _check(function: str, q: Any, k: Any, keep: Any, kind: Any, block: Any) -> None:
    one_of(function, "kind", kind, KINDS)
    if not all(isinstance(part, Tensor) and part.dim() == 4 for part in (q, k)):
        raise type_error(
            function, "q and k", "tensors [batch, heads, tokens, width]",
            f"{getattr(q, 'shape', type(q).__name__)} and {getattr(k, 'shape', type(k).__name__)}",
            "Add the missing dimensions",
        )  # fmt: skip
    if q.shape[2] != k.shape[2] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise value_error(
            function, "q and k", "of the same tokens, with q's heads a multiple of k's",
            f"{tuple(q.shape)} and {tuple(k.shape)}", "Use dense attention while decoding",
        )  # fmt: skip
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0.0 < keep <= 1.0:
        raise value_error(
            function, "keep", "above 0 and at most 1", keep, "Pass the share of blocks to keep"
        )
    if not isinstance(block, int) or block < 16 or block & (block - 1):
        raise value_error(function, "block", "a power of two, at least 16", block, "Pass block=128")


def _sampled(q: Tensor, k: Tensor) -> Tensor:
    """Attention of the last queries, float32 [batch, heads, sample, tokens]."""
    batch, heads, tokens, width = q.shape
    sample, kv_heads = min(_SAMPLE, tokens), k.shape[1]
    last = q[:, :, -sample:].reshape(batch, kv_heads, heads // kv_heads * sample, width)
    scores = (last @ k.mT).to(torch.float32) / math.sqrt(width)
    scores = scores.reshape(batch, heads, sample, tokens)
    row = torch.arange(tokens - sample, tokens, device=q.device)[:, None]
    hidden = torch.arange(tokens, device=q.device) > row
    return scores.masked_fill(hidden, -math.inf).softmax(-1)


def _by_block(mass: Tensor, block: int) -> Tensor:
    """[..., tokens] as [..., blocks, block], zeros past the end."""
    count = -(-mass.shape[-1] // block)
    return functional.pad(mass, (0, count * block - mass.shape[-1])).unflatten(-1, (count, block))


def _top(peaks: Tensor, count: int) -> Tensor:
    """Which blocks have the largest peaks, and the first one."""
    chosen = torch.zeros_like(peaks, dtype=torch.bool)
    chosen.scatter_(-1, peaks.topk(min(count, peaks.shape[-1]), -1).indices, True)
    chosen[..., 0] = True
    return chosen


def _vertical_slash(seen: Tensor, blocks: int, block: int, budget: int) -> Tensor:
    """Kept blocks [batch, heads, blocks, blocks], not cut at the diagonal."""
    tokens, sample = seen.shape[-1], seen.shape[-2]
    share = max(budget // (1 + _SLASH_WIDTH), 1)
    columns = _top(_by_block(seen.sum(-2), block).amax(-1), share)
    # Entry (s, j) looks back by tokens - sample + s - j.
    row = torch.arange(tokens - sample, tokens, device=seen.device)[:, None]
    back = (row - torch.arange(tokens, device=seen.device)).clamp(min=0)
    distance = seen.new_zeros((*seen.shape[:-2], tokens))
    distance.scatter_add_(-1, back.flatten().expand(*seen.shape[:-2], -1), seen.flatten(-2))
    groups = _top(_by_block(distance, block).amax(-1), share)
    # Distances of group g, from g * block on, reach the blocks g and g + 1 before the query's own.
    reached = groups | functional.pad(groups, (1, 0))[..., :-1]
    place = torch.arange(blocks, device=seen.device)
    apart = (place[:, None] - place).clamp(min=0)
    return columns[..., None, :] | reached[..., apart]


def attention_blocks(
    q: Tensor, k: Tensor, *, keep: float = 0.1, kind: str = "auto", block: int = 128
) -> Tensor:
    """Return which blocks of a causal attention matrix are computed.

    Parameters
    ----------
    q : Tensor [batch, heads, tokens, width]
    k : Tensor [batch, kv heads, tokens, width]
    keep : float
        Approximate share of the blocks of the longest row to keep. The diagonal and the first
        column are always kept.
    kind : {"auto", "local_sink", "vertical_slash"}
        ``"auto"`` chooses for each head the kind that covers more of its last queries' attention.
    block : int
        Tokens of a block.

    Returns
    -------
    Tensor of bool [batch, heads, blocks, blocks]
        Lower triangle.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import attention_blocks
    >>> q = torch.randn(1, 2, 512, 32)
    >>> attention_blocks(q, q, keep=0.5, kind="local_sink", block=128)[0, 0].int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 0, 0, 1]], dtype=torch.int32)
    """
    _check("attention_blocks", q, k, keep, kind, block)
    batch, heads, tokens, _ = q.shape
    blocks = -(-tokens // block)
    budget = max(round(keep * blocks), 2)
    place = torch.arange(blocks, device=q.device)
    apart = place[:, None] - place
    local = ((apart < budget - 1) | (place == 0)).expand(batch, heads, blocks, blocks)
    if keep == 1.0 or kind == "local_sink" or tokens == 0:
        chosen = local if keep < 1.0 else torch.ones_like(local)
        return chosen & (apart >= 0)
    seen = _sampled(q, k)
    chosen = _vertical_slash(seen, blocks, block, budget)
    if kind == "auto":
        mass = _by_block(seen.sum(-2), block).sum(-1)[..., None, :]
        covered, other = ((mass * each[..., -1:, :]).sum((-2, -1)) for each in (chosen, local))
        chosen = torch.where((covered >= other)[..., None, None], chosen, local)
    return chosen & (apart >= 0)


def _causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


@functools.cache
def _flex(compiled: bool) -> Callable[..., Any]:
    """FlexAttention, compiled here if ``compiled``, else with the caller."""
    from torch.nn.attention.flex_attention import flex_attention

    found: Callable[..., Any] = flex_attention
    return torch.compile(found, dynamic=False) if compiled else found


def _dense_mask(kept: Tensor, tokens: int, block: int) -> Tensor:
    """The same mask, token by token, for the CPU."""
    wide = kept.repeat_interleave(block, -1).repeat_interleave(block, -2)[..., :tokens, :tokens]
    return wide & torch.ones((tokens, tokens), dtype=torch.bool, device=kept.device).tril()


def _block_mask(kept: Tensor, tokens: int, block: int) -> Any:
    """FlexAttention's mask: blocks on the diagonal are cut, those before it are whole."""
    from torch.nn.attention.flex_attention import BlockMask

    diagonal = torch.eye(kept.shape[-1], dtype=torch.bool, device=kept.device)
    lists: list[Tensor] = []
    for part in (kept & diagonal, kept & ~diagonal):
        order = part.to(torch.int8).argsort(stable=True, dim=-1, descending=True)
        lists += [part.sum(-1).to(torch.int32), order.to(torch.int32)]
    return BlockMask.from_kv_blocks(
        lists[0], lists[1], lists[2], lists[3], BLOCK_SIZE=block, mask_mod=_causal,
        seq_lengths=(tokens, tokens),
    )  # fmt: skip


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, *, keep: float = 0.1, kind: str = "auto", block: int = 128,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return causal attention over the blocks of :func:`attention_blocks`.

    On a GPU, FlexAttention is compiled at the first call of each size and needs Triton. On a CPU,
    this is dense attention under the same mask.

    Parameters
    ----------
    q : Tensor [batch, heads, tokens, width]
    k, v : Tensor [batch, kv heads, tokens, width]
    keep, kind, block
        As in :func:`attention_blocks`.
    scale : float, optional
        Scale of the scores; 1 / sqrt(width) when None.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import sparse_attention
    >>> q = torch.randn(1, 2, 64, 16)
    >>> dense = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(sparse_attention(q, q, q, keep=1.0, block=16), dense, atol=1e-5)
    True
    """
    _check("sparse_attention", q, k, keep, kind, block)
    if not isinstance(v, Tensor) or v.shape[:3] != k.shape[:3]:
        raise value_error(
            "sparse_attention", "v", f"of shape {(*k.shape[:3], 'width')}",
            tuple(getattr(v, "shape", ())), "Give one row per key",
        )  # fmt: skip
    if q.shape[2] == 0:
        return q.new_empty((*q.shape[:3], v.shape[3]))
    with torch.no_grad():
        kept = attention_blocks(q, k, keep=keep, kind=kind, block=block)
    tokens, grouped = q.shape[2], q.shape[1] != k.shape[1]
    if not q.is_cuda:  # without compilation, FlexAttention ignores block lists
        mask = _dense_mask(kept, tokens, block)
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    call = _flex(not torch.compiler.is_compiling())
    listed = _block_mask(kept, tokens, block)
    return call(q, k, v, block_mask=listed, scale=scale, enable_gqa=grouped)


def use_sparse_attention_(
    model: nn.Module, *, keep: float = 0.1, kind: str = "auto", block: int = 128, least: int = 8192
) -> nn.Module:
    """Enable :func:`sparse_attention` for long prompts in a transformers model.

    Decoding, prompts shorter than ``least``, padded batches and training still use torch's dense
    attention. The model is not patched: an attention function is registered and selected.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    keep, kind, block
        As in :func:`attention_blocks`.
    least : int
        Smallest number of tokens of a long prompt.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import use_sparse_attention_
    >>> try:
    ...     use_sparse_attention_(torch.nn.Linear(2, 2))
    ... except TypeError as error:
    ...     print("set_attn_implementation" in str(error))
    True
    """
    one_of("use_sparse_attention_", "kind", kind, KINDS)
    if not callable(getattr(model, "set_attn_implementation", None)):
        raise type_error(
            "use_sparse_attention_", "model", "a model of transformers (set_attn_implementation)",
            type(model).__name__, "Call sparse_attention in your own attention layer",
        )  # fmt: skip
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        tokens = query.shape[2]
        dense = (
            tokens < least or tokens != key.shape[2] or mask is not None or module.training
            or more.get("sliding_window") is not None
        )  # fmt: skip
        if dense:
            return sdpa_attention_forward(module, query, key, value, mask, **more)
        scale = more.get("scaling")
        out = sparse_attention(query, key, value, keep=keep, kind=kind, block=block, scale=scale)
        return out.transpose(1, 2).contiguous(), None

    name = f"sparsetile_{kind}_{keep:g}_{block}_{least}"
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)  # type: ignore[operator]
    return model
