"""Redacts secrets in all files of a run and on the screen; docs/security.md states what counts as one.

The run uses the real values; everything it writes shows `(redacted)`. Loads neither ray nor torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

REDACTED = "(redacted)"
_SECRET = re.compile(
    r"_((password|passwd|passphrase|secret|credential|authorization|connection_string"
    r"|(api|access|secret|private|account|auth|signing|encryption)_?key)s?|token)$"
)
"""What the names of secrets end in."""
_PUBLIC = re.compile(r"_((bos|eos|unk|sep|pad|cls|mask)_token|application_credentials)$")
"""Not secret: the special tokens of transformers, and GOOGLE_APPLICATION_CREDENTIALS, a path."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NUMBER = re.compile(r"[-+]?[\d_.]+(e[-+]?\d+)?", re.I)
_ORDINARY = re.compile(r".{,5}|[A-Za-z _-]{,11}", re.S)
"""Values that are redacted at their key alone, not in other text."""
_TOKEN = re.compile(
    r"\b((AKIA|ASIA)[A-Z0-9]{16}|(gh[pousr]|github_pat)_\w{30,}|hf_[A-Za-z0-9]{30,}"
    r"|sk-(\w{20,}|(proj|ant|svcacct|admin|or-v1)-[\w-]{20,})|glpat-[\w-]{20,})"
)
"""Tokens of AWS, GitHub, Hugging Face, OpenAI (and those who copied its form) and GitLab."""
_USER = re.compile(
    r"(?<=://)([^/?#\s\"'@]+|[^/?#\s\"'@:]+:([^/\s\"'@]|[\"'](?![]},:]))+)(@[^/?#,\s\"'@]+)*(?=@)"
)
"""The user of a URL, with a password that may contain `@`."""
_QUERY = re.compile(r"(?<=[?&])([\w.~-]+)=([^&#\s'\"]+)")
_known: set[str] = set()


def is_secret(name: str, value: Any = "") -> bool:
    """Whether a key, with or without its section, names a secret; numbers are no tokens."""
    words = "_".join(["", *_WORD.findall(name.rpartition(".")[2])]).lower()
    if value is None or isinstance(value, bool) or _PUBLIC.search(words):
        return False
    number = words.endswith("_token") and _NUMBER.fullmatch(str(value))
    return not number and _SECRET.search(words) is not None


def redact(
    value: Any,
    name: str = "",
    secret: bool = False,
    hide: Callable[[str], str] = lambda text: REDACTED,
) -> Any:
    """A copy of nested dicts and lists, the value of the key `name`, with secrets replaced by `hide` of them.

    With `secret`, all of its texts are.
    """
    if isinstance(value, Mapping):
        secret = secret or is_secret(name)
        return {key: redact(below, str(key), secret, hide) for key, below in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        if name == "args" and all(isinstance(word, str) for word in value):
            return [
                prefix + redact(text, key, secret, hide) for key, prefix, text in _arguments(value)
            ]
        return [redact(below, name, secret, hide) for below in value]
    if is_secret(name, value) or (secret and isinstance(value, str)):
        return hide(str(value))
    return _in_text(value, hide) if isinstance(value, str) else value


def learn(tree: Any) -> None:
    """Remember a configuration's secrets, so that `scrub` can remove them from any text."""

    def hide(text: str) -> str:
        if not _ORDINARY.fullmatch(text):
            _known.update({text, quote(text, safe=""), json.dumps(text)[1:-1]})
            _known.add(json.dumps(text, ensure_ascii=False)[1:-1])
        return REDACTED

    redact(tree, hide=hide)


def learn_job(config: Any) -> None:
    learn(config)
    learn(dict(os.environ))


def scrub(text: str) -> str:
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return text


def scrubbed(value: Any) -> Any:
    """Plain data with all learned secrets replaced in its texts; its numbers stay numbers.

    Searching the written JSON instead would also find a secret of digits within a number.
    """
    if isinstance(value, Mapping):
        return {scrubbed(key): scrubbed(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(below) for below in value]
    return value if value is None or isinstance(value, bool | int | float) else scrub(str(value))


def _in_text(text: str, hide: Callable[[str], str]) -> str:
    """Replace tokens of a known form, and the user and secret arguments of a URL."""

    def user(match: re.Match[str]) -> str:
        for part in (match[0], *match[0].split(":")[1:]):  # messages may quote the password alone
            hide(part)
            hide(unquote(part))
        return REDACTED

    def argument(match: re.Match[str]) -> str:
        signed = match[1].lower().rpartition("-")[2] in ("signature", "sig")
        return f"{match[1]}={hide(match[2])}" if signed or is_secret(*match.groups()) else match[0]

    if "://" in text:
        text = _QUERY.sub(argument, _USER.sub(user, text))
    return _TOKEN.sub(lambda match: hide(match[0]), text)


def _arguments(words: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Split a command line into (name of a value, `name=` before it, value)."""
    flag = ""
    for word in words:
        name, sign, value = word.partition("=")
        named = sign and re.fullmatch(r"[-+~]*[\w.-]+", name)
        if named and (word.startswith("-") or not is_secret(flag)):
            key, prefix = name, f"{name}="
        else:
            key, prefix, value = "" if word.startswith("-") else flag, "", word
        nothing = value.lower() in ("", "true", "false", "null", "none")
        yield "" if nothing else key, prefix, value
        flag = word if word.startswith("-") and not sign else ""
