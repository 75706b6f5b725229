"""``sparsetile compile``: fill the kernel cache, with or without a GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer

from sparsetile.cli.console import note, print_json, print_table, progress_bar
from sparsetile.cli.options import Json
from sparsetile.core.checks import one_of
from sparsetile.core.errors import CompileError, UnsupportedError, value_error
from sparsetile.jit import (
    ARCHITECTURES,
    Compiled,
    KernelSource,
    compile_source,
    compiler_available,
    device_arch,
    nvrtc_version,
)
from sparsetile.kernels import KERNELS, KernelSpec

__all__ = ["compile_kernels"]


@dataclass(frozen=True)
class _Job:
    spec: KernelSpec
    source: KernelSource
    arch: str


@dataclass(frozen=True)
class _Result:
    job: _Job
    compiled: Compiled | None
    error: str | None

    @property
    def spill_bytes(self) -> int:
        if self.compiled is None:
            return 0
        resources = self.compiled.resources
        return max(resources.spill_store_bytes, resources.spill_load_bytes)

    @property
    def unlisted_spill(self) -> bool:
        return self.spill_bytes > self.job.spec.allowed_spills

    def row(self) -> dict[str, Any]:
        found = self.compiled
        return {
            "kernel": self.job.spec.name,
            "arch": self.job.arch,
            "label": self.job.source.label,
            "ok": self.error is None,
            "error": self.error,
            "from_cache": found is not None and found.from_cache,
            "seconds": 0.0 if found is None else found.seconds,
            "cubin_bytes": 0 if found is None else len(found.cubin),
            **({} if found is None else asdict(found.resources)),
        }


def _jobs(kernels: Sequence[str], archs: Sequence[str]) -> list[_Job]:
    return [
        _Job(KERNELS[name], KERNELS[name].source(config), arch)
        for name in kernels
        for arch in archs
        if KERNELS[name].runs_on(arch)
        for config in KERNELS[name].configs()
    ]


def _compile(job: _Job) -> _Result:
    try:
        return _Result(job, compile_source(job.source, job.arch), None)
    except CompileError as error:
        return _Result(job, None, str(error))


def _check_archs(work: Sequence[_Job]) -> None:
    """Refuse a target that the compiler does not know, once and not per configuration."""
    first = {job.arch: job for job in reversed(work) if job.arch not in ARCHITECTURES}
    for arch, job in first.items():
        error = _compile(job).error
        if error is not None and "--gpu-architecture" in error:
            raise value_error(
                "compile", "--arch", f"one that NVRTC knows, such as {', '.join(ARCHITECTURES)}",
                arch, "Name one of those, or omit --arch",
            )  # fmt: skip


def _default_archs() -> list[str]:
    if torch.cuda.is_available():
        return [device_arch(torch.cuda.current_device())]
    return list(ARCHITECTURES)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # the cores this process may use, not those there are
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _summary(results: Sequence[_Result]) -> list[list[str]]:
    """One row a kernel and architecture."""
    groups: dict[tuple[str, str], list[_Result]] = {}
    for result in results:
        groups.setdefault((result.job.spec.name, result.job.arch), []).append(result)
    rows = []
    for (name, arch), members in groups.items():
        done = [member.compiled for member in members if member.compiled is not None]
        registers = [item.resources.registers for item in done] or [0]
        rows.append(
            [
                name,
                arch,
                str(len(members)),
                str(sum(item.from_cache for item in done)),
                f"{min(registers)}-{max(registers)}",
                str(sum(member.spill_bytes > 0 for member in members)),
                str(max((item.resources.static_shared_bytes for item in done), default=0)),
                f"{sum(item.seconds for item in done):.2f}",
                "ok" if all(member.row()["ok"] for member in members) else "FAILED",
            ]
        )
    return rows


def _each(results: Sequence[_Result]) -> list[list[str]]:
    """One row a configuration."""
    rows = []
    for result in results:
        row = result.row()
        rows.append(
            [
                row["label"],
                row["arch"],
                "yes" if row["from_cache"] else "no",
                str(row.get("registers", "-")),
                str(result.spill_bytes),
                str(row.get("static_shared_bytes", "-")),
                f"{row['seconds']:.2f}",
                "ok" if row["ok"] else "FAILED",
            ]
        )
    return rows


def compile_kernels(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            metavar="ARCH",
            help="Target such as sm_90a; may be repeated. This machine's GPU when omitted, or "
            f"{', '.join(ARCHITECTURES)} without one.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every kernel (also when --kernel is omitted).")
    ] = False,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", metavar="NAME", help="Only this kernel; may be repeated."),
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, metavar="N", help="Threads; 0 means one per core.")
    ] = 0,
    each: Annotated[
        bool, typer.Option("--each", help="A row per configuration, not per kernel.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Compile kernels into the cache; no GPU needed.

    Exit code 1 when the compiler refuses a kernel. Spills of another NVRTC are reported: such a
    kernel is slower, not wrong.
    """
    if everything and kernel:
        raise value_error(
            "compile", "--kernel", "omitted with --all", ", ".join(kernel), "Give one of the two"
        )
    names = [one_of("compile", "--kernel", name, KERNELS) for name in kernel or KERNELS]
    missing = compiler_available()
    if missing is not None:
        raise UnsupportedError(
            f"compile: the NVRTC compiler must load, got {missing}. Run `sparsetile doctor`."
        )
    work = _jobs(names, arch or _default_archs())
    if not work:
        raise value_error(
            "compile", "--arch", "one that the kernel is written for", arch,
            "Omit --arch, or see `sparsetile systems`",
        )  # fmt: skip
    # One line per kernel is right for a plan that needs one of them, noise for all of them.
    log = logging.getLogger("sparsetile")
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    results: list[_Result] = []
    try:
        _check_archs(work)
        # NVRTC releases the interpreter lock and takes none of its own: threads keep cores busy.
        # The first kernel is compiled by itself: cuda.core's first import must not meet another.
        with (
            progress_bar(f"compiling for {', '.join(arch or _default_archs())}", len(work)) as step,
            ThreadPoolExecutor(jobs or _cores()) as pool,
        ):
            results.append(_compile(work[0]))
            step()
            for result in pool.map(_compile, work[1:]):
                results.append(result)
                step()
    finally:
        log.setLevel(level)
    return _report(results, each, as_json)


def _report(results: list[_Result], each: bool, as_json: bool) -> int:
    if as_json:
        print_json([result.row() for result in results])
    elif each:
        print_table(
            ("configuration", "arch", "cached", "registers", "spill bytes", "shared", "s", ""),
            _each(results),
            right=("registers", "spill bytes", "shared", "s"),
        )
    else:
        print_table(
            (
                "kernel",
                "arch",
                "configurations",
                "cached",
                "registers",
                "spilling",
                "shared",
                "s",
                "",
            ),
            _summary(results),
            right=("configs", "cached", "registers", "spilling", "shared", "s"),
        )
    failed = [result.error for result in results if result.error is not None]
    for error in failed:
        note(f"sparsetile: error: {error}")
    spilling = sum(result.unlisted_spill for result in results)
    if spilling:
        found = f"registers spill in {spilling} of {len(results)} configurations"
        more = "" if each or as_json else " (--each lists them)"
        note(f"sparsetile: {found} with NVRTC {nvrtc_version()}: slower, not wrong{more}")
    return 1 if failed else 0
