"""mkdocs hooks: reference pages from the source, and links out of docs/ as text."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.structure.files import File, Files

import stoker.data
from stoker.config.loading import schema_rows, type_name
from stoker.config.schema import Config
from stoker.events.summary import Summary
from stoker_launcher.command_line import app

ROOT = Path(__file__).resolve().parents[1]
ERRORS = {"UsageError": "exit code 2", "DataError": "exit code 1", "ClusterError": "exit code 1"}
API = {
    "In your own script": ("stoker.DataLoader", "stoker.log", "stoker.checkpoint_dir"),
    "In a notebook": ("stoker_launcher.notebook.run", "stoker_launcher.notebook.RunResult"),
    "Recipes": ("stoker.recipe.Recipe",),
    "Data and transforms": tuple(
        f"stoker.{room}.{name}"
        for room, names in stoker.data._EXPORTS.items()
        for name in names.split()
    ),
}
OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./|docs/iam|iam/|ray/)[^)]*)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are written from the source."""
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    pages = {
        "index.md": readme,
        "changelog.md": (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "]("),
        "reference/configuration.md": configuration(),
        "reference/commands.md": commands(),
        "reference/api.md": api(),
        "reference/summary.md": summary(),
        "reference/errors.md": errors(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show links to files that are not part of the site as text."""
    return OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2].removeprefix('../')}`)", markdown)


def api() -> str:
    """The public names by subject; mkdocstrings fills in their docstrings."""
    lines = ["# Python API", ""]
    for subject, names in API.items():
        lines += [f"## {subject}", "", *(f"::: {name}\n" for name in names)]
    return "\n".join(lines)


def configuration() -> str:
    """Every key of job.yaml by section."""
    lines = [
        "# Configuration",
        "",
        "Every key of `job.yaml`; on the command line, write `key=value`.",
        "",
    ]
    section = None
    rows = [
        (key.partition(".")[0] if "." in key else "", key, kind, info)
        for key, kind, info in schema_rows(Config)
    ]
    for head, key, kind, info in sorted(rows, key=lambda row: bool(row[0])):
        if head != section:
            section = head
            lines += [
                "",
                f"## {head or 'The job'}",
                "",
                "| Key | Type | Default | Meaning |",
                "|---|---|---|---|",
            ]
        default = info.get_default(call_default_factory=True)
        lines.append(f"| `{key}` | {cell(kind)} | `{default!r}` | {cell(info.description or '')} |")
    return "\n".join(lines)


def commands() -> str:
    """Usage, arguments and options of every command, as `--help` shows them."""
    group: Any = typer.main.get_command(app)
    lines = ["# Commands", "", "`stoker`, or in a clone `python launcher/submit.py`.", ""]
    for name, command in sorted(group.commands.items()):
        context = click.Context(command, info_name=f"stoker {name}")
        lines += [
            f"## {name}",
            "",
            command.help or "",
            "",
            "```",
            command.get_usage(context),
            "```",
            "",
        ]
        lines += ["| | |", "|---|---|"]
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            shown = record or (parameter.human_readable_name, getattr(parameter, "help", "") or "")
            lines.append(f"| `{shown[0]}` | {cell(shown[1])} |")
        lines.append("")
        if command.epilog:
            lines += [command.epilog.replace("Example: ", "```\n", 1) + "\n```", ""]
    return "\n".join(lines)


def summary() -> str:
    """Every field of summary.json."""
    lines = [
        "# summary.json",
        "",
        "The result of a run for people and programs, rewritten every two seconds. Figures that were not",
        "measured are 0 or absent.",
        "",
        "| Field | Type | Meaning |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{key}` | {cell(kind)} | {cell(meaning)} |" for key, kind, meaning in fields_of(Summary)
    ]
    return "\n".join(lines)


def fields_of(model: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Key, type and docstring of each field, depth first."""
    docs = docstrings(model)
    for name, info in model.model_fields.items():
        key = prefix + (info.alias or name)
        inner = info.annotation
        if inspect.isclass(inner) and hasattr(inner, "model_fields"):
            yield from fields_of(inner, key + ".")
        else:
            yield key, type_name(inner), docs.get(name, "")


def docstrings(model: Any) -> dict[str, str]:
    """Field → the string below it in the source."""
    (body,) = [
        node.body
        for node in ast.parse(inspect.getsource(model)).body
        if isinstance(node, ast.ClassDef)
    ]
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            value = getattr(text.value, "value", None)
            if isinstance(field.target, ast.Name) and isinstance(value, str):
                found[field.target.id] = " ".join(value.split())
    return found


def errors() -> str:
    """Every error that ends a job or refuses a command, with its remedy where the message has one."""
    lines = [
        "# Errors",
        "",
        "Messages by the file that raises them; `…` stands for a value. Exit codes: 2 for wrong usage, 1 for",
        "a failed job, 130 and 143 for a requested stop.",
        "",
    ]
    for folder in ("source_dir/stoker", "launcher/stoker_launcher"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            rows = sorted({row for row in raised(ast.parse(path.read_text())) if row[0]})
            if rows:
                name = path.relative_to(ROOT / folder.split("/")[0]).with_suffix("").as_posix()
                lines += [f"## {name}", "", "| Message | Remedy | |", "|---|---|---|"]
                lines += [
                    f"| {cell(text)} | {cell(remedy)} | {ERRORS[kind]} |"
                    for text, remedy, kind in rows
                ]
                lines.append("")
    return "\n".join(lines)


def raised(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Message, remedy and class of each error that the source creates with a literal message."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        kind = (
            "UsageError"
            if ast.unparse(node.func) == "problems.append"
            else getattr(node.func, "id", "")
        )
        for argument in node.args if kind in ERRORS else ():
            cause, _, remedy = literal(argument).partition("; ")
            if len(cause.replace("…", "").strip(" :'\"()")) > 3:
                yield cause.strip(), remedy.strip(), kind


def literal(node: ast.expr) -> str:
    """The text of a string or f-string, with … for what is inserted."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.Starred):
        return literal(node.value)
    if isinstance(node, ast.GeneratorExp | ast.ListComp):
        return literal(node.elt)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return "…"


def cell(text: str) -> str:
    """Text for a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
