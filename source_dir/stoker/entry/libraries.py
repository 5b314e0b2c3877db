"""Every host: find in a recipe's files the libraries that it imports, to import them before forking."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stoker.config.schema import Config
from stoker.recipe import ALIASES

LIGHT = ("PIL", "cv2", "pandas", "scipy", "albumentations")
HEAVY = ("torch", "torchvision", "timm")
"""Preloaded only if the recipe's own import needs them: a CPU host may never call the function that does."""
QUICK = {*sys.stdlib_module_names, *LIGHT, "numpy", "pydantic", "stoker", "yaml"}
"""Importing any other library may import PyTorch or Ray."""


@dataclass
class Libraries:
    """Every host: modules of libraries that are safe to import before forking."""

    at_once: dict[str, None] = field(default_factory=dict)
    """Imported together with the recipe."""
    in_functions: dict[str, None] = field(default_factory=dict)
    """Imported when one of its functions runs."""
    quick: bool = True
    """Whether importing the recipe takes little time, and no function of it imports Ray."""

    def all(self) -> tuple[str, ...]:
        return (*self.at_once, *self.in_functions)


def libraries_of(config: Config, source: Path) -> Libraries:
    """Every host: read the files of a recipe and of the modules beside it that it imports.

    Args:
        config: names the recipe; a script has none.
        source: the folder of the user's modules.

    Returns:
        What was found; nothing for files that cannot be read or parsed.
    """
    found, recipe = Libraries(), ALIASES.get(config.recipe, config.recipe)
    if config.script is not None:
        return found
    if recipe == ALIASES["ImageClassification"]:
        found.at_once["torchvision.transforms.v2"] = None  # its chain, which it makes on the head
    waiting, seen = [recipe.partition(":")[0]], {""}
    while waiting:
        module = waiting.pop()
        root = module.split(".")[0]
        if module in seen or root == "stoker":
            continue
        seen.add(module)
        try:
            tree = ast.parse(source.joinpath(*module.split(".")).with_suffix(".py").read_bytes())
        except (OSError, SyntaxError, ValueError):
            own = source.joinpath(root)
            found.quick &= root in QUICK or own.is_dir() or own.with_suffix(".py").is_file()
            continue
        top, everywhere = list(_imported(_executed(tree.body))), list(_imported(ast.walk(tree)))
        waiting += top
        found.at_once |= dict.fromkeys(n for n in top if n.split(".")[0] in (*LIGHT, *HEAVY))
        found.in_functions |= dict.fromkeys(n for n in everywhere if n.split(".")[0] in LIGHT)
        found.quick &= not any(n.split(".")[0] == "ray" for n in everywhere)
    return found


def _executed(body: Iterable[ast.stmt]) -> Iterable[ast.AST]:
    """The statements that run when the module is imported, without `if TYPE_CHECKING`."""
    for node in body:
        if isinstance(node, ast.If):
            checked = "TYPE_CHECKING" in ast.unparse(node.test)
            yield from _executed(node.orelse if checked else [*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            yield from _executed(node.body)
        else:
            yield node


def _imported(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """Names of modules, and of what may be a module: `from torch import nn` gives torch and torch.nn."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
