"""Convert adapters of Hugging Face's peft: rename the tensors of an adapter, or add LoRA matrices to the base weights.

A model of peft names its tensors as follows. In the file of an adapter, its name ``default`` is left out::

    base_model.model.<layer>.base_layer.weight                 base weight
    base_model.model.<layer>.lora_A.default.weight             of the adapter; lora_B, other methods as well
    base_model.model.<module>.modules_to_save.default.<name>   trained copy of a module of the base model, and
    base_model.model.<module>.original_module.<name>           the module itself

Source: Hu et al. 2022, arXiv:2106.09685 (LoRA), and Kalajdzievski 2023, arXiv:2312.03732 (``use_rslora``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.plan import Region, full_region
from dtrain.checkpoint.weights import TensorFiles, WeightStream, batch_regions, read_batch, rename_tensors
from dtrain.errors import CheckpointError

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_ADAPTER = re.compile(r"\.default(?=\.|$)")
_TRAINED_COPY, _REPLACED_MODULE, _BASE_LAYER = ".modules_to_save.default.", ".original_module.", ".base_layer."
# Ends of the two matrices of a layer and of an embedding.
_MATRICES = {
    ".lora_A.default.weight": ".lora_B.default.weight",
    ".lora_embedding_A.default": ".lora_embedding_B.default",
}
# Ends of the names of models with an output layer for tokens.
_WITH_HEAD = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "LMHeadModel")
_NOT_MERGED = ("use_dora", "use_qalora", "alora_invocation_tokens")
_USE_PEFT = "Convert with to='peft', and call merge_and_unload() of peft."


def select_adapter(files: TensorFiles, config: bytes) -> TensorFiles:
    """Return the tensors of the adapter ``default``, by their names in ``adapter_model.safetensors``.

    Raises:
        CheckpointError: no such adapter, or trained tensors that are not in the adapter.
    """
    adapter = [name for name in files.refs if _ADAPTER.search(name)]
    rest = [name for name in files.refs if not _ADAPTER.search(name)]
    if not adapter:
        raise CheckpointError(
            "convert: path must hold an adapter of peft with the name 'default', got other tensors. Convert with to='hf'."
        )
    # A checkpoint of the trainable parameters has no base weights, so all its tensors are trained.
    is_whole = any(_BASE_LAYER in name or _REPLACED_MODULE in name for name in rest)
    if json.loads(config).get("bias", "none") != "none" or (rest and not is_whole):
        raise CheckpointError(
            f"convert: all trained tensors must be in the adapter, got {(rest or ['biases'])[0]!r}. "
            "Name its module in modules_to_save of peft's config, or convert with merge."
        )
    names = {}
    for name in adapter:
        short = _ADAPTER.sub("", name.replace(_TRAINED_COPY, "."))
        # The magnitude of DoRA has the name of an earlier version.
        short = re.sub(r"(\.lora_magnitude_vector)\.weight$", r"\1", short)
        names[short if short.startswith(_PREFIX) else _PREFIX + short] = name
    return rename_tensors(files, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """Product of two matrices to add to a base weight.

    Args:
        down: key of the matrix ``[rank, in]``.
        up: key of the matrix ``[out, rank]``.
        scale: factor of the product ``up @ down``.
        transposed: if True, the base weight has the shape ``[in, out]``.
    """

    down: str
    up: str
    scale: float
    transposed: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MergedStream(WeightStream):
    """Stream of base weights with the adapter added, in at least float32.

    Args:
        stored: all tensors by their stored names, with the matrices of the adapter.
        updates: products to add, by name of the base weight.
    """

    stored: TensorFiles
    updates: Mapping[str, _Update]

    def iter_tensors(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Iterate over the data of these tensors in row-major order, in tensors of limited size."""
        for batch in batch_regions(self.files.refs, names):
            for name, tensor in read_batch(self.files, batch).items():
                update = self.updates.get(name)
                merged = tensor if update is None else self._add(tensor, update, batch[name])
                yield merged.to(DTYPES[self.dtypes[name]])

    def _add(self, tensor: Tensor, update: _Update, region: Region) -> Tensor:
        regions = {name: full_region(self.stored.refs[name].shape) for name in (update.down, update.up)}
        matrices = read_batch(self.stored, regions)
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        down, up = matrices[update.down].to(dtype), matrices[update.up].to(dtype)
        left, right = (down.T, up.T) if update.transposed else (up, down)
        rows = left[region.offset[0] : region.offset[0] + region.size[0]]
        return tensor.to(dtype).addmm(rows, right, alpha=update.scale)


def merge_adapter(files: TensorFiles, config: bytes) -> tuple[TensorFiles, dict[str, _Update]]:
    """Return the weights of the base model by their own names, and the products to add to them.

    Raises:
        CheckpointError: an adapter that is not LoRA, or base weights that the checkpoint lacks.
    """
    settings = json.loads(config)
    unsupported = [name for name in _NOT_MERGED if settings.get(name)]
    if settings.get("peft_type") != "LORA" or unsupported:
        problem = unsupported[0] if unsupported else f"peft_type {settings.get('peft_type')!r}"
        raise CheckpointError(f"convert: merge must be used with plain LoRA, got {problem}. {_USE_PEFT}")
    updates: dict[str, _Update] = {}
    matrices: set[str] = set()
    for down in files.refs:
        end = next((end for end in _MATRICES if down.endswith(end)), None)
        if end is not None:
            layer = down.removesuffix(end)
            base, up = f"{layer}{_BASE_LAYER}weight", layer + _MATRICES[end]
            if base not in files.refs or up not in files.refs:
                tied = (
                    f"A tied weight is stored under one name: pass tie={{{base!r}: '<name of the stored weight>'}} for both. "
                    if any(_BASE_LAYER in name or name.endswith("embed_tokens.weight") for name in files.refs)
                    else ""
                )
                raise CheckpointError(
                    f"convert: merge needs the base weights, but the checkpoint lacks {base!r}. {tied}{_USE_PEFT}"
                )
            updates[_base_name(base)] = _plan_update(files, base, down, up, settings)
            matrices |= {down, up}
    others = [name for name in files.refs if name not in matrices and _TRAINED_COPY not in name and _ADAPTER.search(name)]
    if others or not updates:
        problem = repr(others[0]) if others else "no adapter 'default'"
        raise CheckpointError(f"convert: merge must be used with plain LoRA, got {problem}. {_USE_PEFT}")
    kept = [name for name in files.refs if name not in matrices and _REPLACED_MODULE not in name]
    return rename_tensors(files, {_base_name(name): name for name in kept}), updates


def untie(files: TensorFiles, base: TensorFiles, updates: Mapping[str, _Update], adapter: bytes, config: bytes) -> bytes:
    """Return the model's config, with ``tie_word_embeddings`` False if an adapter made two weights of a tied one.

    Args:
        files: all tensors by their stored names.
        base: tensors of the merged model by name.
        updates: products to add, by name of the weight.
        adapter: config of the adapter.
        config: ``config.json`` of the model, or nothing.

    Raises:
        CheckpointError: only the input embedding of a tied model is adapted, and nothing says under which name its output layer
            has the unchanged weight.
    """
    settings, model = json.loads(adapter), json.loads(config or b"{}")
    sizes = {part.get("vocab_size") for part in (model, model.get("text_config") or {})} - {None}
    matrices = {name: ref.shape for name, ref in base.refs.items() if len(ref.shape) == 2}
    # Outside of the numbered layers, whose matrices may have the size of the vocabulary, too.
    outside = {name: shape for name, shape in matrices.items() if not re.search(r"wpe|posit|\.\d+\.", name)}
    names = [name for name, shape in outside.items() if not sizes or shape[0] in sizes]
    copied = {_base_name(name) for name in files.refs if _TRAINED_COPY in name and _original(name) in files.refs}
    adapted = [name for name in names if "lora_embedding" in getattr(updates.get(name), "down", "") or name in copied]
    kinds = [*(model.get("architectures") or ()), (settings.get("auto_mapping") or {}).get("base_model_class") or ""]
    is_lm = settings.get("task_type") in ("CAUSAL_LM", "SEQ_2_SEQ_LM") or any(kind.endswith(_WITH_HEAD) for kind in kinds)
    is_tied = is_lm and model.get("tie_word_embeddings") is not False and not settings.get("ensure_weight_tying")
    for name in adapted if is_tied else ():
        if re.search("embed|wte|shared", name) and not any(
            other != name and base.refs[other].shape == base.refs[name].shape for other in names
        ):
            stored = next(
                key for key in files.refs if _TRAINED_COPY not in key and _base_name(key.replace(_REPLACED_MODULE, ".")) == name
            )
            head = f"{_PREFIX if stored.startswith(_PREFIX) else ''}lm_head.weight"
            raise CheckpointError(
                f"convert: merge must write the output layer too, but its weight was tied to {name!r}, and the adapter changes "
                f"the embedding alone. Pass tie={{{head!r}: {stored!r}}}, with the name of the output weight, to write both "
                "weights, or convert with to='peft'."
            )
    if not is_tied or len({(base.keys[name], updates.get(name)) for name in names}) < 2 or not config:
        return config
    model["tie_word_embeddings"] = False
    if (model.get("text_config") or {}).get("tie_word_embeddings"):
        model["text_config"]["tie_word_embeddings"] = False
    return json.dumps(model, indent=2).encode() + b"\n"


def _original(name: str) -> str:
    return name.replace(_TRAINED_COPY, _REPLACED_MODULE)


def _base_name(name: str) -> str:
    return name.removeprefix(_PREFIX).replace(_BASE_LAYER, ".").replace(_TRAINED_COPY, ".")


def _plan_update(files: TensorFiles, base: str, down: str, up: str, settings: Mapping[str, Any]) -> _Update:
    (rank, inputs), (outputs, _) = (files.refs[name].shape[:2] for name in (down, up))
    layer = _base_name(base).removesuffix(".weight")
    patterns = settings.get("alpha_pattern") or {}
    alpha = next((patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", layer)), settings["lora_alpha"])
    shape = files.refs[base].shape
    if {shape, shape[::-1]}.isdisjoint({(outputs, inputs)}) or len(files.refs[down].shape) != 2:
        raise CheckpointError(
            f"convert: merge: {base!r} must have the shape {[outputs, inputs]} or its transpose, got {list(shape)}. {_USE_PEFT}"
        )
    # Both are possible for a square weight.
    transposed = shape != (outputs, inputs) or (outputs == inputs and bool(settings.get("fan_in_fan_out")))
    if "lora_embedding" in down:
        transposed = True
    scale = alpha / (sqrt(rank) if settings.get("use_rslora") else rank)
    return _Update(down=down, up=up, scale=scale, transposed=transposed)
