"""What the search of the site finds: pages that it leaves out, pages that it prefers, and the field's words for a page.

Words that a page does not use itself are its tags: the search ranks them above the text, and shows them below the title.
"""

from __future__ import annotations

from typing import Any

EXCLUDED = ("project/changelog.md", "log.md", "evidence.md", "names.md", "project/benchmarks.md", "reference/index.md")
"""Lists of everything, which would be among the first results of any word."""

BOOSTS = {"guides": 3.0, "recipes/": 1.5, "examples/": 0.5, "reference/": 0.7, "project/": 0.5}
"""By beginning of the address; ``guides`` are the other pages of docs/."""

LESS = ("figures.md", "scale.md", "truth-table.md", "composer.md", "architecture.md")
"""Pages of docs/ that are not guides."""

WORDS = {
    "checkpoints.md": "checkpoint, resume, Hugging Face, safetensors, DCP, torch.save",
    "collectives.md": "all-reduce, all-gather, collective",
    "data.md": "DataLoader, streaming dataset, dataset, S3, shards",
    "determinism.md": "random seed, reproducibility",
    "distributed.md": "FSDP, HSDP, DDP, pipeline parallel, expert parallel",
    "embeddings.md": "contrastive loss, InfoNCE, GradCache, sentence embeddings",
    "errors.md": "out of memory, OOM, NCCL timeout, NaN loss, RuntimeError",
    "faq.md": "FAQ",
    "finetuning.md": "LoRA, PEFT, Hugging Face, transformers, SFT",
    "from_accelerate.md": "Accelerate",
    "from_ddp.md": "DDP, DistributedDataParallel, DistributedSampler",
    "from_deepspeed.md": "DeepSpeed, ZeRO",
    "from_fabric.md": "Fabric, Lightning",
    "from_torchtitan.md": "torchtitan",
    "gpu.md": "CUDA, NCCL, H100, H200",
    "hangs.md": "hang, deadlock, NCCL timeout, watchdog, stuck",
    "launch.md": "torchrun, launcher, mpirun",
    "memory.md": "activation checkpointing, gradient checkpointing, CPU offload, out of memory, OOM",
    "microbatch.md": "gradient accumulation, OOM, batch size, automatic batch size",
    "nodes.md": "multi node, multi-node, Slurm, Kubernetes, Ray, rendezvous",
    "observing.md": "early stopping, wandb, TensorBoard, MLflow, throughput, logging, metrics, tqdm, progress bar",
    "optimizers.md": "weight decay, AdamW, optimizer",
    "packing.md": "sequence packing, validation, evaluation, eval loop",
    "parallelism.md": "tensor parallel, context parallel, sequence parallel",
    "precision.md": "mixed precision, AMP, bf16, fp16, fp8, quantization",
    "preemption.md": "spot instance, SIGTERM, requeue, time limit",
    "preferences.md": "RLHF, DPO, preference optimization",
    "profiling.md": "profiler, trace, nsight",
    "prove.md": "correctness, reproducibility",
    "quickstart.md": "tutorial, getting started, resume",
    "schedules.md": "learning rate schedule, lr scheduler, warmup",
    "scope.md": "pipeline parallel, mixture of experts, MoE, quantization, RLHF",
    "sharding.md": "FSDP, FSDP2, HSDP, fully_shard, ZeRO, torch.compile, meta device",
    "time.md": "epoch, max steps, training length",
    "recipes/clip_by_norm.md": "gradient clipping, clip_grad_norm_",
    "recipes/clip_by_value.md": "gradient clipping",
    "recipes/ema.md": "EMA",
    "recipes/autocast.md": "mixed precision, AMP, bf16",
    "recipes/nonfinite.md": "NaN loss, skip step",
    "recipes/param_groups.md": "weight decay, layer-wise learning rate",
    "recipes/scale_lr.md": "learning rate schedule",
    "recipes/loss_scale.md": "GradScaler, fp16",
    "recipes/DecoupledAdamW.md": "weight decay, AdamW",
}
"""By page, the words that people type, separated by commas."""


def settings(uri: str) -> dict[str, Any]:
    """Return the front matter that a page gets for the search, beside its own."""
    if uri in EXCLUDED:
        return {"search": {"exclude": True}}
    kind = "guides" if "/" not in uri and uri not in LESS else ""
    boost = next((value for start, value in BOOSTS.items() if start == kind or uri.startswith(start)), 1.0)
    words = [word.strip() for word in WORDS.get(uri, "").split(",") if word.strip()]
    return {"search": {"boost": boost}} | ({"tags": words} if words else {})
