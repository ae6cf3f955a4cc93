"""All programs of the sweep, by field."""

from collections.abc import Mapping, Sequence

from benchmarks.sweep import (
    contrastive,
    generative,
    graphs_sparse,
    optimization,
    physics,
    reinforcement,
    sequences,
    signal,
    statistics,
    vision_geometry,
)
from benchmarks.sweep.program import Entry

FIELDS: Mapping[str, Sequence[Entry]] = {
    "contrastive": contrastive.ENTRIES,
    "generative": generative.ENTRIES,
    "sequences": sequences.ENTRIES,
    "vision_geometry": vision_geometry.ENTRIES,
    "reinforcement": reinforcement.ENTRIES,
    "statistics": statistics.ENTRIES,
    "optimization": optimization.ENTRIES,
    "graphs_sparse": graphs_sparse.ENTRIES,
    "signal": signal.ENTRIES,
    "physics": physics.ENTRIES,
}


def chosen(patterns: Sequence[str] = ()) -> list[tuple[str, Entry]]:
    """Returns the fields and entries whose names contain one of some texts.

    Args:
      patterns: the texts, in any case; all programs if there are none. A text may be
        the name of a field.

    Raises:
      SystemExit: no name contains one of the texts.
    """
    every = [(field, entry) for field, of in FIELDS.items() for entry in of]
    texts = [text.lower() for text in patterns]
    found = [
        (field, entry)
        for field, entry in every
        if not texts or field in texts or any(t in entry.name.lower() for t in texts)
    ]
    if not found:
        names = ", ".join(entry.name for _, entry in every)
        asked = ", ".join(patterns)
        raise SystemExit(f"No such program: {asked}. There are: {names}.")
    return found
