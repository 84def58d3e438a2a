"""Record the evaluations of a run, the weights that they ran, and the exported weights (``Evaluations``).

``ExportCheck`` loads exported weights into the model again, and compares its outputs with those of the evaluated weights.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from dtrain.data.batch import list_tensors
from dtrain.dist.dtensor import to_local
from dtrain.fqn import buffers_by_fqn, modules_by_fqn, parameters_by_fqn, unwrap_module
from dtrain.prove.run_config import RunConfig
from dtrain.prove.run_log import RunLog, sample_hashes
from dtrain.prove.run_records import matching_name
from dtrain.prove.script_values import script_line

_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
# Evaluated weights that are kept, the last ones.
_MAX_SNAPSHOTS = 6

Values = Mapping[str, Tensor]


class Evaluations:
    """Forwards without gradient outside of steps, and exports.

    Args:
        config: the run.
        log: files of the rank.
        note: writes a fact about the whole run, once.
    """

    def __init__(self, config: RunConfig, log: RunLog, note: Callable[..., None]) -> None:
        self._config, self._log, self._note = config, log, note
        self._batches: list[list[str]] = []
        self._line = ""
        self._dropout: dict[str, None] = {}
        self._weights_written = False
        self.exports = ExportCheck() if config.check_exports else None

    def add(self, batch: Any) -> bool:
        """Add the samples of a forward. Returns True for the first forward since the last step."""
        if not self._batches:
            self._line = script_line(self._config.script)
        self._batches.append(sample_hashes(batch))
        return len(self._batches) == 1

    def forward_begins(self, model: nn.Module) -> None:
        """Observe the modules of an evaluation that drop values, unless the model is frozen, as a teacher is."""
        if any(param.requires_grad for param in model.parameters()):
            self._dropout |= dict.fromkeys(list_random_modules(model))

    def write_weights(self, model: nn.Module) -> None:
        """Write the weights of an evaluation that begins. On several ranks the gather would need the same forward on all."""
        if self._weights_written or self._config.ranks > 1:
            return
        self._weights_written = True
        for name, param in parameters_by_fqn(model)[0].items():
            self._log.write_tensor("evaluated_weight", name, param)
        if self.exports is not None:
            self.exports.evaluation_begins(model, self._log.step)

    def number_shown(self) -> None:
        """Observe that the script shows numbers, on some of its ranks: the next evaluation may run other weights."""
        self._weights_written = False

    def flush(self) -> None:
        """Write the evaluations since the last step. All ranks call this at the same place."""
        if self._batches:
            self._log.write("evaluation", batches=self._batches, dropout=list(self._dropout), line=self._line)
            self._batches, self._dropout = [], {}
        self._weights_written = False

    def exported(self, path: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write the tensors of a file that other programs will read, after the file is written."""
        for name, tensor in tensors:
            self._log.write_tensor("exported", name, tensor, optimizer_index=0, path=path)
        if self.exports is None:
            return
        result, problem = None, ""
        try:
            result = self.exports.check(path, self._log.step)
        except Exception as error:  # noqa: BLE001 - the script does not run the model this way
            problem = f"{type(error).__name__}: {error}"[:300]
        if result is None:
            self._note("export_not_run", path=os.path.basename(path), error=problem)
        else:
            self._log.write("export_check", **result)


def list_random_modules(model: nn.Module, *, statistics: bool = False) -> list[str]:
    """Return the modules that drop values in their mode; with ``statistics``, also those that update statistics."""
    return [
        name or "model"
        for name, module in modules_by_fqn(model)
        if module.training
        and (
            (isinstance(module, _DropoutNd) and module.p)
            or (statistics and isinstance(module, _BatchNorm) and module.track_running_stats)
        )
    ]


class ExportCheck:
    """Exports of a run on one rank: a file is read again, and a held batch gives the same outputs with its tensors.

    The tensors that the file lacks get their values before the first step, as in a model that was just built.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[nn.Module, Any, Any]] = {}
        self._initial: dict[int, Values] = {}
        self._evaluated: dict[int, list[tuple[int, Values]]] = {}
        self._shards: dict[Path, dict[str, Tensor]] = {}
        self.running = False

    def hold(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep the inputs of a forward, and the values of the model before its first forward."""
        inner = unwrap_module(module)
        self._held[id(inner)] = (module, args, kwargs)
        if id(inner) not in self._initial:
            self._initial[id(inner)] = _clone(_tensors(inner))

    def evaluation_begins(self, module: nn.Module, step: int) -> None:
        """Keep the values of a model that is evaluated."""
        inner = unwrap_module(module)
        kept = self._evaluated.setdefault(id(inner), [])
        kept.append((step, _clone(_tensors(inner))))
        del kept[:-_MAX_SNAPSHOTS]

    def check(self, path: str, step: int) -> dict[str, Any] | None:
        """Load the file at ``path``, and return the difference of the outputs; None if the file is a part, or of no model.

        A script may have several models with these names, such as an average beside the trained model. The file is that of the
        nearest one.

        Mutates: the parameters and buffers of these models, which get their values back.
        """
        exported = self._read(Path(path))
        results = [self._compare(exported, step, *model) for model in self._models_of(exported)]
        if not results:
            return None
        return {"path": Path(path).name} | min(results, key=lambda result: result["error"])

    def _compare(self, exported: Values, step: int, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        inner = unwrap_module(module)
        own, names = _match(inner, exported)
        shapes = {name: (list(exported[name].shape), list(own[target].shape)) for name, target in names.items()}
        loaded = {names[name]: exported[name] for name, (shape, expected) in shapes.items() if shape == expected}
        snapshots = self._evaluated.get(id(inner), [])
        references = [values for _, values in reversed(snapshots)]
        if not snapshots or snapshots[-1][0] != step:
            references.insert(0, _clone(own))
        with self._borrowed(inner, own):
            _fill(own, self._initial[id(inner)])
            _fill(own, loaded)
            outputs = _run(module, args, kwargs)
            errors = []
            for values in references:
                # The dtype of the file is checked elsewhere.
                _fill(own, {name: value.to(loaded[name].dtype) if name in loaded else value for name, value in values.items()})
                errors.append(_relative(_run(module, args, kwargs), outputs))
        needed = {*parameters_by_fqn(inner)[0], *buffers_by_fqn(inner, persistent_only=True)}
        differs = (
            f"{name} has the shape {shape} instead of {expected}"
            for name, (shape, expected) in shapes.items()
            if shape != expected
        )
        return {"error": min(errors), "missing": sorted(needed - set(loaded)), "shapes": list(differs)}

    def _read(self, path: Path) -> Values:
        shard = _SHARD.search(path.name)
        # torch.save writes zip files, whatever their name, and wrote other files before.
        if zipfile.is_zipfile(path) or path.suffix in (".pt", ".pth", ".bin"):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}
        tensors = safetensors.torch.load_file(path)
        if shard is None:
            return tensors
        whole = self._shards.setdefault(path.parent, {})
        whole.update(tensors)
        return whole if shard[1] == shard[2] else {}

    def _models_of(self, exported: Values) -> list[tuple[nn.Module, Any, Any]]:
        """Return the models that have the most tensors of a file by name and shape, else by name alone, with inputs."""
        most = (0, 0)
        models: list[tuple[nn.Module, Any, Any]] = []
        for module, args, kwargs in self._held.values():
            inner = unwrap_module(module)
            own, names = _match(inner, exported)
            if any(tensor.is_meta for tensor in own.values()):
                continue
            count = sum(exported[name].shape == own[target].shape for name, target in names.items()), len(names)
            if count > most:
                most, models = count, []
            if count == most > (0, 0):
                models.append((module, args, kwargs))
        return models

    @contextmanager
    def _borrowed(self, model: nn.Module, own: Values) -> Iterator[None]:
        """Restore values, modes and random numbers of a model at the end. Sets evaluation mode."""
        before, modes = _clone(own), {module: module.training for module in model.modules()}
        random = torch.get_rng_state()
        model.eval()
        self.running = True
        try:
            yield
        finally:
            self.running = False
            reshard(model)
            _fill(own, before)
            for module, mode in modes.items():
                module.training = mode
            torch.set_rng_state(random)


def _match(model: nn.Module, exported: Values) -> tuple[Values, dict[str, str]]:
    """Return the tensors of a model, and by name in a file the model's name of the tensor. A tied tensor has one name."""
    own, aliases = _tensors(model), parameters_by_fqn(model)[1]
    names = {name: matching_name(name, [*own, *aliases]) for name in exported}
    return own, {name: aliases.get(target, target) for name, target in names.items() if target is not None}


def reshard(model: nn.Module) -> None:
    """Free unsharded parameters, which are other objects than those of the optimizer. Mutates: FSDP2's modules."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _tensors(model: nn.Module) -> Values:
    """Return the local tensors of all parameters and buffers, which on one rank are whole. Mutates: unsharded parameters."""
    reshard(model)
    named = {**parameters_by_fqn(model)[0], **buffers_by_fqn(model)}
    return {name: to_local(tensor.detach()) for name, tensor in named.items()}


def _clone(values: Values) -> Values:
    return {name: value.clone() for name, value in values.items()}


def _fill(own: Values, values: Values) -> None:
    with torch.no_grad():
        for name, value in values.items():
            # A buffer that the model computes on demand may have grown.
            if own[name].shape == value.shape:
                own[name].copy_(value)


def _run(module: nn.Module, args: Any, kwargs: Any) -> Tensor:
    reshard(module)
    with torch.no_grad():
        output = module(*args, **kwargs)
    tensors = [tensor for tensor in list_tensors([output]) if tensor.is_floating_point()]
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def _relative(reference: Tensor, other: Tensor) -> float:
    if reference.shape != other.shape:
        return 1.0
    norm = float(torch.linalg.vector_norm(reference))
    return float(torch.linalg.vector_norm(reference - other)) / norm if norm else float(other.any())
