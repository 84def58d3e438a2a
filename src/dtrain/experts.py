"""Route rows to experts, compute the experts in groups, and compute the losses that balance them.

    routing = router(x)                    # Router: each row chooses top_k experts
    y = experts(x, routing)                # Experts: stacked matrices, one grouped product for each
    terms = dt.experts.router_terms([routing], balance=0.01, z=0.001)

``dt.transforms.balance_experts`` moves the bias of the routers. All statistics are those of the global batch: a router counts
in a buffer that ranks sum, and the losses are sums over rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.errors import ConfigError
from dtrain.fqn import modules_by_fqn
from dtrain.shard.spec import Buffers

Scoring = Literal["softmax", "sigmoid"]
"""Function of a router's logits: over all experts, or for each expert by itself."""

Scope = Literal["batch", "sequence"]
"""Rows whose choices make the shares of a load-balancing loss."""


class Routing(NamedTuple):
    """Choice of experts for each row, with the values that losses of the router need.

    Args:
        experts: int64 ``[*, top_k]``, the chosen experts of each row.
        gates: ``[*, top_k]``, the factors of their outputs, with gradient.
        logits: ``[*, experts]``, at least float32, with gradient.
        probs: ``[*, experts]``, the scores of a row over their sum, with gradient.
        share: ``[experts]``, each expert's share of the choices of a global batch; sums to 1. None if nothing counts.
        mask: bool ``[*]``, True for rows that count; None if all rows count.
    """

    experts: Tensor
    gates: Tensor
    logits: Tensor
    probs: Tensor
    share: Tensor | None = None
    mask: Tensor | None = None


def route(
    logits: Tensor,
    *,
    top_k: int,
    bias: Tensor | None = None,
    scoring: Scoring = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    share: Tensor | None = None,
    mask: Tensor | None = None,
) -> Routing:
    """Choose the ``top_k`` experts of each row with the largest ``scores + bias``.

    The bias decides the choice only. The gates are the scores without it, so no gradient reaches the bias.

    Formula: ``experts = topk(scores + bias)``, ``gates = scale * scores[experts] / sum(scores[experts])`` (the division with
    ``normalize``), ``scores = softmax(logits)`` or ``sigmoid(logits)``

    Args:
        logits: ``[*, experts]``, any float dtype; scores are computed in at least float32.
        top_k: experts for each row, from 1 to the number of experts.
        bias: ``[experts]`` without gradient; None for no bias.
        scoring: function of the logits: ``"softmax"`` over the experts, or ``"sigmoid"`` for each expert by itself.
        normalize: if True, the gates of a row add up to ``scale``.
        scale: factor of the gates, > 0.
        share: share of the choices for ``load_balancing_loss``, as in ``Routing``.
        mask: bool ``[*]``, True for rows that count, such as no padding; None if all rows count.

    Example:
        >>> import dtrain as dt
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
        >>> dt.experts.route(logits, top_k=2, normalize=False).experts.tolist()
        [[0, 1]]
        >>> dt.experts.route(
        ...     logits, top_k=1, bias=torch.tensor([0.0, 0.0, 1.0])
        ... ).experts.tolist()
        [[2]]

    Raises:
        ConfigError: ``top_k`` above the number of experts, a bias or share of another length, a bias that is a parameter, a
            mask of another shape, or an argument out of range.

    Source: Shazeer et al. 2017, arXiv:1701.06538 (top-k gates); Wang et al. 2024, arXiv:2408.15664 (the bias);
        DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (sigmoid, normalized gates, scale).
    """
    num_experts = logits.shape[-1]
    _check_top_k("route", top_k, num_experts)
    check_choice("route", "scoring", scoring, ("softmax", "sigmoid"))
    for name, value in (("bias", bias), ("share", share)):
        if value is not None and value.shape != (num_experts,):
            raise ConfigError(
                f"route: {name} must have shape ({num_experts},), one number per expert, got {tuple(value.shape)}. "
                "Make it with the router's number of experts."
            )
    if bias is not None and bias.requires_grad:
        raise ConfigError(
            "route: bias must need no gradient, got a parameter. Register it as a buffer: register_buffer('bias', "
            "torch.zeros(experts)); the choice of experts has no gradient, and an optimizer would only decay it."
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != logits.shape[:-1]):
        raise ConfigError(
            f"route: mask must be bool {tuple(logits.shape[:-1])}, one value per row, got {mask.dtype} {tuple(mask.shape)}. "
            "Write for example (input_ids != pad_id)."
        )
    logits = logits if logits.dtype.itemsize >= 4 else logits.float()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    biased = scores.detach() if bias is None else scores.detach() + bias
    experts = biased.topk(top_k, dim=-1).indices
    gates = scores.gather(-1, experts)
    if normalize:
        gates = gates / gates.sum(-1, keepdim=True).clamp(min=1e-20)
    probs = scores if scoring == "softmax" else scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
    return Routing(experts, gates if scale == 1.0 else gates * scale, logits, probs, share, mask)


def _check_top_k(caller: str, top_k: int, num_experts: int) -> None:
    if check_int(caller, "top_k", top_k) > num_experts:
        raise ConfigError(
            f"{caller}: top_k must be at most the number of experts ({num_experts}), got {top_k}. Lower top_k, or add experts."
        )


def count_choices(routing: Routing) -> Tensor:
    """Return how often each expert was chosen by rows that count: int64 ``[experts]``. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> routing = dt.experts.route(
        ...     torch.tensor([[2.0, 1.0], [3.0, 0.0], [0.0, 1.0]]), top_k=1
        ... )
        >>> dt.experts.count_choices(routing).tolist()
        [2, 1]
    """
    num_experts, chosen = routing.logits.shape[-1], routing.experts
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    counted = torch.ones_like(chosen) if routing.mask is None else routing.mask[..., None].expand_as(chosen).to(torch.int64)
    # Not torch.bincount, which reads the largest number on the host.
    return counts.scatter_add_(0, chosen.reshape(-1), counted.reshape(-1))


class Router(nn.Module):
    """Linear map from a row to the scores of experts, with a balancing bias and counters of the choices.

    Buffers of the router:

    - ``bias`` ``[experts]``, saved: moved by ``dt.transforms.balance_experts`` alone, zero without it.
    - ``share`` ``[experts]``, saved: each expert's share of the choices of the last global batch, ``1 / experts`` at first.
    - ``load`` int64 ``[experts]``, not saved: choices in the current step. A forward in training mode counts. Ranks sum what
      they count, whatever ``shard_model(buffers=)`` says, so the numbers are those of the global batch for every number of
      ranks and microbatches. Recomputed forwards (``checkpoint_activations``) and retries (``auto_microbatch``) count once.

    The scores are computed in at least float32. With low-precision parameters, keep the weight in float32, too:
    ``Precision(param="bf16", overrides={"**.router": "fp32"})``.

    Args:
        dim: size of a row.
        experts: number of experts.
        top_k, scoring, normalize, scale: as in ``route``.

    Example:
        >>> import dtrain as dt
        >>> router = dt.experts.Router(4, 8, top_k=2)
        >>> routing = router(torch.randn(3, 4))
        >>> routing.experts.shape, int(router.load.sum())
        (torch.Size([3, 2]), 6)

    Raises:
        ConfigError: ``top_k`` above the number of experts, or an argument out of range.

    Source: as ``route``.
    """

    dtrain_buffers: ClassVar[Mapping[str, Buffers]] = {"load": "sum"}
    bias: Tensor
    load: Tensor
    share: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        top_k: int,
        scoring: Scoring = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.dim, self.experts = check_int("Router", "dim", dim), check_int("Router", "experts", experts)
        self.scoring: Scoring = check_choice("Router", "scoring", scoring, ("softmax", "sigmoid"))
        self.scale = check_number("Router", "scale", scale, above=0)
        _check_top_k("Router", top_k, experts)
        self.top_k, self.normalize = top_k, normalize
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("share", torch.full((experts,), 1 / experts))
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution with standard deviation ``dim ** -0.5``. Mutates: the weight."""
        nn.init.normal_(self.weight, std=self.dim**-0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        """Route rows ``[*, dim]``; ``mask`` as in ``route``. Mutates: ``load``, in training mode."""
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
            logits = F.linear(x.to(wide), self.weight.to(wide))
        routing = route(
            logits,
            top_k=self.top_k,
            bias=self.bias,
            scoring=self.scoring,
            normalize=self.normalize,
            scale=self.scale,
            share=self.share,
            mask=mask,
        )
        if self.training:
            self.load += count_choices(routing)
        return routing

    def extra_repr(self) -> str:
        return f"{self.dim}, experts={self.experts}, top_k={self.top_k}, scoring={self.scoring!r}"


def set_shares_(model: nn.Module, counts: Mapping[str, Tensor]) -> None:
    """Set the buffer ``share`` of each router to its part of ``counts``, for ``dt.step.count_first_step``.

    Args:
        model: model with routers, whose buffers ``load`` and ``share`` have one number per expert.
        counts: choices of a global batch by the names of the buffers ``load``.

    Mutates: ``share``. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> router = dt.experts.Router(2, 4, top_k=1)
        >>> dt.experts.set_shares_(router, {"load": torch.tensor([3, 1, 0, 0])})
        >>> router.share.tolist()
        [0.75, 0.25, 0.0, 0.0]
    """
    for name, module in modules_by_fqn(model):
        load, share = counts.get(f"{name}.load" if name else "load"), module._buffers.get("share")
        if load is not None and share is not None:
            share_from_load_(share, load)


def share_from_load_(share: Tensor, load: Tensor) -> None:
    """Set the shares of experts to those of their choices; keep them if nothing was counted.

    Args:
        share: float ``[experts]``.
        load: ``[experts]``, the choices of each expert in a global batch.

    Mutates: ``share``. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> share = torch.tensor([0.5, 0.5])
        >>> dt.experts.share_from_load_(share, torch.tensor([3, 1]))
        >>> share.tolist()
        [0.75, 0.25]
    """
    total = load.sum()
    share.copy_(torch.where(total > 0, load.to(share.dtype) / total.clamp(min=1), share))


class Experts(nn.Module):
    """MLPs whose matrices are stacked, each for the rows that chose it.

    Formula: ``y = sum over the chosen experts e of gate[e] * down[e] @ (activation(gate[e] @ x) * (up[e] @ x))``, without
    ``gated`` ``down[e] @ activation(up[e] @ x)``

    ``shard_model(blocks=(Experts, ...))`` makes the experts a unit: its matrices are gathered for its own forward only. The
    first axis, the experts, is sharded, and may be shorter than the number of ranks. There is no dispatch: each rank computes
    all experts that its rows chose. ``Muon`` orthogonalizes each expert by itself.

    Args:
        dim: size of a row.
        hidden: size of the hidden layer of an expert.
        experts: number of experts.
        activation: function of the hidden layer, without parameters.
        gated: if True, an expert has a third matrix ``gate``.

    Attributes:
        up, gate: ``[experts, hidden, dim]``; ``gate`` is None without ``gated``.
        down: ``[experts, dim, hidden]``.

    Example:
        >>> import dtrain as dt
        >>> router, experts = (
        ...     dt.experts.Router(4, 8, top_k=2),
        ...     dt.experts.Experts(4, 16, 8),
        ... )
        >>> x = torch.randn(2, 3, 4)
        >>> experts(x, router(x)).shape
        torch.Size([2, 3, 4])

    Raises:
        ConfigError: a size below 1; in a forward, a routing of other rows or to other experts.

    Source: Shazeer et al. 2017, arXiv:1701.06538; gated, Shazeer 2020, arXiv:2002.05202; no dropped rows, Gale et al. 2022,
        arXiv:2211.15841.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        *,
        activation: Callable[[Tensor], Tensor] = F.silu,
        gated: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.hidden = check_int("Experts", "dim", dim), check_int("Experts", "hidden", hidden)
        self.experts, self.activation, self.gated = check_int("Experts", "experts", experts), activation, gated
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim)) if gated else None
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw matrices from normal distributions with standard deviation ``inputs ** -0.5``. Mutates: the matrices."""
        for matrix, inputs in ((self.up, self.dim), (self.gate, self.dim), (self.down, self.hidden)):
            if matrix is not None:
                nn.init.normal_(matrix, std=1 / math.sqrt(inputs))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Return ``[*, dim]`` for the rows ``x`` ``[*, dim]`` that ``routing`` has routed."""
        if routing.experts.shape[:-1] != x.shape[:-1] or routing.logits.shape[-1] != self.experts:
            raise ConfigError(
                f"Experts: routing must be of the rows {tuple(x.shape[:-1])} to {self.experts} experts, got rows "
                f"{tuple(routing.experts.shape[:-1])} to {routing.logits.shape[-1]}. Route the same rows with "
                "a router of equal size."
            )
        rows, top_k = x.reshape(-1, x.shape[-1]), routing.experts.shape[-1]
        order = routing.experts.reshape(-1).argsort(stable=True)
        # Rows that a mask does not count are computed, too.
        counts = count_choices(routing._replace(mask=None))
        grouped = rows[order.div(top_k, rounding_mode="floor")]
        hidden = grouped_linear(grouped, self.up, counts)
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            hidden = self.activation(grouped_linear(grouped, self.gate, counts)) * hidden
        out = grouped_linear(hidden, self.down, counts)
        # Back to the order of the rows, and not index_add, whose sum has another order in each run on a GPU.
        out = out[order.argsort()].view(len(rows), top_k, x.shape[-1])
        gates = routing.gates.reshape(len(rows), top_k, 1).to(out.dtype)
        return (out * gates).sum(1).view(x.shape)

    def extra_repr(self) -> str:
        return f"{self.dim}, {self.hidden}, experts={self.experts}, gated={self.gated}"


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows that are sorted by expert with the matrix of their expert.

    ``torch.nn.functional.grouped_mm`` computes all experts in one call where torch has it: on a CPU in float32, bfloat16 and
    float16, on a CUDA GPU (compute capability 8.0 or newer) in bfloat16, for matrices whose rows are multiples of 16 bytes. All
    other cases, such as float64, run one product for each expert. Both have the same result, up to rounding.

    Args:
        x: ``[rows, in]``, the rows of expert 0 first. Under autocast it and ``weight`` are cast.
        weight: ``[experts, out, in]``.
        counts: int64 ``[experts]``, the number of rows of each expert; they add up to ``rows``.

    Returns:
        ``[rows, out]``.

    Host sync: none with ``grouped_mm``, else one, for the counts.

    Example:
        >>> import dtrain as dt
        >>> weight = torch.tensor([[[2.0]], [[3.0]]])
        >>> dt.experts.grouped_linear(torch.ones(3, 1), weight, torch.tensor([1, 2])).tolist()
        [[2.0], [3.0], [3.0]]
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    x, weight = x.to(dtype), weight.to(dtype)
    if not _has_grouped_mm(x, weight):
        parts = x.split(counts.tolist())
        return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(), strict=True)])
    out = F.grouped_mm(x.contiguous(), weight.contiguous().mT, offs=counts.cumsum(0, dtype=torch.int32))
    if out.requires_grad:
        # The kernel refuses a gradient that is expanded from fewer numbers, such as that of a sum.
        out.register_hook(Tensor.contiguous)
    return out


def _has_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Return True if torch has a grouped product for these tensors on their device."""
    if not hasattr(F, "grouped_mm") or not len(x) or any(size * x.itemsize % 16 for size in weight.shape[1:]):
        return False
    if x.is_cpu:
        return x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    # The kernels exist for CUDA alone, from this capability on.
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)


def load_balancing_loss(routing: Routing, *, scope: Scope = "batch") -> tuple[Tensor, Tensor]:
    """Return the summed load-balancing loss of a router and its weight, for ``LossSum.terms``.

    The mean is 1 if all experts are chosen equally often, and ``experts / top_k`` at most. The gradient moves probability away
    from experts with a large share. Shares have no gradient.

    - ``"batch"``: the shares are ``routing.share``, those of a *global* batch, over all microbatches and ranks. So the loss is
      a sum over rows, exact for each split. ``dt.transforms.balance_experts`` sets the shares after each update, so the loss
      of a step has the shares of the batch before. ``dt.step.count_first_step`` sets them before the gradient to those of
      the batch itself, for one more forward.
    - ``"sequence"``: the shares are those of each sequence alone, so the loss is a sum over sequences. It needs nothing from
      other microbatches or ranks, except with a ``cp`` axis, which cuts sequences.

    Formula: ``total = experts * sum over rows t and experts e of share[e] * probs[t, e]``, ``weight = rows``; for a sequence
    ``s`` ``total = sum over s of experts * sum over e of share_s[e] * mean over t in s of probs[t, e]``, ``weight = sequences``

    Args:
        routing: result of ``Router`` or ``route``; for ``"sequence"`` of rows ``[*, seq]``.
        scope: rows whose choices make the shares.

    Returns:
        ``(total, weight)``, both ``[]`` in the dtype of ``probs``.

    Example:
        >>> import dtrain as dt
        >>> routing = dt.experts.route(torch.zeros(3, 4), top_k=1, share=torch.full((4,), 0.25))
        >>> dt.experts.load_balancing_loss(routing)
        (tensor(3.), tensor(3.))

    Raises:
        ConfigError: no shares, or rows without an axis of sequences.

    Source: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6, for the global batch as in Qiu et al. 2025,
        arXiv:2501.11873; for a sequence DeepSeek-V3, arXiv:2412.19437, equations 17 to 20.
    """
    check_choice("load_balancing_loss", "scope", scope, ("batch", "sequence"))
    probs, num_experts = routing.probs, routing.probs.shape[-1]
    mask = None if routing.mask is None else routing.mask.to(probs.dtype)
    if scope == "batch":
        if routing.share is None:
            raise ConfigError(
                "load_balancing_loss: routing.share must be the shares of a global batch, got None. Use dt.experts.Router, or "
                "pass share= to route; the shares of one microbatch are another loss."
            )
        by_row = probs @ routing.share.to(probs.dtype) * num_experts
        return _sum_rows(by_row, mask)
    if probs.ndim < 3:
        raise ConfigError(
            f"load_balancing_loss: routing must have rows [*, seq] for scope='sequence', got {list(probs.shape[:-1])}. Route "
            "before you flatten the sequences."
        )
    counted = probs.new_ones(probs.shape[:-1]) if mask is None else mask
    length = counted.sum(-1, keepdim=True).clamp(min=1.0)
    mean_probs = (probs * counted[..., None]).sum(-2) / length
    chosen = counted[..., None].expand(routing.experts.shape).flatten(-2)
    share = torch.zeros_like(mean_probs).scatter_add_(-1, routing.experts.flatten(-2), chosen)
    share = share / (length * routing.experts.shape[-1])
    has_rows = counted.amax(-1)
    return (share * mean_probs).sum() * num_experts, has_rows.sum()


def router_z_loss(routing: Routing) -> tuple[Tensor, Tensor]:
    """Return the summed z-loss of a router and its weight, for ``LossSum.terms``. It keeps logits small.

    Formula: ``total = sum over rows of logsumexp(logits)**2``, ``weight = rows``

    Args:
        routing: result of ``Router`` or ``route``.

    Returns:
        ``(total, weight)``, both ``[]`` in the dtype of the logits.

    Example:
        >>> import dtrain as dt
        >>> total, weight = dt.experts.router_z_loss(
        ...     dt.experts.route(torch.zeros(3, 4), top_k=1)
        ... )
        >>> round(total.item(), 4), weight.item()  # 3 * log(4)**2
        (5.7654, 3.0)

    Source: Zoph et al. 2022, arXiv:2202.08906, equation 5.
    """
    mask = None if routing.mask is None else routing.mask.to(routing.logits.dtype)
    return _sum_rows(routing.logits.logsumexp(-1).square(), mask)


def _sum_rows(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if mask is None:
        return values.sum(), values.new_full((), values.numel())
    return (values * mask).sum(), mask.sum()


def router_terms(
    routings: Sequence[Routing], *, balance: float = 0.0, sequence: float = 0.0, z: float = 0.0
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the losses of all routers of a model as ``LossSum.terms``, each the sum over the routers.

    A term has its own weight, the number of rows or sequences, so declare the weights:
    ``batch_spec(weight=lambda batch: {"loss": ..., "balance": rows, "z": rows, "sequence": sequences})``.

    Args:
        routings: results of the routers for the same rows.
        balance: factor of ``load_balancing_loss``; 0 leaves the term out.
        sequence: factor of ``load_balancing_loss`` with ``scope="sequence"``; 0 leaves the term out.
        z: factor of ``router_z_loss``; 0 leaves the term out.

    Returns:
        ``(total, weight)`` by name, ``"balance"``, ``"sequence"`` and ``"z"``.

    Example:
        def loss_fn(model, batch):
            logits, routings = model(batch["input_ids"])
            loss = dt.cross_entropy(logits, batch["labels"])
            terms = dt.experts.router_terms(routings, balance=0.01, z=0.001)
            return dt.LossSum(total=loss.total, weight=loss.weight, terms=terms)

    Raises:
        ConfigError: no routing, or a negative factor.

    Suggested values:
        Load balancing of the batch: ``balance=0.01`` (Fedus et al. 2021, section 2.2)
        With a balancing bias: ``sequence=0.0001`` (DeepSeek-V3, section 4.2)
        Logits: ``z=0.001`` (Zoph et al. 2022, section 3.1)
    """
    if not routings:
        raise ConfigError("router_terms: routings must have a routing per router, got none. Return them from the model.")
    terms = {}
    for name, factor, loss in (
        ("balance", balance, load_balancing_loss),
        ("sequence", sequence, partial(load_balancing_loss, scope="sequence")),
        ("z", z, router_z_loss),
    ):
        if check_number("router_terms", name, factor, minimum=0):
            pairs = [loss(routing) for routing in routings]
            terms[name] = torch.stack([total for total, _ in pairs]).sum() * factor, pairs[0][1]
    return terms
