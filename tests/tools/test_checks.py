"""Guards against a source check that has gone blind: a rule must find its bad snippet and leave the good one."""

import re
from pathlib import Path

import pytest

import checks

BAD = [
    ("inline-asm", "include/weft/sync/wait.h", 'asm volatile("nop");'),
    ("inline-asm", "src/base/clock.cc", '__asm__ __volatile__ ("rdtsc");'),
    ("spin-loop", "src/engine/cpu/window.cc", "while (true) { step(); }"),
    ("spin-loop", "src/engine/cpu/window.cc", "for (;;) step();"),
    ("spin-loop", "include/weft/kernels/dispatch.h", "while (flag.load(std::memory_order_acquire) != 1) {}"),
    ("spin-loop", "include/weft/kernels/dispatch.h", "do { step(); } while (ld_acquire_sys(header) != expected);"),
    ("peer-address", "include/weft/kernels/dispatch/entry.cuh", "u8* heap = a.view.heap[to];"),
    ("peer-address", "include/weft/kernels/combine/entry.cuh", "return b_.a.view.control[b_.a.view.rank] + offset;"),
    ("torch-include", "src/bindings/module.cc", "#include <torch/extension.h>"),
    ("torch-include", "include/weft/config/shape.h", "#include <ATen/ATen.h>"),
    ("toolkit-include", "src/base/driver.h", "#include <cuda.h>"),
    ("toolkit-include", "include/weft/ptx/load.cuh", "#include <cuda_fp8.h>"),
    ("python-include", "src/engine/cpu/window.cc", "#include <nanobind/nanobind.h>"),
    ("stable-api", "src/bindings/arrays.cc", "PyTuple_SET_ITEM(made, 0, value);"),
    ("stable-api", "src/bindings/arrays.cc", "PyObject_CallMethodNoArgs(tensor, name);"),
    ("environment", "src/engine/cpu/window.cc", 'auto* text = std::getenv("WEFT_LOG_LEVEL");'),
    ("environment", "python/weft/communicator.py", 'rank = os.environ["RANK"]'),
    ("environment", "python/weft/cli/app.py", "from os import getenv"),
    ("sleeping", "include/weft/sync/wait.h", "std::this_thread::sleep_for(pause);"),
    ("sleeping", "include/weft/sync/wait.h", "usleep(10);"),
    ("named-memory", "src/memory/shared_memory.cc", 'int fd = shm_open("/weft", O_RDWR, 0600);'),
    ("trap", "include/weft/ptx/misc.cuh", 'asm volatile("trap;");'),
    ("trap", "src/engine/cpu/window.cc", "std::abort();"),
    ("non-coherent-load", "include/weft/ptx/load.cuh", 'asm("ld.global.nc.b32 %0, [%1];");'),
    ("pickling", "python/weft/routing.py", "import pickle"),
    ("pickling", "python/weft/routing.py", "numpy.load(path, allow_pickle=True)"),
    ("include-direction", "include/weft/ptx/load.h", '#include "weft/sync/wait.h"'),
    ("include-direction", "include/weft/layout/rows.h", '#include "weft/ptx/load.h"'),
    ("include-direction", "include/weft/config/shape.h", '#include "weft/layout/rows.h"'),
    ("include-direction", "include/weft/kernels/send.h", '#include "base/status.h"'),
    ("include-direction", "src/base/status.cc", '#include "engine/window.h"'),
    ("include-direction", "src/memory/heap.cc", '#include "bootstrap/endpoint.h"'),
    ("include-direction", "include/weft/utils/all.h", "#pragma once"),
    ("engine-include", "src/engine/nvlink/unload.h", '#include "engine/cpu/window.h"'),
    ("engine-include", "src/engine/cpu/dispatch.cc", '#include "engine/nvlink/window.h"'),
    ("engine-include", "src/engine/communicator.cc", '#include "engine/cpu/pause.h"'),
    ("peer-address", "include/weft/kernels/unload.cuh", "u8* rows = a.view.heap[peer];"),
    ("peer-address", "include/weft/kernels/combine/ring.cuh", "auto* x = args.view.heap[rank()] + 1;"),
    ("ambient-tensor", "python/weft/call/cpu_calls.py", "import torch\ntorch.empty(3, dtype=torch.int32)"),
    ("ambient-tensor", "python/weft/bench/tune.py", 'import torch\nx = torch.arange(3, device="cpu") + 1'),
    ("file-size", "src/engine/cpu/window.cc", "int a;\n" * 401),
    ("file-size", "include/weft/kernels/dispatch/entry.cuh", "int a;\n" * 501),
    ("file-size", "python/weft/communicator.py", "a = 1\n" * 401),
    ("function-size", "python/weft/spawn.py", "def f():\n" + "    a = 1\n" * 71),
    ("function-size", "python/weft/spawn.py", "def f(a, b, c, d, e, f, g): pass"),
    ("unfinished", "python/weft/spawn.py", "# TODO: more"),
    ("private-words", "README.md", "see /" + "work/main"),
]

GOOD = [
    ("include/weft/ptx/load.h", 'asm volatile("ld.acquire.sys.global.b64 %0, [%1];");'),
    ("include/weft/sync/wait.h", "while (true) { if (now > deadline) break; }"),
    ("src/base/clock.cc", "// never: while (true)\nint basm(int);"),
    ("src/base/clock.cc", 'const char* text = "while (true) asm(";'),
    ("src/bootstrap/mesh.cc", "// check: allow spin-loop: blocks in poll(), ends with the socket\nfor (;;) {"),
    ("src/bootstrap/mesh.cc", "for (;;) {  // check: allow spin-loop: blocks in poll()"),
    ("src/base/env.cc", 'std::getenv("WEFT_LOG_LEVEL");'),
    ("python/weft/env.py", 'os.environ.get("WEFT_LOG_LEVEL")'),
    ("python/weft/errors.py", '"""Never reads os.environ."""'),
    ("tests/python/test_env.py", 'os.environ["WEFT_LOG_LEVEL"] = "debug"'),
    ("src/engine/nvlink/unload.h", '#include "engine/nvlink/window.h"\n#include "engine/address.h"'),
    ("include/weft/transport/peers.cuh", "u8* rows = view.heap[peer];"),
    ("python/weft/call/cpu_calls.py", 'torch.empty(3, dtype=torch.int32, device="cpu")\nx.new_empty(3)'),
    ("include/weft/kernels/send.h", '#include "weft/transport/put.h"\n#include "weft/layout/rows.h"'),
    ("include/weft/layout/rows.h", '#include "weft/config/shape.h"\n#include <stdint.h>'),
    (
        "src/engine/cpu/window.cc",
        '#include "engine/cpu/window.h"\n#include "weft/kernels/send.h"\n#include "base/fd.h"',
    ),
    ("src/engine/cpu/window.cc", "int a;\n" * 400),
    ("src/engine/cpu/table.cc", "// check: allow file-size: one table, generated\n" + "int a;\n" * 500),
    (
        "python/weft/call/ops.py",
        "# check: allow-in-file function-size: schemas are flat\n\n\ndef f(a, b, c, d, e, f, g): pass",
    ),
    ("python/weft/spawn.py", "def f(a, *, b, c, d, e, f, g, h): pass"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_bad_snippet_is_found(rule: str, path: str, text: str) -> None:
    assert rule in {finding.rule for finding in checks.check_text(path, text)}


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_good_snippet_is_left_alone(path: str, text: str) -> None:
    assert checks.check_text(path, text) == []


def test_every_rule_has_a_bad_snippet() -> None:
    names = {name for name, _, _ in BAD}
    source = Path(checks.__file__).read_text()
    used = set(re.findall(r'(?:find\(source, |, number, |, 1, |, node\.lineno, )"([a-z-]+)"', source))
    assert used
    assert used - {"import-circle", "module-name", "root-files"} <= names  # which are about several files


def test_allowance_needs_a_reason_and_the_right_rule() -> None:
    for allowance in ("allow spin-loop:", "allow inline-asm: because", "allow-in-file spin-loop: "):
        assert checks.check_text("src/base/a.cc", f"// check: {allowance}\nfor (;;) {{"), allowance


def test_line_numbers_survive_blanking() -> None:
    text = '/* a\n b */\nauto a = "x";\nfor (;;) {}\n'
    assert [finding.line for finding in checks.check_text("src/base/a.cc", text)] == [4]


def test_main_reports_and_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    (tmp_path / "src/base").mkdir(parents=True)
    (tmp_path / "src/base/a.cc").write_text("int main() {\n  for (;;) {}\n}\n")
    assert checks.main(["src/base/a.cc"]) == 1
    assert "src/base/a.cc:2: spin-loop" in capsys.readouterr().out
    (tmp_path / "src/base/a.cc").write_text("int main() {}\n")
    assert checks.main(["src/base/a.cc"]) == 0


CIRCLES = [
    {"a": "import weft.b", "b": "from weft import a"},
    {"a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from weft.b import B", "b": "from weft.a import A"},
    {"a": "def f():\n    from weft.b import B", "b": "from weft.c.d import D", "c/d": "import weft.a"},
    {"c/__init__": "from weft.c import d", "c/d": "from weft.c import name"},
    {"a": "from weft.c.d import D", "c/__init__": "from weft.a import A", "c/d": ""},  # the package is loaded first
]


@pytest.mark.parametrize("texts", CIRCLES)
def test_circles_of_imports_are_found(texts: dict[str, str]) -> None:
    leaf = {"python/weft/leaf.py": "import torch", "python/weft/user.py": "from weft import a, leaf"}
    files = {f"python/weft/{name}.py": text for name, text in texts.items()} | leaf
    found = checks.check_imports(files)
    assert [finding.rule for finding in found] == ["import-circle"]
    assert found[0].path in {f"python/weft/{name}.py" for name in texts}


def test_imports_without_a_circle_are_left_alone() -> None:
    texts = {"a": "from weft.b import B", "b": "import weft.c", "c": "from weft.other import x", "_native": ""}
    assert checks.check_imports({f"python/weft/{name}.py": text for name, text in texts.items()}) == []


def test_two_circles_are_two_findings() -> None:
    texts = {"a": "import weft.b", "b": "import weft.a", "c": "import weft.d", "d": "import weft.c, weft.a"}
    found = checks.check_imports({f"python/weft/{name}.py": text for name, text in texts.items()})
    assert len(found) == 2


def test_the_root_of_the_package_stays_small() -> None:
    """What lies in a folder counts for nothing."""
    most = ["python/weft/py.typed", *(f"python/weft/m{idx}.py" for idx in range(checks.MAX_ROOT_FILES - 1))]
    others = ["python/weft/call/plan.py", "python/more.py"]
    assert checks.check_root(most + others) == []
    found = checks.check_root([*most, *others, "python/weft/more.py"])
    assert [(finding.rule, finding.message) for finding in found] == [("root-files", "21 files, allowed are 20")]


def test_two_modules_of_one_name() -> None:
    """An import takes the first of them. Tests, and other folders, may have any name."""
    folders = ["tests/python", "tests/gpu"]
    paths = ["tests/python/cases.py", "tests/python/test_nodes.py", "tests/gpu/test_nodes.py", "tests/native/cases.py"]
    paths += ["tests/python/conftest.py", "tests/gpu/conftest.py"]
    assert checks.check_module_names(paths, folders) == []
    found = checks.check_module_names([*paths, "tests/gpu/cases.py"], folders)
    assert [str(finding) for finding in found] == [
        "tests/gpu/cases.py:1: module-name: tests/python/cases.py has this name, too, and hides it"
    ]
