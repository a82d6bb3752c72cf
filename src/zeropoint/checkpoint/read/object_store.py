"""Objects behind URLs, read through fsspec: S3 and Google Cloud Storage.

Credentials, regions and endpoints come from where those packages look for them: the environment
(`AWS_ENDPOINT_URL`, `FSSPEC_S3_...`), their configuration files, the machine's role. They also repeat
requests that failed in passing; what still fails is an error here, and never a short or partial result.

An object's identity is its ETag, which changes with every upload. Where a store gives none, it is the time of
the last change.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from zeropoint.checkpoint.read.file_names import is_inside
from zeropoint.errors import CheckpointError, printable

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "memory": "fsspec"}
"""The package that fsspec needs for each scheme."""
_SPELLED = ("s3", "gs")
"""The schemes of URLs that are read; memory, which ends with the process, is for tests alone."""
# What the packages raise besides OSError: failures of credentials, of the connection, of the answer.
_FAILURES = {
    "s3": ("botocore.exceptions:BotoCoreError", "botocore.exceptions:ClientError", "aiohttp:ClientError"),
    "gs": ("gcsfs.retry:HttpError", "google.auth.exceptions:GoogleAuthError", "aiohttp:ClientError"),
    "memory": (),
}
# One request takes so many bytes, and requests of one read are under way together: a single stream of a store
# carries less than a network does.
_REQUEST_BYTES = 8 << 20
# Parts of an upload, of which 10,000 make the largest object of S3, and how many are under way together.
# Google's package checks that bytes arrive as they were sent when an option says so; for S3 it is done here.
_PART_BYTES = 32 << 20
_UPLOAD: dict[str, dict[str, Any]] = {
    "s3": {"chunksize": _PART_BYTES, "max_concurrency": 4},
    "gs": {"chunksize": _PART_BYTES, "consistency": "md5"},
    "memory": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """State of a file: equal stamps mean unchanged content.

    Nobody replaced, resized or rewrote it. `ctime_ns`: of the last change of the file or its metadata, which
    cannot be set back, as `mtime_ns` can. So a new owner, name or link counts as a change too, which costs
    work and no harm. `identity`: the ETag of an object, which then has no inode and
    no device; empty for a file.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    identity: str = ""


@dataclass(frozen=True, slots=True, order=True)
class RemotePath:
    """An object or name prefix, as a URL without a final slash.

    >>> path = RemotePath("s3://bucket/model") / "config.json"
    >>> str(path), path.name, str(path.parent)
    ('s3://bucket/model/config.json', 'config.json', 's3://bucket/model')
    """

    url: str

    @staticmethod
    def parse(text: str) -> RemotePath:
        """Return the path of a URL; raises CheckpointError for bad ones."""
        scheme, _, rest = text.partition("://")
        scheme = {"s3a": "s3", "gcs": "gs"}.get(scheme.lower(), scheme.lower())
        if scheme not in _SPELLED:
            raise CheckpointError(
                f"{printable(text)} has the scheme {scheme}, but s3, gs and file are read; use a directory, "
                "or a bucket of such a store"
            )
        if not rest.strip("/"):
            raise CheckpointError(f"{printable(text)} names no bucket; write {scheme}://BUCKET/NAME")
        return RemotePath(f"{scheme}://{rest.strip('/')}")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, other: str | PurePath) -> RemotePath:
        inner = other if isinstance(other, str) else other.as_posix()
        if inner == ".":
            return self
        if not is_inside(inner):
            raise CheckpointError(
                f"{printable(inner)} is not a name below {printable(self.url)}; do not trust where it is from"
            )
        return RemotePath(f"{self.url}/{inner}")

    @property
    def name(self) -> str:
        """Part behind the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Part before the last slash; a bucket is its own parent."""
        head = self.url.rpartition("/")[0]
        return self if head.endswith("/") else RemotePath(head)

    @property
    def scheme(self) -> str:
        """Scheme of the URL, before `://`."""
        return self.url.partition("://")[0]


def filesystem(path: RemotePath) -> Any:
    """Return fsspec's file system for a path, one per scheme.

    Raises CheckpointError where the package for the scheme is not installed.
    """
    import fsspec  # only a URL needs it, and it takes its time to load

    try:
        found = fsspec.filesystem(path.scheme)
    except ImportError as error:
        package = _PACKAGES[path.scheme]
        raise CheckpointError(
            f"{printable(str(path))} needs the package {package}, which is not installed; "
            "pip install 'zeropoint[remote]'"
        ) from error
    if path.scheme == "s3":
        # ValueError: an endpoint that is no URL.
        unreachable: tuple[type[BaseException], ...] = (ValueError, *failures(path))
        try:
            found.connect()  # does nothing where it is connected already
        except unreachable as error:
            raise CheckpointError(
                f"{printable(str(path))} cannot be reached: {reason(error)}; check AWS_ENDPOINT_URL, the "
                "region and the configuration"
            ) from OSError(str(error))
    return found


def failures(path: RemotePath) -> tuple[type[BaseException], ...]:
    """Return the exceptions by which the packages say that a request failed."""
    found: list[type[BaseException]] = [OSError]
    for spelled in _FAILURES[path.scheme]:
        module, _, name = spelled.partition(":")
        found.append(getattr(importlib.import_module(module), name))
    return tuple(found)


def reason(error: BaseException) -> str:
    """Return the reason of a failure in one line."""
    said = getattr(error, "strerror", None)
    if said is None and isinstance(error, FileNotFoundError):
        said = "there is no such object"  # stores say no more than its name, each in its own way
    return printable(said or str(error) or type(error).__name__)[1:-1]


def _advised(path: RemotePath, error: BaseException) -> str:
    """Return why a request failed, and what to check."""
    bucket = RemotePath(f"{path.scheme}://{path.url.partition('://')[2].partition('/')[0]}")
    if isinstance(error, FileNotFoundError):
        if path != bucket and _is_there(bucket):
            return f"there is no such object in bucket {printable(bucket.name)}; check the name behind it"
        return f"there is no bucket {printable(bucket.name)}; check its name, and the endpoint and region"
    if isinstance(error, PermissionError):
        return (
            f"access is denied ({reason(error)}); check the permissions of these credentials for bucket "
            f"{printable(bucket.name)}"
        )
    return f"{reason(error)}; check the URL, permissions and the credentials"


def _is_there(bucket: RemotePath) -> bool:
    """Return whether there is a bucket, as far as may be seen."""
    try:
        filesystem(bucket).ls(bucket.url, detail=False)
    except FileNotFoundError:
        return False
    except failures(bucket):
        pass
    return True


class RemoteFile:
    """An object read by ranges, with the stamp of its latest listing."""

    descriptor = None

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._filesystem = filesystem(path)
        self._failures = failures(path)
        try:
            self.stamp = stamp(path)
        except self._failures as error:
            raise CheckpointError(
                f"{printable(str(path))} cannot be opened: {_advised(path, error)}"
            ) from error

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the object's bytes from absolute `offset` on.

        Raises CheckpointError where the object ends before the buffer is full, which means that it changed
        after its header was read, or where the store fails.
        """
        starts = range(offset, offset + len(buffer), _REQUEST_BYTES)
        ends = [min(start + _REQUEST_BYTES, offset + len(buffer)) for start in starts]
        try:
            parts = self._ranges(list(starts), ends)
        except self._failures as error:
            if _is_another(error):
                raise CheckpointError(
                    f"{printable(str(self._path))} changed since its header was read: its ETag is no longer "
                    f"{self.stamp.identity}; stop what writes to it and start again"
                ) from error
            raise CheckpointError(
                f"{printable(str(self._path))} cannot be read at byte {offset}: {reason(error)}; check the "
                "connection, and retry"
            ) from (error if isinstance(error, OSError) else ConnectionError(str(error)))
        for start, end, part in zip(starts, ends, parts, strict=True):
            if len(part) != end - start:
                raise CheckpointError(
                    f"{printable(str(self._path))} gave {len(part)} bytes from byte {start} on, but "
                    f"{end - start} were there when its header was read: the object changed while reading; "
                    "stop what writes to it and start again"
                )
            buffer[start - offset : end - offset] = part

    def _ranges(self, starts: list[int], ends: list[int]) -> list[bytes]:
        """Return byte ranges, requested concurrently; S3 refuses another version's."""
        if self._path.scheme != "s3" or not self.stamp.identity.startswith('"'):
            paths = [self._path.url] * len(starts)
            found: list[bytes] = self._filesystem.cat_ranges(paths, starts, ends, on_error="raise")
            return found
        from fsspec.asyn import sync  # as in `filesystem`

        wanted = _matching(self._filesystem, self._path.url, self.stamp.identity, starts, ends)
        matching: list[bytes] = sync(self._filesystem.loop, lambda: wanted)
        return matching

    def close(self) -> None:
        """Do nothing: there is no connection of its own."""


async def _matching(
    store: Any, url: str, etag: str, starts: Sequence[int], ends: Sequence[int]
) -> list[bytes]:
    """Return ranges of an S3 object with this ETag.

    s3fs 2026.7 has no public call for this; an answer that breaks off is asked for again, as its own are.
    """
    repeated = importlib.import_module("s3fs.core")._error_wrapper  # only S3 needs it
    bucket, key, _ = store.split_path(url)

    async def part(start: int, end: int) -> bytes:
        answer = await store._call_s3(
            "get_object",
            Bucket=bucket,
            Key=key,
            Range=f"bytes={start}-{end - 1}",
            IfMatch=etag,
            **store.req_kw,
        )
        async with answer["Body"] as body:
            content: bytes = await body.read()
        return content

    tasks = [repeated(part, args=span, retries=store.retries) for span in zip(starts, ends, strict=True)]
    return list(await asyncio.gather(*tasks))


def _is_another(error: BaseException) -> bool:
    """Return whether S3 refused a range since the object's ETag is another."""
    answer = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return bool(answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == _PRECONDITION_FAILED)


_PRECONDITION_FAILED = 412


def stamp(path: RemotePath) -> Stamp:
    """Return an object's stamp; raises FileNotFoundError or one of `failures`."""
    store = filesystem(path)
    store.invalidate_cache(path.parent.url)
    facts = store.info(path.url)
    if facts["type"] != "file":
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not an object", path.url)
    identity = facts.get("ETag") or facts.get("etag") or store.modified(path.url)
    return Stamp(size=facts["size"], mtime_ns=0, ctime_ns=0, inode=0, device=0, identity=str(identity))


def exists(path: RemotePath) -> bool:
    """Return whether `path` exists; raises CheckpointError where the store fails."""
    return any(name == path.name for name, _ in listing(path.parent, may_be_absent=True))


def is_folder(path: RemotePath) -> bool:
    """Return whether objects lie below `path`; raises CheckpointError on failures."""
    return bool(listing(path, may_be_absent=True))


def listing(folder: RemotePath, *, may_be_absent: bool = False) -> list[tuple[str, bool]]:
    """Return the names below `folder`, each with whether it is a folder.

    Raises CheckpointError where the store fails, or there is no such folder and that was not allowed.
    """
    store = filesystem(folder)
    try:
        found: Iterable[dict[str, Any]] = store.ls(folder.url, detail=True, refresh=True)
    except FileNotFoundError as error:
        if may_be_absent:
            return []
        raise CheckpointError(f"{printable(str(folder))} does not exist; check the URL") from error
    except failures(folder) as error:
        raise CheckpointError(
            f"{printable(str(folder))} cannot be listed: {_advised(folder, error)}"
        ) from error
    own = folder.url.partition("://")[2]
    # A store may list an object by its own name, and a folder by an empty object that represents it.
    inside = [entry for entry in found if str(entry["name"]).strip("/") != own]
    return [(str(e["name"]).rstrip("/").rpartition("/")[2], e["type"] == "directory") for e in inside]


def everything(folder: RemotePath) -> list[str]:
    """Return the sorted names of all objects below `folder`, `/` between parts."""
    store = filesystem(folder)
    store.invalidate_cache(folder.url)
    with _writing(folder, "listed"):
        found = store.find(folder.url)
    own = folder.url.partition("://")[2] + "/"
    return sorted(str(name).strip("/").removeprefix(own) for name in found)


def upload(local: PurePath, target: RemotePath) -> Stamp:
    """Upload a local file as an object, atomically; return its stamp.

    At most 128 MiB are in memory. Raises CheckpointError where the store fails, or holds other bytes.
    """
    with _writing(target, "written"):
        filesystem(target).put_file(str(local), target.url, **_UPLOAD[target.scheme])
        made = stamp(target)
    if target.scheme == "s3":
        with open(local, "rb") as file:
            _require_arrived(target, made, iter(lambda: file.read(_PART_BYTES), b""))
    return made


def _require_arrived(target: RemotePath, made: Stamp, parts: Iterable[bytes]) -> None:
    """Raise CheckpointError where an S3 object differs from the sent parts.

    Its ETag says so: the MD5 of a single part, or the MD5 of the MD5s of several. An ETag that is neither
    (encrypted by a key of KMS, or of a store that counts otherwise) proves nothing, and the bytes are read.
    """
    whole, digests, sizes = hashlib.md5(usedforsecurity=False), [], []
    for part in parts:
        whole.update(part)
        digests.append(hashlib.md5(part, usedforsecurity=False).digest())
        sizes.append(len(part))
    joined = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    if made.identity.strip('"') in (whole.hexdigest(), f"{joined}-{len(digests)}"):
        return
    problem = f"{printable(str(target))} has other bytes than were sent to it"
    remedy = "check the network between here and the store, and start the same command again"
    if made.size != sum(sizes):
        raise CheckpointError(f"{problem}: {made.size} instead of {sum(sizes)}; {remedy}")
    file, begin = RemoteFile(target), 0
    for digest, size in zip(digests, sizes, strict=True):
        found = bytearray(size)
        file.read_into(memoryview(found), begin)
        if hashlib.md5(found, usedforsecurity=False).digest() != digest:
            raise CheckpointError(f"{problem} between byte {begin} and {begin + size}; {remedy}")
        begin += size


def write(target: RemotePath, content: bytes) -> Stamp:
    """Write an object in one request; raises CheckpointError on failures."""
    with _writing(target, "written"):
        filesystem(target).pipe_file(target.url, content)
        made = stamp(target)
    if target.scheme == "s3":
        _require_arrived(target, made, [content])
    return made


def remove(target: RemotePath) -> None:
    """Remove an object, if any; raises CheckpointError on failures."""
    with _writing(target, "removed"), contextlib.suppress(FileNotFoundError):
        filesystem(target).rm_file(target.url)


@contextlib.contextmanager
def _writing(path: RemotePath, verb: str) -> Iterator[None]:
    try:
        yield
    except failures(path) as error:
        # Callers that test the type of an error look for the operating system's.
        cause = error if isinstance(error, OSError) else ConnectionError(str(error))
        raise CheckpointError(
            f"{printable(str(path))} cannot be {verb}: {_advised(path, error)}, and start the same command "
            "again"
        ) from cause
