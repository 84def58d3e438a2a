"""The data benchmark at tiny sizes: all sides of a claim run and hand out the same samples, and each claim has its line."""

from __future__ import annotations

import re

import pytest
import torch

from data import PARTS, Amount
from data_loading import PEERS, WORKS, check_pass
from data_peers import mosaicml, versions
from data_position import check_next, shards_in_use
from data_streaming import CASES
from dtrain.data import ElasticSampler

TINY = Amount(resumes=(1, 4_096), stretches=(1, 4_096), votes=1, shards=(8, 64), passes=(1, 0.001), streams=(1, 128))
CLAIMS = {
    "resume": 2,
    "permutation": 3,
    "agreement": 1,
    "quality": 0,
    "loading": 2 * len(WORKS) * len(PEERS),
    "layers": 0,
    "streaming": len(CASES),
}
SLOW = ("loading", "streaming")  # they start workers and servers

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),  # mosaicml-streaming
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PARTS])
def test_part_prints_a_verdict_for_each_of_its_claims(name, tmp_path, capsys):
    if name == "streaming" and mosaicml() is None:
        pytest.skip("needs mosaicml-streaming, which the sessions of nox install")
    PARTS[name](TINY, tmp_path)
    verdicts = re.findall(r"target <= .*: (?:met|not met|not resolved)$", capsys.readouterr().out, re.MULTILINE)
    assert len(verdicts) == CLAIMS[name]


def test_a_loader_that_repeats_a_sample_is_refused(tmp_path):
    work = WORKS[1]
    batches = [{"id": torch.arange(64)}, {"id": torch.arange(64)}]
    with pytest.raises(SystemExit, match="did not hand out every sample once"):
        check_pass("broken", work, lambda: iter(batches), 128)


def test_resume_at_a_wrong_position_is_refused():
    with pytest.raises(SystemExit, match="does not go on where it was"):
        check_next("broken", torch.arange(3), torch.arange(1, 4))


@pytest.mark.parametrize(
    ("shuffle", "held"), [pytest.param(True, 8, id="all-of-a-full-shuffle"), pytest.param(False, 1, id="one-in-order")]
)
def test_shards_in_use_are_started_but_unfinished_shards(shuffle, held):
    assert shards_in_use(ElasticSampler(size=512, shuffle=shuffle), [64] * 8, 64) == held


def test_compared_packages_are_printed_with_version_or_as_missing():
    assert re.fullmatch(r"peers: torchdata \S+, mosaicml-streaming (\S+|not installed)", versions())
