"""Laptop: what the places share whose runs go on without the launcher.

A service's folder adds only what differs: how its request is built and checked, its client and its words.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import secrets
import shlex
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from stoker import figures
from stoker.config.redaction import is_secret, redact
from stoker.config.schema import Config
from stoker.errors import UsageError
from stoker.events.prices import PriceList
from stoker.figures import dollars, table
from stoker_launcher.job import DataUpload, Job, Staged, files_below, pack_source, write_private
from stoker_launcher.places import EXIT_CODES, RemoteRun

LATE_S = 60.0
"""How far back to read logs again: a service delays the lines of each host differently."""
DRAIN_S = 20.0
"""How long to wait for the last lines after the job has ended."""
UNREACHABLE_S = 600.0
"""How long a service that has answered may not."""
Tell = Callable[[str], None]
Answer = TypeVar("Answer")
Value = TypeVar("Value")


@dataclass(frozen=True)
class HostGroup:
    name: str
    type: str
    count: int
    key: str
    """The configuration key that defines them: `sagemaker.gpu`, or `sagemaker.groups.1`."""
    vcpus: int | None = None
    gpus: int | None = 0
    """Per host; None: unknown here."""
    gpu_name: str = ""
    gbps: float | None = None

    def usd_per_hour(self, prices: PriceList) -> float | None:
        return prices.usd_per_hour(self.type, self.count, self.name)


def usd_per_hour(groups: Sequence[HostGroup], prices: PriceList) -> float | None:
    """Of the groups whose price is known; None if none is."""
    known = [price for group in groups if (price := group.usd_per_hour(prices)) is not None]
    return sum(known) if known else None


def without_price(groups: Sequence[HostGroup], prices: PriceList) -> str:
    """Names the types that a sum leaves out."""
    types = {group.type: None for group in groups if group.usd_per_hour(prices) is None}
    return f", without {', '.join(types)}, whose price is not known" if types else ""


def names_of(groups: Sequence[HostGroup]) -> list[str]:
    return list(dict.fromkeys(group.name for group in groups))


def training_group(config: Config, groups: Sequence[HostGroup]) -> str | None:
    """The group that trains: the only one, else the one configured, `gpu`, or the only one with GPUs."""
    names = names_of(groups)
    if len(names) == 1:
        return names[0]
    if named := config.cluster.gpu_group:
        return named if named in names else None
    if declared := [group.name for group in groups if group.key.endswith(".gpu")]:
        return declared[0]
    with_gpus = names_of([group for group in groups if group.gpus != 0])
    return with_gpus[0] if len(with_gpus) == 1 else None


def with_training_group(job: Job, name: str | None) -> Job:
    config = job.resolved.config
    cluster = config.cluster.model_copy(update={"gpu_group": name})
    return replace(
        job, resolved=replace(job.resolved, config=config.model_copy(update={"cluster": cluster}))
    )


def cost_table(groups: Sequence[HostGroup], limits: str, seconds: int, prices: PriceList) -> str:
    rows = [
        (
            group.name,
            str(group.count),
            group.type,
            "?" if group.vcpus is None else str(group.vcpus * group.count),
            f"{group.gpus * group.count}×{group.gpu_name}"
            if group.gpus
            else ("?" if group.gpus is None else "-"),
            "?" if group.gbps is None else f"{group.gbps:g}",
            dollars(group.usd_per_hour(prices), 3),
        )
        for group in groups
    ]
    total, hours = usd_per_hour(groups, prices), seconds / 3600
    rows.append(
        ("total", str(sum(group.count for group in groups)), "", "", "", "", dollars(total, 3))
    )
    head: tuple[str, ...] = ("group", "hosts", "type", "vCPUs", "GPUs", "Gb/s each", "$/h")
    if all(group.gbps is None for group in groups):
        head, *rows = ((*row[:5], row[6]) for row in (head, *rows))  # type: ignore[assignment]
    most = dollars(total * hours if total is not None else None)
    limit = f"at most ${most} in {hours:g} h ({limits}){without_price(groups, prices)}"
    return f"{table(head, rows)}\n{limit}; {prices.label}"


def stamp() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def job_name(name: str, end: str) -> str:
    """A valid name from `my_job.v2` and a time stamp: at most 63 characters, no `_` or `.`."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "job"
    return f"{words[: 62 - len(end)].rstrip('-')}-{end}"


class Keyed(NamedTuple):
    """A part of a request, and the configuration key that sets it."""

    value: Any
    key: str


def pruned(value: Any, keys: dict[str, str], path: str = "") -> Any:
    """A request without None values and empty structures; `keys` gets the key of each part's path."""
    if isinstance(value, Keyed):
        keys[path], value = value.key, value.value
    if isinstance(value, dict):
        kept = {
            name: pruned(item, keys, f"{path}.{name}".lstrip(".")) for name, item in value.items()
        }
        return {name: item for name, item in kept.items() if item is not None and item != {}}
    if isinstance(value, list):
        return [pruned(item, keys, f"{path}[{index}]") for index, item in enumerate(value)]
    return value


def nearest_of(path: str, found: Mapping[str, Value]) -> Value | None:
    """What is known of a part of a request, such as its key, else of the nearest part around it."""
    while path and path not in found:
        path = path.rpartition(".")[0]
    return found.get(path)


class UploadStore(Protocol):
    def exists(self, uri: str) -> bool: ...
    def send(self, file: Path, uri: str) -> None: ...
    def put(self, content: bytes, uri: str) -> None: ...


@dataclass(frozen=True)
class CloudRequest(ABC):
    """The request and its uploads. It is built whole, valid or not, and then checked."""

    section: ClassVar[str]
    """The service's section of the configuration."""
    job: Job
    """The job to stage, with the training group set in its configuration."""
    name: str
    region: str
    root_uri: str
    """`s3://bucket/prefix` or `gs://bucket/prefix` for all objects."""
    groups: tuple[HostGroup, ...]
    body: dict[str, Any]
    """The request in the JSON form of the service's API."""
    keys: dict[str, str]
    """Path in `body` → configuration key, for error messages."""
    data: tuple[DataUpload, ...]
    data_at: dict[str, str]
    """Recipe parameter → path of its data on the hosts."""
    staged: Staged | None = None

    @property
    def base_uri(self) -> str:
        return f"{self.root_uri}/{self.name}"

    @property
    @abstractmethod
    def code_uri(self) -> str:
        """URI of the archive with the staged code; ending with `/`, of its files."""

    @property
    def archive(self) -> str:
        """The name of the archive of the code; "" if its files are uploaded one by one."""
        return self.code_uri.rpartition("/")[2]

    @abstractmethod
    def title(self) -> str: ...

    @abstractmethod
    def costs(self) -> str: ...

    def for_command_line(self) -> dict[str, Any]:
        """The part of the request that the service's own command line reads from a file."""
        return self.body

    @abstractmethod
    def copy_command(self, source: Path, target: str) -> list[str]: ...

    @abstractmethod
    def create_command(self, file: Path) -> list[str]: ...

    def render(self) -> str:
        code = self.staged or Staged(self.job, self.data_at)
        uploads = [
            ("code", str(len(code.found) + 1), figures.size(code.bytes), self.code_uri),
            *(
                (one.parameter, str(one.files), figures.size(one.bytes), one.uri)
                for one in self.data
            ),
        ]
        parts = [
            self.title(),
            json.dumps(self.body, indent=2),
            self.costs(),
            table(("upload", "files", "size", "to"), uploads),
        ]
        return "\n\n".join(parts)

    def write(self, path: Path) -> str:
        """Write the request and the source to upload next to it; returns the commands that submit it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        code = path.with_name(f"{path.stem}-code")
        if code.exists():
            raise UsageError(f"--request: {code} exists; remove it or choose another name")
        write_private(path, (json.dumps(self.for_command_line(), indent=2) + "\n").encode())
        staged = self.staged or Staged(self.job, self.data_at)
        shutil.copytree(staged.with_token(), code)
        commands = [self.copy_command(item.source, item.uri) for item in self.data]
        if self.archive:
            archive = path.with_name(f"{path.stem}-{self.archive}")
            pack_source(code, archive)
            commands.append(self.copy_command(archive, self.code_uri))
        else:
            commands.append(self.copy_command(code, self.code_uri))
        commands.append(self.create_command(path))
        return "\n".join(shlex.join(command) for command in commands)

    def upload(self, store: UploadStore, tell: Tell | None) -> None:
        """Upload data and code; `tell` gets the progress, and without it standard error."""
        tell = tell or functools.partial(print, file=sys.stderr, flush=True)
        for item in self.data:
            # Written last, so that an interrupted upload is repeated.
            manifest, state = item.uri.rstrip("/") + ".json", "already there"
            if not store.exists(manifest):
                _send_all(store, item.source, item.uri)
                content = {"source": str(item.source), "files": item.files, "bytes": item.bytes}
                store.put(json.dumps(content).encode(), manifest)
                state = "uploaded"
            tell(f"{item.parameter}: {figures.size(item.bytes)} {state}")
        staged, uri = self.staged or Staged(self.job, self.data_at), self.code_uri
        folder = staged.with_token()
        if self.archive:
            archive = folder.with_name(self.archive)
            pack_source(folder, archive)
            store.send(archive, uri)
        else:
            _send_all(store, folder, uri)
        tell(f"code: {figures.size(staged.bytes)} uploaded to {uri}")


def _send_all(store: UploadStore, source: Path, uri: str) -> None:
    with ThreadPoolExecutor(max_workers=8) as pool:
        sent = pool.map(lambda file: store.send(file[1], f"{uri}{file[0]}"), files_below(source))
        list(sent)  # re-raises upload errors


class UnansweredError(UsageError):
    """The service did not answer, or failed itself: the call may have had its effect."""


def created_once(create: Callable[[], Answer], find: Callable[[], Answer], doubt: str) -> Answer:
    """Create a job whose name no other has; if the answer is lost, the job that exists now is this one.

    `doubt`: for the message if it is not found either.
    """
    try:
        return create()
    except UnansweredError as error:
        try:
            return find()
        except UsageError:
            raise UnansweredError(f"{error}; {doubt}") from None


class LostError(UsageError):
    """A service that had answered no longer does; the run may go on."""


@dataclass
class ServicePoller:
    """Asks a service about a run. Once it has answered, failures get `UNREACHABLE_S` to pass."""

    poll_s: float
    passing: type[UsageError] = UsageError
    """Errors that may pass by themselves."""
    answered: bool = False

    def __call__(self, ask: Callable[[], Answer]) -> Answer:
        """The answer; LostError if a service that had answered no longer does."""
        since = None
        while True:
            try:
                found = ask()
            except UsageError as error:
                if not self.answered:
                    raise
                if not isinstance(error, self.passing):
                    raise LostError(*error.problems) from None
                if since is None:
                    since = time.monotonic()
                    told = f"{error}; asking again for up to {UNREACHABLE_S:.0f} s"
                    print(told, file=sys.stderr, flush=True)
                elif time.monotonic() - since > UNREACHABLE_S:
                    raise LostError(f"{error}, for {UNREACHABLE_S:.0f} s now") from None
                time.sleep(self.poll_s)
            else:
                self.answered = True
                return found


show = functools.partial(print, flush=True)


def follow(run: RemoteRun, tell: Tell = show) -> int:
    """Show the logs until the job ends, then the outcome; its exit code, or 1 if that remains unknown."""
    tell(f"{run.id}: Ctrl-C stops watching, not the job")
    try:
        for line in run.logs(follow=True):
            tell(line)
        code = run.wait()
        tell(run.closing())
    except KeyboardInterrupt:
        tell(run.detached())
        return 130
    except LostError as error:
        again = shlex.join(["stoker", "logs", "-f", run.id])
        tell(f"{error}; the job may still be running, or have ended. Watch it again: {again}")
        return 1
    return code


class LogEntry(NamedTuple):
    id: str
    at_s: float
    host: str
    text: str


class WatchedRun(ABC):
    def __init__(
        self,
        run_id: str,
        label: str,
        poll_s: float,
        submitted: bool,
        passing: type[UsageError] = UsageError,
    ) -> None:
        """`submitted`: by this process, so that there is a run, whatever the service answers."""
        self.id, self.label, self.poll_s = run_id, label, poll_s
        self.patiently = ServicePoller(poll_s, passing, submitted)

    @abstractmethod
    def ask(self) -> Any:
        """The service's description of the job, asked once."""

    @abstractmethod
    def status_in(self, description: Any) -> str:
        """The status that a description tells, in the words of all places."""

    def describe(self) -> Any:
        return self.patiently(self.ask)

    def status(self) -> str:
        return self.status_in(self.describe())

    def wait(self) -> int:
        while (state := self.status()).startswith("running"):
            time.sleep(self.poll_s)
        return EXIT_CODES.get(state.partition(":")[0], 1)

    def detached(self) -> str:
        return detached(self.label, self.id)


class CloudRun(WatchedRun):
    """A run whose service keeps the lines of all hosts in one log."""

    @abstractmethod
    def entries(self, since_s: float) -> list[LogEntry]:
        """What hosts have written since a time."""

    def lines(self, entry: LogEntry, description: Any) -> Iterator[str]:
        yield from (f"[{entry.host}] {line}" for line in entry.text.splitlines() or [""])

    def progress(self, description: Any) -> str:
        return self.status_in(description)

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The lines of all hosts by time; with `follow` until the end, with changes of state."""
        seen: dict[str, float] = {}
        last_state, ended_at = "", None
        while True:
            description = self.describe()
            if follow and (state := self.progress(description)) != last_state:
                last_state = state
                yield f"[{self.label}] {state}"
            since = max(0.0, max(seen.values(), default=0.0) - LATE_S)
            seen = {name: at for name, at in seen.items() if at >= since}
            entries = self.patiently(functools.partial(self.entries, since))
            fresh = [entry for entry in entries if entry.id not in seen]
            for entry in sorted(fresh, key=lambda entry: entry.at_s):
                seen[entry.id] = entry.at_s
                yield from self.lines(entry, description)
            if not follow:
                return
            if not self.status_in(description).startswith("running"):
                ended_at = ended_at or time.monotonic()
                # The last lines arrive late: end at the first poll without new lines after a delay.
                if not fresh and time.monotonic() - ended_at >= min(DRAIN_S, 3 * self.poll_s):
                    return
            time.sleep(self.poll_s)


def detached(name: str, run_id: str) -> str:
    again = shlex.quote(run_id)
    return f"{name} keeps running. Watch it again: stoker logs -f {again}; stop it: stoker stop {again}"


def texts_in(value: object) -> Iterator[str]:
    """The strings in lists and mappings of any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts_in(one)


def shared_problems(
    request: CloudRequest,
    shown: Mapping[str, Mapping[str, object]],
    vault: str,
    remedy: str,
) -> Iterator[str]:
    """What every service would accept, and only its billed hosts would find.

    `shown`: by key, what everyone who may describe the job can read; secrets belong into the `vault` instead.
    `remedy`: how else to name data than by a file or folder of this machine.
    """
    config, section = request.job.resolved.config, request.section
    groups, names = request.groups, names_of(request.groups)
    listed, trains = ", ".join(names), training_group(config, groups)
    if groups and trains is None:
        if named := config.cluster.gpu_group:
            yield f"cluster.gpu_group: no such group (got {named!r}); the job has {listed}"
        else:
            yield f"cluster.gpu_group: cannot tell which group trains; name one of {listed}"
    gpus = sum((group.gpus or 0) * group.count for group in groups if group.name == trains)
    if config.train.workers and config.train.workers > gpus > 0:
        yield (
            f"train.workers: more than the {gpus} GPUs of group {trains} (got {config.train.workers});"
            " one train worker per GPU"
        )
    cpu_hosts = sum(group.count for group in groups if group.name != trains)
    if (least := config.cluster.min_cpu_hosts) is not None and least > cpu_hosts:
        yield f"cluster.min_cpu_hosts: the job has only {cpu_hosts} (got {least}); add some to {section}.cpu"
    for name in config.data.preprocess_on:
        if len(names) > 1 and name not in names:
            yield f"data.preprocess_on: no such group (got {name!r}); the job has {listed}"
    if (where := config.checkpoint.dir) and "://" not in where and not where.startswith("/"):
        yield (
            f"checkpoint.dir: {where} would be in the job's copy of your code, which is lost with its hosts;"
            " leave it out, as the service keeps the default folder"
        )
    if (config.tracking.mlflow.uri or "").startswith(("sqlite:", "file:")):
        yield (
            "tracking.mlflow.uri: this database would be lost with the hosts; name a server"
            f" (got {redact(config.tracking.mlflow.uri)!r})"
        )
    for name, value in config.params.items():
        texts = [] if isinstance(value, str) else [t for t in texts_in(value) if "://" not in t]
        if texts and request.job.is_path(name):
            yield f"params.{name}: lists of paths are not uploaded (got {texts[0]!r}); name one folder, {remedy}"
    for item in request.data:
        if not item.files:
            what = "holds no files" if item.source.is_dir() else "no such file or folder here"
            yield f"params.{item.parameter}: {what} (got {str(item.source)!r}); name another, {remedy}"
        for name in item.private:
            yield f"params.{item.parameter}: {name} looks private and would be uploaded; move it elsewhere"
    for key, values in shown.items():
        for name, value in values.items():
            if is_secret(name, str(value)) or redact(str(value)) != str(value):
                yield (
                    f"{key}.{name}: looks like a secret, which everyone who may describe the job can read; let"
                    f" the job read it from {vault} instead"
                )
