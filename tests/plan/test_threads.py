"""Plans made by many threads at once, in a process that has loaded no kernel yet."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.contracts.cases import runs_on_this_gpu

PROGRAM = """
import sys
import threading
import torch
import sparsetile as st

torch.backends.cuda.matmul.allow_tf32 = True
device, systems = sys.argv[1], sys.argv[2].split(",")
jobs = [(system, n) for system in systems for n in (32, 40)] * 2
together, wrong = threading.Barrier(len(jobs), timeout=240), []

def work(number, system, n):
    generator = torch.Generator().manual_seed(number)
    dense = torch.randn(300 + number, 200, generator=generator)
    dense *= torch.rand(dense.shape, generator=generator) < 0.05
    A, B = dense.to_sparse_csr().to(device), torch.randn(200, n, generator=generator)
    try:
        together.wait()
        plan = st.plan(A, n, system=system)
        found = [plan @ B.to(device) for _ in range(3)]
        for C in found:
            torch.testing.assert_close(C.cpu(), dense @ B, rtol=2e-2, atol=2e-2)
    except Exception as error:
        wrong.append(f"{system} N = {n}: {error!r}"[:300])

threads = [threading.Thread(target=work, args=(k, *job)) for k, job in enumerate(jobs)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("wrong:", *wrong, sep="\\n") if wrong else print("right")
"""


def run(device: str, systems: list[str]) -> str:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, device, ",".join(systems)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    return done.stdout.strip() + done.stderr[-2000:]


def test_threads_plan_and_multiply_at_once():
    assert run("cpu", ["cpu", "auto"]) == "right"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_threads_plan_and_multiply_at_once_on_a_gpu():
    """Kernels that two threads loaded were unloaded with one of them, while they ran."""
    systems = ["csr", "acc", "wcsr", "rsh", "brp", "half", "dense"]
    here = [name for name in systems if runs_on_this_gpu(name)]
    assert run("cuda", [*here, "auto"]) == "right"


COLD = """
import sys
import threading
import time
import torch
import sparsetile as st

family = sys.modules["sparsetile.plan.family"]

def slowly(function):
    def wait(*args):
        found = function(*args)
        time.sleep(0.05)  # until every thread is here, if nothing stops it
        return found
    return wait

family.flatten, family.row_scale = slowly(family.flatten), slowly(family.row_scale)
edges = torch.tensor([[0, 3, 1, 1], [2, 0, 3, 3]])
made = st.plan((edges, torch.ones(4), (4, 4)), 8)
together, seen = threading.Barrier(4, timeout=60), []

def work():
    together.wait()
    B = torch.ones(4, 8, requires_grad=True)
    made.run(B, values=torch.ones(4)).sum().backward()
    made.run(B, reduce="mean").sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made.run(B.detach())
    seen.append((id(made.flat), id(made._variant.row_scale)))

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
read = {id(each) for each in made._variant.read_tensors()}
parts = [made._variant.row_scale, made._csr.entry_map, *made.flat[0], *made._csr.duplicates()]
print(len(seen), len(set(seen)), all(id(part) in read for part in parts))
"""


def test_what_threads_build_at_once_is_built_once_and_known_to_be_read(interpreter):
    """Streams read what a plan built last: what was built first must not be replaced."""
    done = interpreter(COLD)
    assert done.stdout.split() == ["4", "1", "True"], done.stdout + done.stderr[-2000:]
