"""NCCL's device headers as NVRTC takes them: a rewritten copy, small stand-ins for the C library's, and a prologue.

docs/protocols/rail-gin.md says what is rewritten and why.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from weft.errors import InvalidArgument
from weft.kernels.cache import is_private

__all__ = ["PROLOGUE", "prepare", "rewrite"]

# What a kernel's source begins with, before the first header of NCCL.
PROLOGUE = """\
#include <cuda/std/cstdint>
#include <cuda/std/cstddef>
#include <cuda/std/type_traits>
#include <cuda/atomic>
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda.h>
#include <cooperative_groups.h>
#define EIO 5
#define EBUSY 16
#define EINVAL 22
#define ETIMEDOUT 110
#define __builtin_memcpy(to, from, size) memcpy(to, from, size)
#undef __host__
#define __host__
"""

_EMPTY = (
    "algorithm", "assert.h", "cassert", "config.h", "cstring", "errno.h", "limits.h", "math.h", "new", "stdbool.h",
    "stddef.h", "stdio.h", "stdlib.h", "string.h",
)  # fmt: skip
_STAND_INS = {
    **dict.fromkeys(_EMPTY, ""),
    "cstddef": "#include <cuda/std/cstddef>\n",
    "cstdint": "#include <stdint.h>\n",
    "stdint.h": "#include <cuda/std/cstdint>\n",
    "type_traits": "#include <cuda/std/type_traits>\nnamespace std { using namespace cuda::std; }\n",
    "linux/types.h": "".join(
        f"typedef {'unsigned' if sign == 'u' else 'signed'} {kind} __{sign}{bits};\n"
        for sign in "us"
        for bits, kind in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
    )
    + "".join(f"typedef __u{bits} __{order}{bits};\n" for order in ("be", "le") for bits in (16, 32, 64)),
}

_ATTRIBUTES = re.compile(r"\}(\s*)((?:__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)\s*)+)")
_TAG = re.compile(r"\b(?:struct|union)(?=(?:\s+\w+)?\s*$)")
_PARTS = re.compile(r"\bpart\[(sizeof\(T\) / \d+)\]")
_TYPE_OF = re.compile(r"^(#define TYPEOF\(x\)) .*$", re.MULTILINE)


def rewrite(text: str) -> str:
    """The text of a header of NCCL as NVRTC takes it."""
    text = _move_attributes(text)
    text = _PARTS.sub(r"part[\1 ? \1 : 1]", text)
    return _TYPE_OF.sub(r"\1 cuda::std::remove_reference_t<decltype(x)>", text)


def _move_attributes(text: str) -> str:
    """NVRTC ignores attributes behind the closing brace of a struct, without a word: they go in front of its name."""
    at = 0
    while (found := _ATTRIBUTES.search(text, at)) is not None:
        at = found.end()
        opening = _opening_brace(text, found.start())
        tag = _TAG.search(text, 0, opening)
        if tag is None:
            continue
        attributes = found[2].strip()
        text = f"{text[: tag.end()]} {attributes}{text[tag.end() : found.start() + 1]}{found[1]}{text[found.end() :]}"
        at = found.start() + 1 + len(attributes) + 1
    return text


def _opening_brace(text: str, closing: int) -> int:
    depth = 0
    for at in range(closing, -1, -1):
        depth += (text[at] == "}") - (text[at] == "{")
        if depth == 0:
            return at
    raise InvalidArgument("a header of NCCL closes a brace that it does not open")


def prepare(include: Path, cache: Path) -> Path:
    """The folder to give the compiler in place of `include`, NCCL's folder of headers; made once in `cache`.

    It is named by the hash of what made it, so it never is stale, and it is private to this user.

    Raises:
        InvalidArgument: `include` has no nccl_device.h.
    """
    files = sorted(path for path in include.rglob("*") if path.is_file())
    if include / "nccl_device.h" not in files:
        raise InvalidArgument(f"{include} has no nccl_device.h: NCCL's headers from 2.30.7 on are expected")
    texts = {path.relative_to(include).as_posix(): rewrite(path.read_text(encoding="utf-8")) for path in files}
    texts.update(_STAND_INS)
    hashed = hashlib.sha256("\0".join(text for pair in sorted(texts.items()) for text in pair).encode())
    folder = cache / f"nccl-headers-{hashed.hexdigest()[:32]}"
    if folder.is_dir() and is_private(folder):
        return folder
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=cache))
    for name, text in texts.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text, encoding="utf-8")
    try:
        os.rename(made, folder)
    except OSError:  # another process was first
        shutil.rmtree(made)
    return folder
