"""Memory and time of models of transformers: base weights into shards, export, generation with shards, islands of float32.

    python benchmarks/hugging_face.py                    # about three minutes on two free cores
    python benchmarks/hugging_face.py --layers 8         # a larger Llama

The model is a Llama of transformers in float32, with LoRA of peft where it is loaded and exported. There, memory is the largest
resident memory of one process above that before the call, and bytes read are those of its system calls, without mapped files.
Elsewhere memory is that of a rank's tensors. Ranks share the cores of this machine.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dtrain as dt
from dtrain.testing import Ranks
from dtrain.testing.checks import UNLIMITED, memory_budget
from measure import machine

HIDDEN, HEADS, VOCAB, FILE_BYTES = 512, 8, 8192, 2**25
PROMPTS, PROMPT, NEW = 4, 16, 32
MIB = 2**20
ISLANDS = {"**.*layernorm": "fp32", "**.norm": "fp32", "lm_head": "fp32"}
PRECISIONS: dict[str, Any] = {
    "fp32": None,
    'dt.Precision(param="bf16")': {"param": "bf16"},
    "the same with fp32 norms and head": {"param": "bf16", "overrides": ISLANDS},
}


def _llama(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_attention_heads": HEADS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=layers, tie_word_embeddings=False, **sizes))


def _adapted(model: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))


def _block() -> type[nn.Module]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return LlamaDecoderLayer


def measure(run: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of ``run``, its largest resident memory above that before, and the bytes that it read, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    before, read, began = _resident("VmRSS"), _read_bytes(), time.monotonic()
    run()
    seconds = time.monotonic() - began
    return {"seconds": seconds, "memory": (_resident("VmHWM") - before) / MIB, "read": (_read_bytes() - read) / MIB}


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def loaded(folder: str, layers: int, way: str) -> dict[str, float]:
    """Measure base weights below adapters, on this rank, until they are in shards."""
    from transformers import LlamaForCausalLM

    mesh = dt.build_mesh()
    with torch.device("meta"):
        empty = _adapted(_llama(layers))
    kept: list[nn.Module] = []

    def by_rank() -> None:
        kept.append(dt.shard_model(_adapted(LlamaForCausalLM.from_pretrained(folder)), mesh, blocks=(_block(),)))

    def streamed() -> None:
        init = empty.get_submodule("base_model.model")._init_weights
        model = dt.materialize(dt.shard_model(empty, mesh, blocks=(_block(),)), seed=0, init=init)  # type: ignore[arg-type]
        dt.load_weights_(model, folder)
        kept.append(model)

    return measure(by_rank if way == "from_pretrained" else streamed)


def saved(root: str, layers: int) -> None:
    """Save a model with adapters, and the config files beside it."""
    model = _adapted(_llama(layers))
    config: Any = model
    config.config.save_pretrained(f"{root}-configs")
    config.peft_config["default"].save_pretrained(f"{root}-configs")
    model = dt.shard_model(model, dt.build_mesh(), blocks=(_block(),))
    trained = [param for param in model.parameters() if param.requires_grad]
    dt.save_sharded(root, dt.compose_step(dt.transformers_loss).init(model, torch.optim.AdamW(trained)), scope="weights")


def converted(root: str, out: str, to: str, merge: bool) -> dict[str, float]:
    """Measure the export of a checkpoint of two ranks by one process."""
    return measure(lambda: dt.checkpoint.convert(root, out, to=to, merge=merge, config=f"{root}-configs"))  # type: ignore[arg-type]


def generated(layers: int, strategy: Any) -> dict[str, float]:
    """Measure the tokens of some prompts per rank, and the tensors that the rank holds at most."""
    with memory_budget(UNLIMITED) as held:
        model: Any = dt.shard_model(_llama(layers), dt.build_mesh(), strategy=strategy, blocks=(_block(),)).eval()
        ids = torch.randint(VOCAB, (PROMPTS, PROMPT))
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        with dt.eval_mode(model):
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), **{**options, "max_new_tokens": 1, "min_new_tokens": 1}
            )
            held.reset()
            began = time.monotonic()
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        return {"seconds": (time.monotonic() - began) / NEW, "memory": held.peak / MIB, "read": 0.0}


def trained(layers: int, name: str) -> dict[str, float]:
    """Measure a training step, and the tensors that the rank holds at most."""
    with memory_budget(UNLIMITED) as held:
        options = PRECISIONS[name]
        precision = None if options is None else dt.Precision(**options)
        model = dt.shard_model(_llama(layers), dt.build_mesh(), precision=precision, blocks=(_block(),))
        step = dt.compose_step(dt.transformers_loss)
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4), allow_equal_batches=True)
        ids = torch.randint(VOCAB, (2, 128), generator=torch.Generator().manual_seed(1))
        seconds = []
        for _ in range(3):
            held.reset()
            began = time.monotonic()
            state, _ = step(state, {"input_ids": ids, "labels": ids})
            seconds.append(time.monotonic() - began)
        return {"seconds": min(seconds), "memory": held.peak / MIB, "read": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    layers = parser.parse_args().layers
    print(machine())
    with tempfile.TemporaryDirectory() as place:
        model = _llama(layers)
        model.save_pretrained(f"{place}/base", max_shard_size=FILE_BYTES)
        files = [path.stat().st_size for path in Path(place, "base").glob("*.safetensors")]
        print(f"a Llama of {layers} layers of {HIDDEN}, {sum(files) / MIB:.0f} MiB in {len(files)} files; of the first rank:")
        row = "{:<50}{:>7}{:>9}{:>12}{:>10}".format
        print(row("what", "ranks", "seconds", "memory MiB", "read MiB"))

        def show(what: str, ranks: int, function: Callable[..., Any], *args: Any) -> None:
            with Ranks(ranks) as pool:
                figures: dict[str, float] = pool.run(function, *args, timeout_s=1200)[0]
            numbers = [f"{figures['seconds']:.3g}", f"{figures['memory']:.0f}", f"{figures.get('read', 0.0):.0f}"]
            print(row(what, ranks, *numbers), flush=True)

        for way, ranks in (("from_pretrained", 2), ("load_weights_", 1), ("load_weights_", 2), ("load_weights_", 4)):
            show(f"{way}, into shards below LoRA", ranks, loaded, f"{place}/base", layers, way)
        with Ranks(2) as pool:
            pool.run(saved, f"{place}/root", layers, timeout_s=1200)
        for to, merge in (("peft", False), ("hf", True)):
            out = f"{place}/{to}"
            show(f"convert --to {to}{' --merge' * merge}", 1, converted, f"{place}/root", out, to, merge)
        for strategy, ranks in (("replicate", 2), ("full_shard", 2)):
            show(f"generate, a token of {PROMPTS} prompts, {strategy}", ranks, generated, layers, strategy)
        for name in PRECISIONS:
            show(f"step, {name}", 2, trained, layers, name)


if __name__ == "__main__":
    main()
