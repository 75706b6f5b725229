"""load_sparse_ reads only the files of the folder that it was given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sparsetile.nn import SparseConfig, load_sparse_, sparsify_

INDEX = "model.safetensors.index.json"


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder without weights, beside a file of weights that it must not reach."""
    state = sparsify_(model_of(), SparseConfig(sparsity=0.5, block=16)).state_dict()
    save_file(state, tmp_path / "secret.safetensors")
    made = tmp_path / "model"
    made.mkdir()
    (made / "part").mkdir()
    save_file(state, made / "part" / "a.safetensors")
    return made


def write_index(folder: Path, name: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"0.weight": name}}))


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "part/a.safetensors", "..", "", "..\\secret.safetensors", "absolute"],
)
def test_rejects_names_that_leave_the_folder(folder, name):
    name = str(folder.parent / "secret.safetensors") if name == "absolute" else name
    write_index(folder, name)
    model = model_of()
    text = r"load_sparse_: source must be a folder whose model\.safetensors\.index\.json names fil"
    with pytest.raises(ValueError, match=text):
        load_sparse_(model, folder)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}'])
def test_rejects_an_index_that_is_not_one(folder, text):
    (folder / INDEX).write_text(text)
    with pytest.raises(
        ValueError, match=r"index\.json has a weight_map, got .*Save the model with"
    ):
        load_sparse_(model_of(), folder)


def test_rejects_a_name_that_is_no_text(folder):
    write_index(folder, 3)
    with pytest.raises(ValueError, match=r"names files inside of it, got 3\. Load only folders"):
        load_sparse_(model_of(), folder)


def test_a_file_of_torch_save_is_named_as_such(tmp_path):
    path = tmp_path / "s.pt"
    torch.save(model_of().state_dict(), path)
    with pytest.raises(ValueError, match=r"a safetensors file, .*s\.pt .*pass what torch\.load"):
        load_sparse_(model_of(), path)


def test_links_of_a_download_cache_are_followed(folder):
    """Folders of huggingface_hub hold links to files elsewhere."""
    (folder / "model-1.safetensors").symlink_to(folder.parent / "secret.safetensors")
    write_index(folder, "model-1.safetensors")
    assert load_sparse_(model_of(), folder)[0].sparsity == 0.5


def test_rejects_a_file_without_the_weights_of_a_layer():
    state = sparsify_(model_of(), SparseConfig(sparsity=0.5, block=16)).state_dict()
    del state["0.weight"]
    with pytest.raises(ValueError, match=r"the weights of this model, got no weights 0\.weight"):
        load_sparse_(model_of(), state)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("eight", [False, True])
def test_layers_get_the_type_of_the_saved_weight_or_of_the_model_if_that_is_fp8(eight, assign):
    """Weights of FP8 are converted to the type of the layer that they replace."""
    config = SparseConfig(sparsity=0.0, weight_dtype=torch.float8_e4m3fn if eight else None)
    saved = sparsify_(model_of().to(torch.bfloat16), config)
    loaded = load_sparse_(model_of(), saved.state_dict(), assign=assign)[0]
    assert torch.equal(loaded.to_dense(), saved[0].to_dense().to(loaded.to_dense().dtype))
    wide = loaded.dequantize_().weight
    assert wide.dtype is (torch.float32 if eight else torch.bfloat16)
    assert loaded.bias.dtype is (torch.bfloat16 if assign else wide.dtype)
