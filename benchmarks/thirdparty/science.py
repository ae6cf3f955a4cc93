"""Solvers, samplers, densities and physics of scientific libraries."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.thirdparty.parts import cross_entropy, layers, mlp, normal
from benchmarks.thirdparty.program import Entry, Program

_LOTKA_VOLTERRA = {"birth": 1.1, "hunt": 0.4, "growth": 0.1, "death": 0.4}

# ------------------------------------------------------------- differential equations


def neural_ode(adjoint: str) -> Callable[[], Program]:
    """Returns a function that makes the neural ODE with an adjoint of diffrax."""

    def make() -> Program:
        """diffrax: a neural ODE learns spirals, with adaptive steps of Tsit5."""
        import diffrax
        import equinox as eqx

        field = eqx.nn.MLP(2, 2, 64, 2, jax.nn.softplus, key=jax.random.key(0))
        params, static = eqx.partition(field, eqx.is_inexact_array)
        term = diffrax.ODETerm(lambda t, y, field: eqx.combine(field, static)(y))

        def solve(params, times, start):
            solution = diffrax.diffeqsolve(
                term,
                diffrax.Tsit5(),
                t0=0.0,
                t1=2.0,
                dt0=0.1,
                y0=start,
                args=params,
                saveat=diffrax.SaveAt(ts=times),
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
                adjoint=getattr(diffrax, adjoint)(),
                max_steps=64,
            )
            return solution.ys

        def loss(params, batch):
            times, targets = batch
            starts = targets[:, 0]
            paths = jax.vmap(solve, (None, None, 0))(params, times, starts)
            return jnp.mean((paths - targets) ** 2), ()

        return Program(loss, params, _spirals(16, 20), learning_rate=3e-3)

    return make


def predator_and_prey() -> Program:
    """diffrax: Lotka-Volterra without a network, with adaptive steps that count."""
    import diffrax

    def field(t, y, args):
        prey, predators = y
        return (
            args["birth"] * prey - args["hunt"] * prey * predators,
            args["growth"] * prey * predators - args["death"] * predators,
        )

    def solve(params, times, start):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            t0=0.0,
            t1=10.0,
            dt0=0.1,
            y0=(start[0], start[1]),
            args=params,
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
            max_steps=256,
        )
        return jnp.stack(solution.ys, -1), solution.stats

    def loss(params, batch):
        times, starts, counted = batch
        paths, stats = jax.vmap(solve, (None, None, 0))(params, times, starts)
        steps = stats["num_accepted_steps"], stats["num_rejected_steps"]
        return jnp.mean((jnp.log(paths) - counted) ** 2), steps

    true = {k: jnp.float32(v) for k, v in _LOTKA_VOLTERRA.items()}
    times = jnp.linspace(0.5, 10.0, 20)
    starts = 1.0 + jax.random.uniform(jax.random.key(0), (8, 2))
    paths, _ = jax.vmap(solve, (None, None, 0))(true, times, starts)
    batch = (times, starts, jnp.log(paths) + 0.1 * normal(1, *paths.shape))
    return Program(loss, jax.tree.map(lambda x: 0.8 * x, true), batch)


def stiff_oscillator() -> Program:
    """diffrax: Van der Pol's oscillator by the implicit solver Kvaerno5."""
    import diffrax

    def field(t, y, stiffness):
        x, v = y
        return jnp.stack([v, stiffness * (1 - x**2) * v - x])

    def solve(stiffness, start, times):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Kvaerno5(),
            t0=0.0,
            t1=10.0,
            dt0=0.01,
            y0=start,
            args=stiffness,
            saveat=diffrax.SaveAt(ts=times),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
            max_steps=1024,
        )
        return solution.ys[:, 0], solution.stats["num_accepted_steps"]

    def loss(params, batch):
        times, observed = batch
        path, accepted = solve(params["stiffness"], params["start"], times)
        return jnp.mean((path - observed) ** 2), accepted

    times = jnp.linspace(0.0, 10.0, 40)
    path, _ = solve(jnp.float32(5.0), jnp.array([2.0, 0.0]), times)
    params = {"stiffness": jnp.float32(4.0), "start": jnp.array([1.5, 0.0])}
    return Program(loss, params, (times, path))


def neural_sde() -> Program:
    """diffrax: a neural SDE with Brownian motion of a virtual tree, in fixed steps."""
    import diffrax
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0))
    drift = eqx.nn.MLP(9, 8, 48, 1, jax.nn.silu, final_activation=jnp.tanh, key=keys[0])
    noise = eqx.nn.MLP(9, 8, 48, 1, jax.nn.silu, final_activation=jnp.tanh, key=keys[1])
    params, static = eqx.partition((drift, noise), eqx.is_inexact_array)

    def solve(params, key, start):
        drift, noise = eqx.combine(params, static)

        def at(t, y):
            return jnp.concatenate([jnp.asarray(t)[None], y])

        path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(8,), key=key)
        diffusion = diffrax.ControlTerm(
            lambda t, y, _: diffrax_diagonal(noise(at(t, y))), path
        )
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, _: drift(at(t, y))), diffusion
        )
        solution = diffrax.diffeqsolve(
            terms, diffrax.Heun(), 0.0, 1.0, 0.05, start, max_steps=32
        )
        return solution.ys[0], solution.stats["num_steps"]

    def diffrax_diagonal(x):
        import lineax

        return lineax.DiagonalLinearOperator(0.3 * x)

    def loss(params, batch):
        keys, starts, targets = batch
        ends, steps = jax.vmap(solve, (None, 0, 0))(params, keys, starts)
        bits = jax.vmap(jax.random.bits)(keys)
        return jnp.mean((ends - targets) ** 2), (steps, bits)

    starts = normal(1, 32, 8)
    batch = (jax.random.split(jax.random.key(2), 32), starts, jnp.sin(2 * starts))
    return Program(loss, params, batch)


# --------------------------------------------------------------- equations and systems


def levenberg_marquardt() -> Program:
    """optimistix: curves are fitted by Levenberg-Marquardt on learned features."""
    import optimistix as optx

    def residuals(weights, args):
        features, y = args
        hidden = jnp.tanh(features @ weights["w"])
        return hidden @ weights["v"] - y, 0.3 * weights["w"], 0.3 * weights["v"]

    def loss(params, batch):
        x, y = batch
        features = mlp(params, x)
        start = {"w": normal(5, 16, 3) / 4, "v": jnp.ones(3)}
        fitted = optx.least_squares(
            residuals,
            optx.LevenbergMarquardt(rtol=1e-4, atol=1e-4),
            start,
            args=(features[:32], y[:32]),
            max_steps=64,
        )
        predicted = jnp.tanh(features[32:] @ fitted.value["w"]) @ fitted.value["v"]
        return jnp.mean((predicted - y[32:]) ** 2), ()

    x = normal(0, 64, 16)
    batch = (x, jnp.sin(x[:, 0]) + 0.5 * x[:, 1])
    return Program(loss, layers(1, 16, 48, 16), batch)


def fitted_in_float32() -> Program:
    """The same, with the fit in float32 and the features in 16 bits."""
    fit_in_full = lambda rules: rules.scope("least_squares", "full")
    return levenberg_marquardt()._replace(rules=fit_in_full)


def kepler() -> Program:
    """optimistix: orbits fitted through Newton's method for Kepler's equation."""
    import optimistix as optx

    def solve(mean_anomaly, eccentricity):
        def equation(anomaly, _):
            return anomaly - eccentricity * jnp.sin(anomaly) - mean_anomaly

        solver = optx.Newton(rtol=1e-5, atol=1e-5)
        found = optx.root_find(equation, solver, mean_anomaly)
        return found.value, found.stats["num_steps"]

    def place(params, times):
        e = jax.nn.sigmoid(params["eccentricity"])
        mean_anomaly = params["rate"] * times + params["phase"]
        anomaly, steps = jax.vmap(solve, (0, None))(mean_anomaly, e)
        x = params["axis"] * (jnp.cos(anomaly) - e)
        y = params["axis"] * jnp.sqrt(1 - e**2) * jnp.sin(anomaly)
        return jnp.stack([x, y], -1), steps

    def loss(params, batch):
        times, seen = batch
        places, steps = place(params, times)
        return jnp.mean((places - seen) ** 2), steps

    true = {"eccentricity": -0.5, "rate": 1.0, "phase": 0.2, "axis": 1.5}
    true = jax.tree.map(jnp.float32, true)
    times = jnp.linspace(0.0, 6.0, 64)
    params = jax.tree.map(lambda x: 0.9 * x, true)
    batch = (times, place(true, times)[0])
    return Program(loss, params, batch, learning_rate=1e-2)


def fixed_point() -> Program:
    """optimistix: a deep equilibrium classifier, differentiated implicitly."""
    import equinox as eqx
    import optimistix as optx

    class Equilibrium(eqx.Module):
        inside: eqx.nn.Linear
        outside: eqx.nn.Linear
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.inside = eqx.nn.Linear(32, 32, key=keys[0])
            self.outside = eqx.nn.Linear(16, 32, key=keys[1])
            self.head = eqx.nn.Linear(32, 8, key=keys[2])

        def __call__(self, x):
            found = optx.fixed_point(
                lambda z, model: jnp.tanh(0.7 * model.inside(z) + model.outside(x)),
                optx.FixedPointIteration(rtol=1e-3, atol=1e-3),
                jnp.zeros(32),
                args=self,
                max_steps=100,
                throw=False,
            )
            return self.head(found.value)

    model = Equilibrium(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        x, labels = batch
        logits = jax.vmap(eqx.combine(params, static))(x)
        return cross_entropy(logits, labels), ()

    x = normal(1, 32, 16)
    labels = jnp.argmax(x @ normal(2, 16, 8), axis=-1)
    return Program(loss, params, (x, labels), learning_rate=3e-3)


def linear_systems() -> Program:
    """lineax: one system of learned features by LU, QR, Cholesky, CG and GMRES."""
    import lineax as lx

    def loss(params, batch):
        x, y = batch
        features = jnp.tanh(mlp(params, x))
        train, test = jnp.split(features, 2)
        gram = train.T @ train / len(train) + 0.1 * jnp.eye(16)
        definite = lx.MatrixLinearOperator(gram, lx.positive_semidefinite_tag)
        right = train.T @ y[:64] / len(train)
        closed = [
            lx.linear_solve(lx.MatrixLinearOperator(gram), right, lx.LU()).value,
            lx.linear_solve(definite, right, lx.Cholesky()).value,
            lx.linear_solve(lx.MatrixLinearOperator(train), y[:64], lx.QR()).value,
        ]
        iterative = [
            lx.linear_solve(definite, right, lx.CG(rtol=1e-4, atol=1e-4)).value,
            lx.linear_solve(definite, right, lx.GMRES(rtol=1e-4, atol=1e-4)).value,
        ]
        errors = [jnp.mean((test @ w - y[64:]) ** 2) for w in closed + iterative]
        return jnp.mean(jnp.stack(errors)), ()

    x = normal(0, 128, 16)
    batch = (x, jnp.sin(x[:, 0]) + 0.5 * x[:, 1])
    return Program(loss, layers(1, 16, 48, 16), batch)


def ridge_regression() -> Program:
    """jaxopt: the penalty and features of ridge regression, by implicit derivatives."""
    import jaxopt

    def objective(weights, penalty, features, y):
        residuals = features @ weights - y
        return jnp.mean(residuals**2) + penalty * jnp.mean(weights**2)

    def loss(params, batch):
        x, y = batch
        features = jnp.tanh(mlp(params["net"], x))
        solver = jaxopt.LBFGS(objective, maxiter=50, tol=1e-4, implicit_diff=True)
        weights = solver.run(
            jnp.zeros(16), jax.nn.softplus(params["penalty"]), features[:64], y[:64]
        ).params
        return jnp.mean((features[64:] @ weights - y[64:]) ** 2), ()

    x = normal(0, 128, 16)
    params = {"net": layers(1, 16, 32, 16), "penalty": jnp.float32(0.0)}
    batch = (x, jnp.sin(x[:, 0]) + 0.5 * x[:, 1])
    return Program(loss, params, batch)


def support_vectors() -> Program:
    """jaxopt: the dual of a multiclass SVM by projected gradient, in fixed steps."""
    import jaxopt

    def objective(dual, features, labels, penalty):
        weights = features.T @ (labels - dual) / penalty
        return 0.5 * penalty * jnp.sum(weights**2) + jnp.sum(dual * labels)

    def loss(params, batch):
        x, labels = batch
        features = jnp.tanh(mlp(params["net"], x))
        penalty = 20 * jax.nn.softplus(params["penalty"])
        solver = jaxopt.ProjectedGradient(
            objective, jaxopt.projection.projection_simplex, maxiter=200, tol=1e-4
        )
        # The dual of each example lies on the simplex.
        solver = jaxopt.ProjectedGradient(
            objective,
            jax.vmap(jaxopt.projection.projection_simplex, (0, None)),
            stepsize=0.1,
            maxiter=200,
            tol=1e-4,
        )
        dual, _ = solver.run(
            jnp.full((64, 4), 0.25),
            hyperparams_proj=1.0,
            features=features[:64],
            labels=labels[:64],
            penalty=penalty,
        )
        weights = features[:64].T @ (labels[:64] - dual) / penalty
        errors = features[64:] @ weights - labels[64:]
        return jnp.mean(errors**2), ()

    x = normal(0, 128, 16)
    labels = jax.nn.one_hot(jnp.argmax(x @ normal(2, 16, 4), axis=-1), 4)
    params = {"net": layers(1, 16, 32, 16), "penalty": jnp.float32(0.0)}
    return Program(loss, params, (x, labels))


# ----------------------------------------------------------------------------- bayes


def bayesian_network() -> Program:
    """numpyro: the ELBO of a Bayesian neural network with a normal guide."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x, y):
        for i, (n, m) in enumerate([(8, 32), (32, 32), (32, 1)]):
            w = numpyro.sample(f"w{i}", dist.Normal(jnp.zeros((n, m)), n**-0.5))
            b = numpyro.sample(f"b{i}", dist.Normal(jnp.zeros(m), 1.0))
            x = x @ w + b
            x = jnp.tanh(x) if i < 2 else x
        spread = numpyro.sample("spread", dist.LogNormal(-1.0, 0.5))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Normal(x[:, 0], spread), obs=y)

    guide = AutoNormal(model)
    elbo = Trace_ELBO(num_particles=4)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), elbo)
    x = normal(0, 64, 8)
    y = jnp.sin(2 * x[:, 0]) * x[:, 1] + 0.1 * normal(1, 64)
    state = svi.init(jax.random.key(2), x, y)

    def loss(params, batch):
        key, x, y = batch
        constrained = svi.constrain_fn(params)
        value = elbo.loss(key, constrained, model, guide, x, y)
        return value / len(y), jax.random.bits(key, (4,))

    params = svi.optim.get_params(state.optim_state)
    return Program(loss, params, (jax.random.key(3), x, y), learning_rate=1e-2)


def nuts_expectation() -> Program:
    """numpyro: an EM step of logistic regression with weights that NUTS draws."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.hmc import hmc
    from numpyro.infer.util import potential_energy

    def model(params, x, y):
        features = jnp.tanh(mlp(params["net"], x))
        scale = jnp.exp(params["scale"])
        w = numpyro.sample("w", dist.Normal(jnp.zeros(16), scale).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 3.0))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", dist.Bernoulli(logits=features @ w + b), obs=y)

    def loss(params, batch):
        key, x, y = batch
        fixed = lax.stop_gradient(params)

        def potential(weights):
            return potential_energy(model, (fixed, x, y), {}, weights)

        init, sample = hmc(potential, algo="NUTS")
        state = init(
            {"w": jnp.zeros(16), "b": jnp.float32(0.0)},
            num_warmup=5,
            step_size=0.1,
            max_tree_depth=4,
            rng_key=key,
        )

        def step(state, _):
            state = sample(state)
            return state, state.z

        state, drawn = lax.scan(step, state, length=10)
        energies = jax.vmap(lambda z: potential_energy(model, (params, x, y), {}, z))(
            lax.stop_gradient(drawn)
        )
        return jnp.mean(energies[5:]) / len(y), (state.i, state.rng_key)

    x = normal(0, 64, 8)
    y = (x[:, 0] * x[:, 1] > 0).astype(jnp.float32)
    params = {"net": layers(1, 8, 32, 16), "scale": jnp.float32(0.0)}
    return Program(loss, params, (jax.random.key(2), x, y))


def hamiltonian_variational() -> Program:
    """blackjax: latents of a decoder are moved by HMC, and the decoder is fitted."""
    import blackjax

    def log_joint(params, z, x):
        return -0.5 * jnp.sum(z**2) - 2.0 * jnp.sum((mlp(params, z) - x) ** 2)

    def loss(params, batch):
        key, start, x = batch
        fixed = lax.stop_gradient(params)
        sampler = blackjax.hmc(
            lambda z: log_joint(fixed, z, x),
            step_size=0.02,
            inverse_mass_matrix=jnp.ones(start.shape).reshape(-1),
            num_integration_steps=5,
        )

        def step(state, key):
            state, info = sampler.step(key, state)
            return state, (state.position, info.num_integration_steps)

        keys = jax.random.split(key, 8)
        _, (drawn, counts) = lax.scan(step, sampler.init(start), keys)
        each = jax.vmap(log_joint, (None, 0, None))(params, drawn[4:], x)
        return -jnp.mean(each) / x.size, (counts, jax.vmap(jax.random.bits)(keys))

    start = normal(0, 32 * 8)
    del start
    x = jnp.sin(normal(1, 32, 8) @ normal(2, 8, 32))
    batch = (jax.random.key(3), normal(0, 32, 8), x)
    return Program(loss, layers(4, 8, 64, 64, 32), batch)


def adapted_langevin() -> Program:
    """blackjax: energies of particles are fitted to data by MALA (contrastive)."""
    import blackjax

    def energy(params, x):
        return 0.1 * jnp.sum(x**2) - mlp(params, x, jax.nn.silu)[0]

    def loss(params, batch):
        keys, starts, data = batch
        fixed = lax.stop_gradient(params)
        sampler = blackjax.mala(lambda x: -energy(fixed, x), step_size=0.05)

        def chain(key, start):
            def step(state, key):
                return sampler.step(key, state)

            state, _ = lax.scan(step, sampler.init(start), jax.random.split(key, 8))
            return state.position

        drawn = lax.stop_gradient(jax.vmap(chain)(keys, starts))
        each = jax.vmap(energy, (None, 0))
        return jnp.mean(each(params, data)) - jnp.mean(each(params, drawn)), ()

    data = jnp.repeat(jnp.sign(normal(0, 64, 1)), 16, 1) + 0.2 * normal(1, 64, 16)
    batch = (jax.random.split(jax.random.key(2), 64), normal(3, 64, 16), data)
    return Program(loss, layers(4, 16, 64, 64, 1), batch)


def _spirals(count: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Returns times, and at those the points of spirals from several starts."""
    times = jnp.linspace(0.0, 2.0, length)
    turns = jax.random.uniform(jax.random.key(0), (count, 1)) * 2 * jnp.pi + 3 * times
    radius = jnp.exp(-0.5 * times)
    return times, jnp.stack([radius * jnp.cos(turns), radius * jnp.sin(turns)], -1)


ENTRIES = (
    *(
        Entry(f"neural ODE, {adjoint}", ["diffrax"], neural_ode(adjoint))
        for adjoint in (
            *("RecursiveCheckpointAdjoint", "BacksolveAdjoint", "DirectAdjoint"),
        )
    ),
    Entry("Lotka-Volterra", ["diffrax"], predator_and_prey),
    Entry("Van der Pol, implicit", ["diffrax"], stiff_oscillator),
    Entry("neural SDE", ["diffrax"], neural_sde),
    Entry("Levenberg-Marquardt", ["optimistix"], levenberg_marquardt),
    Entry("Levenberg-Marquardt in float32", ["optimistix"], fitted_in_float32),
    Entry("Kepler's equation", ["optimistix"], kepler),
    Entry("fixed point", ["optimistix"], fixed_point),
    Entry("linear systems", ["lineax"], linear_systems),
    Entry("ridge regression", ["jaxopt"], ridge_regression),
    Entry("support vectors", ["jaxopt"], support_vectors),
    Entry("Bayesian network by SVI", ["numpyro"], bayesian_network),
    Entry("NUTS", ["numpyro"], nuts_expectation),
    Entry("Hamiltonian variational inference", ["blackjax"], hamiltonian_variational),
    Entry("energies by MALA", ["blackjax"], adapted_langevin),
)
