"""Checkpoints made to do harm."""

from pathlib import Path

import pytest

from checkpoint.faults import malicious
from checkpoint.faults.malicious import TRAVERSALS, WITHIN_BYTES, WITHIN_S
from checkpoint.faults.payloads import payloads

ALL = 10**6  # more than there are


@pytest.mark.costly
@pytest.mark.parametrize("one_in", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_malicious_files_are_refused_cheaply_without_execution(collect, one_in):
    tally = collect(malicious.draw, count=ALL, stride=one_in)
    assert tally.wrong == []
    assert tally.count > 1000 / one_in
    assert len(TRAVERSALS) >= 40
    assert tally.largest["seconds until refused"] < WITHIN_S
    assert tally.largest["MB until refused"] < WITHIN_BYTES / 1e6
    assert not Path("/tmp/payload-was-run").exists()
    assert not Path("/tmp/payload-was-opened").exists()


def test_payloads_run_when_unpickled(nursery):
    """The payloads are genuine: unpickled, most run their command. Only here, and in a process of its own."""
    assert len(payloads("true")) >= 40
    assert nursery.ask(malicious.how_many_payloads_run) >= 15


def test_audit_hook_records_execution_and_file_access(nursery):
    seen = nursery.ask(malicious.what_the_hook_sees)
    assert [text.split()[0] for text in seen] == ["open", "pickle.find_class", "os.system", "exec"]
