"""What a job installs never replaces the image's torch, and is the same on every host."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from pathlib import Path

import pytest

from stoker.config.loading import load
from stoker.hosts import requirements
from stoker_launcher.job import Job, Project
from tests.fakes.answers import Answer, answering

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


def wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": about + "".join(f"Requires-Dist: {line}\n" for line in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return path


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python of its own with pip and a torch, as a training image has it."""
    folder = tmp_path_factory.mktemp("image")
    subprocess.run(
        [sys.executable, "-m", "virtualenv", "-q", folder / "venv"], check=True, timeout=120
    )
    python = folder / "venv" / "bin" / "python"
    torch = wheel(folder / "torch", "torch", "2.15.0+cu130")
    install = [python, "-m", "pip", "install", "-q", "--no-index", torch]
    subprocess.run(install, check=True, timeout=120, env=plain_environment())
    return python


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    wheel(folder, "torch", "1.0")
    wheel(folder, "wantsold", "1.0", "torch<2")
    wheel(folder, "goes_along", "1.0", "torch>=2", "helper")
    wheel(folder, "helper", "1.0")
    wheel(folder, "helper", "2.0")
    return folder


def plain_environment(**more: str) -> dict[str, str]:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))
    }
    return kept | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | more


ENSURE = """
import sys
from pathlib import Path
from stoker.hosts.requirements import InstallError, ensure, versions
try:
    print(ensure(Path(sys.argv[1])), versions("goes_along"))
except InstallError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def ensured(
    folder: Path, image: Path, wanted: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A host of that image installs requirements, before anything else."""
    (folder / "requirements.txt").write_text(f"{wanted}\n")
    path = f"{ROOT / 'source_dir'}:{folder}"
    done = subprocess.run(
        [image, "-c", ENSURE, folder], timeout=120, capture_output=True, text=True,
        env=plain_environment(PYTHONPATH=path, PIP_RETRIES="0", **variables),
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


def installed(python: Path, name: str) -> str:
    script = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, env=plain_environment()
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("wanted", "exit_code", "says"),
    [
        ("torch==1.0", 2, "torch==1.0 would replace the image's torch 2.15.0+cu130"),
        ("torch @ file:///x.whl\ngoes_along", 2, "torch @ file:///x.whl would replace the image's"),
        ("wantsold", 1, "wantsold 1.0 depends on torch<2"),
    ],
)
def test_a_requirement_that_would_replace_the_images_torch_is_refused(
    tmp_path: Path, image: Path, index: Path, wanted: str, exit_code: int, says: str
) -> None:
    done = ensured(tmp_path, image, wanted, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index))
    assert (done.returncode, installed(image, "torch")) == (exit_code, "2.15.0+cu130")
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


def test_what_the_image_lacks_gets_the_staged_versions(
    tmp_path: Path, image: Path, index: Path
) -> None:
    (tmp_path / requirements.CONSTRAINTS).write_text("helper==1.0\n")
    done = ensured(tmp_path, image, "goes_along", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index))
    assert done.returncode == 0, done.stderr
    assert installed(image, "helper") == "1.0", "and not the newest"
    assert installed(image, "torch") == "2.15.0+cu130"
    assert "{'torch': '2.15.0', 'goes-along': '1.0', 'helper': '1.0'}" in done.stdout


def test_copies_that_ray_brings_for_itself_are_no_packages_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray puts them first on the path as it is imported, on the head earlier than elsewhere."""
    before = requirements.installed("psutil")
    copies = tmp_path / "ray" / "thirdparty_files"
    with zipfile.ZipFile(wheel(tmp_path, "psutil", "0.1")) as archive:
        archive.extractall(copies)
    monkeypatch.syspath_prepend(copies)
    assert metadata.version("psutil") == "0.1"
    assert requirements.installed("psutil") == before


@contextlib.contextmanager
def private_index(package: Path, login: str) -> Iterator[str]:
    """The host and port of a package index that answers those who log in."""
    wanted = "Basic " + base64.b64encode(login.encode()).decode()

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        if request.headers.get("Authorization") != wanted:
            return 401, "text/html", b""
        if request.path.endswith("/"):
            return 200, "text/html", f"<a href='/{package.name}'>{package.name}</a>".encode()
        return 200, "application/zip", package.read_bytes()

    with answering(answer) as address:
        yield address.removeprefix("http://")


ARN = "arn:aws:codeartifact:eu-west-1:123456789012:repository/d/mine"
BOTO3 = """
def client(service, region_name):
    assert (service, region_name) == ("codeartifact", "eu-west-1")
    return Client()

class Client:
    def get_authorization_token(self, domain, domainOwner):
        assert (domain, domainOwner) == ("d", "123456789012")
        return {"authorizationToken": "hidden-token"}

    def get_repository_endpoint(self, domain, domainOwner, repository, format):
        assert (domain, repository, format) == ("d", "mine", "pypi")
        return {"repositoryEndpoint": "http://PLACE/pypi/mine/"}
"""


@pytest.mark.parametrize("how", ["pip.conf", "pip.conf of a script", "CodeArtifact"])
def test_requirements_come_from_a_private_index_whose_password_no_message_shows(
    tmp_path: Path, image: Path, how: str
) -> None:
    name = "private_" + "".join(letter for letter in how.lower() if letter.isalpha())
    package = wheel(tmp_path / "wheel", name, "1.0")
    variables = {"CA_REPOSITORY_ARN": ARN} if how == "CodeArtifact" else {}
    with private_index(package, "aws:hidden-token") as place:
        (tmp_path / "boto3.py").write_text(BOTO3.replace("PLACE", place))
        folder = tmp_path / "script" if "script" in how else tmp_path
        folder.mkdir(exist_ok=True)
        if how != "CodeArtifact":
            address = f"http://aws:hidden-token@{place}/packages/"
            (folder / "pip.conf").write_text(f"[global]\nindex-url = {address}\n")
        done = ensured(tmp_path, image, name, **variables)
        assert (done.returncode, installed(image, name)) == (0, "1.0"), done.stderr
        assert "hidden-token" not in done.stdout + done.stderr
        failed = ensured(tmp_path, image, f"{name}==2.0", **variables)
        assert f"cannot install {name}==2.0" in failed.stderr
        assert "hidden-token" not in failed.stdout + failed.stderr


def test_with_wheels_no_index_is_asked(tmp_path: Path, image: Path) -> None:
    wheel(tmp_path / "wheels", "brought", "1.0")
    done = ensured(tmp_path, image, "brought", CA_REPOSITORY_ARN=ARN)
    assert (done.returncode, installed(image, "brought")) == (0, "1.0"), done.stderr


def test_the_staged_copy_names_the_versions_of_the_machine_that_submits(tmp_path: Path) -> None:
    source = tmp_path / "mine"
    source.mkdir()
    (source / "requirements.txt").write_text("scikit-learn\n")
    (source / requirements.CONSTRAINTS).write_text("Pillow==11.0\n")
    resolved = load(None)
    Job(resolved, Project(resolved.config, source)).stage(tmp_path / "code")
    lines = (tmp_path / "code" / requirements.CONSTRAINTS).read_text().splitlines()
    assert f"timm=={metadata.version('timm')}" in lines
    assert f"scikit-learn=={metadata.version('scikit-learn')}" in lines
    assert f"scipy=={metadata.version('scipy')}" in lines, "what that needs"
    assert f"ray=={metadata.version('ray')}" in lines, "for images without Ray"
    assert "Pillow==11.0" in lines, "the user's own word"
    assert not [line for line in lines if line.startswith(("torch==", "torchvision==", "pillow=="))]


def test_a_host_with_other_packages_than_the_heads_names_them() -> None:
    text = "timm\npydantic\n"
    here = requirements.versions(text)
    assert not {"pip", "pytest", "mypy"} & {*here}, "only some extras need them"
    assert here["timm"] == metadata.version("timm") and "safetensors" in here and "ray" in here
    says = requirements.difference(here, here | {"timm": "0.1", "extra": "3"})
    assert says == f"extra (absent) here, 3 on the head; timm {here['timm']} here, 0.1 on the head"
    assert requirements.difference(here, dict(here)) == ""
