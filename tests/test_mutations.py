"""Mutations of files: each kind occurs, the same seed gives the same one, and each differs from the original."""

import json

from mutations import mutate_bytes, mutate_json

TEXT = json.dumps({"a": [1, 2.5, {"b": "text", "c": None}], "d": True, "e": {"f": "x"}}).encode()


def test_each_kind_of_mutation_occurs_and_changes_the_data():
    for mutate, kinds in ((mutate_bytes, 10), (mutate_json, 9)):
        made = [mutate(TEXT, seed) for seed in range(300)]
        assert made == [mutate(TEXT, seed) for seed in range(300)]
        assert len({mutation.kind for mutation in made}) == kinds
        assert all(mutation.data != TEXT for mutation in made)


def test_most_json_mutations_are_valid_json():
    parsed = 0
    for seed in range(300):
        try:
            json.loads(mutate_json(TEXT, seed).data)
        except (ValueError, RecursionError):
            continue
        parsed += 1
    assert 150 < parsed < 300


def test_empty_data_can_be_mutated():
    assert all(mutate_bytes(b"", seed).data for seed in range(50))


def test_a_document_without_fields_can_be_mutated():
    assert all(mutate_json(b"[1]", seed).data != b"[1]" for seed in range(50))
