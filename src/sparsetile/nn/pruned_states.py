"""State dicts of models that others pruned, in the form of sparse layers' state dicts.

    compressed-tensors   sparse-bitmask and sparse-24-bitmask: values and a bitmask for each weight
    zeros                dense weights: the pattern of each layer's zeros is found

See ``load_sparse_``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sparsetile.core.errors import value_error
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.masks import Found, pack_bits, pattern_of, unpack_bits

__all__ = ["BITS", "from_compressed_tensors", "from_zeros", "is_quantized"]

BITS = ".mask_bits"
_VALUES = ".compressed"
_PARTS = (".shape", ".bitmask", ".row_offsets")
# Tensors that weights of fewer bits have in compressed-tensors, AutoGPTQ, AWQ and bitsandbytes.
_QUANTIZED = (
    ".weight_packed", ".weight_scale", ".qweight", ".scale_packed", ".weight.quant_state",
    ".meta",
)  # fmt: skip


def is_quantized(state: Iterable[str]) -> str | None:
    """Return the first name of a quantised weight, None if there is none."""
    return next((name for name in state if name.endswith(_QUANTIZED)), None)


def from_compressed_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with values and bitmasks of compressed-tensors as those of MaskedLinear.

    Both libraries store bits in the same order, and values row by row.
    """
    names = [name.removesuffix(_VALUES) for name in state if name.endswith(_VALUES)]
    if not names:
        return state
    parts = {name + part for name in names for part in (_VALUES, *_PARTS)}
    made = {name: tensor for name, tensor in state.items() if name not in parts}
    for name in names:
        values, bits = state[name + _VALUES], state.get(f"{name}.bitmask")
        shape = state.get(f"{name}.shape")
        if bits is None or shape is None or shape.numel() != 2:
            missing = "bitmask" if bits is None else "shape of two numbers"
            raise value_error(
                "load_sparse_", "source",
                "weights of compressed-tensors' sparse-bitmask or sparse-24-bitmask",
                f"{name} without a {missing}",
                "Decompress the model with compressed-tensors and save it dense",
            )  # fmt: skip
        rows, cols = (int(side) for side in shape.flatten())
        mask = unpack_bits(bits.to(torch.uint8).reshape(rows, -1), cols)
        if int(mask.sum()) != values.numel():
            raise value_error(
                "load_sparse_", "source", "one value for each bit of a mask",
                f"{values.numel()} values and {int(mask.sum())} bits for {name}",
                "The file is damaged: get it again",
            )  # fmt: skip
        layer = name.removesuffix(".weight")
        made[f"{layer}.weight"] = values.flatten()
        made[layer + BITS] = pack_bits(mask)
    return made


def from_zeros(
    state: dict[str, Tensor], layers: Iterable[str]
) -> tuple[dict[str, Tensor], dict[str, Found]]:
    """Return a state dict with the kept part of layers whose dense weights have many zeros.

    And what was found: layer name -> pattern, also of those that stay dense.
    """
    made, found = dict(state), {}
    for name in layers:
        weight = state.get(f"{name}.weight")
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            continue
        found[name] = pattern = pattern_of(weight)
        if pattern.pattern == "block":
            blocks = SparseLinear.from_dense(weight, block=pattern.block).state_dict()
            made |= {f"{name}.{part}": tensor for part, tensor in blocks.items()}
        elif pattern.pattern != "dense":
            mask = weight != 0
            made[f"{name}.weight"], made[name + BITS] = weight[mask], pack_bits(mask)
    return made, found
