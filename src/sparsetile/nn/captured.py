"""A training or inference step as a CUDA graph: captured once, replayed at every call.

A replay repeats the kernels of one run on the same memory. So inputs are copied into static
tensors, gradients keep their memory, and the graph holds a reference to every plan that it reads.

A capture that the host interrupts by a wait can leave torch's allocator unusable. So the step runs
three times before the capture, the last time with waits as errors; all state is reset afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from sparsetile.cache.kept import noted_reads
from sparsetile.core.epoch import changed
from sparsetile.core.errors import type_error, value_error
from sparsetile.core.streams import record_stream
from sparsetile.nn.cache import note_long_lived
from sparsetile.nn.captured_checks import Settings, check_input, check_optimizers
from sparsetile.nn.training_state import TrainingState
from sparsetile.plan.family import many_products

__all__ = ["captured"]

_REMEDY = (
    "Move .item(), .cpu(), printing, masks as indices and new graphs or plans out of the step, and "
    "drop results of earlier steps that have a grad_fn"
)


def captured(
    step: Callable[..., Any], *inputs: Any,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> CapturedStep:  # fmt: skip
    """Capture a training or inference step as a CUDA graph, and return a function that replays it.

    The step runs three times with the example inputs before the capture. Then parameters, buffers,
    gradients, random numbers and the states of the optimiser and scaler are reset, so the first
    call is the first step. On the CPU the returned function runs the step as it is.

    Parameters
    ----------
    step : callable
        Takes the inputs and returns tensors, nested or not, or None. Its Python code does not run
        in a replay: it must not wait for the GPU (``.item()``, ``.cpu()``, masks as indices), and
        schedulers of the learning rate belong outside.
    *inputs
        Examples: tensors on the GPU, also in tuples, lists and dicts. Later inputs must have the
        same shapes, types and device. They are copied into static tensors, ``step.inputs``, unless
        they are these. ``edge_index`` and other tensors that sparsetile makes plans of are not
        copied: they must stay the same and unchanged.
    optimizer : torch.optim.Optimizer or a list of them, optional
        All that the step runs. Adam and others get ``capturable=True``. Their settings must stay as
        they are: pass a learning rate that changes as a tensor on the GPU.
    scaler : torch.amp.GradScaler, optional
        The one that the step uses. It needs an optimiser with ``fused=True``.

    Returns
    -------
    CapturedStep
        Call it like the step. The results are detached, and the next call overwrites them. A replay
        runs on the current stream. It reads everything that is not an input, such as parameters,
        where it was at the capture: write new values in place.

    Examples
    --------
    >>> import torch
    >>> from sparsetile.nn import GCNConv, captured
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x, edge_index = torch.randn(3, 8), torch.tensor([[0, 1, 2], [1, 2, 0]])
    >>> x, edge_index, net = x.to(device), edge_index.to(device), GCNConv(8, 4).to(device)
    >>> optimizer = torch.optim.Adam(net.parameters())
    >>> def train(x, edge_index):
    ...     optimizer.zero_grad()
    ...     loss = net(x, edge_index).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss
    >>> step = captured(train, x, edge_index, optimizer=optimizer)
    >>> losses = [step(x, edge_index).item() for _ in range(3)]
    >>> losses[2] < losses[0]
    True
    """
    if not callable(step):
        raise type_error("captured", "step", "callable", type(step).__name__, "Pass a function")
    known = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    if not all(isinstance(each, Optimizer) for each in known):
        raise type_error(
            "captured", "optimizer", "a torch.optim.Optimizer or a list of them",
            type(optimizer).__name__, "Pass the optimiser that the step runs",
        )  # fmt: skip
    return CapturedStep(step, inputs, known, scaler)


class CapturedStep:
    """What :func:`captured` returns; ``inputs`` are the static inputs, in the order of the call."""

    def __init__(
        self, step: Callable[..., Any], inputs: tuple[Any, ...], optimizers: list[Optimizer],
        scaler: Any,
    ) -> None:  # fmt: skip
        self._step, self._optimizers = step, optimizers
        self._leaves, self._spec = tree_flatten(inputs)
        self._flat = all(isinstance(each, Tensor) for each in inputs)
        self._fixed: dict[int, int] = {}  # number of an input that is not copied -> its version
        self._graph: torch.cuda.CUDAGraph | None = None
        device = _capture_device(self._leaves, optimizers)
        for index, leaf in enumerate(self._leaves):
            check_input(index, leaf, leaf, device)
        if device is not None:
            check_optimizers(optimizers, scaler, device)
            self._prepare(device, TrainingState(optimizers, scaler))

    @property
    def inputs(self) -> Any:
        """The static inputs."""
        return tree_unflatten(self._leaves, self._spec)

    def __call__(self, *inputs: Any) -> Any:
        """Replay the step with these inputs."""
        leaves: Sequence[Any] = inputs
        if not self._flat or len(inputs) != len(self._leaves):  # flattening is slow
            leaves, spec = tree_flatten(inputs)
            if spec != self._spec:
                raise value_error(
                    "captured", "inputs", f"{len(self._leaves)} tensors, nested as in the example",
                    f"{len(leaves)} or other nesting", "Pass the arguments that the example has",
                )  # fmt: skip
        for index, (given, own) in enumerate(zip(leaves, self._leaves, strict=True)):
            check_input(index, given, own, own.device)
            if index in self._fixed:
                self._check_fixed(index, given, own)
        if self._graph is None:
            return self._outputs_of(self._step(*inputs), None)
        self._settings.check()
        if any(parameter.grad is not None for parameter in self._without):
            raise value_error(
                "captured", "gradients", "None before the step, which sets them to None at its end",
                "others", "Set them to None first",
            )  # fmt: skip
        for given, own in zip(leaves, self._leaves, strict=True):
            if not _same_memory(given, own):
                own.copy_(given)
        for parameter, grad in self._accumulated:
            if parameter.grad is None:
                grad.zero_()
            elif parameter.grad is not grad:
                grad.copy_(parameter.grad)
        self._graph.replay()
        for parameter, left in self._grads:
            if parameter.grad is not left:
                parameter.grad = left
        if self._trains:
            changed()
        return self._results[0] if self._alone else tree_unflatten(self._results, self._nesting)

    # -- the capture ----------------------------------------------------------------------------

    def _prepare(self, device: torch.device, state: TrainingState) -> None:
        """Run the step for practice, capture it, and reset the state."""
        here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(here)
        note_long_lived()
        try:
            state.make_capturable()
            with torch.cuda.stream(side), many_products(), _without_cast_cache(device):
                self._practise(device, state)
                self._capture(device, side, state)
        except BaseException:
            here.wait_stream(side)
            state.restore()
            raise
        here.wait_stream(side)
        state.rewind()
        static = [each for at, each in enumerate(self._leaves) if at not in self._fixed]
        record_stream([*static, *(grad for _, grad in self._accumulated)], device)

    def _practise(self, device: torch.device, state: TrainingState) -> None:
        """Let everything be planned and compiled, and raise if the step waits for the GPU."""
        with torch.random.fork_rng(devices=[device]):
            with noted_reads() as reads, state.watched():
                self._run(device)
            owners = [owner for _, owners in reads for owner in owners]
            self._take_inputs({_memory(owner) for owner in owners if isinstance(owner, Tensor)})
            self._run(device)
            with _waits_are_errors():
                self._run(device)
        state.check()

    def _take_inputs(self, planned: set[int]) -> None:
        """Make the static inputs; those that plans were made of stay the caller's."""
        for index, leaf in enumerate(self._leaves):
            if leaf.layout is not torch.strided:
                self._fixed[index] = -1  # values of a sparse tensor are read in every replay
            elif _memory(leaf) in planned:
                self._fixed[index] = -1 if leaf.is_inference() else leaf._version
            else:
                with torch.inference_mode(False), torch.no_grad():
                    self._leaves[index] = leaf.clone()

    def _capture(self, device: torch.device, side: torch.cuda.Stream, state: TrainingState) -> None:
        before = [(parameter, parameter.grad) for parameter in state.parameters]
        settings, writes = Settings(self._optimizers, state.parameters), state.writes()
        random = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
        gc.collect()  # autograd nodes of earlier steps belong to other streams
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        failure: Exception | None = None
        outputs: Any = None
        with noted_reads() as reads:
            try:
                # Other threads, such as those that load data, go on meanwhile.
                with torch.cuda.graph(
                    graph, pool=pool, stream=side, capture_error_mode="thread_local"
                ):
                    try:
                        outputs = self._run(device)
                    except Exception as error:
                        failure = error
            except Exception as error:
                failure = failure or error
                with contextlib.suppress(RuntimeError):  # not done by all versions
                    torch._C._cuda_endAllocateToPool(device.index, pool)
                    torch._C._cuda_releasePool(device.index, pool)
                _renew_generator(device, random)
        if failure is not None:
            text = str(failure).strip().split("\n")[0].rstrip(".")
            raise value_error(
                "captured", "step", "work that a CUDA graph can repeat",
                f"{type(failure).__name__}: {text}", _REMEDY,
            ) from failure  # fmt: skip
        settings.check()
        self._settings = settings
        self._results, self._nesting = tree_flatten(outputs)
        self._alone = isinstance(outputs, Tensor)
        # Where gradients were added to those of before, each replay needs them there.
        self._accumulated = [(p, grad) for p, grad in before if grad is not None and p.grad is grad]
        self._without = [p for p, grad in before if grad is None and p.grad is None]
        self._grads = [(p, p.grad) for p, _ in before]
        self._trains = bool(self._optimizers) or state.writes() != writes
        self._held = [_parts(value) for value, _ in reads], _closure(self._step)
        self._graph = graph

    def _run(self, device: torch.device) -> Any:
        return self._outputs_of(self._step(*self.inputs), device)

    def _outputs_of(self, outputs: Any, device: torch.device | None) -> Any:
        """Return the step's results without their gradients' history."""
        leaves, spec = tree_flatten(outputs)
        where = "" if device is None else f"on {device}"
        for leaf in leaves:
            placed = isinstance(leaf, Tensor) and device in (None, leaf.device)
            if leaf is not None and not placed:
                raise value_error(
                    "captured", "step", f"a function that returns tensors {where}".rstrip(),
                    leaf.device if isinstance(leaf, Tensor) else type(leaf).__name__,
                    "Return tensors such as the loss, and read them after the call",
                )  # fmt: skip
        return tree_unflatten([leaf if leaf is None else leaf.detach() for leaf in leaves], spec)

    # -- what must stay as it was ---------------------------------------------------------------

    def _check_fixed(self, index: int, given: Any, own: Any) -> None:
        version = self._fixed[index]
        if given is not own and (version < 0 or not _same_memory(given, own)):
            actual = "another one"
        elif version >= 0 and own._version != version:
            actual = "new content"
        else:
            return
        raise value_error(
            "captured", f"inputs[{index}]", "the graph that the step was captured with",
            actual, "Capture the step for each graph",
        )  # fmt: skip


def _capture_device(leaves: list[Any], optimizers: list[Optimizer]) -> torch.device | None:
    """Return the GPU of the step; None if it runs on the host."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors += [p for each in optimizers for group in each.param_groups for p in group["params"]]
    found = next((each.device for each in tensors if each.is_cuda), None)
    if tensors or not torch.cuda.is_available():
        return found
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def _without_cast_cache(device: torch.device) -> Iterator[None]:
    """Within an outer autocast, do not reuse casts of weights that were made before the capture."""
    before = torch.is_autocast_cache_enabled()
    if torch.is_autocast_enabled(device.type):
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _waits_are_errors() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise value_error(
            "captured", "step", "free of waits for the GPU", "one, see the cause above", _REMEDY
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _renew_generator(device: torch.device, numbers: Tensor) -> None:
    """Give torch's random numbers a state outside of a capture that was broken off."""
    if device.type == "cuda":
        fresh = torch.Generator(device)
        fresh.set_state(numbers)
        torch.cuda.default_generators[device.index].graphsafe_set_state(fresh)


def _memory(tensor: Tensor) -> int:
    """Return what tells memory apart: that of a tensor's storage, or a sparse tensor itself."""
    strided = tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if strided else id(tensor)


def _same_memory(given: Tensor, own: Tensor) -> bool:
    return given is own or (
        given.layout is own.layout is torch.strided
        and given.data_ptr() == own.data_ptr()
        and given.stride() == own.stride()
    )


def _parts(value: Any) -> list[Any]:
    """Return all that a cached value consists of now: it may drop parts, which a graph reads."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, (list, tuple)):
            waiting += each
        elif type(each).__module__.startswith("sparsetile."):
            waiting += getattr(each, "__dict__", {}).values()
    return list(found.values())


def _closure(step: Callable[..., Any]) -> Any:
    """Return what a function refers to by name: a graph reads its tensors at every replay."""
    try:
        names = inspect.getclosurevars(step)
    except TypeError:
        return step
    return names.nonlocals, names.globals
