"""Images, cameras, points and poses."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sweep.program import (
    Entry,
    Program,
    cross_entropy,
    dense,
    layer_norm,
    mlp,
)

# --------------------------------------------------------------------------- sampling


def _sampled(image, x, y):
    """Returns an image at real places, bilinearly: ``[h, w, c]`` at ``[n]``."""
    h, w = image.shape[:2]
    x, y = jnp.clip(x, 0, w - 1.001), jnp.clip(y, 0, h - 1.001)
    x0, y0 = jnp.floor(x), jnp.floor(y)
    fx, fy = (x - x0)[:, None], (y - y0)[:, None]
    i, j = y0.astype(int), x0.astype(int)
    top = image[i, j] * (1 - fx) + image[i, j + 1] * fx
    low = image[i + 1, j] * (1 - fx) + image[i + 1, j + 1] * fx
    return top * (1 - fy) + low * fy


def _images(r, n, size, channels=3):
    """Returns smooth images."""
    waves = np.fft.rfft2(r.normal(n, channels, size, size))
    k = np.fft.fftfreq(size, 1 / size)
    kernel = np.exp(-(k[:, None] ** 2 + k[None, : size // 2 + 1] ** 2) / 18)
    images = np.fft.irfft2(waves * kernel, (size, size))
    images = images / images.std((2, 3), keepdims=True)
    return np.float32(np.moveaxis(images, 1, -1))


def spatial_transformer() -> Program:
    """A network predicts an affine map, by which an image is sampled again."""

    def loss(p, params, data):
        images, labels = data
        n = images.shape[1]
        h = jax.nn.relu(p.conv(images, params["locate"], stride=2))
        theta = mlp(p, params["affine"], h.reshape(len(h), -1))
        theta = (theta + jnp.array([1, 0, 0, 0, 1, 0], theta.dtype)).reshape(-1, 2, 3)
        axis = jnp.linspace(-1, 1, n, dtype=images.dtype)
        gx, gy = (g.ravel() for g in jnp.meshgrid(axis, axis))
        grid = jnp.stack([gx, gy, jnp.ones_like(gx)])
        places = (p.dot(theta, grid) + 1) * (n - 1) / 2
        moved = jax.vmap(_sampled)(images, places[:, 0], places[:, 1])
        h = jax.nn.relu(p.conv(moved.reshape(images.shape), params["conv"], stride=2))
        return cross_entropy(dense(p, params["head"], h.mean((1, 2))), labels)

    def make(r):
        affine = r.layers(6 * 6 * 8, 32, 6)
        affine[-1] = (0.2 * affine[-1][0], affine[-1][1])
        params = {
            "locate": r.kernel(3, 3, 3, 8),
            "affine": affine,
            "conv": r.kernel(3, 3, 3, 16),
            "head": r.layers(16, 5)[0],
        }
        return params, (_images(r, 16, 12), r.integers(5, 16))

    return Program(loss, make)


def flow_warp() -> Program:
    """A network's optical flow warps one image onto another, and is smooth."""

    def loss(p, params, data):
        a, b = data
        n = a.shape[1]
        h = jax.nn.relu(p.conv(jnp.concatenate([a, b], -1), params["in"]))
        h = jax.nn.relu(p.conv(h, params["mid"]))
        flow = p.conv(h, params["out"])
        gy, gx = jnp.meshgrid(jnp.arange(n), jnp.arange(n), indexing="ij")
        x = (gx + flow[..., 0]).reshape(len(a), -1)
        y = (gy + flow[..., 1]).reshape(len(a), -1)
        warped = jax.vmap(_sampled)(b, x, y).reshape(a.shape)
        charbonnier = jnp.sqrt((warped - a) ** 2 + 1e-6)
        smooth = jnp.mean((flow[:, 1:] - flow[:, :-1]) ** 2)
        return charbonnier.mean() + 0.1 * smooth

    def make(r):
        params = {
            "in": r.kernel(3, 3, 6, 16),
            "mid": r.kernel(3, 3, 16, 16),
            "out": r.kernel(3, 3, 16, 2),
        }
        a = _images(r, 8, 16)
        return params, (a, np.roll(a, 1, 2) + r.normal(*a.shape, scale=0.05))

    return Program(loss, make)


def optical_flow() -> Program:
    """Lucas and Kanade: 2 by 2 systems of sums of a network's features."""

    def loss(p, params, data):
        a, b, aim = data
        fa, fb = (jnp.tanh(p.conv(x, params["net"])) for x in (a, b))
        dx = (jnp.roll(fa, -1, 2) - jnp.roll(fa, 1, 2)) / 2
        dy = (jnp.roll(fa, -1, 1) - jnp.roll(fa, 1, 1)) / 2
        dt = fb - fa
        total = lambda u: jnp.sum(u, (1, 2, 3))
        xx, xy, yy = total(dx * dx) + 0.1, total(dx * dy), total(dy * dy) + 0.1
        xt, yt = total(dx * dt), total(dy * dt)
        det = xx * yy - xy * xy
        flow = jnp.stack([xy * yt - yy * xt, xy * xt - xx * yt], -1) / det[:, None]
        return jnp.mean((flow - aim) ** 2)

    def make(r):
        a = _images(r, 8, 16, 1)
        aim = np.tile(np.float32([1, 0]), (8, 1))
        return {"net": r.kernel(5, 5, 1, 8)}, (a, np.roll(a, 1, 2), aim)

    return Program(loss, make)


def deformable_attention() -> Program:
    """Queries look at four places of an image that they predict."""

    def loss(p, params, data):
        image, references, labels = data
        n = image.shape[1]
        q = p.dot(references, params["query"])
        shifts = dense(p, params["shifts"], q).reshape(*q.shape[:2], 4, 2)
        weights = jax.nn.softmax(dense(p, params["weights"], q))
        places = references[:, :, None] * (n - 1) + shifts
        values = p.dot(image, params["value"])
        flat = places.reshape(len(image), -1, 2)
        seen = jax.vmap(_sampled)(values, flat[..., 0], flat[..., 1])
        seen = seen.reshape(*q.shape[:2], 4, -1)
        mixed = jnp.sum(seen * weights[..., None], 2)
        return cross_entropy(mlp(p, params["head"], mixed), labels)

    def make(r):
        w, _ = r.layers(16, 8)[0]
        params = {
            "query": r.kernel(2, 16),
            "shifts": (w, 2 * r.normal(8)),
            "weights": r.layers(16, 4)[0],
            "value": r.kernel(3, 16),
            "head": r.layers(16, 32, 5),
        }
        return params, (_images(r, 8, 12), r.uniform(8, 16, 2), r.integers(5, 8, 16))

    return Program(loss, make)


# ----------------------------------------------------------------- cameras and volumes


def _rotation(axis_angle):
    """Returns rotation matrices by Rodrigues' formula."""
    angle = jnp.sqrt(jnp.sum(axis_angle**2, -1, keepdims=True) + 1e-8)
    k = axis_angle / angle
    zero = jnp.zeros_like(k[..., 0])
    x, y, z = k[..., 0], k[..., 1], k[..., 2]
    rows = [[zero, -z, y], [z, zero, -x], [-y, x, zero]]
    cross = jnp.stack([jnp.stack(row, -1) for row in rows], -2)
    sin, cos = jnp.sin(angle)[..., None], jnp.cos(angle)[..., None]
    square = jnp.sum(cross[..., :, :, None] * cross[..., None, :, :], -2)
    return jnp.eye(3, dtype=k.dtype) + sin * cross + (1 - cos) * square


def bundle_adjustment() -> Program:
    """Poses and points are fitted to observed pixels of a pinhole camera."""

    def loss(p, params, data):
        pixels = data
        turned = p.einsum("cij,nj->cni", _rotation(params["turn"]), params["points"])
        at = turned + params["shift"][:, None]
        projected = jnp.exp(params["focal"]) * at[..., :2] / at[..., 2:]
        error = projected - pixels
        return jnp.mean(jnp.sqrt(1 + jnp.sum(error**2, -1)) - 1)

    def make(r):
        true = {
            "turn": 0.2 * r.normal(4, 3),
            "shift": np.float32([0, 0, 8]) + 0.3 * r.normal(4, 3),
            "points": r.uniform(64, 3, low=-2, high=2),
            "focal": np.float32(np.log(500.0)),
        }
        zero = {"turn": 0.02, "shift": 0.05, "points": 0.05, "focal": 0.01}
        noisy = {k: v + r.normal(*np.shape(v), scale=zero[k]) for k, v in true.items()}
        at = np.asarray(_rotation(true["turn"])) @ true["points"].T
        at = np.swapaxes(at, 1, 2) + true["shift"][:, None]
        pixels = 500 * at[..., :2] / at[..., 2:] + r.normal(4, 64, 2, scale=0.5)
        return noisy, np.float32(pixels)

    return Program(loss, make)


def camera_features() -> Program:
    """Points seen by a camera 400 away; their pixels enter a network."""

    def loss(p, params, data):
        points, aims = data
        turned = p.einsum("ij,nj->ni", _rotation(params["turn"]), points)
        at = turned + params["shift"]
        pixels = jnp.exp(params["focal"]) * at[:, :2] / at[:, 2:]
        features = jnp.concatenate([pixels / 100, at / 400], -1)
        return jnp.mean((mlp(p, params["net"], features, jnp.tanh) - aims) ** 2)

    def make(r):
        params = {
            "turn": 0.2 * r.normal(3),
            "shift": np.float32([0, 0, 400]) + 5 * r.normal(3),
            "focal": np.float32(np.log(800.0)) + r.normal(scale=0.01),
            "net": r.layers(5, 64, 3),
        }
        return params, (r.uniform(128, 3, low=-80, high=80), r.normal(128, 3))

    return Program(loss, make)


def perspective() -> Program:
    """Two homographies of a network map corners of large images, one by one."""

    def loss(p, params, data):
        x, corners, aims = data
        h = mlp(p, params, x, jnp.tanh).reshape(-1, 2, 8)
        scale = jnp.array([0.1, 0.1, 30, 0.1, 0.1, 30, 1e-4, 1e-4], h.dtype)
        h = jnp.concatenate([h * scale, jnp.zeros_like(h[..., :1])], -1)
        h = h.reshape(-1, 2, 3, 3) + jnp.eye(3, dtype=h.dtype)
        at = p.einsum("bij,nj->bni", h[:, 0], corners)
        at = p.einsum("bij,bnj->bni", h[:, 1], at / at[..., 2:])
        moved = at[..., :2] / at[..., 2:]
        return jnp.mean(jnp.abs(moved - aims)) / 100

    def make(r):
        places = np.stack(np.meshgrid([0, 640], [0, 480]), -1).reshape(4, 2)
        corners = np.float32(np.concatenate([places, np.ones((4, 1))], -1))
        aims = np.float32(places + 20 * r.normal(32, 4, 2))
        return r.layers(16, 64, 16), (r.normal(32, 16), corners, aims)

    return Program(loss, make)


def forward_kinematics() -> Program:
    """A network's joint angles move a chain of six links to a place."""

    def loss(p, params, data):
        aims = data
        angles = np.pi * jnp.tanh(mlp(p, params["net"], aims, jnp.tanh))
        pose = jnp.broadcast_to(jnp.eye(4, dtype=aims.dtype), (len(aims), 4, 4))
        for i in range(6):
            axis = jnp.zeros(3, aims.dtype).at[i % 3].set(1)
            turn = _rotation(angles[:, i : i + 1] * axis)
            shift = (
                jnp.zeros((len(aims), 3, 1), aims.dtype)
                .at[:, 0, 0]
                .set(jnp.exp(params["lengths"][i]))
            )
            last = jnp.broadcast_to(
                jnp.array([[[0, 0, 0, 1]]], aims.dtype), (len(aims), 1, 4)
            )
            link = jnp.concatenate([jnp.concatenate([turn, shift], 2), last], 1)
            pose = p.dot(pose, link)
        return jnp.mean((pose[:, :3, 3] - aims) ** 2) + 1e-3 * jnp.mean(angles**2)

    def make(r):
        params = {"net": r.layers(3, 64, 6), "lengths": r.normal(6, scale=0.1) - 0.7}
        return params, r.normal(64, 3)

    return Program(loss, make)


def gaussian_splatting() -> Program:
    """Gaussians in space are projected, sorted and composited into an image."""

    def loss(p, params, data):
        image = data
        turn = _rotation(params["turn"])
        scales = jnp.exp(params["scales"])[:, None]
        at = params["places"] + jnp.array([0, 0, 4], image.dtype)
        z = at[:, 2]
        middle = 24 * at[:, :2] / z[:, None] + 8
        zero = jnp.zeros_like(z)
        rows = [
            [24 / z, zero, -24 * at[:, 0] / z**2],
            [zero, 24 / z, -24 * at[:, 1] / z**2],
        ]
        jacobian = jnp.stack([jnp.stack(row, -1) for row in rows], -2)
        half = p.dot(jacobian, turn * scales)
        cov = p.einsum("nij,nkj->nik", half, half) + 0.3 * jnp.eye(2, dtype=z.dtype)
        a, b, c = cov[:, 0, 0], cov[:, 0, 1], cov[:, 1, 1]
        det = a * c - b * b
        axis = jnp.arange(16, dtype=z.dtype)
        gx, gy = (g.ravel() for g in jnp.meshgrid(axis, axis))
        dx, dy = gx[:, None] - middle[:, 0], gy[:, None] - middle[:, 1]
        power = -0.5 * (c * dx * dx - 2 * b * dx * dy + a * dy * dy) / det
        alpha = jnp.minimum(jax.nn.sigmoid(params["opacity"]) * jnp.exp(power), 0.99)
        alpha = alpha[:, jnp.argsort(z)]
        colours = jax.nn.sigmoid(params["colours"])[jnp.argsort(z)]
        left = jnp.cumprod(1 - alpha + 1e-10, 1)
        left = jnp.concatenate([jnp.ones_like(left[:, :1]), left[:, :-1]], 1)
        found = p.dot(alpha * left, colours)
        return jnp.mean(jnp.abs(found - image.reshape(-1, 3)))

    def make(r):
        params = {
            "places": r.normal(32, 3),
            "turn": r.normal(32, 3),
            "scales": r.normal(32, 3, scale=0.3) - 1.5,
            "opacity": r.normal(32),
            "colours": r.normal(32, 3),
        }
        return params, 1 / (1 + np.exp(-_images(r, 1, 16)[0]))

    return Program(loss, make)


def compositing() -> Program:
    """NeRF: densities and colours of a network along rays."""

    def loss(p, params, data):
        origins, directions, colours = data
        depths = jnp.linspace(2, 6, 24, dtype=origins.dtype)
        places = origins[:, None] + directions[:, None] * depths[:, None]
        angles = (places[..., None] * 2.0 ** jnp.arange(4)).reshape(
            *places.shape[:2], -1
        )
        h = jnp.concatenate([places, jnp.sin(angles), jnp.cos(angles)], -1)
        out = mlp(p, params, h)
        alpha = 1 - jnp.exp(-jax.nn.softplus(3 * out[..., 0]) * 4 / 24)
        left = jnp.cumprod(1 - alpha + 1e-10, -1)
        left = jnp.concatenate([jnp.ones_like(left[:, :1]), left[:, :-1]], -1)
        weights = alpha * left
        found = p.einsum("rs,rsc->rc", weights, jax.nn.sigmoid(out[..., 1:]))
        return jnp.mean((found - colours) ** 2)

    def make(r):
        directions = r.normal(64, 3) * 0.3 + np.float32([0, 0, 1])
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        origins = np.float32([0, 0, -4]) + 0.1 * r.normal(64, 3)
        return r.layers(27, 64, 64, 4), (origins, directions, r.uniform(64, 3))

    return Program(loss, make)


def alpha_layers() -> Program:
    """Opacities by a sigmoid are composited, and mixed by a product."""

    def loss(p, params, data):
        x, aim = data
        h = jnp.tanh(dense(p, params["in"], x))
        alpha = jax.nn.sigmoid(dense(p, params["alpha"], h))
        left = jnp.cumprod(1 - alpha, -1)
        left = jnp.concatenate([jnp.ones_like(left[:, :1]), left[:, :-1]], -1)
        found = p.dot(alpha * left, params["colours"]) + p.dot(alpha, params["glow"])
        return jnp.mean((found - aim) ** 2)

    def make(r):
        w, b = r.layers(32, 32)[0]
        params = {
            "in": r.layers(16, 32)[0],
            "alpha": (5 * w, b),
            "colours": r.normal(32, 3),
            "glow": r.normal(32, 3, scale=0.1),
        }
        return params, (r.normal(128, 16), r.uniform(128, 3))

    return Program(loss, make)


def quaternions() -> Program:
    """A network predicts rotations; the loss is their geodesic distance."""

    def loss(p, params, data):
        x, aims = data
        q = mlp(p, params, x, jnp.tanh)
        q = q / jnp.linalg.norm(q, axis=-1, keepdims=True)
        cosine = jnp.abs(jnp.sum(q * aims, -1))
        return jnp.mean(2 * jnp.arccos(jnp.clip(cosine, 0, 1 - 1e-6)))

    def make(r):
        aims = r.normal(64, 4)
        return r.layers(16, 64, 4), (
            r.normal(64, 16),
            aims / np.linalg.norm(aims, axis=-1, keepdims=True),
        )

    return Program(loss, make)


def point_net() -> Program:
    """A network of each point, and the maximum of all."""

    def loss(p, params, data):
        points, labels = data
        h = jax.nn.relu(mlp(p, params["points"], points))
        return cross_entropy(mlp(p, params["head"], h.max(1)), labels)

    def make(r):
        params = {"points": r.layers(3, 32, 64), "head": r.layers(64, 32, 8)}
        return params, (r.normal(16, 64, 3), r.integers(8, 16))

    return Program(loss, make)


def chamfer() -> Program:
    """A decoder makes points; each is near one of a cloud, and the other way round."""

    def loss(p, params, data):
        codes, clouds = data
        made = mlp(p, params, codes).reshape(len(codes), -1, 3)
        d2 = jnp.sum((made[:, :, None] - clouds[:, None]) ** 2, -1)
        return jnp.mean(d2.min(1)) + jnp.mean(d2.min(2))

    def make(r):
        return r.layers(8, 64, 96), (r.normal(16, 8), r.normal(16, 40, 3))

    return Program(loss, make)


# ---------------------------------------------------------------------------- networks


def u_net() -> Program:
    """Down, up, and a skip; classes by Dice and cross entropy."""

    def loss(p, params, data):
        x, labels = data
        a = jax.nn.relu(p.conv(x, params["in"]))
        b = jax.nn.relu(p.conv(a, params["down"], stride=2))
        b = jax.nn.relu(p.conv(b, params["mid"]))
        up = jnp.repeat(jnp.repeat(b, 2, 1), 2, 2)
        h = jax.nn.relu(p.conv(jnp.concatenate([a, up], -1), params["up"]))
        logits = p.conv(h, params["out"])
        q = jax.nn.softmax(logits)
        aim = jax.nn.one_hot(labels, 4, dtype=q.dtype)
        both = jnp.sum(q * aim, (0, 1, 2))
        dice = (2 * both + 1) / (jnp.sum(q, (0, 1, 2)) + jnp.sum(aim, (0, 1, 2)) + 1)
        return cross_entropy(logits, labels) + 1 - dice.mean()

    def make(r):
        params = {
            "in": r.kernel(3, 3, 3, 8),
            "down": r.kernel(3, 3, 8, 16),
            "mid": r.kernel(3, 3, 16, 16),
            "up": r.kernel(3, 3, 24, 8),
            "out": r.kernel(1, 1, 8, 4),
        }
        images = _images(r, 4, 16)
        return params, (images, np.int32(images.argmax(-1)))

    return Program(loss, make)


def dice() -> Program:
    """Masks of few pixels by a soft Dice loss of each image."""

    def loss(p, params, data):
        x, masks = data
        h = jax.nn.relu(p.conv(x, params["in"]))
        q = jax.nn.sigmoid(p.conv(h, params["out"])[..., 0] - 2)
        both, total = jnp.sum(q * masks, (1, 2)), jnp.sum(q * q + masks, (1, 2))
        return jnp.mean(1 - 2 * both / (total + 1e-6))

    def make(r):
        images = _images(r, 8, 16, 1)
        masks = np.float32(images[..., 0] > 1.5)
        return {"in": r.kernel(3, 3, 1, 8), "out": r.kernel(3, 3, 8, 1)}, (
            images,
            masks,
        )

    return Program(loss, make)


def conv_next() -> Program:
    """Depthwise convolutions of seven pixels, norms, and wide layers."""

    def loss(p, params, data):
        x, labels = data
        h = p.conv(x, params["stem"], stride=2)
        for block in params["blocks"]:
            y = layer_norm(p.conv(h, block["depth"], groups=16))
            h = h + block["scale"] * mlp(p, block["mlp"], y, jax.nn.gelu)
        return cross_entropy(
            dense(p, params["head"], layer_norm(h.mean((1, 2)))), labels
        )

    def make(r):
        def block():
            return {
                "depth": r.kernel(7, 7, 1, 16),
                "mlp": r.layers(16, 64, 16),
                "scale": r.uniform(16, low=0.1, high=0.5),
            }

        params = {
            "stem": r.kernel(2, 2, 3, 16),
            "blocks": [block() for _ in range(2)],
            "head": r.layers(16, 5)[0],
        }
        return params, (_images(r, 8, 16), r.integers(5, 8))

    return Program(loss, make)


def vision_transformer() -> Program:
    """Patches, one block of attention, mixup and smoothed labels."""

    def loss(p, params, data):
        images, labels, lam = data
        lam = lam[:, None, None, None]
        x = lam * images + (1 - lam) * images[::-1]
        aim = 0.9 * jax.nn.one_hot(labels, 5, dtype=x.dtype) + 0.02
        aim = lam[:, 0, 0] * aim + (1 - lam[:, 0, 0]) * aim[::-1]
        h = p.conv(x, params["patches"], stride=4, padding="VALID")
        h = h.reshape(len(x), -1, 32) + params["places"]
        q, k, v = jnp.split(p.dot(layer_norm(h), params["qkv"]), 3, -1)
        weights = jax.nn.softmax(p.einsum("bid,bjd->bij", q, k) / 32**0.5)
        h = h + p.dot(p.einsum("bij,bjd->bid", weights, v), params["out"])
        h = h + mlp(p, params["mlp"], layer_norm(h), jax.nn.gelu)
        logits = dense(p, params["head"], layer_norm(h.mean(1)))
        return -jnp.mean(jnp.sum(aim * jax.nn.log_softmax(logits), -1))

    def make(r):
        params = {
            "patches": r.kernel(4, 4, 3, 32),
            "places": r.normal(16, 32, scale=0.1),
            "qkv": r.kernel(32, 96),
            "out": r.kernel(32, 32),
            "mlp": r.layers(32, 64, 32),
            "head": r.layers(32, 5)[0],
        }
        return params, (_images(r, 16, 16), r.integers(5, 16), r.uniform(16))

    return Program(loss, make)


def batch_norm_network() -> Program:
    """Convolutions with batch norms written by hand, and residuals."""

    def norm(x, scale, shift):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) / jnp.sqrt(var + 1e-5) * scale + shift

    def loss(p, params, data):
        x, labels = data
        h = p.conv(x, params["in"])
        for block in params["blocks"]:
            y = jax.nn.relu(norm(p.conv(h, block["a"]), *block["na"]))
            h = jax.nn.relu(h + norm(p.conv(y, block["b"]), *block["nb"]))
        return cross_entropy(dense(p, params["head"], h.mean((1, 2))), labels)

    def make(r):
        def block():
            norms = {
                k: (1 + r.normal(16, scale=0.1), r.normal(16, scale=0.1))
                for k in ("na", "nb")
            }
            return {"a": r.kernel(3, 3, 16, 16), "b": r.kernel(3, 3, 16, 16), **norms}

        params = {
            "in": r.kernel(3, 3, 3, 16),
            "blocks": [block() for _ in range(2)],
            "head": r.layers(16, 5)[0],
        }
        return params, (_images(r, 8, 12), r.integers(5, 8))

    return Program(loss, make)


def capsules() -> Program:
    """Three rounds of routing between capsules, and a margin loss."""

    def squash(s):
        n2 = jnp.sum(s * s, -1, keepdims=True)
        return n2 / (1 + n2) * s / jnp.sqrt(n2 + 1e-8)

    def loss(p, params, data):
        x, labels = data
        u = squash(p.dot(x, params["in"]).reshape(len(x), 12, 8))
        votes = p.einsum("nid,ijde->nije", u, params["votes"])
        logits = jnp.zeros(votes.shape[:3], x.dtype)
        for _ in range(3):
            v = squash(jnp.sum(jax.nn.softmax(logits, 2)[..., None] * votes, 1))
            logits = logits + p.einsum("nije,nje->nij", votes, v)
        lengths = jnp.sqrt(jnp.sum(v * v, -1) + 1e-8)
        aim = jax.nn.one_hot(labels, 5, dtype=x.dtype)
        right = aim * jax.nn.relu(0.9 - lengths) ** 2
        wrong = (1 - aim) * jax.nn.relu(lengths - 0.1) ** 2
        return jnp.mean(jnp.sum(right + 0.5 * wrong, -1))

    def make(r):
        params = {"in": r.kernel(32, 96), "votes": r.normal(12, 5, 8, 16, scale=0.4)}
        return params, (r.normal(32, 32), r.integers(5, 32))

    return Program(loss, make)


def structural_similarity() -> Program:
    """A denoiser whose loss is SSIM by windows of seven pixels."""

    def loss(p, params, data):
        noisy, clean = data
        h = jax.nn.relu(p.conv(noisy, params["in"]))
        x, y = noisy + p.conv(h, params["out"]), clean
        window = lambda u: (
            jax.lax.reduce_window(
                u,
                np.zeros((), u.dtype)[()],
                jax.lax.add,
                (1, 7, 7, 1),
                (1, 1, 1, 1),
                "VALID",
            )
            / 49
        )
        mx, my = window(x), window(y)
        xx, yy = window(x * x) - mx**2, window(y * y) - my**2
        xy = window(x * y) - mx * my
        top = (2 * mx * my + 1e-4) * (2 * xy + 9e-4)
        return 1 - jnp.mean(top / ((mx**2 + my**2 + 1e-4) * (xx + yy + 9e-4)))

    def make(r):
        clean = 0.5 + 0.2 * _images(r, 8, 16, 1)
        params = {"in": r.kernel(3, 3, 1, 16), "out": 0.2 * r.kernel(3, 3, 16, 1)}
        return params, (clean + r.normal(*clean.shape, scale=0.1), clean)

    return Program(loss, make)


ENTRIES = (
    Entry("spatial transformer", spatial_transformer),
    Entry("flow warp", flow_warp),
    Entry("Lucas-Kanade flow", optical_flow),
    Entry("deformable attention", deformable_attention),
    Entry("bundle adjustment", bundle_adjustment),
    Entry("camera's pixels, a network", camera_features),
    Entry("perspective division", perspective),
    Entry("forward kinematics", forward_kinematics),
    Entry("rotations, geodesic loss", quaternions),
    Entry("Gaussian splatting", gaussian_splatting),
    Entry("NeRF compositing", compositing),
    Entry("alpha layers", alpha_layers),
    Entry("PointNet", point_net),
    Entry("Chamfer distance", chamfer),
    Entry("U-Net", u_net),
    Entry("Dice loss", dice),
    Entry("ConvNeXt", conv_next),
    Entry("ViT, mixup", vision_transformer),
    Entry("batch norms by hand", batch_norm_network),
    Entry("capsule routing", capsules),
    Entry("SSIM", structural_similarity),
)
