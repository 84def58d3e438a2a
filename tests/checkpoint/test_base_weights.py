"""Base weights of Hugging Face in shards, under adapters of peft and with a larger vocabulary; each rank reads its shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import dtrain as dt
from checkpoint.test_load_weights import INDEX, write_folder
from dtrain import storage
from dtrain.checkpoint.load_weights import LoadWeightsResult, load_weights_
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.dist.mesh import build_mesh
from dtrain.errors import CheckpointMismatchError, ConfigError
from dtrain.shard.fsdp import shard_model
from dtrain.shard.materialize import materialize
from dtrain.state import init_state

peft = pytest.importorskip("peft")
get_peft_model = peft.get_peft_model
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft
VOCAB, MORE = 30, 37
METHODS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    "copies": lambda: peft.LoraConfig(r=2, target_modules=["v_proj", "embed_tokens"], modules_to_save=["lm_head"]),
    # These are not initialized on the meta device.
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"]),
    "prompts": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def llama(*, vocab: int = VOCAB, tied: bool = False) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocab, num_hidden_layers=2, tie_word_embeddings=tied, **sizes)
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def base_tensors() -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in llama().named_parameters()}


def adapted(method: str, *, meta: bool = True) -> nn.Module:
    with torch.device("meta" if meta else "cpu"):
        return peft.get_peft_model(llama(), METHODS[method]())


def sharded(model: nn.Module, strategy: str = "full_shard") -> nn.Module:
    init = model._init_weights
    return materialize(shard_model(model, build_mesh(), strategy=strategy, blocks=(LlamaDecoderLayer,)), seed=0, init=init)


def load_counted(model: nn.Module, folder: str, **options: Any) -> tuple[LoadWeightsResult, int]:
    """Load, and count the bytes that this rank reads from files."""
    bytes_read = []
    original = storage.FileReader.read_into

    def counting(self, begin, out):
        bytes_read.append(len(out))
        return original(self, begin, out)

    storage.FileReader.read_into = counting
    try:
        return load_weights_(model, folder, **options), sum(bytes_read)
    finally:
        storage.FileReader.read_into = original


def load_under_adapters(folder: str, method: str) -> list:
    net = sharded(adapted(method))
    done, bytes_read = load_counted(net, folder)
    params = dict(net.named_parameters())
    loaded = {name: full_tensor(params[name].detach()).tolist() for name in done.loaded}
    own = sum(to_local(params[name]).nbytes for name in done.loaded)
    return [loaded, sorted(done.kept), sorted(n for n, p in net.named_parameters() if n not in loaded), bytes_read, own]


def plain_name(name: str) -> str:
    """Return the name in the base model, without the words of peft."""
    for word in ("base_model.model.", "base_layer.", "original_module.", "modules_to_save.default."):
        name = name.replace(word, "")
    return name


@pytest.mark.parametrize(("method", "files"), [("lora", 1), ("lora", 4), ("copies", 16), ("copies", 1)])
def test_base_weights_load_under_adapters_and_each_rank_reads_its_shards(tmp_path, ranks, method, files):
    tensors = base_tensors()
    folder = write_folder(tmp_path, tensors, files=files)
    assert len(list(folder.glob("*.safetensors"))) == files
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))
    index = (folder / INDEX).stat().st_size if files > 1 else 0
    whole = 0
    for loaded, kept, rest, bytes_read, own in ranks(2).run(load_under_adapters, str(folder), method):
        assert {name: tensors[plain_name(name)].tolist() for name in loaded} == loaded
        assert kept == rest, "the adapters keep their values"
        assert all("lora" in name for name in kept)
        assert bytes_read == headers + index + own
        whole += own
    count = sum(tensor.nbytes for tensor in tensors.values())
    copies = tensors["lm_head.weight"].nbytes if method == "copies" else 0
    assert whole == count + copies, "all ranks together read each byte once, and that of a trained copy twice"


@pytest.mark.parametrize("method", METHODS)
def test_every_tensor_of_the_base_model_is_found_under_each_method(tmp_path, method):
    llama().save_pretrained(tmp_path)
    net = adapted(method, meta=False)
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    with torch.no_grad():
        for param in net.parameters():
            param.add_(1)
    done = load_weights_(net, tmp_path)
    assert set(done.loaded) | set(done.kept) == set(before)
    for name, param in net.named_parameters():
        assert torch.equal(param, before[name] + (name in done.kept)), name


def test_names_can_be_dropped_and_a_step_with_adapters_still_names_every_tensor(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    net = materialize(model := adapted("lora"), seed=0, init=model._init_weights)
    load_weights_(
        net, tmp_path / "base", rename=lambda name: None if name == "lm_head.weight" else name, ignore=["**.lm_head.*"]
    )
    root = tmp_path / "root"
    save_sharded(root, init_state(net, torch.optim.AdamW(net.parameters())))
    other = materialize(model := adapted("lora"), seed=1, init=model._init_weights)
    assert load_weights_(other, root).kept == ()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    deeper = materialize(model := adapted("copies"), seed=1, init=model._init_weights)
    with pytest.raises(CheckpointMismatchError, match=r"9 missing"):
        load_weights_(deeper, root)


def load_base(config, folder, lora, tokenizer):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        # before adapters and shards
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model = get_peft_model(model, lora)
    init = model._init_weights
    model = dt.shard_model(model, dt.build_mesh(), blocks=(LlamaDecoderLayer,))
    model = dt.materialize(model, seed=0, init=init)
    # names of the base model need no rename, and each rank reads its own shards
    embeddings = ["**.embed_tokens.**", "**.lm_head.**"]
    dt.load_weights_(model, folder, extend_rows=embeddings)
    return model


def load_as_documented(folder: str) -> list:
    net = load_base(llama().config, folder, METHODS["copies"](), "a tokenizer" * 5)
    rows = {name: full_tensor(p.detach()) for name, p in net.named_parameters()}
    return [
        rows[f"base_model.model.{name}.weight"][:VOCAB].tolist()
        for name in ("model.embed_tokens.base_layer", "lm_head.modules_to_save.default")
    ]


def test_a_larger_vocabulary_under_adapters_loads_as_documented(tmp_path, ranks):
    llama().save_pretrained(tmp_path)
    expected = [base_tensors()[name].tolist() for name in ("model.embed_tokens.weight", "lm_head.weight")]
    assert ranks(2).run(load_as_documented, str(tmp_path)) == [expected] * 2


def load_more_rows(folder: str, tied: bool, strategy: str, tp: bool) -> list:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    with torch.device("meta"):
        net = llama(tied=tied)
        net.resize_token_embeddings(MORE + tp, mean_resizing=False)
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": ColwiseParallel()} if tp else None
    mesh = build_mesh(tp=2) if tp else build_mesh()
    net = shard_model(net, mesh, strategy=strategy, blocks=(LlamaDecoderLayer,), tp_plan=plan)
    net = materialize(net, seed=0, init=net._init_weights)
    before = {name: full_tensor(p.detach()).clone() for name, p in net.named_parameters()}
    wide = ["model.embed_tokens.weight", "lm_head.weight"]
    load_weights_(net, folder, extend_rows=wide)
    after = {name: full_tensor(p.detach()) for name, p in net.named_parameters()}
    stays = all(torch.equal(after[name][VOCAB:], before[name][VOCAB:]) for name in wide if name in after)
    return [{name: tensor[:VOCAB].tolist() if name in wide else tensor.tolist() for name, tensor in after.items()}, stays]


@pytest.mark.parametrize(
    ("world", "strategy", "tied", "tp"),
    [
        (3, "full_shard", False, False),
        (2, "full_shard", True, False),
        (4, "full_shard", False, True),
        (2, "replicate", False, False),
    ],
)
def test_a_vocabulary_that_grew_before_sharding_keeps_its_new_rows(tmp_path, ranks, world, strategy, tied, tp):
    folder = tmp_path / "base"
    stored = llama(tied=tied)
    stored.save_pretrained(folder)
    expected = {name: param.tolist() for name, param in stored.named_parameters()}
    for loaded, stays in ranks(world).run(load_more_rows, str(folder), tied, strategy, tp):
        assert loaded == expected
        assert stays


def test_more_rows_are_refused_unless_named(tmp_path):
    llama().save_pretrained(tmp_path)
    wider = llama(vocab=MORE)
    with pytest.raises(CheckpointMismatchError, match=r"model.embed_tokens.weight: file F32 \[30, 16\], here F32 \[37, 16\]"):
        load_weights_(wider, tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"lm_head.weight: file F32 \[30, 16\], here"):
        load_weights_(wider, tmp_path, extend_rows=["model.embed_tokens.weight"])
    with pytest.raises(CheckpointMismatchError, match=r"here F32 \[29, 16\]"):
        load_weights_(llama(vocab=VOCAB - 1), tmp_path, extend_rows=["**.embed_tokens.weight", "lm_head.weight"])
    with pytest.raises(ConfigError, match=r"extend_rows must match names of the model, got 'embed'"):
        load_weights_(wider, tmp_path, extend_rows=["embed"])
    load_weights_(wider, Path(tmp_path), extend_rows=["**.embed_tokens.weight", "lm_head.weight"])
