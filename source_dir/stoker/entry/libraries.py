"""Find in a recipe's files the libraries that it imports, for the fork server to import them ahead."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from stoker.config.schema import Config
from stoker.recipe import ALIASES

LIGHT = ("PIL", "cv2", "pandas", "scipy", "albumentations")
HEAVY = ("torch", "torchvision", "timm")
"""Only if the recipe's own import needs them: a CPU host may never call the function that does."""


def libraries_of(config: Config, source: Path) -> tuple[str, ...]:
    """Modules that a recipe, and the modules beside it that it imports, import; none of unreadable files."""
    recipe = ALIASES.get(config.recipe, config.recipe)
    if config.script is not None:
        return ()
    # The built-in recipe makes its chain on the head.
    found = dict.fromkeys(["torchvision.transforms.v2"] if recipe == ALIASES["ImageClassification"] else [])
    waiting, seen = [recipe.partition(":")[0]], set()
    while waiting:
        module = waiting.pop()
        if module in seen or module.split(".")[0] in ("", "stoker"):
            continue
        seen.add(module)
        try:
            tree = ast.parse(source.joinpath(*module.split(".")).with_suffix(".py").read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        top = list(_imported(_executed(tree.body)))
        waiting += top
        found |= dict.fromkeys(name for name in top if name.split(".")[0] in HEAVY)
        found |= dict.fromkeys(name for name in _imported(ast.walk(tree)) if name.split(".")[0] in LIGHT)
    return tuple(found)


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
