"""Parsing of URLs and local paths."""

import importlib.util
from pathlib import Path

import pytest

from dtrain import storage
from dtrain.errors import ConfigError


def test_text_without_protocol_is_a_local_path(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for text in (str(tmp_path / "link"), tmp_path / "link", f"file://{tmp_path}/link"):
        assert storage.resolve_path(text) == tmp_path / "real"


def test_remote_path_joins_like_a_path():
    root = storage.resolve_path("memory://bucket//runs/a/")
    step = root / "step-1" / "sub/file"
    assert str(step) == "memory://bucket/runs/a/step-1/sub/file"
    assert (step.name, str(step.parent), str(step.with_name("x"))) == (
        "file",
        "memory://bucket/runs/a/step-1/sub",
        "memory://bucket/runs/a/step-1/sub/x",
    )
    assert storage.resolve_path(str(step)) == step == storage.resolve_path(step)
    assert {step: 1}[root / "step-1/sub/file"] == 1
    top = storage.resolve_path("memory://bucket")
    assert (top.parent, top.name, str(top)) == (top, "", "memory://bucket")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://host/x", r"protocol must be one of s3, gs, az, oci, sftp, memory, or http, https for reading, got ftp://"),
        ("s3:///x", "URL must name a bucket"),
        ("sftp:///x", "URL must name a host"),
        ("memory://b/../x", r"parts must be names of files or folders, got '\.\.'"),
        ("memory://b/a/./x", r"parts must be names of files or folders, got '\.'"),
        (Path("s3://b/x"), r"path must be a URL as a str, got Path\('s3:/b/x'\), which has lost a slash"),
        (
            "sftp://me:secret@host/x",
            r"^sftp://\.\.\.@host/x: URL must not have a password, which would appear in logs. Use a key",
        ),
    ],
    ids=["protocol", "bucket", "host", "up", "here", "path", "password"],
)
def test_invalid_locations_are_refused(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        storage.resolve_path(text)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "..", "a/../b"])
def test_name_outside_the_folder_is_refused(name):
    with pytest.raises(ConfigError, match="parts must be names of files or folders, got"):
        storage.resolve_path("memory://bucket/a") / name


EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "oci": "oci", "sftp": "sftp"}


@pytest.mark.parametrize("protocol", EXTRAS)
def test_missing_library_error_names_the_extra(protocol, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    extra = EXTRAS[protocol]
    with pytest.raises(ConfigError, match=rf'^{protocol}:// needs the package \w+: pip install "dtrain\[{extra}\]"$'):
        storage.resolve_path(f"{protocol}://bucket/x")
