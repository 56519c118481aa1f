"""Guards against a new Call for every call: what the GPU engine keeps goes by the object."""

from __future__ import annotations

from weft.call.spec import Call, call_of, changed


def test_the_same_values_give_the_same_object() -> None:
    first = call_of(0, 1, -1, 64, 10.0, 0, 16, is_small=False)
    assert call_of(0, 1, -1, 64, 10.0, 0, 16, is_small=False) is first
    assert call_of(0, 1, -1, 65, 10.0, 0, 16, is_small=False) is not first


def test_a_backward_takes_the_same_object_every_time() -> None:
    plain, wired = Call(0, 1, -1, 64, 10.0, 0), Call(0, 1, -1, 64, 10.0, 0, wire=1, is_async=True)
    assert plain.in_backward() is plain
    assert wired.in_backward() is wired.in_backward()
    assert (wired.in_backward().wire, wired.in_backward().is_async, wired.in_backward().max_tokens) == (0, False, 64)
    bounded = Call(0, 1, 8, 64, 10.0, 0)
    assert bounded.in_backward() is bounded.in_backward()
    assert not bounded.in_backward().counts_dropped, "the forward has counted"
    assert changed(wired, zero_holes=False) is changed(wired, zero_holes=False)
    assert not changed(wired, zero_holes=False).zero_holes
