"""The rooms of the project lie in an order, and no module depends on itself in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *(
        "stoker_launcher",
        "stoker.entry",
        "stoker.scripts",
        "stoker.train",
        "stoker.image_classification",
    ),
    *(
        "stoker.data",
        "stoker.loader",
        "stoker.serve",
        "stoker.serve.blocks",
        "stoker.chain",
        "stoker.read",
    ),
    *("stoker.protocol", "stoker.sizing", "stoker.events", "stoker.hosts", "stoker.checkpoints"),
    *("stoker.storage", "stoker.recipe", "stoker.config"),
    "stoker",
)
"""Each uses only itself and those behind it; the last one is the modules without a room of their own."""
PUBLIC = "stoker"
"""The package itself, which loads its public names on first use: anything may import it."""


def room_of(name: str) -> str:
    return max((room for room in ROOMS if f"{name}.".startswith(f"{room}.")), key=len)


def modules() -> dict[str, Path]:
    found = {}
    for top, package in (("source_dir", "stoker"), ("launcher", "stoker_launcher")):
        for path in (ROOT / top / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT / top).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports_of(path: Path, known: set[str]) -> set[str]:
    """What a module imports at any time, also what only the type checker sees."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom) and child.module:
                names = {f"{child.module}.{alias.name}" for alias in child.names}
                found.update(name if name in known else child.module for name in names)
            elif isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            visit(child)

    visit(ast.parse(path.read_text()))
    return found & known


@cache
def graph() -> dict[str, set[str]]:
    known = modules()
    names = set(known)
    return {name: imports_of(path, names) - {name} for name, path in known.items()}


def circles(depends: dict[str, set[str]]) -> list[list[str]]:
    left = {name: set(needed) for name, needed in depends.items()}
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    while free := [name for name in left if not any(name in needed for needed in left.values())]:
        for name in free:
            del left[name]
    return [sorted(left)] if left else []


def test_no_module_depends_on_itself() -> None:
    assert circles(graph()) == []


def test_the_rule_sees_circles() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_a_room_uses_only_those_behind_it() -> None:
    upward = [
        f"{name} → {needed}"
        for name, all_needed in graph().items()
        for needed in all_needed - {PUBLIC}
        if name != PUBLIC and ROOMS.index(room_of(needed)) < ROOMS.index(room_of(name))
    ]
    assert upward == []


def test_every_module_has_a_room() -> None:
    loose = {name for name in modules() if room_of(name) == "stoker"} - {PUBLIC}
    named = {"accuracy", "errors", "figures", "place", "ray_compat", "session"}
    assert loose == {f"stoker.{name}" for name in named}


def types_of(module: ast.Module) -> Iterator[str]:
    """Names of its classes and of its other types, but for type variables."""
    yield from (node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    for node in module.body:
        if isinstance(node, ast.Assign) and "TypeVar(" not in ast.unparse(node.value):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            yield from (name for name in names if re.match("[A-Z][a-z]", name))


def test_a_name_has_one_meaning() -> None:
    files: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for name, path in modules().items():
        if name.startswith("stoker_launcher.projects."):
            continue  # projects for users, each on its own
        files.setdefault(path.name, []).append(name)
        for kind in types_of(ast.parse(path.read_text())):
            classes.setdefault(kind, []).append(name)
    del files["__init__.py"]
    assert {name: found for name, found in (files | classes).items() if len(found) > 1} == {}


def test_a_file_has_at_most_600_lines() -> None:
    assert [
        str(path) for path in modules().values() if len(path.read_text().splitlines()) > 600
    ] == []


def test_the_way_of_an_image_can_be_followed() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    stops = re.findall(r"^\d+\. `([\w/]+\.py)(?:: ([\w.]+))?`", page, re.MULTILINE)
    assert 8 <= len(stops) <= 12
    for file, function in stops:
        text = (ROOT / "source_dir/stoker" / file).read_text()
        for part in function.split("."):
            assert not part or re.search(rf"(?:class|def) {part}\b", text), f"{file}: {part}"


def test_the_page_names_files_that_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    names = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.py)\b", page)}
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert names - tests - {path.name for path in modules().values()} == set()


def test_private_calls_of_ray_stand_in_one_file() -> None:
    private = re.compile(
        r"ray\.(_private|_raylet|data\._internal)|\._max_num_blocks|_create_executor"
    )
    found = {
        path.relative_to(ROOT / "source_dir/stoker").as_posix()
        for path in (ROOT / "source_dir/stoker").rglob("*.py")
        if private.search(path.read_text())
    }
    assert found == {"ray_compat.py"}
