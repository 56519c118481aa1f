"""A rank's part of a benchmark: for each case check the results, then time the calls. Collective in every step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

import weft
from weft.bench.baselines import Baselines, with_baseline
from weft.bench.cases import CALLS_IN_GRAPH, EXPERTS, ONE_SHAPE, Case
from weft.bench.grouped_gemm import Experts
from weft.bench.halves import run_halves
from weft.bench.options import Options, SuiteOptions
from weft.bench.samples import Samples, parts_of, result_bytes
from weft.bench.small_worker import small_calls
from weft.bench.timing import PROFILED, profile_calls, time_calls, time_copies, time_replays
from weft.limits import default_heap_bytes
from weft.machine import where
from weft.machine.topology.parse import format_cpus
from weft.verify.check import DTYPES, Mismatch, poison

EXPERT_WIDTH = 2048  # of the step's experts: H -> 2 x 2048 -> H, as in DeepSeek-V3
_MEET_S = 300.0
_SAMPLES = 200  # of replays
_DEADLINE_S = 30.0


class Barrier(Protocol):
    """Waits until every rank of the machine has come here; multiprocessing's and threading's barriers do."""

    def wait(self, timeout: float | None = None, /) -> int: ...


class Meeting:
    """Where ranks wait for each other and compare notes, beside the engine under test."""

    def __init__(self, barrier: Barrier, store: TCPStore, rank: int, num_ranks: int) -> None:
        self._barrier, self.store, self.rank, self.num_ranks = barrier, store, rank, num_ranks
        self._number = 0

    def wait(self) -> None:
        """Until every rank has come."""
        self._barrier.wait(_MEET_S)

    def gather(self, text: str) -> list[str]:
        """Every rank's text."""
        self._number += 1
        self.store.set(f"{self._number}/{self.rank}", text)
        return [self.store.get(f"{self._number}/{rank}").decode() for rank in range(self.num_ranks)]


class Worker:
    """One rank with its ExpertParallel objects, one per shape and T."""

    deadline_s = _DEADLINE_S

    def __init__(self, comm: weft.Communicator, options: Options | SuiteOptions, meeting: Meeting) -> None:
        self.comm, self.options, self.meeting = comm, options, meeting
        self.on_gpu = comm.device.type == "cuda"
        self.samples = Samples(comm, options.seed, options.node_ranks)
        self.objects: dict[Any, weft.ExpertParallel] = {}
        self.experts: Experts | None = None
        self.step_y: Tensor | None = None
        self.memory: dict[str, int] = {}  # of the call made last, see `note_memory`

    def ep(self, case: Case) -> weft.ExpertParallel:
        """The object for at most as many tokens a call."""
        key = (case.tokens, case.hidden, case.experts, case.top_k, case.dtype)
        if key not in self.objects:
            self.objects[key] = weft.ExpertParallel(
                self.comm,
                num_experts=case.experts,
                top_k=case.top_k,
                hidden=case.hidden,
                max_tokens_per_rank=max(1, case.tokens),
                dtype=DTYPES[case.dtype],
                heap_bytes=self.heap_bytes(case),
                deadline_s=_DEADLINE_S,
                node_ranks=self.options.node_ranks,
            )
        return self.objects[key]

    def heap_bytes(self, case: Case) -> int:
        """What ExpertParallel takes by itself, given in so many words, so that it can be subtracted."""
        shape = (self.comm.num_ranks, case.top_k, case.hidden, max(1, case.tokens))
        return default_heap_bytes(*shape, DTYPES[case.dtype])

    def settle(self) -> None:
        """Wait for this rank's calls. Where ranks are threads of a GPU, copies to the host must not wait for them: they
        take turns, and so would hold up a rank that others wait for."""
        if self.on_gpu:
            torch.cuda.current_stream(self.comm.device).synchronize()

    def measure_memory(self) -> dict[str, Any]:
        """GPU memory that constructing an object of the suites takes, beside the heap."""
        tokens = max(1, self.options.tokens)
        case = Case(suite="", op="", tokens=tokens, hidden=self.options.hidden)
        if not self.on_gpu:
            self.ep(case)
            return {}
        torch.zeros(1, device=self.comm.device, dtype=torch.float32)  # the context itself is not Weft's
        torch.cuda.empty_cache()
        self.meeting.wait()
        free_before, _ = torch.cuda.mem_get_info()
        torch_before = torch.cuda.memory_reserved()
        self.ep(case)
        torch_bytes = torch.cuda.memory_reserved() - torch_before
        taken = free_before - torch.cuda.mem_get_info()[0] - torch_bytes
        heap = self.heap_bytes(case)
        return {"heap_bytes": heap, "registered_bytes": taken - heap, "tokens": tokens}

    def first_call_s(self, case: Case) -> float:
        """Of constructing the object of a case and its first dispatch."""
        self.samples.use(case)
        self.samples.x(case.rows)
        self.meeting.wait()
        begin_ns = time.monotonic_ns()
        self._dispatch_call(case)()
        return (time.monotonic_ns() - begin_ns) / 1e9

    # ---- one case

    def run(self, case: Case) -> dict[str, Any]:
        """Check, then time. The result is this rank's; a case of a suite that is refused or wrong on any rank is not
        timed, nor are halves that are refused. Raises Mismatch, or what refuses it, for other cases of one shape.
        """
        self.samples.use(case)
        if case.is_halved:
            return {**run_halves(self, case), **self.memory}
        if case.suite == ONE_SHAPE:
            with self._prepared(case) as right:
                return {**self._timed(case, right), **self.memory}
        with contextlib.ExitStack() as stack:
            refused = wrong = ""
            call: Callable[[], None] = _nothing
            try:
                call = stack.enter_context(self._prepared(case))
            except weft.Unsupported as error:
                refused = str(error)
            except (Mismatch, weft.InvalidArgument) as error:
                wrong = f"rank {self.comm.rank}: {type(error).__name__}: {error}"
            notes = [json.loads(text) for text in self.meeting.gather(json.dumps([refused, wrong]))]
            refusals, problems = ([note[idx] for note in notes if note[idx]] for idx in (0, 1))
            if refusals or problems:
                return {"unsupported": refusals[0] if refusals else None, "problems": problems}
            return {**self._timed(case, call), **self.memory}

    def _timed(self, case: Case, call: Callable[[], None]) -> dict[str, Any]:
        device = self.comm.device
        is_whole = case.suite in ("targets", "step", ONE_SHAPE)
        iters = self.options.iters if is_whole else max(1, self.options.iters // 2)
        is_replay = self.on_gpu and case.is_graphed
        if is_replay:
            times = time_replays(call, num_calls=CALLS_IN_GRAPH, samples=_SAMPLES, meet=self.meeting.wait)
        else:
            times = time_calls(call, iters=iters, warmup=self.options.warmup, device=device, meet=self.meeting.wait)
        return {"gpu_us": times.gpu_us, "host_us": times.host_us, **self.samples.row_counts(case)}

    def is_profiled(self, case: Case) -> bool:
        """Whether the profiler records the case."""
        return self.on_gpu and case.suite in ("targets", "routings", "step", "small")

    def profile(self, case: Case) -> dict[str, Any] | None:
        """What the GPU runs in a case that was right when it was timed."""
        self.samples.use(case)
        num_calls = CALLS_IN_GRAPH if case.is_graphed else 1
        with self._prepared(case) as call:
            work = profile_calls(call, iters=PROFILED, meet=self.meeting.wait, num_calls=num_calls)
        return None if work is None else dataclasses.asdict(work)

    def note_memory(self, ep: weft.ExpertParallel, received: weft.Dispatched | None, y: Tensor | None) -> None:
        """Bytes of a call's results, and the most of the object's heap that has been in use."""
        num_bytes = result_bytes(received) + (0 if y is None else y.nbytes)
        heap_peak = sum(int(window["heap_peak"]) for window in ep.stats()["windows"])
        self.memory = {"result_bytes": num_bytes, "heap_peak_bytes": heap_peak}

    def _prepared(self, case: Case) -> contextlib.AbstractContextManager[Callable[[], None]]:
        if case.is_graphed:
            return small_calls(self, case)
        operations = {"dispatch": self._dispatch, "combine": self._combine, "both": self._both, "step": self._step}
        return operations[case.op](case)

    def _dispatch_call(self, case: Case, handle: weft.Handle | None = None) -> Callable[[], weft.Dispatched]:
        """The call with its arguments, which are not looked for while it is timed."""
        x = self.samples.x(case.rows)
        ep, quantize = self.ep(case), None if case.quantize == "none" else case.quantize
        common = self._common(case)
        if handle is not None:
            return functools.partial(ep.dispatch, x, handle=handle, quantize=quantize, **common)
        return functools.partial(
            ep.dispatch,
            x,
            self.samples.topk_idx,
            self.samples.topk_weights,
            layout=case.layout,
            alignment=case.alignment,
            quantize=quantize,
            scale_layout=case.scale_layout,
            capacity=self.samples.capacity(case),
            **common,
        )

    def _common(self, case: Case) -> dict[str, Any]:
        return {"num_sms": case.num_sms or None, "mode": case.mode}

    @contextlib.contextmanager
    def _dispatch(self, case: Case) -> Iterator[Callable[[], None]]:
        handle = self._dispatch_call(case)().handle if case.is_cached else None
        dispatch = self._dispatch_call(case, handle)
        received: list[weft.Dispatched] = []

        def call() -> None:
            received.clear()  # one result is alive at a time
            received.append(dispatch())

        call()
        for part in parts_of(received[0].x):
            poison(part)
        call()
        self.settle()
        if case.is_cached:
            want = self.samples.expected(case)[self.comm.rank]
            self.samples.check_rows(received[0].x, want.x, int(want.num_rows))
        else:
            self.samples.check_dispatched(case, received[0])
        self.note_memory(self.ep(case), received[0], None)
        yield call

    def _outputs(self, case: Case, received: weft.Dispatched) -> tuple[Tensor, Tensor]:
        """Expert outputs where the case wants them, and what must come of them."""
        outputs, want = self.samples.outputs(case)
        if case.source == "heap":
            in_heap = self.ep(case).empty_output(received)
            in_heap.copy_(outputs)
            outputs = in_heap
        return outputs, want

    @contextlib.contextmanager
    def _both(self, case: Case) -> Iterator[Callable[[], None]]:
        ep, dispatch = self.ep(case), self._dispatch_call(case)
        outputs, want = self._outputs(case, dispatch())
        common = self._common(case)
        received: list[weft.Dispatched] = []
        y: list[Tensor] = []

        def call() -> None:
            received.clear()
            received.append(dispatch())
            y.clear()
            y.append(ep.combine(outputs, received[0].handle, wire=case.wire, **common))

        call()
        poison(y[0])
        call()
        self.settle()
        self.samples.check_y(y[0], want)
        self.note_memory(ep, received[0], y[0])
        yield call

    @contextlib.contextmanager
    def _combine(self, case: Case) -> Iterator[Callable[[], None]]:
        ep, received = self.ep(case), self._dispatch_call(case)()
        outputs, want = self._outputs(case, received)
        common = self._common(case)
        y: list[Tensor] = []

        def call() -> None:
            y.clear()
            y.append(ep.combine(outputs, received.handle, wire=case.wire, **common))

        call()
        poison(y[0])
        call()
        self.settle()
        self.samples.check_y(y[0], want)
        self.note_memory(ep, None, y[0])
        yield call

    @contextlib.contextmanager
    def _step(self, case: Case) -> Iterator[Callable[[], None]]:
        ep, dispatch, common = self.ep(case), self._dispatch_call(case), self._common(case)

        def call() -> None:
            received = dispatch()
            assert isinstance(received.x, Tensor)  # noqa: S101  for mypy: BF16 rows
            output = self.step_experts()(received.x, received.offsets)
            self.step_y = ep.combine(output, received.handle, **common)

        call()  # its y is compared with that of the baseline's step
        self.note_memory(ep, None, self.step_y)
        yield call

    def step_experts(self) -> Experts:
        """The experts of this rank, made when first asked for: some GB."""
        if self.experts is None:
            num_local = EXPERTS // self.comm.num_ranks
            width = min(EXPERT_WIDTH, self.options.hidden)
            self.experts = Experts(num_local, self.options.hidden, width, device=self.comm.device, dtype=torch.bfloat16)
        return self.experts

    def close(self) -> None:
        """Give all objects back."""
        for ep in self.objects.values():
            ep.close()


def _nothing() -> None:
    """Stands in for a call that could not be prepared."""


def run_rank(
    comm: weft.Communicator,
    cases: tuple[Case, ...],
    options: Options | SuiteOptions,
    barrier: Barrier,
    port: int,
    folder: Path,
) -> None:
    """All cases on one rank. Results go to a file as they come: nothing is lost if a later case fails."""
    started_at_ns = time.monotonic_ns()
    if comm.device.type == "cuda":
        torch.cuda.set_device(comm.device)
    meeting = Meeting(barrier, TCPStore("127.0.0.1", port, is_master=False), comm.rank, comm.num_ranks)
    worker = Worker(comm, options, meeting)
    with (folder / f"rank{comm.rank}.jsonl").open("w", encoding="utf-8") as file:

        def note(**values: Any) -> None:
            file.write(json.dumps(values) + "\n")
            file.flush()

        is_one_shape = cases[0].suite == ONE_SHAPE
        if is_one_shape:
            placement = comm.placement
            note(
                kind="rank",
                started_at_ns=started_at_ns,
                engine=str(comm.engine),
                device=str(comm.device),
                placement=placement.mode,
                cpus=format_cpus(placement.cpus),
                nics=[str(nic) for nic in placement.nics],
                first_call_s=worker.first_call_s(cases[0]),
            )
        else:
            started = time.perf_counter()
            memory = worker.measure_memory()
            note(kind="memory", start_s=time.perf_counter() - started, engine=str(comm.engine), **memory)
        _run_cases(worker, cases, note)
        if is_one_shape:
            copies = time_copies(iters=options.iters, device=comm.device, meet=meeting.wait)
            note(kind="copies", **copies, windows=list(worker.ep(cases[0]).stats().get("windows", ())))
        worker.close()
    meeting.wait()


def _run_cases(worker: Worker, cases: tuple[Case, ...], note: Callable[..., None]) -> None:
    def say(text: str) -> None:
        if worker.comm.rank == 0:
            where.say(text)

    # Once a profiler has run in a process, the host's part of a call takes half as long again: times come first.
    timed = []
    for number, case in enumerate(cases):
        say(f"case {number + 1} of {len(cases)}, {case.name}, T = {case.tokens}")
        result = worker.run(case)
        note(kind="case", number=number, **result)
        if worker.is_profiled(case) and "gpu_us" in result:
            timed.append((number, case))
    baselines = with_baseline(cases) if worker.options.baseline else {}
    if baselines:
        with Baselines(worker, "times") as library:
            for key, case in baselines.items():
                say(f"baseline of {case.name}, T = {case.tokens}")
                note(kind="baseline", key=key, **library.run(case))
    for number, case in timed:
        say(f"kernels of case {number + 1} of {len(cases)}, {case.name}")
        note(kind="work", number=number, work=worker.profile(case))
    if timed and baselines:
        with Baselines(worker, "kernels") as library:
            for key, case in baselines.items():
                note(kind="baseline_work", key=key, kernel_us=library.profile(case))
