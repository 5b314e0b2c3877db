"""Started by Ray for a worker with a runtime environment; Ray's version takes 0.5 s of CPU.

The file name must match Ray's: by that name the raylet knows that it may skip it.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main(given: list[str]) -> None:
    """Set variables and folder and run `forked_worker.py`; leave any other environment to Ray."""
    context = next(
        (json.loads(a.removeprefix(CONTEXT)) for a in given if a.startswith(CONTEXT)), None
    )
    if isinstance(context, dict) and is_simple(context) and given[0].endswith("/forked_worker.py"):
        os.environ.update(context.get("env_vars") or {})
        os.chdir(working_dir_of(context) or ".")
        sys.argv = [a for a in given if not a.startswith((CONTEXT, LANGUAGE))]
        # A second interpreter would take longer to start.
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        command = [str(Path(os.environ["STOKER_RAY_WORKERS"]) / "setup_worker.py"), *given]
        os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - Ray's own command


def is_simple(context: dict[str, Any]) -> bool:
    """Whether an environment has only variables and a folder, and uses this interpreter."""
    program, variables = context.get("py_executable"), context.get("env_vars") or {}
    known = ("env_vars", "py_executable", *(("command_prefix",) if working_dir_of(context) else ()))
    other = [key for key, value in context.items() if value and key not in known]
    return (
        program in (None, sys.executable)
        and not other
        and not any("$" in v for v in variables.values())
    )


def working_dir_of(context: dict[str, Any]) -> str:
    """Where a job with a working directory runs: Ray changes to it by a command."""
    match context.get("command_prefix"):
        case ["cd", str(folder), "&&"] if Path(folder).is_dir():
            return folder
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
