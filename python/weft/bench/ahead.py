"""Compiles the kernels of many calls at once, before ranks start, which would compile one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft import env, prebuild
from weft.bench.cases import EXPERTS, TOP_K, Case
from weft.bench.options import SuiteOptions
from weft.errors import InvalidArgument, Unsupported
from weft.prebuild import KernelShape
from weft.tuning import Table, choose, small_num_sms

__all__ = ["Launch", "compile_ahead", "of_cases"]


@dataclass(frozen=True)
class Launch:
    """A call: its name in words, what its kernels are compiled for, and options of `prebuild.call_sources`."""

    name: str
    shape: KernelShape
    layout: str
    is_small: bool
    options: Mapping[str, Any]


def compile_ahead(launches: Iterable[Launch], arch: str) -> int:
    """Into the cache; returns how many kernels there are. Those of calls that are refused are left out; nothing is done
    without a cache, or for an architecture that Weft does not know.
    """
    folder = env.cache_folder()
    if arch not in prebuild.ARCHITECTURES or not folder:
        return 0
    sources: dict[str, str] = {}
    for each in launches:
        try:
            found = [*prebuild.call_sources(each.shape, each.layout, arch, is_small=each.is_small, **each.options)]
        except (Unsupported, InvalidArgument):
            continue
        sources.update(dict.fromkeys(found, each.name))
    prebuild.compile_all([(arch, name, source) for source, name in sources.items()], folder)
    return len(sources)


def of_cases(chosen: Sequence[Case], options: SuiteOptions, table: Table) -> Iterator[Launch]:
    """What the ranks of the suite will launch."""
    for case in chosen:
        auto = choose(table, "dispatch", case.layout, "bytes", case.tokens)
        shape = KernelShape(
            ranks=options.ranks,
            experts=EXPERTS,
            top_k=TOP_K,
            hidden=options.hidden,
            tokens=case.tokens,
            num_sms=case.num_sms or KernelShape.num_sms,
            small_num_sms=(case.num_sms or small_num_sms(table, case.tokens),),
        )
        sources = {
            "rows": "fp8 rows" if case.rows == "fp8" else "plain" if case.quantize == "none" else case.quantize,
            "routings": ("int64 ids", "handle") if case.is_cached else ("int64 ids",),
            "has_combine": case.source is not None,
            "wire": case.wire,
            "has_push": case.link_kind == "push",
        }
        is_small = case.is_graphed and (auto if case.mode == "auto" else case.mode) == "latency"
        yield Launch(case.name, shape, case.layout, is_small, sources)
