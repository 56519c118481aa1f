"""Runs the examples and the demo as a user would, and prints what they print: JSON lines for benchmarks/results/.

python tools/example_runs.py [--device cuda] [--ranks 4]; exit 1 if one failed. The demo trains the same model with and
without Weft, and compares the losses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from weft.bench.apart import apart
from weft.bench.suite import machine_facts

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMES = ("moe_layer", "overlap_gemm", "decode_overlap", "decode_graph", "elastic_serving")
PROGRAMS = {f"{name}.py": [str(EXAMPLES / f"{name}.py")] for name in NAMES}
PROGRAMS["weft demo"] = ["-m", "weft.cli", "demo", "--json"]
DEMO_KEYS = ("ok", "problems", "placement", "losses", "baseline_losses", "early_difference", "overall_difference")
DEMO_KEYS += ("train_s", "baseline_s", "total_s")
TIMEOUT_S, TIMED_OUT = 300.0, 124


def run(program: str, device: str, ranks: int) -> dict[str, Any]:
    """One of them -> what it printed and how it ended; of the demo its own object."""
    words = [sys.executable, *PROGRAMS[program], "--device", device, "--ranks", str(ranks)]
    start = time.monotonic()
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        status, said, complaints = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        status, said, complaints = TIMED_OUT, "", f"{program} took more than {TIMEOUT_S:.0f} s"
    if status:
        print(complaints[-3000:], file=sys.stderr)
    row: dict[str, Any] = {"kind": "example", "name": program, "ranks": ranks, "status": status}
    row["seconds"] = round(time.monotonic() - start, 1)
    lines = said.rstrip().splitlines()
    if status or "--json" not in words:
        return {**row, "lines": lines}
    demo = json.loads(lines[-1])
    return {**row, "demo": {key: demo[key] for key in DEMO_KEYS}}


def main() -> int:
    """All of them, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    print(json.dumps({"kind": "machine", **apart(machine_facts, options.device)}), flush=True)
    status = False
    for program in PROGRAMS:
        row = run(program, options.device, options.ranks)
        print(json.dumps(row), flush=True)
        status |= row["status"] != 0
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
