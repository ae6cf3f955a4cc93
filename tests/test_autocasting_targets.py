"""What a real compiler makes of a function under autocast."""

import jax
import jax.numpy as jnp
import pytest
from programs import BLOCK, Block

from benchmarks.compiled import TARGETS, compile_for, missing
from benchmarks.models import transformer
from jmp_lite.autocasting.interpreter.api import autocast

pytestmark = pytest.mark.targets


@pytest.fixture(params=TARGETS)
def target(request):
    if missing(request.param):
        pytest.skip(missing(request.param))
    return request.param


def loss(params, x):
    return jnp.mean(BLOCK.apply(params, x) ** 2)


def loss_by_hand(params, x):
    y = Block(dtype=jnp.bfloat16).apply(params, x)
    return jnp.mean(y.astype(jnp.float32) ** 2)


def compile_gradient(target, fun):
    params = jax.eval_shape(BLOCK.init, jax.random.key(0), jnp.ones((512, 1024)))
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    return compile_for(target, jax.grad(fun), params, x)


def test_all_matrix_products_of_a_gradient_are_16_bit(target):
    traced, low = (compile_gradient(target, f) for f in (loss, autocast(loss)))
    assert sum(low.matmuls.values()) == sum(traced.matmuls.values())
    assert "bf16" not in traced.matmuls
    assert {dtypes.split("->")[0] for dtypes in low.matmuls} == {"bf16"}
    assert low.bytes_moved <= traced.bytes_moved


def test_there_are_as_many_matrix_products_as_in_code_written_by_hand(target):
    low = compile_gradient(target, autocast(loss))
    with jax.numpy_dtype_promotion("standard"):  # Flax's own promotion.
        by_hand = compile_gradient(target, loss_by_hand)
    assert low.matmuls == by_hand.matmuls
    # The gradients of a norm's input add up in float32: in so small a model a kernel of
    # its own casts their sum. So does the gradient of the last bias.
    assert low.bytes_moved <= 1.06 * by_hand.bytes_moved


def test_a_loop_over_layers_moves_and_holds_less_than_code_written_by_hand(target):
    size = {"width": 256, "heads": 4, "vocabulary": 512, "batch": (8, 256)}

    def compile_model(dtype, wrap):
        model = transformer(dtype, layout="scan", depth=6, **size)
        return compile_for(
            target, jax.grad(wrap(model.loss)), model.params, model.batch
        )

    with jax.numpy_dtype_promotion("standard"):  # Flax's own promotion.
        by_hand = compile_model(jnp.bfloat16, lambda loss: loss)
        low = compile_model(None, autocast)
    assert low.matmuls == by_hand.matmuls
    assert low.peak_memory < 0.9 * by_hand.peak_memory
    assert low.bytes_moved < 0.95 * by_hand.bytes_moved


HIDDEN, HEAD = (4096, 256), (256, 32768)


def by_index(logits, labels):
    return jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


def by_mask(logits, labels):
    is_label = jnp.arange(logits.shape[-1]) == labels[:, None]
    return jnp.where(is_label, logits, 0).sum(-1)


def test_a_mask_that_picks_the_label_spares_a_gradient_in_float32(target):
    """A GPU scatters the gradient of an index into an array of float32."""

    def compile_loss(wrap, pick):
        def loss(head, x, labels):
            logits = x @ head
            return jnp.mean(jax.nn.logsumexp(logits, -1) - pick(logits, labels))

        head, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (HEAD, HIDDEN))
        labels = jax.ShapeDtypeStruct(HIDDEN[:1], jnp.int32)
        return compile_for(target, jax.grad(wrap(loss), (0, 1)), head, x, labels)

    def spared(wrap):
        index, mask = (compile_loss(wrap, pick) for pick in (by_index, by_mask))
        moved = index.bytes_moved - mask.bytes_moved
        held = index.peak_memory - mask.peak_memory
        logits = 4 * HIDDEN[0] * HEAD[1]
        return pytest.approx((moved / logits, held / logits), abs=0.01)

    assert spared(autocast) == ((2, 0.5) if target == "h100" else (0, 0))
    assert spared(lambda loss: loss) == (0, 0)
