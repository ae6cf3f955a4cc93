"""Flax's examples of recurrent networks: seq2seq and SST-2."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.examples.shared import apply, floats, ints
from benchmarks.models import Model, cast_low, shapes_of

# ------------------------------------------------------------------- recurrent networks

END = 1  # The token that ends a sequence of seq2seq.


def lengths_to_end(tokens: Any) -> Any:
    """Returns how many tokens there are to the first that ends a sequence, with it."""
    ends = tokens == END
    first = jnp.argmax(ends, axis=-1)
    return jnp.where(jnp.any(ends, axis=-1), first + 1, tokens.shape[-1])


class DecoderLSTMCell(nn.RNNCellBase):
    """A step of the decoder, from a token before to the logits of the next one."""

    hidden: int
    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, carry: Any, inputs: Any) -> Any:
        """Returns the new carry, and logits."""
        cell = nn.LSTMCell(self.hidden, dtype=self.dtype)
        carry, y = cell(carry, inputs)
        dense = nn.Dense(self.vocabulary, dtype=self.dtype, name="projection")
        return carry, dense(y)

    @property
    def num_feature_axes(self) -> int:
        """Vectors go in."""
        return 1


class Seq2seq(nn.Module):
    """The encoder and decoder of the example that learns to add."""

    hidden: int
    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, inputs: Any, lengths: Any, targets: Any) -> Any:
        """Returns logits, each from the true tokens before it."""
        cell = nn.LSTMCell(self.hidden, dtype=self.dtype)
        encoder = nn.RNN(cell, return_carry=True, name="encoder")
        state, _ = encoder(inputs, seq_lengths=lengths)
        cell = DecoderLSTMCell(self.hidden, self.vocabulary, self.dtype)
        return nn.RNN(cell, name="decoder")(targets, initial_carry=state)


def seq2seq(
    dtype: Any = None,
    hidden: int = 1024,
    batch: int = 256,
    length: int = 64,
    vocabulary: int = 16,
) -> Model:
    """Returns an encoder and a decoder of one LSTM each, fed with one-hot tokens."""
    module = Seq2seq(hidden, vocabulary, dtype)

    def loss(params: Any, pairs: Any) -> Any:
        queries, answers = pairs
        labels, lengths = answers[:, 1:], lengths_to_end(answers[:, 1:])
        hot = functools.partial(
            jax.nn.one_hot, num_classes=vocabulary, dtype=jnp.float32
        )
        ends = lengths_to_end(queries)
        logits = apply(module, params, hot(queries), ends, hot(answers[:, :-1]))
        chosen = jax.nn.log_softmax(logits.astype(jnp.float32)) * hot(labels)
        mask = jnp.arange(labels.shape[-1]) < lengths[:, None]
        return -jnp.mean(jnp.sum(chosen, -1) * mask.astype(jnp.float32))

    queries, answers = ints(batch, length), ints(batch, length + 1)
    hot = jnp.zeros((batch, length, vocabulary))
    params = shapes_of(module.init, hot, jnp.zeros(batch, jnp.int32), hot)
    return Model(loss, params, (queries, answers))


class KeysOnlyMlpAttention(nn.Module):
    """Weights over a sequence that depend on its keys alone."""

    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(self, keys: Any, mask: Any) -> Any:
        """Returns weights of the shape of the mask; by hand their sum is float32."""
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        energy = jnp.tanh(dense(self.hidden, name="keys")(keys))
        scores = dense(1, name="energy")(energy)[..., 0].astype(jnp.float32)
        scores = jnp.where(mask, scores, -jnp.inf)
        return cast_low(jax.nn.softmax(scores), self.dtype)


class AttentionClassifier(nn.Module):
    """A weighted mean of a sequence, and an MLP."""

    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(self, encoded: Any, mask: Any) -> Any:
        """Returns one logit a sequence."""
        attention = KeysOnlyMlpAttention(
            self.hidden, self.dtype, name="keys_only_mlp_attention"
        )
        weights = attention(encoded, mask)
        context = (weights[:, None] @ encoded)[:, 0]
        h = jnp.tanh(nn.Dense(self.hidden, dtype=self.dtype)(context))
        return nn.Dense(1, dtype=self.dtype)(h)


class TextClassifier(nn.Module):
    """The classifier of sentences of the SST-2 example."""

    vocabulary: int
    embedding: int
    hidden: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: Any, lengths: Any) -> Any:
        """Returns one logit a sentence."""
        x = nn.Embed(self.vocabulary, self.embedding, name="embedder")(tokens)
        cell = functools.partial(nn.OptimizedLSTMCell, self.hidden, dtype=self.dtype)
        both = nn.Bidirectional(nn.RNN(cell()), nn.RNN(cell()), name="encoder")
        encoded = both(cast_low(x, self.dtype), seq_lengths=lengths)
        mask = jnp.arange(tokens.shape[-1]) < lengths[:, None]
        classifier = AttentionClassifier(
            self.hidden, self.dtype, name="attention_classifier"
        )
        return classifier(cast_low(encoded, self.dtype), mask)


def sst2(
    dtype: Any = None,
    hidden: int = 1024,
    embedding: int = 512,
    batch: int = 128,
    length: int = 64,
    vocabulary: int = 8192,
) -> Model:
    """Returns a classifier of sentences, two LSTMs with attention over both."""
    module = TextClassifier(vocabulary, embedding, hidden, dtype)

    def loss(params: Any, batch: Any) -> Any:
        tokens, lengths, labels = batch
        logits = apply(module, params, tokens, jnp.maximum(lengths, 1))[:, 0]
        logits = logits.astype(jnp.float32)
        linear = jnp.where(logits >= 0, logits, 0.0) - logits * labels
        return jnp.mean(linear + jnp.log1p(jnp.exp(-jnp.abs(logits))))

    tokens, lengths = ints(batch, length), ints(batch)
    zeros = (jnp.zeros(tokens.shape, jnp.int32), jnp.zeros(batch, jnp.int32))
    params = shapes_of(module.init, *zeros)
    return Model(loss, params, (tokens, lengths, floats(batch)))


# At full size, to be compiled, and as small, to be run on a CPU.
