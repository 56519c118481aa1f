"""Guards against loading an NCCL that nobody checked, and against headers that compilers lay out in two ways."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft.scaleout import headers, nccl


def test_attributes_behind_a_struct_go_in_front_of_its_name() -> None:
    text = (
        "struct one {\n  struct { int x; } __attribute__((packed)) inner;\n  int y;\n"
        "} __attribute__((__packed__)) __attribute__((__aligned__(4)));\n"
    )
    assert headers.rewrite(text) == (
        "struct __attribute__((__packed__)) __attribute__((__aligned__(4))) one {\n"
        "  struct __attribute__((packed)) { int x; } inner;\n  int y;\n} ;\n"
    )


def test_attributes_of_what_is_no_struct_stay() -> None:
    text = (
        "enum one { kOne } __attribute__((packed));\nstruct two { int x; };\n"
        "void f() {} __attribute__((noinline)) void g();\n"
    )
    assert headers.rewrite(text) == text


def test_an_array_has_an_element_and_a_type_no_reference() -> None:
    assert headers.rewrite("uint64_t part[sizeof(T) / 8];") == "uint64_t part[sizeof(T) / 8 ? sizeof(T) / 8 : 1];"
    text = "#if x\n#define TYPEOF(x) __typeof__(x)\n#else\n#define TYPEOF(x) decltype(x)\n#endif\n"
    assert headers.rewrite(text).count("#define TYPEOF(x) cuda::std::remove_reference_t<decltype(x)>\n") == 2


def test_headers_are_made_once_and_for_this_user(tmp_path: Path) -> None:
    include = tmp_path / "include"
    (include / "inner").mkdir(parents=True)
    (include / "nccl_device.h").write_text('#include "inner/one.h"\n')
    (include / "inner/one.h").write_text("struct one { int x; } __attribute__((packed));\n")
    made = headers.prepare(include, tmp_path / "cache")
    assert (made / "inner/one.h").read_text() == "struct __attribute__((packed)) one { int x; } ;\n"
    assert "__be32" in (made / "linux/types.h").read_text()
    assert made.stat().st_mode & 0o777 == 0o700
    before = (made / "inner/one.h").stat().st_mtime_ns
    assert headers.prepare(include, tmp_path / "cache") == made
    assert (made / "inner/one.h").stat().st_mtime_ns == before
    (include / "inner/one.h").write_text("struct one { int y; };\n")
    assert headers.prepare(include, tmp_path / "cache") != made
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_folder_without_headers_is_named(tmp_path: Path) -> None:
    with pytest.raises(weft.InvalidArgument, match=r"no nccl_device\.h: NCCL's headers from 2\.30\.7"):
        headers.prepare(tmp_path, tmp_path / "cache")


def test_without_nccl_the_text_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_mapped", list)
    with pytest.raises(weft.Unsupported, match=r"no NCCL, need NCCL 2\.30\.7 or newer: type `weft scaleout fetch`"):
        nccl.find(str(tmp_path))


def library(folder: Path, code: int) -> Path:
    """A library with one function of NCCL's, and headers beside it."""
    for name in ("lib", "include"):
        (folder / name).mkdir(parents=True)
    (folder / "include/nccl_device.h").touch()
    path = folder / "lib/libnccl.so.2"
    source = f'extern "C" int ncclGetVersion(int* version) {{ *version = {code}; return 0; }}'
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)], input=source, text=True, check=True)
    return path


@pytest.mark.parametrize(("code", "version"), [(22907, (2, 29, 7)), (23007, (2, 30, 7)), (23203, (2, 32, 3))])
def test_the_process_s_own_counts_if_it_is_new_enough(code: int, version: tuple[int, int, int], tmp_path: Path) -> None:
    path = library(tmp_path / "own", code)
    program = (
        f"import ctypes; ctypes.CDLL({str(path)!r})\n"
        "from weft.scaleout import nccl\n"
        "own = nccl.loaded()\n"
        f"assert (own.version, own.include) == ({version!r}, own.library.parent.parent / 'include'), own\n"
        f"print(nccl.find({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if version < nccl.MIN_VERSION:
        assert "Unsupported: a network engine is not supported: have NCCL 2.29.7 (of this process, " in done.stderr
    else:
        assert done.stdout == f"NCCL {'.'.join(map(str, version))} (of this process, {path})\n", done.stderr


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy that lies where `fetch` would put it."""
    folder = tmp_path / "nccl-2.32.3"
    (folder / "nvidia/nccl/lib").mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "nvidia/nccl/lib/libnccl.so.2").write_bytes(b"another library")
    return folder


def test_another_library_in_the_cache_is_not_loaded(copied: Path) -> None:
    with pytest.raises(weft.InvalidState, match=r"is not what `weft scaleout fetch` wrote; remove .* and fetch again"):
        nccl.find(str(copied.parent))
    with pytest.raises(weft.InvalidState, match="is not what"):
        nccl.fetch(str(copied.parent))


def test_a_folder_that_others_can_write_is_not_read(copied: Path) -> None:
    copied.chmod(0o777)
    with pytest.raises(weft.InvalidState, match="is not a private folder of this user"):
        nccl.fetched(str(copied.parent))


def test_another_wheel_is_refused_with_both_hashes(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"a wheel")
    with pytest.raises(weft.InvalidArgument, match=r"other\.whl has SHA-256 \w{64}; nvidia-nccl-cu13 2.* has \w{64}"):
        nccl.fetch(str(tmp_path / "cache"), str(wheel))
    with pytest.raises(weft.InvalidArgument, match=r"missing\.whl: No such file"):
        nccl.fetch(str(tmp_path / "cache"), str(tmp_path / "missing.whl"))
    with pytest.raises(weft.InvalidArgument, match="WEFT_CACHE_DIR is empty"):
        nccl.fetch("", str(wheel))
    assert not list((tmp_path / "cache").iterdir())


def test_an_index_without_the_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(weft.Unsupported, match=r"pip says: .*or its wheel with `weft scaleout fetch --from FILE`"):
        nccl.fetch(str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").iterdir())


def test_a_processor_without_a_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(weft.Unsupported, match="have a riscv64 processor, need one of x86_64, aarch64"):
        nccl.fetch(str(tmp_path / "cache"))
