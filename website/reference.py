"""The Python reference: one page for each topic. Docstrings are read without importing the package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from dtrain.lazy_imports import public_doors


@dataclass(frozen=True, slots=True)
class Topic:
    """One page: all public names that the modules below ``modules`` define, whichever package exports them."""

    file: str
    title: str
    about: str
    modules: str


TOPICS = (
    Topic("processes", "Processes and meshes", "Start ranks, join them, arrange them, seed them. See [launch](../launch.md), "
          "[several nodes](../nodes.md) and [determinism](../determinism.md).",
          "dist launch.spawn_function launch.heartbeats"),
    Topic("sharding", "Model and sharding", "`shard_model` (FSDP, HSDP, DDP), precision, compilation, activation "
          "checkpointing, offload. See [sharding](../sharding.md) and [precision](../precision.md).",
          "shard"),
    Topic("loader", "Loader", "Batches of a run that resumes, in place of a DataLoader. See [data](../data.md).",
          "data.build_loader data.loader data.batch data.position batch"),
    Topic("losses", "Losses and metrics", "A loss is a sum and its weight. See [concepts](../concepts.md#losssum).",
          "losses metrics monitors.reduce_metrics"),
    Topic("step", "Step", "Compose a step, accumulate gradients, evaluate. See [how pieces compose](../seams.md) "
          "and [microbatches](../microbatch.md).",
          "step transform"),
    Topic("state", "State and time", "What a run carries from step to step. See [time](../time.md).",
          "state clock durations spans"),
    Topic("checkpoints", "Checkpoints", "Save, load, list, verify, prune, convert. See [checkpoints](../checkpoints.md).",
          "checkpoint"),
    Topic("runs", "Run folders", "The folder that reports read. See [observing](../observing.md).", "run"),
    Topic("collectives", "Collectives", "Exchange values between ranks. See [collectives](../collectives.md).",
          "dist.collectives dist.differentiable dist.ragged dist.collectives"),
    Topic("random", "Random numbers and determinism", "Seeds, generators, TF32. See [determinism](../determinism.md).",
          "dist.rng"),
    Topic("experts", "Mixtures of experts", "Routers, experts, losses of routers. See [experts](../experts.md).", "experts"),
    Topic("optimizers", "Optimizers", "Optimizers and parameter groups. See [optimizers](../optimizers.md).", "optim"),
    Topic("schedules", "Schedules", "Functions of the step, such as a learning rate. See [schedules](../schedules.md).",
          "schedules"),
    Topic("schedules-composer", "Composer's schedules", "`dt.schedules.composer`. See [schedules](../schedules.md).",
          "schedules.composer"),
    Topic("transforms", "Transforms of a step", "The type of a transform, and how to combine transforms. "
          "See [write your own pieces](../own.md).",
          "transforms combinators schedules.hyperparameter"),
    Topic("transforms-gradients", "Transforms of gradients", "Clipping, SAM, noise. See [recipes](../recipes/index.md).",
          "transforms.gradients dtensor"),
    Topic("transforms-weights", "Transforms of weights", "EMA, SWA, freezing, local SGD. See [recipes](../recipes/index.md).",
          "transforms.weights"),
    Topic("transforms-batches", "Transforms of batches", "Labels, lengths, samples. See [recipes](../recipes/index.md).",
          "transforms.batches"),
    Topic("transforms-images", "Transforms of images", "Mixup, cutout and others. See [recipes](../recipes/index.md).",
          " ".join(f"transforms.batches.{name}" for name in (
              "augmix", "colout", "cutmix", "cutout", "mixup", "progressive_resizing", "rand_augment"))),
    Topic("surgery", "Model surgery", "Edits of a model before sharding. See [recipes](../recipes/index.md).", "surgery"),
    Topic("surgery-layers", "Surgery of layers", "See [recipes](../recipes/index.md).", "surgery.layers surgery.dropout"),
    Topic("datasets", "Datasets and packing", "Datasets, orders, mixtures, packing. See [data](../data.md) "
          "and [packing](../packing.md).", "data"),
    Topic("streaming", "Streaming shards", "Read and write shards. See [data](../data.md).", "data.stream"),
    Topic("memory", "Memory", "Out of memory, snapshots, microbatch search. See [memory](../memory.md).",
          "memory step.auto_microbatch step.microbatch_search shard.activations"),
    Topic("planning", "Planning", "Estimates without the machine. See [planning](../planning.md).", "planning"),
    Topic("monitors", "Monitors", "Measurements of a run. See [observing](../observing.md).", "monitors"),
    Topic("loggers", "Loggers", "Destinations of metrics. See [observing](../observing.md).", "loggers run.run_dir"),
    Topic("profiling", "Profiling", "Traces, snapshots, hangs. See [profiling](../profiling.md) and [hangs](../hangs.md).",
          "profiling report launch.hang_report"),
    Topic("testing", "Testing", "Tests of distributed code. See [testing](../testing.md).", "testing prove"),
    Topic("errors", "Errors", "The error tree. See [errors](../errors.md).", "errors"),
    Topic("types", "Types", "Names for batches, losses, metrics and call shapes.", "typing"),
)  # fmt: skip
"""Pages in the order of a loop, then of what surrounds it."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the reference with its entries, which are full names."""

    file: str
    title: str
    about: str
    names: tuple[str, ...]


def _topic_of(module: str) -> Topic | None:
    """Return the topic with the longest prefix of a module."""
    inside = module.removeprefix("dtrain.")
    found = [
        (len(prefix), topic) for topic in TOPICS for prefix in topic.modules.split() if f"{inside}.".startswith(f"{prefix}.")
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


@cache
def all_pages() -> tuple[Page, ...]:
    """Return the pages that have names, in order; a module without a topic goes to a page of its door."""
    entries: dict[str, list[tuple[str, str]]] = {}
    kinds = [(topic.file, topic.title, topic.about) for topic in TOPICS]
    for door in doors():
        rest = f"more-{door.replace('.', '-')}"
        kinds.append((rest, f"More of {door}", ""))
        for name, module in exported(door).items():
            topic = _topic_of(module)
            entries.setdefault(topic.file if topic else rest, []).append((module, f"{door}.{name}"))
    return tuple(Page(file, title, about, tuple(_in_order(entries[file]))) for file, title, about in kinds if file in entries)


def _in_order(entries: list[tuple[str, str]]) -> list[str]:
    """Return the names of a page: those of ``import dtrain`` first, then by module."""
    return [name for _, name in sorted(entries, key=lambda entry: (entry[1].count(".") > 1, *entry))]


def doors() -> tuple[str, ...]:
    """Return the packages with public names: ``dtrain``, and the sub-packages that a package exports."""
    return tuple(public_doors())


def exported(package: str) -> dict[str, str]:
    """Map the public names of a package or module, sub-packages left out, to the modules that define them."""
    found = public_doors()[package]
    return {name: module for name, module in sorted(found.items()) if f"{module}.{name}" not in public_doors()}


HEAD = """# Python reference

Every public name of `import dtrain as dt`, one page per topic, in the order of a loop. [Stability](../stability.md) says what
may change.

An entry states the contract of a function:

- *Mutates*: what is not the same afterwards. Without this line, nothing that existed before changes.
- *Collective*: what the function sends. Every rank must call it then, alike. Without this line, nothing.
- *Host sync*: where the host waits for the device. Without this line, nowhere.
- *Raises*: errors of its own. `ConfigError` is a mistake in the call, the same on every rank.

A name that ends in `_` writes into tensors that it is given. For a function that makes a transform, the contract is that of the
step with the transform.

Examples use `import torch, dtrain as dt` and `from torch import nn`, and the `mesh`, `state` and `batch` of
[a loop](../loop.md).
"""


def pages() -> Iterator[tuple[str, str]]:
    """Yield file and Markdown of each page of the reference."""
    yield "reference/index.md", index()
    for page in all_pages():
        entries = "\n\n".join(f"::: {name}" for name in page.names)
        yield f"reference/{page.file}.md", f"# {page.title}\n\n{page.about}\n\n{entries}\n"


@cache
def places() -> dict[str, str]:
    """Map each public name to its place in the site."""
    return {name: f"reference/{page.file}.md#{name}" for page in all_pages() for name in page.names}


def index() -> str:
    """Return the page that lists all names by page."""
    parts = [HEAD]
    for page in all_pages():
        listed = ", ".join(f"[`{_short(name)}`]({page.file}.md#{name})" for name in page.names)
        parts.append(f"## [{page.title}]({page.file}.md)\n\n{listed}\n")
    return "\n".join(parts)


def _short(name: str) -> str:
    """Return a name as a loop writes it, without ``dt.``."""
    return name.removeprefix("dtrain.")
