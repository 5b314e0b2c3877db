"""Anywhere: what a value given as text means (its field's type decides), and what YAML and paths mean.

    typed(Text("010"), str)  →  "010"        typed(Text("[1, 2]"), list[int])  →  [1, 2]

A text is a number, a boolean, null, a list or a mapping only where the type has one and the whole text reads
as one. Imports neither ray nor torch.
"""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import enum
import inspect
import json
import os
import re
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

NULLS = {"", "null", "none", "~"}
BOOLEANS = {"true": True, "false": False}
SWITCHES = (
    BOOLEANS | dict.fromkeys(("yes", "on", "1"), True) | dict.fromkeys(("no", "off", "0"), False)
)
MOST_VALUES = 1_000_000
_INT, _FLOAT = re.compile(r"-?(0|[1-9]\d*)"), re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")
_ANYTHING: list[Any] = [NoneType, bool, int, float, list, dict, str]


class Text(str):
    """A value given as text whose field's type is not known yet, such as a recipe's parameter."""

    __slots__ = ()


class Quoted(Text):
    """One whose producer has quoted it: where its field may be text, it is."""

    __slots__ = ()


def typed(value: Any, kind: Any, path: Sequence[str] = ()) -> Any:
    """A value, in which each `Text` has become what the type `kind` says of its field, or of the field at the
    keys `path` in it."""
    kinds = list(members(kind))
    for part in path:
        kinds = _part(kinds, part)
    return _typed(value, kinds)


def _typed(value: Any, kinds: list[Any]) -> Any:
    if isinstance(value, Text):
        return _read(value, kinds)
    if isinstance(value, dict):
        return {
            _typed(key, _part(kinds, None)): _typed(below, _part(kinds, str(key)))
            for key, below in value.items()
        }
    if isinstance(value, list):
        return [_typed(item, _item(kinds, at)) for at, item in enumerate(value)]
    return value


def has_text(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Text) or any(map(has_text, parts))


def true_as_number(value: Any, kind: Any) -> bool:
    """Whether true, which Python takes for 1, stands where a number must; a section checks its own keys."""
    return _true_as_number(value, list(members(kind)))


def _true_as_number(value: Any, kinds: list[Any]) -> bool:
    if value is True:
        choices = [choice for kind in kinds for choice in _choices(kind)]
        means_true = any(kind in (bool, Any, object) for kind in kinds) or any(
            one is True for one in choices
        )
        return not means_true and (int in kinds or float in kinds)
    if any(hasattr(kind, "_says_something") for kind in kinds):
        return False
    if isinstance(value, dict):
        return any(_true_as_number(below, _part(kinds, str(key))) for key, below in value.items())
    return isinstance(value, list) and any(
        _true_as_number(item, _item(kinds, at)) for at, item in enumerate(value)
    )


def is_path(kind: Any) -> bool:
    """Whether a field's type has a `Path`, alone or in a list or mapping."""
    return any(
        (inspect.isclass(one) and issubclass(one, PurePath)) or any(map(is_path, get_args(one)))
        for one in members(kind)
    )


def expanded(path: str) -> str:
    """A path or URI with `~` and `$VARIABLES` replaced; a ValueError says which of them there is not."""
    found = os.path.expanduser(path)  # noqa: PTH111 - Path would shorten s3://
    unset = [name for name in map("".join, _VARIABLE.findall(found)) if not os.environ.get(name)]
    if unset:
        raise ValueError(f"${unset[0]} is not set; set it, or write the whole path")
    if found.startswith("~"):
        raise ValueError(
            f"{found.partition('/')[0]} is no user's home folder; write the whole path"
        )
    return _VARIABLE.sub(lambda match: os.environ[match[1] or match[2]], found)


def expanded_paths(value: Any) -> Any:
    """The value of a parameter that is a path, or holds paths, with each of them `expanded`."""
    if isinstance(value, list):
        return [expanded_paths(item) for item in value]
    if isinstance(value, dict):
        return {key: expanded_paths(below) for key, below in value.items()}
    if isinstance(value, Text) and value[:1] == "[":  # a list, once its type is known
        return value
    return type(value)(expanded(value)) if isinstance(value, str) else value


def read_yaml(text: str, loader: Any = None) -> Any:
    """Parse YAML; a ValueError says in one line why it cannot be."""
    try:
        return without_cycles(yaml.load(text, Loader=loader or UniqueKeys))  # noqa: S506 - derived from SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{place}{getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply, or an alias refers to itself") from None
    except ValueError:
        raise
    except Exception as error:  # PyYAML's, on values such as the 30th of February
        raise ValueError(f"a value cannot be read: {error}") from None


def without_cycles(tree: Any) -> Any:
    """A tree of mappings and lists as it is; a ValueError says that it has no end."""
    left = [tree]
    for _ in range(MOST_VALUES):
        if not left:
            return tree
        value = left.pop()
        left += (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
    raise ValueError(f"an alias refers to itself, or it holds more than {MOST_VALUES:,} values")


class _Unique(yaml.constructor.BaseConstructor):
    """Rejects duplicate keys, which PyYAML silently overwrites, and joins JSON's pairs of `\\u` escapes."""

    def construct_scalar(self, node: Any) -> Any:
        found = super().construct_scalar(node)
        return (
            found.encode("utf-16", "surrogatepass").decode("utf-16") if node.style == '"' else found
        )

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


class UniqueKeys(_Unique, yaml.SafeLoader):
    """YAML of a file; `args` are texts, so that 007 and 1e-3 arrive as typed."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if isinstance(node, yaml.MappingNode):
            node.value = [
                (key, _texts(below) if key.value == "args" else below) for key, below in node.value
            ]
        return node


def _texts(node: Any) -> Any:
    """A list with its scalars as texts; a copy, since an anchor may stand for the same node elsewhere."""
    if not isinstance(node, yaml.SequenceNode):
        return node
    copied = copy.copy(node)
    copied.value = [copy.copy(item) for item in node.value]
    for item in copied.value:
        item.tag = "tag:yaml.org,2002:str" if isinstance(item, yaml.ScalarNode) else item.tag
    return copied


class Dumper(yaml.SafeDumper):
    """YAML that `UniqueKeys` reads back; what YAML has no type for is written as JSON has it."""


def _scalar(dumper: Any, value: str) -> Any:
    style = (
        '"' if {*"\x85\u2028\u2029"} & {*value} else None
    )  # else these would be folded as ends of lines
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)


Dumper.add_representer(str, _scalar)
Dumper.add_multi_representer(
    object,
    lambda dumper, value: dumper.represent_data(to_jsonable_python(value, bytes_mode="base64")),
)


def _number(loader: Any, node: Any) -> Any:
    kind = node.tag.rpartition(":")[2]
    found = getattr(loader, f"construct_yaml_{kind}")(node)
    if re.match(r"[-+]?0[\d_]|.*:", node.value) and "." not in node.value.partition(":")[0]:
        problem = (
            f"{node.value} is {found} in YAML; quote it if it is text, or write the plain number"
        )
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return found


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    UniqueKeys.add_constructor(_tag, _number)
for _yaml in (UniqueKeys, Dumper):  # PyYAML takes 1e-3 for text; 1234e56 may be a commit
    _exponent = re.compile(r"[-+]?((\d|\d+\.\d*|\.\d+)[eE][-+]?|\d+[eE][-+])\d{1,2}$")
    _yaml.add_implicit_resolver("tag:yaml.org,2002:float", _exponent, [*"-+.0123456789"])


class Texts(_Unique, yaml.BaseLoader):
    """YAML whose scalars are texts, for `typed`."""

    def construct_scalar(self, node: Any) -> Any:
        found = super().construct_scalar(node)
        return Quoted(found) if node.style else Text(found)


def _read(text: Text, kinds: list[Any]) -> Any:
    """The text as the first of these types that it reads as; itself if it may be, or if it is none."""
    if Any in kinds or object in kinds:
        kinds = [str]
    choices = [choice for kind in kinds for choice in _choices(kind)]
    for choice in choices:
        if text in (str(choice), json.dumps(choice, default=str)):
            return choice
    free = not all(
        kind in _ANYTHING[:-1] or _choices(kind) or _is_collection(kind) for kind in kinds
    )
    if free and isinstance(text, Quoted):
        return str(text)
    lower = text.lower()
    if NoneType in kinds and (text == "null" or (lower in NULLS and not free)):
        return None
    words = BOOLEANS if free or int in kinds or float in kinds else SWITCHES
    if bool in kinds and lower in words:
        return words[lower]
    with contextlib.suppress(ValueError):
        plain = _FLOAT.fullmatch(text) or not (free or "_" in text or text != text.strip())
        if int in kinds and plain and (_INT.fullmatch(text) or not free):
            return int(text)
    with contextlib.suppress(ValueError):
        if float in kinds and plain:
            return float(text)
    collection = text[:1] + text[-1:] in ("[]", "{}") and any(map(_is_collection, kinds))
    with contextlib.suppress(ValueError):
        if collection and isinstance(found := read_yaml(text, Texts), list | dict):
            mapping = isinstance(found, dict)
            if any(_is_collection(kind) and _is_mapping(kind) == mapping for kind in kinds):
                return _typed(found, kinds)
    if free:
        return str(text)
    if "none" in choices and lower in NULLS:
        return "none"
    if len(text) > 1 and text[0] == text[-1] and text[0] in ("'", '"'):
        with contextlib.suppress(ValueError):
            return _read(read_yaml(text, Texts), kinds)
    return str(text)


def members(kind: Any) -> Iterator[Any]:
    """The types of a union; a type without its annotations."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        yield from members(args[0])
    elif origin in (Union, UnionType):
        for one in args:
            yield from members(one)
    elif hasattr(kind, "__value__"):  # type Name = …
        yield from members(kind.__value__)
    elif hasattr(kind, "__supertype__"):  # NewType
        yield from members(kind.__supertype__)
    else:
        yield NoneType if kind is None else kind


def _choices(kind: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return [one.value if isinstance(one, enum.Enum) else one for one in get_args(kind)]
    return (
        [one.value for one in kind] if inspect.isclass(kind) and issubclass(kind, enum.Enum) else []
    )


def _is_collection(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if not inspect.isclass(origin) or issubclass(origin, str | bytes):
        return False
    return _is_mapping(kind) or issubclass(origin, collections.abc.Iterable)


def _is_mapping(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return inspect.isclass(origin) and (
        issubclass(origin, Mapping | BaseModel) or hasattr(origin, "__dataclass_fields__")
    )


def _part(kinds: list[Any], key: str | None) -> list[Any]:
    """The types of what these types have at a key; None: of their keys."""
    found: list[Any] = []
    for kind in filter(_is_mapping, kinds):
        origin, args = get_origin(kind) or kind, get_args(kind)
        if issubclass(origin, BaseModel):
            fields = {
                info.alias or name: info.annotation for name, info in origin.model_fields.items()
            }
            fields |= {name: info.annotation for name, info in origin.model_fields.items()}
        elif hasattr(origin, "__annotations__"):  # a dataclass or TypedDict
            fields = typing.get_type_hints(origin)
        else:
            found += _anything_of(args[key is not None] if len(args) == 2 else Any)
            continue
        if key is None or key in fields:
            found += members(str if key is None else fields[key])
    return found or [Any]


def _item(kinds: list[Any], at: int) -> list[Any]:
    found: list[Any] = []
    for kind in kinds:
        args = get_args(kind)
        if _is_collection(kind) and not _is_mapping(kind):
            each = get_origin(kind) is tuple and args[-1:] != (...,)
            found += _anything_of(args[min(at, len(args) - 1) if each else 0] if args else Any)
    return found or [Any]


def _anything_of(kind: Any) -> list[Any]:
    """The types of an item of a list or mapping; YAML says what it is where it may be anything."""
    kinds = list(members(kind))
    return _ANYTHING if Any in kinds or object in kinds else kinds
