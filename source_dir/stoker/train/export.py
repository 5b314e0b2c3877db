"""Train worker (rank 0): exports the final model to other formats; each file is loaded again and compared.

An exported model takes what the feed yields (images as uint8, records × channels × height × width),
because it includes the recipe's `on_device("val")`, and returns what the recipe's `predict` returns. It is
made on the CPU from the saved weights, so device and training strategy do not matter.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import pickle
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.config.schema import Config
from stoker.errors import UsageError, where_raised
from stoker.events.kinds import ExportWritten, Note
from stoker.recipe import Batch, Recipe, Split
from stoker.train.build import OnDevice, on_device
from stoker.train.feed import as_one_batch
from stoker.train.state import Worker, count_records

EXAMPLE_RECORDS = 16


def wanted(config: Config) -> list[str]:
    """The formats to write; a registered MLflow model needs torch_export."""
    formats = ["safetensors", *config.export]
    if config.tracking.mlflow.uri and config.tracking.mlflow.registered_model:
        formats.append("torch_export")
    return [name for name in FILES if name in formats]


def keep_example(worker: Worker, split: Split, batch: Batch) -> None:
    """Called with every batch: rank 0 keeps a few records of the first one, from validation if there is one.

    What an export needs is tried with the very first batch, not after days of training.
    """
    kept: Example | None = worker.example
    better = kept is None or (split == "val" and kept.split == "train")
    if worker.rank or not better or not count_records(batch):
        return
    recipe = worker.recipe
    worker.example = export_example(recipe, batch, split)
    if kept is None and wanted(worker.config) != ["safetensors"]:
        refuse_absent(recipe, batch)
        names = recipe.export_inputs()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            module = as_module(recipe, recipe.model().eval())
            try:
                module(*worker.example.take(names, TRACED_RECORDS))
            except Exception as error:
                raise UsageError(
                    f"export: {type(recipe).__name__}'s on_device('val') and predict(model, batch) do not"
                    f" work on {', '.join(names)} alone, on the CPU: {where_raised(error)}"
                ) from error


def refuse_absent(recipe: Recipe, batch: Batch) -> None:
    columns = [name for name, value in batch.items() if isinstance(value, torch.Tensor)]
    absent = [name for name in recipe.export_inputs() if name not in columns]
    if absent:
        raise UsageError(
            f"export: {type(recipe).__name__} has no tensor column {', '.join(absent)} in its batches (there"
            f" are: {', '.join(sorted(columns))}); define export_inputs() and predict(model, batch) in the"
            " recipe"
        )


def export_model(worker: Worker, folder: Path) -> None:
    """A failure is an event, which the head turns into the run's error: a restart would only fail again."""

    def tell(result: dict[str, Any]) -> None:
        # Wait, because the head takes an unreported export for done.
        worker.log(ExportWritten(**result))
        worker.flush()

    example = worker.example
    if example is None:
        try:
            example = read_example(worker)
        except Exception as error:
            text = f"export: no record could be read to compare with: {where_raised(error)}"
            worker.log(Note(text=text))
    write_forms(worker.recipe, wanted(worker.config), example, folder, tell)


def read_example(worker: Worker) -> Example | None:
    """A few records, read here, for a resumed run that has nothing left to train; None: all are bad."""
    from stoker.serve.opening import open_data
    from stoker.serve.shards import DatasetSource

    data = open_data(worker.config)
    split: Split = "val" if "val" in data.sources else "train"
    source = data.sources[split]
    records: Iterator[Any]
    if isinstance(source, DatasetSource):
        records = iter(source.first_rows(EXAMPLE_RECORDS))
    else:
        shards = source.shards(EXAMPLE_RECORDS, None)
        records = itertools.chain.from_iterable(source.read(shard, None) for shard in shards)
    # Pickled and unpickled, as for chain workers, to import what its transforms need.
    chain = pickle.loads(pickle.dumps(data.chains[split]))  # noqa: S301 - this process wrote it
    columns, report = chain.run(itertools.islice(records, EXAMPLE_RECORDS), 0)
    batch = as_one_batch(chain.collate, columns, report) if columns else {}
    return export_example(worker.recipe, batch, split) if batch else None


def export_example(recipe: Recipe, batch: Batch, split: Split) -> Example:
    inputs = {name: batch.get(name) for name in recipe.export_inputs()}
    rows = {n: value[:EXAMPLE_RECORDS] for n, value in inputs.items() if torch.is_tensor(value)}
    # Copies, because the feed may reuse its buffers.
    contiguous = torch.contiguous_format
    copies = {n: value.cpu().clone(memory_format=contiguous) for n, value in rows.items()}
    return Example(copies, split)


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
    batch: Batch
    split: Split = "train"

    def take(self, names: list[str], records: int) -> tuple[Any, ...]:
        """Columns by name, cut or repeated to the given number of records."""
        rows = torch.arange(records) % count_records(self.batch)
        return tuple(self.batch[name][rows] for name in names)


def write_forms(
    recipe: Recipe,
    forms: list[str],
    example: Example | None,
    folder: Path,
    tell: Callable[[dict[str, Any]], Any],
) -> None:
    """Each file appears in `folder` only after the comparison; a failure does not affect other formats."""
    results: list[dict[str, Any]] = []
    model: ExportModel | None = None
    for form in forms:
        started, file = time.perf_counter(), FILES[form]
        result: dict[str, Any] = {
            "format": form,
            "path": file,
            "max_abs_diff": None,
            "error": None,
        }
        try:
            model = model or ExportModel(recipe, folder, example)
            with tempfile.TemporaryDirectory(prefix="stoker-export-") as scratch:
                if model.failure is not None and form == "safetensors":
                    result["note"] = why_not(recipe, model.failure)
                else:
                    result["batch_sizes"] = [*model.answers]
                    result["max_abs_diff"] = model.write(form, Path(scratch))
                for path in Path(scratch).iterdir():
                    shutil.copyfile(path, folder / path.name)
            result["bytes"] = (folder / file).stat().st_size
        except Exception as error:
            cause = str(error) if isinstance(error, MismatchError) else where_raised(error)
            result["error"] = f"{file}: {cause}"[:600]
        result["seconds"] = round(time.perf_counter() - started, 3)
        results.append(result)
        tell(result)
    about = json.loads((folder / "model.json").read_text())
    about |= (model.description() if model else {}) | {"exports": results}
    (folder / "model.json").write_text(json.dumps(about, indent=1, default=str))


class MismatchError(Exception):
    """The outputs of an exported file differ from the model's."""


def why_not(recipe: Recipe, failure: Exception) -> str:
    """Why outputs are not compared, as a note."""
    if type(recipe).predict is Recipe.predict:
        return "weights compared; to compare outputs, too, define predict() and export_inputs()"
    cause = str(failure) if isinstance(failure, UsageError) else where_raised(failure)
    return f"weights compared, but not outputs, because predict() failed: {cause}"


class ExportModel:
    """The saved weights in a new model, and its answers to the example, with which each file is compared."""

    def __init__(self, recipe: Recipe, folder: Path, example: Example | None) -> None:
        self.recipe, self.folder = recipe, folder
        self.inputs, self.outputs = recipe.export_inputs(), list[str]()
        self.module = self.fresh(self.outputs)
        self.answers: dict[int, list[Any]] = {}
        """By batch size."""
        self.failure: Exception | None = None
        """Why there are none. The weights are compared all the same: they have been loaded."""
        try:
            if example is None:
                raise UsageError("there was no record to compare with")
            refuse_absent(recipe, example.batch)
            self.example = example
            sizes = [1, max(count_records(example.batch), TRACED_RECORDS + 1)]
            with torch.no_grad():
                self.answers = {size: self.answer(self.module, size) for size in sizes}
        except Exception as error:
            self.failure = error

    def fresh(self, outputs: list[str] | None = None) -> Any:
        from safetensors.torch import load_file

        model = self.recipe.model()
        model.load_state_dict(load_file(self.folder / FILES["safetensors"]))
        return as_module(self.recipe, model.eval(), outputs)

    def answer(self, module: Callable[..., Any], records: int) -> list[Any]:
        answer = module(*self.example.take(self.inputs, records))
        return list(answer) if isinstance(answer, tuple | list) else [answer]

    def description(self) -> dict[str, Any]:
        if not self.answers:
            return {}
        size, answers = [*self.answers.items()][-1]
        given = self.example.take(self.inputs, size)
        before = self.module.before
        nothing = isinstance(before, OnDevice) and before.function is None
        return {
            "inputs": [*map(_spec, self.inputs, given)],
            "outputs": [*map(_spec, self.outputs, answers)],
            "includes": "" if nothing else 'the recipe\'s on_device("val")',
        }

    def write(self, form: str, draft: Path) -> float:
        """Write a file, load it and compare its outputs: the largest difference."""
        if self.failure is not None:
            raise self.failure
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # deprecations that the user cannot act on
            loaded = getattr(self, f"_{form}")(draft / FILES[form])
            return max(self._difference(loaded, size) for size in self.answers)

    def _difference(self, loaded: Callable[..., Any], size: int) -> float:
        worst, answers = 0.0, self.answer(loaded, size)
        for name, expected, given in zip(self.outputs, self.answers[size], answers, strict=True):
            got = torch.as_tensor(given)
            if got.shape != expected.shape:
                raise MismatchError(
                    f"{name} of a batch of {size} has the shape {tuple(got.shape)}, not"
                    f" {tuple(expected.shape)}"
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

    @property
    def _traced(self) -> tuple[Any, ...]:
        return self.example.take(self.inputs, TRACED_RECORDS)

    @cached_property
    def _program(self) -> Any:
        free = [{0: torch.export.Dim.DYNAMIC} for _ in self.inputs]
        return torch.export.export(self.module, self._traced, dynamic_shapes=free)

    def _safetensors(self, _: Path) -> Any:
        """The file exists already; load it into a second new model."""
        return self.fresh()

    def _torch_export(self, path: Path) -> Any:
        torch.export.save(self._program, path)
        return torch.export.load(path).module()

    def _onnx(self, path: Path) -> Any:
        import onnxruntime

        model: Any = torch.onnx.export(
            self._program,
            self._traced,
            dynamo=True,
            input_names=self.inputs,
            output_names=self.outputs,
            dynamic_shapes=[{0: "batch"} for _ in self.inputs],
            verbose=False,
        )
        # The format is limited to 2 GiB per file; larger weights go into a second file.
        large = (self.folder / FILES["safetensors"]).stat().st_size > 1.5 * 2**30
        model.save(path, external_data=large)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda *columns: session.run(
            None, {name: each.numpy() for name, each in zip(self.inputs, columns, strict=True)}
        )

    def _torchscript(self, path: Path) -> Any:
        torch.jit.trace(self.module, self._traced).save(str(path))  # type: ignore[no-untyped-call]
        return torch.jit.load(str(path))  # type: ignore[no-untyped-call]


def _spec(name: str, tensor: Any) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": ["batch", *tensor.shape[1:]]}


def as_module(recipe: Recipe, model: Any, outputs: list[str] | None = None) -> Any:
    """`on_device("val")` and `predict` as one module from columns to tensors; names these in `outputs`."""
    names, before = recipe.export_inputs(), on_device(recipe, "val")
    found = [] if outputs is None else outputs

    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.before = model, before

    module = Exported()

    def forward(*columns: Any) -> Any:
        batch: Batch = module.before(dict(zip(names, columns, strict=True)))
        answer = recipe.predict(module.model, batch)
        if isinstance(answer, dict):
            found[:] = list(answer)
            return tuple(answer.values())
        many = isinstance(answer, tuple | list)
        found[:] = [f"output_{i}" for i in range(len(answer))] if many else ["output"]
        return tuple(answer) if many else answer

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    # Exporters read the input names from this signature.
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in names]
    )
    module.forward = forward
    return module.eval()
