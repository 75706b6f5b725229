"""Plan files: what comes back is what was saved; anything else is refused in words."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import sparsetile as st
from sparsetile.plan import build
from sparsetile.plan import files as module
from sparsetile.reorder import REORDERERS
from sparsetile.systems import SYSTEMS
from tests.contracts.cases import MATRICES, assert_close, csr_of, random_matrix

MATRIX = random_matrix(30, 20, 0.2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    st.plan(csr_of(MATRIX), 4, system="cpu").save(path)
    return path


def refused(path: Path, **kwargs) -> str:
    with pytest.raises(st.PlanFileError) as caught:
        st.load_plan(path, **kwargs)
    text = str(caught.value)
    assert text.startswith("load_plan: path must be a plan file written by sparsetile, got ")
    assert f"({path})" in text and text.endswith(".")
    return text


def rewrite(path: Path, change: Callable[[dict], None], *, sign: bool = True, **metadata) -> None:
    """Change the plan's header and write a file that is whole, and signed unless told not to."""
    with safe_open(path, framework="pt") as held:
        found = dict(held.metadata())
        tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    header = json.loads(found["plan"])
    change(header)
    found["plan"] = json.dumps(header, sort_keys=True)
    if sign:
        found["sha256"] = module._checksum(tensors, found["plan"])
    safetensors.torch.save_file(tensors, path, metadata={**found, **metadata})


def facts(plan: st.Plan) -> dict[str, object]:
    """What is planned. Parts of a loaded plan share no memory, so that its bytes are its own."""
    return {name: fact for name, fact in plan.info.items() if name != "bytes"}


# -- round trip ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [False, True], ids=["weighted", "pattern"])
@pytest.mark.parametrize("name", MATRICES)
def test_a_loaded_plan_multiplies_to_the_same_bits(tmp_path, name, pattern):
    plan = st.plan(csr_of(MATRICES[name](), pattern=pattern), 5)
    plan.save(tmp_path / "a.safetensors")
    loaded = st.load_plan(tmp_path / "a.safetensors")
    B, G = torch.randn(plan.shape[1], 5), torch.randn(plan.shape[0], 5)
    assert torch.equal(loaded @ B, plan @ B)
    assert torch.equal(loaded.T @ G, plan.T @ G)
    assert facts(loaded) == facts(plan) and repr(loaded) == repr(plan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_every_dtype_comes_back(tmp_path, dtype):
    plan = st.plan(csr_of(MATRIX, dtype=dtype), 4)
    plan.save(tmp_path / "a.safetensors")
    loaded = st.load_plan(tmp_path / "a.safetensors")
    assert loaded.dtype is dtype and torch.equal(loaded.values, plan.values)


def test_options_choices_and_reasons_come_back(tmp_path):
    order = torch.randperm(30)
    plan = st.plan(csr_of(MATRIX), 4, reorder=order, deterministic=True, system="dense")
    plan.save(tmp_path / "a.safetensors")
    loaded = st.load_plan(tmp_path / "a.safetensors")
    assert (loaded.system, loaded.reorder, loaded.deterministic) == ("dense", "given", True)
    assert torch.equal(loaded._variant.permutation.perm, order)
    assert loaded.explain() == plan.explain()


def test_values_of_a_loaded_plan_are_still_given_in_the_order_of_the_input(tmp_path):
    edges = torch.tensor([[2, 0, 2, 1], [1, 3, 1, 0]])
    st.plan((edges, torch.ones(4), (3, 4)), 4).save(tmp_path / "a.safetensors")
    loaded = st.load_plan(tmp_path / "a.safetensors")
    loaded.update_values(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    expected = torch.tensor([[0, 0, 0, 2.0], [4, 0, 0, 0], [0, 4, 0, 0]])
    assert torch.equal(loaded @ torch.eye(4), expected)


def test_a_followed_parameter_is_saved_as_the_numbers_it_holds(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(MATRIX.nnz))
    plan = st.plan(csr_of(MATRIX).with_values(parameter), 4)
    with torch.no_grad():
        parameter.mul_(3)
    plan.save(tmp_path / "a.safetensors")
    loaded, B = st.load_plan(tmp_path / "a.safetensors"), torch.randn(20, 4)
    assert not (loaded @ B).requires_grad
    assert_close(loaded @ B, csr_of(MATRIX).with_values(parameter.detach()), B)


def test_neither_order_nor_system_is_chosen_again(tmp_path, monkeypatch):
    plan = st.plan(csr_of(MATRIX), 4, reorder="rcm", system="dense")
    plan.save(tmp_path / "a.safetensors")

    def chosen(*_: object, **__: object) -> None:
        pytest.fail("chosen again")

    monkeypatch.setitem(REORDERERS, "rcm", chosen)
    monkeypatch.setattr(build, "choose_system", chosen)
    for name, system in SYSTEMS.items():
        if name != "dense":  # nor is any other asked whether it could
            monkeypatch.setattr(type(system), "reasons", chosen)
    assert st.load_plan(tmp_path / "a.safetensors").system == "dense"


def test_a_file_holds_nothing_that_can_be_built_again(tmp_path):
    plan = st.plan(csr_of(MATRIX), 4, reorder="rcm")
    plan.save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as held:
        assert sorted(held.keys()) == ["indices", "indptr", "perm", "values"]


def test_a_saved_plan_can_be_named_by_text_or_path(tmp_path, file):
    plan = st.load_plan(str(file), device="cpu")
    plan.save(str(tmp_path / "b.safetensors"))
    assert facts(st.load_plan(tmp_path / "b.safetensors")) == facts(plan)


# -- writing ------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_old_file_and_nothing_beside_it(file, monkeypatch):
    before = file.read_bytes()

    def half(tensors, path, metadata):
        Path(path).write_bytes(b"half a fi")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(OSError, match="No space left"):
        st.plan(csr_of(MATRIX), 8).save(file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_the_file_appears_under_its_name_only_when_it_is_whole(tmp_path, monkeypatch):
    target = tmp_path / "a.safetensors"
    save_file = safetensors.torch.save_file

    def watched(tensors, path, metadata):
        save_file(tensors, path, metadata=metadata)
        assert not target.exists() and Path(path).parent == tmp_path

    monkeypatch.setattr(safetensors.torch, "save_file", watched)
    st.plan(csr_of(MATRIX), 4).save(target)
    assert list(tmp_path.iterdir()) == [target]


def test_a_save_replaces_what_was_there(file):
    st.plan(csr_of(MATRIX), 77).save(file)
    assert st.load_plan(file).n == 77


CHILD = """
import resource, signal, sys, time, torch
import sparsetile as st
path, how = sys.argv[1:]
made = [st.plan(torch.ones(200, 200 + k).to_sparse_csr(), 4, system="cpu") for k in range(2)]
if how == "full":  # bytes that a file may have: the write that exceeds them fails in its middle
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    try:
        made[0].save(path)
    except Exception as error:
        print(error)
    sys.exit()
print("ready", flush=True)
while True:
    for plan in made:
        plan.save(path)
"""


def child(path: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(path), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_disk_that_is_full_in_the_middle_of_a_save_leaves_the_old_file(file, interpreter):
    before = file.read_bytes()
    said = interpreter(CHILD, str(file), "full")
    assert "File too large" in said.stdout, said.stderr
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_a_process_killed_in_the_middle_of_saves_leaves_a_whole_file(file):
    """What it leaves beside the file is refused, or whole."""
    rng = random.Random(22)
    saving = child(file, "forever")
    assert saving.stdout is not None and saving.stdout.readline() == "ready\n"
    first, until = file.stat().st_ino, time.monotonic() + 30
    while file.stat().st_ino == first and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(rng.uniform(0.05, 0.3))
    saving.kill()
    saving.wait()
    for path in file.parent.iterdir():
        try:
            assert st.load_plan(path).shape in ((200, 200), (200, 201))
        except st.PlanFileError:
            assert path != file


def test_a_folder_that_takes_no_files_is_an_error_of_one_line(file):
    plan = st.load_plan(file)
    with pytest.raises(Exception, match=r"os error|Errno") as caught:
        plan.save("/proc/a.safetensors")
    assert "\n" not in str(caught.value)


# -- damage -------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_noticed(file):
    body = file.read_bytes()
    header = 8 + int.from_bytes(body[:8], "little")
    in_header, in_tensors = range(0, header, 7), range(header, len(body), 61)
    for at in (*range(9), *in_header, header - 1, *in_tensors, len(body) - 1):
        for mask in (0x01, 0x80):
            file.write_bytes(body[:at] + bytes([body[at] ^ mask]) + body[at + 1 :])
            refused(file)
    file.write_bytes(body)
    st.load_plan(file)


def test_a_truncated_file_is_refused_whatever_its_length(file):
    body = file.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, *range(0, len(body), 97), len(body) - 1):
        file.write_bytes(body[:length])
        assert "a damaged or foreign file" in refused(file)


def test_a_longer_file_is_refused(file):
    file.write_bytes(file.read_bytes() + b"\0")
    assert "a damaged or foreign file" in refused(file)


@pytest.mark.parametrize(
    "body", [b"", b"PK\x03\x04 not safetensors", b"\xff" * 64, b"%%MatrixMarket matrix"], ids=len
)
def test_a_file_of_another_kind_is_refused(tmp_path, body):
    path = tmp_path / "b.safetensors"
    path.write_bytes(body)
    text = refused(path)
    assert "a damaged or foreign file" in text
    assert text.endswith("Make the plan again and save it.")


@pytest.mark.parametrize("metadata", [None, {}, {"kind": "model weights"}])
def test_the_safetensors_of_another_program_are_refused(tmp_path, metadata):
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(3)}, path, metadata=metadata)
    assert refused(path) == (
        "load_plan: path must be a plan file written by sparsetile, got a safetensors file of "
        f"another kind ({path}). Give a file from plan.save."
    )


@pytest.mark.parametrize("version", ["0", "1", "4", "one"])
def test_another_version_is_refused(file, version):
    rewrite(file, lambda header: None, version=version)
    assert f"got version {version}, this release reads {module.FORMAT_VERSION}" in refused(file)


def test_a_header_changed_by_hand_is_refused(file):
    rewrite(file, lambda header: header.update(n=5), sign=False)
    assert "got a file whose checksum does not match its content" in refused(file)


def test_a_header_that_is_gone_is_refused(file):
    tensors = {"indptr": torch.zeros(1)}
    metadata = {"kind": "sparsetile-plan", "version": str(module.FORMAT_VERSION)}
    safetensors.torch.save_file(tensors, file, metadata=metadata)
    assert "checksum does not match" in refused(file)


def test_a_plan_for_a_gpu_is_built_again_on_the_cpu_when_that_is_asked_for(file):
    expected = st.load_plan(file)
    rewrite(file, lambda header: header.update(device="cuda", system="csr"))
    plan = st.load_plan(file, device="cpu")
    assert (plan.system, plan.device.type, plan.reorder) == ("cpu", "cpu", expected.reorder)
    B = torch.randn(expected.shape[1], 4, dtype=expected.dtype)
    assert torch.equal(plan @ B, expected @ B)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_this_machine_lacks_is_refused(file):
    with pytest.raises(ValueError, match=r"^load_plan: device must be a device of this machine"):
        st.load_plan(file, device="cuda")


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_devices_without_systems_are_refused_by_name(file, device):
    for function, call in (
        ("load_plan", lambda: st.load_plan(file, device=device)),
        ("plan", lambda: st.plan(torch.eye(2).to_sparse_csr(), 2, device=device)),
        ("to", lambda: st.load_plan(file).to(device)),
    ):
        with pytest.raises(
            ValueError, match=rf"^{function}: device must be cpu or cuda, got {device}"
        ):
            call()


@pytest.mark.parametrize("name", ["no/such/folder/a.safetensors", "."])
def test_a_place_where_no_file_can_be_is_refused(tmp_path, file, name):
    with pytest.raises(ValueError, match=r"^save: path must be a file in a folder that exists"):
        st.load_plan(file).save(tmp_path / name)


@pytest.mark.parametrize("path", [None, 3, b"a.safetensors"], ids=repr)
def test_a_path_that_is_none_is_refused(file, path):
    plan, kind = st.load_plan(file), type(path).__name__
    for function, call in (("save", plan.save), ("load_plan", st.load_plan)):
        with pytest.raises(TypeError) as caught:
            call(path)
        assert str(caught.value) == (
            f"{function}: path must be a string or a path, got {kind}. Name a .safetensors file."
        )


@pytest.mark.parametrize("device", ["abacus", 1.5])
def test_a_device_that_does_not_exist_is_refused(file, device):
    with pytest.raises(ValueError, match=r"load_plan: device must be a device such as cpu or cuda"):
        st.load_plan(file, device=device)


def test_a_plan_for_a_gpu_is_refused_where_there_is_none(file, no_gpu):
    rewrite(file, lambda header: header.update(device="cuda"))
    text = refused(file)
    assert "got a plan for a GPU, and there is none here" in text
    assert text.endswith('Pass device="cpu" to build it there.')


def test_an_unknown_system_is_refused(file):
    rewrite(file, lambda header: header.update(system="quantum"))
    text = refused(file)
    assert "got a plan of unknown system 'quantum'" in text and text.endswith("Make it again.")


def test_a_system_that_cannot_run_here_says_why(file):
    rewrite(file, lambda header: header.update(system="csr"))
    text = refused(file)
    assert "got a plan that cannot run here: runs on cuda, A is on cpu" in text
    assert text.endswith("Make a new plan.")


@pytest.mark.parametrize("name", ["absent.safetensors", "."])
def test_a_file_that_is_not_there_is_told_apart_from_a_damaged_one(tmp_path, name):
    with pytest.raises(FileNotFoundError) as caught:
        st.load_plan(tmp_path / name)
    assert str(caught.value) == (
        f"load_plan: path must be an existing file, got {tmp_path / name}. Check the name."
    )


def test_threads_may_save_to_one_file(tmp_path):
    made = st.plan(csr_of(random_matrix(60, 50, 0.2)), 8)
    path, failures = tmp_path / "plan.safetensors", []

    def work() -> None:
        try:
            for _ in range(20):
                made.save(path)
                st.load_plan(path)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and list(tmp_path.iterdir()) == [path]
