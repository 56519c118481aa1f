"""Looks a wheel over before it leaves: what is in it, what it links, which C library it needs.

A wheel must hold the typed package, the kernels' sources and one native module and nothing else native; the module may
need only the C library and the compiler's support library (no libstdc++, no CUDA, no torch), found with readelf of
binutils. The wheel of weft-deep-ep holds the name deep_ep alone, and asks for weft of its own version.
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
    needed += ("weft/deep_ep/top_level/deep_ep/__init__.py",)
    problems = [f"the wheel lacks {name}" for name in needed if name not in names]
    if not any(re.match(r"weft/deep_ep/top_level/deep_ep-.*\.egg-info$", name) for name in names):
        problems.append("the wheel lacks the METADATA of its folder deep_ep")
    problems += [f"{name} belongs into the wheel of weft-deep-ep" for name in names if name.startswith("deep_ep/")]
    native = [name for name in names if re.search(r"\.so(\.|$)", name)]
    if len(native) != 1 or not native[0].startswith("weft/_native"):
        problems.append(f"the wheel must hold one native module weft/_native*.so, it holds {native}")
    problems += [f"{name} does not belong in a wheel" for name in names if "__pycache__" in name or "/tests/" in name]
    if not any(name.endswith("/LICENSE") for name in names):
        problems.append("the wheel lacks its LICENSE")
    return problems


def check_name_wheel(names: list[str], metadata: str, version: str) -> list[str]:
    """Return what is wrong with the wheel of weft-deep-ep; `version`: of Weft."""
    problems = [f"{name} does not belong in this wheel" for name in names if ".dist-info/" not in name][:5]
    if "deep_ep/__init__.py" in names:
        problems.remove("deep_ep/__init__.py does not belong in this wheel")
    else:
        problems.append("the wheel lacks deep_ep/__init__.py")
    problems += [
        f"its METADATA lacks {line!r}"
        for line in (f"Version: {version}", f"Requires-Dist: weft=={version}")
        if line not in metadata.splitlines()
    ]
    return problems


def weft_version() -> str:
    """Of this source tree."""
    text = (Path(__file__).resolve().parents[1] / "python/weft/_version.py").read_text()
    found = re.search(r'__version__ = "(.+)"', text)
    return found[1] if found else ""


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
        if path.name.startswith("weft_deep_ep-"):
            (metadata,) = (wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
            print(f"{path.name}: {len(names)} files")
            return check_name_wheel(names, metadata, weft_version())
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
