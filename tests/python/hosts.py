"""Machines for tests: `weft.bench.hosts`; where network namespaces are denied such tests are skipped by name."""

from __future__ import annotations

import functools
import subprocess

import pytest

from weft.bench.hosts import LONG_S, HostRank, Hosts

__all__ = ["LONG_S", "HostRank", "Hosts", "have_hosts", "needs_hosts"]


@functools.cache
def have_hosts() -> bool:
    """Whether this process may make network namespaces."""
    try:
        with Hosts(2):
            return True
    except (OSError, subprocess.SubprocessError):
        return False


needs_hosts = pytest.mark.skipif("not __import__('hosts').have_hosts()", reason="network namespaces are denied here")
