"""Stochastic depth: residual blocks that are left out at random while training."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError
from dtrain.fqn import modules_by_fqn
from dtrain.shard.wrapping import Blocks, select_blocks
from dtrain.surgery.class_swap import Mixin, add_mixin
from dtrain.surgery.replace import check_plain_model, replace_modules

DropMethod = Literal["block", "sample"]
ResidualKind = Literal["block", "branch"]
RateDistribution = Literal["linear", "uniform"]


def drop_rates(drop_rate: float, blocks: int, distribution: RateDistribution = "linear") -> list[float]:
    """The rate at which each of so many blocks is dropped, from the first to the last.

    Formula: ``rate[l] = drop_rate * (l + 1) / blocks`` if linear, ``drop_rate`` if uniform

    Source: Huang et al. 2016, arXiv:1603.09382, equation 4.

    Example:
        >>> drop_rates(0.5, 4), drop_rates(0.5, 2, "uniform")
        ([0.125, 0.25, 0.375, 0.5], [0.5, 0.5])
    """
    return [drop_rate * ((at + 1) / blocks if distribution == "linear" else 1.0) for at in range(blocks)]


def is_dropped(drop_rate: float, count: int, *, seed: int, name: str = "") -> bool:
    """Whether the forward number ``count`` leaves the block ``name`` out: on every rank and machine the same.

    Formula: ``derive_seed(seed, "stochastic_depth", name, count) / 2**63 < drop_rate``

    Source: Huang et al. 2016, arXiv:1603.09382, section 3, with a hash for a uniform number.

    Example:
        >>> dropped = [is_dropped(0.25, count, seed=0) for count in range(4000)]
        >>> 920 < sum(dropped) < 1080, is_dropped(0.0, 0, seed=0), is_dropped(1.0, 0, seed=0)
        (True, False, True)
    """
    return derive_seed(seed, "stochastic_depth", name, count) < drop_rate * 2.0**63


def drop_samples(x: Tensor, keep: Tensor) -> Tensor:
    """``x`` with zeros for the samples (rows of the first axis) that are not kept.

    Formula: ``out[i] = x[i] if keep[i] else 0``

    Args:
        x: ``[samples, ...]``.
        keep: bool ``[samples]``.

    Source: the per-sample form is MosaicML Composer's.

    Example:
        >>> drop_samples(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([False, True])).tolist()
        [[0.0, 0.0], [3.0, 4.0]]
    """
    return x.masked_fill(~keep.reshape(-1, *[1] * (x.ndim - 1)), 0.0)  # a product would make infinity something else


class Stochastic(Mixin):
    """Mixed into a residual block, or into the branch of one: it is left out at random while training.

    What a count of forwards must survive decides its form. It is a buffer, so it is saved, is put back where a step is tried
    again, and is what it was when activation checkpointing computes a block again. The host keeps the value beside it, and
    reads the buffer only if that was written by someone else.
    """

    _drop_rate: float
    _method: DropMethod
    _kind: ResidualKind
    _seed: int
    _block_name: str
    forwards: Tensor

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return self._scale_residual(x, self._run_block(x, args, kwargs), 1.0 - self._drop_rate)
        if self._method == "sample":
            out = self._run_block(x, args, kwargs)
            keep = torch.rand(len(x), device=x.device) >= self._drop_rate
            return drop_samples(out, keep) if self._kind == "branch" else x + drop_samples(out - x, keep)
        if not self._should_drop():
            return self._run_block(x, args, kwargs)
        if any(isinstance(inner, FSDPModule) for inner in self.modules() if inner is not self):
            # What is gathered inside must not depend on numbers that a rank may have counted otherwise.
            return self._scale_residual(x, self._run_block(x, args, kwargs), 0.0)
        if self._kind == "branch":
            return x.new_zeros(())
        # What comes into a unit of FSDP2 is a view, on which a later operation in place would drop the unit's hook.
        return x.clone() if isinstance(self, FSDPModule) else x

    def _scale_residual(self, x: Tensor, out: Tensor, factor: float) -> Tensor:
        if self._kind == "branch":
            return out * factor
        return out if factor == 1.0 else x + factor * (out - x)

    def _run_block(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        out = super().forward(x, *args, **kwargs)
        wanted = tuple(x.shape) if self._kind == "block" else None
        if not isinstance(out, Tensor) or (wanted is not None and tuple(out.shape) != wanted):
            got = f"a tensor {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ConfigError(
                f"stochastic_depth: {self._block_name!r} makes {got} of {list(x.shape)}, so it cannot be left out; choose "
                "blocks that keep the shape, or the branches beside a shortcut with kind='branch'"
            )
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else code is compiled anew for each count
    def _should_drop(self) -> bool:
        """Whether this forward is one of those that leave the block out; the next one has the next number."""
        seen, version, count = self.__dict__.get("_seen", (None, 0, 0))
        if self.forwards is not seen or self.forwards._version != version:
            count = int(self.forwards)
        with torch.no_grad():
            self.forwards.add_(1)
        self.__dict__["_seen"] = (self.forwards, self.forwards._version, count + 1)
        return is_dropped(self._drop_rate, count, seed=self._seed, name=self._block_name)

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return f"{own}, drop_rate={self._drop_rate:.3g}" if own else f"drop_rate={self._drop_rate:.3g}"


def stochastic_depth(
    model: nn.Module,
    blocks: Blocks,
    *,
    drop_rate: float = 0.5,
    distribution: RateDistribution = "linear",
    method: DropMethod = "block",
    kind: ResidualKind = "block",
    seed: int = 0,
) -> nn.Module:
    """Have residual blocks of ``model`` be left out at random while training; return the model.

    In evaluation the residual is scaled by the chance that it is kept. Names stay as they are, and a class finds its blocks.

    Formula: ``out = x + keep * (block(x) - x)``, or of a branch ``keep * branch(x)``; ``keep`` is 1 or 0 while training, and
    ``1 - rate`` in evaluation, ``rate`` as in ``drop_rates``

    Args:
        model: a plain module, before ``shard_model``; on meta, too.
        blocks: which modules, as in ``shard_model``: classes, names, or a function of (name, module). They are counted in the
            order of the model. Their first argument is ``x``, a tensor ``[samples, ...]``, and their result is a tensor.
        drop_rate: of the last block, from 0 to below 1. The paper's is 0.5 (Composer: 0.2).
        distribution: ``"linear"`` from the first block to the last, as in the paper, or ``"uniform"``.
        method: ``"block"``: for all samples alike, as in the paper; then nothing is computed, forward or backward. A parameter
            that no microbatch of a step used has no gradient in that step, so the optimizer leaves it alone. ``"sample"``:
            each sample by itself; everything is computed.
        kind: ``"block"``: modules that add their input themselves, with a shortcut that is the identity. Where an activation
            comes after the sum, as in the first ResNets, the paper scales inside of it in evaluation; this scales its result.
            ``"branch"``: modules whose result is added to something (``shortcut + branch``, not in place: what is left out is
            a zero without a shape), for any shortcut; this is the paper's formula.
        seed: of the choices of ``method="block"``: they depend on it, on a block's name and on how many forwards it has seen
            while training. So all ranks choose alike. Two ranks equal one process if each runs one microbatch in a step; with
            more, a choice is for other samples, since a microbatch of each rank holds other ones. (A rank that
            has fewer than the others repeats one without counting it; with ``buffers="local"`` it then stays behind, which
            changes its choices and nothing else.) Those of ``"sample"`` are drawn from torch's global generator, as dropout's
            are, so they differ between ranks.

    Mutates: ``model``: the classes of the blocks, and for ``"block"`` a buffer ``forwards`` in each, which is saved. (So
        weights from before load with ``load_weights_(..., missing=["**.forwards"])``.)
    Collective: none of its own; ``forwards`` is one of the buffers that a step makes equal on all ranks. Where units of
        sharding are inside a block, it is computed even if left out.
    Host sync: none while the count is only written here. After a checkpoint was loaded, in activation checkpointing, and where
        ``shard_model(buffers=...)`` makes buffers equal on several ranks, a forward waits for it once: ``"block"`` is decided
        on the host.

    Raises:
        ConfigError: ``blocks`` that pick nothing, an argument that cannot be right, a model that is sharded already; in a
            forward, a block that gives no tensor, or one of another shape.

    Source: Huang et al. 2016, arXiv:1603.09382, section 3.

    Example:
        >>> net = stochastic_depth(nn.Sequential(nn.ReLU(), nn.ReLU()), nn.ReLU, drop_rate=0.5, distribution="uniform")
        >>> net.eval()(torch.tensor([[-8.0, 8.0]])).tolist()  # twice x + 0.5 * (relu(x) - x)
        [[-2.0, 8.0]]
    """
    where = "stochastic_depth"
    for given, name, allowed in (
        (distribution, "distribution", RateDistribution),
        (method, "method", DropMethod),
        (kind, "kind", ResidualKind),
    ):
        if given not in get_args(allowed):
            raise ConfigError(f"{where}: unknown {name}={given!r}; use one of {', '.join(get_args(allowed))}")
    if not isinstance(drop_rate, int | float) or not 0 <= drop_rate < 1 or math.isnan(drop_rate):
        raise ConfigError(f"{where}: needs 0 <= drop_rate < 1, got {drop_rate=}")
    if type(seed) is not int:
        raise ConfigError(f"{where}: seed must be a whole number, got {seed!r}")
    check_plain_model(model, where)
    names = {id(module): name for name, module in modules_by_fqn(model)}
    chosen = select_blocks(model, blocks, caller=where)
    if not chosen:
        raise ConfigError(f"{where}: {blocks=} picks no module inside the model; e.g. blocks=(Block,)")
    order = sorted(chosen, key=lambda module: list(names).index(id(module)))
    rates = dict(zip(map(id, order), drop_rates(drop_rate, len(order), distribution), strict=True))

    def stochastic(module: nn.Module, name: str) -> nn.Module | None:
        if not add_mixin(module, Stochastic):
            return None
        assert isinstance(module, Stochastic)
        module._drop_rate, module._method, module._kind = rates[id(module)], method, kind
        module._seed, module._block_name = seed, name
        if method == "block":
            module.register_buffer("forwards", torch.zeros((), dtype=torch.int64, device="cpu"))
        return module

    def wanted(name: str, module: nn.Module) -> bool:
        return id(module) in rates

    return replace_modules(model, {wanted: stochastic}, caller=where).model
