"""What is lost without each rule of the decisions.

Each rule is switched off alone. Where a program's trace does not change, nothing is
lost. Where it does, its errors are measured with the rule and without it: the programs
of the sweep, programs of the search for law 7, and ten models compiled for an H100.

    PYTHONPATH=tests python -m benchmarks.ablation.rules --json benchmarks/results

A row is written as soon as it is measured, and one that is there is not measured again:
``--rules`` names those that are.
"""

import argparse
import contextlib
import functools
import json
import math
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from search import law
from search.programs import Program, programs

import jmp_lite as jmp
from benchmarks import autocast, models
from benchmarks.ablation.rows import Cost, Lost, Row, rows_of, table
from benchmarks.compiled import compile_for, missing
from benchmarks.report import stamp, write
from benchmarks.sweep.collection import chosen
from benchmarks.sweep.measure import DTYPES, SEEDS, errors_of, in_float32
from benchmarks.sweep.program import Products, Random
from jmp_lite.autocasting import binding, walk
from jmp_lite.autocasting.decide import equation, readers, special_ops, values
from jmp_lite.autocasting.decide.facts import Mark, Readers
from jmp_lite.autocasting.decide.lookup import RuleLookup
from jmp_lite.ops import Precision

WORSE = 1.25
"""How many times larger an error has to be to count."""
DRAWS = range(5)

STORED = "transformer 24, scan"
MODELS: Mapping[str, Callable[[], models.Model]] = {
    **{
        name: functools.partial(autocast.MODELS[name][0])
        for name in (
            *("transformer 4, unrolled", STORED, "transformer 24, scan + remat"),
            *("resnet", "lstm", "mlp", "nnx", "flax seq2seq"),
        )
    },
    "norms after the blocks": lambda: _post_norm(),
    f"{STORED}, 16-bit parameters": lambda: _stored(autocast.MODELS[STORED][0]()),
}


def _post_norm() -> models.Model:
    """Blocks whose norms come last, as in BERT: the stream begins with one."""

    def norm(x: jax.Array) -> jax.Array:
        x = x - jnp.mean(x, -1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = norm(params["table"][tokens])
        for up, down in params["blocks"]:
            x = norm(x + jax.nn.gelu(x @ up) @ down)
        return jnp.mean(x * x)

    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    blocks = [(of(1024, 2048), of(2048, 1024))] * 4
    tokens = jax.ShapeDtypeStruct((16, 512), jnp.int32)
    return models.Model(loss, {"table": of(512, 1024), "blocks": blocks}, tokens)


def _stored(model: models.Model) -> models.Model:
    return model._replace(params=jmp.cast_tree(model.params, "bfloat16"))


Off = Callable[[], contextlib.AbstractContextManager[Any]]


class Rule(NamedTuple):
    """A rule of the decisions.

    Attributes:
      says: what it says.
      off: switches it off: a context manager.
      rules: the rules without it, where it is an option of them.
    """

    says: str
    off: Off = contextlib.nullcontext
    rules: jmp.Rules = jmp.get_rules("mixed")


def _never(*_: Any, **__: Any) -> bool:
    return False


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _replacing(*replaced: tuple[Any, str, Any]) -> Off:
    """Returns a context manager in which attributes are other ones."""

    @contextlib.contextmanager
    def off() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for place, name, new in replaced:
                stack.enter_context(mock.patch.object(place, name, new))
            yield

    return off


def _without_marks(marks: Mark) -> Off:
    found = RuleLookup.mark
    fewer = lambda self, eqn: found(self, eqn) & ~marks
    return _replacing((RuleLookup, "mark", fewer))


def _without_tail() -> Off:
    found = readers.UseAnalysis._reader

    def reader(self: Any, eqn: Any, op: str, *others: Any) -> Readers:
        kind = found(self, eqn, op, *others)
        follows = self._rules.match(op, others[-1]).precision is Precision.FOLLOW
        demands = Readers.FULL | Readers.OUTPUT
        return kind & ~demands | Readers.OTHER if follows else kind

    return _replacing((readers.UseAnalysis, "_reader", reader))


def _leaving_where_it_must() -> Off:
    found = walk.Walk._operands

    def operands(self: Any, eqn: Any, site: Any) -> Any:
        must = walk.params.op_of(eqn) in walk._CUSTOM_OR_CONTROL
        return found(self, eqn, site) if must else list(map(self._read, eqn.invars))

    return _replacing((walk.Walk, "_operands", operands))


def _early_casts() -> Off:
    def decide_low(
        op: Any,
        operands: Any,
        reason: Any,
        leader: Any = None,
        match: Any = None,
        **_: Any,
    ) -> Any:
        run, state = equation.Run.LOW, equation.State.LOW
        return equation.Decision(run, state, reason, leader, match)

    return _replacing((equation, "_decide_low", decide_low))


_MIXED = jmp.get_rules("mixed")
RULES: Mapping[str, Rule] = {
    "amplify": Rule(
        "log, sqrt, pow, quotients ... want float32 of their operand",
        _replacing((readers.UseAnalysis, "_amplified", lambda *_: [])),
    ),
    "order": Rule(
        "so do a sort and a comparison of two computed numbers",
        _replacing((readers, "_orders", _never)),
    ),
    "difference": Rule(
        "a difference of functions of one value wants them in float32",
        _without_marks(Mark.DIFFERENCE),
    ),
    "factor": Rule(
        "so does a product of many factors, in a loop or nested",
        _without_marks(Mark.FACTOR),
    ),
    "shift": Rule(
        "1 - g and a norm want an added number or bias, and g, in float32",
        _without_marks(Mark.NUMBER | Mark.SHIFT),
    ),
    "saturate": Rule(
        "tanh, logistic and erf want an added number or bias in float32",
        _replacing((readers, "SATURATING", frozenset())),
    ),
    "slope": Rule(
        "the slope of tanh and logistic is computed from their operand",
        _replacing((equation, "_loses_slope", _never)),
    ),
    "tail": Rule("what only float32 ops read is float32", _without_tail()),
    "demanded product": Rule(
        "a product is float32 for a cast to integers, a solver, or a phase",
        _replacing((special_ops, "demanded_by", _nothing)),
    ),
    "position": Rule(
        "sin and cos are float32", _replacing((equation, "POSITIONAL", frozenset()))
    ),
    "lookup": Rule(
        "a product with zeros and ones looks up, or counts, in float32",
        _without_marks(Mark.BINARY_LEFT | Mark.BINARY_RIGHT),
    ),
    "matrix power": Rule(
        "a power of one matrix, in a loop, is float32", _without_marks(Mark.POWER)
    ),
    "spread": Rule(
        "in float16, a product of exponentials is float32", _without_marks(Mark.SPREAD)
    ),
    "small": Rule(
        "a batch of small products is float32",
        _replacing((special_ops, "_is_small", _never)),
    ),
    "random": Rule(
        "random numbers are those of the trace", _without_marks(Mark.RANDOM)
    ),
    "late cast": Rule(
        "quotients, and what adds up in its derivative, are float32 inside",
        _early_casts(),
    ),
    "broadcast": Rule(
        "what is broadcast is broadcast in float32, then cast",
        _replacing((binding, "BROADCASTING", frozenset())),
    ),
    "raise once": Rule(
        "a 16-bit value that several float32 ops read is raised once",
        _replacing(
            (walk.Walk, "_is_raised", _never),
        ),
    ),
    "rounds nothing": Rule(
        "a choice of 16-bit values, and a scale by a power of two, are 16-bit",
        _replacing((equation, "_rounds_nothing", _never)),
    ),
    "one function": Rule(
        "a function of one 16-bit value, such as a norm, is float32 inside",
        _replacing(
            (equation, "is_one_function", _never), (values, "is_one_function", _never)
        ),
    ),
    "leaving": Rule(
        "float32 ops read the 16-bit result of such a function, if others do",
        _leaving_where_it_must(),
    ),
    "undecided norm": Rule(
        "a norm of an argument is undecided",
        _replacing((equation, "_is_undecided", _never)),
    ),
    "power": Rule(
        "in float16, a product of functions of one value is float32",
        _replacing((equation, "_is_power", _never)),
    ),
    "held move": Rule(
        "a move of what is stored in 16 bits or fewer moves these",
        _replacing((equation, "_dtype_of_all", _nothing)),
    ),
    **{
        f"pass {name}": Rule(f"the pass {name!r}", rules=_MIXED.without_pass(name))
        for name in _MIXED.passes
    },
}


# ---------------------------------------------------------------------------- errors


def _traced(fun: Callable[..., Any], *args: Any) -> int:
    """Returns the hash of a traced function as text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hash(re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(fun)(*args))))


class _Tally:
    """Adds up what programs lose."""

    def __init__(self) -> None:
        self._changed, self._not_finite = 0, 0
        self._worse = dict.fromkeys(DTYPES, 0)
        self._worst, self._one = 1.0, ""

    def add(self, name: str, dtype: str, before: float, after: float) -> None:
        self._changed, least = self._changed + 1, _LEAST[dtype]
        if math.isfinite(before) and not math.isfinite(after):
            self._not_finite += 1
            return
        ratio = (after + least) / (before + least)
        self._worse[dtype] += ratio > WORSE
        if ratio > self._worst:
            self._worst, self._one = ratio, f"{name}, {dtype}"

    def lost(self) -> Lost:
        return Lost(
            self._changed, self._not_finite, self._worse, self._worst, self._one
        )


_LEAST = {"bfloat16": 2.0**-12, "float16": 2.0**-15}
"""A sixteenth of a dtype's precision: smaller errors are equal."""


def _of_sweep(rule: Rule, names: Sequence[str]) -> Lost:
    tally = _Tally()
    for _, entry in chosen(names):
        program = entry.program()
        loss = functools.partial(program.loss, Products())
        inputs = [program.make(Random(seed)) for seed in SEEDS]
        for dtype in DTYPES:
            mixed = jmp.autocast(loss, compute_dtype=dtype)
            without = jmp.autocast(loss, rule.rules, compute_dtype=dtype)
            key = entry.name, dtype
            with rule.off():
                changed = _traced(jax.value_and_grad(without), *inputs[0])
            traced = functools.partial(_traced, jax.value_and_grad(mixed), *inputs[0])
            if changed == _once("trace", *key, make=traced):
                continue
            expected = in_float32(loss, inputs)
            with rule.off():
                after = errors_of(without, inputs, dtype, expected).all
            error = functools.partial(errors_of, mixed, inputs, dtype, expected)
            tally.add(*key, _once("error", *key, make=error).all, after)
    return tally.lost()


_with_all_rules: dict[object, Any] = {}


def _once(*key: object, make: Callable[[], Any]) -> Any:
    """Returns what ``make`` returned for a key at first: with all rules, it is one."""
    if key not in _with_all_rules:
        _with_all_rules[key] = make()
    return _with_all_rules[key]


@functools.cache
def _drawn(n: int) -> Sequence[Program]:
    found: list[Program] = []

    @seed(0)
    @settings(
        max_examples=n,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def draw(program: Program) -> None:
        found.append(program)

    draw()
    return found


def _of_search(rule: Rule, n: int) -> Lost:
    tally = _Tally()
    for i, program in enumerate(_drawn(n)):
        if i % 100 == 0:
            jax.clear_caches()  # Each program leaves its traces.
        args = law.draw_args(0)
        for dtype in DTYPES:
            mixed = jmp.autocast(program, compute_dtype=dtype)
            without = jmp.autocast(program, rule.rules, compute_dtype=dtype)
            key = f"program {i}", dtype
            with rule.off():
                changed = _traced(jax.value_and_grad(without), args)
            traced = functools.partial(_traced, jax.value_and_grad(mixed), args)
            if changed == _once("trace", *key, make=traced):
                continue
            with rule.off():
                after = _error(program, rule.rules, dtype)
            error = functools.partial(_error, program, _MIXED, dtype)
            tally.add(*key, _once("error", *key, make=error), after)
    return tally.lost()


def _error(program: Program, rules: jmp.Rules, dtype: str) -> float:
    scale = 2.0**8 if dtype == "float16" else 1.0
    rows = [law.errors(program, seed, [dtype], rules, scale) for seed in DRAWS]
    found = [row[dtype].mixed for row in rows if row]
    return float(np.median(found)) if found else 0.0


def _of_models(rule: Rule, names: Sequence[str]) -> list[Cost]:
    found: list[Cost] = []
    for name in names if not missing("h100") else ():
        model = MODELS[name]()
        args = model.params, model.batch

        def gradient(rules: jmp.Rules, model: models.Model = model) -> Any:
            return jax.grad(jmp.autocast(model.loss, rules))

        with rule.off():
            after = _traced(gradient(rule.rules), *args)
        traced = functools.partial(_traced, gradient(_MIXED), *args)
        if after == _once("trace", name, make=traced):
            continue
        with rule.off():
            without = compile_for("h100", gradient(rule.rules), *args)
        compiled = functools.partial(compile_for, "h100", gradient(_MIXED), *args)
        whole = _once("compiled", name, make=compiled)
        found.append(
            Cost(
                name,
                without.bytes_moved / whole.bytes_moved,
                without.peak_memory / whole.peak_memory,
                without.roofline_seconds / whole.roofline_seconds,
            )
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser("python -m benchmarks.ablation.rules")
    parser.add_argument("--rules", nargs="*", choices=RULES, default=None)
    parser.add_argument("--programs", nargs="*", default=[], help="of the sweep")
    parser.add_argument("--drawn", type=int, default=1000, help="of the search")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--json", type=pathlib.Path, default=None)
    options = parser.parse_args(argv)
    path = options.json / "ablation.json" if options.json else None
    known: dict[str, Row] = {}
    if path and path.exists():
        known = {row.rule: row for row in rows_of(json.loads(path.read_text())["rows"])}
    for name in options.rules or [one for one in RULES if one not in known]:
        rule = RULES[name]
        row = Row(
            name,
            rule.says,
            _of_sweep(rule, options.programs),
            _of_search(rule, options.drawn),
            _of_models(rule, options.models),
        )
        known[name] = row
        print(table([row]).splitlines()[1], flush=True)
        if options.json:
            ordered = [known[one] for one in RULES if one in known]
            write(options.json, "ablation", stamp(), rows=ordered)
    print(table([known[one] for one in RULES if one in known]))


if __name__ == "__main__":
    main()
