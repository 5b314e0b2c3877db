"""No lock of the project is held across a Ray call: whoever waits for the lock would wait for Ray, too."""

from __future__ import annotations

import ast
import textwrap
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import IOBase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    p for folder in ("source_dir/stoker", "launcher") for p in (ROOT / folder).rglob("*.py")
)
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
RAY_CALLS = {
    "get",
    "wait",
    "put",
    "nodes",
    "kill",
    "cancel",
    "init",
    "get_actor",
    "cluster_resources",
}
COMMON = {
    name
    for kind in (
        dict,
        list,
        set,
        str,
        bytes,
        deque,
        Path,
        IOBase,
        threading.Condition,
        threading.Thread,
    )
    for name in dir(kind)
}
"""Methods of Python's own types: a call of one of these on an object says nothing about whose it is."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    module: str
    owner: str
    """Its class; empty: none."""
    name: str


@dataclass
class Code:
    locks: set[str] = field(default_factory=set)
    """Names that a lock is bound to anywhere."""
    functions: dict[Place, Function] = field(default_factory=dict)
    named: dict[str, list[Place]] = field(default_factory=dict)
    modules: dict[str, ast.Module] = field(default_factory=dict)
    imports: dict[str, set[str]] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        self.modules[name] = module = ast.parse(text)
        self.imports[name] = {name}
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom):
                self.imports[name] |= {
                    node.module or "",
                    *(f"{node.module}.{a.name}" for a in node.names),
                }
            for target in made_here(node):
                self.locks.add(target)
        for place, function in functions_of(name, module):
            self.functions[place] = function
            self.named.setdefault(place.name, []).append(place)

    def meant(self, call: ast.Call, caller: Place) -> list[Place]:
        """The functions that a call may mean: of its own class, or of what its module imports."""
        name, function = called(call), call.func
        by_self = isinstance(function, ast.Attribute) and last_name(function.value) == "self"
        if by_self:
            own = Place(caller.module, caller.owner, name)
            return [own] if own in self.functions else []
        if isinstance(function, ast.Attribute) and name in COMMON:
            return []
        near = [self.imports.get(known, ()) for known in self.imports[caller.module]]
        return [
            place
            for place in self.named.get(name, ())
            if any(place.module in names for names in near)
        ]

    def waits_for_ray(self) -> set[Place]:
        inside = {place: list(calls(function.body)) for place, function in self.functions.items()}
        found = {place for place, made in inside.items() if any(map(is_ray, made))}
        meant = {
            place: {m for c in made for m in self.meant(c, place)} for place, made in inside.items()
        }
        while more := {place for place, callees in meant.items() if callees & found} - found:
            found |= more
        return found

    def violations(self) -> list[str]:
        """module:line of each call under a lock that reaches Ray."""
        waiting = self.waits_for_ray()
        found = set()
        for place, function in self.functions.items():
            for node in ast.walk(function):
                if isinstance(node, ast.With) and any(
                    held(item, self.locks) for item in node.items
                ):
                    found |= {
                        f"{place.module}:{call.lineno} {called(call)}"
                        for call in calls(node.body)
                        if is_ray(call) or waiting.intersection(self.meant(call, place))
                    }
        return sorted(found)


def functions_of(module: str, tree: ast.AST, owner: str = "") -> Iterator[tuple[Place, Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield Place(module, owner, node.name), node
        if not isinstance(node, ast.expr):
            yield from functions_of(
                module, node, node.name if isinstance(node, ast.ClassDef) else owner
            )


def made_here(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.AnnAssign) and last_name(node.annotation) in LOCKS:
        yield last_name(node.target)
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        made = [c for c in ast.walk(node.value) if isinstance(c, ast.Call) and called(c) in LOCKS]
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if made:
            yield from (last_name(target) for target in targets)
    if (
        isinstance(node, ast.arg)
        and node.annotation is not None
        and last_name(node.annotation) in LOCKS
    ):
        yield node.arg


def calls(body: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """Calls that these statements make themselves: not those of functions that are only defined there."""
    for node in body:
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            yield node
            # A method that is passed on is called there.
            methods = (arg for arg in node.args if isinstance(arg, ast.Attribute))
            yield from (
                ast.copy_location(ast.Call(arg, [], []), node)
                for arg in methods
                if last_name(arg.value) == "self"
            )
        yield from calls(ast.iter_child_nodes(node))


def last_name(node: ast.AST) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def called(call: ast.Call) -> str:
    return last_name(call.func)


def is_ray(call: ast.Call) -> bool:
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    return function.attr == "remote" or (
        last_name(function.value) == "ray" and function.attr in RAY_CALLS
    )


def held(item: ast.withitem, locks: set[str]) -> bool:
    return last_name(item.context_expr) in locks


@pytest.mark.long
def test_no_lock_is_held_across_a_ray_call() -> None:
    code = Code()
    for path in SOURCES:
        relative = path.relative_to(ROOT / "source_dir" if "source_dir" in path.parts else ROOT)
        code.add(
            ".".join(relative.with_suffix("").parts).removesuffix(".__init__"), path.read_text()
        )
    assert {"changed", "_changed", "_lock"} <= code.locks, (
        "the coordinator's and the feed's are seen"
    )
    waiting = {place.name for place in code.waits_for_ray()}
    assert {"start_coordinator", "fetch", "rows", "_ask"} <= waiting
    assert not code.violations()


@pytest.mark.parametrize(
    ("body", "line", "name"),
    [
        ("with self.lock:\n    ray.get(x)", 6, "get"),
        ("with self.lock:\n    self.actor.f.remote()", 6, "remote"),
        ("with other.lock:\n    if x:\n        self.a()", 7, "a"),
        ("with self.lock:\n    x = 1\nray.get(x)", 0, ""),
        ("with self.lock:\n    self.later = lambda: ray.get(x)", 0, ""),
        ("with self.file:\n    ray.get(x)", 0, ""),
    ],
)
def test_the_rule_sees_calls_however_deep_and_only_those_under_the_lock(
    body: str, line: int, name: str
) -> None:
    text = """
class Any:
    def __init__(self): self.lock = threading.Lock()
    def f(self, x):
BODY
    def a(self): return self.b()
    def b(self): return [ray.wait([]) for _ in ()]
"""
    code = Code()
    code.add("any", text.replace("BODY", textwrap.indent(body, " " * 8)))
    assert code.violations() == ([f"any:{line} {name}"] if line else [])
