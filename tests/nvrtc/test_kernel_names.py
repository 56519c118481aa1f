"""Guards against kernels that profilers show under other names than readers of profiles look for, and against a name
that the host looks for in vain when it loads a cubin."""

from __future__ import annotations

import re

import sass

from weft import _load
from weft.kernels import prebuild
from weft.kernels.prebuild import KernelShape

SHAPE = KernelShape(ranks=2, experts=8, top_k=2, hidden=512, tokens=192, num_sms=2)
MANGLED = re.compile(r"_ZN4weft(\d+)(\w+)ENS_7kernels(\d+)(\w+)E")
NAMES = {
    "dispatch": "dispatch_kernel", "small dispatch": "dispatch_kernel", "combine": "combine_kernel",
    "small combine": "combine_kernel", "unload": "unload_kernel", "gradients": "gradients_kernel",
    "count": "count_picks_kernel", "picks": "picks_of_map_kernel", "need": "need_room_kernel",
    "place": "place_rows_kernel", "stage": "stage_rows_kernel",
}  # fmt: skip


def kind_of(name: str) -> str:
    words = name.replace("_", " ").split()
    return " ".join(words[:2]) if words[0] == "small" else words[0].rstrip(",")


def test_profilers_see_two_names_of_calls() -> None:
    """`weft::dispatch_kernel` and `weft::combine_kernel`; no other kernel of a call has either word in its name."""
    first: dict[str, str] = {}
    for name, source in prebuild.kernels(SHAPE, prebuild.ARCHITECTURES["sm_90"]):
        found = MANGLED.fullmatch(_load.native().kernel_symbol(source))
        assert found is not None, name
        shown, arguments = found[2], found[4]
        assert (int(found[1]), int(found[3])) == (len(shown), len(arguments)), name
        assert shown == NAMES[kind_of(name)], name
        is_of_call = shown in ("dispatch_kernel", "combine_kernel")
        assert is_of_call or not re.search("dispatch|combine", f"{shown} {arguments}", re.IGNORECASE), name
        first.setdefault(kind_of(name), source)
    assert set(first) == set(NAMES)
    for kernel, source in zip(sass.compiled_kernels(list(first.values()), "sm_90"), first.values(), strict=True):
        symbol = _load.native().kernel_symbol(source).encode()
        assert b"\0" + symbol + b"\0" in kernel.compiled.cubin
