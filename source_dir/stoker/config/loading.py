"""Anywhere: loads a job's configuration from YAML, `key=value` and hyperparameters, without ray and torch.

    config = load(Path("job.yaml"), ["train.epochs=3"]).config

Reports all problems at once, each on one line with its origin, the value and a remedy.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stoker.config import redaction
from stoker.config.schema import SCRIPT_KEYS, Config, for_scripts
from stoker.config.values import (
    Dumper,
    Quoted,
    Text,
    expanded_paths,
    read_yaml,
    typed,
    without_cycles,
)
from stoker.errors import ErrorLine, UsageError, nearest, nearest_file

_MESSAGES = {"string_too_short": "must not be empty", "list_type": "must be a list, such as [a, b]"}
TYPED = ("command line", "stoker.run", "arguments")
"""Origins of values that were given as text."""
SECRETS_FILE = "job.secrets.json"
"""Next to a staged `job.yaml`: the values redacted there. Readable by the owner only."""


@dataclass(frozen=True)
class Resolved:
    """A configuration and the origin of each value (`train.lr` → `command line`)."""

    config: Config
    origins: dict[str, str] = field(default_factory=dict)
    file: Path | None = None


def load(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Iterable[str] = (),
    origin: str = "command line",
    passed: Mapping[str, str] | None = None,
    texts: Iterable[str] = (),
) -> Resolved:
    """Load and validate a file with overrides.

    Args:
        path: YAML file, its content as a mapping, or None for defaults only.
        overrides: `section.key=value`; the type of the key says what a value means.
        origin: recorded for the overridden keys.
        passed: values by key that a service passes: as overrides, or text that is quoted as JSON.
        texts: keys of `params` in the file that were given as text.
    """
    tree: dict[str, Any]
    if isinstance(path, Mapping):
        try:
            without_cycles(dict(path))
        except ValueError as error:
            raise UsageError(f"configuration: {error}") from None
        tree, path = _filled(copy.deepcopy(dict(path))), None
    else:
        tree = _read_yaml(Path(path)) if path else {}
    where = str(path) if path else "configuration"
    if path and (secrets := Path(path).with_name(SECRETS_FILE)).is_file():
        tree = _overlaid(tree, json.loads(secrets.read_text(encoding="utf-8")))
    values = dict(leaves(tree))
    origins = dict.fromkeys(values, where)
    for key in texts:
        if isinstance(values.get(key), str):
            _put(tree, key, Text(values[key]))
    given = [(key, unquoted(value)) for key, value in (passed or {}).items()]
    problems: list[str] = []

    def refuse(key: str, why: object, where: str) -> None:
        problems.append(ErrorLine(f"{where}: {why}", key))

    for text in overrides:
        key, sign, value = text.partition("=")
        if sign:
            given.append((key.strip(), Text(value)))
        else:
            refuse(key, f"{text!r} is not of the form key=value", origin)
    for key, value in given:
        try:
            # Only the recipe's class says what its parameters are: `typed_params`.
            meant = value if key.startswith("params.") else typed(value, Config, key.split("."))
            for part, below in _merged(key, meant):
                _put(tree, part, below)
                origins[part] = origin
        except ValueError as error:
            refuse(key, f"{key or repr('=' + value)}: {error}", origin)
    params: Any = tree.get("params")
    for name, value in params.items() if isinstance(params, dict) else ():
        try:
            if name == "data" or tree.get("script"):  # a recipe's class names the others
                params[name] = expanded_paths(value)
        except ValueError as error:
            key = f"params.{name}"
            refuse(key, f"{key}: {error}", origins.get(key, where))
    for key, value in leaves(tree):
        if redaction.REDACTED in str(value):
            why = f"is {redaction.REDACTED}, because runs do not store secrets; set it with {key}=…"
            refuse(key, f"{key}: {why}", where)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"])
            place = next(
                (o for k, o in origins.items() if k == key or key.startswith(k + ".")), where
            )
            refuse(key, error_line(detail, Config), place)
    if problems:
        raise UsageError(*problems)
    return Resolved(config, origins, Path(path) if path else None)


def unquoted(text: str) -> Text:
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(text), str):
            return Quoted(found)
    return Text(text)


def hyperparameter_overrides(arguments: Iterable[str]) -> list[str]:
    overrides: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            if "=" not in word:
                raise UsageError(
                    f"arguments: {word!r} is neither --section.key value nor key=value"
                )
            overrides.append(word)
            continue
        key, sign, value = word.lstrip("-").partition("=")
        if not sign:
            if not words:
                raise UsageError(f"arguments: {word} has no value")
            value = words.pop(0)
        overrides.append(f"{key.replace('__', '.')}={value}")
    return overrides


def error_line(detail: ErrorDetails, model: type[BaseModel], prefix: str = "") -> str:
    """Format a pydantic error as `section.key: what is wrong (got …); did you mean …`."""
    loc = [str(part) for part in detail["loc"]]
    key = ".".join(([prefix] if prefix else []) + loc)
    if detail["type"] == "extra_forbidden":
        fields = _section_at(model, loc[:-1]).model_fields
        known = [field.alias or name for name, field in fields.items()]
        elsewhere = [
            k for k, _, _ in schema_rows(model) if k.split(".")[-1] == loc[-1] and not prefix
        ]
        otherwise = (
            f"did you mean {elsewhere[0]}?" if elsewhere else f"known: {', '.join(known) or 'none'}"
        )
        return f"{key}: unknown key{nearest(loc[-1], known, otherwise)}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message[:1].lower() + message[1:]
    if detail["type"] == "string_pattern_mismatch":
        named = [part for part in loc if not part.isdigit()]
        info = _section_at(model, named[:-1]).model_fields.get(named[-1]) if named else None
        meaning = info.description if info else None
        message = f"has the wrong form: {meaning}" if meaning else message
    if detail["type"] == "missing":
        return f"{key}: is required and has no default"
    if detail["type"] in ("model_type", "model_attributes_type"):
        known = list(_section_at(model, loc).model_fields)
        message = f"has keys of its own: {', '.join([*known[:4], *(['…'] if known[4:] else [])])}"
    message = _MESSAGES.get(detail["type"], message)
    return f"{key}: {message} (got {redaction.redact(detail['input'], loc[-1] if loc else '')!r})"


def schema_rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        if _is_section(info.annotation):
            yield from schema_rows(info.annotation, key + ".")
        else:
            yield key, type_name(info.annotation), info


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def type_name(annotation: Any) -> str:
    """Format a type for users: `int or null`, `any | exact`, `list of text`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is not None and not args:  # bare typing.List
        return type_name(origin)
    if origin is Annotated:
        return type_name(args[0])
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, UnionType):
        return " or ".join(map(type_name, args))
    if origin in (list, tuple, set, frozenset):
        inner = type_name(args[0])
        return f"list of ({inner})" if " | " in inner else f"list of {inner}"
    if origin is dict:
        return f"map of {type_name(args[1])}"
    if _is_section(annotation):
        return "map"
    names = {NoneType: "null", Any: "anything", bool: "true | false"}
    return str(names.get(annotation) or getattr(annotation, "__name__", annotation))


def to_yaml(config: Config) -> str:
    """YAML that `load` reads back, but for redacted secrets; of a script, only the keys that apply to it."""
    # JSON has no dates, no infinity, and no keys but texts.
    tree = redaction.redact(config.model_dump(mode="json") | {"params": config.params})
    if tree.get("script") is not None:
        whole = {section: below for section, below in tree.items() if for_scripts(section, "")}
        parts = {s: {key: tree[s][key] for key in keys} for s, keys in SCRIPT_KEYS.items() if keys}
        tree = {section: (whole | parts)[section] for section in tree if section in whole | parts}
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def secrets_json(config: BaseModel) -> str | None:
    """What `redact` hides, by key and place in lists: the rest has types that JSON has not."""

    def hidden(whole: Any, shown: Any) -> Any:
        if isinstance(whole, list):
            whole, shown = dict(enumerate(whole)), dict(enumerate(shown))
        if not isinstance(whole, Mapping):
            return whole
        return {key: hidden(whole[key], shown[key]) for key in whole if whole[key] != shown[key]}

    tree = config.model_dump(mode="json")
    shown = redaction.redact(tree)
    return None if shown == tree else json.dumps(hidden(tree, shown))


def resolved_yaml(resolved: Resolved) -> str:
    origins = json.dumps(resolved.origins, indent=1, ensure_ascii=False).splitlines()[1:-1]
    header = ["# The resolved configuration of this run. Values not named below are defaults."]
    header += [f"# {line.strip().rstrip(',')}" for line in origins]
    return "\n".join(header) + "\n" + to_yaml(resolved.config)


def _overlaid(tree: Any, secrets: Any) -> Any:
    if isinstance(secrets, Mapping) and isinstance(tree, list):
        return [_overlaid(item, secrets.get(str(at), item)) for at, item in enumerate(tree)]
    if isinstance(secrets, Mapping) and isinstance(tree, Mapping):
        keys = {str(key): key for key in tree}
        found = {keys.get(key, key): below for key, below in secrets.items()}
        return {**tree, **{key: _overlaid(tree.get(key), below) for key, below in found.items()}}
    return secrets


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree as (`section.key`, value); an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _merged(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The keys to set: those of a mapping that is given for a section or for `params`."""
    section = key == "params" or any(
        name.startswith(f"{key}.") for name, _, _ in schema_rows(Config)
    )
    if isinstance(value, dict) and section:
        for name, below in value.items():
            yield from _merged(f"{key}.{name}", below)
    else:
        yield key, value


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    if not all([*sections, last]):
        raise ValueError("the key has an empty part")
    for section in sections:
        below = tree.setdefault(section, {})
        if below is None:
            below = tree[section] = {}
        if not isinstance(below, dict):
            raise ValueError(f"{section} is a value, not a section")
        tree = below
    tree[last] = value


def _section_at(model: type[BaseModel], loc: list[str]) -> type[BaseModel]:
    for part in loc:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        if not _is_section(annotation):
            return model
        model = annotation
    return model


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else Path()
        hint = nearest_file(path.name, folder, "*.y*ml")
        raise UsageError(f"{path}: no such configuration file{hint}") from None
    except IsADirectoryError:
        inside = sorted(path.glob("*.y*ml"))
        hint = (
            f"; did you mean {shlex.quote(str(inside[0]))}?"
            if inside
            else "; name a job's YAML file"
        )
        raise UsageError(f"{path}: is a folder{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text: {error}") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    try:
        tree = read_yaml(text)
    except ValueError as error:
        raise UsageError(f"{where}: not valid YAML: {error}") from None
    if tree is None:
        raise UsageError(f"{where}: the file is empty; `--show-config` lists every key")
    if not isinstance(tree, dict):
        raise UsageError(f"{where}: holds a {type(tree).__name__}, not keys and values")
    return _filled(tree)


def _filled(tree: dict[str, Any]) -> dict[str, Any]:
    """An empty section (`data:` with nothing below) uses the defaults."""
    return {
        key: ({} if value is None and key in _SECTIONS else value) for key, value in tree.items()
    }


_SECTIONS = {
    name
    for name, info in Config.model_fields.items()
    if name == "params" or _is_section(info.annotation)
}
