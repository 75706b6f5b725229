"""load_sparse_: load the weights and the pattern of a pruned model into a dense one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from sparsetile.core.errors import value_error
from sparsetile.nn.empty_layers import (
    block_like,
    linear_of,
    own_weights,
    put_joined,
    split_where_named,
)
from sparsetile.nn.layer_choice import SparsifyReport, why_not_pruned
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.masked_linear import MaskedLinear
from sparsetile.nn.masks import GROUP, is_two_of_four, unpack_bits
from sparsetile.nn.pretrained import record_pretrained
from sparsetile.nn.pruned_states import BITS, from_compressed_tensors, from_zeros, is_quantized
from sparsetile.nn.replacement import Replacements

__all__ = ["load_sparse_"]

_Model = TypeVar("_Model", bound=nn.Module)
_ENDING = ".block_col_idx"
_JOINED = "gate_up_proj"
_INDEX = "model.safetensors.index.json"


def _indexed_files(index: Path) -> set[str]:
    """Names of the files that an index file lists, all in its folder."""
    try:
        listed: Any = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise value_error(
            "load_sparse_", "source", f"a folder whose {_INDEX} has a weight_map", index,
            "Save the model with save_pretrained again",
        ) from error  # fmt: skip
    for name in listed:
        if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\\", "\0"} & {*name}:
            raise value_error(
                "load_sparse_", "source", f"a folder whose {_INDEX} names files inside of it",
                repr(name), "Load only folders that you trust",
            )  # fmt: skip
    return listed  # type: ignore[no-any-return]


def _read_state(source: Mapping[str, Tensor] | str | os.PathLike[str]) -> dict[str, Tensor]:
    """Tensors of a state dict, a safetensors file, or a folder that save_pretrained wrote."""
    if isinstance(source, Mapping):
        return dict(source)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(source)
    if path.is_dir():
        index = path / _INDEX
        files = _indexed_files(index) if index.is_file() else {"model.safetensors"}
        paths = [path / file for file in sorted(files)]
    else:
        paths = [path]
    missing = [file for file in paths if not file.is_file()]
    if missing:
        raise value_error(
            "load_sparse_", "source", "a state dict, a safetensors file or a folder with one",
            missing[0], "Save the model with save_pretrained first",
        )  # fmt: skip
    try:
        return {name: tensor for file in paths for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise value_error(
            "load_sparse_", "source", "a safetensors file, or a folder with one",
            f"{', '.join(map(str, paths))} ({error})",
            "If torch.save wrote it, pass what torch.load(path) returns",
        ) from error  # fmt: skip


def load_sparse_(
    model: _Model, source: Mapping[str, Tensor] | str | os.PathLike[str], *, assign: bool = True
) -> _Model:
    """Load the weights of a pruned model into a dense one, in place.

    The pruned layers and what they keep are read from the weights, of

    - models that :func:`sparsify_` pruned;
    - files of compressed-tensors, ``sparse-bitmask`` and ``sparse-24-bitmask``;
    - dense weights with zeros: blocks, 2:4 and other zeros are recognised (:func:`pattern_of`).

    Names are those of the model's state dict: for models of transformers that are saved under other
    names (Mixtral), use ``from_pretrained`` (:func:`enable_from_pretrained`). Quantised weights are
    refused. ``model.sparsify_report`` says what was found. Hooks, modes and
    frozen parameters are those of the dense model.

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
    state = from_compressed_tensors(_read_state(source))
    split_where_named(model, state)
    report = SparsifyReport()
    if not any(name.endswith((_ENDING, BITS)) for name in state):
        state, report = _of_zeros(model, state)
    names = [name.removesuffix(_ENDING) for name in state if name.endswith(_ENDING)]
    masked = [name.removesuffix(BITS) for name in state if name.endswith(BITS)]
    change = Replacements()
    joined = {}
    for name in names:
        weight = state.get(f"{name}.weight")
        if weight is None:
            raise _other_weights(f"no weights {name}.weight")
        parent, _, last = name.rpartition(".")
        if last == _JOINED:
            joined[parent] = weight
        else:
            linear = linear_of(model, name)
            change[linear] = block_like(linear, weight.shape[-1], weight.dtype, weight.shape[0])
    for name in masked:
        linear = linear_of(model, name)
        if f"{name}.weight" not in state:
            raise _other_weights(f"no weights {name}.weight")
        change[linear] = _masked_like(linear, state[f"{name}.weight"], state[name + BITS])
    for parent, weight in joined.items():
        put_joined(change, model, parent, weight.shape[-1], weight.dtype)
    change.apply(model)
    found = model.load_state_dict(state, strict=False, assign=assign)
    if callable(tie := getattr(model, "tie_weights", None)):
        tie()
    present = model.state_dict(keep_vars=True)
    loaded = {id(present[name]) for name in state if name in present}
    missing = [name for name in found.missing_keys if id(present[name]) not in loaded]
    if missing or found.unexpected_keys:
        wrong = missing or found.unexpected_keys
        raise _other_weights(f"{'no' if missing else 'unexpected'} weights {wrong[0]}")
    for name in (*names, *masked):
        report.pruned.setdefault(name, _kept(model.get_submodule(name)))
    model.sparsify_report = report  # type: ignore[assignment]
    own_weights(model)
    record_pretrained(model)
    return model


def _kept(layer: nn.Module) -> str:
    assert isinstance(layer, (SparseLinear, MaskedLinear))
    if isinstance(layer, SparseLinear):
        return f"blocks of {layer.block}, kept {1 - layer.sparsity:.0%}"
    return f"{layer.pattern}, kept {1 - layer.sparsity:.0%}"


def _of_zeros(
    model: nn.Module, state: dict[str, Tensor]
) -> tuple[dict[str, Tensor], SparsifyReport]:
    """The kept part of dense weights with zeros, and which layers stay dense."""
    quantized = is_quantized(state)
    if quantized is not None:
        raise value_error(
            "load_sparse_", "source", "weights of 16 bits or more", f"quantised ones: {quantized}",
            "Load them with transformers; quantised sparse weights are not supported",
        )  # fmt: skip
    linear = [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, nn.Linear) and why_not_pruned(module) is None
    ]
    state, found = from_zeros(state, linear)
    pruned = {name: str(kind) for name, kind in found.items() if kind.pattern != "dense"}
    skipped = {name: str(kind) for name, kind in found.items() if kind.pattern == "dense"}
    if not pruned:
        raise value_error(
            "load_sparse_", "source", "weights of a pruned model", "dense weights only",
            "Load them with load_state_dict, then call sparsify_",
        )  # fmt: skip
    return state, SparsifyReport(pruned, skipped)


def _masked_like(linear: nn.Linear, weight: Tensor, bits: Tensor) -> MaskedLinear:
    """A replacement for a dense layer that takes this mask, in the type of the loaded weight."""
    pattern = "unstructured"
    if bits.device.type != "meta" and linear.in_features % GROUP[0] == 0:
        half = linear.in_features * linear.out_features // 2
        # At less than 2/5 kept, nearly any mask may have two of four: a plan is faster then.
        if weight.numel() >= 0.8 * half and is_two_of_four(unpack_bits(bits, linear.in_features)):
            pattern = "2:4"
    made = MaskedLinear(
        linear.in_features, linear.out_features, 0, pattern=pattern, bias=linear.bias is not None,
        device=linear.weight.device, dtype=weight.dtype,
    )  # fmt: skip
    return made._train_like(linear)


def _other_weights(found: str) -> ValueError:
    return value_error(
        "load_sparse_", "source", "the weights of this model", found, "Build the same model"
    )
