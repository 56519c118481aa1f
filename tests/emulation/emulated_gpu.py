"""One emulated GPU, on which Python, the host code and the real kernels run together.

The driver is that of the native tests (tests/native/engine/nvlink/fake_cuda.cc), as libcuda.so.1 and as NVRTC: it has
g++ compile a kernel that is launched, runs its blocks as threads, and lets the thread that launches it wait for them.
Ranks are threads of this process and share the GPU. Device memory is host memory, so tensors are those of the CPU, and
what torch does between two calls is in order with them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels import HERE, INCLUDE, Compiler, Mutant
from torch import Tensor

import weft
import weft.call.gpu_calls
import weft.call.streams
import weft.communicator
import weft.group.joining
import weft.group.windows
from pool import RankFailed, RankState, run_threads
from weft import _load
from weft.engine import Facts

NUM_SMS = 8  # of the GPU, for all ranks
SHARED_BYTES = 64 << 10  # of a block: few stages, which are used several times
_HOST = 1  # kDLCPU
_DEVICE_TYPE = 8  # where it lies in a DLManagedTensor
_REAL_FROM_DLPACK = torch._C._from_dlpack
IDLE = Mutant("kernels that do nothing, and are not compiled", "", "", "")


class EmulatedGpu:
    """That of this process, for the native module sees a driver once."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            ctypes.CDLL("libcuda.so.1")
            pytest.skip("this machine has a CUDA driver: tests/gpu runs the kernels")
        self.mutant: Mutant | None = None
        self._compiler = Compiler()
        self._loaded: dict[Mutant | None, Any] = {}
        atexit.register(self._compiler.close)
        roots = HERE.parents[1]
        folders = (roots / "src", INCLUDE, roots / "tests" / "native", HERE)
        source = roots / "tests" / "native" / "engine" / "nvlink" / "fake_cuda.cc"
        linking = "-Wl,-soname,libcuda.so.1,-Bsymbolic"  # its own symbols, where another NVRTC is loaded too
        options = [linking, *(f"-I{each}" for each in folders), str(source)]
        self.driver_path = str(self._compiler.library("libcuda.so.1", options))
        self.driver = ctypes.CDLL(self.driver_path)
        self._compile = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)(self._made)
        self.driver.emulated_gpu_start(self._compile, NUM_SMS, SHARED_BYTES)
        for name in ("begin_capture", "end_capture", "replay", "destroy_graph", "seed", "given"):
            getattr(self.driver, f"emulated_gpu_{name}").argtypes = [ctypes.c_uint64] * (1 + (name == "begin_capture"))

    def _made(self, source: bytes, answer: int, num_bytes: int) -> int:
        """For the driver: the path of the library of a kernel, when it is first launched."""
        try:
            if self.mutant is IDLE:
                said, status = "", 0
            else:
                made = self._compiler.start(source.decode(), self.mutant, is_library=True)
                said, status = str(made.result().path), 0
        except Exception as error:  # the driver has it raised
            said, status = str(error), 1
        said_bytes = said.encode()[: num_bytes - 1] + b"\0"
        ctypes.memmove(answer, said_bytes, len(said_bytes))
        return status

    @property
    def native(self) -> Any:
        """The native module's GPU, with its kernels."""
        if self.mutant not in self._loaded:
            made = _load.native().Gpu(0, nvrtc=self.driver_path, include=str(INCLUDE), cache="")
            self._loaded[self.mutant] = made
        return self._loaded[self.mutant]

    def given(self, stream: Any) -> int:
        """How many pieces of work a stream has been given."""
        number: int = self.driver.emulated_gpu_given(stream.cuda_stream)
        return number

    def found(self) -> str:
        """The mistake that a block has found since it was last asked, or ""."""
        text = ctypes.create_string_buffer(1000)
        self.driver.emulated_gpu_found(text, len(text))
        return text.value.decode()


@functools.cache
def gpu() -> EmulatedGpu:
    """The emulated GPU of this process."""
    return EmulatedGpu()


# ---- what torch has of a GPU


def on_host(array: Any) -> Tensor:
    """`from_dlpack` of memory of the GPU, which torch takes for the host's."""
    capsule = array if type(array).__name__ == "PyCapsule" else array.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    device = ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + _DEVICE_TYPE)
    device.value = _HOST
    tensor: Tensor = _REAL_FROM_DLPACK(capsule)
    return tensor


class Stream:
    """A stream on which everything has happened."""

    _numbers = itertools.count(1)
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.cuda_stream = 0x10000 + next(self._numbers)
        self.is_capturing = False

    def query(self) -> bool:
        """Whether all has ended."""
        return True

    def synchronize(self) -> None:
        """Wait for all."""

    def wait_stream(self, other: Any) -> None:
        """Come behind another."""

    def record_event(self) -> Any:
        """An event that has happened."""
        return SimpleNamespace(query=lambda: True, wait=lambda stream=None: None, synchronize=lambda: None)


class _Current(threading.local):
    def __init__(self) -> None:
        self.stream = Stream()


class Graph:
    """What calls in `record` launch, again and again. Their results must be kept as long as it is replayed: nothing
    here holds what torch makes under capture, as the memory pool of a CUDA graph does.
    """

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self.number = next(self._numbers)

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """The calls in the block are recorded and not made."""
        stream: Any = torch.cuda.current_stream()
        gpu().driver.emulated_gpu_begin_capture(stream.cuda_stream, self.number)
        stream.is_capturing = True
        try:
            yield
        finally:
            stream.is_capturing = False
            gpu().driver.emulated_gpu_end_capture(stream.cuda_stream)

    def replay(self) -> None:
        """Make the calls."""
        status = gpu().driver.emulated_gpu_replay(self.number)
        assert status == 0, f"the driver answered {status}"

    def destroy(self) -> None:
        """Let go of what the calls use."""
        gpu().driver.emulated_gpu_destroy_graph(self.number)


class Noting:
    """A native window that lets `note(name of a method, arguments)` see each call; what that raises is raised."""

    def __init__(self, native: Any, note: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._native, self._note = native, note

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._native, name)
        if not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            self._note(name, args)
            return found(*args, **named)

        return call


class EmulatedRanks:
    """`run` as that of `Pool`, on ranks that share the emulated GPU. `mutant`: a mistake in the kernels, or IDLE."""

    def __init__(self, patch: pytest.MonkeyPatch, mutant: Mutant | None = None) -> None:
        current = _Current()
        cuda: Any = torch.cuda
        patch.setattr(cuda, "current_stream", lambda device=None: current.stream)
        patch.setattr(cuda, "set_stream", lambda stream: setattr(current, "stream", stream))
        patch.setattr(cuda, "is_current_stream_capturing", lambda: current.stream.is_capturing)
        patch.setattr(cuda, "current_device", lambda: None)
        patch.setattr(cuda.nvtx, "range_push", lambda name: 0)
        patch.setattr(cuda.nvtx, "range_pop", lambda: None)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current.stream.cuda_stream, raising=False)
        patch.setattr(torch._C, "_from_dlpack", on_host)
        patch.setattr(torch, "from_dlpack", on_host)
        for name, module in list(sys.modules.items()):
            if name.startswith("weft.") and getattr(module, "from_dlpack", None) is _REAL_FROM_DLPACK:
                patch.setattr(module, "from_dlpack", on_host)
        patch.setattr(weft.call.streams, "own_stream", lambda device: Stream())
        patch.setattr(weft.call.streams, "give_back_stream", lambda stream: None)
        facts = {"problem": "", "uuid": "emulated", "name": "emulated GPU", "capability": (9, 0), "num_sms": NUM_SMS}
        patch.setattr(weft.group.joining, "look", lambda device, engine: Facts(engine, **facts))
        patch.setattr(weft.group.windows, "driver_gpu", lambda index: gpu().native)
        patch.setattr(gpu(), "mutant", mutant)
        gpu().found()

    def run(
        self,
        num_ranks: int,
        function: Callable[[RankState, Any], Any],
        args: Sequence[Any],
        *,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """See Pool."""

        def on_gpu(state: RankState, argument: Any) -> Any:
            assert state.comm.engine == "nvlink", state.comm
            return function(state, argument)

        outcomes, text = [], ""
        try:
            outcomes = run_threads(num_ranks, on_gpu, args, device="cpu")
        except RankFailed as failed:
            text = str(failed)
        if found := gpu().found():
            text = f"emulated GPU: {found}\n{text}"
        if text:
            raise RankFailed(text)
        return outcomes
