"""Pruned models in transformers' ``save_pretrained`` and ``from_pretrained``.

``config.json`` records which layers are pruned and how, in the place of a quantisation: a
``quantization_config`` with ``quant_method: sparsetile``. transformers asks the quantizer that is
registered for it to replace layers before it loads weights. ``sparsify_`` and ``load_sparse_``
record models of transformers. transformers is imported only if a model of it is there, or by
``enable_from_pretrained``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sparsetile.nn.empty_layers import (
    block_like,
    linear_of,
    own_weights,
    put_joined,
    split_where_named,
)
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.masked_linear import MaskedLinear
from sparsetile.nn.replacement import Replacements

__all__ = ["enable_from_pretrained", "forget_pretrained", "record_pretrained"]

METHOD = "sparsetile"


def enable_from_pretrained() -> None:
    """Let ``from_pretrained`` of transformers load pruned models that ``save_pretrained`` wrote.

    Call it once in a process that loads models; it imports transformers. Processes in which
    ``sparsify_`` or ``load_sparse_`` had a model of transformers need not call it.

    Examples
    --------
    >>> import importlib.util
    >>> from sparsetile.nn import enable_from_pretrained
    >>> if importlib.util.find_spec("transformers"):
    ...     enable_from_pretrained()
    ...     from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known
    ... else:
    ...     known = {"sparsetile": None}
    >>> "sparsetile" in known
    True
    """
    _classes()


@functools.cache
def _classes() -> type[Any]:
    """Register with transformers; return the class of the configuration."""
    from transformers.quantizers import (
        HfQuantizer,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class SparsetileConfig(QuantizationConfigMixin):  # type: ignore[misc]
        """Which layers are pruned: name -> pattern, block and number of kept blocks or weights."""

        def __init__(self, layers: Mapping[str, Any] | None = None, **others: Any) -> None:
            self.quant_method: Any = METHOD
            self.layers = dict(layers or {})
            self._model: Any = None

        def follow(self, model: nn.Module) -> None:
            """Describe a model as it is when the configuration is saved: prune_ changes it."""
            self._model = weakref.ref(model)

        def to_dict(self) -> dict[str, Any]:
            model = None if self._model is None else self._model()
            if model is not None:
                self.layers = _described(model)
            return {"quant_method": METHOD, "layers": self.layers}

        def __getstate__(self) -> dict[str, Any]:
            return {**self.to_dict(), "_model": None}

        def __deepcopy__(self, memo: Any) -> SparsetileConfig:
            made = SparsetileConfig(self.to_dict()["layers"])
            model = None if self._model is None else self._model()
            if id(model) in memo:  # the model is copied too
                made.follow(memo[id(model)])
            return made

    @register_quantizer(METHOD)
    class SparsetileQuantizer(HfQuantizer):  # type: ignore[misc]
        """Replaces the layers that a configuration names before their weights are loaded."""

        requires_calibration = True

        def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
            config: Any = self.quantization_config
            _replace(model, config.layers)
            return model

        def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
            own_weights(model)
            config: Any = self.quantization_config
            config.follow(model)
            return model

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

        @property
        def is_qat_trainable(self) -> bool:  # transformers' Trainer asks for it
            return True

        @property
        def is_compileable(self) -> bool:
            return True

    return SparsetileConfig


def _described(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLinear):
            found[name] = {"pattern": "block", "block": layer.block, "kept": len(layer.weight)}
        elif isinstance(layer, MaskedLinear):
            found[name] = {"pattern": layer.pattern, "kept": len(layer.weight)}
    return found


def _replace(model: nn.Module, layers: Mapping[str, Any]) -> None:
    """Put empty sparse layers of the recorded sizes into a dense model."""
    change = Replacements()
    split_where_named(model, layers)
    with torch.device("meta"):  # as the dense layers, whose weights were not loaded
        for name, facts in layers.items():
            if name.rpartition(".")[2] == "gate_up_proj":
                continue
            linear = linear_of(model, name)
            if facts["pattern"] == "block":
                change[linear] = block_like(
                    linear, facts["block"], linear.weight.dtype, facts["kept"]
                )
            else:
                made = MaskedLinear(
                    linear.in_features, linear.out_features, facts["kept"],
                    pattern=facts["pattern"], bias=linear.bias is not None,
                    dtype=linear.weight.dtype,
                )  # fmt: skip
                change[linear] = made._train_like(linear)
        for name, facts in layers.items():
            parent, _, last = name.rpartition(".")
            if last == "gate_up_proj":
                joined = put_joined(change, model, parent, facts["block"], None)
                joined.gate_up_proj._resize(facts["kept"])
    change.apply(model)


def _is_pretrained(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


def record_pretrained(model: nn.Module) -> None:
    """Record the pruned layers in the configuration of a model of transformers; others have none.

    FP8 weights are not recorded: ``from_pretrained`` would convert them. ``load_sparse_`` loads
    them.
    """
    if not _is_pretrained(model):
        return
    config: Any = model.config
    earlier = getattr(config, "quantization_config", None)
    if earlier is not None and not isinstance(earlier, _classes()):
        kind = earlier.get("quant_method") if isinstance(earlier, dict) else None
        if kind != METHOD:
            return  # a quantised model: its own record stays
    eight = any(
        isinstance(layer, SparseLinear) and layer.weight_exponent is not None
        for layer in model.modules()
    )
    if eight:
        forget_pretrained(model)
        return
    made = _classes()(_described(model))
    made.follow(model)
    config.quantization_config = made


def forget_pretrained(model: nn.Module) -> None:
    """Remove the record of a model that is dense again."""
    config = getattr(model, "config", None)
    earlier = getattr(config, "quantization_config", None)
    if earlier is None or getattr(earlier, "quant_method", None) != METHOD:
        return
    del config.quantization_config  # type: ignore[union-attr]
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model, "is_quantized"):
        model.is_quantized = False  # type: ignore[assignment]
