"""Recorded routing: file format, reading with every check, replay, `record`. Public names: ``weft.routing``."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import re
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOP_K = 128
_log = logging.getLogger("weft.routing")
_VERSION = 1


@dataclass(frozen=True)
class TracedDispatch:
    """Ids and weights that one rank gave to one dispatch: int32 [T, K] (-1: no expert or out of range), fp32 [T, K]."""

    topk_idx: npt.NDArray[np.int32]
    topk_weights: npt.NDArray[np.float32]
    num_experts: int


@dataclass(frozen=True)
class Trace:
    """Recorded dispatches by rank, in the order of the calls."""

    dispatches: Mapping[int, tuple[TracedDispatch, ...]]

    def replay(
        self, num_tokens: int | None = None, *, num_experts: int, top_k: int, rank: int = 0, step: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Dispatch ``step`` (modulo what was recorded) of ``rank`` (modulo the recorded ranks) -> (topk_idx,
        topk_weights).

        Tokens are repeated or cut to ``num_tokens`` (None: as recorded); if there were none, all ids are -1. Raises
        ``InvalidArgument`` if num_experts or top_k is not what was recorded.
        """
        import torch

        ranks = sorted(self.dispatches)
        recorded = self.dispatches[ranks[rank % len(ranks)]]
        dispatch = recorded[step % len(recorded)]
        num_recorded, recorded_k = dispatch.topk_idx.shape
        if num_experts != dispatch.num_experts:
            raise InvalidArgument(f"num_experts={num_experts}: the trace was recorded with {dispatch.num_experts}")
        if top_k != recorded_k:
            raise InvalidArgument(f"top_k={top_k}: the trace was recorded with {recorded_k}")
        num_tokens = num_recorded if num_tokens is None else num_tokens
        if num_recorded == 0:
            return torch.full((num_tokens, top_k), -1, dtype=torch.int64, device="cpu"), torch.zeros(
                (num_tokens, top_k), dtype=torch.float32, device="cpu"
            )
        rows = np.arange(num_tokens) % num_recorded
        return (
            torch.from_numpy(dispatch.topk_idx[rows].astype(np.int64)),
            torch.from_numpy(dispatch.topk_weights[rows].copy()),
        )


def load_trace(file: str | os.PathLike[str]) -> Trace:
    """Read what ``record(file)`` wrote: one rank's file if ``file`` is one, else ``NAME.rank0.npz``,
    ``NAME.rank1.npz``, ...

    Everything is checked before it is used, nothing is unpickled. Raises ``InvalidArgument`` naming the file and what
    is wrong.
    """
    path = Path(file)
    files = [path] if path.is_file() else [found for _, found in sorted(_rank_files(path).items())]
    if not files:
        raise InvalidArgument(f"file={str(path)!r}: no such trace, nor {_rank_file(path, 0).name} beside it")
    dispatches: dict[int, tuple[TracedDispatch, ...]] = {}
    for found in files:
        try:
            rank, recorded = _read(found)
        except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
            raise InvalidArgument(f"file={str(found)!r}: not a routing trace: {error}") from error
        if rank in dispatches:
            raise InvalidArgument(f"file={str(found)!r}: rank {rank} is in another file too")
        dispatches[rank] = recorded
    return Trace(dispatches)


def _read(file: Path) -> tuple[int, tuple[TracedDispatch, ...]]:
    """One rank's file -> rank, dispatches; raises ValueError or what numpy raises."""
    stored = np.load(file, allow_pickle=False)
    if not isinstance(stored, np.lib.npyio.NpzFile):
        raise ValueError("not an npz file")
    with stored:
        version, rank = _array(stored, "version", np.int64, 0), _array(stored, "rank", np.int64, 0)
        if version != _VERSION:
            raise ValueError(f"version {version}, this Weft reads {_VERSION}")
        sizes = [_array(stored, name, np.int64, 1) for name in ("num_tokens", "top_k", "num_experts")]
        ids, weights = _array(stored, "topk_idx", np.int32, 1), _array(stored, "topk_weights", np.float32, 1)
    if not 0 <= rank < 1 << 31:
        raise ValueError(f"rank is {rank}")
    if len({len(size) for size in sizes}) != 1 or len(sizes[0]) == 0:
        raise ValueError("num_tokens, top_k and num_experts must have one entry per dispatch, and at least one")
    start = 0
    dispatches: list[TracedDispatch] = []
    for num_tokens, top_k, num_experts in zip(*(size.tolist() for size in sizes), strict=True):
        if num_tokens < 0 or not 1 <= top_k <= MAX_TOP_K or not 1 <= num_experts < 1 << 31:
            raise ValueError(
                f"dispatch {len(dispatches)}: num_tokens {num_tokens}, top_k {top_k}, experts {num_experts}"
            )
        end = start + num_tokens * top_k
        if end > min(len(ids), len(weights)):
            raise ValueError(f"dispatch {len(dispatches)}: ids or weights end too early")
        idx = ids[start:end].reshape(num_tokens, top_k)
        if idx.size and (idx.min() < -1 or idx.max() >= num_experts):
            raise ValueError(f"dispatch {len(dispatches)}: expert ids {idx.min()} to {idx.max()} of {num_experts}")
        dispatches.append(TracedDispatch(idx, weights[start:end].reshape(num_tokens, top_k), num_experts))
        start = end
    if start != len(ids) or start != len(weights):
        raise ValueError("more ids or weights than the dispatches need")
    return int(rank), tuple(dispatches)


def _array(stored: Mapping[str, Any], name: str, dtype: type[np.generic], ndim: int) -> npt.NDArray[Any]:
    if name not in stored:
        raise ValueError(f"{name} is missing")
    array: npt.NDArray[Any] = stored[name]
    if array.dtype != dtype or array.ndim != ndim:
        raise ValueError(f"{name} is {array.dtype} with {array.ndim} dimensions, must be {np.dtype(dtype)} with {ndim}")
    return array


def _rank_file(path: Path, rank: int) -> Path:
    stem = path.name.removesuffix(".npz")
    return path.with_name(f"{stem}.rank{rank}.npz")


def _rank_files(path: Path) -> dict[int, Path]:
    """The files of this trace that exist, by rank."""
    pattern = re.compile(re.escape(path.name.removesuffix(".npz")) + r"\.rank(\d+)\.npz")
    if not path.parent.is_dir():
        return {}
    matches = ((pattern.fullmatch(found.name), found) for found in path.parent.iterdir())
    return {int(match[1]): found for match, found in matches if match}


# ---- recording -------------------------------------------------------------------------------------------------------


@dataclass
class _Recorder:
    """What one process notes for one file; shared by ``users`` blocks (threads as ranks), the last to leave writes."""

    path: Path
    pid: int = field(default_factory=os.getpid)
    users: int = 0
    dispatches: dict[int, list[TracedDispatch]] = field(default_factory=dict)

    def note(self, rank: int, dispatch: TracedDispatch) -> None:
        if self.pid != os.getpid():  # entered before a fork: this child writes its own ranks when it ends
            self.pid, self.dispatches = os.getpid(), {}
            multiprocessing.util.Finalize(self, self.write, exitpriority=10)
        self.dispatches.setdefault(rank, []).append(dispatch)

    def write(self) -> None:
        dispatches, self.dispatches = self.dispatches, {}
        for rank, recorded in sorted(dispatches.items()):
            _write(_rank_file(self.path, rank), rank, recorded)


_recorders: list[_Recorder] = []  # empty: dispatch takes no notice
_lock = threading.Lock()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held the old one at the fork


os.register_at_fork(after_in_child=_new_lock)


@contextmanager
def record(file: str | os.PathLike[str]) -> Iterator[None]:
    """Save ids and weights of every dispatch of this process inside the block, never activations.

    Each rank writes its own file when the block is left, by an exception too: ``trace.npz`` gives ``trace.rank0.npz``,
    and so on (npz, no pickle; written aside, then renamed). Files of an earlier recording of that name are removed at
    the start. Around ``weft.spawn`` the ranks write when they end. Ids out of range are saved as -1; dispatches that
    repeat a handle have no ids of their own and are not saved. Threads may share a file. Noting a dispatch copies its
    ids and weights to the host, which synchronises on a GPU. Raises ``InvalidArgument`` if the directory does not
    exist.
    """
    path = Path(os.path.abspath(file))
    if not path.parent.is_dir():
        raise InvalidArgument(f"file={str(file)!r}: the directory {str(path.parent)!r} does not exist")
    with _lock:
        recorder = next((r for r in _recorders if r.path == path and r.pid == os.getpid()), None)
        if recorder is None:
            for stale in _rank_files(path).values():
                with suppress(FileNotFoundError):  # another rank was faster
                    stale.unlink()
            recorder = _Recorder(path)
            _recorders.append(recorder)
        recorder.users += 1
    try:
        yield
    finally:
        with _lock:
            recorder.users -= 1
            if recorder.users == 0:
                _recorders.remove(recorder)
                recorder.write()
                if not _rank_files(path):
                    _log.warning("record(%r): no dispatch inside the block, nothing written", str(file))


def _note(topk_idx: Tensor, topk_weights: Tensor | None, rank: int, num_experts: int) -> None:
    """Called after every dispatch that has ids, while ``_recorders`` is not empty."""
    from weft.engine import to_host

    ids = to_host(topk_idx.detach()).numpy()
    ids = np.where((ids >= 0) & (ids < num_experts), ids, -1).astype(np.int32)
    weights = np.ones(ids.shape, np.float32) if topk_weights is None else to_host(topk_weights.detach()).numpy().copy()
    with _lock:
        for recorder in _recorders:
            recorder.note(rank, TracedDispatch(ids, weights, num_experts))


def _finish() -> None:
    """Write what was noted after a fork inside ``record``: for a child that ends by ``os._exit``."""
    with _lock:
        for recorder in _recorders:
            if recorder.dispatches and recorder.pid == os.getpid():
                recorder.write()


def _write(file: Path, rank: int, dispatches: list[TracedDispatch]) -> None:
    """Write aside, rename: a reader sees a whole file or none."""
    descriptor, aside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as out:
            np.savez_compressed(
                out,
                version=np.int64(_VERSION),
                rank=np.int64(rank),
                num_tokens=np.array([d.topk_idx.shape[0] for d in dispatches], np.int64),
                top_k=np.array([d.topk_idx.shape[1] for d in dispatches], np.int64),
                num_experts=np.array([d.num_experts for d in dispatches], np.int64),
                topk_idx=np.concatenate([d.topk_idx.ravel() for d in dispatches]),
                topk_weights=np.concatenate([d.topk_weights.ravel() for d in dispatches]),
            )
            out.flush()
            os.fsync(out.fileno())
        os.replace(aside, file)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(aside)
        raise
