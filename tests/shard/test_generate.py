"""``generate`` of transformers with a sharded model: equal tokens to one process, whatever each rank's prompts and ends."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh, data_rank
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.shard.unshard import eval_mode, unshard_params
from dtrain.step.evaluate import evaluate

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
PAD, VOCAB, NEW = 0, 24, 12
PROMPTS = [[5], [7, 3, 2, 9], [4, 4], [11, 6, 8, 1, 13, 2], [3, 9, 5], [12], [8, 2]]
"""Of different lengths. They end after different numbers of tokens."""


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        made = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
        made = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, **sizes))
    with torch.no_grad():
        for param in made.parameters():
            param.add_(0.3 * torch.randn_like(param))
    return made.double() if kind != "lora" else adapted(made).double()


def adapted(base: PreTrainedModel) -> nn.Module:
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.add_(0.3 * torch.randn_like(param))
    return model


def blocks_of(kind: str) -> tuple[type[nn.Module], ...]:
    return (GPT2Block if kind == "gpt2" else LlamaDecoderLayer,)


def ends(kind: str) -> list[int]:
    """Tokens that end some prompts early, others not at all."""
    with torch.no_grad():
        tokens = [generated(model(kind).eval(), [prompt], None)[0][len(prompt) :] for prompt in PROMPTS[:2]]
    return [tokens[0][1], tokens[1][-2]]


def generated(net: nn.Module, prompts: list[list[int]], eos: list[int] | None, **options) -> list[list[int]]:
    """Tokens of prompts that are padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": eos, "pad_token_id": PAD, **options}
    return net.generate(input_ids=ids, attention_mask=mask, **options).tolist()


def prompts_of(rank: int) -> list[list[int]]:
    """One rank has one short prompt, another two."""
    return [PROMPTS[:1], PROMPTS[1:3], PROMPTS[3:4]][rank]


def on_ranks(kind: str, strategy: str, eos: list[int], tp: bool) -> list:
    mesh = build_mesh(tp=2) if tp else build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    net = shard_model(model(kind), mesh, strategy=strategy, blocks=blocks_of(kind), tp_plan="auto" if tp else None)
    mine = prompts_of(data_rank(mesh)[0])
    with eval_mode(net):
        return [generated(net, mine, eos), generated(net, mine, eos, num_beams=2), generated(net, mine, eos, use_cache=False)]


CASES = [
    ("llama", "full_shard", 3, False),
    ("gpt2", "full_shard", 2, False),
    ("llama", "full_shard", 4, True),
    ("lora", "full_shard", 2, False),
    ("llama", "hybrid_shard", 2, False),
    ("llama", "replicate", 2, False),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "strategy", "world", "tp"), CASES)
def test_tokens_equal_those_of_one_process(ranks, kind, strategy, world, tp):
    eos, net = ends(kind), model(kind).eval()
    results = ranks(world).run(on_ranks, kind, strategy, eos, tp)
    lengths = set()
    for rank, tokens in enumerate(results):
        mine = prompts_of(rank // 2 if tp else rank)
        expected = [
            generated(net, mine, eos),
            generated(net, mine, eos, num_beams=2),
            generated(net, mine, eos, use_cache=False),
        ]
        assert tokens == expected
        lengths.add(len(tokens[0][0]) - max(map(len, mine)))
    assert len(lengths) > 1, "ranks must end at different times"


def alone(eos: list[int]) -> list:
    net = shard_model(model("llama"), build_mesh(), blocks=blocks_of("llama"))
    tokens = []
    with unshard_params(net), eval_mode(net):
        if get_dist_info().rank == 1:
            tokens = generated(net, PROMPTS[1:3], eos)
    with eval_mode(net):
        return [tokens, generated(net, prompts_of(get_dist_info().rank), eos)]


def test_one_rank_generates_alone_while_the_model_is_unsharded(ranks):
    eos, net = ends("llama"), model("llama").eval()
    first, second = ranks(2).run(alone, eos)
    assert [first[0], second[0]] == [[], generated(net, PROMPTS[1:3], eos)]
    assert [first[1], second[1]] == [generated(net, prompts_of(rank), eos) for rank in range(2)]


def exact_match(net: nn.Module, batch: dict[str, torch.Tensor]) -> dt.LossSum:
    prompt = batch["input_ids"]
    tokens = net.generate(input_ids=prompt, attention_mask=batch["attention_mask"], max_new_tokens=NEW, do_sample=False)
    return dt.sum_loss((first_tokens(tokens, prompt.shape[1]) != batch["answers"]).any(dim=1).double())


def first_tokens(tokens: torch.Tensor, begin: int) -> torch.Tensor:
    return nn.functional.pad(tokens[:, begin:], (0, 3), value=PAD)[:, :3]


def tasks(eos: list[int]) -> list[dict[str, torch.Tensor]]:
    """One task a batch. Every second answer is right."""
    made = []
    for number, prompt in enumerate(PROMPTS):
        tokens = generated(model("llama").eval(), [prompt], eos)[0]
        answer = first_tokens(torch.tensor([tokens]), len(prompt)) + number % 2
        ids = torch.tensor([prompt])
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "answers": answer})
    return made


def evaluated(eos: list[int]) -> float:
    mesh = build_mesh()
    net = shard_model(model("llama"), mesh, blocks=blocks_of("llama"))
    net.generation_config.eos_token_id, net.generation_config.pad_token_id = eos, PAD
    rank = get_dist_info().rank
    # Rank 0 has more tasks than the others.
    mine = tasks(eos)[:4] if rank == 0 else tasks(eos)[4 + rank - 1 :: get_dist_info().world_size - 1]
    return reduce_metrics(evaluate(net, mine, exact_match))["loss"]


@pytest.mark.costly
@pytest.mark.parametrize("world", [2, 3])
def test_evaluation_with_generation_counts_each_task_once(ranks, world):
    for wrong in ranks(world).run(evaluated, ends("llama")):
        assert wrong == pytest.approx(3 / 7, rel=1e-12)
