"""Transforms of precision: autocast and loss scaling."""
