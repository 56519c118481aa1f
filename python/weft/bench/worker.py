"""A rank's part of the suite: for each case check the results, then time the calls. Collective in every step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

import weft
from weft.bench.cases import CALLS_IN_GRAPH, EXPERTS, TOP_K, Case
from weft.bench.grouped_gemm import Experts
from weft.bench.options import SuiteOptions
from weft.bench.samples import Samples
from weft.bench.small_worker import small_calls
from weft.bench.suite_baseline import Baselines, with_baseline
from weft.bench.timing import PROFILED, profile_calls, time_calls, time_replays
from weft.bench.worker import Barrier, result_bytes
from weft.limits import default_heap_bytes
from weft.machine import where
from weft.verify.check import Mismatch, poison

EXPERT_WIDTH = 2048  # of the step's experts: H -> 2 x 2048 -> H, as in DeepSeek-V3
_MEET_S = 300.0
_SAMPLES = 200  # of replays
_DEADLINE_S = 30.0


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
    """One rank with its ExpertParallel objects, one per T."""

    deadline_s = _DEADLINE_S

    def __init__(self, comm: weft.Communicator, options: SuiteOptions, meeting: Meeting) -> None:
        self.comm, self.options, self.meeting = comm, options, meeting
        self.on_gpu = comm.device.type == "cuda"
        self.samples = Samples(comm, options.hidden, options.seed)
        self.objects: dict[int, weft.ExpertParallel] = {}
        self.experts: Experts | None = None
        self.step_y: Tensor | None = None
        self.memory: dict[str, int] = {}  # of the call made last, see `note_memory`

    def ep(self, tokens: int) -> weft.ExpertParallel:
        """The object for at most this many tokens a call."""
        if tokens not in self.objects:
            self.objects[tokens] = weft.ExpertParallel(
                self.comm,
                num_experts=EXPERTS,
                top_k=TOP_K,
                hidden=self.options.hidden,
                max_tokens_per_rank=tokens,
                heap_bytes=self.heap_bytes(tokens),
                deadline_s=_DEADLINE_S,
            )
        return self.objects[tokens]

    def heap_bytes(self, tokens: int) -> int:
        """What ExpertParallel takes by itself, given in so many words, so that it can be subtracted."""
        return default_heap_bytes(self.comm.num_ranks, TOP_K, self.options.hidden, tokens, torch.bfloat16)

    def measure_memory(self) -> dict[str, Any]:
        """GPU memory that constructing an object takes, beside the heap."""
        tokens = max(1, self.options.tokens)
        if not self.on_gpu:
            self.ep(tokens)
            return {}
        torch.zeros(1, device=self.comm.device, dtype=torch.float32)  # the context itself is not Weft's
        torch.cuda.empty_cache()
        self.meeting.wait()
        free_before, _ = torch.cuda.mem_get_info()
        torch_before = torch.cuda.memory_reserved()
        self.ep(tokens)
        torch_bytes = torch.cuda.memory_reserved() - torch_before
        taken = free_before - torch.cuda.mem_get_info()[0] - torch_bytes
        heap = self.heap_bytes(tokens)
        return {"heap_bytes": heap, "registered_bytes": taken - heap, "tokens": tokens}

    # ---- one case

    def run(self, case: Case) -> dict[str, Any]:
        """Check, then time. The result is this rank's; a case that is refused or wrong on any rank is not timed."""
        self.samples.use(case)
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
        iters = self.options.iters if case.suite in ("targets", "step") else max(1, self.options.iters // 2)
        is_replay = self.on_gpu and case.is_graphed
        if is_replay:
            times = time_replays(call, num_calls=CALLS_IN_GRAPH, samples=_SAMPLES, meet=self.meeting.wait)
        else:
            times = time_calls(call, iters=iters, warmup=self.options.warmup, device=device, meet=self.meeting.wait)
        traffic = self.samples.traffic()
        return {
            "gpu_us": times.gpu_us,
            "host_us": times.host_us,
            "out_rows": traffic.out_rows(),
            "in_rows": traffic.in_rows(),
            "logical_rows": traffic.logical_rows(),
        }

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
        prepare = {"dispatch": self._dispatch, "combine": self._combine, "step": self._step}[case.op]
        return prepare(case)

    def _dispatch_call(self, case: Case, handle: weft.Handle | None = None) -> Callable[[], weft.Dispatched]:
        """The call with its arguments, which are not looked for while it is timed."""
        x = self.samples.x(case.rows)
        ep, quantize = self.ep(case.tokens), None if case.quantize == "none" else case.quantize
        if handle is not None:
            return functools.partial(ep.dispatch, x, handle=handle, num_sms=case.num_sms, quantize=quantize)
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
            num_sms=case.num_sms,
        )

    @contextlib.contextmanager
    def _dispatch(self, case: Case) -> Iterator[Callable[[], None]]:
        handle = self._dispatch_call(case)().handle if case.is_cached else None
        dispatch = self._dispatch_call(case, handle)
        received: list[weft.Dispatched] = []

        def call() -> None:
            received.clear()  # one result is alive at a time
            received.append(dispatch())

        call()
        for part in _parts(received[0].x):
            poison(part)
        call()
        if case.is_cached:
            want = self.samples.expected(case)[self.comm.rank]
            self.samples.check_rows(received[0].x, want.x, int(want.num_rows))
        else:
            self.samples.check_dispatched(case, received[0])
        self.note_memory(self.ep(case.tokens), received[0], None)
        yield call

    @contextlib.contextmanager
    def _combine(self, case: Case) -> Iterator[Callable[[], None]]:
        ep, received = self.ep(case.tokens), self._dispatch_call(case)()
        outputs, want = self.samples.outputs(case)
        if case.source == "heap":
            in_heap = ep.empty_output(received)
            in_heap.copy_(outputs)
            outputs = in_heap
        y: list[Tensor] = []

        def call() -> None:
            y.clear()
            y.append(ep.combine(outputs, received.handle, wire=case.wire, num_sms=case.num_sms))

        call()
        poison(y[0])
        call()
        self.samples.check_y(y[0], want)
        self.note_memory(ep, None, y[0])
        yield call

    @contextlib.contextmanager
    def _step(self, case: Case) -> Iterator[Callable[[], None]]:
        ep, dispatch = self.ep(case.tokens), self._dispatch_call(case)

        def call() -> None:
            received = dispatch()
            assert isinstance(received.x, Tensor)  # noqa: S101  for mypy: BF16 rows
            output = self.step_experts()(received.x, received.offsets)
            self.step_y = ep.combine(output, received.handle, num_sms=case.num_sms)

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


def _parts(x: Tensor | weft.Quantized) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [part for part in (x.data, x.scales) if part is not None]


def _nothing() -> None:
    """Stands in for a call that could not be prepared."""


def run_rank(
    comm: weft.Communicator, cases: tuple[Case, ...], options: SuiteOptions, barrier: Barrier, port: int, folder: Path
) -> None:
    """All cases on one rank. Results go to a file as they come: nothing is lost if a later case fails."""
    if comm.device.type == "cuda":
        torch.cuda.set_device(comm.device)
    meeting = Meeting(barrier, TCPStore("127.0.0.1", port, is_master=False), comm.rank, comm.num_ranks)
    worker = Worker(comm, options, meeting)
    with (folder / f"rank{comm.rank}.jsonl").open("w", encoding="utf-8") as file:

        def note(**values: Any) -> None:
            file.write(json.dumps(values) + "\n")
            file.flush()

        def say(text: str) -> None:
            if comm.rank == 0:
                where.say(text)

        started = time.perf_counter()
        memory = worker.measure_memory()
        note(kind="memory", start_s=time.perf_counter() - started, engine=str(comm.engine), **memory)
        # Once a profiler has run in a process, the host's part of a call takes half as long again: times come first.
        timed = []
        for number, case in enumerate(cases):
            say(f"case {number + 1} of {len(cases)}, {case.name}, T = {case.tokens}")
            result = worker.run(case)
            note(kind="case", number=number, **result)
            if worker.is_profiled(case) and "gpu_us" in result:
                timed.append((number, case))
        baselines = with_baseline(cases) if options.baseline else {}
        if baselines:
            with Baselines(worker, "times") as library:
                for key, case in baselines.items():
                    say(f"baseline of {case.name}, T = {case.tokens}")
                    note(kind="baseline", key=key, **library.run(case))
        for number, case in timed:
            say(f"kernels of case {number + 1} of {len(cases)}, {case.name}")
            note(kind="work", number=number, work=worker.profile(case))
        if baselines and worker.on_gpu:
            with Baselines(worker, "kernels") as library:
                for key, case in baselines.items():
                    note(kind="baseline_work", key=key, kernel_us=library.profile(case))
        worker.close()
    meeting.wait()
