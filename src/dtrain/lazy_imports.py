"""Import public names on first use, and advise on a name that does not exist.

A package lists its public names once, as ``from module import name as name`` under ``if TYPE_CHECKING:`` in its
``__init__.py``. Type checkers and editors read the block. ``attach`` reads the same block at run time, on first use of a name.
So importing the package imports nothing else:

    if TYPE_CHECKING:
        from dtrain.schedules.curves import cosine as cosine

    __getattr__, __dir__ = attach(__name__, __file__)

Advice is for a word of another library, a name behind another door, and a misspelt name. Functions, arguments and values of
arguments each have a table of the words that people type.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package that imports its public names lazily.

    Args:
        package: dotted name of the package, its ``__name__``.
        file: path of the package's ``__init__.py``, its ``__file__``.
    """

    def load_attribute(name: str) -> Any:
        if name == "__all__":
            return sorted(public_names(file))
        module = None if name.startswith("_") else public_names(file).get(name)
        if module is None:
            # Protocols probe names with underscores.
            advice = "" if name.startswith("_") else advise_on_name(public_paths(), package, name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{advice and '. '}{advice}", name=name)
        value = import_module(f"{module}.{name}") if module == package else getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return load_attribute, lambda: sorted(public_names(file))


@cache
def public_names(file: str) -> dict[str, str]:
    """Map each public name of a package to the module that defines the name.

    A sub-package maps to its parent package.
    """
    # An import of dtrain alone needs no parser.
    import ast

    with open(file, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    blocks = [node.body for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {alias.asname: str(node.module) for node in imports for alias in node.names if alias.asname}


@cache
def public_doors() -> dict[str, dict[str, str]]:
    """Map each door of dtrain, such as ``dtrain.schedules``, to its ``public_names``. A door may be one module."""
    root, doors = os.path.dirname(__file__), dict[str, dict[str, str]]()
    packages = ["dtrain"]
    for package in packages:
        file = os.path.join(root, *package.split(".")[1:], "__init__.py")
        if os.path.exists(file):
            doors[package] = names = public_names(file)
            packages += [f"{package}.{name}" for name, module in names.items() if module == package]
        else:
            doors[package] = dict.fromkeys(_defined_names(f"{os.path.dirname(file)}.py"), package)
    return doors


def public_paths() -> dict[str, list[str]]:
    """Map each door of dtrain to the paths of its public names, such as ``dt.schedules.cosine``."""
    return {
        package: [f"{package.replace('dtrain', 'dt', 1)}.{name}" for name in names] for package, names in public_doors().items()
    }


def _defined_names(file: str) -> list[str]:
    """Return the public classes, functions and values that a module defines."""
    import ast

    with open(file, encoding="utf-8") as source:
        body = ast.parse(source.read()).body
    names = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


_LOOP = "Write the loop yourself: dt.compose_step(loss_fn, transforms) makes its step."
_OPEN = "Open the process groups with `with dt.init_dist() as dist:`."
_PREPARE = "Use model = dt.shard_model(model, dt.build_mesh()), then dt.compose_step(loss_fn).init(model, optimizer)."
_SHARD = "Use dt.shard_model(model, dt.build_mesh(), strategy='full_shard')."
_REPLICATE = "Use dt.shard_model(model, dt.build_mesh(), strategy='replicate')."
_LOADER = "Use dt.build_loader(dataset, global_batch_size=32, seed=0, mesh=mesh)."
_SAVE = "Use dt.save_sharded('ckpt', state)."
_LOAD = "Use dt.load_sharded('ckpt', state, missing_ok=True)."
_CLIP = "Use dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0)])."
_RATE = "Use dt.compose_step(loss_fn, [dt.transforms.scale_lr(dt.schedules.cosine(1.0, 0.1, 1000))])."
_PRECISION = "Use dt.shard_model(model, mesh, precision=dt.Precision(param='bf16'))."
_MICROBATCH = "Use dt.auto_microbatch() in the list of dt.compose_step, or its microbatch_size."
_METRICS = "Use dt.reduce_metrics(metrics)['loss']."
_RANK = "Use the object of `with dt.init_dist() as dist:`, which has dist.rank and dist.world_size."
_RESTORED = "Use state.restored of state = dt.load_sharded('ckpt', state)."
_TRANSFORMS = "List the transforms, the first one outermost: dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0)])."
_SEED = "Use dt.seed_all(seed)."

FOREIGN_NAMES = {
    _LOOP: "Trainer LightningModule Engine TrainingArguments train fit training_step ComposerModel Callback Algorithm",
    _OPEN: "init initialize init_distributed init_process_group setup_distributed initialize_dist dist_init PartialState",
    _PREPARE: "prepare setup prepare_model prepare_optimizer wrap Accelerator Fabric",
    _SHARD: "fsdp fsdp2 FullyShardedDataParallel fully_shard FSDPModule zero zero2 zero3 deepspeed parallelize hsdp",
    _REPLICATE: "ddp DistributedDataParallel DataParallel data_parallel replicate",
    _LOADER: "DataLoader dataloader make_loader Dataset DistributedSampler StatefulDataLoader prepare_data_loader DataSpec",
    _SAVE: "save save_state save_checkpoint async_save save_model",
    _LOAD: "load load_state load_checkpoint resume restore load_state_dict",
    _CLIP: "clip clip_grad clip_grad_norm clip_grads clip_gradients max_grad_norm GradientClipping",
    _RATE: "scheduler lr_scheduler LRScheduler get_scheduler lr_schedule set_learning_rate CosineAnnealingLR LambdaLR",
    _PRECISION: "amp GradScaler mixed_precision MixedPrecision MixedPrecisionPolicy bf16 fp16",
    _MICROBATCH: "accumulate no_sync gradient_accumulation grad_accum backward set_microbatch_size GradientAccumulation",
    _METRICS: "gather_for_metrics metric metrics item get_metrics reduce_loss all_reduce_metrics",
    _RANK: "rank get_rank local_rank world_size get_world_size is_main is_main_process is_rank_zero get_global_rank",
    _SEED: "seed set_seed manual_seed seed_everything",
    "Use dist.print(...) of `with dt.init_dist() as dist:`.": "print print_once log_once rank_zero_print",
    "Use dt.shard.checkpoint_activations(model, blocks).": "gradient_checkpointing activation_checkpointing",
    "Use dt.compile_blocks(model, blocks).": "compile torch_compile compile_model",
    _RESTORED: "LoadResult load_result restored",
    _TRANSFORMS: "chain sequential",
    "Use `for batch in loader.until('3ep'):`.": "epochs num_epochs max_epochs",
    "Use dt.loggers.progress_bar(600).": "progress_line progress tqdm",
    "Use dt.open_run('runs') and dt.loggers.": "log Logger logger WandBLogger TensorBoardLogger tracker init_trackers",
    "Use dt.spawn(fn, world_size=2), or `dtrain launch -n 2 train.py`.": "notebook_launcher launcher start_processes torchrun",
    "Use dt.mean_loss(fn, weight=...).": "loss Loss wrap_loss",
    "Use dt.build_mesh().": "mesh DeviceMesh device_mesh init_device_mesh make_mesh",
    "Use the optimizer of torch, such as torch.optim.AdamW(model.parameters()).": "AdamW Adam SGD Optimizer optimizer",
}
"""Line to write, and the names that other libraries use for it. A test resolves every name in a line."""


_SAMPLES = "Use global_batch_size, the samples of a step over all ranks."
_ORDER = "Leave it out, because the loader shuffles by seed and divides the samples over the ranks of mesh."
_SHARES = "Use mesh, whose data-parallel ranks share each batch."
_SCHEDULE = "Give it to the step: dt.compose_step(loss_fn, [dt.transforms.scale_lr(schedule)])."
_WIDTH = "Give it to dt.shard_model(model, mesh, precision=dt.Precision(param='bf16'))."
_STRATEGY = "Give it to dt.shard_model(model, mesh, strategy='full_shard')."
_STATE = "Give it to the state: step.init(model, optimizer)."
_SIZE = "Use microbatch_size, the samples of one forward, or dt.auto_microbatch() as the last transform."
_LAUNCHER = "Leave it out, because the launcher sets it: dtrain launch -n 2 train.py."
_RUN = "Give it to the state: step.init(model, optimizer, loader=loader)."
_WHOLE = "Leave it out, because the state holds model, optimizer and step."
_GOAL = "Use goal='max' if larger is better, or goal='min'."

FOREIGN_ARGUMENTS: dict[str, dict[str, str]] = {
    "build_loader": {
        _SAMPLES: "batch_size per_device_batch_size per_device_train_batch_size micro_batch_size",
        _ORDER: "sampler batch_sampler",
        _SHARES: "num_replicas world_size rank",
        "Use last_batch='drop'.": "drop_last",
        "Use collate.": "collate_fn",
        "Use seed.": "generator",
        "Use device='cuda', which pins batches and copies them in advance.": "pin_memory pin_memory_device",
        "Leave it out, because workers live as long as the loader.": "persistent_workers",
        "Use timeout_s.": "timeout",
        "Use start_method.": "multiprocessing_context",
        "Use transform, a function of (sample, generator).": "worker_init_fn",
    },
    "shard_model": {
        "Use strategy='full_shard'.": "sharding_strategy",
        "Use blocks=(Block,), the classes to shard.": "auto_wrap_policy wrap_policy units",
        "Use precision=dt.Precision(param='bf16').": "mixed_precision mp_policy dtype param_dtype",
        "Use offload='params'.": "cpu_offload offload_policy",
        "Use strategy='full_shard', or 'shard_grad_op' to keep parameters after the forward.": "reshard_after_forward",
        "Use mesh=dt.build_mesh().": "device_mesh process_group",
        "Leave it out, because dt.init_dist chooses the device.": "device_id device device_ids",
        "Leave it out, because FSDP2 keeps parameters separate.": "use_orig_params",
        "Use sync=True, the default.": "sync_module_states",
        "Use ignored_params.": "ignored_modules ignored_states",
        "Use forward_methods.": "methods",
        "Leave it out, because a step drops unused gradients on all ranks.": "find_unused_parameters",
    },
    "compose_step": {
        _STATE: "model optimizer",
        _SCHEDULE: "scheduler lr_scheduler schedule",
        _WIDTH: "precision mixed_precision amp",
        _STRATEGY: "strategy mesh",
        "Use dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0)]).": "clip_grad_norm max_grad_norm gradient_clip_val",
        _SIZE: "gradient_accumulation_steps accumulate_grad_batches grad_accum accumulation_steps",
    },
    "init": {
        _SCHEDULE: "scheduler lr_scheduler schedule",
        _WIDTH: "precision mixed_precision amp",
        _STRATEGY: "strategy mesh",
        "Give it to the step: dt.compose_step(loss_fn, [dt.transforms.loss_scale()]).": "scaler grad_scaler",
        "Give it to the step: dt.compose_step(loss_fn, transforms).": "loss_fn transforms",
        "Give it to the loop: loader.until('3ep').": "epochs num_epochs max_epochs max_steps num_steps",
    },
    "save_sharded": {
        _WHOLE: "model optimizer step",
        "Use root, a folder that gets one folder per step.": "filename checkpoint_id folder",
        "Use keep_last.": "save_total_limit max_to_keep save_top_k num_checkpoints_to_keep",
        "Use mode='async'.": "async_save asynchronous",
        "Use scope='weights'.": "what",
        "Use dtype=torch.bfloat16.": "cast",
        _RUN: "loader dataloader sampler stateful",
    },
    "load_sharded": {
        _WHOLE: "model optimizer step",
        _RUN: "loader dataloader sampler stateful",
        "Use ignore=['head.**'], the names to leave out.": "strict partial ignore_keys missing",
        "Use allow_cast=True.": "cast",
        "Use scope='weights'.": "what",
        "Use root, the folder passed to save_sharded, or the folder of one step.": "filename checkpoint_id folder path",
        "Leave it out, because each rank loads to its own device.": "map_location device",
        "Leave it out, because a load never runs stored code.": "weights_only",
    },
    "load_weights_": {
        "Use ignore=['head.**'], the names that keep their values.": "missing strict partial ignore_keys missing_ok",
        "Leave it out, because weights are converted to the dtype of the model.": "cast allow_cast",
    },
    "Checkpointer": {
        "Use keep_last.": "keep save_total_limit max_to_keep save_top_k num_checkpoints_to_keep",
        "Use root, a folder that gets one folder per step.": "filename checkpoint_id folder path",
        "Give it to the save: checkpoints.save(state, scope='weights').": "what scope",
        _RUN: "loader dataloader sampler stateful",
    },
    "spawn": {
        "Use world_size, the number of ranks.": "nproc nprocs num_processes n nproc_per_node",
        "Use timeout_s.": "timeout",
    },
    "mean_loss": {"Use weight, a function of the batch.": "weight_fn weights count"},
    "batch_spec": {"Use weight, a function of the batch.": "weight_fn weights"},
    "evaluate": {
        "Use loader, the batches to evaluate.": "dataloader data dataset",
        "Use loss_fn, as in dt.compose_step.": "loss criterion",
        "Use microbatch_size.": "batch_size",
    },
    "init_dist": {
        "Use timeout_s.": "timeout",
        _LAUNCHER: "rank world_size master_addr master_port",
        "Use device='cuda'.": "device_id",
        _STRATEGY: "strategy",
        "Call dt.seed_all(seed).": "seed",
    },
    "early_stop": {_GOAL: "mode maximize minimize greater_is_better higher_is_better"},
    "threshold_stop": {_GOAL: "mode maximize minimize greater_is_better higher_is_better"},
}
"""Sentence that says what to write, and the arguments of other libraries that it replaces, by function."""

FOREIGN_VALUES: dict[str, dict[str, str]] = {
    "shard_model strategy": {
        "full_shard": "fsdp fsdp2 zero3 zero-3 zero stage3 fully_shard fullyshard fully_sharded deepspeed shard",
        "shard_grad_op": "zero2 zero-2 stage2 zero1 zero-1 shard_grad shard_gradients",
        "replicate": "ddp dp data_parallel replicated zero0",
        "hybrid_shard": "hsdp hybrid fsdp_hybrid",
    },
}
"""Value to pass, and the words that other libraries use for it, by function and argument."""


def advise_on_name(doors: Mapping[str, Sequence[str]], package: str, name: str) -> str:
    """Return the line that helps somebody who wrote ``name`` at the door ``package``; empty for a name like no other.

    Args:
        doors: paths of the public names of each door, such as ``{"dtrain.schedules": ["dt.schedules.cosine"]}``.
        package: door at which the name was looked up.
        name: name that is not there.

    Example:
        >>> doors = {"dtrain": ["dt.evaluate"], "dtrain.transforms": ["dt.transforms.ema"]}
        >>> [
        ...     advise_on_name(doors, "dtrain", name)
        ...     for name in ("ema", "EMA", "seed_everything")
        ... ]
        ['Use dt.transforms.ema.', 'Use dt.transforms.ema.', 'Use dt.seed_all(seed).']
    """
    # An import of dtrain alone needs no comparison of words.
    from difflib import get_close_matches

    paths = [path for paths in doors.values() for path in paths]
    equal = nearest_doors(path for path in paths if path.rpartition(".")[2] == name)
    line = find_line(FOREIGN_NAMES, name)
    # At the top level a word means the same as in the other library, also if another door has the word.
    if line and (package == "dtrain" or not equal):
        return line
    if equal:
        return f"Use {' or '.join(equal)}."
    for candidates, cutoff in ((doors.get(package, ()), 0.72), (paths, 0.8)):
        by_spelling: dict[str, list[str]] = {}
        for path in candidates:
            by_spelling.setdefault(_spell(path.rpartition(".")[2]), []).append(path)
        if close := get_close_matches(_spell(name), list(by_spelling), n=1, cutoff=cutoff):
            return f"Use {' or '.join(nearest_doors(by_spelling[close[0]]))}."
    return ""


def nearest_doors(paths: Iterable[str]) -> list[str]:
    """Return the paths with the fewest doors."""
    nearest = sorted(paths, key=lambda path: path.count("."))
    return [path for path in nearest if path.count(".") == nearest[0].count(".")]


def find_line(table: Mapping[str, str], word: str) -> str:
    """Return the line of ``table`` whose words contain ``word``, in any case; empty for another word."""
    return next((line for line, words in table.items() if word.lower() in words.lower().split()), "")


def _spell(name: str) -> str:
    """Return ``name`` as people compare it: without case and underscores."""
    return name.replace("_", "").lower()
