"""Laptop: a cheap S3 server of many small objects behind a link: `python -m benchmarks.far_objects FOLDERS`.

Each of the class folders has `EACH` objects, all of the same bytes. Every answer begins `LATENCY_S` after
its request, the first of a connection after twice that. Objects share a link of `LINK_BYTES_PER_S`: each is
sent when the link would have delivered its last byte. Prints the port as JSON; `GET /counts` tells what was
requested.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections import Counter
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bench"
FOLDERS, EACH = 1000, 1000
OBJECT_BYTES = 100_000
LATENCY_S = 0.03
LINK_BYTES_PER_S = 30e6
PAGE = 1000
CONTENT = bytes(i * i % 251 for i in range(OBJECT_BYTES))
_DATE = "Mon, 01 Jan 2024 00:00:00 GMT"
_PAGE = "".join(
    f"<Contents><Key>@{n:04d}.jpg</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
    f'<ETag>"0"</ETag><Size>{OBJECT_BYTES}</Size><StorageClass>STANDARD</StorageClass></Contents>'
    for n in range(EACH)
)
_MISSING = b"<Error><Code>NoSuchKey</Code></Error>"


class Link:
    """What all connections share."""

    def __init__(self) -> None:
        self.free_at = 0.0
        """When the link has sent all queued data."""
        self.counts: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()

    def figures(self) -> dict[str, int]:
        return self.counts | {
            "keys": len(self.keys),
            "most of a key": max(self.keys.values(), default=0),
        }


LINK = Link()


class Connection(asyncio.Protocol):
    """Answers the requests of one connection, which come one after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.received = transport, b""
        self.loop = asyncio.get_running_loop()
        self.ready_at = self.loop.time() + LATENCY_S
        LINK.counts["connections"] += 1
        LINK.counts["open"] += 1
        LINK.counts["most open"] = max(LINK.counts["most open"], LINK.counts["open"])

    def connection_lost(self, error: Exception | None) -> None:
        LINK.counts["open"] -= 1

    def data_received(self, data: bytes) -> None:
        self.received += data
        while b"\r\n\r\n" in self.received:
            head, _, self.received = self.received.partition(b"\r\n\r\n")
            method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
            self.answer(method, urlsplit(path).path, parse_qs(urlsplit(path).query))

    def answer(self, method: str, path: str, query: dict[str, list[str]]) -> None:
        at = max(self.loop.time(), self.ready_at) + LATENCY_S
        _, _, key = unquote(path).strip("/").partition("/")
        status, content = 200, CONTENT
        if path == "/counts":
            at, content = 0, json.dumps(LINK.figures()).encode()
        elif "list-type" in query or not key:
            LINK.counts["LIST"] += 1
            content = listing({name: values[0] for name, values in query.items()})
        elif is_object(key):
            LINK.counts[method] += 1
            if method == "GET":
                LINK.keys[key] += 1
                at = LINK.free_at = max(LINK.free_at, at) + OBJECT_BYTES / LINK_BYTES_PER_S
        else:
            LINK.counts["absent"] += 1
            status, content = 404, _MISSING
        kind = "image/jpeg" if content is CONTENT else "application/xml"
        head = (
            f"HTTP/1.1 {status} OK\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
            f'ETag: "0"\r\nLast-Modified: {_DATE}\r\nAccept-Ranges: bytes\r\n\r\n'
        ).encode()
        self.loop.call_at(at, self.transport.write, head + content * (method == "GET"))


def is_object(key: str) -> bool:
    split, _, rest = key.partition("/")
    folder, _, name = rest.partition("/")
    return split == "train" and folder.isdecimal() and name.endswith(".jpg")


def listing(query: dict[str, str]) -> bytes:
    """ListObjectsV2: a page of a folder, or of all; folders of a prefix."""
    prefix, folder = query.get("prefix", ""), query.get("prefix", "").partition("/")[2].strip("/")
    inside, token, contents, more = "train/".startswith(prefix), "", "", ""
    if query.get("delimiter") and prefix in ("", "train/"):
        found = ["train/"] if not prefix else [f"train/{n:04d}/" for n in range(FOLDERS)]
        contents = "".join(
            f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in found
        )
    elif folder.isdecimal() or inside or prefix == "train/":
        number = int(query.get("continuation-token") or (folder if folder.isdecimal() else 0))
        contents = _PAGE.replace("@", f"train/{number:04d}/")
        if query.get("max-keys", "1000") != "1000":
            contents = contents[: contents.index("</Contents>") + len("</Contents>")]
        if not folder and number + 1 < FOLDERS:
            token, more = f"<NextContinuationToken>{number + 1}</NextContinuationToken>", "true"
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix>{prefix}</Prefix><MaxKeys>{PAGE}</MaxKeys>"
        f"<IsTruncated>{more or 'false'}</IsTruncated>{token}{contents}</ListBucketResult>"
    ).encode()


async def serve() -> None:
    """Serve until stdin closes."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0, backlog=1000)
    print(json.dumps({"link": server.sockets[0].getsockname()[1]}), flush=True)
    threading.Thread(
        target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(server.close))
    ).start()
    await server.serve_forever()


if __name__ == "__main__":
    FOLDERS = int(sys.argv[1])
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve())
