"""From the source of a kernel, as the library renders it, to a program that runs it on the CPU.

The headers are those of include/, but for the ones that have a stand-in here and for three words of CUDA that C++ does
not know. A mutant is a kernel whose headers have been changed in one place.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "include"
SHARED_FOLDER = "EMULATED_KERNELS"  # tests/conftest.py sets it: where all workers of a session put what they compile
FLAGS = ("-std=c++20", "-O1", "-w", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
# Libraries of several kernels lie in one process: nothing of one may stand for the same of another.
LIBRARY_FLAGS = ("-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")
PREFIX = '#include "fields.h"\n#include <new>\n'
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
    """Compiles each source once, some at a time, for all processes that share a folder.

    `folder` is this compiler's own, which `close` removes. Without SHARED_FOLDER all that is compiled lies there, too.
    """

    def __init__(self, jobs: int = 2) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="emulated-"))
        self._made = Path(os.environ.get(SHARED_FOLDER, self.folder))
        self._pool = ThreadPoolExecutor(jobs)
        self._lock = threading.Lock()
        self._includes: dict[Mutant | None, Path] = {}
        self._programs: dict[tuple[str, Mutant | None, bool], Future[Program]] = {}
        self._commons: dict[tuple[str, ...], Path] = {}
        self._common_lock = threading.Lock()

    def close(self) -> None:
        """Remove what was compiled."""
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, source: str, mutant: Mutant | None = None, *, is_library: bool = False) -> "Future[Program]":
        """Begin to compile a kernel: a program that runs it, or a library for the emulated GPU."""
        with self._lock:
            key = (source, mutant, is_library)
            if key not in self._programs:
                compile_it = self._compile_library if is_library else self._compile_kernel
                self._programs[key] = self._pool.submit(compile_it, source, self._include(mutant))
            return self._programs[key]

    def library(self, name: str, options: list[str]) -> Path:
        """The shared library that g++ makes with these options."""
        path = self._made / _digest(name, *options) / name
        path.parent.mkdir(exist_ok=True)
        return made_once(path, lambda part: _run_compiler(["-shared", "-fPIC", *options], part))

    def layout(self, shape: dict[str, int]) -> dict[str, int]:
        """Where things lie in a window of this shape."""
        found: dict[str, int] = json.loads(self.tell("layout.cc", shape))
        return found

    def tell(self, name: str, shape: dict[str, int]) -> str:
        """What a program of this folder says of a shape."""
        with self._lock:
            key = (name, None, False)
            if key not in self._programs:
                text = (HERE / name).read_text()
                self._programs[key] = self._pool.submit(self._compile, text, self._include(None))
        fields = self.folder / f"shape-{_digest(name, str(shape))}"
        fields.write_text("".join(f"{name} {value}\n" for name, value in shape.items()))
        program = self._programs[key].result().path
        return subprocess.run([program, fields], capture_output=True, check=True, timeout=600, text=True).stdout

    def _compile_library(self, source: str, include: Path) -> Program:
        _, kernel, args = _parts(source)
        return self._compile(
            f'{source}#include "library.h"\n'
            f'#define EXPORTED extern "C" __attribute__((visibility("default")))\n'
            f"EXPORTED size_t emulated_args_bytes() {{ return sizeof(weft::kernels::{args}); }}\n"
            "EXPORTED int emulated_launch(const emulation::LaunchRequest* request) {\n"
            f"  return emulation::launch({kernel}, *request, (void*)emulated_launch);\n}}\n",
            include,
            LIBRARY_FLAGS,
        )

    def _compile_kernel(self, source: str, include: Path) -> Program:
        bounds, kernel, args = _parts(source)
        has_config = "kConfig" in source
        shared = "complete(kConfig, args)" if has_config else "u64{0}"
        return self._compile(
            f'{source}#include "driver.h"\nusing namespace emulation;\n'
            f"int main(int, char** arguments) {{\n  using Args = weft::kernels::{args};\n"
            f"  return run_launches<Args>({kernel}, {bounds}, [](Args& args) {{ return {shared}; }},"
            " arguments);\n}\n",
            include,
        )

    def _compile(self, text: str, include: Path, more_flags: tuple[str, ...] = ()) -> Program:
        path = self._made / f"program-{_digest(text, str(include))}"
        shared_variables = path.with_suffix(".shared_variables")

        def make(part: Path) -> None:
            source = path.with_suffix(".cc")
            source.write_text(f'#include "prefix.h"\n{text}')
            common = self._common(more_flags)
            folders = [f"-I{folder}" for folder in (common, include, HERE)]
            _run_compiler([*more_flags, *folders, str(common / "common.o"), str(source)], part)
            shared_variables.write_text("".join(f"{offset} {size}\n" for offset, size in _shared_variables(part)))

        return Program(made_once(path, make), shared_variables)

    def _common(self, more_flags: tuple[str, ...]) -> Path:
        """A folder with what is the same for all kernels: a precompiled header, and common.o."""
        with self._common_lock:
            if more_flags not in self._commons:
                folder = self._made / f"common-{_digest(str(HERE), *more_flags)}"
                folder.mkdir(exist_ok=True)
                folders = (f"-I{INCLUDE}", f"-I{HERE}")

                def make_header(part: Path) -> None:
                    header = folder / "prefix.h"
                    header.write_text(PREFIX)
                    _run_compiler([*more_flags, *folders, "-x", "c++-header", str(header)], part)

                def make_object(part: Path) -> None:
                    entry = "library.cc" if more_flags else "driver.cc"
                    sources = (str(HERE / entry), str(HERE / "emulator.cc"))
                    _run_compiler([*more_flags, "-no-pie", "-r", *folders, *sources], part)

                made_once(folder / "prefix.h.gch", make_header)
                made_once(folder / "common.o", make_object)
                self._commons[more_flags] = folder
            return self._commons[more_flags]

    def _include(self, mutant: Mutant | None) -> Path:
        if mutant not in self._includes:
            folder = self._made / f"include-{_digest(str(INCLUDE), repr(mutant))}"
            self._includes[mutant] = made_once(folder, lambda part: _write_headers(part, mutant))
        return self._includes[mutant]


_in_process: dict[Path, threading.Lock] = {}


def _lock(file: IO[str]) -> None:
    """The system takes threads of a process for one: it may see a circle of processes where there is none."""
    while True:
        try:
            return fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno != errno.EDEADLK:
                raise
            time.sleep(0.05)


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, which one thread of one process makes under another name; the others wait for it."""
    # Not flock: its locks are also held by ranks that are forked meanwhile. Those of lockf hold for all threads.
    with _in_process.setdefault(path, threading.Lock()), open(f"{path}.lock", "w") as lock:
        _lock(lock)
        if not path.exists():
            part = path.with_name(f"{path.name}.{os.getpid()}")
            make(part)
            part.rename(path)
    return path


def _run_compiler(options: list[str], target: Path) -> None:
    command = ["nice", "-n", "10", "g++", *FLAGS, *options, "-o", str(target)]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if compiled.returncode != 0:
        raise RuntimeError(f"g++ refused {options[-1]}:\n{compiled.stderr[:4000]}")


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


def _parts(source: str) -> tuple[str, str, str]:
    """Of a kernel's source: its launch bounds, its name and the type of its arguments."""
    bounds, entry = LAUNCH_BOUNDS.search(source), ENTRY.search(source)
    if bounds is None or entry is None:
        raise ValueError(f"not the source of a kernel: {source}")
    return bounds[1], f"weft::{entry[1]}", entry[2]


def _shared_variables(path: Path) -> list[tuple[int, int]]:
    """Places, as run_block.h wants them, and sizes of the thread_local variables of functions in namespace weft."""
    listed = subprocess.run(["readelf", "-sW", str(path)], capture_output=True, text=True, check=True, timeout=600)
    places, beside = {}, 0
    for words in map(str.split, listed.stdout.splitlines()):
        if len(words) == 8 and words[3] == "TLS" and words[6] != "UND":
            if words[7] == "_ZN9emulation12random_stateE":
                beside = int(words[1], 16)
            elif words[7].startswith("_ZZN4weft"):
                places[int(words[1], 16)] = int(words[2], 0)
    return [(place - beside, num_bytes) for place, num_bytes in places.items()]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
