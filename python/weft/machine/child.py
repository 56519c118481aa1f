"""Asks a Python process of its own: what may crash or hang never does so in this one. Standard library only."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from weft.machine.redact import redact

__all__ = ["NATIVE", "ask"]

# Code for `ask`: what the native module says of itself.
NATIVE = """
import json, weft._native as native
print(json.dumps({"version": native.version(), **native.build_info()}))
"""


def ask(code: str, *, arguments: Sequence[str] = (), seconds: float = 10.0) -> Any:
    """The JSON in the last line that the code prints, or `{"error": text}` with its last words. Never raises."""
    words = [sys.executable, "-c", code, *arguments]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
        if ended.returncode == 0:
            return json.loads(ended.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {seconds:.0f} s"}
    except (OSError, ValueError, IndexError) as error:
        return {"error": redact(f"{type(error).__name__}: {error}")[:500]}
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    return {"error": redact(said[-1] if said else "no output")[:500], "exit_code": ended.returncode}
