"""A sparse layer's blocks over the ranks: shares of features, a rank's part, the joined layer.

Shares are contiguous, whole stored blocks, balanced by kept blocks. A SwiGLU's gate and up have the
same shares, so that a rank's part is a SwiGLU of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsetile.core.errors import type_error, value_error
from sparsetile.dist.partition import share_bounds
from sparsetile.formats.block_pattern import BlockPattern
from sparsetile.intake.csr import offsets, owners
from sparsetile.nn import SparseLinear

__all__ = [
    "Side", "as_sparse", "digest_of", "feature_shares", "joined", "part_of", "shares_given",
    "side_features",
]  # fmt: skip

# Which features of a layer are shared: those of its result, or those of its input.
Side = Literal["outputs", "inputs"]


def as_sparse(function: str, layer: Any, options: dict[str, Any]) -> SparseLinear:
    """Return the layer itself, or the blocks of a ``torch.nn.Linear`` that ``options`` keep."""
    if isinstance(layer, nn.Linear):
        made = SparseLinear.from_linear(layer, **options)
    elif isinstance(layer, SparseLinear):
        if options:
            raise type_error(
                function, "options", "none for a SparseLinear", sorted(options),
                "Omit them: its blocks are chosen already",
            )  # fmt: skip
        made = layer
    else:
        raise type_error(
            function, "layer", "a torch.nn.Linear or a SparseLinear", type(layer).__name__,
            "Pass the whole layer, the same on every rank",
        )  # fmt: skip
    if made.weight.device.type == "meta":
        raise value_error(
            function, "layer", "one that holds its weights", "one on the meta device",
            "Load it first, or take the shares from a state dict",
        )  # fmt: skip
    return made


def _halves(layer: SparseLinear, side: Side) -> int:
    """Number of stacked halves: two for gate and up."""
    return 2 if side == "outputs" and layer.activation == "swiglu" else 1


def side_features(layer: SparseLinear, side: Side) -> int:
    """Return how many features are shared among the ranks."""
    whole = layer.out_features if side == "outputs" else layer.in_features
    return whole // _halves(layer, side)


def _block_counts(layer: SparseLinear, side: Side) -> Tensor:
    """Kept blocks by block of features, int64 on the CPU."""
    pattern = layer.pattern
    if side == "inputs":
        return torch.bincount(pattern.col_idx.cpu().long(), minlength=pattern.grid[1])
    lengths = torch.diff(pattern.row_ptr.cpu().long())
    return lengths.reshape(_halves(layer, side), -1).sum(0)


def feature_shares(
    parts: int, outputs_of: Sequence[Any] = (), inputs_of: Sequence[Any] = ()
) -> tuple[int, ...]:
    """Return the first feature of each rank's share, and the number of features at the end.

    A column-parallel layer and the row-parallel layer after it need the same shares. Shares are
    whole blocks. Over all given layers, ranks have about equal numbers of kept blocks. A share may
    be empty.

    Parameters
    ----------
    parts : int
        Ranks.
    outputs_of, inputs_of : sequence of SparseLinear or torch.nn.Linear
        Layers whose outputs, or whose inputs, are these features. A dense layer counts as keeping
        all blocks.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.dist import feature_shares
    >>> from sparsetile.nn import SparseLinear
    >>> up = SparseLinear.from_linear(torch.nn.Linear(64, 256), mask=torch.ones(4, 1))
    >>> down = SparseLinear.from_linear(torch.nn.Linear(256, 64), mask=torch.tensor([[1, 0, 0, 1]]))
    >>> feature_shares(2, [up], [down])
    (0, 128, 256)
    """
    name = "feature_shares"
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise value_error(name, "parts", "at least 1", parts, "Pass the number of ranks")
    sides: list[tuple[Side, Any]] = [("outputs", layer) for layer in outputs_of]
    sides += [("inputs", layer) for layer in inputs_of]
    found: list[tuple[int, int, Tensor]] = []  # features, size of a block, kept weights of each
    for side, layer in sides:
        if isinstance(layer, nn.Linear):
            features = layer.out_features if side == "outputs" else layer.in_features
            other = layer.in_features if side == "outputs" else layer.out_features
            unit = 64
            counts = torch.full((-(-features // unit),), unit * other, dtype=torch.float64)
        elif isinstance(layer, SparseLinear):
            features, unit = side_features(layer, side), BlockPattern.unit_of(layer.block)
            counts = _block_counts(layer, side).double() * unit * unit
        else:
            raise type_error(
                name, "layers", "SparseLinear or torch.nn.Linear", type(layer).__name__,
                "Pass the whole layers, before they are shared",
            )  # fmt: skip
        found.append((features, unit, counts))
    sizes = {features for features, _, _ in found}
    if len(sizes) != 1:
        raise value_error(
            name, "layers", "of the same number of shared features", sorted(sizes),
            "Pass layers whose results and inputs are the same features",
        )  # fmt: skip
    (features,) = sizes
    step = max(unit for _, unit, _ in found)
    total = torch.zeros(-(-features // step), dtype=torch.float64)
    for _, unit, counts in found:
        total.index_add_(0, torch.arange(counts.numel()) // (step // unit), counts)
    if not bool(total.any()):  # no blocks at all: features are still shared
        total = torch.ones_like(total)
    return tuple(min(end * step, features) for end in share_bounds(total, parts))


def shares_given(
    function: str, layer: SparseLinear, side: Side, parts: int, given: Sequence[int] | None
) -> tuple[int, ...]:
    """Return checked shares: those given, or the layer's own."""
    if given is None:
        lists: dict[str, list[Any]] = {f"{side}_of": [layer]}
        return feature_shares(parts, **lists)
    bounds = tuple(int(first) for first in given)
    features, unit = side_features(layer, side), BlockPattern.unit_of(layer.block)
    sound = len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == features
    sound = sound and all(a <= b for a, b in itertools.pairwise(bounds))
    if not sound or any(first % unit and first != features for first in bounds):
        raise value_error(
            function, "shares", f"the first of {features} features of each of {parts} ranks and "
            f"{features} at the end, rising, in blocks of {unit}", list(bounds)[:8],
            "Call sparsetile.dist.feature_shares",
        )  # fmt: skip
    return bounds


def digest_of(layer: SparseLinear) -> str:
    """Return a digest of a layer and its weights, to detect that ranks have different ones."""
    with torch.no_grad():
        sums = []
        for part in (layer.weight, layer.bias, layer.block_row_ptr, layer.block_col_idx):
            if part is None or not part.numel():
                continue
            whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            bits = part.detach().contiguous().view(whole[part.element_size()])
            each = bits.reshape(part.shape[0], -1).sum(1, dtype=torch.int64)
            sums.append(int((each * torch.arange(1, each.numel() + 1, device=each.device)).sum()))
        mixed = hash(tuple(sums)) & 0xFFFFFFFF
    return f"{layer}, {layer.weight.dtype}, content {mixed:08x}"


def _units(layer: SparseLinear, bounds: Sequence[int], part: int) -> tuple[int, int]:
    """First and last block of a share's features."""
    unit = BlockPattern.unit_of(layer.block)
    return -(-bounds[part] // unit), -(-bounds[part + 1] // unit)


@torch.no_grad()
def part_of(layer: SparseLinear, side: Side, bounds: Sequence[int], part: int) -> SparseLinear:
    """Return a rank's part of a layer, a copy: some of its block rows, or block columns.

    If outputs are split, the part has its bias and the activation. If inputs are split, these
    belong to the sum of all parts, and the part has neither.
    """
    pattern, halves = layer.pattern, _halves(layer, side)
    first, last = _units(layer, bounds, part)
    rows, cols = pattern.row_ids(), pattern.col_idx.long()
    size = bounds[part + 1] - bounds[part]
    if side == "outputs":
        high = pattern.grid[0] // halves
        place = rows % high
        kept = torch.nonzero((place >= first) & (place < last)).flatten()
        rows = (rows // high * (last - first) + place - first)[kept]
        cols, count = cols[kept], halves * (last - first)
        shape = (halves * size, layer.in_features)
    else:
        kept = torch.nonzero((cols >= first) & (cols < last)).flatten()
        rows, cols, count = rows[kept], cols[kept] - first, pattern.grid[0]
        shape = (layer.out_features, size)
    own = side == "outputs"
    bias = layer.bias if own else None
    made = SparseLinear.of_size(
        shape[1], shape[0], kept.numel(), block=layer.block, bias=bias is not None,
        activation=layer.activation if own else "none", prefer=layer.prefer,
        device=layer.weight.device, dtype=layer._wide_dtype(),
    )  # fmt: skip
    made.weight.requires_grad_(layer.weight.requires_grad)
    state = {
        "weight": layer.weight[kept],
        "block_row_ptr": offsets(torch.bincount(rows, minlength=count), torch.int32),
        "block_col_idx": cols.to(torch.int32),
    }
    if layer.weight_exponent is not None:
        state["weight_exponent"] = layer.weight_exponent[kept]
    if bias is not None:
        made.bias.requires_grad_(bias.requires_grad)
        begin, end = bounds[part], bounds[part + 1]
        state["bias"] = bias.detach().reshape(halves, -1)[:, begin:end].reshape(-1)
    made.load_state_dict(state)
    return made.train(layer.training)


@torch.no_grad()
def joined(
    states: Sequence[dict[str, Tensor]], like: SparseLinear, side: Side, bounds: Sequence[int]
) -> SparseLinear:
    """Join the state dicts of all parts into ``like``, an empty layer of the whole size."""
    halves = _halves(like, side)
    high, wide = like.pattern.grid
    rows, cols = [], []
    for part, state in enumerate(states):
        first, last = _units(like, bounds, part)
        ptr = state["block_row_ptr"]
        ids = owners(torch.diff(ptr.long()))
        if side == "outputs" and last > first:
            step = last - first
            ids = ids // step * (high // halves) + ids % step + first
        rows.append(ids)
        cols.append(state["block_col_idx"].long() + (first if side == "inputs" else 0))
    row, col = torch.cat(rows), torch.cat(cols)
    order = torch.argsort(row * max(wide, 1) + col)
    found = {
        "weight": torch.cat([state["weight"] for state in states])[order],
        "block_row_ptr": offsets(torch.bincount(row, minlength=high), torch.int32),
        "block_col_idx": col[order].to(torch.int32),
    }
    if "weight_exponent" in states[0]:
        found["weight_exponent"] = torch.cat([state["weight_exponent"] for state in states])[order]
    if side == "outputs" and like.bias is not None:
        parts = [state["bias"].reshape(halves, -1) for state in states]
        found["bias"] = torch.cat(parts, 1).reshape(-1)
    like.load_state_dict(found, strict=like.bias is None or "bias" in found)
    return like
