"""Access Amazon S3 and compatible servers. A file is created by a put with ``If-None-Match: *``."""

from __future__ import annotations

import secrets
from typing import Any

from dtrain.storage.stores.base import ObjectStore, Upload

OPTIONS: dict[str, Any] = {
    "use_listings_cache": False,
    "config_kwargs": {
        "retries": {"total_max_attempts": 1},
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": 32,
    },
}
_MARK_KEY = "dtrain-upload"


class S3Store(ObjectStore):
    """Store of a bucket."""

    def __init__(self, fs: Any) -> None:
        super().__init__(fs)
        # Attempts of s3fs for each request.
        fs.retries = 1

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        options = {} if mark is None else {"IfNoneMatch": "*", "Metadata": {_MARK_KEY: mark}}
        self.fs.call_s3("put_object", **_bucket_and_key(key), Body=data, **options)

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        return _mark_of(self.fs, key) == mark

    def upload(self, key: str, count: int) -> Upload:
        return _S3Upload(self.fs, key)


def _bucket_and_key(key: str) -> dict[str, str]:
    bucket, name = key.split("/", 1)
    return {"Bucket": bucket, "Key": name}


def _mark_of(fs: Any, key: str) -> str | None:
    try:
        response = fs.call_s3("head_object", **_bucket_and_key(key))
    except FileNotFoundError:
        return None
    return str(response.get("Metadata", {}).get(_MARK_KEY))


class _S3Upload:
    def __init__(self, fs: Any, key: str) -> None:
        self._fs = fs
        self._key, self._object = key, _bucket_and_key(key)
        # The mark distinguishes this upload from another upload of the same name after a lost answer.
        self._mark = secrets.token_hex(16)
        response = fs.call_s3("create_multipart_upload", **self._object, Metadata={_MARK_KEY: self._mark})
        self._id = response["UploadId"]
        self._tags: dict[int, str] = {}

    def send_part(self, number: int, begin: int, data: bytes) -> None:
        response = self._fs.call_s3("upload_part", **self._object, UploadId=self._id, PartNumber=number + 1, Body=data)
        self._tags[number] = response["ETag"]

    def finish(self) -> None:
        parts = [{"PartNumber": number + 1, "ETag": self._tags[number]} for number in sorted(self._tags)]
        self._fs.call_s3(
            "complete_multipart_upload", **self._object, UploadId=self._id, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
        )

    def is_committed(self) -> bool:
        return _mark_of(self._fs, self._key) == self._mark

    def clean_up(self, *, finished: bool) -> None:
        if not finished:
            self._fs.call_s3("abort_multipart_upload", **self._object, UploadId=self._id)
