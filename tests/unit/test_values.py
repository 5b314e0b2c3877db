"""The configuration: read, overridden and shown; what a value given as text means."""

from __future__ import annotations

import enum
import json
import math
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, PositiveInt

from stoker.config.loading import (
    hyperparameter_overrides,
    load,
    resolved_yaml,
    schema_rows,
    secrets_json,
)
from stoker.config.schema import Config
from stoker.config.values import Dumper
from stoker.entry import main as run
from stoker.errors import UsageError
from stoker.events.runs import flat_config
from stoker.hosts.services import sagemaker
from stoker.recipe import Recipe, load_recipe

HERE = Path(__file__).parent


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


class Crop(BaseModel):
    size: int = 1
    modes: list[str] = []
    name: str | None = None
    extra: Any = None


class Everything(Recipe):
    text: str = ""
    maybe: str | None = "x"
    number: int = 0
    some: Optional[int] = 1  # noqa: UP045 - what people write
    small: Annotated[PositiveInt, Field(lt=100)] = 1
    rate: float = 0.0
    flag: bool = False
    both: bool | str = False
    either: int | str = 0
    any: Any = None
    names: list[str] = Field([])
    sizes: list[int] = Field([])
    pair: tuple[int, str] = (0, "")
    bag: set[str] = Field(set())
    bare: list = Field([])  # type: ignore[type-arg]
    rates: dict[str, float] = Field({})
    ids: dict[int, str] = Field({})
    options: dict[str, Any] = Field({})
    pretrained: int | Literal[True] = 0
    lr: float | Literal["auto", True] = 0.1
    loose: int | Any = 0
    mode: Literal["none", "flip", 2] = "none"
    augment: Literal["none", "flip"] | None = None
    late: float | Literal["never"] = 0.0
    colour: Colour = Colour.RED
    one_or_more: str | list[str] = ""
    file: Path = Path()
    crop: Crop = Crop()
    shown: int = Field(0, alias="as")


def read(*words: str, file: Any = None) -> Everything:
    """The recipe that these overrides give, from the command line to the job's own process."""
    return recipe_of(load(file, [f"params.{word}" for word in words]).config)


def recipe_of(config: Config) -> Everything:
    recipe = load_recipe(f"{__name__}:Everything", config.params, HERE)
    assert isinstance(recipe, Everything)
    return recipe


MEANINGS: list[tuple[str, Any]] = [
    ("text=/data/my set #2", "/data/my set #2"),
    ("text=a: b", "a: b"),
    ("text=010", "010"),
    (f"text={'1' * 5000}", "1" * 5000),
    ("text=12:30:00", "12:30:00"),
    ("text=1e-3", "1e-3"),
    ("text=[a, b]", "[a, b]"),
    ("text={a: b}", "{a: b}"),
    ("text=null", "null"),
    ("text=none", "none"),
    ("text=yes", "yes"),
    ("text=2024-02-30", "2024-02-30"),
    ("text=", ""),
    ("text=&a *b !c %d @e `f", "&a *b !c %d @e `f"),
    ("text='quoted'", "'quoted'"),
    ("text=a=b", "a=b"),
    ("text=- x", "- x"),
    ("text=cost $5 of $HOME", "cost $5 of $HOME"),
    ("maybe=null", None),
    ("maybe=none", "none"),
    ("maybe=None", "None"),
    ("maybe=", ""),
    ("number=010", 10),
    ("number=-3", -3),
    ("some=null", None),
    ("some=none", None),
    ("some=7", 7),
    ("small=64", 64),
    ("rate=1e-3", 0.001),
    ("rate=5", 5.0),
    ("rate=.5", 0.5),
    ("flag=True", True),
    ("flag=off", False),
    ("flag=0", False),
    ("both=true", True),
    ("both=yes", "yes"),
    ("either=5", 5),
    ("either=05", "05"),
    ("either=1_000", "1_000"),
    ("any=5", "5"),
    ("any=no", "no"),
    ("any=12:30", "12:30"),
    ("names=[a, 010, 12:30:00, no, 'x, y']", ["a", "010", "12:30:00", "no", "x, y"]),
    ('names=["a", "null"]', ["a", "null"]),
    ("names=[]", []),
    ("sizes=[1, 02]", [1, 2]),
    ("pair=[1, 2]", (1, "2")),
    ("bag=[a, a, b]", {"a", "b"}),
    ("bare=[1, a, 010, 1.5, null, [true]]", [1, "a", "010", 1.5, None, [True]]),
    ("rates={a: 1, b: 1e-3}", {"a": 1.0, "b": 0.001}),
    ('rates={"a":1}', {"a": 1.0}),
    ("rates.a=1e-3", {"a": 0.001}),
    ("ids={1: 010}", {1: "010"}),
    ("options={a: 1, b: [no, 2]}", {"a": 1, "b": ["no", 2]}),
    ("options.deep.x=[1]", {"deep": {"x": [1]}}),
    ("options.flag=false", {"flag": False}),
    ("options.rate=0.1", {"rate": 0.1}),
    ("options.id=007", {"id": "007"}),
    ("options.name=no", {"name": "no"}),
    ("options.none=none", {"none": "none"}),
    ("crop.extra=5", Crop(extra="5")),
    ("crop={extra: 5}", Crop(extra="5")),
    ("mode=none", "none"),
    ("mode=2", 2),
    ("augment=none", "none"),
    ("augment=null", None),
    ("late=never", "never"),
    ("late=30", 30.0),
    ("colour=red", Colour.RED),
    ("colour=1", Colour.ONE),
    ("one_or_more=[a, b]", ["a", "b"]),
    ("one_or_more=[a", "[a"),
    ("file=a #1", Path("a #1")),
    ("crop.size=08", Crop(size=8)),
    ("crop={size: 3, modes: [010], name: null}", Crop(size=3, modes=["010"])),
    ("as=4", 4),
]


@pytest.mark.parametrize(("word", "meant"), MEANINGS, ids=[word[:40] for word, _ in MEANINGS])
def test_the_type_of_a_parameter_says_what_a_text_means(word: str, meant: Any) -> None:
    name = word.partition("=")[0].partition(".")[0].replace("as", "shown")
    found = getattr(read(word), name)
    assert (found, type(found)) == (meant, type(meant))


UNFIT = """\
number=1e3|number=5 #|number=none|rate=1_0 |flag=maybe|names=a|names=[a|mode=3|sizes=[1.5]|\
rates={a: b}|crop=3|rates={a: 1, a: 2}|sizes=[&a [*a]]"""


@pytest.mark.parametrize("word", UNFIT.split("|"))
def test_a_text_that_does_not_fit_is_refused_with_its_key_and_as_typed(word: str) -> None:
    name = word.partition("=")[0]
    with pytest.raises(UsageError, match=rf"^params\.{name}.*\(got .*\)$"):
        read(word)


TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20
).filter(
    lambda text: text[:1] not in ("~", "$")  # paths, if they exist
)
KEYS = st.text(st.sampled_from("abcxyz019-"), min_size=1, max_size=5)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": TEXTS,
    "any": TEXTS,
    "maybe": TEXTS.filter(lambda text: text != "null") | st.none(),
    "number": st.integers(),
    "some": st.integers() | st.none(),
    "rate": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "mode": st.sampled_from(["none", "flip", 2]),
    "augment": st.sampled_from(["none", "flip", None]),
    "late": st.floats(allow_nan=False, allow_infinity=False) | st.just("never"),
    "names": st.lists(TEXTS),
    "sizes": st.lists(st.integers()),
    "rates": st.dictionaries(KEYS, st.floats(allow_nan=False, allow_infinity=False)),
    "options": st.dictionaries(
        KEYS, TEXTS | st.integers() | st.booleans() | st.none() | st.lists(TEXTS)
    ),
    "ids": st.dictionaries(st.integers(), TEXTS),
}


@pytest.mark.long
@given(st.one_of(*[st.tuples(st.just(name), values) for name, values in VALUES.items()]))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_a_value_written_as_text_or_json_or_yaml_is_read_back(case: tuple[str, Any]) -> None:
    name, value = case
    forms = [value if isinstance(value, str) else json.dumps(value)]
    if isinstance(value, list | dict):
        flow = {"default_flow_style": True, "width": 10**6}
        forms.append(yaml.dump(value, Dumper=Dumper, **flow).strip())
    for written in forms:
        assert getattr(read(f"{name}={written}"), name) == value, written


def test_a_file_says_with_quotes_what_is_text(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "params: {maybe: 'null', either: '5', augment: none, mode: none, some: ~, any: 5}\n"
    )
    recipe = read(file=job)
    found = (recipe.maybe, recipe.either, recipe.augment, recipe.mode, recipe.some, recipe.any)
    assert found == ("null", "5", "none", "none", None, 5)


@pytest.mark.parametrize(
    "params", ["number: yes", "sizes: [3, on]", "rates: {a: true}", "crop: {size: yes}"]
)
def test_a_yes_of_yaml_is_no_number(tmp_path: Path, params: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"params: {{{params}}}\n")
    name = params.partition(":")[0]
    with pytest.raises(UsageError, match=rf"^params\.{name}: must be a number \(got .*True.*\)$"):
        read(file=job)
    meant = {"options": {"a": True}, "bare": [True], "number": 0}
    meant |= dict.fromkeys(("flag", "both", "any", "pretrained", "lr", "loose"), True)
    job.write_text(
        "params: {flag: yes, both: on, options: {a: yes}, bare: [true], any: yes, number: off,"
        " pretrained: true, lr: yes, loose: true}\n"
    )
    found = read(file=job).model_dump(include={*meant})
    assert found == meant and found["lr"] is True


def test_a_run_gets_the_parameters_as_its_file_has_them(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "params: {any: {0: .inf, a: -.inf, 2024-01-31: [2024-01-31, 2024-01-31 10:00:00]}, ids: {7: x},"
        " options: {3: {api_token: tok-12345}}, bag: !!set {b, c}, rate: .nan}\n"
    )
    first = load(job)
    staged = tmp_path / "staged.yaml"
    staged.write_text(resolved_yaml(first))
    (tmp_path / "job.secrets.json").write_text(str(secrets_json(first.config)))
    again = load(staged).config.params
    assert "tok-12345" not in staged.read_text()
    staged.rename(tmp_path / "config.yaml")
    assert flat_config(tmp_path)["params.any.2024-01-31"] == '["2024-01-31", "2024-01-31T10:00:00"]'
    assert math.isnan(again.pop("rate")) and math.isnan(first.config.params.pop("rate"))
    assert set(again.pop("bag")) == first.config.params.pop("bag") and again == first.config.params
    (tmp_path / "job.secrets.json").unlink()
    breaks = "a\x85b\u2028c \u2029\nd"
    objects = {
        "any": (Path("/a"), "/a"),
        "rate": (np.float64("inf"), math.inf),
        "colour": (Colour.RED, "red"),
        "pair": ((1, "b"), [1, "b"]),
        "raw": (enum.Enum("Raw", {"X": b"\xff"}).X, "_w=="),
        "bytes": (b"\xff", b"\xff"),
        "text": (breaks, breaks),
        breaks: (1, 1),
    }
    given, meant = ({name: both[i] for name, both in objects.items()} for i in (0, 1))
    staged.write_text(resolved_yaml(load({"params": given})), encoding="utf-8")
    assert load(staged).config.params == meant


AS_TEXT = {
    "train.lr": "1e-3",
    "train.scheduler": "cosine",
    "data.cache": "none",
    "params.text": "/data/my set #2",
    "params.maybe": "none",
    "params.some": "null",
    "params.number": "64",
    "params.flag": "false",
    "params.names": '["010", "b"]',
    "params.rates": '{"a": 1}',
    "tracking.mlflow.experiment": "010",
}
AS_PYTHON = {"params.some": "None", "params.flag": "False", "params.rates": "{'a': 1}"}
AS_PYTHON |= {"train.lr": "0.001", "params.names": "['010', 'b']"}
PLAIN = ("train.lr", "params.some", "params.flag", "params.names", "params.rates")
QUOTED = {key: f'"{value}"' for key, value in AS_TEXT.items() if key not in PLAIN}


def underscored(sent: dict[str, str]) -> dict[str, str]:
    return {key.replace(".", "__"): value for key, value in sent.items()}


SENT: dict[str, dict[str, str]] = {
    "the AWS CLI and boto3": underscored(AS_TEXT),
    "SageMaker's SDK 2": underscored(AS_TEXT | QUOTED | {"train.lr": "0.001"}),
    "a tuner with keys as in a file": AS_TEXT,
    "an estimator that prints Python": underscored(AS_TEXT | AS_PYTHON),
}


@pytest.mark.parametrize("producer", SENT)
@pytest.mark.parametrize("how", ["file", "arguments", "toolkit"])
def test_a_hyperparameter_arrives_as_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, producer: str, how: str
) -> None:
    sent = SENT[producer]
    (tmp_path / "input" / "config").mkdir(parents=True)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    (tmp_path / "job.yaml").write_text("train: {epochs: 3}\n")
    arguments = ["--config", str(tmp_path / "job.yaml")]
    if how == "arguments":  # as SDK 3 does for an entry script: text as it is, all else as JSON
        decoded = {key: _json(value) for key, value in sent.items()}
        for key, value in decoded.items():
            arguments += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    else:
        written = sent | {"sagemaker_program": "train.py", "_tuning_objective_metric": "loss"}
        (tmp_path / "input" / "config" / "hyperparameters.json").write_text(json.dumps(written))
    if how == "toolkit":  # sagemaker-training 5.1.4, mapping.to_cmd_args
        copied = [
            word for key in sorted(sent) for word in (f"--{key}", _as_toolkit(_json(sent[key])))
        ]
        monkeypatch.setenv("SM_USER_ARGS", json.dumps([*arguments, *copied]))
        arguments += copied
    (tmp_path / "job.origins.json").write_text('{"train.epochs": "digits.yaml"}')
    resolved = run.read_configuration(arguments, sagemaker.SERVICE.given())
    config, origins = resolved.config, resolved.origins
    assert (origins["train.epochs"], origins["train.lr"]) == ("digits.yaml", "arguments")
    assert (config.train.lr, config.train.scheduler, config.train.epochs) == (0.001, "cosine", 3)
    assert (config.data.cache, config.tracking.mlflow.experiment) == ("none", "010")
    recipe = recipe_of(config)
    assert (recipe.text, recipe.maybe, recipe.some) == ("/data/my set #2", "none", None)
    assert (recipe.number, recipe.flag, recipe.names) == (64, False, ["010", "b"])
    assert recipe.rates == {"a": 1.0}


def _as_toolkit(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={below}" for key, below in sorted(value.items()))
    return "" if value is None else str(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_text_that_reads_as_null_is_text_where_the_producer_quotes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "input" / "config").mkdir(parents=True)
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    sent = {"params__maybe": '"null"', "params__either": '"5"'}
    (tmp_path / "input" / "config" / "hyperparameters.json").write_text(json.dumps(sent))
    (tmp_path / "job.yaml").write_text("train: {epochs: 3}\n")
    arguments = ["--config", str(tmp_path / "job.yaml")]
    recipe = recipe_of(run.read_configuration(arguments, sagemaker.SERVICE.given()).config)
    assert (recipe.maybe, recipe.either) == ("null", "5")


PATHS = [
    "output_dir",
    "params.data",
    "script",
    "checkpoint.dir",
    "checkpoint.resume",
    "slurm.image",
]
EXPANDED = {
    "~/x y": "/home/me/x y",
    "$HOME/x": "/home/me/x",
    "${DISK}/a/$RUN": "/disk/a/7",
    "a$5": "a$5",
}


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize("typed", EXPANDED)
def test_home_and_variables_are_expanded_in_paths(
    monkeypatch: pytest.MonkeyPatch, key: str, typed: str
) -> None:
    for name, value in (("HOME", "/home/me"), ("DISK", "/disk"), ("RUN", "7")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_SUCH", raising=False)
    rest = ["slurm.container=apptainer"] if key == "slurm.image" else []
    section, _, name = key.rpartition(".")

    def in_file(value: str) -> dict[str, Any]:
        return {section: {name: value}} if section else {name: value}

    for resolved in (load(in_file(typed), rest), load(None, [*rest, f"{key}={typed}"])):
        config: Any = resolved.config.model_dump()
        assert (config[section] if section else config)[name] == EXPANDED[typed]
    for wrong in ("$NO_SUCH/x", "~no-such-user/x"):
        says = rf"{key}: .*{wrong[1:5]}.*write the whole path"
        with pytest.raises(UsageError, match=f"^command line: {says}"):
            load(None, [*rest, f"{key}={wrong}"])
        with pytest.raises(UsageError, match=says):
            load(in_file(wrong), rest)


def test_a_parameter_that_is_a_path_is_expanded_and_other_text_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "labels.csv").touch()
    recipe = read("file=~/not/there", "text=~/labels.csv", "names=[$PRICE, b]")
    assert (recipe.file, recipe.text) == (tmp_path / "not/there", "~/labels.csv")
    assert recipe.names == ["$PRICE", "b"]
    assert read(file={"params": {"file": "~/f"}}).file == tmp_path / "f"
    data = load(
        {"params": {"data": {"a": ["~/a", "s3://b/~c"], "n": 5}}}, ["params.data.b=$HOME/b"]
    ).config.params
    assert data == {"data": {"a": [f"{tmp_path}/a", "s3://b/~c"], "n": 5, "b": f"{tmp_path}/b"}}


def test_the_command_line_wins_over_the_file_and_origins_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: x\ntrain: {epochs: 3, lr: 1e-3}\n")
    resolved = load(path, ["train.epochs=5", "params.model=resnet18"])
    assert resolved.config.train.epochs == 5
    assert resolved.config.train.lr == 0.001
    assert resolved.config.params == {"model": "resnet18"}
    assert resolved.origins["train.epochs"] == "command line"
    assert resolved.origins["train.lr"] == str(path)


def test_a_text_joins_what_its_file_has_beside_it() -> None:
    file = {"params": {"any": {0: "1", date(2024, 1, 31): 2}, "options": {"s": "7", "d": date.min}}}
    recipe = read("any.x=5", "options.y=[5, no]", file=file)
    assert recipe.any == {0: "1", date(2024, 1, 31): 2, "x": "5"}
    assert recipe.options == {"s": "7", "d": date.min, "y": [5, "no"]}


def test_a_mapping_for_a_section_or_params_leaves_their_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "params: {a: 1, b: {x: 1, y: 2}}\nsagemaker: {prices: {a: 1}}\n"
        "train: {epochs: 7, lr: 0.5, early_stopping: {monitor: val/loss}}\n"
    )
    typed = [
        "train={epochs: 3, early_stopping: {patience: 9}}",
        "params={b: {x: 5}}",
        "sagemaker.prices={b: 2}",
    ]
    resolved = load(path, typed)
    train = resolved.config.train
    assert (train.epochs, train.lr) == (3, 0.5)
    assert (train.early_stopping.monitor, train.early_stopping.patience) == ("val/loss", 9)
    assert resolved.config.params == {"a": 1, "b": {"x": 5}}, "a parameter is replaced"
    assert resolved.config.sagemaker.prices == {"b": 2}
    for nothing in ("train={}", "params={}", "train={early_stopping: {}}"):
        assert load(path, [*typed, nothing]).config == resolved.config
    assert load(path, ["sagemaker.prices={}"]).config.sagemaker.prices == {}
    assert resolved.origins["train.epochs"] == "command line"
    assert resolved.origins["train.lr"] == str(path)


def test_numbers_of_a_file_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = "params: {a: 1e-3, b: -1.5E5, c: 0x10, d: '1e-3', e: '010', f: 12e4567, g: 0.5, h: 0, i: 00.5}\n"
    text = text.replace("}", ", j: 1234e56, k: &k 3}")
    path.write_text(text + "sagemaker: {hyperparameters: {train.lr: 1e-3, train.compile: on}}\n")
    first = load(path).config
    expected = [0.001, -150000.0, 16, "1e-3", "010", "12e4567", 0.5, 0, 0.5, "1234e56", 3]
    assert list(first.params.values()) == expected
    assert first.sagemaker.hyperparameters == {"train.lr": 0.001, "train.compile": True}
    path.write_text(resolved_yaml(load(path)))
    assert load(path).config == first


def test_arguments_are_texts_and_leave_other_uses_of_an_anchor_alone(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "script: a.py\ntrain: {epochs: &e 3}\nsagemaker: {max_wait_s: &n null}\nargs: [*e, *n, 007]\n"
    )
    config = load(path).config
    assert config.args == ["3", "null", "007"]
    assert (config.train.epochs, config.sagemaker.max_wait_s) == (3, None)


FORMS = [["--train__lr", "0.1"], ["--train.lr", "0.1"]]
FORMS += [["--train.lr=0.1"], ["train.lr=0.1"], ["--train__lr=0.1"]]


@pytest.mark.parametrize("words", FORMS)
def test_hyperparameters_come_in_many_forms(words: list[str]) -> None:
    assert load(None, hyperparameter_overrides(words)).config.train.lr == 0.1


def test_a_flag_without_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--train.lr has no value"):
        hyperparameter_overrides(["--train.lr"])


def test_anchors_and_merges_are_read_as_yaml_has_them(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("params: {a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}, c: *a}\n")
    params = load(tmp_path / "job.yaml").config.params
    assert params == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}


def test_a_mapping_that_holds_itself_is_refused() -> None:
    job: dict[str, Any] = {"params": {"a": []}}
    job["params"]["a"].append(job)
    with pytest.raises(UsageError, match="configuration: an alias refers to itself"):
        load(job)


def test_every_key_has_a_meaning_to_show() -> None:
    rows = list(schema_rows(Config))
    assert len(rows) > 30
    assert not [key for key, _, info in rows if not info.description]


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(None).config.train.epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize("typed", ["none", "None", "null", "'none'"])
def test_none_can_be_typed_where_it_is_a_choice(typed: str) -> None:
    config = load(None, [f"data.cache={typed}", f"train.scheduler={typed}"]).config
    assert (config.data.cache, config.train.scheduler) == ("none", "none")
