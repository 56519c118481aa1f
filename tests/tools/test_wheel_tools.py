"""Guards against a wheel that carries or links what it must not, and requirements that are read wrongly."""

import importlib.metadata
from pathlib import Path

import pytest

import check_wheel
import requirements

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "weft/__init__.py",
    "weft/py.typed",
    "weft/_native.abi3.so",
    "weft/include/weft/kernels/dispatch/entry.cuh",
    "weft/tables/h200-2.json",
    "weft/tables/h200-4.json",
    "weft/planner/published.json",
    "weft/planner/fitted.json",
    "weft/planner/measured.json",
    "weft/deep_ep/top_level/deep_ep/__init__.py",
    "weft/deep_ep/top_level/deep_ep-2.1.0+weft.0.1.0.egg-info",
    "weft-0.1.0.dist-info/licenses/LICENSE",
]


def test_a_good_wheel_passes() -> None:
    assert check_wheel.check_names(NAMES) == []
    assert check_wheel.check_libraries(["libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"]) == []


@pytest.mark.parametrize("missing", NAMES)
def test_a_wheel_without_a_needed_file_fails(missing: str) -> None:
    assert check_wheel.check_names([name for name in NAMES if name != missing])


@pytest.mark.parametrize(
    "extra", ["weft/_native.cpython-311-x86_64-linux-gnu.so", "weft/__pycache__/a.pyc", "deep_ep/__init__.py"]
)
def test_a_wheel_with_a_strange_file_fails(extra: str) -> None:
    assert check_wheel.check_names([*NAMES, extra])


def test_the_wheel_of_the_name() -> None:
    """weft-deep-ep in the source tree has the version of Weft, and holds one file."""
    version = check_wheel.weft_version()
    project = tomllib.loads((ROOT / "packaging/weft-deep-ep/pyproject.toml").read_text())["project"]
    assert (project["version"], project["dependencies"]) == (version, [f"weft=={version}"])
    names = ["deep_ep/__init__.py", f"weft_deep_ep-{version}.dist-info/METADATA"]
    metadata = f"Version: {version}\nRequires-Dist: weft=={version}\n"
    assert check_wheel.check_name_wheel(names, metadata, version) == []
    assert check_wheel.check_name_wheel(names[1:], metadata, version)
    assert check_wheel.check_name_wheel([*names, "deep_ep/utils.py"], metadata, version)
    assert check_wheel.check_name_wheel(names, metadata, "9.9.9")


@pytest.mark.parametrize("library", ["libstdc++.so.6", "libcudart.so.13", "libcuda.so.1", "libtorch.so", "libc10.so"])
def test_a_module_that_links_more_than_the_c_library_fails(library: str) -> None:
    assert check_wheel.check_libraries(["libc.so.6", library])


def test_requirements_are_those_of_the_project_file() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    extras = [name for extra in project["optional-dependencies"].values() for name in extra]
    expected = {name for name in project["dependencies"] + extras if not name.startswith("weft[")}
    assert set(requirements.read_requirements(text)) == expected
    assert any(name.startswith("torch>=") for name in expected)


def test_running_needs_no_linters_and_no_gpu_compilers() -> None:
    """`make demo` installs these groups alone."""
    text = (ROOT / "pyproject.toml").read_text()
    names = requirements.read_requirements(text, ["dependencies", "build"])
    assert {"torch>=2.10", "ninja"} <= set(names)
    assert not [
        name for name in names if name.startswith(("clang", "ruff", "mypy", "pytest", "nvidia-cuda", "matplotlib"))
    ]


def test_build_requirements_are_the_same_with_and_without_isolation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["build-system"]["requires"]) <= set(project["project"]["optional-dependencies"]["build"])


def test_what_is_missing_is_told_by_version() -> None:
    version = importlib.metadata.version("pytest")
    assert requirements.is_met("pytest")
    assert requirements.is_met(f"pytest>={version}")
    assert not requirements.is_met("pytest>=1000.1")
    assert not requirements.is_met("no-such-package-here")
