"""Parameter structs and launches, with the driver replaced: no GPU is needed to see the bytes."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from types import SimpleNamespace

import pytest
import torch

from sparsetile.jit import LoadedKernel, device_arch, params_bytes
from sparsetile.jit import loader as module
from sparsetile.jit.loader import PreparedLaunch
from sparsetile.kernels import KERNELS

_CTYPES = {
    "P": ctypes.c_void_p,
    "Q": ctypes.c_ulonglong,
    "q": ctypes.c_longlong,
    "d": ctypes.c_double,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "x": ctypes.c_byte,  # padding
}


def fields_of(params_format: str) -> list[type]:
    """``2P3i`` -> the C types of the five fields."""
    return [
        _CTYPES[letter]
        for count, letter in re.findall(r"(\d*)(\w)", params_format)
        for _ in range(int(count or 1))
    ]


def structure(params_format: str) -> type[ctypes.Structure]:
    fields = [(f"f{i}", kind) for i, kind in enumerate(fields_of(params_format))]
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize("params_format", ["P", "Pi", "P3i", "iP", "P2iqi", "2Pidi", "Pfqf"])
def test_a_struct_is_as_long_as_c_makes_it(params_format):
    assert params_bytes(params_format) == ctypes.sizeof(structure(params_format))


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_the_parameters_of_every_kernel_are_as_long_as_c_makes_them(name):
    params_format = KERNELS[name].params_format
    assert params_bytes(params_format) == ctypes.sizeof(structure(params_format))


@pytest.mark.parametrize(
    "capability, arch",
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120"),
    ],
)
def test_a_chip_with_instructions_of_its_own_gets_the_a_target(monkeypatch, capability, arch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert device_arch(0) == arch


class Driver:
    """Stands for cuLaunchKernelEx: keeps the launch's sizes, and the struct's fields."""

    def __init__(self, params_format: str, status: int = 0) -> None:
        self.kind = structure(params_format)
        self.status = status
        self.calls: list[tuple] = []
        self.fields: list[tuple] = []

    def __call__(self, sizes, handle, address, extra):
        pointer = ctypes.c_void_p.from_address(address).value
        found = self.kind.from_address(pointer)
        self.fields.append(tuple(getattr(found, name) for name, _ in self.kind._fields_))
        names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ")
        numbers = tuple(getattr(sizes, name) for name in (*names, "sharedMemBytes", "numAttrs"))
        self.calls.append((handle, *numbers, int(sizes.hStream)))
        return (self.status,)


def kernel(driver: Driver, params_format: str) -> LoadedKernel:
    """A loaded kernel without a GPU: what the constructor would set, less the module."""
    made = LoadedKernel.__new__(LoadedKernel)
    made.compiled = SimpleNamespace(source=SimpleNamespace(label="toy[kVec=4]"))
    made.dynamic_shared = 1024
    made._handle = "handle"
    made._launch = driver
    made._may_overlap = True
    made._struct = struct.Struct("@" + params_format + "0P")
    made._local = threading.local()
    return made


def test_a_launch_hands_grid_threads_stream_and_struct_to_the_driver():
    driver = Driver("2Pqdi")
    kernel(driver, "2Pqdi").launch((3, 2, 1), 128, 77, 4096, 8192, -5, 0.25, True)
    assert driver.calls == [("handle", 3, 2, 1, 128, 1, 1, 1024, 0, 77)]
    assert driver.fields == [(4096, 8192, -5, 0.25, 1)]


@pytest.mark.parametrize("able", [False, True])
def test_a_kernel_starts_before_its_predecessor_ends_only_where_asked_and_able(able):
    driver = Driver("P")
    made = kernel(driver, "P")
    made._may_overlap = able
    patch = struct.Struct("@P")
    for overlap in (True, False):
        made.launch((1, 1, 1), 32, 0, 1, overlap=overlap)
        made.prepare((1, 1, 1), 32, (1,), patch, 0, overlap=overlap).launch(0, 2)
    assert [call[8] for call in driver.calls] == [able, able, False, False]


def test_overlap_is_the_driver_s_programmatic_serialisation():
    from cuda.bindings import driver

    (attribute,) = module._launch_config(True).attrs
    wanted = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.id == wanted
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_a_launch_that_fails_says_which_kernel_and_with_what():
    with pytest.raises(RuntimeError) as caught:
        kernel(Driver("P", status=700), "P").launch((3, 2, 1), 128, 0, 4096)
    assert str(caught.value) == (
        "launch: toy[kVec=4] must start, got 700 for grid (3, 2, 1), 128 threads. "
        "Run `sparsetile doctor`; if the GPU is healthy, report this as a bug."
    )


def test_a_prepared_launch_changes_only_the_fields_it_is_given():
    driver = Driver("4Pi")
    two, second = struct.Struct("@2P"), struct.calcsize("@P")
    prepared = kernel(driver, "4Pi").prepare((1, 1, 1), 64, (10, 20, 30, 40, 5), two, second)
    assert isinstance(prepared, PreparedLaunch)
    prepared.launch(7, 21, 31)
    prepared.launch(8, 22, 32)
    assert driver.fields == [(10, 21, 31, 40, 5), (10, 22, 32, 40, 5)]
    assert [call[-1] for call in driver.calls] == [7, 8]
    assert driver.calls[0] == ("handle", 1, 1, 1, 64, 1, 1, 1024, 0, 7)


def test_a_prepared_launch_that_fails_says_which_kernel():
    one = struct.Struct("@P")
    prepared = kernel(Driver("P", status=1), "P").prepare((1, 1, 1), 64, (10,), one, 0)
    with pytest.raises(RuntimeError) as caught:
        prepared.launch(0, 3)
    assert str(caught.value) == (
        "launch: toy[kVec=4] must start, got 1. Run `sparsetile doctor`; if the GPU is healthy, "
        "report this as a bug."
    )


@pytest.mark.parametrize("prepared", [False, True])
def test_threads_do_not_write_into_each_other_s_parameters(prepared):
    """All threads are inside the driver at once; each must still find its own numbers there."""
    barrier = threading.Barrier(4, timeout=30)

    class Slow(Driver):
        def __call__(self, *arguments):
            barrier.wait()
            return super().__call__(*arguments)

    driver = Slow("2P")
    made = kernel(driver, "2P")
    repeated = made.prepare((1, 1, 1), 32, (1, 2), struct.Struct("@P"), 0)

    def work(number: int) -> None:
        if prepared:
            repeated.launch(number, number)
        else:
            made.launch((1, 1, 1), 32, number, number, 2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(100, 104)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    streams = [call[-1] for call in driver.calls]
    assert sorted(streams) == [100, 101, 102, 103]
    assert [first for first, _ in driver.fields] == streams


def test_more_shared_memory_than_the_device_has_is_refused(monkeypatch):
    import cuda.core
    from cuda.bindings import driver

    loaded = SimpleNamespace(get_kernel=lambda entry: SimpleNamespace(handle=0))
    code = SimpleNamespace(from_cubin=lambda cubin, name: loaded)
    monkeypatch.setattr(cuda.core, "ObjectCode", code)
    status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuKernelSetAttribute", lambda *_: (status,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    compiled = SimpleNamespace(cubin=b"", resources=None, source=SimpleNamespace(entry="toy"))
    with pytest.raises(ValueError) as caught:
        LoadedKernel(compiled, "P", 300_000, 0)
    text = str(caught.value)
    assert text.startswith(
        "launch: shared memory must be within the device's limit, got 300000 bytes ("
    )
    assert text.endswith("Use a configuration with smaller tiles or fewer stages.")


def test_the_current_device_is_entered_only_when_it_is_another(monkeypatch):
    monkeypatch.setattr(module, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: f"enter {index}")
    assert module.on_device(1) is module._ALREADY_THERE
    assert module.on_device(0) == "enter 0"


def test_the_stream_s_handle_is_found_where_torch_has_no_quick_way(monkeypatch):
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert module._slow_stream(2) == 7
