"""Peak memory of one rank, and bytes that it exchanges, for a packed row over more and more ranks along ``cp``.

    python benchmarks/long_sequences.py                   # about a minute on two free cores
    python benchmarks/long_sequences.py --seq 8192        # a longer row

The model is a stock Llama of transformers in float32, the row is packed from ragged documents. Memory is that of one rank's
tensors in the second step above the memory between steps, counted by ``memory_budget``. All ways but the ring compute the same
gradient, which is checked; the ring attends beyond documents.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dtrain as dt
from dtrain.dist.collective_replay import get_interceptor
from dtrain.memory.device_memory import get_device_memory
from dtrain.testing import Ranks
from dtrain.testing.checks import UNLIMITED, memory_budget
from measure import machine

HIDDEN, LAYERS, HEADS, KEY_HEADS, VOCAB = 256, 4, 8, 4, 512
SAME = 1e-4  # relative, float32
WAYS = {
    "dense mask of transformers": (1, "sdpa"),
    "bounds of documents": (1, "ulysses"),
    "ulysses, cp=2": (2, "ulysses"),
    "ulysses, cp=4": (4, "ulysses"),
    "ring, cp=2": (2, "ring"),
    "ring, cp=4": (4, "ring"),
}


def _llama(attention: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=2**20,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def _batch(seq: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(seq // 16, seq // 3, (12,), generator=generator).tolist()
    documents = [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]
    block = dt.data.PackedTokens(documents, seq=seq, lengths=lengths)[0]
    return {name: tensor[None] for name, tensor in block.items()}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> dt.LossSum:
    logits = model(batch["input_ids"], position_ids=batch["positions"], use_cache=False).logits
    return dt.cross_entropy(logits, batch["labels"])


def _transforms(mesh: Any, method: str) -> list[dt.Transform]:
    if method == "sdpa":
        return []
    dims = {"input_ids": 1, "labels": 1, "positions": 1}
    documents = "documents" if method == "ulysses" else None
    # The comparison of the first step runs whole sequences.
    return [
        dt.transforms.context_parallel(mesh, batch_seq_dims=dims, method=method, documents=documents, check=False)  # type: ignore[arg-type]
    ]


def measured(cp: int, method: str, seq: int) -> dict[str, float]:
    """Return the peak above the memory between steps, the bytes sent along cp, and the norm of the gradient."""
    with memory_budget(UNLIMITED):
        mesh = dt.build_mesh(cp=cp)
        model = dt.shard_model(
            _llama("sdpa" if method == "sdpa" else dt.shard.register_attention()), mesh, strategy="replicate"
        )
        batch = _batch(seq)
        if method == "ring":
            del batch["documents"]
            batch["positions"] = torch.arange(seq)[None]
        step = dt.compose_step(loss_fn, [*_transforms(mesh, method), dt.transforms.clip_by_norm(1e9)])
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0))
        gauge = get_device_memory(state.device)
        assert gauge is not None
        state, _ = step(state, batch)
        sent: Counter[str] = Counter()

        def count(operation: Any, args: tuple[Any, ...], _: dict[str, Any], issue: Callable[[], Any]) -> Any:
            sent["bytes"] += _sent_bytes(operation.name(), args, cp)
            return issue()

        before = gauge.read().live
        gauge.reset()
        with get_interceptor().listen(count):
            state, metrics = step(state, batch)
        return {"peak": gauge.read().peak - before, "sent": sent["bytes"], "norm": float(metrics["grad_norm"].total)}


def _sent_bytes(name: str, args: tuple[Any, ...], ranks: int) -> int:
    """Return the bytes that leave this rank in an exchange along cp. The gradients are all-reduced, which does not count."""
    if "alltoall" not in name and "allgather" not in name:
        return 0
    tensors = args[1] if isinstance(args[1], list) else [args[1]]
    given = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if "allgather" in name:
        return given * (ranks - 1)
    # The ring gives all to one rank, and names sizes.
    return given if any(isinstance(value, list) and value for value in args) else given * (ranks - 1) // ranks


def table(by_way: dict[str, dict[str, float]]) -> str:
    """The figures as text, each beside those of one rank with bounds."""
    one = by_way["bounds of documents"]["peak"]
    rows = [f"{'way':<30}{'peak MiB':>10}{'of one rank':>13}{'sent MiB':>10}"]
    for way, figures in by_way.items():
        rows.append(f"{way:<30}{figures['peak'] / 2**20:>10.1f}{figures['peak'] / one:>13.2f}{figures['sent'] / 2**20:>10.1f}")
    return "\n".join(rows)


def check_same(by_way: dict[str, dict[str, float]]) -> None:
    """Refuse figures of ways that computed other gradients."""
    norms = [figures["norm"] for way, figures in by_way.items() if not way.startswith("ring")]
    if max(norms) - min(norms) > SAME * norms[0]:
        raise SystemExit(f"long_sequences: the gradients differ: norms {norms}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=1024)
    seq = parser.parse_args().seq
    print(machine())
    by_way = {}
    for way, (cp, method) in WAYS.items():
        with Ranks(cp) as pool:
            by_way[way] = pool.run(measured, cp, method, seq, timeout_s=1800)[0]
    check_same(by_way)
    print(f"a row of {seq} tokens, {LAYERS} layers of {HIDDEN}, {HEADS} heads, {KEY_HEADS} key heads, float32, CPU ranks")
    print(table(by_way))


if __name__ == "__main__":
    main()
