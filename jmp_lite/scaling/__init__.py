"""Loss scales, gradients under a loss scale, and optimizers for low precision."""
