"""Source to cubin with the real NVRTC: the cache, its damage, its absence, the errors."""

from __future__ import annotations

import itertools
import json
import logging
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparsetile.core.errors import CompileError
from sparsetile.jit import (
    ARCHITECTURES,
    KernelSource,
    NotCompiled,
    ParamStruct,
    compile_source,
    compiler_available,
    device_tree_digest,
    nvrtc_version,
    without_compiling,
)
from sparsetile.jit import compiler as module
from sparsetile.jit import source as source_module
from sparsetile.kernels import KERNELS

# cuda.core prints an AttributeError when a program whose compile failed is collected as garbage.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. 'cuda.core._program.Program.__dealloc__'"
)

ARCH = "sm_90a"

TINY = """
extern "C" __global__ void tiny(float* out) { out[threadIdx.x] = kValue; }
"""
# 96 numbers held at once by threads that have 32 registers each, and 100 bytes shared.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* data) {
  __shared__ float shared[25];
  shared[threadIdx.x % 25] = data[threadIdx.x];
  float held[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) held[i] = data[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) data[i * 1024 + threadIdx.x] =
        held[95 - i] * held[(i * 7) % 96] + shared[i % 25];
}
"""


@pytest.fixture
def cache(tmp_path: Path, environment) -> Path:
    """A cold kernel cache of this test's own."""
    folder = tmp_path / "kernels"
    environment(SPARSETILE_CACHE_DIR=folder)
    return folder


@pytest.fixture
def tree(tmp_path: Path, constants):
    """A device tree of this test's own, with two small kernels."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "tiny.cu").write_text(TINY)
    (folder / "spilling.cu").write_text(SPILLING)
    for place in (source_module, module):
        constants(place, DEVICE_TREE=folder)
    device_tree_digest.cache_clear()
    yield folder
    device_tree_digest.cache_clear()


def tiny(value: int = 1) -> KernelSource:
    return KernelSource.make("tiny.cu", "tiny", {"kValue": value})


def entries(cache: Path) -> tuple[Path, Path]:
    """The two files of a cache that holds one kernel: its cubin, its report."""
    files = [path for path in (cache / "entries").rglob("*") if path.is_file()]
    reports = [path for path in files if path.read_bytes().startswith(b"{")]
    assert len(files) == 2 and len(reports) == 1
    return next(path for path in files if path not in reports), reports[0]


def flipped(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def test_a_kernel_of_the_library_compiles_without_a_gpu_and_is_found_again(cache):
    spec = KERNELS["sddmm_csr"]
    source = spec.source(next(spec.configs()))
    cold, warm = compile_source(source, ARCH), compile_source(source, ARCH)
    assert not cold.from_cache and cold.seconds > 0
    assert warm.from_cache and warm.seconds == 0.0
    assert cold.cubin == warm.cubin and cold.cubin.startswith(b"\x7fELF")
    assert cold.resources == warm.resources
    assert cold.resources.registers > 0 and not cold.resources.spills
    assert (cold.source, cold.arch) == (source, ARCH)


def test_spills_stack_and_shared_memory_are_read_from_the_compiler_s_report(cache, tree):
    found = compile_source(KernelSource.make("spilling.cu", "spilling", {}), "sm_80").resources
    assert found.registers == 32
    assert found.spills and found.spill_store_bytes > 0 and found.spill_load_bytes > 0
    assert found.stack_bytes > 0 and found.static_shared_bytes == 100


def test_another_configuration_architecture_or_device_tree_is_another_entry(cache, tree):
    assert not compile_source(tiny(1), ARCH).from_cache
    assert not compile_source(tiny(2), ARCH).from_cache
    assert not compile_source(tiny(1), "sm_80").from_cache
    assert compile_source(tiny(1), ARCH).from_cache
    (tree / "unrelated.cuh").write_text("// a header that a kernel might include\n")
    device_tree_digest.cache_clear()
    assert not compile_source(tiny(1), ARCH).from_cache


@pytest.mark.parametrize("which", ["cubin", "report"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda body: flipped(body, 0),
        lambda body: flipped(body, len(body) // 2),
        lambda body: body[: len(body) // 2],
        lambda body: b"",
        lambda body: b"null",
        lambda body: b'{"sha256": 1}',
        lambda body: body + b"x",
    ],
    ids=["first byte", "middle byte", "truncated", "empty", "null", "other fields", "longer"],
)
def test_a_damaged_entry_is_compiled_again_and_mended(cache, tree, which, damage):
    first = compile_source(tiny(), ARCH)
    file = entries(cache)[which == "report"]
    file.write_bytes(damage(file.read_bytes()))
    again = compile_source(tiny(), ARCH)
    assert not again.from_cache
    assert (again.cubin, again.resources) == (first.cubin, first.resources)
    assert compile_source(tiny(), ARCH).from_cache


@pytest.mark.parametrize("which", ["cubin", "report"])
def test_no_length_and_no_flipped_bit_gives_another_cubin(cache, tree, which):
    first = compile_source(tiny(), ARCH)
    file = entries(cache)[which == "report"]
    body = file.read_bytes()
    lengths = (1, 64, *range(0, len(body), max(1, len(body) // 3)), len(body) - 1)
    places = range(3, len(body), max(1, len(body) // 4))
    for damaged in (*(body[:n] for n in lengths), *(flipped(body, at) for at in places)):
        file.write_bytes(damaged)
        again = compile_source(tiny(), ARCH)
        assert again.cubin == first.cubin
        assert which == "report" or not again.from_cache


KILLED = """
import os, signal, sys
from sparsetile.jit import compile_source
from sparsetile.kernels import KERNELS
spec = KERNELS["sddmm_csr"]
done, say = os.pipe()
pid = os.fork()
if pid == 0:
    for config in spec.configs():
        compile_source(spec.source(config), sys.argv[1])
        os.write(say, b"1")
os.read(done, 1)
os.kill(pid, signal.SIGKILL)
print(os.WTERMSIG(os.waitpid(pid, 0)[1]))
"""


def test_a_process_killed_while_it_fills_the_cache_leaves_no_wrong_entry(cache, interpreter):
    ran = interpreter(KILLED, ARCH, SPARSETILE_CACHE_DIR=str(cache))
    assert ran.stdout == f"{int(signal.SIGKILL)}\n", ran.stderr
    spec = KERNELS["sddmm_csr"]
    for config in itertools.islice(spec.configs(), 2):
        kept = compile_source(spec.source(config), ARCH)
        assert kept.cubin == compile_source(spec.source(config), ARCH, use_cache=False).cubin
    assert compile_source(spec.source(next(spec.configs())), ARCH).from_cache


@pytest.mark.parametrize("which", ["cubin", "report"])
def test_a_missing_half_of_an_entry_is_compiled_again(cache, tree, which):
    compile_source(tiny(), ARCH)
    entries(cache)[which == "report"].unlink()
    assert not compile_source(tiny(), ARCH).from_cache
    assert compile_source(tiny(), ARCH).from_cache


def test_the_report_of_another_cubin_is_not_believed(cache, tree):
    compile_source(tiny(), ARCH)
    report = entries(cache)[1]
    body = json.loads(report.read_bytes())
    body["sha256"] = "0" * 64
    report.write_bytes(json.dumps(body).encode())
    assert not compile_source(tiny(), ARCH).from_cache


def test_a_folder_that_cannot_exist_costs_the_cache_and_not_the_compile(
    tmp_path, tree, caplog, environment
):
    (tmp_path / "file").write_text("not a folder")
    environment(SPARSETILE_CACHE_DIR=tmp_path / "file" / "kernels")
    with caplog.at_level(logging.INFO, "sparsetile"):
        assert not compile_source(tiny(), ARCH).from_cache
        assert not compile_source(tiny(), ARCH).from_cache
    assert f"kernel cache {tmp_path / 'file' / 'kernels'} not used" in caplog.text


def test_a_full_disk_costs_the_cache_and_not_the_compile(cache, tree, monkeypatch, caplog):
    from cuda.core.utils import FileStreamProgramCache

    def full(self, key, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileStreamProgramCache, "__setitem__", full)
    with caplog.at_level(logging.INFO, "sparsetile"):
        assert compile_source(tiny(), ARCH).cubin.startswith(b"\x7fELF")
    assert "not written" in caplog.text and "No space left on device" in caplog.text


def test_without_compiling_only_the_cache_is_used(cache, tree):
    with without_compiling(), pytest.raises(NotCompiled, match="tiny"):
        compile_source(tiny(), ARCH)
    compile_source(tiny(), ARCH)
    with without_compiling():
        assert compile_source(tiny(), ARCH).from_cache


def test_the_cache_can_be_bypassed(cache, tree):
    assert not compile_source(tiny(), ARCH, use_cache=False).from_cache
    assert not cache.exists()


def test_one_line_of_information_comes_before_a_compile_and_none_before_a_hit(
    cache, tree, caplog, monkeypatch
):
    order = []
    monkeypatch.setattr(module.log, "info", lambda text, *args: order.append(text % args))
    report = module._report
    monkeypatch.setattr(module, "_report", lambda *args: order.append("compiled") or report(*args))
    compile_source(tiny(7), "sm_80")
    assert order == ["compiling tiny[kValue=7] for sm_80", "compiled"]
    compile_source(tiny(7), "sm_80")
    assert len(order) == 2
    assert module.log.name == "sparsetile"


TWO = """
import os
from sparsetile.jit import compile_source
from sparsetile.kernels import KERNELS
pid = os.fork()
spec = KERNELS["sddmm_csr"]
found = compile_source(spec.source(next(spec.configs())), "sm_90a")
print(found.cubin.hex()[:40], len(found.cubin), found.resources.registers, flush=True)
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_two_processes_on_a_cold_cache_both_succeed_and_leave_it_whole(cache, interpreter):
    ran = interpreter(TWO, SPARSETILE_CACHE_DIR=str(cache))
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.splitlines()
    assert first == second
    spec = KERNELS["sddmm_csr"]
    found = compile_source(spec.source(next(spec.configs())), ARCH)
    assert found.from_cache
    assert f"{found.cubin.hex()[:40]} {len(found.cubin)}" in first


def test_a_broken_source_gives_the_compiler_s_log_and_the_source_s_path(cache, tree):
    (tree / "tiny.cu").write_text(TINY.replace("kValue", "kValue + kMissing"))
    with pytest.raises(CompileError) as caught:
        compile_source(tiny(), ARCH)
    error = caught.value
    assert error.source_path == str(tree / "tiny.cu")
    assert "kMissing" in error.log and "tiny.cu(2)" in error.log
    assert str(error).startswith(
        "compile: tiny[kValue=1] must compile for sm_90a, got an NVRTC error. "
        f"Source {tree / 'tiny.cu'}; the compiler said:\n"
    )
    assert error.log in str(error)


def test_a_refused_source_is_not_remembered(cache, tree):
    (tree / "tiny.cu").write_text("broken")
    with pytest.raises(CompileError):
        compile_source(tiny(), ARCH)
    (tree / "tiny.cu").write_text(TINY)
    assert compile_source(tiny(), ARCH).resources.registers > 0


def test_host_and_device_that_disagree_on_the_parameters_do_not_compile(cache):
    spec = KERNELS["sddmm_csr"]
    source = spec.source(next(spec.configs()))
    assert compile_source(source, ARCH).cubin
    *fields, n = spec.params.fields
    params = ParamStruct.of(*fields, replace(n, declaration="long long n"))
    with pytest.raises(CompileError, match="host and device disagree on the parameter struct"):
        compile_source(replace(source, params=params), ARCH)


@pytest.mark.parametrize("arch", ["hopper", "sm_9", "sm_90x", "compute90", "sm_90a ", ""])
def test_rejects_an_invalid_architecture(cache, arch):
    with pytest.raises(ValueError) as caught:
        compile_source(tiny(), arch)
    assert str(caught.value) == (
        f"compile: arch must be a name such as sm_80 or sm_90a, got {arch!r}. Give one of those."
    )


def test_a_virtual_architecture_is_compiled_to_ptx(cache, tree, monkeypatch):
    """Without a driver cuda.core makes no PTX, so its Program is replaced."""
    import cuda.core

    class Program:
        def __init__(self, text, kind, options):
            assert options.arch == "compute_80" and options.ptxas_options is None

        def compile(self, target, logs):
            return SimpleNamespace(code=target.encode())

    monkeypatch.setattr(cuda.core, "Program", Program)
    found = compile_source(tiny(), "compute_80")
    assert found.virtual and found.cubin == b"ptx" and found.resources.registers == 0
    assert found.is_ptx and compile_source(tiny(), "compute_80").from_cache


@pytest.fixture
def assembling(monkeypatch) -> list[tuple[str, str]]:
    """Stands for cuda.core's Program, which needs a driver or nvJitLink; notes what it made."""
    import cuda.core

    made: list[tuple[str, str]] = []

    class Program:
        def __init__(self, text, kind, options):
            self.kind, self.arch = kind, options.arch
            if kind == "ptx":
                assert text == ".version 9.0", "without the zero byte at the end of NVRTC's"

        def compile(self, target, logs=None):
            made.append((self.arch, target))
            if self.arch == "sm_86":
                raise RuntimeError("unsupported .version 9.0")
            code = b"\x7fELF of sm_90" if self.kind == "ptx" else b".version 9.0\0"
            return SimpleNamespace(code=code)

    monkeypatch.setattr(cuda.core, "Program", Program)
    return made


@pytest.mark.filterwarnings("ignore:cuda.bindings.nvjitlink is not available")
def test_ptx_is_assembled_once_for_all_processes(cache, tree, assembling):
    """The driver would assemble it in each."""
    first = compile_source(tiny(), "compute_80", assemble_for="sm_90")
    assert assembling == [("compute_80", "ptx"), ("sm_90", "cubin")]
    assert first.virtual and not first.is_ptx and first.cubin == b"\x7fELF of sm_90"
    again = compile_source(tiny(), "compute_80", assemble_for="sm_90")
    assert again.from_cache and again.cubin == first.cubin and len(assembling) == 2
    assert compile_source(tiny(), "compute_80").is_ptx, "it is another entry"
    compile_source(tiny(), "compute_89", assemble_for="sm_90")
    compile_source(tiny(), "compute_80", assemble_for="sm_100")
    assert [each for each in assembling[3:] if each[1] == "cubin"] == [
        ("sm_90", "cubin"),
        ("sm_100", "cubin"),
    ]


def test_ptx_newer_than_the_linker_is_left_to_the_driver(cache, tree, assembling, caplog):
    with caplog.at_level(logging.INFO, "sparsetile"):
        found = compile_source(tiny(), "compute_80", assemble_for="sm_86")
    assert found.is_ptx and found.cubin.startswith(b".version 9.0")
    assert "PTX of tiny not assembled for sm_86: unsupported .version 9.0" in caplog.text


def test_a_kernel_that_is_not_assembled_yet_is_not_compiled_for_a_comparison(cache, assembling):
    spec = KERNELS["sddmm_csr"]
    source = spec.source(next(spec.configs()))
    with without_compiling(), pytest.raises(NotCompiled):
        compile_source(source, "compute_80", assemble_for="sm_90")
    assert not assembling


def test_an_architecture_the_compiler_does_not_know_is_a_compile_error(cache, tree):
    with pytest.raises(CompileError, match=r"must compile for sm_10, got an NVRTC error"):
        compile_source(tiny(), "sm_10")


def test_without_cuda_core_the_error_says_what_to_install(tree, monkeypatch):
    """As on Windows, where torch may have a GPU."""
    monkeypatch.setitem(sys.modules, "cuda.core.utils", None)
    with pytest.raises(CompileError) as caught:
        compile_source(tiny(), ARCH)
    said = str(caught.value)
    assert said.startswith(
        "compile: cuda-core must be installed to run kernels, got import of cuda"
    )
    assert said.endswith(
        "Install cuda-core and nvidia-cuda-nvrtc (on Windows in WSL 2), or use the CPU."
    )


def test_reports_why_the_compiler_is_missing(monkeypatch):
    assert compiler_available() is None
    major, minor = nvrtc_version()
    assert major >= 13 and minor >= 0

    def missing():
        raise ImportError("libnvrtc.so.13 is not here")

    monkeypatch.setattr(module, "nvrtc_version", missing)
    assert compiler_available() == "ImportError: libnvrtc.so.13 is not here"


def test_a_compiler_that_answers_with_an_error_says_which(monkeypatch):
    from cuda.bindings import nvrtc

    status = nvrtc.nvrtcResult.NVRTC_ERROR_INTERNAL_ERROR
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (status, 0, 0))
    nvrtc_version.cache_clear()
    try:
        assert str(compiler_available()).startswith("RuntimeError: nvrtcVersion answered")
    finally:
        nvrtc_version.cache_clear()


def test_the_architectures_of_the_tests_are_real_names():
    assert {"sm_80", "sm_89", "sm_90a"} <= set(ARCHITECTURES)


def test_spills_of_functions_that_a_kernel_calls_count_too():
    said = """
ptxas info    : Function properties for spmm
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Function properties for join_piece
    0 bytes stack frame, 12 bytes spill stores, 24 bytes spill loads
"""
    found = module._parse_resources(said)
    assert (found.spill_store_bytes, found.spill_load_bytes) == (16, 32)
    assert (found.registers, found.stack_bytes, found.static_shared_bytes) == (80, 16, 2048)
