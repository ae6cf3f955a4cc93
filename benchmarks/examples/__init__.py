"""The models of Flax's examples, each with a twin whose precision is written by hand.

They are made as in `benchmarks.models`: with ``dtype=None`` as their authors write them
in float32, or with a 16-bit dtype that goes to Flax's own ``dtype=``, with casts where
a careful author puts them. The layers have the names of the examples. There is no
dropout. Tokens of 0 are padding.
"""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.examples.gemma import gemma
from benchmarks.examples.images import imagenet_resnet, ppo, vae
from benchmarks.examples.recurrent import seq2seq, sst2
from benchmarks.examples.transformers import lm1b, wmt
from benchmarks.models import Model

EXAMPLES: Mapping[str, tuple[Callable[..., Model], dict[str, Any]]] = {
    "imagenet": (
        imagenet_resnet,
        {"size": 32, "batch": 8, "stages": (1, 1), "width": 8, "classes": 10},
    ),
    "lm1b": (
        lm1b,
        {
            "depth": 2,
            "width": 32,
            "heads": 8,
            "hidden": 64,
            "vocabulary": 64,
            "batch": (2, 16),
        },
    ),
    "wmt": (
        wmt,
        {
            "depth": 1,
            "width": 32,
            "heads": 8,
            "hidden": 64,
            "vocabulary": 64,
            "batch": (2, 16),
        },
    ),
    "gemma": (
        gemma,
        {
            "depth": 2,
            "width": 64,
            "heads": 4,
            "groups": 2,
            "head": 16,
            "hidden": 64,
            "vocabulary": 64,
            "batch": (4, 32),
        },
    ),
    "seq2seq": (seq2seq, {"hidden": 32, "batch": 8, "length": 12}),
    "sst2": (
        sst2,
        {"hidden": 32, "embedding": 16, "batch": 8, "length": 12, "vocabulary": 64},
    ),
    "vae": (vae, {"hidden": 64, "latents": 8, "pixels": 49, "batch": 32}),
    "ppo": (ppo, {"batch": 16, "size": 36, "width": 8, "hidden": 32}),
}
