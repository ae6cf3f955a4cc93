"""Faults to plant in the package, one at a time: data for ``tests/mutations/run.py``.

Each replaces a piece of one file, which has to stand there exactly once, and names a
test that fails with it.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault.

    Attributes:
      path: the file, below ``jmp_lite``.
      old: what stands there.
      new: what stands there with the fault.
      does: what goes wrong.
      caught_by: a test that fails, as ``file::name``; the file is below ``tests``.
    """

    path: str
    old: str
    new: str
    does: str
    caught_by: str = ""

    @property
    def room(self) -> str:
        """The room of the package that the file is in."""
        return self.path.split("/")[0].removesuffix(".py")


FAULTS = (
    # -------------------------------------------------------------------- casting
    Fault(
        "casting/dtypes.py",
        "wanted = is_floating(leaf) and (where is None or where(path, leaf))",
        "wanted = is_floating(leaf)",
        "cast_tree ignores its predicate",
    ),
    Fault(
        "casting/dtypes.py",
        "narrow = is_floating(leaf) and jnp.finfo(leaf.dtype).bits < 32",
        "narrow = is_floating(leaf) and jnp.finfo(leaf.dtype).bits < 16",
        "upcast_tree leaves 16-bit arrays as they are",
    ),
    Fault(
        "casting/dtypes.py",
        "if int(major) >= 8:",
        "if int(major) > 8:",
        "an A100 computes in float16",
    ),
    Fault(
        "casting/dtypes.py",
        "one = DtypeTotals(1, size, size * leaf.dtype.itemsize)",
        "one = DtypeTotals(1, size, size * 4)",
        "dtype_summary counts four bytes for every element",
    ),
    Fault(
        "casting/dtypes.py",
        "jnp.finfo(dtype).minexp > jnp.finfo(jnp.float32).minexp",
        "jnp.finfo(dtype).minexp >= jnp.finfo(jnp.float32).minexp",
        "bfloat16 gets a loss scale",
    ),
    Fault(
        "casting/policy.py",
        'compute = parts.get("compute_dtype", param)',
        'compute = parts.get("compute_dtype", np.dtype(np.float32))',
        "a policy's compute dtype does not follow its parameters'",
    ),
    Fault(
        "casting/policy.py",
        'Policy(param, compute, parts.get("output_dtype", compute))',
        'Policy(param, compute, parts.get("output_dtype", param))',
        "a policy's output dtype does not follow its compute dtype",
    ),
    Fault(
        "casting/selection.py",
        "return any(is_selected(one, path, item) for one in selector)",
        "return all(is_selected(one, path, item) for one in selector)",
        "a tuple of selectors selects what all of them select",
    ),
    Fault(
        "casting/counting.py",
        "return cls(largest + spacing / 2, smallest / 2, normal)",
        "return cls(largest, smallest / 2, normal)",
        "the largest finite number counts as an overflow",
    ),
    Fault(
        "casting/counting.py",
        "a.high + b.high + (low < a.low).astype(np.uint32)",
        "a.high + b.high",
        "a count loses its carry at 2**32",
    ),
    # ---------------------------------------------------------------- autocasting
    Fault(
        "autocasting/rules.py",
        "scopes=(*mine, new, *preset)",
        "scopes=(*preset, *mine, new)",
        "a user's scope stands behind the preset's norms",
    ),
    Fault(
        "autocasting/rules.py",
        'for name in reversed(path.split("/")):',
        'for name in path.split("/"):',
        "the outermost mark wins",
    ),
    Fault(
        "autocasting/rules.py",
        '"dot_general ragged_dot_general conv_general_dilated"',
        '"dot_general conv_general_dilated"',
        "ragged products are unknown",
    ),
    Fault(
        "autocasting/rules.py",
        'precision = Precision.LOW if flag == "true" else Precision.FULL',
        'precision = Precision.LOW if flag == "false" else Precision.FULL',
        "Ascend's flag is read the other way round",
    ),
    Fault(
        "autocasting/rules.py",
        '"carries": [list(carry) for carry in self.carries],',
        '"carries": [],',
        "JSON loses the carry rules",
    ),
    Fault(
        "autocasting/rules.py",
        '*("broadcast_in_dim", "broadcast_to", "tile", "gather", "sort", "top_k"),',
        '*("broadcast_in_dim", "broadcast_to", "tile", "sort", "top_k"),',
        "the gradient of a gather adds up in 16 bits",
    ),
    Fault(
        "autocasting/rules.py",
        '"O2": Rules(default=Precision.LOW, scopes=(NORM_LAYERS,)),',
        '"O2": Rules(default=Precision.LOW),',
        "O2 lowers norm layers",
    ),
    Fault(
        "autocasting/rules.py",
        "if said and (group.has_low_form or said.precision is not Precision.LOW):",
        "if said:",
        "a LOW scope lowers what has no 16-bit form",
    ),
    Fault(
        "autocasting/decisions.py",
        'return Decision(Run.FULL, State.SOFT, "its argument may be a position")',
        'return Decision(Run.FULL, State.HARD, "its argument may be a position")',
        "sine and cosine widen what follows",
    ),
    Fault(
        "autocasting/decisions.py",
        "if readers.want_float32:",
        "if False:",
        "no value is computed in float32 for its readers",
    ),
    Fault(
        "autocasting/decisions.py",
        "if state > joined:",
        "if state >= joined:",
        "a decision names the wrong operand as its leader",
    ),
    Fault(
        "autocasting/decisions.py",
        "return all(\n        state is State.LOW or kind in (Kind.EXACT, Kind.END)",
        "return any(\n        state is State.LOW or kind in (Kind.EXACT, Kind.END)",
        "a selection among float32 numbers is low",
    ),
    Fault(
        "autocasting/decisions.py",
        "widens = kind not in (Kind.LITERAL, Kind.EXACT, Kind.END)",
        "widens = True",
        "literals widen under WIDEST",
    ),
    Fault(
        "autocasting/demand.py",
        "is_summed = op in ADDING and wanted.want_float32",
        "is_summed = False",
        "demand does not pass through sums",
    ),
    Fault(
        "autocasting/demand.py",
        "results = [found[var] or Readers.OUTPUT for var in eqn.outvars]\n"
        "            for atom, readers in zip(",
        "results = [found[var] or Readers.OTHER for var in eqn.outvars]\n"
        "            for atom, readers in zip(",
        "a value that nobody reads counts as read by a product",
    ),
    Fault(
        "autocasting/demand.py",
        "joined = [union(column) for column in zip(*branches, strict=True)]",
        "joined = [column[0] for column in zip(*branches, strict=True)]",
        "demand looks into the first branch of a cond only",
    ),
    Fault(
        "autocasting/demand.py",
        "key = (id(jaxpr), tuple(outside))",
        "key = id(jaxpr)",
        "demand inside a jitted call forgets who reads its results",
    ),
    Fault(
        "autocasting/equations.py",
        "is_spread = op in BROADCASTING and not value.is_number",
        "is_spread = False",
        "a bias is cast before it is broadcast",
    ),
    Fault(
        "autocasting/equations.py",
        "if dtype == np.bool_:\n        return State.SOFT",
        "if dtype == np.bool_:\n        return State.HARD",
        "a mask of booleans widens what it multiplies",
    ),
    Fault(
        "autocasting/equations.py",
        "return State.SOFT if is_float and value.kind is Kind.GIVEN else State.HARD",
        "return State.HARD",
        "a 16-bit parameter that is upcast widens the stream",
    ),
    Fault(
        "autocasting/equations.py",
        "if op not in MOVING and not (op in _SCALING and Kind.INTEGER in kinds):",
        "if op not in MOVING:",
        "scaled positions are not known as positions",
    ),
    Fault(
        "autocasting/equations.py",
        "again = jax.checkpoint(from_held, prevent_cse=False)\n"
        "    return again(*(value.array for value in operands))",
        "return from_held(*(value.array for value in operands))",
        "what is raised for one op is kept in float32",
    ),
    Fault(
        "autocasting/equations.py",
        "name: casts.low_dtype if is_dtype else None\n",
        "name: eqn.params[name] if is_dtype else None\n",
        "low products return float32",
    ),
    Fault(
        "autocasting/casts.py",
        "if value.cast is None:",
        "if True:",
        "a computed value is cast anew for each use",
    ),
    Fault(
        "autocasting/casts.py",
        "if value.kind is not Kind.COMPUTED:",
        "if False:",
        "a weight is cast once for all its uses",
    ),
    Fault(
        "autocasting/casts.py",
        "if np.any(np.isfinite(numbers) & ~np.isfinite(low)):",
        "if False:",
        "a constant mask overflows",
    ),
    Fault(
        "autocasting/casts.py",
        "np.isfinite(low) and (low != 0 or number == 0) and (low != 1 or number == 1)",
        "np.isfinite(low) and (low != 0 or number == 0)",
        "1 - 1e-7 becomes 1",
    ),
    Fault(
        "autocasting/casts.py",
        "if number in _ENDS:",
        "if False:",
        "the end of the range is a number like any other",
    ),
    Fault(
        "autocasting/casts.py",
        "        if saturates:\n",
        "        if False:\n",
        "what is out of range becomes infinite",
    ),
    Fault(
        "autocasting/interpreter.py",
        "if has_positions and _is_outer_product(eqn):",
        "if False:",
        "positions times rates lose their digits",
    ),
    Fault(
        "autocasting/interpreter.py",
        "return lax.Precision.HIGHEST in asked and usual is not lax.Precision.HIGHEST",
        "return lax.Precision.HIGHEST in asked",
        "a global precision switches autocast off",
    ),
    Fault(
        "autocasting/interpreter.py",
        "has_float32 = any(map(compat.is_float32, eqn.invars))\n        return ",
        "has_float32 = any(map(compat.is_float32, eqn.invars))\n        return False and ",
        "an op of the user's own 16 bits is decided like one of float32",
    ),
    Fault(
        "autocasting/interpreter.py",
        "            return decisions.HAS_EFFECTS",
        "            pass",
        "an op with effects is lowered",
    ),
    Fault(
        "autocasting/higher_order.py",
        "key = (id(jaxpr), states, wanted, said, region is None, forced)",
        "key = (id(jaxpr), states, said, region is None, forced)",
        "a converted call forgets who reads its results",
    ),
    Fault(
        "autocasting/higher_order.py",
        "key = (id(jaxpr), states, wanted, said, region is None, forced)",
        "key = (id(jaxpr), states, wanted, region is None, forced)",
        "a converted call forgets the scope rules",
    ),
    Fault(
        "autocasting/higher_order.py",
        "return max(states, default=None), kinds.pop()",
        "return min(states, default=None), kinds.pop()",
        "the lowest branch of a cond wins",
    ),
    Fault(
        "autocasting/higher_order.py",
        'if "_custom_root" in compat.name_of(jaxpr):',
        "if False:",
        "a root is sought in 16 bits",
    ),
    Fault(
        "autocasting/higher_order.py",
        "    if value.state is not State.LOW:\n        return value\n    return Value("
        "walk.full(value)",
        "    if True:\n        return value\n    return Value(walk.full(value)",
        "the gradient of a loop's constant adds up in 16 bits",
    ),
    Fault(
        "autocasting/higher_order.py",
        "raised = raises.only_raised(low) if name else frozenset()",
        "raised = frozenset()",
        "a value is raised inside of each call that reads it",
    ),
    Fault(
        "autocasting/higher_order.py",
        "low_body = islands.rematerialize(inside.jaxpr, n_consts)",
        "low_body = inside.jaxpr",
        "a loop keeps what cheap ops make",
    ),
    Fault(
        "autocasting/higher_order.py",
        "computed[:] = [(v.state, Kind.COMPUTED) for v in kept]",
        "computed[:] = [(None, Kind.COMPUTED) for v in kept]",
        "a backward rule meets residuals in 16 bits",
    ),
    Fault(
        "autocasting/loops.py",
        "if flow.is_added_to(carry):",
        "if False:",
        "a running sum may be low",
    ),
    Fault(
        "autocasting/loops.py",
        "        if not is_read:\n",
        "        if False:\n",
        "weights trained in a loop may be low",
    ),
    Fault(
        "autocasting/loops.py",
        "        if read_by[carry] is _Use.PRODUCT:\n",
        "        if False:\n",
        "an LSTM's hidden state is float32",
    ),
    Fault(
        "autocasting/loops.py",
        'return rules.carry_in(path) != "follow" and ends_by_a_float(eqn)',
        "return ends_by_a_float(eqn)",
        "no rule converts a loop that a float ends",
    ),
    Fault(
        "autocasting/loops.py",
        "if in_any_step is _Use.PRODUCT and read_by is not _Use.PRODUCT:",
        "if False:",
        "a cache of keys in a while loop is float32",
    ),
    Fault(
        "autocasting/endings.py",
        "is_counted = any(map(loop.is_count, conditions))",
        "is_counted = True",
        "a loop without a count may run for ever",
    ),
    Fault(
        "autocasting/endings.py",
        "return any(self._is_float[i] and self._changes[i] for i in deciding)",
        "return False",
        "a loop to a tolerance is converted",
    ),
    Fault(
        "autocasting/regions.py",
        "if self._readers_outside(atom, value.region).want_float32:",
        "if False:",
        "running statistics leave a norm in 16 bits",
    ),
    Fault(
        "autocasting/regions.py",
        "        if value.is_from_low:\n",
        "        if False:\n",
        "a norm's result is float32",
    ),
    Fault(
        "autocasting/islands.py",
        "    both = not compat.is_literal(one) and not compat.is_literal(other)\n"
        "    return both and",
        "    both = not compat.is_literal(one) and not compat.is_literal(other)\n"
        "    return False and both and",
        "a loop computes its sums again",
    ),
    Fault(
        "autocasting/weights.py",
        "return 0 < stacked <= use.weight.aval.size",
        "return False",
        "a recurrent weight's gradient is added up at each step",
    ),
    Fault(
        "autocasting/weights.py",
        "return jnp.moveaxis(out, range(-n_free, 0), range(1, 1 + n_free))",
        "return jnp.moveaxis(out, range(-n_free, 0), range(0, n_free))",
        "the axes of a recurrent weight's gradient are swapped",
    ),
    Fault(
        "autocasting/residuals.py",
        "    return jax.lax.clamp(low, x, high).astype(dtype)",
        "    return x.astype(dtype)",
        "a compressed residual overflows",
    ),
    Fault(
        "autocasting/residuals.py",
        "yield compat.is_float32(atom) and eqn is not None and not is_marked",
        "yield compat.is_float32(atom) and eqn is not None",
        "full_precision does not keep residuals in float32",
    ),
    Fault(
        "autocasting/marks.py",
        "args, kwargs = cast_tree((args, kwargs), dtype)",
        "args = cast_tree(args, dtype)",
        "low_call leaves keyword arguments in float32",
    ),
    Fault(
        "autocasting/door.py",
        '"something that its function captures": _captured(fun),',
        "",
        "a captured nnx module loses its updates",
    ),
    Fault(
        "autocasting/door.py",
        '    if compute_dtype != "half":\n        parse_dtype(compute_dtype)\n',
        "",
        "an unknown dtype is refused at the call only",
    ),
    Fault(
        "autocasting/compat.py",
        "return own or caller or of_a_package",
        "return own or of_a_package or caller",
        "explain names a line of an installed package",
    ),
    Fault(
        "autocasting/compat.py",
        'spread = math.prod(eqn.params.get("lhs_dilation", ()))',
        "spread = 1",
        "the gradient of a strided convolution counts zeros as work",
    ),
    Fault(
        "autocasting/rows.py",
        "times=self.times and trips and self.times * trips,",
        "times=self.times,",
        "explain counts a loop once",
    ),
    Fault(
        "autocasting/rows.py",
        "flops[row.precision] += row.flops * counted(row.times)",
        "flops[row.precision] += row.flops",
        "the operations of a loop count once",
    ),
    Fault(
        "autocasting/lints.py",
        "isinstance(n, int) and n > 8 and n % 8]",
        "isinstance(n, int) and n > 8 and n % 16]",
        "a width of 24 counts as a misfit",
    ),
    Fault(
        "autocasting/lints.py",
        "if name not in is_cast_back or len(rows) == 1:",
        "if False:",
        "the float32 tail of a loss counts as a widened stream",
    ),
    Fault(
        "autocasting/backward.py",
        "for v in residuals if not compat.is_literal(v)} - there",
        "for v in residuals if not compat.is_literal(v)}",
        "arguments count as residuals",
    ),
    Fault(
        "autocasting/explain.py",
        "added = tuple(n - m for n, m in zip(as_run, as_traced, strict=True))",
        "added = as_run",
        "the user's own casts count as autocast's",
    ),
    Fault(
        "autocasting/tune.py",
        "return min(map(self._weakened, [*found, everything]), key=self._in_float32)",
        "return max(map(self._weakened, [*found, everything]), key=self._in_float32)",
        "tune keeps the most ops in float32",
    ),
    Fault(
        "autocasting/tune.py",
        "return self.error(kept).largest <= self._tolerance",
        "return self.error(kept).outputs <= self._tolerance",
        "tune does not judge gradients",
    ),
    Fault(
        "autocasting/units.py",
        "if matched <= kept:",
        "if True:",
        "a pattern of tune's keeps more than was measured",
    ),
    Fault(
        "autocasting/samples.py",
        "is_whole = array == jnp.round(array)",
        "is_whole = jnp.zeros_like(array, bool)",
        "tune changes whole numbers in their last bit",
    ),
    Fault(
        "autocasting/watching.py",
        'counts["is_first"] = _are_finite(given) & ~_are_finite(made)',
        'counts["is_first"] = ~_are_finite(made)',
        "every op after the first NaN is the first",
    ),
    Fault(
        "autocasting/watching.py",
        "return (results[:n_carry], added(counts, new)), results[n_carry:]",
        "return (results[:n_carry], new), results[n_carry:]",
        "watch counts the last trip of a loop only",
    ),
    # -------------------------------------------------------------------- numerics
    Fault(
        "numerics.py",
        "scale = 2.0 ** math.floor(exponent)",
        "scale = 2.0 ** math.ceil(exponent)",
        "a suggested loss scale overflows",
    ),
    Fault(
        "numerics.py",
        "return NonfiniteReport(row for row in rows if row.nan or row.inf)",
        "return NonfiniteReport(row for row in rows if row.nan)",
        "nonfinite_report passes infinities over",
    ),
    # --------------------------------------------------------------------- scaling
    Fault(
        "scaling/loss_scale.py",
        "counter = jnp.where(counter >= self.period, 0, counter)",
        "counter = jnp.where(counter > self.period, 0, counter)",
        "the scale grows one step late",
    ),
    Fault(
        "scaling/loss_scale.py",
        "return overflows, overflows >= self.hysteresis",
        "return overflows, overflows > self.hysteresis",
        "hysteresis never backs off",
    ),
    Fault(
        "scaling/loss_scale.py",
        "overflows = jnp.where(finite, 0, more)",
        "overflows = more",
        "a finite step does not start the count of overflows again",
    ),
    Fault(
        "scaling/loss_scale.py",
        "floor = max(self.min_loss_scale, float(_FLOAT32.tiny))",
        "floor = self.min_loss_scale",
        "the scale reaches zero",
    ),
    Fault(
        "scaling/loss_scale.py",
        "grown = jnp.minimum(loss_scale * self.factor, self.max_loss_scale)",
        "grown = loss_scale * self.factor",
        "the scale grows without bound",
    ),
    Fault(
        "scaling/loss_scale.py",
        "width = max(jnp.finfo(array.dtype).bits, 32)",
        "width = jnp.finfo(array.dtype).bits",
        "a float16 loss is scaled in float16",
    ),
    Fault(
        "scaling/loss_scale.py",
        "return lax.pmin(finite.astype(jnp.int32), axis_name).astype(jnp.bool_)",
        "return finite",
        "replicas skip by themselves",
    ),
    Fault(
        "scaling/gradients.py",
        "(_, (value, aux)), scaled_grads = scaled_value_and_grad(*args, **kwargs)",
        "(value, (_, aux)), scaled_grads = scaled_value_and_grad(*args, **kwargs)",
        "the loss that is returned is scaled",
    ),
    Fault(
        "scaling/gradients.py",
        "grads = upcast_tree(loss_scale.unscale(scaled_grads))",
        "grads = loss_scale.unscale(loss_scale.unscale(scaled_grads))",
        "gradients are unscaled twice",
    ),
    Fault(
        "scaling/transforms.py",
        "return jnp.where(grads_finite, leaf, jnp.ones_like(leaf))",
        "return jnp.where(grads_finite, leaf, jnp.zeros_like(leaf))",
        "a normalizing optimizer divides 0 by 0",
    ),
    Fault(
        "scaling/transforms.py",
        "inner_state=select_tree(grads_finite, new_inner_state, inner_state),",
        "inner_state=new_inner_state,",
        "a skipped step changes the optimizer's state",
    ),
    Fault(
        "scaling/transforms.py",
        "consecutive_skipped = jnp.where(grads_finite, 0, state.consecutive_skipped + 1)",
        "consecutive_skipped = state.consecutive_skipped + jnp.where(grads_finite, 0, 1)",
        "the count of skipped steps in a row is never reset",
    ),
    Fault(
        "scaling/transforms.py",
        "grads_finite = all_finite(updates, axis_name)",
        "grads_finite = all_finite(updates)",
        "loss_scaling ignores its axis",
    ),
    Fault(
        "scaling/transforms.py",
        "if in_a_row > max_consecutive_skips:",
        "if in_a_row >= max_consecutive_skips:",
        "check_loss_scale raises one step early",
    ),
    Fault(
        "scaling/transforms.py",
        "    if isinstance(inner, optax.MultiSteps):\n        return inner\n",
        "    if isinstance(inner, optax.MultiSteps):\n"
        "        return optax.with_extra_args_support(inner.gradient_transformation())\n",
        "MultiSteps loses extra arguments",
    ),
    Fault(
        "scaling/transforms.py",
        "start = DynamicLossScale() if loss_scale is None else loss_scale\n",
        "start = DynamicLossScale() if loss_scale is None else loss_scale\n"
        "        start = start.adjust(True)\n",
        "a fresh scale has counted a step",
    ),
    Fault(
        "scaling/masters.py",
        "return jnp.array(leaf, parsed, copy=True) if is_floating(leaf) else leaf",
        "return jnp.asarray(leaf, parsed) if is_floating(leaf) else leaf",
        "masters share their buffers with the parameters",
    ),
    Fault(
        "scaling/masters.py",
        "jax.lax.RoundingMethod.TO_NEAREST_EVEN",
        "jax.lax.RoundingMethod.AWAY_FROM_ZERO",
        "ties round away from zero",
    ),
    Fault(
        "scaling/masters.py",
        "left = jnp.where(jnp.isfinite(rounded), total - rounded, 0)",
        "left = jnp.zeros_like(total)",
        "compensated forgets the rest",
    ),
    Fault(
        "scaling/masters.py",
        "return moved, StochasticRoundingState(later, inner_state)",
        "return moved, StochasticRoundingState(state.key, inner_state)",
        "each step rounds by the same chance",
    ),
    Fault(
        "scaling/masters.py",
        "noise = jax.random.uniform(jax.random.fold_in(now, number), param.shape)",
        "noise = jax.random.uniform(now, param.shape)",
        "parameters of one shape round by the same chance",
    ),
    # ----------------------------------------------------------------------- train
    Fault(
        "train.py",
        "attempt = state.step + opt_state.skipped",
        "attempt = state.step",
        "a step after a skipped one draws the same random numbers",
    ),
    Fault(
        "train.py",
        "return decay * old + (1 - decay) * new.astype(old.dtype)",
        "return (1 - decay) * old + decay * new.astype(old.dtype)",
        "the moving average decays the other way round",
    ),
    Fault(
        "train.py",
        "grads = jax.tree.map(lambda x: x / times, total)",
        "grads = total",
        "accumulated gradients are summed",
    ),
    Fault(
        "train.py",
        "finite = all_finite((loss, grads))",
        "finite = all_finite(grads)",
        "a step whose loss is NaN is not skipped",
    ),
    Fault(
        "train.py",
        "loss, model_state, grads = _averaged((loss, model_state, grads), axis_name)",
        "loss, grads = _averaged((loss, grads), axis_name)",
        "batch statistics differ between devices",
    ),
    Fault(
        "train.py",
        "key = None if rng is None else jax.random.fold_in(rng, i)",
        "key = rng",
        "micro-batches draw the same random numbers",
    ),
    Fault(
        "train.py",
        "return select_tree(finite, new_state, kept), metrics",
        "return new_state._replace(params=select_tree(finite, new_params, params)), "
        "metrics",
        "a skipped step changes the model state",
    ),
    # ------------------------------------------------------------------ nnx, linen
    Fault(
        "nnx.py",
        "        _unscope((inputs, out), depth)\n",
        "",
        "modules keep another class",
    ),
    Fault(
        "nnx.py",
        "if isinstance(variable, nnx.Param) and id(variable) not in kept | named:",
        "if isinstance(variable, nnx.Param) and id(variable) not in named:",
        "cast lowers norm layers",
    ),
    Fault(
        "nnx.py",
        "name = (type(inner).__name__,) if is_leaf or not path else ()",
        "name = ()",
        "a module's class is not in its path",
    ),
    Fault(
        "linen.py",
        "above = (path[:n] for n in range(len(path) + 1))",
        "above = (path,)",
        "what is inside of a selected module stays float32",
    ),
    Fault(
        "linen.py",
        "return dataclasses.replace(scale, **state)",
        "return scale",
        "a checkpoint's loss scale is not restored",
    ),
    # ---------------------------------------------------------------------- others
    Fault(
        "plots.py",
        "name: np.log2(array[np.isfinite(array) & (array > 0)])",
        "name: np.log10(array[np.isfinite(array) & (array > 0)])",
        "the picture counts powers of ten",
    ),
    Fault(
        "__main__.py",
        "return 1 if reason else 0",
        "return 0",
        "the doctor succeeds where there is no device",
    ),
    Fault(
        "__main__.py",
        'low = sum(n for dtype, n in products.items() if dtype in ("bfloat16", '
        '"float16"))',
        'low = sum(n for dtype, n in products.items() if dtype in ("float16",))',
        "the demo does not count products in bfloat16",
    ),
)
