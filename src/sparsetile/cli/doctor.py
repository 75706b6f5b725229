"""``sparsetile doctor``: what is installed, what works, what is missing, what works without it."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

import sparsetile
from sparsetile.check.environment import core_count, driver_version, nvrtc_text
from sparsetile.check.judge import check_product
from sparsetile.cli.checkout import checkout_root
from sparsetile.cli.console import activity, note, print_json, print_table, print_text
from sparsetile.cli.options import Json
from sparsetile.core import settings
from sparsetile.core.device import machine
from sparsetile.data.generators import random
from sparsetile.intake.csr import CSR
from sparsetile.jit import compile_source, compiler_available
from sparsetile.kernels import KERNELS
from sparsetile.tune import source_of

__all__ = ["Finding", "doctor", "examine"]

OK, MISSING, FAILED = "ok", "missing", "FAILED"
_TEST_ARCH = "sm_90a"
_PACKAGES = ("numpy", "scipy", "numba", "safetensors")
_REPORT_PACKAGES = ("matplotlib",)
_CUDA_PACKAGES = ("cuda-core", "cuda-bindings")
_WITHOUT_GPU = "plan, spmm and every command but `verify` work on the CPU (system cpu)"
_WITHOUT_DRIVER = "no GPU can be used; kernels still compile (`sparsetile compile`)"
_SOURCES = {
    "measured": "measured here by `sparsetile tune --fit`",
    "shipped": "shipped: fitted on a GPU of this model",
    "scaled": "scaled from an H200's; `sparsetile tune --fit` measures them in 90 seconds",
}
_WITHOUT_WINDOWS = (
    "GPU products need Linux, also in WSL 2: NVRTC, cuda.core and torch's CUDA build are installed "
    "there; on Windows itself matrices are read and multiplied on the CPU"
)
_WITHOUT_COMPILER = "products on the CPU, through cuSPARSE and dense still work"


@dataclass(frozen=True)
class Finding:
    """One line of the examination; ``advice`` says what still works, or what to do."""

    name: str
    status: str
    detail: str
    advice: str = ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Iterator[Finding]:
    yield Finding("sparsetile", OK, sparsetile.__version__)
    yield Finding(
        "Python",
        OK,
        f"{platform.python_version()}, {sys.platform} {platform.machine()}, {core_count()} cores",
    )
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Finding("torch", OK, f"{torch.__version__}, {build}")


def _packages() -> Iterator[Finding]:
    for packages, status, advice in (
        (_PACKAGES, FAILED, "reinstall sparsetile: it depends on this package"),
        (_REPORT_PACKAGES, MISSING, "for pictures run pip install 'sparsetile[report]'"),
        (_CUDA_PACKAGES, MISSING, f"GPU kernels cannot be compiled; {_WITHOUT_COMPILER}"),
    ):
        for package in packages:
            found = _version(package)
            if found:
                yield Finding(package, OK, found)
            else:
                yield Finding(package, status, "not installed", advice)


def _gpus() -> Iterator[Finding]:
    driver = driver_version()
    yield Finding(
        "NVIDIA driver",
        OK if driver else MISSING,
        driver or "not found",
        "" if driver else _WITHOUT_DRIVER,
    )
    if sys.platform == "win32":
        yield Finding("Windows", MISSING, "no GPU kernels here", _WITHOUT_WINDOWS)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            memory = f"{found.total_memory / 2**30:.0f} GiB"
            detail = f"{found.name}, sm_{found.major}{found.minor}, {memory}"
            yield Finding(f"GPU {index}", OK, detail)
            source = source_of(machine(torch.device("cuda", index)))
            yield Finding(f"cost models of GPU {index}", OK, _SOURCES[source])
        return
    if driver and torch.version.cuda is None:
        detail = "there is a driver, but torch was built without CUDA"
        advice = f"install a CUDA build of torch to use the GPU; until then {_WITHOUT_GPU}"
    elif driver:
        detail = "there is a driver, but torch finds no GPU it can use"
        advice = f"see nvidia-smi and CUDA_VISIBLE_DEVICES; until then {_WITHOUT_GPU}"
    else:
        detail, advice = "none", _WITHOUT_GPU
    yield Finding("GPU", MISSING, detail, advice)


def _settings() -> Iterator[Finding]:
    try:
        for name, value in settings.describe_settings().items():
            yield Finding(name, OK, value)
    except ValueError as error:
        yield Finding("settings", FAILED, str(error))
    folder = settings.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        yield Finding("kernel cache", OK, f"{folder} is writable")
    except OSError as error:
        yield Finding(
            "kernel cache",
            MISSING,
            f"{folder} cannot be written: {error.strerror or error}",
            "each process compiles its kernels again; set SPARSETILE_CACHE_DIR to another folder",
        )


def _compiler() -> Iterator[Finding]:
    trouble = compiler_available()
    if trouble is not None:
        installed = all(_version(package) for package in _CUDA_PACKAGES)
        yield Finding(
            "NVRTC",
            FAILED if installed else MISSING,
            f"does not load: {trouble}",
            f"install nvidia-cuda-nvrtc; {_WITHOUT_COMPILER}",
        )
        return
    yield Finding("NVRTC", OK, nvrtc_text() or "")
    spec = next(iter(KERNELS.values()))
    source = spec.source(next(iter(spec.configs())))

    def compile_one() -> str:
        made = compile_source(source, _TEST_ARCH, use_cache=False)
        return (
            f"{spec.name} for {_TEST_ARCH} in {made.seconds:.2f} s, "
            f"{made.resources.registers} registers"
        )

    yield _attempt("test compile", compile_one)


def _attempt(name: str, work: Callable[[], str]) -> Finding:
    """Run a task; an exception becomes the finding."""
    try:
        return Finding(name, OK, work())
    except Exception as error:
        text = " ".join(str(error).split())
        return Finding(
            name, FAILED, f"{type(error).__name__}: {text}",
            "this should work here: please report it with the output of this command",
        )  # fmt: skip


def _multiply(csr: CSR, device: torch.device) -> str:
    """Multiply a small matrix on a device and check it against float64."""
    plan = sparsetile.plan(csr, 64, dtype=torch.float32, device=device)
    B = torch.randn(csr.shape[1], 64, generator=torch.Generator().manual_seed(0)).to(device)
    verdict = check_product(csr.with_values(plan.values), B, plan @ B)
    if not verdict.ok:
        raise ArithmeticError(f"system {plan.system} is off by {verdict.worst:.3g} error bounds")
    return f"right to {verdict.worst:.2f} of the error bound (system {plan.system})"


def _products() -> Iterator[Finding]:
    csr = random(rows=500, cols=400, nnz=8000, weighted=True, seed=0)
    yield _attempt("product on the CPU", lambda: _multiply(csr, torch.device("cpu")))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            yield _attempt(f"product on GPU {index}", lambda d=device: _multiply(csr, d))  # type: ignore[misc]


def _proofs() -> Iterator[Finding]:
    """The age of a source checkout's proofs, which does not depend on this machine."""
    root = checkout_root()
    if root is None or not (root / "results").is_dir():
        return
    sys.path.insert(0, str(root))
    try:
        ages = importlib.import_module("tools.proofs").ages(root)
    except ImportError:  # another package of that name was imported before
        return
    finally:
        sys.path.remove(str(root))
    for age in ages:  # an old proof, or none, is no fault of this machine
        yield Finding(f"proof {age.name}", OK if age.date else "-", age.text)


def examine() -> list[Finding]:
    """Check everything; errors become findings."""
    found: list[Finding] = []
    for part in (_python, _packages, _gpus, _compiler, _settings, _products, _proofs):
        found.extend(part())
    return found


def doctor(as_json: Json = False) -> int:
    """Show what is installed, what works, what is missing and what still works without it."""
    with activity("looking, compiling and multiplying"):
        found = examine()
    failed = [finding for finding in found if finding.status == FAILED]
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in found]})
        return 1 if failed else 0
    print_table(
        ("what", "status", "detail"),
        [[finding.name, finding.status, finding.detail] for finding in found],
    )
    for finding in found:
        if finding.status in (MISSING, FAILED):
            print_text(
                f"{finding.name} {finding.status.lower()}: {finding.advice or finding.detail}."
            )
    note(
        f"sparsetile: {len(failed)} of {len(found)} checks failed"
        if failed
        else "sparsetile: everything that is possible here works"
    )
    return 1 if failed else 0
