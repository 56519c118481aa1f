"""Fixtures of the tests of weft.deep_ep."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # ranks are forked: a pool of OpenMP threads does not survive that
