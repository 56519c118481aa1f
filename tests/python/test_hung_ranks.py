"""Guards against a hung rank that does not say where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, time, hung_ranks
said, to_us = os.pipe()
os.dup2(to_us, 2)
hung_ranks.Watch()
def where_it_hangs():
    os.write(to_us, b"ready\\n")
    time.sleep(200)
if not (pid := os.fork()):
    where_it_hangs()
with open(said) as lines:
    assert lines.readline() == "ready\\n"
    hung_ranks.ask()
    while "where_it_hangs" not in lines.readline():
        pass
os.kill(pid, 9)
"""


def test_a_hung_rank_prints_its_stack() -> None:
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True, timeout=600)
