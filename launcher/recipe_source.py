"""Laptop: finds mistakes in a recipe's file without importing it, since most recipes import PyTorch."""

from __future__ import annotations

import ast
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from stoker.errors import UsageError, nearest
from stoker.recipe import ALIASES, no_import_path, no_such_module, not_installed


def refuse_unimportable(path: str, source: Path) -> None:
    """Laptop: refuse a recipe that cannot be imported; what only importing can tell is not checked.

    Args:
        path: `package.module:Class`.
        source: the folder of the user's modules.

    Raises:
        UsageError: no such module or class, a syntax error, or an import of a package that is not installed.
    """
    module, sign, name = ALIASES.get(path, path).partition(":")
    if not (sign and module and name):
        raise UsageError(no_import_path("recipe", path))
    parts = module.split(".")
    file = source.joinpath(*parts).with_suffix(".py")
    if not file.is_file():
        if not source.joinpath(*parts).is_dir() and not _installed(parts[0], source):
            raise UsageError(no_such_module("recipe", module, source))
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        raise UsageError(f"recipe: {module} cannot be imported: {text}") from None
    refuse_absent_packages(tree, module, source)
    names, complete = _names_of(tree)
    if complete and name not in names:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        hint = nearest(name, classes, f"available: {', '.join(classes) or 'nothing'}")
        raise UsageError(f"recipe: {module} ({file}) has no {name}{hint}")


def refuse_absent_packages(tree: ast.Module, module: str, source: Path) -> None:
    """Laptop: refuse an unconditional import of a package that is neither installed nor in `source`.

    Raises:
        UsageError: names the package.
    """
    for node in tree.body:
        if isinstance(node, ast.Import):
            roots = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots = [node.module]
        else:
            continue
        for root in (each.split(".")[0] for each in roots):
            if not _installed(root, source):
                raise UsageError(not_installed("recipe", module, root))


def _installed(root: str, source: Path) -> bool:
    if root in sys.modules or PathFinder.find_spec(root, [str(source)]) is not None:
        return True
    return importlib.util.find_spec(root) is not None  # also what finders of editable installs know


def _names_of(tree: ast.Module) -> tuple[set[str], bool]:
    """All names that a module may define, and whether none can be missing from them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names, not names & {"*", "__getattr__"}
