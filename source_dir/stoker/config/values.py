"""Anywhere: what a value given as text means (its field's type decides), and what YAML and paths mean.

    typed(Text("010"), str)  →  "010"        typed(Text("[1, 2]"), list[int])  →  [1, 2]

A text is a number, a boolean, null, a list or a mapping only where the type has one and the whole text reads
as one. Imports neither ray nor torch.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import operator
import os
import re
import typing
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import reduce
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

NULLS = {"", "null", "none", "~"}
MOST_VALUES = 1_000_000
_JSON = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))")


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
    models = [one for one in kinds if inspect.isclass(one) and issubclass(one, BaseModel)]
    if path and models:
        return typed(value, _annotation(models, path[0]), path[1:])
    if path:
        found = typed(reduce(lambda below, key: {key: below}, reversed(path), value), kind)
        return reduce(operator.getitem, path, found)
    if models and isinstance(value, Text) and value[:1] == "{":
        with contextlib.suppress(ValueError):
            value = read_yaml(value, Texts)
    if models and isinstance(value, dict):
        return {str(key): typed(below, _annotation(models, key)) for key, below in value.items()}
    if not has_text(value):
        return value
    return _each(value, str) if Any in kinds or object in kinds else _meant(value, kind)


def _annotation(models: list[Any], key: str) -> Any:
    """The type of a field of one of these models."""
    for model in models:
        for name, info in model.model_fields.items():
            if key in (name, info.alias):
                return info.annotation
    return Any


def _meant(value: Any, kind: Any) -> Any:
    """What pydantic takes as it is: numbers, true and null as JSON has them, or else text. If it takes none of
    that, what it makes of the text: `010` is 10 where only a number can be meant."""
    tree, text = _each(value, _parsed), _each(value, str)
    plain, words = _each(tree, _plain), _each(tree, str)
    nothing = str(text).lower() in NULLS and str not in members(kind)
    exact = [text, words] if isinstance(plain, str) else [plain, text, words]
    try:
        adapter = TypeAdapter(kind)
    except Exception:  # a class that pydantic does not know
        return text
    for choice in exact + [None, "none"] * nothing:
        with contextlib.suppress(ValueError, TypeError):  # a date is no key in JSON
            adapter.validate_json(json.dumps(choice, default=str), strict=True)
            return choice
    for choice in (text, words, _each(tree, lambda leaf: None if leaf == "null" else str(leaf))):
        with contextlib.suppress(ValueError):
            if (found := adapter.validate_python(choice)) == choice:
                return choice
            return found if isinstance(found, int | float) else to_jsonable_python(found)
    return words if isinstance(words, dict | list) and _wrong_within(adapter, words) else text


def _wrong_within(adapter: TypeAdapter[Any], tree: Any) -> bool:
    """Whether what is wrong has a key in the tree, which the refusal then names."""
    try:
        adapter.validate_python(tree)
    except ValidationError as error:
        return all(each["loc"] for each in error.errors())
    return False


def _each(value: Any, read: Callable[[Any], Any]) -> Any:
    """A tree with each `Text` in it read."""
    if isinstance(value, dict):
        return {_each(key, str): _each(below, read) for key, below in value.items()}
    if isinstance(value, list):
        return [_each(below, read) for below in value]
    return read(value) if isinstance(value, Text) else value


def _parsed(text: Text) -> Any:
    """The list or mapping that a text holds, or what stands in its quotes."""
    if text[:1] + text[-1:] in ("[]", "{}", "''", '""'):
        with contextlib.suppress(ValueError):
            return read_yaml(text, Texts)
    return text


def _plain(text: Text) -> Any:
    """A number, true, false or null in JSON's spelling; anything else is text."""
    with contextlib.suppress(ValueError):  # a number of thousands of digits
        if not isinstance(text, Quoted) and _JSON.fullmatch(text):
            return json.loads(text)
    return str(text)


def has_text(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Text) or any(map(has_text, parts))


def true_as_number(value: Any, kind: Any) -> bool:
    """Whether true, which Python takes for 1, stands where a number must; a section checks its own keys."""
    if "True" not in str(value) or any(hasattr(one, "_says_something") for one in members(kind)):
        return False
    try:
        TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        wrong = [each["type"] for each in error.errors() if each["input"] is True]
        return not {"int_type", "float_type", "value_error"}.isdisjoint(wrong)
    except Exception:  # a class that pydantic does not know
        return False
    return False


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
    # Else these would be folded as ends of lines.
    style = '"' if {*"\x85\u2028\u2029"} & {*value} else None
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
