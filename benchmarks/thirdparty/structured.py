"""Graphs, molecules, densities and time series of scientific libraries."""

import jax
import jax.numpy as jnp

from benchmarks.thirdparty.parts import cross_entropy, layers, mlp, normal
from benchmarks.thirdparty.program import Entry, Program

# ---------------------------------------------------------------- graphs and molecules


def graph_network() -> Program:
    """jraph: message passing with attention over random graphs of several sizes."""
    import jraph

    def loss(params, batch):
        graph, labels = batch

        def edges(edges, sent, received, _):
            return mlp(params["edge"], jnp.concatenate([edges, sent, received], -1))

        def nodes(nodes, _, received, __):
            return jax.nn.relu(
                mlp(params["node"], jnp.concatenate([nodes, received], -1))
            )

        def total(nodes, edges, _):
            return mlp(params["global"], jnp.concatenate([nodes, edges], -1))

        def attention(edges, sent, received, _):
            both = jnp.concatenate([edges, sent, received], -1)
            return mlp(params["attention"], both)

        network = jraph.GraphNetwork(
            edges,
            nodes,
            total,
            attention_logit_fn=attention,
            attention_reduce_fn=lambda edges, weights: edges * weights,
        )
        found = network(network(graph)._replace(globals=None))
        return cross_entropy(found.globals, labels), found.n_node

    def one(seed):
        n = 6 + seed
        keys = jax.random.split(jax.random.key(seed))
        return jraph.GraphsTuple(
            nodes=normal(seed, n, 16),
            edges=normal(seed + 50, 3 * n, 16),
            senders=jax.random.randint(keys[0], (3 * n,), 0, n),
            receivers=jax.random.randint(keys[1], (3 * n,), 0, n),
            globals=None,
            n_node=jnp.array([n]),
            n_edge=jnp.array([3 * n]),
        )

    graph = jraph.batch([one(seed) for seed in range(8)])
    params = {
        "edge": layers(1, 48, 32, 16),
        "node": layers(2, 32, 32, 16),
        "global": layers(3, 32, 32, 4),
        "attention": layers(4, 48, 16, 1),
    }
    return Program(loss, params, (graph, jnp.arange(8) % 4), learning_rate=3e-3)


def equivariant_network() -> Program:
    """e3nn: energies of point clouds by tensor products with spherical harmonics."""
    import e3nn_jax as e3nn
    import flax.linen as nn

    class Energy(nn.Module):
        @nn.compact
        def __call__(self, places, kinds):
            vectors = places[:, None] - places[None]
            lengths = jnp.sqrt(jnp.sum(vectors**2, -1) + jnp.eye(len(places)))
            directions = e3nn.spherical_harmonics(
                "0e + 1o + 2e", e3nn.IrrepsArray("1o", vectors), normalize=True
            )
            radial = e3nn.soft_one_hot_linspace(
                lengths, start=0.0, end=4.0, number=8, basis="gaussian", cutoff=False
            )
            x = e3nn.IrrepsArray("16x0e", nn.Embed(3, 16)(kinds))
            for _ in range(2):
                messages = e3nn.tensor_product(x[None], directions)
                messages = e3nn.flax.Linear("16x0e + 8x1o + 4x2e")(messages)
                near = e3nn.flax.MultiLayerPerceptron((32, 28), jax.nn.silu)(radial)
                x = e3nn.flax.Linear(messages.irreps, force_irreps_out=True)(x)
                x = x + e3nn.sum(messages * near, axis=1) / len(kinds)
                x = e3nn.flax.Linear("32x0e + 8x1o + 4x2e")(x)
                x = e3nn.gate(x, even_act=jax.nn.silu, even_gate_act=jax.nn.sigmoid)
            return jnp.sum(nn.Dense(1)(x.filter("0e").array))

    model = Energy()

    def energy(places, params, kinds):
        return model.apply(params, places, kinds)

    def loss(params, batch):
        places, kinds, energies, forces = batch
        grad_fn = jax.value_and_grad(energy)
        found, slopes = jax.vmap(grad_fn, (0, None, 0))(places, params, kinds)
        error = jnp.mean((found - energies) ** 2)
        return error + jnp.mean((slopes + forces) ** 2), ()

    kinds = jax.random.randint(jax.random.key(3), (4, 8), 0, 3)
    places = 1.5 * normal(4, 4, 8, 3)
    params = model.init(jax.random.key(0), places[0], kinds[0])
    batch = (places, kinds, normal(5, 4), 0.1 * normal(6, 4, 8, 3))
    return Program(loss, params, batch)


def molecular_dynamics() -> Program:
    """jax-md: a network of Behler and Parrinello is fitted to energies and forces."""
    from flax import nnx
    from jax_md import energy, space

    displacement, _ = space.periodic(5.0)
    energy_fn = energy.behler_parrinello(
        displacement, key=jax.random.key(0), mlp_sizes=(32, 32)
    )
    graph, params = nnx.split(energy_fn.model)

    def loss(params, batch):
        places, energies, forces = batch
        model = nnx.merge(graph, params)
        found, slopes = jax.vmap(jax.value_and_grad(model))(places)
        error = jnp.mean((found - energies) ** 2)
        return error + jnp.mean((slopes + forces) ** 2), ()

    places = 5.0 * jax.random.uniform(jax.random.key(1), (4, 12, 3))
    batch = (places, normal(3, 4), 0.1 * normal(4, 4, 12, 3))
    return Program(loss, params, batch)


# --------------------------------------------------------------------------- densities


def coupling_flow() -> Program:
    """distrax: a flow of masked couplings with rational quadratic splines."""
    import distrax

    def density(params):
        mask = jnp.arange(8) % 2 == 0
        couplings = []
        for i, network in enumerate(params):
            couplings.append(
                distrax.MaskedCoupling(
                    mask if i % 2 else ~mask,
                    bijector=lambda p: distrax.RationalQuadraticSpline(p, -4.0, 4.0),
                    conditioner=lambda x, net=network: mlp(net, x, jax.nn.relu).reshape(
                        *x.shape[:-1], 8, 3 * 6 + 1
                    ),
                )
            )
        base = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(couplings)))

    def loss(params, x):
        return -jnp.mean(density(params).log_prob(x)), ()

    x = normal(0, 128, 8)
    x = x.at[:, 1::2].set(0.3 * x[:, 1::2] + jnp.sin(2 * x[:, ::2]))
    params = [layers(i, 8, 64, 8 * 19) for i in range(4)]
    return Program(loss, params, x, learning_rate=1e-3)


def autoregressive_flow() -> Program:
    """flowjax: a masked autoregressive flow, conditioned, by its own loss."""
    import equinox as eqx
    import paramax
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from flowjax.train.losses import MaximumLikelihoodLoss

    flow = masked_autoregressive_flow(
        jax.random.key(0),
        base_dist=Normal(jnp.zeros(6)),
        cond_dim=3,
        flow_layers=4,
        nn_width=48,
    )
    params, static = eqx.partition(
        flow,
        eqx.is_inexact_array,
        is_leaf=lambda leaf: isinstance(leaf, paramax.NonTrainable),
    )

    def loss(params, batch):
        x, condition = batch
        return MaximumLikelihoodLoss()(params, static, x, condition), ()

    condition = normal(1, 128, 3)
    x = jnp.repeat(condition, 2, 1) + 0.5 * normal(2, 128, 6)
    return Program(loss, params, (x, condition), learning_rate=1e-3)


def gaussian_process() -> Program:
    """tinygp: the likelihood of a Gaussian process with a network as its transform."""
    import tinygp

    def loss(params, batch):
        x, y = batch
        kernel = jnp.exp(params["amplitude"]) * tinygp.kernels.Matern52(
            jnp.exp(params["scale"])
        )
        kernel = tinygp.transforms.Transform(lambda x: mlp(params["net"], x), kernel)
        noise = jnp.exp(params["noise"])
        process = tinygp.GaussianProcess(kernel, x, diag=noise)
        return -process.log_probability(y) / len(y), ()

    x = normal(0, 64, 8)
    y = jnp.sin(x[:, 0]) + 0.5 * x[:, 1] + 0.1 * normal(1, 64)
    params = {
        "net": layers(2, 8, 32, 4),
        "amplitude": jnp.float32(0.0),
        "scale": jnp.float32(0.0),
        "noise": jnp.float32(-2.0),
    }
    return Program(loss, params, (x, y))


def optimal_transport() -> Program:
    """OTT: samples of a generator are moved towards data by Sinkhorn's divergence."""
    from ott.geometry import pointcloud
    from ott.tools import sinkhorn_divergence

    def loss(params, batch):
        noise, data = batch
        made = mlp(params, noise)
        divergence, _ = sinkhorn_divergence.sinkhorn_divergence(
            pointcloud.PointCloud, made, data, epsilon=0.5
        )
        return divergence, ()

    data = jnp.sign(normal(0, 64, 8)) + 0.1 * normal(1, 64, 8)
    batch = (normal(2, 64, 8), data)
    return Program(loss, layers(3, 8, 64, 64, 8), batch, learning_rate=3e-3)


def kalman_filter() -> Program:
    """dynamax: the likelihood of a linear Gaussian state-space model by its filter."""
    from dynamax.linear_gaussian_ssm import inference

    def loss(params, batch):
        y = batch
        model = inference.make_lgssm_params(
            initial_mean=params["mean"],
            initial_cov=jnp.eye(8),
            dynamics_weights=params["dynamics"],
            dynamics_cov=jnp.exp(params["noise"]) * jnp.eye(8),
            emissions_weights=params["emissions"],
            emissions_cov=0.5 * jnp.eye(4),
        )
        return -inference.lgssm_filter(model, y).marginal_loglik / y.size, ()

    params = {
        "mean": jnp.zeros(8),
        "dynamics": 0.9 * jnp.eye(8) + 0.05 * normal(0, 8, 8),
        "noise": jnp.float32(-1.0),
        "emissions": normal(1, 4, 8) / 3,
    }
    y = jnp.cumsum(0.3 * normal(2, 50, 4), axis=0)
    return Program(loss, params, y, learning_rate=1e-2)


ENTRIES = (
    Entry("graph network with attention", ["jraph"], graph_network),
    Entry("equivariant network", ["e3nn-jax"], equivariant_network),
    Entry("Behler-Parrinello network", ["jax-md"], molecular_dynamics),
    Entry("spline couplings", ["distrax"], coupling_flow),
    Entry("masked autoregressive flow", ["flowjax"], autoregressive_flow),
    Entry("Gaussian process", ["tinygp"], gaussian_process),
    Entry("Sinkhorn divergence", ["ott-jax"], optimal_transport),
    Entry("Kalman filter", ["dynamax"], kalman_filter),
)
