"""Logging under the name `weft`; lines of the native module arrive here too."""

from __future__ import annotations

import logging

from weft import env

__all__ = ["configure", "logger", "native_line"]

logger = logging.getLogger("weft")


def configure() -> None:
    """Apply WEFT_LOG_LEVEL: the level, and a handler on stderr unless the program has installed its own."""
    level = env.log_level()
    if level is None:
        return
    if level == "off":
        logger.disabled = True
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s weft[%(process)d] %(levelname)s %(message)s"))
        logger.addHandler(handler)


def native_line(level: int, text: str) -> None:
    """Sink of the native module, called from any thread; its levels are the numbers of `logging`."""
    logger.log(level, "%s", text)
