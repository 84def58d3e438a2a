"""The error tree: every error that dtrain raises on purpose.

::

    DtrainError
    ├── ConfigError (ValueError)            an argument, option or batch that cannot be right
    ├── StaleStateError (RuntimeError)      a TrainState that was already stepped is used again
    ├── StepError (RuntimeError)            a training step that cannot be made sense of (no weight, no gradient)
    │   ├── NonFiniteError                  losses or gradients are infinite or NaN as often as the run allows
    │   └── OutOfMemoryError                 the smallest microbatch needs more memory than there is
    ├── DistError (RuntimeError)            ranks that did not meet, or that disagree
    │   ├── PeerError                       this rank is fine; another one failed, and all of them stop
    │   └── DesyncError                     ranks hold different values of what is to be the same on them
    ├── CheckpointError (RuntimeError)
    │   ├── CorruptCheckpointError          a committed checkpoint that fails verification
    │   └── CheckpointMismatchError         a sound checkpoint that does not fit what it is loaded into
    ├── DataError (RuntimeError)            samples that could not be read: a shard, a worker, a dataset at fault
    │   └── ShardError                      a whole shard is missing or damaged, or does not come
    └── RankError (RuntimeError)            a rank started by dtrain.testing or spawn failed or hung

A message is one line: where, what came with its value, what to do. ``ValueError`` subclasses mean bad input,
``RuntimeError`` subclasses mean that the state of the world is at fault.
"""

from __future__ import annotations


def escape_unprintable(text: str, *, keep: str = "") -> str:
    """Escape the characters of ``text`` that are not printable, but for those in ``keep``: names come out of files."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


class DtrainError(Exception):
    """Base of every error that dtrain raises on purpose."""


class ConfigError(DtrainError, ValueError):
    """An argument, an option, or a batch cannot be right."""


class StaleStateError(DtrainError, RuntimeError):
    """A ``TrainState`` that has been stepped is used again."""


class StepError(DtrainError, RuntimeError):
    """A training step that cannot be made sense of: no weight anywhere, or no gradient."""


class NonFiniteError(StepError):
    """Losses or gradients are infinite or NaN, as often one after another as the run allows."""


class OutOfMemoryError(StepError):
    """The smallest microbatch that is allowed needs more memory than a rank has."""


class DistError(DtrainError, RuntimeError):
    """Ranks that did not meet in time, or that disagree about what to do."""


class PeerError(DistError):
    """This rank is fine; another one failed, and all of them stop together."""


class DesyncError(DistError):
    """Ranks hold different values of what is to be the same on all of them."""


class CheckpointError(DtrainError, RuntimeError):
    """A checkpoint could not be written, found, or read.

    The message is one printable line: it may name what a file holds, so other characters are escaped, and a name of thousands
    of characters is shortened.
    """

    _unescaped = ""  # characters that are not escaped, though they are not printable

    def __init__(self, message: str) -> None:
        lines = "\n".join(map(_shorten_line, message.split("\n")))
        super().__init__(escape_unprintable(lines, keep=self._unescaped))


class CorruptCheckpointError(CheckpointError):
    """A committed checkpoint fails verification: a file is missing, truncated, altered, or foreign."""


class CheckpointMismatchError(CheckpointError):
    """A sound checkpoint does not fit what it is loaded into. A table of what differs may follow the line."""

    _unescaped = "\n"


class DataError(DtrainError, RuntimeError):
    """Samples could not be read: a shard is missing or damaged, a sample cannot be decoded, a worker died or hangs."""


class ShardError(DataError):
    """A whole shard is missing or damaged, or its server does not give it: ``on_error="skip"`` does not leave that much out."""


class RankError(DtrainError, RuntimeError):
    """A rank that ``dtrain.testing`` or ``spawn`` started has failed, or did not finish in time."""


_HALF_LINE = 2000  # characters; a path has at most 4,096


def _shorten_line(line: str) -> str:
    """``line`` without its middle if it is far too long for a reader."""
    return line if len(line) <= 3 * _HALF_LINE else f"{line[:_HALF_LINE]} ... {line[-_HALF_LINE:]}"
