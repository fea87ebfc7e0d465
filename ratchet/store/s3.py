"""Object storage on S3 and everything that speaks it, through boto3.

Endpoint, region and credentials come from the usual AWS variables (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID).
Traps: an ETag is no identity (it depends on the part size), so Ratchet compares sha256 digests only; and a HEAD request
is answered without a body, so that a missing object and a missing bucket look the same until one asks by GET.
"""

import copy
import io
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    FlexibleChecksumError,
    NoCredentialsError,
)
from botocore.parsers import ResponseParserError

from ratchet.errors import ConfigError, StoreError, StoreUnavailableError
from ratchet.store import s3_client
from ratchet.store.objects import ObjectInfo, ObjectNotFoundError, ObjectStore, check_key, check_range, folder_prefix

_PART_BYTES = 16 * 1024 * 1024
TRANSFER = TransferConfig(multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=10)
"""How files are cut and how many parts travel at once."""

_BODY_ATTEMPTS = 3
"""Attempts at reading one answer to its end: boto3 retries requests, but neither a connection that breaks in the body
nor a body whose checksum is not the server's."""
_UPLOAD_ATTEMPTS = 3
"""Attempts at an upload in parts that the server no longer knows of."""
_REFUSED_ATTEMPTS = 5
"""Attempts at a create-only put that was refused although the object is not there."""

_REFUSED = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")
_HINTS = {
    "NoSuchBucket": "the bucket does not exist; create it, or name another in the run's root",
    "InvalidAccessKeyId": "the access key is not known to the server; check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret does not fit the access key; check AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "these credentials may not do this here",
    "ExpiredToken": "the session token has expired; check AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "this machine's clock and the server's differ too much",
    "AuthorizationHeaderMalformed": "the bucket lies in another region; check AWS_REGION",
    "PermanentRedirect": "the bucket lies in another region; check AWS_REGION",
    "NotImplemented": "the server lacks this request; commits need create-only puts (If-None-Match: *)",
}


class S3Store(ObjectStore):
    """Objects below `s3://bucket/prefix`."""

    def __init__(self, uri: str) -> None:
        bucket, _, prefix = uri.removeprefix("s3://").rstrip("/").partition("/")
        if not bucket:
            raise ConfigError(f"no bucket in {uri!r}: expected s3://bucket/prefix")
        self.bucket = bucket
        self.prefix = folder_prefix(prefix)
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        try:
            self._client = s3_client.client()
        except (BotoCoreError, ValueError) as error:
            raise StoreError(f"cannot open {self.uri}: {error} (check the AWS_ variables)") from error
        self._is_bucket_known = False

    def get(self, key: str) -> bytes:
        with self._errors("read", key):
            return self._read(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(key, start, length)
        if length == 0:
            return b""
        with self._errors("read", key):
            try:
                return self._read(key, Range=f"bytes={start}-{start + length - 1}")
            except ClientError as error:
                if _code(error) in ("InvalidRange", "416"):
                    return b""
                raise

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._errors("write", key):
            if len(data) >= _PART_BYTES:
                self._upload(
                    lambda: self._client.upload_fileobj(io.BytesIO(data), self.bucket, self._name(key), Config=TRANSFER)
                )
            else:
                self._client.put_object(Bucket=self.bucket, Key=self._name(key), Body=bytes(data))

    def put_create(self, key: str, data: bytes) -> bool:
        with self._errors("write", key):
            for attempt in range(_REFUSED_ATTEMPTS):
                try:
                    self._client.put_object(Bucket=self.bucket, Key=self._name(key), Body=data, IfNoneMatch="*")
                    return True
                except ClientError as error:
                    if _code(error) not in _REFUSED:
                        raise
                # 409 says only that another conditional put or a delete was under way, not that an object is there.
                if self.size(key) is not None:
                    return False
                time.sleep(random.random() * 0.1 * 2**attempt)
        raise StoreError(
            f"cannot write {key!r} in {self.uri}: the server refuses to create it, yet shows no object there; "
            "some servers take a key for a folder once objects lie below it"
        )

    def size(self, key: str) -> int | None:
        with self._errors("read", key):
            try:
                return int(self._client.head_object(Bucket=self.bucket, Key=self._name(key))["ContentLength"])
            except ClientError as error:
                if not _is_missing(error):
                    raise
                # Once is enough: a bucket that answered does not vanish while a run goes on.
                if not self._is_bucket_known and not _is_missing(self._explain(error, key)):
                    raise
                self._is_bucket_known = True
                return None

    def list_objects(self, folder: str) -> Iterator[ObjectInfo]:
        with self._errors("list", folder):
            items = [item for page in self._pages(folder) for item in page.get("Contents", [])]
        # Servers that keep a tree sort folder by folder ("a/b" before "a-b"). A key that ends in "/" marks a folder.
        found = [
            ObjectInfo(item["Key"].removeprefix(self.prefix), item["Size"], item["LastModified"].timestamp())
            for item in items
        ]
        yield from sorted(
            (info for info in found if not info.key.endswith("/") and info.key), key=lambda info: info.key
        )

    def list_folders(self, folder: str) -> list[str]:
        with self._errors("list", folder):
            items = [item for page in self._pages(folder, Delimiter="/") for item in page.get("CommonPrefixes", [])]
        return sorted(item["Prefix"].rstrip("/").rpartition("/")[2] for item in items)

    def delete(self, key: str) -> None:
        with self._errors("delete", key):
            try:
                self._client.delete_object(Bucket=self.bucket, Key=self._name(key))
            except ClientError as error:
                # Amazon's answer is the same whether there was one; that of others is not.
                if _code(error) != "NoSuchKey":
                    raise

    def upload_file(self, path: Path, key: str, *, is_given: bool = False) -> None:
        with self._errors("write", key):
            self._upload(lambda: self._client.upload_file(str(path), self.bucket, self._name(key), Config=TRANSFER))

    def download_file(self, key: str, path: Path) -> None:
        temporary = path.with_name(f".tmp-{uuid.uuid4().hex}")
        with self._errors("read", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._download(self._name(key), temporary)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def child(self, folder: str) -> "S3Store":
        # A copy, and no new store: the child must use this one's credentials whatever the environment says by now.
        child = copy.copy(self)
        child.prefix = self.prefix + folder_prefix(check_key(folder))
        child.uri = f"{self.uri}/{folder}"
        return child

    def _name(self, key: str) -> str:
        return self.prefix + check_key(key)

    def _read(self, key: str, **options: str) -> bytes:
        for attempt in range(1, _BODY_ATTEMPTS + 1):
            body = self._client.get_object(Bucket=self.bucket, Key=self._name(key), **options)["Body"]
            try:
                return bytes(body.read())
            except BotoCoreError:
                if attempt == _BODY_ATTEMPTS:
                    raise
            finally:
                body.close()
        raise AssertionError("unreachable")

    def _download(self, name: str, path: Path) -> None:
        for attempt in range(1, _BODY_ATTEMPTS + 1):
            try:
                self._client.download_file(self.bucket, name, str(path), Config=TRANSFER)
                return
            except FlexibleChecksumError:
                if attempt == _BODY_ATTEMPTS:
                    raise

    def _upload(self, upload: Callable[[], None]) -> None:
        """Upload in parts. If the answer to the last request is lost, the server no longer knows what is repeated."""
        for attempt in range(1, _UPLOAD_ATTEMPTS + 1):
            try:
                upload()
                return
            except (ClientError, Boto3Error) as error:
                inner = _inner(error)
                is_unknown = isinstance(inner, ClientError) and _code(inner) in ("NoSuchUpload", "InvalidPart")
                if not is_unknown or attempt == _UPLOAD_ATTEMPTS:
                    raise

    def _pages(self, folder: str, **options: str) -> Iterator[dict[str, Any]]:
        prefix = self.prefix + folder_prefix(folder)
        paginator = self._client.get_paginator("list_objects_v2")
        return iter(paginator.paginate(Bucket=self.bucket, Prefix=prefix, **options))

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        place = f"{key!r} in {self.uri}"
        try:
            yield
        except StoreError:
            raise
        except (ClientError, Boto3Error, BotoCoreError) as error:
            inner = _inner(error)
            if isinstance(inner, ClientError):
                answer = self._explain(inner, key)
                if _is_missing(answer):
                    raise ObjectNotFoundError(f"no object {place}") from error
                code = _code(answer)
                hint = _HINTS.get(code) or answer.response.get("Error", {}).get("Message", "")
                if not code or code.isdigit():  # S3's own have names
                    code = code or str(answer.response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
                    hint += "; is AWS_ENDPOINT_URL an S3 server?"
                kind = StoreUnavailableError if s3_client.is_passing(answer.response) else StoreError
                raise kind(f"cannot {verb} {place}: {code}: {hint}") from error
            kind = StoreUnavailableError if s3_client.is_broken_off(inner) else StoreError
            raise kind(f"cannot {verb} {place}: {inner}{_advice(inner)}") from error
        except ResponseParserError as error:
            raise StoreError(f"cannot {verb} {place}: is AWS_ENDPOINT_URL an S3 server?") from error
        except OSError as error:
            kind = StoreUnavailableError if s3_client.is_broken_off(error) else StoreError
            raise kind(f"cannot {verb} {place}: {error}") from error

    def _explain(self, error: ClientError, key: str) -> ClientError:
        """Return the error that names the cause where `error` is a bare status number, all that HEAD yields."""
        if _code(error).isdigit() and error.operation_name == "HeadObject":
            try:
                self._client.get_object(Bucket=self.bucket, Key=self._name(key))["Body"].close()
            except ClientError as named:
                return named
        return error


def _code(error: ClientError) -> str:
    return s3_client.code(error.response)


def _inner(error: Exception) -> BaseException:
    """Return the server's error: transfers raise one of their own around it."""
    if isinstance(error, ClientError | BotoCoreError):
        return error
    return getattr(error, "last_exception", None) or error.__cause__ or error.__context__ or error


def _is_missing(error: ClientError) -> bool:
    # A bare 404 to anything but HEAD comes from something that is not S3.
    return _code(error) == "NoSuchKey" or (_code(error) in ("404", "NotFound") and error.operation_name == "HeadObject")


def _advice(error: BaseException) -> str:
    if isinstance(error, NoCredentialsError):
        return "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, EndpointConnectionError):
        return "; check AWS_ENDPOINT_URL, and that the server runs"
    return ""
