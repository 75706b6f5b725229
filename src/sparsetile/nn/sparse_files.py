"""load_sparse_: load the weights and the pattern of a pruned model into a dense one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from sparsetile.core.errors import value_error
from sparsetile.intake.csr import FP8
from sparsetile.nn.layer_choice import why_not_pruned
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.replacement import Replacements
from sparsetile.nn.sparsify import put_swiglu
from sparsetile.nn.swiglu import GATE_UP, has_swiglu_parts

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
    """Load the weights of a model that was pruned by :func:`sparsify_` into a dense one, in place.

    The pruned layers and the positions of their blocks are read from the weights. Hooks, modes and
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
    state = _read_state(source)
    names = [name.removesuffix(_ENDING) for name in state if name.endswith(_ENDING)]
    if not names:
        raise value_error(
            "load_sparse_", "source", "weights of a model that sparsify_ pruned",
            "dense weights only", "Load them with load_state_dict, then call sparsify_",
        )  # fmt: skip
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
            linear = _linear(model, name)
            change[linear] = _like(linear, weight, weight.shape[0])
    for parent, weight in joined.items():
        gate, up = (_linear(model, f"{parent}.{part}") for part in GATE_UP)
        origin = model.get_submodule(parent)
        if not has_swiglu_parts(origin):
            raise value_error(
                "load_sparse_", "model", f"one whose {parent} is a SwiGLU and nothing more",
                f"a {type(origin).__name__} with parts, weights or hooks of its own",
                "Build the model that was saved",
            )  # fmt: skip
        # Without blocks: loading allocates those of both.
        put_swiglu(change, origin, _like(gate, weight, 0), _like(up, weight, 0))
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
    return model


def _other_weights(found: str) -> ValueError:
    return value_error(
        "load_sparse_", "source", "the weights of this model", found, "Build the same model"
    )


def _linear(model: nn.Module, name: str) -> nn.Linear:
    """The dense layer of this name, which a sparse one can replace."""
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        linear = None
    reason = why_not_pruned(linear) if isinstance(linear, nn.Linear) else type(linear).__name__
    if reason or not isinstance(linear, nn.Linear):
        raise value_error(
            "load_sparse_", "model", f"one with a linear layer {name}", reason,
            "Build the model that was saved",
        )  # fmt: skip
    return linear


def _like(linear: nn.Linear, weight: Tensor, blocks: int) -> SparseLinear:
    """A replacement for a dense layer with this many blocks, in the type of the loaded weight."""
    made = SparseLinear.of_size(
        linear.in_features, linear.out_features, blocks, block=weight.shape[-1],
        bias=linear.bias is not None, device=linear.weight.device,
        dtype=linear.weight.dtype if weight.dtype is FP8 else weight.dtype,
    )  # fmt: skip
    return made._train_like(linear)
