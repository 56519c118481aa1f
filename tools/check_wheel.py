"""Looks a wheel over before it leaves: what is in it, what it links, which C library it needs.

A wheel must hold the typed package, the kernels' sources and one native module and nothing else native; the module may
need only the C library and the compiler's support library (no libstdc++, no CUDA, no torch), found with readelf of
binutils.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ALLOWED_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libgcc_s.so.1"}
ALLOWED_PREFIXES = ("ld-linux",)
MAX_BYTES = 8 << 20


def check_names(names: list[str]) -> list[str]:
    """Return what is wrong with the list of files in a wheel."""
    needed = ("weft/__init__.py", "weft/py.typed", "weft/include/weft/kernels/dispatch/entry.cuh")
    needed += ("weft/tables/h200-2.json", "weft/tables/h200-4.json")
    needed += tuple(f"weft/planner/{name}.json" for name in ("published", "fitted", "measured"))
    problems = [f"the wheel lacks {name}" for name in needed if name not in names]
    native = [name for name in names if re.search(r"\.so(\.|$)", name)]
    if len(native) != 1 or not native[0].startswith("weft/_native"):
        problems.append(f"the wheel must hold one native module weft/_native*.so, it holds {native}")
    problems += [f"{name} does not belong in a wheel" for name in names if "__pycache__" in name or "/tests/" in name]
    if not any(name.endswith("/LICENSE") for name in names):
        problems.append("the wheel lacks its LICENSE")
    return problems


def check_libraries(libraries: list[str]) -> list[str]:
    """Return what is wrong with the list of shared libraries that the native module needs."""
    return [
        f"the native module needs {name}, allowed are {sorted(ALLOWED_LIBRARIES)}"
        for name in libraries
        if name not in ALLOWED_LIBRARIES and not name.startswith(ALLOWED_PREFIXES)
    ]


def check_wheel(path: Path) -> list[str]:
    """Return what is wrong with a wheel file; prints its size and the newest C library symbol it needs."""
    problems = []
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        names = wheel.namelist()
        problems += check_names(names)
        newest = "none"
        for name in names:
            if ".so" not in name:
                continue
            module = wheel.extract(name, folder)
            dynamic = subprocess.run(["readelf", "-dW", module], capture_output=True, text=True, check=True).stdout
            problems += check_libraries(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
            symbols = subprocess.run(["readelf", "-VW", module], capture_output=True, text=True, check=True).stdout
            versions = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+\.\d+)", symbols)]
            newest = ".".join(map(str, max(versions, default=())))
    if path.stat().st_size > MAX_BYTES:
        problems.append(f"the wheel has {path.stat().st_size} bytes, allowed are {MAX_BYTES}")
    print(f"{path.name}: {path.stat().st_size >> 10} KiB, {len(names)} files, needs glibc {newest}")
    return problems


if __name__ == "__main__":
    found = [problem for argument in sys.argv[1:] for problem in check_wheel(Path(argument))]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))
