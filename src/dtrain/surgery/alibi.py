"""Attention with linear biases: what is far away counts less, and positions need no embedding."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.names import clean_modules, matcher
from dtrain.surgery.alibi_multihead import biased, pad_tensors_, sees_another_text
from dtrain.surgery.attention_bias import alibi_bias, with_alibi
from dtrain.surgery.known import known_class
from dtrain.surgery.mixed import Mixed, mix_in
from dtrain.surgery.replace import Key, Policy, check_plain, replace_modules


class NoPositions(nn.Module):
    """In place of an embedding of positions: zero, for any position.

    Formula: ``y = 0``

    Source: Press et al. 2022, arXiv:2108.12409, section 3 (no embedding of positions).

    Example:
        >>> (torch.ones(2) + NoPositions()(torch.tensor([3, 9000]))).tolist()
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
            ``attention_mask=``, a mask as in ``with_alibi``, by name; it is causal without one if its ``is_causal`` is true.
            ``nn.MultiheadAttention: "num_heads"`` is torch's own, with its own kind of masks.
        positions: for other models: names of embeddings of positions, or patterns of such.

    Mutates: ``model``. With ``max_sequence_length`` its ``config.max_position_embeddings``, too.

    Raises:
        ConfigError: no attention that is known, an implementation of attention other than ``sdpa`` and ``eager``, a pattern
            that fits no module, lengths and numbers of heads that are none, a model that is sharded already; in a forward,
            what ``with_alibi`` refuses.

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
    check_plain(model, _WHERE)
    if max_sequence_length is not None and (type(max_sequence_length) is not int or max_sequence_length < 1):
        raise ConfigError(f"{_WHERE}: max_sequence_length is a whole number of at least 1, got {max_sequence_length!r}")
    heads = {**_known_attentions(), **(attentions or {})}
    _check_implementation(model)
    silent = _position_places(model, positions)
    others = sees_another_text(model)
    policies: dict[Key, Policy] = {kind: _policy(attribute, others) for kind, attribute in heads.items()}
    if not policies:
        raise ConfigError(
            f"{_WHERE}: no attention that is known: transformers' BERT and GPT-2 are not in this process; for another model "
            'say which, attentions={SelfAttention: "num_heads"}'
        )
    model = replace_modules(model, policies, where=_WHERE).model
    pad_tensors_(model)
    _silence_positions_(model, silent)
    if max_sequence_length is not None:
        _lengthen_(model, max_sequence_length)
    return model


_WHERE = "alibi"
_BERT, _GPT2 = "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2"


def _known_attentions() -> dict[type[nn.Module], str]:
    known = {
        known_class(_BERT, "BertSelfAttention"): "num_attention_heads",
        known_class(_GPT2, "GPT2Attention"): "num_heads",
    }
    return {kind: attribute for kind, attribute in known.items() if kind is not None}


def _check_implementation(model: nn.Module) -> None:
    names = (getattr(getattr(module, "config", None), "_attn_implementation", None) for module in model.modules())
    strange = sorted({name for name in names if name not in (None, "sdpa", "eager")})
    if strange:
        raise ConfigError(f"{_WHERE}: takes attn_implementation 'sdpa' or 'eager', this model has {strange[0]!r}")


def _policy(attribute: str, others: Container[int]) -> Policy:
    def policy(module: nn.Module, name: str) -> nn.Module | None:
        if getattr(module, "is_cross_attention", False) or id(module) in others:
            return None  # queries and keys are of two texts, whose distances mean nothing
        heads = getattr(module, attribute, None)
        if type(heads) is not int:
            raise ConfigError(f"{_WHERE}: {type(module).__name__}.{attribute} must be the number of heads, it is {heads!r}")
        if type(module) is nn.MultiheadAttention:
            return biased(module)
        mix_in(module, Alibi)
        assert isinstance(module, Alibi)
        module._alibi_heads = heads
        return module

    return policy


class Alibi(Mixed):
    """Mixed into an attention: the mask that it is called with gets the bias."""

    _alibi_heads: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``[batch, length, dim]`` -> what the attention gives."""
        if args:
            raise ConfigError(f"{_WHERE}: {type(self).__name__} must be called with attention_mask and what follows by name")
        length = hidden_states.shape[1]
        bias = alibi_bias(
            self._alibi_heads, length, length + self._past(kwargs), device=hidden_states.device, dtype=hidden_states.dtype
        )
        mask = with_alibi(kwargs.pop("attention_mask", None), bias, causal=bool(getattr(self, "is_causal", False)))
        return super().forward(hidden_states, attention_mask=mask, **kwargs)

    def _past(self, kwargs: Mapping[str, Any]) -> int:
        """How many keys there are from before, in a cache of transformers."""
        cache = kwargs.get("past_key_values")
        return 0 if cache is None else int(cache.get_seq_length(getattr(self, "layer_idx", 0)))


def _position_places(model: nn.Module, positions: str | tuple[str, ...]) -> set[int]:
    """Identities of the modules that the patterns name, each of which must name one."""
    found = set()
    for pattern in (positions,) if isinstance(positions, str) else positions:
        fits = matcher([pattern], where=_WHERE)
        named = {id(module) for name, module in clean_modules(model, every_name=True) if fits(name)}
        if not named:
            raise ConfigError(f"{_WHERE}: positions={pattern!r} fits no module of this {type(model).__name__}")
        found |= named
    return found


def _silence_positions_(model: nn.Module, named: set[int]) -> None:
    """Mutates: ``model``: its embeddings of positions, and what is named, give zero."""
    places = ((known_class(_BERT, "BertEmbeddings"), "position_embeddings"), (known_class(_GPT2, "GPT2Model"), "wpe"))
    for module in model.modules():
        for kind, key in places:
            if kind is not None and isinstance(module, kind):
                setattr(module, key, NoPositions().train(module.training))
    if named:
        policies: dict[Key, Policy] = {lambda name, module: id(module) in named: lambda module, name: NoPositions()}
        replace_modules(model, policies, where=_WHERE, missing_ok=True)  # those that gave zero above are gone


def _lengthen_(model: nn.Module, length: int) -> None:
    """Mutates: ``model``: the tables of BERT that are as long as the longest sequence, and what its configuration says."""
    bert = known_class(_BERT, "BertEmbeddings")
    for module in model.modules():
        if bert is not None and isinstance(module, bert):
            ids, kinds = module.get_buffer("position_ids"), module.get_buffer("token_type_ids")
            module.position_ids = torch.arange(length, device=ids.device).expand(1, -1)
            module.token_type_ids = torch.zeros(1, length, dtype=kinds.dtype, device=kinds.device)
        config: Any = getattr(module, "config", None)
        if hasattr(config, "max_position_embeddings"):
            config.max_position_embeddings = length
