"""Runs clang-tidy on host sources, several at once. Usage: run_clang_tidy.py [FILE...], default src/ and lab/nic/.

Configures build/tidy for its compile_commands.json. A file that passed is not looked at again until it, a header of
the repository, .clang-tidy or constraints.txt (for clang-tidy's version) changes: the digest of all these is kept in
build/tidy/passed.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tidy"


def configure() -> None:
    """Write build/tidy/compile_commands.json."""
    command = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    # clang-tidy reads gcc's command lines, so launchers are in the way.
    command.append("-DCMAKE_CXX_COMPILER_LAUNCHER=")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"cmake failed:\n{result.stdout}{result.stderr}")
    commands = BUILD / "compile_commands.json"
    entries = json.loads(commands.read_text())
    for entry in entries:
        entry["command"] = with_system_headers(entry["command"])
    commands.write_text(json.dumps(entries, indent=1))


def with_system_headers(command: str) -> str:
    """Name folders outside of the repository as the system's, whose declarations clang-tidy passes over."""
    return re.sub(rf"(?<= )-I(?!{re.escape(str(ROOT))}/(?:src|include|lab)\b)(?=\S)", "-isystem ", command)


def hash_shared() -> bytes:
    """Return the digest of what every file's result depends on: all headers, the configuration and the versions."""
    digest = hashlib.sha256((ROOT / ".clang-tidy").read_bytes() + (ROOT / "constraints.txt").read_bytes())
    for path in sorted(path for folder in ("include", "src", "lab/nic") for path in ROOT.glob(f"{folder}/**/*.h")):
        digest.update(path.read_bytes())
    return digest.digest()


def tidy(path: Path, shared: bytes) -> str:
    """Check one file; return what clang-tidy said, empty if nothing."""
    stamp = BUILD / "passed" / hashlib.sha256(shared + str(path).encode() + path.read_bytes()).hexdigest()
    if stamp.exists():
        return ""
    command = ["clang-tidy", "--quiet", "-p", str(BUILD), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
        return ""
    return result.stdout or result.stderr


def main(arguments: list[str]) -> int:
    """Check the files named, or all; print what was found and return the exit status."""
    paths = [ROOT / name for name in arguments] or [
        *sorted(ROOT.glob("src/**/*.cc")),
        *sorted(ROOT.glob("lab/nic/*.cc")),
    ]
    if not paths:
        return 0
    configure()
    shared = hash_shared()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        num_bad = 0
        for text in pool.map(lambda path: tidy(path, shared), paths):
            num_bad += bool(text)
            print(text, end="", flush=True)
    return bool(num_bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
