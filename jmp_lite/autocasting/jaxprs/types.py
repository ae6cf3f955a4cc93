"""The types of what a jaxpr consists of, as far as this library reads them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

Dtype: TypeAlias = np.dtype[Any]
PyTree: TypeAlias = Any
Function: TypeAlias = Callable[..., Any]
"""A function of a user's, of which nothing is known."""
Array: TypeAlias = jax.Array
"""An array, a tracer, or a number of NumPy that stands for one."""


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
        """How many numbers it has."""
        ...

    @property
    def sharding(self) -> Any:
        """How it is sharded, where types say so."""
        ...

    @property
    def manual_axis_type(self) -> Any:
        """Over which mapped axes it varies."""
        ...

    def update(self, **changes: Any) -> "Aval":
        """Returns the type with something changed."""
        ...

    def str_short(self) -> str:
        """Returns the type in words."""
        ...


class Var(Protocol):
    """A variable of a jaxpr, or a literal."""

    @property
    def aval(self) -> Aval:
        """Its type."""
        ...


class Literal(Var, Protocol):
    """A number that is written into a jaxpr."""

    @property
    def val(self) -> Any:
        """The number."""
        ...


class Primitive(Protocol):
    """An operation."""

    name: str
    multiple_results: bool

    def bind(self, *operands: Any, **params: Any) -> Any:
        """Applies it."""
        ...

    def get_bind_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters with which it is bound."""
        ...


class Eqn(Protocol):
    """An equation: a primitive applied to variables."""

    @property
    def primitive(self) -> Primitive:
        """What it applies."""
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
        """Its parameters, which ``compat`` alone reads."""
        ...

    @property
    def effects(self) -> Any:
        """Its effects."""
        ...

    @property
    def source_info(self) -> Any:
        """Where it stands in the code, and in which scopes."""
        ...

    @property
    def ctx(self) -> Any:
        """The settings that it was traced in."""
        ...


class Jaxpr(Protocol):
    """A jaxpr, closed or open; ``compat.parts`` takes it apart."""

    def pretty_print(self) -> str:
        """Returns it as text."""
        ...
