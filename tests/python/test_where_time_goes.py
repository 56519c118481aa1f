"""Guards against lab/where_time_goes.py noting other places than it says, or kernels that do not compile so."""

from __future__ import annotations

from pathlib import Path

import pytest
import where_time_goes

from weft import _load
from weft.kernels import paths as kernel_paths
from weft.kernels import prebuild

KERNELS = {"dispatch": "small dispatch masked, fp8, int64 ids", "combine": "small combine by expert, plain"}


@pytest.mark.parametrize("op", where_time_goes.PLACES)
def test_every_place_is_noted_once(op: str, tmp_path: Path) -> None:
    folder = where_time_goes.noting_headers(tmp_path / "include", op, 0x7F0000000000)
    text = "".join(path.read_text() for path in (folder / "weft" / "kernels" / "small").glob("*.cuh"))
    places = where_time_goes.places_of(op)
    assert len(places) == len(set(places)) <= where_time_goes.SLOTS
    for slot in range(1, len(places) - 1):
        assert text.count(f"note({slot});") == 1, places[slot]
    assert text.count("begin_notes();") == text.count(f"end_notes({len(places) - 1});") == 1


@pytest.mark.slow
@pytest.mark.parametrize("op", where_time_goes.PLACES)
def test_kernels_that_note_compile(op: str, tmp_path: Path) -> None:
    address = 0x7F0000000000
    where_time_goes.noting_headers(tmp_path / "include", op, address)
    sources = dict(prebuild.kernels(prebuild.KernelShape(), prebuild.ARCHITECTURES["sm_90"]))
    paths = {**kernel_paths.compiler_paths(cache=""), "include": str(tmp_path / "include")}
    plain = _load.native().compile_kernel(sources[KERNELS[op]], arch="sm_90", **kernel_paths.compiler_paths(cache=""))
    assert len(_load.native().compile_kernel(sources[KERNELS[op]], arch="sm_90", **paths)) > len(plain)
