"""DSpark speculative decoding on compiled engines under Triton Inference Server."""

__version__ = "0.1.0"
