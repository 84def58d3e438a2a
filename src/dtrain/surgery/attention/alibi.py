"""Attention with linear biases: what is far away counts less, and positions need no embedding.

torch's own attention with linear biases."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn
from dtrain.surgery.attention.attention_bias import add_alibi_bias, alibi_bias
from dtrain.surgery.class_swap import Mixin, add_mixin, swap_class
from dtrain.surgery.replace import ModuleSelector, ReplacementPolicy, check_plain_model, find_imported_class, replace_modules


class ZeroPositionEmbedding(nn.Module):
    """In place of an embedding of positions: zero, for any position.

    Formula: ``y = 0``

    Source: Press et al. 2022, arXiv:2108.12409, section 3 (no embedding of positions).

    Example:
        >>> (torch.ones(2) + ZeroPositionEmbedding()(torch.tensor([3, 9000]))).tolist()
        [1.0, 1.0]
    """

    def forward(self, positions: Tensor) -> Tensor:
        """Positions -> a zero ``[]``, which adds to embeddings of any shape and dtype."""
        return torch.zeros((), device=positions.device)


def alibi(
    model: nn.Module,
    *,
    max_sequence_length: int | None = None,
    attentions: Mapping[type[nn.Module], str] | None = None,
    positions: str | tuple[str, ...] = (),
) -> nn.Module:
    """The model with linear biases in its attention, and without embeddings of positions.

    On BERT (both sides) and GPT-2 (causal) of transformers it is complete. Each attention adds the bias to the mask that it
    is called with, and each embedding of positions gives zero, so it has no parameter any more: what a checkpoint from
    before has for it is left over. The bias takes the place of flash kernels' own masks: ``sdpa`` runs with a float mask
    ``[batch or 1, heads, length, length]``, which every layer makes for itself.

    Formula: ``softmax(q @ k.T * scale - slope[h] * abs(i - j))``, the slopes as in ``alibi_slopes``

    Args:
        model: before ``shard_model``; on meta, too.
        max_sequence_length: the longest sequence that BERT is to take; None leaves that. GPT-2 takes any.
        attentions: for other models: by class, the name of the attribute that is the number of heads. Such a module takes
            ``attention_mask=``, a mask as in ``add_alibi_bias``, by name; it is causal without one if its ``is_causal`` is true.
            ``nn.MultiheadAttention: "num_heads"`` is torch's own, with its own kind of masks.
        positions: for other models: names of embeddings of positions, or patterns of such.

    Mutates: ``model``. With ``max_sequence_length`` its ``config.max_position_embeddings``, too.

    Raises:
        ConfigError: no attention that is known, an implementation of attention other than ``sdpa`` and ``eager``, a pattern
            that fits no module, lengths and numbers of heads that are none, a model that is sharded already; in a forward,
            what ``add_alibi_bias`` refuses.

    Source: Press et al. 2022, arXiv:2108.12409; symmetric for BERT as in MosaicML Composer. Unlike there, an embedding of
        positions is not kept as frozen zeros.

    Example:
        >>> class Attention(nn.Module):
        ...     heads, is_causal = 2, True
        ...     def forward(self, x, attention_mask=None):
        ...         return attention_mask
        >>> alibi(Attention(), attentions={Attention: "heads"})(torch.zeros(1, 2, 8))[0, 0].tolist()
        [[-0.0, -3.4028234663852886e+38], [-0.0625, -0.0]]
    """
    check_plain_model(model, _WHERE)
    if max_sequence_length is not None and (type(max_sequence_length) is not int or max_sequence_length < 1):
        raise ConfigError(f"{_WHERE}: max_sequence_length is a whole number of at least 1, got {max_sequence_length!r}")
    heads = {**_default_attentions(), **(attentions or {})}
    _check_implementation(model)
    silent = _match_position_modules(model, positions)
    others = cross_attention_ids(model)
    policies: dict[ModuleSelector, ReplacementPolicy] = {
        kind: _make_policy(attribute, others) for kind, attribute in heads.items()
    }
    if not policies:
        raise ConfigError(
            f"{_WHERE}: no attention that is known: transformers' BERT and GPT-2 are not in this process; for another model "
            'say which, attentions={SelfAttention: "num_heads"}'
        )
    model = replace_modules(model, policies, caller=_WHERE).model
    disable_nested_tensors_(model)
    _zero_position_embeddings_(model, silent)
    if max_sequence_length is not None:
        _resize_position_buffers_(model, max_sequence_length)
    return model


_WHERE = "alibi"
_BERT_MODULE, _GPT2_MODULE = "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2"


def _default_attentions() -> dict[type[nn.Module], str]:
    known = {
        find_imported_class(_BERT_MODULE, "BertSelfAttention"): "num_attention_heads",
        find_imported_class(_GPT2_MODULE, "GPT2Attention"): "num_heads",
    }
    return {kind: attribute for kind, attribute in known.items() if kind is not None}


def _check_implementation(model: nn.Module) -> None:
    names = (getattr(getattr(module, "config", None), "_attn_implementation", None) for module in model.modules())
    strange = sorted({name for name in names if name not in (None, "sdpa", "eager")})
    if strange:
        raise ConfigError(f"{_WHERE}: takes attn_implementation 'sdpa' or 'eager', this model has {strange[0]!r}")


def _make_policy(attribute: str, others: Container[int]) -> ReplacementPolicy:
    def policy(module: nn.Module, name: str) -> nn.Module | None:
        if getattr(module, "is_cross_attention", False) or id(module) in others:
            return None  # queries and keys are of two texts, whose distances mean nothing
        heads = getattr(module, attribute, None)
        if type(heads) is not int:
            raise ConfigError(f"{_WHERE}: {type(module).__name__}.{attribute} must be the number of heads, it is {heads!r}")
        if type(module) is nn.MultiheadAttention:
            return swap_to_alibi_multihead(module)
        add_mixin(module, Alibi)
        assert isinstance(module, Alibi)
        module._alibi_heads = heads
        return module

    return policy


class Alibi(Mixin):
    """Mixed into an attention: the mask that it is called with gets the bias."""

    _alibi_heads: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``[batch, length, dim]`` -> what the attention gives."""
        if args:
            raise ConfigError(f"{_WHERE}: {type(self).__name__} must be called with attention_mask and what follows by name")
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
        """How many keys there are from before, in a cache of transformers."""
        cache = kwargs.get("past_key_values")
        return 0 if cache is None else int(cache.get_seq_length(getattr(self, "layer_idx", 0)))


def _match_position_modules(model: nn.Module, positions: str | tuple[str, ...]) -> set[int]:
    """Identities of the modules that the patterns name, each of which must name one."""
    found = set()
    for pattern in (positions,) if isinstance(positions, str) else positions:
        fits = compile_patterns([pattern], caller=_WHERE)
        named = {id(module) for name, module in modules_by_fqn(model, include_duplicates=True) if fits(name)}
        if not named:
            raise ConfigError(f"{_WHERE}: positions={pattern!r} fits no module of this {type(model).__name__}")
        found |= named
    return found


def _zero_position_embeddings_(model: nn.Module, named: set[int]) -> None:
    """Mutates: ``model``: its embeddings of positions, and what is named, give zero."""
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
        replace_modules(model, policies, caller=_WHERE, missing_ok=True)  # those that gave zero above are gone


def _resize_position_buffers_(model: nn.Module, length: int) -> None:
    """Mutates: ``model``: the tables of BERT that are as long as the longest sequence, and what its configuration says."""
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
    """``nn.MultiheadAttention`` of a text with itself, with linear biases; masks are those of ``nn.MultiheadAttention``.

    Formula: ``softmax(q @ k.T * scale - slope[h] * abs(i - j) + mask)``

    Source: Press et al. 2022, arXiv:2108.12409, section 3.

    Example:
        >>> layer = AlibiMultiheadAttention(2, 1, batch_first=True).requires_grad_(False)
        >>> _ = layer.in_proj_weight.zero_()  # so all scores are 0, but for the bias of 1/256
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
        """As ``nn.MultiheadAttention.forward``; ``is_causal`` needs no mask beside it."""
        axis = 1 if self.batch_first and query.ndim == 3 else 0
        length, keys = query.shape[axis], key.shape[axis]
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).triu(keys - length + 1)
        bias = alibi_bias(self.num_heads, length, keys, device=query.device, dtype=query.dtype)
        if query.ndim == 3:
            bias = bias.repeat(query.shape[1 - axis], 1, 1)
        mask, padding = (_to_additive_mask(each, query.dtype) for each in (attn_mask, key_padding_mask))
        return super().forward(
            query,
            key,
            value,
            key_padding_mask=padding,
            need_weights=need_weights,
            attn_mask=bias if mask is None else bias + mask,
            average_attn_weights=average_attn_weights,
        )


def swap_to_alibi_multihead(module: nn.MultiheadAttention) -> nn.Module:
    """``module`` with linear biases. A hook that does nothing keeps torch from its kernels for evaluation, which have none."""
    swap_class(module, AlibiMultiheadAttention).register_forward_pre_hook(_no_op_hook)
    return module


def cross_attention_ids(model: nn.Module) -> set[int]:
    """Identities of attentions that torch's decoder layers have for what the encoder has made."""
    return {id(layer.multihead_attn) for layer in model.modules() if isinstance(layer, nn.TransformerDecoderLayer)}


def disable_nested_tensors_(model: nn.Module) -> None:
    """Let torch's encoders leave tensors padded: nested ones have no place for a bias. Mutates: ``model``."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _no_op_hook(module: nn.Module, given: Any) -> None:
    return None


def _to_additive_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask that is added, of one that may be of bools (True is hidden)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
