"""Guards against kernels with nodes that NVRTC refuses, or that spill."""

import re

import pytest
import sass

from weft.kernels import prebuild
from weft.kernels.prebuild import KernelShape

DIRECT = (".route = static_cast<weft::Route>(0)", ".node_ranks = 0")
OF_NODES = (".route = static_cast<weft::Route>(2)", ".node_ranks = 2")
NAMES = (
    "dispatch rank_major, plain, int64 ids",
    "dispatch rank_major, plain, handle",
    "dispatch expert_major, plain, int64 ids",
    "dispatch masked, fp8, int64 ids",
    "dispatch expert_major, plain, handle",
    "combine rank_major from the heap, domains of 2",
    "combine by expert, domains of 2",
    "combine rank_major from the heap, domains of 2 in fp8",
    "combine by expert, domains of 2 in fp8",
    "small dispatch rank_major, plain, int64 ids",
    "small dispatch masked, fp8, int64 ids, sends",
    "small dispatch expert_major, plain, handle, receives",
    "small combine rank_major, domains of 2",
    "small combine by expert, domains of 2 in fp8, side, receives",
)
# Bytes of stack frame, spill stores, spill loads. They may only shrink.
KNOWN_SPILLS = {
    ("sm_90", "small dispatch rank_major, plain, int64 ids"): ("32", "28", "36"),
    ("sm_100", "small dispatch expert_major, plain, handle, receives"): ("8", "8", "8"),
}


def source_of(name: str) -> str:
    """Of four ranks in two nodes."""
    shape = KernelShape(sum_domain=2 if "combine" in name else 0)
    source = dict(prebuild.kernels(shape, prebuild.ARCHITECTURES["sm_90"]))[name]
    for old, new in zip(DIRECT, OF_NODES, strict=True):
        assert source.count(old) == 1
        source = source.replace(old, new)
    if name.startswith("dispatch"):  # by expert another kernel places rows
        source = re.sub(r"\.num_fan_stages = \d+", ".num_fan_stages = 0", source)
        source = re.sub(r"\.is_spread = \d", f".is_spread = {int('rank_major' not in name)}", source)
    return source.replace(".reduce_rings = 2", ".reduce_rings = 1")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.long
def test_kernels_with_nodes_compile_without_spills(arch: str) -> None:
    """Large rows move in bulk."""
    kernels = sass.compiled_kernels([source_of(name) for name in NAMES], arch)
    for name, kernel in zip(NAMES, kernels, strict=True):
        found = sass.problems(
            kernel,
            loads_in_bulk=not name.startswith("small"),
            stores_in_bulk=not name.startswith(("combine rank_major", "small")),
            adds_exact_products="in fp8" in name,
            lets_next_begin=False,
        )
        if (arch, name) in KNOWN_SPILLS:
            assert found[0] == f"spills or a stack frame: [{KNOWN_SPILLS[arch, name]}]"
            found = [each for each in found[1:] if not each.startswith("local memory")]
        assert found == [], name
