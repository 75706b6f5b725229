"""load_sparse_ of masks, of compressed-tensors' files, and of dense weights with zeros."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sparsetile.nn import (
    MaskedLinear,
    SparseConfig,
    SparseLinear,
    load_sparse_,
    pattern_of,
    sparsify_,
)

SHAPE = (64, 128)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128, bias=False)).eval()


def mask_of(pattern: str, shape: tuple[int, int] = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(shape, generator=generator)
    if pattern == "2:4":
        best = scores.reshape(-1, 4).topk(2, 1).indices
        return torch.zeros(scores.numel() // 4, 4).scatter(1, best, 1.0).reshape(shape) > 0
    if pattern == "block":
        blocks = torch.rand(shape[0] // 32, shape[1] // 32, generator=generator) > 0.5
        return blocks.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return scores > 0.7


def zeroed(pattern: str) -> nn.Sequential:
    """A dense model whose first layer has zeros in this pattern."""
    model = model_of()
    with torch.no_grad():
        model[0].weight.mul_(mask_of(pattern))
    return model


def compressed(model: nn.Module, exactly_two: bool = False) -> dict[str, Tensor]:
    """The first layer as compressed-tensors writes it; bits by NumPy."""
    state = model.state_dict()
    weight = state.pop("0.weight")
    kept = weight != 0
    bits = np.packbits(kept.numpy(), axis=-1, bitorder="little")
    state |= {
        "0.shape": torch.tensor(weight.shape), "0.compressed": weight[kept],
        "0.bitmask": torch.from_numpy(bits),
        "0.row_offsets": kept.sum(1).cumsum(0) - kept.sum(1),
    }  # fmt: skip
    if exactly_two:
        state["0.compressed"] = state["0.compressed"].reshape(weight.shape[0], -1)
        state["0.shape"] = state["0.shape"].reshape(-1, 1)
        del state["0.row_offsets"]
    return state


X = torch.randn(5, 128)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("assign", [False, True])
def test_masked_models_load_from_their_files(pattern, assign, tmp_path):
    saved = sparsify_(model_of(), SparseConfig(0.6, pattern=pattern))
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    model = load_sparse_(model_of(), tmp_path, assign=assign)
    assert [type(each) for each in model] == [MaskedLinear, nn.ReLU, MaskedLinear]
    assert model[0].pattern == pattern
    with torch.no_grad():
        assert torch.equal(model(X), saved(X))
    kept = "50%" if pattern == "2:4" else "40%"
    assert model.sparsify_report.pruned["0"] == f"{pattern}, kept {kept}"


def test_a_mixed_model_loads():
    saved = sparsify_(model_of(), SparseConfig(0.5, block=16), lambda _, name: name == "0")
    sparsify_(saved, SparseConfig(0.5, pattern="unstructured"), lambda _, name: name == "2")
    model = load_sparse_(model_of(), saved.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(X), saved(X))
    assert isinstance(model[0], SparseLinear) and isinstance(model[2], MaskedLinear)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("name", ["0", "0.weight"])
def test_files_of_compressed_tensors_load(pattern, name, tmp_path):
    dense = zeroed(pattern)
    state = compressed(dense, exactly_two=pattern == "2:4")
    state = {
        key.replace("0.", f"{name}.", 1)
        if key.split(".")[1] not in ("bias", "weight")
        else key: part
        for key, part in state.items()
    }
    save_file({key: part.contiguous() for key, part in state.items()}, tmp_path / "c.safetensors")
    model = load_sparse_(model_of(), tmp_path / "c.safetensors")
    assert isinstance(model[0], MaskedLinear) and model[0].pattern == pattern
    assert type(model[2]) is nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(model(X), dense(X))


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "block"])
def test_zeros_of_dense_weights_are_recognised(pattern):
    dense = zeroed(pattern)
    model = load_sparse_(model_of(), dense.state_dict())
    kept = 1 - pattern_of(dense[0].weight).sparsity
    if pattern == "block":
        assert isinstance(model[0], SparseLinear) and model[0].block == 32
    else:
        assert isinstance(model[0], MaskedLinear) and model[0].pattern == pattern
    assert model.sparsify_report.skipped == {"2": "dense (0% zeros)"}
    named = "blocks of 32" if pattern == "block" else pattern
    assert model.sparsify_report.pruned == {"0": f"{named}, {1 - kept:.0%} zeros"}
    with torch.no_grad():
        torch.testing.assert_close(model(X), dense(X))


def test_patterns_of_weights():
    assert str(pattern_of(torch.randn(8, 8))) == "dense (0% zeros)"
    assert pattern_of(torch.randn(64, 64) * mask_of("2:4", (64, 64))).pattern == "2:4"
    found = pattern_of(torch.randn(256, 256) * mask_of("block", (256, 256)))
    assert (found.pattern, found.block) == ("block", 32)
    few = torch.randn(64, 64) * mask_of("unstructured", (64, 64))
    assert pattern_of(few).pattern == "unstructured"
    assert pattern_of(torch.empty(0, 4)).pattern == "dense"


@pytest.mark.parametrize(
    "change, text",
    [
        ({"0.bitmask": None}, "got 0 without a bitmask. Decompress the model"),
        ({"0.shape": torch.tensor([3])}, "got 0 without a shape of two numbers"),
        ({"0.compressed": torch.ones(3)}, "got 3 values and .* bits for 0. The file is damaged"),
    ],
)
def test_damaged_files_of_compressed_tensors_are_refused(change, text):
    state = {**compressed(zeroed("unstructured")), **change}
    state = {name: part for name, part in state.items() if part is not None}
    with pytest.raises(ValueError, match=text):
        load_sparse_(model_of(), state)


def test_quantised_weights_are_refused():
    state = {**model_of().state_dict(), "0.weight_packed": torch.ones(2)}
    with pytest.raises(ValueError, match="must be weights of 16 bits or more, got quantised ones"):
        load_sparse_(model_of(), state)


def test_dense_weights_are_refused():
    with pytest.raises(ValueError, match="must be weights of a pruned model, got dense weights"):
        load_sparse_(model_of(), model_of().state_dict())


def test_a_mask_without_weights_is_refused():
    state = sparsify_(model_of(), SparseConfig(0.6, pattern="unstructured")).state_dict()
    del state["0.weight"]
    with pytest.raises(ValueError, match=r"got no weights 0\.weight"):
        load_sparse_(model_of(), state)
