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
from stoker.config.redaction import REDACTED, is_secret, redact
from stoker.entry import main as bootstrap
from stoker.errors import UsageError
from stoker.storage.checkpoint_store import open_store
from stoker.train import resume as resuming
from stoker_launcher import commands
from stoker_launcher.job import open_job
from stoker_launcher.rehearsal.host import SPEC_VARIABLE
from stoker_launcher.rehearsal.running import keep_ray_logs
from stoker_launcher.rehearsal.world import World
from stoker_launcher.run_directory import continuation
from tests.clouds import WORDS
from tests.command_line import type_command

SECRET = 's3cr3t-V4lue/+"quoted"'


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", set())


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("hf_token", "x", True),
        ("HF_TOKEN", "x", True),
        ("api_key", "x", True),
        ("apiKey", "x", True),
        ("aws_secret_access_key", "x", True),
        ("db.password", "x", True),
        ("password2", "x", True),
        ("password", 123456, True),
        ("credentials", "x", True),
        ("max_tokens", 128, False),
        ("num_tokens_per_record", 128, False),
        ("class_token", True, False),
        ("pad_token", "<pad>", False),
        ("api_tokens", "12345678", True),
        ("hf_tokens", "12345678", True),
        ("class_api_token", "x", True),
        ("MAX_TOKENS", "12345678", False),
        ("tokenizer", "bert", False),
        ("key", "image", False),
        ("token", None, False),
        ("path", "runs/secret.txt", False),
        ("anything", "AKIAIOSFODNN7EXAMPLE", True),
        ("openai_key", "x", True),
        ("wandb_key", "x", True),
        ("Authorization", "x", True),
        ("a", "sk-proj-Ab1_cd-Ef2ghIjKlMnOpQr", True),
        ("a", "sk-ant-api03-Ab1_cd-Ef2ghIjKl", True),
        ("a", "glpat-Ab1_cd-Ef2ghIjKlMnOp", True),
        ("a", "xoxb-1234567890-abcdef", True),
        ("a", f"AIza{'Sy_-1' * 7}", True),
        ("a", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjMifQ.c2ln-_", True),
        ("a", "Name=x;AccountKey=QUJDREVGR0hJSktMTU5PUA==;Suffix=y", True),
        ("a", f"hf_{'aB3dE6' * 5}", True),
        ("a", "disk-proj-cache-of-large-images-2", False),
        ("a", "sk-learn-baseline-of-2026-with-trees", False),
        ("a", "hf_text_classification_of_long_documents", False),
        ("sort_key", "x", False),
    ],
)
def test_a_key_tells_what_is_secret(name: str, value: Any, secret: bool) -> None:
    assert is_secret(name, value) is secret


def test_nested_values_and_addresses_are_redacted_and_nothing_else() -> None:
    tree = {
        "data": "s3://bucket/a?b=c",
        "store": {
            "url": "https://me:pw1@host/x?token=t0k&part=1",
            "secrets": {"a": ["x", "y"], "n": 3},
        },
        "signed": "https://host/x?X-Amz-Signature=abc&X-Amz-Date=2026",
        "credentials": {"args": ["--user", "me"]},
        "lr": 0.1,
    }
    assert redact(tree) == {
        "data": "s3://bucket/a?b=c",
        "store": {
            "url": f"https://{REDACTED}@host/x?token={REDACTED}&part=1",
            "secrets": {"a": [REDACTED, REDACTED], "n": 3},
        },
        "signed": f"https://host/x?X-Amz-Signature={REDACTED}&X-Amz-Date=2026",
        "credentials": {"args": [REDACTED, REDACTED]},
        "lr": 0.1,
    }


def test_a_word_of_a_command_line_may_name_its_value_and_a_password_may_have_an_at_sign() -> None:
    words = [
        "trainer.api_key=S3cr3t!",
        "++hub.token=S3cr3t!",
        "lr=0.1",
        "--api-key",
        "a=S3cr3t!",
        "--tag",
        "a=b",
    ]
    words += ["model.max_tokens=100000", "--max-tokens", "128"]
    hidden = [
        f"trainer.api_key={REDACTED}",
        f"++hub.token={REDACTED}",
        "lr=0.1",
        "--api-key",
        REDACTED,
    ]
    assert redact(words, "args") == [*hidden, *words[5:]]
    whole = ["https://h/x?part=1", "db=postgresql://me:p@ssw0rd9@host/db?a=b@c"]
    assert redact(whole, "args") == [
        "https://h/x?part=1",
        f"db=postgresql://{REDACTED}@host/db?a=b@c",
    ]
    redaction.learn({"args": [*words, *whole]})
    scrubbed = redaction.scrub("S3cr3t! p@ssw0rd9 lr=0.1")
    assert scrubbed == f"{REDACTED} {REDACTED} lr=0.1"


@pytest.mark.parametrize(
    "word",
    [
        *(
            "model.token_dim=768",
            "data.token_count=1000000",
            "data.max_tokens=1e6",
            "max_tokens=4_096",
        ),
        *(
            "model.token_dropout=0.1",
            "model.use_token_type=true",
            "model.token=null",
            "data/tokens=5000/a",
        ),
        *(
            "tokenizer.special_tokens=[cls,sep]",
            "data.tokens=[1,2]",
            "model.token_pooling=average-of-all",
        ),
        *(
            "tokenizer={pad_token:<pad>,name:large-vocabulary}",
            "--token-dim=768",
            "db/secret=production-2",
        ),
        "https://h:8080?notify-me",
        *(
            "model.max_token=512",
            "n_token=5",
            "loss.weight_per_token=0.5",
            "cost_per_token=1e-6",
            "x={max_token:5}",
        ),
        *(
            "model.image_token=<image_placeholder>",
            "--start-token=<|startoftranscript|>",
            "stop_token='</s>'",
        ),
        *(
            "model.patch_token=mean",
            "model.token=first",
            "pool.token=cls",
            "model.tokens=[p16,p32]",
        ),
        *('{"image_token": "<image>"}', '{"a":"http://h:80","b":"me@x"}'),
        *(
            "train.tokens=10B",
            "--max-token=512",
            "data.tokens=/data/tokens.bin",
            "train_tokens=web_100BT.bin",
        ),
        *(
            "model.extra_tokens=[<ctx_0001>,<ctx_0002>]",
            "api_key=${oc.env:KEY}",
            "--hub-token=$HF_TOKEN",
        ),
        f"data.classes=[{'aerosol can, ' * 40}type2]",
    ],
)
def test_an_honest_word_of_a_command_line_stays(word: str, tmp_path: Path) -> None:
    resolved = load({"script": "train.py", "args": [word]})
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(resolved.config))
    assert load(again).config.args == [word]
    redaction.learn({"args": [word]})
    assert redaction.scrub("trained 1000000 samples, average-of-all 4_096") == (
        "trained 1000000 samples, average-of-all 4_096"
    )


def test_a_secret_in_a_mapping_of_a_command_line_or_before_further_hosts_is_redacted() -> None:
    words = ["trainer.logger={api_key:abc123456,on:{db_password: 'x y9'}}", "a=[{token:S3cr3t9}]"]
    words += ["x.auth_token=12345678", "api_tokens=[S3cr3t1,S3cr3t2]"]
    words += ['[{"token": "abc\\"def12345"}]', " {api_key:abc{def12345}", "--hf-tokens", "12345678"]
    words += [
        "--github-tokens=12345678",
        "hub.token=1234",
        "api_token=abcdef",
        "api_tokens=12345678",
        "db.credentials=[me,hunter]",
        "--password=1e8",
    ]
    assert redact(words, "args") == [
        f"trainer.logger={{api_key:{REDACTED},on:{{db_password: {REDACTED}}}}}",
        f"a=[{{token:{REDACTED}}}]",
        f"x.auth_token={REDACTED}",
        *(f"api_tokens={REDACTED}", f'[{{"token": {REDACTED}}}]', f" {{api_key:{REDACTED}}}"),
        *(
            "--hf-tokens",
            REDACTED,
            f"--github-tokens={REDACTED}",
            f"hub.token={REDACTED}",
            f"api_token={REDACTED}",
        ),
        *(f"{name}={REDACTED}" for name in ("api_tokens", "db.credentials", "--password")),
    ]
    addresses = ["amqp://u:S3cretpw9@h?notify=me@x.org", "registry://u:pw@h:5000,mirror@other"]
    addresses += ["db://u:p#Ss,w0rd8@h/x", "db://u:pa'ss99word@h/x", 'db://u:pa"ss99word@h/x']
    assert redact(addresses) == [
        f"amqp://{REDACTED}@h?notify=me@x.org",
        f"registry://{REDACTED}@h:5000,mirror@other",
        *[f"db://{REDACTED}@h/x"] * 3,
    ]
    redaction.learn(addresses)
    assert (
        redaction.scrub("S3cretpw9 p#Ss,w0rd8 pa'ss99word") == f"{REDACTED} {REDACTED} {REDACTED}"
    )


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
    resolved = load(job_file(tmp_path, data="x", nested={"hf_token": SECRET, "depth": 3}))
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
            commands.show(path, [text], Path("tests/recipes"))
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
    text = f"aws/s3cret+Key42 http://ann:pr0xy%2Dpass@proxy:3128 pr0xy-pass 128000 {__file__} token {Path.cwd()}"
    assert redaction.scrub(text) == (
        f"{REDACTED} http://{REDACTED}@proxy:3128 {REDACTED} 128000 {__file__} token {Path.cwd()}"
    )


def test_the_command_that_continues_a_run_repeats_no_secret(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    words = [
        "stoker",
        "job.yaml",
        f"params.hf_token={SECRET}",
        "train.lr=0.1",
        "--",
        "--token",
        SECRET,
    ]
    line = continuation(tmp_path, load(None, ["name=a"]).config, words)
    assert SECRET[:12] not in line and "train.lr=0.1" in line
    assert line.count(REDACTED) == 2


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
