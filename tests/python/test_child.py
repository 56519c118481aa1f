"""Guards against a child process that takes its parent down: by crashing, hanging, or answering nonsense."""

from __future__ import annotations

import time

import pytest

from weft.machine.child import ask


def test_an_answer_is_the_last_line() -> None:
    assert ask("import sys; print('noise'); print('[1, ' + sys.argv[1] + ']')", arguments=["2"]) == [1, 2]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.abort()", "no output"),
        ("raise SystemExit(3)", "no output"),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("raise OSError('/secret/place/libx.so: bad')", "OSError: <path>/libx.so: bad"),
        ("print('no json')", "JSONDecodeError"),
        ("pass", "IndexError"),
        ("print(chr(0) * 10)", "JSONDecodeError"),
    ],
)
def test_what_fails_is_an_error_not_an_exception(code: str, words: str) -> None:
    answer = ask(code)
    assert words in answer["error"]


def test_what_hangs_is_ended() -> None:
    start = time.monotonic()
    assert ask("import time; time.sleep(60)", seconds=0.5)["error"].startswith("no answer in")
    assert time.monotonic() - start < 10
