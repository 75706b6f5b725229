"""The prepared graph: A[target, source] as a pattern, and its plans.

Weights are not part of the pattern: new weights, in place or in a new tensor, keep its plans. A
short-lived graph gets untuned plans; see :mod:`sparsetile.nn.cache`.

One class, though long: all that it keeps is freed together, and one lock guards it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparsetile.core.protocols import SharedPlan
from sparsetile.core.streams import capturing, refuse_capture, settle
from sparsetile.intake import CSR, current_values
from sparsetile.jit.loader import current_stream_handle, device_index
from sparsetile.layers.normalise import WeightMap
from sparsetile.nn.inputs import Given
from sparsetile.plan.family import expects_many
from sparsetile.plan.modes import plain_call
from sparsetile.plan.pair import Pair, Reduction, pair_of
from sparsetile.plan.plan import Plan
from sparsetile.plan.planner import plan

__all__ = ["SHORT_LIVED_CALLS", "Graph", "Loops", "Weights", "building", "lock"]

# Cached value sets per pattern: one for each layer that shares it.
MAX_VALUES = 4
# Products after which a set of values gets its own plan, if the pattern has a plan already.
PATIENCE = 8
MAX_COUNTS = 64
# Up to this many calls a graph counts as short-lived, such as a sampled graph.
SHORT_LIVED_CALLS = 8
# Widths that share a plan: all up to this one, and above it those of one power of two.
NARROW = 32
# Entries × columns up to which torch gathers messages on a CPU if values need gradients: they fit
# into a core's cache, and a product's gradients take the host longer than torch's passes. One
# thread of a Xeon, forward and backward: 0.18 and 0.51 ms at 1,400, 0.67 and 0.64 at 64,000.
MOST_GATHERED = 2**16

Loops = Literal["keep", "replace", "append"]

# One lock for all graphs: making one may drop others.
lock = threading.RLock()


@contextlib.contextmanager
def building(device: torch.device, layer: str = "forward") -> Iterator[None]:
    """Make tensors that later calls may use, on any stream and with autograd.

    Raises during CUDA graph capture; the error begins with ``layer``.
    """
    refuse_capture(layer, device, "Call the layer once before the capture")
    with torch.inference_mode(False), torch.no_grad():
        yield
    settle(device)


class Weights(NamedTuple):
    """Values of A for one call, one per entry, and their key in the cache."""

    key: Hashable | None  # None for values of this call alone, for example if they need gradients
    values: Tensor


class Graph:
    """A pattern A[target, source] with its plans. Made by :func:`sparsetile.nn.cache.find_graph`.

    ``csr.entry_map`` maps edges (after self-loops were added) to entries; its values, if any, count
    parallel edges. ``base`` is the canonical form of a given matrix, to read its values again. A
    given plan, ``planned``, is the only one used. Plans of a ``short_lived`` graph are made without
    tuning, until :data:`SHORT_LIVED_CALLS`.

    ``loops``: what was done to self-loops. ``replace``: those given were removed, then each node
    got one, at the end of the edges. ``kept`` are the numbers of the other given edges, and
    ``loop_edge`` the last given edge that was a node's self-loop, or -1. ``append``: each node got
    one more.
    """

    has_pairs = True  # whether :meth:`pair` may find one
    captured = False  # whether a CUDA graph may read it, of a fresh one

    def __init__(
        self, csr: CSR, loops: Loops = "keep", *, kept: Tensor | None = None,
        loop_edge: Tensor | None = None, base: CSR | None = None,
        planned: Plan | SharedPlan | None = None, short_lived: bool = False,
    ) -> None:  # fmt: skip
        self.short_lived = short_lived
        self.calls = 0
        self.csr = csr if csr.values is None else csr.with_values(None)
        self.multiplicity = csr.values  # None if no two edges are parallel
        self.loops = loops
        self.planned = planned
        self.weighted = base is not None and base.values is not None  # a matrix with values
        self._rows: Tensor | None = None
        self._edges: tuple[Tensor, Tensor] | None = None
        self._edge_of: Tensor | None = None
        self._kept = kept
        self._loop_edge = loop_edge
        self._base = None if base is None else base.with_values(None)
        self._plans: dict[Hashable, OrderedDict[Hashable, Plan]] = {}
        self._pairs: dict[Hashable, Pair] = {}
        self._uses: Counter[Hashable] = Counter()
        self._values: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._row_plan: Plan | None = None
        self._derived: dict[Hashable, tuple[Tensor, ...]] = {}
        self._weight_map: WeightMap | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}  # that its tensors were read on

    def note_stream(self) -> None:
        """Remember that work of the current stream reads the graph's tensors."""
        device = self.csr.device
        if device.type == "cuda":
            handle = current_stream_handle(device_index(device))
            if handle not in self._streams:
                self._streams[handle] = torch.cuda.current_stream(device)

    def __del__(self) -> None:
        """Let go of its tensors. Plans do so themselves."""
        if "_streams" not in self.__dict__:
            return
        csr, base = self.csr, self._base
        parts = [csr.indptr, csr.indices, *csr.order_tensors(), self.multiplicity, self._rows]
        parts += [self._edge_of, self._kept, self._loop_edge, *(self._edges or ())]
        parts += [] if self._weight_map is None else self._weight_map.tensors
        parts += [] if base is None else [base.indptr, base.indices, *base.order_tensors()]
        parts += self._values.values()
        parts += [part for made in self._derived.values() for part in made]
        self._let_go(parts)

    def replaces(self, other: Graph) -> None:
        """Keep a graph that this one takes the place of if a CUDA graph may read it."""
        self._replaced = other if other.captured else None

    def _let_go(self, parts: Iterable[Tensor | None]) -> None:
        """Delay the reuse of the parts' memory until the streams that read it are done."""
        if len(self._streams) < 2:
            return
        for stream in self._streams.values():
            for part in parts:
                if part is not None:
                    part.record_stream(stream)

    @property
    def shape(self) -> tuple[int, int]:
        """(targets, sources)."""
        return self.csr.shape

    def derived(self, name: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return tensors that depend on the pattern alone, made once."""
        found = self._derived.get(name)
        if found is not None:
            return found
        if torch.compiler.is_compiling():  # which cannot trace a lock
            return make()
        with lock:
            if name not in self._derived:
                with building(self.csr.device):
                    self._derived[name] = make()
            return self._derived[name]

    # -- entries and edges ----------------------------------------------------------------------

    # Cached by hand: torch.compile cannot trace the lock of functools.cached_property.

    def _publish(self, name: str, made: object) -> None:
        """Store what was built, unless another thread was first: its result may already be in use
        on another stream, so it is never replaced."""
        if torch.compiler.is_compiling():  # which cannot trace a lock
            setattr(self, name, made)
            return
        with lock:
            if getattr(self, name) is None:
                setattr(self, name, made)

    @property
    def rows(self) -> Tensor:
        """Target of each entry, int64 [entries]."""
        if self._rows is None:
            with building(self.csr.device):
                rows = self.csr.row_ids()
            self._publish("_rows", rows)
        return self._rows  # type: ignore[return-value]

    @property
    def edges(self) -> tuple[Tensor, Tensor]:
        """(source, target) of each edge, in the order given, added self-loops last."""
        if self._edges is None:
            with building(self.csr.device):
                source, target, entry_map = self.csr.indices.long(), self.rows, self.csr.entry_map
                if entry_map is not None:
                    source, target = source[entry_map], target[entry_map]
                edges = source, target
            self._publish("_edges", edges)
        return self._edges  # type: ignore[return-value]

    @property
    def kept(self) -> Tensor | None:
        """Numbers of the given edges that are left, before the self-loops that were added; None if
        all are."""
        return self._kept

    @property
    def _order(self) -> Tensor | None:
        """Edge of each entry; None if entry k is edge k."""
        entry_map = self.csr.entry_map
        if entry_map is not None and self._edge_of is None:
            with building(self.csr.device):
                order = torch.empty_like(entry_map)
                order[entry_map] = torch.arange(entry_map.numel(), device=entry_map.device)
            self._publish("_edge_of", order)
        return self._edge_of

    @property
    def edges_of_rows(self) -> Tensor:
        """Edge of each entry, int32: what a kernel takes in place of A's columns."""
        order = self._order
        nnz, device = self.csr.nnz, self.csr.device

        def make() -> tuple[Tensor, ...]:
            numbers = torch.arange(nnz, device=device) if order is None else order
            return (numbers.to(torch.int32),)

        return self.derived("edges of rows", make)[0]

    def to_entries(self, values: Tensor) -> Tensor:
        """Bring [edges, ...] to [entries, ...]; parallel edges are summed. Differentiable."""
        entry_map = self.csr.entry_map
        if entry_map is not None and entry_map.numel() > self.csr.nnz:
            return self.csr.canonical_values(values)
        return values if self._order is None else values.index_select(0, self._order)

    # -- values ---------------------------------------------------------------------------------

    def edge_weights(self, given: Given, fill: float) -> Tensor | None:
        """Return the weight of each given edge, as :meth:`weight_map` takes them; None if all
        edges, those that were added too, have weight 1. Differentiable in what was given."""
        if given.kind != "matrix" or self._base is None:
            return given.weight
        weight = current_values(given.pattern, self._base, function="forward")
        if weight is None and self.loops == "append" and fill != 1.0:
            weight = torch.ones(self._base.nnz, device=self.csr.device)
        return weight

    def weight_map(self, differentiable: bool) -> WeightMap:
        """Return which given edge's weight each entry takes.

        Self-loops that were given keep their weight (the last one's, if a node has several).
        """
        if self._weight_map is None or (differentiable and not self._weight_map.differentiable):
            with lock, building(self.csr.device):
                made = self._weight_map or WeightMap(self.csr, self._edge_numbers())
                if made.parallel:
                    self.csr.duplicates()  # kept there
                if differentiable:
                    made.prepare_gradients()
            self._publish("_weight_map", made)
        return self._weight_map  # type: ignore[return-value]

    weight_map._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _edge_numbers(self) -> Tensor | None:
        """Number of each edge among the given ones, -1 for an added one; None if none was added."""
        if self._kept is not None and self._loop_edge is not None:
            return torch.cat([self._kept, self._loop_edge])
        if self.loops != "append":
            return None
        added = min(self.shape)
        numbers = torch.arange(self.edge_count, device=self.csr.device)
        numbers[self.edge_count - added :] = -1
        return numbers

    def keep_values(
        self, name: Hashable, values_key: Hashable, compute: Callable[[], Tensor]
    ) -> Weights:
        """Return the values called ``name``, computed unless they are cached.

        ``values_key`` is None for values that depend on the pattern alone: these are computed
        once, for all streams. Values that depend on weights are cached per stream, so that no
        stream has to wait for another. A CUDA graph computes them at each replay, and so do the
        steps that prepare its capture, which must build all that it needs.
        """
        device = self.csr.device
        fixed = values_key is None
        if fixed or device.type != "cuda":
            key: Hashable = name, values_key
        else:
            key = name, values_key, current_stream_handle(device_index(device))
        with lock:
            values = self._values.get(key)
            if (
                (values is None or not fixed)
                if capturing(device)
                else (expects_many() and not fixed)
            ):
                return Weights(None, compute())
            if values is None:
                with torch.inference_mode(False), torch.no_grad():
                    values = compute()
                if fixed:
                    settle(device)
                self._values[key] = values
                while len(self._values) > MAX_VALUES:
                    self._let_go([self._values.popitem(last=False)[1]])
            self._values.move_to_end(key)
        return Weights(key, values)

    # Not to be traced: what torch.compiler.disable does, without the import of torch._dynamo.
    keep_values._torchdynamo_disable = True  # type: ignore[attr-defined]

    def own_weights(self, given: Given, values_key: Hashable) -> Weights | None:
        """Return a matrix's own values, or how often each edge occurs; None for a plain pattern."""
        if self.weighted:
            read = functools.partial(self._matrix_values, given)
            if given.trained:
                return Weights(None, read())
            return self.keep_values("own", values_key, lambda: read().detach())
        return None if self.multiplicity is None else Weights("multiplicity", self.multiplicity)

    def _matrix_values(self, given: Given) -> Tensor:
        assert self._base is not None
        values = current_values(given.pattern, self._base, function="forward")
        assert values is not None
        return values

    def edge_counts(self) -> Tensor:
        """Return the number of edges of each target, with parallel ones, float64 [targets]."""
        if self.multiplicity is None:
            return self.csr.row_lengths().double()
        return self.csr.row_sums(self.multiplicity.double())

    @property
    def edge_count(self) -> int:
        """Number of edges, with added self-loops and parallel edges."""
        entry_map = self.csr.entry_map
        return self.csr.nnz if entry_map is None else entry_map.numel()

    def edges_of_entries(self) -> Tensor | None:
        """Return how many edges each entry stands for, float32 [entries]; None if all are one.

        A given plan does not count them itself.
        """
        if self.multiplicity is not None:
            return self.multiplicity.float()
        entry_map = self.csr.entry_map
        if entry_map is None or entry_map.numel() == self.csr.nnz:
            return None
        # Sums of whole numbers are exact in any order.
        ones = torch.ones(entry_map.numel(), device=entry_map.device)
        return torch.zeros(self.csr.nnz, device=entry_map.device).index_add_(0, entry_map, ones)

    def mean_weights(self) -> Weights:
        """Return values that make a sum the mean over edges, with parallel ones."""

        def compute() -> Tensor:
            assert self.multiplicity is not None
            edges = self.multiplicity.double()  # float32 would be too coarse for float64 products
            return edges / self.edge_counts().index_select(0, self.rows)

        return self.keep_values("mean", None, compute)

    # -- products -------------------------------------------------------------------------------

    def aggregate(
        self, x: Tensor, weights: Weights | None = None, *, reduce: str = "sum",
        bias: Tensor | None = None, relu: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return relu(A·x + bias), or A's other reductions of x, at each target.

        Without ``weights`` every entry counts as 1. A given plan uses its own values.
        """
        if self.planned is not None:
            return self.planned.run(
                self.planned.permute(x), reduce=reduce, bias=bias, relu=relu,
                values=None if weights is None else weights.values,
            )  # fmt: skip
        if weights is not None and self._gathers(x, weights.values, reduce):
            out = self._gathered(x, weights.values, reduce)
            out = out if bias is None else out + bias
            return out.relu() if relu else out
        made, key = self._plan(x.shape[-1], x.dtype, weights)
        values = None
        if weights is not None and (weights.key is None or weights.key != key):
            values = weights.values
        return made.run(x, values=values, reduce=reduce, bias=bias, relu=relu)

    def gathers(self, numbers: int, dtype: torch.dtype) -> bool:
        """Whether torch computes an eager sum of so many numbers sooner, with its gradients."""
        return (
            numbers <= MOST_GATHERED
            and self.csr.device.type == "cpu"
            and dtype.itemsize > 2
            and torch.is_grad_enabled()
            and plain_call()
            and not torch.is_autocast_enabled("cpu")
        )

    def _gathers(self, x: Tensor, values: Tensor, reduce: str) -> bool:
        return (
            values.requires_grad
            and x.dim() == 2
            and x.dtype is values.dtype
            and reduce in ("sum", "mean")
            and self.gathers(self.csr.nnz * x.shape[1], x.dtype)
        )

    def _gathered(self, x: Tensor, values: Tensor, reduce: str) -> Tensor:
        """Return the sum or mean by torch's operations."""
        messages = x.index_select(0, self.csr.indices) * values.unsqueeze(-1)
        out = x.new_zeros(self.shape[0], x.shape[1]).index_add(0, self.rows, messages)
        if reduce == "sum":
            return out
        return out / self.csr.row_lengths().clamp(min=1).unsqueeze(-1)

    def gradient(
        self, grad: Tensor, weights: Weights | None = None, *, reduce: str = "sum"
    ) -> Tensor:
        """Return the gradient of :meth:`aggregate`'s sum or mean for x, not differentiable."""
        made, key = self._plan(grad.shape[-1], grad.dtype, weights)
        values = None
        if weights is not None and (weights.key is None or weights.key != key):
            values = weights.values
        return made.gradient(grad, values=values, reduce=reduce)

    def rows_plan(self, n: int, differentiable: bool) -> tuple[list[Tensor], str]:
        """Return the flat plan whose rows graph attention walks, ``n`` columns wide.

        It uses the exact system, so one plan serves all widths. With ``differentiable`` it has its
        transpose.
        """
        made = self.planned
        if not isinstance(made, Plan):
            made = self._row_plan if self._row_plan is not None else self._make_row_plan(n)
        return made.flat_with_transpose() if differentiable else made.flat

    def _make_row_plan(self, n: int) -> Plan:
        with lock:
            if self._row_plan is None:
                with building(self.csr.device):
                    made = plan(self.pattern, n, dtype=torch.float32, tune="none")
                self._row_plan = made
            return self._row_plan

    _make_row_plan._torchdynamo_disable = True  # type: ignore[attr-defined]

    def pair(
        self, width: int, dtype: torch.dtype, reduce: str, name: Hashable,
        weights: Callable[[], Weights | None], differentiable: bool,
    ) -> Reduction | None:  # fmt: skip
        """Return a product of x of this width, with its gradient if it is ``differentiable``; None
        if only :meth:`aggregate` computes it.

        ``name`` stands for the weights, which are looked up if no product with them is known; None
        for none.
        """
        if self.planned is not None:
            return None
        if torch.is_autocast_enabled(self.csr.device.type) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(self.csr.device.type)
        key = (
            name, width, dtype, reduce, differentiable,
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        found = self._pairs.get(key)
        if found is not None and not self.short_lived and found.current():
            return found
        given = weights()
        if given is not None and given.key is None:
            return None
        made, values = self._plan(width, dtype, given)
        if given is not None and given.key != values:
            return None  # they come with each product
        found = pair_of(made, reduce, differentiable)
        if found is not None:
            if len(self._pairs) >= MAX_COUNTS:
                self._pairs.clear()
            self._pairs[key] = found
        return found

    def _plan(
        self, width: int, dtype: torch.dtype, weights: Weights | None
    ) -> tuple[Plan, Hashable]:
        """Return a plan for products of this width and type, and the key of its values.

        Values without a key are passed to a plan at each product. The others get a plan of their
        own: at once if there is no plan yet, otherwise after ``PATIENCE`` uses.
        """
        device = self.csr.device
        if torch.is_autocast_enabled(device.type) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        # An untuned plan serves every width.
        short_lived = self._still_short_lived(device)
        width = max(NARROW, 1 << (max(width, 1) - 1).bit_length())
        key = None if weights is None else weights.key
        # A plan with values cannot serve as a plan of the pattern, so both kinds are separate.
        kind = (
            0 if short_lived else width, dtype, weights is not None,
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        with lock:
            plans = self._plans.setdefault(kind, OrderedDict())
            if key not in plans:
                if len(self._uses) > MAX_COUNTS:  # weights that change at every step leave counts
                    self._uses.clear()
                self._uses[kind, key] += 1
                if plans and (key is None or self._uses[kind, key] <= PATIENCE):
                    key = next(reversed(plans))
                    return plans[key], key
                with building(device):
                    values = None
                    if weights is not None and key is not None:
                        values = weights.values.to(dtype)
                    made = plan(
                        self.pattern.with_values(values), width, dtype=dtype,
                        tune="none" if short_lived else "model",
                    )  # fmt: skip
                plans[key] = made
                self._uses.clear()
                while len(plans) > MAX_VALUES:
                    plans.popitem(last=False)
                    self._pairs.clear()
            plans.move_to_end(key)
            return plans[key], key

    _plan._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _still_short_lived(self, device: torch.device) -> bool:
        """Whether plans are still made without tuning. When that ends, drops the untuned plans."""
        if not self.short_lived or self.calls <= SHORT_LIVED_CALLS:
            return self.short_lived
        if capturing(device):
            return True  # no plan can be made now
        with lock:
            self.short_lived = False
            self._plans.clear()
            self._pairs.clear()
        return False

    @property
    def pattern(self) -> CSR:
        """The pattern for plans, whose values are one per entry."""
        csr = self.csr
        return CSR(csr.indptr, csr.indices, None, csr.shape, checked=csr.checked)
