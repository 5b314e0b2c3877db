"""Laptop: a cheap S3 server behind an emulated link: `python -m benchmarks.far_s3 FILE COPIES`.

The server answers the requests of readers (HEAD, GET with a range, ListObjectsV2) and serves one file under
many names. The link limits the total rate of all connections and delays every answer, as a network does;
latency does not limit the data in flight. Prints both ports as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bench"
LINK_BYTES_PER_S = 1e9 / 8
LATENCY_S = 0.02
"""From a request to the first byte of its answer; opening a connection takes the same again."""
AHEAD_S = 0.005
"""Queue at the link's entrance: longer than an event loop oversleeps, so that the link never idles."""
CHUNK = 128 * 1024


class Objects(BaseHTTPRequestHandler):
    """The S3 server of one bucket."""

    protocol_version = "HTTP/1.1"
    file: Path
    names: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, body: bool) -> None:
        address = urlsplit(self.path)
        _, _, key = address.path.strip("/").partition("/")
        if "list-type" in address.query or not key:
            self._send(
                200, _listing(self.names, parse_qs(address.query), self.file.stat().st_size), body
            )
        elif key not in self.names:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", body)
        else:
            self._object(body)

    def _send(self, status: int, content: bytes, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _object(self, body: bool) -> None:
        size = self.file.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = (
            (int(wanted[1]), min(int(wanted[2] or size), size - 1)) if wanted else (0, size - 1)
        )
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        if body:
            with self.file.open("rb") as file, contextlib.suppress(ConnectionError):
                self.connection.settimeout(None)
                while first <= last:
                    first += os.sendfile(
                        self.connection.fileno(), file.fileno(), first, last + 1 - first
                    )


def _listing(names: list[str], query: dict[str, list[str]], size: int) -> bytes:
    """ListObjectsV2 in one page."""
    prefix, delimiter = (query.get(part, [""])[0] for part in ("prefix", "delimiter"))
    keys, folders = [], set()
    for name in names:
        if name.startswith(prefix):
            folder, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
            folders.add(prefix + folder + cut) if cut and delimiter else keys.append(name)
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"0"</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>'
        for key in sorted(keys)
    )
    common = "".join(
        f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders)
    )
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(keys) + len(folders)}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>false</IsTruncated>{contents}{common}</ListBucketResult>"
    ).encode()


Travelling = asyncio.Queue[tuple[float, bytes]]
"""Chunks in flight with their arrival times."""


class Link:
    """The link: one rate for all answers, with a latency of `LATENCY_S` per chunk."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.free_at = 0.0
        """When the link has sent all queued data."""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either end closes it."""
        try:
            await asyncio.sleep(LATENCY_S)
            from_server, to_server = await asyncio.open_connection(
                "127.0.0.1", self.port, limit=2 * CHUNK
            )
        except OSError:
            writer.close()
            return
        travelling: Travelling = asyncio.Queue(maxsize=64)
        jobs = [
            asyncio.create_task(job)
            for job in (
                _requests(reader, to_server),
                self._enter(from_server, travelling),
                _arrive(travelling, writer),
            )
        ]
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        to_server.close()
        writer.close()

    async def _enter(
        self, reader: asyncio.StreamReader, travelling: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        while chunk := await reader.read(CHUNK):
            now = time.monotonic()
            self.free_at = max(self.free_at, now) + len(chunk) / LINK_BYTES_PER_S
            await travelling.put((self.free_at + LATENCY_S, chunk))
            if self.free_at - now > AHEAD_S:
                await asyncio.sleep(self.free_at - now - AHEAD_S)


async def _requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()


async def _arrive(
    travelling: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
) -> None:
    while True:
        at, chunk = await travelling.get()
        if (wait := at - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        writer.write(chunk)
        await writer.drain()


async def serve(port: int, told: Callable[[int], None]) -> None:
    """Run the link forever."""
    server = await asyncio.start_server(Link(port).connected, "127.0.0.1", 0)
    told(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def main(file: Path, copies: int) -> None:
    """Serve until stdin closes. Server and link are separate processes, so each can use a core."""
    Objects.file, Objects.names = file, [f"train/{number:05d}.tar" for number in range(copies)]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Objects)
    server.daemon_threads = True
    port = server.server_port
    if os.fork() == 0:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()
        os._exit(0)
    server.socket.close()

    def told(link: int) -> None:
        print(json.dumps({"server": port, "link": link}), flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()

    asyncio.run(serve(port, told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
