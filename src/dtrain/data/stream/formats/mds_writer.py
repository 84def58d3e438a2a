"""Writes MDS: byte for byte what mosaicml-streaming writes of the same samples with the same options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from dtrain.data.stream.formats.mds_values import encoding_for, encoding_named
from dtrain.data.stream.formats.samples import Naming, Sample, check_columns, check_mapping, plain
from dtrain.errors import ConfigError
from dtrain.types import Plain


class MdsWriter:
    """See ``Writer``."""

    suffix = ".mds"
    sample_bytes = 4

    def __init__(self, first: Sample, columns: Mapping[str, str] | None, settings: dict[str, Plain]) -> None:
        columns = _inferred(first) if columns is None else columns
        self._names = sorted(columns)
        self._encodings = []
        with Naming() as at:
            for at.column in self._names:
                self._encodings.append(encoding_named(columns[at.column]))
        self.details: dict[str, Plain] = {
            **settings,
            "column_names": [*self._names],
            "column_encodings": [columns[name] for name in self._names],
            "column_sizes": [encoding.size for encoding in self._encodings],
        }
        self._config = json.dumps({**self.details, "version": 2, "format": "mds"}, sort_keys=True).encode()
        self.shard_bytes = 8 + len(self._config)

    def encode(self, sample: Sample, number: int, /) -> bytes:
        """The sizes of the values that have no fixed one, and the values."""
        check_columns(sample, number, self._names)
        sizes, values = [], []
        with Naming(number=number) as at:
            for at.column, encoding in zip(self._names, self._encodings, strict=True):
                values.append(encoding.encode(plain(sample[at.column])))
                if encoding.size is None:
                    sizes.append(len(values[-1]))
        return np.array(sizes, "<u4").tobytes() + b"".join(values)

    def size(self, encoded: bytes, /) -> int:
        """Its bytes."""
        return len(encoded)

    def pack(self, encoded: Sequence[bytes], /) -> bytes:
        """The shard."""
        begin = 4 * (len(encoded) + 2) + len(self._config)
        bounds = np.cumsum([begin, *map(len, encoded)])
        if bounds[-1] >= 2**32:
            raise ConfigError(f"a shard of {bounds[-1]} bytes cannot be MDS, which counts them in four; make samples smaller")
        return b"".join([np.uint32(len(encoded)).tobytes(), bounds.astype("<u4").tobytes(), self._config, *encoded])


def _inferred(first: Sample) -> dict[str, str]:
    check_mapping(first, 0)
    columns = {}
    with Naming(number=0) as at:
        for at.column in first:
            columns[at.column] = encoding_for(plain(first[at.column]))
    return columns
