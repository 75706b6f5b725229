"""Draws the layer cases of ``tools.fuzz``: a layer, and the edits between its calls.

A case calls one layer two or three times. Between two calls an edit changes edges, weights or
parameters as programs do, or changes nothing. Each result must be that of the current content.
:func:`_settle` says what is not drawn, and why. Writes that torch does not count (through ``.data``
into the same memory, through ``.numpy()``, by other kernels) are drawn only with ``st.changed()``:
the docs say that these are not noticed. ``st.changed()`` is about values, so edges are not drawn
with it.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tools.fuzz_cases import CASES_OF_A_SEED, Case, draw, weighted

# Values of --kind, and the percentage of layers with "all".
KINDS = ("all", "products", "layers")
LAYERS_OF_ALL = {"cpu": 50, "cuda": 25}
# What is called, and how often. "pyg" layers are those of PyG under sparsetile.pyg.patch().
LAYERS = {
    "GCNConv": 14, "SAGEConv": 10, "GINConv": 6, "GATConv": 8, "aggregate": 10, "spmm": 12,
    "SparseLinear": 10, "MLP": 10, "pyg GCNConv": 6, "pyg SAGEConv": 5, "pyg GraphConv": 6,
    "pyg GINConv": 3,
}  # fmt: skip
WEIGHTED = ("GCNConv", "aggregate", "spmm", "pyg GCNConv", "pyg GraphConv")
WITHOUT_GRAPH = ("SparseLinear", "MLP")
WITHOUT_PARAMETERS = ("aggregate", "spmm")
MODES = {"no grad": 5, "grad": 4, "inference": 2}
OPTIMISERS = ("SGD", "AdamW", "Adam")
IMPLEMENTATIONS = ("plain", "foreach", "fused")
_STEPS = {f"{how} {name}": 2 if how == "fused" else 1
          for name in OPTIMISERS for how in IMPLEMENTATIONS}  # fmt: skip
# What an edit changes -> the edit -> how often.
EDITS: Mapping[str, Mapping[str, int]] = {
    "nothing": {"nothing": 4, "another call": 2, "clear": 1},
    "edges": {"in place": 4, "data": 3, "data twice": 3, "new": 4, "thread": 1},
    "weight": {
        "in place": 4, "element": 2, "data": 3, "data twice": 3, "new": 4, "set_": 1, "thread": 1,
        "changed": 2, "requires_grad": 1, "base": 1, "vector": 2, **_STEPS,
    },
    "parameters": {
        "in place": 3, "data": 3, "thread": 1, "changed": 2, "vector": 3, "state dict": 3,
        "state dict, assign": 1, "new": 2, **_STEPS,
    },
    "module": {
        "train": 2, "eval": 2, "cast and back": 2, "cast": 2, "deepcopy": 2, "toggle": 4,
        "prune": 3, "pattern data": 3,
    },
}  # fmt: skip
# Edits of inference tensors, which have no version counter and no gradient.
_OF_INFERENCE = {
    ("nothing", "nothing"), ("nothing", "another call"), ("edges", "in place"), ("edges", "new"),
    ("weight", "in place"), ("weight", "element"), ("weight", "new"), ("parameters", "in place"),
}  # fmt: skip


@dataclass(frozen=True)
class LayerCase:
    """One layer, its calls and the edits between them. Unused fields are drawn too."""

    seed: int
    number: int
    device: str
    layer: str
    dtype: str
    nodes: int
    edges: int
    parallel: bool
    index: str
    width: int
    out: int
    flow: str
    weight: str
    reduce: str
    bias: bool
    relu: bool
    loops: bool
    normalize: bool
    heads: int
    block: int
    activation: str
    training: bool
    inference: bool
    short_lived: bool
    tf32: bool
    modes: tuple[str, ...]
    edits: tuple[tuple[str, str], ...]
    pick: int

    @property
    def kind(self) -> str:
        return "layers"

    @property
    def system(self) -> str:
        """What is counted as having run."""
        return self.layer

    @property
    def replay(self) -> str:
        """The command that runs this case alone."""
        number = self.seed * CASES_OF_A_SEED + self.number
        return f"python -m tools.fuzz --device {self.device} --kind layers --replay {number}"

    @property
    def features(self) -> dict[str, tuple[str, ...]]:
        """What the record counts."""
        return {
            "layer": (self.layer,),
            "edit": tuple(f"{what}: {how}" for what, how in self.edits),
            "mode": self.modes,
            "layer dtype": (self.dtype,),
            "edge weight": (self.weight,),
        }


def has_pyg() -> bool:
    return importlib.util.find_spec("torch_geometric") is not None


def draw_case(seed: int, number: int, device: str, kind: str) -> Case | LayerCase:
    """Return case ``number`` of a seed; of ``kind`` "all" the number says which kind it is."""
    if kind == "all":
        share = random.Random(f"kind:{seed}:{number}").random() * 100
        kind = "layers" if share < LAYERS_OF_ALL[device] else "products"
    return (draw_layer if kind == "layers" else draw)(seed, number, device)


def draw_layer(seed: int, number: int, device: str) -> LayerCase:
    """Return layer case ``number`` of a seed, for a type of device."""
    rng = random.Random(f"layer:{seed}:{number}")
    layer, calls = weighted(rng, LAYERS), rng.choice((2, 2, 3))
    nodes = rng.choice((1, 2, 3, 5, 8, 12, 17, 25, 40, 60))
    case = LayerCase(
        seed=seed,
        number=number,
        device=device,
        layer=layer,
        dtype=weighted(rng, {"float32": 10, "float64": 6, "float16": 2, "bfloat16": 2}),
        nodes=nodes,
        edges=rng.choice((0, 1, 2, nodes, 2 * nodes, 4 * nodes)),
        parallel=rng.random() < 0.4,
        index="int32" if rng.random() < 0.1 else "int64",
        width=rng.choice((1, 2, 3, 5, 8)),
        out=rng.choice((1, 2, 4, 6, 9)),
        flow=rng.choice(("source_to_target", "source_to_target", "target_to_source")),
        weight=rng.choice(("none", "plain", "plain", "grad", "parameter")),
        reduce=rng.choice(("sum", "mean", "max", "min")),
        bias=rng.random() < 0.7,
        relu=rng.random() < 0.3,
        loops=rng.random() < 0.7,
        normalize=rng.random() < 0.8,
        heads=rng.choice((1, 2, 3)),
        block=rng.choice((16, 16, 32) if device == "cpu" else (32, 64, 64)),
        activation=rng.choice(("none", "relu")),
        training=rng.random() < 0.5,
        inference=rng.random() < 0.08,
        short_lived=rng.random() < 0.3,
        tf32=rng.random() < 0.5,
        modes=tuple(weighted(rng, MODES) for _ in range(calls)),
        edits=(),
        pick=rng.randrange(10_000),
    )
    return _settle(case, rng)


def _settle(case: LayerCase, rng: random.Random) -> LayerCase:
    """Change combinations that are not supported; each rule says why."""
    if case.layer.startswith("pyg") and not has_pyg():
        own = case.layer.removeprefix("pyg ")
        case = replace(case, layer=own if own in LAYERS else "aggregate")
    if case.layer.startswith("pyg"):  # PyG's layers take no other
        case = replace(case, index="int64")
    if case.layer not in WEIGHTED:
        case = replace(case, weight="none")
    if case.inference:
        case = replace(case, modes=("inference",) * len(case.modes))
        if case.weight != "none":
            case = replace(case, weight="plain")
    if case.edges == 0 and case.nodes == 1:
        case = replace(case, parallel=False)
    if case.weight != "none" and case.reduce in ("max", "min"):
        # Refused: which of several weighted messages of an edge is the largest.
        case = replace(case, parallel=False)
    if case.layer == "pyg GCNConv" and case.weight != "none":
        # PyG gives a gradient to each of a node's parallel self-loops; one alone has a part.
        case = replace(case, parallel=False)
    if case.layer == "spmm" and case.reduce != "sum":
        case = replace(case, parallel=False)  # a matrix has one entry for parallel edges
    if case.layer == "GATConv" and case.dtype in ("float16", "bfloat16"):
        # Scores of 16 bits: the rounding error of a softmax has no useful bound.
        case = replace(case, dtype="float32")
    if case.device == "cuda" and case.dtype == "float64" and case.pick % 2:
        case = replace(case, dtype="float32")  # the kernels of layers have no float64
    if case.device == "cuda" and case.layer in WITHOUT_GRAPH and case.pick % 3:
        case = replace(case, dtype=rng.choice(("float16", "bfloat16")))  # all that theirs have
    edits = tuple(_edit(case, rng) for _ in case.modes[1:])
    return replace(case, edits=edits)


def _edit(case: LayerCase, rng: random.Random) -> tuple[str, str]:
    """Draw an edit that applies to this case."""
    found: dict[tuple[str, str], float] = {}
    for what, hows in EDITS.items():
        if not _has(case, what):
            continue
        share = {"nothing": 1.0, "module": 1.0, "edges": 2.5, "weight": 4.0, "parameters": 2.5}
        total = sum(hows.values())
        found |= {
            (what, how): share[what] * count / total
            for how, count in hows.items()
            if _fits(case, what, how)
        }
    return rng.choices(list(found), list(found.values()))[0]


def _has(case: LayerCase, what: str) -> bool:
    if what == "edges":
        return case.layer not in WITHOUT_GRAPH
    if what == "weight":
        return case.weight != "none"
    if what in ("parameters", "module"):
        return case.layer not in WITHOUT_PARAMETERS
    return True


def _fits(case: LayerCase, what: str, how: str) -> bool:
    if case.inference:
        return (what, how) in _OF_INFERENCE
    if how == "toggle":  # sparsify_ and densify_
        return case.layer == "MLP"
    if how in ("prune", "pattern data"):
        return case.layer == "SparseLinear"
    if what == "weight" and how == "vector":
        return case.weight == "parameter"
    if what == "weight" and how == "base":  # a view that another tensor writes
        return case.weight == "plain"
    if what == "weight" and how == "set_":  # torch refuses it of leaves that need a gradient
        return case.weight == "plain"
    return True
