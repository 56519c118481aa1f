"""Guards against a README that says what was never tried, dead links, and an environment table unlike the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "lab" / "README.md",
    ROOT / "tests" / "data" / "machines" / "PLACEMENT.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\bWEFT_[A-Z][A-Z0-9_]*\b")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the file it is saved as, and the output stated right after it."""

    language: str
    text: str
    line: int
    output: str | None

    @property
    def file_name(self) -> str:
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else f"block_{self.line}.py"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(FENCE.finditer(text))
    result = []
    for idx, match in enumerate(found):
        follower = found[idx + 1] if idx + 1 < len(found) else None
        is_output = follower is not None and follower[1] == "text" and not text[match.end() : follower.start()].strip()
        output = follower[2] if is_output and follower is not None else None
        result.append(Block(match[1], match[2], text.count("\n", 0, match.start()) + 1, output))
    return result


PYTHON_BLOCKS = [block for block in blocks(README) if block.language == "python"]
COMMANDS = [
    line
    for block in blocks(README)
    if block.language == "bash"
    for line in block.text.splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every python block of the README saved under its name."""
    folder = tmp_path_factory.mktemp("readme")
    for block in PYTHON_BLOCKS:
        (folder / block.file_name).write_text(block.text)
    return folder


def run(command: list[str], folder: Path, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    package = Path(weft.__file__).resolve().parents[1]  # also where PYTHONPATH is relative, or weft is not installed
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=lambda block: block.file_name)
def test_python_block_runs(block: Block, scripts: Path) -> None:
    result = run([sys.executable, block.file_name], scripts)
    assert result.returncode == 0, f"README.md:{block.line}\n{result.stdout}\n{result.stderr}"
    if block.output is not None:
        assert result.stdout == block.output


def test_there_is_something_to_run() -> None:
    assert {"train.py", "train_torchrun.py", "lost.py"} <= {block.file_name for block in PYTHON_BLOCKS}
    assert any(command.startswith("make ") for command in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("torchrun ")])
def test_torchrun_line_runs(command: str, scripts: Path) -> None:
    arguments = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command, comments=True)[1:]]
    result = run(arguments, scripts)
    assert result.returncode == 0, result.stdout + result.stderr
    # Ranks share the terminal, so their lines may run into each other.
    assert [rank for rank in range(4) if f"rank {rank}: loss" not in result.stdout] == []


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command: str, scripts: Path) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        assert [name for name in arguments if "=" not in name and name not in make_targets()] == []
    elif program == "weft":
        names = [name for name in arguments[:1] if not name.startswith("-")]
        help_text = run([sys.executable, "-m", "weft.cli", *names, "--help"], scripts)
        assert help_text.returncode == 0, help_text.stderr
        flags = {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
        assert {flag for flag in flags if flag not in help_text.stdout} == set()
    else:
        assert program in {"torchrun", "git", "cd", "pip"}, f"say how to test {command!r}"


# Others have tests of their own (demo, bench), want a GPU (tune) or take minutes (cache prebuild).
QUICK = "verify|size|plan|doctor|run|topo|collect-env"


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if re.match(f"weft ({QUICK}) ?", line)])
def test_tool_line_runs(command: str, scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scripts / "x.py").write_text("print('x ran')")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    words = shlex.split(command, comments=True)[1:]
    result = run([sys.executable, "-m", "weft.cli", *words], scripts)
    assert result.returncode == 0 or (words[0] == "doctor" and "failed: " in result.stdout), result.stderr
    assert ("x ran" in result.stdout) == (words[0] == "run")
    assert (scripts / "machine.svg").exists() or words[0] != "topo"


def test_the_readme_is_short() -> None:
    """At most 200 lines; the table of states has at most ten rows, each of at most 15 words."""
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    table = text.split("## What works")[1].split("##")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| what |"))]
    assert 8 <= len(rows) <= 10
    for row in rows:
        assert len(row.replace("|", " ").split()) <= 15, row


def links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if not target.startswith(("http:", "https:", "mailto:")):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists():
            missing.append(target)
        elif anchor and file.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text()), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            if anchor not in anchors:
                missing.append(target)
    assert missing == []


def test_environment_table_agrees_with_the_code() -> None:
    """docs/environment.md names exactly the variables that the two places which read the environment name."""
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \|", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE)
    table = {name for name in rows if name.startswith("WEFT_")}
    readers = [ROOT / "src" / "base" / "env.cc", ROOT / "python" / "weft" / "env.py"]
    read = {name for file in readers for name in VARIABLE.findall(file.read_text())}
    assert table == read
    assert len(rows) == len(set(rows))


def test_no_document_names_an_unknown_variable() -> None:
    table = set(VARIABLE.findall((ROOT / "docs" / "environment.md").read_text()))
    build_options = set(VARIABLE.findall((ROOT / "CMakeLists.txt").read_text()))
    for page in PAGES:
        assert set(VARIABLE.findall(page.read_text())) <= table | build_options, page


def test_every_error_is_documented() -> None:
    """docs/errors.md has a row and an example for each exported error."""
    text = (ROOT / "docs" / "errors.md").read_text()
    names = {name for name in dir(weft.errors) if isinstance(getattr(weft.errors, name), type)}
    names = {name for name in names if issubclass(getattr(weft.errors, name), weft.Error)} - {"Error"}
    assert names
    for name in names:
        assert f"| `{name}` |" in text, name
        assert f"## {name}" in text, name
