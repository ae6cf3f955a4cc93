"""Sound and other series: spectra, wavelets, filters."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sweep.program import Entry, Program, cross_entropy, dense, mlp


def _tones(r, n, length):
    t = np.arange(length) / 4000
    pitches = r.uniform(n, 3, 1, low=100, high=1500)
    loudness = r.uniform(n, 3, 1)
    tones = loudness * np.sin(2 * np.pi * pitches * t + r.uniform(n, 3, 1, high=6))
    return np.float32(0.3 * tones.sum(1) + 0.01 * r.normal(n, length))


def _frames(x, size=128, step=64):
    places = np.arange(0, x.shape[-1] - size + 1, step)[:, None] + np.arange(size)
    return x[..., places] * np.hanning(size).astype(x.dtype)


def _mel(n, bins):
    """Returns triangular filters ``[bins, n]`` of a rising width."""
    edges = np.linspace(0, 1, n + 2) ** 1.7 * (bins - 1)
    at = np.arange(bins)[:, None]
    up = (at - edges[:-2]) / np.diff(edges)[:-1]
    down = (edges[2:] - at) / np.diff(edges)[1:]
    return np.float32(np.maximum(np.minimum(up, down), 0))


def log_mel() -> Program:
    """A classifier of the logarithm of a mel spectrogram."""

    def loss(p, params, data):
        sound, mel, labels = data
        h = p.conv(sound[..., None], params["filter"])[..., 0]
        power = jnp.abs(jnp.fft.rfft(_frames(h))) ** 2
        features = jnp.log(p.dot(power, mel) + 1e-6)
        features = (features - features.mean()) / (features.std() + 1e-5)
        return cross_entropy(mlp(p, params["net"], features).mean(1), labels)

    def make(r):
        tap = r.normal(9, 1, 1, scale=0.2)
        tap[4] += 1
        params = {"filter": tap, "net": r.layers(20, 32, 5)}
        return params, (_tones(r, 8, 1024), _mel(20, 65), r.integers(5, 8))

    return Program(loss, make)


def product_log_mel() -> Program:
    """The same with the Fourier transform as two products."""

    def loss(p, params, data):
        sound, mel, sine, cosine, labels = data
        frames = _frames(sound) * jax.nn.softplus(params["window"])
        power = p.dot(frames, cosine) ** 2 + p.dot(frames, sine) ** 2
        features = jnp.log(p.dot(power, mel) + 1e-6)
        return cross_entropy(mlp(p, params["net"], features).mean(1), labels)

    def make(r):
        params = {"window": r.normal(128, scale=0.1), "net": r.layers(20, 32, 5)}
        angles = 2 * np.pi * np.outer(np.arange(128), np.arange(65)) / 128
        waves = (np.float32(np.sin(angles)), np.float32(np.cos(angles)))
        return params, (_tones(r, 8, 1024), _mel(20, 65), *waves, r.integers(5, 8))

    return Program(loss, make)


def stft_loss() -> Program:
    """A vocoder's network with spectral convergence and log magnitudes."""

    def loss(p, params, data):
        noisy, clean = data
        h = noisy[..., None]
        for w in params[:-1]:
            h = jnp.tanh(p.conv(h, w))
        found = p.conv(h, params[-1])[..., 0] + noisy
        total = 0.0
        for size in (64, 128):
            x, y = (
                jnp.sqrt(jnp.abs(jnp.fft.rfft(_frames(s, size, size // 2))) ** 2 + 1e-7)
                for s in (found, clean)
            )
            total += jnp.linalg.norm(y - x) / jnp.linalg.norm(y)
            total += jnp.mean(jnp.abs(jnp.log(x) - jnp.log(y)))
        return total

    def make(r):
        params = [r.kernel(9, 1, 16), r.kernel(9, 16, 16), 0.3 * r.kernel(9, 16, 1)]
        clean = _tones(r, 4, 512)
        return params, (clean + r.normal(4, 512, scale=0.1), clean)

    return Program(loss, make)


def wavelets() -> Program:
    """Three levels of a learned wavelet, soft thresholds, and back."""

    def loss(p, params, data):
        noisy, clean = data
        low = params["low"]
        high = low[::-1] * jnp.array([1, -1] * 4, low.dtype)
        filters = jnp.stack([low, high], -1)[:, None]
        h, details = noisy[..., None], []
        for threshold in params["thresholds"]:
            both = p.conv(h, filters, stride=2)
            h, d = both[..., :1], both[..., 1:]
            size = jax.nn.relu(jnp.abs(d) - jax.nn.softplus(threshold))
            details.append(jnp.sign(d) * size)
        for d in reversed(details):
            both = jnp.concatenate([h, d], -1)
            wide = jnp.zeros((*both.shape[:1], 2 * both.shape[1], 2), both.dtype)
            wide = wide.at[:, ::2].set(both)
            h = p.conv(wide, jnp.swapaxes(filters[::-1], 1, 2))
        return jnp.mean((h[..., 0] - clean) ** 2) + 0.1 * (jnp.sum(low**2) - 1) ** 2

    def make(r):
        db4 = [0.2304, 0.7148, 0.6309, -0.0280, -0.1870, 0.0308, 0.0329, -0.0106]
        params = {
            "low": np.float32(db4) + r.normal(8, scale=0.02),
            "thresholds": r.normal(3, scale=0.3) - 2,
        }
        clean = _tones(r, 8, 256)
        return params, (clean + r.normal(8, 256, scale=0.1), clean)

    return Program(loss, make)


def temporal_convolutions() -> Program:
    """WaveNet: dilated convolutions with gates, over mu-law codes."""

    def loss(p, params, data):
        codes = data
        h = params["embed"][codes[:, :-1]]
        skips = 0.0
        for i, block in enumerate(params["blocks"]):
            dilation = 2**i
            padded = jnp.pad(h, ((0, 0), (dilation, 0), (0, 0)))
            both = p.conv(padded, block["in"], padding="VALID", dilation=dilation)
            a, b = jnp.split(both, 2, -1)
            y = jnp.tanh(a) * jax.nn.sigmoid(b)
            h, skips = h + p.dot(y, block["out"]), skips + p.dot(y, block["skip"])
        return cross_entropy(dense(p, params["head"], jax.nn.relu(skips)), codes[:, 1:])

    def make(r):
        def block():
            return {
                "in": r.kernel(2, 16, 32),
                "out": r.kernel(16, 16),
                "skip": r.kernel(16, 32),
            }

        params = {
            "embed": r.normal(32, 16),
            "blocks": [block() for _ in range(4)],
            "head": r.layers(32, 32)[0],
        }
        sound = np.clip(_tones(r, 4, 128), -1, 1)
        codes = np.sign(sound) * np.log1p(255 * np.abs(sound)) / np.log(256)
        return params, np.int32((codes + 1) * 15.9)

    return Program(loss, make)


def parametric_equaliser() -> Program:
    """DDSP: frequency responses of second-order filters, by a network."""

    def loss(p, params, data):
        spectra, targets = data
        raw = mlp(p, params, jnp.log(spectra + 1e-5), jnp.tanh).reshape(-1, 4, 5)
        z = jnp.exp(-2j * np.pi * jnp.arange(spectra.shape[1]) / 128)
        radius = 0.98 * jax.nn.sigmoid(raw[..., 0] + 1)
        cosine = jnp.cos(np.pi * jax.nn.sigmoid(raw[..., 1]))
        a1, a2 = -2 * radius * cosine, radius**2
        b0, b1, b2 = 1 + 0.3 * raw[..., 2], 0.3 * raw[..., 3], 0.3 * raw[..., 4]
        top = b0[..., None] + b1[..., None] * z + b2[..., None] * z**2
        low = 1 + a1[..., None] * z + a2[..., None] * z**2
        gains = jnp.sum(
            jnp.log(jnp.abs(top) ** 2 + 1e-6) - jnp.log(jnp.abs(low) ** 2), 1
        )
        return jnp.mean((jnp.log(spectra**2 + 1e-5) + gains - targets) ** 2)

    def make(r):
        spectra = np.abs(np.fft.rfft(_tones(r, 16, 128)))
        return r.layers(65, 32, 20), (np.float32(spectra), r.normal(16, 65))

    return Program(loss, make)


def beamformer() -> Program:
    """A network's masks weigh covariances of microphones; the filter is a solve."""

    def loss(p, params, data):
        sound, clean = data
        power = jnp.log(jnp.sum(sound**2, 2) + 1e-5)
        mask = jax.nn.sigmoid(mlp(p, params, power))
        noise = (
            jnp.einsum(
                "bft,btfc,btfd->bfcd",
                jnp.swapaxes(1 - mask, 1, 2),
                *(jnp.moveaxis(sound, 2, -1),) * 2,
            )
            / mask.shape[1]
        )
        steer = jnp.ones((*noise.shape[:2], 4, 1), noise.dtype)
        inverse = jnp.linalg.solve(noise + 1e-2 * jnp.eye(4, dtype=noise.dtype), steer)
        weights = inverse / jnp.sum(inverse, 2, keepdims=True)
        found = jnp.sum(jnp.moveaxis(sound, 2, -1) * weights[:, None, ..., 0], -1)
        return jnp.mean((found - clean) ** 2)

    def make(r):
        clean = r.normal(4, 24, 16) * np.exp(r.normal(4, 1, 16))
        sound = clean[:, :, None] + 0.7 * r.normal(4, 24, 4, 16)
        return r.layers(16, 32, 16), (sound, clean)

    return Program(loss, make)


ENTRIES = (
    Entry("log-mel, by FFT", log_mel),
    Entry("log-mel, by products", product_log_mel),
    Entry("STFT loss", stft_loss),
    Entry("wavelet shrinkage", wavelets),
    Entry("WaveNet", temporal_convolutions),
    Entry("equalizer", parametric_equaliser),
    Entry("beamformer", beamformer),
)
