"""The example that pretrains: masked and packed tokens, each method in the model, learning, and resuming."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dtrain as dt
from example_runs import ended, launched
from helpers.masked_text import IGNORED, Corpus, MaskedOnce, Masking, packed, padded, read_corpus, read_documents
from pretrain_bert import METHODS, SEQ, build_bert, loss_fn

SCRIPT = "pretrain_bert.py"

# Attention masks some of the scores with the least number there is, whose exp() is 0: only the order of sums differs.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus()


def lengths_of(out: Path) -> dict[int, float]:
    """Return the tokens of a block that each step trained on."""
    return {step: numbers["length"] for step, numbers in dt.loggers.read_jsonl(out / "metrics.jsonl").items()}


# ---- the text ----------------------------------------------------------------------------------------------------------------


def test_held_out_and_training_documents_are_disjoint(corpus):
    texts = read_documents()
    held_out = set(map(tuple, corpus.held_out))
    assert held_out.isdisjoint(map(tuple, corpus.train))  # not in other letters or spaces either
    alike = sum(tuple(encoded.ids) in held_out for encoded in corpus.tokenizer.encode_batch_fast(texts))
    assert len(texts) == len(set(texts)) == len(corpus.train) + alike
    assert sum(map(len, texts)) > 1_000_000
    ids = corpus.held_out[0]
    assert [corpus.tokenizer.id_to_token(ids[index]) for index in (0, -1)] == ["[CLS]", "[SEP]"]


def test_masking_follows_the_paper(corpus):
    ids = torch.randint(corpus.mask + 1, corpus.words, (200_000,), generator=torch.Generator().manual_seed(1))
    ids[::10] = corpus.mask - 1  # [SEP]
    made = Masking(corpus)({"input_ids": ids, "documents": ids}, torch.Generator().manual_seed(2))
    shown, labels = made["input_ids"], made["labels"]
    guess = labels != IGNORED
    assert (torch.equal(labels[guess], ids[guess]), torch.equal(shown[~guess], ids[~guess])) == (True, True)
    assert not guess[::10].any()
    shares = guess.sum() / (0.9 * len(ids)), *((shown[guess] == one).float().mean() for one in (corpus.mask, ids[guess]))
    assert [float(share) for share in shares] == pytest.approx([0.15, 0.8, 0.1], abs=0.01)
    assert shown[guess].min() == corpus.mask
    assert shown[guess].max() < corpus.words
    assert made["documents"] is ids


def test_masks_differ_by_epoch_and_are_reproducible(corpus):
    def passes():
        loader = dt.build_loader(
            packed(corpus.held_out, SEQ), global_batch_size=64, seed=0, shuffle=False, transform=Masking(corpus)
        )
        return [torch.cat([batch["labels"] for batch in loader.one_epoch()]) for _ in range(2)], loader

    (first, _), loader = passes()
    (again, _), _ = passes()
    assert torch.equal(first, again)
    later = torch.cat([batch["labels"] for batch in itertools.islice(loader.until("2ep"), 5, 10)])
    assert not torch.equal(later, first)


def test_packed_and_padded_blocks_have_the_same_tokens(corpus):
    documents = corpus.held_out[-40:]
    tokens = sorted(token for ids in documents for token in ids)
    blocks = {make: [make(documents, SEQ)[index] for index in range(len(make(documents, SEQ)))] for make in (packed, padded)}
    for made in blocks.values():
        assert sorted(int(token) for block in made for token in block["input_ids"][block["documents"] >= 0]) == tokens
    assert [len(block["documents"][block["documents"] >= 0].unique()) for block in blocks[padded]] == [1] * len(blocks[padded])
    assert len(blocks[packed]) < 0.8 * len(blocks[padded])


def test_baseline_is_the_entropy_of_masked_tokens(corpus):
    gaps = MaskedOnce(packed(corpus.held_out, SEQ), Masking(corpus))
    labels = torch.cat([gaps[index]["labels"] for index in range(len(gaps))])
    share = torch.unique(labels[labels != IGNORED], return_counts=True)[1] / (labels != IGNORED).sum()
    assert gaps.entropy() == pytest.approx(float(-(share * share.log()).sum()), rel=1e-5)


# ---- the model ---------------------------------------------------------------------------------------------------------------

SIGNS = {"alibi": "AlibiBertSelfAttention", "glu": "GatedLinearUnit", "low_precision_norm": "LowPrecisionLayerNorm"}


@pytest.mark.parametrize("without", [None, *SIGNS])
def test_each_enabled_edit_applies_to_all_layers(without):
    model = build_bert(100, set(METHODS) - {without})
    kinds = [type(module).__name__ for module in model.modules()]
    counts = {name: kinds.count(sign) for name, sign in SIGNS.items()}
    everywhere = {"alibi": 2, "glu": 2, "low_precision_norm": 6}  # of two layers; a norm after the embeddings, one in the head
    assert counts == {**everywhere, **({} if without is None else {without: 0})}


def test_model_edits_may_be_applied_in_any_order():
    made = set()
    for order in itertools.permutations([dt.surgery.alibi, dt.surgery.gated_linear_units, dt.surgery.low_precision_layer_norm]):
        model = build_bert(100, set())
        for edit in order:
            model = edit(model)
        parts = sorted((name, type(module).__name__) for name, module in model.named_modules())
        made.add((*parts, *sorted((name, tuple(param.shape)) for name, param in model.named_parameters())))
    assert len(made) == 1


@pytest.mark.parametrize("without", [(), ("alibi",), ("glu", "low_precision_norm")], ids="-".join)
def test_tokens_attend_only_within_their_document(without):
    """The loss of two documents in one block is that of each in a block of its own, where the second begins at position 0."""
    model = build_bert(100, set(METHODS) - set(without))
    model = dt.materialize(model, seed=0, init=model._init_weights).eval()
    for parameter in model.parameters():  # larger ones than BERT's, so that attention matters
        parameter.data.mul_(5)
    documents = [
        torch.randint(5, 100, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (20, 12)
    ]

    def loss(blocks):
        batch = {key: torch.stack([block[key] for block in blocks]) for key in blocks[0]}
        batch["labels"] = torch.where(batch["documents"] >= 0, batch["input_ids"], IGNORED)
        return float(loss_fn(model, batch).total)

    apart, together = padded(documents, 32), [packed(documents, 32)[0]]
    with torch.no_grad():
        assert loss(together) == pytest.approx(loss(apart), rel=TOLERANCE)
        together[0]["documents"] = torch.zeros(32, dtype=torch.int64)
        assert abs(loss(together) - loss(apart)) > 10 * TOLERANCE * loss(apart)


# ---- runs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "below_baseline"), [(50, -0.2), (120, 0.2)], ids=["short", "longer"])
def test_training_on_two_ranks_with_growing_sequences_lowers_the_loss(tmp_path, steps, below_baseline):
    """A new model is 0.7 nats above the baseline, and the whole run goes 1.2 nats below it."""
    ending = ended(launched(SCRIPT, "--until", f"{steps}ba", out=tmp_path / "out"))
    assert ending.value < ending.baseline - below_baseline
    lengths = list(lengths_of(tmp_path / "out").values())
    grown = int(0.3 * steps)
    assert lengths[:grown] == sorted(lengths[:grown])
    assert (lengths[0], set(lengths[grown:]), len(set(lengths)) > 8) == (32, {128}, True)


@pytest.mark.slow
def test_resumed_run_ends_with_the_same_bits(tmp_path):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    last = launched(SCRIPT, "--until", "40ba", out=straight).splitlines()[-1]
    shutil.copytree(straight / "checkpoints" / "step-00000030", resumed / "checkpoints" / "step-00000030")
    assert launched(SCRIPT, "--until", "40ba", out=resumed).splitlines()[-1] == last
    assert list(lengths_of(resumed)) == list(range(31, 41))
    one, other = (
        [load_file(path) for path in sorted((out / "checkpoints" / "step-00000040").glob("*.safetensors"))]
        for out in (straight, resumed)
    )
    assert [sorted(tensors) for tensors in one] == [sorted(tensors) for tensors in other]
    assert all(torch.equal(tensors[name], again[name]) for tensors, again in zip(one, other, strict=True) for name in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_training_runs_without_each_method(method, tmp_path):
    ended(launched(SCRIPT, "--until", "10ba", "--without", method, out=tmp_path / "out"))
    lengths = lengths_of(tmp_path / "out").values()
    assert (min(lengths), max(lengths)) == (128 if method == "length_warmup" else 32, 128)


@pytest.mark.slow
def test_complete_run_ends_well_below_the_entropy_baseline(tmp_path):
    ending = ended(launched(SCRIPT, out=tmp_path / "out"))
    assert ending.value < 0.85 * ending.baseline
