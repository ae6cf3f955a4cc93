"""Types of the parts of a jaxpr that this library reads."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax._src.ad_util import Zero
from jax.extend.core import Effect
from jax.extend.source_info_util import SourceInfo
from jax.sharding import ManualAxisType, NamedSharding

Dtype: TypeAlias = np.dtype[Any]
PyTree: TypeAlias = Any
Function: TypeAlias = Callable[..., Any]
"""A user's function, with an unknown signature."""
Array: TypeAlias = jax.Array
"""An array, or a tracer of one."""
Tangent: TypeAlias = jax.Array | Zero
"""A tangent or a cotangent: an array, or a zero of JAX that is not one."""
Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""The axes of the left and of the right operand of a product."""


# JAX's own classes differ between 0.10 and 0.12, and most are not public: protocols say
# what this library reads of them.
class Aval(Protocol):
    """The type of a value, such as ``float32[4,8]``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; a size may be symbolic."""
        ...

    @property
    def dtype(self) -> Dtype:
        """Its dtype."""
        ...

    @property
    def size(self) -> int:
        """The number of its elements."""
        ...

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        ...

    @property
    def sharding(self) -> NamedSharding:
        """Its sharding, if types state it."""
        ...

    @property
    def manual_axis_type(self) -> ManualAxisType:
        """The mapped axes over which it varies."""
        ...

    def update(self, **changes: Any) -> "Aval":
        """Returns the type with some fields changed."""
        ...

    def to_tangent_aval(self) -> "Aval":
        """Returns the type of a derivative; that of an integer or a key is float0."""
        ...

    def str_short(self) -> str:
        """Returns the type as text."""
        ...


class Var(Protocol):
    """A variable of a jaxpr, or a literal."""

    @property
    def aval(self) -> Aval:
        """Its type."""
        ...


class Literal(Var, Protocol):
    """A number in a jaxpr."""

    @property
    def val(self) -> Any:
        """The number."""
        ...


class Primitive(Protocol):
    """An operation."""

    name: str
    multiple_results: bool

    def bind(self, *operands: Array, **params: Any) -> Any:
        """Applies it to operands."""
        ...

    def get_bind_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters for ``bind``."""
        ...


class Eqn(Protocol):
    """An equation: a primitive applied to variables."""

    @property
    def primitive(self) -> Primitive:
        """The primitive."""
        ...

    @property
    def invars(self) -> Sequence[Var]:
        """Its operands."""
        ...

    @property
    def outvars(self) -> Sequence[Var]:
        """Its results."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """Its parameters; only files of ``jaxprs`` read them."""
        ...

    @property
    def effects(self) -> AbstractSet[Effect]:
        """Its side effects."""
        ...

    @property
    def source_info(self) -> SourceInfo:
        """Its line of code and its scopes."""
        ...

    @property
    def ctx(self) -> Any:
        """The settings of its trace."""
        ...

    def replace(self, **changes: Any) -> "Eqn":
        """Returns the equation with some fields changed."""
        ...


class Jaxpr(Protocol):
    """A jaxpr, closed or open; ``structure.parts`` returns its parts."""

    def pretty_print(self) -> str:
        """Returns it as text."""
        ...
