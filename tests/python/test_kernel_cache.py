"""Guards against `weft cache` removing what is not Weft's, trusting a folder that others write, or showing nothing."""

from __future__ import annotations

import os
from pathlib import Path

import nvrtc
import pytest
from cli_lines import assert_documented, rows_of
from typer.testing import CliRunner

import weft
from weft import _load
from weft.cli import app
from weft.kernels import cache as kernel_cache

SOURCE = 'extern "C" __global__ void weft_kernel(int* out) { *out = 1; }'


def filled(folder: Path) -> Path:
    """Two kernels that the native module compiled, and files that are not its own."""
    include = Path(__file__).resolve().parents[2] / "include"
    library = str(nvrtc.load()._name)
    for arch in ("sm_90", "sm_100"):
        _load.native().compile_kernel(SOURCE, arch=arch, nvrtc=library, include=str(include), cache=str(folder))
    (folder / ".new-Ab3dE6").write_bytes(b"left over")
    (folder / "notes.txt").write_text("mine")
    (folder / ("0" * 32 + ".cubin")).symlink_to(folder / "notes.txt")
    return folder


def test_list_and_clear(tmp_path: Path) -> None:
    folder = filled(tmp_path / "kernels")
    result = CliRunner().invoke(app, ["cache", "list", "--folder", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    *kernels, summary = rows_of(result.stdout)
    assert_documented([*kernels, summary])
    assert {kernel["arch"] for kernel in kernels} == {"sm_90", "sm_100"}
    assert summary["kernels"] == 2
    assert summary["bytes"] == sum(kernel["bytes"] for kernel in kernels) > 0

    result = CliRunner().invoke(app, ["cache", "clear", "--folder", str(folder), "--json"])
    (cleared,) = rows_of(result.stdout)
    assert_documented(cleared)
    assert cleared["files"] == 5  # with the sources, and the left over one too
    assert sorted(file.name for file in folder.iterdir()) == ["0" * 32 + ".cubin", "notes.txt"]


def test_files_that_other_processes_take_away_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that writes a kernel gives its file another name; one that clears removes them."""
    folder = filled(tmp_path / "kernels")
    listed = list(folder.iterdir())
    (folder / ".new-Ab3dE6").unlink()
    kept, gone = kernel_cache.entries(str(folder))
    (folder / f"{gone.key}.cubin").unlink()
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(listed))
    assert kernel_cache.entries(str(folder)) == (kept,)
    assert kernel_cache.clear(str(folder)) == (3, kept.num_bytes + 2 * len(SOURCE))


def test_the_same_source_is_compiled_once(tmp_path: Path) -> None:
    folder = filled(tmp_path / "kernels")
    before = {kernel.key: kernel.written_at for kernel in kernel_cache.entries(str(folder))}
    filled_again = {kernel.key: kernel.written_at for kernel in kernel_cache.entries(str(filled_twice(folder)))}
    assert filled_again == before


def filled_twice(folder: Path) -> Path:
    for name in ("notes.txt", "0" * 32 + ".cubin"):
        (folder / name).unlink()
    return filled(folder)


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(weft.InvalidState, match="private"):
        kernel_cache.clear(str(folder))
    link = tmp_path / "link"
    os.symlink(filled(tmp_path / "kernels"), link)
    with pytest.raises(weft.InvalidState, match="private"):
        kernel_cache.entries(str(link))
    result = CliRunner().invoke(app, ["cache", "list", "--folder", str(link)])
    assert result.exit_code == 1


def test_no_folder_is_an_empty_cache(tmp_path: Path) -> None:
    assert kernel_cache.entries("") == kernel_cache.entries(str(tmp_path / "none")) == ()
    assert kernel_cache.clear(str(tmp_path / "none")) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)  # many kernels are compiled
def test_prebuild_fills_a_cache_that_the_next_run_finds(tmp_path: Path) -> None:
    shape = [
        "--ranks",
        "2",
        "--experts",
        "8",
        "--top-k",
        "2",
        "--hidden",
        "256",
        "--tokens",
        "64",
        "--layout",
        "rank_major",
        "--num-sms",
        "4",
        "--arch",
        "sm_90",
    ]
    command = ["cache", "prebuild", *shape, "--folder", str(tmp_path / "kernels"), "--json"]
    *built, summary = rows_of(CliRunner().invoke(app, command).stdout)
    assert_documented([*built, summary])
    assert summary["found"] == 0
    assert summary["kernels"] == len(built) == len({kernel["name"] for kernel in built})
    kernels = kernel_cache.entries(str(tmp_path / "kernels"))
    assert len(kernels) == len(built)
    assert {(kernel.name, kernel.layout, kernel.dtype, kernel.tokens) for kernel in kernels} >= {
        ("dispatch", "rank_major", "512 bytes", "any"),
        ("dispatch", "rank_major", "bf16 -> fp8", "any"),
        ("small dispatch", "rank_major", "bf16 -> fp8_ue8m0", "up to 512"),
        ("combine", "rank_major", "bf16", "any"),
        ("small combine", "rank_major", "bf16 -> fp8", "up to 512"),
        ("place rows", "", "", "any"),
        ("stage rows", "", "", "any"),
    }
    *_, again = rows_of(CliRunner().invoke(app, command).stdout)
    assert again["found"] == len(built)


@pytest.mark.parametrize(("flags", "named"), [(["--arch", "sm_70"], "sm_70"), (["--ranks", "3"], "experts=256")])
def test_prebuild_refuses(flags: list[str], named: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cache", "prebuild", *flags, "--folder", str(tmp_path), "--json"])
    assert result.exit_code == 2
    assert named in rows_of(result.stdout)[0]["text"]
