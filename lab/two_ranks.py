"""Times the calls of docs/performance.md's table of two ranks, in several variants in turn, as JSON lines:

git archive HEAD~3 include | tar -x -C build
python lab/two_ranks.py --folder OUT --variant "before=build/include;stage=0" --variant after=include > rows.jsonl

A variant is a folder of headers, and what it gives to the native module: `spread` (SMs of place_rows), `stage` (SMs
that bring rows of a combine into the landing), 0: none, left out: what Weft takes. Each has a window of its own.
Results are compared with the reference, then calls are timed in rounds that change between the variants.
"""

# check: allow file-size: one program, of which each row needs all
from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import weft
import weft.engine
from weft import _load, env
from weft.bench.apart import apart
from weft.bench.cases import ALIGNMENT, EXPERTS, TOP_K, Case
from weft.bench.facts import machine_facts
from weft.bench.samples import Samples
from weft.bench.timing import time_calls
from weft.kernels import paths as kernel_paths
from weft.kernels import prebuild
from weft.kernels.prebuild import KernelShape
from weft.kernels.tuning import default_num_sms
from weft.limits import default_heap_bytes
from weft.verify.check import Mismatch, poison

HIDDEN, TOKENS, WIDTH, DEADLINE_S = 7168, 4096, 2048, 20.0
ON_GPU = True  # --quick: a small shape on the CPU, to see that this program runs
CALLS_IN_GRAPH = 10
PATHS = kernel_paths.compiler_paths()
KEPT: list[Any] = []  # what windows use
NOTES: list[str] = []  # that ranks have exchanged
GIVEN: dict[str, int] = {}  # to native arguments, by the variant whose call is made next


@dataclass(frozen=True)
class Variant:
    """Headers, and what the native module is told."""

    name: str
    include: str
    given: dict[str, int] = field(default_factory=dict)  # spread, stage; sms: of calls that say nothing
    rows: tuple[str, ...] = ()  # names of rows, or of a row with @SMs; none: all


@dataclass(frozen=True)
class Row:
    """A call of the table."""

    name: str
    case: Case
    sms: tuple[int | None, ...]
    zero_holes: bool = True
    kind: str = "calls"  # "graph": of dispatch and combine; "eager": those two; "step": of training


def rows() -> Iterator[Row]:
    """Those of the table."""
    by_expert: dict[str, Any] = {"layout": "expert_major", "alignment": ALIGNMENT}
    few: tuple[int, ...] = (8, 16, 24)

    def dispatch(**options: Any) -> Case:
        return Case(suite="targets", op="dispatch", **{"tokens": TOKENS, "hidden": HIDDEN, **options})

    def combine(**options: Any) -> Case:
        shape = {"source": "ordinary", "tokens": TOKENS, "hidden": HIDDEN}
        return Case(suite="targets", op="combine", **{**shape, **options})

    yield Row("by expert, FP8", dispatch(rows="fp8", **by_expert), (16, 24, 32))
    yield Row("by expert, FP8, holes left", dispatch(rows="fp8", **by_expert), (16, 24), zero_holes=False)
    yield Row("by expert, BF16", dispatch(**by_expert), (16, 24, 32))
    yield Row("unregistered combine", combine(), few)
    yield Row("weighted combine", combine(**by_expert), (16, 24, 32, 40))
    yield Row("quantize", dispatch(quantize="fp8"), (16,))
    yield Row("by expert, quantize", dispatch(quantize="fp8", **by_expert), (16, 24))
    yield Row("FP8", dispatch(rows="fp8"), few)
    yield Row("BF16", dispatch(), few)
    yield Row("heap combine", combine(source="heap"), few)
    yield Row("FP8 on the wire", combine(source="heap", wire="fp8"), (16,))
    for tokens, sizes in itertools.product((256, 1024), ("exact", "capacity")):
        yield Row(f"T = {tokens}, {sizes}", dispatch(rows="fp8", tokens=tokens, sizes=sizes, mode="throughput"), (16,))
    for kind, tokens in itertools.product(("graph", "eager"), (128, 32, 8)):
        shape = {"layout": "masked", "quantize": "fp8", "sizes": "capacity", "tokens": tokens, "hidden": HIDDEN}
        case = Case(suite="small", op="both", **shape)
        yield Row(f"{kind}, T = {tokens}", case, (None,), kind=kind)
    for experts in (256, 128):
        yield Row(f"step, E = {experts}", dispatch(**by_expert), (None,), kind="step")


def give(make: Callable[..., Any], names: dict[str, str]) -> Callable[..., Any]:
    """Native specs with what the variant gives."""

    def made(*args: Any, **named: Any) -> Any:
        native = make(*args, **named)
        for name, attribute in names.items():
            if name in GIVEN and hasattr(native, attribute):
                setattr(native, attribute, GIVEN[name])
        return native

    return made


NATIVE: Any = _load.native()
NATIVE.DispatchSpec = give(NATIVE.DispatchSpec, {"spread": "spread_blocks"})
NATIVE.CombineSpec = give(NATIVE.CombineSpec, {"stage": "stage_blocks"})


class Side:
    """One variant on one rank."""

    def __init__(self, comm: weft.Communicator, variant: Variant, number: int) -> None:
        self.comm, self.variant, self.number = comm, variant, number
        self.eps: dict[tuple[int, int], weft.ExpertParallel] = {}

    def use(self) -> None:
        """Calls from now on are this variant's."""
        GIVEN.clear()
        GIVEN.update(self.variant.given)

    def ep(self, tokens: int, experts: int = EXPERTS) -> weft.ExpertParallel:
        """The object for so many tokens, with kernels of the variant. Collective."""
        if (tokens, experts) not in self.eps:
            if ON_GPU:
                paths = {**PATHS, "include": self.variant.include, "cache": env.cache_folder() or ""}
                kernel_paths.compiler_paths = lambda cache=None: paths
                KEPT.append(dict(weft.engine._gpus))
                weft.engine._gpus.clear()
            heap = default_heap_bytes(self.comm.num_ranks, TOP_K, HIDDEN, tokens, torch.bfloat16)
            if ON_GPU and tokens <= 128:  # a captured result keeps its part
                heap += (CALLS_IN_GRAPH + 4) * self.comm.num_ranks * tokens * EXPERTS // 2 * (HIDDEN + 512)
            self.eps[tokens, experts] = weft.ExpertParallel(
                self.comm, num_experts=experts, top_k=TOP_K, hidden=HIDDEN, max_tokens_per_rank=tokens,
                deadline_s=DEADLINE_S, heap_bytes=max(heap, 256 << 20) + (self.number << 20),
                num_sms=self.variant.given.get("sms"),
            )  # fmt: skip
        return self.eps[tokens, experts]

    def close(self) -> None:
        """Give everything back."""
        for ep in self.eps.values():
            ep.close()


def steps(chosen: Sequence[Side], experts: int) -> list[tuple[str, Callable[[], None]]]:
    """A step of each variant, and the GEMMs alone; all have the same experts."""
    made: list[Step] = []
    for side in [*chosen, chosen[0]]:
        made.append(Step(side, experts, made[0] if made else None, alone=len(made) == len(chosen)))
    names = [*(side.variant.name for side in chosen), "GEMMs alone"]
    return [*zip(names, made, strict=True)]


class Calls:
    """A row's call in one variant, with one result alive at a time."""

    def __init__(self, side: Side, row: Row, num_sms: int | None, samples: Samples) -> None:
        side.use()
        self.side, self.row, self.case, self.samples = side, row, row.case, samples
        self.ep = side.ep(row.case.tokens)
        self.result: Any = None
        quantize = None if self.case.quantize == "none" else self.case.quantize
        self.x = samples.x(self.case.rows)
        self.options = {
            "layout": self.case.layout, "alignment": self.case.alignment, "quantize": quantize, "num_sms": num_sms,
            "capacity": samples.capacity(self.case), "mode": self.case.mode,
        }  # fmt: skip
        if not row.zero_holes:
            self.options["zero_holes"] = False
        self.num_sms = num_sms
        if self.case.op in ("combine", "both"):
            self.received = self.dispatch()
            self.y, self.want = samples.outputs(self.case)
            if self.case.source == "heap":
                self.y = self.ep.empty_output(self.received).copy_(self.y)
        self.check()

    def dispatch(self) -> weft.Dispatched:
        """The first call."""
        return self.ep.dispatch(self.x, self.samples.topk_idx, self.samples.topk_weights, **self.options)

    def combine(self) -> Tensor:
        """The second call."""
        return self.ep.combine(
            self.y, self.received.handle, wire=self.case.wire, num_sms=self.num_sms, mode=self.case.mode
        )

    def __call__(self) -> None:
        """What is timed."""
        self.result = None
        if self.case.op == "both":
            self.received = None  # type: ignore[assignment]
            self.received = self.dispatch()
        self.result = self.dispatch() if self.case.op == "dispatch" else self.combine()

    def check(self) -> None:
        """Raises Mismatch."""
        wrong: list[Mismatch] = []
        for _ in range(2):
            self()
            synchronize()
            try:
                if self.case.op != "dispatch":
                    self.samples.check_y(self.result, self.want)
                elif self.row.zero_holes:
                    self.samples.check_dispatched(self.case, self.result)
            except Mismatch as error:  # raised when no other rank waits for this one any more
                wrong.append(error)
            for part in [self.result] if self.case.op != "dispatch" else _parts(self.result.x):
                poison(part)
        if wrong:
            raise wrong[0]

    def graph(self) -> Callable[[], None]:
        """A replay of some such calls."""
        if not ON_GPU:
            return self
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS_IN_GRAPH):
                self()
        return graph.replay


class Step:
    """A step of training: dispatch, grouped GEMMs forward and backward, weighted combine. `alone`: its GEMMs.
    `first`: a step whose experts it has."""

    def __init__(self, side: Side, experts: int, first: Step | None, *, alone: bool) -> None:
        side.use()
        self.side, self.alone, device = side, alone, side.comm.device
        self.ep = side.ep(TOKENS, experts)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
        num_local = experts // side.comm.num_ranks
        if first is None:
            with torch.no_grad():
                self.up = torch.empty(num_local, 2 * WIDTH, HIDDEN, **options).normal_(std=HIDDEN**-0.5)
                self.down = torch.empty(num_local, HIDDEN, WIDTH, **options).normal_(std=WIDTH**-0.5)
        else:
            self.up, self.down = first.up, first.down
        idx, weights = weft.routing.uniform(TOKENS, experts, TOP_K, rank=side.comm.rank, num_ranks=side.comm.num_ranks)
        self.idx, self.weights = idx.to(device), weights.to(device).requires_grad_()
        self.x = torch.randn(TOKENS, HIDDEN, **options)
        self.grad = torch.randn_like(self.x, requires_grad=False)
        kept = self.dispatch(self.x.detach(), self.weights.detach())
        self.rows, self.offsets = kept.x.clone().requires_grad_(), kept.offsets.clone()  # type: ignore[union-attr]
        self.grad_rows = torch.randn_like(self.rows, requires_grad=False)
        self()

    def dispatch(self, x: Tensor, weights: Tensor) -> weft.Dispatched:
        """By expert."""
        return self.ep.dispatch(x, self.idx, weights, layout="expert_major", alignment=ALIGNMENT)

    def experts(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """SwiGLU by grouped GEMMs."""
        if not ON_GPU:
            return rows * self.down.mean()
        gate, up = torch._grouped_mm(rows, self.up.transpose(-2, -1), offs=offsets[1:]).chunk(2, dim=-1)
        return torch._grouped_mm(functional.silu(gate) * up, self.down.transpose(-2, -1), offs=offsets[1:])

    def __call__(self) -> None:
        """What is timed."""
        for parameter in (self.x, self.weights, self.up, self.down, self.rows):
            parameter.grad = None
        if self.alone:
            self.experts(self.rows, self.offsets).backward(self.grad_rows)
            return
        r = self.dispatch(self.x, self.weights)
        self.ep.combine(self.experts(r.x, r.offsets), r.handle).backward(self.grad)  # type: ignore[arg-type]


def _rounded(rounds: list[list[float]]) -> list[list[float]]:
    return [[round(us, 2) for us in each] for each in rounds]


def synchronize() -> None:
    """Wait for the GPU."""
    if ON_GPU:
        torch.cuda.synchronize()


def _parts(x: Tensor | weft.Quantized) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [part for part in (x.data, x.scales) if part is not None]


def time_round(comm: weft.Communicator, call: Callable[[], None], iters: int) -> tuple[list[float], list[float]]:
    """us of each call: on the stream from the end of the one before, and of the host."""
    times = time_calls(call, iters=iters, warmup=3, device=comm.device, meet=lambda: comm.meet(DEADLINE_S))
    return times.gpu_us, times.host_us


def measure(
    comm: weft.Communicator, calls: Sequence[tuple[str, Callable[[], None]]], iters: int, rounds: int, each: int
) -> dict[str, Any]:
    """-> of each variant, by name, its rounds."""
    found: dict[str, Any] = {name: {"gpu": [], "host": []} for name, _ in calls}
    for _ in range(rounds):
        for name, call in calls:
            gpu, host = time_round(comm, call, iters)
            found[name]["gpu"].append([us / each for us in gpu])
            found[name]["host"].append([us / each for us in host])
    return found


def run_rank(
    comm: weft.Communicator, variants: Sequence[Variant], wanted: Sequence[str], rounds: int, folder: str, notes: str
) -> None:
    """Every row; what was measured goes to a file as it comes."""
    if ON_GPU:
        torch.cuda.set_device(comm.device)
    samples = Samples(comm, 0)
    sides = [Side(comm, variant, number) for number, variant in enumerate(variants)]
    with (Path(folder) / f"speed{comm.rank}.jsonl").open("w", encoding="utf-8") as file:
        for row, num_sms in launches(wanted):
            took, note = time.perf_counter(), {"row": row.name, "num_sms": num_sms}
            chosen = [side for side in sides if has(side.variant, row, num_sms)]
            problems: list[str] = []
            calls: list[tuple[str, Callable[[], None]]] = []
            if row.kind == "step":
                try:
                    calls = steps(chosen, int(row.name.split()[-1]))
                except RuntimeError as error:  # of torch: a GPU without memory, no grouped GEMM
                    problems.append(f"rank {comm.rank}: {error}")
            else:
                samples.use(row.case)
            for side in chosen if row.kind != "step" else []:
                try:
                    made, wrong = Calls(side, row, num_sms, samples), ""
                except (Mismatch, weft.InvalidArgument, weft.Unsupported) as error:
                    wrong = f"{side.variant.name}, rank {comm.rank}: {type(error).__name__}: {error}"
                found_wrong = [text for text in gathered(comm, Path(notes), wrong) if text]
                problems += found_wrong
                if not found_wrong:
                    calls.append((side.variant.name, made.graph() if row.kind == "graph" else made))
            iters, each = 5 if row.kind == "step" else 25, CALLS_IN_GRAPH if row.kind == "graph" else 1
            found = measure(comm, calls, iters, rounds, each)
            rounded = {name: {key: _rounded(of[key]) for key in of} for name, of in found.items()}
            print(json.dumps({**note, "found": rounded, "problems": problems}), file=file, flush=True)
            calls.clear()
            made = None  # type: ignore[assignment]
            if row.kind == "step" and ON_GPU:
                torch.cuda.empty_cache()
            if comm.rank == 0:
                print(f"{row.name}, {num_sms}: {time.perf_counter() - took:.1f} s", file=sys.stderr, flush=True)
    for side in sides:
        side.close()


def gathered(comm: weft.Communicator, folder: Path, text: str) -> list[str]:
    """Every rank's text."""
    NOTES.append(text)
    (folder / f"note-{len(NOTES)}-{comm.rank}").write_text(text, encoding="utf-8")
    comm.meet(DEADLINE_S * 3)
    return [(folder / f"note-{len(NOTES)}-{rank}").read_text(encoding="utf-8") for rank in range(comm.num_ranks)]


def launches(wanted: Sequence[str]) -> Iterator[tuple[Row, int | None]]:
    """Rows and SMs, in the order of `wanted`: names with @SMs+SMs or without; none: all."""
    table = {row.name: row for row in rows()}
    for text in wanted or table:
        name, _, sms = text.partition("@")
        row = table[name]
        yield from ((row, num_sms) for num_sms in ([int(each) for each in sms.split("+")] if sms else row.sms))


def has(variant: Variant, row: Row, num_sms: int | None) -> bool:
    """Whether the row is timed in this variant."""
    return not variant.rows or bool({row.name, f"{row.name}@{num_sms}"} & set(variant.rows))


def compile_ahead(variants: Sequence[Variant], wanted: Sequence[str], arch: str) -> int:
    """Kernels of large calls, all at once, into the cache."""
    jobs: dict[tuple[str, str], str] = {}
    for row, num_sms in launches(wanted):
        if row.kind == "step":
            for variant in variants:
                if has(variant, row, num_sms):
                    jobs.update({(variant.include, source): row.name for source in sources_of_step(row, variant, arch)})
        if row.kind != "calls":
            continue
        shape = KernelShape(ranks=2, tokens=row.case.tokens, num_sms=num_sms)
        of_rows = "fp8 rows" if row.case.rows == "fp8" else "plain" if row.case.quantize == "none" else "fp8"
        sources = [prebuild.call_source(shape, row.case.layout, arch, is_small=False, rows=of_rows)]
        if row.case.op == "combine":
            sources += [
                prebuild.call_source(
                    shape, row.case.layout, arch, is_small=False, wire=row.case.wire, has_push=has_push
                )
                for has_push in ((True, False) if row.case.layout == "rank_major" and not row.case.wire else (True,))
            ]
        for variant in variants:
            if has(variant, row, num_sms):
                jobs.update({(variant.include, source): row.name for source in sources})
    for variant in variants:
        jobs[variant.include, NATIVE.render_place_rows()] = "place rows"
        if (Path(variant.include) / "weft" / "kernels" / "stage_rows.cuh").exists():
            jobs[variant.include, NATIVE.render_stage_rows()] = "stage rows"
    for include in {variant.include for variant in variants}:
        kernel_paths.compiler_paths = lambda cache=None, include=include: {**PATHS, "include": include, "cache": cache}
        prebuild.compile_all(
            [(arch, name, source) for (where, source), name in jobs.items() if where == include],
            env.cache_folder() or "",
        )
    return len(jobs)


def sources_of_step(row: Row, variant: Variant, arch: str) -> Iterator[str]:
    """Kernels of a step of training."""
    shared_bytes, said = prebuild.ARCHITECTURES[arch], variant.given.get("sms")
    sms = {said} if said else {default_num_sms(op, "expert_major") for op in ("dispatch", "combine")}
    for num_sms in sms:
        shape = KernelShape(ranks=2, experts=int(row.name.split()[-1]), tokens=TOKENS, num_sms=num_sms)
        for routing in ("int64 ids", "handle"):
            yield prebuild.dispatch_source(shape, "expert_major", "plain", routing, shared_bytes)
        for has_side in (False, True):
            yield prebuild.combine_source(shape, "expert_major", None, shared_bytes, has_push=True, has_side=has_side)
    yield NATIVE.render_gradients()


def results(folder: Path) -> Iterator[dict[str, Any]]:
    """A JSON object for each row, SMs and variant: of each call the slowest rank."""
    files = [
        (folder / f"speed{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        for rank in range(2)
        if (folder / f"speed{rank}.jsonl").exists()
    ]
    for lines in zip(*files, strict=False):
        notes = [json.loads(line) for line in lines]
        base = {"kind": "two_ranks", "row": notes[0]["row"], "num_sms": notes[0]["num_sms"]}
        if notes[0]["problems"]:
            yield {**base, "problems": notes[0]["problems"]}
        for name in notes[0]["found"]:
            gpu, host = (
                [
                    [max(each) for each in zip(*ranks, strict=True)]
                    for ranks in zip(*(note["found"][name][key] for note in notes), strict=True)
                ]
                for key in ("gpu", "host")
            )
            of_all = sorted(itertools.chain(*gpu))
            yield {
                **base,
                "variant": name,
                "time_us": round(statistics.median(of_all), 2),
                "p99_us": round(of_all[int(0.99 * len(of_all))], 2),
                "rounds_us": [round(statistics.median(each), 2) for each in gpu],
                "host_us": round(statistics.median(itertools.chain(*host)), 2),
                "calls": len(of_all),
            }


def variant_of(text: str) -> Variant:
    """`name=folder;key=number;...;rows=name/name`."""
    name, rest = text.split("=", 1)
    include, *others = rest.split(";")
    pairs = dict(other.split("=", 1) for other in others)
    of_rows = tuple(pairs.pop("rows", "").split("/")) if "rows" in pairs else ()
    return Variant(name, str(Path(include).resolve()), {key: int(value) for key, value in pairs.items()}, of_rows)


def main() -> int:
    """Run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", required=True, type=variant_of)
    parser.add_argument("--rows", default="", help="names, each with @SMs+SMs or without, / between; else all")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, required=True, help="of what ranks write")
    parser.add_argument("--only-compile", action="store_true", help="kernels for sm_90 into the cache")
    parser.add_argument("--quick", action="store_true", help="a small shape on the CPU")
    options = parser.parse_args()
    if options.quick:
        global ON_GPU, HIDDEN, TOKENS, WIDTH
        ON_GPU, HIDDEN, TOKENS, WIDTH = False, 256, 64, 128
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in options.rows.split("/") if name]
    if options.only_compile:
        return int(compile_ahead(options.variant, wanted, "sm_90") == 0)
    device = "cpu" if options.quick else "cuda"
    facts = apart(machine_facts, device)
    variants = [{"name": each.name, "given": each.given, "rows": each.rows} for each in options.variant]
    print(json.dumps({"kind": "machine", **facts, "variants": variants}), flush=True)
    if ON_GPU:
        num_kernels = apart(compile_ahead, options.variant, wanted, facts["arch"], timeout_s=400.0)
        print(f"{num_kernels} kernels", file=sys.stderr, flush=True)
    status = 0
    try:
        with tempfile.TemporaryDirectory() as notes:
            args = (options.variant, wanted, options.rounds, str(options.folder), notes)
            weft.spawn(run_rank, 2, args=args, device=device)
    except weft.Error as error:
        print(error, file=sys.stderr)
        status = 1
    for result in results(options.folder):
        print(json.dumps(result))
        status = status or int("problems" in result)
    return status


if __name__ == "__main__":
    sys.exit(main())
