"""Laptop: the command line, as `stoker` and as `python launcher/submit.py`."""

from __future__ import annotations

import errno
import re
import sys
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

import stoker
from stoker.config.redaction import scrub
from stoker.config.values import expanded
from stoker.errors import INSTALL_TRAIN, OF_TRAIN, UsageError, nearest

EXAMPLE = "python launcher/submit.py source_dir/configs/digits.yaml"


EXPECTED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
ARGUMENTS = "stoker.arguments"
"""The key in `ctx.meta` of the script arguments after `--`."""


class DefaultsToRun(TyperGroup):
    """`submit.py job.yaml` means `submit.py run job.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(word.startswith("example:") for word in args):
            from stoker_launcher.job import example_file

            args = [example_file(word) if word.startswith("example:") else word for word in args]
        args = [*args[1:], "--help"] if args[:1] == ["help"] else args
        args = expanded_words(args)
        own = {option for param in self.get_params(ctx) for option in param.opts}
        if args and args[0].split("=")[0] not in (*self.commands, *own):
            if not ctx.resilient_parsing:
                refuse_mistyped(args[0], list(self.commands))
            args = ["run", *args]
        if "--" in args and args[0] != "check":
            at = args.index("--")
            ctx.meta[ARGUMENTS], args = args[at + 1 :], args[:at]
            if args[:1] != ["run"]:
                raise UsageError("--: only jobs and `check` accept script arguments after it")
        return list(super().parse_args(ctx, args))


def expanded_words(words: list[str]) -> list[str]:
    """Expand `~` and `$VARIABLES` in paths that the shell left alone, as in `--source-dir=~/x`."""
    end = words.index("--") if "--" in words else len(words)
    found = []
    for word in words[:end]:
        option, path = re.fullmatch(r"(--[\w-]+=)?(.*)", word, re.DOTALL).groups("")  # type: ignore[union-attr]
        try:
            found.append(option + expanded(path) if path[:1] in ("~", "$") else word)
        except ValueError as error:
            raise UsageError(f"{word}: {error}") from None
    return [*found, *words[end:]]


def refuse_mistyped(word: str, commands: list[str]) -> None:
    if not re.fullmatch(r"[a-z][a-z_-]{,40}", word) or Path(word).exists():
        return
    here = [str(path) for end in ("*.y*ml", "*.py") for path in Path().glob(end)]
    hint = nearest(word, [*commands, *here], f"commands: {', '.join(commands)}")
    raise UsageError(f"{word}: no such command or file{hint}")


app = typer.Typer(
    cls=DefaultsToRun,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=f"Example: {EXAMPLE} train.epochs=3 --on rehearsal   (`run` is the default command; `run --help`)",
)

Option = typer.Option


def show_version(asked: bool) -> None:
    if asked:
        print(f"stoker {stoker.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    version: Annotated[
        bool,
        Option(
            "--version", callback=show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Stoker keeps GPUs fed: one training job, on this machine or on a cluster."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def keys(incomplete: str) -> list[str]:
    from stoker.config.loading import schema_rows
    from stoker.config.schema import Config

    return [f"{key}=" for key, _, _ in schema_rows(Config) if key.startswith(incomplete)]


def places(incomplete: str) -> list[str]:
    from stoker_launcher.places import names

    return [name for name in names() if name.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None, typer.Argument(help="override keys, key=value", autocompletion=keys)
]
SourceDir = Annotated[Path | None, Option(help="your folder with recipes")]
GpuTypes = Annotated[list[str] | None, Option(help="GPU host type, ml.g5.xlarge; repeatable")]
CpuTypes = Annotated[list[str] | None, Option(help="CPU host type, ml.c5.xlarge; repeatable")]
GpuRates = Annotated[
    list[str] | None, Option(help="samples/s of one GPU that never waits: 400, A10G=400")
]
MostHosts = Annotated[int, Option(help="most CPU hosts to consider")]
CpuSpeed = Annotated[float, Option(help="speed of a vCPU relative to a core here")]
AsJson = Annotated[bool, Option("--json", help="print everything as JSON")]
Given = TypeVar("Given", bound=Any)


def given_to(options: type[Given], ctx: typer.Context) -> Given:
    """The typed options as a dataclass whose fields are named after them."""
    typed = {name: ctx.params[name] for name in options.__dataclass_fields__}
    given: Given = options(**{name: value for name, value in typed.items() if value is not None})
    return given


@app.command(epilog=f"Example: {EXAMPLE} train.epochs=3 --on rehearsal rehearsal.hosts=gpu=1,cpu=2")
def run(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="YAML file, or your script, such as train.py")
    ] = None,
    overrides: Overrides = None,
    on: Annotated[
        str, Option(help="local, ray, rehearsal, sagemaker …", autocompletion=places)
    ] = "local",
    source_dir: SourceDir = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="check and print the plan, run nothing")
    ] = False,
    show_config: Annotated[bool, Option("--show-config", help="list every key")] = False,
    address: Annotated[str | None, Option(help="ray: http://head:8265 or plug-in://…")] = None,
    driver: Annotated[
        bool, Option("--driver", help="start a Ray script once, on the head")
    ] = False,
    offline: Annotated[bool, Option("--offline", help="with --dry-run: no network access")] = False,
    request: Annotated[Path | None, Option(help="write what would be sent to a file")] = None,
    source: Annotated[
        Path | None, Option(help="sagemaker: write what an SDK's source_dir needs")
    ] = None,
    resume: Annotated[str | None, Option(help="auto, never, or a run or checkpoint")] = None,
    install: Annotated[bool, Option("--install", help="ray: pip install on the hosts")] = False,
    dashboard: Annotated[
        bool, Option("--dashboard", help="local, sagemaker: Ray dashboard on 127.0.0.1")
    ] = False,
) -> None:
    """Run a job from a YAML file or a script; its arguments follow --."""
    from stoker_launcher import commands
    from stoker_launcher.places import Options

    if show_config:
        raise typer.Exit(commands.show(config, overrides or [], source_dir))
    arguments = ctx.meta.get(ARGUMENTS)
    words = [*(overrides or []), *(["driver=true"] if driver else [])]
    raise typer.Exit(commands.run(config, words, given_to(Options, ctx), arguments))


RunName = Annotated[
    str, typer.Argument(help="a run directory, runs/latest, or an id: ray:…, sagemaker:…")
]


@app.command(epilog="Example: python launcher/submit.py status runs/latest")
def status(run: RunName = "runs/latest") -> None:
    """Show the status of a run."""
    from stoker_launcher.commands import last_progress, standing
    from stoker_launcher.places import attach

    found = attach(run)
    print(found.status())
    run_dir = getattr(found, "run_dir", None)
    for line in standing(run_dir) if run_dir else last_progress(found):
        print(f"  {line}")


@app.command(epilog="Example: python launcher/submit.py logs -f runs/latest")
def logs(
    run: RunName = "runs/latest",
    follow: Annotated[
        bool, Option("--follow", "-f", help="follow the log until the run ends")
    ] = False,
) -> None:
    """Show the log of a run; Ctrl-C leaves the run running."""
    from stoker_launcher.places import RemoteRun, attach, remote

    found = attach(run)
    if follow and isinstance(found, RemoteRun):
        raise typer.Exit(remote.follow(found))
    for line in found.logs(follow):
        print(line, flush=True)
    if follow:
        raise typer.Exit(found.wait())


@app.command(epilog="Example: python launcher/submit.py stop runs/latest")
def stop(run: RunName = "runs/latest") -> None:
    """Ask a run to write a checkpoint and stop."""
    from stoker_launcher.places import attach

    told = attach(run).stop()
    print(f"{run}: {told or 'stop requested; the run writes a checkpoint first'}")


@app.command(epilog="Example: python launcher/submit.py report runs/a runs/b -o shapes.html")
def report(
    runs: Annotated[list[Path] | None, typer.Argument(help="run directories")] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="the file to write")] = None,
) -> None:
    """Write an HTML report of a run, or of several side by side."""
    from stoker.events.report import REPORT, write_report
    from stoker_launcher.run_directory import is_lost

    runs = runs or [Path("runs/latest")]
    target = output or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    if target.is_dir():
        target = target / REPORT
    write_report(runs, target, is_lost)
    print(f"written: {target}")


@app.command(epilog="Example: python launcher/submit.py compare runs/*")
def compare(
    runs: Annotated[list[str] | None, typer.Argument(help="run directories; default: runs")] = None,
) -> None:
    """Compare runs: results, speed, cost and configuration differences."""
    from stoker_launcher.advise.compare import compare

    raise typer.Exit(compare(runs or ["runs"]))


@app.command(
    epilog=f"Example: {EXAMPLE.replace('submit.py ', 'submit.py size ')} --gpu-samples-per-s 4000"
)
def size(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="the job's YAML file")] = None,
    overrides: Overrides = None,
    gpu: GpuTypes = None,
    cpu: CpuTypes = None,
    from_run: Annotated[
        Path | None, Option("--from", help="use a run's figures, run nothing")
    ] = None,
    gpu_samples_per_s: GpuRates = None,
    max_cpu_hosts: MostHosts = 32,
    cpu_speed: CpuSpeed = 1.0,
    source_dir: SourceDir = None,
    as_json: AsJson = False,
) -> None:
    """Run a job for a minute and recommend hosts, with speed and cost."""
    from stoker_launcher.advise import sizing

    raise typer.Exit(sizing.size(config, overrides or [], given_to(sizing.SizeOptions, ctx)))


@app.command(epilog=f"Example: {EXAMPLE.replace('submit.py ', 'submit.py peek ')} --split val")
def peek(
    ctx: typer.Context,
    target: Annotated[
        str | None, typer.Argument(help="the job's YAML file, or a run directory")
    ] = None,
    overrides: Overrides = None,
    split: Annotated[str, Option(help="job: train or val")] = "train",
    n: Annotated[int, Option("--n", "-n", help="job: number of records to show")] = 16,
    step: Annotated[int | None, Option(help="run: the step whose batch to rebuild")] = None,
    rank: Annotated[int | None, Option(help="run: a single train worker; default: all")] = None,
    out: Annotated[
        Path | None, Option("--out", "-o", help="HTML file to write; default: peek.html")
    ] = None,
    source_dir: SourceDir = None,
) -> None:
    """Show a job's records after each stage, or one batch of a run."""
    from stoker_launcher.advise.peek.peek_job import PeekOptions, peek

    raise typer.Exit(peek(target, overrides or [], given_to(PeekOptions, ctx)))


@app.command(epilog="Example: python launcher/submit.py check train.py -- --lr 0.1")
def check(
    ctx: typer.Context,
    script: Annotated[Path | None, typer.Argument(help="your training script, unchanged")] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="the script's arguments, after --")
    ] = None,
    steps: Annotated[int | None, Option(help="steps to measure; default: until stable")] = None,
    timeout: Annotated[float, Option(help="limit in seconds, including start-up")] = 900.0,
    gpu: GpuTypes = None,
    cpu: CpuTypes = None,
    gpu_samples_per_s: GpuRates = None,
    max_cpu_hosts: MostHosts = 32,
    cpu_speed: CpuSpeed = 1.0,
    as_json: AsJson = False,
) -> None:
    """Measure how long your script waits for data, and suggest fixes."""
    from stoker_launcher.advise.check import command

    raise typer.Exit(command.check(script, given_to(command.CheckOptions, ctx)))


@app.command(epilog="Example: python launcher/submit.py doctor job.yaml")
def doctor(
    job: Annotated[
        Path | None, typer.Argument(help="a job's YAML file, to check its instance types")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check this machine and your AWS account, and suggest fixes."""
    from stoker_launcher.doctor import doctor

    raise typer.Exit(doctor(job, overrides or []))


@app.command(epilog="Example: python launcher/submit.py init my-images --kind images")
def init(
    folder: Annotated[Path, typer.Argument(help="folder to create; default: here")] = Path(),
    kind: Annotated[
        str, Option(help="images, segmentation, text, tabular, script, lightning or ray")
    ] = "images",
) -> None:
    """Write a small project that trains as it is: job, recipe and test."""
    from stoker_launcher.commands import init

    raise typer.Exit(init(folder, kind))


def main() -> None:
    """Run the command line; wrong usage prints one line per problem and exits with 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except UsageError as error:
        problems: tuple[str, ...] = error.problems
    except ModuleNotFoundError as error:
        if error.name not in OF_TRAIN:
            raise
        problems = (f"{error.name} is not installed: {INSTALL_TRAIN}",)
    except OSError as error:
        if error.errno not in EXPECTED:
            raise
        place = error.filename2 or error.filename or "a file"
        remedy = "free up space, shorten a name or choose another folder (output_dir=…, TMPDIR)"
        problems = (f"{place}: {error.strerror}; {remedy}",)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        more = f"; see {context.command_path} --help" if context else ""
        if hasattr(error, "option_name") and any(word.endswith(".py") for word in sys.argv[1:]):
            more += "; a script's own arguments go after --"
        problems = (error.format_message().rstrip(".") + more,)
    for problem in problems:
        print(f"error: {scrub(problem)}", file=sys.stderr)
    sys.exit(2)
