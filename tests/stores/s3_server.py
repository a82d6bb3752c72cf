"""A real S3 server on localhost: moto's, over HTTP, with failures that a test may order."""

import contextlib
import io
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.peers import Peer
from werkzeug.serving import WSGIRequestHandler, make_server

boto3 = Peer("boto3")
werkzeug_app = Peer("moto.moto_server.werkzeug_app")

REGION = "us-east-1"
Then = Callable[[], None]


class _Quiet(WSGIRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):  # a connection that was reset on purpose
            super().handle()

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 (the signature is werkzeug's)
        pass


@dataclass
class Fault:
    """What happens to some requests: an answer 500, a connection reset, a flipped bit of what is sent, ten
    bytes too few of what is read, or whatever `then` does.

    method, inside: which requests are counted. at: their numbers, from 0. then: called before the request
    continues as if nothing had been ordered.
    """

    kind: str
    at: range
    method: str = ""
    inside: str = ""
    then: Then | None = None
    seen: int = 0
    struck: int = 0


@dataclass
class S3Server:
    """Counts requests, and fails those that are ordered to."""

    requests: list[str] = field(default_factory=list)
    bytes_asked: int = 0
    fault: Fault | None = None
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._app = werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Quiet)
        self._server.daemon_threads = True  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.client: Any = boto3.client(
            "s3", endpoint_url=self.url, region_name=REGION,
            aws_access_key_id="testing", aws_secret_access_key="testing",
        )  # fmt: skip

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if environ.get("HTTP_RANGE", "").startswith("bytes="):
            first, _, last = environ["HTTP_RANGE"].removeprefix("bytes=").partition("-")
            with self._guard:
                self.bytes_asked += int(last) + 1 - int(first)
        kind = self._order(method, f"{path}?{environ['QUERY_STRING']}")
        if kind in ("500", "reset"):
            # What was sent is taken, or closing the connection would itself be a reset.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if kind == "500":
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return []
        if kind == "403":
            body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            start_response(
                "403 Forbidden", [("Content-Length", str(len(body))), ("Content-Type", "text/xml")]
            )
            return [body]
        if kind == "reset":
            # No FIN but RST: the client sees a connection reset by its peer.
            raw = environ["werkzeug.socket"]
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(raw.detach())
            raise ConnectionResetError
        if kind == "flip":
            content = bytearray(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            content[len(content) // 2] ^= 1
            environ["wsgi.input"] = io.BytesIO(content)
        if kind == "short":
            first, _, last = environ["HTTP_RANGE"].partition("-")
            environ["HTTP_RANGE"] = f"{first}-{int(last) - 10}"
        return self._app(environ, start_response)

    def _order(self, method: str, target: str) -> str | None:
        with self._guard:
            self.requests.append(f"{method} {target}")
            fault = self.fault
            if fault is None or not method.startswith(fault.method) or fault.inside not in target:
                return None
            fault.seen += 1
            if fault.seen - 1 not in fault.at:
                return None
            fault.struck += 1
        if fault.then is not None:
            fault.then()
        return fault.kind

    @contextlib.contextmanager
    def failing(
        self,
        kind: str,
        at: range,
        *,
        method: str = "",
        inside: str = "",
        then: Callable[[], None] | None = None,
    ) -> Iterator[Fault]:
        """Fail the requests that a `Fault` describes, inside the block."""
        self.fault = Fault(kind=kind, at=at, method=method, inside=inside, then=then)
        try:
            yield self.fault
        finally:
            self.fault = None

    def put(self, bucket: str, key: str, body: bytes) -> None:
        self.client.put_object(Bucket=bucket, Key=key, Body=body)

    def keys(self, bucket: str) -> list[str]:
        """Return the names of all objects, as a reader that lists the bucket sees them."""
        found = self.client.list_objects_v2(Bucket=bucket)
        return sorted(entry["Key"] for entry in found.get("Contents", ()))

    def content(self, bucket: str, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def unfinished(self, bucket: str) -> list[str]:
        """Return the names of uploads in parts that were begun and neither completed nor aborted."""
        return [
            entry["Key"] for entry in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
