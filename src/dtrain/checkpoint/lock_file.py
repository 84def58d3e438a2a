"""The lock file of a root, as all processes see it: create it, take it over from a dead owner, read it, remove it."""

from __future__ import annotations

import errno
import hashlib
import time
from contextlib import suppress

from msgspec.structs import replace

from dtrain import storage
from dtrain.checkpoint import lock_owner
from dtrain.checkpoint.lock_owner import LockOwner
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import AnyPath

LOCK_FILE = "run.lock"
_POLL_S = 0.2


def acquire_file(path: AnyPath, our_owner: LockOwner) -> LockOwner:
    """Create ``path`` with this process as owner, once no live owner is named there."""
    watched, since = b"", time.monotonic()
    while True:
        now = time.time()
        our_owner = replace(our_owner, acquired_at=now, heartbeat_at=now)
        if create_file(path, our_owner):
            return our_owner
        found = read_file(path)
        if found is None:
            # The owner released the lock after the attempt to create the file.
            continue
        owner = lock_owner.parse_owner(found)
        if found != watched:
            before = lock_owner.parse_owner(watched)
            if owner is not None and before is not None and owner.token == before.token:
                # The owner has renewed its heartbeat.
                raise _in_use_error(path, owner)
            watched, since = found, time.monotonic()
        status = lock_owner.owner_status(owner, our_owner, now=now, unchanged_s=time.monotonic() - since)
        if owner is not None and lock_owner.is_same_process(owner, our_owner):
            # This process has no lock on the root, so its last attempt failed half way.
            status = "dead"
        if status == "live":
            assert owner is not None, "a file without owner is never live"
            raise _in_use_error(path, owner)
        if status == "dead" and _take_over(path, found, our_owner):
            return our_owner
        time.sleep(_POLL_S)


def write_again(path: AnyPath, our_owner: LockOwner) -> None:
    """Create the lock file of a live owner again, or replace bytes that no process writes. Other owners keep the file.

    Waits: ``lock_owner.TORN_AFTER_S`` seconds for such bytes to change, because another process may be about to complete them.
    """
    watched, since = b"", time.monotonic()
    while not create_file(path, our_owner):
        found = read_file(path)
        if found is not None and lock_owner.parse_owner(found) is not None:
            return
        if found != watched:
            watched, since = found or b"", time.monotonic()
        status = lock_owner.owner_status(None, our_owner, now=time.time(), unchanged_s=time.monotonic() - since)
        if found is not None and status == "dead" and _take_over(path, found, our_owner):
            return
        time.sleep(_POLL_S)


def _take_over(path: AnyPath, found: bytes, our_owner: LockOwner) -> bool:
    """Replace a dead owner, or bytes that name no owner, by ``our_owner`` if the file is unchanged.

    The claim for the takeover is a lock file itself.
    """
    dead = lock_owner.parse_owner(found)
    token = hashlib.sha256(found).hexdigest()[:16] if dead is None else dead.token
    claim = path.with_name(f"{LOCK_FILE}.{token}")
    claimed = acquire_file(claim, replace(our_owner, token=lock_owner.new_token()))
    try:
        if read_file(path) != found:
            # Another process was faster, or the owner is alive.
            return False
        storage.replace_file(path, our_owner.encode())
        return True
    finally:
        remove_if_owned_by(claim, claimed)


def _in_use_error(path: AnyPath, owner: LockOwner) -> CheckpointError:
    return CheckpointError(
        f"{path.parent}: another live job uses this root ({owner.describe()}). Save into another root, or end that job first."
    )


def create_file(path: AnyPath, our_owner: LockOwner) -> bool:
    """Create the lock file. Return False if the file exists."""
    data = our_owner.encode()
    try:
        storage.create_file(path, data)
    except FileExistsError:
        return False
    except OSError:
        # A partly written file of this process must not block the next attempt. Files of other processes differ in the token.
        with suppress(OSError):
            found = read_file(path)
            if found is not None and data.startswith(found):
                storage.remove_file(path)
        raise
    return True


def read_file(path: AnyPath) -> bytes | None:
    """Return the content of a lock file; None if there is none, and b"" if the content cannot be a lock file."""
    try:
        size = storage.file_size(path)
        if size is None:
            return b"" if storage.exists(path) else None
        return b"" if size > lock_owner.MAX_BYTES else storage.read_file(path, limit=lock_owner.MAX_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            # The file was removed or replaced while being read.
            return None
        raise


def remove_if_owned_by(path: AnyPath, our_owner: LockOwner) -> None:
    """Remove a lock file if this process owns it. If the removal fails, a file with a dead owner remains."""
    with suppress(OSError, ConfigError):
        found = lock_owner.parse_owner(read_file(path) or b"")
        if found is not None and found.token == our_owner.token:
            storage.remove_file(path)
