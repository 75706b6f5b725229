"""Plan: everything about a product that does not depend on B, decided once, run many times.

Made by ``planner.plan()``, which may synchronise, compile and allocate. ``Plan.run`` allocates C
and launches on torch's current stream. A plan is one direction of a family (``family.py``), which
has what was built; ``plan.T`` is the other direction of the same family. Products are in
``eager.py``. This file has the public methods; most of its lines are their docstrings.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from sparsetile.core.device import machine
from sparsetile.core.errors import type_error, value_error
from sparsetile.intake.csr import COMPLEX, CSR, PRODUCT_DTYPES
from sparsetile.launch.interface import Tensors
from sparsetile.plan import report as reports
from sparsetile.plan.arrays import array_like, as_operand, is_array
from sparsetile.plan.complex_products import complex_product
from sparsetile.plan.devices import usable_device
from sparsetile.plan.eager import (
    eager_product,
    general_product,
    gradient_of_operand,
    operand_values,
)
from sparsetile.plan.explain import explain
from sparsetile.plan.family import Family
from sparsetile.plan.files import write_plan_file
from sparsetile.plan.linear import linear
from sparsetile.plan.modes import PLAIN_TYPES, plain_call, transforming
from sparsetile.plan.operands import check_operand, check_values
from sparsetile.plan.saved import copied, on_file, reduced, restored
from sparsetile.plan.traced.transforms import refuse_in_transform
from sparsetile.plan.variant import Variant
from sparsetile.reorder.permutation import positions
from sparsetile.tune import floor_seconds

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

__all__ = ["Plan"]

_Read = TypeVar("_Read", bound=Callable[..., Any])
_Kind = TypeVar("_Kind")


# Types that the parts of complex numbers have.
_PARTS = tuple(COMPLEX.values())

_SETUP = """\
>>> import torch
>>> import sparsetile as st
>>> A = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]).to_sparse_csr()
>>> plan = st.plan(A, n=2)
"""


def _example(shown: str) -> Callable[[_Read], _Read]:
    """Add to a fact's docstring how a plan shows it."""

    def decorate(read: _Read) -> _Read:
        text = inspect.cleandoc(str(read.__doc__))
        read.__doc__ = f"{text}\n\nExamples\n--------\n>>> plan.{read.__name__}\n{shown}"
        return read

    return decorate


def _with_setup(kind: type[_Kind]) -> type[_Kind]:
    """Begin the example of each method with the lines that make its plan: sources omit them."""
    for member in vars(kind).values():
        if isinstance(member, (property, FunctionType)):
            head, mark, example = inspect.cleandoc(member.__doc__ or "").partition("--------\n>>> ")
            if mark:
                member.__doc__ = f"{head}--------\n{_SETUP}>>> {example}"
    return kind


@_with_setup
class Plan(torch.nn.Module):
    """A sparse matrix prepared for products of about one width. Made by :func:`sparsetile.plan`.

    A plan is a module without parameters: as an attribute of another module it follows its
    ``to()``, ``cuda()``, ``half()`` and so on, and adds nothing to its state dict.

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

    _family: Family
    _transposed: bool
    _other: weakref.ref[Plan] | None  # the plan of the other direction
    _kept: Plan | None  # the same, if this plan keeps it alive

    def __init__(self, family: Family, transposed: bool = False) -> None:
        super().__init__()
        # None of these is a parameter or a module, which is what takes torch time to find out.
        self.__dict__.update(_family=family, _transposed=transposed, _other=None, _kept=None)

    @property
    def _variant(self) -> Variant:
        """What was planned for this direction."""
        family = self._family
        return family.main(True) if self._transposed else family.forward

    @property
    @_example("(2, 3)")
    def shape(self) -> tuple[int, int]:
        """(M, K) of A."""
        return self._variant.shape

    @property
    @_example("2")
    def n(self) -> int:
        """Width that was planned for; other widths work too.

        A plan made without ``n`` plans for each width that it meets and keeps the most recent ones.
        """
        return self._family.forward.n

    @property
    @_example("torch.float32")
    def dtype(self) -> torch.dtype:
        """Type of B, of A's values and of C."""
        return self._family.forward.dtype

    @property
    @_example("device(type='cpu')")
    def device(self) -> torch.device:
        """Where A is."""
        return self._family.forward.device

    @property
    @_example("'cpu'")
    def system(self) -> str:
        """The system chosen."""
        return self._variant.system

    @property
    @_example("'identity'")
    def reorder(self) -> str:
        """The row order chosen."""
        return self._variant.permutation.name

    @property
    @_example("False")
    def deterministic(self) -> bool:
        """Whether only systems that repeat their bits were considered."""
        return self._family.forward.deterministic

    @property
    def column_order(self) -> Tensor | None:
        """With ``reorder_columns=True``: the row of B at each position; see :meth:`permute`.

        Examples
        --------
        >>> st.plan(A, n=2, reorder_columns=True).column_order
        tensor([0, 2, 1])
        """
        return None if self._transposed else self._family.column_order

    @property
    def flat(self) -> tuple[list[Tensor], str]:
        """What torch's operators take: all tensors, and the recipe that names them.

        Examples
        --------
        >>> tensors, recipe = plan.flat
        >>> len(tensors) > 0, type(recipe).__name__
        (True, 'str')
        """
        variant = self._variant
        variant.note_stream()
        return variant.both or variant.flat

    def flat_with_transpose(self) -> tuple[list[Tensor], str]:
        """The same with the transpose, which gradients need. Planned at first use, then kept.

        Examples
        --------
        >>> len(plan.flat_with_transpose()[0]) > len(plan._variant.flat[0])
        True
        """
        self._family.prepare(self._transposed, self.dtype, self.n, True)
        return self.flat

    @property
    def _csr(self) -> CSR:
        """The pattern of A."""
        return self._variant.csr

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch's allocator that work on ``stream`` reads the plan's tensors.

        Products do this themselves. Needed only if kernels of your own read tensors of
        :attr:`flat` on another stream and the plan may be freed before they are done; like
        ``torch.Tensor.record_stream``. Does nothing on the CPU.

        Examples
        --------
        >>> print(plan.record_stream(None))  # a stream if the plan is on a GPU
        None
        """
        if self.device.type == "cuda":
            for variant in self._family.variants():
                for tensor in (*variant.read_tensors(), self._family.order):
                    if tensor is not None:
                        tensor.record_stream(stream)

    # -- values ---------------------------------------------------------------------------------

    @property
    @_example("3")
    def nnz(self) -> int:
        """Stored entries of A, duplicates summed."""
        return self._family.forward.nnz

    @property
    @_example("tensor([1., 2., 3.])")
    def values(self) -> Tensor | None:
        """A's values by rows, then columns in the plan's numbering; None for a pattern."""
        return self._family.values_now(self._variant)

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
        >>> plan.update_values(torch.tensor([10.0, 20.0, 30.0])) @ torch.ones(3, 1)
        tensor([[30.],
                [30.]])
        """
        check_values("update_values", self._variant.csr, self.dtype, values)
        if transforming():
            raise refuse_in_transform("update_values", "values", "Pass values= to run instead")
        self._family.take(values, self._transposed)
        return self

    def operand_values(
        self, dtype: torch.dtype, given: Tensor | None = None
    ) -> tuple[Tensor | None, Tensors | None]:
        """Return A's values by rows, or ``given`` ones, in ``dtype``, and their packed copies.

        Examples
        --------
        >>> values, packed = plan.operand_values(torch.float64)
        >>> values
        tensor([1., 2., 3.], dtype=torch.float64)
        """
        variant = self._variant
        if dtype is not variant.dtype:
            variant = self._family.in_type(variant, dtype)
        values, packed = operand_values(self._family, variant, given)
        return (None if values is None else values.to(dtype)), packed

    def to_csr(self) -> Tensor:
        """Return A as a ``torch.sparse_csr_tensor``, with the values that products read now.

        Duplicates are summed, and a pattern's values are ones. The tensor shares no memory with the
        plan.

        Raises
        ------
        ValueError
            The plan has ``reorder_columns=True`` or ``keep="inference"``.

        Examples
        --------
        >>> plan.to_csr().to_dense()
        tensor([[1., 0., 2.],
                [0., 0., 3.]])
        """
        if self._family.column_order is not None:
            raise value_error(
                "to_csr", "the plan", "one whose columns keep their order",
                "reorder_columns=True", "Plan A without it",
            )  # fmt: skip
        csr, values = self._csr, self.values
        made = torch.ones(csr.nnz, dtype=self.dtype, device=self.device)
        if values is not None:
            made.copy_(values.detach())
        return torch.sparse_csr_tensor(
            csr.indptr.to(torch.int64, copy=True), csr.indices.to(torch.int64), made, csr.shape,
            check_invariants=False,
        )  # fmt: skip

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
            a vector. With ``reorder_columns=True`` pass ``plan.permute(B)``. An array of NumPy or
            cupy gives an array. A plan of float32 or float64 takes a complex B too: its real and
            imaginary parts are the columns of one product, which gives a complex C.
        out : Tensor [..., M, N] or [M], optional
            Written in place and returned; not differentiable.
        alpha, beta : float
            Scale of the product and of the old contents of ``out``. ``beta`` needs ``out``. With
            max and min, ``alpha`` scales the result: alpha · max(…), even if it is negative.
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
        family = self._family
        if isinstance(B, Tensor) and B.is_complex() and B.dim() > 1 and self.dtype in _PARTS:
            return self._of_complex(B, out, alpha, beta, reduce, values, bias, relu, out_dtype)
        if torch.compiler.is_dynamo_compiling():
            family.compared()
        variant = family.main(True) if self._transposed else family.forward
        if family.widths is not None:
            variant = family.for_width(variant, B)
        if variant.later is not None:
            variant = family.counted(variant)
        if (
            beta == 0.0
            and out_dtype is None
            and values is None
            and family.follow is None
            and type(B) in PLAIN_TYPES
            and plain_call()
        ):
            # What eager code calls nearly always: without the dispatcher.
            C = eager_product(family, variant, B, out, bias, reduce, alpha, relu)
            if C is not None:
                return C
        if is_array(B) and out is None:
            C = self.run(
                as_operand(B, variant.device), alpha=alpha, beta=beta, reduce=reduce,
                values=values, bias=bias, relu=relu, out_dtype=out_dtype,
            )  # fmt: skip
            return array_like(C, B)  # type: ignore[no-any-return]
        if isinstance(B, Tensor) and B.dim() == 1:
            column = out.unsqueeze(-1) if isinstance(out, Tensor) else out
            C = self.run(
                B.unsqueeze(-1), column, alpha=alpha, beta=beta, reduce=reduce, values=values,
                bias=bias, relu=relu, out_dtype=out_dtype,
            )  # fmt: skip
            return C.squeeze(-1) if out is None else out
        if values is not None:
            check_values("run", variant.csr, variant.dtype, values)
            values = variant.csr.canonical_values(values)
        return general_product(
            family, variant, B, out, alpha, beta, reduce, values, bias, relu, out_dtype
        )

    def _of_complex(
        self, B: Tensor, out: Tensor | None, alpha: float, beta: float, reduce: str,
        values: Tensor | None, bias: Tensor | None, relu: bool, out_dtype: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        """The product with a complex B of a real A."""

        def columns(
            part: Tensor, to: Tensor | None, scale: float, share: float, _: int,
            added: Tensor | None,
        ) -> Tensor:  # fmt: skip
            return self.run(
                part, to, alpha=scale, beta=share, reduce=reduce, values=values, bias=added
            )

        tracked = self._family.follow is not None or (values is not None and values.requires_grad)
        return complex_product(
            self, columns, False, B, out, alpha, beta, reduce, tracked, bias, relu, out_dtype
        )

    def gradient(
        self, grad: Tensor, *, values: Tensor | None = None, reduce: str = "sum"
    ) -> Tensor:
        """Return the gradient for B of a product whose result has the gradient ``grad``.

        That is Aᵀ·grad, of a mean with each row of ``grad`` divided by the row's entries. For
        operators of your own: products of :meth:`run` have their gradients already.

        Parameters
        ----------
        grad : Tensor [..., M, N]
            Of the plan's dtype.
        values : Tensor [entries], optional
            Those that :meth:`run` had.
        reduce : {"sum", "mean"}

        Returns
        -------
        Tensor [..., K, N]

        Examples
        --------
        >>> plan.gradient(torch.ones(2, 1))
        tensor([[1.],
                [0.],
                [5.]])
        """
        family, variant = self._family, self._variant
        if family.widths is not None:
            variant = family.for_width(variant, grad)
        if reduce not in ("sum", "mean"):
            raise value_error(
                "gradient", "reduce", "sum or mean", repr(reduce), "Use autograd for max and min"
            )
        if values is not None:
            check_values("gradient", variant.csr, variant.dtype, values)
            values = variant.csr.canonical_values(values)
        return gradient_of_operand(family, variant, grad, values, reduce == "mean")

    def linear(
        self, X: Tensor, *, bias: Tensor | None = None, relu: bool = False, alpha: float = 1.0,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
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
        >>> plan.linear(torch.ones(1, 3), bias=torch.tensor([1.0, -9.0]), relu=True)
        tensor([[4., 0.]])
        """
        if torch.compiler.is_dynamo_compiling():
            self._family.compared()
        variant = self._variant
        if variant.later is not None:
            variant = self._family.counted(variant)
        return linear(self._family, variant, X, bias, relu, alpha, out_dtype)

    @property
    @_example("False")
    def fuses_linear(self) -> bool:
        """Whether :meth:`linear` is one kernel if no gradients are needed."""
        return self._variant.runner.fuses_linear and not transforming()

    def forward(self, B: Tensor, **options: Any) -> Tensor:
        """Return A·B: ``plan(B)`` is ``plan.run(B)``, with the same options.

        Examples
        --------
        >>> torch.nn.Sequential(st.plan(A, n=2), torch.nn.ReLU())(-torch.ones(3, 2))
        tensor([[0., 0.],
                [0., 0.]])
        """
        return self.run(B, **options)

    def __matmul__(self, B: Tensor) -> Tensor:
        """Return A·B: ``plan @ B`` is ``plan.run(B)``."""
        return self.run(B)

    def __rmatmul__(self, left: Any) -> Any:
        if is_array(left):
            return (self.T @ left.T).T
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

    __array_ufunc__ = None  # NumPy leaves `ndarray @ plan` to the plan

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
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

    def _turned(self) -> Plan:
        """Return the plan of the other direction. The first one keeps it; it does not keep the
        first one alive, but has all that was built."""
        found = None if self._other is None else self._other()
        if found is None:
            with self._family.lock:
                found = None if self._other is None else self._other()
                if found is None:
                    self._family.main(not self._transposed)
                    found = type(self)(self._family, not self._transposed)
                    found._other, self._other = weakref.ref(self), weakref.ref(found)
                    self.__dict__["_kept"] = found  # no submodule: it follows by itself
        return found

    def _has_transpose(self) -> bool:
        """Plan the transpose, before a tracer reads it."""
        self._turned()
        return True

    # What torch.compiler.assume_constant_result does, without the 1.5 s import of torch._dynamo.
    _has_transpose._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @property
    def T(self) -> Plan:
        """The planned transpose: ``plan.T @ G`` is Aᵀ·G. Planned at first use, then kept.

        It has the values of the plan it comes from, also when those change later, and its own
        transpose is that plan. With ``reorder_columns=True`` its results have the row order of the
        permuted B; :meth:`unpermute` restores the order of A's columns.

        Examples
        --------
        >>> plan.T @ torch.ones(2, 1)
        tensor([[1.],
                [0.],
                [5.]])
        """
        if torch.compiler.is_dynamo_compiling() and self._has_transpose():
            # Planned before it is first read: a tracer takes what it has read to be constant.
            return self._kept or self._other()  # type: ignore[return-value, misc]
        return self._turned()

    @property
    def H(self) -> Plan:
        """The conjugate transpose: ``plan.H @ G`` is Aᴴ·G. Of a real A that is :attr:`T`.

        Examples
        --------
        >>> plan.H @ torch.ones(2, 1)
        tensor([[1.],
                [0.],
                [5.]])
        """
        return self.T

    def as_linear_operator(self) -> LinearOperator:
        """Return the plan as a ``scipy.sparse.linalg.LinearOperator``, for SciPy's solvers.

        Vectors and matrices are NumPy arrays; they are copied to the plan's device and back. Both
        A·X and Aᴴ·X are products of plans. Values that change later are those of the operator too.

        Raises
        ------
        TypeError
            The plan is of bfloat16, which NumPy does not have, or has ``reorder_columns=True``.

        Examples
        --------
        >>> from scipy.sparse.linalg import svds
        >>> largest = svds(plan.as_linear_operator(), k=1, return_singular_vectors=False)
        >>> round(float(largest[0]), 2)
        3.65
        """
        from sparsetile.plan.scientific import PlanOperator  # scipy's solvers take time to import

        return PlanOperator(self)

    # -- reports --------------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """What was planned, as plain data: sizes, choices, times in seconds, bytes.

        ``seconds`` has the time of each stage; ``build`` splits the stage of that name into format
        and schedule. ``bytes`` has what each part takes now: a planned transpose adds its own.

        Examples
        --------
        >>> plan.info["system"], plan.info["nnz"], plan.info["reorder"]
        ('cpu', 3, 'identity')
        >>> sorted(plan.info["seconds"])
        ['build', 'compile', 'intake', 'reorder']
        """
        return reports.info(self._family, self._variant)

    def floor(self) -> tuple[float, str]:
        """Return the floor, the least seconds the device allows, and the term that sets it.

        On a CPU it is an estimate: the limits of a typical one are taken for this one's.

        Examples
        --------
        >>> seconds, term = plan.floor()
        >>> seconds > 0
        True
        """
        variant = self._variant
        found = floor_seconds(
            variant.csr.with_values(variant.values), self.n, self.dtype, machine(self.device),
            variant.permutation.perm,
        )  # fmt: skip
        return found.seconds, found.term

    def explain(self) -> str:
        """Return each stage's choice and cost, and why this system was chosen, as text.

        Examples
        --------
        >>> print(plan.explain())
        Plan(2x3, 3 entries, weighted, n=2, float32, cpu, system=cpu)
          intake    3 entries in canonical CSR, ... ms
          reorder   identity, ... ms
          ...
          cpu       chosen: predicted ... ms a product
          dense     slower: predicted ... ms a product
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
        if dtype is not None and dtype not in PRODUCT_DTYPES:
            names = ", ".join(str(each) for each in PRODUCT_DTYPES)
            raise type_error("to", "dtype", f"one of {names}", dtype, "Choose one of those")
        self._family.move(device, self.dtype if dtype is None else dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Plan:
        """What ``to()``, ``cuda()``, ``half()``… of a module that holds the plan call."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        self._place(usable_device("to", probe.device), probe.dtype)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, reduced(self._family, self._variant)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return Plan(copied(self._family, self._variant, memo))

    def __repr__(self) -> str:
        rows, cols = self.shape
        family = self._family
        kind = "weighted" if family.forward.weighted else "pattern"
        return (
            f"Plan({rows}x{cols}, {self.nnz} entries, {kind}, "
            f"n={self.n if family.widths is None else 'any'}, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.device}, system={self.system})"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a safetensors file that :func:`sparsetile.load_plan` reads.

        Examples
        --------
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plan.save(f"{folder}/a.safetensors")
        ...     again = st.load_plan(f"{folder}/a.safetensors")
        >>> B = torch.randn(3, 2)
        >>> torch.equal(again @ B, plan @ B)
        True
        """
        write_plan_file(path, *on_file(self._family, self._variant))


def _restored(header: str, tensors: dict[str, Tensor | None], followed: Tensor | None) -> Plan:
    """Build the plan that ``Plan.__reduce__`` wrote, on the device of its tensors."""
    plan = Plan(restored(header, tensors))
    return plan if followed is None else plan.update_values(followed)


torch.serialization.add_safe_globals([_restored])
