"""Drop parts of a model at random during training: residual blocks (``stochastic_depth``), or units for several steps
(``gyro_dropout``).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.dist.rng import derive_seed, generator
from dtrain.errors import ConfigError
from dtrain.fqn import modules_by_fqn
from dtrain.shard.wrapping import Blocks, select_some_blocks
from dtrain.surgery.replace import Mixin, ModuleSelector, ReplacementPolicy, apply_policies, check_plain_model, mix_in

DropMethod = Literal["block", "sample"]
ResidualKind = Literal["block", "branch"]
RateDistribution = Literal["linear", "uniform"]


def drop_rates(drop_rate: float, num_blocks: int, distribution: RateDistribution = "linear") -> list[float]:
    """Return the drop rate of each block, from the first to the last.

    Formula: ``rate[l] = drop_rate * (l + 1) / num_blocks`` if linear, ``drop_rate`` if uniform

    Source: Huang et al. 2016, arXiv:1603.09382, equation 4.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.drop_rates(0.5, 4), dt.surgery.drop_rates(0.5, 2, "uniform")
        ([0.125, 0.25, 0.375, 0.5], [0.5, 0.5])
    """
    return [drop_rate * ((index + 1) / num_blocks if distribution == "linear" else 1.0) for index in range(num_blocks)]


def is_dropped(drop_rate: float, count: int, *, seed: int, name: str = "") -> bool:
    """Return True if forward number ``count`` skips the block ``name``; equal on every rank and machine.

    Formula: ``derive_seed(seed, "stochastic_depth", name, count) / 2**63 < drop_rate``

    Source: Huang et al. 2016, arXiv:1603.09382, section 3, with a hash as the uniform random number.

    Example:
        >>> dropped = [is_dropped(0.25, count, seed=0) for count in range(4000)]
        >>> 920 < sum(dropped) < 1080, is_dropped(0.0, 0, seed=0), is_dropped(1.0, 0, seed=0)
        (True, False, True)
    """
    return derive_seed(seed, "stochastic_depth", name, count) < drop_rate * 2.0**63


def drop_samples(x: Tensor, keep: Tensor) -> Tensor:
    """Replace the samples (rows of the first axis) that are not kept by zeros.

    Formula: ``out[i] = x[i] if keep[i] else 0``

    Args:
        x: ``[samples, ...]``.
        keep: bool ``[samples]``.

    Source: the per-sample variant is MosaicML Composer's.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.drop_samples(
        ...     torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([False, True])
        ... ).tolist()
        [[0.0, 0.0], [3.0, 4.0]]
    """
    # A product would turn infinity into NaN.
    return x.masked_fill(~keep.reshape(-1, *[1] * (x.ndim - 1)), 0.0)


class Stochastic(Mixin):
    """Mixin of a residual block, or of a residual branch, that is skipped at random during training.

    The number of forwards is a buffer, so the number is saved, restored with a repeated step, and reset for the recomputation
    of activation checkpointing. The host caches the value, and reads the buffer only if other code wrote the buffer.
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
            # Gathers of inner units must not depend on a count that may differ between ranks.
            return self._scale_residual(x, self._run_block(x, args, kwargs), 0.0)
        if self._kind == "branch":
            return x.new_zeros(())
        # The input of an FSDP2 unit is a view. A later in-place operation on the view would remove the unit's hook.
        return x.clone() if isinstance(self, FSDPModule) else x

    def _scale_residual(self, x: Tensor, out: Tensor, factor: float) -> Tensor:
        if self._kind == "branch":
            return out * factor
        return out if factor == 1.0 else x + factor * (out - x)

    def _run_block(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        out = super().forward(x, *args, **kwargs)
        expected_shape = tuple(x.shape) if self._kind == "block" else None
        if not isinstance(out, Tensor) or (expected_shape is not None and tuple(out.shape) != expected_shape):
            actual = f"a tensor {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ConfigError(
                f"stochastic_depth: {self._block_name!r} must return a tensor {list(x.shape)} like its input, got {actual}. "
                "Select blocks that keep the shape, or pass residual branches with kind='branch'."
            )
        return out

    # The compiler would recompile for each count.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _should_drop(self) -> bool:
        """Return True if this forward skips the block, and count the forward."""
        known_buffer, version, count = self.__dict__.get("_seen", (None, 0, 0))
        if self.forwards is not known_buffer or self.forwards._version != version:
            count = int(self.forwards)
        with torch.no_grad():
            self.forwards.add_(1)
        self.__dict__["_seen"] = (self.forwards, self.forwards._version, count + 1)
        return is_dropped(self._drop_rate, count, seed=self._seed, name=self._block_name)

    def extra_repr(self) -> str:
        base = super().extra_repr()
        return f"{base}, drop_rate={self._drop_rate:.3g}" if base else f"drop_rate={self._drop_rate:.3g}"


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
    """Skip residual blocks of ``model`` at random during training; return the model.

    In evaluation the residual is scaled by the probability of keeping the block. Names do not change, and a class still selects
    its blocks.

    Formula: ``out = x + keep * (block(x) - x)``, or for a branch ``keep * branch(x)``; ``keep`` is 1 or 0 during training, and
    ``1 - rate`` in evaluation, with ``rate`` from ``drop_rates``

    Args:
        model: plain module before ``shard_model``; on meta, too.
        blocks: modules to skip, as in ``shard_model``: classes, names, or a function of (name, module), counted in model order.
            The first argument is a tensor ``[samples, ...]``, and the result is a tensor.
        drop_rate: drop rate of the last block, from 0 to below 1. The paper uses 0.5 (Composer: 0.2).
        distribution: ``"linear"`` from the first to the last block, as in the paper, or ``"uniform"``.
        method: ``"block"`` skips a block for all samples, as in the paper, and computes nothing in forward and backward. A
            parameter that no microbatch of a step used has no gradient in that step, so the optimizer ignores the parameter.
            ``"sample"`` drops samples independently and computes everything.
        kind: ``"block"``: modules that add their input, with an identity shortcut. If an activation follows the sum, as in the
            first ResNets, the paper scales inside of the activation in evaluation, and this function scales the result.
            ``"branch"``: modules whose result is added to any shortcut (``shortcut + branch``, not in place, because a skipped
            branch returns a zero without a shape), as in the paper's formula.
        seed: seed of ``method="block"``. Decisions depend on the seed, the block's name and its number of training forwards, so
            all ranks decide alike. Two ranks equal one process if each rank runs one microbatch per step. With several
            microbatches, decisions apply to different samples. (A rank with fewer microbatches repeats one without counting.
            With ``buffers="own"`` its count then stays behind, which changes only its decisions.) ``"sample"`` uses torch's
            global generator, as dropout does, so ranks differ.

    Mutates: ``model``: the classes of the blocks, and for ``"block"`` a saved buffer ``forwards`` in each. (Load earlier
        weights with ``load_weights_(..., ignore=["**.forwards"])``.)
    Collective: none of its own; a step synchronizes ``forwards`` like other buffers. A block with sharded units inside is
        computed even if skipped. Host sync: none while only this module writes the count. One per forward of ``"block"`` after
        loading a checkpoint, under activation checkpointing, and if ``shard_model(buffers=...)`` synchronizes buffers over
        several ranks.

    Example:
        >>> import dtrain as dt
        >>> model = nn.Sequential(nn.ReLU(), nn.ReLU())
        >>> model = dt.surgery.stochastic_depth(
        ...     model, nn.ReLU, drop_rate=0.5, distribution="uniform"
        ... )
        >>> model.eval()(torch.tensor([[-8.0, 8.0]])).tolist()  # twice x + 0.5 * (relu(x) - x)
        [[-2.0, 8.0]]

    Raises:
        ConfigError: ``blocks`` selects no module, an argument is invalid, or the model is sharded; in a forward, a block
            returns no tensor, or a tensor of another shape.

    Source: Huang et al. 2016, arXiv:1603.09382, section 3.

    Suggested values:
        CIFAR, ResNet-110; ImageNet, ResNet-152: ``drop_rate=0.5``, linear (Huang et al. 2016, section 4)
        ImageNet, ResNet-50: ``drop_rate=0.2``, linear (MosaicML Composer, method card of stochastic depth)
        ImageNet, ConvNeXt-T: ``drop_rate=0.1``, ``method="sample"`` (Liu et al. 2022, arXiv:2201.03545, appendix A)
    When not to use: the model has few blocks: each dropped block is a large part of its capacity.
    """
    caller = "stochastic_depth"
    check_choice(caller, "distribution", distribution, get_args(RateDistribution))
    check_choice(caller, "method", method, get_args(DropMethod))
    check_choice(caller, "kind", kind, get_args(ResidualKind))
    check_number(caller, "drop_rate", drop_rate, minimum=0, below=1)
    check_int(caller, "seed", seed, minimum=0)
    check_plain_model(model, caller)
    names = {id(module): name for name, module in modules_by_fqn(model)}
    selected = select_some_blocks(model, blocks, caller=caller)
    order = sorted(selected, key=lambda module: list(names).index(id(module)))
    rates = dict(zip(map(id, order), drop_rates(drop_rate, len(order), distribution), strict=True))

    def set_up(block: Stochastic, name: str) -> None:
        block._drop_rate, block._method, block._kind = rates[id(block)], method, kind
        block._seed, block._block_name = seed, name
        if method == "block":
            block.register_buffer("forwards", torch.zeros((), dtype=torch.int64, device="cpu"))

    return mix_in(model, Stochastic, lambda name, module: id(module) in rates, set_up, caller=caller)


def subnetwork_masks(count: int, features: int, p: float, *, seed: int, name: str = "") -> Tensor:
    """Return the features that each of ``count`` subnetworks keeps: bool ``[count, features]``, on the CPU.

    Formula: ``rand(count, features) >= p``, from a random stream of ``seed`` and ``name``

    Source: Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.subnetwork_masks(2, 3, 0.0, seed=0).tolist()
        [[True, True, True], [True, True, True]]
        >>> first, second = (
        ...     dt.surgery.subnetwork_masks(4, 8, 0.5, seed=0, name="a") for _ in range(2)
        ... )
        >>> bool((first == second).all())
        True
    """
    return torch.rand(count, features, generator=generator("cpu", "gyro_dropout", seed, name), device="cpu") >= p


def drop_by_masks(x: Tensor, masks: Tensor, p: float, *, axis: int = -1) -> Tensor:
    """Apply one mask to each group of consecutive samples of ``x`` ``[batch, ...]``.

    Formula: ``y[i] = x[i] * masks[i * len(masks) // batch] / (1 - p)``

    Args:
        x: samples along the first axis.
        masks: ``[count, features]``; with fewer samples than masks, each sample gets a different mask.
        p: fraction of features that masks drop.
        axis: feature axis of ``x``.

    Host sync: none.

    Source: Lee et al. 2022, MLSys.

    Example:
        >>> import dtrain as dt
        >>> masks = torch.tensor([[True, False], [False, True]])
        >>> dt.surgery.drop_by_masks(torch.ones(4, 2), masks, 0.5).tolist()
        [[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]
    """
    batch = x.shape[0]
    rows = torch.arange(batch, device=x.device) * len(masks) // max(batch, 1)
    shape = [1] * x.ndim
    shape[0], shape[axis] = batch, x.shape[axis]
    return x * (masks[rows].to(x.dtype) / (1.0 - p)).view(shape)


class GyroDropout(nn.Dropout):
    """Dropout with ``sigma`` fixed masks; each forward trains ``tau`` of these subnetworks.

    torch's global generator selects the ``tau`` subnetworks, as in ``nn.Dropout``. Ranks select independently, a checkpoint
    continues the selection, and a recomputed forward repeats the selection. The masks are equal on all ranks. The masks are
    computed from ``seed`` and ``name`` at first use, and are in no state dict.

    Formula: ``y[i] = x[i] * masks[selected[i * tau // batch]] / (1 - p)``; in evaluation ``y = x``

    Args:
        p: fraction of features that a mask drops, in ``[0, 1)``.
        sigma: total number of subnetworks.
        tau: subnetworks per forward, each for consecutive samples.
        seed: seed of the masks.
        name: name of the layer, so that each layer has different masks.
        axis: feature axis; the first axis is the sample axis.

    Host sync: none, except in the first forward, which copies the masks to the device.

    Example:
        >>> import dtrain as dt
        >>> layer = dt.surgery.GyroDropout(0.5, sigma=1, tau=1, seed=0)
        >>> first, second = layer(torch.ones(3, 8))[0], layer(torch.ones(3, 8))[1]
        >>> (
        ...     bool((first == second).all()),
        ...     sorted(set(first.tolist())),
        ...     bool((layer.eval()(first) == first).all()),
        ... )
        (True, [0.0, 2.0], True)

    Raises:
        ConfigError: ``p`` outside of ``[0, 1)``, or not ``1 <= tau <= sigma``; in a forward, an input with fewer than two dims.

    Source: Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys. There, as in MosaicML
        Composer, ``tau`` subnetworks train for ``tau / sigma`` of the run. Here each forward selects new subnetworks, so each
        subnetwork trains equally often and the length of the run is not needed.
    """

    def __init__(
        self, p: float = 0.5, *, sigma: int = 256, tau: int = 16, seed: int = 0, name: str = "", axis: int = -1
    ) -> None:
        check_number("gyro_dropout", "p", p, minimum=0, below=1)
        check_int("gyro_dropout", "sigma", sigma)
        check_int("gyro_dropout", "tau", tau, maximum=sigma)
        super().__init__(p)
        self.sigma, self.tau, self.seed, self.name, self.axis = sigma, tau, seed, name, axis
        self._mask_cache: dict[tuple[int, torch.device], Tensor] = {}

    def forward(self, input: Tensor) -> Tensor:
        """Drop features of ``[batch, ...]``; the shape does not change."""
        if not self.training or self.p == 0.0:
            return input
        if input.ndim < 2:
            raise ConfigError(
                f"gyro_dropout: input must be [batch, ..., features], got shape {tuple(input.shape)} in {self.name!r}. "
                "Give the input a batch axis."
            )
        selected = torch.rand(self.sigma, device=input.device).argsort()[: self.tau]
        return drop_by_masks(input, self._get_masks(input.shape[self.axis], input.device)[selected], self.p, axis=self.axis)

    def _get_masks(self, features: int, device: torch.device) -> Tensor:
        """Return cached masks, bool ``[sigma, features]``."""
        masks = self._mask_cache.get((features, device))
        if masks is None:
            masks = subnetwork_masks(self.sigma, features, self.p, seed=self.seed, name=self.name).to(device)
            # Fake tensors of a simulated step must not stay in the cache.
            if type(masks) is Tensor:
                self._mask_cache[(features, device)] = masks
        return masks

    def extra_repr(self) -> str:
        """Return the constructor arguments."""
        return f"p={self.p}, sigma={self.sigma}, tau={self.tau}, seed={self.seed}, axis={self.axis}"


def gyro_dropout(
    model: nn.Module, *, p: float | None = None, sigma: int = 256, tau: int = 16, seed: int = 0, axis: int = -1
) -> nn.Module:
    """Replace ``nn.Dropout`` by ``GyroDropout``; return the model.

    Formula: ``y[i] = x[i] * masks[selected[i * tau // batch]] / (1 - p)``

    Args:
        model: model with ``nn.Dropout``, before ``shard_model``. If a module only reads ``p`` of its dropout (attention of
            transformers), the replacement has no effect.
        p: fraction of features to drop; None keeps the ``p`` of each layer (MosaicML Composer uses 0.5).
        sigma: total number of subnetworks; memory is ``sigma`` bytes per feature.
        tau: subnetworks per forward.
        seed: seed of the masks.
        axis: feature axis; the first axis is the sample axis.

    Mutates: ``model``.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.gyro_dropout(
        ...     nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), sigma=8, tau=2
        ... )[1]
        GyroDropout(p=0.1, sigma=8, tau=2, seed=0, axis=-1)

    Raises:
        ConfigError: no ``nn.Dropout``, an invalid ``p``, ``sigma`` or ``tau``, or a sharded model.

    Source: Lee et al. 2022, "Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training", MLSys; see ``GyroDropout``.

    Suggested values:
        AlexNet, LeNet: ``sigma=256``, ``tau=16`` (MosaicML Composer, method card of gyro dropout, by authors of the paper)
        ResNet-18, BERT: ``sigma=1024``, ``tau=8`` (MosaicML Composer, method card of gyro dropout, by authors of the paper)
    When not to use: a step has fewer samples than ``tau``, or the model has no ``nn.Dropout``, as most decoders today.
    """

    def policy(module: nn.Module, name: str) -> nn.Module:
        assert isinstance(module, nn.Dropout), "the policy selects nn.Dropout"
        return GyroDropout(module.p if p is None else p, sigma=sigma, tau=tau, seed=seed, name=name, axis=axis)

    policies: dict[ModuleSelector, ReplacementPolicy] = {nn.Dropout: policy}
    return apply_policies(model, policies, caller="gyro_dropout").model
