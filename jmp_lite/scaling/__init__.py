"""Loss scales, gradients under a loss scale, and the wrapper that skips steps."""
