"""Types of arrays as text, for messages."""

from jmp_lite.casting.dtypes import is_array
from jmp_lite.casting.types import Leaf


def type_of(leaf: Leaf) -> str:
    """Returns the dtype and the shape of an array as text: ``float32[2, 3]``."""
    if not is_array(leaf):
        return repr(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"
