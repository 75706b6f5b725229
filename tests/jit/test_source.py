"""What a kernel is compiled from: generated header, file, digest, label."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sparsetile.jit import KernelSource, ParamStruct, config_header, device_tree_digest
from sparsetile.jit import source as module
from sparsetile.jit.params import i32, pointer
from sparsetile.kernels import KERNELS


@pytest.fixture
def tree(tmp_path: Path, constants):
    """A copy of the device tree, in the place where the package would have it."""
    package = tmp_path / "sparsetile"
    for room in ("kernels", "jit"):
        origin = module.DEVICE_TREE.parent.parent / room
        shutil.copytree(origin, package / room, ignore=shutil.ignore_patterns("__pycache__"))
    copy = package / "kernels" / "cuda"
    constants(module, DEVICE_TREE=copy)
    device_tree_digest.cache_clear()
    yield copy
    device_tree_digest.cache_clear()


def digest() -> str:
    device_tree_digest.cache_clear()
    return device_tree_digest()


def test_the_header_declares_numbers_as_constexpr_and_types_by_name():
    config = (("ELEMENT", "F16"), ("kExtremum", False), ("kLanes", 8), ("kWeighted", True))
    assert config_header(config) == (
        "// Generated: the configuration of this kernel.\n"
        "#define ELEMENT F16\n"
        "constexpr bool kExtremum = false;\n"
        "constexpr int kLanes = 8;\n"
        "constexpr bool kWeighted = true;\n"
    )


def test_the_header_declares_the_fields_and_what_must_hold_of_them():
    params = ParamStruct.of(i32("n"), pointer("c", "const float*"))
    assert config_header((("kVec", 4),), params) == (
        "// Generated: the configuration of this kernel.\n"
        "constexpr int kVec = 4;\n"
        "#define PARAMS_FIELDS int n; const float* c;\n"
        "#define PARAMS_LAYOUT_MATCHES sizeof(Params) == 16 "
        "&& sizeof(decltype(Params::n)) == 4 && alignof(decltype(Params::n)) == 4 "
        "&& sizeof(decltype(Params::c)) == 8 && alignof(decltype(Params::c)) == 8\n"
    )


def test_the_text_is_the_header_and_then_the_file_as_it_stands(tree):
    (tree / "rows" / "tiny.cu").write_text('extern "C" __global__ void tiny() {}\n')
    source = KernelSource.make("rows/tiny.cu", "tiny", {"kVec": 4})
    assert source.path == tree / "rows" / "tiny.cu"
    assert source.text() == (
        "// Generated: the configuration of this kernel.\nconstexpr int kVec = 4;\n"
        '#line 1 "rows/tiny.cu"\nextern "C" __global__ void tiny() {}\n'
    )


def test_the_order_in_which_a_configuration_was_written_does_not_matter():
    one = KernelSource.make("a.cu", "a", {"kVec": 4, "ELEMENT": "F32", "kWeighted": True})
    other = KernelSource.make("a.cu", "a", {"kWeighted": True, "ELEMENT": "F32", "kVec": 4})
    assert one == other and hash(one) == hash(other)


def test_the_label_names_the_kernel_and_every_constant():
    source = KernelSource.make("a.cu", "add", {"kVec": 4, "ELEMENT": "F32", "kWeighted": True})
    assert source.label == "add[ELEMENT=F32 kVec=4 kWeighted=true]"


def test_the_digest_of_an_unchanged_tree_stays_the_same(tree):
    assert digest() == digest()


def test_the_digest_of_a_copy_is_that_of_the_tree(tree, monkeypatch):
    copied = digest()
    monkeypatch.undo()
    assert digest() == copied


@pytest.mark.parametrize("suffix", [".cu", ".cuh"])
def test_one_changed_byte_of_device_code_changes_the_digest(tree, suffix):
    before = digest()
    file = sorted(tree.rglob(f"*{suffix}"))[0]
    file.write_bytes(file.read_bytes() + b" ")
    assert digest() != before


def test_an_added_a_renamed_and_a_removed_file_change_the_digest(tree):
    seen = {digest()}
    (tree / "extra.cuh").write_text("// nothing\n")
    seen.add(digest())
    (tree / "extra.cuh").rename(tree / "other.cuh")
    seen.add(digest())
    assert len(seen) == 3
    (tree / "other.cuh").unlink()
    assert digest() in seen


def test_content_moved_from_one_file_to_the_next_changes_the_digest(tree):
    (tree / "y.cuh").write_bytes(b"ab")
    (tree / "z.cuh").write_bytes(b"c")
    before = digest()
    (tree / "y.cuh").write_bytes(b"a")
    (tree / "z.cuh").write_bytes(b"bc")
    assert digest() != before


def test_files_that_are_not_device_code_do_not_count(tree):
    before = digest()
    (tree / "notes.txt").write_text("no code")
    host = tree.parent / "spec.py"
    host.write_text(host.read_text() + "\n# changed\n")
    assert digest() == before


def test_a_kernel_of_another_folder_is_found_there(tree, tmp_path):
    (tmp_path / "tiny.cu").write_text("// here\n")
    (tree / "tiny.cu").write_text("// there\n")
    source = KernelSource.make("tiny.cu", "tiny", {})
    assert source.text().endswith("// there\n")
    assert source.in_folder(tmp_path).text().endswith("// here\n")


@pytest.mark.parametrize("file", ["../tiny.cu", "rows/../../tiny.cu", "/elsewhere/tiny.cu"])
def test_a_path_out_of_the_device_tree_is_refused(file):
    with pytest.raises(ValueError) as caught:
        KernelSource.make(file, "tiny", {})
    assert str(caught.value) == (
        f"KernelSource.make: file must be a file of the device tree, got {file!r}. "
        "Give its path from the device tree on."
    )


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_kernel_is_one_file_with_one_entry_of_its_name(name):
    spec = KERNELS[name]
    source = spec.source(next(spec.configs()))
    text = source.path.read_text()
    assert text.count('extern "C"') == 1
    assert f"{name}(" in text
    assert source.params is spec.params


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_no_two_configurations_of_a_kernel_are_the_same(name):
    labels = [KERNELS[name].source(config).label for config in KERNELS[name].configs()]
    assert len(labels) == len(set(labels))


def test_a_kernel_for_some_architectures_runs_on_those_alone():
    spec = KERNELS["spmm_csr"]
    assert spec.runs_on("sm_80") and spec.runs_on("sm_120")
    limited = type(spec)("rows/k.cu", spec.params, spec.configs, architectures=("sm_90a",))
    assert limited.runs_on("sm_90a") and not limited.runs_on("sm_80")
