"""GPUs as Weft's Python sees them: what a rank knows of its own, whether all ranks together can use the nvlink engine,
where the kernel compiler is, and streams.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft import _load, env
from weft.errors import CudaError, InvalidArgument, InvalidState, Unsupported, rank_list
from weft.kernels import paths
from weft.limits import ENGINES, MAX_GPU_RANKS, MAX_NUM_SMS

if TYPE_CHECKING:
    from weft import _native

__all__ = [
    "Choice", "Facts", "choose_engine", "choose_gpu", "device_name", "driver_gpu", "look", "own_stream",
    "prepare_threads",
]  # fmt: skip

LEAST_CAPABILITY = (9, 0)  # bulk copies between shared memory and peers
LEAST_DRIVER = 12040  # of CUDA 12.4: what src/base/cuda_driver.cc asks the driver for
_QUEUES = 32  # hardware queues of a context at most: streams beyond share one, and then wait for each other


@dataclass(frozen=True)
class Facts:
    """What one rank tells the others when a communicator is made; travels as JSON.

    Attributes: `engine` asked for; `problem`: why this rank can't use the nvlink engine, "" if it can; `uuid`, `name`,
    `capability` and `num_sms` of its GPU; `reach`: the GPUs whose memory its GPU can load from and store to.
    """

    engine: str
    problem: str = ""
    uuid: str = ""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    num_sms: int = 0
    reach: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Facts:
        """Of a peer's message."""
        lists = {"capability": tuple(values["capability"]), "reach": tuple(values["reach"])}
        return cls(**{**values, **lists})


@dataclass(frozen=True)
class Choice:
    """The engine of a communicator, equal on all ranks. SMs of a GPU: `max_num_sms` that a call may take, `rank_sms`
    that there are for a rank.
    """

    engine: str
    why: str
    max_num_sms: int = 0
    rank_sms: int = 0


def look(device: torch.device, engine: str) -> Facts:
    """What this rank knows. Asks CUDA and loads NVRTC only if `device` is a GPU and the cpu engine is not asked for."""
    if engine not in ("auto", *ENGINES):
        raise InvalidArgument(f"engine is {engine!r}; allowed are 'auto', {', '.join(map(repr, ENGINES))}")
    if device.type != "cuda":
        return Facts(engine, "its tokens are in host memory")
    if engine == "cpu":
        return Facts(engine, "the cpu engine was asked for")
    properties = torch.cuda.get_device_properties(device)
    missing = _missing()
    return Facts(
        engine,
        "" if missing is None else missing,
        str(properties.uuid),
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        _reach(device),
    )


def choose_engine(facts: Mapping[int, Facts], far: Sequence[int] = ()) -> Choice:
    """The engine for ranks with these facts, of which those `far` are on other machines. Pure: all ranks have the same
    facts and so decide alike.

    Raises:
        InvalidArgument: the ranks asked for different engines.
        Unsupported: the nvlink engine was asked for and can't be.
    """
    asked = {each.engine for each in facts.values()}
    if len(asked) > 1:
        found = "; ".join(f"{each.engine!r} on rank {rank}" for rank, each in facts.items())
        raise InvalidArgument(f"engine differs between ranks: {found}. It must be equal on all ranks")
    (engine,) = asked
    problem = "the ranks are on several machines" if far else _problem(facts)
    if problem:
        if engine == "nvlink":
            raise Unsupported(
                "engine 'nvlink'", problem, f"up to {MAX_GPU_RANKS} ranks on GPUs that access each other, and NVRTC"
            )
        return Choice("cpu", problem)
    sharing = Counter(each.uuid for each in facts.values())
    most = min(each.num_sms // sharing[each.uuid] for each in facts.values())
    gpus = f"{len(sharing)} GPU{'s that access each other' if len(sharing) > 1 else ''}"
    why = f"{len(facts)} rank{'s' if len(facts) > 1 else ''} on {gpus}"
    return Choice("nvlink", why, min(most, MAX_NUM_SMS), most)


def _problem(facts: Mapping[int, Facts]) -> str:
    """Why these ranks can't use the nvlink engine, or ""."""
    texts = [each.problem for each in facts.values()]
    if texts and texts[0] and len(set(texts)) == 1:
        return texts[0].replace("its tokens", "the tokens")
    for rank, mine in facts.items():
        if mine.problem:
            return f"rank {rank}: {mine.problem}"
        if mine.capability < LEAST_CAPABILITY:
            have, need = (".".join(map(str, each)) for each in (mine.capability, LEAST_CAPABILITY))
            return f"rank {rank}: {mine.name} has compute capability {have}, less than {need}"
        far = [peer for peer, other in facts.items() if other.uuid != mine.uuid and other.uuid not in mine.reach]
        if far:
            return f"the GPU of rank {rank} can't access that of {rank_list(far)}"
    if len(facts) > MAX_GPU_RANKS:
        return f"{len(facts)} ranks, more than {MAX_GPU_RANKS}"
    sharing = Counter(each.uuid for each in facts.values())
    if any(each.num_sms < sharing[each.uuid] for each in facts.values()):
        return "more ranks on a GPU than it has SMs"
    return ""


def _missing() -> str | None:
    """What this machine lacks for compiling and loading kernels."""
    try:
        paths.compiler_paths()
        version = _driver_version()
    except (Unsupported, OSError) as error:
        return str(error)
    if version < LEAST_DRIVER:
        return f"its driver is of CUDA {version // 1000}.{version % 1000 // 10}, older than 12.4"
    return None


def _driver_version() -> int:
    """12040 for CUDA 12.4; asked of the driver that is loaded, which may be newer than the kernel's."""
    version = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    if status:
        raise Unsupported("the nvlink engine", f"cuDriverGetVersion failed with {status}", "a CUDA driver that answers")
    return version.value


def _reach(device: torch.device) -> tuple[str, ...]:
    """UUIDs of the GPUs that `device` accesses: those that this process sees by CUDA, the others by NVML."""
    mine = torch.cuda.current_device() if device.index is None else device.index
    found = {}
    for other in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(other).uuid)
        found[uuid] = other != mine and torch.cuda.can_device_access_peer(mine, other)
    own = str(torch.cuda.get_device_properties(mine).uuid)
    for uuid, can_access in _reach_by_nvml(own).items():
        found.setdefault(uuid, can_access)
    return tuple(sorted(uuid for uuid, can_access in found.items() if can_access and uuid != own))


def _reach_by_nvml(own: str) -> dict[str, bool]:
    """The same for every GPU of the machine: another rank's may be hidden from this process. Empty without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(idx) for idx in range(pynvml.nvmlDeviceGetCount())]
            by_uuid = {_plain_uuid(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
            if own not in by_uuid:
                return {}
            found = {}
            for uuid, handle in by_uuid.items():
                states = [
                    pynvml.nvmlDeviceGetP2PStatus(by_uuid[own], handle, cap)
                    for cap in (pynvml.NVML_P2P_CAPS_INDEX_READ, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
                ]
                found[uuid] = uuid != own and all(state == pynvml.NVML_P2P_STATUS_OK for state in states)
            return found
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001  no NVML, or one that does not answer: CUDA's own answer has to do
        return {}


def _plain_uuid(text: str | bytes) -> str:
    """NVML writes GPU-1234..., torch 1234..."""
    return (text.decode() if isinstance(text, bytes) else text).removeprefix("GPU-")


# ---- which GPU a rank gets


def device_name(device: torch.device) -> str:
    """Of the kind of GPU; "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def choose_gpu(device: str, rank: int) -> str:
    """The device of a local rank: "auto" is "cuda" where torch sees a GPU, "cuda" is GPU rank % number of GPUs.

    Raises:
        InvalidState: CUDA was used before a fork, after which it can't be used.
    """
    if device not in ("auto", "cuda"):
        return device
    num_gpus = torch.cuda.device_count()  # by NVML where it is there: that starts no CUDA
    if num_gpus == 0:
        return "cpu" if device == "auto" else device
    if torch.cuda._is_in_bad_fork():
        raise InvalidState(
            f"device={device!r}: this program used CUDA before weft.spawn, and CUDA does not survive a fork. Call "
            "weft.spawn first, or use isolation='thread', device='cpu', or torchrun with Communicator.from_env()"
        )
    return f"cuda:{rank % num_gpus}"


def prepare_threads(num_ranks: int) -> None:
    """Before ranks that are threads use CUDA: kernels of one rank wait for those of another, so no two ranks may share
    a hardware queue, and no kernel may be loaded when first launched, which waits for all that run.

    Raises:
        InvalidState: CUDA is in use with fewer queues than the ranks need.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0 or num_ranks <= 1:
        return
    if not torch.cuda.is_initialized():
        env.set_cuda_queues(_QUEUES)
        return
    num_queues = env.cuda_queues()
    sharing = -(-num_ranks // num_gpus)
    if sharing > 1 and num_queues < min(2 * sharing, _QUEUES):
        raise InvalidState(
            f"isolation='thread': {sharing} ranks would share a GPU with {num_queues} hardware queues, and CUDA is in "
            "use already. Call weft.spawn before anything else uses CUDA, or start the program with "
            f"CUDA_DEVICE_MAX_CONNECTIONS={_QUEUES} and CUDA_MODULE_LOADING=EAGER"
        )


# ---- streams


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.cpu()` once the current stream is idle.

    CUDA makes copies to pageable memory one at a time in a process, in the order in which they are asked for: one
    behind a call that waits for a peer would hold up the copy that this peer, a thread too, makes before it calls
    (docs/protocols/nvlink-window.md).
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor.cpu()


_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_spare_streams: dict[int, list[torch.cuda.Stream]] = {}
_streams_lock = threading.Lock()


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A non-blocking stream of high priority that nobody else has, also while the current one records a graph. torch's
    come from a pool and are shared.
    """
    index = device.index
    with _streams_lock:
        spare = _spare_streams.setdefault(index, [])
        if spare:
            return spare.pop()
    with torch.cuda.device(device):
        is_capturing, capture_mode = torch.cuda.is_current_stream_capturing(), ctypes.c_int(_RELAXED)
        driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        if is_capturing:  # then the context is current
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(capture_mode))
        else:
            torch.cuda.current_stream().query()  # makes the context current in this thread
        non_blocking, priority = 1, -1
        status = driver.cuStreamCreateWithPriority(ctypes.byref(handle), non_blocking, priority)
        if is_capturing:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(capture_mode))
    if status or handle.value is None:
        raise CudaError(f"cuStreamCreateWithPriority failed with {status}")
    return torch.cuda.ExternalStream(handle.value, device=device)


def give_back_stream(stream: torch.cuda.Stream) -> None:
    """Keep it for the next one. Never destroyed: tensors that were recorded on it may outlive its user."""
    with _streams_lock:
        _spare_streams.setdefault(stream.device.index, []).append(stream)


# ---- the native GPU


_gpus: dict[int, _native.Gpu] = {}
_gpus_lock = threading.Lock()


def driver_gpu(index: int) -> _native.Gpu:
    """The native module's GPU `index` of this process, with its loaded kernels; shared by all communicators."""
    with _gpus_lock:
        if index not in _gpus:
            _gpus[index] = _load.native().Gpu(index, **paths.compiler_paths())
        return _gpus[index]
