"""Guards against tools/wait_cost.py measuring kernels that are not changed: each change must find its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import wait_cost

from weft import kernel_paths


@pytest.mark.parametrize("kernels", wait_cost.CHANGES)
def test_every_change_finds_its_place(kernels: str, tmp_path: Path) -> None:
    folder = wait_cost.copy_of_headers(tmp_path / "include", wait_cost.CHANGES[kernels])
    mine = Path(kernel_paths.compiler_paths()["include"])
    files = [path.relative_to(mine) for path in sorted((mine / "weft").rglob("*")) if path.is_file()]
    different = [str(name) for name in files if (folder / name).read_bytes() != (mine / name).read_bytes()]
    change = wait_cost.CHANGES[kernels]
    assert different == ([] if change is None else [change[0]])
