"""Guards against a docs/api.md that no longer says what the docstrings say."""

import subprocess
import sys
from pathlib import Path

import generate_api_docs as generator

ROOT = Path(__file__).resolve().parents[2]


def test_api_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate_api_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


def sample(x: "Tensor", *, num_sms: int | None = None, layout: str = "rank_major") -> "Dispatched":  # type: ignore[name-defined]  # noqa: F821
    """Do a thing.

    Args:
        x: [T, H], any dtype,
            on any device.

    Raises:
        InvalidArgument: if not.
    """
    raise ValueError


def test_signature_is_as_written_and_keyword_only_is_shown() -> None:
    text = generator.format_signature("weft.sample", sample)
    assert text == "weft.sample(x: Tensor, *, num_sms: int | None = None, layout: str = 'rank_major') -> Dispatched"


def test_sections_become_lists() -> None:
    text = generator.format_docstring(sample)
    assert "**Args**\n\n- `x`: [T, H], any dtype,\n  on any device." in text
    assert "**Raises**\n\n- `InvalidArgument`: if not." in text


def test_a_changed_docstring_changes_the_page() -> None:
    class First:
        """One."""

        def method(self) -> int:
            """Two."""
            return 1

    before = list(generator.describe("First", First))
    First.method.__doc__ = "Three."
    after = list(generator.describe("First", First))
    assert before != after
    assert "Three." in after[1]


def test_defaults_have_no_addresses() -> None:
    assert "0x" not in generator.format_default(object())
