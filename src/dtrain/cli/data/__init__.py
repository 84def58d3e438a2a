"""``dtrain data``: shards of samples, made of what is there, and looked at."""

from __future__ import annotations

from dtrain.cli.data.app import app

__all__ = ["app"]
