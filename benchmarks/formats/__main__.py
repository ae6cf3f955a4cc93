"""Compiles, trains and prints the tables; writes JSON and a picture on request."""

import argparse
import pathlib
from collections.abc import Sequence

import jax

from benchmarks.compiled import missing
from benchmarks.formats import (
    chips,
    experts,
    flax_modules,
    outliers,
    recipes,
    training,
    transformers,
    wire,
)
from benchmarks.report import stamp, write


def main(argv: Sequence[str] | None = None) -> None:
    """Prints all tables of number formats."""
    parser = argparse.ArgumentParser("python -m benchmarks.formats")
    parser.add_argument(
        "--chips", nargs="*", choices=chips.CHIPS, default=[*chips.CHIPS]
    )
    parser.add_argument("--sizes", nargs="*", type=int, default=[*chips.WIDTHS])
    parser.add_argument("--tokens", type=int, default=chips.TOKENS)
    widths = [512, 768, 1024, 1536, 2048, 4096]
    parser.add_argument("--widths", nargs="*", type=int, default=widths)
    lengths = [512, 1024, 2048, 4096, 8192]
    parser.add_argument("--lengths", nargs="*", type=int, default=lengths)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=training.STEPS)
    parser.add_argument("--json", type=pathlib.Path, help="folder to write to")
    parser.add_argument("--picture", type=pathlib.Path, help="folder to draw to")
    options = parser.parse_args(argv)
    for chip in {"h100", *experts.CHIPS, *options.chips}:
        if missing(chip):
            raise SystemExit(missing(chip))
    # Flax promotes by itself where precision is written by hand.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    on_chips = [
        chips.measure(chip, width, name, options.tokens)
        for chip in options.chips
        for width in options.sizes
        for name in chips.FORMATS
    ]
    print(chips.table(on_chips), flush=True)
    compared = [transformers.compare(**size) for size in transformers.MODELS]
    print("\n" + transformers.models_table(compared), flush=True)
    every_size = transformers.EVERY_SIZE
    wide = [transformers.compare(width=n, rules=every_size) for n in options.widths]
    print("\n" + transformers.models_table(wide), flush=True)
    long = [transformers.compare(length=n) for n in options.lengths]
    print("\n" + transformers.models_table(long), flush=True)
    made = [
        recipes.measure_recipe(name, at)
        for at in ("h100", "b200")
        for name in recipes.RECIPES
    ]
    print("\n" + recipes.recipes_table(made), flush=True)
    stacked = [recipes.measure_stacked(name) for name in recipes.STACKED]
    print("\n" + recipes.recipes_table(stacked, recipes.STACK), flush=True)
    sent = [wire.measure_sent(*case) for case in wire.CASES]
    print("\n" + wire.sent_table(sent), flush=True)
    mixtures = [
        experts.measure_mixture(chip, *size, variant)
        for chip in experts.CHIPS
        for size in experts.SIZES
        for variant in experts.VARIANTS
    ]
    print("\n" + experts.mixtures_table(mixtures), flush=True)
    peers = [flax_modules.measure(variant) for variant in flax_modules.VARIANTS]
    print("\n" + flax_modules.compiled_table(peers), flush=True)
    large = [row for name in chips.FORMATS for row in outliers.measure_outliers(name)]
    print("\n" + outliers.outliers_table(large), flush=True)
    trained = [
        row
        for task in training.TASKS
        for seed in range(options.seeds)
        for row in training.train(task, seed, options.steps)
    ]
    print("\n" + training.trained_table(trained))
    write(
        options.json,
        "formats",
        stamp(tokens=options.tokens, steps=options.steps),
        chips=on_chips,
        models=compared,
        widths=wide,
        lengths=long,
        recipes=made,
        stacked=stacked,
        sent=sent,
        experts=mixtures,
        flax=peers,
        outliers=large,
        trained=trained,
    )
    if options.picture:
        options.picture.mkdir(parents=True, exist_ok=True)
        transformers.draw(wide, long, options.picture / "float8.png")


if __name__ == "__main__":
    main()
