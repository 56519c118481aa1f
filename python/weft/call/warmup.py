"""Calls without tokens, which compile and load the kernels of those to come."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.quantized import Quantized, no_rows

__all__ = ["run_all"]


def run_all(
    ep: Any,
    x: Tensor | Quantized | None,
    options: dict[str, Any],
    *,
    wire: str | None,
    weighted: bool,
    has_side: bool,
    topk_dtype: torch.dtype,
    output_dtype: torch.dtype | None,
) -> None:
    """On every window a dispatch, its repetition and its combine, from the heap and of ordinary tensors. Collective.
    `ep` is the ExpertParallel, the rest as in its `warmup`."""
    same = {name: options[name] for name in ("num_sms", "mode", "staged") if name in options}
    x = torch.empty((0, ep.hidden), dtype=ep.dtype, device=ep.device) if x is None else no_rows(x)
    ids = torch.empty((0, ep.top_k), dtype=topk_dtype, device=ep.device)
    for idx in range(ep.num_windows):
        with torch.no_grad():
            r = ep.dispatch(x, ids, window=idx, **options).wait()
            ep.dispatch(x, handle=r.handle, window=idx, **same).wait()
            outputs, values = [ep.empty_output(r)], r.topk_weights if has_side else None
            outputs.append(torch.empty_like(outputs[0], dtype=output_dtype))
            if outputs[1].dtype != ep.dtype:
                del outputs[0]
                if not options.get("staged"):  # which have no gradients
                    ep.dispatch(outputs[0].new_empty(0, ep.hidden), handle=r.handle, window=idx, **same)
            if weighted and r.handle.layout != "rank_major" and not options.get("staged"):
                rows = outputs[-1].new_empty((0, ep.hidden))
                ep.calls.gradients(rows, rows, rows.new_empty(0, dtype=torch.float32))
            for output in outputs:
                y = ep.combine(output, r.handle, weighted=weighted, side=values, wire=wire, window=idx, **same)
                if options.get("staged"):
                    y.wait()
