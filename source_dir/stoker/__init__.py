"""Stoker keeps GPUs fed: PyTorch training on clusters of GPU hosts and cheap CPU hosts."""

__version__ = "0.1.0"
