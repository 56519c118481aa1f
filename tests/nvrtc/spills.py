"""Kernels of a shape that spill, as JSON lines; no GPU is needed:

PYTHONPATH=python python tests/nvrtc/spills.py --experts 128 --top-k 4 --hidden 2880

The kernels of `weft cache prebuild` are compiled for sm_90 and sm_100, which takes some minutes. An object for each
that has a stack frame or spills; the last has the shape and how many kernels there were.
"""

import argparse
import dataclasses
import json
import multiprocessing
import re
import sys

import nvrtc
import sass

from weft.kernels import prebuild
from weft.kernels.prebuild import KernelShape

ARCHITECTURES = ("sm_90", "sm_100")
FIGURES = ("stack_bytes", "stored_bytes", "loaded_bytes")


def figures(job: tuple[str, str, str]) -> tuple[str, str, list[int]]:
    """Of (architecture, name, source), in place of the source."""
    arch, name, source = job
    log = nvrtc.compile_source(source, [*sass.options(arch), "--ptxas-options=-v"]).log
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return arch, name, [max(map(int, each)) for each in zip(*found, strict=True)]


def main() -> int:
    """Compile, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(KernelShape):
        if field.name not in ("small_num_sms", "layouts"):
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=type(field.default or 0),
                default=field.default,
                help="%(default)s",
            )
    shape = KernelShape(**vars(parser.parse_args()))
    sources = {}  # once each: with other numbers of SMs they are the same but for a constant
    for name, source in prebuild.kernels(shape, prebuild.ARCHITECTURES["sm_90"]):
        if not name.endswith(" SMs"):
            sources.setdefault(source, name)
    jobs = [(arch, name, source) for arch in ARCHITECTURES for source, name in sources.items()]
    num_spills = 0
    with multiprocessing.Pool() as pool:
        for arch, name, found in pool.imap(figures, jobs, chunksize=4):
            if any(found):
                num_spills += 1
                print(json.dumps({"arch": arch, "kernel": name, **dict(zip(FIGURES, found, strict=True))}), flush=True)
    print(json.dumps({**vars(shape), "kernels": len(jobs), "spills": num_spills}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
