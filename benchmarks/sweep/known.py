"""Programs whose gradient in ``mixed`` is worse than in both other ways, and why."""

from collections.abc import Mapping

FLAGGED: Mapping[tuple[str, str], str] = {
    ("Gumbel VQ", "float16"): "a relu flips in one seed of seven",
    ("C51", "float16"): "an argmax flips in one seed of seven",
    ("deep Ritz", "bfloat16"): "a cube rounds after each multiplication (in float32 a "
    "scan with remat would move 1.6 % more bytes)",
    ("deep Ritz", "float16"): "the bias is added in 16 bits, and the second derivative "
    "of a cubed relu reads the sum",
}
"""(program, dtype) -> the cause."""
