"""Laptop: the command line. `python launcher/submit.py CONFIG [key=value …] [--on PLACE]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

if __package__ in (None, ""):
    # Run as a file: the folder above holds the `launcher` package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import typer
from typer.core import TyperGroup

from stoker.config import UsageError

PLACES = ("local", "ray", "rehearsal", "sagemaker")


class DefaultsToRun(TyperGroup):
    """`submit.py job.yaml` means `submit.py run job.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        verbs = set(self.commands)
        if args and args[0] not in verbs and args[0] not in ("--help", "--version"):
            args = ["run", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(
    cls=DefaultsToRun,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Stoker keeps GPUs fed: one training job, on this machine or on a cluster.\n\n"
    "Example: python launcher/submit.py source_dir/configs/digits.yaml train.epochs=3",
)


@app.command(context_settings={"ignore_unknown_options": False})
def run(
    config: Annotated[Path | None, typer.Argument(help="the job's YAML file")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as in the file")] = None,
    on: Annotated[str, typer.Option(help="local, ray, rehearsal or sagemaker")] = "local",
    source_dir: Annotated[Path | None, typer.Option(help="your own folder with recipes")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be done")] = False,
    show_config: Annotated[bool, typer.Option("--show-config", help="list every key")] = False,
) -> None:
    """Run a job: submit.py CONFIG [key=value …] (the word run may be left out)."""
    from launcher import commands

    raise typer.Exit(commands.run(config, overrides or [], on, source_dir, dry_run, show_config))


def main() -> None:
    """Laptop: run the command line; wrong usage is one line per problem and exit code 2."""
    try:
        app()
    except UsageError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
