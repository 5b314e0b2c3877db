"""Train worker: what of lightning.Trainer's state goes into a checkpoint: plain values and tensors only.

Whoever can write to a folder of checkpoints could otherwise run code on the train host: a pickle that may
hold objects of any type executes what it names as it is read.
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
"""The weights have a file of their own, and the module is made from `params.init`."""


class NotPlainError(TypeError):
    """Train worker: a value that only code could bring back; the text says where it lies."""


def plain(value: Any, where: str) -> Any:
    """Train worker: the same nesting of dicts, lists, tuples, sets, plain values and tensors.

    Args:
        value: subclasses of these types become the types themselves, numbers of NumPy Python's.
        where: names it in errors.

    Raises:
        NotPlainError: something in it is of another type.
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
        if callable(item) and getattr(value, "ndim", None) == 0:  # a number of NumPy's
            return plain(item(), where)
        kind = type(value)
        raise NotPlainError(f"{where} is a {kind.__module__}.{kind.__qualname__}")
    base = next(kind for kind in (int, float, str) if isinstance(value, kind))
    return base(value)


def plain_state(dumped: dict[str, Any], tell: Callable[[str], Any]) -> dict[str, Any]:
    """Train worker: a trainer's dumped checkpoint, without the weights, as plain values.

    Args:
        dumped: by lightning.Trainer.
        tell: takes one line for each callback whose state is left out.

    Raises:
        UsageError: the state of an optimiser, of a schedule, or what the module adds, is not plain; training
            could not go on from such a checkpoint as if nothing had happened.
    """
    state: dict[str, Any] = {"callbacks": {}}
    for name, content in dumped.get("callbacks", {}).items():
        try:
            state["callbacks"][str(name)] = plain(content, f"state of the callback {name}")
        except NotPlainError as error:
            tell(
                f"checkpoints leave out the {error}, which is no plain value or tensor: after a resume this"
                " callback begins anew"
            )
    try:
        for name, content in dumped.items():
            if name not in (*OMITTED, "callbacks"):
                state[str(name)] = plain(content, str(name))
    except NotPlainError as error:
        raise UsageError(
            f"the LightningModule's checkpoint: {error}; only plain values and tensors can be read back"
            " safely: change state_dict() or on_save_checkpoint() to give those"
        ) from None
    return state


def pack(state: dict[str, Any]) -> torch.Tensor:
    """Train worker: plain state as bytes in a tensor, which copies it to the CPU once."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpack(content: bytes, where: str) -> dict[str, Any]:
    """Train worker: the reverse of `pack`.

    Args:
        content: from a checkpoint.
        where: names the file in errors.

    Raises:
        OSError: it holds more than plain values; nothing of it was executed.
    """
    state: dict[str, Any] = read_plain(io.BytesIO(content), where)
    return state
