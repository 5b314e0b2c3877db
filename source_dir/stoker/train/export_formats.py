"""Train worker (rank 0): the export formats: how each is written, loaded and compared."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.recipe import Batch, Recipe, Split
from stoker.train.state import count_records

TRACED_RECORDS = 2
"""Batch size for an export; exporters take a dimension of 1 for a constant."""

TOLERANCE = 1e-4
"""Largest allowed difference, relative to the model's largest output; kernels differ in summation order."""

FILES = {
    "safetensors": "model.safetensors",
    "torch_export": "model.pt2",
    "onnx": "model.onnx",
    "torchscript": "model.ts",
}


@dataclass(frozen=True)
class Example:
    """Train worker: a few records as the feed yields them, on the CPU."""

    batch: Batch
    split: Split = "train"

    def take(self, names: list[str], records: int) -> tuple[Any, ...]:
        """Columns by name, cut or repeated to the given number of records."""
        import torch

        there = count_records(self.batch)
        rows = torch.arange(records) % there
        return tuple(self.batch[name][rows] for name in names)


@dataclass
class Exports:
    """Train worker: the model to export and the reference for the checks."""

    recipe: Recipe
    folder: Path
    names: list[str]
    example: Example
    sizes: list[int]
    reference: Any = None
    """The recipe's model with the saved weights, as one module from columns to outputs."""
    outputs: list[str] = field(default_factory=list)
    answers: dict[int, list[Any]] = field(default_factory=dict)
    """Outputs of the reference, by number of records."""
    program: Any = None


class MismatchError(Exception):
    """Train worker: the outputs of an exported file differ from the model's."""


def fresh_model(recipe: Recipe, weights: Path) -> Any:
    """Train worker: a new model from the recipe, on the CPU, in eval mode, with weights from a file."""
    from safetensors.torch import load_file

    model = recipe.model()
    model.load_state_dict(load_file(weights))
    return model.eval()


def as_module(recipe: Recipe, model: Any, names: list[str], outputs: list[str]) -> Any:
    """Train worker: `on_device("val")` and `predict` as one module from columns to tensors.

    Args:
        recipe: defines both.
        model: on the CPU.
        names: the columns, which become the parameters of `forward`.
        outputs: filled with the names of the outputs at the first call.
    """
    from torch import nn

    before = recipe.on_device("val")

    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.before = model, before

    module = Exported()

    def forward(*columns: Any) -> Any:
        batch: Batch = dict(zip(names, columns, strict=True))
        if module.before is not None:
            batch = module.before(batch)
        answer = recipe.predict(module.model, batch)
        if isinstance(answer, dict):
            outputs[:] = list(answer)
            return tuple(answer.values())
        many = isinstance(answer, tuple | list)
        outputs[:] = [f"output_{i}" for i in range(len(answer))] if many else ["output"]
        return tuple(answer) if many else answer

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # Exporters read the input names from this signature.
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in names]
    )
    module.forward = forward
    return module.eval()


def write_one(exports: Exports, form: str, draft: Path) -> float:
    """Train worker: write one format into `draft`, load it again and compare.

    Returns:
        The largest absolute difference from the model, over all batch sizes and outputs.

    Raises:
        MismatchError: the difference exceeds `TOLERANCE`.
    """
    import torch

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations that the user cannot act on
        loaded = WRITERS[form](exports, draft / FILES[form])
        return max(compare(exports, loaded, size) for size in exports.sizes)


def compare(exports: Exports, loaded: Callable[..., Any], size: int) -> float:
    """Train worker: the largest absolute difference in a batch of `size` records.

    Raises:
        MismatchError: another shape, or a difference above `TOLERANCE`.
    """
    import torch

    worst = 0.0
    answers = flat(loaded(*exports.example.take(exports.names, size)))
    for name, expected, given in zip(exports.outputs, exports.answers[size], answers, strict=True):
        got = torch.as_tensor(given)
        if got.shape != expected.shape:
            raise MismatchError(
                f"{name} of a batch of {size} has the shape {tuple(got.shape)}, not {tuple(expected.shape)}"
            )
        difference = float((got.double() - expected.double()).abs().max())
        scale = float(expected.double().abs().max())
        # Written so that NaN fails the comparison, too.
        if not difference <= TOLERANCE * max(scale, 1e-6) or not math.isfinite(scale):
            raise MismatchError(
                f"{name} of a batch of {size} differs from the model's by {difference:.3g}"
                f" (largest output {scale:.3g}, tolerance {TOLERANCE:g} of it)"
            )
        worst = max(worst, difference)
    return worst


def flat(answer: Any) -> list[Any]:
    """Train worker: a module's output as a list of tensors or arrays."""
    return list(answer) if isinstance(answer, tuple | list) else [answer]


def write_safetensors(exports: Exports, path: Path) -> Callable[..., Any]:
    """Train worker: the file exists already; load it into a second new model."""
    recipe = exports.recipe
    module: Any = as_module(recipe, fresh_model(recipe, exports.folder / path.name), exports.names, [])
    return module  # type: ignore[no-any-return]


def exported_program(exports: Exports) -> Any:
    """Train worker: the program of torch.export with a dynamic batch dimension, created once."""
    import torch

    if exports.program is None:
        inputs = exports.example.take(exports.names, TRACED_RECORDS)
        free = [{0: torch.export.Dim.DYNAMIC} for _ in inputs]
        exports.program = torch.export.export(exports.reference, inputs, dynamic_shapes=free)
    return exports.program


def write_torch_export(exports: Exports, path: Path) -> Callable[..., Any]:
    import torch

    torch.export.save(exported_program(exports), path)
    module: Callable[..., Any] = torch.export.load(path).module()
    return module


def write_onnx(exports: Exports, path: Path) -> Callable[..., Any]:
    import onnxruntime
    import torch

    program = exported_program(exports)
    inputs = exports.example.take(exports.names, TRACED_RECORDS)
    model: Any = torch.onnx.export(
        program,
        inputs,
        dynamo=True,
        input_names=exports.names,
        output_names=exports.outputs,
        dynamic_shapes=[{0: "batch"} for _ in inputs],
        verbose=False,
    )
    # The format is limited to 2 GiB per file; larger weights go into a second file.
    large = (exports.folder / FILES["safetensors"]).stat().st_size > 1.5 * 2**30
    model.save(path, external_data=large)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda *columns: session.run(
        None, {name: column.numpy() for name, column in zip(exports.names, columns, strict=True)}
    )


def write_torchscript(exports: Exports, path: Path) -> Callable[..., Any]:
    import torch

    inputs = exports.example.take(exports.names, TRACED_RECORDS)
    torch.jit.trace(exports.reference, inputs).save(str(path))  # type: ignore[no-untyped-call]
    module: Callable[..., Any] = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    return module


WRITERS: dict[str, Callable[[Exports, Path], Callable[..., Any]]] = {
    "safetensors": write_safetensors,
    "torch_export": write_torch_export,
    "onnx": write_onnx,
    "torchscript": write_torchscript,
}
