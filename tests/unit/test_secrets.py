"""A secret in a configuration reaches the run, and nothing that is written or shown."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from stoker.checkpoints import format as checkpoint
from stoker.checkpoints.format import Content
from stoker.config import redaction
from stoker.config.loading import SECRETS_FILE, load, to_yaml
from stoker.config.redaction import REDACTED, redact
from stoker.entry import main as bootstrap
from stoker.errors import UsageError
from stoker.storage.checkpoint_store import open_store
from stoker.train import resume as resuming
from stoker_launcher import commands
from stoker_launcher.job import open_job
from stoker_launcher.rehearsal.host import SPEC_VARIABLE
from stoker_launcher.rehearsal.running import keep_ray_logs
from stoker_launcher.rehearsal.world import World
from tests.clouds import WORDS
from tests.command_line import type_command

SECRET = 's3cr3t-V4lue/+"quoted"'


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", set())


KEPT = {
    "max_tokens": 128,
    "weight_per_token": 0.5,
    "max_token": "512",
    "class_token": True,
    "pad_token": "<pad>",
    "token_type": "wordpiece",
    "password_policy": "strong",
    "credentials_path": "/x/y",
    "GOOGLE_APPLICATION_CREDENTIALS": "/etc/key.json",
    "tokenizer": "bert",
    "sort_key": "image",
    "token": None,
    "path": "runs/secret.txt",
    "form": "disk-proj-cache-of-large-images-2",
    "name": "hf_text_classification_of_long_documents",
    "address": "s3://bucket/a?b=c",
}
HIDDEN = {
    **dict.fromkeys(["hf_token", "HF_TOKEN", "db.password", "password2", "apiKey", "apikey"], "x"),
    **dict.fromkeys(["aws_secret_access_key", "AUTH-KEY", "Authorization", "credentials"], "x"),
    **dict.fromkeys(["AZURE_STORAGE_CONNECTION_STRING", "api_keys", "my_service_token"], "x"),
    "password": 123456,
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "github": f"ghp_{'aB3dE6' * 6}",
    "hub": f"hf_{'aB3dE6' * 5}",
    "openai": "sk-proj-Ab1_cd-Ef2ghIjKlMnOpQr",
    "gitlab": "glpat-Ab1_cd-Ef2ghIjKlMnOp",
}


def test_the_end_of_a_key_or_the_form_of_a_token_makes_a_secret() -> None:
    assert redact(KEPT) == KEPT
    assert redact(HIDDEN) == dict.fromkeys(HIDDEN, REDACTED)
    assert redact({"passwords": {"a": ["x", "y"], "n": 3}}) == {
        "passwords": {"a": [REDACTED, REDACTED], "n": 3}
    }


ADDRESSES = {
    "https://me:pw1@host/x?token=t0k&part=1": "https://#@host/x?token=#&part=1",
    "https://host/x?X-Amz-Signature=abc&X-Amz-Date=2026": (
        "https://host/x?X-Amz-Signature=#&X-Amz-Date=2026"
    ),
    "postgresql://me:p@ssw0rd9@host/db?a=b@c": "postgresql://#@host/db?a=b@c",
    "amqp://u:S3cretpw9@h?notify=me@x.org": "amqp://#@h?notify=me@x.org",
    "registry://u:pw@h:5000,mirror@other": "registry://#@h:5000,mirror@other",
    "db://u:p#Ss,w0rd8@h/x": "db://#@h/x",
    "db://u:pa'ss99word@h/x": "db://#@h/x",
    'db://u:pa"ss99word@h/x': "db://#@h/x",
    '{"a":"http://h:80","b":"me@x"}': '{"a":"http://h:80","b":"me@x"}',
}


def test_users_and_secret_arguments_of_urls_are_redacted() -> None:
    for address, shown in ADDRESSES.items():
        assert redact(address) == shown.replace("#", REDACTED)
    redaction.learn(list(ADDRESSES))
    for password in ("p@ssw0rd9", "S3cretpw9", "p#Ss,w0rd8", "pa'ss99word"):
        assert redaction.scrub(f"401: {password}") == f"401: {REDACTED}"


ARGUMENTS = {
    "--api-key a=S3cr3t!": "--api-key #",
    "--hub-token=12ab34cd": "--hub-token=#",
    "--password=1e8": "--password=#",
    "trainer.api_key=S3cr3t!": "trainer.api_key=#",
    "++hub.token=S3cr3t!": "++hub.token=#",
    "db=postgresql://me:p@ssw0rd9@host/db": "db=postgresql://#@host/db",
    **{
        words: words
        for words in (
            *("lr=0.1", "--tag a=b", "model.max_tokens=1e6", "--max-token 4_096", "x.token=null"),
            *("model.token_pooling=average-of-all", "model.token_dropout=0.1", "tokens=[cls,sep]"),
            *("--token --verbose", "data.tokens=/data/tokens.bin", "https://h:8080?notify-me"),
        )
    },
}


@pytest.mark.parametrize("words", ARGUMENTS)
def test_arguments_are_redacted_by_their_names(words: str, tmp_path: Path) -> None:
    config = load({"script": "train.py", "args": words.split()}).config
    assert " ".join(redact(config.args, "args")) == ARGUMENTS[words].replace("#", REDACTED)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    if REDACTED in to_yaml(config):
        with pytest.raises(UsageError):
            load(tmp_path / "config.yaml")
    else:
        assert load(tmp_path / "config.yaml").config.args == config.args


def test_a_list_with_a_secret_keeps_what_json_has_no_type_for(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "recipe: rows:Counting\nparams: {x: [{api_key: abcdef123, limit: .inf, d: 2024-01-01}]}\n"
    )
    resolved = load(path)
    staged = tmp_path / "staged"
    open_job(resolved).stage(staged)
    assert load(staged / "job.yaml").config.params == resolved.config.params


def test_text_loses_every_spelling_of_a_secret_and_no_ordinary_word() -> None:
    redaction.learn(
        {"token": SECRET, "password": "hunter2-and-more", "token_mode": "average", "pin": "x"}
    )
    text = f"{SECRET} {json.dumps(SECRET)} https://h/?token=s3cr3t-V4lue%2F%2B%22quoted%22 hunter2-and-more"
    scrubbed = redaction.scrub(f"{text} average x")
    assert scrubbed == f'{REDACTED} "{REDACTED}" https://h/?token={REDACTED} {REDACTED} average x'


def job_file(folder: Path, **params: Any) -> Path:
    path = folder / "job.yaml"
    sections = {
        "recipe": "rows:Counting",
        "params": params,
        "tracking": {"mlflow": {"tags": {"api_key": SECRET}}},
        "sagemaker": {"environment": {"HF_TOKEN": SECRET}},
    }
    path.write_text(yaml.safe_dump(sections))
    return path


def test_the_staged_job_gets_the_value_through_a_private_file_that_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = load(job_file(tmp_path, note="x", nested={"hf_token": SECRET, "depth": 3}))
    code = tmp_path / "code"
    open_job(resolved).stage(code)
    private = code / SECRETS_FILE
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    others = [path for path in code.rglob("*") if path.is_file() and path != private]
    assert not [path for path in others if SECRET.encode()[:12] in path.read_bytes()]
    monkeypatch.setenv("STOKER_PLACE", "local")
    read = bootstrap.read_configuration(["--config", str(code / "job.yaml")], {})
    assert read.config == resolved.config
    assert not private.exists()
    with pytest.raises(
        UsageError,
        match=r"params.nested.hf_token: is \(redacted\), because runs do not store secrets",
    ):
        bootstrap.read_configuration(["--config", str(code / "job.yaml")], {})


def test_what_the_command_line_shows_holds_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file(tmp_path, hf_token=SECRET, data="x")
    for text in (f"tracking.mlflow.timeout_s={SECRET}", f"params.password={SECRET}"):
        try:
            commands.show(path, [text], Path(__file__).parents[1] / "recipes")
        except UsageError as error:
            assert SECRET in str(error), "what stands under an ordinary key is shown"
    with pytest.raises(UsageError) as caught:
        load(path, [f"sagemaker.environment.TOKEN=[{SECRET}]", "train.epochs=x"])
    assert SECRET not in str(caught.value)
    assert SECRET not in capsys.readouterr().out


PLACES = {
    "local": [],
    "ray": ["--address", "http://head:8265", "--offline", "--install", "output_dir=/shared"],
    "rehearsal": [],
    "sagemaker": ["--offline", *WORDS["sagemaker"]],
}


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_no_dry_run_shows_a_secret(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "cluster-token-55")
    monkeypatch.setenv("HTTPS_PROXY", "http://ann:pr0xy%2Dpass@proxy:3128")
    source = tmp_path / "mine"
    source.mkdir()
    recipe = "from stoker.data import read_range\nfrom stoker.recipe import Recipe\n\n\nclass Mine(Recipe):\n"
    recipe += "    data: str\n    hf_token: str\n    def read(self, split): return read_range(99)\n"
    (source / "discreet.py").write_text(recipe + "    def model(self): ...\n")
    index = "--extra-index-url https://ci:index-tok-66@packages.example/wheels\n"
    (source / "requirements.txt").write_text(index)
    address = "s3://AKIAINTHEADDRESS0001:url-secret-19@bucket/x"
    sections = {
        "recipe": "discreet:Mine",
        "params": {"data": address, "hf_token": SECRET},
        "tracking": {"mlflow": {"tags": {"api_key": "tag-secret-81"}}},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(sections))
    words = [str(tmp_path / "job.yaml"), "--on", place, "--dry-run", "--source-dir", str(source)]
    code, errors, shown = type_command([*words, *PLACES[place]], capsys)
    assert code == 0, errors
    found = [SECRET, "cluster-token-55", "pr0xy", "index-tok-66", "url-secret-19", "tag-secret-81"]
    assert [secret for secret in found if secret in shown + "".join(errors)] == []
    if place == "ray":
        assert f"https://{REDACTED}@packages.example/wheels" in shown


def test_a_job_file_beside_its_recipe_is_not_staged_with_its_secrets(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from stoker.recipe import Recipe\n\n\nclass Mine(Recipe): ...\n"
    )
    for name, tag in (("secretive", SECRET), ("plain", "")):
        job = {"recipe": "mine:Mine", "tracking": {"mlflow": {"tags": {"api_key": tag}}}}
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(job if tag else {"recipe": "mine:Mine"}))
        open_job(load(file)).stage(tmp_path / "runs" / name)
        assert (tmp_path / "runs" / name / "mine.py").is_file()
        assert (tmp_path / "runs" / name / file.name).is_file() == (name == "plain")


def test_an_emulated_host_gets_its_variables_out_of_sight_and_its_kept_logs_lose_them(
    tmp_path: Path,
) -> None:
    spec = {"name": "algo-1", "environment": {"HF_TOKEN": SECRET}}
    about = {
        "faults": [],
        "linger_s": 1,
        "timeout_s": 1,
        "stop_grace_s": 1,
        "ray_port": 1,
        "head": "algo-1",
    }
    world = World({"hosts": [spec], **about})
    never = mock.patch("subprocess.Popen", side_effect=InterruptedError)
    with never as started, pytest.raises(InterruptedError):
        world._start(world._hosts[0])
    assert SECRET not in str(started.call_args.args)
    assert json.loads(started.call_args.kwargs["env"][SPEC_VARIABLE]) == spec

    logs = tmp_path / "tmp/sray-1/s/session_2026/logs"
    logs.mkdir(parents=True)
    (logs / "worker.err").write_bytes(b"\xff 401: " + SECRET.encode())
    redaction.learn({"environment": {"HF_TOKEN": SECRET}})
    keep_ray_logs(tmp_path, tmp_path / "kept")
    assert (tmp_path / "kept/worker.err").read_bytes() == b"\xff 401: " + REDACTED.encode()


def test_messages_that_quote_the_environment_lose_its_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {
        "AWS_SECRET_ACCESS_KEY": "aws/s3cret+Key42",
        "ALL_PROXY": "http://ann:pr0xy%2Dpass@proxy:3128",
        "MAX_TOKENS": "128000",
        "SECRETS_FILE": __file__,
        "RAY_AUTH_MODE": "token",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    redaction.learn_job({})
    kept = f"128000 {__file__} token {Path.cwd()}"
    text = f"aws/s3cret+Key42 http://ann:pr0xy%2Dpass@proxy:3128 pr0xy-pass {kept}"
    assert redaction.scrub(text) == (f"{REDACTED} http://{REDACTED}@proxy:3128 {REDACTED} {kept}")


def test_a_run_goes_on_with_another_secret_and_says_that_it_was_not_compared(
    tmp_path: Path,
) -> None:
    def config(**params: Any) -> Any:
        return load(job_file(tmp_path, **params)).config

    kept = redact(config(token="first-token-1", width=4).model_dump(mode="json"))
    about = {"step": 5, "monitored": None, "config": kept, "global_batch": 64, "workers": 1}
    store = open_store(str(tmp_path / "kept"))
    saved = checkpoint.save(store, Content({"w": torch.zeros(1)}, {}, about))
    said: list[str] = []
    resuming.check_same_run(config(token="other-token-2", width=4), 1, saved, said.append)
    assert said == ["params.token: secret, not compared with step-00000005"]
    with pytest.raises(UsageError, match=r"params.width: 8 here, 4 in"):
        resuming.check_same_run(config(token="other-token-2", width=8), 1, saved, said.append)
