"""Many random cases by hand: run.py [--trials N] [--first SEED] [--kernel NAME...]."""

import argparse
import signal
import sys
import time

from combine_cases import run_combine
from dispatch_cases import run_case
from kernels import Compiler
from machine import LaunchFailed
from random_cases import random_combine, random_dispatch

from weft.errors import Unsupported

KERNELS = ("dispatch", "small_dispatch", "combine", "small_combine")


def run_random(compiler: Compiler, kernel: str, seed: int) -> tuple[object, list[str]]:
    """A case and what differs in it."""
    is_small = kernel.startswith("small_")
    if kernel.endswith("combine"):
        combine = random_combine(seed, is_small=is_small)
        return combine, run_combine(compiler, combine)
    dispatch = random_dispatch(seed, is_small=is_small)
    return dispatch, run_case(compiler, dispatch)


def main() -> int:
    """Exit status 1 if any case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--kernel", choices=KERNELS, nargs="*")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # clears up first
    compiler, num_failed = Compiler(), 0
    try:
        for seed in range(options.first, options.first + options.trials):
            for kernel in options.kernel or KERNELS:
                begin = time.monotonic()
                try:
                    case, found = run_random(compiler, kernel, seed)
                except (Unsupported, MemoryError) as error:  # or larger than the emulated memory
                    print(f"{kernel} {seed}: not run: {error}", flush=True)
                    continue
                except LaunchFailed as error:
                    case, found = "", [str(error)]
                num_failed += bool(found)
                print(f"{kernel} {seed}: {'FAILED' if found else 'ok'} {time.monotonic() - begin:.1f} s", flush=True)
                for line in found[:8]:
                    print(f"    {line}")
                if found:
                    print(f"    {case}", flush=True)
    finally:
        compiler.close()
    print(f"{num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
