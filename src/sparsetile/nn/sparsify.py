"""sparsify_ and densify_: prune the linear layers of a model in blocks, and undo it.

The signature is torchao's: ``sparsify_(model, config, filter_fn)``. Modules are replaced, nothing
is patched, so models of transformers work unchanged. All replacements are made before the first is
put in: a call that fails leaves the model unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error, value_error
from sparsetile.formats.block_pattern import BlockPattern
from sparsetile.intake.csr import FP8
from sparsetile.layers.block_layer import activate
from sparsetile.nn.hooks import has_hooks, has_tensor_hooks
from sparsetile.nn.layer_choice import Filter, SparsifyReport, chosen_layers
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.pruning import METHODS, block_size, kept_blocks, sparsity_share
from sparsetile.nn.replacement import Replacements, names_of, place_of, tensor_owners
from sparsetile.nn.swiglu import GATE_UP, SparseSwiGLU, is_swiglu

__all__ = ["SparseConfig", "densify_", "put_swiglu", "sparsify_"]

_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True)
class SparseConfig:
    """How :func:`sparsify_` prunes.

    Attributes
    ----------
    sparsity : float
        Share of each layer's blocks to drop, at least 0 and below 1. Not used with masks.
    block : int
        Rows and columns of a block: 64 (fastest), a multiple of it, 32 or 16.
    method : {"magnitude", "random", "mask"}
        Keep the blocks with the largest norm, random blocks, or those of ``mask``.
    mask : mapping, callable or None
        With ``method="mask"``: layer name -> mask, or a function of name and layer. A mask has one
        value per weight or one per block and keeps or drops whole blocks. A layer without a mask
        keeps its nonzero blocks, which suits models that are already pruned.
    seed : int
        Seed of ``method="random"``.
    prefer : {"speed", "memory"}
        As in :class:`SparseLinear`.
    join_gate_up : bool or tuple of classes
        Whether gate and up of a SwiGLU become one product (:class:`SparseSwiGLU`). True: in the
        feed-forward layers of transformers that are known to be one, such as ``LlamaMLP``. Add
        your own classes, which must compute ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``.
    weight_dtype : torch.dtype or None
        ``torch.float8_e4m3fn`` rounds kept weights to FP8 (``SparseLinear.quantize_``); None
        keeps their type.

    Examples
    --------
    >>> from sparsetile.nn import SparseConfig
    >>> SparseConfig(sparsity=0.8).block
    64
    """

    sparsity: float = 0.9
    block: int = 64
    method: str = "magnitude"
    mask: Mapping[str, Tensor] | Callable[[str, nn.Module], Tensor | None] | None = None
    seed: int = 0
    prefer: str = "speed"
    join_gate_up: bool | tuple[type[nn.Module], ...] = True
    weight_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.weight_dtype not in (None, FP8):
            raise value_error(
                "SparseConfig", "weight_dtype", "None or torch.float8_e4m3fn", self.weight_dtype,
                "Convert the model with .to(dtype) instead",
            )  # fmt: skip
        one_of("SparseConfig", "method", self.method, METHODS)
        one_of("SparseConfig", "prefer", self.prefer, ("speed", "memory"))
        block_size("SparseConfig", self.block)
        sparsity_share("SparseConfig", self.sparsity)
        joined = self.join_gate_up
        if not isinstance(joined, bool) and not (
            isinstance(joined, tuple) and all(isinstance(kind, type) for kind in joined)
        ):
            raise type_error(
                "SparseConfig", "join_gate_up", "True, False or a tuple of classes", repr(joined),
                "Pass for example join_gate_up=(MyMLP,)",
            )  # fmt: skip
        if self.mask is not None and self.method != "mask":
            raise value_error(
                "SparseConfig", "mask", 'None unless method="mask"', f"method={self.method!r}",
                'Pass method="mask"',
            )  # fmt: skip

    def _mask_of(self, names: list[str], layer: nn.Module) -> Tensor | None:
        """The mask of a layer, under any of its names."""
        if not isinstance(self.mask, Mapping):
            return None if self.mask is None else self.mask(names[0], layer)
        found = [self.mask[name] for name in names if name in self.mask]
        if any(not _same(found[0], other) for other in found[1:]):
            raise value_error(
                "sparsify_", "mask", "one for each layer",
                f"different ones for the names {', '.join(names)} of one layer", "Omit all but one",
            )  # fmt: skip
        return found[0] if found else None


def _same(one: object, other: object) -> bool:
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return one is other or (both and torch.equal(one, other))  # type: ignore[arg-type]


def _pruned(config: SparseConfig, names: list[str], layer: nn.Linear, number: int) -> SparseLinear:
    given = config._mask_of(names, layer)
    keep = kept_blocks(
        "sparsify_", layer.weight.detach(), config.block,
        sparsity=None if config.method == "mask" else config.sparsity, method=config.method,
        mask=given, mask_name=f"mask of layer {names[0]}",
        generator=torch.Generator().manual_seed(config.seed + number),
    )  # fmt: skip
    made = SparseLinear.from_linear(layer, mask=keep, block=config.block, prefer=config.prefer)
    if layer.bias is not None:
        made.bias = layer.bias  # optimisers, hooks and other modules may have it
    return made


def sparsify_(
    model: _Model, config: SparseConfig | None = None, filter_fn: Filter | None = None
) -> _Model:
    """Replace linear layers of a model by pruned ones, in place.

    Hooks of a replaced module stay, and so do its bias, its mode and which parameters are frozen.
    A module that has several names stays one module.

    Parameters
    ----------
    model : torch.nn.Module
    config : SparseConfig, optional
        When None: 90 % sparsity, blocks of 64, by magnitude.
    filter_fn : callable (module, name) -> bool, optional
        Which ``torch.nn.Linear`` to prune. When None, all but output heads (such as ``lm_head``
        and what ``get_output_embeddings()`` returns), layers that share their weight with another
        module, and layers whose replacement would not compute the same. The last are those with
        tensor hooks on the weight, with ``weight_norm`` or another parametrization, or with a
        replaced ``forward``. If ``filter_fn`` is true for one that cannot be pruned, an error says
        why.

    Returns
    -------
    torch.nn.Module
        The model. ``model.sparsify_report`` says which layers are pruned, and why others are not.
        If the call fails, the model is unchanged: until the end it holds both weights.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import SparseConfig, sparsify_
    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU())
    >>> sparsify_(model, SparseConfig(sparsity=0.75))
    Sequential(
      (0): SparseLinear(in_features=128, out_features=256, bias=True, block=64, kept=2/8)
      (1): ReLU()
    )
    >>> print(model.sparsify_report)
    pruned: 1 layer
      0: kept 2 of 8 blocks of 64
    skipped: 0 modules
    """
    config = SparseConfig() if config is None else config
    _check_model("sparsify_", model)
    if not isinstance(config, SparseConfig):
        raise type_error(
            "sparsify_", "config", "a SparseConfig", type(config).__name__,
            "Pass SparseConfig(sparsity=0.9)",
        )  # fmt: skip
    masked = config.mask if isinstance(config.mask, Mapping) else None
    choice = chosen_layers(model, filter_fn, masked)
    report = SparsifyReport({}, choice.skipped)
    change = Replacements()
    for number, (layer, names) in enumerate(choice.layers.items()):
        made = _pruned(config, names, layer, number)
        change[layer] = made
        blocks = made.pattern.grid[0] * made.pattern.grid[1]
        unit = BlockPattern.unit_of(config.block)
        padded = ", the last padded with zeros" if any(n % unit for n in layer.weight.shape) else ""
        report.pruned[names[0]] = f"kept {len(made.weight)} of {blocks} blocks of {unit}{padded}"
    for module in _swiglus(model, change, config):
        put_swiglu(change, module, *(change[getattr(module, part)] for part in GATE_UP))
    if config.weight_dtype is not None:
        for new in change.values():
            sparse = new.gate_up_proj if isinstance(new, SparseSwiGLU) else new
            assert isinstance(sparse, SparseLinear)
            sparse.quantize_()
    change.apply(model)
    model.sparsify_report = report  # type: ignore[assignment]
    return model


def _check_model(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise type_error(
            function, "model", "a torch.nn.Module", type(model).__name__, "Pass the model"
        )


def _swiglus(model: nn.Module, change: Replacements, config: SparseConfig) -> list[nn.Module]:
    """Feed-forward layers whose gate and up are both pruned and can be joined."""
    if config.join_gate_up is False:
        return []
    classes = () if config.join_gate_up is True else config.join_gate_up
    names, owners = names_of(model), tensor_owners(model)
    found = []
    for module, given in names.items():
        if not is_swiglu(module, classes) or "" in given:
            continue
        parts = [getattr(module, part) for part in GATE_UP]
        # No other module may use a part or its bias: joining removes them.
        alone = all(
            part in change
            and len(names[part]) == len(given)
            and (part.bias is None or len(owners[place_of(part.bias)]) == 1)
            for part in parts
        )
        if alone and parts[0].out_features % BlockPattern.unit_of(config.block) == 0:
            found.append(module)
    return found


def put_swiglu(
    change: Replacements, origin: nn.Module, gate: nn.Module, up: nn.Module
) -> SparseSwiGLU:
    """Replace a feed-forward layer by a SparseSwiGLU."""
    assert isinstance(gate, SparseLinear) and isinstance(up, SparseLinear)
    down = origin.get_submodule("down_proj")
    made = SparseSwiGLU(gate, up, change[down])
    made.training = origin.training
    made._origin = (origin,)
    change[origin] = made
    for part in GATE_UP:
        change.pop(origin.get_submodule(part), None)
    # The module that densify_ restores.
    change.parts.append((origin, {part: nn.Identity() for part in (*GATE_UP, "down_proj")}))
    return made


class _SwiGLU(nn.Module):
    """silu of the first half times the second half."""

    def forward(self, x: Tensor) -> Tensor:
        return activate(x, "swiglu")


_ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "swiglu": _SwiGLU}


def densify_(model: _Model) -> _Model:
    """Undo :func:`sparsify_`: dense layers with zeros where blocks were dropped, in place.

    Hooks, biases, modes and frozen parameters stay, and tied weights stay tied. A layer with an
    activation becomes a ``torch.nn.Sequential`` of both.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import densify_, sparsify_
    >>> model = sparsify_(torch.nn.Sequential(torch.nn.Linear(128, 256)))
    >>> densify_(model)
    Sequential(
      (0): Linear(in_features=128, out_features=256, bias=True)
    )
    """
    _check_model("densify_", model)
    names = names_of(model)
    joined: dict[nn.Module, SparseSwiGLU] = {
        each.gate_up_proj: each for each in names if isinstance(each, SparseSwiGLU)
    }
    _check_dense(model, names, joined)
    change = Replacements()
    weights: dict[tuple[int, ...], tuple[SparseLinear, Tensor]] = {}
    for module in names:
        if isinstance(module, SparseLinear) and module not in joined:
            change[module] = _dense(module, names[module][0], weights)
    for made in joined.values():
        (origin,) = made._origin
        halves = zip(GATE_UP, made.split(), strict=True)
        parts: dict[str, nn.Module] = {part: half.to_linear() for part, half in halves}
        origin.train(made.training)
        change.parts.append((origin, {**parts, "down_proj": change[made.down_proj]}))
        change[made] = origin
    change.apply(model)
    if hasattr(model, "sparsify_report"):
        del model.sparsify_report
    return model


def _dense(
    layer: SparseLinear, name: str, weights: dict[tuple[int, ...], tuple[SparseLinear, Tensor]]
) -> nn.Module:
    """A dense layer with the same results; layers with tied weights share one weight."""
    made = layer.to_linear()
    if layer.bias is not None:
        made.bias = layer.bias
    first = weights.setdefault(place_of(layer.weight), (layer, made.weight))
    if first[0] is not layer:
        if not _alike(first[0], layer):
            raise _tied(name)
        made.weight = first[1]  # type: ignore[assignment]
    if layer.activation == "none":
        return made
    both = nn.Sequential(made, _ACTIVATIONS[layer.activation]())
    return both.train(layer.training)


def _alike(one: SparseLinear, other: SparseLinear) -> bool:
    """Whether two layers of one Parameter have the same block pattern."""
    lists = ("block_row_ptr", "block_col_idx", "weight_exponent")
    return one.pattern.shape == other.pattern.shape and all(
        _same(getattr(one, part), getattr(other, part)) for part in lists
    )


def _tied(name: str) -> ValueError:
    return value_error(
        "densify_", "model", "one whose tied sparse weights can stay tied",
        f"{name}, whose weight is also elsewhere", "Untie it first",
    )  # fmt: skip


def _check_dense(
    model: nn.Module, names: dict[nn.Module, list[str]], joined: dict[nn.Module, SparseSwiGLU]
) -> None:
    """Raise for a model that densify_ cannot restore."""
    owners = tensor_owners(model)
    for module, (name, *_) in names.items():
        if not isinstance(module, (SparseLinear, SparseSwiGLU)):
            continue
        if not name:
            raise value_error(
                "densify_", "model", "one that holds sparse layers", f"a {type(module).__name__}",
                "Call to_linear() on it, or split() on a SparseSwiGLU",
            )  # fmt: skip
        if isinstance(module, SparseSwiGLU):
            if not module._origin or not isinstance(module.gate_up_proj, SparseLinear):
                raise value_error(
                    "densify_", "model", "one that sparsify_ or load_sparse_ made",
                    f"{name} made by hand", "Call split() on it",
                )  # fmt: skip
            continue
        if has_tensor_hooks(module.weight) or (
            module in joined and (has_hooks(module) or has_tensor_hooks(module.bias))
        ):
            raise value_error(
                "densify_", "model", "one without hooks on what disappears", f"hooks of {name}",
                "Remove them first",
            )  # fmt: skip
        others = owners[place_of(module.weight)]
        free = [each for each in others if isinstance(each, SparseLinear) and each not in joined]
        if len(others) > 1 and len(free) < len(others):
            raise _tied(name)
