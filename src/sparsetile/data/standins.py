"""Named stand-ins for the large graphs of the papers, for machines that cannot download them.

A stand-in has the rows, the nonzeros and the degree shape of a published graph, not its edges;
its name says so by ending in ``-like``. Rows and nonzeros come from the papers' tables, which
``source`` names. Maximum degrees, communities and molecule counts are not in the papers: they are
set here to resemble each graph's kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sparsetile.core.checks import one_of
from sparsetile.core.errors import value_error
from sparsetile.data.graphs import molecules, road_grid
from sparsetile.data.powerlaw import power_law
from sparsetile.data.sampling import real
from sparsetile.intake.csr import CSR

__all__ = ["STAND_INS", "StandIn", "stand_in"]


@dataclass(frozen=True)
class StandIn:
    """A generator with the parameters that make it resemble a published graph.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> entry = generators.STAND_INS["reddit-like"]
    >>> entry.generator, entry.rows
    ('power_law', 232965)
    """

    name: str
    generator: str
    params: Mapping[str, Any]
    rows: int
    nnz: int
    source: str

    def scaled(self, scale: float) -> dict[str, Any]:
        """Return the generator's parameters for ``scale`` times the rows and the nonzeros.

        The mean degree and the size of communities stay. A graph too small to hold such long
        rows gets half of its cells filled instead.
        """
        params = dict(self.params)
        if self.generator == "molecules":
            params["count"] = max(round(params["count"] * scale), 1)
            return params
        rows = max(round(self.rows * scale), 1)
        params["rows"] = rows
        if self.generator == "power_law":
            loops = rows if params.get("self_loops") else 0
            nnz = min(round(self.nnz * scale), rows * (rows - 1) // 2 + loops)
            params["nnz"] = max(nnz, loops)
            mean = params["nnz"] / rows
            # The longest row keeps its length while that is under a quarter of the rows.
            room = max(rows // 4, round(params["max_degree"] * scale), int(2 * mean) + 1)
            params["max_degree"] = min(params["max_degree"], room)
            if "communities" in params:
                params["communities"] = max(round(params["communities"] * scale), 1)
        return params


_GENERATORS: dict[str, Callable[..., CSR]] = {
    each.__name__: each for each in (power_law, road_grid, molecules)
}
_VOLTRIX = "Voltrix, table 1"
_BRP = "BRP-SpMM, table I"
_RSH = "RSH-SpMM, table 1"
_ACC = "Acc-SpMM, table 2"


def _power(name: str, rows: int, nnz: int, max_degree: int, source: str, **more: Any) -> StandIn:
    params = MappingProxyType({"max_degree": max_degree, **more})
    return StandIn(name, "power_law", params, rows, nnz, source)


def _road(name: str, rows: int, nnz: int, source: str) -> StandIn:
    return StandIn(
        name, "road_grid", MappingProxyType({"mean_degree": nnz / rows}), rows, nnz, source
    )


def _union(name: str, count: int, rows: int, nnz: int, source: str, **more: Any) -> StandIn:
    params = {"count": count, "atoms": rows / count, "mean_degree": nnz / rows, **more}
    return StandIn(name, "molecules", MappingProxyType(params), rows, nnz, source)


# ``self_loops`` if the published count includes the diagonal; ``symmetric=False`` if the published
# graph is directed; ``shuffle=False`` if its numbering keeps neighbours together.
# fmt: off
_ALL = (
    _power("reddit-like", 232_965, 114_848_857, 21_000, f"{_VOLTRIX}; {_ACC}",
           exponent=2.4, communities=50, mixing=0.3, self_loops=True),
    _power("protein-like", 132_534, 79_255_038, 7_500, f"{_VOLTRIX}; {_ACC}",
           exponent=2.6, communities=40, mixing=0.2, self_loops=True),
    _power("yelp-like", 716_847, 13_954_819, 4_800, f"{_BRP} (717K rows, 14.0M nonzeros)",
           exponent=2.3, mixing=0.4),
    _power("fraudyelp-rsr-like", 45_954, 6_805_486, 2_800, f"{_ACC}; {_VOLTRIX}",
           exponent=2.3, communities=100, mixing=0.1, self_loops=True),
    _power("ddi-like", 4_267, 2_140_089, 3_500, f"{_VOLTRIX}; {_RSH}",
           exponent=2.0, communities=3, mixing=0.6, self_loops=True),
    _power("web-berkstan-like", 685_230, 7_600_595, 20_000, f"{_VOLTRIX}; {_RSH}; {_ACC}",
           exponent=2.1, communities=5_000, mixing=0.1, symmetric=False, shuffle=False),
    _power("amazon0505-like", 410_236, 4_878_875, 2_700,
           f"{_VOLTRIX} (4,878,875, the symmetric graph); {_RSH} (3,356,824, the directed one)",
           exponent=2.8, communities=20_000, mixing=0.2),
    _power("amazon0601-like", 403_394, 3_387_388, 2_700, f"{_VOLTRIX}; {_RSH}",
           exponent=2.8, communities=20_000, mixing=0.2, symmetric=False),
    _power("com-amazon-like", 334_863, 1_851_744, 550, _VOLTRIX,
           exponent=2.8, communities=20_000, mixing=0.2),
    _power("ppi-like", 56_944, 818_716, 700, _VOLTRIX, exponent=2.4, communities=24, mixing=0.1),
    _power("ogbn-arxiv-like", 169_343, 1_166_243, 13_000, f"{_BRP} (169K rows, 1.16M nonzeros)",
           exponent=2.3, symmetric=False),
    _power("flickr-like", 89_250, 899_756, 5_400, f"{_BRP} (89K rows, 899K nonzeros)",
           exponent=2.3),
    _power("questions-like", 48_921, 307_080, 1_500, f"{_BRP} (49K rows, 307K nonzeros)",
           exponent=2.1),
    _power("amazon-ratings-like", 24_492, 186_100, 130, f"{_BRP} (24K rows, 186K nonzeros)",
           exponent=3.0, communities=2_000, mixing=0.2),
    _road("roadnet-ca-like", 1_971_281, 5_533_214, _ACC),
    _road("roadnet-pa-like", 1_090_920, 3_083_796, _ACC),
    _union("yeasth-like", 79_601, 3_138_114, 6_487_230,
           f"{_RSH}; {_ACC}; {_VOLTRIX} (3,139,988 rows)", hydrogens=0.45),
    _union("yeast-like", 79_601, 1_710_902, 3_636_546,
           f"{_RSH}; {_ACC}; {_VOLTRIX} (1,714,644 rows)"),
    _union("ovcar-8h-like", 40_516, 1_889_542, 3_946_402, f"{_RSH}; {_ACC}", hydrogens=0.45),
    _union("dd-like", 1_178, 334_925, 1_686_092, f"{_VOLTRIX}; {_RSH}; {_ACC}",
           spread=0.8, reach=40),
    _union("tu-proteins-like", 1_113, 43_471, 162_088, "PROTEINS of TUDataset; no paper's table",
           spread=0.8, reach=12),
)
# fmt: on

STAND_INS: dict[str, StandIn] = {entry.name: entry for entry in _ALL}


def stand_in(name: str, scale: float = 1.0, *, seed: int = 0) -> CSR:
    """Generate the stand-in ``name``, its rows and nonzeros multiplied by ``scale``.

    Parameters
    ----------
    name : str
        A key of :data:`STAND_INS`, such as ``"reddit-like"``.
    scale : float
        Above 0, at most 4.
    seed : int
        Same seed, same matrix.

    Examples
    --------
    >>> from sparsetile.data import generators
    >>> A = generators.stand_in("reddit-like", scale=0.001)
    >>> A.shape, A.nnz
    ((233, 233), 27261)
    """
    entry = STAND_INS[one_of("stand_in", "name", name, STAND_INS)]
    scale = real("stand_in", "scale", scale, 0.0, 4.0)
    if scale == 0.0:
        raise value_error("stand_in", "scale", "above 0", 0, "Pass 1 for the published size")
    return _GENERATORS[entry.generator](**entry.scaled(scale), seed=seed)
