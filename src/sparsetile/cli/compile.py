"""``sparsetile compile``: fill the kernel cache, with or without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from sparsetile.check.environment import core_count
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


_Job = tuple[KernelSpec, KernelSource, str]
_NUMBERS = ("configurations", "cached", "registers", "spill bytes", "spilling", "shared", "s")


def _jobs(kernels: Sequence[str], archs: Sequence[str]) -> list[_Job]:
    return [
        (KERNELS[name], KERNELS[name].source(config), arch)
        for name in kernels
        for arch in archs
        if KERNELS[name].runs_on(arch)
        for config in KERNELS[name].configs()
    ]


def _compile(job: _Job) -> dict[str, Any]:
    """Compile one configuration and return its row of ``--json``."""
    spec, source, arch = job
    found: Compiled | None = None
    error: str | None = None
    try:
        found = compile_source(source, arch)
    except CompileError as refused:
        error = str(refused)
    return {
        "kernel": spec.name, "arch": arch, "label": source.label, "ok": found is not None,
        "error": error, "from_cache": found is not None and found.from_cache,
        "seconds": 0.0 if found is None else found.seconds,
        "cubin_bytes": 0 if found is None else len(found.cubin),
        **({} if found is None else asdict(found.resources)),
    }  # fmt: skip


def _spill_bytes(row: Mapping[str, Any]) -> int:
    return max(row.get("spill_store_bytes", 0), row.get("spill_load_bytes", 0))


def _check_archs(work: Sequence[_Job]) -> None:
    """Raise for a target that the compiler does not know, once for all configurations."""
    first = {job[2]: job for job in reversed(work) if job[2] not in ARCHITECTURES}
    for arch, job in first.items():
        if "--gpu-architecture" in (_compile(job)["error"] or ""):
            raise value_error(
                "compile", "--arch", f"one that NVRTC knows, such as {', '.join(ARCHITECTURES)}",
                arch, "Name one of those, or omit --arch",
            )  # fmt: skip


def _default_archs() -> list[str]:
    if torch.cuda.is_available():
        return [device_arch(torch.cuda.current_device())]
    return list(ARCHITECTURES)


def _summary(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row a kernel and architecture."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["arch"]), []).append(row)
    cells = []
    for key, members in groups.items():
        registers = [row["registers"] for row in members if row["ok"]] or [0]
        cells.append([
            *key,
            str(len(members)),
            str(sum(row["from_cache"] for row in members)),
            f"{min(registers)}-{max(registers)}",
            str(sum(_spill_bytes(row) > 0 for row in members)),
            str(max(row.get("static_shared_bytes", 0) for row in members)),
            f"{sum(row['seconds'] for row in members):.2f}",
            "ok" if all(row["ok"] for row in members) else "FAILED",
        ])  # fmt: skip
    return cells


def _each(row: Mapping[str, Any]) -> list[str]:
    """One row a configuration."""
    return [
        row["label"], row["arch"], "yes" if row["from_cache"] else "no",
        str(row.get("registers", "-")), str(_spill_bytes(row)),
        str(row.get("static_shared_bytes", "-")), f"{row['seconds']:.2f}",
        "ok" if row["ok"] else "FAILED",
    ]  # fmt: skip


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
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            "--kernel", metavar="NAME", help="Only this kernel; may be repeated. All when omitted."
        ),
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
    # One log line per kernel suits a plan, but not this many.
    log = logging.getLogger("sparsetile")
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    rows: list[dict[str, Any]] = []
    try:
        _check_archs(work)
        # NVRTC releases the GIL and has no lock of its own, so threads use all cores.
        # The first kernel is compiled alone: cuda.core's first import is not thread-safe.
        with (
            progress_bar(f"compiling for {', '.join(arch or _default_archs())}", len(work)) as step,
            ThreadPoolExecutor(jobs or core_count()) as pool,
        ):
            rows.append(_compile(work[0]))
            step()
            for row in pool.map(_compile, work[1:]):
                rows.append(row)
                step()
    finally:
        log.setLevel(level)
    if as_json:
        print_json(rows)
    elif each:
        columns = ("configuration", "arch", "cached", "registers", "spill bytes", "shared", "s", "")
        print_table(columns, [_each(row) for row in rows], right=_NUMBERS[2:])
    else:
        print_table(("kernel", "arch", *_NUMBERS[:3], *_NUMBERS[4:], ""), _summary(rows),
                    right=_NUMBERS[1:])  # fmt: skip
    failed = [row["error"] for row in rows if not row["ok"]]
    for error in failed:
        note(f"sparsetile: error: {error}")
    allowed = [spec.allowed_spills for spec, _, _ in work]
    spilling = sum(_spill_bytes(row) > least for row, least in zip(rows, allowed, strict=True))
    if spilling:
        found = f"registers spill in {spilling} of {len(rows)} configurations"
        more = "" if each or as_json else " (--each lists them)"
        note(f"sparsetile: {found} with NVRTC {nvrtc_version()}: slower, not wrong{more}")
    return 1 if failed else 0
