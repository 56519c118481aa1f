"""Guards against bad input that is not refused by a typed error with the name, the value and what is allowed, against a
refused feature that does not say what to use, and against a lost rank that hangs the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusal_cases import (
    Rank,
    ids_out_of_range,
    low_combine,
    v1_combine,
    with_a_lost_rank,
    wrong_input,
    wrong_on_one_rank,
)

import weft
from weft import deep_ep


def test_bad_input_is_named() -> None:
    """On every rank at once; the calls after it are right."""
    weft.spawn(wrong_input, 2, device="cpu")


def test_a_corrected_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEEP_EP_TIMEOUT_S", "30")
    weft.spawn(wrong_on_one_rank, 2, device="cpu")


def peers_are_told(comm: weft.Communicator, kind: str) -> str:
    os.environ["WEFT_DEEP_EP_TIMEOUT_S"] = "2"
    rank = Rank(comm)
    calls: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
        "V1": (rank.normal, lambda had, x: v1_combine(rank, had, x)),
        "low": (rank.low, lambda had, x: low_combine(rank, had, x=x)),
        "V2": (rank.elastic, lambda had, x: rank.v2.combine(x, had[3])),
        "hybrid": (
            lambda: rank.hybrid.dispatch(rank.x, topk_idx=rank.ids),
            lambda had, x: rank.hybrid.combine(x, handle=had[3]),
        ),
    }  # fmt: skip
    first, combine = calls[kind]
    had = first()
    if comm.rank == 0:
        with pytest.raises(weft.InvalidArgument, match="64"):
            combine(had, torch.cat([had[0]] * 2, dim=-1))
        with contextlib.suppress(weft.PeerTimeout, weft.PeerLost):
            comm.meet(60.0)
        return "refused"
    with pytest.raises(weft.PeerTimeout, match="allowed is"):
        combine(had, had[0])
    return "told"


@pytest.mark.parametrize("kind", ["V1", "low", "V2", "hybrid"])
def test_peers_are_told_of_a_refusal(kind: str) -> None:
    assert weft.spawn(peers_are_told, 2, (kind,), device="cpu") == ["refused", "told"]


def test_ids_out_of_range() -> None:
    weft.spawn(ids_out_of_range, 1, device="cpu")


@pytest.mark.parametrize("kind", ["v1", "low", "v2", "hybrid"])
def test_a_lost_rank_is_named(kind: str) -> None:
    found = weft.spawn(with_a_lost_rank, 3, (kind,), device="cpu", on_failure="return")
    assert [found[0], found[2]] == ["named", "named"]
    assert isinstance(found[1], weft.PeerLost)


def test_variables_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(comm: weft.Communicator) -> None:
        for name, value in (
            ("WEFT_DEEP_EP_MAX_TOKENS", "many"),
            ("WEFT_DEEP_EP_TIMEOUT_S", "-1"),
            ("WEFT_DEEP_EP_DEVICE", "tpu"),
        ):
            monkeypatch.setenv(name, value)
            with pytest.raises(weft.InvalidArgument, match=name):
                deep_ep.Buffer(comm)
            monkeypatch.delenv(name)
        monkeypatch.setenv("WEFT_DEEP_EP_MAX_TOKENS", "3000")
        monkeypatch.setenv("WEFT_DEEP_EP_TIMEOUT_S", "7")
        rank = Rank(comm)
        ep = rank.normal()[4].ep
        assert (ep.max_tokens_per_rank, ep.deadline_s) == (3000, 7.0)

    weft.spawn(body, 1, device="cpu")
