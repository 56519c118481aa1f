"""Guards against an NCCL of Weft's that the program's own variables reach, or that kernels of other headers post to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import weft
from weft import env
from weft.scaleout import headers, nccl, network


@pytest.mark.parametrize(("word", "found"), [(None, "block"), ("", "block"), ("NCCL", "nccl"), ("block", "block")])
def test_what_leads_between_nodes(monkeypatch: pytest.MonkeyPatch, word: str | None, found: str) -> None:
    monkeypatch.delenv("WEFT_NETWORK", raising=False)
    if word is not None:
        monkeypatch.setenv("WEFT_NETWORK", word)
    assert env.network() == found


def test_variables_are_set_for_a_while_where_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in network.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    before = dict(os.environ)
    with network.variables():
        assert os.environ["NCCL_NVLS_ENABLE"] == "1"
        assert os.environ["NCCL_IB_MERGE_NICS"] == "0"
        with network.variables():
            pass
        assert os.environ["NCCL_IB_MERGE_NICS"] == "0"  # another rank is still in there
    assert dict(os.environ) == before


def test_what_was_changed_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_RMA_DISABLE", raising=False)
    with network.variables():
        monkeypatch.setenv("NCCL_RMA_DISABLE", "0")
    assert os.environ["NCCL_RMA_DISABLE"] == "0"


def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the native module is told, with an NCCL and a CUDA that have headers alone."""
    include, cuda = tmp_path / "include", tmp_path / "cuda"
    for path, text in (
        (include / "nccl_device.h", ""),
        (cuda / "cuda_fp8.h", ""),
        (cuda / "cuda_runtime_api.h", "#define CUDART_VERSION  13000\n"),
        (cuda / "cccl/cuda/std/cstdint", ""),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = nccl.Nccl(tmp_path / "libnccl.so.2", (2, 32, 3), include, is_of_process=True)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nccl, "find", lambda cache: found)
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: str(cuda))
    monkeypatch.setattr(network._load, "native", lambda: Native)
    network.cuda_folders.cache_clear()
    try:
        told: dict[str, Any] = network.paths()  # type: ignore[assignment]
        return told
    finally:
        network.cuda_folders.cache_clear()


class Native:
    """Its module."""

    NcclPaths = dict


def test_kernels_are_told_which_headers_they_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their key is their source: it must change with the headers."""
    told = made(monkeypatch, tmp_path)
    assert told["library"] == str(tmp_path / "libnccl.so.2")
    rewritten, cuda, library = map(Path, told["includes"])
    assert (rewritten / "nccl_device.h").is_file()
    assert (cuda / "cuda_fp8.h").is_file()
    assert (library / "cuda/std/cstdint").is_file()
    assert told["prologue"] == f"// {rewritten.name}, CUDA 13000\n{headers.PROLOGUE}"


def test_cuda_without_headers_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: None)
    network.cuda_folders.cache_clear()
    with pytest.raises(weft.Unsupported, match=r"no header cuda_fp8\.h of CUDA, need pip install nvidia-cuda-runtime"):
        network.cuda_folders()


def test_no_folder_for_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", "")
    with pytest.raises(weft.InvalidArgument, match="WEFT_CACHE_DIR is empty"):
        network.paths()
