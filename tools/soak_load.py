"""What a soak does beside its calls: copies on the same links, and a host that does not run ahead of its GPU."""

from __future__ import annotations

import collections

import torch

CALLS_AHEAD = 2


class Traffic:
    """Copies to the GPUs of all peers on a stream of their own, kept going from call to call."""

    def __init__(self, device: torch.device, num_bytes: int = 16 << 20) -> None:
        self.stream = torch.cuda.Stream(device)
        others = [idx for idx in range(torch.cuda.device_count()) if idx != device.index]
        self.source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        self.targets = [torch.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", idx)) for idx in others]
        self.done = torch.cuda.Event()
        self.num_copies = 0

    def go_on(self) -> None:
        """Start the next copies if the last are through."""
        if not self.done.query():
            return
        with torch.cuda.stream(self.stream):
            for target in self.targets:
                target.copy_(self.source, non_blocking=True)
            self.done.record(self.stream)
        self.num_copies += len(self.targets)


class Pace:
    """Keeps the host at most `CALLS_AHEAD` calls ahead of its GPU. Ranks that are threads of a process share the
    driver: one whose stream is full of work holds up the launches of the others, for which that work waits.
    """

    def __init__(self) -> None:
        self.events = collections.deque(torch.cuda.Event() for _ in range(CALLS_AHEAD))

    def go_on(self) -> None:
        """Before a call: wait for the one so many before it. An event that has not been recorded is over."""
        self.events[0].synchronize()
        self.events[0].record()
        self.events.rotate(-1)
