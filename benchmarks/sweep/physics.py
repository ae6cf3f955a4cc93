"""Equations: networks that solve, learn or step them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sweep.program import Entry, Program, dense, mlp


def heat_pinn() -> Program:
    """A network solves the heat equation: its residual, and two boundaries."""

    def loss(p, params, data):
        inside, start, edges = data

        def u(x, t):
            return mlp(p, params, jnp.stack([x, t]), jnp.tanh)[0]

        def residual(x, t):
            u_t = jax.grad(u, 1)(x, t)
            u_xx = jax.grad(jax.grad(u))(x, t)
            return u_t - 0.1 * u_xx

        inner = jnp.mean(jax.vmap(residual)(*inside.T) ** 2)
        first = jax.vmap(lambda x: u(x, jnp.zeros_like(x)))(start)
        first = jnp.mean((first - jnp.sin(np.pi * start)) ** 2)
        return inner + first + jnp.mean(jax.vmap(u)(*edges.T) ** 2)

    def make(r):
        edges = np.stack([np.float32(r.integers(2, 32)), r.uniform(32)], -1)
        return r.layers(2, 32, 32, 1), (r.uniform(64, 2), r.uniform(32), edges)

    return Program(loss, make)


def hamiltonian() -> Program:
    """The gradient of a network's energy is the motion of a pendulum."""

    def loss(p, params, data):
        state, rates = data

        def energy(state):
            return mlp(p, params, state, jnp.tanh)[..., 0].sum()

        dq, dp = jnp.split(jax.grad(energy)(state), 2, -1)
        return jnp.mean((jnp.concatenate([dp, -dq], -1) - rates) ** 2)

    def make(r):
        state = r.uniform(128, 2, low=-2, high=2)
        rates = np.stack([state[:, 1], -np.sin(state[:, 0])], -1)
        return r.layers(2, 64, 64, 1), (state, rates)

    return Program(loss, make)


def lagrangian() -> Program:
    """Accelerations follow from a network's Lagrangian by a solve with its Hessian."""

    def loss(p, params, data):
        q, v, expected = data

        def lagrange(q, v):
            inputs = jnp.concatenate([jnp.sin(q), jnp.cos(q), v])
            return mlp(p, params, inputs, jax.nn.softplus)[0] + 0.5 * jnp.sum(v * v)

        def acceleration(q, v):
            hessian = jax.hessian(lagrange, 1)(q, v)
            mixed = jax.jacobian(jax.grad(lagrange, 1), 0)(q, v)
            force = jax.grad(lagrange)(q, v) - jnp.sum(mixed * v[None], -1)
            return jnp.linalg.solve(hessian + 1e-3 * jnp.eye(2), force)

        return jnp.mean((jax.vmap(acceleration)(q, v) - expected) ** 2)

    def make(r):
        return r.layers(6, 32, 32, 1), (
            r.normal(16, 2),
            r.normal(16, 2),
            r.normal(16, 2),
        )

    return Program(loss, make)


def siren() -> Program:
    """An image as a network of sines of 30 times their operands."""

    def loss(p, params, data):
        places, colours = data
        h = places
        for layer in params[:-1]:
            h = jnp.sin(30 * dense(p, layer, h))
        return jnp.mean((dense(p, params[-1], h) - colours) ** 2)

    def make(r):
        sizes, params = (2, 64, 64, 64, 3), []
        for i, (n, m) in enumerate(itertools.pairwise(sizes)):
            bound = 1 / n if i == 0 else (6 / n) ** 0.5 / 30
            w = r.uniform(n, m, low=-bound, high=bound)
            params.append((w, r.uniform(m, low=-bound, high=bound)))
        places = r.uniform(256, 2, low=-1, high=1)
        waves = np.sin(places @ r.normal(2, 3, scale=8.0))
        return params, (places, waves)

    return Program(loss, make)


def fourier_features() -> Program:
    """A network of sines and cosines of projected coordinates."""

    def loss(p, params, data):
        places, waves, values = data
        angles = 2 * np.pi * p.dot(places, waves)
        h = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        return jnp.mean((mlp(p, params, h)[:, 0] - values) ** 2)

    def make(r):
        places = r.uniform(256, 2)
        values = np.sin(20 * places[:, 0]) * np.cos(15 * places[:, 1])
        return r.layers(64, 64, 64, 1), (places, r.normal(2, 32, scale=10.0), values)

    return Program(loss, make)


def neural_ode() -> Program:
    """A learned field, integrated by RK4 with 16 fixed steps."""

    def loss(p, params, data):
        start, path = data
        field = lambda y: mlp(p, params, y, jnp.tanh)

        def step(y, _):
            h = 0.1
            k1 = field(y)
            k2 = field(y + h / 2 * k1)
            k3 = field(y + h / 2 * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + field(y + h * k3))
            return y, y

        _, found = jax.lax.scan(step, start, length=16)
        return jnp.mean((found - path) ** 2)

    def make(r):
        angles = 0.1 * np.arange(1, 17)[:, None] + r.uniform(32, high=6)[None]
        path = np.float32(np.stack([np.cos(angles), np.sin(angles)], -1))
        return r.layers(2, 32, 32, 2), (path[0], path)

    return Program(loss, make)


def spectral_navier_stokes() -> Program:
    """A network corrects twelve pseudo-spectral steps of a vorticity equation."""

    def loss(p, params, data):
        start, aim = data
        n = start.shape[-1]
        k = jnp.fft.fftfreq(n, 1 / n).astype(start.dtype)
        kx, ky = k[:, None], k[None, : n // 2 + 1]
        k2 = kx**2 + ky**2
        inverse = jnp.where(k2 == 0, 0.0, 1 / jnp.where(k2 == 0, 1, k2))

        def back(x):
            return jnp.fft.irfft2(x, (n, n))

        def step(w, _):
            spectrum = jnp.fft.rfft2(w)
            u, v = (
                back(1j * ky * spectrum * inverse),
                back(-1j * kx * spectrum * inverse),
            )
            change = u * back(1j * kx * spectrum) + v * back(1j * ky * spectrum)
            image = jnp.stack([w, u, v], -1)
            learned = p.conv(jax.nn.gelu(p.conv(image, params["in"])), params["out"])
            new = jnp.fft.rfft2(w + 0.02 * (0.1 * learned[..., 0] - change))
            w = back(new / (1 + 0.02 * 1e-2 * k2))
            return w, w

        _, found = jax.lax.scan(step, start, length=12)
        return jnp.mean((found[-1] - aim) ** 2)

    def make(r):
        params = {"in": r.kernel(3, 3, 3, 16), "out": r.kernel(3, 3, 16, 1)}
        fields = np.fft.rfft2(r.normal(8, 16, 16))
        k = np.fft.fftfreq(16, 1 / 16)
        smooth = np.exp(-(k[:, None] ** 2 + k[None, :9] ** 2) / 16)
        fields = np.float32(4 * np.fft.irfft2(fields * smooth, (16, 16)))
        return params, (fields[:4], fields[4:])

    return Program(loss, make)


def fourier_operator() -> Program:
    """Two layers that multiply modes by complex weights, beside pointwise ones."""

    def loss(p, params, data):
        x, y = data
        h = dense(p, params["in"], x)
        for block in params["blocks"]:
            modes = jnp.fft.rfft(h, axis=1)[:, :8]
            re, im = jnp.real(modes), jnp.imag(modes)
            wr, wi = block["re"], block["im"]
            mix = lambda a, b: p.einsum("bki,kio->bko", a, b)
            out = jax.lax.complex(mix(re, wr) - mix(im, wi), mix(re, wi) + mix(im, wr))
            out = jnp.fft.irfft(jnp.pad(out, ((0, 0), (0, 9), (0, 0))), 32, axis=1)
            h = jax.nn.gelu(out + dense(p, block["point"], h))
        found = mlp(p, params["out"], h, jax.nn.gelu)
        norms = jnp.sqrt(jnp.sum((found - y) ** 2, (1, 2)) / jnp.sum(y**2, (1, 2)))
        return jnp.mean(norms)

    def make(r):
        def block():
            return {
                "re": r.kernel(8, 16, 16),
                "im": r.kernel(8, 16, 16),
                "point": r.layers(16, 16)[0],
            }

        params = {
            "in": r.layers(2, 16)[0],
            "blocks": [block() for _ in range(2)],
            "out": r.layers(16, 32, 1),
        }
        grid = np.linspace(0, 1, 32, dtype=np.float32)
        phases = r.uniform(16, 1, high=6)
        x = np.sin(2 * np.pi * grid + phases)
        inputs = np.stack([x, np.broadcast_to(grid, x.shape)], -1)
        y = np.sin(4 * np.pi * grid + phases)[..., None]
        return params, (np.float32(inputs), np.float32(y))

    return Program(loss, make)


def deep_onet() -> Program:
    """A branch of a function's samples times a trunk of places."""

    def loss(p, params, data):
        functions, places, values = data
        branch = mlp(p, params["branch"], functions, jnp.tanh)
        trunk = jnp.tanh(mlp(p, params["trunk"], places, jnp.tanh))
        return jnp.mean((p.dot(branch, trunk.T) + params["bias"] - values) ** 2)

    def make(r):
        grid = np.linspace(0, 1, 32, dtype=np.float32)
        waves = r.uniform(32, 1, low=1, high=6)
        params = {
            "branch": r.layers(32, 64, 32),
            "trunk": r.layers(1, 64, 32),
            "bias": r.normal(),
        }
        data = (np.sin(waves * grid), grid[:, None], (1 - np.cos(waves * grid)) / waves)
        return params, data

    return Program(loss, make)


def deep_ritz() -> Program:
    """A network minimises the energy of Poisson's equation."""

    def loss(p, params, data):
        inside, edge = data
        u = lambda x: mlp(p, params, x, lambda h: jax.nn.relu(h) ** 3)[0]
        values, slopes = jax.vmap(jax.value_and_grad(u))(inside)
        energy = jnp.mean(0.5 * jnp.sum(slopes**2, -1) - values)
        return energy + 100 * jnp.mean(jax.vmap(u)(edge) ** 2)

    def make(r):
        edge = r.uniform(64, 2)
        edge[:32, 0], edge[32:, 1] = r.integers(2, 32), r.integers(2, 32)
        net = [(0.7 * w, b) for w, b in r.layers(2, 32, 32, 1)]
        return net, (r.uniform(128, 2), edge)

    return Program(loss, make)


def lennard_jones() -> Program:
    """Energies and forces of clusters fit parameters of pairs, and a network."""

    def loss(p, params, data):
        places, energies, forces = data

        def energy(at):
            d2 = jnp.sum((at[:, None] - at[None]) ** 2, -1) + jnp.eye(len(at)) * 100
            s6 = (jnp.exp(params["size"]) ** 2 / d2) ** 3
            pairs = 2 * jnp.exp(params["depth"]) * jnp.sum(s6 * s6 - s6)
            near = jnp.exp(-d2[..., None] / jnp.array([1.0, 2.0, 4.0, 8.0], at.dtype))
            return pairs + jnp.sum(mlp(p, params["net"], near.sum(1), jnp.tanh))

        found, slopes = jax.vmap(jax.value_and_grad(energy))(places)
        return jnp.mean((found - energies) ** 2) + jnp.mean((slopes + forces) ** 2)

    def make(r):
        grid = np.stack(np.meshgrid(*[np.arange(2)] * 3), -1).reshape(8, 3)
        places = np.float32(1.1 * grid + 0.05 * r.normal(8, 8, 3))
        params = {
            "size": r.normal(scale=0.05),
            "depth": r.normal(scale=0.1),
            "net": r.layers(4, 32, 1),
        }
        return params, (places, r.normal(8) - 20, r.normal(8, 8, 3))

    return Program(loss, make)


def equivariant_network() -> Program:
    """EGNN: messages of distances move the nodes along their differences."""

    def loss(p, params, data):
        x, h, aim = data
        for layer in params:
            differences = x[:, :, None] - x[:, None]
            d2 = jnp.sum(differences**2, -1, keepdims=True)
            n = h.shape[1]
            left = jnp.broadcast_to(h[:, :, None], (*h.shape[:2], n, h.shape[-1]))
            pairs = jnp.concatenate([left, jnp.swapaxes(left, 1, 2), d2], -1)
            messages = jax.nn.silu(mlp(p, layer["edge"], pairs, jax.nn.silu))
            pushes = mlp(p, layer["push"], messages, jax.nn.silu)
            x = x + jnp.mean(differences / (jnp.sqrt(d2 + 1e-8) + 1) * pushes, 2)
            both = jnp.concatenate([h, messages.sum(2)], -1)
            h = h + mlp(p, layer["node"], both, jax.nn.silu)
        return jnp.mean((x - aim) ** 2)

    def make(r):
        def layer():
            return {
                "edge": r.layers(17, 32, 16),
                "push": r.layers(16, 16, 1),
                "node": r.layers(24, 32, 8),
            }

        x = 2 * r.normal(8, 6, 3)
        return [layer() for _ in range(2)], (
            x,
            r.normal(8, 6, 8),
            x + r.normal(8, 6, 3),
        )

    return Program(loss, make)


def cloth() -> Program:
    """A network controls a chain of springs for 20 steps of a simulation."""

    def loss(p, params, data):
        start, aim = data

        def step(state, _):
            x, v = state
            edges = x[:, 1:] - x[:, :-1]
            lengths = jnp.linalg.norm(edges, axis=-1, keepdims=True)
            pull = 50 * (lengths - 0.25) * edges / lengths
            zero = jnp.zeros_like(pull[:, :1])
            force = jnp.concatenate([pull, zero], 1) - jnp.concatenate([zero, pull], 1)
            inputs = jnp.concatenate([x, v], -1).reshape(len(x), -1)
            push = mlp(p, params, inputs, jnp.tanh).reshape(x.shape)
            v = 0.99 * v + 0.02 * (force + push)
            return (x + 0.02 * v, v), ()

        (x, _), _ = jax.lax.scan(step, (start, jnp.zeros_like(start)), length=20)
        return jnp.mean((x[:, -1] - aim) ** 2)

    def make(r):
        x = np.stack([0.25 * np.arange(6), np.zeros(6)], -1)
        start = np.float32(x + 0.02 * r.normal(16, 6, 2))
        return r.layers(24, 32, 12), (start, r.uniform(16, 2, low=1, high=2))

    return Program(loss, make)


ENTRIES = (
    Entry("heat PINN", heat_pinn),
    Entry("Hamiltonian network", hamiltonian),
    Entry("Lagrangian network", lagrangian),
    Entry("SIREN", siren),
    Entry("Fourier features", fourier_features),
    Entry("neural ODE, RK4", neural_ode),
    Entry("spectral Navier-Stokes", spectral_navier_stokes),
    Entry("Fourier neural operator", fourier_operator),
    Entry("DeepONet", deep_onet),
    Entry("deep Ritz", deep_ritz),
    Entry("Lennard-Jones and network", lennard_jones),
    Entry("EGNN", equivariant_network),
    Entry("differentiable simulation", cloth),
)
