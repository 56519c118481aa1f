"""Whether two trees of headers make the same machine code: PYTHONPATH=python python tools/same_code.py OLD NEW

Compiles the kernels of a shape from both with NVRTC, for sm_90 and sm_100, and compares the code sections of the
cubins, whatever they are called, registers and stack. No GPU. OLD and NEW: a folder that has `weft/` or
`include/weft/`, or a revision of this repository. All kernels take some minutes a tree; `--quick` has one of each kind
of code, `--only` those whose names have a text. What a tree has been compiled to is kept under build/same_code.

The sources come from the native module in use. For the other tree, an entry is looked for where that tree has it, and
fields of a configuration that it does not have are left out, which is said. Prints a line for each kernel that differs,
and a summary; exit status 1 if any differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weft import _load
from weft.errors import CompileError
from weft.kernels import paths as kernel_paths
from weft.kernels import prebuild
from weft.kernels.prebuild import KernelShape

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "same_code"
ARCHITECTURES = ("sm_90", "sm_100")
SMALL = KernelShape(ranks=2, experts=8, top_k=2, hidden=512, tokens=192, num_sms=2)
QUICK = (
    "dispatch rank_major, plain, int64 ids",
    "dispatch rank_major, fp8, handle",
    "dispatch expert_major, plain, int64 ids",
    "dispatch expert_major, fp8 rows, handle",
    "dispatch masked, fp8_ue8m0, int32 ids",
    "small dispatch rank_major, plain, int64 ids",
    "small dispatch masked, fp8, handle",
    "small dispatch expert_major, fp8 by column, int64 ids, receives",
    "small dispatch masked, fp8 rows, int64 ids, sends",
    "combine rank_major from the heap, plain, side",
    "combine rank_major, plain",
    "combine rank_major, fp8, side",
    "combine by expert, plain, side",
    "combine by expert, fp8",
    "small combine rank_major, plain, side",
    "small combine by expert, fp8",
    "small combine by expert, plain, receives",
    "unload",
)
EXECUTABLE, PROGBITS, CUDA_INFO = 4, 1, 0x70000000  # ELF: a flag and two types of sections
REGISTERS, FRAME, WITH_LENGTH = 0x2F, 0x11, 4  # of an attribute: two numbers and a form (as nvdisasm names them)


class Tree:
    """Headers, and the sources of kernels as they must be for them."""

    def __init__(self, include: Path) -> None:
        self.include = include
        self._kernels = {path: path.read_text() for path in sorted((include / "weft" / "kernels").rglob("*.cuh"))}
        config = "\n".join(path.read_text() for path in sorted((include / "weft" / "config").glob("*.h")))
        self._config = re.sub(r"//[^\n]*", "", config)
        self.left_out: set[str] = set()

    def source(self, rendered: str) -> str:
        """A rendered kernel, for this tree."""

        def entry(found: re.Match[str]) -> str:
            if (self.include / found[1]).is_file():
                return found[0]
            named = re.search(r"weft::kernels::(\w+)(?:<kConfig>)?\(args\)", rendered)
            if named is None:
                raise SystemExit(f"no entry in {rendered}")
            wanted = re.compile(rf"__device__ (?:inline )?void {named[1]}\(const")
            paths = [path for path, text in self._kernels.items() if wanted.search(text)]
            if len(paths) != 1:
                raise SystemExit(f"{self.include}: {len(paths)} files with the entry of {found[1]}")
            return f'#include "{paths[0].relative_to(self.include)}"'

        named = re.search(r"weft::(\w+KernelConfig)\b", rendered)
        its_config = named and re.search(rf"struct {named[1]} \{{(.*?)\n\}};", self._config, re.DOTALL)
        known = its_config[1] if its_config else self._config

        def field(found: re.Match[str]) -> str:
            if re.search(rf"\b{found[1]}\b *[=;{{]", known):
                return found[0]
            self.left_out.add(found[1])
            return ""

        source = re.sub(r'#include "([^"]+)"', entry, rendered)
        return re.sub(r"\.(\w+) = (?:\{[^{}]*\}|[^,{]+), ", field, source)


@dataclass(frozen=True)
class Code:
    """What a cubin has of a kernel."""

    sections: tuple[bytes, ...]
    registers: int
    stack_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of code."""
        return sum(map(len, self.sections))


def code_of(cubin: bytes) -> Code:
    """The sections of an ELF file (64 bits) that hold code, by content, and the largest figures of its functions."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    sections, figures = [], {REGISTERS: 0, FRAME: 0}
    for idx in range(count):
        _, kind, flags, _, begin, length, *_ = struct.unpack_from("<IIQQQQIIQQ", cubin, table + idx * size)
        if kind == PROGBITS and flags & EXECUTABLE:
            sections.append(cubin[begin : begin + length])
        if kind == CUDA_INFO:
            for attribute, value in attributes(cubin[begin : begin + length]):
                if attribute in figures:
                    figures[attribute] = max(figures[attribute], struct.unpack_from("<I", value, 4)[0])
    if not sections or not figures[REGISTERS]:
        raise SystemExit("a cubin without code, or of another form")
    return Code(tuple(sorted(sections)), figures[REGISTERS], figures[FRAME])


def attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Of a section of figures: 4 bytes each, format, number, and a value or the length of one that follows."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == WITH_LENGTH:
            yield attribute, info[at : at + length]
            at += length


def include_of(given: str, folder: str) -> Path:
    """The headers of a folder or of a revision, which is unpacked into `folder`."""
    for path in (Path(given), Path(given) / "include"):
        if (path / "weft" / "kernels").is_dir():
            return path.resolve()
    command = ["git", "-C", str(ROOT), "archive", given, "include"]
    archive = subprocess.run(command, check=False, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"{given}: neither headers nor a revision: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return Path(folder) / "include"


def wanted_kernels(shape: KernelShape, only: list[str], *, quick: bool) -> list[tuple[str, str]]:
    """Name and source; with other numbers of SMs they are the same but for a constant."""
    found: dict[str, str] = {}
    for name, source in prebuild.kernels(shape, prebuild.ARCHITECTURES["sm_90"]):
        is_wanted = name in QUICK if quick else True
        if is_wanted and not name.endswith(" SMs") and (not only or any(text in name for text in only)):
            found.setdefault(source, name)
    return [(name, source) for source, name in found.items()]


def compare(old: Tree, new: Tree, jobs: list[tuple[str, str, str]], num_threads: int) -> tuple[list[str], int, int]:
    """Of (architecture, name, source): a line for each that differs, and the bytes of all code in both trees."""
    CACHE.mkdir(parents=True, exist_ok=True, mode=0o700)

    def compiled(tree: Tree, arch: str, source: str) -> Code:
        paths = kernel_paths.compiler_paths(cache=str(CACHE)) | {"include": str(tree.include)}
        return code_of(_load.native().compile_kernel(tree.source(source), arch=arch, **paths))

    def both(job: tuple[str, str, str]) -> tuple[str, int, int]:
        arch, name, source = job
        try:
            was, now = (compiled(tree, arch, source) for tree in (old, new))
        except CompileError as error:
            return f"{arch} {name}: {' '.join(str(error).splitlines()[:2])}", 0, 0
        text = (
            f"{arch} {name}: {was.num_bytes} -> {now.num_bytes} bytes, registers {was.registers} -> {now.registers}, "
            f"stack {was.stack_bytes} -> {now.stack_bytes}"
        )
        return "" if was == now else text, was.num_bytes, now.num_bytes

    with ThreadPoolExecutor(num_threads) as pool:
        found = list(pool.map(both, jobs))
    return [text for text, _, _ in found if text], sum(was for _, was, _ in found), sum(now for _, _, now in found)


def main(arguments: list[str] | None = None) -> int:
    """Compile, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default=str(ROOT))
    parser.add_argument("--quick", action="store_true", help="one kernel of each kind of code")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="kernels with this in their names")
    parser.add_argument("--arch", action="append", metavar="ARCH", help="; ".join(ARCHITECTURES))
    parser.add_argument("--shape", choices=("large", "small"), default="large", help="4 ranks, H = 7168; 2, H = 512")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="%(default)s at once")
    given = parser.parse_args(arguments)
    shape = KernelShape() if given.shape == "large" else dataclasses.replace(SMALL)
    kernels = wanted_kernels(shape, given.only, quick=given.quick)
    if not kernels:
        parser.error("no such kernels")
    jobs = [(arch, name, source) for arch in given.arch or ARCHITECTURES for name, source in kernels]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        old, new = Tree(include_of(given.old, first)), Tree(include_of(given.new, second))
        differences, was, now = compare(old, new, jobs, given.jobs)
    for tree, name in ((old, "OLD"), (new, "NEW")):
        if tree.left_out:
            print(f"{name} has no field {', '.join(sorted(tree.left_out))}")
    for line in differences:
        print(line)
    print(f"{len(jobs)} kernels, {len(differences)} differ; {was} -> {now} bytes of code")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
