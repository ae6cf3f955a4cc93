"""Loss scales, gradients under one, and the optax transformations that carry it."""
