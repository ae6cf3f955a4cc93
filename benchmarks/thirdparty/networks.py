"""Networks of transformers, Flax, Haiku, Equinox, Keras and penzai."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from benchmarks.thirdparty.parts import cross_entropy, normal
from benchmarks.thirdparty.program import Entry, Loss, Program

# ---------------------------------------------------------------------- transformers


def gpt2() -> Program:
    """transformers: GPT-2, two layers, next tokens."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4
    )
    return _causal(transformers.FlaxGPT2LMHeadModel, config, deterministic=False)


def llama() -> Program:
    """transformers: Llama, two layers with grouped queries, next tokens."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return _causal(transformers.FlaxLlamaForCausalLM, config)


def gpt_j() -> Program:
    """transformers: GPT-J, two layers with rotary positions, next tokens."""
    import transformers

    config = transformers.GPTJConfig(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, rotary_dim=8
    )
    return _causal(transformers.FlaxGPTJForCausalLM, config)


def bert() -> Program:
    """transformers: BERT, two layers with dropout, masked tokens."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    make = functools.partial(transformers.FlaxBertForMaskedLM, config)

    def loss_of(model: Any) -> Loss:
        def loss(params, batch):
            tokens, labels, mask, key = batch
            logits = model(
                tokens, mask, params=params, dropout_rng=key, train=True
            ).logits
            is_kept = jax.random.bernoulli(key, 0.9, (4,))
            return cross_entropy(logits.astype(jnp.float32), labels), is_kept

        return loss

    labels = _tokens(0, 4, 32)
    tokens = jnp.where(normal(1, 4, 32) > 1, 3, labels)
    mask = (jnp.arange(32) < jnp.array([[32], [20], [28], [9]])).astype(jnp.int32)
    batch = (tokens, labels, mask, jax.random.key(2))
    return _with_dtype(make, loss_of, lambda model: model.params, batch)


def vit() -> Program:
    """transformers: ViT, two layers, classes of images."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    make = functools.partial(transformers.FlaxViTForImageClassification, config)

    def loss_of(model: Any) -> Loss:
        def loss(params, batch):
            images, labels = batch
            logits = model(images, params=params).logits
            return cross_entropy(logits.astype(jnp.float32), labels), ()

        return loss

    batch = (normal(0, 8, 3, 32, 32), jnp.arange(8))
    return _with_dtype(make, loss_of, lambda model: model.params, batch, 1e-3)


def clip() -> Program:
    """transformers: CLIP, texts beside images."""
    import transformers

    layers = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.CLIPConfig(
        text_config={
            **layers,
            "vocab_size": 256,
            "max_position_embeddings": 16,
            "eos_token_id": 255,
        },
        vision_config={**layers, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
    make = functools.partial(
        transformers.FlaxCLIPModel, config, input_shape=((1, 8), (1, 32, 32, 3))
    )

    def loss_of(model: Any) -> Loss:
        def loss(params, batch):
            tokens, images = batch
            found = model(tokens, images, params=params)
            logits = found.logits_per_text.astype(jnp.float32)
            ways = cross_entropy(logits, jnp.arange(8))
            return ways + cross_entropy(logits.T, jnp.arange(8)), ()

        return loss

    tokens = _tokens(0, 8, 12).at[:, -1].set(255)
    batch = (tokens, normal(1, 8, 3, 32, 32))
    return _with_dtype(make, loss_of, lambda model: model.params, batch)


def bart() -> Program:
    """transformers: BART, an encoder and a decoder with attention across."""
    import transformers

    config = transformers.BartConfig(
        vocab_size=256,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=64,
    )
    make = functools.partial(transformers.FlaxBartForConditionalGeneration, config)

    def loss_of(model: Any) -> Loss:
        def loss(params, batch):
            tokens, targets, labels = batch
            found = model(tokens, decoder_input_ids=targets, params=params)
            return cross_entropy(found.logits.astype(jnp.float32), labels), ()

        return loss

    words = _tokens(1, 4, 17)
    batch = (_tokens(0, 4, 32), words[:, :-1], words[:, 1:])
    return _with_dtype(make, loss_of, lambda model: model.params, batch)


def whisper() -> Program:
    """transformers: Whisper, convolutions and attention from frames to words."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=256,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    make = functools.partial(
        transformers.FlaxWhisperForConditionalGeneration, config, (1, 16, 64)
    )

    def loss_of(model: Any) -> Loss:
        def loss(params, batch):
            frames, targets, labels = batch
            logits = model(frames, targets, params=params).logits
            return cross_entropy(logits.astype(jnp.float32), labels), ()

        return loss

    words = _tokens(1, 4, 17)
    batch = (normal(0, 4, 16, 64), words[:, :-1], words[:, 1:])
    return _with_dtype(make, loss_of, lambda model: model.params, batch)


def _causal(model_type: Any, config: Any, deterministic: bool = True) -> Program:
    """Returns a language model that learns the next token of few sequences."""
    make = functools.partial(model_type, config)

    def loss_of(model: Any) -> Loss:
        def loss(params, batch):
            tokens, key = batch
            settings = {} if deterministic else {"dropout_rng": key, "train": True}
            logits = model(tokens[:, :-1], params=params, **settings).logits
            bits = jax.random.bits(key, (2,))
            return cross_entropy(logits.astype(jnp.float32), tokens[:, 1:]), bits

        return loss

    batch = (_tokens(0, 4, 33), jax.random.key(1))
    return _with_dtype(make, loss_of, lambda model: model.params, batch, 1e-3)


def _with_dtype(
    make: Callable[..., Any],
    loss_of: Callable[[Any], Loss],
    params_of: Callable[[Any], Any],
    batch: Any,
    learning_rate: float | None = None,
) -> Program:
    """Returns a model whose own 16-bit option is its argument ``dtype``."""
    model = make(dtype=jnp.float32)
    by_hand = lambda dtype: loss_of(make(dtype=jnp.dtype(dtype)))
    return Program(loss_of(model), params_of(model), batch, by_hand, learning_rate)


# ----------------------------------------------------------------------------- linen


def linen_layers() -> Program:
    """Flax linen: each of its layers once."""
    import flax.linen as nn

    class Layers(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, images, tokens, train):
            dtype = self.dtype
            conv = functools.partial(nn.Conv, dtype=dtype)
            x = conv(16, (3, 3), strides=2)(images)
            x = nn.BatchNorm(use_running_average=not train, dtype=dtype)(x)
            x = nn.PReLU()(x)
            x = x + conv(16, (3, 3), feature_group_count=16)(x)
            x = nn.GroupNorm(4, dtype=dtype)(x)
            x = nn.ConvTranspose(16, (2, 2), strides=(2, 2), dtype=dtype)(x)
            x = nn.InstanceNorm(dtype=dtype)(x)
            x = nn.ConvLocal(8, (4, 4), strides=(4, 4), dtype=dtype)(x)
            x = nn.avg_pool(nn.max_pool(x, (2, 2)), (2, 2))
            x = x.reshape(len(x), -1)
            x = nn.WeightNorm(nn.Dense(32, dtype=dtype))(x)
            x = nn.SpectralNorm(nn.Dense(32, dtype=dtype))(x, update_stats=train)
            embed = nn.Embed(64, 32, dtype=dtype)
            y = embed(tokens)
            y = nn.LayerNorm(dtype=dtype)(y + x[:, None])
            attention = nn.MultiHeadDotProductAttention(4, dtype=dtype)
            y = y + attention(y, mask=nn.make_causal_mask(tokens))
            y = nn.RMSNorm(dtype=dtype)(y)
            y = nn.DenseGeneral((4, 8), dtype=dtype)(y)
            y = nn.Einsum((4, 8, 32), "bthd,hde->bte", dtype=dtype)(y)
            cells = [nn.OptimizedLSTMCell, nn.GRUCell, nn.MGUCell, nn.SimpleCell]
            for cell in cells:
                y = y + nn.RNN(cell(32, dtype=dtype))(y)
            both = [nn.RNN(nn.LSTMCell(16, dtype=dtype)) for _ in range(2)]
            y = y + nn.Bidirectional(*both)(y)
            y = nn.Dropout(0.1, deterministic=not train)(y)
            return embed.attend(nn.gelu(y))

    def loss_of(model: Any) -> Loss:
        def loss(params, batch):
            stats, images, tokens, labels, key = batch
            logits, _ = model.apply(
                {"params": params, **stats},
                images,
                tokens,
                True,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            return cross_entropy(logits.astype(jnp.float32), labels), ()

        return loss

    images, tokens = normal(0, 4, 32, 32, 3), _tokens(1, 4, 12) % 64
    variables = Layers().init(jax.random.key(2), images, tokens, False)
    params = variables.pop("params")
    batch = (variables, images, tokens, (tokens * 7) % 64, jax.random.key(3))
    by_hand = lambda dtype: loss_of(Layers(jnp.dtype(dtype)))
    return Program(loss_of(Layers()), params, batch, by_hand, learning_rate=3e-3)


def linen_lifted() -> Program:
    """Flax linen: scan, remat, vmap, jit, cond, while_loop and custom_vjp, lifted."""
    import flax.linen as nn

    class Block(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            dense = functools.partial(nn.Dense, dtype=self.dtype)
            h = nn.LayerNorm(dtype=self.dtype)(x)
            return x + dense(32)(nn.gelu(dense(64)(h))), None

    class Lifted(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x, is_deep):
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            block = nn.remat(Block, prevent_cse=False)
            x, _ = nn.scan(block, length=3, **split)(self.dtype)(x)
            x, _ = nn.vmap(Block, in_axes=0, out_axes=0, **split)(self.dtype)(x)
            x, _ = nn.jit(Block)(self.dtype)(x)
            last = nn.Dense(32, dtype=self.dtype)
            last(x)
            x = nn.cond(is_deep, lambda m, x: m(m(x)), lambda m, x: m(x), last, x)

            def forward(mdl, x):
                return nn.vjp(lambda m, x: nn.tanh(m(x)), mdl, x)

            def backward(vjp_fn, cotangent):
                return jax.tree.map(lambda g: -0.5 * g, vjp_fn(cotangent))

            reverse = nn.custom_vjp(lambda m, x: nn.tanh(m(x)), forward, backward)
            return reverse(last, x)

    def loss_of(model: Any) -> Loss:
        def loss(params, batch):
            x, y, is_deep = batch
            predicted = model.apply({"params": params}, x, is_deep)
            return jnp.mean((predicted.astype(jnp.float32) - y) ** 2), ()

        return loss

    x = normal(0, 4, 16, 32)
    params = Lifted().init(jax.random.key(1), x, True)["params"]
    batch = (x, jnp.tanh(x @ normal(2, 32, 32) / 6), jnp.bool_(True))
    by_hand = lambda dtype: loss_of(Lifted(jnp.dtype(dtype)))
    # Its last gradient is reversed: it does not learn.
    return Program(loss_of(Lifted()), params, batch, by_hand)


# ------------------------------------------------------------------------------- nnx


def nnx_layers() -> Program:
    """Flax nnx: each of its layers once, LoRA and a sequence of blocks in a scan."""
    from flax import nnx

    class Layers(nnx.Module):
        def __init__(self, rngs, dtype=None):
            options = {"dtype": dtype, "rngs": rngs}
            self.conv = nnx.Conv(3, 16, (3, 3), strides=2, **options)
            self.batch_norm = nnx.BatchNorm(16, **options)
            self.group_norm = nnx.GroupNorm(16, 4, **options)
            self.up = nnx.ConvTranspose(16, 8, (2, 2), strides=(2, 2), **options)
            self.dense = nnx.LoRALinear(8, 32, lora_rank=4, **options)
            self.embed = nnx.Embed(64, 32, **options)
            self.layer_norm = nnx.LayerNorm(32, **options)
            self.attention = nnx.MultiHeadAttention(4, 32, decode=False, **options)
            self.rms_norm = nnx.RMSNorm(32, **options)
            self.general = nnx.LinearGeneral(32, (4, 8), **options)
            self.einsum = nnx.Einsum("bthd,hde->bte", (4, 8, 32), (32,), **options)
            cells = [nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell]
            self.rnns = nnx.List([nnx.RNN(cell(32, 32, **options)) for cell in cells])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

            @nnx.split_rngs(splits=3)
            @nnx.vmap
            def stack(rngs):
                return nnx.Linear(32, 32, dtype=dtype, rngs=rngs)

            self.blocks = stack(rngs)

        def __call__(self, images, tokens):
            x = nnx.relu(self.batch_norm(self.conv(images)))
            x = self.up(self.group_norm(x))
            x = self.dense(jnp.mean(x, axis=(1, 2)))
            y = self.layer_norm(self.embed(tokens) + x[:, None])
            y = y + self.attention(y, mask=nnx.make_causal_mask(tokens))
            y = self.einsum(self.general(self.rms_norm(y)))
            for rnn in self.rnns:
                y = y + rnn(y)

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(y, block):
                return y + nnx.gelu(block(y))

            y = self.dropout(forward(y, self.blocks))
            return self.embed.attend(y)

    def loss_of(dtype: DTypeLike | None) -> tuple[Loss, Any]:
        model = Layers(nnx.Rngs(0), dtype)
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, batch):
            images, tokens, labels = batch
            logits = nnx.merge(graph, params, rest, copy=True)(images, tokens)
            return cross_entropy(logits.astype(jnp.float32), labels), ()

        return loss, params

    loss, params = loss_of(None)
    tokens = _tokens(1, 4, 12) % 64
    batch = (normal(0, 4, 16, 16, 3), tokens, (tokens * 7) % 64)
    by_hand = lambda dtype: loss_of(jnp.dtype(dtype))[0]
    return Program(loss, params, batch, by_hand, learning_rate=3e-3)


# ----------------------------------------------------------------------------- haiku


def haiku_resnet() -> Program:
    """Haiku: a residual network with batch norms and their averages."""
    import haiku as hk

    def forward(images, is_training):
        net = hk.nets.ResNet(
            (1, 1, 1, 1),
            10,
            bottleneck=False,
            channels_per_group=(16, 32, 32, 64),
            use_projection=(True, True, True, True),
        )
        return net(images, is_training)

    return _of_haiku(forward, (normal(0, 8, 32, 32, 3),), jnp.arange(8), 1e-3)


def haiku_transformer() -> Program:
    """Haiku: a transformer of its attention, norms and linear layers, with dropout."""
    import haiku as hk

    def forward(tokens, is_training):
        x = hk.Embed(256, 64)(tokens)
        x = x + hk.get_parameter(
            "places", (32, 64), init=hk.initializers.RandomNormal()
        )
        mask = jnp.tril(jnp.ones((1, 1, 32, 32), bool))
        for _ in range(2):
            h = hk.LayerNorm(-1, True, True)(x)
            attention = hk.MultiHeadAttention(
                4, 16, w_init=hk.initializers.VarianceScaling(), model_size=64
            )
            x = x + attention(h, h, h, mask)
            h = jax.nn.gelu(hk.Linear(128)(hk.LayerNorm(-1, True, True)(x)))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(64)(h))
        return hk.Linear(256)(hk.RMSNorm(-1)(x))

    words = _tokens(0, 4, 33)
    return _of_haiku(forward, (words[:, :-1],), words[:, 1:], 1e-3)


def haiku_lstm() -> Program:
    """Haiku: a deep recurrent network of LSTM and GRU by dynamic_unroll."""
    import haiku as hk

    def forward(tokens, is_training):
        x = jnp.swapaxes(hk.Embed(256, 32)(tokens), 0, 1)
        core = hk.DeepRNN([hk.LSTM(48), jnp.tanh, hk.GRU(48)])
        x, _ = hk.dynamic_unroll(core, x, core.initial_state(len(tokens)))
        return jnp.swapaxes(hk.BatchApply(hk.Linear(256))(x), 0, 1)

    words = _tokens(0, 8, 25)
    return _of_haiku(forward, (words[:, :-1],), words[:, 1:], 3e-3)


def _of_haiku(
    forward: Callable[..., Any], args: Any, labels: jax.Array, learning_rate: float
) -> Program:
    import haiku as hk

    net = hk.transform_with_state(forward)
    params, state = net.init(jax.random.key(0), *args, is_training=True)

    def loss(params, batch):
        args, labels, state, key = batch
        logits, _ = net.apply(params, state, key, *args, is_training=True)
        return cross_entropy(logits, labels), jax.random.bits(key, (2,))

    batch = (args, labels, state, jax.random.key(1))
    return Program(loss, params, batch, learning_rate=learning_rate)


# --------------------------------------------------------------------------- equinox


def equinox_attention() -> Program:
    """Equinox: attention with rotary positions, norms, dropout and filtered scans."""
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norms: tuple[eqx.nn.LayerNorm, eqx.nn.RMSNorm]
        mlp: eqx.nn.MLP
        rope: eqx.nn.RotaryPositionalEmbedding
        dropout: eqx.nn.Dropout

        def __init__(self, key):
            keys = jax.random.split(key)
            self.attention = eqx.nn.MultiheadAttention(4, 64, key=keys[0])
            self.norms = (eqx.nn.LayerNorm(64), eqx.nn.RMSNorm(64))
            self.mlp = eqx.nn.MLP(64, 64, 128, 1, jax.nn.gelu, key=keys[1])
            self.rope = eqx.nn.RotaryPositionalEmbedding(16)
            self.dropout = eqx.nn.Dropout(0.1)

        def __call__(self, x, key):
            def turned(q, k, v):
                turn = jax.vmap(self.rope, in_axes=1, out_axes=1)
                return turn(q), turn(k), v

            h = jax.vmap(self.norms[0])(x)
            mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
            x = x + self.attention(h, h, h, mask, process_heads=turned)
            h = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
            return x + self.dropout(h, key=key)

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: Block
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(256, 64, key=keys[0])
            self.blocks = eqx.filter_vmap(Block)(jax.random.split(keys[1], 2))
            self.head = eqx.nn.Linear(64, 256, key=keys[2])

        def __call__(self, tokens, key):
            arrays, static = eqx.partition(self.blocks, eqx.is_array)

            def step(x, layer):
                block, key = layer
                return eqx.combine(block, static)(x, key), None

            x = jax.vmap(self.embed)(tokens)
            x, _ = lax.scan(step, x, (arrays, jax.random.split(key)))
            return jax.vmap(self.head)(x)

    words = _tokens(0, 4, 25)
    return _of_equinox(Model(jax.random.key(1)), (words[:, :-1],), words[:, 1:], 1e-3)


def equinox_rnn() -> Program:
    """Equinox: LSTM and GRU cells in scans of their own."""
    import equinox as eqx

    class Recurrent(eqx.Module):
        embed: eqx.nn.Embedding
        lstm: eqx.nn.LSTMCell
        gru: eqx.nn.GRUCell
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.embed = eqx.nn.Embedding(256, 32, key=keys[0])
            self.lstm = eqx.nn.LSTMCell(32, 48, key=keys[1])
            self.gru = eqx.nn.GRUCell(48, 48, key=keys[2])
            self.head = eqx.nn.Linear(48, 256, key=keys[3])

        def __call__(self, tokens, key):
            def step(carry, x):
                lstm, gru = carry
                lstm = self.lstm(x, lstm)
                gru = self.gru(lstm[0], gru)
                return (lstm, gru), gru

            zeros = jnp.zeros(48)
            start = ((zeros, zeros), zeros)
            _, hidden = lax.scan(step, start, jax.vmap(self.embed)(tokens))
            return jax.vmap(self.head)(hidden)

    words = _tokens(0, 8, 25)
    return _of_equinox(
        Recurrent(jax.random.key(1)), (words[:, :-1],), words[:, 1:], 3e-3
    )


def _of_equinox(
    model: Any, args: Any, labels: jax.Array, learning_rate: float
) -> Program:
    import equinox as eqx

    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        *args, labels, keys = batch
        logits = jax.vmap(eqx.combine(params, static))(*args, keys)
        return cross_entropy(logits, labels), jax.vmap(jax.random.bits)(keys)

    keys = jax.random.split(jax.random.key(2), len(labels))
    return Program(loss, params, (*args, labels, keys), learning_rate=learning_rate)


def equinox_images() -> Program:
    """Equinox: ConvTranspose, pools, BatchNorm with State, SpectralNorm with State."""
    import equinox as eqx

    class Autoencoder(eqx.Module):
        conv: eqx.nn.Conv2d
        norm: eqx.nn.BatchNorm
        group_norm: eqx.nn.GroupNorm
        narrow: eqx.nn.SpectralNorm
        wide: eqx.nn.WeightNorm
        pool: eqx.nn.MaxPool2d
        up: eqx.nn.ConvTranspose2d
        activation: eqx.nn.PReLU

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.conv = eqx.nn.Conv2d(3, 16, 3, 2, 1, key=keys[0])
            self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")
            self.group_norm = eqx.nn.GroupNorm(4, 16)
            self.pool = eqx.nn.MaxPool2d(2, 2)
            narrow = eqx.nn.Linear(16 * 16, 32, key=keys[1])
            self.narrow = eqx.nn.SpectralNorm(narrow, "weight", key=keys[2])
            self.wide = eqx.nn.WeightNorm(eqx.nn.Linear(32, 16 * 16, key=keys[3]))
            self.up = eqx.nn.ConvTranspose2d(16, 3, 4, 4, key=keys[4])
            self.activation = eqx.nn.PReLU()

        def __call__(self, image, state):
            x, state = self.norm(self.conv(image), state)
            x = self.pool(self.activation(self.group_norm(x)))
            x, state = self.narrow(x.reshape(-1), state)
            x = self.wide(jnp.tanh(x)).reshape(16, 4, 4)
            return self.up(x), state

    model, state = eqx.nn.make_with_state(Autoencoder)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        images, state = batch
        model = eqx.combine(params, static)
        run = jax.vmap(model, (0, None), (0, None), axis_name="batch")
        decoded, _ = run(images, state)
        return jnp.mean((decoded - images) ** 2), ()

    images = jnp.sin(normal(1, 8, 3, 1, 1) * jnp.linspace(0, 6, 16)) * normal(
        2, 8, 3, 16, 1
    )
    return Program(loss, params, (images, state), learning_rate=3e-3)


# ----------------------------------------------------------------------------- others


def keras_classifier() -> Program:
    """Keras on JAX: convolutions, norms, attention and a GRU by stateless_call."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    def build(dtype: str) -> Any:
        keras.utils.set_random_seed(0)
        policy = {"dtype": dtype}
        inputs = keras.Input((16, 16, 3))
        x = keras.layers.Conv2D(16, 3, strides=2, padding="same", **policy)(inputs)
        x = keras.layers.BatchNormalization(**policy)(x)
        x = keras.layers.Activation("gelu", **policy)(x)
        x = keras.layers.SeparableConv2D(32, 3, padding="same", **policy)(x)
        x = keras.layers.Reshape((64, 32), **policy)(x)
        x = keras.layers.LayerNormalization(**policy)(x)
        x = x + keras.layers.MultiHeadAttention(4, 8, **policy)(x, x)
        x = keras.layers.GRU(32, **policy)(x)
        logits = keras.layers.Dense(8, **policy)(x)
        return keras.Model(inputs, logits)

    def loss_of(model: Any) -> Loss:
        def loss(params, batch):
            images, labels, rest = batch
            logits, _ = model.stateless_call(params, rest, images, training=True)
            return cross_entropy(logits.astype(jnp.float32), labels), ()

        return loss

    model = build("float32")
    params = [jnp.asarray(v.value) for v in model.trainable_variables]
    rest = [jnp.asarray(v.value) for v in model.non_trainable_variables]
    batch = (normal(0, 8, 16, 16, 3), jnp.arange(8), rest)
    by_hand = lambda dtype: loss_of(build(f"mixed_{dtype}"))
    return Program(loss_of(model), params, batch, by_hand, learning_rate=3e-3)


def penzai_transformer() -> Program:
    """penzai: a Llama-like transformer on named axes, two layers in a stack."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    def build(dtype: DTypeLike) -> Any:
        config = llamalike_common.LlamalikeTransformerConfig(
            num_kv_heads=2,
            query_head_multiplier=2,
            embedding_dim=64,
            projection_dim=16,
            mlp_hidden_dim=128,
            num_decoder_blocks=2,
            vocab_size=256,
            mlp_variant="swiglu",
            tie_embedder_and_logits=False,
            parameter_dtype=dtype,
            activation_dtype=dtype,
            use_layer_stack=True,
        )
        model = llamalike_common.build_llamalike_transformer(
            config, init_base_rng=jax.random.key(0)
        )
        return pz.unbind_params(model)

    def loss_of(model: Any, dtype: DTypeLike) -> Loss:
        def loss(params, batch):
            params = jax.tree.map(lambda x: x.astype(dtype), params)
            bound = pz.bind_variables(model, params)
            logits = bound(pz.nx.wrap(batch[:, :-1]).tag("batch", "seq"))
            logits = logits.unwrap("batch", "seq", "vocabulary")
            return cross_entropy(logits.astype(jnp.float32), batch[:, 1:]), ()

        return loss

    model, variables = build(jnp.float32)
    params = [variable.freeze() for variable in variables]
    by_hand = lambda dtype: loss_of(build(jnp.dtype(dtype))[0], dtype)
    loss = loss_of(model, jnp.float32)
    return Program(loss, params, _tokens(0, 4, 25), by_hand, learning_rate=1e-3)


def _tokens(seed: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 4, 256)


ENTRIES = (
    Entry("GPT-2", ["transformers", "flax"], gpt2),
    Entry("Llama", ["transformers", "flax"], llama),
    Entry("GPT-J", ["transformers", "flax"], gpt_j),
    Entry("BERT", ["transformers", "flax"], bert),
    Entry("ViT", ["transformers", "flax"], vit),
    Entry("CLIP", ["transformers", "flax"], clip),
    Entry("BART", ["transformers", "flax"], bart),
    Entry("Whisper", ["transformers", "flax"], whisper),
    Entry("linen's layers", ["flax"], linen_layers),
    Entry("linen's lifted transforms", ["flax"], linen_lifted),
    Entry("nnx's layers", ["flax"], nnx_layers),
    Entry("Haiku ResNet", ["dm-haiku"], haiku_resnet),
    Entry("Haiku transformer", ["dm-haiku"], haiku_transformer),
    Entry("Haiku recurrent network", ["dm-haiku"], haiku_lstm),
    Entry("Equinox transformer", ["equinox"], equinox_attention),
    Entry("Equinox recurrent network", ["equinox"], equinox_rnn),
    Entry("Equinox autoencoder", ["equinox"], equinox_images),
    Entry("Keras classifier", ["keras"], keras_classifier),
    Entry("penzai transformer", ["penzai"], penzai_transformer),
)
