"""Laptop: changes single values of a YAML file and preserves everything else, including comments."""

from __future__ import annotations

from typing import Any

import yaml

from stoker.errors import UsageError


def with_values(text: str, changes: dict[str, Any]) -> str:
    """The text with values set by `section.key`, replacing existing keys or adding new ones.

    Args:
        text: a YAML document whose root is a mapping, or an empty one.
        changes: plain values (strings, numbers, null) by dotted path.

    Raises:
        UsageError: the file's form is not supported (anchors, several documents, …).
    """
    wanted = _unshared(yaml.safe_load(text) or {})
    for path, value in changes.items():
        text = _set(text, path.split("."), value)
        _put(wanted, path.split("."), value)
    # Verify that unusual YAML did not cause any other change.
    try:
        if yaml.safe_load(text) == wanted:
            return text
    except yaml.YAMLError:
        pass
    raise UsageError(f"cannot change {', '.join(changes)} in a YAML file of this form; edit it by hand")


def _set(text: str, path: list[str], value: Any) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None or _is_null(root):
        return text + ("" if not text or text.endswith("\n") else "\n") + _block(path, value, 0)
    node: Any = root
    for depth, key in enumerate(path):
        found = next((pair for pair in node.value if pair[0].value == key), None)
        if found is None:
            return _add(text, node, path[depth:], value)
        if depth == len(path) - 1 or _is_null(found[1]):
            below = path[depth + 1 :]
            return _replace(text, found, below, value)
        if not isinstance(found[1], yaml.MappingNode):
            raise UsageError(f"{'.'.join(path[: depth + 1])}: is a value, not a section")
        node = found[1]
    raise AssertionError("the path ends at a key")


def _replace(text: str, pair: Any, below: list[str], value: Any) -> str:
    """Replace the value of a key, which may be empty."""
    key, old = pair
    new = _flow(below, value)
    start, end = old.start_mark.index, old.end_mark.index
    if start == end:
        # The value is empty: its mark may be lines below the key.
        start = end = text.index(":", key.end_mark.index) + 1
        new = " " + new
    return text[:start] + new + text[end:]


def _add(text: str, node: Any, path: list[str], value: Any) -> str:
    """Add a key at the end of a mapping."""
    if node.flow_style:
        end = node.end_mark.index - 1
        comma = ", " if node.value else ""
        return text[:end].rstrip() + f"{comma}{path[0]}: {_flow(path[1:], value)}" + text[end:]
    indent = node.value[0][0].start_mark.column
    end = text.find("\n", _last_character(node))
    line = _block(path, value, indent)
    if end < 0:
        return text + "\n" + line
    return text[: end + 1] + line + text[end + 1 :]


def _last_character(node: Any) -> int:
    """The end of the last value below a node; a block's own end mark includes trailing comments."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    if isinstance(last, tuple):
        key, value = last
        return (
            max(int(key.end_mark.index), _last_character(value))
            if not _is_empty(value)
            else key.end_mark.index
        )
    return _last_character(last)


def _block(path: list[str], value: Any, indent: int) -> str:
    """`gpu: {type: x}`, or a section with indented keys at the top level."""
    if indent or len(path) == 1:
        return f"{' ' * indent}{path[0]}: {_flow(path[1:], value)}\n"
    return f"{path[0]}:\n" + _block(path[1:], value, indent + 2)


def _flow(path: list[str], value: Any) -> str:
    if path:
        return "{" + f"{path[0]}: {_flow(path[1:], value)}" + "}"
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
    tree[path[-1]] = value


def _unshared(value: Any) -> Any:
    """A deep copy that duplicates values shared by anchors."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _is_null(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _is_empty(node: Any) -> bool:
    return bool(node.start_mark.index == node.end_mark.index)
