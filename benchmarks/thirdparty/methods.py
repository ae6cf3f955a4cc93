"""Optimization, reinforcement learning, and methods written out after papers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from benchmarks.thirdparty.parts import cross_entropy, layers, mlp, normal
from benchmarks.thirdparty.program import Entry, Program

# ---------------------------------------------------------------------- optimization


def kronecker_factored() -> Program:
    """K-FAC (Martens and Grosse 2015): the loss after a step with Kronecker factors."""

    def forward(params, probes, x):
        inputs = []
        for i, ((w, b), probe) in enumerate(zip(params, probes, strict=True)):
            inputs.append(jnp.concatenate([x, jnp.ones((len(x), 1))], axis=-1))
            x = x @ w + b + probe
            x = jnp.tanh(x) if i + 1 < len(params) else x
        return x, inputs

    def solve(factor, right):
        damped = factor + 0.1 * jnp.eye(len(factor))
        return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(damped), right)

    def loss(params, batch):
        x, labels, key = batch
        probes = [jnp.zeros((len(x), len(b))) for _, b in params]

        def likelihood(params, probes, labels):
            logits, inputs = forward(params, probes, x)
            return cross_entropy(logits, labels), (logits, inputs)

        gradient, (logits, _) = jax.grad(likelihood, has_aux=True)(
            params, probes, labels
        )
        drawn = jax.random.categorical(key, lax.stop_gradient(logits))
        slopes, (_, inputs) = jax.grad(likelihood, 1, has_aux=True)(
            params, probes, drawn
        )
        stepped = []
        for (w, b), (dw, db), a, g in zip(
            params, gradient, inputs, slopes, strict=True
        ):
            joint = solve(a.T @ a / len(x), jnp.concatenate([dw, db[None]]))
            joint = solve(g.T @ g * len(x), joint.T).T
            stepped.append((w - 0.1 * joint[:-1], b - 0.1 * joint[-1]))
        return likelihood(stepped, probes, labels)[0], ()

    x = normal(0, 64, 32)
    labels = jnp.argmax(x @ normal(1, 32, 8), axis=-1)
    return Program(loss, layers(3, 32, 48, 8), (x, labels, jax.random.key(2)))


def hessian_free() -> Program:
    """Hessian-free optimization (Martens 2010): the loss after conjugate gradients."""

    def loss(params, batch):
        x, y = batch

        def predict(params):
            return mlp(params, x)

        def error(params):
            return jnp.mean((predict(params) - y) ** 2)

        def curvature(vector):
            _, moved = jax.jvp(predict, (params,), (vector,))
            _, pull = jax.vjp(predict, params)
            (product,) = pull(2 * moved / y.size)
            return jax.tree.map(lambda p, v: p + 0.1 * v, product, vector)

        direction, _ = jax.scipy.sparse.linalg.cg(
            curvature, jax.grad(error)(params), tol=1e-3, maxiter=10
        )
        return error(jax.tree.map(lambda p, d: p - 0.5 * d, params, direction)), ()

    x = normal(0, 64, 16)
    return Program(loss, layers(1, 16, 32, 4), (x, jnp.sin(2 * x[:, :4])))


def kfac_registered() -> Program:
    """kfac-jax: a network whose layers and loss are registered, without a step."""
    import kfac_jax

    def loss(params, batch):
        x, y = batch
        for w, b in params[:-1]:
            x = jax.nn.relu(kfac_jax.register_dense(x @ w + b, x, w, b))
        w, b = params[-1]
        predicted = kfac_jax.register_dense(x @ w + b, x, w, b)
        kfac_jax.register_squared_error_loss(predicted, y)
        return jnp.mean((predicted - y) ** 2), ()

    x = normal(0, 64, 32)
    return Program(loss, layers(1, 32, 64, 64, 8), (x, jnp.sin(x[:, :8])))


def muon_steps() -> Program:
    """optax.contrib.muon: the loss after two steps, from a learned start."""
    import optax

    return _inner_training(optax.contrib.muon(0.05), steps=2)


def galore_steps() -> Program:
    """optax.contrib.galore: the loss after four steps, its first-order gradient."""
    import optax

    return _inner_training(
        optax.contrib.galore(0.05, rank=8), steps=4, first_order=True
    )


def prodigy_steps() -> Program:
    """optax.contrib.prodigy: the loss after eight steps, its first-order gradient."""
    import optax

    return _inner_training(
        optax.contrib.prodigy(estim_lr0=1e-2), steps=8, first_order=True
    )


def schedule_free_steps() -> Program:
    """optax.contrib.schedule_free: the loss at the average of four steps."""
    import optax

    return _inner_training(
        optax.contrib.schedule_free_sgd(0.2, warmup_steps=2),
        steps=4,
        evaluated=optax.contrib.schedule_free_eval_params,
    )


def lbfgs_head() -> Program:
    """optax.lbfgs: ridge regression on learned features, with a line search."""
    import optax

    optimizer = optax.lbfgs()

    def fitted(head, features, y):
        def objective(head):
            return jnp.mean((features @ head - y) ** 2) + 1e-2 * jnp.mean(head**2)

        value_and_grad = optax.value_and_grad_from_state(objective)

        def step(carry, _):
            head, state = carry
            value, gradient = value_and_grad(head, state=state)
            updates, state = optimizer.update(
                gradient, state, head, value=value, grad=gradient, value_fn=objective
            )
            return (optax.apply_updates(head, updates), state), value

        (head, _), _ = lax.scan(step, (head, optimizer.init(head)), length=8)
        return head

    def loss(params, batch):
        x, y = batch
        features = jnp.tanh(mlp(params, x))
        support, query = jnp.split(features, 2)
        head = fitted(jnp.zeros((16, 2)), lax.stop_gradient(support), y[:32])
        return jnp.mean((query @ lax.stop_gradient(head) - y[32:]) ** 2), ()

    x = normal(0, 64, 16)
    y = jnp.sin(x[:, :2]) * x[:, 2:4]
    return Program(loss, layers(1, 16, 64, 16), (x, y))


def ctc() -> Program:
    """optax.ctc_loss: speech frames of several lengths through an LSTM."""
    import optax

    def loss(params, batch):
        frames, frame_paddings, labels, label_paddings = batch
        hidden = _lstm(params["lstm"], frames)
        logits = mlp(params["head"], hidden)
        each = optax.losses.ctc_loss(logits, frame_paddings, labels, label_paddings)
        return jnp.mean(each), jnp.sum(label_paddings == 0, axis=-1)

    params = {"lstm": layers(0, 32 + 48, 4 * 48)[0], "head": layers(1, 48, 32)}
    labels = jax.random.randint(jax.random.key(2), (8, 10), 1, 32)
    label_lengths = jnp.array([10, 4, 7, 9, 3, 10, 6, 5])
    frame_lengths = jnp.array([40, 40, 33, 36, 21, 30, 40, 25])
    spoken = jax.nn.one_hot(jnp.repeat(labels, 4, axis=1), 32)
    frames = spoken + 0.3 * normal(3, 8, 40, 32)
    batch = (
        frames,
        (jnp.arange(40) >= frame_lengths[:, None]).astype(jnp.float32),
        labels,
        (jnp.arange(10) >= label_lengths[:, None]).astype(jnp.float32),
    )
    return Program(loss, params, batch, learning_rate=1e-2)


def optax_losses() -> Program:
    """optax.losses: NT-Xent, poly and focal losses of one convolutional network."""
    import optax

    def loss(params, batch):
        images, labels, tags = batch
        x = images
        for kernel in params["convs"]:
            x = jax.nn.relu(_conv(x, kernel, stride=2))
        x = jnp.mean(x, axis=(1, 2))
        contrast = optax.losses.ntxent(mlp(params["project"], x), labels)
        logits = mlp(params["classify"], x)
        poly = optax.losses.poly_loss_cross_entropy(logits, jax.nn.one_hot(labels, 8))
        focal = optax.losses.sigmoid_focal_loss(mlp(params["tag"], x), tags, alpha=0.3)
        return contrast + jnp.mean(poly) + jnp.mean(focal), ()

    params = {
        "convs": [_kernel(0, 3, 16), _kernel(1, 16, 32)],
        "project": layers(2, 32, 32),
        "classify": layers(3, 32, 8),
        "tag": layers(4, 32, 12),
    }
    labels = jnp.arange(32) % 8
    images = normal(5, 8, 16, 16, 3)[labels] + 0.5 * normal(6, 32, 16, 16, 3)
    tags = (normal(7, 32, 12) > 1).astype(jnp.float32)
    return Program(loss, params, (images, labels, tags))


# ------------------------------------------------------------ reinforcement learning


def double_dqn() -> Program:
    """rlax: double DQN with prioritized samples of a replay buffer."""
    import rlax

    def loss(params, batch):
        replay, target, key = batch
        chosen = jax.random.categorical(key, replay["priority"], shape=(64,))
        s, a, r, discount, s_next = (
            replay[k][chosen] for k in ("s", "a", "r", "d", "n")
        )
        errors = jax.vmap(rlax.double_q_learning)(
            mlp(params, s, jax.nn.relu),
            a,
            r,
            discount,
            mlp(target, s_next, jax.nn.relu),
            mlp(params, s_next, jax.nn.relu),
        )
        weights = 1 / jax.nn.softmax(replay["priority"])[chosen]
        weights = (weights / jnp.max(weights)) ** 0.6
        return jnp.mean(weights * rlax.huber_loss(errors)), chosen

    keys = jax.random.split(jax.random.key(0), 2)
    replay = {
        "s": normal(1, 256, 16),
        "a": jax.random.randint(keys[0], (256,), 0, 6),
        "r": normal(2, 256),
        "d": 0.99 * (normal(3, 256) < 1.5),
        "n": normal(4, 256, 16),
        "priority": normal(5, 256),
    }
    sizes = (16, 64, 64, 6)
    return Program(loss, layers(6, *sizes), (replay, layers(7, *sizes), keys[1]))


def quantile_dqn() -> Program:
    """rlax: quantile regression Q-learning on images."""
    import rlax

    tau = (jnp.arange(16) + 0.5) / 16

    def quantiles(params, images):
        x = jax.nn.relu(_conv(images, params["conv_1"], stride=2))
        x = jax.nn.relu(_conv(x, params["conv_2"], stride=2))
        x = mlp(params["head"], x.reshape(len(x), -1), jax.nn.relu)
        return x.reshape(len(x), 16, 4)

    def loss(params, batch):
        s, a, r, s_next, target = batch
        learn = jax.vmap(rlax.quantile_q_learning, (0, None, 0, 0, 0, 0, 0, None))
        errors = learn(
            quantiles(params, s),
            tau,
            a,
            r,
            jnp.full_like(r, 0.9),
            quantiles(params, s_next),
            quantiles(target, s_next),
            1.0,
        )
        return jnp.mean(errors), ()

    def network(seed):
        return {
            "conv_1": _kernel(seed, 2, 16),
            "conv_2": _kernel(seed + 1, 16, 16),
            "head": layers(seed + 2, 3 * 3 * 16, 64, 64),
        }

    batch = (
        normal(10, 32, 12, 12, 2),
        jax.random.randint(jax.random.key(11), (32,), 0, 4),
        normal(12, 32),
        normal(13, 32, 12, 12, 2),
        network(20),
    )
    return Program(loss, network(0), batch)


def impala() -> Program:
    """rlax: IMPALA, an actor-critic with an LSTM and V-trace."""
    import rlax

    def loss(params, batch):
        s, a, r, discount, behaviour = batch
        hidden = _lstm(params["lstm"], jax.nn.relu(mlp(params["body"], s)))
        hidden = jnp.swapaxes(hidden, 0, 1)
        logits = mlp(params["policy"], hidden)[:-1]
        values = mlp(params["value"], hidden)[..., 0]
        ratios = jax.vmap(rlax.categorical_importance_sampling_ratios)(
            logits, behaviour, a
        )
        vtrace = jax.vmap(rlax.vtrace_td_error_and_advantage, 1, 1)(
            values[:-1], values[1:], r, discount, ratios
        )
        weights = jnp.ones_like(r)
        policy = jax.vmap(rlax.policy_gradient_loss, 1)(
            logits, a, vtrace.pg_advantage, weights
        )
        entropy = jax.vmap(rlax.entropy_loss, 1)(logits, weights)
        value = 0.5 * jnp.mean(vtrace.errors**2)
        return jnp.mean(policy) + value + 0.01 * jnp.mean(entropy), ()

    params = {
        "body": layers(0, 16, 32),
        "lstm": layers(1, 32 + 32, 4 * 32)[0],
        "policy": layers(2, 32, 6),
        "value": layers(3, 32, 1),
    }
    a = jax.random.randint(jax.random.key(4), (20, 8), 0, 6)
    discount = 0.99 * (normal(5, 20, 8) < 1.5)
    batch = (
        normal(6, 8, 21, 16),
        a,
        normal(7, 20, 8),
        discount,
        normal(8, 20, 8, 6),
    )
    return Program(loss, params, batch)


def ppo() -> Program:
    """rlax: PPO with generalized advantages and a shuffled minibatch."""
    import rlax

    def loss(params, batch):
        s, a, r, old, key = batch
        values = mlp(params["value"], s)[..., 0]
        advantages = jax.vmap(
            rlax.truncated_generalized_advantage_estimation, (1, 1, None, 1), 1
        )(r, jnp.full_like(r, 0.99), 0.95, lax.stop_gradient(values))
        returns = advantages + lax.stop_gradient(values[:-1])
        chosen = jax.random.permutation(key, r.size)[:128]
        advantages = advantages.reshape(-1)[chosen]
        advantages = (advantages - jnp.mean(advantages)) / (jnp.std(advantages) + 1e-8)
        logits = mlp(params["policy"], s[:-1].reshape(-1, 16)[chosen])
        a = a.reshape(-1)[chosen]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), a[:, None], -1)[:, 0]
        ratios = jnp.exp(logp - old.reshape(-1)[chosen])
        policy = rlax.clipped_surrogate_pg_loss(ratios, advantages, 0.2)
        errors = returns.reshape(-1)[chosen] - values[:-1].reshape(-1)[chosen]
        entropy = rlax.entropy_loss(logits, jnp.ones(128))
        return policy + 0.5 * jnp.mean(errors**2) + 0.01 * entropy, chosen

    params = {"policy": layers(0, 16, 64, 64, 4), "value": layers(1, 16, 64, 64, 1)}
    a = jax.random.randint(jax.random.key(2), (32, 8), 0, 4)
    old = jnp.log(0.25) + 0.1 * normal(3, 32, 8)
    batch = (normal(4, 33, 8, 16), a, normal(5, 32, 8), old, jax.random.key(6))
    return Program(loss, params, batch)


def muzero() -> Program:
    """mctx: Gumbel MuZero searches with a learned model, and learns from the search."""
    import mctx

    def predict(params, state):
        return mlp(params["policy"], state), jnp.tanh(mlp(params["value"], state))[:, 0]

    def recurrent_fn(params, key, action, state):
        del key
        moved = jnp.concatenate([state, jax.nn.one_hot(action, 6)], axis=-1)
        state = jnp.tanh(mlp(params["dynamics"], moved, jax.nn.relu))
        logits, value = predict(params, state)
        reward = mlp(params["reward"], state)[:, 0]
        discount = jnp.full_like(value, 0.97)
        output = mctx.RecurrentFnOutput(
            reward=reward, discount=discount, prior_logits=logits, value=value
        )
        return output, state

    def loss(params, batch):
        observed, returns, key = batch
        state = jnp.tanh(mlp(params["represent"], observed, jax.nn.relu))
        logits, value = predict(params, state)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=state)
        policy = mctx.gumbel_muzero_policy(
            params, key, lax.stop_gradient(root), recurrent_fn, num_simulations=16
        )
        weights = lax.stop_gradient(policy.action_weights)
        cross_entropy = -jnp.sum(weights * jax.nn.log_softmax(logits), axis=-1)
        visits = policy.search_tree.summary().visit_counts
        loss = jnp.mean(cross_entropy) + jnp.mean((value - returns) ** 2)
        return loss, jnp.sum(visits, axis=-1)

    params = {
        "represent": layers(0, 16, 64, 32),
        "dynamics": layers(1, 32 + 6, 64, 32),
        "policy": layers(2, 32, 6),
        "value": layers(3, 32, 1),
        "reward": layers(4, 32, 1),
    }
    batch = (normal(5, 16, 16), jnp.tanh(normal(6, 16)), jax.random.key(7))
    return Program(loss, params, batch)


# ------------------------------------------------------------------- sequence models


def s5() -> Program:
    """S5 (Smith et al. 2023): complex diagonal state spaces in associative scans."""

    def state_space(p, u):
        rates = -jnp.exp(p["decay"]) + 1j * p["frequency"]
        step = jnp.exp(p["log_step"])
        a = jnp.exp(rates * step)
        b = ((a - 1) / rates)[:, None] * (p["b"][0] + 1j * p["b"][1])
        c = p["c"][0] + 1j * p["c"][1]
        driven = u.astype(b.dtype) @ b.T

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        gains = jnp.broadcast_to(a, driven.shape)
        _, states = lax.associative_scan(combine, (gains, driven))
        return 2 * (states @ c.T).real + p["d"] * u

    def loss(params, batch):
        inputs, labels = batch
        x = inputs @ params["encode"]
        for p in params["layers"]:
            y = jax.nn.gelu(jax.vmap(state_space, (None, 0))(p, _layer_norm(x)))
            x = x + y * jax.nn.sigmoid(y @ p["gate"])
        logits = mlp(params["decode"], jnp.mean(x, axis=1))
        return cross_entropy(logits, labels), ()

    def layer(seed):
        return {
            "decay": jnp.full(32, -0.7),
            "frequency": jnp.pi * jnp.arange(32.0),
            "log_step": jnp.linspace(-5.0, -2.3, 32),
            "b": normal(seed, 2, 32, 32) / 32**0.5,
            "c": normal(seed + 1, 2, 32, 32) / 32**0.5,
            "d": normal(seed + 2, 32),
            "gate": normal(seed + 3, 32, 32) / 32**0.5,
        }

    params = {
        "encode": normal(0, 4, 32) / 2,
        "layers": [layer(10), layer(20)],
        "decode": layers(1, 32, 4),
    }
    labels = jnp.arange(16) % 4
    waves = jnp.sin(jnp.arange(128)[:, None] * (1.0 + labels) / 6).T[..., None]
    batch = (waves + 0.5 * normal(2, 16, 128, 4), labels)
    return Program(loss, params, batch, learning_rate=3e-3)


def mamba() -> Program:
    """Mamba (Gu and Dao 2023): a language model of selective scans."""

    def mixer(p, x):
        h, gate = jnp.split(x @ p["in"], 2, axis=-1)
        h = lax.conv_general_dilated(
            h,
            p["conv"],
            (1,),
            [(3, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=64,
        )
        h = jax.nn.silu(h + p["conv_bias"])
        step, b, c = jnp.split(h @ p["select"], (4, 4 + 16), axis=-1)
        step = jax.nn.softplus(step @ p["step"] + p["step_bias"])
        a = -jnp.exp(p["a_log"])

        def scan(state, inputs):
            step, b, c, h = inputs
            decay = jnp.exp(step[..., None] * a)
            state = decay * state + (step * h)[..., None] * b[:, None, :]
            return state, jnp.einsum("bdn,bn->bd", state, c)

        inputs = jax.tree.map(lambda t: jnp.swapaxes(t, 0, 1), (step, b, c, h))
        _, y = lax.scan(scan, jnp.zeros((len(x), 64, 16)), inputs)
        y = jnp.swapaxes(y, 0, 1) + h * p["d"]
        return (y * jax.nn.silu(gate)) @ p["out"]

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        for p in params["layers"]:
            x = x + mixer(p, _rms_norm(x, p["scale"]))
        logits = _rms_norm(x, params["scale"]) @ params["embed"].T
        return cross_entropy(logits, tokens[:, 1:]), ()

    def layer(seed):
        return {
            "scale": jnp.ones(32),
            "in": normal(seed, 32, 128) / 32**0.5,
            "conv": normal(seed + 1, 4, 1, 64) / 2,
            "conv_bias": jnp.zeros(64),
            "select": normal(seed + 2, 64, 4 + 32) / 8,
            "step": normal(seed + 3, 4, 64) / 2,
            "step_bias": jnp.linspace(-6.9, -2.3, 64),
            "a_log": jnp.log(jnp.tile(jnp.arange(1.0, 17.0), (64, 1))),
            "d": jnp.ones(64),
            "out": normal(seed + 4, 64, 32) / 8,
        }

    params = {
        "embed": normal(0, 64, 32) * 0.1,
        "layers": [layer(10), layer(20)],
        "scale": jnp.ones(32),
    }
    tokens = jax.random.randint(jax.random.key(1), (4, 49), 0, 64)
    return Program(loss, params, tokens, learning_rate=3e-3)


def cached_decoder() -> Program:
    """A transformer that is fed token by token, with a cache of keys and values."""

    def loss(params, tokens):
        def step(cache, inputs):
            position, token = inputs
            return _decode(params, cache, position, token)

        inputs = (jnp.arange(31), tokens[:, :-1].T)
        cache, logits = lax.scan(step, _empty_cache(len(tokens), 32), inputs)
        written = jnp.sum(jnp.any(cache[0][0] != 0, axis=(0, 2)))
        return cross_entropy(logits, tokens[:, 1:].T), written

    tokens = jax.random.randint(jax.random.key(0), (4, 32), 0, 64)
    return Program(loss, _decoder(1), tokens)


def sampled_text() -> Program:
    """REINFORCE: a while loop samples text with a cache; its likelihood is trained."""

    def sample(params, prompt, key):
        def proceed(carry):
            return carry[0] < 23

        def body(carry):
            position, tokens, cache = carry
            cache, logits = _decode(params, cache, position, tokens[:, position])
            noise = jax.random.fold_in(key, position)
            drawn = jax.random.categorical(noise, logits / 0.7)
            drawn = jnp.where(position + 1 < 8, tokens[:, position + 1], drawn)
            tokens = tokens.at[:, position + 1].set(drawn)
            return position + 1, tokens, cache

        tokens = jnp.zeros((len(prompt), 24), jnp.int32).at[:, :8].set(prompt)
        start = (0, tokens, _empty_cache(len(prompt), 24))
        position, tokens, _ = lax.while_loop(proceed, body, start)
        return position, tokens

    def loss(params, batch):
        prompt, key = batch
        position, tokens = sample(lax.stop_gradient(params), prompt, key)

        def step(cache, inputs):
            return _decode(params, cache, *inputs)

        inputs = (jnp.arange(23), tokens[:, :-1].T)
        _, logits = lax.scan(step, _empty_cache(len(prompt), 24), inputs)
        logp = jax.nn.log_softmax(logits[7:])
        logp = jnp.take_along_axis(logp, tokens.T[8:, :, None], axis=-1)[..., 0]
        reward = jnp.mean(tokens[:, 8:] % 2 == 0, axis=-1)
        advantage = reward - jnp.mean(reward)
        return -jnp.mean(jnp.sum(logp, axis=0) * advantage), (position, tokens[:, :8])

    prompt = jax.random.randint(jax.random.key(0), (8, 8), 0, 64)
    return Program(loss, _decoder(1), (prompt, jax.random.key(2)))


# --------------------------------------------------------------- experts and devices


def ring_attention() -> Program:
    """Ring attention (Liu et al. 2023): each device holds a piece of the sequence."""
    count = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("ring",))
    ring = [(i, (i + 1) % count) for i in range(count)]

    def attend(q, k, v):
        rank, size = lax.axis_index("ring"), q.shape[1]
        rows = rank * size + jnp.arange(size)

        def step(carry, i):
            out, total, largest, k, v = carry
            columns = ((rank - i) % count) * size + jnp.arange(size)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
            scores = jnp.where(rows[:, None] >= columns, scores, -1e30)
            new = jnp.maximum(largest, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - new[..., None])
            shrunk = jnp.exp(largest - new)
            total = total * shrunk + jnp.sum(weights, axis=-1)
            out = out * shrunk[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
            k, v = lax.ppermute((k, v), "ring", ring)
            return (out, total, new, k, v), None

        out = jnp.zeros_like(jnp.swapaxes(q, 1, 2))
        total = jnp.zeros_like(out[..., 0])
        start = (out, total, total - 1e30, k, v)
        (out, total, *_), _ = lax.scan(step, start, jnp.arange(count))
        return jnp.swapaxes(out / total[..., None], 1, 2)

    spread = PartitionSpec(None, "ring")
    attend = jax.shard_map(
        attend, mesh=mesh, in_specs=(spread, spread, spread), out_specs=spread
    )

    def loss(params, batch):
        x, y = batch
        qkv = (x @ params["qkv"]).reshape(*x.shape[:2], 3, 4, 16)
        attended = attend(*jnp.moveaxis(qkv, 2, 0))
        x = x + attended.reshape(x.shape) @ params["out"]
        return jnp.mean((x - y) ** 2), ()

    params = {"qkv": normal(0, 64, 192) / 8, "out": normal(1, 64, 64) / 8}
    return Program(loss, params, (normal(2, 2, 16 * count, 64), normal(3, 2, 1, 64)))


def tensor_parallel() -> Program:
    """Megatron's MLP (Shoeybi et al. 2019): columns, rows and data over devices."""
    size = min(4, jax.device_count())
    mesh = Mesh(np.array(jax.devices()).reshape(-1, size), ("data", "model"))

    def forward(params, x, y):
        for p in params:
            h = jax.nn.gelu(_layer_norm(x) @ p["up"] + p["up_bias"])
            x = x + lax.psum(h @ p["down"], "model") + p["down_bias"]
        return lax.pmean(jnp.mean((x - y) ** 2), "data")

    specs = {
        "up": PartitionSpec(None, "model"),
        "up_bias": PartitionSpec("model"),
        "down": PartitionSpec("model", None),
        "down_bias": PartitionSpec(),
    }
    data = PartitionSpec("data")
    forward = jax.shard_map(
        forward,
        mesh=mesh,
        in_specs=([specs] * 2, data, data),
        out_specs=PartitionSpec(),
    )

    def loss(params, batch):
        return forward(params, *batch), ()

    def layer(seed):
        (up, up_bias), (down, down_bias) = layers(seed, 32, 128, 32)
        return {"up": up, "up_bias": up_bias, "down": down, "down_bias": down_bias}

    x = normal(0, 64, 32)
    return Program(loss, [layer(1), layer(2)], (x, jnp.sin(2 * x)))


def switch_experts() -> Program:
    """GShard (Lepikhin et al. 2021): two experts a token, and one-hot dispatch."""
    experts, capacity = 8, 40

    def mixture(params, x):
        gates = jax.nn.softmax(x @ params["router"])
        top, chosen = lax.top_k(gates, 2)
        top = top / jnp.sum(top, axis=-1, keepdims=True)
        masks = jax.nn.one_hot(chosen.T, experts)
        positions = jnp.cumsum(masks.reshape(-1, experts), axis=0) - 1
        positions = positions.reshape(masks.shape)
        masks = masks * (positions < capacity)
        places = jnp.sum(positions * masks, axis=-1).astype(jnp.int32)
        dispatch = masks[..., None] * jax.nn.one_hot(places, capacity)[:, :, None]
        combine = jnp.einsum("kt,ktec->tec", top.T, dispatch)
        queued = jnp.einsum("tec,td->ecd", jnp.sum(dispatch, axis=0), x)
        hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", queued, params["up"]))
        out = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
        balance = experts * jnp.mean(masks[0], axis=0) @ jnp.mean(gates, axis=0)
        return jnp.einsum("tec,ecd->td", combine, out), balance

    def loss(params, batch):
        x, y = batch
        mixed, balance = mixture(params, _layer_norm(x))
        return jnp.mean((x + mixed - y) ** 2) + 0.01 * balance, ()

    params = {
        "router": normal(0, 32, experts) / 32**0.5,
        "up": normal(1, experts, 32, 64) / 32**0.5,
        "down": normal(2, experts, 64, 32) / 8,
    }
    x = normal(3, 128, 32)
    return Program(loss, params, (x, jnp.sin(2 * x)), learning_rate=3e-3)


def ragged_experts() -> Program:
    """MegaBlocks (Gale et al. 2022): tokens sorted by expert, and lax.ragged_dot."""
    experts = 8

    def mixture(params, x):
        gates, chosen = lax.top_k(x @ params["router"], 2)
        gates = jax.nn.softmax(gates)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        h = x[order // 2]
        gate = lax.ragged_dot(h, params["gate"], sizes)
        up = lax.ragged_dot(h, params["up"], sizes)
        out = lax.ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)
        weighted = out * gates.reshape(-1)[order, None]
        return jnp.zeros_like(x).at[order // 2].add(weighted), jnp.sum(sizes)

    def loss(params, batch):
        x, y = batch
        mixed, tokens = mixture(params, _layer_norm(x))
        return jnp.mean((x + mixed - y) ** 2), tokens

    params = {
        "router": normal(0, 32, experts) / 32**0.5,
        "gate": normal(1, experts, 32, 48) / 32**0.5,
        "up": normal(2, experts, 32, 48) / 32**0.5,
        "down": normal(3, experts, 48, 32) / 48**0.5,
    }
    x = normal(4, 128, 32)
    return Program(loss, params, (x, jnp.sin(2 * x)))


def pallas_dense() -> Program:
    """A Pallas kernel of a dense layer with GELU, interpreted, with its own VJP."""
    from jax.experimental import pallas as pl

    def kernel(x, w, b, out):
        y = jnp.dot(x[...], w[...], preferred_element_type=jnp.float32) + b[...]
        out[...] = jax.nn.gelu(y).astype(out.dtype)

    def forward(x, w, b):
        rows, columns = len(x), w.shape[1]
        return pl.pallas_call(
            kernel,
            grid=(rows // 32, columns // 32),
            in_specs=[
                pl.BlockSpec((32, x.shape[1]), lambda i, j: (i, 0)),
                pl.BlockSpec((x.shape[1], 32), lambda i, j: (0, j)),
                pl.BlockSpec((1, 32), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((32, 32), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
            interpret=True,
        )(x, w, b[None])

    dense = jax.custom_vjp(forward)

    def forward_rule(x, w, b):
        return forward(x, w, b), (x, w, b)

    def backward_rule(residuals, g):
        x, w, b = residuals
        _, pull = jax.vjp(jax.nn.gelu, x @ w + b)
        (g,) = pull(g)
        return g @ w.T, x.T @ g, jnp.sum(g, axis=0)

    dense.defvjp(forward_rule, backward_rule)

    def loss(params, batch):
        x, y = batch
        for w, b in params[:-1]:
            x = dense(x, w, b)
        return jnp.mean((mlp(params[-1:], x) - y) ** 2), ()

    x = normal(0, 64, 32)
    return Program(loss, layers(1, 32, 64, 64, 8), (x, jnp.sin(x[:, :8])))


# ----------------------------------------------------------------- physics and images


def fourier_operator_1d() -> Program:
    """A Fourier neural operator (Li et al. 2021) in one dimension."""

    def spectral(weights, x):
        modes = weights.shape[1]
        spectrum = jnp.fft.rfft(x, axis=1)
        kept = jnp.einsum(
            "bmi,mio->bmo", spectrum[:, :modes], weights[0] + 1j * weights[1]
        )
        spectrum = jnp.zeros_like(spectrum).at[:, :modes].set(kept)
        return jnp.fft.irfft(spectrum, n=x.shape[1], axis=1)

    def loss(params, batch):
        x, y = batch
        h = mlp(params["lift"], x)
        for weights, (w, b) in zip(params["spectral"], params["local"], strict=True):
            h = jax.nn.gelu(spectral(weights, h) + h @ w + b)
        predicted = mlp(params["project"], h, jax.nn.gelu)
        off, size = (jnp.linalg.norm(t, axis=1) for t in (predicted - y, y))
        return jnp.mean(off / size), ()

    params = {
        "lift": layers(0, 2, 32),
        "spectral": [normal(i, 2, 12, 32, 32) / 32 for i in (1, 2)],
        "local": layers(3, 32, 32, 32),
        "project": layers(4, 32, 64, 1),
    }
    grid = jnp.linspace(0, 2 * jnp.pi, 64, endpoint=False)
    phase = normal(5, 8, 1)
    start = jnp.sin(grid + phase) + 0.5 * jnp.cos(3 * grid - phase)
    x = jnp.stack([start, jnp.broadcast_to(grid, start.shape)], axis=-1)
    y = jnp.roll(start, 8, axis=1)[..., None] ** 2 + 0.1
    return Program(loss, params, (x, y), learning_rate=3e-3)


def fourier_operator_2d() -> Program:
    """A Fourier neural operator (Li et al. 2021) in two dimensions."""

    def spectral(low, high, x):
        spectrum = jnp.fft.rfft2(x, axes=(1, 2))
        out = jnp.zeros_like(spectrum)
        for rows, weights in ((slice(0, 6), low), (slice(-6, None), high)):
            kept = jnp.einsum(
                "bxyi,xyio->bxyo", spectrum[:, rows, :6], lax.complex(*weights)
            )
            out = out.at[:, rows, :6].set(kept)
        return jnp.fft.irfft2(out, s=x.shape[1:3], axes=(1, 2))

    def loss(params, batch):
        x, y = batch
        h = mlp(params["lift"], x)
        for p in params["layers"]:
            h = h + jax.nn.gelu(spectral(p["low"], p["high"], h) + _conv(h, p["local"]))
        predicted = mlp(params["project"], h, jax.nn.gelu)
        return jnp.mean((predicted - y) ** 2), ()

    def layer(seed):
        return {
            "low": normal(seed, 2, 6, 6, 16, 16) / 16,
            "high": normal(seed + 1, 2, 6, 6, 16, 16) / 16,
            "local": _kernel(seed + 2, 16, 16),
        }

    params = {
        "lift": layers(0, 1, 16),
        "layers": [layer(10), layer(20)],
        "project": layers(1, 16, 32, 1),
    }
    x = jnp.fft.irfft2(jnp.fft.rfft2(normal(2, 4, 24, 24))[:, :, :5], s=(24, 24))
    x = (x / jnp.std(x))[..., None]
    y = x - jnp.roll(x, 1, axis=1) * jnp.roll(x, 1, axis=2)
    return Program(loss, params, (x, y))


def physics_informed() -> Program:
    """A PINN (Raissi et al. 2019) of a Poisson equation: second derivatives."""

    def loss(params, batch):
        inside, boundary = batch

        def u(point):
            return mlp(params, point)[0]

        def residual(point):
            source = -2 * jnp.pi**2 * jnp.prod(jnp.sin(jnp.pi * point))
            return jnp.trace(jax.hessian(u)(point)) - source

        equation = jnp.mean(jax.vmap(residual)(inside) ** 2)
        return equation + 100 * jnp.mean(jax.vmap(u)(boundary) ** 2), ()

    keys = jax.random.split(jax.random.key(0), 2)
    inside = jax.random.uniform(keys[0], (256, 2))
    edge = jax.random.uniform(keys[1], (16,))
    sides = [jnp.stack([edge, jnp.full(16, s)], -1) for s in (0.0, 1.0)]
    boundary = jnp.concatenate([*sides, *(s[:, ::-1] for s in sides)])
    params = layers(1, 2, 48, 48, 1)
    return Program(loss, params, (inside, boundary), learning_rate=3e-3)


def burgers() -> Program:
    """A PINN of Burgers' equation: derivatives of derivatives in forward mode."""

    def loss(params, batch):
        inside, start, value = batch

        def u(t, x):
            return mlp(params, jnp.stack([t, x]))[0]

        def residual(point):
            t, x = point

            def slope(x):
                return jax.jvp(lambda x: u(t, x), (x,), (jnp.ones_like(x),))[1]

            u_x, u_xx = jax.jvp(slope, (x,), (jnp.ones_like(x),))
            u_t = jax.grad(u)(t, x)
            return u_t + u(t, x) * u_x - 0.01 / jnp.pi * u_xx

        initial = jax.vmap(u, (None, 0))(jnp.zeros(()), start) - value
        return jnp.mean(jax.vmap(residual)(inside) ** 2) + jnp.mean(initial**2), ()

    inside = jax.random.uniform(jax.random.key(0), (256, 2)) * 2 - jnp.array([0.0, 1.0])
    start = jnp.linspace(-1, 1, 64)
    batch = (inside, start, -jnp.sin(jnp.pi * start))
    return Program(loss, layers(1, 2, 32, 32, 32, 1), batch)


def nerf() -> Program:
    """NeRF (Mildenhall et al. 2020): encoded positions, volumes rendered along rays."""

    def encode(x, count):
        angles = x[..., None, :] * 2.0 ** jnp.arange(count)[:, None] * jnp.pi
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return jnp.concatenate([x, waves.reshape(*x.shape[:-1], -1)], axis=-1)

    def render(params, origin, direction, key):
        edges = jnp.linspace(2.0, 6.0, 25)
        jitter = jax.random.uniform(key, (24,))
        depth = edges[:-1] + jitter * (edges[1:] - edges[:-1])
        points = (origin + depth[:, None] * direction) / 6
        h = jax.nn.relu(mlp(params["body"], encode(points, 8), jax.nn.relu))
        density = jax.nn.relu(mlp(params["density"], h)[:, 0])
        view = jnp.broadcast_to(encode(direction, 4), (24, 27))
        color = mlp(params["color"], jnp.concatenate([h, view], -1), jax.nn.relu)
        gaps = jnp.append(depth[1:] - depth[:-1], 1e10)
        alpha = 1 - jnp.exp(-density * gaps)
        passed = jnp.cumprod(1 - alpha[:-1] + 1e-10)
        weights = alpha * jnp.append(1.0, passed)
        return jnp.sum(weights[:, None] * jax.nn.sigmoid(color), axis=0)

    def loss(params, batch):
        origins, directions, colors, key = batch
        keys = jax.random.split(key, len(origins))
        rendered = jax.vmap(render, (None, 0, 0, 0))(params, origins, directions, keys)
        return jnp.mean((rendered - colors) ** 2), jax.random.key_data(keys)

    params = {
        "body": layers(0, 3 + 6 * 8, 64, 64),
        "density": layers(1, 64, 1),
        "color": layers(2, 64 + 27, 32, 3),
    }
    directions = normal(3, 64, 3)
    directions = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
    colors = jax.nn.sigmoid(3 * jnp.sin(4 * directions))
    batch = (-4 * directions, directions, colors, jax.random.key(4))
    return Program(loss, params, batch, learning_rate=3e-3)


def diffusion() -> Program:
    """DDPM (Ho et al. 2020): a U-Net with time embeddings predicts the noise."""

    def embed(steps):
        angles = steps[:, None] * jnp.exp(-jnp.log(1e4) * jnp.arange(16) / 16)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)

    def block(p, x, time):
        h = _conv(jax.nn.silu(_group_norm(x)), p["first"])
        h = h + (time @ p["time"])[:, None, None]
        h = _conv(jax.nn.silu(_group_norm(h)), p["second"])
        return h + x @ p["skip"]

    def network(params, x, steps):
        time = jax.nn.silu(mlp(params["time"], embed(steps), jax.nn.silu))
        x = _conv(x, params["in"])
        high = block(params["down"], x, time)
        low = _conv(high, params["shrink"], stride=2)
        low = block(params["middle"], low, time)
        up = jax.image.resize(low, high.shape[:3] + low.shape[3:], "nearest")
        x = block(params["up"], jnp.concatenate([up, high], axis=-1), time)
        return _conv(jax.nn.silu(_group_norm(x)), params["out"])

    def loss(params, batch):
        images, key = batch
        step_key, noise_key = jax.random.split(key)
        kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))
        steps = jax.random.randint(step_key, (len(images),), 0, 1000)
        noise = jax.random.normal(noise_key, images.shape)
        level = kept[steps][:, None, None, None]
        noisy = jnp.sqrt(level) * images + jnp.sqrt(1 - level) * noise
        return jnp.mean((network(params, noisy, steps) - noise) ** 2), steps

    def layer(seed, inputs, outputs):
        return {
            "first": _kernel(seed, inputs, outputs),
            "time": normal(seed + 1, 64, outputs) / 8,
            "second": _kernel(seed + 2, outputs, outputs),
            "skip": normal(seed + 3, inputs, outputs) / inputs**0.5,
        }

    params = {
        "time": layers(0, 32, 64, 64),
        "in": _kernel(1, 1, 16),
        "down": layer(10, 16, 16),
        "shrink": _kernel(2, 16, 32),
        "middle": layer(20, 32, 32),
        "up": layer(30, 48, 16),
        "out": _kernel(3, 16, 1),
    }
    images = jnp.tanh(normal(4, 8, 1, 16, 1) + normal(5, 8, 16, 1, 1))
    return Program(loss, params, (images, jax.random.key(6)), learning_rate=2e-3)


# ----------------------------------------------------------------------- other methods


def deep_kernel() -> Program:
    """Deep kernel learning (Wilson et al. 2016): a Gaussian process on features."""

    def loss(params, batch):
        x, y = batch
        features = mlp(params["network"], x) / jnp.exp(params["log_length"])
        squared = jnp.sum(features**2, axis=-1)
        distances = squared[:, None] + squared - 2 * features @ features.T
        kernel = jnp.exp(params["log_scale"] - 0.5 * jnp.maximum(distances, 0))
        kernel = kernel + jnp.exp(params["log_noise"]) * jnp.eye(len(x))
        factor = jnp.linalg.cholesky(kernel)
        solved = jax.scipy.linalg.cho_solve((factor, True), y)
        fit = 0.5 * y @ solved + jnp.sum(jnp.log(jnp.diag(factor)))
        return fit / len(x), ()

    params = {
        "network": layers(0, 8, 64, 16),
        "log_length": jnp.zeros(16),
        "log_scale": jnp.zeros(()),
        "log_noise": jnp.full((), -3.0),
    }
    x = normal(1, 64, 8)
    y = jnp.sin(2 * x[:, 0]) * jnp.cos(x[:, 1]) + 0.1 * normal(2, 64)
    return Program(loss, params, (x, y), learning_rate=1e-2)


def deep_kernel_in_float32() -> Program:
    """The same, with all products in float32."""
    return deep_kernel()._replace(rules=lambda rules: rules.full("dot_general"))


def maml() -> Program:
    """MAML (Finn et al. 2017): regression of sine waves, through two inner steps."""

    def error(params, data):
        x, y = data
        return jnp.mean((mlp(params, x, jax.nn.relu) - y) ** 2)

    def adapted(params, support):
        for _ in range(2):
            gradient = jax.grad(error)(params, support)
            params = jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)
        return params

    def loss(params, tasks):
        def of_task(support, query):
            return error(adapted(params, support), query)

        return jnp.mean(jax.vmap(of_task)(*tasks)), ()

    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.uniform(keys[0], (16, 20, 1), minval=-5.0, maxval=5.0)
    height = jax.random.uniform(keys[1], (16, 1, 1), minval=0.1, maxval=5.0)
    phase = jax.random.uniform(keys[2], (16, 1, 1), maxval=jnp.pi)
    y = height * jnp.sin(x - phase)
    tasks = ((x[:, :10], y[:, :10]), (x[:, 10:], y[:, 10:]))
    return Program(loss, layers(1, 1, 40, 40, 1), tasks, learning_rate=1e-3)


def real_nvp() -> Program:
    """RealNVP (Dinh et al. 2017): coupling layers, trained by likelihood."""

    def loss(params, x):
        logdet = 0.0
        for i, p in enumerate(params):
            mask = (jnp.arange(8) + i) % 2 == 0
            shift, log_scale = jnp.split(mlp(p, x * mask, jax.nn.relu), 2, axis=-1)
            log_scale = jnp.tanh(log_scale) * ~mask
            x = x * jnp.exp(log_scale) + shift * ~mask
            logdet = logdet + jnp.sum(log_scale, axis=-1)
        logp = jax.scipy.stats.norm.logpdf(x).sum(axis=-1) + logdet
        return -jnp.mean(logp), ()

    params = [layers(i, 8, 64, 64, 16) for i in range(4)]
    x = normal(5, 256, 8)
    x = jnp.sinh(x @ normal(6, 8, 8) / 8**0.5)
    return Program(loss, params, x, learning_rate=1e-3)


def quantization_aware() -> Program:
    """Quantization-aware training (Jacob et al. 2018): 8 bits, straight through."""

    @jax.custom_vjp
    def fake_quant(x, scale):
        return jnp.clip(jnp.round(x / scale), -127, 127) * scale

    def forward(x, scale):
        return fake_quant(x, scale), jnp.abs(x / scale) <= 127

    def backward(inside, g):
        return g * inside, jnp.zeros(())

    fake_quant.defvjp(forward, backward)

    def loss(params, batch):
        x, labels = batch
        codes = []
        for i, (w, b) in enumerate(params):
            scale = jnp.max(jnp.abs(w)) / 127
            codes.append(jnp.round(w / scale).astype(jnp.int8))
            x = fake_quant(x, lax.stop_gradient(jnp.max(jnp.abs(x)) / 127))
            x = x @ fake_quant(w, lax.stop_gradient(scale)) + b
            x = jax.nn.relu(x) if i + 1 < len(params) else x
        return cross_entropy(x, labels), codes

    x = normal(0, 128, 32)
    labels = jnp.argmax(x @ normal(1, 32, 10), axis=-1)
    return Program(loss, layers(2, 32, 64, 64, 10), (x, labels))


def vq_vae() -> Program:
    """VQ-VAE (van den Oord et al. 2017): the nearest code, straight through."""

    def loss(params, images):
        x = images
        for kernel in params["encoder"]:
            x = jax.nn.relu(_conv(x, kernel, stride=2))
        z = x @ params["bottleneck"]
        flat = z.reshape(-1, z.shape[-1])
        codes = params["codes"]
        distances = (
            jnp.sum(flat**2, axis=1, keepdims=True)
            - 2 * flat @ codes.T
            + jnp.sum(codes**2, axis=1)
        )
        quantized = codes[jnp.argmin(distances, axis=1)].reshape(z.shape)
        codebook = jnp.mean((quantized - lax.stop_gradient(z)) ** 2)
        commitment = jnp.mean((z - lax.stop_gradient(quantized)) ** 2)
        x = z + lax.stop_gradient(quantized - z)
        for kernel in params["decoder"]:
            x = lax.conv_transpose(jax.nn.relu(x), kernel, (2, 2), "SAME")
        return jnp.mean((x - images) ** 2) + codebook + 0.25 * commitment, ()

    params = {
        "encoder": [_kernel(0, 3, 16), _kernel(1, 16, 32)],
        "bottleneck": normal(2, 32, 16) / 32**0.5,
        "codes": normal(3, 64, 16) / 2,
        "decoder": [_kernel(4, 16, 16), _kernel(5, 16, 3)],
    }
    return Program(loss, params, jnp.tanh(normal(6, 8, 16, 16, 3)))


def momentum_contrast() -> Program:
    """MoCo (He et al. 2020): a queue of keys, and an encoder that follows."""

    def encode(params, images):
        x = images
        for kernel in params["convs"]:
            x = jax.nn.relu(_conv(x, kernel, stride=2))
        x = mlp(params["head"], jnp.mean(x, axis=(1, 2)), jax.nn.relu)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def augment(key, images):
        flip_key, noise_key = jax.random.split(key)
        flips = jax.random.bernoulli(flip_key, 0.5, (len(images), 1, 1, 1))
        images = jnp.where(flips, images[:, :, ::-1], images)
        return images + 0.1 * jax.random.normal(noise_key, images.shape), flips

    def loss(params, batch):
        images, followers, queue, pointer, key = batch
        keys = jax.random.split(key)
        (first, first_flips), (second, second_flips) = (
            augment(k, images) for k in keys
        )
        followers = jax.tree.map(lambda k, q: 0.99 * k + 0.01 * q, followers, params)
        q = encode(params, first)
        k = lax.stop_gradient(encode(followers, second))
        positive = jnp.sum(q * k, axis=-1, keepdims=True)
        logits = jnp.concatenate([positive, q @ queue], axis=-1) / 0.07
        queue = lax.dynamic_update_slice(queue, k.T, (0, pointer))
        pointer = (pointer + len(images)) % queue.shape[1]
        loss = cross_entropy(logits, jnp.zeros(len(images), jnp.int32))
        return loss, (first_flips, second_flips, pointer)

    def network(seed):
        convs = [_kernel(seed, 3, 16), _kernel(seed + 1, 16, 32)]
        return {"convs": convs, "head": layers(seed + 2, 32, 64, 32)}

    queue = normal(20, 32, 128)
    queue = queue / jnp.linalg.norm(queue, axis=0)
    batch = (normal(21, 32, 16, 16, 3), network(0), queue, 96, jax.random.key(22))
    return Program(loss, network(10), batch)


def equilibrium() -> Program:
    """A deep equilibrium model (Bai et al. 2019): while loops with their own VJP."""

    def layer(params, x, z):
        return jnp.tanh(z @ params["w"] + x @ params["u"] + params["b"])

    def solve(f, start):
        def proceed(carry):
            last, z, count = carry
            return (jnp.linalg.norm(z - last) > 1e-4) & (count < 60)

        def body(carry):
            _, z, count = carry
            return z, f(z), count + 1

        return lax.while_loop(proceed, body, (start, f(start), 0))[1]

    @jax.custom_vjp
    def fixed_point(params, x):
        return solve(lambda z: layer(params, x, z), jnp.zeros((len(x), 64)))

    def forward(params, x):
        z = fixed_point(params, x)
        return z, (params, x, z)

    def backward(residuals, g):
        params, x, z = residuals
        _, pull_z = jax.vjp(lambda z: layer(params, x, z), z)
        u = solve(lambda u: g + pull_z(u)[0], jnp.zeros_like(g))
        _, pull = jax.vjp(lambda params, x: layer(params, x, z), params, x)
        return pull(u)

    fixed_point.defvjp(forward, backward)

    def loss(params, batch):
        x, labels = batch
        z = fixed_point(params["layer"], x)
        return cross_entropy(mlp(params["head"], z), labels), ()

    cell = {
        "w": normal(0, 64, 64) / 24,
        "u": normal(1, 32, 64) / 32**0.5,
        "b": jnp.zeros(64),
    }
    x = normal(2, 64, 32)
    labels = jnp.argmax(x @ normal(3, 32, 8), axis=-1)
    return Program(loss, {"layer": cell, "head": layers(4, 64, 8)}, (x, labels))


def hopfield() -> Program:
    """A modern Hopfield network (Ramsauer et al. 2021): it descends its energy."""
    beta = 1 / 32**0.5

    def energy(memories, x):
        attraction = jax.nn.logsumexp(beta * x @ memories.T) / beta
        return 0.5 * jnp.sum(x**2) - attraction

    def loss(params, batch):
        damaged, whole = batch
        memories = mlp(params["memories"], params["patterns"])

        def step(x, _):
            slope = jax.vmap(jax.grad(energy, 1), (None, 0))(memories, x)
            return x - 0.5 * slope, None

        recalled, _ = lax.scan(step, damaged @ params["in"], length=6)
        return jnp.mean((recalled @ params["out"] - whole) ** 2), ()

    params = {
        "memories": layers(0, 32, 64, 32),
        "patterns": normal(1, 24, 32),
        "in": normal(2, 48, 32) / 48**0.5,
        "out": normal(3, 32, 48) / 32**0.5,
    }
    whole = jnp.sign(normal(4, 16, 48))
    damaged = whole * (normal(5, 16, 48) < 0.5)
    return Program(loss, params, (damaged, whole))


# ------------------------------------------------------------------------------ parts


def _kernel(seed: int, inputs: int, outputs: int) -> jax.Array:
    return normal(seed, 3, 3, inputs, outputs) / (9 * inputs) ** 0.5


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _layer_norm(x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def _group_norm(x: jax.Array, groups: int = 4) -> jax.Array:
    split = x.reshape(*x.shape[:-1], groups, -1)
    mean = jnp.mean(split, axis=(1, 2, 4), keepdims=True)
    variance = jnp.var(split, axis=(1, 2, 4), keepdims=True)
    return ((split - mean) / jnp.sqrt(variance + 1e-5)).reshape(x.shape)


def _lstm(layer: Any, xs: jax.Array) -> jax.Array:
    """Returns the hidden states of sequences ``(batch, time, features)``."""
    w, b = layer

    def step(carry: Any, x: jax.Array) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], axis=-1) @ w + b, 4, axis=-1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((len(xs), len(b) // 4))
    _, hidden = lax.scan(step, (zeros, zeros), jnp.swapaxes(xs, 0, 1))
    return jnp.swapaxes(hidden, 0, 1)


def _inner_training(
    optimizer: Any,
    steps: int,
    evaluated: Callable[..., Any] | None = None,
    first_order: bool = False,
) -> Program:
    """Returns the loss of a regression after some steps of an optimizer."""
    import optax

    def error(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((mlp(params, x) - y) ** 2)

    def loss(params: Any, batch: Any) -> Any:
        xs, ys, x, y = batch

        def step(carry: Any, data: Any) -> Any:
            params, state = carry
            gradient = jax.grad(error)(params, *data)
            updates, state = optimizer.update(gradient, state, params)
            if first_order:
                updates, state = lax.stop_gradient((updates, state))
            return (optax.apply_updates(params, updates), state), ()

        start = (params, optimizer.init(params))
        (params, state), _ = lax.scan(step, start, (xs, ys))
        counts = [n for n in jax.tree.leaves(state) if n.dtype == jnp.int32]
        params = evaluated(state, params) if evaluated else params
        return error(params, x, y), counts

    xs = normal(0, steps + 1, 64, 16)
    ys = jnp.sin(xs[..., :8]) + xs[..., 8:] / 2
    batch = (xs[:-1], ys[:-1], xs[-1], ys[-1])
    return Program(loss, layers(1, 16, 48, 48, 8), batch)


def _decoder(seed: int) -> Any:
    """Returns the parameters of a decoder of two layers."""

    def layer(seed: int) -> dict[str, jax.Array]:
        return {
            "qkv": normal(seed, 32, 96) / 32**0.5,
            "out": normal(seed + 1, 32, 32) / 32**0.5,
            "up": normal(seed + 2, 32, 64) / 32**0.5,
            "down": normal(seed + 3, 64, 32) / 8,
            "scales": jnp.ones((2, 32)),
        }

    return {
        "embed": normal(seed, 64, 32),
        "place": normal(seed + 1, 32, 32),
        "layers": [layer(seed + 10), layer(seed + 20)],
        "head": normal(seed + 2, 32, 64) / 32**0.5,
    }


def _empty_cache(rows: int, length: int) -> Any:
    """Returns keys and values of two layers: ``(rows, length, 32)`` each."""
    return [tuple(jnp.zeros((rows, length, 32)) for _ in range(2)) for _ in range(2)]


def _decode(params: Any, cache: Any, position: Any, token: jax.Array) -> Any:
    """Returns the cache with one more token, and the logits of the next."""
    x = params["embed"][token] + params["place"][position]
    written = []
    for p, (keys, values) in zip(params["layers"], cache, strict=True):
        q, k, v = jnp.split(_rms_norm(x, p["scales"][0]) @ p["qkv"], 3, axis=-1)
        keys = lax.dynamic_update_slice(keys, k[:, None], (0, position, 0))
        values = lax.dynamic_update_slice(values, v[:, None], (0, position, 0))
        heads = (len(x), -1, 4, 8)
        scores = jnp.einsum(
            "bhd,bthd->bht", q.reshape(len(x), 4, 8), keys.reshape(heads)
        )
        scores = jnp.where(jnp.arange(keys.shape[1]) <= position, scores, -jnp.inf)
        weights = jax.nn.softmax(scores / 8**0.5)
        attended = jnp.einsum("bht,bthd->bhd", weights, values.reshape(heads))
        x = x + attended.reshape(x.shape) @ p["out"]
        x = x + jax.nn.silu(_rms_norm(x, p["scales"][1]) @ p["up"]) @ p["down"]
        written.append((keys, values))
    return written, x @ params["head"]


ENTRIES = (
    Entry("K-FAC step", [], kronecker_factored),
    Entry("Hessian-free step", [], hessian_free),
    Entry("K-FAC registered network", ["kfac-jax"], kfac_registered),
    Entry("muon steps", ["optax"], muon_steps),
    Entry("GaLore steps", ["optax"], galore_steps),
    Entry("prodigy steps", ["optax"], prodigy_steps),
    Entry("schedule-free steps", ["optax"], schedule_free_steps),
    Entry("L-BFGS head", ["optax"], lbfgs_head),
    Entry("CTC", ["optax"], ctc),
    Entry("contrastive, poly and focal loss", ["optax"], optax_losses),
    Entry("double DQN", ["rlax"], double_dqn),
    Entry("quantile DQN", ["rlax"], quantile_dqn),
    Entry("IMPALA", ["rlax"], impala),
    Entry("PPO", ["rlax"], ppo),
    Entry("Gumbel MuZero", ["mctx"], muzero),
    Entry("S5", [], s5),
    Entry("Mamba", [], mamba),
    Entry("decoder with a cache", [], cached_decoder),
    Entry("REINFORCE on sampled text", [], sampled_text),
    Entry("ring attention", [], ring_attention),
    Entry("tensor-parallel MLP", [], tensor_parallel),
    Entry("experts by one-hot", [], switch_experts),
    Entry("experts by ragged_dot", [], ragged_experts),
    Entry("Pallas kernel", [], pallas_dense),
    Entry("Fourier neural operator 1-D", [], fourier_operator_1d),
    Entry("Fourier neural operator 2-D", [], fourier_operator_2d),
    Entry("PINN of Poisson", [], physics_informed),
    Entry("PINN of Burgers", [], burgers),
    Entry("NeRF", [], nerf),
    Entry("diffusion U-Net", [], diffusion),
    Entry("deep kernel GP", [], deep_kernel),
    Entry("deep kernel GP, float32 products", [], deep_kernel_in_float32),
    Entry("MAML", [], maml),
    Entry("RealNVP", [], real_nvp),
    Entry("quantization-aware training", [], quantization_aware),
    Entry("VQ-VAE", [], vq_vae),
    Entry("MoCo", [], momentum_contrast),
    Entry("deep equilibrium model", [], equilibrium),
    Entry("Hopfield network", [], hopfield),
)
