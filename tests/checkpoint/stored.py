"""Files of a step as a test looks at them, and changes to them whose digests are right again."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dtrain.checkpoint import layout
from dtrain.checkpoint.index import StoredShard
from dtrain.checkpoint.plan import full_region
from dtrain.checkpoint.reader import open_checkpoint


def shards_of(step: Path, rank: int = 0) -> dict[str, StoredShard]:
    """The first shard of each tensor of the run, and of each tensor that only ``rank`` has, that are in data files."""
    reader = open_checkpoint(step)
    shards = reader.find_shards({key: full_region(ref.shape) for key, ref in reader.refs.items()})
    first = {key: stored[0] for key, stored in shards.items() if stored and stored[0].file}
    return {**first, **reader.shards_of_rank(rank)}


def index_shards(parts: Iterable[Mapping[str, StoredShard]]) -> dict[str, list[StoredShard]]:
    """Return the shards of several ranks or files by key."""
    index: dict[str, list[StoredShard]] = {}
    for shards in parts:
        for key, shard in shards.items():
            index.setdefault(key, []).append(shard)
    return index


def json_of(step: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file of a step."""
    content: dict[str, Any] = json.loads((step / name).read_bytes())
    return content


def compact(body: Any) -> bytes:
    """Return JSON as the writer writes it."""
    return json.dumps(body, separators=(",", ":")).encode()


def sign(
    step: Path,
    *,
    ranks: Mapping[int, bytes] | None = None,
    index: bytes | None = None,
    change: Callable[[dict[str, Any]], object] | None = None,
) -> None:
    """Give a step other indexes of ranks, another index or another manifest, with digests and sizes that are right."""
    if ranks is not None:
        body = json_of(step, layout.INDEX)
        for rank, data in ranks.items():
            (step / layout.index_name(rank)).write_bytes(data)
            body["files"][rank][:2] = [len(data), hashlib.sha256(data).hexdigest()]
        index = compact(body) if index is None else index
    manifest = json_of(step, layout.MANIFEST)
    del manifest["sha256"]
    if index is not None:
        (step / layout.INDEX).write_bytes(index)
        manifest["index_bytes"], manifest["index_sha256"] = len(index), hashlib.sha256(index).hexdigest()
    names = [path for path in step.iterdir() if path.is_file() and path.name != layout.MANIFEST]
    manifest["bytes"] = sum(path.stat().st_size for path in names)
    if change is not None:
        change(manifest)
    (step / layout.MANIFEST).write_bytes(layout._sign(manifest))
