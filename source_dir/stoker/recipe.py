"""Recipes: what to read, how to preprocess it, what to train. Imports neither ray nor torch.

class Flowers(Recipe):
    data: str
    def read(self, split): return read_images(self.data, split)
    def preprocess(self, split): return [DecodeImage(), Resize(224)]
    def model(self): return timm.create_model("resnet18", num_classes=5)
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from stoker.config.loading import Resolved, error_line
from stoker.config.schema import Config
from stoker.config.values import expanded_paths, has_text, is_path, true_as_number, typed
from stoker.errors import INSTALL_TRAIN, OF_TRAIN, UsageError, nearest, where_raised
from stoker.place import ORIGINS_FILE

if TYPE_CHECKING:
    from torch import Tensor, nn

Split = Literal["train", "val"]
Batch = dict[str, Any]
"""Columns of a batch: tensors whose first dimension is the record."""

SOURCE_FOLDER = Path(__file__).resolve().parent.parent
"""The folder that contains `stoker` and, in a staged job, the user's modules."""

ALIASES = {"ImageClassification": "stoker.image_classification:ImageClassification"}


class Recipe(BaseModel):
    """Every host: base class whose fields are the recipe's parameters and whose methods define the job.

    Fields are validated before a cluster forms; unknown `params` are errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    pad: ClassVar[dict[str, Any]] = {}
    """Variable-length columns → the padding value up to the longest row of the batch, or
    `stoker.data.Pad(number, multiple=8)`. The batch then also has `<column>_length`. If it depends on
    parameters, define it as a property."""

    class_names: ClassVar[Sequence[str]] = ()
    """Names of class 0, 1, …, for masks and boxes in the report."""

    def check(self, resolved: Resolved) -> None:
        """Head: reject invalid parameters before a cluster forms.

        Raises:
            UsageError: one line per problem.
        """

    def read(self, split: Split) -> Any:
        """Head: define the records of a split; nothing is read yet.

        Returns:
            A `stoker.read.sources.Source` or a `ray.data.Dataset`; None if the split does not exist.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what to read: define read()")

    def discover(self) -> dict[str, Any]:
        """Head: parameters derived from the data, such as the number of classes; added to `params`."""
        return {}

    def preprocess(self, split: Split) -> list[Any]:
        """Head: the chain of transforms that chain workers run, in order; see `as_stages`."""
        return []

    def collate(self, records: list[dict[str, Any]]) -> Batch:
        """CPU host: turn the records of a batch into the batch, in place of stacking their columns.

        Define it for records that differ in shape, or to build a batch from all of its records. Records may
        hold anything then; images come as CHW, arrays as tensors. Draws from `random`, NumPy and PyTorch
        depend only on the seed, the epoch and the records.

        Returns:
            Tensors whose first dimension is the record, and lists with one item per record.
        """
        raise NotImplementedError

    @property
    def collates(self) -> bool:
        """Every host: whether the recipe defines `collate`."""
        return type(self).collate is not Recipe.collate

    def model(self) -> nn.Module:
        """Train worker: create the network with its initial weights."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what to train: define model()"
        )

    def on_device(self, split: Split) -> nn.Module | Callable[[Batch], Batch] | None:
        """Train worker: a module or function applied to each batch (a dict of tensors) on the GPU, or None."""
        return None

    def training_step(self, model: nn.Module, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Train worker: the loss of a batch (mean over its records), or a dict with "loss".

        The default is the cross-entropy of `batch["image"]` (records × channels × height × width) against
        `batch["label"]` (records). With a field or attribute `multi_label`, labels are vectors of 0 and 1
        (records × classes), and the loss is the binary cross-entropy.
        """
        return classification_loss(model, batch, multi_label=several_labels(self))

    def validation_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Train worker: `loss` (mean over the batch's records) and, for metrics, `preds` and `target`."""
        if type(self).training_step is not Recipe.training_step:
            loss = self.training_step(model, batch)
            return loss if isinstance(loss, dict) else {"loss": loss}
        preds = model(batch["image"])
        loss = loss_of(preds, batch["label"], multi_label=several_labels(self))
        return {"loss": loss, "preds": preds, "target": batch["label"]}

    def predict(
        self, model: nn.Module, batch: Batch
    ) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        """Train worker: the model's output for a batch after `on_device("val")`.

        Exported models contain both steps. The default is `model(batch["image"])`.
        """
        answer: Tensor = model(batch["image"])
        return answer

    def export_inputs(self) -> list[str]:
        """Train worker: the columns that `on_device("val")` and `predict` need: the inputs of an exported
        model, in this order."""
        return ["image"]

    def metrics(self) -> dict[str, Any]:
        """Train worker: torchmetrics, updated with `preds` and `target` of `validation_step`.

        The default is top-1 accuracy as `acc1`, or for `multi_label` the micro-averaged F1 score as `f1`, for
        recipes that return both.
        """
        from stoker.accuracy import F1, Accuracy

        return {"f1": F1()} if several_labels(self) else {"acc1": Accuracy()}

    def optimizer(self, model: nn.Module) -> Any:
        """Train worker: a custom optimiser, or None to use `train.optimizer`."""
        return None


class Better:
    """Stands for a default metric where torch is not to be imported."""

    higher_is_better = True


def metrics_by_name(recipe: Recipe) -> dict[str, Any]:
    """Its metrics by name."""
    if type(recipe).metrics is not Recipe.metrics:
        return dict(from_recipe(recipe, "metrics"))
    return {"f1" if several_labels(recipe) else "acc1": Better()}


def several_labels(recipe: Recipe) -> bool:
    """Whether a record may have several labels, as a vector of 0 and 1."""
    return bool(getattr(recipe, "multi_label", False))


def from_recipe(recipe: Recipe, method: str, *arguments: str) -> Any:
    """Call a method of the user's recipe; an exception becomes one line with its location."""
    try:
        return getattr(recipe, method)(*arguments)
    except UsageError:
        raise
    except Exception as error:
        name = type(recipe).__name__
        raise UsageError(
            f"recipe: {name}.{method}({', '.join(map(repr, arguments))}) failed: {where_raised(error)}"
        ) from error


def classification_loss(
    model: nn.Module, batch: Batch, label_smoothing: float = 0.0, multi_label: bool = False
) -> Tensor:
    """Train worker: mean cross-entropy of `image` against `label` (class indices or probabilities).

    With `multi_label`, labels are vectors of 0 and 1, and the cross-entropy is that of each class alone.
    """
    return loss_of(model(batch["image"]), batch["label"], label_smoothing, multi_label)


def loss_of(
    preds: Tensor, label: Tensor, label_smoothing: float = 0.0, multi_label: bool = False
) -> Tensor:
    import torch.nn.functional as F

    if multi_label:
        return F.binary_cross_entropy_with_logits(preds, label.to(preds.dtype))
    return F.cross_entropy(preds, label, label_smoothing=label_smoothing)


def class_names_of(recipe: Recipe, found: Sequence[str] | None) -> list[str]:
    """Names of the classes that labels count, the recipe's own before those of the data, if known."""
    names = list(recipe.class_names or found or [])
    # A recipe may map its labels to other classes.
    return names if getattr(recipe, "num_classes", None) in (None, len(names)) else []


def code_digest(folder: Path) -> str:
    """Of a job's own Python files, which decide what its records become."""
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if name.parts[0] != "stoker":
            found.update(repr((name.as_posix(), path.read_bytes())).encode())
    return found.hexdigest()


def load_recipe(path: str, params: dict[str, Any], source: Path) -> Recipe:
    """Every host: import the recipe class at `package.module:Class` and instantiate it."""
    if path.endswith(":LightningRecipe"):
        raise UsageError(
            "recipe: LightningRecipe is gone; train the LightningModule in a script with stoker.DataLoader"
            " (docs/migrate.md; `stoker init --kind lightning` writes one)"
        )
    cls = load_object(ALIASES.get(path, path), source, "recipe", offers=Recipe)
    if not (inspect.isclass(cls) and issubclass(cls, Recipe)):
        raise UsageError(
            f"recipe: {path} is not a Recipe class; derive it from stoker.recipe.Recipe"
        )
    try:
        return cls(**typed_params(cls, params))
    except ValidationError as error:
        raise UsageError(*(describe_param(detail, cls) for detail in error.errors())) from None
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"recipe: cannot create {path}: {where_raised(error)}") from error


def typed_params(cls: type[Recipe], params: dict[str, Any]) -> dict[str, Any]:
    """A recipe's parameters, with texts converted to the types of its fields and paths expanded."""
    fields = {info.alias or name: info.annotation for name, info in cls.model_fields.items()}
    found: dict[str, Any] = {}
    for name, value in params.items():
        kind = fields.get(name) or getattr(cls.model_fields.get(name), "annotation", Any)
        try:
            found[name] = typed(value, kind)
            if names_data(name, kind):
                found[name] = expanded_paths(found[name])
            if true_as_number(found[name], kind):
                raise ValueError(f"must be a number (got {value!r})")
        except ValueError as error:
            raise UsageError(f"params.{name}: {error}") from None
    return found


def names_data(name: str, kind: Any) -> bool:
    """Whether a recipe's parameter is a path by contract: it is named `data`, or annotated `Path`."""
    return name == "data" or is_path(kind)


def with_types(config: Config) -> Config:
    """The job with `typed_params` of its recipe."""
    if config.script is not None or not has_text(config.params):
        return config
    cls = load_object(
        ALIASES.get(config.recipe, config.recipe), SOURCE_FOLDER, "recipe", offers=Recipe
    )
    return config.model_copy(update={"params": typed_params(cls, config.params)})


def describe_param(detail: Any, cls: type[Recipe]) -> str:
    """An error in the recipe's parameters like one in the configuration."""
    if not detail["loc"]:
        return f"params: {str(detail['msg']).removeprefix('Value error, ')}"
    return error_line(detail, cls, prefix="params")


def load_object(path: str, source: Path, key: str, offers: type | None = None) -> Any:
    """Every host: import the object at `package.module:name`, searching `source` first."""
    module_name, sign, name = path.partition(":")
    if not sign or not module_name or not name:
        hint = nearest(path, ALIASES if key == "recipe" else ())  # it may be a misspelt short name
        raise UsageError(f"{key}: {path!r} is not of the form package.module:name{hint}")
    # On a laptop, Stoker's own folder must not come before the job's: both may have `recipes` and `train`.
    if sys.path[:1] != [str(source)] and (source != SOURCE_FOLDER or str(source) not in sys.path):
        sys.path.insert(0, str(source))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UsageError(f"{key}: {_absent(module_name, source)}") from None
        missing = f"{module_name} needs the module {error.name!r}, which is not installed"
        ours = error.name and error.name.split(".")[0] in OF_TRAIN
        remedy = INSTALL_TRAIN if ours else "add it to requirements.txt"
        raise UsageError(f"{key}: {missing}; {remedy}") from None
    except SyntaxError as error:  # its text names file and line, and its frames are ours alone
        text = f"{type(error).__name__}: {error}"
        raise UsageError(f"{key}: {module_name} cannot be imported: {text}") from error
    except Exception as error:
        raise UsageError(
            f"{key}: {module_name} cannot be imported: {where_raised(error)}"
        ) from error
    if not hasattr(module, name):
        there = [
            n
            for n, value in vars(module).items()
            if not n.startswith("_") and getattr(value, "__module__", None) == module.__name__
            if offers is None or (inspect.isclass(value) and issubclass(value, offers))
        ]
        hint = nearest(name, there, f"available: {', '.join(there) or 'nothing'}")
        file = Path(str(module.__file__))
        file = file.relative_to(source) if file.is_relative_to(source) else file
        raise UsageError(f"{key}: {module_name} ({file}) has no {name}{hint}")
    return getattr(module, name)


def _absent(module_name: str, source: Path) -> str:
    first = module_name.split(".")[0]
    names = [p.stem for p in source.glob("*.py")]
    names += [p.name for p in source.iterdir() if p.is_dir() and any(p.glob("*.py"))]
    if (source / first).is_dir() and "." in module_name:
        names = [f"{first}.{p.stem}" for p in (source / first).glob("*.py") if p.stem != "__init__"]
    hint = nearest(module_name, names, f"available: {', '.join(sorted(names)) or 'none'}")
    # The staged copy is gone when a refused run's message is read.
    where = "the job's source" if (source / ORIGINS_FILE).is_file() else source
    return f"no module {module_name} in {where}{hint}"
