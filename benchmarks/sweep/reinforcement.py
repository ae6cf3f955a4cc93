"""Values, policies and preferences."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sweep.program import (
    Entry,
    Program,
    cross_entropy,
    layer_norm,
    mlp,
    normal_log_prob,
)


def _pick(values, actions):
    return jnp.take_along_axis(values, actions[..., None], -1)[..., 0]


def _noisy(r, net):
    return jax.tree.map(lambda w: w + r.normal(*w.shape, scale=0.02), net)


def dqn() -> Program:
    """Double Q-learning with a Huber loss."""

    def loss(p, params, data):
        target, state, actions, rewards, following = data
        best = jnp.argmax(mlp(p, params, following), -1)
        aim = rewards + 0.99 * _pick(mlp(p, target, following), best)
        error = _pick(mlp(p, params, state), actions) - jax.lax.stop_gradient(aim)
        size = jnp.abs(error)
        return jnp.mean(jnp.where(size < 1, 0.5 * error**2, size - 0.5))

    def make(r):
        net = r.layers(16, 64, 64, 4)
        data = (_noisy(r, net), r.normal(64, 16), r.integers(4, 64), r.normal(64))
        return net, (*data, r.normal(64, 16))

    return Program(loss, make)


def c51() -> Program:
    """A distribution of returns on 51 atoms, projected from the next state's."""

    def loss(p, params, data):
        target, state, actions, rewards, following = data
        atoms = jnp.linspace(-10, 10, 51, dtype=rewards.dtype)
        logits = mlp(p, params, state).reshape(-1, 4, 51)
        later = jax.nn.softmax(mlp(p, target, following).reshape(-1, 4, 51))
        best = jnp.argmax(jnp.sum(later * atoms, -1), -1)
        later = jnp.take_along_axis(later, best[:, None, None], 1)[:, 0]
        moved = jnp.clip(rewards[:, None] + 0.99 * atoms, -10, 10)
        near = 1 - jnp.abs(moved[:, None] - atoms[None, :, None]) / 0.4
        aim = jnp.sum(jnp.clip(near, 0, 1) * later[:, None], -1)
        logits = jnp.take_along_axis(logits, actions[:, None, None], 1)[:, 0]
        logp = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.sum(jax.lax.stop_gradient(aim) * logp, -1))

    def make(r):
        net = r.layers(16, 64, 204)
        data = (_noisy(r, net), r.normal(64, 16), r.integers(4, 64), 3 * r.normal(64))
        return net, (*data, r.normal(64, 16))

    return Program(loss, make)


def quantile_regression_dqn() -> Program:
    """Quantiles of returns by a quantile Huber loss."""

    def loss(p, params, data):
        target, state, rewards, following = data
        taus = (jnp.arange(16) + 0.5) / 16
        found = mlp(p, params, state)
        aim = rewards[:, None] + 0.99 * mlp(p, target, following)
        error = jax.lax.stop_gradient(aim)[:, None] - found[..., None]
        size = jnp.abs(error)
        huber = jnp.where(size < 1, 0.5 * error**2, size - 0.5)
        weights = jnp.abs(taus[:, None] - (error < 0))
        return jnp.mean(jnp.sum(weights * huber, 1))

    def make(r):
        net = r.layers(16, 64, 16)
        return net, (_noisy(r, net), r.normal(64, 16), r.normal(64), r.normal(64, 16))

    return Program(loss, make)


def sac() -> Program:
    """A squashed Gaussian policy with an entropy term, against two critics."""

    def loss(p, params, data):
        critics, state, noise = data
        mean, log_std = jnp.split(mlp(p, params, state), 2, -1)
        log_std = jnp.clip(log_std, -5, 2)
        action = jnp.tanh(mean + jnp.exp(log_std) * noise)
        logp = normal_log_prob(noise, 0.0, 0.0) - log_std
        logp = jnp.sum(logp - jnp.log(1 - action**2 + 1e-6), -1)
        both = jnp.concatenate([state, action], -1)
        q = jnp.minimum(*(mlp(p, net, both)[:, 0] for net in critics))
        return jnp.mean(0.2 * logp - q)

    def make(r):
        net = r.layers(16, 64, 64, 8)
        net[-1] = (net[-1][0], net[-1][1] - np.float32([0] * 4 + [1] * 4))
        critics = [r.layers(20, 64, 64, 1) for _ in range(2)]
        return net, (critics, r.normal(64, 16), r.normal(64, 4))

    return Program(loss, make)


def ddpg() -> Program:
    """A deterministic policy climbs a critic, which fits targets."""

    def loss(p, params, data):
        state, actions, aims = data
        q = lambda net, a: mlp(p, net, jnp.concatenate([state, a], -1))[:, 0]
        chosen = jnp.tanh(mlp(p, params["actor"], state))
        fit = jnp.mean((q(params["critic"], actions) - aims) ** 2)
        return fit - jnp.mean(q(jax.lax.stop_gradient(params["critic"]), chosen))

    def make(r):
        params = {"actor": r.layers(16, 64, 4), "critic": r.layers(20, 64, 1)}
        return params, (r.normal(64, 16), r.uniform(64, 4, low=-1), r.normal(64))

    return Program(loss, make)


def ppo() -> Program:
    """Clipped ratios with generalised advantages, a value and an entropy."""

    def loss(p, params, data):
        states, actions, rewards, old = data
        values = mlp(p, params["value"], states, jnp.tanh)[..., 0]
        logp = jax.nn.log_softmax(mlp(p, params["policy"], states[:-1], jnp.tanh))
        deltas = rewards + 0.99 * values[1:] - values[:-1]

        def back(later, delta):
            later = delta + 0.99 * 0.95 * later
            return later, later

        zero = jnp.zeros_like(deltas[0])
        _, advantages = jax.lax.scan(back, zero, deltas, reverse=True)
        advantages = jax.lax.stop_gradient(advantages)
        returns = advantages + jax.lax.stop_gradient(values[:-1])
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = jnp.exp(_pick(logp, actions) - old)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        policy = -jnp.mean(jnp.minimum(ratio * advantages, clipped * advantages))
        entropy = -jnp.mean(jnp.sum(jnp.exp(logp) * logp, -1))
        return policy + 0.5 * jnp.mean((values[:-1] - returns) ** 2) - 0.01 * entropy

    def make(r):
        params = {"policy": r.layers(8, 64, 4), "value": r.layers(8, 64, 1)}
        old = np.log(r.uniform(16, 8, low=0.15, high=0.4))
        data = (r.normal(17, 8, 8), r.integers(4, 16, 8), r.normal(16, 8), old)
        return params, data

    return Program(loss, make)


def v_trace() -> Program:
    """IMPALA: values and advantages corrected by clipped importance weights."""

    def loss(p, params, data):
        states, actions, rewards, old = data
        out = mlp(p, params, states)
        values, logits = out[..., 0], out[:-1, ..., 1:]
        logp = _pick(jax.nn.log_softmax(logits), actions)
        rho = jnp.minimum(1.0, jnp.exp(jax.lax.stop_gradient(logp) - old))
        deltas = rho * (rewards + 0.99 * values[1:] - values[:-1])

        def back(later, now):
            later = now[0] + 0.99 * now[1] * later
            return later, later

        zero = jnp.zeros_like(deltas[0])
        _, errors = jax.lax.scan(back, zero, (deltas, rho), reverse=True)
        targets = jax.lax.stop_gradient(values[:-1] + errors)
        following = jnp.concatenate([targets[1:], values[-1:]])
        advantages = rho * (rewards + 0.99 * following - values[:-1])
        policy = -jnp.mean(jax.lax.stop_gradient(advantages) * logp)
        return policy + 0.5 * jnp.mean((targets - values[:-1]) ** 2)

    def make(r):
        old = np.log(r.uniform(16, 8, low=0.15, high=0.4))
        data = (r.normal(17, 8, 8), r.integers(4, 16, 8), r.normal(16, 8), old)
        return r.layers(8, 64, 64, 5), data

    return Program(loss, make)


def decision_transformer() -> Program:
    """Attention over returns, states and actions predicts actions."""

    def loss(p, params, data):
        returns, states, actions = data
        tokens = jnp.stack(
            [
                p.dot(returns[..., None], params["return"]),
                p.dot(states, params["state"]),
                params["action"][actions],
            ],
            2,
        )
        h = tokens.reshape(len(states), -1, 32) + params["place"]
        q, k, v = jnp.split(p.dot(layer_norm(h), params["qkv"]), 3, -1)
        scores = p.einsum("bid,bjd->bij", q, k) / 32**0.5
        scores = jnp.where(jnp.tri(h.shape[1], dtype=bool), scores, -1e9)
        h = h + p.einsum("bij,bjd->bid", jax.nn.softmax(scores), v)
        h = h + mlp(p, params["mlp"], layer_norm(h), jax.nn.gelu)
        return cross_entropy(p.dot(layer_norm(h)[:, 1::3], params["head"]), actions)

    def make(r):
        params = {
            "return": r.normal(1, 32, scale=0.1),
            "state": r.kernel(8, 32),
            "action": r.normal(4, 32),
            "place": r.normal(24, 32, scale=0.1),
            "qkv": r.kernel(32, 96),
            "mlp": r.layers(32, 64, 32),
            "head": r.kernel(32, 4),
        }
        return params, (10 * r.uniform(8, 8), r.normal(8, 8, 8), r.integers(4, 8, 8))

    return Program(loss, make)


def dpo() -> Program:
    """A policy prefers one of two answers more than its reference does."""

    def loss(p, params, data):
        reference, tokens = data

        def log_prob(weights):
            h = jnp.tanh(p.dot(weights["embed"][tokens[..., :-1]], weights["mix"]))
            h = jnp.cumsum(h, -2) / jnp.arange(1, h.shape[-2] + 1)[:, None]
            logp = jax.nn.log_softmax(p.dot(h, weights["embed"].T))
            return _pick(logp, tokens[..., 1:]).sum(-1)

        margins = log_prob(params) - jax.lax.stop_gradient(log_prob(reference))
        return -jnp.mean(jax.nn.log_sigmoid(0.1 * (margins[0] - margins[1])))

    def make(r):
        params = {"embed": r.normal(64, 32, scale=0.5), "mix": r.kernel(32, 32)}
        reference = jax.tree.map(lambda w: w + r.normal(*w.shape, scale=0.01), params)
        return params, (reference, r.integers(64, 2, 16, 16))

    return Program(loss, make)


def dreamer() -> Program:
    """A policy is trained on lambda returns of imagined states."""

    def loss(p, params, data):
        start, noise = data

        def step(state, eps):
            mean, raw = jnp.split(mlp(p, params["policy"], state, jax.nn.elu), 2, -1)
            action = jnp.tanh(mean + (jax.nn.softplus(raw) + 0.1) * eps)
            both = jnp.concatenate([state, action], -1)
            state = jnp.tanh(mlp(p, params["model"], both, jax.nn.elu))
            return state, state

        _, states = jax.lax.scan(step, start, noise)
        out = mlp(p, params["head"], states, jax.nn.elu)
        rewards, values = out[..., 0], out[..., 1]

        def back(later, now):
            reward, value = now
            later = reward + 0.99 * (0.05 * value + 0.95 * later)
            return later, later

        parts = (rewards[:-1], values[1:])
        _, returns = jax.lax.scan(back, values[-1], parts, reverse=True)
        return -jnp.mean(returns)

    def make(r):
        params = {
            "policy": r.layers(16, 32, 8),
            "model": r.layers(20, 32, 16),
            "head": r.layers(16, 32, 2),
        }
        return params, (r.normal(32, 16), r.normal(10, 32, 4))

    return Program(loss, make)


ENTRIES = (
    Entry("double DQN", dqn),
    Entry("C51", c51),
    Entry("quantile DQN", quantile_regression_dqn),
    Entry("SAC", sac),
    Entry("DDPG", ddpg),
    Entry("PPO, GAE", ppo),
    Entry("V-trace", v_trace),
    Entry("decision transformer", decision_transformer),
    Entry("DPO", dpo),
    Entry("Dreamer", dreamer),
)
