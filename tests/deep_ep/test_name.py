"""Guards against an `import deep_ep` that fails, loads too much, or finds another module than `weft.deep_ep`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft.deep_ep import alias

PYTHON_FOLDER = Path(weft.__file__).parents[1]


def run(*arguments: str, path: tuple[str, ...] = (), **more: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(PYTHON_FOLDER)]), **more}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_bare_process_loads_little() -> None:
    """No CUDA, no native module, no compiler of torch, and the same module objects under both names."""
    text = run("-c", """
import importlib.metadata, importlib.util, sys
assert importlib.util.find_spec("deep_ep").name == "deep_ep"
import deep_ep
assert "torch" not in sys.modules
import torch
from deep_ep.utils import EventHandle, EventOverlap
heavy = {"weft._native", "weft.communicator", "torch._dynamo"} & set(sys.modules)
assert not heavy, heavy
assert not torch.cuda.is_initialized()
import deep_ep.buffer, deep_ep.buffers.elastic, deep_ep.buffers.legacy, deep_ep.hybrid_ep_buffer
import deep_ep.utils.comm, deep_ep.utils.envs, deep_ep.utils.gate, deep_ep.utils.math, deep_ep.utils.refs
import deep_ep.utils.semantic, deep_ep.utils.testing
import weft.deep_ep
assert deep_ep is weft.deep_ep
assert deep_ep.utils.math is weft.deep_ep.utils.math
assert set(deep_ep.__all__) <= set(dir(deep_ep)) and all(hasattr(deep_ep, each) for each in deep_ep.__all__)
assert not hasattr(deep_ep, "no_such_name") and not hasattr(deep_ep.utils, "no_such_name")
assert deep_ep.buffer.Buffer is deep_ep.buffers.legacy.Buffer is deep_ep.Buffer
from deep_ep._C import Config, EventHandle as Event, is_sm90_compiled, topk_idx_t
assert Config is deep_ep.Config and Event is EventHandle and is_sm90_compiled() and topk_idx_t is deep_ep.topk_idx_t
assert deep_ep._C is weft.deep_ep._C
assert importlib.util.find_spec("deep_ep") and importlib.util.find_spec("deep_ep.utils")
try:
    import deep_ep.no_such_module
except ModuleNotFoundError:
    pass
else:
    raise AssertionError
assert importlib.metadata.version("deep_ep") == deep_ep.__version__
assert deep_ep.topk_idx_t == torch.int64
print(deep_ep.__version__)
""", path=(str(alias.folder()),))  # fmt: skip
    assert text.strip() == f"2.1.0+weft.{weft.__version__}"


def test_the_command_starts_programs(tmp_path: Path) -> None:
    """And the programs that they start find it, too."""
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys\nimport deep_ep\nassert deep_ep.weft\n"
        "subprocess.run([sys.executable, '-c', 'import deep_ep; print(deep_ep.weft)'], check=True)\n"
    )
    assert run("-m", "weft.deep_ep", "run", str(program)).strip() == "True"
    assert run("-m", "weft.deep_ep", "path").strip() == str(alias.folder())
    found = json.loads(run("-m", "weft.deep_ep", "check", "--json", path=(str(alias.folder()),), NVSHMEM_IB_SL="3"))
    assert found["is Weft's"] is True
    assert found["set without effect"] == {"NVSHMEM_IB_SL": "3"}
    assert found["other owners"] == []


def test_ids_of_32_bits() -> None:
    light = "from weft import env; assert env.topk_idx_bits() == 32"
    text = f"{light}; import weft.deep_ep as d; print(d.topk_idx_t)"
    assert run("-c", text, EP_NUM_TOPK_IDX_BITS="32").strip() == "torch.int32"
    run("-c", light, TOPK_IDX_BITS="32")


def test_install_in_a_process(tmp_path: Path) -> None:
    run("-c", "import weft.deep_ep as d; d.install(); d.install(); import deep_ep; assert deep_ep is d")
    (tmp_path / "deep_ep.py").write_text("")
    run("-c", """
import deep_ep, weft, weft.deep_ep
try:
    weft.deep_ep.install()
except weft.InvalidState as error:
    assert "deep_ep.py" in str(error) and "weft" in str(error)
else:
    raise AssertionError
""", path=(str(tmp_path),))  # fmt: skip


def test_another_owner_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "sgl_deep_ep-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-deep-ep\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert alias.other_owners() == ["sgl-deep-ep"]


def test_the_distribution_asks_for_its_weft(tmp_path: Path) -> None:
    """weft-deep-ep of another version, or without weft: ImportError that says what to do."""
    shutil.copytree(alias.folder() / "deep_ep", tmp_path / "deep_ep")
    info = tmp_path / "weft_deep_ep-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weft-deep-ep\nVersion: 9.9\n")
    text = "try:\n    import deep_ep\nexcept ImportError as error:\n    print(error)"
    found = run("-c", text, path=(str(tmp_path),))
    assert f"pip install weft-deep-ep=={weft.__version__}" in found
    hidden = f"import sys; sys.modules['weft'] = None\n{text}"
    assert "pip install weft" in run("-c", hidden, path=(str(tmp_path),))
    info.rename(tmp_path / f"weft_deep_ep-{weft.__version__}.dist-info")
    metadata = tmp_path / f"weft_deep_ep-{weft.__version__}.dist-info" / "METADATA"
    metadata.write_text(f"Metadata-Version: 2.1\nName: weft-deep-ep\nVersion: {weft.__version__}\n")
    assert (
        run("-c", "import deep_ep, weft.deep_ep; print(deep_ep is weft.deep_ep)", path=(str(tmp_path),)).strip()
        == "True"
    )


def test_the_version_is_written_once_more() -> None:
    """importlib.metadata reads it from a file and its name."""
    (info,) = alias.folder().glob("*.egg-info")
    version = f"2.1.0+weft.{weft.__version__}"
    assert info.name == f"deep_ep-{version}.egg-info"
    assert f"\nVersion: {version}\n" in info.read_text()
