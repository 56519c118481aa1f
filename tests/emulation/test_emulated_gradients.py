"""Guards against a kernel that gives other gradients of a weighted combine than the cpu engine: rows left out or taken
twice, products or sums rounded otherwise, in-place rows overwritten before they are read."""

import pytest
import torch
from kernels import Compiler, Mutant
from machine import Launch, Memory, Streams
from torch import Tensor

from weft import _load
from weft.call.spec import DTYPE_CODES

POISON = 0xA5
KERNEL = "weft/kernels/gradients.cuh"


def inputs(num_rows: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, y and weights; some rows are zero, as holes are, one has an infinity and one a NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows, y = (torch.randn(num_rows, hidden, generator=generator).to(dtype) for _ in range(2))
    weights = torch.randn(num_rows, generator=generator)
    rows[::5], weights[::5] = 0, 0
    if num_rows > 3:
        rows[1, hidden - 1], y[3, 0] = float("inf"), float("nan")
    return rows, y, weights


def on_cpu(rows: Tensor, y: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor]:
    """By the cpu engine."""
    out, dots, native = torch.empty_like(rows), torch.full_like(weights, 7.0), _load.native()
    comm = native.Communicator.local(native.LocalHub(1), 0)
    shape = {"num_experts": 1, "top_k": 1, "max_tokens": 1, "max_row_bytes": 16, "heap_bytes": 4096}
    native.CpuWindow(comm, **shape).gradients(
        0, DTYPE_CODES[rows.dtype], rows.shape[1], len(rows), rows.data_ptr(), 0 if y is None else y.data_ptr(),
        weights.data_ptr(), out.data_ptr(), dots.data_ptr(),
    )  # fmt: skip
    return out, dots


def emulate(
    compiler: Compiler,
    rows: Tensor,
    y: Tensor | None,
    weights: Tensor,
    *,
    num_blocks: int = 3,
    in_place: bool = False,
    mutant: Mutant | None = None,
) -> tuple[Tensor, Tensor, list[int]]:
    """Gradients of rows and weights, and addresses that should not have been written."""
    memory = Memory(8 << 20, POISON)
    try:
        place = memory.put(rows)
        out = place if in_place else memory.allocate(rows.nbytes)
        dots = memory.put(torch.full_like(weights, 7.0))
        fields = {
            "num_blocks": num_blocks,
            "rows": place,
            "y": 0 if y is None else memory.put(y),
            "weights": memory.put(weights),
            "out": out,
            "grad_weights": dots,
            "num_rows": len(rows),
            "hidden": rows.shape[1],
            "dtype": DTYPE_CODES[rows.dtype],
        }
        launch = Launch(compiler.start(_load.native().render_gradients(), mutant), fields)
        Streams(memory, [[launch]], seed=1, timeout_s=120).run()
        found = memory.tensor(out, rows.shape, rows.dtype), memory.tensor(dots, weights.shape, torch.float32)
        return *found, memory.written_red_zones()
    finally:
        memory.close()


def differences(found: tuple[Tensor, Tensor, list[int]], wanted: tuple[Tensor, Tensor]) -> list[str]:
    """What differs, bit by bit; any NaN equals any NaN."""
    texts = [f"written behind its end: {address:#x}" for address in found[2]]
    for name, here, there in zip(("rows", "weights"), found[:2], wanted, strict=True):
        integers = torch.int32 if here.dtype == torch.float32 else torch.int16
        same = (here.view(integers) == there.view(integers)) | (here.isnan() & there.isnan())
        if not bool(same.all()):
            texts.append(f"{name}: {int((~same).sum())} values differ")
    return texts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_rows", "hidden"), [(41, 600), (7, 16), (5, 2048), (1, 1288)])
def test_bits_are_those_of_the_cpu_engine(compiler: Compiler, dtype: torch.dtype, num_rows: int, hidden: int) -> None:
    rows, y, weights = inputs(num_rows, hidden, dtype)
    for in_place in (False, True):
        assert differences(emulate(compiler, rows, y, weights, in_place=in_place), on_cpu(rows, y, weights)) == []


def test_without_y_weights_get_nothing(compiler: Compiler) -> None:
    rows, _, weights = inputs(9, 264, torch.bfloat16)
    found = emulate(compiler, rows, None, weights, in_place=True)
    assert differences(found, on_cpu(rows, None, weights)) == []
    assert bool((found[1] == 7.0).all())


def test_the_order_of_the_sum_does_not_depend_on_the_launch(compiler: Compiler) -> None:
    rows, y, weights = inputs(33, 1032, torch.bfloat16)
    found = [emulate(compiler, rows, y, weights, num_blocks=number)[1] for number in (1, 4)]
    assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))


MISTAKES = {
    "a row is left out": ("row < args.num_rows; row += num_warps", "row < args.num_rows - 1; row += num_warps"),
    "a vector is left out": ("bool is_there = vector < num_vectors;", "bool is_there = vector + 1 < num_vectors;"),
    "the sum lacks a step": ("step > 0; step /= 2) sum +=", "step > 1; step /= 2) sum +="),
    "the weight is in the dot product": ("sum += values[at] * others", "sum += weight * values[at] * others"),
    "rows are weighed twice": ("values[at] *= weight;", "values[at] *= weight * weight;"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.long
def test_mistakes_are_found(compiler: Compiler, name: str) -> None:
    rows, y, weights = inputs(29, 520, torch.bfloat16)
    mutant = Mutant(name, KERNEL, *MISTAKES[name])
    assert differences(emulate(compiler, rows, y, weights, mutant=mutant), on_cpu(rows, y, weights)) != []
