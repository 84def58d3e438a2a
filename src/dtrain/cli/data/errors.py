"""Errors name the command that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dtrain.errors import ConfigError, DataError


@contextmanager
def named(command: str) -> Iterator[None]:
    """Put the command before the message of an error."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(f"data: {command}: {error}") from error
    except OSError as error:
        raise DataError(f"data: {command}: {error}") from error
