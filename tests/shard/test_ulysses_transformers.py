"""A stock Llama on packed rows under ``context_parallel(method="ulysses")``: trained, evaluated, probed for leaks, refused."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import dtrain as dt
from documents import documents
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, PeerError
from shard.llama import VOCAB, llama

SEQ, SAMPLES, STEPS = 16, 4, 3
# Ragged: documents over several blocks and parts, of one token, and padding at the end.
LENGTHS = [5, 9, 1, 30, 3, 11, 2]
DIMS = {"input_ids": 1, "labels": 1, "positions": 1}
TOLERANCE = 1e-12  # largest difference of a loss or a parameter, in float64
TP_PLAN = {
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def batch(step: int = 0) -> dict[str, Tensor]:
    texts = [[(token + step) % VOCAB for token in text] for text in documents(LENGTHS)]
    blocks = list(dt.data.PackedTokens(texts, seq=SEQ, lengths=LENGTHS))
    assert len(blocks) == SAMPLES
    return {name: torch.stack([block[name] for block in blocks]) for name in blocks[0]}


def loss_fn(net: nn.Module, given: dict[str, Tensor]) -> dt.LossSum:
    logits = net(given["input_ids"], position_ids=given["positions"], use_cache=False).logits
    return dt.cross_entropy(logits, given["labels"])


def one_process(kv_heads: int) -> tuple[list[float], Tensor]:
    """Plain torch, stock ``sdpa`` on whole rows: transformers makes a dense mask of the positions."""
    net, losses = llama("sdpa", kv_heads), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for step in range(STEPS):
        given = batch(step)
        logits = net(given["input_ids"], position_ids=given["positions"], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([param.detach().flatten() for param in net.parameters()])


def own_samples(mesh, given: dict[str, Tensor]) -> dict[str, Tensor]:
    index, count = dt.dist.data_rank(mesh)
    own = slice(index * SAMPLES // count, (index + 1) * SAMPLES // count)
    return {key: value[own] for key, value in given.items()}


def ulysses(mesh, documents: str | None = "documents", **options) -> dt.transforms.ContextParallelTransform:
    return dt.transforms.context_parallel(mesh, method="ulysses", batch_seq_dims=DIMS, documents=documents, **options)


def trained(
    kv_heads: int,
    degrees: dict[str, int],
    *,
    strategy: str = "full_shard",
    checkpointed: bool = False,
    compiled: bool = False,
    microbatches: int = 0,
    out_of_memory: bool = False,
) -> tuple[list[float], Tensor]:
    """Return the losses of some steps and all parameters after them."""
    mesh = dt.build_mesh(**degrees)
    net = llama(dt.shard.register_attention(), kv_heads)
    if checkpointed:
        dt.shard.checkpoint_activations(net, blocks=(LlamaDecoderLayer,))
    plan = TP_PLAN if "tp" in degrees else None
    net = dt.shard_model(net, mesh, strategy=strategy, blocks=(LlamaDecoderLayer,), tp_plan=plan)
    if compiled:
        for layer in net.model.layers:
            layer.compile(backend="aot_eager")
    transforms = [dt.auto_microbatch(initial_size=microbatches)] if microbatches else []
    memory = OutOfMemory()
    if out_of_memory:
        net.model.layers[1].mlp.register_forward_pre_hook(memory)
    step = dt.compose_step(loss_fn, [*transforms, ulysses(mesh)])
    state, losses = step.init(net, torch.optim.SGD(net.parameters(), lr=0.3)), []
    for number in range(STEPS):
        # The last step fails in a run whose collectives the ranks have recorded.
        memory.limit = SAMPLES // 2 if number < STEPS - 1 else 1
        state, metrics = step(state, own_samples(mesh, batch(number)))
        losses.append(dt.reduce_metrics(metrics)["loss"])
    assert memory.failures >= 2 * (out_of_memory and get_dist_info().rank == 1)
    return losses, torch.cat([full_tensor(param.detach()).flatten() for param in state.params.values()])


class OutOfMemory:
    """Hook that fails on rank 1, between two attentions, for more than ``limit`` samples."""

    def __init__(self) -> None:
        self.limit, self.failures = SAMPLES // 2, 0

    def __call__(self, module: nn.Module, arguments: tuple[Tensor]) -> None:
        if torch.is_grad_enabled() and get_dist_info().rank == 1 and len(arguments[0]) > self.limit:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")


def differences(cases: dict[str, dict]) -> dict[str, float]:
    largest = {}
    for name, options in cases.items():
        losses, params = trained(**options)
        expected_losses, expected = one_process(options["kv_heads"])
        pairs = zip(losses, expected_losses, strict=True)
        largest[name] = max((params - expected).abs().max().item(), *(abs(loss - value) for loss, value in pairs))
    return largest


TWO_RANKS = {
    "two parts": {"kv_heads": 4, "degrees": {"cp": 2}},
    "grouped queries": {"kv_heads": 2, "degrees": {"cp": 2}},
    "one key head, replicated": {"kv_heads": 1, "degrees": {"cp": 2}, "strategy": "replicate"},
    "checkpointed": {"kv_heads": 2, "degrees": {"cp": 2}, "checkpointed": True},
    "compiled": {"kv_heads": 2, "degrees": {"cp": 2}, "compiled": True},
    "microbatches": {"kv_heads": 2, "degrees": {"cp": 2}, "microbatches": 1},
    "out of memory on one rank": {"kv_heads": 2, "degrees": {"cp": 2}, "microbatches": SAMPLES, "out_of_memory": True},
    "documents without cp": {"kv_heads": 2, "degrees": {}},
}
FOUR_RANKS = {
    "four parts": {"kv_heads": 4, "degrees": {"cp": 4}},
    "fewer key heads than ranks": {"kv_heads": 2, "degrees": {"cp": 4}},
    "one key head": {"kv_heads": 1, "degrees": {"cp": 4}, "checkpointed": True},
    "data parallel": {"kv_heads": 2, "degrees": {"cp": 2}, "microbatches": 1},
    "hybrid": {"kv_heads": 2, "degrees": {"cp": 2, "dp_replicate": 2}, "strategy": "hybrid_shard"},
    "tensor parallel": {"kv_heads": 2, "degrees": {"cp": 2, "tp": 2}},
}


@pytest.mark.costly
@pytest.mark.parametrize(("count", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_packed_rows_in_parts_train_as_in_one_process(ranks, count, cases):
    for largest in ranks(count).run(differences, cases):
        assert largest.keys() == cases.keys()
        assert max(largest.values()) <= TOLERANCE, largest


def evaluated(attention: str, kv_heads: int) -> list[float]:
    """Return the loss of one process, and in parts, after a step."""
    mesh = dt.build_mesh(cp=2)
    net = dt.shard_model(llama(dt.shard.register_attention(), kv_heads), mesh, blocks=(LlamaDecoderLayer,))
    sequences = ulysses(mesh)
    loader = [own_samples(mesh, batch(step)) for step in range(2)]
    metrics = dt.evaluate(net, loader, sequences.eval_loss(loss_fn), microbatch_size="auto")
    plain, totals = llama("sdpa", kv_heads), []
    with torch.no_grad():
        totals = [loss_fn(plain, batch(step)) for step in range(2)]
    expected = sum(loss.total.item() for loss in totals) / sum(float(loss.weight) for loss in totals)
    return [dt.reduce_metrics(metrics)["loss"], expected]


def test_evaluation_in_parts_equals_one_process(ranks):
    for loss, expected in ranks(4).run(evaluated, "sdpa", 2):
        assert loss == pytest.approx(expected, rel=1e-13)


def leaks(documents: str | None) -> dict[str, float]:
    """Change one document at a time: return the largest change of the outputs, and of input gradients, in other documents.

    The outputs are those of this rank's parts. ``own`` is the smallest change in the changed documents themselves.
    """
    mesh = dt.build_mesh(cp=2)
    net = dt.shard_model(llama(dt.shard.register_attention(), 2), mesh, blocks=(LlamaDecoderLayer,))
    given = batch()
    if documents is None:
        given["numbers"] = given.pop("documents")
        # Positions that run on, or transformers would see the documents in them.
        given["positions"] = torch.arange(SEQ).expand(SAMPLES, SEQ).clone()
    outputs = []

    def keep(net: nn.Module, part: dict[str, Tensor]) -> dt.LossSum:
        outputs.append(net(part["input_ids"], position_ids=part["positions"], use_cache=False).logits)
        return dt.LossSum(total=outputs[-1].sum(), weight=1)

    probe = ulysses(mesh, documents).eval_loss(keep)
    numbers = given["documents" if documents else "numbers"]
    half = SEQ // 2
    own = slice(mesh["cp"].get_local_rank() * half, (mesh["cp"].get_local_rank() + 1) * half)
    with torch.no_grad():
        probe(net, given)
        others, inside = [], []
        for number in range(len(LENGTHS)):
            changed = {
                **given,
                "input_ids": torch.where(numbers == number, (given["input_ids"] + 7) % VOCAB, given["input_ids"]),
            }
            probe(net, changed)
            change = (outputs[-1] - outputs[0]).abs().amax(-1)
            is_own = numbers[:, own] == number
            others.append(change[~is_own].max().item())
            inside += [change[is_own].min().item()] if is_own.any() else []
    return {"others": max(others), "own": min(inside)}


def test_no_document_sees_another_one(ranks):
    for probe in ranks(2).run(leaks, "documents"):
        assert probe["others"] == 0.0
        assert probe["own"] > 1e-3


def test_the_probe_sees_a_leak(ranks):
    assert all(probe["others"] > 1e-3 for probe in ranks(2).run(leaks, None))


def refused(case: str) -> str:
    """Return the error of a first step, or of an evaluation."""
    mesh = dt.build_mesh(cp=2)
    name = dt.shard.register_attention()
    given = batch()
    special = {"odd heads": {"heads": 3, "kv_heads": 3, "hidden_size": 36}}.get(case, {"kv_heads": 2})
    if case == "window":
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
        net = MistralForCausalLM(
            MistralConfig(vocab_size=VOCAB, num_key_value_heads=2, sliding_window=12, attn_implementation=name, **sizes)
        )
    else:
        net = llama("sdpa" if case == "stock sdpa" else name, **special)
    net = dt.shard_model(net.double(), mesh)
    arguments = {"use_cache": False}
    if case == "padding":
        arguments["attention_mask"] = torch.ones(SAMPLES, SEQ // 2).index_fill(1, torch.tensor([0]), 0)
    if case == "mask":
        arguments["attention_mask"] = torch.zeros(SAMPLES, 1, SEQ // 2, SEQ // 2, dtype=torch.float64)
    options = {}
    if case in ("unnamed documents", "restarts"):
        options["documents"] = None
    if case == "restarts":
        del given["documents"]
    dims = {"buffer_seq_dims": {"**.inv_freq": 0}} if case == "tables" else {}

    def loss_of_case(net: nn.Module, part: dict[str, Tensor]) -> dt.LossSum:
        if case.startswith("generation"):
            ids = part["input_ids"] if case.endswith("lengths") else part["input_ids"][:, :4]
            net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0)
        if case == "rows":
            part = {**part, "input_ids": part["input_ids"].repeat(2, 1), "positions": part["positions"].repeat(2, 1)}
        logits = net(part["input_ids"], position_ids=part["positions"], **arguments).logits
        return dt.cross_entropy(logits[: len(part["labels"])], part["labels"])

    try:
        sequences = ulysses(mesh, check=False, **options, **dims)
        if case == "eval_loss in training":
            sequences.eval_loss(loss_fn)(net, given)
        state = dt.compose_step(loss_of_case, [sequences]).init(net, torch.optim.SGD(net.parameters(), lr=0.3))
        if case == "evaluation":
            dt.evaluate(net, [given], loss_fn)
        dt.compose_step(loss_of_case, [sequences])(state, given)
    except (ConfigError, PeerError) as error:
        return str(error)
    return "taken"


REFUSED = {
    "odd heads": "the number of query heads must be a multiple of the 2 ranks along cp, got 3 heads on this rank",
    "window": "a sliding window must reach over the sequence of 16 tokens, got 12",
    "stock sdpa": "attn_mask must be None, got a mask of shape [4, 1, 8, 8]",
    "padding": "attention_mask must be True everywhere, got padding",
    "mask": "attn_mask must be None, got a mask of shape [4, 1, 8, 8]",
    "unnamed documents": "documents must be the key of the documents of a packed batch, got None",
    "restarts": "the model's mask must allow all pairs of a document, but it separates tokens of one document",
    "rows": "query must have 4 rows of 8 tokens, as the batch, got 8 rows of 8 tokens",
    "tables": "documents must be None with buffer_seq_dims",
    "generation": "got 4 rows of 4 tokens. Run the model on the batch as it is, and generate outside of the step",
    "generation of whole lengths": "attention must be self-attention with the usual mask, got 1 queries and 9 keys. Generate",
    "evaluation": "loss_fn must attend within documents as the training step does",
    "eval_loss in training": "gradients must be off",
}


def refusals(cases: list[str]) -> list[str]:
    return [refused(case) for case in cases]


@pytest.mark.costly
def test_ways_that_are_not_exact_are_refused_by_name(ranks):
    for messages in ranks(2).run(refusals, list(REFUSED)):
        for (case, expected), message in zip(REFUSED.items(), messages, strict=True):
            assert expected in message or "failed" in message, (case, message)
            assert message != "taken", case


def generated(attention: str) -> list[list[int]]:
    """Generate outside of a step, with prompts of different lengths that are padded on the left."""
    name = dt.shard.register_attention()
    mesh = dt.build_mesh(cp=2)
    net = dt.shard_model(llama(name if attention == "dtrain" else attention, 2), mesh, forward_methods=("generate",))
    ids = torch.arange(1, 13).view(2, 6) % VOCAB
    mask = torch.ones_like(ids).index_put((torch.tensor([0, 0]), torch.tensor([0, 1])), torch.tensor(0))
    with dt.eval_mode(net):
        return net.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist()


def test_generation_outside_of_a_step_is_that_of_sdpa(ranks):
    tokens = ranks(2).run(generated, "dtrain")
    assert tokens == ranks(2).run(generated, "sdpa")
    assert len({str(row) for row in tokens}) == 1
