"""Fork Ray's worker processes on a host from one process that has already imported their modules.

Importing Ray, Ray Data and PyTorch takes three to five seconds of CPU per process, and a small job has a
dozen processes. A fork takes 0.05 s and shares the imported code in memory.

    raylet  →  forked_worker.py (as Ray's worker program)  →  fork_server.py: fork  →  Ray's default_worker.py

Without that process, workers start as in plain Ray, and the host says so.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.config.schema import Config
from stoker.hosts import early
from stoker.hosts.machine import runs
from stoker.hosts.requirements import at_least, installed
from stoker.recipe import ALIASES

SOCKET_VARIABLE, TRAINS_VARIABLE = "STOKER_FORKS", "STOKER_TRAINS"
"""For Ray's daemons, the server's socket; for train workers, that they need what `LATER` names."""
FIRST_RAY = "2.56"
"""On Ray 2.52, a host without a dashboard does not join if its workers are forked."""
CHAIN = ("pyarrow.parquet", "ray.data", "stoker.serve.chain_worker", "PIL.Image")
TRAINING = (*CHAIN, "ray.train.torch", "stoker.serve.actor", "stoker.train.loop")
LATER = ("torch._dynamo", "timm.optim")


@dataclass(frozen=True)
class Imports:
    """What a fork server imports; missing modules are skipped."""

    first: tuple[str, ...]
    later: tuple[str, ...] = ()
    """What only train workers need; a second process imports it in parallel."""

    def also(self, *modules: str) -> Imports:
        return Imports((*self.first, *modules), self.later)


FOR_CHAINS = Imports(CHAIN)
FOR_TRAINING = Imports(TRAINING, LATER)


def started(imports: Imports, folder: Path) -> ForkServer | None:
    """A fork server, its sockets in `folder`; None on systems and Rays without."""
    begun = early.begun()
    if early.POSSIBLE and at_least(ray := installed("ray"), FIRST_RAY):
        return ForkServer(begun or early.begin(), imports, folder)
    if early.POSSIBLE:
        print(f"Ray {ray}: processes start more slowly than with Ray {FIRST_RAY} or newer", flush=True)
    if begun is not None:
        os.close(begun.instructions)
    return None


class ForkServer:
    """The process from which Ray's workers on this host are forked, its sockets in a private folder.

    Ray's daemons get its socket in their environment; they may start while it imports.
    """

    def __init__(self, begun: early.Begun, imports: Imports, folder: Path) -> None:
        self.socket = str(Path(tempfile.mkdtemp(prefix="forks-", dir=folder)) / "socket")
        self._wanted = Path(self.socket).with_name("wanted")
        self.pid, self._stopped = begun.pid, False
        told = {
            "path": self.socket,
            "environment": {
                **os.environ,
                # Ray reads these once, when its library is loaded. A worker without a job id can serve any
                # job. The raylet's end is also detected through the connection to it.
                "RAY_JOB_ID": "ffffffff",
                "RAY_RAYLET_PID": str(os.getpid()),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            "folder": str(Path.cwd()),
            "python_path": sys.path,
            "modules": imports.first,
            "later": imports.later,
        }
        try:
            with os.fdopen(begun.instructions, "w") as instructions:
                instructions.write(json.dumps(told) + "\n")
        except BrokenPipeError:  # it has ended; else workers would wait for its socket
            shutil.rmtree(self._wanted.parent, ignore_errors=True)

    @contextlib.contextmanager
    def follows(self) -> Iterator[None]:
        """While this process tries the chains: the server also imports the libraries that they need."""
        finder: Any = ImportNotes(self._wanted)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)

    def stop(self) -> None:
        """Kill the process, after Ray has stopped; say so if it ended before."""
        if self._stopped:
            return
        self._stopped = True
        if runs(self.pid):
            os.kill(self.pid, signal.SIGKILL)
        else:
            print("warning: the process that forks Ray's workers ended early, so they started slowly")
        with contextlib.suppress(ChildProcessError):  # the launcher's
            os.waitpid(self.pid, 0)
        shutil.rmtree(Path(self.socket).parent, ignore_errors=True)


LIGHT = ("PIL", "cv2", "pandas", "scipy", "albumentations")
HEAVY = ("torch", "torchvision", "timm")
"""Only if the recipe's own import needs them, or on the head its chains: a CPU host may never call the
function that does."""


class ImportNotes:
    """Finds no module, but notes which known libraries this process is about to import."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in (*LIGHT, *HEAVY):
            with contextlib.suppress(OSError), self._file.open("a") as file:
                file.write(f"{name}\n")


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
