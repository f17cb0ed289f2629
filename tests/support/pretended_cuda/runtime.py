"""CUDA's runtime on the pretended card: current device, events, streams, graphs, memory, Triton's launches."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from llmopt.base.build import cache_folder

from .card import Card
from .tensors import CudaTensor, Dispatch

GUARD = Path(__file__).with_name("guard.cpp")


@cache
def load_guard() -> None:
    """Compile and load the device guard, once on a machine and torch.

    Skips the test where there is no C++ compiler, or a real GPU.
    """
    if torch.cuda.is_available():
        pytest.skip("there is a real CUDA device")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler for the device guard")
    torch_folder = Path(torch.__file__).parent
    key = hashlib.sha256(
        GUARD.read_bytes() + f"{torch.__version__} {torch_folder}".encode()
    ).hexdigest()[:16]
    library = cache_folder().parent / "tests" / f"guard-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so", delete=False) as file:
            command = [compiler, "-std=c++20", "-shared", "-fPIC", str(GUARD), "-o", file.name]
            command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10"]
            subprocess.run(command, check=True)
            Path(file.name).replace(library)
    ctypes.CDLL(str(library))


@contextmanager
def pretended_cuda(card: Card) -> Iterator[Card]:
    """A context in which torch and Triton see the card; nothing of it is left behind."""
    load_guard()
    dispatch = Dispatch(card)
    with ExitStack() as stack:
        for target, name, value in _replacements(card, dispatch):
            stack.enter_context(patch.object(target, name, value, create=True))
        stack.enter_context(dispatch)
        stack.enter_context(_driver(card))
        # `Module.to` makes parameters of the card's tensors: setting `data` would lose their class.
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        # So that `torch.tensor(..., device="cuda")` asks the mode for the copy.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        yield card


@contextmanager
def _driver(card: Card) -> Iterator[None]:
    """Triton's driver, as far as launches ask it for limits; which the project remembers by device."""
    from llmopt.engine.kernels.common import devices, verdicts
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = card.capability
    properties = {"max_shared_mem": card.shared_bytes, "multiprocessor_count": card.multiprocessors}
    fake: Any = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda _: properties),
        get_current_device=lambda: card.current,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_benchmarker=lambda: lambda call, **_: [1.0, 1.0, 1.0],  # of an autotuner
    )
    remembered = [verdicts._table, devices._limits_of, devices._launch_problem]
    for each in remembered:
        each.cache_clear()
    before, driver._active = driver._active, fake
    try:
        yield
    finally:
        driver._active = before
        for each in remembered:
            each.cache_clear()


def _replacements(card: Card, dispatch: Dispatch) -> Iterator[tuple[Any, str, Any]]:
    for name, value in (_runtime(card) | _memory(card) | _graphs(card, dispatch)).items():
        yield torch.cuda, name, value

    from llmopt.engine.kernels.common import verdicts

    yield verdicts, "FLUSH_BYTES", 1

    def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        card.refuse_in_capture("pin_memory")
        return Dispatch.pinned.add(tensor.clone())

    yield torch.Tensor, "pin_memory", pin_memory
    from triton.runtime import interpreter, jit

    def launch(function: Any, grid: Any, args: Any, kwargs: dict[str, Any]) -> None:
        _launch(card, dispatch, function.__name__, [*args, *kwargs.values()])

    def run_interpreted(self: Any, *args: Any, **kwargs: Any) -> None:
        launch(self.fn, self.grid, args, kwargs)

    run: Any = jit.JITFunction.run

    def run_compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if card.compiles:  # by the launch's own code, up to the launch: so the key is that of a GPU
            run(self, *args, grid=grid, warmup=True, **kwargs)
        launch(self.fn, grid, args, kwargs)

    yield interpreter.GridExecutor, "__call__", run_interpreted
    yield jit.JITFunction, "run", run_compiled


def _launch(card: Card, dispatch: Dispatch, name: str, values: list[Any]) -> None:
    """What Triton and CUDA refuse: pointers of another device than the current one, types the card lacks."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    stray = {str(tensor.device) for tensor in tensors} - {f"cuda:{card.current}"}
    if stray:
        card.add(
            "wrong device",
            f"{name} on cuda:{card.current} with pointers to {', '.join(sorted(stray))}",
        )
        raise ValueError(
            f"Pointer argument cannot be accessed from Triton ({name}: {sorted(stray)})"
        )
    has_e4m3 = any(tensor.dtype is torch.float8_e4m3fn for tensor in tensors)
    if has_e4m3 and card.capability < (8, 9):
        raise ValueError(
            f"type fp8e4nv not supported in this architecture, of compute capability {card.capability}"
        )
    for tensor in tensors:
        assert isinstance(tensor, CudaTensor)
        dispatch.note_read(tensor)
    card.add("triton", name)


def _runtime(card: Card) -> dict[str, Any]:
    class Event:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def record(self, *_: Any) -> None: ...

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            card.refuse_in_capture("cudaEventSynchronize")
            card.waits += 1

        def elapsed_time(self, _: Any) -> float:
            return 1.0

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.device = torch.device("cuda", card.current)

        cuda_stream = 0

        def synchronize(self) -> None:
            synchronize()

        def wait_stream(self, _: Any) -> None: ...

        def wait_event(self, _: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

    def synchronize(*_: Any) -> None:
        card.add("sync", "cudaDeviceSynchronize")
        card.refuse_in_capture("cudaDeviceSynchronize")

    def register(address: int, count: int, _: int) -> int:
        Dispatch.pinned.register(address, count)
        return 0

    def check_error(status: int) -> None:
        assert status == 0

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None:
            card.thread.device = index

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        before = card.current
        set_device(device)
        try:
            yield
        finally:
            card.thread.device = before

    @contextmanager
    def on_stream(_: Any) -> Iterator[None]:
        yield

    return {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "device_count": lambda: card.count,
        "current_device": lambda: card.current,
        "set_device": set_device,
        "device": on,
        "get_device_capability": lambda *_: card.capability,
        "get_device_name": lambda *_: card.name,
        "get_device_properties": lambda *_: SimpleNamespace(
            name=card.name,
            major=card.capability[0],
            minor=card.capability[1],
            total_memory=card.memory_bytes,
            multi_processor_count=card.multiprocessors,
            shared_memory_per_block_optin=card.shared_bytes,
            L2_cache_size=50 << 20,
        ),
        "is_bf16_supported": lambda *_, **__: card.capability >= (8, 0),
        "set_sync_debug_mode": lambda _: None,
        "synchronize": synchronize,
        "Event": Event,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": on_stream,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=register, cudaHostUnregister=Dispatch.pinned.registered.pop
        ),
        "check_error": check_error,
    }


def _memory(card: Card) -> dict[str, Any]:
    def index(device: Any) -> int:
        found = card.current if device is None else torch.device(device).index
        return card.current if found is None else found

    def reset(device: Any = None) -> None:
        card.peak[index(device)] = card.held[index(device)]

    def free(device: Any = None) -> tuple[int, int]:
        return card.memory_bytes - card.held[index(device)], card.memory_bytes

    return {
        "mem_get_info": free,
        "memory_reserved": lambda device=None: card.held[index(device)],
        "max_memory_reserved": lambda device=None: card.peak[index(device)],
        "memory_allocated": lambda device=None: card.held[index(device)],
        "max_memory_allocated": lambda device=None: card.peak[index(device)],
        "reset_peak_memory_stats": reset,
        "empty_cache": lambda: card.refuse_in_capture("cudaFree"),
    }


def _graphs(card: Card, dispatch: Dispatch) -> dict[str, Any]:
    class Graph:
        """A graph that computes nothing; it knows the memory that it points at and does not own."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.read: dict[int, Any] = {}
            self.device = card.current

        def replay(self) -> None:
            card.refuse_in_capture("cudaGraphLaunch")
            if card.current != self.device:
                card.add("wrong device", f"a graph of cuda:{self.device} on cuda:{card.current}")
            gone = sum(reference() is None for reference in self.read.values())
            if gone:
                card.add("stale", f"a graph reads {gone} tensors that are gone")
            card.add("replay", "cudaGraphLaunch")

        def reset(self) -> None:
            self.read = {}

        def pool(self) -> int:
            return 1

    @contextmanager
    def capture(graph: Any, *_: Any, **__: Any) -> Iterator[None]:
        card.refuse_in_capture("cudaStreamBeginCapture")
        card.capturing, dispatch.read = True, {}
        dispatch.own.clear()
        try:
            yield
            card.captures += 1
        finally:
            graph.read, card.capturing, dispatch.read = dispatch.read, False, None

    return {
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": lambda: 1,
        "is_current_stream_capturing": lambda: card.capturing,
    }
