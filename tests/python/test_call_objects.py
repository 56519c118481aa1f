"""Guards against options and calls that change on their way: what is kept for calls goes by them."""

from __future__ import annotations

from weft.call.options import CombineOptions, DispatchOptions, options_of
from weft.call.spec import Call, call_of_numbers, numbers_in_backward


def test_numbers_make_the_same_call() -> None:
    made = Call(1, 8, 5, 64, 10.0, 1, 16, wire=1, is_small=True, counts_dropped=False)
    assert vars(call_of_numbers(made.numbers, 10.0)) == vars(made)
    assert call_of_numbers(made.numbers, 11.0).deadline_s == 11.0


def test_the_call_of_a_backward() -> None:
    plain, wired = Call(0, 1, -1, 64, 10.0, 0), Call(0, 1, -1, 64, 10.0, 0, wire=1, is_async=True)
    assert plain.in_backward() is plain
    assert (wired.in_backward().wire, wired.in_backward().is_async, wired.in_backward().max_tokens) == (0, False, 64)
    assert not Call(0, 1, 8, 64, 10.0, 0).in_backward().counts_dropped, "the forward has counted"


def test_numbers_of_a_backward() -> None:
    call = Call(1, 8, 5, 64, 10.0, 1, 16, wire=1, is_small=True)
    assert numbers_in_backward(call.numbers) == call.in_backward().numbers


def test_options_of_equal_values_and_types_are_one_object() -> None:
    first = options_of(CombineOptions, None, None, "auto", False, False, 0, True, None)
    assert options_of(CombineOptions, None, None, "auto", False, False, 0, True, None) is first
    assert options_of(CombineOptions, None, None, "auto", False, False, False, True, None) is not first
    assert vars(first) == vars(CombineOptions())
    assert options_of(DispatchOptions).zero_holes is True
