"""Host time of one block for rows and scales of an FP8 result beside a tensor for each, as a JSON line; by hand.

python lab/one_block.py > one_block.jsonl

Tensors as a call makes them, of a masked result. Both ways take turns; a time is the median of its rounds. It runs on
a GPU if there is one.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

ROUNDS, CALLS = 41, 2000
EXPERTS, ROWS, HIDDEN = 8, 64, 2048
NUM_SCALES = HIDDEN // 128


def main() -> None:
    """One line of JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codes, scale, byte = (
        torch.empty(0, dtype=kind, device=device) for kind in (torch.float8_e4m3fn, torch.float32, torch.uint8)
    )
    of_rows = ((EXPERTS, ROWS, HIDDEN), (ROWS * HIDDEN, HIDDEN, 1))
    of_scales = ((EXPERTS, ROWS, NUM_SCALES), (ROWS * NUM_SCALES, NUM_SCALES, 1))
    num_codes, num_scales = EXPERTS * ROWS * HIDDEN, EXPERTS * ROWS * NUM_SCALES
    of_block = ((num_codes + 4 * num_scales,), (1,))

    def two() -> Any:
        return codes.new_empty_strided(*of_rows), scale.new_empty_strided(*of_scales)

    def block() -> Any:  # the fewest operations: a view of another type, then its part
        whole = byte.new_empty_strided(*of_block)
        rows = whole.view(torch.float8_e4m3fn).as_strided(*of_rows)
        return rows, whole.view(torch.float32).as_strided(*of_scales, num_codes // 4)

    def us(make: Callable[[], Any]) -> float:
        begin = time.process_time()
        for _ in range(CALLS):
            make()
        return (time.process_time() - begin) / CALLS * 1e6

    rounds = [(us(two), us(block)) for _ in range(ROUNDS)][1:]
    found = {
        "kind": "one_block",
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "two_us": statistics.median(first for first, _ in rounds),
        "block_us": statistics.median(second for _, second in rounds),
        "ratio": statistics.median(second / first for first, second in rounds),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
