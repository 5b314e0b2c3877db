"""Laptop: whether this Python can run the command line. Standard library only; any Python can read it."""

import importlib.util
import sys

NEEDED = ("typer", "rich", "pydantic", "yaml", "psutil", "jinja2", "stoker")


def refuse_absent() -> None:
    """End with one line and exit code 2 if packages are missing, or Python is too old."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    why = "lacks " + ", ".join(absent)
    if sys.version_info < (3, 11):  # noqa: UP036 - a Python in which nothing is installed may be older
        why = "is Python {}.{}; Stoker needs 3.11 to 3.13".format(*sys.version_info)
    elif not absent:
        return
    where = "run `make setup` once, then `source .venv/bin/activate`"
    sys.stderr.write(f"error: {sys.executable} {why}; {where}\n")
    sys.exit(2)
