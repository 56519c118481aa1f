"""Runs a command whose NCCL posts GIN's puts to the software NIC: for the lab, where no network card is.

python lab/emulated_nic.py --gb-s 2.5 --latency-us 8.4 --nodes-of 2 --threads -- python my_ranks.py

Builds the plugin into build/lab unless --plugin names one, sets NCCL's variables, and becomes the command. The card is
that of docs/protocols/software-nic.md: two ports, and puts overtake each other unless --spread-us is 0. Weft itself
reads no path of a plugin.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "lab"
MOST = 1_000_000


def build_plugin() -> Path:
    """Build the plugin; return its path."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-DWEFT_BUILD_MODULE=OFF", "-DWEFT_BUILD_TESTS=OFF"]
    for command in (configure, ["cmake", "--build", str(BUILD), "--target", "weft_rma_plugin"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return BUILD / "lab" / "nic" / "libweft_rma_plugin.so"


def variables(options: argparse.Namespace, plugin: Path) -> dict[str, str]:
    """Return what the command's environment has besides."""
    card = {
        "ports": options.ports,
        "gb_s": options.gb_s,
        "latency_us": options.latency_us,
        "spread_us": options.spread_us,
        "seed": options.seed,
    }
    for name in ("faults", "report"):
        path = getattr(options, name)
        if path is not None:
            card[name] = path.resolve()
    found = {
        "SOFTWARE_NIC": ",".join(f"{name}={value}" for name, value in card.items()),
        "NCCL_RMA_PLUGIN": str(plugin.resolve()),
        "NCCL_GIN_TYPE": "2",  # puts are posted by a thread of NCCL
        "NCCL_LSA_TEAM_SIZE": str(options.nodes_of),
        "CUDA_MODULE_LOADING": "EAGER",  # loading a kernel waits for those that run, and these wait for the card
    }
    if options.threads:
        found["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return found


def _number(text: str) -> float:
    """What the software NIC reads, too (lab/nic/settings.cc)."""
    value = float(text)
    if not 0 <= value <= MOST:  # nan is none either
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 to {MOST}")
    return value


def _count(most: int, least: int = 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is no number from {least} to {most}")
        return value

    read.__name__ = "int"  # as argparse names it where it is none
    return read


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", type=_count(8), default=2, help="of each rank's card (2)")
    parser.add_argument(
        "--gb-s", type=_number, default=2.5, help="of each port, in GB/s; 0: as fast as copies are (2.5)"
    )
    parser.add_argument("--latency-us", type=_number, default=8.4, help="(8.4)")
    parser.add_argument("--spread-us", type=_number, default=20, help="a frame takes up to so much longer (20)")
    parser.add_argument("--seed", type=_count(MOST, 0), default=1, help="(1)")
    parser.add_argument("--faults", type=Path, help="a file that may change while it runs; see lab/README.md")
    parser.add_argument("--report", type=Path, help="a file to which each card adds what it has carried")
    parser.add_argument("--nodes-of", type=_count(MOST), default=1, help="ranks of a node, which share memory (1)")
    parser.add_argument("--threads", action="store_true", help="several ranks, as threads of a process, share a GPU")
    parser.add_argument("--plugin", type=Path, help="a plugin that is built already")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and what is run")
    options = parser.parse_args(arguments)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not options.command:
        parser.error("no command is given")
    return options


def main() -> None:
    """Become the command."""
    options = parse()
    plugin = options.plugin or build_plugin()
    if not plugin.is_file():
        sys.exit(f"{plugin} is not there")
    os.execvpe(options.command[0], options.command, {**os.environ, **variables(options, plugin)})


if __name__ == "__main__":
    main()
