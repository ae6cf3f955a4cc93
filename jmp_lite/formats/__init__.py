"""The number formats of matrix products, one file each, and arrays in 8 bits."""

from jmp_lite.casting.quantize import Quantized, dequantize, quantize

__all__ = ["Quantized", "dequantize", "quantize"]
