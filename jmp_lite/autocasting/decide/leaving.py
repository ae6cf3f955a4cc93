"""Decides how a value leaves a function of 16-bit values, or a scope, or enters a loop.

A function of one 16-bit value and a norm layer are float32 inside, and 16-bit outside,
unless all readers of the result demand float32.
"""

from jmp_lite.autocasting.decide.facts import Kind, Readers, Spec, State


def state_after_function(readers: Readers) -> State:
    """Returns the state of the result of a function of 16-bit values.

    Its readers do not all demand float32. If one of them amplifies a rounding error,
    the result is float32, but no longer deliberate.
    """
    return State.SOFT if readers.amplify else State.LOW


def state_after_scope(
    state: State | None, is_from_low: bool, readers: Readers
) -> State | None:
    """Returns the state of a result of a ``FULL_INSIDE`` scope outside of it.

    Args:
      state: its state inside.
      is_from_low: whether it is computed from a low value that entered the scope.
      readers: its readers outside.
    """
    if readers.demand_float32:
        return state
    return state_after_function(readers) if is_from_low else State.SOFT


def spec_in_loop(spec: Spec) -> Spec:
    """Returns the spec of a value that every step of a loop reads.

    A 16-bit one is float32, and cast at each use, as a parameter is. Otherwise its
    gradient would add up in 16 bits over the steps.
    """
    return Spec(State.SOFT, Kind.GIVEN) if spec.state is State.LOW else spec
