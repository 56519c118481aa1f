"""Guards against a comparison of machine code that has gone blind: a planted difference must be found, and what is none
must not."""

import shutil
from pathlib import Path

import pytest
import same_code

ROOT = Path(__file__).parents[2]
ONE = ["--arch", "sm_90", "--shape", "small", "--only", "unload"]
LOOP = "for (i32 k = 0; k < args.top_k; ++k) {"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the headers, to be changed."""
    shutil.copytree(ROOT / "include", tmp_path / "include")
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    """There must be one such text."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_comment_is_no_difference(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is the place of an entry."""
    kernels = tree / "include" / "weft" / "kernels"
    (kernels / "unload").mkdir()
    (kernels / "unload.cuh").rename(kernels / "unload" / "entry.cuh")
    change(kernels / "unload" / "entry.cuh", LOOP, f"// Each pick.\n    {LOOP}")
    assert same_code.main([str(tree), str(ROOT), *ONE]) == 0
    assert "1 kernels, 0 differ" in capsys.readouterr().out


def test_a_planted_difference_is_found(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One pick is left out."""
    change(tree / "include" / "weft" / "kernels" / "unload.cuh", LOOP, LOOP.replace("k = 0", "k = 1"))
    assert same_code.main([str(ROOT), str(tree), *ONE]) == 1
    out = capsys.readouterr().out
    assert "sm_90 unload" in out
    assert "1 kernels, 1 differ" in out


def test_a_kernel_that_does_not_compile_differs(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of either tree."""
    change(tree / "include" / "weft" / "kernels" / "unload.cuh", LOOP, "nonsense")
    assert same_code.main([str(tree), str(ROOT), *ONE]) == 1
    assert "1 kernels, 1 differ" in capsys.readouterr().out


def test_a_field_that_a_tree_lacks_is_left_out(tree: Path) -> None:
    """So kernels of a tree from before a new field can be compared; another field stays."""
    lacks = same_code.Tree(tree / "include")
    source = same_code.Tree(ROOT / "include").source(
        "constexpr weft::X kConfig{.top_k = 2, .route = 1, .hidden = 8, };\n"
    )
    assert ".top_k = 2, " in source
    assert lacks.source("constexpr weft::X kConfig{.top_k = 2, .no_such_field = 1, .hidden = 8, };\n") == (
        "constexpr weft::X kConfig{.top_k = 2, .hidden = 8, };\n"
    )
    assert lacks.left_out == {"no_such_field"}


def test_a_revision_is_a_tree(tmp_path: Path) -> None:
    """And what is neither is said."""
    found = same_code.include_of("HEAD", str(tmp_path))
    assert (found / "weft" / "kernels").is_dir()
    with pytest.raises(SystemExit, match="neither headers nor a revision"):
        same_code.include_of("no-such-revision", str(tmp_path))


def test_every_kernel_of_the_quick_list_exists() -> None:
    """A name that is none would be compared no more."""
    names = [name for name, _ in same_code.wanted_kernels(same_code.KernelShape(), [], quick=True)]
    assert sorted(names) == sorted(same_code.QUICK)
