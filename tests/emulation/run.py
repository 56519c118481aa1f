"""Many random cases by hand: run.py [--trials N] [--first SEED] [--kernel dispatch|small_dispatch]."""

import argparse
import sys
import time

from dispatch_cases import run_case
from kernels import Compiler
from machine import LaunchFailed
from random_cases import random_dispatch

from weft.errors import Unsupported


def main() -> int:
    """Exit status 1 if any case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--kernel", choices=("dispatch", "small_dispatch"), nargs="*")
    options = parser.parse_args()
    compiler, num_failed = Compiler(), 0
    try:
        for seed in range(options.first, options.first + options.trials):
            for kernel in options.kernel or ("dispatch", "small_dispatch"):
                case, begin = random_dispatch(seed, is_small=kernel == "small_dispatch"), time.monotonic()
                try:
                    found = run_case(compiler, case)
                except Unsupported as error:
                    print(f"{kernel} {seed}: not run: {error}", flush=True)
                    continue
                except LaunchFailed as error:
                    found = [str(error)]
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
