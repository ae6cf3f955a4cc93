"""What a benchmark writes: its figures, with their provenance.

A figure is kept with the date, the versions and the settings of the run that made it.
"""

import contextlib
import datetime
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jmp_lite")
_PEERS = ("jmp", "mixed-precision-for-JAX")
WIDTH = 88
"""The longest line of a table: a longer one scrolls on a page of 1,400 pixels."""


def stamp(**settings: Any) -> dict[str, Any]:
    """Returns the date and the versions that figures belong to, and their settings."""
    found = {"python": platform.python_version()}
    for name in (*_PACKAGES, *_PEERS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {"date": datetime.date.today().isoformat(), "versions": found, **settings}


def device_name() -> str:
    """Returns what JAX computes on, as ``"cpu: cpu"``."""
    device = jax.devices()[0]
    return f"{device.platform}: {device.device_kind}"


def joined(parts: Iterable[str], start: str = "") -> str:
    """Returns parts after each other, with commas, in lines of at most ``WIDTH``."""
    lines, line = list[str](), start
    for part in parts:
        longer = f"{line}, {part}" if line and line != start else f"{line}{part}"
        if len(longer) < WIDTH or line in ("", start):
            line = longer
        else:
            lines, line = [*lines, f"{line},"], part
    return "\n".join([*lines, line])


def write(
    folder: pathlib.Path | None,
    name: str,
    told: Mapping[str, Any],
    **tables: Sequence[Any],
) -> None:
    """Writes a stamp and tables as JSON; without a folder it does nothing.

    Args:
      folder: where to; it is made if it is not there.
      name: of the file, without its ending.
      told: what ``stamp`` has returned, and more.
      **tables: rows, named tuples, under the name of their table.
    """
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    rows = {key: [row._asdict() for row in table] for key, table in tables.items()}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**told, **rows}, indent=1) + "\n")
