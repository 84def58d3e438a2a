"""docs/parallelism.md: the code runs."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import dtrain as dt
import public
from dtrain.dist.init import get_dist_info
from helpers.gpt import GPT, Block, GPTConfig

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def plan_of_the_page() -> list:
    names = {"dt": dt, "torch": torch, "GPT": GPT, "Block": Block, "config": GPTConfig(n_layer=1, n_head=2, dim=8, max_seq=4)}
    exec(compile(BLOCKS[0], str(PAGE), "exec"), names)  # the page's own text
    shown = dt.describe(names["model"])
    return [shown.splitlines()[0], "cut on dim 0 over dp_all=2, cut on dim 0 over tp=2" in shown, get_dist_info().rank]


def test_documented_tp_plan_shards_the_example_model(ranks):
    head = "full_shard over 2 ranks (dp_replicate=1, dp_shard=2, tp=2), accumulate=local, buffers=broadcast"
    assert ranks(4).run(plan_of_the_page) == [[head, True, rank] for rank in range(4)]


def llama_of_the_page() -> list[float]:
    """Return the losses of the page's step and evaluation in parts, and the loss of stock attention on whole packed rows."""
    config = LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    names = {"dt": dt, "torch": torch, "mesh": dt.build_mesh(cp=2), "config": config}
    torch.manual_seed(0)
    exec(compile(BLOCKS[2], str(PAGE), "exec"), names)  # the page's own text
    documents = [torch.randint(0, 31, (length,)) for length in (5, 3, 9, 7)]
    blocks = list(dt.data.PackedTokens(documents, seq=12, lengths=[5, 3, 9, 7]))
    batch = {key: torch.stack([block[key] for block in blocks]) for key in blocks[0]}
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(LlamaConfig(**{**config.to_dict(), "attn_implementation": "sdpa"}))
    logits = whole(batch["input_ids"], position_ids=batch["positions"], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    model, names["valid_loader"] = names["model"], [batch]
    state = names["step"].init(model, torch.optim.SGD(model.parameters(), lr=0.0))
    exec(compile(BLOCKS[3], str(PAGE), "exec"), names)
    _, metrics = names["step"](state, batch)
    return [dt.reduce_metrics(metrics)["loss"], dt.reduce_metrics(names["metrics"])["loss"], expected.item()]


def test_documented_model_of_transformers_has_the_loss_of_one_process(ranks):
    for loss, valid_loss, expected in ranks(2).run(llama_of_the_page):
        assert loss == pytest.approx(expected, abs=1e-5)
        assert valid_loss == pytest.approx(expected, abs=1e-5)


def test_documented_functions_are_public():
    named = public.named_in(PAGE.read_text())
    assert len(named) >= 10
    assert public.unknown_in(PAGE.read_text()) == set()
    assert len(BLOCKS) == 4


def test_documented_files_exist():
    root = PAGE.parents[1]
    named = re.compile(r"`(tests/\S+?\.py|examples/\S+?\.py)`")
    files = named.findall(PAGE.read_text())
    files += [name for name in named.findall(PAGE.with_name("evidence.md").read_text()) if "parallel" in name]
    assert len(files) >= 4
    assert all((root / name).exists() for name in files)
