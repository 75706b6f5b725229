"""lora_config: PEFT's LoRA on pruned layers.

PEFT wraps layers that it knows by their class. Its own LoRA layer for ``torch.nn.Linear`` computes
base(x) + B·A·x, which suits any base, but merging adds B·A to the base's weight: for a pruned layer
that is an error, because B·A is dense.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from sparsetile.core.errors import value_error
from sparsetile.nn.linear import SparseLinear
from sparsetile.nn.masked_linear import MaskedLinear

__all__ = ["lora_config"]


@functools.cache
def _lora_layer() -> type[Any]:
    from peft.tuners.lora.layer import Linear

    class SparseLora(Linear):  # type: ignore[misc]
        """LoRA beside a pruned layer."""

        def __init__(self, base_layer: Any, *arguments: Any, **options: Any) -> None:
            if getattr(base_layer, "activation", "none") != "none":
                raise value_error(
                    "lora_config", "target_modules", "layers without an activation of their own",
                    f"one with {base_layer.activation}",
                    "Prune with SparseConfig(join_gate_up=False) and target gate_proj and up_proj",
                )  # fmt: skip
            if getattr(options.get("config"), "use_dora", False):
                raise value_error(
                    "lora_config", "use_dora", "False", "True",
                    "DoRA rescales the base's weight: use LoRA",
                )  # fmt: skip
            super().__init__(base_layer, *arguments, **options)

        def merge(self, *_: Any, **__: Any) -> NoReturn:
            raise value_error(
                "merge", "the layer", "dense", "a pruned one, which LoRA's product would fill",
                "Keep the adapter, or call densify_ before get_peft_model",
            )  # fmt: skip

    return SparseLora


def lora_config(**options: Any) -> Any:
    """Return a ``peft.LoraConfig`` whose adapters also fit pruned layers.

    The pruned weights stay frozen, and keep their pattern. Adapters cannot be merged into them.
    PEFT registers such layers with a configuration, not for all: pass the configuration also to
    ``PeftModel.from_pretrained(model, folder, config=...)``.

    Parameters
    ----------
    **options
        Those of ``peft.LoraConfig``.

    Examples
    --------
    >>> import importlib.util, torch
    >>> from sparsetile.nn import SparseConfig, lora_config, sparsify_
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> model = sparsify_(model, SparseConfig(0.5, pattern="unstructured"))
    >>> if importlib.util.find_spec("peft"):
    ...     from peft import get_peft_model
    ...     model = get_peft_model(model, lora_config(r=4, target_modules=["0"]))
    ...     trained = sum(part.numel() for part in model.parameters() if part.requires_grad)
    ... else:
    ...     trained = 2 * 4 * 64
    >>> trained
    512
    """
    from peft import LoraConfig

    made = LoraConfig(**options)
    layer = _lora_layer()
    made._register_custom_module({SparseLinear: layer, MaskedLinear: layer})
    return made
