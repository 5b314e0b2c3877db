"""Laptop: `submit.py init [FOLDER]`: writes a small project that trains as it is, with a test."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import typer

from launcher.job import examples_root
from stoker.errors import UsageError, nearest

PROJECTS = Path(__file__).resolve().parent / "projects"
KINDS = {
    "images": "image classification: one folder of images per class",
    "segmentation": "images with masks in tar shards",
    "text": "text classification: rows of text and label",
    "tabular": "tabular data: numeric columns in Parquet",
    "script": "your own training script with stoker.DataLoader",
    "lightning": "a LightningModule in a script with stoker.DataLoader",
}
EXAMPLES = {
    kind: {"recipe.py": f"recipes/{kind}.py", "job.yaml": f"configs/{kind}.yaml"}
    for kind in ("segmentation", "text")
}
"""Files that a project copies from the examples in `source_dir`."""
IGNORED = ".data/\nruns/\n__pycache__/\n"


def init(folder: Path | None, kind: str | None) -> int:
    """Write the project and print how to run it; on a terminal, prompt for missing options."""
    if kind is None:
        if not sys.stdin.isatty():
            raise UsageError(f"--kind: choose one of: {', '.join(KINDS)}")
        for name, meaning in KINDS.items():
            print(f"  {name:<12} {meaning}")
        kind = str(typer.prompt("What do you train on?", default="images")).strip()
    if kind not in KINDS:
        raise UsageError(f"--kind {kind}: no such kind (known: {', '.join(KINDS)}){nearest(kind, KINDS)}")
    if folder is None:
        folder = Path(typer.prompt("Folder", default=f"my-{kind}") if sys.stdin.isatty() else ".")
    files = files_of(kind, folder)
    if there := [name for name in files if (folder / name).exists() or (folder / name).is_symlink()]:
        raise UsageError(*(f"{folder / name}: already exists; nothing was written" for name in there))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}") from None
    test = next(name for name in files if name.startswith("test_"))
    print(f"wrote {', '.join(files)} into {folder}")
    print(f"  train  stoker {shlex.quote(str(folder / 'job.yaml'))}")
    print(f"  test   pytest {shlex.quote(str(folder / test))}")
    return 0


def files_of(kind: str, folder: Path) -> dict[str, str]:
    sources = {path.name: path for path in sorted((PROJECTS / kind).iterdir()) if path.is_file()}
    sources |= {name: examples_root() / path for name, path in EXAMPLES.get(kind, {}).items()}
    texts = {name: path.read_text(encoding="utf-8") for name, path in sorted(sources.items())}
    job = re.sub(r"[^A-Za-z0-9_.-]", "-", folder.resolve().name).lstrip("_.-")[:63] or kind
    named = re.sub(r"^name: .*", f"name: {job}", texts["job.yaml"], flags=re.MULTILINE)
    texts["job.yaml"] = named.replace(f"recipes.{kind}:", "recipe:")
    return {**texts, ".gitignore": IGNORED}
