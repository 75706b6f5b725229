"""sparsify_ and densify_: prune the linear layers of a model in blocks, and give them back.

Spelled as in torchao: ``sparsify_(model, config, filter_fn)``. Modules are replaced, nothing is
patched, so models of transformers work as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from sparsetile.core.checks import one_of
from sparsetile.core.errors import type_error, value_error
from sparsetile.formats.block_pattern import BlockPattern
from sparsetile.intake.csr import FP8
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.pruning import METHODS, block_size, sparsity_share
from sparsetile.nn.swiglu import SparseSwiGLU, is_swiglu

__all__ = ["SparseConfig", "densify_", "load_sparse_", "sparsify_"]

_Model = TypeVar("_Model", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]
_ENDING = ".block_col_idx"
_GATE_UP = ("gate_proj", "up_proj")


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
        value per weight or one per block. A layer without a mask keeps its nonzero blocks, which
        suits models that are already pruned.
    seed : int
        Seed of ``method="random"``.
    prefer : {"speed", "memory"}
        As in :class:`SparseLinear`.
    join_gate_up : bool
        Whether gate and up of a SwiGLU become one product (:class:`SparseSwiGLU`).
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
    join_gate_up: bool = True
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
        if self.mask is not None and self.method != "mask":
            raise value_error(
                "SparseConfig", "mask", 'None unless method="mask"', f"method={self.method!r}",
                'Pass method="mask"',
            )  # fmt: skip

    def _mask_of(self, name: str, layer: nn.Module) -> Tensor | None:
        if self.mask is None:
            return None
        return self.mask.get(name) if isinstance(self.mask, Mapping) else self.mask(name, layer)


def _shared(model: nn.Module) -> set[int]:
    """Parameters that several modules have, such as tied embeddings."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _pruned(config: SparseConfig, name: str, layer: nn.Linear, number: int) -> SparseLinear:
    return SparseLinear.from_linear(
        layer, sparsity=None if config.method == "mask" else config.sparsity, block=config.block,
        method=config.method, mask=config._mask_of(name, layer), prefer=config.prefer,
        generator=torch.Generator().manual_seed(config.seed + number),
    )  # fmt: skip


def sparsify_(
    model: _Model, config: SparseConfig | None = None, filter_fn: Filter | None = None
) -> _Model:
    """Replace linear layers of a model by pruned ones, in place.

    Parameters
    ----------
    model : torch.nn.Module
    config : SparseConfig, optional
        When None: 90 % sparsity, blocks of 64, by magnitude.
    filter_fn : callable (module, name) -> bool, optional
        Which ``torch.nn.Linear`` to prune. When None, all that do not share their weight with
        another module (as tied output embeddings do).

    Returns
    -------
    torch.nn.Module
        The model. Layers are replaced one by one, so memory use falls during the call.

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
    """
    config = SparseConfig() if config is None else config
    if not isinstance(model, nn.Module):
        raise type_error(
            "sparsify_", "model", "a torch.nn.Module", type(model).__name__, "Pass the model"
        )
    if not isinstance(config, SparseConfig):
        raise type_error(
            "sparsify_", "config", "a SparseConfig", type(config).__name__,
            "Pass SparseConfig(sparsity=0.9)",
        )  # fmt: skip
    chosen = _chosen(model, filter_fn)
    joined = _swiglus(model, chosen) if config.join_gate_up else []
    for number, name in enumerate(chosen):
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        _set_module(model, name, _pruned(config, name, layer, number))
    for name in joined:
        _join(model, name)
    if config.weight_dtype is not None:
        made = {f"{name}.gate_up_proj" for name in joined} | set(chosen)
        for name, module in model.named_modules():
            if name in made and isinstance(module, SparseLinear):
                module.quantize_()
    return model


def _chosen(model: nn.Module, filter_fn: Filter | None) -> list[str]:
    """Names of the layers to prune. Names alone: what is replaced must not be held."""
    shared = _shared(model)
    linear = {
        name: part for name, part in model.named_modules() if type(part) is nn.Linear and name
    }
    if filter_fn is None:
        chosen = [name for name, part in linear.items() if id(part.weight) not in shared]
    else:
        chosen = [name for name, part in linear.items() if filter_fn(part, name)]
    if not chosen:
        raise value_error(
            "sparsify_", "filter_fn",
            f"true for at least one of the model's {len(linear)} linear layers", "none",
            f"Its layers are {', '.join([*linear][:8]) or 'none'}",
        )  # fmt: skip
    tied = [name for name in chosen if id(linear[name].weight) in shared]
    if tied:
        raise value_error(
            "sparsify_", "filter_fn", "false for layers that share their weight", tied[0],
            "Untie it first, or leave it dense",
        )  # fmt: skip
    return chosen


def _swiglus(model: nn.Module, chosen: list[str]) -> list[str]:
    """Names of the feed-forward layers whose gate and up are both pruned."""
    found = []
    for name, module in model.named_modules():
        dotted = f"{name}." if name else ""
        both = all(f"{dotted}{part}" in chosen for part in _GATE_UP)
        if both and name and is_swiglu(module):
            found.append(name)
    return found


def _join(model: nn.Module, name: str) -> None:
    """Put a SparseSwiGLU in the place of a feed-forward layer of pruned parts."""
    origin = model.get_submodule(name)
    gate, up = (origin.get_submodule(part) for part in _GATE_UP)
    assert isinstance(gate, SparseLinear) and isinstance(up, SparseLinear)
    if gate.out_features % BlockPattern.unit_of(gate.block):
        return  # they stay layers of their own
    made = SparseSwiGLU(gate, up, origin.get_submodule("down_proj")).train(origin.training)
    for part in (*_GATE_UP, "down_proj"):  # the shell that densify_ fills again
        setattr(origin, part, nn.Identity())
    made._origin = (origin,)
    _set_module(model, name, made)


def _split(model: nn.Module, name: str) -> None:
    """Undo :func:`_join`."""
    made = model.get_submodule(name)
    assert isinstance(made, SparseSwiGLU)
    if not made._origin:
        raise value_error(
            "densify_", "model", "one that sparsify_ or load_sparse_ made", f"{name} made by hand",
            "Call split() on it",
        )  # fmt: skip
    (origin,) = made._origin
    for part, layer in zip(_GATE_UP, made.split(), strict=True):
        setattr(origin, part, layer)
    origin.down_proj = made.down_proj
    _set_module(model, name, origin.train(made.training))


def densify_(model: _Model) -> _Model:
    """Undo :func:`sparsify_`: dense layers with zeros where blocks were dropped, in place.

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
    for name, module in list(model.named_modules()):
        if isinstance(module, SparseSwiGLU) and name:
            _split(model, name)
    for name, module in list(model.named_modules()):
        if isinstance(module, SparseLinear) and name:
            _set_module(model, name, module.to_linear())
    return model


def _read_state(source: Mapping[str, Tensor] | str | os.PathLike[str]) -> dict[str, Tensor]:
    """Tensors of a state dict, a safetensors file, or a folder that save_pretrained wrote."""
    if isinstance(source, Mapping):
        return dict(source)
    from safetensors.torch import load_file

    path = Path(source)
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        files = {"model.safetensors"}
        if index.is_file():
            files = set(json.loads(index.read_text())["weight_map"].values())
        paths = [path / file for file in sorted(files)]
    else:
        paths = [path]
    missing = [file for file in paths if not file.is_file()]
    if missing:
        raise value_error(
            "load_sparse_", "source", "a state dict, a safetensors file or a folder with one",
            missing[0], "Save the model with save_pretrained first",
        )  # fmt: skip
    return {name: tensor for file in paths for name, tensor in load_file(file).items()}


def load_sparse_(
    model: _Model, source: Mapping[str, Tensor] | str | os.PathLike[str], *, assign: bool = True
) -> _Model:
    """Load the weights of a model that was pruned by :func:`sparsify_` into a dense one, in place.

    The pruned layers and the positions of their blocks are read from the weights.

    Parameters
    ----------
    model : torch.nn.Module
        A model of the same sizes with dense layers, for example
        ``AutoModelForCausalLM.from_config(config)``. It may be on the meta device.
    source : state dict, or path
        A safetensors file, or a folder that ``save_pretrained`` wrote.
    assign : bool
        Use the loaded tensors, with their dtype and device, instead of copying from them.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import load_sparse_, sparsify_
    >>> saved = sparsify_(torch.nn.Sequential(torch.nn.Linear(128, 256)))
    >>> model = load_sparse_(torch.nn.Sequential(torch.nn.Linear(128, 256)), saved.state_dict())
    >>> x = torch.randn(2, 128)
    >>> torch.equal(model(x), saved(x))
    True
    """
    state = _read_state(source)
    names = [name.removesuffix(_ENDING) for name in state if name.endswith(_ENDING)]
    if not names:
        raise value_error(
            "load_sparse_", "source", "weights of a model that sparsify_ pruned",
            "dense weights only", "Load them with load_state_dict, then call sparsify_",
        )  # fmt: skip
    joined = []
    for name in names:
        parent, _, last = name.rpartition(".")
        parts = [f"{parent}.{part}" for part in _GATE_UP] if last == "gate_up_proj" else [name]
        if last == "gate_up_proj":
            joined.append(parent)
        for part in parts:
            _set_module(model, part, _like(model, part, name, state, len(parts)))
    for name in joined:
        _join(model, name)
    found = model.load_state_dict(state, strict=False, assign=assign)
    if callable(tie := getattr(model, "tie_weights", None)):
        tie()
    shared = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    present = model.state_dict(keep_vars=True)
    loaded = {id(present[name]) for name in state if name in present}
    missing = [name for name in found.missing_keys if id(present[name]) not in loaded & shared]
    if missing or found.unexpected_keys:
        wrong = missing or found.unexpected_keys
        raise value_error(
            "load_sparse_", "source", "the weights of this model",
            f"{'no' if missing else 'unexpected'} weights {wrong[0]}", "Build the same model",
        )  # fmt: skip
    return model


def _like(
    model: nn.Module, part: str, name: str, state: Mapping[str, Tensor], share: int
) -> SparseLinear:
    """A layer in the place of a dense one, of as many blocks as the state has (half if joined)."""
    try:
        linear = model.get_submodule(part)
    except AttributeError:
        linear = None
    if not isinstance(linear, nn.Linear):
        raise value_error(
            "load_sparse_", "model", f"one with a linear layer {part}",
            type(linear).__name__, "Build the model that was saved",
        )  # fmt: skip
    weight = state[f"{name}.weight"]
    blocks = weight.shape[0] if share == 1 else 0
    return SparseLinear.of_size(
        linear.in_features, linear.out_features, blocks, block=weight.shape[-1],
        bias=linear.bias is not None, device=linear.weight.device,
        dtype=linear.weight.dtype if weight.dtype is FP8 else weight.dtype,
    ).train(linear.training)  # fmt: skip
