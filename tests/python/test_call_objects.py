"""Guards against a new Call for every call: what the GPU engine keeps goes by the object."""

from __future__ import annotations

from weft.call.options import CombineOptions, DispatchOptions, options_of
from weft.call.spec import Call, call_of_numbers, changed, numbers_in_backward


def test_the_same_values_give_the_same_object() -> None:
    made = Call(1, 8, 5, 64, 10.0, 1, 16, wire=1, is_small=True, counts_dropped=False)
    first = call_of_numbers(made.numbers, 10.0)
    assert vars(first) == vars(made)
    assert call_of_numbers(list(made.numbers), 10.0) is first
    assert call_of_numbers(made.numbers, 11.0) is not first


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


def test_numbers_of_a_backward() -> None:
    call = Call(1, 8, 5, 64, 10.0, 1, 16, wire=1, is_small=True)
    assert numbers_in_backward(call.numbers) == call.in_backward().numbers


def test_options_of_equal_values_and_types_are_one_object() -> None:
    first = options_of(CombineOptions, None, None, "auto", False, False, 0, True, None)
    assert options_of(CombineOptions, None, None, "auto", False, False, 0, True, None) is first
    assert options_of(CombineOptions, None, None, "auto", False, False, False, True, None) is not first
    assert vars(first) == vars(CombineOptions())
    assert options_of(DispatchOptions).zero_holes is True
