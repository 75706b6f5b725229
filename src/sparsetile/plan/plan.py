"""Plan: everything about a product that does not depend on B, decided once, run many times.

Made by ``planner.plan()``, which may synchronise, compile and allocate. ``Plan.run`` allocates C
and launches on torch's current stream. Where nothing has to be traced or differentiated, it calls
the system directly and skips torch's dispatcher, which alone would cost more than the launch.

One class, longer than a file should be: its methods are the interface, and most of its lines are
their docstrings. What they do at length is in modules of its own: values in ``values.py`` and
``updates.py``, the general way of a product in ``products.py``, transpose and autocast in
``derived.py``, facts in ``report.py``, moves and copies in ``placement.py``.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsetile.core.device import machine
from sparsetile.core.errors import type_error
from sparsetile.core.streams import record_stream, refuse_capture, settle
from sparsetile.intake import CSR
from sparsetile.intake.csr import FP8, PRODUCT_DTYPES
from sparsetile.jit.loader import current_stream_handle
from sparsetile.plan import report as reports
from sparsetile.plan.derived import PLANNING, for_eager, planned_transpose
from sparsetile.plan.devices import usable_device
from sparsetile.plan.dispatch import lasting, plain_call, transforming
from sparsetile.plan.explain import explain
from sparsetile.plan.files import write_plan_file
from sparsetile.plan.flat import Direction, flatten
from sparsetile.plan.gradients import differentiable_product, plain_product
from sparsetile.plan.linear import linear
from sparsetile.plan.operands import check_epilogue, check_operand, check_values
from sparsetile.plan.products import general_product
from sparsetile.plan.transforms import refuse_in_transform
from sparsetile.plan.updates import set_values, take_values
from sparsetile.plan.values import HeldValues, canonical, picked
from sparsetile.plan.widths import Widths
from sparsetile.reorder import Permutation
from sparsetile.reorder.permutation import positions
from sparsetile.systems import BuiltSystem, Request, runner
from sparsetile.systems.base import Bound, Tensors
from sparsetile.systems.registry import exact_part, exact_system
from sparsetile.tune import floor_seconds

__all__ = ["Plan"]

# Streams and versions of values for which the allocator need not be told again.
_NOTED = 64
# Subclasses may override what operators do.
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class Plan(torch.nn.Module):
    """A sparse matrix prepared for products of about one width. Made by :func:`sparsetile.plan`.

    A plan is a module without parameters: as an attribute of another module it follows its
    ``to()``, ``cuda()``, ``half()`` and so on, and adds nothing to its state dict.

    Attributes
    ----------
    shape : tuple of int
        (M, K) of A.
    n : int
        Width that was planned for; other widths work too. A plan made without ``n`` plans for
        each width that it meets and keeps the most recent ones.
    dtype : torch.dtype
        Type of B, of A's values and of C.
    device : torch.device
    system, reorder : str
        What was chosen.
    column_order : Tensor [K] or None
        With ``reorder_columns=True``: the row of B that belongs at each position; see
        :meth:`permute`.

    Examples
    --------
    >>> import torch
    >>> import sparsetile as st
    >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
    >>> plan = st.plan(A, n=2)
    >>> plan
    Plan(2x3, 3 entries, weighted, n=2, float32, cpu, system=cpu)
    >>> plan @ torch.ones(3, 2)
    tensor([[3., 3.],
            [3., 3.]])
    """

    _castable = True  # whether autocast may have the plan in its own type

    def __init__(
        self,
        csr: CSR,
        n: int,
        dtype: torch.dtype,
        built: BuiltSystem,
        permutation: Permutation,
        *,
        deterministic: bool,
        report: Mapping[str, Any],
        column_order: Tensor | None = None,
        direction: Direction | None = None,
    ) -> None:
        super().__init__()
        self.shape = csr.shape
        self.n = n
        self.dtype = dtype
        self.device = csr.device
        self.system = built.system
        self.reorder = permutation.name
        self.deterministic = deterministic
        self.column_order = column_order
        self._csr = csr.with_values(None)
        self._built = built
        self._permutation = permutation
        self._report = dict(report)
        self._runner = runner(built.recipe)
        self._direction = direction or self._make_direction()
        # Replaced as one: a product must not see tensors and recipe of two states.
        self._flat = flatten(self._direction, None, None, None)
        self._order: Tensor | None = None
        self._scale: Tensor | None = None  # of rows, for gradients of means
        self._transposed: Plan | None = None
        self._origin: weakref.ref[Plan] | None = None  # the plan that this is the transpose of
        self._mirrors = False  # A is known to equal its transpose (derived.py)
        self._mirror_captured = False  # a CUDA graph takes that for granted
        self._as_planned = True  # values are those of the matrix that was planned
        self._casts: dict[torch.dtype, Plan] = {}  # the same in types that autocast asked for
        self._wider: weakref.ref[Plan] | None = None  # the plan that has this one among its casts
        self._held = HeldValues(self._runner, built.tensors, dtype)
        self._keep_widths(None)
        self._bound: Bound | None = None
        self._value_version = 0  # gradients must meet the values that their product had
        self._streams: set[tuple[int, ...]] = set()  # see _note_stream
        set_values(self, None if csr.values is None else csr.values.detach())
        settle(self.device)  # from now on products may run on any stream

    def _keep_widths(self, widths: Widths | None) -> None:
        """Plan for other widths, too, or (None) for one."""
        self._widths = widths
        # What every product compares, read at once: a module's attributes are slow to read.
        place = self.device.type
        self._key = (self.dtype, self.device, place, self.shape[1], self._held, widths)

    def _make_direction(self) -> Direction:
        exact = exact_system(self.device.type)
        if exact.name == self.system:
            return Direction(self._csr.indptr, self._built, self._built)
        found = exact_part(self._built)
        if found is None:
            request = Request(self._csr, self.n, self.dtype, self._permutation, self.deterministic)
            found = exact.build(request)
        return Direction(self._csr.indptr, self._built, found)

    @property
    def flat(self) -> tuple[list[Tensor], str]:
        """What torch's operators take: all tensors, and the recipe that names them.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> tensors, recipe = plan.flat
        >>> len(tensors) > 0, type(recipe).__name__
        (True, 'str')
        """
        return self._flat

    @property
    def _tensors(self) -> list[Tensor]:
        return self._flat[0]

    @property
    def _recipe(self) -> str:
        return self._flat[1]

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch's allocator that work on ``stream`` reads the plan's tensors.

        Products do this themselves. Needed only if kernels of your own read tensors of
        :attr:`flat` on another stream and the plan may be freed before they are done; like
        ``torch.Tensor.record_stream``. Does nothing on the CPU.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> plan = st.plan(torch.eye(2).to_sparse_csr(), n=2)
        >>> print(plan.record_stream(None))  # a stream where the plan is on a GPU
        None
        """
        if self.device.type == "cuda":
            for tensor in self._read_tensors():
                if tensor is not None:
                    tensor.record_stream(stream)
            if self._transposed is not None:
                self._transposed.record_stream(stream)
            others = [] if self._widths is None else self._widths.plans()
            for other in (*others, *self._casts.values()):
                other.record_stream(stream)

    def _note_stream(self) -> None:
        """Before a product through torch's operators: do what ``record_stream`` does, once for the
        current stream and what is held now. Bound products do it themselves."""
        if self.device.type == "cuda" and not torch.compiler.is_compiling():
            stream = current_stream_handle(self.device.index)
            # What is built is never replaced, except by new values: counts tell it apart.
            note = (
                stream, self._value_version, len(self._flat[0]), self._held.cast_count,
                self._scale is None, self._order is None, self._csr.has_duplicates_kept,
            )  # fmt: skip
            if note not in self._streams:
                if len(self._streams) >= _NOTED:
                    self._streams.clear()
                record_stream(self._read_tensors(), self.device)
                self._streams.add(note)

    def _read_tensors(self) -> list[Tensor | None]:
        """What products read, of any kind, as far as it is built."""
        return [
            *self._flat[0], *self._held.tensors(), *self._csr.order_tensors(), self._scale,
            self._order,
        ]  # fmt: skip

    # -- values ---------------------------------------------------------------------------------

    @property
    def nnz(self) -> int:
        """Stored entries of A, duplicates summed.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> plan.nnz
        3
        """
        return self._csr.nnz

    @property
    def values(self) -> Tensor | None:
        """A's values by rows, then columns in the plan's numbering; None for a pattern.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> plan.values
        tensor([1., 2., 3.])
        """
        return self._held.now

    def update_values(self, values: Tensor) -> Plan:
        """Replace A's values, keeping the pattern and everything planned for it.

        Parameters
        ----------
        values : Tensor [entries]
            One value per entry of the matrix that was planned, in that matrix's own order
            (before sorting and summing of duplicates). If it requires grad, later products follow
            it: gradients flow into it and its changes are seen. Otherwise it is copied in place,
            so that CUDA graphs captured with this plan see the new values. The plan follows the
            tensor itself, not a module's attribute: if ``load_state_dict(assign=True)`` or another
            assignment replaces the Parameter, call this again, or pass the new Parameter as
            ``values=`` to :meth:`run`. Values given to :attr:`T`, in the order of the transpose's
            entries, become the plan's values too.
            If a captured graph computes gradients of a symmetric A, new values must be symmetric
            too. To avoid that, read :attr:`T` once before the capture.

        Returns
        -------
        Plan
            The plan itself.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> plan.update_values(torch.tensor([10.0, 20.0, 30.0])) @ torch.ones(3, 1)
        tensor([[30.],
                [30.]])
        """
        check_values("update_values", self, values)
        if transforming():
            raise refuse_in_transform("update_values", "values", "Pass values= to run instead")
        origin = self._alive_origin()
        if origin is None:
            take_values(self, functools.partial(canonical, values, self._csr), values)
        else:
            back = origin._entries_of_transpose()
            take_values(origin, functools.partial(picked, values, back), values)
        return self

    def _alive_origin(self) -> Plan | None:
        return None if self._origin is None else self._origin()

    def _entries_of_transpose(self) -> Tensor:
        """Where each entry of A is among those of its planned transpose."""
        if self._order is None:
            raise RuntimeError("plan: the transpose was planned without its order")
        return positions(self._order)

    def _values_transposed(self) -> Tensor | None:
        return None if self._held.held is None else self._held.held[self._order]

    def operand_values(
        self, dtype: torch.dtype, given: Tensor | None = None
    ) -> tuple[Tensor | None, Tensors | None]:
        """Return A's canonical values, or ``given`` ones, in ``dtype``, and their packed copies.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> values, packed = plan.operand_values(torch.float64)
        >>> values
        tensor([1., 2., 3.], dtype=torch.float64)
        """
        return self._held.operands(dtype, given)

    # -- products -------------------------------------------------------------------------------

    def run(
        self,
        B: Tensor,
        out: Tensor | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        reduce: str = "sum",
        values: Tensor | None = None,
        bias: Tensor | None = None,
        relu: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return C = alpha · A·B (+ beta · out), or relu(alpha · A·B + bias).

        Parameters
        ----------
        B : Tensor [..., K, N] or [K]
            Dense, of the plan's dtype, any strides; leading dimensions are batches. A vector gives
            a vector. With ``reorder_columns=True`` pass ``plan.permute(B)``.
        out : Tensor [..., M, N] or [M], optional
            Written in place and returned; not differentiable.
        alpha, beta : float
            Scale of the product and of what ``out`` held. ``beta`` needs ``out``. With max and min,
            ``alpha`` scales the result: alpha · max(…), even if it is negative.
        reduce : {"sum", "mean", "max", "min"}
            How the entries of a row are combined. ``add``, ``amax`` and ``amin`` are accepted
            too. Empty rows give 0.
        values : Tensor [entries], optional
            Values for this product only, in the order of the matrix that was planned; gradients
            flow into them. The plan's own values when None.
        bias : Tensor [N], optional
            Added to every row. Cannot be combined with ``out``, max or min.
        relu : bool
            Replace negative results by 0. Cannot be combined with ``out``, max or min.
        out_dtype : torch.dtype, optional
            Type of C; B's dtype when None. A 16-bit product can return its FP32 sums
            (``torch.float32``). A float8 product returns bfloat16 (when None), float16 or
            float32, and ``alpha`` is its scale.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> B = torch.ones(3, 2)
        >>> plan.run(B, alpha=2.0, bias=torch.tensor([0.5, -7.0]), relu=True)
        tensor([[6.5000, 0.0000],
                [6.5000, 0.0000]])
        >>> plan.run(B, reduce="mean")
        tensor([[1.5000, 1.5000],
                [3.0000, 3.0000]])
        >>> out = torch.ones(2, 2)
        >>> plan.run(B, out=out, beta=1.0)
        tensor([[4., 4.],
                [4., 4.]])
        """
        dtype, device, place, columns, held, widths = self._key
        if widths is not None and (plan := widths.plan_for(self, B)) is not self:
            return plan.run(
                B, out, alpha=alpha, beta=beta, reduce=reduce, values=values, bias=bias, relu=relu,
                out_dtype=out_dtype,
            )  # fmt: skip
        if (
            out is None
            and beta == 0.0
            and out_dtype is None
            and values is None
            and reduce in ("sum", "mean")
            and type(B) in _PLAIN_TYPES
            and B.dim() == 2
            and B.layout is torch.strided
            and (B.shape[0] == columns) is True  # torch.jit.trace has tensors for sizes
            and B.device == device
            and held.follow is None
            and (dtype is not FP8 or (bias is None and not relu and reduce == "sum"))
            and plain_call()
            and not B.is_neg()  # not seen while tracing
            and (eager := for_eager(self, B, dtype, place)) is not None
        ):
            # What eager code calls nearly always: without the dispatcher.
            if eager is not self:
                dtype = eager.dtype
            if B.dtype is not dtype:
                B = B.to(dtype)
            tracked = B.requires_grad
            if bias is not None or relu is not False:
                check_epilogue(B, None, reduce, bias, relu, None)
                if bias is not None:
                    bias = bias.resolve_neg()
                    tracked = tracked or bias.requires_grad
            if not (tracked and torch.is_grad_enabled()):
                return plain_product(eager, B, bias, reduce, alpha, relu)
            if dtype is not FP8:
                return differentiable_product(eager, B, bias, reduce, alpha, relu)
        if isinstance(B, Tensor) and B.dim() == 1:
            column = out.unsqueeze(-1) if isinstance(out, Tensor) else out
            C = self.run(
                B.unsqueeze(-1), column, alpha=alpha, beta=beta, reduce=reduce, values=values,
                bias=bias, relu=relu, out_dtype=out_dtype,
            )  # fmt: skip
            return C.squeeze(-1) if out is None else out
        if values is not None:
            check_values("run", self, values)
            values = self._csr.canonical_values(values)
        return general_product(self, B, out, alpha, beta, reduce, values, bias, relu, out_dtype)

    def linear(
        self,
        X: Tensor,
        *,
        bias: Tensor | None = None,
        relu: bool = False,
        alpha: float = 1.0,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return Y = relu(alpha · X·Aᵀ + bias), a linear layer whose weight is A.

        With ``bcsr``, one kernel reads X and writes Y without transposing either; if a block is not
        full, a second kernel checks for non-finite sums. Other systems, and calls that need
        gradients, use :meth:`run` with torch operations around it.

        Parameters
        ----------
        X : Tensor [..., K]
            Of the plan's dtype; row-major is fastest. With ``reorder_columns=True`` its last
            dimension must be in the order of :attr:`column_order`.
        bias : Tensor [M], optional
            Added before the result is rounded and stored.
        relu : bool
            Replace negative results by 0.
        alpha : float
            Scale of the product; in float8 the product of the operands' scales.
        out_dtype : torch.dtype, optional
            As in :meth:`run`.

        Returns
        -------
        Tensor [..., M]
            Row-major.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> plan.linear(torch.ones(1, 3), bias=torch.tensor([1.0, -9.0]), relu=True)
        tensor([[4., 0.]])
        """
        return linear(self, X, bias, relu, alpha, out_dtype)

    @property
    def fuses_linear(self) -> bool:
        """Whether :meth:`linear` is one kernel if no gradients are needed.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> plan.fuses_linear
        False
        """
        return self._runner.fuses_linear and not transforming()

    def forward(self, B: Tensor, **options: Any) -> Tensor:
        """Return A·B: ``plan(B)`` is ``plan.run(B)``, with the same options.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> torch.nn.Sequential(st.plan(A, n=2), torch.nn.ReLU())(-torch.ones(3, 2))
        tensor([[0., 0.],
                [0., 0.]])
        """
        return self.run(B, **options)

    def __matmul__(self, B: Tensor) -> Tensor:
        """Return A·B: ``plan @ B`` is ``plan.run(B)``."""
        return self.run(B)

    def __rmatmul__(self, left: Any) -> Tensor:
        raise type_error(
            "plan", "operands", "plan @ B", f"{type(left).__name__} @ plan",
            "Write plan @ B, or plan.T for the transpose",
        )  # fmt: skip

    def permute(self, B: Tensor) -> Tensor:
        """Return B in the order that this plan expects.

        With ``reorder_columns=True`` that is a copy with permuted rows, otherwise B itself, so that
        ``plan @ plan.permute(B)`` is A·B for every plan. Differentiable: gradients of B come back
        in B's own order.

        Parameters
        ----------
        B : Tensor [..., K, N]
            Rows in the order of A's columns, on the plan's device, of any dtype.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=1, reorder_columns=True)
        >>> B = torch.tensor([[1.0], [10.0], [100.0]])
        >>> plan.column_order
        tensor([0, 2, 1])
        >>> plan @ plan.permute(B)
        tensor([[201.],
                [300.]])
        """
        check_operand(self, B, "permute")
        return B if self.column_order is None else B.index_select(-2, self.column_order)

    def unpermute(self, B: Tensor) -> Tensor:
        """Undo :meth:`permute`: ``plan.unpermute(plan.T @ G)`` is Aᵀ·G for every plan.

        Parameters
        ----------
        B : Tensor [..., K, N]
            Rows in the order of :attr:`column_order`, on the plan's device, of any dtype.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=1, reorder_columns=True)
        >>> plan.unpermute(plan.T @ torch.ones(2, 1))
        tensor([[1.],
                [0.],
                [5.]])
        """
        check_operand(self, B, "unpermute")
        if self.column_order is None:
            return B
        return B.index_select(-2, positions(self.column_order))

    __array_ufunc__ = None  # leaves `plan @ ndarray` to __matmul__, whose error says what to do

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # torch.compile traces `plan @ B` as Tensor.matmul(B, plan), operands swapped, because it
        # looks for a tensor first. Outside of tracing only `B @ plan` and torch.xxx(plan) come
        # here, and those are mistakes.
        name = getattr(func, "__name__", "")
        if torch.compiler.is_compiling() and name in ("matmul", "__matmul__", "__rmatmul__"):
            left, right = args
            return left.run(right) if isinstance(left, Plan) else right.run(left)
        raise TypeError(
            f"plan: operands must be plan @ B, got {name} of {len(args)} arguments. "
            "Write plan @ B, or plan.T for the transpose."
        )

    # -- transpose and gradients ----------------------------------------------------------------

    @lasting
    def _transpose(self) -> Plan:
        with PLANNING:
            return planned_transpose(self)

    def _has_transpose(self) -> bool:
        """Plan the transpose; what a tracer calls, which then reads it where it is kept."""
        self._transpose()
        return True

    # What torch.compiler.assume_constant_result does, without the 1.5 s import of torch._dynamo.
    _has_transpose._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @lasting
    def _prepare_gradients(self) -> bool:
        """Plan the transpose and put it into the flat tensors; once, also while tracing."""
        if len(self._tensors) > len(self._direction.tensors()):
            return True
        with PLANNING:
            if len(self._tensors) == len(self._direction.tensors()):
                refuse_capture("run", self.device, "Compute a gradient once before the capture")
                transposed, inverse = self._transpose(), self._entries_of_transpose().long()
                order = None if self._order is None else self._order.long()
                flat = flatten(self._direction, transposed._direction, order, inverse)
                settle(self.device)
                self._flat = flat
        return True

    _prepare_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @property
    def T(self) -> Plan:
        """The planned transpose: ``plan.T @ G`` is Aᵀ·G. Planned at first use, then kept.

        It has the values of the plan it comes from, also when those change later, and its own
        transpose is that plan. With ``reorder_columns=True`` its results have the row order of the
        permuted B; :meth:`unpermute` restores the order of A's columns.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> plan.T @ torch.ones(2, 1)
        tensor([[1.],
                [0.],
                [5.]])
        """
        if torch.compiler.is_dynamo_compiling():
            # Planned before it is first read: a tracer takes what it has read to be constant.
            origin = self._has_transpose() and self._alive_origin()
            return origin or self._transposed  # type: ignore[return-value]
        return self._transpose() if self._transposed is None else self._transposed

    def _following_transposed(self) -> Callable[[], Tensor | None] | None:
        """What the transpose follows: the values that this plan follows, if any."""
        return None if self._held.follow is None else self._follow_transposed

    def _follow_transposed(self) -> Tensor | None:
        values = self.values
        if values is None:
            return None
        self._note_stream()
        return values[self._order]

    # -- reports --------------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """What was planned, as plain data: sizes, choices, times in seconds, bytes.

        ``seconds`` has the time of each stage; ``build`` splits the stage of that name into format
        and schedule. ``bytes`` has what each part takes now: a planned transpose adds its own.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> plan.info["system"], plan.info["nnz"], plan.info["reorder"]
        ('cpu', 3, 'identity')
        >>> sorted(plan.info["seconds"])
        ['build', 'compile', 'intake', 'reorder']
        """
        return reports.info(self)

    @property
    def _weighted(self) -> bool:
        return self._held.held is not None

    def _parts(self) -> dict[str, Tensors]:
        return reports.all_parts(self)

    def floor(self) -> tuple[float, str]:
        """Return the floor, the least seconds the device allows, and the term that sets it.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> seconds, term = plan.floor()
        >>> seconds > 0
        True
        """
        found = floor_seconds(
            self._csr.with_values(self._held.held), self.n, self.dtype, machine(self.device),
            self._permutation.perm,
        )  # fmt: skip
        return found.seconds, found.term

    def explain(self) -> str:
        """Return each stage's choice and cost, and why this system was chosen, as text.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> print(plan.explain())
        Plan(2x3, 3 entries, weighted, n=2, float32, cpu, system=cpu)
          intake    3 entries in canonical CSR, ... ms
          reorder   identity, ... ms
          ...
          cpu       chosen: predicted ... ms a product
          ...
          acc       rejected: runs on cuda, A is on cpu
          ...
        """
        return explain(repr(self), self.info, self.floor())

    # -- devices and copies ---------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Plan:
        """Move the plan to another device or dtype, in place, and return it.

        The row order is kept. Between the CPU and a GPU, and to another dtype, tiles and schedule
        are built again; if the system cannot run there, the plan switches to the one that is
        predicted to be fastest. Trainable values that the plan follows stay where they are, and
        are copied at each product if they are on another device.

        Parameters
        ----------
        *args, **kwargs
            As ``torch.nn.Module.to``: a device, a dtype, both, or a tensor that has both.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> plan.to(torch.float64)
        Plan(2x3, 3 entries, weighted, n=2, float64, cpu, system=cpu)
        >>> plan.to("cuda" if torch.cuda.is_available() else "cpu").device.type in ("cuda", "cpu")
        True
        """
        first = args[0] if args else kwargs.get("device")
        if isinstance(first, (str, torch.device)):
            usable_device("to", first)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        self._place(self.device if device is None else usable_device("to", device), dtype)
        return self

    def _place(self, device: torch.device, dtype: torch.dtype | None) -> None:
        from sparsetile.plan.placement import move

        if dtype is not None and dtype not in PRODUCT_DTYPES:
            names = ", ".join(str(each) for each in PRODUCT_DTYPES)
            raise type_error("to", "dtype", f"one of {names}", dtype, "Choose one of those")
        origin = self._alive_origin()
        move(self if origin is None else origin, device, self.dtype if dtype is None else dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Plan:
        """What ``to()``, ``cuda()``, ``half()``… of a module that holds the plan call."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        self._place(usable_device("to", probe.device), probe.dtype)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        from sparsetile.plan.placement import reduced

        return reduced(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        from sparsetile.plan.placement import copied

        return copied(self, memo)

    def __repr__(self) -> str:
        rows, cols = self.shape
        kind = "weighted" if self._weighted else "pattern"
        return (
            f"Plan({rows}x{cols}, {self.nnz} entries, {kind}, "
            f"n={self.n if self._widths is None else 'any'}, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.device}, system={self.system})"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a safetensors file that :func:`sparsetile.load_plan` reads.

        Examples
        --------
        >>> import torch
        >>> import sparsetile as st
        >>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
        >>> plan = st.plan(A, n=2)
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plan.save(f"{folder}/a.safetensors")
        ...     again = st.load_plan(f"{folder}/a.safetensors")
        >>> B = torch.randn(3, 2)
        >>> torch.equal(again @ B, plan @ B)
        True
        """
        from sparsetile.plan.placement import on_file

        write_plan_file(path, *on_file(self))
