"""Script's process: `python runner.py FOLDER STEPS SCRIPT [arguments]`.

Runs a training script like `python SCRIPT`, and observes torch's loaders once torch is imported. STEPS is a
number or `auto`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from launcher.advise.check.watch import Enough, Watch

OBSERVED = "torch.utils.data.dataloader"


class AfterImport(importlib.abc.MetaPathFinder):
    """Script's process: calls back after the first import of a module."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main(folder: str, steps: str, script: str, *arguments: str) -> int:
    """Run the script and write the observations to FOLDER.

    Returns:
        The script's exit code; 0 if it was ended after enough steps.
    """
    # `check` ends the script by SIGINT, which a shell's background jobs inherit as ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watch = Watch(Path(folder), None if steps == "auto" else int(steps))
    sys.meta_path.insert(0, AfterImport(OBSERVED, watch.observe))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except Enough:
        return 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        if not watch.over:
            watch.finish("failed" if code else "finished", f"exit code {code}" if code else "")
        return code
    except KeyboardInterrupt:
        if not watch.over:
            watch.finish("interrupted")
        return 130
    except BaseException as error:
        if watch.over:
            return 0  # The script turned `Enough` into another exception.
        # Print the traceback as Python does, without our frames.
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != script:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        watch.finish("failed", f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": "))
        return 1
    if not watch.over:
        watch.finish("finished")
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 130:
        os._exit(code)  # The launcher ends the script's threads and workers.
    sys.exit(code)
