"""Guards against sizes that Python works out otherwise than the headers of the kernels."""

import itertools
import subprocess
from pathlib import Path

import pytest
from kernels import INCLUDE

from weft.limits import small_shared_bytes

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "weft/config/small_dispatch_kernel.h"
int main(int, char** given) {
  weft::SmallDispatchKernelConfig config;
  config.num_ranks = atoi(given[1]);
  config.num_experts = atoi(given[2]);
  config.layout = static_cast<weft::Layout>(atoi(given[3]));
  for (char** places = given + 4; *places != nullptr; ++places) {
    std::printf("%d %d\\n", config.num_groups(), config.shared_bytes(atoi(*places)));
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layout")
    (folder / "sizes.cc").write_text(PROGRAM)
    command = ["g++", "-std=c++20", f"-I{INCLUDE}", str(folder / "sizes.cc"), "-o", str(folder / "sizes")]
    subprocess.run(command, check=True, timeout=600)
    return folder / "sizes"


def test_shared_memory_of_small_batches(program: Path) -> None:
    places = (0, 1, 31, 32, 500, 4096)
    for num_ranks, num_experts, layout in itertools.product((1, 2, 8), (8, 64, 256), range(3)):
        command = [program, *map(str, (num_ranks, num_experts, layout, *places))]
        told = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True).stdout.split()
        groups, sizes = map(int, told[::2]), map(int, told[1::2])
        for place, num_groups, size in zip(places, groups, sizes, strict=True):
            assert small_shared_bytes(place, num_groups, num_experts // num_ranks) == size
