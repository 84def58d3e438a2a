"""Define the errors that dtrain raises on purpose.

::

    DtrainError
    ├── ConfigError (ValueError)            an invalid argument, option or batch
    │   └── ConfigTypeError (TypeError)     an operation that the type of a value does not support
    ├── StaleStateError (RuntimeError)      a TrainState that was already stepped is used again
    ├── StepError (RuntimeError)            a training step without a valid result (no weight, no gradient)
    │   ├── NonFiniteError                  losses or gradients are infinite or NaN more often than the run allows
    │   └── OutOfMemoryError                the smallest microbatch does not fit in memory
    ├── DistError (RuntimeError)            ranks that did not arrive, or that disagree
    │   ├── PeerError                       another rank failed, so all ranks stop
    │   └── DesyncError                     ranks hold different values that must be equal
    ├── CheckpointError (RuntimeError)
    │   ├── CorruptCheckpointError          a committed checkpoint that fails verification
    │   └── CheckpointMismatchError         an intact checkpoint that does not fit the model or state
    ├── DataError (RuntimeError)            samples that could not be read: a shard, a worker or a dataset failed
    │   └── ShardError                      a whole shard is missing, damaged or unreachable
    └── RankError (RuntimeError)            a rank started by dtrain.testing or spawn failed or hung

A message is one line with the function, the invalid value and advice. ``ValueError`` subclasses report invalid input,
``RuntimeError`` subclasses report failures outside of the call.
"""

from __future__ import annotations


def escape_unprintable(text: str, *, keep: str = "") -> str:
    """Escape the characters of ``text`` that are not printable, except ``keep``, because names come from files."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


class DtrainError(Exception):
    """Base class of every error that dtrain raises on purpose."""


class ConfigError(DtrainError, ValueError):
    """Invalid argument, option or batch."""


class ConfigTypeError(ConfigError, TypeError):
    """Operation that the type of a value does not support, such as ``len`` of a loader without a length."""


class StaleStateError(DtrainError, RuntimeError):
    """Second use of a ``TrainState`` that has been stepped."""


class StepError(DtrainError, RuntimeError):
    """Training step without a valid result: no weight on any rank, or no gradient."""


class NonFiniteError(StepError):
    """Infinite or NaN losses or gradients, more often in a row than the run allows."""


class OutOfMemoryError(StepError):
    """Smallest microbatch that does not fit in a rank's memory. Not a subclass of ``torch.OutOfMemoryError``."""


class DistError(DtrainError, RuntimeError):
    """Ranks that did not arrive in time, or that disagree about the next action."""


class PeerError(DistError):
    """Failure of another rank, which stops all ranks together."""


class DesyncError(DistError):
    """Different values on ranks that must hold equal values."""


class CheckpointError(DtrainError, RuntimeError):
    """Checkpoint that could not be written, found or read.

    The message is one printable line. Other characters are escaped, because the message may contain names from files. Very long
    names are shortened.
    """

    # Unprintable characters that are not escaped.
    _unescaped = ""

    def __init__(self, message: str) -> None:
        lines = "\n".join(map(_shorten_line, message.split("\n")))
        super().__init__(escape_unprintable(lines, keep=self._unescaped))


class CorruptCheckpointError(CheckpointError):
    """Committed checkpoint that fails verification: a file is missing, truncated, altered or unknown."""


class CheckpointMismatchError(CheckpointError):
    """Intact checkpoint that does not fit the model or state. A table of differences may follow the first line."""

    _unescaped = "\n"


class DataError(DtrainError, RuntimeError):
    """Samples that could not be read: a shard is missing or damaged, a sample is invalid, a worker died or hangs."""


class ShardError(DataError):
    """Whole shard that is missing, damaged or unreachable. ``on_error="skip"`` does not skip a whole shard."""


class RankError(DtrainError, RuntimeError):
    """Rank started by ``dtrain.testing`` or ``spawn`` that failed or did not finish in time."""


_HALF_LINE = 2000  # characters


def _shorten_line(line: str) -> str:
    """Remove the middle of ``line`` if it is longer than three half lines."""
    return line if len(line) <= 3 * _HALF_LINE else f"{line[:_HALF_LINE]} ... {line[-_HALF_LINE:]}"
