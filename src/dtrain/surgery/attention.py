"""Add linear attention biases (ALiBi) to a model and disable position embeddings: ``alibi``.

``AlibiMultiheadAttention`` is torch's multi-head attention with ALiBi.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from dtrain.arguments import check_int
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn
from dtrain.surgery.replace import (
    Mixin,
    ModuleSelector,
    ReplacementPolicy,
    add_mixin,
    apply_policies,
    check_plain_model,
    find_imported_class,
    swap_class,
)

_CALLER = "alibi"
_BERT_MODULE, _GPT2_MODULE = "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2"


class ZeroPositionEmbedding(nn.Module):
    """A replacement of a position embedding that returns zero for any position.

    Formula: ``y = 0``

    Source: Press et al. 2022, arXiv:2108.12409, section 3 (no position embeddings).

    Example:
        >>> (torch.ones(2) + ZeroPositionEmbedding()(torch.tensor([3, 9000]))).tolist()
        [1.0, 1.0]
    """

    def forward(self, positions: Tensor) -> Tensor:
        """Return a zero ``[]``, which can be added to embeddings of any shape and dtype."""
        return torch.zeros((), device=positions.device)


def alibi(
    model: nn.Module,
    *,
    max_length: int | None = None,
    attentions: Mapping[type[nn.Module], str] | None = None,
    positions: str | tuple[str, ...] = (),
) -> nn.Module:
    """Add linear attention biases to ``model`` and remove its position embeddings; return the model.

    BERT (bidirectional) and GPT-2 (causal) of transformers are supported completely. Each attention adds the bias to its mask.
    Each position embedding returns zero and loses its parameter, so earlier checkpoints have unused values. ``sdpa`` runs with
    a float mask ``[batch or 1, heads, length, length]`` per layer, instead of a flash kernel's mask.

    Formula: ``softmax(q @ k.T * scale - slope[h] * abs(i - j))``, with slopes from ``alibi_slopes``

    Args:
        model: plain module before ``shard_model``; on meta, too.
        max_length: new maximum sequence length of BERT; None keeps the old length. GPT-2 accepts any length.
        attentions: for other models: attention class -> name of the attribute with the number of heads. The attention must
            accept ``attention_mask=`` (a mask as in ``add_alibi_bias``). An attention with a true ``is_causal`` is causal if
            called without a mask. ``nn.MultiheadAttention: "num_heads"`` selects torch's attention, with torch's masks.
        positions: for other models: names or patterns of position embeddings.

    Mutates: ``model``. With ``max_length`` also ``config.max_position_embeddings``.

    Example:
        >>> import dtrain as dt
        >>> class Attention(nn.Module):
        ...     heads, is_causal = 2, True
        ...
        ...     def forward(self, x, attention_mask=None):
        ...         return attention_mask
        >>> model = dt.surgery.alibi(Attention(), attentions={Attention: "heads"})
        >>> model(torch.zeros(1, 2, 8))[0, 0].tolist()
        [[-0.0, -3.4028234663852886e+38], [-0.0625, -0.0]]

    Raises:
        ConfigError: no known attention, an attention implementation other than ``sdpa`` and ``eager``, a pattern without a
            match, an invalid length or number of heads, or a sharded model; in a forward, an invalid mask.

    Source: Press et al. 2022, arXiv:2108.12409; symmetric for BERT as in MosaicML Composer. Unlike there, position embeddings
        are removed instead of frozen at zero.

    Suggested values:
        decoder of 1.3B, evaluated on longer texts: train on 512 or 1024 tokens, evaluate on 2048 (Press et al. 2022, section 4)
        MosaicBERT-Base, trained on 128 tokens: symmetric biases, no position embeddings (Portes et al. 2023, arXiv:2312.17482)
    When not to use: the model is pretrained with other positions, such as rotary ones. Flash kernels do not accept the float
        mask.
    """
    check_plain_model(model, _CALLER)
    if max_length is not None:
        check_int(_CALLER, "max_length", max_length)
    of_library = {
        find_imported_class(_BERT_MODULE, "BertSelfAttention"): "num_attention_heads",
        find_imported_class(_GPT2_MODULE, "GPT2Attention"): "num_heads",
    }
    heads = {**{kind: attribute for kind, attribute in of_library.items() if kind is not None}, **(attentions or {})}
    _check_implementation(model)
    named = _match_position_modules(model, positions)
    cross_attention = {id(layer.multihead_attn) for layer in model.modules() if isinstance(layer, nn.TransformerDecoderLayer)}
    policies: dict[ModuleSelector, ReplacementPolicy] = {
        kind: _make_policy(attribute, cross_attention) for kind, attribute in heads.items()
    }
    if not policies:
        raise ConfigError(
            f"{_CALLER}: the model must have a known attention, but this process did not import transformers' BERT or GPT-2. "
            'Pass for example attentions={SelfAttention: "num_heads"}.'
        )
    model = apply_policies(model, policies, caller=_CALLER).model
    disable_nested_tensors_(model)
    _zero_position_embeddings_(model, named)
    if max_length is not None:
        _resize_position_buffers_(model, max_length)
    return model


def _check_implementation(model: nn.Module) -> None:
    names = (getattr(getattr(module, "config", None), "_attn_implementation", None) for module in model.modules())
    unsupported = sorted({name for name in names if name not in (None, "sdpa", "eager")})
    if unsupported:
        raise ConfigError(
            f"{_CALLER}: attn_implementation must be 'sdpa' or 'eager', got {unsupported[0]!r}. "
            "Build the model with attn_implementation='sdpa'."
        )


def _make_policy(attribute: str, cross_attention: Container[int]) -> ReplacementPolicy:
    def policy(module: nn.Module, name: str) -> nn.Module | None:
        if getattr(module, "is_cross_attention", False) or id(module) in cross_attention:
            # Distances between two different sequences have no meaning.
            return None
        heads = getattr(module, attribute, None)
        if type(heads) is not int:
            raise ConfigError(
                f"{_CALLER}: {type(module).__name__}.{attribute} must be the number of heads, got {heads!r}. "
                "Name the attribute that counts the heads."
            )
        if type(module) is nn.MultiheadAttention:
            # A no-op hook disables torch's inference kernels, which support no bias.
            swap_class(module, AlibiMultiheadAttention).register_forward_pre_hook(_no_op_hook)
            return module
        add_mixin(module, Alibi)
        assert isinstance(module, Alibi)
        module._alibi_heads = heads
        return module

    return policy


class Alibi(Mixin):
    """Mixin of an attention that adds the bias to the attention mask."""

    _alibi_heads: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the attention on ``[batch, length, dim]`` with the bias in its mask."""
        if args:
            raise ConfigError(
                f"{_CALLER}: {type(self).__name__} must get keyword arguments after hidden_states, got positional arguments. "
                "Pass attention_mask= by name."
            )
        length = hidden_states.shape[1]
        bias = alibi_bias(
            self._alibi_heads,
            length,
            length + self._num_cached_keys(kwargs),
            device=hidden_states.device,
            dtype=hidden_states.dtype,
        )
        mask = add_alibi_bias(kwargs.pop("attention_mask", None), bias, causal=bool(getattr(self, "is_causal", False)))
        return super().forward(hidden_states, attention_mask=mask, **kwargs)

    def _num_cached_keys(self, kwargs: Mapping[str, Any]) -> int:
        """Return the number of keys in a cache of transformers."""
        cache = kwargs.get("past_key_values")
        return 0 if cache is None else int(cache.get_seq_length(getattr(self, "layer_idx", 0)))


def _match_position_modules(model: nn.Module, positions: str | tuple[str, ...]) -> set[int]:
    """Return the ids of modules that match the patterns. Every pattern must match."""
    matched = set()
    for pattern in (positions,) if isinstance(positions, str) else positions:
        is_match = compile_patterns([pattern], caller=_CALLER)
        ids = {id(module) for name, module in modules_by_fqn(model, include_duplicates=True) if is_match(name)}
        if not ids:
            raise ConfigError(
                f"{_CALLER}: positions={pattern!r} matches no module of the {type(model).__name__}. Correct the pattern."
            )
        matched |= ids
    return matched


def _zero_position_embeddings_(model: nn.Module, named: set[int]) -> None:
    """Replace position embeddings and named modules by zeros. Mutates: ``model``."""
    places = (
        (find_imported_class(_BERT_MODULE, "BertEmbeddings"), "position_embeddings"),
        (find_imported_class(_GPT2_MODULE, "GPT2Model"), "wpe"),
    )
    for module in model.modules():
        for kind, key in places:
            if kind is not None and isinstance(module, kind):
                setattr(module, key, ZeroPositionEmbedding().train(module.training))
    if named:
        policies: dict[ModuleSelector, ReplacementPolicy] = {
            lambda name, module: id(module) in named: lambda module, name: ZeroPositionEmbedding()
        }
        # Modules that were replaced above no longer match.
        apply_policies(model, policies, caller=_CALLER, missing_ok=True)


def _resize_position_buffers_(model: nn.Module, length: int) -> None:
    """Resize BERT's position tables and update its configuration. Mutates: ``model``."""
    bert = find_imported_class(_BERT_MODULE, "BertEmbeddings")
    for module in model.modules():
        if bert is not None and isinstance(module, bert):
            ids, kinds = module.get_buffer("position_ids"), module.get_buffer("token_type_ids")
            module.position_ids = torch.arange(length, device=ids.device).expand(1, -1)
            module.token_type_ids = torch.zeros(1, length, dtype=kinds.dtype, device=kinds.device)
        config: Any = getattr(module, "config", None)
        if hasattr(config, "max_position_embeddings"):
            config.max_position_embeddings = length


class AlibiMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with linear biases, for self-attention; masks are those of ``nn.MultiheadAttention``.

    Formula: ``softmax(q @ k.T * scale - slope[h] * abs(i - j) + mask)``

    Source: Press et al. 2022, arXiv:2108.12409, section 3.

    Example:
        >>> import dtrain as dt
        >>> layer = dt.surgery.AlibiMultiheadAttention(2, 1, batch_first=True).requires_grad_(
        ...     False
        ... )
        >>> _ = layer.in_proj_weight.zero_()  # all scores are 0, except the bias of 1/256
        >>> x = torch.ones(1, 2, 2)
        >>> torch.softmax(torch.tensor([0.0, -1 / 256]), 0).allclose(layer(x, x, x)[1][0, 0])
        True
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run ``nn.MultiheadAttention.forward`` with the bias. ``is_causal`` needs no additional mask."""
        axis = 1 if self.batch_first and query.ndim == 3 else 0
        length, keys = query.shape[axis], key.shape[axis]
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).triu(keys - length + 1)
        bias = alibi_bias(self.num_heads, length, keys, device=query.device, dtype=query.dtype)
        if query.ndim == 3:
            bias = repeat(bias, "h q k -> (b h) q k", b=query.shape[1 - axis])
        mask, padding = (_to_additive_mask(tensor, query.dtype) for tensor in (attn_mask, key_padding_mask))
        return super().forward(
            query,
            key,
            value,
            key_padding_mask=padding,
            need_weights=need_weights,
            attn_mask=bias if mask is None else bias + mask,
            average_attn_weights=average_attn_weights,
        )


def disable_nested_tensors_(model: nn.Module) -> None:
    """Disable nested tensors in torch's encoders, because nested tensors support no bias. Mutates: ``model``."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _no_op_hook(module: nn.Module, args: Any) -> None:
    return None


def _to_additive_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return an additive mask for a bool mask (True is hidden) or an additive mask."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def alibi_slopes(heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the ALiBi slope of each head: float32 ``[heads]``.

    Formula: ``2 ** (-8 * h / heads)``, ``h = 1 ... heads``, for a power of two; else the slopes of the next lower power of two,
    then every second slope of twice that power, from the first on.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> dt.surgery.alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]

    Raises:
        ConfigError: ``heads`` is not an integer >= 1.

    Source: Press et al. 2022, arXiv:2108.12409, section 3; other numbers of heads as in the authors' code.
    """
    check_int("alibi_slopes", "heads", heads)
    power = 2 ** int(math.log2(heads))
    first = torch.arange(1, power + 1, device=device) * (-8.0 / power)
    rest = (2 * torch.arange(heads - power, device=device) + 1) * (-4.0 / power)
    return torch.exp2(torch.cat([first, rest]))


def alibi_bias(
    heads: int,
    length: int,
    keys: int | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the ALiBi bias that is added to attention scores: ``[heads, length, keys]``.

    The bias is symmetric, for bidirectional attention. A causal mask hides later tokens. Use the bias in a custom model as
    ``scaled_dot_product_attention(q, k, v, attn_mask=dt.surgery.alibi_bias(heads, length) + causal_mask)``.

    Formula: ``bias[h, i, j] = -slope[h] * abs(i + keys - length - j)``

    Args:
        heads: number of attention heads.
        length: number of queries, at the last positions of the keys.
        keys: number of keys; None uses ``length``.
        device: device of the result.
        dtype: dtype of the result; the computation uses float32.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.alibi_bias(2, 3)[0].tolist()  # slope 1/16
        [[-0.0, -0.0625, -0.125], [-0.0625, -0.0, -0.0625], [-0.125, -0.0625, -0.0]]
        >>> dt.surgery.alibi_bias(2, 1, 3)[1].tolist()  # slope 1/256
        [[-0.0078125, -0.00390625, -0.0]]

    Raises:
        ConfigError: ``heads`` is not an integer >= 1.

    Source: Press et al. 2022, arXiv:2108.12409, section 3.
    """
    num_keys = length if keys is None else keys
    queries = torch.arange(num_keys - length, num_keys, device=device)
    distance = (rearrange(queries, "q -> q 1") - torch.arange(num_keys, device=device)).abs()
    return (-rearrange(alibi_slopes(heads, device=device), "h -> h 1 1") * distance).to(dtype)


def add_alibi_bias(mask: Tensor | None, bias: Tensor, *, causal: bool) -> Tensor:
    """Add an ALiBi bias to an attention mask: returns an additive float mask ``[batch or 1, heads, length, keys]``.

    Formula: ``bias`` for visible tokens, the minimum of the dtype for hidden tokens

    Args:
        mask: ``[batch, 1 or heads, length or 1, keys]`` of bools (True is visible) or floats (additive); None hides nothing.
        bias: bias from ``alibi_bias``.
        causal: if True and ``mask`` is None, hide later tokens.

    Example:
        >>> import dtrain as dt
        >>> mask, bias = torch.tensor([[[[True, False]]]]), dt.surgery.alibi_bias(1, 1, 2) - 2.0
        >>> dt.surgery.add_alibi_bias(mask, bias, causal=False).tolist()
        [[[[-2.00390625, -3.4028234663852886e+38]]]]

    Raises:
        ConfigError: a mask of another type, or with another number of keys.

    Source: Press et al. 2022, arXiv:2108.12409, section 3.
    """
    least = torch.finfo(bias.dtype).min
    length, keys = bias.shape[-2:]
    if mask is None:
        if causal:
            visible = torch.ones(length, keys, dtype=torch.bool, device=bias.device).tril(keys - length)
            bias = torch.where(visible, bias, least)
        return bias.unsqueeze(0)
    if not isinstance(mask, Tensor) or mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        actual = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(
            f"alibi: mask must be a bool or float tensor [batch, heads, length, keys], got {actual}. Use sdpa or eager."
        )
    if mask.shape[-1] != keys:
        raise ConfigError(f"alibi: mask must have {keys} keys, got {mask.shape[-1]}. Do not use caches of a fixed size.")
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, least)
    # The sum may be below the range of the dtype.
    return (mask + bias).clamp(min=least)
