"""Which layers of a model ``sparsify_`` prunes, and why the others stay dense."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import nn
from torch.nn.utils import parametrize

from sparsetile.core.errors import type_error, value_error
from sparsetile.nn.dense_copy import KeepsDense
from sparsetile.nn.experts import why_not_split
from sparsetile.nn.hooks import has_state_hooks, has_tensor_hooks
from sparsetile.nn.replacement import names_of, place_of, tensor_owners

__all__ = ["Choice", "Filter", "SparsifyReport", "chosen_layers", "why_not_pruned"]

Filter = Callable[[nn.Module, str], bool]

# Last parts of the names of output layers, in models of transformers and others.
_HEADS = ("lm_head", "head", "embed_out", "output_projection", "classifier", "score", "qa_outputs")
_SMALLEST = 16  # rows and columns from which weights of three dimensions are taken for experts
_ADVICE = "pass a filter_fn that is true for it to prune it"


@dataclass(frozen=True)
class SparsifyReport:
    """What :func:`sparsify_` did with each layer that has weights of two dimensions or more."""

    pruned: dict[str, str] = field(default_factory=dict)  # layer name -> what is kept
    skipped: dict[str, str] = field(default_factory=dict)  # module name -> why it stays dense

    def __str__(self) -> str:
        lines = [f"pruned: {_counted(len(self.pruned), 'layer')}"]
        lines += [f"  {name}: {kept}" for name, kept in self.pruned.items()]
        lines += [f"skipped: {_counted(len(self.skipped), 'module')}"]
        return "\n".join([*lines, *(f"  {line}" for line in grouped(self.skipped))])


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def grouped(reasons: dict[str, str]) -> list[str]:
    """One line for each reason, with the first name that has it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [
        f"{given[0]}{f' and {len(given) - 1} more' if len(given) > 1 else ''}: {reason}"
        for reason, given in names.items()
    ]


@dataclass(frozen=True)
class Choice:
    """The layers to prune with all of their names, and why others are not."""

    layers: dict[nn.Linear, list[str]]
    skipped: dict[str, str]


def why_not_pruned(layer: nn.Linear) -> str | None:
    """Why a sparse layer cannot replace this one; None if it can."""
    if parametrize.is_parametrized(layer):
        return (
            "its weight is computed by a parametrization: call "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if type(layer) is not nn.Linear:
        return f"a subclass of torch.nn.Linear: {type(layer).__name__}"
    own = {*layer._parameters, *layer._buffers, *layer._modules}
    if own != {"weight", "bias"}:
        return (
            "its weight is computed before each call, as by weight_norm, spectral_norm or "
            "torch.nn.utils.prune: remove that first"
        )
    if "forward" in vars(layer):
        return "its forward method was replaced"
    if has_state_hooks(layer):
        return "it has hooks that read or change its state dict: remove them first"
    if type(layer.weight) is not nn.Parameter:
        return f"its weight is a {type(layer.weight).__name__}"
    if has_tensor_hooks(layer.weight):
        return "its weight has a tensor hook, which expects a dense gradient: remove it first"
    return None


def _why_unreadable(layer: nn.Linear) -> str | None:
    """Why the weight of a plain layer cannot be pruned."""
    weight = layer.weight
    if weight.device.type == "meta":
        return "its weight is on the meta device: load it first"
    if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return f"its weight is {weight.dtype}, not a float of 16 bits or more"
    return None if weight.numel() else "it has no weights"


def _why_other(module: nn.Module) -> tuple[str, bool] | None:
    """Why a module that is not a linear layer stays dense, and whether users may expect otherwise.

    None for a module without weights of its own.
    """
    shapes = [part.shape for part in module._parameters.values() if part is not None]
    kind = type(module).__name__
    if isinstance(module, parametrize.ParametrizationList):
        return None  # its layer is reported
    if isinstance(module, KeepsDense):
        return "it is sparse already", False
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "an embedding", False
    if isinstance(module, nn.MultiheadAttention):
        return "torch.nn.MultiheadAttention reads its weights without calling a layer", True
    if kind == "Conv1D" and type(module).__module__.startswith("transformers."):
        return "a Conv1D of transformers: replace it by a torch.nn.Linear first", True
    convolution = isinstance(module, nn.modules.conv._ConvNd)
    if not convolution and any(
        len(shape) == 3 and shape[0] > 1 and min(shape[1:]) >= _SMALLEST for shape in shapes
    ):
        advice = ": call split_experts_ first" if why_not_split(module) is None else ""
        return f"weights of three dimensions, as experts of a mixture have ({kind}){advice}", True
    if any(len(shape) > 1 for shape in shapes):
        return f"its class is {kind}, not torch.nn.Linear", False
    return None


def _output_heads(model: nn.Module) -> set[nn.Module]:
    """What models of transformers return as their output embeddings."""
    found = set()
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        if callable(getter):
            try:
                found.add(getter())
            except (AttributeError, NotImplementedError):  # a model without any
                continue
    return found


def chosen_layers(
    model: nn.Module, filter_fn: Filter | None, masked: Collection[str] | None
) -> Choice:
    """Choose the layers to prune; raise if the caller names one that cannot be pruned.

    Without a filter these are linear layers but no output heads. Names with masks, ``masked``,
    choose their layers as a filter does.
    """
    names, owners = names_of(model), tensor_owners(model)
    heads = _output_heads(model)
    _check_masked(masked or (), names)
    choice, surprising = Choice({}, {}), {}
    for module, given in names.items():
        name = given[0]
        if not isinstance(module, nn.Linear):
            other = _why_other(module)
            if other is not None:
                choice.skipped[name] = other[0]
                if other[1]:
                    surprising[name] = other[0]
            continue
        reason = why_not_pruned(module) or _why_unreadable(module)
        if not name:
            name, reason = "it", "the model is a layer: call SparseLinear.from_linear"
        others = [] if reason else owners[place_of(module.weight)]
        if not reason and len(others) > 1:
            first = next(each for each in others if each is not module)
            reason = f"it shares its weight with {names[first][0] or 'the model'}"
        asked = _is_asked(module, given, filter_fn, masked)
        if asked and reason:
            argument = "filter_fn" if filter_fn else "mask"
            raise value_error(
                "sparsify_", argument, "false for layers that cannot be pruned"
                if filter_fn else "masks of layers that can be pruned",
                f"{name}: {reason}", "Change the layer, or leave it dense",
            )  # fmt: skip
        if asked is False:
            choice.skipped[name] = "filter_fn is false"
        elif reason:
            choice.skipped[name] = reason
            if not reason.startswith("it shares"):
                surprising[name] = reason
        elif not asked and (module in heads or name.rpartition(".")[2] in _HEADS):
            choice.skipped[name] = f"an output head: {_ADVICE}"
        else:
            choice.layers[module] = given
    if not choice.layers:
        raise _nothing_chosen(names, choice, filter_fn)
    if surprising and filter_fn is None:
        _warn(model, surprising)
    return choice


def _is_asked(
    layer: nn.Linear, names: list[str], filter_fn: Filter | None, masked: Collection[str] | None
) -> bool | None:
    """Whether the caller wants a layer pruned; None if neither filter nor masks decide."""
    if filter_fn is None:
        return True if any(name in (masked or ()) for name in names) else None
    if type(layer) is not nn.Linear and not parametrize.is_parametrized(layer):
        return None  # filters are for torch.nn.Linear
    try:
        return any(bool(filter_fn(layer, name)) for name in names)
    except (AttributeError, TypeError) as error:  # most often the arguments are exchanged
        raise type_error(
            "sparsify_", "filter_fn", "a function of a module and its name, in this order",
            f"one that raised {type(error).__name__}: {error}",
            "Write it as def keep(module, name)",
        ) from error  # fmt: skip


def _linear_names(names: dict[nn.Module, list[str]]) -> list[str]:
    found = [given for module, given in names.items() if isinstance(module, nn.Linear)]
    return [name for given in found for name in given if name]


def _check_masked(masked: Collection[str], names: dict[nn.Module, list[str]]) -> None:
    known = _linear_names(names)
    unknown = [name for name in masked if name not in known]
    if unknown:
        raise value_error(
            "sparsify_", "mask", "masks of linear layers of the model", repr(unknown[0]),
            f"Its layers are {', '.join(known[:8]) or 'none'}",
        )  # fmt: skip


def _nothing_chosen(
    names: dict[nn.Module, list[str]], choice: Choice, filter_fn: Filter | None
) -> ValueError:
    linear = _linear_names(names)
    if filter_fn is not None:
        return value_error(
            "sparsify_", "filter_fn",
            f"true for at least one of the model's {len(linear)} linear layers", "none",
            f"Its layers are {', '.join(linear[:8]) or 'none'}",
        )  # fmt: skip
    return value_error(
        "sparsify_", "model", "one with linear layers that can be pruned", "none",
        "Its modules: " + ("; ".join(grouped(choice.skipped)[:8]) or "none has weights"),
    )  # fmt: skip


def _warn(model: nn.Module, surprising: dict[str, str]) -> None:
    sizes = {name: part.numel() for name, part in model.named_parameters()}
    prefixes = tuple(f"{name}." if name else "" for name in surprising)
    ours = sum(size for name, size in sizes.items() if name.startswith(prefixes))
    share = 100 * ours / max(sum(sizes.values()), 1)
    warnings.warn(
        f"sparsify_: modules with {share:.0f} % of the model's weights cannot be pruned and stay "
        f"dense: {'; '.join(grouped(surprising)[:4])}. Print model.sparsify_report for all of "
        "them, or pass a filter_fn",
        UserWarning,
        stacklevel=4,
    )
