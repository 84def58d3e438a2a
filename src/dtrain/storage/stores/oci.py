"""Access Oracle's object storage. A file is created by a put with ``If-None-Match: *`` through the SDK client of ocifs."""

from __future__ import annotations

import errno
import secrets
from typing import Any

from dtrain.storage.retry import TruncatedError
from dtrain.storage.stores.base import ObjectStore, Upload

OPTIONS: dict[str, Any] = {"use_listings_cache": False}
_MARK_KEY = "dtrain-upload"


class OciStore(ObjectStore):
    """Store of a bucket, ``bucket@namespace`` in the URL."""

    def put(self, key: str, data: bytes, *, mark: str | None = None) -> None:
        bucket, namespace, name = self.fs.split_path(key)
        options = {} if mark is None else {"if_none_match": "*", "opc_meta": {_MARK_KEY: mark}}
        self.fs.oci_client.put_object(namespace, bucket, name, data, **options)

    def was_written_by(self, key: str, mark: str, data: bytes) -> bool:
        bucket, namespace, name = self.fs.split_path(key)
        return _mark_of(self.fs.oci_client, namespace, bucket, name) == mark

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        bucket, namespace, name = self.fs.split_path(key)
        answer = self.fs.oci_client.get_object(namespace, bucket, name, range=f"bytes={begin}-{end - 1}")
        data = bytes(answer.data.content)
        if len(data) != end - begin:
            raise TruncatedError(f"the server must send {end - begin} bytes, got {len(data)}")
        return data

    def remove(self, key: str) -> None:
        bucket, namespace, name = self.fs.split_path(key)
        self.fs.oci_client.delete_object(namespace, bucket, name)

    def copy(self, old: str, new: str) -> None:
        raise OSError(errno.EOPNOTSUPP, "the server copies some time later, and dtrain does not wait for such copies")

    def upload(self, key: str, count: int) -> Upload:
        return _OciUpload(self.fs, key)


def _mark_of(client: Any, namespace: str, bucket: str, name: str) -> str | None:
    from oci.exceptions import ServiceError

    try:
        return str(client.head_object(namespace, bucket, name).headers.get(f"opc-meta-{_MARK_KEY}"))
    except ServiceError as error:
        if error.status == 404:
            return None
        raise


class _OciUpload:
    def __init__(self, fs: Any, key: str) -> None:
        from oci.object_storage.models import CreateMultipartUploadDetails

        self._client = fs.oci_client
        bucket, namespace, self._name = fs.split_path(key)
        self._bucket = (namespace, bucket)
        self._mark = secrets.token_hex(16)
        details = CreateMultipartUploadDetails(object=self._name, metadata={f"opc-meta-{_MARK_KEY}": self._mark})
        self._id = self._client.create_multipart_upload(*self._bucket, details, if_none_match="*").data.upload_id
        self._tags: dict[int, str] = {}

    def send_part(self, number: int, begin: int, data: bytes) -> None:
        response = self._client.upload_part(*self._bucket, self._name, self._id, number + 1, data)
        self._tags[number] = response.headers["etag"]

    def finish(self) -> None:
        from oci.object_storage.models import CommitMultipartUploadDetails, CommitMultipartUploadPartDetails

        parts = [CommitMultipartUploadPartDetails(part_num=number + 1, etag=tag) for number, tag in sorted(self._tags.items())]
        details = CommitMultipartUploadDetails(parts_to_commit=parts)
        self._client.commit_multipart_upload(*self._bucket, self._name, self._id, details, if_none_match="*")

    def is_committed(self) -> bool:
        return _mark_of(self._client, *self._bucket, self._name) == self._mark

    def clean_up(self, *, finished: bool) -> None:
        if not finished:
            self._client.abort_multipart_upload(*self._bucket, self._name, self._id)
