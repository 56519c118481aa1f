"""Runs a function in a forked process: what starts CUDA there does not keep the caller from forking ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.errors import Error

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

COMPILE_S = 600.0  # for some hundred kernels on two CPUs


def apart(function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> Any:
    """What the function returns, pickled.

    Raises:
        Error: the process died or took too long; else what the function raised.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise Error(f"{function.__name__} took more than {timeout_s:.0f} s")
        result, error = ours.recv()
    except EOFError as ended:
        process.join()
        raise Error(f"the process of {function.__name__} ended with exit code {process.exitcode}") from ended
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise error
    return result


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((function(*args), None))
    except Exception as error:  # noqa: BLE001  brought to the parent
        pipe.send((None, error))
