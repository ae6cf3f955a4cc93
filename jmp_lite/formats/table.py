"""The number formats that rules can request."""

import dataclasses
from typing import Any

from jmp_lite.casting.dtypes import unknown_name
from jmp_lite.formats.float8 import Float8, Float8Format
from jmp_lite.formats.number_format import NumberFormat, check_option
from jmp_lite.formats.rows import RowsFormat
from jmp_lite.formats.wide import WideFormat

FORMATS: dict[str, NumberFormat] = {
    "float8": Float8Format("float8"),
    # Below these sizes, quantization costs what the product gains: on an H100 for
    # float8, and on a TPU v5e for int8.
    "float8_rows": RowsFormat(
        "float8_rows", "float8_e4m3fn", "float8_e4m3fn", smallest=3000
    ),
    "int8": RowsFormat("int8", "int8", "int8", smallest=4000),
    "wide": WideFormat("wide"),
}
"""The formats that rules can request, by name."""


def get_format(name: str, **options: Any) -> NumberFormat:
    """Returns a number format of products with other options.

    Args:
      name: ``"int8"``, ``"float8_rows"``, ...
      **options: its options. Formats of 8 bits have those of ``Float8``. By rows,
        ``forward`` and ``backward`` are names of dtypes.

    Raises:
      ValueError: the name or an option is unknown.

    Example:
      >>> import jmp_lite as jmp
      >>> small_too = jmp.get_format("int8", smallest=0)
      >>> rules = jmp.get_rules("mixed").scope("mlp", small_too)
      >>> jmp.Rules.from_json(rules.to_json()) == rules
      True
    """
    known = FORMATS.get(name) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if known is None:
        raise unknown_name("format", str(name), FORMATS)
    names = options_of(known)
    if options and not names:
        raise ValueError(f"The format {name!r} has no options, got {[*options]}.")
    for option in options:
        check_option(f"option of {name}", option, [*names])
    # The options of float8 are an object of their own, which users write in rules, too.
    if isinstance(known, Float8Format):
        return Float8Format(name, Float8(**options))
    return dataclasses.replace(known, **options)


def options_of(number_format: NumberFormat) -> dict[str, Any]:
    """Returns the options of a number format, by name."""
    is_float8 = isinstance(number_format, Float8Format)
    record = number_format.options if is_float8 else number_format
    names = [field.name for field in dataclasses.fields(record)]
    return {name: getattr(record, name) for name in names if name != "name"}
