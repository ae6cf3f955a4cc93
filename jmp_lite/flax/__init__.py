"""The parts of ``jmp_lite.linen`` and ``jmp_lite.nnx``."""
