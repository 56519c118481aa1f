"""From the source of a kernel, as the library renders it, to a program that runs it on the CPU.

The headers are those of include/, but for the ones that have a stand-in here and for three words of CUDA that C++ does
not know. A mutant is a kernel whose headers have been changed in one place.
"""

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "include"
FLAGS = ("-std=c++20", "-O1", "-w", "-no-pie", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) u8 (\w+)\[\];")
LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\(([^,]+), \d+\)")
ENTRY = re.compile(r"(\w+)\(const __grid_constant__ weft::kernels::(\w+Args) args")


@dataclass(frozen=True)
class Mutant:
    """A deliberate mistake: in the header `path` (below include/), `old` is replaced by `new`."""

    name: str
    path: str
    old: str
    new: str


def _rule(flag: str, name: str) -> Mutant:
    """A switch of include/weft/config/mutants.h."""
    off = f"constexpr bool {flag} = false;"
    return Mutant(name, "weft/config/mutants.h", off, off.replace("false", "true"))


ONE_BUFFER = _rule("kOneBuffer", "both parities share headers, payloads and slots (R2)")
NO_SEQUENCE = _rule("kNoSequence", "a header is a flag: its sequence is not compared (R1)")


@dataclass(frozen=True)
class Program:
    """A compiled kernel, and the file that lists its __shared__ variables."""

    path: Path
    shared_variables: Path


class Compiler:
    """Compiles each source once, some at a time. Everything lies in one folder, which `close` removes."""

    def __init__(self, jobs: int = 2) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="emulated-"))
        self._pool = ThreadPoolExecutor(jobs)
        self._lock = threading.Lock()
        self._includes: dict[Mutant | None, Path] = {}
        self._programs: dict[tuple[str, Mutant | None], Future[Program]] = {}

    def close(self) -> None:
        """Remove what was compiled."""
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, source: str, mutant: Mutant | None = None) -> "Future[Program]":
        """Begin to compile a kernel."""
        with self._lock:
            key = (source, mutant)
            if key not in self._programs:
                self._programs[key] = self._pool.submit(self._compile_kernel, source, self._include(mutant))
            return self._programs[key]

    def layout(self, shape: dict[str, int]) -> dict[str, int]:
        """Where things lie in a window of this shape."""
        with self._lock:
            key = ("layout", None)
            if key not in self._programs:
                text = (HERE / "layout.cc").read_text()
                self._programs[key] = self._pool.submit(self._compile, text, self._include(None))
        fields = self._folder / f"shape-{_digest(str(shape))}"
        fields.write_text("".join(f"{name} {value}\n" for name, value in shape.items()))
        program = self._programs[key].result().path
        told = subprocess.run([program, fields], capture_output=True, check=True, timeout=60).stdout
        found: dict[str, int] = json.loads(told)
        return found

    def _compile_kernel(self, source: str, include: Path) -> Program:
        bounds, entry = LAUNCH_BOUNDS.search(source), ENTRY.search(source)
        if bounds is None or entry is None:
            raise ValueError(f"not the source of a kernel: {source}")
        has_config = "kConfig" in source
        shared = "complete(kConfig, args)" if has_config else "u64{0}"
        return self._compile(
            f'#include "emulator.h"\n{source}#include "driver.h"\nusing namespace emulation;\n'
            f"int main(int, char** arguments) {{\n  using Args = weft::kernels::{entry[2]};\n"
            f"  return run_launches<Args>(weft::{entry[1]}, {bounds[1]}, [](Args& args) {{ return {shared}; }},"
            " arguments);\n}\n",
            include,
        )

    def _compile(self, text: str, include: Path) -> Program:
        path = self._folder / f"program-{_digest(text, str(include))}"
        path.with_suffix(".cc").write_text(text)
        command = ["nice", "-n", "10", "g++", *FLAGS, f"-I{include}", f"-I{HERE}", str(path.with_suffix(".cc"))]
        compiled = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True, timeout=300)
        if compiled.returncode != 0:
            raise RuntimeError(f"g++ refused {path.with_suffix('.cc')}:\n{compiled.stderr[:4000]}")
        shared_variables = path.with_suffix(".shared_variables")
        shared_variables.write_text("".join(f"{address} {size}\n" for address, size in _shared_variables(path)))
        return Program(path, shared_variables)

    def _include(self, mutant: Mutant | None) -> Path:
        if mutant not in self._includes:
            self._includes[mutant] = self._folder / f"include-{len(self._includes)}"
            _write_headers(self._includes[mutant], mutant)
        return self._includes[mutant]


def _write_headers(folder: Path, mutant: Mutant | None) -> None:
    shutil.copytree(INCLUDE, folder)
    shutil.copytree(HERE / "include", folder, dirs_exist_ok=True)
    if mutant is not None:
        path = folder / mutant.path
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"mutant {mutant.name}: {mutant.old!r} is {text.count(mutant.old)} times in {mutant.path}")
        path.write_text(text.replace(mutant.old, mutant.new))
    for path in folder.glob("weft/kernels/**/*.cuh"):
        path.write_text(DYNAMIC.sub(r"u8* const \1 = emulation::dynamic_shared;", path.read_text()))


def _shared_variables(path: Path) -> list[tuple[int, int]]:
    """Addresses and sizes of the variables of functions in namespace weft: those that were __shared__."""
    listed = subprocess.run(["nm", "-S", str(path)], capture_output=True, text=True, check=True, timeout=60).stdout
    found = []
    for line in listed.splitlines():
        words = line.split()
        if len(words) == 4 and words[2] in "bBdDuV" and words[3].startswith("_ZZN4weft"):
            found.append((int(words[0], 16), int(words[1], 16)))
    return found


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
