"""LoRA of peft under a tensor-parallel plan: training is that of one process, and peft loads the checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from dtrain.checkpoint.conversion.convert import convert
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.shard.unshard import full_params
from dtrain.state import init_state
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.transforms.gradients.clipping import clip_by_norm
from shard.test_tensor_parallel_transformers import STEPS, TOLERANCE, error, loss_fn, model_of, share, whole_batch

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # read by peft

GIVEN = {
    "**.q_proj": ColwiseParallel(),
    "**.k_proj": ColwiseParallel(),
    "**.v_proj": ColwiseParallel(),
    "**.o_proj": RowwiseParallel(),
    "**.up_proj": ColwiseParallel(),
    "**.gate_proj": ColwiseParallel(),
    "**.down_proj": RowwiseParallel(),
}
# Model, tensor-parallel plan, and options of LoRA.
CASES: dict[str, Any] = {
    "llama, its own plan": ("llama", "auto", {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}),
    "llama, the head and the embedding": ("llama", "auto", {"target_modules": ["embed_tokens", "v_proj", "lm_head"]}),
    "qwen2, its own plan": ("qwen2", "auto", {"target_modules": ["q_proj", "k_proj", "v_proj"], "lora_bias": True}),
    "qwen2, given": ("qwen2", GIVEN, {"target_modules": ["q_proj", "o_proj", "down_proj"], "use_rslora": True}),
}


def adapted(kind: str, options: dict[str, Any]) -> nn.Module:
    """A model with adapters other than zero."""
    config = peft.LoraConfig(r=3, lora_alpha=5, **options)
    model = peft.get_peft_model(model_of(kind), config)
    torch.manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn_like(param))
    return model


def reference(model: nn.Module) -> dict[str, Any]:
    """One process, without dtrain. Mutates: ``model``."""
    batch, losses, gradients = whole_batch(), [], {}
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        gradients = gradients or {name: param.grad.clone() for name, param in trained.items()}
        nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "gradients": gradients, "weights": {k: p.detach() for k, p in model.named_parameters()}}


def train(case: str, root: str) -> list[float]:
    """Return the errors of the gradient, the losses and the weights, and save the adapter."""
    kind, plan, options = CASES[case]
    expected, errors = reference(adapted(kind, options)), []
    for with_steps in (False, True):
        model = adapted(kind, options)
        blocks = (type(model.base_model.model.model.layers[0]),)
        model = shard_model(model, build_mesh(tp=2), blocks=blocks, tp_plan=plan)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
        if not with_steps:
            state = init_state(model, optimizer)
            mine = share(state.spec.data_rank, state.spec.data_ranks)
            state, _ = microbatch_step(state, mine, loss_fn=loss_fn, microbatch_size=1)
            found = {name: full_tensor(p.grad) for name, p in state.params.items() if p.requires_grad}
            errors.append(error(found, expected["gradients"]))
            continue
        step = compose_step(loss_fn, [clip_by_norm(0.5)], microbatch_size=1)
        state = step.init(model, optimizer)
        for number in range(STEPS):
            state, metrics = step(state, mine)
            errors.append(abs(reduce_metrics(metrics)["loss"] - expected["losses"][number]))
        errors.append(error(dict(full_params(state)), expected["weights"]))
    save_sharded(root, state, scope="trainable")
    return errors


@pytest.mark.costly
@pytest.mark.parametrize("case", CASES)
def test_lora_under_a_plan_equals_one_process_and_peft_loads_its_checkpoint(tmp_path: Path, ranks: Any, case: str) -> None:
    for errors in ranks(4).run(train, case, str(tmp_path / "root")):
        assert len(errors) == 2 + STEPS
        assert max(errors) <= TOLERANCE
    kind, _, options = CASES[case]
    model = adapted(kind, options)
    model.peft_config["default"].save_pretrained(tmp_path)
    done = convert(tmp_path / "root", tmp_path / "out", to="peft", config=tmp_path / "adapter_config.json")
    reference(model)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model_of(kind)), done.path)
    batch = {key: value for key, value in whole_batch().items() if key != "labels"}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=1e-10, atol=1e-10)


SEQUENCES = {"**.q_proj": ColwiseParallel(input_layouts=Shard(1)), "**.o_proj": RowwiseParallel(output_layouts=Shard(1))}
REFUSED: dict[str, Any] = {
    "dora": (
        {"target_modules": ["q_proj"], "use_dora": True},
        {"**.q_proj": ColwiseParallel()},
        "must be plain LoRA under a plan, got lora_magnitude_vector in ",
    ),
    "sequence": (
        {"target_modules": ["q_proj"]},
        SEQUENCES,
        "ColwiseParallel must have whole inputs on 'base_model.model.model.layers.0.",
    ),
}


def refused() -> dict[str, str]:
    messages = {}
    for name, (options, plan, _) in REFUSED.items():
        try:
            shard_model(adapted("llama", options), build_mesh(tp=2), tp_plan=plan)
        except ConfigError as problem:
            messages[name] = str(problem)
    return messages


def test_adapters_that_a_plan_cannot_split_are_refused_by_name(ranks: Any) -> None:
    for messages in ranks(2).run(refused):
        for name, (_, _, expected) in REFUSED.items():
            assert expected in messages[name]
