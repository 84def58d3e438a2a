"""Requests of providers without a server in these tests: Oracle's SDK calls, and how Google composes many parts."""

from types import SimpleNamespace
from unittest import mock

import pytest

from dtrain.storage.object_stores import OciStore, _compose_levels
from dtrain.storage.remote_store import RemoteStore, Upload

KEY = "bucket@namespace/folder/file"
WHERE = ("namespace", "bucket", "folder/file")


@pytest.fixture
def client():
    """Client with the signatures of Oracle's SDK, which records its calls."""
    oci = pytest.importorskip("oci")
    client = mock.create_autospec(oci.object_storage.ObjectStorageClient, instance=True)
    client.create_multipart_upload.return_value.data.upload_id = "upload"
    client.upload_part.side_effect = lambda *where: SimpleNamespace(headers={"etag": f"tag-{where[4]}"})
    return client


@pytest.fixture
def store(client):
    return OciStore(SimpleNamespace(oci_client=client, split_path=lambda key: ("bucket", "namespace", key.split("/", 1)[1])))


def test_oci_file_is_created_with_a_condition_and_a_mark(store, client):
    store.put(KEY, b"x", mark="mark")
    client.put_object.assert_called_once_with(*WHERE, b"x", if_none_match="*", opc_meta={"dtrain-upload": "mark"})
    client.head_object.return_value.headers = {"opc-meta-dtrain-upload": "mark"}
    assert store.was_written_by(KEY, "mark", b"x")
    assert not store.was_written_by(KEY, "another", b"x")


def test_oci_upload_is_committed_with_all_parts_in_order(store, client):
    upload = Upload(store, KEY)
    for number in (1, 0):
        upload.add_part(number, store.send_part(upload, number, 0, b"x"))
    store.finish_upload(upload)
    (*where, upload_id, details), condition = client.commit_multipart_upload.call_args
    assert (tuple(where), upload_id, condition) == (WHERE, "upload", {"if_none_match": "*"})
    assert [(commit_part.part_num, commit_part.etag) for commit_part in details.parts_to_commit] == [(1, "tag-1"), (2, "tag-2")]
    store.clean_up_upload(upload, finished=True)
    client.abort_multipart_upload.assert_not_called()
    store.clean_up_upload(upload, finished=False)
    client.abort_multipart_upload.assert_called_once_with(*WHERE, "upload")


@pytest.mark.parametrize(("parts", "composed"), [(1, []), (32, []), (33, [2]), (32 * 32, [32]), (32 * 32 + 1, [33, 2])])
def test_google_composes_at_most_32_objects_per_call(parts, composed):
    upload = Upload(RemoteStore(None), "bucket/file")
    for number in range(parts):
        upload.add_part(number, f"part-{number}")
    *levels, last = _compose_levels(upload)
    assert [len(level) for level in levels] == composed
    assert len(last) == 1
    names = upload.tags
    for level in (*levels, last):
        assert [name for _, group in level for name in group] == names
        assert all(len(group) <= 32 for _, group in level)
        names = [name for name, _ in level]
