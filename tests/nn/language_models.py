"""Small language models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

__all__ = ["TOKENS", "model_of", "transformers"]

transformers: Any = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 100, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = torch.arange(12).reshape(2, 6)


def model_of(kind: str = "Qwen2", tied: bool = False) -> nn.Module:
    """A model of this kind, always of the same weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**_SIZES, tie_word_embeddings=tied)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()
