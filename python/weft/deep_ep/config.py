"""`Config`: how DeepEP divides its kernels' work. Of it only `num_sms` has an effect here."""
# check: allow-in-file function-size: parameters as in DeepEP

from __future__ import annotations

from weft.errors import InvalidArgument

__all__ = ["COMBINE", "DISPATCH", "Config", "config_for"]

# By ranks: tokens sent at a time and buffered, between GPUs of a machine and between machines.
_Chunks = tuple[int, int, int, int]
_LARGE = (24, 32, 48, 64)
DISPATCH: dict[int, _Chunks] = {
    2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 8: (6, 256, 6, 128), 16: (36, 288, 20, 128),
    **dict.fromkeys(_LARGE, (32, 288, 8, 128)), 96: (20, 480, 12, 128), 128: (20, 560, 12, 128),
    144: (32, 720, 12, 128), 160: (28, 720, 12, 128),
}  # fmt: skip
COMBINE: dict[int, _Chunks] = {
    2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128),
    **dict.fromkeys(_LARGE, (1, 288, 8, 128)), 96: (1, 480, 8, 128), 128: (1, 560, 8, 128),
    144: (2, 720, 8, 128), 160: (2, 720, 8, 128),
}  # fmt: skip
_RANKS_OF_A_MACHINE = 8
_ALIGNMENT = 128


class Config:
    """Attributes as the parameters.

    Raises:
        InvalidArgument: a number of tokens is not above 0, or as many are sent at a time as are buffered.
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        nvl_send, nvl_recv = num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens
        rdma_send, rdma_recv = num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens
        if min(num_sms, nvl_send, nvl_recv, rdma_send, rdma_recv) <= 0:
            given = (num_sms, nvl_send, nvl_recv, rdma_send, rdma_recv)
            raise InvalidArgument(f"Config{given}: allowed are numbers above 0")
        if nvl_send >= nvl_recv:
            raise InvalidArgument(
                f"num_max_nvl_chunked_send_tokens is {nvl_send}; allowed are numbers below "
                f"num_max_nvl_chunked_recv_tokens, {nvl_recv}"
            )
        rdma_recv = -(-rdma_recv // rdma_send) * rdma_send
        if rdma_send > rdma_recv // 2:
            raise InvalidArgument(
                f"num_max_rdma_chunked_send_tokens is {rdma_send}; allowed is at most half of "
                f"num_max_rdma_chunked_recv_tokens, {rdma_recv}"
            )
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens = nvl_send, nvl_recv
        self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens = rdma_send, rdma_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of a buffer between the GPUs of a machine."""
        return self._hint(hidden_bytes, min(num_ranks, _RANKS_OF_A_MACHINE) * self.num_max_nvl_chunked_recv_tokens)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of a buffer between machines; 0 within one."""
        if num_ranks <= _RANKS_OF_A_MACHINE:
            return 0
        num_machines = -(-num_ranks // _RANKS_OF_A_MACHINE)
        return 2 * self._hint(hidden_bytes, num_machines * self.num_max_rdma_chunked_recv_tokens)

    def _hint(self, hidden_bytes: int, num_tokens: int) -> int:
        num_bytes = max(1, self.num_sms // 2) * num_tokens * (hidden_bytes + 8 + 128 * 16)
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def __repr__(self) -> str:
        return f"deep_ep.Config({', '.join(f'{name}={value}' for name, value in vars(self).items())})"


def config_for(table: dict[int, _Chunks], num_ranks: int, num_sms: int) -> Config:
    """Of the largest entry that has no more ranks, else of the smallest."""
    known = [size for size in table if size <= num_ranks]
    return Config(num_sms, *table[max(known) if known else min(table)])
