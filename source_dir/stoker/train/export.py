"""Train worker (rank 0): exports the final model to other formats; each file is loaded again and compared.

An exported model takes what the feed yields (images as uint8, records × channels × height × width),
because it includes the recipe's `on_device("val")`, and returns what the recipe's `predict` returns. It is
made on the CPU from the saved weights, so device and training strategy do not matter.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import os
import pickle
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
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
    if (
        worker.rank
        or (kept is not None and split in ("train", kept.split))
        or not count_records(batch)
    ):
        return
    recipe = worker.recipe
    worker.example = export_example(recipe, batch, split)
    if kept is None and wanted(worker.config) != ["safetensors"]:
        refuse_absent(
            recipe, [name for name, value in batch.items() if isinstance(value, torch.Tensor)]
        )
        names = recipe.export_inputs()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            module = as_module(recipe, recipe.model().eval(), names, [])
            try:
                module(*worker.example.take(names, TRACED_RECORDS))
            except Exception as error:
                raise UsageError(
                    f"export: {type(recipe).__name__}'s on_device('val') and predict(model, batch) do not"
                    f" work on {', '.join(names)} alone, on the CPU: {where_raised(error)}"
                ) from error


def refuse_absent(recipe: Recipe, columns: Collection[str]) -> None:
    absent = [name for name in recipe.export_inputs() if name not in columns]
    if absent:
        raise UsageError(
            f"export: {type(recipe).__name__} has no tensor column {', '.join(absent)} in its batches (there"
            f" are: {', '.join(sorted(columns))}); define export_inputs() and predict(model, batch) in the"
            " recipe"
        )


def export_model(worker: Worker, folder: Path, mounted: bool = False) -> None:
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
    with contextlib.ExitStack() as stack:
        draft = (
            stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-export-"))
            if mounted
            else None
        )
        write_forms(worker.recipe, wanted(worker.config), example, folder, tell, draft)


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
    return (
        export_example(worker.recipe, as_one_batch(chain.collate, columns, report), split)
        if columns
        else None
    )


def export_example(recipe: Recipe, batch: Batch, split: Split) -> Example:
    there = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    rows = {name: there[name][:EXAMPLE_RECORDS] for name in recipe.export_inputs() if name in there}
    # Copies, because the feed may reuse its buffers.
    contiguous = torch.contiguous_format
    return Example(
        {n: value.cpu().clone(memory_format=contiguous) for n, value in rows.items()}, split
    )


def write_forms(
    recipe: Recipe,
    forms: list[str],
    example: Example | None,
    folder: Path,
    tell: Callable[[dict[str, Any]], Any],
    elsewhere: str | None = None,
) -> None:
    """Each file appears in `folder` only after the comparison; a failure does not affect other formats."""
    draft = Path(elsewhere or folder) / ".draft"
    place = shutil.copyfile if elsewhere else os.replace
    results = []
    exports: Exports | None = None
    for form in forms:
        started = time.perf_counter()
        result: dict[str, Any] = {
            "format": form,
            "path": FILES[form],
            "max_abs_diff": None,
            "error": None,
        }
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            ready = exports or export_reference(recipe, forms, example, folder)
            if isinstance(ready, str):
                result["note"] = ready
            else:
                exports = ready
                result |= {
                    "batch_sizes": exports.sizes,
                    "max_abs_diff": write_one(exports, form, draft),
                }
            for path in draft.iterdir():
                place(path, folder / path.name)
            result["bytes"] = (folder / FILES[form]).stat().st_size
        except Exception as error:
            cause = str(error) if isinstance(error, MismatchError) else where_raised(error)
            result["error"] = f"{FILES[form]}: {cause}"[:600]
        result["seconds"] = round(time.perf_counter() - started, 3)
        results.append(result)
        tell(result)
    shutil.rmtree(draft, ignore_errors=True)
    describe_export(folder, exports, results)


def export_reference(
    recipe: Recipe, forms: list[str], example: Example | None, folder: Path
) -> Exports | str:
    """The reference model and its outputs; if only safetensors is wanted, else why the recipe cannot predict.

    The weights have then been loaded into a new model, which is all that can be checked.
    """
    model = fresh_model(recipe, folder / FILES["safetensors"])
    try:
        if example is None:
            raise UsageError("there was no record to compare with")
        refuse_absent(recipe, example.batch)
        names = recipe.export_inputs()
        exports = Exports(
            recipe,
            folder,
            names,
            example,
            sizes=[1, max(count_records(example.batch), TRACED_RECORDS + 1)],
        )
        exports.reference = as_module(recipe, model, names, exports.outputs)
        with torch.no_grad():
            for size in exports.sizes:
                exports.answers[size] = flat(exports.reference(*example.take(names, size)))
    except Exception as error:
        if forms != ["safetensors"]:
            raise
        if type(recipe).predict is Recipe.predict:
            return "weights compared; to compare outputs, too, define predict() and export_inputs()"
        cause = str(error) if isinstance(error, UsageError) else where_raised(error)
        return f"weights compared, but not outputs, because predict() failed: {cause}"
    return exports


def describe_export(folder: Path, exports: Exports | None, results: list[dict[str, Any]]) -> None:
    about = json.loads((folder / "model.json").read_text())
    if exports is not None and exports.answers:
        size = exports.sizes[-1]
        given = exports.example.take(exports.names, size)
        about["inputs"] = [
            _spec(name, value) for name, value in zip(exports.names, given, strict=True)
        ]
        answers = exports.answers[size]
        about["outputs"] = [
            _spec(name, value) for name, value in zip(exports.outputs, answers, strict=True)
        ]
        before = exports.reference.before
        nothing = isinstance(before, OnDevice) and before.function is None
        about["includes"] = "" if nothing else 'the recipe\'s on_device("val")'
    forms = [result["format"] for result in results]
    others = [each for each in about.get("exports", ()) if each["format"] not in forms]
    about["exports"] = [*others, *results]
    (folder / "model.json").write_text(json.dumps(about, indent=1, default=str))


def exports_of(folder: Path) -> dict[str, Any]:
    """What `describe_export` has written in a model's folder."""
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((folder / "model.json").read_text())
        return {
            key: about[key] for key in ("inputs", "outputs", "includes", "exports") if key in about
        }
    return {}


def _spec(name: str, tensor: Any) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": ["batch", *tensor.shape[1:]]}


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
        there = count_records(self.batch)
        rows = torch.arange(records) % there
        return tuple(self.batch[name][rows] for name in names)


@dataclass
class Exports:
    recipe: Recipe
    folder: Path
    names: list[str]
    example: Example
    sizes: list[int]
    reference: Any = None
    outputs: list[str] = field(default_factory=list)
    answers: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def traced(self) -> tuple[Any, ...]:
        return self.example.take(self.names, TRACED_RECORDS)

    @cached_property
    def program(self) -> Any:
        free = [{0: torch.export.Dim.DYNAMIC} for _ in self.names]
        return torch.export.export(self.reference, self.traced, dynamic_shapes=free)


class MismatchError(Exception):
    """The outputs of an exported file differ from the model's."""


def fresh_model(recipe: Recipe, weights: Path) -> Any:
    from safetensors.torch import load_file

    model = recipe.model()
    model.load_state_dict(load_file(weights))
    return model.eval()


def as_module(recipe: Recipe, model: Any, names: list[str], outputs: list[str]) -> Any:
    """`on_device("val")` and `predict` as one module from columns to tensors."""
    before = on_device(recipe, "val")

    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.before = model, before

    module = Exported()

    def forward(*columns: Any) -> Any:
        batch: Batch = module.before(dict(zip(names, columns, strict=True)))
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
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecations that the user cannot act on
        loaded = WRITERS[form](exports, draft / FILES[form])
        return max(max_difference(exports, loaded, size) for size in exports.sizes)


def max_difference(exports: Exports, loaded: Callable[..., Any], size: int) -> float:
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
    return list(answer) if isinstance(answer, tuple | list) else [answer]


def write_safetensors(exports: Exports, path: Path) -> Any:
    """The file exists already; load it into a second new model."""
    recipe = exports.recipe
    return as_module(recipe, fresh_model(recipe, exports.folder / path.name), exports.names, [])


def write_torch_export(exports: Exports, path: Path) -> Any:
    torch.export.save(exports.program, path)
    return torch.export.load(path).module()


def write_onnx(exports: Exports, path: Path) -> Any:
    import onnxruntime

    model: Any = torch.onnx.export(
        exports.program,
        exports.traced,
        dynamo=True,
        input_names=exports.names,
        output_names=exports.outputs,
        dynamic_shapes=[{0: "batch"} for _ in exports.names],
        verbose=False,
    )
    # The format is limited to 2 GiB per file; larger weights go into a second file.
    large = (exports.folder / FILES["safetensors"]).stat().st_size > 1.5 * 2**30
    model.save(path, external_data=large)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda *columns: session.run(
        None, {name: column.numpy() for name, column in zip(exports.names, columns, strict=True)}
    )


def write_torchscript(exports: Exports, path: Path) -> Any:
    torch.jit.trace(exports.reference, exports.traced).save(str(path))  # type: ignore[no-untyped-call]
    return torch.jit.load(str(path))  # type: ignore[no-untyped-call]


WRITERS: dict[str, Callable[[Exports, Path], Any]] = {
    "safetensors": write_safetensors,
    "torch_export": write_torch_export,
    "onnx": write_onnx,
    "torchscript": write_torchscript,
}
