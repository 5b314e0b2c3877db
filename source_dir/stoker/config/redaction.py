"""Redacts the configuration's secrets in all files of a run and on the screen.

A value is secret by the name of its key (`api_token`, `DB_PASSWORD`), by its form (`AKIA…`), or by its
position in a URL (`https://user:password@host`, `?token=…`). The run uses the real values; everything it
writes shows `(redacted)`. So do secrets of the environment, which messages of libraries may quote. Loads
neither ray nor torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import quote, unquote

REDACTED = "(redacted)"
SHORTEST = 6
"""Values shorter than this are redacted only at their key, not in other text."""
_WORDS = {
    "token",
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "secret",
    "credential",
    "apikey",
    "accesskey",
}
_WORDS |= {"authorization"}
_KEYS = {
    "api",
    "access",
    "secret",
    "private",
    "account",
    "auth",
    "signing",
    "encryption",
    "openai",
    "wandb",
}
_HOLDERS = {"api", "access", "auth", "bot", "hf", "github", "gitlab", "hub", "telegram", "slack"}
"""Before `token`, they tell that it is not one of a vocabulary."""
_MARKS = {"bos", "class", "cls", "eos", "mask", "pad", "sep", "special", "unk"}
"""Tokens of a vocabulary."""
_ORDINARY = re.compile(r"[A-Za-z _-]{,11}")
"""Short words are not redacted in other text: `token_pooling: average` may not be a secret."""
_CREDENTIAL = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+~=-]{16,}")
_VALUE = re.compile(
    r"((AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_\w{30,}|github_pat_\w{30,}|hf_[A-Za-z0-9]{30,}|-----BEGIN"
    r"|\bsk-(\w{20,}|(proj|ant|svcacct|admin|or-v1)-[\w-]{20,})|\bglpat-[\w-]{20,}|\bxox[abeprs]-\d[\w-]{9,}"
    r"|\bAIza[\w-]{35}|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+|\b(AccountKey|SharedAccessKey)=[\w+/]{20,})"
)
"""Credentials recognized by their form, whatever the name of their key."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USER = re.compile(
    r"(?<=://)([^/?#\s\"'@]+|[^/?#\s\"'@:]+:([^/\s\"'@]|[\"'](?![]},:]))+)(@[^/?#,\s\"'@]+)*(?=@)"
)
"""The user of an address, with a password that may have an `@`; not the name of a further host."""
_FLAG = re.compile(r"-.*|[+~]*[\w.-]+")
"""What names the value after `=` in a word of a command line, as `--token=x` and Hydra's `+api.token=x`. With
a slash it is Hydra's name of a file, or a path."""
_EMPTY = re.compile(r"true|false|null|none|~||\$.*", re.I)
"""Also what names a variable: `${oc.env:HF_TOKEN}`."""
_NUMBER = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?[kmbt]?", re.I)
_PAIR = re.compile(
    r"(?<![\w.-])([\w.-]+)([\"']?\s*:\s*)(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
    r"|[^\s,{}\[\]][^,}\[\]]*)"
)
"""A key and its value in a mapping as Hydra takes it: `{api_key:x}`."""
_QUERY = re.compile(r"(?<=[?&])([\w.~-]+)=([^&#\s'\"]+)")
_known: set[str] = set()


def is_secret(name: str, value: Any = "") -> bool:
    """Whether a key, with or without its section, or its value looks secret.

    A number is only if the name ends in a secret word (not `max_tokens: 128`).
    """
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2])]
    if not _HOLDERS & {*words}:
        plain = (
            ("token", "tokens")
            if _MARKS & {*words}
            else ("tokens",)
            if str(value).isdecimal()
            else ()
        )
        words = [word for word in words if word not in plain]
    found = [word.removesuffix("s") in _WORDS or word in _WORDS for word in words]
    found += [first in _KEYS and second in ("key", "keys") for first, second in pairwise(words)]
    if value is None or isinstance(value, bool):
        return False
    if isinstance(value, int | float):
        return bool(words) and words[-1] in _WORDS
    return any(found) or (isinstance(value, str) and _VALUE.search(value) is not None)


def redacted_at(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(tree, Mapping):
        for key, below in tree.items():
            yield from redacted_at(below, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for below in tree:
            yield from redacted_at(below, path)
    elif isinstance(tree, str) and REDACTED in tree:
        yield path


def redact(
    value: Any,
    name: str = "",
    secret: bool = False,
    hide: Callable[[str], str] = lambda text: REDACTED,
) -> Any:
    """A copy of nested dicts and lists, the value of the key `name`, with secrets replaced by `hide` of them.

    With `secret`, everything in it is.
    """
    if isinstance(value, Mapping):
        secret = secret or is_secret(name)
        return {key: redact(below, str(key), secret, hide) for key, below in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        # In a script's command line, a flag names the next argument.
        if name == "args" and all(isinstance(word, str) for word in value):
            found = [
                (flag, redact(below, key, secret, hide)) for key, flag, below in _arguments(value)
            ]
            return [flag + _mapping(below, hide) for flag, below in found]
        return [redact(below, name, secret, hide) for below in value]
    if is_secret(name, value) or (secret and isinstance(value, str)):
        return hide(str(value))
    return _address(value, hide) if isinstance(value, str) else value


def learn(tree: Any) -> None:
    """Remember a configuration's secrets, so that `scrub` can remove them from any text."""

    def hide(text: str) -> str:
        if len(text) >= SHORTEST and not _ORDINARY.fullmatch(text):
            _known.update({text, quote(text, safe=""), json.dumps(text)[1:-1]})
            _known.add(json.dumps(text, ensure_ascii=False)[1:-1])
        return REDACTED

    redact(tree, hide=hide)


def learn_job(config: Any) -> None:
    learn(config)
    # PWD and the like name files; MAX_TOKENS=1000 is a number.
    values = {k: v for k, v in os.environ.items() if not (v.startswith("/") and os.path.lexists(v))}
    learn({key: int(value) if value.isdecimal() else value for key, value in values.items()})


def scrub(text: str) -> str:
    for secret in sorted(_known, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    return text


def scrubbed(value: Any) -> Any:
    """Plain data with all learned secrets replaced in its texts; its numbers stay numbers.

    Searching the written JSON instead would also find a secret of digits within a number.
    """
    if isinstance(value, Mapping):
        return {
            scrub(key) if isinstance(key, str) else key: scrubbed(below)
            for key, below in value.items()
        }
    if isinstance(value, list | tuple):
        return [scrubbed(below) for below in value]
    return value if value is None or isinstance(value, bool | int | float) else scrub(str(value))


def _address(text: str, hide: Callable[[str], str]) -> str:
    """A text, of which the user and secret arguments are replaced if it is a URL."""

    def user(found: re.Match[str]) -> str:
        for part in (found[0], *found[0].split(":")[1:]):  # messages may quote the password alone
            hide(part)
            hide(unquote(part))
        return REDACTED

    def argument(found: re.Match[str]) -> str:
        signed = found[1].lower().rpartition("-")[2] in ("signature", "sig")
        return f"{found[1]}={hide(found[2])}" if signed or is_secret(found[1]) else found[0]

    return _QUERY.sub(argument, _USER.sub(user, text)) if "://" in text else text


def _mapping(text: str, hide: Callable[[str], str]) -> str:
    def value(found: re.Match[str]) -> str:
        plain = found[3].strip().strip("'\"")
        return f"{found[1]}{found[2]}{hide(plain)}" if _is_told(found[1], plain) else found[0]

    return _PAIR.sub(value, text) if text.lstrip()[:1] in ("{", "[") else text


def _arguments(words: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Split a command line into (what tells that a value is secret, `--flag=` prefix, value)."""
    flag = ""
    for word in words:
        name, sign, value = word.partition("=")
        if sign and _FLAG.fullmatch(name) and (word.startswith("-") or not is_secret(flag)):
            yield name if _is_told(name, value) else "", f"{name}=", value
        else:
            yield flag if not word.startswith("-") and _is_told(flag, word) else "", "", word
        flag = word if word.startswith("-") and not sign else ""


def _is_told(name: str, value: str) -> bool:
    """Whether a name in a command line, where numbers are texts, tells that its value is secret.

    Without a dash, the name is a key of a configuration, such as `token_pooling`, and only its end counts.
    """
    plain = value.strip("'\"")
    if _EMPTY.fullmatch(plain):
        return False
    *_, before, last = ["", "", *map(str.lower, _WORD.findall(name.rpartition(".")[2]))]
    end = f"{before}_{last}" if last in ("key", "keys", "token", "tokens") else last
    number = _NUMBER.fullmatch(plain)
    # Of a vocabulary, or how many, or a file of them.
    if last in ("token", "tokens") and before not in _HOLDERS:
        short = number and before and sum(map(str.isdigit, plain)) < 8
        word = not name.startswith("-") and _ORDINARY.fullmatch(plain)
        if (
            short
            or word
            or plain[0] in "<["
            or (last == "tokens" and not _CREDENTIAL.fullmatch(plain))
        ):
            return False
    return is_secret(end, "0") if number else is_secret(name if name.startswith("-") else end)
