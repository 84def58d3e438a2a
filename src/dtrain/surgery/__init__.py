"""Edits of a model, made before it is sharded: ``Module -> Module``, one file per method."""
