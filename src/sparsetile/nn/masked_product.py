"""What multiplies in a MaskedLinear without gradients.

    dense   the dense weight, torch's product; also wherever nothing else runs
    entries kept values and the gaps between (layers/entry_layer.py), up to 8 tokens on a GPU
    kept    kept weights and bits as the layer stores them (layers/masked_rows.py), up to 4 tokens
            on a GPU, with ``prefer="memory"``
    2:4     torch.sparse.to_sparse_semi_structured (cuSPARSELt or CUTLASS), for 2:4 on a GPU
    plan    sparsetile.plan: on a CPU, where that was measured to be faster

``entries``, ``2:4`` and ``plan`` need a form of the weight beside the kept values. So with
``prefer="memory"`` there are only ``kept`` and ``dense``, written out for the call.

What ``entries`` and ``kept`` derive never moves once a CUDA graph has captured it, as the dense
copy: a later call outside of captures writes that of a changed weight into the same memory, and
replays read it there.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from sparsetile.core.device import machine
from sparsetile.core.streams import capturing, settle
from sparsetile.formats.entry_streams import EntryStreams, choose_parts, pack_entries
from sparsetile.layers.entry_layer import EntryLayer, entry_reasons
from sparsetile.layers.entry_layer_cost import entries_pay
from sparsetile.layers.masked_rows import (
    PACKED_COLUMNS,
    MaskedRows,
    pack_masked,
    takes_few,
    takes_rows,
)
from sparsetile.nn.dense_copy import BUILDING, keeps_copies
from sparsetile.nn.host_choice import plan_on_host
from sparsetile.plan.planner import plan

__all__ = ["METHODS", "Made", "made_for", "method_of", "numbered", "writes_out"]

# A ``MaskedLinear``, whose file imports this one.
Layer: TypeAlias = Any

METHODS = ("dense", "entries", "kept", "2:4", "plan")
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# Flops of a product from which torch's 2:4 kernels are faster, in spite of their host time.
_SEMI_STRUCTURED_FLOPS = 5.5e11
# Tokens from which a dense weight that is not there is not kept.
_WRITTEN_TOKENS = 16384
# Tokens that a plan is made for; it multiplies any number.
_PLANNED = 16


@dataclass(frozen=True)
class Made:
    """A form of the weight beside the kept values, and the product with it."""

    method: str
    key: Hashable
    nbytes: int
    product: Any  # (x, bias) -> x W^T + bias; None: dense after all

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self.product is not None  # `made_for` returns no others
        return self.product(x, bias)


def _semi_structured_pays(rows: int, cols: int, tokens: int) -> bool:
    """Whether torch's 2:4 product is faster than its dense one on a GPU.

    On an H200 (torch 2.11, cuSPARSELt, five layers of Llama-3-8B's and Qwen2.5-7B's sizes, BF16,
    development readings) its kernels take 0.65 to 0.86 of the dense time from 1024 tokens, and 1.7
    to 3.3 times the dense time up to 128. But each call costs the host 0.5 to 0.9 ms, so it pays
    from products of about as long: 18944x3584 with 4096 tokens takes 0.59 ms, dense 0.73 ms; 4096
    x14336 takes 0.68 ms, dense 0.59 ms, and 4096x4096 with 16384 tokens 0.86 and 0.79 ms. With
    16384 tokens the four larger layers gain 1.17 to 1.47.
    """
    return 2 * rows * cols * tokens >= _SEMI_STRUCTURED_FLOPS


def _takes_semi_structured(layer: Layer) -> bool:
    """Whether torch has 2:4 kernels for a layer: 16 bits, sides a multiple of 64, sm_80 on."""
    weight: Tensor = layer.weight
    return (
        layer.pattern == "2:4"
        and weight.dtype in _SIXTEEN_BITS
        and layer.out_features % 64 == 0
        and layer.in_features % 64 == 0
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    )


def _takes_entries(layer: Layer, tokens: int) -> bool:
    """Whether few tokens are multiplied entry by entry, which is predicted to be faster."""
    weight: Tensor = layer.weight
    rows, cols = layer.out_features, layer.in_features
    return not entry_reasons(tokens, weight.dtype, weight.device) and entries_pay(
        rows, cols, weight.numel(), tokens, machine(weight.device)
    )


def method_of(layer: Layer, tokens: int) -> str:
    """Return the method of a layer in eval mode for a number of tokens; see ``METHODS``.

    ``plan`` may become ``dense`` once the plan is made.
    """
    method = _predicted(layer, tokens)
    made: Made | None = layer._made.get(method)
    return method if made is None else made.method


def _predicted(layer: Layer, tokens: int) -> str:
    weight: Tensor = layer.weight
    rows, cols = layer.out_features, layer.in_features
    if not weight.numel() or not tokens:
        return "dense"
    if layer.prefer != "speed":
        kept = takes_rows(weight, layer.mask_bits) and takes_few(weight, cols, tokens)
        return "kept" if kept else "dense"
    if weight.device.type == "cuda":
        if _takes_semi_structured(layer) and _semi_structured_pays(rows, cols, tokens):
            return "2:4"
        return "entries" if _takes_entries(layer, tokens) else "dense"
    planned = weight.device.type == "cpu" and plan_on_host(
        rows * cols, weight.numel(), tokens, weight.dtype.itemsize
    )
    return "plan" if planned else "dense"


def writes_out(layer: Layer, tokens: int) -> bool:
    """Whether a dense weight is written out for one product and not kept.

    Writing takes as long as 350 tokens' share of the product (``spread_masked.cu``, an H200): from
    here on about 2 % of the time, for the bytes of a dense copy.
    """
    return tokens >= _WRITTEN_TOKENS and takes_rows(layer.weight, layer.mask_bits)


def made_for(layer: Layer, tokens: int) -> Made | None:
    """Return the form of the weight for this many tokens, None for ``dense``.

    It is kept until the weight may have changed. A CUDA graph goes on reading what it captured. So
    a capture takes a form only if later calls rewrite that in place, and only one that is current:
    else it multiplies the dense copy, for which that holds too.
    """
    method, device = _predicted(layer, tokens), layer.weight.device
    if method == "dense" or not keeps_copies(layer):
        return None
    captured = capturing(device)
    if captured and method not in _IN_PLACE:
        return None
    with BUILDING:
        key: Hashable = layer._contents_key()
        made: Made | None = layer._made.get(method)
        if made is None or made.key != key:
            if captured:
                return None
            made = _MAKERS[method](layer, key)
            settle(device)
            layer._made[method] = made
        if made.product is None or (method in _IN_PLACE and not made.product.takes(tokens)):
            return None
        if captured:
            layer._captured.append(made)
    return made


def _packed(layer: Layer, parts: int) -> EntryStreams:
    weight, bits, cols = layer.weight.detach(), layer.mask_bits, layer.in_features
    if takes_rows(weight, bits) and cols <= PACKED_COLUMNS:
        return pack_masked(weight, bits, cols, parts)
    return pack_entries(layer.to_dense(), layer.mask(), parts)


@torch.no_grad()
def _entries(layer: Layer, key: Hashable) -> Made:
    weight: Tensor = layer.weight
    made = _packed(layer, choose_parts(layer.out_features, machine(weight.device).processors))
    packed: EntryLayer | None = layer._packed
    if packed is None or packed.dtype is not weight.dtype or not packed.packed.rewrite(made):
        packed = layer._packed = EntryLayer(made, weight.dtype)
    return Made("entries", key, packed.nbytes, packed)


@torch.no_grad()
def _kept(layer: Layer, key: Hashable) -> Made:
    rows: MaskedRows | None = layer._rows
    if rows is None or rows.kept_begin.device != layer.weight.device:
        rows = layer._rows = MaskedRows(layer.weight, layer.mask_bits, layer.in_features)
    else:
        rows.rewrite(layer.weight, layer.mask_bits)
    return Made("kept", key, rows.nbytes, rows)


@torch.no_grad()
def _semi_structured(layer: Layer, key: Hashable) -> Made:
    # Its constructor warns that the class may change.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        weight: Any = torch.sparse.to_sparse_semi_structured(layer.to_dense().contiguous())
    rows = layer.out_features
    parts = [getattr(weight, name, None) for name in ("packed", "meta", "packed_t", "meta_t")]
    nbytes = sum(part.nbytes for part in parts if part is not None)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        X = x.reshape(-1, x.shape[-1]).contiguous()  # torch's kernels take a matrix
        return functional.linear(X, weight, bias).reshape(*x.shape[:-1], rows)

    return Made("2:4", key, nbytes, product)


@torch.no_grad()
def _planned(layer: Layer, key: Hashable) -> Made:
    matrix = layer.to_dense().to_sparse_csr()
    made = plan(matrix, n=_PLANNED)
    if made.system == "dense":  # torch's product without the plan's copies
        return Made("dense", key, 0, None)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        return made.linear(x, bias=bias)

    return Made("plan", key, sum(made.info["bytes"].values()), product)


_MAKERS: dict[str, Callable[[Layer, Hashable], Made]] = {
    "entries": _entries, "kept": _kept, "2:4": _semi_structured, "plan": _planned,
}  # fmt: skip
# Methods whose form is rewritten in place.
_IN_PLACE = ("entries", "kept")

# -- under torch.compile -----------------------------------------------------------------------

# Layers by number: a compiled graph has the number, the operator finds the layer's copies by it.
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_LIB = torch.library.Library("sparsetile", "FRAGMENT")
_LIB.define("masked_linear(Tensor x, Tensor weight, Tensor? bias, int layer, int rows) -> Tensor")


def numbered(layer: Layer) -> int:
    """Give a layer a number, by which a compiled graph names it."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def _masked_linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: int, rows: int) -> Tensor:
    """The product of the layer; weight and bias are its own, so that graphs have them as inputs."""
    return _layers[layer]._inference(x)  # type: ignore[no-any-return]


for _key in ("CPU", "CUDA"):
    _LIB.impl("masked_linear", _masked_linear, _key)


@torch.library.register_fake("sparsetile::masked_linear", lib=_LIB)
def _(x, weight, bias, layer, rows):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], rows))
