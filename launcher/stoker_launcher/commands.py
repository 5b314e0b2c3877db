"""Laptop: the actions behind the commands of `submit.py`."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic.fields import FieldInfo

from stoker.config.loading import load, schema_rows, type_name
from stoker.config.redaction import learn_job, redact, scrub
from stoker.config.schema import Config
from stoker.errors import UsageError, nearest
from stoker.figures import count_of
from stoker_launcher.places import (
    EVERYWHERE,
    Options,
    Place,
    RemoteRun,
    Resume,
    place_named,
)

if TYPE_CHECKING:
    from stoker_launcher.job import Job


def refuse_meaningless(options: Options, chosen: Place) -> None:
    meant = (*EVERYWHERE, *chosen.options)
    given = [name for name in Options.__dataclass_fields__ if getattr(options, name)]
    if problems := [
        f"--{name}: is not supported with --on {chosen.name}; see run --help"
        for name in given
        if name not in meant
    ]:
        raise UsageError(*problems)


def run(
    config: Path | None, overrides: list[str], options: Options, arguments: list[str] | None = None
) -> int:
    place = place_named(options.on)
    refuse_meaningless(options, place)
    if config is None:
        raise UsageError(
            "CONFIG: no configuration file or script given; try source_dir/configs/digits.yaml"
        )
    if "=" in str(config) and not config.exists():
        raise UsageError(
            f"{config}: name the configuration file or script before overrides: JOB.yaml {config}"
        )
    from stoker_launcher.job import as_overrides, open_job
    from stoker_launcher.places.local import LocalRequest
    from stoker_launcher.run_directory import continuation, resolve_resume

    config, own = as_overrides(config, arguments)
    given = [*own, *overrides, *(["cluster.dashboard=true"] if options.dashboard else [])]
    unread = (
        options.dry_run and options.resume is None
    )  # storage, which may take half a minute to fail
    resume = (
        Resume() if unread else resolve_resume(options.resume, place, load(config, given).config)
    )
    resolved = load(config, [*given, *resume.overrides()])
    learn_job(resolved.config.model_dump(mode="json"))
    job = open_job(resolved, options.source_dir)
    refuse_unsupported(job.resolved.config, place)
    if job.resolved.config.script is None and place.name != "local":
        check_recipe(job)
    if options.source:
        from stoker_launcher.places.sagemaker import write_source

        print(write_source(job, options.source))
        return 0
    request: Any = place.plan(job, options, resume)
    if options.request:
        print(request.write(options.request))
        return 0
    if options.dry_run:
        if isinstance(request, LocalRequest) and (code := request.check()):
            return int(code)
        print(scrub(request.render()))
        return 0
    submitted = place.submit(request)
    del request  # and the staged copy of the source, which may hold secrets
    if isinstance(submitted, RemoteRun):
        from stoker_launcher.places.remote import follow

        return follow(submitted)
    code, run_dir = submitted.wait(), getattr(submitted, "run_dir", None)
    if code not in (0, 2) and run_dir and (line := continuation(run_dir, job.resolved.config)):
        print(line)
    return code


def refuse_unsupported(config: Config, place: Place) -> None:
    if config.cluster.dashboard and "dashboard" not in place.options:
        raise UsageError(
            f"cluster.dashboard: only for local runs and --on sagemaker, not --on {place.name}"
        )
    if config.cluster.cpu_hosts.max and not place.scales:
        raise UsageError(
            f"cluster.cpu_hosts: with --on {place.name} hosts cannot be added during a run; leave it out and"
            " choose their number with `size`"
        )


def check_recipe(job: Job) -> None:
    """Refuse a wrong recipe or parameter before hosts cost money; the driver of a local run does it itself.

    A missing package only warns, as other hosts may have it.
    """
    from stoker.recipe import Recipe
    from stoker.train.stopping import check_monitors

    try:
        recipe = job.project.recipe
        if type(recipe).discover is Recipe.discover:
            # Otherwise its metrics may need parameters that are found in the data.
            check_monitors(job.resolved.config, recipe, has_val=True)
    except UsageError as error:
        if not isinstance(error.__cause__, ImportError) and "which is not installed" not in str(
            error
        ):
            raise
        paths = "of its parameters, only data is known to be a path"
        print(f"warning: {error} (skipping its other checks; {paths})", file=sys.stderr)


def standing(run_dir: Path) -> list[str]:
    from stoker.events.bottleneck import judged
    from stoker.events.summary import number, read_summary

    # A rehearsal's head holds the files until the rehearsal ends.
    inside = ("hosts/*/ml/output/data/summary.json", "hosts/gcs/*/*/run/summary.json")
    places = [
        run_dir / "summary.json",
        *(path for form in inside for path in sorted(run_dir.glob(form))),
    ]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return []
    try:
        summary = read_summary(path)
    except UsageError as error:
        return [f"no figures: {error}"]
    if (
        summary.script is not None
        and not summary.speed.steady_samples_per_s
        and path.parent == run_dir
    ):
        return []  # `status` has said what there is
    if not summary.steps:
        return [f"{count_of(len(summary.cluster.hosts), 'host')}; no step yet"]
    found, speed = judged(summary), summary.speed
    lines = [found.headline, *found.details]
    lines.append(
        f"{speed.steady_samples_per_s:.0f} samples/s, input wait {speed.input_wait_pct:.0f} %"
    )
    if (per := number((summary.cost or {}).get("usd_per_million_samples"))) is not None:
        lines.append(f"${per:.2f} per 1M samples at the steady rate (estimated)")
    if (path.parent / "report.html").is_file():
        lines.append(f"report: {path.parent / 'report.html'}")
    return lines


LOG_TIMEOUT_S = 20.0


def last_progress(run: Any, timeout_s: float = LOG_TIMEOUT_S) -> list[str]:
    """The last line with a throughput in a remote run's log, which may be long."""
    found: deque[str] = deque(maxlen=1)
    failed: list[BaseException] = []

    def read() -> None:
        try:
            found.extend(line for line in run.logs(False) if "samples/s" in line)
        except BaseException as error:
            failed.append(error)

    # The services' timeouts apply per response, and a log has any number of responses.
    reader = threading.Thread(target=read, name="log", daemon=True)
    reader.start()
    reader.join(timeout_s)
    if failed:
        raise failed[0]
    note = f"the log is longer than {timeout_s:.0f} s of reading; use `logs` for all of it"
    return [*found, *([note] if reader.is_alive() else [])]


def show(config: Path | None, overrides: list[str], source_dir: Path | None) -> int:
    from stoker_launcher.job import as_overrides, project_of

    file, own = as_overrides(config, None)
    resolved = load(file, [*own, *overrides]) if config else None
    rows: list[tuple[str, str, str, str]] = []
    values = resolved.config.model_dump() if resolved else {}
    for key, kind, info in schema_rows(Config):
        default = default_of(info)
        origins = resolved.origins.items() if resolved else ()
        # The keys of a mapping have origins of their own.
        if found := dict.fromkeys(
            origin for name, origin in origins if f"{name}.".startswith(f"{key}.")
        ):
            value: Any = values
            for part in key.split("."):
                value = value[part]
            default = f"{shown(redact(value, key))} ({', '.join(found)})"
        rows.append((key, kind, default, info.description or ""))
    if resolved and resolved.config.script is None:
        from stoker.recipe import typed_params

        recipe = project_of(resolved, source_dir)[1].kind
        params = typed_params(recipe, resolved.config.params)
        for name, info in recipe.model_fields.items():
            key = f"params.{info.alias or name}"
            default = "required" if info.is_required() else default_of(info)
            given = params.get(info.alias or name)
            if given is not None:
                default = f"{shown(redact(given, key))} ({resolved.origins.get(key, 'file')})"
            rows.append((key, type_name(info.annotation), default, info.description or ""))
    widths = [min(max(len(row[i]) for row in rows), limit) for i, limit in enumerate((34, 24, 40))]
    for key, kind, default, meaning in rows:
        print(
            f"{key:<{widths[0]}}  {kind:<{widths[1]}}  {default:<{widths[2]}}  {meaning}".rstrip()
        )
    return 0


def default_of(info: FieldInfo) -> str:
    if info.default_factory is not None and info.default_factory_takes_validated_data:
        return "depends on other keys"
    return shown(info.get_default(call_default_factory=True))


def shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


PROJECTS = Path(__file__).resolve().parent / "projects"
KINDS = ("images", "segmentation", "text", "tabular", "script", "lightning", "ray")
EXAMPLES = {
    kind: {"recipe.py": f"recipes/{kind}.py", "job.yaml": f"configs/{kind}.yaml"}
    for kind in ("segmentation", "text")
}
"""Files that a project copies from the examples in `source_dir`."""
IGNORED = ".data/\nruns/\n__pycache__/\n"


def init(folder: Path, kind: str) -> int:
    """Write a small project that trains as it is, with a test."""
    if kind not in KINDS:
        raise UsageError(
            f"--kind {kind}: no such kind (known: {', '.join(KINDS)}){nearest(kind, KINDS)}"
        )
    files = files_of(kind, folder)
    if there := [
        name for name in files if (folder / name).exists() or (folder / name).is_symlink()
    ]:
        raise UsageError(
            *(f"{folder / name}: already exists; nothing was written" for name in there)
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}") from None
    test = next(name for name in files if name.startswith("test_"))
    print(f"wrote {', '.join(files)} into {folder} (--kind {kind})")
    print(f"  train  stoker {shlex.quote(str(folder / 'job.yaml'))}")
    print(f"  test   pytest {shlex.quote(str(folder / test))}")
    return 0


def files_of(kind: str, folder: Path) -> dict[str, str]:
    from stoker_launcher.job import examples_root

    sources = {path.name: path for path in sorted((PROJECTS / kind).iterdir()) if path.is_file()}
    sources |= {name: examples_root() / path for name, path in EXAMPLES.get(kind, {}).items()}
    texts = {name: path.read_text(encoding="utf-8") for name, path in sorted(sources.items())}
    job = re.sub(r"[^A-Za-z0-9_.-]", "-", folder.resolve().name).lstrip("_.-")[:63] or kind
    named = re.sub(r"^name: .*", f"name: {job}", texts["job.yaml"], flags=re.MULTILINE)
    texts["job.yaml"] = named.replace(f"recipes.{kind}:", "recipe:")
    return {**texts, ".gitignore": IGNORED}
