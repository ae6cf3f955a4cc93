"""Gathers that read no element of their operand twice.

JAX's transpose of a gather adds the cotangent to an array of zeros, at the places that
the indices name. If no two indices name one place, nothing adds up, and the transpose
is a selection::

    where(iota == index, cotangent, 0)

XLA fuses a selection with the ops around it, unlike a scatter.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax.slicing import gather_p
from jax.extend import core

from jmp_lite.jaxprs import products, sharding, structure
from jmp_lite.jaxprs.types import Array, Aval, Dtype, Eqn, Tangent, Var


def fills_with_number(eqn: Eqn) -> bool:
    """Whether a gather returns a number in place of rows that are out of range."""
    return eqn.params.get("fill_value") is not None


# ---------------------------------------------------------------- finding such gathers


def selecting(eqn: Eqn, definitions: "Definitions") -> Eqn | None:
    """Returns a gather with the same results, whose transpose is a selection.

    The gather takes one index along one axis, for each index of other axes, such as
    ``take_along_axis(x, labels[:, None], 1)`` and ``x[arange(len(x)), labels]``.

    Args:
      eqn: an equation.
      definitions: the definitions of the variables in its jaxpr.

    Returns:
      The equation; None for any other gather, and any other op.
    """
    if eqn.primitive is not gather_p:
        return None
    operand, indices = eqn.invars
    dimensions = eqn.params["dimension_numbers"]
    # ``x[arange(len(x)), labels]`` names the rows, too; ``take_along_axis`` does not.
    if len(dimensions.start_index_map) > 1:
        rows = _rows(dimensions, operand, indices, definitions)
        if rows is None:
            return None
        dimensions, indices = rows
    sizes = eqn.params["slice_sizes"]
    if not _reads_once(dimensions, sizes, operand.aval.shape, indices.aval.shape):
        return None
    changed = {
        "dimension_numbers": dimensions,
        "indices_are_sorted": False,
        "unique_indices": False,
    }
    return eqn.replace(
        primitive=_SELECTING_GATHER,
        invars=[operand, indices],
        params={**eqn.params, **changed},
    )


def _reads_once(
    dimensions: lax.GatherDimensionNumbers,
    sizes: Sequence[int],
    shape: Sequence[int],
    of_indices: Sequence[int],
) -> bool:
    """Whether a gather takes one index of one axis for each index of other axes."""
    if len(dimensions.start_index_map) != 1 or not dimensions.operand_batching_dims:
        return False
    (axis,) = dimensions.start_index_map
    for i, (size, full) in enumerate(zip(sizes, shape, strict=True)):
        is_batch = i in dimensions.operand_batching_dims
        if not is_batch and size != (1 if i == axis else full):
            return False
    batch = dimensions.start_indices_batching_dims
    # Several labels of each row may be equal.
    free = [size for i, size in enumerate(of_indices[:-1]) if i not in batch]
    return all(size == 1 for size in free)


def _rows(
    dimensions: lax.GatherDimensionNumbers,
    operand: Var,
    indices: Var,
    definitions: "Definitions",
) -> tuple[lax.GatherDimensionNumbers, Var] | None:
    """Returns a gather of ``x[arange(len(x)), labels]`` as a batch of gathers.

    Returns:
      Its dimension numbers and its indices, the labels; None for any other gather.
    """
    made = definitions.maker(indices, "concatenate")
    rank = len(indices.aval.shape)
    if made is None or made.params["dimension"] != rank - 1:
        return None
    columns = made.invars
    if sharding.is_type_sharded(operand.aval) or len(columns) != indices.aval.shape[-1]:
        return None
    pairs = dict(
        zip(
            dimensions.operand_batching_dims,
            dimensions.start_indices_batching_dims,
            strict=True,
        )
    )
    labels: dict[int, Var] = {}
    for axis, column in zip(dimensions.start_index_map, columns, strict=True):
        counted = definitions.counted_axis(column)
        size = operand.aval.shape[axis]
        # ``x[arange(1), labels]`` reads one row for all labels, perhaps one element
        # twice.
        is_row = counted is not None and column.aval.shape[counted] == size
        is_row = is_row and axis in dimensions.collapsed_slice_dims
        # A count along the axis of the index vectors is a part of one index, and no
        # row.
        is_row = is_row and counted != rank - 1
        if counted is not None and is_row and counted not in pairs.values():
            pairs[axis] = counted
        else:
            labels[axis] = column
    # With two labels, ``x[arange(4), a, b]``, neither axis is selected alone.
    if len(labels) != 1:
        return None
    ((axis, column),) = labels.items()
    changed = dimensions._replace(
        start_index_map=(axis,),
        collapsed_slice_dims=tuple(
            i for i in dimensions.collapsed_slice_dims if i not in pairs
        ),
        operand_batching_dims=tuple(sorted(pairs)),
        start_indices_batching_dims=tuple(pairs[i] for i in sorted(pairs)),
    )
    return changed, column


class Definitions:
    """The equations and constants that define the variables of a jaxpr.

    Args:
      parts: the parts of the jaxpr.
    """

    def __init__(self, parts: structure.Parts) -> None:
        self._parts = parts

    @functools.cached_property
    def _makers(self) -> Mapping[Var, Eqn]:
        return {var: eqn for eqn in self._parts.eqns for var in eqn.outvars}

    @functools.cached_property
    def _constants(self) -> Mapping[Var, Array]:
        return dict(zip(self._parts.constvars, self._parts.consts, strict=True))

    def maker(self, atom: Var, op: str) -> Eqn | None:
        """Returns the equation of an op that makes a variable, or None."""
        eqn = None if structure.is_literal(atom) else self._makers.get(atom)
        return eqn if eqn is not None and eqn.primitive.name == op else None

    def counted_axis(self, atom: Var) -> int | None:
        """Returns the axis along which a variable counts 0, 1, 2, ..., or None."""
        axis = self._counted_axis(atom)
        if axis is None or not structure.is_integer(atom):
            return None
        # A narrower dtype wraps around.
        most = np.iinfo(structure.dtype_of(atom)).max
        return axis if products.is_at_most(atom.aval.shape[axis] - 1, most) else None

    def _counted_axis(self, atom: Var) -> int | None:
        """Returns the axis, whatever the dtype of the variable is."""
        if structure.is_literal(atom):
            return None
        # ``x[np.arange(5), labels]``: NumPy's indices are constants of the jaxpr.
        if atom in self._constants:
            return _axis_of_constant(self._constants[atom])
        eqn = self._makers.get(atom)
        if eqn is None:
            return None
        op = eqn.primitive.name
        if op == "iota":
            return eqn.params["dimension"]
        # Of integers alone: ``arange(300.0).astype(bfloat16)`` repeats numbers.
        if op == "convert_element_type":
            return self.counted_axis(eqn.invars[0])
        if op == "select_n" and self._is_negative(*eqn.invars[:2]):
            # ``x[arange(n)]`` adds n to the negative numbers, of which there are none.
            return self.counted_axis(eqn.invars[1])
        if op == "broadcast_in_dim":
            (operand, *_), axis = eqn.invars, self.counted_axis(eqn.invars[0])
            if axis is None:
                return None
            new = eqn.params["broadcast_dimensions"][axis]
            # An axis of size 1 that is spread counts nothing.
            return new if operand.aval.shape[axis] == atom.aval.shape[new] else None
        return None

    def _is_negative(self, predicate: Var, number: Var) -> bool:
        """Whether a predicate is ``number < 0``, for numbers that count."""
        if predicate in self._constants:
            known = _numbers(self._constants[predicate])
            return known is not None and not known.any()
        eqn = self.maker(predicate, "lt")
        if eqn is None or eqn.invars[0] is not number:
            return False
        zero = eqn.invars[1]
        return structure.is_literal(zero) and zero.val == 0


def _numbers(constant: Array) -> np.ndarray | None:
    """Returns the numbers of a constant; None if this process does not have them."""
    # An array over several processes cannot be read in one of them.
    is_here = getattr(constant, "is_fully_addressable", True)
    is_known = is_here and not structure.is_tracer(constant)
    return np.asarray(constant) if is_known else None


def _axis_of_constant(constant: Array) -> int | None:
    """Returns the axis along which a constant counts 0, 1, 2, ..., or None."""
    numbers = _numbers(constant)
    if numbers is None or not np.issubdtype(numbers.dtype, np.integer):
        return None
    long = [axis for axis, size in enumerate(numbers.shape) if size > 1]
    if len(long) != 1:
        return None
    counted = np.arange(numbers.size)
    # Not ``[0, 1, 2, 3, 3]``, which reads a row twice.
    return long[0] if np.array_equal(numbers.ravel(), counted) else None


# ----------------------------------------------------------------- the selecting gather


class _Places(NamedTuple):
    """The axes of a gather's indices and result, as axes of its operand.

    Attributes:
      label: the axis of the operand that the indices index.
      of_indices: an axis of the operand for each axis of the indices but the last; None
        for an axis of size 1.
      of_result: the same for the axes of the result.
    """

    label: int
    of_indices: Sequence[int | None]
    of_result: Sequence[int | None]


def _places(
    dimensions: lax.GatherDimensionNumbers, rank: int, rank_of_indices: int
) -> _Places:
    (label,) = dimensions.start_index_map
    batch = dict(
        zip(
            dimensions.start_indices_batching_dims,
            dimensions.operand_batching_dims,
            strict=True,
        )
    )
    of_indices = [batch.get(i) for i in range(rank_of_indices - 1)]
    left = {*dimensions.collapsed_slice_dims, *batch.values()}
    offset = iter([i for i in range(rank) if i not in left])
    others = iter(of_indices)
    n_result = len(dimensions.offset_dims) + len(of_indices)
    of_result = [
        next(offset if i in dimensions.offset_dims else others) for i in range(n_result)
    ]
    of_result = [None if i == label else i for i in of_result]
    return _Places(label, of_indices, of_result)


def _spread(array: Array, places: Sequence[int | None], like: Aval) -> Array:
    """Broadcasts an array to a type, given the type's axis for each of its axes."""
    extra = [i for i, axis in enumerate(places) if axis is None]
    kept = [axis for axis in places if axis is not None]
    array = lax.squeeze(array, extra)
    order = sorted(range(len(kept)), key=kept.__getitem__)
    array = lax.transpose(array, order)
    return sharding.spread(array, sorted(kept), like)


def _transpose(
    cotangent: Any, operand: ad.UndefinedPrimal, indices: Array, **params: Any
) -> list[Tangent | None]:
    """Returns the cotangent of the operand: a selection."""
    if structure.is_zero(cotangent):
        return [type(cotangent)(operand.aval), None]
    like = operand.aval
    places = _places(params["dimension_numbers"], len(like.shape), indices.ndim)
    size = like.shape[places.label]
    labels = lax.squeeze(indices, [indices.ndim - 1])
    labels = lax.convert_element_type(labels, _index_dtype(labels))
    # Other modes read nothing, or a number, for an index out of range: it equals no
    # position, so its gradient is zero there, too.
    if params["mode"] == lax.GatherScatterMode.CLIP:
        last = jnp.asarray(size - 1, labels.dtype)  # It may be symbolic.
        labels = lax.clamp(labels.dtype.type(0), labels, last)
    counted = sharding.iota(labels.dtype, places.label, like)
    here = lax.eq(counted, _spread(labels, places.of_indices, like))
    spread = _spread(cotangent, places.of_result, like)
    return [lax.select(here, spread, lax.full_like(spread, 0)), None]


def _index_dtype(labels: Array) -> Dtype:
    """Returns a dtype that represents the labels and the size of their axis."""
    # ``uint8`` labels of 300 columns: 299 is no uint8.
    is_narrow = labels.dtype.itemsize < 4
    return np.dtype("int32") if is_narrow else labels.dtype


def _batch(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
    """Maps over the operand and the indices.

    Indices that are mapped alone share one operand, and may read an element twice. They
    get JAX's own gather.
    """
    if axes[0] is None:
        gather = functools.partial(gather_p.bind, **params)
        return jax.vmap(gather, axes)(*operands), 0
    size = operands[0].shape[axes[0]]
    operand, indices = (
        batching.bdim_at_front(each, axis, size)
        for each, axis in zip(operands, axes, strict=True)
    )
    old = params["dimension_numbers"]

    def moved(dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(1 + i for i in dims)

    dimensions = old._replace(
        offset_dims=moved(old.offset_dims),
        collapsed_slice_dims=moved(old.collapsed_slice_dims),
        start_index_map=moved(old.start_index_map),
        operand_batching_dims=(0, *moved(old.operand_batching_dims)),
        start_indices_batching_dims=(0, *moved(old.start_indices_batching_dims)),
    )
    changed = {
        "dimension_numbers": dimensions,
        "slice_sizes": (min(size, 1), *params["slice_sizes"]),
    }
    return _linear_gather.bind(operand, indices, **{**params, **changed}), 0


class _Gather:
    """The primitive of a gather whose derivative is a ``_linear_gather``."""

    name = "gather"
    multiple_results = False

    def get_bind_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the parameters for ``bind``."""
        return dict(params)

    def bind(self, operand: Array, indices: Array, **params: Any) -> Array:
        """Returns the gathered elements."""

        # Without a derivative it is JAX's own gather, for ``checkify`` and ``vmap``,
        # too.
        @jax.custom_jvp
        def gather(operand: Array, indices: Array) -> Array:
            return gather_p.bind(operand, indices, **params)

        @gather.defjvp
        def jvp(  # pyright: ignore[reportUnusedFunction]
            primals: Sequence[Array], tangents: Sequence[Array]
        ) -> tuple[Array, Array]:
            return gather(*primals), _jvp(tangents[0], *primals, **params)

        return gather(operand, indices)


_SELECTING_GATHER = _Gather()


def _jvp(tangent: Array, operand: Array, indices: Array, **params: Any) -> Array:
    """Returns the elements of a tangent; zero if an index is out of range."""
    del operand
    # The number in place of a row is constant.
    fill = {} if params["fill_value"] is None else {"fill_value": 0}
    return _linear_gather.bind(tangent, indices, **{**params, **fill})


# JAX's other transformations know gathers, but not this primitive. So it is in
# derivatives only.
_linear_gather = core.Primitive("gather")
_linear_gather.def_impl(gather_p.bind)
_linear_gather.def_effectful_abstract_eval(gather_p.abstract_eval)
mlir.register_lowering(
    _linear_gather, mlir.lower_fun(gather_p.bind, multiple_results=False)
)
batching.primitive_batchers[_linear_gather] = _batch
ad.defjvp(_linear_gather, _jvp, None)
ad.primitive_transposes[_linear_gather] = _transpose
