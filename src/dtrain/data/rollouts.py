"""``RolloutBuffer``: hold the samples that a policy has made, and deal them in minibatches for several updates.

A ``Loader`` deals the minibatches, so their order, the shares of ranks and the position at a save are those of any loader. The
buffer replaces the data of the loader with each rollout, and saves the rollout beside the position.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.arguments import check_int, explain_arguments
from dtrain.data.batch import count_samples, list_tensors
from dtrain.data.batch_source import BatchOptions, MapBatchSource
from dtrain.data.fetcher import Fetcher
from dtrain.data.loader import Loader
from dtrain.data.position import Position
from dtrain.data.sample_order import ElasticSampler
from dtrain.data.workers import WorkerConfig
from dtrain.dist.batch_info import BatchInfo
from dtrain.dist.context import current_context
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import data_rank
from dtrain.dist.ragged import Rows, all_gather_ragged
from dtrain.errors import CheckpointMismatchError, ConfigError
from dtrain.schedules.durations import Duration
from dtrain.typing import Batch

_STATE_VERSION = 1


class RolloutBuffer:
    """Samples of one rollout, which several updates read in minibatches, as a part of the run's position.

    Each rank fills in the samples that it made, and holds the samples of all ranks on the CPU. An iteration deals the rest of
    the rollout: ``epochs`` passes, each in an order of its own, which depends on ``seed`` and the pass only. Each minibatch has
    the same samples on every number of ranks, and a rank receives its share of them as a ``TensorDict``.

    Pass the buffer to ``Step.init``, as ``loader=`` or in ``stateful=``. A checkpoint then holds the rollout until its last
    update, so a run that was killed between or inside rollouts continues as if it had not been, on any number of ranks. As the
    ``loader``, its passes are the epochs of the clock.

    Args:
        mesh: device mesh; its data-parallel ranks share each minibatch. Required on several ranks.
        global_batch_size: samples per minibatch over all ranks; the last minibatch of a pass may be smaller.
        seed: seed of the order.
        epochs: passes over each rollout.
        shuffle: if False, each pass has the order of the samples.

    Example:
        >>> import dtrain as dt
        >>> buffer = dt.data.RolloutBuffer(global_batch_size=2, seed=0, epochs=2)
        >>> buffer.fill({"tokens": torch.arange(4)})
        >>> [batch["tokens"].tolist() for batch in buffer]
        [[2, 3], [1, 0], [0, 2], [1, 3]]
        >>> buffer.is_finished, buffer.rollouts, buffer.policy_version
        (True, 1, 4)

    Raises:
        ConfigError: a number below 1, or several ranks without a mesh.
    """

    @explain_arguments
    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        global_batch_size: int,
        seed: int,
        epochs: int = 1,
        shuffle: bool = True,
    ) -> None:
        check_int("RolloutBuffer", "global_batch_size", global_batch_size)
        check_int("RolloutBuffer", "epochs", epochs)
        if mesh is None and get_dist_info().world_size > 1:
            raise ConfigError(
                f"RolloutBuffer: mesh must be given on several ranks, got None on {get_dist_info().world_size}. "
                "Pass mesh=, so that the ranks share each minibatch."
            )
        rank, ranks = (0, 1) if mesh is None else data_rank(mesh)
        self._mesh, self._epochs = mesh, epochs
        self._source = MapBatchSource(
            fetcher=Fetcher(dataset=None, seed=seed),
            order=ElasticSampler(size=1, seed=seed, shuffle=shuffle),
            options=BatchOptions(
                global_batch_size=global_batch_size,
                last_batch="short",
                rank=rank,
                ranks=ranks,
                workers=WorkerConfig(count=0),
            ),
        )
        self._loader = _RolloutLoader(self, self._source, seed)
        self._rollouts = self._rollout_version = self._last_pass = 0

    @property
    def rows(self) -> Any:
        """The rollout of all ranks as a ``TensorDict`` of batch size ``[samples]`` on the CPU; None before the first.

        A buffer that was saved after the last update of its rollout has no rows after the load.
        """
        return self._source.fetcher.dataset

    @property
    def rollouts(self) -> int:
        """Number of rollouts so far. The next rollout has this number, for its seeds."""
        return self._rollouts

    @property
    def policy_version(self) -> int:
        """Number of minibatches of all rollouts that had an update: the version of the policy."""
        return self._position.batches

    @property
    def rollout_version(self) -> int:
        """Version of the policy that made the rollout. ``policy_version - rollout_version`` updates lie between both."""
        return self._rollout_version

    @property
    def is_finished(self) -> bool:
        """True if the rollout has no minibatch left, so that the buffer needs a new rollout; also before the first."""
        return self._position.epoch >= self._last_pass

    def fill(self, rows: Rows, *, order: Tensor | None = None) -> None:
        """Replace the rollout by a new one, of which each rank passes the samples that it made.

        A batch of prompts that a loader of ``build_loader`` issued last counts as consumed, as after a step: the rollout is in
        the buffer now. So a resume makes no rollout twice.

        Args:
            rows: this rank's samples: a TensorDict, or a mapping of tensors ``[n, ...]`` with text keys, equal on ranks along
                ``cp`` and ``tp``. ``n`` may differ between ranks and rollouts.
            order: ``[n]`` numbers of the samples in the global rollout, by which the rows are sorted, so that the rollout is
                the same on every number of ranks; None puts the rows one after another in the order of ranks.

        Mutates: the buffer. Collective: as ``dt.dist.all_gather_ragged``. Host sync: one for rows on an accelerator.

        Example:
            numbers = torch.arange(64)[index::count]
            buffer.fill(roll_out(model, buffer.rollouts, numbers), order=numbers)

        Raises:
            ConfigError: the rollout before has minibatches left; rows that are no mapping, or no rows on all ranks; as
                ``dt.dist.all_gather_ragged``.
        """
        if not self.is_finished:
            batches, position = self._source.epoch_batches(), self._position
            passes_left = self._last_pass - position.epoch - 1
            left = batches.remaining_steps(position) + passes_left * batches.steps_per_epoch()
            raise ConfigError(
                f"fill: the rollout must have no minibatch left, got {left}. Iterate over the buffer first, or "
                "call discard() to leave them out."
            )
        gathered = all_gather_ragged(rows, order=order, mesh=self._mesh)
        self._hold(gathered, "fill")
        position = self._position
        self._rollouts, self._rollout_version = self._rollouts + 1, position.batches
        self._last_pass = position.epoch + self._epochs
        context = current_context()
        issuing = cast("Any", context.issuing_loader)
        prompts = None if issuing is None else issuing()
        if prompts is not None and prompts._last_batch_info is not None:
            prompts._last_batch_info.status.consumed = True
        context.issuing_loader = None

    def discard(self) -> None:
        """Leave out the rest of the rollout, for example if the policy has moved too far. A running iteration ends.

        Call it on every rank, after the update of a minibatch. Mutates: the buffer.

        Example:
            for batch in buffer:
                state, metrics = step(state, batch)
                if dt.reduce_metrics(metrics)["kl"] > 0.02:
                    buffer.discard()
        """
        position = self._loader._skip_begin()
        self._loader.skip(max(0, (self._last_pass - position.epoch) * self._source.order.size - position.samples))

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of the rollout, from the position that a checkpoint saves.

        A minibatch is consumed as in ``Loader.until``: when its step is complete, or when the loop asks for the next.

        Raises:
            ConfigError: the rollout has no minibatch left.
        """
        if self.is_finished:
            raise ConfigError(
                f"RolloutBuffer: an iteration must begin with a rollout, got none left after {self._rollouts}. Call fill if "
                "buffer.is_finished."
            )
        return self._loader.until(Duration(self._last_pass, "ep"))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the versions and the rollout; without the rollout if it has no minibatch left."""
        return {
            "version": _STATE_VERSION,
            "position": self._loader.state_dict(),
            "rollouts": self._rollouts,
            "rollout_version": self._rollout_version,
            "last_pass": self._last_pass,
            "rows": None if self.is_finished else self.rows.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned. Ranks and minibatch size may differ; ``epochs`` holds from the next rollout on.

        Mutates: the buffer.

        Raises:
            CheckpointMismatchError: the state has another format version, another seed or another shuffle.
        """
        if state.get("version") != _STATE_VERSION:
            raise CheckpointMismatchError(
                f"RolloutBuffer: the saved state has format version {state.get('version')}, this release reads "
                f"{_STATE_VERSION}. Pass ignore= with the name of the buffer to start over."
            )
        position, rows = state["position"], state["rows"]
        self._source.fetcher = replace(self._source.fetcher, dataset=None)
        self._source.order = replace(cast(ElasticSampler, self._source.order), size=position["size"])
        if rows is not None:
            self._hold(rows, "RolloutBuffer")
        self._loader.load_state_dict(position)
        self._rollouts, self._rollout_version = state["rollouts"], state["rollout_version"]
        self._last_pass = state["last_pass"]

    def __repr__(self) -> str:
        size = self._source.options.global_batch_size
        return f"RolloutBuffer(rollouts={self._rollouts}, global_batch_size={size}, epochs={self._epochs})"

    def _hold(self, rows: Rows, caller: str) -> None:
        """Put the rows of all ranks in the place of the former rollout."""
        # The import takes a second or two.
        from tensordict import TensorDict, TensorDictBase

        if not isinstance(rows, Mapping | TensorDictBase):
            raise ConfigError(f"{caller}: rows must be a mapping of tensors, got {type(rows).__name__}. Name the tensors.")
        size = count_samples(rows) if list_tensors(rows) else 0
        if size == 0:
            raise ConfigError(f"{caller}: rows must hold at least one sample over all ranks, got none. Roll out more samples.")
        content = TensorDict(dict(rows.items()), batch_size=[size]).to("cpu")
        self._source.fetcher = replace(self._source.fetcher, dataset=content)
        self._source.order = replace(cast(ElasticSampler, self._source.order), size=size)

    @property
    def _position(self) -> Position:
        """Position of the next minibatch: that of a minibatch whose step is not complete."""
        return self._loader._resume_point()[0]

    @property
    def _last_batch_info(self) -> BatchInfo | None:
        return self._loader._last_batch_info

    @property
    def _identity(self) -> object:
        return self._loader._identity

    def _join_run(self) -> None:
        self._loader._join_run()


class _RolloutLoader(Loader):
    """Loader of the minibatches of a buffer, by which steps and saves find the buffer."""

    def __init__(self, buffer: RolloutBuffer, source: MapBatchSource, seed: int) -> None:
        super().__init__(source, seed=seed, fingerprint={"kind": "rollouts"})
        self._buffer = weakref.ref(buffer)

    @property
    def _identity(self) -> weakref.ref[Any]:
        return self._buffer
