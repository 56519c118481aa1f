"""Guards against a planner that claims more than its model is worth: every published cell is classified and counted,
constants are those of the fit, and cells that were held out judge it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from weft.planner import evidence, fit
from weft.planner.groups import BOUNDS, GROUPS, NOT_MODELLED, group_of, reason_against
from weft.planner.published import cells, sources

DOC = (Path(__file__).resolve().parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
KINDS = {"modelled": 216, "not modelled": 27, "without evidence": 6}


def test_every_cell_is_there_with_its_source() -> None:
    assert len(cells()) == 249
    assert Counter(cell.source for cell in cells()) == {
        "azure": 6,
        "deepep-readme": 32,
        "nixl-pr": 26,
        "ibrc": 14,
        "hybrid-ep-readme": 171,
    }
    assert set(sources()) == {cell.source for cell in cells()}


def test_every_cell_is_modelled_or_not_or_without_evidence() -> None:
    assert Counter(verdict.kind for verdict in evidence.verdicts()) == KINDS
    assert sum(KINDS.values()) == 249
    for verdict in evidence.verdicts():
        if verdict.kind == "modelled":
            assert verdict.error is not None
            assert abs(verdict.error) <= 0.10
            assert verdict.held_out_error is None or abs(verdict.held_out_error) <= 0.10
            assert evidence.num_points(group_of(verdict.cell)) > len(group_of(verdict.cell).free)
        else:
            assert verdict.reason


def test_the_page_has_the_same_counts() -> None:
    for kind, count in KINDS.items():
        assert f"| {kind} | {count} |" in DOC
    for row in evidence.table():
        held = "-" if row.worst_held_out is None else f"{row.worst_held_out:.1%}"
        line = f"| {row.name} | {row.num_constants} | {row.num_modelled} of {row.num_cells} | {row.worst:.1%} | "
        line += f"{held} | {row.held_out_words} |"
        assert line in DOC, line
    for _, reason in NOT_MODELLED:
        assert reason in DOC


def test_each_cell_belongs_to_one_group() -> None:
    for cell in cells():
        if not reason_against(cell):
            assert len([group for group in GROUPS if group.has(cell)]) == 1, cell
            group_of(cell)


def test_no_group_has_a_constant_a_cell_and_is_called_modelled() -> None:
    modelled = {verdict.group for verdict in evidence.verdicts() if verdict.kind == "modelled"}
    for group in GROUPS:
        fitted = fit.fitted_cells(group)
        kept = [cell for cell in fitted if not group.held_out(cell)]
        if group.name in modelled:
            assert len(fitted) > len(group.free)
            assert len(kept) >= len(group.free)  # the prediction's fit is not free either
            assert len(kept) < len(fitted) or any(group.predicted(c) for c in cells() if group.has(c))


@pytest.mark.parametrize("name", ["hybrid-h100-dispatch", "hybrid-h100-combine"])
def test_ep64_is_predicted_from_ep16_and_ep32_within_6_percent(name: str) -> None:
    held = [v for v in evidence.verdicts() if v.group == name and v.cell.ranks == 64]
    assert len(held) == (6 if "dispatch" in name else 3)
    assert all(v.held_out_error is not None and abs(v.held_out_error) <= 0.06 for v in held)


def test_a_machine_that_no_constant_has_seen_is_predicted() -> None:
    """8 x B200 from GB200: four of six figures of Hybrid-EP within 10 %, those of FP8 just beyond."""
    found = [v for v in evidence.verdicts() if v.cell.machine == "8 x B200" and v.cell.system == "Hybrid-EP"]
    assert len(found) == 6
    assert all(abs(v.held_out_error or 1) <= 0.12 for v in found)
    assert sum(v.kind == "modelled" for v in found) == 4


def test_the_constants_are_those_of_the_fit() -> None:
    """Refits everything; what counts are the figures, since constants at a bound of no effect may differ."""
    fits = fit.fit_all()
    stored = evidence.fits()
    assert set(fits) == set(stored)
    for group in GROUPS:
        for which in ("all", "held_out"):
            for name, value in stored[group.name][which].items():
                low, high = BOUNDS[name]
                assert low * 0.999 <= value <= high * 1.001
            kernels = {name: fits[name][which] for name in group.kernel.values()}
            kept = {name: stored[name][which] for name in group.kernel.values()}
            for cell in fit.fitted_cells(group):
                call = (cell.op, cell.dtype)
                new = cell.time_us(evidence.constants_for(group, call, fits[group.name][which], kernels))
                old = cell.time_us(evidence.constants_for(group, call, stored[group.name][which], kept))
                assert new == pytest.approx(old, rel=2e-3), (group.name, which, cell)


def test_a_fit_does_not_see_what_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out figures twice as high change the fit to all cells and not the other."""
    import dataclasses

    group = next(group for group in GROUPS if group.name == "hybrid-h100-combine")
    plain = fit.fitted_cells(group)
    changed = [dataclasses.replace(c, value=2 * c.value) if group.held_out(c) else c for c in plain]
    kept = fit._fit(group, [c for c in changed if not group.held_out(c)], {})
    assert kept == pytest.approx(evidence.fits()[group.name]["held_out"], rel=1e-3)
    assert fit._fit(group, changed, {}) != pytest.approx(evidence.fits()[group.name]["all"], rel=1e-3)


def test_rates_are_counted_as_the_tables_do() -> None:
    """Where a source gives both the time and the rate of a run, bytes as counted here / its time is its rate."""
    times = {cell.measurement: cell.value for cell in cells() if cell.unit == "us"}
    num_checked = 0
    for cell in cells():
        if cell.unit.startswith("GB/s") and cell.measurement in times:
            rate = cell.counted_bytes() / times[cell.measurement] / 1e3
            assert rate == pytest.approx(cell.value, rel=0.025), cell
            num_checked += 1
    assert num_checked == 24


def test_figures_of_one_run_count_once() -> None:
    """A run published in three units is one measurement, so that units don't outnumber constants."""
    for group in GROUPS:
        found = fit.fitted_cells(group)
        assert len({cell.measurement for cell in found}) == len(found)
    main = next(group for group in GROUPS if group.name == "deepep-main-dispatch")
    assert len(fit.fitted_cells(main)) == 2
    both = [c for c in cells() if c.system == "DeepEP V1" and c.ranks == 8 and c.sms == 16 and c.dtype == "fp8"]
    assert len({c.measurement for c in both}) == 2  # on 8 x B200 and on GB200, not one


def test_the_files_are_what_the_package_carries() -> None:
    folder = Path(evidence.__file__).parent
    assert json.loads((folder / "published.json").read_text(encoding="utf-8"))["about"]
    assert json.loads((folder / "fitted.json").read_text(encoding="utf-8"))["about"]
