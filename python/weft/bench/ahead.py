"""Compiles the kernels of many calls at once, before ranks start, which would compile one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft import env
from weft.bench.cases import Case
from weft.bench.options import SuiteOptions
from weft.errors import InvalidArgument, Unsupported
from weft.kernels import prebuild
from weft.kernels.prebuild import KernelShape
from weft.kernels.tuning import Table, choose, small_num_sms
from weft.limits import MAX_SMALL_TOKENS

__all__ = ["ROWS", "Launch", "compile_ahead", "of_cases"]

ROWS = {"plain": "plain", "wide": "plain", "quantized": "fp8", "bytes": "fp8 rows"}  # FORMS, as kernels.prebuild says


@dataclass(frozen=True)
class Launch:
    """A kernel that ranks launch: its name in words, what it is compiled for, options of `prebuild.call_source`."""

    name: str
    shape: KernelShape
    layout: str
    is_small: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    def source(self, arch: str) -> str:
        """Raises: as `prebuild.call_source`."""
        return prebuild.call_source(self.shape, self.layout, arch, is_small=self.is_small, **self.options)


def compile_ahead(launches: Iterable[Launch], arch: str) -> int:
    """Into the cache; returns how many kernels there are. Those of calls that are refused are left out; nothing is done
    without a cache, or for an architecture that Weft does not know.
    """
    folder = env.cache_folder()
    if arch not in prebuild.ARCHITECTURES or not folder:
        return 0
    names: dict[str, str] = {}
    for launch in launches:
        try:
            names[launch.source(arch)] = launch.name
        except (Unsupported, InvalidArgument):
            continue
    prebuild.compile_all([(arch, name, source) for source, name in names.items()], folder)
    return len(names)


def of_cases(chosen: Sequence[Case], options: SuiteOptions, table: Table) -> Iterator[Launch]:
    """What the ranks of the suite will launch."""
    for case in chosen:
        shape = KernelShape(
            ranks=options.ranks,
            experts=case.experts,
            top_k=case.top_k,
            hidden=case.hidden,
            tokens=case.tokens,
            num_sms=case.num_sms or None,
            small_num_sms=(case.num_sms or small_num_sms(table, case.tokens),),
        )
        form = "bytes" if case.rows == "fp8" else "plain" if case.quantize == "none" else "quantized"
        is_exact = case.layout == "expert_major" and case.sizes == "exact"
        is_small = not (is_exact and case.mode == "auto") and _is_small(case, "dispatch", form, table)
        for routing in ("int64 ids", "handle") if case.is_cached else ("int64 ids",):
            yield Launch(case.name, shape, case.layout, is_small, {"rows": ROWS[form], "routing": routing})
        if case.source is not None:
            is_small = is_small or _is_small(case, "combine", "plain" if case.wire is None else "quantized", table)
            how = {"wire": case.wire, "has_push": case.link_kind == "push"}
            yield Launch(case.name, shape, case.layout, is_small, how)


def _is_small(case: Case, op: str, form: str, table: Table) -> bool:
    mode = choose(table, op, case.layout, form, case.tokens) if case.mode == "auto" else case.mode
    return case.tokens <= MAX_SMALL_TOKENS and mode == "latency"
