"""Guards against a runner of mutants that takes what it could not try for a mutant that the tests have seen."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tomllib")  # Python 3.11

import mutation
from mutation import Mutant, Outcome, Wrong, mutated, problems, read_mutants, table

SOURCE = """def first(a, b):
    if a < b:
        return a
    return b


def second(a, b):
    if a < b:
        return b
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "python" / "weft").mkdir(parents=True)
    (tmp_path / "src").mkdir()
    (tmp_path / "include" / "weft").mkdir(parents=True)
    (tmp_path / "python" / "weft" / "one.py").write_text(SOURCE)
    return tmp_path


def mutant(before: str, after: str = "changed", **more: str) -> Mutant:
    return Mutant("area", "name", "python/weft/one.py", before, after, "tests", **more)


def test_a_text_with_any_white_space_is_found_once(tree: Path) -> None:
    path, text = mutated(mutant("if a < b: return a"), tree)
    assert path == tree / "python/weft/one.py"
    assert text == SOURCE.replace("if a < b:\n        return a", "changed")


def test_near_says_which(tree: Path) -> None:
    with pytest.raises(Wrong, match="is 2 times in"):
        mutated(mutant("if a < b:"), tree)
    _, text = mutated(mutant("if a < b:", "if a > b:", near="def second("), tree)
    assert text.index("a > b") > text.index("def second")
    with pytest.raises(Wrong, match="elsewhere in no file"):
        mutated(mutant("if a < b:", near="def third("), tree)


def test_a_text_that_has_moved_is_followed_and_one_that_is_gone_is_an_error(tree: Path) -> None:
    (tree / "python/weft/call").mkdir()
    (tree / "python/weft/one.py").rename(tree / "python/weft/call/other.py")
    path, _ = mutated(mutant("return a"), tree)
    assert path == tree / "python/weft/call/other.py"
    (tree / "src/one.cc").write_text("return a")
    with pytest.raises(Wrong, match=r"'return a' is not in .*, and elsewhere in \['python.*', 'src.*'\]"):
        mutated(mutant("return a"), tree)
    with pytest.raises(Wrong, match=r"'return c' is not in python/weft/one.py, and elsewhere in no file"):
        mutated(mutant("return c"), tree)


def test_entries_are_whole(tmp_path: Path) -> None:
    entry = '[[mutant]]\nname = "n"\nfile = "f"\nbefore = "b"\nafter = "a"\n'
    for text, words in (
        (entry, "neither tests nor equivalent"),
        (entry + 'tests = "t"\ntest = "t"\n', "unexpected keyword"),
        ((entry + 'tests = "t"\n') * 2, "names used twice"),
    ):
        (tmp_path / "some_area.toml").write_text(text)
        with pytest.raises(Wrong, match=words):
            read_mutants(tmp_path)
    (tmp_path / "some_area.toml").write_text(entry + 'tests = "t"\n')
    assert [(each.area, each.name) for each in read_mutants(tmp_path)] == [("some area", "n")]


def test_what_is_good_enough() -> None:
    one = mutant("b")
    good = [Outcome(one, "killed")] * 9
    assert problems([*good, Outcome(one, "survived"), Outcome(one, "equivalent")], is_whole=False) == []
    assert "the score is 0.82" in problems([*good, *[Outcome(one, "survived")] * 2], is_whole=False)[0]
    assert "to be mended: name" in problems([*good * 9, Outcome(one, "wrong")], is_whole=False)[0]
    assert "9 mutants were counted; at least 150" in problems([*good, Outcome(one, "equivalent")], is_whole=True)[0]
    *_, last = table([*good, Outcome(one, "survived")])
    assert last.split() == ["all", "9", "1", "0", "0", "0.90"]


def test_only_what_was_killed_in_the_same_files_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first, other = mutant("b"), mutant("c")
    journal = mutation.Journal(path, "tree")
    journal.add(Outcome(first, "killed"))
    journal.add(Outcome(other, "survived"))
    again = mutation.Journal(path, "tree")
    assert [again.has(each) for each in (first, other)] == [True, False]
    assert not again.has(mutant("b", "another text"))
    assert not mutation.Journal(path, "another tree").has(first)
    runner = mutation.Runner([first, other], again)
    assert [outcome.mutant for outcome in runner.outcomes] == [first]
    taken = runner.take(from_front=True), runner.take(from_front=True)
    assert taken == (other, None)


def test_a_run_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    run = mutation.run_command(["bash", "-c", f"(sleep 2; touch {tmp_path}/late) & sleep 60"], tmp_path, 0.5, {})
    assert run.has_hung
    again = mutation.run_command(["bash", "-c", "sleep 2.5; exit 3"], tmp_path, 60, {})
    assert (again.status, again.has_hung) == (3, False)
    assert not (tmp_path / "late").exists()


def test_every_entry_of_the_tree_applies() -> None:
    """Who moves or changes a line that an entry names sees it here, not in the long run."""
    found = read_mutants(mutation.ROOT / "tests" / "mutants")
    assert len(found) > 100
    assert mutation.check(found) == 0


def test_what_is_no_python_is_an_error(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tests of such a mutant would fail for another reason than they should."""
    monkeypatch.setattr(mutation, "ROOT", tree)
    assert mutation.check([mutant("return a", "  return (", near="def first(")]) == 1
    assert "no Python" in capsys.readouterr().out
