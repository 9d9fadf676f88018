"""JAX/Flax training stack for latent-space language models."""

__version__ = "0.1.0"
