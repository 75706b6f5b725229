"""One NCCL rank on one GPU against the plain plan: the cost of sparsetile.dist. Needs a GPU.

    python -m tools.dist_nccl_check > dist_nccl.jsonl     # a minute at most

One JSON line per check and size, with ``"right"``: results were compared. A check that raises is a
line with ``"error"``; then, or if a result is wrong, the exit status is 1.

    world_of_one    ``dplan @ B`` beside ``plan @ B``. Aims: at most 5 % more (``ratio_met``; of
                    products that take long) and at most 15 us more (``added_met``)
    layer           Column- and RowParallelSparseLinear beside SparseLinear
    packing         bytes per second of packing a halo, beside those of a copy
    halo_to_itself  a plan whose halo the rank sends to itself: NCCL's all-to-all, the side stream,
                    both products, gradients and a CUDA graph, as with several ranks

With ``--cpu`` it runs small sizes on gloo: a test of the script, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import operator
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import sparsetile as st
import sparsetile.dist
from sparsetile.core.timer import time_product
from sparsetile.data import generators
from sparsetile.dist.exchange import Exchange
from sparsetile.dist.group import Ranks
from sparsetile.dist.halo import Halo
from sparsetile.dist.partition import Partition
from sparsetile.dist.plan import DistributedPlan
from sparsetile.dist.shares import Found

# No check begins after the first, and the process ends at the second, whatever it waits for.
LAST_START = 45.0
LIMIT = 60.0
MOST_RATIO, MOST_ADDED_US = 1.05, 15.0


@dataclass(frozen=True)
class Sizes:
    """How large the checks are."""

    graphs: tuple[tuple[int, int, int], ...]  # rows, entries, N
    packed: tuple[int, int]  # rows of B, N
    features: int
    tokens: int
    calls: int
    rounds: int


LARGE = Sizes(
    ((1000, 10_000, 32), (100_000, 2_000_000, 128), (200_000, 8_000_000, 128)),
    (1_000_000, 128), 4096, 1024, 100, 5,
)  # fmt: skip
SMALL = Sizes(((300, 3000, 8),), (1000, 8), 256, 16, 2, 2)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(
    calls: dict[str, Callable[[], object]], device: torch.device, sizes: Sizes
) -> dict[str, tuple[float, float]]:
    """Return (host, whole) seconds per call of each: until queued, and until computed.

    Calls take turns, round by round, and the fastest round counts, so that clocks and other work on
    the machine affect them equally.
    """
    best = {name: (float("inf"), float("inf")) for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(sizes.rounds):
        for name, call in calls.items():
            synchronize(device)
            begun = time.perf_counter()
            for _ in range(sizes.calls):
                call()
            queued = time.perf_counter()
            synchronize(device)
            ended = time.perf_counter()
            host, whole = best[name]
            best[name] = (
                min(host, (queued - begun) / sizes.calls),
                min(whole, (ended - begun) / sizes.calls),
            )
    return best


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether results agree to the rounding of their type; sums may have another order."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    error = (found.double() - expected.double()).abs().max() if found.numel() else torch.zeros(())
    size = expected.double().abs().max() if expected.numel() else torch.ones(())
    # TF32 has 10 bits, like float16.
    bits = max(torch.finfo(found.dtype).eps, 2.0**-10)
    return bool(error <= 4 * bits * size)


@functools.cache
def graph_of(rows: int, entries: int, device: torch.device) -> st.CSR:
    """A power-law graph in float32, generated once."""
    return generators.power_law(rows, entries, weighted=True, seed=1).to(device)


def graph_in(rows: int, entries: int, dtype: torch.dtype, device: torch.device) -> st.CSR:
    csr = graph_of(rows, entries, device)
    assert csr.values is not None
    return csr.with_values(csr.values.to(dtype))


def world_of_one(group: Any, device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    for rows, entries, n in sizes.graphs:
        for dtype in (torch.float32, torch.bfloat16):
            csr = graph_in(rows, entries, dtype, device)
            plain = st.plan(csr, n)
            made = sparsetile.dist.plan(csr, n, group)
            B = torch.randn(rows, n, device=device).to(dtype)
            right = close(made @ B, plain @ B)
            values = made.values
            taken = call_seconds(
                {
                    "plain": functools.partial(operator.matmul, plain, B),
                    "dist": functools.partial(operator.matmul, made, B),
                    # What several ranks do besides the exchange: checks, values in two parts.
                    "checked": functools.partial(made.run, B, values=values),
                },
                device, sizes,
            )  # fmt: skip
            kernels = {
                name: time_product(run, device)
                for name, run in (
                    ("plain", lambda plain=plain, B=B: plain @ B),
                    ("dist", lambda made=made, B=B: made @ B),
                )
            }
            whole = taken["dist"][1] - taken["plain"][1]
            host = taken["dist"][0] - taken["plain"][0]
            ratio = taken["dist"][1] / taken["plain"][1]
            yield {
                "check": "world_of_one", "rows": rows, "nnz": csr.nnz, "n": n, "dtype": str(dtype),
                "system": plain.system,
                "dist_system": made.system, "right": right,
                **{f"{name}_host_us": 1e6 * pair[0] for name, pair in taken.items()},
                **{f"{name}_call_us": 1e6 * pair[1] for name, pair in taken.items()},
                **{f"{name}_graph_us": 1e6 * found.median for name, found in kernels.items()},
                "method": kernels["dist"].method,
                "ratio": ratio, "added_us": 1e6 * whole, "added_host_us": 1e6 * host,
                "ratio_met": ratio <= MOST_RATIO,
                "added_met": 1e6 * max(whole, host) <= MOST_ADDED_US,
            }  # fmt: skip


def self_halo(csr: st.CSR) -> Halo:
    """The halo of a rank that sends itself the rows of B of the upper half of A's columns."""
    columns = csr.indices.long()
    inside = columns < csr.shape[1] // 2
    lacking = torch.unique(columns[~inside])

    def part(chosen: Tensor, numbers: Tensor, width: int) -> st.CSR:
        before = torch.zeros(chosen.numel() + 1, dtype=torch.int64, device=chosen.device)
        torch.cumsum(chosen, 0, out=before[1:])
        return st.CSR(before[csr.indptr], numbers.to(torch.int32), None, (csr.shape[0], width))

    count = lacking.numel()
    return Halo(
        collective="all_to_all",
        local=part(inside, columns[inside], csr.shape[1]),
        remote=part(~inside, torch.searchsorted(lacking, columns[~inside]), count),
        local_entries=torch.nonzero(inside).flatten(),
        remote_entries=torch.nonzero(~inside).flatten(),
        send_ids=lacking,
        send_rows=(count,),
        receive_rows=(count,),
        rows=count,
        needed=torch.tensor([[count]]),
        padded=csr.shape[1],
    )


def packing(group: Any, device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    rows, n = sizes.packed
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        B = torch.randn(rows, n, device=device).to(dtype)
        other = torch.empty_like(B)
        copy = time_product(functools.partial(other.copy_, B), device).median
        rate = 2 * B.numel() * B.element_size() / copy
        for share in (0.1, 0.5):
            chosen = torch.randperm(rows, generator=generator)[: int(share * rows)]
            ids = chosen.sort().values.to(device)
            count = ids.numel()
            nothing = st.CSR(
                torch.zeros(1, dtype=torch.int64, device=device),
                torch.zeros(0, dtype=torch.int32, device=device), None, (0, count),
            )  # fmt: skip
            none = torch.zeros(0, dtype=torch.int64, device=device)
            halo = Halo(
                "all_to_all", nothing, nothing, none, none, ids, (count,), (count,), count,
                torch.tensor([[count]]), rows,
            )  # fmt: skip
            exchange = Exchange(Ranks(group, "check"), halo, rows, n)
            sent, _ = exchange._buffers_for(B)

            def pack(exchange: Exchange = exchange, B: Tensor = B, sent: Tensor = sent) -> None:
                exchange._pack(B, sent)

            def both(exchange: Exchange = exchange, B: Tensor = B) -> Tensor:
                received, pending = exchange.start(B, keep=False)
                pending.wait()
                return received

            pack()
            right = torch.equal(sent[:, 0], B[ids]) and torch.equal(both()[:, 0], B[ids])
            moved = 2 * sent.numel() * sent.element_size()
            packed = time_product(pack, device)
            yield {
                "check": "packing", "rows": rows, "n": n, "dtype": str(dtype), "share": share,
                "right": right, "pack_us": 1e6 * packed.median,
                "pack_bytes_per_s": moved / packed.median, "copy_bytes_per_s": rate,
                "of_copy": moved / packed.median / rate, "method": packed.method,
            }  # fmt: skip


def gradient(product: Callable[[Tensor], Tensor], B: Tensor, G: Tensor) -> Tensor:
    leaf = B.detach().clone().requires_grad_()
    return torch.autograd.grad(product(leaf), leaf, G)[0]


def timeline(
    exchange: Exchange, local: st.Plan, remote: st.Plan, B: Tensor
) -> list[dict[str, Any]]:
    """Return what a product does on the GPU: step, stream, begin and end in us after its start.

    Events on both streams are recorded around the steps, in the order in which the plan queues
    them. The last of several products counts.
    """
    if not B.is_cuda:
        return []
    current, side = torch.cuda.current_stream(B.device), exchange.ranks.side_stream(B.device)
    for _ in range(5):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(7)]
        synchronize(B.device)
        torch.cuda._sleep(20_000_000)  # 10 ms: the host queues everything before the GPU begins
        marks[0].record(current)
        side.wait_stream(current)
        marks[1].record(side)
        received, pending = exchange.start(B, keep=False)
        marks[2].record(side)
        marks[3].record(current)
        C = local @ B
        marks[4].record(current)
        pending.wait()
        marks[5].record(current)
        remote.run(received[:, 0], out=C, beta=1.0)
        marks[6].record(current)
        synchronize(B.device)
    at = [1e3 * marks[0].elapsed_time(mark) for mark in marks]
    return [
        {"step": step, "stream": stream, "begin_us": at[begin], "end_us": at[begin + 1]}
        for step, stream, begin in (
            ("pack and exchange", "side", 1), ("local product", "main", 3),
            ("halo's product", "main", 5),
        )
    ]  # fmt: skip


def beside(spans: Sequence[dict[str, Any]]) -> float | None:
    """Return the share of the exchange's time during which the local product runs."""
    if not spans:
        return None
    moved, product, _ = spans
    shared = min(moved["end_us"], product["end_us"]) - max(moved["begin_us"], product["begin_us"])
    return max(shared, 0.0) / (moved["end_us"] - moved["begin_us"])


def halo_to_itself(group: Any, device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    rows, entries, n = sizes.graphs[min(1, len(sizes.graphs) - 1)]
    for dtype in (torch.float32, torch.bfloat16):
        csr, ranks = graph_in(rows, entries, dtype, device), Ranks(group, "check")
        partition = Partition("given", (0, rows), (0, rows))
        halo = self_halo(csr)
        assert csr.values is not None
        local, remote = (
            st.plan(st.CSR(one.indptr, one.indices, csr.values[which], one.shape), n)
            for one, which in (
                (halo.local, halo.local_entries),
                (halo.remote, halo.remote_entries),
            )
        )
        found = Found(csr, partition, csr.shape, "a check")
        made = DistributedPlan(ranks, found, halo, local, remote, csr.nnz, check="first")
        plain = st.plan(csr, n)
        B = torch.randn(rows, n, device=device).to(dtype)
        G, bias = torch.randn_like(B), torch.randn(n, device=device).to(dtype)
        H = B[: halo.rows].contiguous()

        # run() of one rank uses the plain plan; these are the functions for several ranks.
        def product(made: DistributedPlan = made, B: Tensor = B, **more: Any) -> Tensor:
            options: dict[str, Any] = {"bias": None, "relu": False, "out_dtype": None, **more}
            return made._fused(B, (None, None, None), 1.0, **options).to(B.dtype)

        def tracked(leaf: Tensor, made: DistributedPlan = made) -> Tensor:
            return made._differentiable(leaf, (None, None, None), 1.0, "sum", None, False, None)

        def sent(exchange: Exchange = made._exchange, B: Tensor = B) -> None:
            exchange.start(B, keep=False)[1].wait()

        expected = plain.run(B, bias=bias, relu=True)
        right = close(product().clone(), plain @ B)
        right = right and close(product(bias=bias, relu=True).clone(), expected)
        right = right and close(gradient(tracked, B, G), gradient(plain.run, B, G))
        title = {
            "check": "halo_to_itself", "rows": rows, "nnz": csr.nnz, "n": n, "dtype": str(dtype),
            "halo_rows": halo.rows, "right": right,
        }  # fmt: skip
        yield title  # capturing may end the process
        times = {
            name: time_product(run, device)
            for name, run in (
                ("plain", lambda plain=plain, B=B: plain @ B),
                ("whole", product),
                ("exchange", sent),
                ("local", lambda local=local, B=B: local @ B),
                ("halo", lambda remote=remote, H=H: remote @ H),
            )
        }
        apart = sum(times[name].median for name in ("exchange", "local", "halo"))
        spans = timeline(made._exchange, local, remote, B)
        yield {
            **title,
            **{f"{name}_us": 1e6 * found.median for name, found in times.items()},
            "captured": times["whole"].method == "graph",
            # Sum of the parts minus the whole: the overlap, if it is positive.
            "hidden_us": 1e6 * (apart - times["whole"].median),
            "timeline": spans,
            "exchange_beside_product": beside(spans),
        }  # fmt: skip


def layer(group: Any, device: torch.device, sizes: Sizes) -> Iterator[dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    dense = torch.nn.Linear(sizes.features, sizes.features).to(device=device, dtype=dtype)
    single = st.nn.SparseLinear.from_dense(dense.weight, dense.bias, sparsity=0.9)
    x = torch.randn(sizes.tokens, sizes.features, device=device).to(dtype)
    G = torch.randn_like(x)
    for kind in (
        sparsetile.dist.ColumnParallelSparseLinear,
        sparsetile.dist.RowParallelSparseLinear,
    ):
        parallel = kind.from_linear(single, group)
        right = close(parallel(x), single(x))
        right = right and close(gradient(parallel, x, G), gradient(single, x, G))
        with torch.no_grad():
            taken = call_seconds(
                {
                    "plain": lambda: single(x),
                    "dist": functools.partial(parallel, x),
                },
                device, sizes,
            )  # fmt: skip
        yield {
            "check": "layer", "layer": kind.__name__, "features": sizes.features,
            "tokens": sizes.tokens, "dtype": str(dtype), "right": right,
            **{f"{name}_host_us": 1e6 * pair[0] for name, pair in taken.items()},
            **{f"{name}_call_us": 1e6 * pair[1] for name, pair in taken.items()},
            "ratio": taken["dist"][1] / taken["plain"][1],
            "added_us": 1e6 * (taken["dist"][1] - taken["plain"][1]),
        }  # fmt: skip


# Captures of NCCL come last: one that fails may leave nothing usable behind.
CHECKS = (world_of_one, layer, packing, halo_to_itself)


def checks(
    group: Any, device: torch.device, sizes: Sizes, last_start: float
) -> Iterator[dict[str, Any]]:
    """Yield every check's lines; one that raises, or that comes too late, is a line too.

    Nothing begins after ``last_start``, by ``time.monotonic()``.
    """
    for check in CHECKS:
        lines = check(group, device, sizes)
        while True:
            if time.monotonic() > last_start:
                yield {"check": check.__name__, "skipped": "no time left"}
                break
            try:
                line = next(lines, None)
            except Exception as error:
                text = " ".join(str(error).split())
                yield {"check": check.__name__, "error": f"{type(error).__name__}: {text}"[:500]}
                break
            if line is None:
                break
            yield line


def rounded(line: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in line.items()
    }


def main() -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="small sizes on gloo")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        print("dist_nccl_check: no GPU found. Pass --cpu to test the script.", file=sys.stderr)
        return 2
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if arguments.cpu else "nccl", store=dist.HashStore(), rank=0, world_size=1,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    first: dict[str, Any] = {"check": "machine", "torch": torch.__version__}
    if device.type == "cuda":
        first["gpu"] = torch.cuda.get_device_name(device)
        first["nccl"] = str(torch.cuda.nccl.version())
    print(json.dumps(first), flush=True)
    wrong = 0
    sizes = SMALL if arguments.cpu else LARGE
    for line in checks(dist.group.WORLD, device, sizes, begun + LAST_START):
        print(json.dumps(rounded(line)), flush=True)
        wrong += "error" in line or line.get("right") is False
    synchronize(device)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
