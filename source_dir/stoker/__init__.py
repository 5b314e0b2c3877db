"""Stoker keeps GPUs fed: PyTorch training on clusters of GPU hosts and cheap CPU hosts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.loader.dataloader import DataLoader as DataLoader

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Importing the package loads neither ray nor torch.
    if name == "DataLoader":
        from stoker.loader.dataloader import DataLoader

        return DataLoader
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
