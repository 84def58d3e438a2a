"""Which parameters of a model are hidden matrices, for Muon, and which are left to AdamW."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dtrain.combinators import Where
from dtrain.errors import ConfigError
from dtrain.optim.groups import Group, fits, is_embedding, listed, of_modules, param_groups, trainable


def muon_groups(
    model: nn.Module,
    *,
    head: Where,
    matrices: Where | None = None,
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.1,
    **options: Any,
) -> list[dict[str, Any]]:
    """Groups for ``Muon``: ``matrices`` with its own method, and the rest, ``adamw`` and ``adamw.no_decay``, with AdamW's.

    Hidden matrices are the trainable parameters with two dims that belong neither to an embedding nor to the head. The head,
    which makes the model's output, cannot be told from a hidden layer, so it has to be named; a head that is tied to an
    embedding is one. Filters of convolutions, with more dims, are left to AdamW.

    Formula: ``matrices = {p : p.ndim == 2} - embeddings - head``

    Args:
        model: plain or sharded; see ``param_groups``, which makes the groups.
        head: a pattern of names, several, or a predicate ``(name, param) -> bool``: what makes the output, such as
            ``"lm_head.*"``; ``()`` if there is none.
        matrices: which parameters are hidden matrices, where those of the formula are not meant.
        lr: of the matrices, the peak.
        adamw_lr: of the rest.
        weight_decay: of both, but for norms, biases and embeddings.
        options: of ``Muon`` for the matrices.

    Raises:
        ConfigError: ``head`` fits nothing, ``matrices`` fits an embedding, the head, or what is no matrix; a model without
        hidden matrices.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", section on embeddings and heads.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 4), torch.nn.Linear(4, 5))
        >>> [(g["name"], g["method"], [tuple(p.shape) for p in g["params"]]) for g in muon_groups(model, head="2.*")]
        [('matrices', 'muon', [(4, 2)]), ('adamw', 'adamw', [(5, 4)]), ('adamw.no_decay', 'adamw', [(5, 2), (4,), (5,)])]
    """
    params, names = trainable(model)
    is_head = fits(head, names, "muon_groups")
    heads = {name for name, param in params.items() if is_head(name, param)}
    if not heads and not (isinstance(head, (list, tuple)) and not head):
        raise ConfigError(f"muon_groups: {head=} fits none of {len(params)} trainable parameters; pass () if there is none")
    embeddings = set(of_modules(model, is_embedding, names))
    barred = {name: _why(param, name in heads, name in embeddings) for name, param in params.items()}
    hidden = {name for name in params if barred[name] is None}
    if matrices is not None:
        chosen = fits(matrices, names, "muon_groups")
        hidden = {name for name, param in params.items() if chosen(name, param)}
        wrong = [name for name in hidden if barred[name] is not None]
        if wrong:
            raise ConfigError(
                f"muon_groups: matrices fits {listed(wrong)}, which {barred[wrong[0]]}; Muon is for hidden "
                "matrices; leave it to AdamW"
            )
    if not hidden:
        raise ConfigError("muon_groups: no trainable parameter is a hidden matrix; torch.optim.AdamW is enough")
    own = {"method": "muon", "lr": lr, "weight_decay": weight_decay, **options}
    muon = Group("matrices", lambda name, param: name in hidden, own)
    rest = Group("adamw", None, {"method": "adamw", "lr": adamw_lr})
    return param_groups(model, muon, *([rest] if len(hidden) < len(params) else []), weight_decay=weight_decay)


def _why(param: Tensor, head: bool, embedding: bool) -> str | None:
    """Why a parameter is no hidden matrix."""
    if param.ndim != 2:
        return f"has {param.ndim} dims"
    return "belongs to an embedding" if embedding else "belongs to the head" if head else None
