"""A decoder of Qwen2.5's shape with random weights, for tools.llm_study.

Plain torch, so that only the linear layers differ between dense and pruned: RMSNorm, rotary
positions, grouped-query attention by torch's own kernel, SwiGLU. Modules have the names of
transformers' models, so ``sparsify_`` treats them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# Queries, keys and values -> output of attention; [batch, heads, tokens, width] each.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DecoderSize:
    """Sizes of a decoder."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    def projections(self) -> dict[str, tuple[int, int]]:
        """Name -> (outputs, inputs) of the linear layers of a block."""
        kv = self.kv_heads * self.head_width
        inner, hidden = self.inner, self.hidden
        return {
            "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
            "q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden),
        }  # fmt: skip


QWEN_7B = DecoderSize(3584, 18944, 28, 28, 4, 152064)
TINY = DecoderSize(256, 512, 2, 4, 2, 512)


@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far: [batch, kv heads, length, width] for each block."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def empty(cls, size: DecoderSize, length: int, like: Tensor) -> Cache:
        shape = (1, size.kv_heads, length, size.head_width)
        made = [[like.new_zeros(shape) for _ in range(size.layers)] for _ in range(2)]
        return cls(made[0], made[1])


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of some positions, [tokens, width]: made once, used by every block."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, width: int, dtype: torch.dtype) -> Rotary:
        half = width // 2
        rates = 1e6 ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
        angles = positions.to(torch.float32)[:, None] * rates
        sin = angles.sin()
        return cls(
            torch.cat([angles.cos()] * 2, -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)
        )

    def turned(self, x: Tensor) -> Tensor:
        """Return x [batch, heads, tokens, width] rotated by its positions."""
        return x * self.cos + x.roll(x.shape[-1] // 2, -1) * self.sin


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class _SwiGLU(nn.Module):
    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.inner, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.inner, bias=False)
        self.down_proj = nn.Linear(size.inner, size.hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class _Block(nn.Module):
    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.size = size
        kv = size.kv_heads * size.head_width
        self.input_layernorm = nn.RMSNorm(size.hidden, eps=1e-6)
        self.q_proj = nn.Linear(size.hidden, size.hidden)
        self.k_proj = nn.Linear(size.hidden, kv)
        self.v_proj = nn.Linear(size.hidden, kv)
        self.o_proj = nn.Linear(size.hidden, size.hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden, eps=1e-6)
        self.mlp = _SwiGLU(size)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size.head_width)).transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotary: Rotary,
        attention: Attention,
        cached: tuple[Tensor, Tensor, Tensor] | None,
    ) -> Tensor:
        y = self.input_layernorm(x)
        q = rotary.turned(self._heads(self.q_proj(y)))
        k = rotary.turned(self._heads(self.k_proj(y)))
        v = self._heads(self.v_proj(y))
        if cached is None:
            met = attention(q, k, v)
        else:  # one token, against all that are cached
            keys, values, seen = cached
            keys.index_copy_(2, positions, k)
            values.index_copy_(2, positions, v)
            met = functional.scaled_dot_product_attention(
                q, keys, values, attn_mask=seen, enable_gqa=True
            )
        x = x + self.o_proj(met.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Random weights; made block by block on its device, each pruned by ``prepare`` at once."""

    def __init__(
        self,
        size: DecoderSize,
        device: torch.device,
        dtype: torch.dtype,
        prepare: Callable[[nn.Module], object] | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        with torch.device(device):
            self.embed_tokens = nn.Embedding(size.vocabulary, size.hidden).to(dtype)
            self.blocks = nn.ModuleList()
            for _ in range(size.layers):
                block = _Block(size).to(dtype)
                if prepare is not None:
                    prepare(block)
                self.blocks.append(block)
            self.norm = nn.RMSNorm(size.hidden, eps=1e-6).to(dtype)
            self.lm_head = nn.Linear(size.hidden, size.vocabulary, bias=False).to(dtype)

    def prefill(self, tokens: Tensor, attention: Attention = _causal) -> Tensor:
        """Logits after the last of ``tokens`` [1, count]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens)
        rotary = Rotary.of(positions, self.size.head_width, x.dtype)
        for block in self.blocks:
            x = block(x, positions, rotary, attention, None)
        return self.lm_head(self.norm(x[:, -1]))

    def decode(self, token: Tensor, position: Tensor, cache: Cache) -> Tensor:
        """Logits after one more ``token`` [1, 1] at ``position`` [1]; it joins the cache."""
        x = self.embed_tokens(token)
        rotary = Rotary.of(position, self.size.head_width, x.dtype)
        seen = (torch.arange(cache.keys[0].shape[2], device=x.device) <= position)[None, None, None]
        for block, keys, values in zip(self.blocks, cache.keys, cache.values, strict=True):
            x = block(x, position, rotary, _causal, (keys, values, seen))
        return self.lm_head(self.norm(x[:, -1]))
