"""Laptop: checks of a Vertex AI job before anything is uploaded.

Each rule checks a request without network access and yields lines `key: what is wrong (got …); remedy`.
All rules run, so that the user sees every problem at once. The last one reads the request into the client
library's own types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from launcher.places.remote import key_of, shared_problems, training_group
from launcher.places.vertex import google_cloud
from launcher.places.vertex.custom_job import PREBUILT, VertexRequest
from stoker.errors import nearest
from stoker.events import prices
from stoker.figures import count_of
from stoker.hosts import requirements

MOST_POOLS = 4
RESERVED_VARIABLES = ("AIP_", "CLOUD_ML_", "CLUSTER_SPEC", "TF_CONFIG", "RAY_AUTH_", "RAY_ADDRESS", "STOKER_")
DISK_TYPES = ("pd-ssd", "pd-standard", "hyperdisk-balanced")

_FORMS = (
    (
        "service_account",
        r"[a-z0-9.-]+@[a-z0-9.-]+\.gserviceaccount\.com",
        "<name>@<project>.iam.gserviceaccount.com",
    ),
    ("network", r"projects/\d+/global/networks/[a-z0-9-]+", "projects/<number>/global/networks/<name>"),
    ("persistent_resource", r"[a-z][a-z0-9-]{0,62}", "the id alone: letters, digits and hyphens"),
    (
        "tensorboard",
        r"projects/[^/]+/locations/[^/]+/tensorboards/\d+",
        "projects/<p>/locations/<region>/tensorboards/<id>",
    ),
    (
        "kms_key",
        r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+",
        "projects/<p>/locations/<region>/keyRings/<ring>/cryptoKeys/<name>",
    ),
)


def problems(request: VertexRequest) -> list[str]:
    """Every problem of a request, including what the client library's types reject."""
    found = [line for rule in RULES for line in rule(request)]
    if not any(line.startswith("--on vertex") for line in found):
        named = {line.partition(": ")[0] for line in found}
        found += [line for line in _types(request) if line.partition(": ")[0] not in named]
    return list(dict.fromkeys(found))


def warnings(request: VertexRequest) -> list[str]:
    """Notes for the dry run on valid but questionable settings."""
    settings = request.settings
    notes = []
    first, trains = request.groups[0].name, request.job.resolved.config.cluster.gpu_group
    if first != trains:
        notes.append(
            f"the first pool, {first}, does not train: Vertex AI ends the job with that host, which exits"
            " with the head's code"
        )
    if settings.service_account is None:
        notes.append(
            "no service account: the hosts act as Vertex AI's own, which reads and writes every bucket of the"
            " project; set vertex.service_account to limit that"
        )
    if not settings.network:
        notes.append("no VPC: hosts can reach the internet; set vertex.network to control that")
    if settings.spot:
        notes.append("spot: hosts get 30 s notice, and the job restarts from its last checkpoint")
    if settings.spot and not settings.restart:
        notes.append("vertex.restart=false: a restarted host that trains waits for a head that does not come")
    if settings.kms_key is None:
        notes.append("no KMS key: disks and bucket use Google's keys; set vertex.kms_key to change that")
    return notes


def _pools(request: VertexRequest) -> Iterator[str]:
    settings, pools = request.settings, request.groups
    if not pools:
        yield "vertex.gpu.machine_type: no hosts requested; name a machine type, for example g2-standard-8"
        return
    if settings.pools and (settings.gpu.machine_type or settings.cpu.machine_type):
        yield "vertex.pools: given together with vertex.gpu or cpu; keep one of the two forms"
    for pool in pools:
        if pool.count < 1:
            yield f"{pool.key}.replicas: at least 1 (got {pool.count}); to have none, remove the pool"
        if wrong := _wrong_type(pool.type):
            yield f"{pool.key}.machine_type: {wrong} (got {pool.type!r}); for example g2-standard-8"
    most = MOST_POOLS if pools[0].count <= 1 else MOST_POOLS - 1
    if len(pools) > most:
        why = "" if most == MOST_POOLS else "; the first host of the first pool is a pool of its own"
        yield f"vertex.pools: at most {most} pools (got {len(pools)}){why}; merge pools of one type"
    for name in dict.fromkeys(pool.name for pool in pools):
        kinds = {(pool.type, pool.gpu_name, pool.gpus) for pool in pools if pool.name == name}
        if len(kinds) > 1:
            yield f"vertex.pools: pools of the group {name!r} differ in machine or GPUs; give them own names"


def _wrong_type(machine_type: str) -> str:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", machine_type):
        return "no Google Cloud machine type"
    if machine_type.startswith(("ct", "cloud-tpu")):
        return "TPUs have no CUDA"
    return "Arm hosts are not supported" if machine_type.startswith("a4x-") else ""


def _accelerators(request: VertexRequest) -> Iterator[str]:
    settings = request.settings
    for pool in request.groups:
        built_in, there = prices.built_in_accelerator(pool.type), prices.built_in_gpus(pool.type)
        if pool.asked is not None and pool.asked < 0:
            yield f"{pool.key}.count: at least 0 (got {pool.asked})"
        elif built_in and pool.accelerator not in (None, built_in):
            yield (
                f"{pool.key}.accelerator: {pool.type} has {built_in} built in (got"
                f" {pool.accelerator!r}); remove the key or choose another machine type"
            )
        elif built_in and pool.asked not in (None, there) and pool.type in prices.GOOGLE_MACHINES:
            yield (
                f"{pool.key}.count: {pool.type} has {count_of(there, 'GPU')} (got {pool.asked});"
                " remove the key or choose another machine type"
            )
        elif pool.accelerator and not built_in and not pool.type.startswith(prices.ATTACHES):
            yield (
                f"{pool.key}.accelerator: GPUs can be attached to N1 machines only (got {pool.type});"
                " use n1-standard-8, or g2-standard-8 with GPUs built in"
            )
        elif pool.asked and not pool.accelerator and not built_in:
            yield f"{pool.key}.count: which GPUs? set {pool.key}.accelerator, for example NVIDIA_TESLA_T4"
    trains = next((pool for pool in request.groups if pool.key == "vertex.gpu"), None)
    if trains and not trains.gpus and not _wrong_type(trains.type):
        yield (
            f"vertex.gpu.machine_type: {settings.gpu.machine_type} has no GPU; set vertex.gpu.accelerator, or"
            " to train on CPUs, set it as vertex.cpu.machine_type and remove gpu"
        )
    if settings.gpu.machine_type and any(p.gpus for p in request.groups if p.key == "vertex.cpu"):
        kind = settings.cpu.machine_type
        yield f"vertex.cpu.machine_type: {kind} has GPUs that would idle; use a c2 or n2 type"


def _shared(request: VertexRequest) -> Iterator[str]:
    """What the rules of all services say."""
    settings, trains = request.settings, training_group(request.job.resolved.config, request.groups)
    types = ("a machine type", [*prices.GOOGLE_MACHINES, *(pool.type for pool in request.groups)])
    shown = {"vertex.environment": settings.environment, "vertex.labels": settings.labels}
    yield from shared_problems(
        request, "vertex", trains, "vertex.cpu.replicas", types, ("Secret Manager", shown)
    )


def _limits(request: VertexRequest) -> Iterator[str]:
    settings = request.settings
    if settings.max_runtime_s < 1:
        yield f"vertex.max_runtime_s: at least 1 (got {settings.max_runtime_s})"
    if not 100 <= settings.boot_disk_gb <= 64_000:
        yield f"vertex.boot_disk_gb: from 100 to 64000 (got {settings.boot_disk_gb})"
    if settings.boot_disk_type not in DISK_TYPES:
        known = nearest(settings.boot_disk_type, DISK_TYPES, f"one of {', '.join(DISK_TYPES)}")
        yield f"vertex.boot_disk_type: no such disk type (got {settings.boot_disk_type!r}){known}"
    if settings.spot and settings.persistent_resource:
        yield "vertex.spot: a persistent resource decides itself what its machines are; remove one of the two"


def _places(request: VertexRequest) -> Iterator[str]:
    settings = request.settings
    if not request.project:
        yield (
            "vertex.project: not set, and the credentials name none; set it, or run"
            " `gcloud auth application-default login`"
        )
    elif not re.fullmatch(r"[a-z][a-z0-9:.-]{4,61}[a-z0-9]|\d+", request.project):
        remedy = "`gcloud projects list` shows yours"
        yield f"vertex.project: not a project id (got {request.project!r}); {remedy}"
    if not re.fullmatch(r"[a-z]+-[a-z]+\d+", settings.region):
        yield f"vertex.region: not a region (got {settings.region!r}); for example us-central1"
    if settings.gcs_uri is None:
        yield "vertex.gcs_uri: not set; name a bucket of the job's region: gs://bucket/prefix"
    elif not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[^*?#\[\]'\s]*)?", settings.gcs_uri):
        yield f"vertex.gcs_uri: must be gs://bucket/prefix (got {settings.gcs_uri!r})"
    for name, form, shown in _FORMS:
        value = getattr(settings, name)
        if value is not None and not re.fullmatch(form, value):
            yield f"vertex.{name}: must be {shown} (got {value!r})"
        elif value and "/locations/" in value and f"/locations/{settings.region}/" not in value:
            yield f"vertex.{name}: must be in the job's region, {settings.region} (got {value!r})"
    if settings.tensorboard and not settings.service_account:
        yield "vertex.tensorboard: requires vertex.service_account, which may write to it"


def _labels(request: VertexRequest) -> Iterator[str]:
    if len(request.settings.labels) > 63:
        yield f"vertex.labels: at most 63, and Stoker's own (got {len(request.settings.labels)})"
    for name, value in request.settings.labels.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name):
            yield f"vertex.labels.{name}: lower-case letters, digits, _ and -, a letter first, at most 63"
        elif not re.fullmatch(r"[a-z0-9_-]{0,63}", value):
            yield f"vertex.labels.{name}: lower-case letters, digits, _ and -, at most 63 (got {value!r})"


def _environment(request: VertexRequest) -> Iterator[str]:
    for name in request.settings.environment:
        if name.startswith(RESERVED_VARIABLES):
            yield f"vertex.environment.{name}: set by Stoker or Vertex AI; remove it"
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"vertex.environment.{name}: names have letters, digits and _ only"


def _parameters(request: VertexRequest) -> Iterator[str]:
    for name, value in request.job.resolved.config.params.items():
        if name in request.data_at or not isinstance(value, str):
            continue
        if value.startswith(("/", "./", "../", "~")) and not value.startswith("/gcs/"):
            yield (
                f"params.{name}: not found on this machine (got {value!r}); use an existing path, a gs:// URI"
                " or /gcs/<bucket>/…"
            )


def _image(request: VertexRequest) -> Iterator[str]:
    image, package = request.settings.image, request.settings.entry == "package"
    if not image:
        yield (
            "vertex.image: not set; name an image with Python 3.11 to 3.13 and PyTorch 2.6 or newer, from"
            " Artifact Registry or Docker Hub (docs/vertex.md)"
        )
        return
    if not re.fullmatch(r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", image):
        yield f"vertex.image: not the name of an image (got {image!r}); <registry>/<name>:<tag>"
    if ".dkr.ecr." in image:
        yield f"vertex.image: Vertex AI cannot read ECR (got {image!r}); push it to Artifact Registry"
    if package and PREBUILT not in image:
        yield (
            f"vertex.image: entry=package needs a prebuilt container, <region>{PREBUILT}… (got {image!r});"
            " use entry=container for other images"
        )
    if PREBUILT in image and re.search(r"(-cpu|-xla)\.", image) and any(p.gpus for p in request.groups):
        yield "vertex.image: a CPU image, but the job has GPUs; all pools share one image, so use the GPU one"
    python = re.search(r"py(\d)(\d{1,2})(?!\d)", image)
    torch = re.search(r"pytorch(?:-\w+)?[.:](\d+)[.-](\d+)", image)
    if why := requirements.unfit(python, torch):
        yield f"vertex.image: {why}"


def _types(request: VertexRequest) -> Iterator[str]:
    for path, message in google_cloud.rejected(request.body):
        yield f"{key_of(path, request.keys) or path}: {message}"


RULES: tuple[Callable[[VertexRequest], Iterator[str]], ...] = (
    _pools,
    _accelerators,
    _shared,
    _limits,
    _places,
    _labels,
    _environment,
    _parameters,
    _image,
)
