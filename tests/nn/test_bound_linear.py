"""SparseLinear's short way to a launch: when it is taken, what makes it begin anew, its exits.

No GPU is needed: the stand-in for linear_few.cu reads X and writes Y, both at the addresses that a
launch is given, with the tensors that it was prepared with. So what is stale is seen in Y.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from sparsetile.formats.block_pattern import dense_of_blocks
from sparsetile.layers import block_layer as bound_module
from sparsetile.layers.block_layer import BlockLayer
from sparsetile.nn import SparseLinear, linear_binding
from sparsetile.systems.bcsr.few import FewTokens
from tests.host import answer_on_host
from tests.locks import at_once, slowed

BF16 = torch.bfloat16
OUT, INTO = 192, 128


def at(address: int, tokens: int, stride: int, width: int) -> Tensor:
    """The 16-bit matrix that lies at an address."""
    room = (ctypes.c_uint16 * ((tokens - 1) * stride + width)).from_address(address)
    return torch.frombuffer(room, dtype=BF16).as_strided((tokens, width), (stride, 1))


class Host:
    """What was prepared and launched, on which stream."""

    def __init__(self) -> None:
        self.prepared, self.streams, self.stream, self.capturing = 0, [], 7, False
        self.copied = 0

    @property
    def launches(self) -> int:
        return len(self.streams)

    def prepare(self, few, lists, blocks, X, epilogue, silu, exponents=None):
        self.prepared += 1
        tokens, stride = X.shape[0], X.stride(0)
        # A launch has addresses, so it does not follow `.data =` as the tensors do.
        lists = [each.clone() if isinstance(each, Tensor) else each for each in lists]
        exponents = None if exponents is None else exponents.clone()

        class Launch:
            def launch(_, stream, x, y):
                self.streams.append(stream)
                wide = blocks.float()
                if exponents is not None:
                    wide = wide * 2.0 ** exponents.view(-1, 1, 1)
                weight = dense_of_blocks(wide, lists[0], lists[1], (OUT, INTO))
                Y = at(x, tokens, stride, INTO).float() @ weight.mT
                Y = Y if epilogue.row_bias is None else Y + epilogue.row_bias
                Y = torch.relu(Y) if epilogue.relu else Y
                at(y, tokens, OUT, OUT).copy_(Y.to(BF16))

        return Launch()

    def run(self, few, lists, blocks, X, Y, epilogue, *, silu=False):
        assert FewTokens.takes(X), "copied to where the kernel can read it"
        self.copied += 1
        self.prepare(few, lists, blocks, X, epilogue, silu).launch(7, X.data_ptr(), Y.data_ptr())


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()
    monkeypatch.setattr(linear_binding, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    answer_on_host(monkeypatch, bound_module, current_stream_handle=lambda device: made.stream)
    monkeypatch.setattr(
        BlockLayer, "method", lambda self, tokens, *_: "few" if tokens <= 16 else "dense"
    )
    monkeypatch.setattr(FewTokens, "prepare", lambda few, *given: made.prepare(few, *given))
    monkeypatch.setattr(FewTokens, "run", lambda few, *a, **b: made.run(few, *a, **b))
    return made


def integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).to(BF16)


@pytest.fixture
def layer() -> SparseLinear:
    torch.manual_seed(0)
    made = SparseLinear.from_dense(
        integers(OUT, INTO), integers(OUT), sparsity=0.5, method="random",
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    return made.requires_grad_(False).eval()


def expected(layer: SparseLinear, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    Y = nn.functional.linear(x.float(), layer.to_dense().float(), bias)
    return (torch.relu(Y) if layer.activation == "relu" else Y).to(BF16)


@pytest.mark.parametrize("shape", [(1,), (16,), (2, 3), (1, 1, 1), (2, 1, 4), ()])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_inputs_of_any_dimensions_are_prepared_once(host, layer, shape, mode):
    with mode():
        for _ in range(3):
            x = integers(*shape, INTO)
            Y = layer(x)
            assert Y.shape == (*shape, OUT) and torch.equal(Y, expected(layer, x))
            assert Y.is_inference() == (mode is torch.inference_mode)
    assert (host.prepared, host.launches) == (1, 3)


def test_the_stream_is_read_at_each_call(host, layer):
    x = integers(3, INTO)
    for host.stream in (7, 9, 7):
        layer(x)
    assert host.streams == [7, 9, 7]


def test_strided_and_misaligned_inputs(host, layer):
    wide, odd = integers(4, 2, INTO + 8), integers(4, 2, INTO + 1)
    taken = [
        wide[..., :INTO],
        wide[..., 8:],
        wide[::2, 0, :INTO],
        integers(1, INTO).expand(5, INTO),
    ]
    for x in taken:
        for _ in range(2):
            assert torch.equal(layer(x), expected(layer, x))
    assert host.copied == 0 and host.prepared == 3
    copied = [odd[..., 1:], wide.transpose(0, 1)[..., :INTO], integers(INTO, 4).mT]
    for number, x in enumerate(copied, 1):
        for _ in range(2):
            Y = layer(x)
            assert torch.equal(Y, expected(layer, x)) and Y.is_contiguous()
        assert host.copied == 2 * number


# -- what makes it begin anew


def _new_weight(layer: SparseLinear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 2, requires_grad=False)


def _other_memory(layer: SparseLinear) -> None:
    layer.weight.data = layer.weight.detach() * 2


def _new_bias(layer: SparseLinear) -> None:
    layer.bias = nn.Parameter(layer.bias.detach() + 1, requires_grad=False)


def _no_bias(layer: SparseLinear) -> None:
    layer.bias = None


def _other_bias_memory(layer: SparseLinear) -> None:
    layer.bias.data = layer.bias.detach() + 1


def _pruned(layer: SparseLinear) -> None:
    layer.prune_(0.8)


def _other_pattern(layer: SparseLinear) -> None:
    other = layer.block_col_idx.flip(0)
    row_ptr = layer.block_row_ptr
    layer.block_row_ptr, layer.block_col_idx = row_ptr.clone(), other % 2
    del row_ptr


def _pattern_in_place(layer: SparseLinear) -> None:
    layer.block_col_idx.copy_(1 - layer.block_col_idx)


def _pattern_in_new_memory(layer: SparseLinear) -> None:
    layer.block_row_ptr.data = layer.block_row_ptr.clone()
    layer.block_col_idx.data = 1 - layer.block_col_idx


def _rows_in_new_memory(layer: SparseLinear) -> None:
    layer.block_row_ptr.data = torch.tensor([0, 1, 1, 3], dtype=torch.int32)


def _same_pattern_in_new_memory(layer: SparseLinear) -> None:
    layer.block_row_ptr.data = layer.block_row_ptr.clone()


def _loaded(layer: SparseLinear) -> None:
    state = {name: part.clone() for name, part in layer.state_dict().items()}
    state["weight"] = state["weight"] * 2
    layer.load_state_dict(state, assign=True)


def _activation(layer: SparseLinear) -> None:
    layer.activation = "relu"


def _preference(layer: SparseLinear) -> None:
    layer.prefer = "memory"


def _quantized(layer: SparseLinear) -> None:
    layer.quantize_()


CHANGES = [
    _new_weight, _other_memory, _new_bias, _no_bias, _other_bias_memory, _pruned, _other_pattern,
    _pattern_in_place, _pattern_in_new_memory, _rows_in_new_memory, _same_pattern_in_new_memory,
    _loaded, _activation, _preference, _quantized,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_binds_anew(host, layer, change: Callable[[SparseLinear], None]):
    x = integers(3, INTO)
    layer(x)
    before = layer._bound
    change(layer)
    for _ in range(2):
        assert torch.equal(layer(x), expected(layer, x))
    assert layer._bound is not before
    assert (host.prepared, host.launches) == (2, 3)


def test_columns_in_new_memory_are_noticed(host, layer):
    x = integers(3, INTO)
    for _ in range(3):
        assert torch.equal(layer(x), expected(layer, x))
        layer.block_col_idx.data = 1 - layer.block_col_idx


def test_scales_in_new_memory_are_noticed(host, layer):
    layer.quantize_()
    x = integers(3, INTO)
    for _ in range(3):
        assert torch.equal(layer(x), expected(layer, x))
        layer.weight_exponent.data = 1 - layer.weight_exponent


@pytest.mark.parametrize("name", ["block_row_ptr", "block_col_idx", "weight_exponent", "bias"])
def test_memory_is_kept_while_its_address_is_compared(host, layer, name):
    if name == "weight_exponent":
        layer.quantize_()
    layer(integers(3, INTO))
    part = getattr(layer, name)
    memory = weakref.ref(part.untyped_storage())
    part.data = part.clone()
    assert memory() is not None, "new memory could get the same address"
    layer(integers(3, INTO))
    gc.collect()  # the class of the launch that stands for a GPU's is in a circle with its bias
    assert memory() is None


def test_weights_and_bias_that_are_written_to_are_read_again(host, layer):
    x = integers(3, INTO)
    layer(x)
    before = layer._bound
    assert before.layer._epilogue.row_bias.data_ptr() == layer.bias.data_ptr()
    with torch.no_grad():
        layer.weight.mul_(2)
        assert torch.equal(layer(x), expected(layer, x))
        layer.bias.add_(1)
        assert torch.equal(layer(x), expected(layer, x))
    layer.bias.data.add_(1)  # torch does not count it
    host.capturing = True
    assert torch.equal(layer(x), expected(layer, x))
    assert layer._bound is before and host.prepared == 1


@pytest.mark.parametrize("bias", [
    torch.ones(OUT, dtype=torch.float64), torch.ones(2 * OUT, dtype=BF16)[::2],
])  # fmt: skip
def test_a_bias_that_kernels_cannot_read_is_copied_in_each_call(host, layer, bias):
    layer.bias = nn.Parameter(bias)
    x = integers(3, INTO)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(layer(x), expected(layer, x))
            layer.bias.add_(1)
    assert layer._bound is None


def fused_optimiser(parameter: nn.Parameter) -> torch.optim.Optimizer:
    """On a CPU, torch's fused SGD skips bfloat16 tensors of 16 elements or more; AdamW does not."""
    return torch.optim.AdamW([parameter], lr=1.0, fused=True)


@pytest.mark.parametrize("training", [False, True])
def test_a_bias_that_a_fused_optimiser_writes_is_read_again(host, layer, training):
    x = integers(3, INTO)
    step = fused_optimiser(layer.bias)
    layer.train(training)
    for _ in range(3):
        with torch.no_grad():
            before = layer(x)
            assert torch.equal(before, expected(layer, x))
        layer.bias.grad = torch.ones_like(layer.bias)
        step.step()
        assert not torch.equal(expected(layer, x), before)
    with torch.no_grad():
        assert torch.equal(layer(x), expected(layer, x))
    assert host.prepared == 1


def test_a_bias_whose_writes_torch_does_not_count_is_read_in_every_call(host):
    with torch.inference_mode():
        layer = SparseLinear.from_dense(integers(OUT, INTO), integers(OUT), sparsity=0.5).eval()
        x = integers(3, INTO)
        for _ in range(3):
            assert torch.equal(layer(x), expected(layer, x))
            layer.bias.add_(1)


def test_new_memory_at_the_address_of_the_old_bias_is_read_again(host, layer):
    x = integers(3, INTO)
    for _ in range(20):
        assert torch.equal(layer(x), expected(layer, x))
        layer.bias.data = layer.bias.detach() + 1
        layer.bias.data = layer.bias.detach() + 1


@pytest.mark.parametrize("how", ["fused step", "new memory"])
def test_the_dense_copy_is_made_again(layer, how):
    step = fused_optimiser(layer.weight)
    for _ in range(10):
        assert torch.equal(layer._dense_copy(), layer.to_dense())
        before = layer.to_dense()
        if how == "fused step":
            layer.weight.grad = torch.ones_like(layer.weight)
            step.step()
        else:
            layer.weight.data = layer.weight.detach() * 2
            layer.weight.data = layer.weight.detach() * 2
        assert not torch.equal(layer.to_dense(), before)
    assert torch.equal(layer._dense_copy(), layer.to_dense())


def test_a_bias_is_read_again_in_another_mode_than_it_was_bound_in(host, layer):
    x = integers(3, INTO)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            layer.bias.add_(1)
            assert torch.equal(layer(x), expected(layer, x))
    assert host.prepared == 1


def test_what_is_first_called_in_a_graph_is_not_kept(host, layer):
    host.capturing = True
    x = integers(3, INTO)
    assert torch.equal(layer(x), expected(layer, x)) and layer._bound is None
    host.capturing = False
    layer(x)
    assert layer._bound is not None


def test_a_layer_made_in_inference_mode(host):
    with torch.inference_mode():
        made = SparseLinear.from_dense(integers(OUT, INTO), integers(OUT), sparsity=0.5)
        made.requires_grad_(False)
        x = integers(3, INTO)
        for _ in range(2):
            assert torch.equal(made(x), expected(made, x))
        made.weight.mul_(2)
        assert torch.equal(made(x), expected(made, x))
    assert (host.prepared, host.launches) == (1, 3)


@pytest.mark.parametrize("how", ["deepcopy", "saved"])
def test_copies_are_bound_to_their_own_tensors(host, layer, how):
    x = integers(3, INTO)
    layer(x)
    if how == "deepcopy":
        other = copy.deepcopy(layer)
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert other._bound is None
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(other(x), expected(other, x))
    assert torch.equal(layer(x), expected(layer, x))


def test_widths_and_types_in_turns(host, layer):
    layer.quantize_()
    for dtype in (BF16, BF16):
        for tokens in (1, 5, 1):
            x = integers(tokens, INTO).to(dtype)
            assert torch.equal(layer(x), expected(layer, x))
    assert host.prepared == 2
    bound = layer._bound
    layer(integers(2, INTO).half()[:0])
    assert layer._bound is not bound and layer._bound.dtype is torch.float16


def test_many_tokens_take_the_written_out_weight(host, layer):
    x = integers(2, 20, INTO)
    for prefer in ("speed", "memory"):
        layer.prefer = prefer
        for _ in range(2):
            assert torch.equal(layer(x), expected(layer, x))
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.equal(layer(x), expected(layer, x))
    assert host.launches == 0


def test_threads_share_one_layer(host, layer):
    x, wrong = [integers(n, INTO) for n in (1, 2, 3, 4)], []

    def work(mine: Tensor) -> None:
        for _ in range(30):
            if not torch.equal(layer(mine), expected(layer, mine)):
                wrong.append(mine.shape)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in x]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and host.launches == 120


def test_threads_that_call_together_share_one_binding(host, layer, monkeypatch):
    slow, x = slowed(monkeypatch, linear_binding, "keeps_dense"), integers(3, INTO)
    for Y in at_once(lambda: layer(x)):
        assert torch.equal(Y, expected(layer, x))
    assert slow.calls == 1


# -- exits: the general way gives the same


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_gradients_go_through_the_operator(host, layer):
    x = integers(3, INTO)
    layer(x)
    for name in ("x", "weight", "bias"):
        layer.requires_grad_(False)
        mine = x.clone().requires_grad_(name == "x")
        if name != "x":
            getattr(layer, name).requires_grad_(True)
        Y = layer(mine)
        assert Y.requires_grad and torch.equal(Y.detach(), expected(layer, x))
        with torch.no_grad():
            assert torch.equal(layer(mine), expected(layer, x))
    assert host.launches == 4


def test_modes_and_transforms_see_the_operator(host, layer):
    x = integers(3, INTO)
    layer(x)
    with _Watch() as watch:
        assert torch.equal(layer(x), expected(layer, x))
    assert any("block_linear" in name for name in watch.seen)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert torch.equal(layer(x), expected(layer, x))
    finally:
        torch.set_autocast_enabled("cuda", False)
    negative = torch._neg_view(x)
    assert negative.is_neg() and torch.equal(layer(negative), expected(layer, -x))
    with forward_ad.dual_level():
        assert torch.equal(layer(x), expected(layer, x))
    assert host.launches == 1
    found = torch.func.functional_call(layer, {"weight": 2 * layer.weight}, (x,))
    assert torch.equal(found, (expected(layer, x).float() * 2 - layer.bias.float()).to(BF16))
    assert torch.equal(layer(x), expected(layer, x))


def test_what_the_layer_does_not_take_is_refused_as_before(host, layer):
    layer(integers(3, INTO))
    with pytest.raises(ValueError, match="in_features of the layer"):
        layer(integers(3, INTO + 1))
    with pytest.raises(ValueError, match="in_features of the layer"):
        layer(torch.tensor(1.0, dtype=BF16))
    with pytest.raises(TypeError, match="like the weight"):
        layer(integers(3, INTO).float())
    with pytest.raises(TypeError, match="a torch tensor"):
        layer([1.0])
    with pytest.raises(ValueError, match="like the weight"):
        layer(integers(3, INTO).to("meta"))
    assert host.launches == 1


def test_a_trace_holds_the_operator(host, layer):
    x = integers(3, INTO)
    layer(x)
    traced = torch.jit.trace(layer, (x,), check_trace=False)
    other = integers(3, INTO)
    assert torch.equal(traced(other), expected(layer, other))


def test_torch_compile_sees_the_operator(host, layer):
    x = integers(3, INTO)
    layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), expected(layer, x))
    assert host.launches == 1
    assert torch.equal(layer(x), expected(layer, x)) and host.launches == 2
