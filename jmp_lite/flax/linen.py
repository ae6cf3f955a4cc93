"""Flax linen: parts of a module in 16 bits, and loss scales in checkpoints.

A module is never changed: each function returns a new one, with the same parameters
under the same names. Importing this module registers the loss scales with
``flax.serialization``.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, SupportsIndex, TypeAlias, TypeVar

import flax.linen as nn
import jax
from flax import serialization
from jax.typing import DTypeLike

from jmp_lite.casting.dtypes import parse_dtype
from jmp_lite.casting.types import Dtype, Leaf, PyTree
from jmp_lite.flax.nnx_variables import (
    Selector,
    as_tuple,
    check_selector,
    is_selected,
    nothing_selected,
)
from jmp_lite.jaxprs import source
from jmp_lite.scaling.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale

Module = TypeVar("Module", bound=nn.Module)
Args = ParamSpec("Args")
Result = TypeVar("Result")
Scale = TypeVar("Scale", NoOpLossScale, StaticLossScale, DynamicLossScale)
Method: TypeAlias = Callable[..., Any] | str | None
"""A method of a module, or its name; None for ``__call__``."""


def to_float(module: Module, dtype: DTypeLike, where: Selector = None) -> Module:
    """Returns a module that computes in a dtype, or of which parts do.

    It sets the field ``dtype`` of each selected module that has one. Such a module
    casts its inputs and parameters to this dtype. Everything inside of a selected
    module computes in the dtype too. Parameters stay in their ``param_dtype``, and
    variables keep their names, so checkpoints do not change. ``nn.SpectralNorm`` and
    ``nn.WeightNorm`` keep their dtype; the layer inside computes in the new one.

    Args:
      module: an unbound linen module.
      dtype: a floating-point dtype or its name.
      where: the parts: a class of modules; a regular expression for the path of a
        submodule (``"encoder/Dense_0"``); a tuple of both; None for all.

    Returns:
      A module of a subclass, with the same name.

    Raises:
      TypeError: ``module`` is not a linen module, or ``where`` has another type.
      ValueError: the dtype is unknown, or ``module`` is part of another module. Or, in
        a call of the module: ``where`` selects nothing that has a dtype. After
        ``init``, a call may leave out a selected part that has variables; and if
        ``where`` contains a class and selects nothing, the call only warns.

    Source: MindSpore's ``cell.to_float``; Haiku's ``mixed_precision.set_policy``.

    Example:
      >>> import flax.linen as nn
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jmp_lite.linen
      >>> model = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)])
      >>> low = jmp_lite.linen.to_float(model, "bfloat16", "layers_2")
      >>> x = jnp.ones((1, 3))
      >>> params = low.init(jax.random.key(0), x)
      >>> jax.tree.leaves(params)[0].dtype, low.apply(params, x).dtype
      (dtype('float32'), dtype(bfloat16))
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"Expected a linen module, got {type(module).__name__}. For nnx modules "
            "use jmp_lite.nnx.to_float."
        )
    if isinstance(module.parent, nn.Module) and module.name is not None:
        raise ValueError(
            f"Expected a module that no other one contains, got {module.name!r} of "
            f"{type(module.parent).__name__}: its name is taken. Call to_float with "
            f"the whole model and where={module.name!r}, make the part in setup, or "
            "set its own field dtype."
        )
    check_selector(where)
    cls = _floating_class(type(module), parse_dtype(dtype), where)
    fields = {
        field.name: getattr(module, field.name)
        for field in dataclasses.fields(module)
        if field.init
    }
    return cls(**fields)


@functools.cache
def _floating_class(cls: type[Module], dtype: Dtype, where: Selector) -> type[Module]:
    """Returns a subclass whose methods run its parts in a dtype."""

    def floating(
        method: Callable[Concatenate[Module, Args], Result],
    ) -> Callable[Concatenate[Module, Args], Result]:
        @functools.wraps(method)
        def call(self: Module, *args: Args.args, **kwargs: Args.kwargs) -> Result:
            # An unbound module has no parts yet, such as a cell that makes its carry.
            if getattr(self, "scope", None) is None:
                return method(self, *args, **kwargs)
            parts = _PartCaster(self, dtype, where)
            with nn.intercept_methods(parts.intercept):
                out = method(self, *args, **kwargs)
            if method is cls.__call__ and not parts.is_any_cast:
                _report_no_cast(self, parts, where)
            return out

        return call

    def taking_methods(run: Callable[..., Result]) -> Callable[..., Result]:
        # `Model.encode` is the original class's function, not the subclass's.
        @nn.nowrap
        @functools.wraps(run)
        def enter(
            self: Module, *args: Any, method: Method = None, **kwargs: Any
        ) -> Result:
            method = _as_function(self, method)
            if callable(method):
                method = floating(method)
            return run(self, *args, method=method, **kwargs)

        return enter

    @nn.nowrap
    def reduce_ex(self: Module, protocol: SupportsIndex) -> tuple[object, ...]:
        # Not by the name of the class, which is that of the original.
        _, _, *state = cls.__reduce_ex__(self, protocol)
        made_of = vars(type(self)).get(_MADE_OF, (type(self),))
        return _make_empty, made_of, *state

    def body(namespace: dict[str, Any]) -> None:
        made_of = *vars(cls).get(_MADE_OF, (cls,)), (dtype, where)
        methods = {name: getattr(cls, name) for name in _methods(cls)}
        namespace.update({name: floating(method) for name, method in methods.items()})
        namespace.update(apply=taking_methods(cls.apply))
        namespace.update(init_with_output=taking_methods(cls.init_with_output))
        namespace.update({"__reduce_ex__": reduce_ex, _MADE_OF: made_of})
        namespace.update(__module__=cls.__module__, __qualname__=cls.__qualname__)
        namespace.update(__doc__=cls.__doc__)

    return types.new_class(cls.__name__, (cls,), exec_body=body)


def _report_no_cast(module: nn.Module, parts: "_PartCaster", where: Selector) -> None:
    """Raises a ValueError, or warns, because a call has cast no part."""
    if parts.selected:
        raise ValueError(
            f"{where!r} selects parts without a field 'dtype': {', '.join(parts.seen)}."
        )
    message = nothing_selected(where, parts.seen.items())
    if not module.is_initializing():
        # A part may be left out of a call, such as a head for training. Its variables
        # show that it exists, and no variable shows the class of a part.
        strings = tuple(one for one in as_tuple(where) if isinstance(one, str))
        with_variables = {
            jax.tree_util.keystr(path[1:end], simple=True, separator="/")
            for path, _ in jax.tree.leaves_with_path(dict(module.variables))
            for end in range(2, len(path))
        }
        if any(is_selected(strings, path, None) for path in with_variables):
            return
        if strings != as_tuple(where):
            source.warn(f"In this call, {message}")
            return
    raise ValueError(message)


_MADE_OF = "_jmp_lite_made_of"
"""The attribute with the original class of a module, and the casts applied to it."""


def _make_empty(cls: type[nn.Module], *changes: tuple[Dtype, Selector]) -> nn.Module:
    """Returns an empty module of a class with casts, for ``pickle`` and ``copy``."""
    for dtype, where in changes:
        cls = _floating_class(cls, dtype, where)
    return object.__new__(cls)


def _as_function(module: nn.Module, method: Method) -> Method:
    """Returns the method that ``apply`` runs, as a function if the subclass lacks it.

    Names of methods stay names: the methods of the subclass run their parts in the
    dtype.
    """
    if isinstance(method, types.MethodType):
        return method.__func__
    if isinstance(method, str) and isinstance(getattr(module, method, None), nn.Module):
        return lambda self, *args, **kwargs: getattr(self, method)(*args, **kwargs)
    return method


def _methods(cls: type[nn.Module]) -> list[str]:
    """Returns the methods of a module that its author wrote and a user may call."""
    fields = {field.name for field in dataclasses.fields(cls)}
    written = [
        name for name in dir(cls) if not (name[0] == "_" or hasattr(nn.Module, name))
    ]
    return [
        name
        for name in ("__call__", *written)
        if isinstance(inspect.getattr_static(cls, name, None), types.FunctionType)
        and name not in fields
    ]


class _PartCaster:
    """Casts the parts of a module while one of its methods runs.

    Attributes:
      seen: the called parts, by path.
      selected: the paths of those that the selector matched.
      is_any_cast: whether a selected part, or one inside of it, has a dtype.
    """

    def __init__(self, module: nn.Module, dtype: Dtype, where: Selector) -> None:
        self._depth = len(module.path)
        self._dtype = dtype
        self._where = where
        self.selected: set[tuple[str, ...]] = set()
        self.seen: dict[str, nn.Module] = {}
        self.is_any_cast = False

    def intercept(
        self,
        method: Callable[..., Result],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Result:
        """Runs a method of a part, in the dtype if the part is selected."""
        module = context.module
        path = module.path[self._depth :]
        name = "/".join(path)
        self.seen[name] = module
        if is_selected(self._where, name, module):
            self.selected.add(path)
        is_inside = any(path[:n] in self.selected for n in range(len(path) + 1))
        # These store parameters in their dtype. The layer inside has one of its own.
        is_norm_of_weights = isinstance(module, nn.SpectralNorm | nn.WeightNorm)
        if is_inside and hasattr(module, "dtype") and not is_norm_of_weights:
            # Linen makes a new module for each call, so no other one changes.
            object.__setattr__(module, "dtype", self._dtype)
            self.is_any_cast = True
        return method(*args, **kwargs)


# --------------------------------------------------------------------- checkpoints


def _to_state_dict(scale: PyTree) -> dict[str, Leaf]:
    """Returns the leaves of a scale, which are the fields that change."""
    leaves = jax.tree.leaves_with_path(scale)
    return {path[-1].name: leaf for path, leaf in leaves}


def _from_state_dict(scale: Scale, state: Mapping[str, Leaf]) -> Scale:
    names = sorted(_to_state_dict(scale))
    # A scale without hysteresis counts no overflows.
    if "overflows" in names:
        state = {"overflows": None, **state}
    if sorted(state) != names:
        both = names, sorted(state)
        expected, got = (", ".join(each) or "no state" for each in both)
        raise ValueError(
            f"Expected a {type(scale).__name__} with {expected}, got {got}. Is it the "
            "state of another loss scale?"
        )
    return dataclasses.replace(scale, **state)


for _scale in (NoOpLossScale, StaticLossScale, DynamicLossScale):
    serialization.register_serialization_state(
        _scale, _to_state_dict, _from_state_dict, override=True
    )
