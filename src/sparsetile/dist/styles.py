"""Parallel layers as styles of ``torch.distributed.tensor.parallel.parallelize_module``.

torch applies a style to a module in place, so the module takes over the class and the attributes of
the parallel layer. Imported at first use: torch's package takes longer to import than all of
``sparsetile.dist``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from sparsetile.core.errors import type_error, value_error
from sparsetile.dist.features import feature_shares
from sparsetile.dist.group import Ranks
from sparsetile.dist.tensor_parallel import ColumnParallelSparseLinear, RowParallelSparseLinear
from sparsetile.nn import SparseSwiGLU
from sparsetile.nn.hooks import HOOKS

__all__ = ["SparseColwiseParallel", "SparseRowwiseParallel", "SparseSwiGLUParallel"]


def _become(module: nn.Module, made: nn.Module) -> nn.Module:
    """Give a module the class and attributes of another, and keep its hooks."""
    hooks = {name: vars(module)[name] for name in HOOKS}
    module.__class__ = type(made)
    module.__dict__.clear()
    module.__dict__.update({**vars(made), **hooks})
    return module


def _group(function: str, device_mesh: Any) -> Any:
    if device_mesh.ndim != 1:
        raise value_error(
            function, "device_mesh", "of one dimension", f"{device_mesh.ndim}",
            'Pass one dimension of it, such as mesh["tp"]',
        )  # fmt: skip
    return device_mesh.get_group()


class _LayerStyle(ParallelStyle):
    """Style of one parallel layer: the arguments of its ``from_linear``."""

    _layer: type[ColumnParallelSparseLinear] | type[RowParallelSparseLinear]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        group = _group(type(self).__name__, device_mesh)
        layer: Any = module
        return _become(module, self._layer.from_linear(layer, group, **self._options))


class SparseColwiseParallel(_LayerStyle):
    """Style of a :class:`ColumnParallelSparseLinear`, for ``parallelize_module``.

    Parameters
    ----------
    shares, gather_output, check, options
        As in :meth:`ColumnParallelSparseLinear.from_linear`.
    """

    _layer = ColumnParallelSparseLinear

    def __init__(
        self,
        *,
        shares: Sequence[int] | None = None,
        gather_output: bool = False,
        check: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(shares=shares, gather_output=gather_output, check=check, **options)


class SparseRowwiseParallel(_LayerStyle):
    """Style of a :class:`RowParallelSparseLinear`, for ``parallelize_module``.

    Parameters
    ----------
    shares, input_is_parallel, check, options
        As in :meth:`RowParallelSparseLinear.from_linear`.
    """

    _layer = RowParallelSparseLinear

    def __init__(
        self,
        *,
        shares: Sequence[int] | None = None,
        input_is_parallel: bool = True,
        check: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(shares=shares, input_is_parallel=input_is_parallel, check=check, **options)


class SparseSwiGLUParallel(ParallelStyle):
    """Style of a :class:`sparsetile.nn.SparseSwiGLU`: gate and up by outputs, down by inputs.

    The hidden features are split so that ranks have about equal numbers of kept blocks of all three
    layers. Each call has one sum over the ranks.

    Parameters
    ----------
    check : {"auto", "always", "first"}
        As in :meth:`ColumnParallelSparseLinear.from_linear`.
    """

    def __init__(self, *, check: str = "auto") -> None:
        super().__init__()
        self._check = check

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        group = _group("SparseSwiGLUParallel", device_mesh)
        name = "SparseSwiGLUParallel"

        def layers() -> tuple[Any, Any, tuple[int, ...]]:
            if not isinstance(module, SparseSwiGLU):
                raise type_error(
                    name, "module", "a SparseSwiGLU", type(module).__name__,
                    "Call sparsify_ first, or use SparseColwiseParallel and SparseRowwiseParallel",
                )  # fmt: skip
            up, down = module.gate_up_proj, module.down_proj
            return up, down, feature_shares(device_mesh.size(), [up], [down])

        up, down, shares = Ranks(group, name).together(name, "module", layers)
        made: Any = ColumnParallelSparseLinear.from_linear(
            up, group, shares=shares, check=self._check
        )
        module.gate_up_proj = made
        module.down_proj = RowParallelSparseLinear.from_linear(
            down, group, shares=shares, check=self._check
        )
        return module
