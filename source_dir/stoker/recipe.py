"""A recipe: what to read, how to preprocess it, what to train. Loads neither ray nor torch.

class Flowers(Recipe):
    data: str
    def read(self, split): return read_images(self.data, split)
    def preprocess(self, split): return [DecodeImage(), Resize(224)]
    def model(self): return timm.create_model("resnet18", num_classes=5)
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from stoker.config import Resolved, describe
from stoker.errors import UsageError, where_raised

if TYPE_CHECKING:
    from torch import Tensor, nn

Split = Literal["train", "val"]
Batch = dict[str, Any]
"""Columns of one batch: tensors whose first dimension counts the records."""

SOURCE_FOLDER = Path(__file__).resolve().parent.parent
"""Where `stoker` lies and, in a staged job, the user's modules beside it."""

ALIASES = {"ImageClassification": "stoker.image_classification:ImageClassification"}


class Recipe(BaseModel):
    """Every host: fields are the recipe's parameters, methods say what happens with the data.

    Fields are checked before any cluster forms; unknown `params` are errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    own_loop: ClassVar[str] = ""
    """A module whose `build` and `run_epochs` take the place of those of `stoker.training.loop`."""

    pad: ClassVar[dict[str, Any]] = {}
    """Columns whose rows differ in length → the number that fills them up to the longest of their batch, or
    `stoker.data.Pad(number, multiple=8)`. A batch then has `<column>_length`, too. Where it depends on the
    parameters, define it as a property."""

    class_names: ClassVar[Sequence[str]] = ()
    """Of class 0, 1, …: what the report calls the classes of masks and boxes."""

    def check(self, resolved: Resolved) -> None:
        """Head: refuse what cannot work before any cluster forms.

        Raises:
            UsageError: one line per problem.
        """

    def read(self, split: Split) -> Any:
        """Head: the records of a split, lazily.

        Returns:
            A `stoker.data.sources.base.Source` or a `ray.data.Dataset`; None where there is no such split.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what to read: define read()")

    def discover(self) -> dict[str, Any]:
        """Head: parameters that the data tells, such as a number of classes; they join `params`."""
        return {}

    def preprocess(self, split: Split) -> list[Any]:
        """Head: the chain that runs on CPU hosts, in order; transforms as `as_stages` takes them."""
        return []

    def model(self) -> nn.Module:
        """Train worker: the network, with its first weights."""
        raise NotImplementedError(f"{type(self).__name__} does not say what to train: define model()")

    def on_device(self, split: Split) -> nn.Module | None:
        """Train worker: a module applied to each batch (a dict of tensors) on the GPU, or None."""
        return None

    def training_step(self, model: nn.Module, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Train worker: the loss of a batch (mean over its records), alone or under "loss".

        The default classifies `batch["image"]` (records × channels × height × width) into
        `batch["label"]` (records) by cross-entropy.
        """
        return classification_loss(model, batch)

    def loss_weight(self, batch: Batch) -> float | Tensor:
        """Train worker: of how many things `training_step`'s loss is the mean, before `on_device`.

        `data.max_tokens` divides batches and weighs their parts' losses by it. The default counts records;
        where the loss is a mean over tokens, return how many of the batch's tokens it covers.
        """
        return len(next(iter(batch.values())))

    def validation_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Train worker: `loss` (mean over the batch's records) and, for metrics, `preds`, `target`."""
        import torch.nn.functional as F

        if type(self).training_step is not Recipe.training_step:
            loss = self.training_step(model, batch)
            return loss if isinstance(loss, dict) else {"loss": loss}
        preds = model(batch["image"])
        loss = F.cross_entropy(preds, batch["label"])
        return {"loss": loss, "preds": preds, "target": batch["label"]}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        """Train worker: the model's answer to a batch that `on_device("val")` has seen.

        Exported models do both, so this is what they answer. The default is `model(batch["image"])`.
        """
        answer: Tensor = model(batch["image"])
        return answer

    def export_inputs(self) -> list[str]:
        """Train worker: the columns of a batch that `on_device("val")` and `predict` need: what an
        exported model takes, in this order."""
        return ["image"]

    def metrics(self) -> dict[str, Any]:
        """Train worker: torchmetrics fed with validation_step's `preds` and `target`.

        The default is top-1 accuracy as `acc1`, for recipes that return both.
        """
        from torchmetrics.classification import MulticlassAccuracy

        return {"acc1": MulticlassAccuracy(num_classes=None, average="micro")}

    def optimizer(self, model: nn.Module) -> Any:
        """Train worker: an optimiser of the recipe's own, or None for the configured one."""
        return None


def classification_loss(model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
    """Train worker: the mean cross-entropy of `image` against `label`, class numbers or shares of classes."""
    import torch.nn.functional as F

    return F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=label_smoothing)


def code_digest(folder: Path) -> str:
    """Anywhere: digest of a job's own Python files, which decide what its records become.

    Args:
        folder: the staged code; Stoker's own package in it does not count.
    """
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if name.parts[0] != "stoker":
            found.update(repr((name.as_posix(), path.read_bytes())).encode())
    return found.hexdigest()


def load_recipe(path: str, params: dict[str, Any], source: Path) -> Recipe:
    """Every host: the recipe class at `package.module:Class`, made with its parameters.

    Args:
        path: import path; "ImageClassification" names the built-in one.
        params: the configuration's `params`.
        source: folder from which the user's modules are imported.

    Raises:
        UsageError: nothing there, not a Recipe, or parameters that do not fit, each in one line.
    """
    cls = load_object(ALIASES.get(path, path), source, "recipe", offers=Recipe)
    if not (inspect.isclass(cls) and issubclass(cls, Recipe)):
        raise UsageError(f"recipe: {path} is no Recipe class; derive it from stoker.recipe.Recipe")
    try:
        return cls(**params)
    except ValidationError as error:
        raise UsageError(*(describe_param(detail, cls) for detail in error.errors())) from None
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"recipe: {path} cannot be made: {where_raised(error)}") from error


def describe_param(detail: Any, cls: type[Recipe]) -> str:
    """Every host: one error in the recipe's parameters, as the configuration's are written."""
    if not detail["loc"]:
        message = str(detail["msg"]).removeprefix("Value error, ")
        return f"params: {message}"
    return describe(detail, cls, prefix="params")


def load_object(path: str, source: Path, key: str, offers: type | None = None) -> Any:
    """Every host: the object at `package.module:name`, importing from `source` first.

    Raises:
        UsageError: naming the key, what was looked for and what the module offers instead.
    """
    module_name, sign, name = path.partition(":")
    if not sign or not module_name or not name:
        raise UsageError(f"{key}: {path!r} is not of the form package.module:name")
    if str(source) not in sys.path:
        sys.path.insert(0, str(source))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UsageError(_no_such_module(key, module_name, source)) from None
        raise UsageError(
            f"{key}: {module_name} needs the module {error.name!r}, which is not installed;"
            " add it to requirements.txt"
        ) from None
    except Exception as error:
        raise UsageError(f"{key}: {module_name} cannot be imported: {where_raised(error)}") from error
    if not hasattr(module, name):
        there = [
            n
            for n, value in vars(module).items()
            if not n.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
            and (offers is None or (inspect.isclass(value) and issubclass(value, offers)))
        ]
        close = difflib.get_close_matches(name, there, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it offers: {', '.join(there) or 'nothing'}"
        raise UsageError(f"{key}: {module_name} ({module.__file__}) has no {name}; {hint}")
    return getattr(module, name)


def _no_such_module(key: str, module_name: str, source: Path) -> str:
    first = module_name.split(".")[0]
    names = [p.stem for p in source.glob("*.py")]
    names += [p.name for p in source.iterdir() if p.is_dir() and any(p.glob("*.py"))]
    if (source / first).is_dir() and "." in module_name:
        names = [f"{first}.{p.stem}" for p in (source / first).glob("*.py") if p.stem != "__init__"]
    close = difflib.get_close_matches(module_name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(sorted(names)) or 'none'}"
    return f"{key}: no module {module_name} in {source}; {hint}"
