"""Guards against times of the control plane that are missing, of a result that was wrong, or of too few ranks."""

import pytest
from cli_lines import assert_documented, rows_of
from hosts import needs_hosts
from typer.testing import CliRunner

from weft.bench.control import MEASURED
from weft.bench.control_hosts import MEASURED_BETWEEN_HOSTS
from weft.cli import app


def test_each_time_is_of_each_rank_that_has_it() -> None:
    """Three ranks, two groups: a survivor or a late rank each."""
    result = CliRunner().invoke(
        app, ["bench", "--control", "--ranks", "3", "--iters", "2", "--device", "cpu", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = rows_of(result.stdout)
    assert_documented(rows)
    assert {row["what"] for row in rows} == set(MEASURED)
    counts = {row["what"]: row["count"] for row in rows}
    assert counts.pop("evict_to_told_ms") == 2
    assert set(counts.values()) == {4}
    assert all(0 < row["p50_ms"] <= row["max_ms"] for row in rows)
    at = {row["what"]: row["p50_ms"] for row in rows}
    assert at["kill_to_out_ms"] < at["kill_to_right_op_ms"]


def test_two_ranks_are_too_few() -> None:
    """One is killed, and those left must have somebody to meet."""
    result = CliRunner().invoke(app, ["bench", "--control", "--ranks", "2"])
    assert result.exit_code != 0
    assert "ranks is 2" in result.output


@needs_hosts
@pytest.mark.slow
def test_times_between_hosts_are_of_each_survivor() -> None:
    """Three hosts, two groups that lose a rank and one that loses a cable."""
    result = CliRunner().invoke(app, ["bench", "--control", "--hosts", "3", "--iters", "2", "--json"])
    assert result.exit_code == 0, result.output
    rows = rows_of(result.stdout)
    assert_documented(rows)
    counts = {row["what"]: row["count"] for row in rows}
    assert counts == {
        "connect_ms": 6, "meet_ms": 6, "host_rebuild_ms": 6, "host_kill_to_told_ms": 4, "host_recover_ms": 4,
        "cable_to_told_ms": 2,
    }  # fmt: skip
    assert set(counts) == set(MEASURED_BETWEEN_HOSTS)
    assert all(0 < row["p50_ms"] <= row["max_ms"] for row in rows)


def test_two_hosts_are_too_few() -> None:
    """As two ranks are."""
    result = CliRunner().invoke(app, ["bench", "--control", "--hosts", "2"])
    assert result.exit_code != 0
    assert "hosts is 2" in result.output
