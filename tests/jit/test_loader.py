"""Parameter structs and launches, with the driver replaced: no GPU is needed to see the bytes."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from sparsetile.jit import KernelSource, LoadedKernel, ParamStruct, device_arch
from sparsetile.jit import loader as module
from sparsetile.jit.loader import PreparedLaunch
from sparsetile.jit.params import f64, i32, i64, pointer

TWO = ParamStruct.of(pointer("b", "float*"), pointer("c", "float*"))
ONE = ParamStruct.of(pointer("b", "float*"))
SEVERAL = ParamStruct.of(
    pointer("a", "float*"), pointer("b", "float*"), pointer("c", "float*"), i64("stride"),
    f64("alpha"), i32("n"),
)  # fmt: skip
VALUES = {"a": 10, "b": 4096, "c": 8192, "stride": -5, "alpha": 0.25, "n": 7}


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
def test_a_chip_with_instructions_of_its_own_gets_the_a_target(capability, arch, torch_cuda):
    torch_cuda(get_device_capability=capability)
    assert device_arch(0) == arch


@pytest.mark.parametrize(
    "chosen, arch", [("8.0", "compute_80"), ("8.9:142:96", "compute_89"), ("9.0", "compute_90a")]
)
def test_a_chosen_capability_is_compiled_for_as_a_virtual_target(
    chosen, arch, torch_cuda, environment
):
    torch_cuda(get_device_capability=(9, 0))
    environment(SPARSETILE_CAPABILITY=chosen)
    assert device_arch(0) == arch


class Driver:
    """Stands for cuLaunchKernelEx: keeps the launch's sizes, and the struct's fields."""

    def __init__(self, params: ParamStruct, status: int = 0) -> None:
        self.format = params._struct.format
        self.status = status
        self.calls: list[tuple] = []
        self.fields: list[tuple] = []

    def __call__(self, sizes, handle, address, extra):
        pointer = ctypes.c_void_p.from_address(address).value
        found = ctypes.string_at(pointer, struct.calcsize(self.format))
        self.fields.append(struct.unpack(self.format, found))
        names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ")
        numbers = tuple(getattr(sizes, name) for name in (*names, "sharedMemBytes", "numAttrs"))
        self.calls.append((handle, *numbers, int(sizes.hStream)))
        return (self.status,)


def kernel(driver: Driver, params: ParamStruct) -> LoadedKernel:
    """A loaded kernel without a GPU: what the constructor would set, less the module."""
    made = LoadedKernel.__new__(LoadedKernel)
    made.compiled = SimpleNamespace(source=SimpleNamespace(label="toy[kVec=4]"))
    made.dynamic_shared = 1024
    made._handle = "handle"
    made._launch = driver
    made._may_overlap = True
    made.params = params
    made._local = threading.local()
    return made


def test_a_launch_hands_grid_threads_stream_and_struct_to_the_driver():
    driver = Driver(SEVERAL)
    kernel(driver, SEVERAL).launch((3, 2, 1), 128, 77, VALUES)
    assert driver.calls == [("handle", 3, 2, 1, 128, 1, 1, 1024, 0, 77)]
    assert driver.fields == [(10, 4096, 8192, -5, 0.25, 7)]


def test_a_launch_that_lacks_a_parameter_does_not_start():
    driver = Driver(TWO)
    with pytest.raises(ValueError, match="missing: c; unknown: C"):
        kernel(driver, TWO).launch((1, 1, 1), 32, 0, {"b": 1, "C": 2})
    assert driver.calls == []


@pytest.mark.parametrize("able", [False, True])
def test_overlaps_launches_only_if_requested_and_supported(able):
    driver = Driver(ONE)
    made = kernel(driver, ONE)
    made._may_overlap = able
    for overlap in (True, False):
        made.launch((1, 1, 1), 32, 0, {"b": 1}, overlap=overlap)
        made.prepare((1, 1, 1), 32, {"b": 1}, ("b",), overlap=overlap).launch(0, 2)
    assert [call[8] for call in driver.calls] == [able, able, False, False]


def test_overlap_is_the_driver_s_programmatic_serialisation():
    from cuda.bindings import driver

    (attribute,) = module._launch_config(True).attrs
    wanted = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.id == wanted
    assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_a_launch_that_fails_says_which_kernel_and_with_what():
    with pytest.raises(RuntimeError) as caught:
        kernel(Driver(ONE, status=700), ONE).launch((3, 2, 1), 128, 0, {"b": 4096})
    assert str(caught.value) == (
        "launch: toy[kVec=4] must start, got 700 for grid (3, 2, 1), 128 threads. "
        "Run `sparsetile doctor`; if the GPU is healthy, report this as a bug."
    )


def test_a_prepared_launch_changes_only_the_fields_it_is_given():
    driver = Driver(SEVERAL)
    prepared = kernel(driver, SEVERAL).prepare((1, 1, 1), 64, VALUES, ("b", "c"))
    assert isinstance(prepared, PreparedLaunch)
    prepared.launch(7, 21, 31)
    prepared.launch(8, 22, 32)
    assert driver.fields == [(10, 21, 31, -5, 0.25, 7), (10, 22, 32, -5, 0.25, 7)]
    assert [call[-1] for call in driver.calls] == [7, 8]
    assert driver.calls[0] == ("handle", 1, 1, 1, 64, 1, 1, 1024, 0, 7)


def test_rare_fields_are_written_only_if_they_changed():
    driver = Driver(SEVERAL)
    names = [field.name for field in SEVERAL.fields]
    rare, patch = (names[0],), ("b", "c")
    prepared = kernel(driver, SEVERAL).prepare((1, 1, 1), 64, VALUES, patch, rare)
    for first, number in ((40, 21), (40, 22), (50, 23), (40, 24)):
        prepared.launch_with(7, (first,), number, number + 10)
    assert [each[:3] for each in driver.fields] == [
        (40, 21, 31), (40, 22, 32), (50, 23, 33), (40, 24, 34),
    ]  # fmt: skip


def test_a_prepared_launch_that_fails_says_which_kernel():
    prepared = kernel(Driver(ONE, status=1), ONE).prepare((1, 1, 1), 64, {"b": 10}, ("b",))
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

    driver = Slow(TWO)
    made = kernel(driver, TWO)
    repeated = made.prepare((1, 1, 1), 32, {"b": 1, "c": 2}, ("b",))

    def work(number: int) -> None:
        if prepared:
            repeated.launch(number, number)
        else:
            made.launch((1, 1, 1), 32, number, {"b": number, "c": 2})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(100, 104)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    streams = [call[-1] for call in driver.calls]
    assert sorted(streams) == [100, 101, 102, 103]
    assert [first for first, _ in driver.fields] == streams


def test_more_shared_memory_than_the_device_has_is_refused(monkeypatch, torch_cuda):
    import cuda.core
    from cuda.bindings import driver

    loaded = SimpleNamespace(get_kernel=lambda entry: SimpleNamespace(handle=0))
    code = SimpleNamespace(from_cubin=lambda cubin, name: loaded)
    monkeypatch.setattr(cuda.core, "ObjectCode", code)
    status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuKernelSetAttribute", lambda *_: (status,))
    torch_cuda(get_device_capability=(9, 0))
    source = SimpleNamespace(entry="toy")
    facts = {"resources": None, "source": source, "virtual": False, "is_ptx": False}
    compiled = SimpleNamespace(cubin=b"", **facts)
    with pytest.raises(ValueError) as caught:
        LoadedKernel(compiled, ONE, 300_000, 0)
    text = str(caught.value)
    assert text.startswith(
        "launch: shared memory must be within the device's limit, got 300000 bytes ("
    )
    assert text.endswith("Use a configuration with smaller tiles or fewer stages.")


@pytest.mark.parametrize("is_ptx", [False, True])
@pytest.mark.parametrize("dynamic, fits", [(99 * 1024 - 512, True), (99 * 1024 - 511, False)])
def test_a_chosen_capability_has_its_own_limit_of_shared_memory(
    monkeypatch, torch_cuda, environment, dynamic, fits, is_ptx
):
    """Its assembled PTX is loaded, or PTX itself, and the driver's limit, that of the real GPU, is
    not the one."""
    import cuda.core
    from cuda.bindings import driver

    ok, given = driver.CUresult.CUDA_SUCCESS, []
    loaded = SimpleNamespace(get_kernel=lambda entry: SimpleNamespace(handle=0))
    name = "from_ptx" if is_ptx else "from_cubin"
    code = SimpleNamespace(**{name: lambda code, name: given.append(code) or loaded})
    monkeypatch.setattr(cuda.core, "ObjectCode", code)
    monkeypatch.setattr(driver, "cuKernelSetAttribute", lambda *_: (ok,))
    monkeypatch.setattr(driver, "cuKernelGetAttribute", lambda *_: (ok, 512))
    torch_cuda(get_device_capability=(9, 0))
    environment(SPARSETILE_CAPABILITY="8.9")
    source = SimpleNamespace(entry="toy")
    facts = {"resources": None, "source": source, "virtual": True, "is_ptx": is_ptx}
    compiled = SimpleNamespace(cubin=b"code", **facts)
    if fits:
        kernel = LoadedKernel(compiled, ONE, dynamic, 0)
        assert given == [b"code"] and not kernel._may_overlap, "sm_89 has no dependent launches"
        return
    with pytest.raises(ValueError) as caught:
        LoadedKernel(compiled, ONE, dynamic, 0)
    assert str(caught.value) == (
        "launch: shared memory must be within the device's limit, got 101377 bytes of 101376. "
        "Use a configuration with smaller tiles or fewer stages."
    )


def test_a_source_without_parameters_is_not_loaded():
    with pytest.raises(ValueError) as caught:
        module.load(KernelSource.make("toy.cu", "toy", {}), 0, 0)
    assert str(caught.value) == (
        "load: source must be one with parameters, got toy[]. Declare its ParamStruct."
    )


@pytest.fixture
def loading(monkeypatch, torch_cuda) -> Callable[[Callable[[], object]], None]:
    """Without a GPU: compiling does nothing, and a kernel is what the given function returns."""

    def kernels_are(made: Callable[[], object]) -> None:
        torch_cuda(
            device=contextlib.nullcontext(), current_stream=None, get_device_capability=(9, 0)
        )
        monkeypatch.setattr(module, "compile_source", lambda source, arch: None)
        monkeypatch.setattr(module, "LoadedKernel", lambda *compiled: made())

    return kernels_are


@pytest.mark.parametrize(
    "chosen, asked",
    [("", ("sm_90a", "")), ("8.0", ("compute_80", "sm_90")), ("9.0", ("compute_90a", "sm_90a"))],
)
def test_code_of_a_chosen_capability_is_assembled_for_the_gpu_at_hand(
    loading, monkeypatch, environment, chosen, asked
):
    given = []
    loading(object)
    environment(SPARSETILE_CAPABILITY=chosen)
    monkeypatch.setattr(
        module,
        "compile_source",
        lambda source, arch, assemble_for="": given.append((arch, assemble_for)),
    )
    module.load(KernelSource.make(f"as {chosen}.cu", "x", {}, ONE), 0, 0)
    assert given == [asked]


def test_threads_that_ask_at_once_get_one_kernel(loading):
    """A second one would be unloaded with its last user, while its launches may still run."""
    entered, go = threading.Barrier(9, timeout=60), threading.Event()
    made: list[object] = []

    def slow() -> object:
        go.wait(60)
        made.append(object())
        return made[-1]

    def ask(place):
        entered.wait()
        found[place] = module.load(source, 0, place % 2)

    loading(slow)
    source, found = KernelSource.make("at once.cu", "x", {}, ONE), [None] * 8
    threads = [threading.Thread(target=ask, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    entered.wait()
    go.set()
    for thread in threads:
        thread.join(60)
    assert len(made) == 2 and found[0] is not found[1], "one for each device"
    assert all(found[place] is found[place % 2] for place in range(8))


def test_a_kernel_that_failed_to_load_is_tried_again(loading):
    answers = iter([RuntimeError("no memory"), "kernel"])

    def answer() -> object:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    loading(answer)
    source = KernelSource.make("failed.cu", "x", {}, ONE)
    with pytest.raises(RuntimeError, match="no memory"):
        module.load(source, 0, 0)
    assert module.load(source, 0, 0) == module.load(source, 0, 0) == "kernel"


def test_the_current_device_is_entered_only_when_it_is_another(monkeypatch, torch_cuda):
    monkeypatch.setattr(module, "current_device", lambda: 1)
    torch_cuda(device="entered")
    assert module.on_device(1) is module._ALREADY_THERE
    assert module.on_device(0) == "entered"


def test_finds_the_stream_handle_without_torch_s_fast_function(torch_cuda):
    stream = SimpleNamespace(cuda_stream=7)
    torch_cuda(current_stream=stream)
    assert module._slow_stream(2) == 7
