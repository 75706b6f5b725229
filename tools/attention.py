"""Graph attention in float64, for checks of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsetile.intake.csr import CSR

__all__ = ["attended"]


def attended(
    csr: CSR, messages: Tensor, of_source: Tensor, of_target: Tensor | None, slope: float,
    counts: Tensor | None = None, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return graph attention in float64: messages weighted by a softmax over A's rows.

    Differentiable. For small matrices: all terms are in memory at once. ``messages`` are [sources,
    heads, width]; ``of_source`` and ``of_target`` [nodes, heads] are terms of the scores before the
    leaky ReLU of ``slope``. ``counts``: parallel edges that each entry stands for. ``scales``
    [entries, heads]: factors of messages in place of the counts.
    """
    target, source = csr.row_ids(), csr.indices.long()
    raw = of_source.double()[source]
    if of_target is not None:
        raw = raw + of_target.double()[target]
    score = torch.nn.functional.leaky_relu(raw, slope)
    shape = (csr.shape[0], score.shape[1])
    highest = score.new_zeros(shape).scatter_reduce(
        0, target[:, None].expand_as(score), score.detach(), "amax", include_self=False
    )
    raised = (score - highest[target]).exp()
    count = score.new_ones(csr.nnz, 1) if counts is None else counts.double()[:, None]
    total = score.new_zeros(shape).index_add(0, target, raised * count)
    attention = raised / total[target] * (count if scales is None else scales.double())
    terms = attention[..., None] * messages.double()[source]
    return terms.new_zeros(shape[0], *terms.shape[1:]).index_add(0, target, terms).flatten(1)
