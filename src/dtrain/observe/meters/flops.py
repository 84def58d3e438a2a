"""``transformer_flops``: what a token costs in a transformer, by the formula."""

from __future__ import annotations

from dtrain.errors import ConfigError


def transformer_flops(*, params: int, layers: int, dim: int, seq: int, causal: bool = False) -> float:
    """Floating-point operations of training a transformer on one token: forward and backward, a multiply-add counted as two.

    Formula: ``6 * params + 12 * layers * dim * seq``; with ``causal=True``, ``6 * params + 6 * layers * dim * (seq + 1)``

    Each weight takes part in one multiply-add per token in the forward, and in two in the backward, which costs twice as much:
    for the gradient of its input and for its own. That is ``6 * params``. In each layer a token is compared with ``seq`` keys
    and gathers as many values, each of ``dim`` numbers over all heads: ``2 * 2 * dim * seq``, times 3 with the backward. The
    papers count every pair of tokens, although a causal model needs only half of them; so ``causal=False`` is the figure that
    is comparable with published ones, and ``causal=True`` is what is needed. Recomputed activations are not work that the model
    needs, and do not count. Norms, softmax and activation functions are left out: they are small.

    Args:
        params: weights that every token is multiplied with. A table of embeddings that is only looked up is not among them,
            one that is also the output layer is; of a mixture of experts, those that one token goes through.
        layers: blocks with attention.
        dim: heads times the size of one.
        seq: tokens that attention sees at once.
        causal: whether only the pairs of a causal model count.

    Raises:
        ConfigError: an argument that is no whole number of at least 1 (``layers`` and ``dim``: of at least 0).

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B; ``6 * params`` as Kaplan et al. 2020, arXiv:2001.08361, section
    2.1.

    Example:
        >>> transformer_flops(params=124_000_000, layers=12, dim=768, seq=1024)
        857246208.0
    """
    for name, value, least in (("params", params, 1), ("layers", layers, 0), ("dim", dim, 0), ("seq", seq, 1)):
        if type(value) is not int or value < least:
            raise ConfigError(f"transformer_flops: {name} must be a whole number of at least {least}, got {value!r}")
    pairs = (seq + 1) / 2 if causal else seq
    return 6.0 * params + 12.0 * layers * dim * pairs
