"""Shard formats, one module each: MDS, Parquet, lines of JSON or text, and tar."""
