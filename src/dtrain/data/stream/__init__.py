"""Datasets of shards: an index, files on this machine or on a server, a cache, and the order to read them in."""
