"""Replace PyG's functions by sparsetile's, and restore them.

PyG's modules import functions by name, so a function is replaced in every loaded module that has
it. PyG generates ``propagate`` for each layer class at its first instance: existing ones are
wrapped now, later ones when they are generated.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

from sparsetile.core.errors import describe
from sparsetile.pyg.forwards import LAYERS, new_forward
from sparsetile.pyg.matrix import new_edges_product, new_matmul, new_spmm
from sparsetile.pyg.norms import clear_norms, new_gcn_norm
from sparsetile.pyg.propagation import new_propagate
from sparsetile.pyg.reporting import Report, clear_counts, report

__all__ = ["Patch", "is_patched", "patch", "unpatch"]

_lock = threading.RLock()
_MARK = "_sparsetile_original"


class _State:
    """Original function -> its replacement, while the patch is on."""

    exchanged: dict[Callable[..., Any], Callable[..., Any]] | None = None
    generate: Callable[..., Any] | None = None


class Patch:
    """The context manager of :func:`patch`: removes the patch at its end, but no earlier one."""

    def __init__(self, mine: bool) -> None:
        self._mine = mine

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        if self._mine:
            unpatch()

    def report(self) -> Report:
        """Return :func:`sparsetile.pyg.report`."""
        return report()


def is_patched() -> bool:
    """Return whether PyG runs on sparsetile now."""
    return _State.exchanged is not None


def patch() -> Patch:
    """Let PyG's layers compute with sparsetile until :func:`unpatch`, or within ``with patch():``.

    What changes, for float tensors on the CPU or on CUDA:

    - ``torch_geometric.utils.spmm`` of torch sparse tensors;
    - ``EdgeIndex.matmul`` and ``@``, which ``spmm`` calls too: every reduction has gradients for
      features and values;
    - ``propagate`` of layers whose messages are neighbours, optionally times ``edge_weight``, and
      whose ``aggr`` is sum, mean, max or min. It stores nothing of size edges × features. Messages
      follow the layer's ``flow``: from ``edge_index[0]`` to ``edge_index[1]`` with
      ``source_to_target``;
    - ``forward`` of ``ChebConv``, ``FastRGCNConv``, ``GATConv``, ``GATv2Conv``, ``GINEConv``,
      ``RGCNConv`` and ``TransformerConv``, with edges: they store nothing of size edges × features
      either;
    - ``gcn_norm``: its result is cached while ``edge_index`` lives and does not change.

    Everything else still runs in PyG: other layers (EdgeConv), hooks, explanations, integer
    features, ``torch_sparse.SparseTensor``, and code inside ``torch.compile`` and ``torch.jit``.
    :func:`report` lists what ran where, and why.

    Returns
    -------
    Patch
        A context manager.

    Raises
    ------
    ModuleNotFoundError
        PyG is not installed.
    """
    with _lock:
        if is_patched():
            return Patch(mine=False)
        base = _pyg("torch_geometric.nn.conv.message_passing").MessagePassing
        spmm = _pyg("torch_geometric.utils").spmm
        norm = _pyg("torch_geometric.nn.conv.gcn_conv").gcn_norm
        edges = _pyg("torch_geometric.edge_index")
        _State.exchanged = {
            spmm: new_spmm(spmm),
            norm: new_gcn_norm(norm, is_patched),
            edges._spmm: new_edges_product(edges._spmm),
        }
        clear_counts()
        _exchange(_State.exchanged)
        edges.EdgeIndex.__matmul__ = new_matmul(edges.EdgeIndex.__matmul__)
        for kind in _layer_classes(base):
            _wrap(kind, base)
        for kind in _taken_layers():
            replaced = cast(Callable[..., Any], vars(kind)["forward"])
            wrapper = new_forward(replaced, kind, is_patched)
            setattr(wrapper, _MARK, replaced)
            kind.forward = wrapper  # type: ignore[attr-defined]
        generate = _State.generate = base._set_jittable_templates

        @functools.wraps(generate)
        def with_wrapper(self: Any, *arguments: Any, **named: Any) -> Any:
            result = generate(self, *arguments, **named)
            if is_patched():
                _wrap(type(self), base)
            return result

        base._set_jittable_templates = with_wrapper
    return Patch(mine=True)


def unpatch() -> None:
    """Undo :func:`patch`. Without a patch, nothing happens."""
    with _lock:
        if _State.exchanged is None:
            return
        base = _pyg("torch_geometric.nn.conv.message_passing").MessagePassing
        _exchange({new: old for old, new in _State.exchanged.items()})
        base._set_jittable_templates = _State.generate
        del _pyg("torch_geometric.edge_index").EdgeIndex.__matmul__  # torch's own again
        for kind in _taken_layers():
            original = getattr(vars(kind).get("forward"), _MARK, None)
            if original is not None:
                kind.forward = original  # type: ignore[attr-defined]
        for kind in _layer_classes(base):
            for name in ("propagate", "_orig_propagate", "_jinja_propagate"):
                original = getattr(vars(kind).get(name), _MARK, None)
                if original is not None:
                    setattr(kind, name, original)
        _State.exchanged = _State.generate = None
        clear_norms()


def _pyg(module: str) -> ModuleType:
    try:
        importlib.import_module("torch_geometric")
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch_geometric":
            raise  # PyG is installed, but one of its dependencies is missing
        raise ModuleNotFoundError(
            describe(
                "patch", "torch_geometric", "installed", "no such package",
                "Run pip install torch-geometric",
            ),
            name=error.name,
        ) from None  # fmt: skip


def _taken_layers() -> list[type]:
    """Return PyG's classes whose ``forward`` is replaced."""
    layers = _pyg("torch_geometric.nn.conv")
    return [getattr(layers, name) for name in LAYERS if "forward" in vars(getattr(layers, name))]


def _exchange(functions: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    """Bind the new function in every loaded module where the old one is bound."""
    new_of = {id(old): new for old, new in functions.items()}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            if id(value) in new_of:
                names[name] = new_of[id(value)]


def _layer_classes(base: type) -> Iterator[type]:
    """Yield every class below ``base``, each once."""
    seen: set[type] = set()
    waiting: list[type] = list(base.__subclasses__())
    while waiting:
        kind = waiting.pop()
        if kind not in seen:
            seen.add(kind)
            waiting += kind.__subclasses__()
            yield kind


def _wrap(kind: type, base: type) -> None:
    """Wrap the ``propagate`` that PyG generated for a class, but not one that a user wrote."""
    original: Any = vars(kind).get("propagate")
    if not callable(original) or hasattr(original, _MARK):
        return
    generated, given = (vars(kind).get(name) for name in ("_jinja_propagate", "_orig_propagate"))
    if original is not generated or original is given:  # if both, nothing was generated
        return
    # PyG binds the general one to a layer that is explained, and the generated one after that.
    for names in (("propagate", "_jinja_propagate"), ("_orig_propagate",)):
        replaced = cast(Callable[..., Any], vars(kind)[names[0]])
        if not hasattr(replaced, _MARK):
            wrapper = new_propagate(replaced, base, is_patched)
            setattr(wrapper, _MARK, replaced)
            for name in names:
                setattr(kind, name, wrapper)
