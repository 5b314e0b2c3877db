"""Train worker: reduces lightning.Trainer's state to plain values and tensors for checkpoints.

An unrestricted pickle executes code when it is loaded, so anyone with write access to the checkpoint folder
could run code on the train host.
"""

from __future__ import annotations

import enum
import io
from collections.abc import Callable
from typing import Any

import torch

from stoker.checkpoints.format import read_plain
from stoker.errors import UsageError

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.device, torch.dtype, torch.Size)
OMITTED = ("state_dict", "hyper_parameters", "hparams_name", "hparams_type")
"""Weights are stored separately, and the module is created from `params.init`."""


class NotPlainError(TypeError):
    """Train worker: a value that cannot be restored without running code; the message locates it."""


def plain(value: Any, where: str) -> Any:
    """Train worker: copy nested dicts, lists, tuples, sets, plain values and tensors.

    Args:
        value: subclasses become their plain base types, NumPy scalars Python numbers.
        where: location for errors.

    Raises:
        NotPlainError: it contains another type.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {plain(key, where): plain(below, f"{where}[{key!r}]") for key, below in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(plain(below, f"{where}[{i}]") for i, below in enumerate(value))
    if isinstance(value, enum.Enum) or not isinstance(value, bool | int | float | str):
        item = getattr(value, "item", None)
        if callable(item) and getattr(value, "ndim", None) == 0:  # a NumPy scalar
            return plain(item(), where)
        kind = type(value)
        raise NotPlainError(f"{where} is a {kind.__module__}.{kind.__qualname__}")
    base = next(kind for kind in (int, float, str) if isinstance(value, kind))
    return base(value)


def plain_state(dumped: dict[str, Any], tell: Callable[[str], Any]) -> dict[str, Any]:
    """Train worker: convert a trainer's checkpoint, without weights, to plain values.

    Args:
        dumped: the checkpoint from lightning.Trainer.
        tell: called with one line per callback whose state is omitted.

    Raises:
        UsageError: the state of an optimiser, a scheduler or the module is not plain, so training could not
            resume exactly.
    """
    state: dict[str, Any] = {"callbacks": {}}
    for name, content in dumped.get("callbacks", {}).items():
        try:
            state["callbacks"][str(name)] = plain(content, f"state of the callback {name}")
        except NotPlainError as error:
            tell(
                f"checkpoints omit the {error}, which is not a plain value or tensor: after a resume this"
                " callback starts from scratch"
            )
    try:
        for name, content in dumped.items():
            if name not in (*OMITTED, "callbacks"):
                state[str(name)] = plain(content, str(name))
    except NotPlainError as error:
        raise UsageError(
            f"the LightningModule's checkpoint: {error}; only plain values and tensors can be loaded"
            " safely: make state_dict() and on_save_checkpoint() return only those"
        ) from None
    return state


def pack(state: dict[str, Any]) -> torch.Tensor:
    """Train worker: serialise plain state as bytes in a tensor, with one copy to the CPU."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpack(content: bytes, where: str) -> dict[str, Any]:
    """Train worker: deserialise the result of `pack`.

    Args:
        content: from a checkpoint.
        where: location for errors.

    Raises:
        OSError: it contains more than plain values; nothing was executed.
    """
    state: dict[str, Any] = read_plain(io.BytesIO(content), where)
    return state
