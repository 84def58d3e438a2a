"""``dtrain checkpoints``: what a root of checkpoints holds, whether it is as it was written, and its weights elsewhere."""

from __future__ import annotations

from dtrain.cli.checkpoints.app import app

__all__ = ["app"]
