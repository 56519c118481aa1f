"""Guards against lab/wait_cost.py measuring kernels that are not changed, or do not compile so."""

from __future__ import annotations

from pathlib import Path

import pytest
import wait_cost

from weft import _load
from weft.kernels import paths as kernel_paths
from weft.kernels import prebuild

KERNELS = ("small dispatch masked, fp8, int64 ids", "small combine by expert, plain")


@pytest.mark.slow
@pytest.mark.parametrize("kernels", wait_cost.CHANGES)
def test_every_change_finds_its_place(kernels: str, tmp_path: Path) -> None:
    folder = wait_cost.copy_of_headers(tmp_path / "include", wait_cost.CHANGES[kernels])
    mine = Path(kernel_paths.compiler_paths()["include"])
    files = [path.relative_to(mine) for path in sorted((mine / "weft").rglob("*")) if path.is_file()]
    different = [str(name) for name in files if (folder / name).read_bytes() != (mine / name).read_bytes()]
    assert different == sorted(wait_cost.CHANGES[kernels])
    sources = dict(prebuild.kernels(prebuild.KernelShape(), prebuild.ARCHITECTURES["sm_90"]))
    paths = kernel_paths.compiler_paths(cache="")
    for name in KERNELS:
        plain = _load.native().compile_kernel(sources[name], arch="sm_90", **paths)
        changed = _load.native().compile_kernel(sources[name], arch="sm_90", **(paths | {"include": str(folder)}))
        assert (changed == plain) == (not wait_cost.CHANGES[kernels])
