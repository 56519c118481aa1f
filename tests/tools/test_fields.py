"""Guards against a field of a kernel's configuration that the library forgets: two configurations that differ in it
alone would share a kernel, and the wrong one would be launched in silence."""

import shutil
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).parents[2] / "include"
CONFIGS = {
    "DispatchKernelConfig": "kernel.h",
    "CombineKernelConfig": "kernel.h",
    "SmallDispatchKernelConfig": "small_dispatch_kernel.h",
    "SmallCombineKernelConfig": "small_kernel.h",
    "Order": "order.h",
}
PROGRAM = """
#include <cstdio>
#include "weft/config/fields.h"
int main() {
  weft::CONFIG config;
  weft::walk_fields(config, []<class Value>(weft::fields::Name name, Value value) {
    std::printf("%.*s", static_cast<int>(name.length), name.data);
    if constexpr (!weft::fields::IsStruct<Value>) std::printf(" %lld", static_cast<long long>(value));
    std::printf("\\n");
  });
}
"""


def compiled(include: Path, config: str, program: Path) -> subprocess.CompletedProcess[str]:
    command = ["g++", "-std=c++20", "-O0", f"-I{include}", "-x", "c++", "-", "-o", str(program)]
    source = PROGRAM.replace("CONFIG", config)
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_field_more_does_not_compile(config: str, tmp_path: Path) -> None:
    """Nor one less; as it is the configuration's fields are walked by their names, in the order of declaration."""
    path = tmp_path / "include" / "weft" / "config" / CONFIGS[config]
    shutil.copytree(INCLUDE / "weft" / "config", path.parent)
    text = path.read_text()
    begin = text.index(f"struct {config} {{")
    declared = text[begin : text.index("\n\n", begin)].splitlines()[1:]
    names = [line.split("=")[0].strip(" ;").split()[-1] for line in declared]

    assert compiled(tmp_path / "include", config, tmp_path / "program").returncode == 0
    said = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in said.splitlines()] == names

    path.write_text(text.replace(f"struct {config} {{", f"struct {config} {{\n  int forgotten = 0;"))
    with_one_more = compiled(tmp_path / "include", config, tmp_path / "program")
    assert with_one_more.returncode != 0
    assert "a field of this configuration is missing in config/fields.h" in with_one_more.stderr
