"""Guards against a command that lies to scripts: wrong exit codes, stray words among JSON, keys and flags left open."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from cli_lines import DOC, ROOT, assert_documented, rows_of, weft_command
from typer.testing import CliRunner

import weft
from weft import errors
from weft.bench.options import SuiteOptions
from weft.cli import app
from weft.cli.bench_suite import run_suite
from weft.cli.output import Output, command_output

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from weft.cli import main; main()"


def test_version_and_help_need_no_torch() -> None:
    version = weft_command("--version", code=WITHOUT_TORCH)
    assert (version.returncode, version.stdout) == (0, f"weft {weft.__version__}\n")
    for args in (["--help"], ["bench", "--help"], ["verify", "--help"], ["size", "--help"], ["demo", "--help"]):
        done = weft_command(*args, code=WITHOUT_TORCH)
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout


def test_size_needs_no_torch() -> None:
    done = weft_command("size", "--json", "--layers", "3", "--training", code=WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(done.stdout)
    assert_documented(row)
    assert row["kind"] == "size"
    assert row["layers"] == 3
    assert row["total_bytes"] >= row["windows_bytes"] >= row["heap_bytes"]


def test_size_prints_a_table_that_fits_a_pipe() -> None:
    done = weft_command("size")
    assert done.returncode == 0
    assert "…" not in done.stdout
    assert "\x1b" not in done.stdout
    assert re.search(r"heap of one window.*\d", done.stdout)


def test_size_explains_its_total() -> None:
    done = weft_command("size", "--layers", "24", "--training", COLUMNS="80", code=WITHOUT_TORCH)
    figures = rows_of(weft_command("size", "--layers", "24", "--training", "--json", code=WITHOUT_TORCH).stdout)[0]
    windows, total = (figures[name] / 2**20 for name in ("windows_bytes", "total_bytes"))
    assert f"total: {windows:,.1f} + {total - windows:,.1f} outside the heap = {total:,.1f} MiB" in done.stdout
    assert total > windows
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "args",
    [
        ["size", "--experts", "0"],
        ["size", "--experts", "63"],
        ["size", "--hidden", "2047"],
        ["size", "--no-such-flag"],
        ["no-such-command"],
        ["bench", "--layout", "sorted"],
        ["bench", "--experts", "63"],
        ["bench", "--capacity", "5"],
        ["bench", "--trace", "/nowhere/trace.npz"],
        ["verify", "--trials", "0"],
        ["verify", "--experts", "7", "--ranks", "2"],
        ["verify", "--hidden", "24", "--quantize", "fp8"],
        ["verify", "--trace", "/nowhere/trace.npz"],
        ["demo", "--kill-rank", "9"],
    ],
)
def test_wrong_usage_exits_2(args: list[str]) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr != ""


def test_a_refused_argument_is_an_object_with_json() -> None:
    result = CliRunner().invoke(app, ["size", "--json", "--experts", "63"])
    assert result.exit_code == 2
    (row,) = rows_of(result.stdout)
    assert_documented(row)
    assert row["kind"] == "error"
    assert row["type"] == "InvalidArgument"
    assert "63" in row["text"]


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.Unsupported("device cuda", "no GPU", "a GPU"), 3),
        (errors.InvalidArgument("x=1: must be 2"), 2),
        (errors.PeerTimeout("dispatch", 3, [1]), 1),
        (errors.PeerLost([1]), 1),
        (errors.InternalError("broken"), 1),
    ],
)
@pytest.mark.parametrize("command", ["verify", "bench"])
def test_errors_of_ranks_have_exit_codes(
    command: str, error: errors.Error, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(weft, "spawn", spawn)
    monkeypatch.setattr("weft.bench.report._import_seconds", lambda: 1.0)  # a second or more each time
    result = CliRunner().invoke(app, [command, "--json"])
    assert result.exit_code == exit_code
    row = rows_of(result.stdout)[-1]
    assert row["type"] == type(error).__name__
    assert row["text"] == str(error)


def test_json_keeps_strangers_off_stdout() -> None:
    code = """
import os
from weft.cli.output import command_output
with command_output(json_lines=True) as output:
    print("a print")
    os.write(1, b"a write\\n")
    output.text("for people")
    output.table("for people", ["a"], [["b"]])
    output.row({"kind": "x", "nan": float("nan"), "inside": [float("inf"), 1.5]})
    if os.fork() == 0:
        os.write(1, b"a rank\\n")
        os._exit(0)
    os.wait()
print("after")
"""
    done = weft_command(code=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == '{"kind": "x", "nan": null, "inside": [null, 1.5]}\nafter\n'
    for stranger in ("a print", "a write", "a rank"):
        assert stranger in done.stderr


def test_an_error_of_a_suite_comes_before_its_tables_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(options: object) -> Iterator[dict[str, Any]]:
        yield {"kind": "link", "link_kind": "push", "row_bytes": 8, "num_sms": 1, "link_gb_per_s": 1.0}
        yield {"kind": "memory", "name": "a case", "problems": ["row 7 differs"]}
        raise errors.InternalError("broken")

    monkeypatch.setattr("weft.bench.suite.run_suite", measure)
    both = io.StringIO()
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    with pytest.raises(typer.Exit), command_output(json_lines=False) as output:
        run_suite(output, SuiteOptions(suites=("targets",)), None)
    text = both.getvalue()
    assert text.count("error: ") == text.count("WRONG a case: row 7 differs") == 1
    assert text.index("error: ") < text.index("WRONG") < text.index("┏")


class Terminal(io.StringIO):
    """Says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [False, True])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_colours_only_on_terminals_without_no_color(
    is_terminal: bool, no_color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    stream, bars = (Terminal() if is_terminal else io.StringIO() for _ in range(2))
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", bars)
    output = Output(json_lines=False)
    output.text("ok", style="green")
    with output.progress(2, "work") as advance:
        advance("working")
    assert ("\x1b[32m" in stream.getvalue()) == (is_terminal and not no_color)
    assert (bars.getvalue().strip() != "") == is_terminal


def test_a_table_that_is_too_wide_leaves_columns_out_and_cuts_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns, row = ("operation", "median us", "bytes", "x all_to_all"), ("all_to_all_single", "12345", "678", "1.00")

    def printed(width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        with command_output(json_lines=False) as output:
            output.table("", columns, [row], spare=(2, 1))
        return capsys.readouterr().out

    def has(text: str) -> list[bool]:
        return [word in text for word in (*" ".join(columns).split(), *row)]

    assert all(has(printed(80)))
    assert "too narrow" not in printed(80)
    assert all(has(printed(51)))
    text = printed(50)
    assert "too narrow for bytes: COLUMNS=120 shows all\n" in text
    assert "678" not in text
    assert all(has(text + "678"))
    assert max(map(len, text.splitlines())) <= 50
    text = printed(41)
    assert "too narrow for median us, bytes" in text
    assert "all_to_all_single" in text


@pytest.mark.parametrize("root", ["dgx-h100"])
@pytest.mark.parametrize("width", [80, 120])
def test_a_matrix_of_eight_gpus_fits(root: str, width: int) -> None:
    folder = ROOT / "tests" / "data" / "machines" / root
    text = weft_command("topo", "--root", str(folder), COLUMNS=str(width)).stdout
    assert max(len(line) for line in text.splitlines() if line[:1] in "┃│┏└") <= width
    assert all(f"mlx5_{idx} " in text for idx in range(12))
    assert "ACTIVE" in text
    assert ("too narrow" in text) == (width == 80)


def options_of(command: str) -> Iterator[str]:
    group: Any = typer.main.get_command(app)
    for parameter in group.commands[command].params:
        yield from (*parameter.opts, *parameter.secondary_opts)


def pages() -> Iterator[tuple[list[str], Any]]:
    """Every command with its words."""
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        yield from ([([name], command)] if inner is None else (([name, part], inner[part]) for part in inner))


@pytest.mark.parametrize(
    ("words", "command"), list(pages()), ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_every_help_page_fits_a_terminal_and_ends_with_two_examples(
    words: list[str], command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80, raising=False)
    text = CliRunner().invoke(app, [*words, "--help"]).output
    assert max(map(len, text.splitlines())) <= 80
    examples = [line.strip() for line in text.split("Examples:")[1].splitlines() if line.strip()]
    assert len(examples) == 2
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for example in examples:
        own = example.removeprefix("torchrun --nproc-per-node 8 --no-python ").split(" -- ")[0]
        assert own.startswith("weft " + " ".join(words))
        assert set(re.findall(r"--[\w-]+", own)) <= flags


@pytest.mark.parametrize("command", ["demo", "verify", "bench", "size"])
def test_every_flag_is_documented(command: str) -> None:
    section = DOC.split(f"\n## `weft {command}`", 1)[1].split("\n## ", 1)[0]
    for flag in options_of(command):
        if flag != "--help":
            assert f"`{flag}`" in section, f"docs/benchmarking.md, `weft {command}`: {flag} is missing"


def test_a_refused_choice_says_what_is_allowed_and_no_more() -> None:
    result = CliRunner().invoke(app, ["verify", "--layout", "flat"])
    assert result.exit_code == 2
    assert "'flat' is not one of" in result.output
    assert "Value error" not in result.output
