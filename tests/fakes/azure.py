"""Azure Blob Storage at the process boundary: one container of block blobs in memory, without names' checks."""

from __future__ import annotations

import base64
import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCOUNT, CONTAINER = "stokertest", "data"
_DATE = "Mon, 01 Jan 2024 00:00:00 GMT"
_EVERY_KEY = base64.b64encode(b"key").decode()


class Blobs(BaseHTTPRequestHandler):
    """The REST calls of pyarrow and obstore; names are those below the container."""

    protocol_version = "HTTP/1.1"
    blobs: dict[str, bytes]
    blocks: dict[tuple[str, str], bytes]
    asked: list[tuple[str, str]]

    def do(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        container, _, name = unquote(parts.path).removeprefix(f"/{ACCOUNT}/").partition("/")
        self.asked.append((self.command, name))
        if container.rstrip("/") != CONTAINER:
            self._send(404, error="ContainerNotFound")
        elif "action" in query:
            self._send(400, error="HierarchicalNamespaceNotEnabled")
        elif query.get("comp") == "list":
            self._send(200, self._listing(query).encode(), "application/xml")
        elif query.get("comp") == "batch":
            self._batch(body)
        elif query.get("restype") == "container":
            no = ("has-immutability-policy", "has-legal-hold", "deny-encryption-scope-override")
            no += ("immutable-storage-with-versioning-enabled",)
            scope = {"x-ms-default-encryption-scope": "$account-encryption-key"}
            self._send(200, extra=scope | {f"x-ms-{name}": "false" for name in no})
        elif query.get("comp") == "lease":
            self._send(201 if name in self.blobs else 404, extra={"x-ms-lease-id": "lease"})
        elif self.command == "PUT":
            self._put(name, query, body)
        elif name not in self.blobs:
            self._send(404, error="BlobNotFound")
        elif self.command == "DELETE":
            del self.blobs[name]
            self._send(202)
        else:
            self._get(self.blobs[name])

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = do  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass

    def _put(self, name: str, query: dict[str, str], body: bytes) -> None:
        if query.get("comp") == "block":
            self.blocks[name, query["blockid"]] = body
        elif query.get("comp") == "blocklist":
            ids = re.findall(r"<(?:Latest|Uncommitted)>([^<]*)</", body.decode())
            self.blobs[name] = b"".join(self.blocks[name, block] for block in ids)
        else:
            self.blobs[name] = body
        self._send(201)

    def _get(self, content: bytes) -> None:
        wanted = self.headers.get("x-ms-range") or self.headers.get("Range") or ""
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
        if part is None:
            self._send(200, content)
            return
        first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
        span = f"bytes {first}-{last}/{len(content)}"
        self._send(206, content[first : last + 1], extra={"Content-Range": span})

    def _listing(self, query: dict[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        files, folders = "", dict[str, None]()
        for name in sorted(name for name in self.blobs if name.startswith(prefix)):
            folder, cut, _ = name[len(prefix) :].partition(delimiter or "\0")
            if delimiter and cut:
                folders[prefix + folder + cut] = None
                continue
            files += (
                f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{_DATE}</Last-Modified>"
                f"<Etag>0x1</Etag><Content-Length>{len(self.blobs[name])}</Content-Length>"
                "<BlobType>BlockBlob</BlobType><Creation-Time>" + _DATE + "</Creation-Time>"
                "</Properties></Blob>"
            )
        below = "".join(f"<BlobPrefix><Name>{escape(f)}</Name></BlobPrefix>" for f in folders)
        return (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="{CONTAINER}">'
            f"<Prefix>{escape(prefix)}</Prefix><Blobs>{files}{below}</Blobs><NextMarker />"
            "</EnumerationResults>"
        )

    def _batch(self, body: bytes) -> None:
        """Deletions in one multipart request, each with an answer of its own."""
        boundary, answer = "batchresponse", ""
        for number, path in enumerate(re.findall(r"DELETE (\S+) HTTP", body.decode())):
            name = unquote(urlsplit(path).path).partition(f"/{CONTAINER}/")[2]
            status = "202 Accepted" if self.blobs.pop(name, None) is not None else "404 Not Found"
            answer += (
                f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                f"HTTP/1.1 {status}\r\nx-ms-request-id: {number}\r\n\r\n"
            )
        self._send(
            202, f"{answer}--{boundary}--\r\n".encode(), f"multipart/mixed; boundary={boundary}"
        )

    def _send(
        self,
        status: int,
        content: bytes = b"",
        kind: str = "application/octet-stream",
        error: str = "",
        extra: dict[str, str] | None = None,
    ) -> None:
        if error and self.command != "HEAD":
            content = f"<?xml version='1.0'?><Error><Code>{error}</Code><Message/></Error>".encode()
            kind = "application/xml"
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "ETag": '"0x1"'}
        headers |= {"Last-Modified": _DATE, "x-ms-version": "2024-01-01", "x-ms-request-id": "1"}
        headers |= {"x-ms-blob-type": "BlockBlob", "x-ms-creation-time": _DATE}
        headers |= {"x-ms-lease-state": "available", "x-ms-lease-status": "unlocked"}
        headers |= {f"x-ms{which}-server-encrypted": "true" for which in ("", "-request")}
        headers |= extra or {}
        headers |= {"x-ms-error-code": error} if error else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextlib.contextmanager
def blob_storage() -> Iterator[tuple[dict[str, str], type[Blobs]]]:
    """Serve an empty container; its clients' environment variables, and what it holds and was asked."""
    kind = type("Served", (Blobs,), {"blobs": {}, "blocks": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield (
            {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": _EVERY_KEY,
                "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{server.server_port}/{ACCOUNT}",
            },
            kind,
        )
    finally:
        server.shutdown()
        server.server_close()
