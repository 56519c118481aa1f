"""What bounded waits and statistics cost small batches: python lab/wait_cost.py [--ranks N] > gpu_wait_cost.jsonl

Dispatch (masked, BF16 to FP8) and combine of T = 128, 32 and 8 tokens a rank are captured in CUDA graphs with the
kernels as they are, and with kernels from changed copies of the headers: without the abort poll and the deadline,
without the statistics, and without all that only errors need. Graphs of all kinds are replayed in turn, so that what
drifts falls on all. Prints JSON lines: `time_us` is the median of the slowest rank, `saved_us` that of its differences
from the kernels as they are. Needs a GPU for each rank, or with --isolation thread one for all, without links.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import compare_kernels

import weft
from weft.bench.apart import apart
from weft.bench.facts import machine_facts
from weft.kernels import paths as kernel_paths

AS_THEY_ARE = "as they are"
LOOK_AGAIN = "return PauseResult::kLookAgain;\n"
NO_POLL = {
    "weft/sync/block_wait.cuh": {
        f"    if (++num_turns_ % kLooks != 0 || ns_since_start() < quiet_ns_) {LOOK_AGAIN}": (
            f"    ++num_turns_;\n    {LOOK_AGAIN}"
        )
    }
}
CHANGES = {  # of the kernels: by file, texts with what takes their place
    AS_THEY_ARE: {},
    "no abort poll, no deadline": NO_POLL,
    "no wait statistics": {
        "weft/transport/peers.cuh": {
            "blockIdx.x == 0 ? &view.words()->waited_ns[peer] : nullptr": "nullptr",
            "&view.host->timeout_ns, blockIdx.x == 0);": "&view.host->timeout_ns, false);",
        },
    },
    # Nor what finds broken windows, other handles, renewed heaps, bad counts, headers that came without their picks.
    "no error paths": NO_POLL
    | {
        "weft/transport/flight.cuh": {
            "const u64 broken = ptx::ld_relaxed_sys(&words->broken);": "constexpr u64 broken = 0;",
            "const bool has_moved = words->heap_generation != view.heap_generation;": (
                "constexpr bool has_moved = false;"
            ),
            "flight.print = print_with(print, caller_bits(flight.caller));": "flight.print = print;",
        },
        "weft/kernels/small/dispatch_picks.cuh": {
            "return is_over ? sync::PauseResult::kAbort : sync::PauseResult::kLookAgain;": (
                "return sync::PauseResult::kLookAgain;"
            ),
            "        const bool is_over = __all_sync(Base::kAll, ptx::ld_acquire_cta(has_heard) != 0) != 0;\n": "",
        },
        "weft/kernels/small/dispatch_entry.cuh": {
            "      ptx::bar_sync(kPlaced, kWithOne);\n      if (has_no_places()) return;\n": "",
            "    if constexpr (!kConfig.is_cached) ptx::bar_arrive(kPlaced, kWithOne);\n": "",
            "if (!Receive(s_).is_sound(num_tokens)) {": "if (false) {",
            "return !kConfig.is_cached && verdict(Phase::kCount) == Verdict::kOk && Receive::shared_words().is_left;": (
                "return false;"
            ),
        },
    },
}
CASES = [{"tokens": tokens, "layout": "masked", "quantize": "fp8"} for tokens in (128, 32, 8)]


def copy_of_headers(folder, change):
    """Into `folder`; -> it. Raises ValueError if a text is not there once."""
    shutil.copytree(kernel_paths.compiler_paths()["include"], folder)
    for name, places in change.items():
        text = (folder / name).read_text()
        for old, new in places.items():
            if text.count(old) != 1:
                raise ValueError(f"{old!r} is {text.count(old)} times in {name}")
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


def main():
    """Run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--isolation", choices=("process", "thread"), default="process", help="of the ranks")
    options = parser.parse_args()
    num_ranks, isolation = options.ranks, options.isolation
    print(json.dumps({"kind": "machine", **apart(machine_facts, "cuda")}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folders = [
            str(copy_of_headers(Path(folder) / str(number), change)) for number, change in enumerate(CHANGES.values())
        ]
        args = (folders, CASES, isolation == "thread")
        run = compare_kernels.run_rank
        ranks = weft.spawn(run, num_ranks=num_ranks, args=args, device="cuda", isolation=isolation)
    for number, case in enumerate(CASES):
        for op in ("dispatch", "combine"):
            of_ranks = [rank[number][op] for rank in ranks]
            for found in compare_kernels.rows_of(case, op, list(CHANGES), of_ranks):
                row = {"kind": "cost", "ranks": num_ranks, "op": op, "tokens": case["tokens"]}
                row |= {
                    "isolation": isolation,
                    "kernels": found["headers"],
                    "time_us": found["time_us"],
                    "saved_us": 0.0 - found["more_us"],
                }
                print(json.dumps(row))


if __name__ == "__main__":
    main()
