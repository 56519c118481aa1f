"""Guards against times of ranks that come and go that are missing, of a result that was wrong, or of too few ranks."""

import pytest
from cli_lines import assert_documented, rows_of
from typer.testing import CliRunner

from weft.bench import elastic
from weft.bench.elastic import ELASTIC
from weft.cli import app


def test_each_time_is_of_each_rank_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three founders and two spares, of which two die and one leaves; then a process of its own; then a spare that
    fetches, less than when it is measured."""
    monkeypatch.setattr(elastic, "FETCH_BYTES", 1 << 20)
    result = CliRunner().invoke(app, ["bench", "--elastic", "--ranks", "3", "--iters", "1", "--json"])
    assert result.exit_code == 0, result.output
    rows = rows_of(result.stdout)
    assert_documented(rows)
    counts = {row["what"]: row["count"] for row in rows}
    assert set(counts) == set(ELASTIC)
    assert counts.pop("step_ms") == 3 * 200
    assert counts.pop("step_before_fetch_ms") == 3 * 200
    assert counts.pop("step_during_cold_join_ms") > 0
    assert counts.pop("step_during_fetch_ms") > 0
    assert counts == {
        "idle_boundary_ms": 2,  # of those that tell: a killed rank does not
        "warm_join_pause_ms": 2,
        "kill_to_full_strength_ms": 2,
        "kill_to_fewer_ms": 3,
        "leave_pause_ms": 2,
        "map_change_pause_ms": 3,
        "resize_ms": 3,
        "fetch_ms": 1,
        "copy_ms": 1,
    }
    assert all(0 <= row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in rows)


def test_two_ranks_are_too_few() -> None:
    result = CliRunner().invoke(app, ["bench", "--elastic", "--ranks", "2"])
    assert result.exit_code != 0
    assert "ranks is 2" in result.output
