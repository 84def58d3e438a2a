"""The first lines that people type from other libraries: each gets an answer of one line with the right code."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt
import public
from dtrain.errors import ConfigError
from dtrain.lazy_imports import FOREIGN_ARGUMENTS, FOREIGN_NAMES, FOREIGN_VALUES

DATA = torch.arange(8.0)
METRIC = dt.typing.Metric(torch.tensor(6.0), torch.tensor(2.0))
LOSS = dt.mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)


def init(**options: object) -> object:
    model = nn.Linear(1, 1)
    return dt.compose_step(LOSS).init(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def shard(**options: object) -> object:
    with dt.init_dist(device="cpu"):
        return dt.shard_model(nn.Linear(1, 1), dt.build_mesh(), **options)


def classify(*transforms: dt.Transform) -> Callable[[], object]:
    """A step of a classifier whose loss takes class indices."""

    def call() -> object:
        model = nn.Linear(4, 3)
        step = dt.compose_step(lambda model, batch: dt.cross_entropy(model(batch["x"]), batch["y"]), list(transforms))
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return step(state, {"x": torch.randn(6, 4), "y": torch.tensor([0, 1, 2, 0, 1, 2])})

    return call


STRATEGIES = "shard_model: strategy must be 'full_shard', 'shard_grad_op', 'hybrid_shard', 'replicate' or 'no_shard', got "
SAMPLES = "Use global_batch_size, the samples of a step over all ranks."
PROBABILITIES = "cross_entropy: targets must be class indices (int64), got probabilities [6, 3], as mixup, cutmix and "

LINES: dict[str, tuple[Callable[[], object], str]] = {
    "load_sharded('ckpt', state, strict=False)": (
        lambda: dt.load_sharded("ckpt", init(), strict=False),
        "load_sharded: has no argument strict. Use ignore=['head.**'], the names to leave out.",
    ),
    "load_sharded('ckpt', state, cast=True)": (
        lambda: dt.load_sharded("ckpt", init(), cast=True),
        "load_sharded: has no argument cast. Use allow_cast=True.",
    ),
    "Checkpointer('ckpt', keep=3)": (
        lambda: dt.Checkpointer("ckpt", keep=3),
        "Checkpointer: has no argument keep. Use keep_last.",
    ),
    "checkpoints.save(state, what='weights')": (
        lambda: dt.Checkpointer("ckpt").save(init(), what="weights"),
        "save: has no argument what. Use scope='weights'.",
    ),
    "checkpoints.load(state, strict=False)": (
        lambda: dt.Checkpointer("ckpt").load(init(), strict=False),
        "load: has no argument strict. Use ignore=['head.**'], the names to leave out.",
    ),
    "load_weights_(model, 'w', missing=[])": (
        lambda: dt.load_weights_(nn.Linear(1, 1), "w", missing=[]),
        "load_weights_: has no argument missing. Use ignore=['head.**'], the names that keep their values.",
    ),
    "spawn(len, [], nproc=2)": (
        lambda: dt.spawn(len, [], nproc=2),
        "spawn: has no argument nproc, needs world_size. Use world_size, the number of ranks. Pass world_size=.",
    ),
    "evaluate(model, loader)": (
        lambda: dt.evaluate(nn.Linear(1, 1), DATA),
        "evaluate: needs loss_fn. Pass loss_fn=.",
    ),
    "mean_loss(fn)": (lambda: dt.mean_loss(len), "mean_loss: needs weight. Pass weight=."),
    "batch_spec(weight_fn=len)": (
        lambda: dt.batch_spec(weight_fn=len),
        "batch_spec: has no argument weight_fn. Use weight, a function of the batch.",
    ),
    "save_sharded('ckpt', state, loader=loader)": (
        lambda: dt.save_sharded("ckpt", init(), loader=DATA),
        "save_sharded: has no argument loader. Give it to the state: step.init(model, optimizer, loader=loader).",
    ),
    "build_loader(ds, batch_size=32)": (
        lambda: dt.build_loader(DATA, batch_size=32),
        "build_loader: has no argument batch_size, needs global_batch_size and seed. " + SAMPLES,
    ),
    "build_loader(ds, batch_size=32, shuffle=True, drop_last=True)": (
        lambda: dt.build_loader(DATA, batch_size=32, shuffle=True, drop_last=True, seed=0),
        "build_loader: has no argument batch_size, has no argument drop_last, needs global_batch_size. "
        + SAMPLES
        + " Use last_batch='drop'.",
    ),
    "build_loader(ds, global_batch_size=4)": (
        lambda: dt.build_loader(DATA, global_batch_size=4),
        "build_loader: needs seed. Pass seed=.",
    ),
    "build_loader(ds, 4)": (
        lambda: dt.build_loader(DATA, 4, seed=0),
        "build_loader: takes only dataset without a name, needs global_batch_size. Name the others, for example mesh=. "
        "Pass global_batch_size=.",
    ),
    "build_loader(ds, sampler=...)": (
        lambda: dt.build_loader(DATA, global_batch_size=4, seed=0, sampler=None),
        "build_loader: has no argument sampler. Leave it out, because the loader shuffles by seed and divides",
    ),
    "build_loader(ds, num_worker=2)": (
        lambda: dt.build_loader(DATA, global_batch_size=4, seed=0, num_worker=2),
        "build_loader: has no argument num_worker. Use num_workers.",
    ),
    "shard_model(strategy='fsdp')": (lambda: shard(strategy="fsdp"), STRATEGIES + "'fsdp'. Pass strategy='full_shard'."),
    "shard_model(strategy='ddp')": (lambda: shard(strategy="ddp"), STRATEGIES + "'ddp'. Pass strategy='replicate'."),
    "shard_model(strategy='zero3')": (lambda: shard(strategy="zero3"), STRATEGIES + "'zero3'. Pass strategy='full_shard'."),
    "shard_model(strategy='zero2')": (lambda: shard(strategy="zero2"), STRATEGIES + "'zero2'. Pass strategy='shard_grad_op'."),
    "shard_model(strategy='fsdp2')": (lambda: shard(strategy="fsdp2"), STRATEGIES + "'fsdp2'. Pass strategy='full_shard'."),
    "shard_model(strategy='hsdp')": (lambda: shard(strategy="hsdp"), STRATEGIES + "'hsdp'. Pass strategy='hybrid_shard'."),
    "shard_model(strategy='FULL_SHARD')": (
        lambda: shard(strategy="FULL_SHARD"),
        STRATEGIES + "'FULL_SHARD'. Pass strategy='full_shard'.",
    ),
    "shard_model(sharding_strategy=...)": (
        lambda: shard(sharding_strategy="FULL_SHARD"),
        "shard_model: has no argument sharding_strategy. Use strategy='full_shard'.",
    ),
    "shard_model(methods=...)": (
        lambda: shard(methods=["encode"]),
        "shard_model: has no argument methods. Use forward_methods.",
    ),
    "compose_step(loss_fn, gradient_accumulation_steps=4)": (
        lambda: dt.compose_step(LOSS, gradient_accumulation_steps=4),
        "compose_step: has no argument gradient_accumulation_steps. Use microbatch_size, the samples of one forward, or "
        "dt.auto_microbatch() as the last transform.",
    ),
    "compose_step(loss_fn, optimizer=optimizer)": (
        lambda: dt.compose_step(LOSS, optimizer=None),
        "compose_step: has no argument optimizer. Give it to the state: step.init(model, optimizer).",
    ),
    "step.init(model, optimizer, scheduler=...)": (
        lambda: init(scheduler=None),
        "init: has no argument scheduler. Give it to the step: dt.compose_step(loss_fn, [dt.transforms.scale_lr(schedule)]).",
    ),
    "step.init(model)": (
        lambda: dt.compose_step(LOSS).init(nn.Linear(1, 1)),
        "init: needs optimizer. Pass optimizer=.",
    ),
    "save_sharded('ckpt', model=model)": (
        lambda: dt.save_sharded("ckpt", model=nn.Linear(1, 1)),
        "save_sharded: has no argument model, needs state. Leave it out, because the state holds model, optimizer and step. "
        "Pass state=.",
    ),
    "init_dist(timeout=30)": (lambda: dt.init_dist(timeout=30), "init_dist: has no argument timeout. Use timeout_s."),
    "Duration '3 epochs'": (
        lambda: dt.schedules.Duration.parse("3 epochs"),
        "duration: the unit must be one of ep, ba, sp, tok, sec, dur, got '3 epochs'. Write '3ep'.",
    ),
    "Duration '100 steps'": (lambda: dt.schedules.Duration.parse("100 steps"), "got '100 steps'. Write '100ba'."),
    "Duration '1 epoch'": (lambda: dt.schedules.Duration.parse("1 epoch"), "got '1 epoch'. Write '1ep'."),
    "Duration '3epochs'": (lambda: dt.schedules.Duration.parse("3epochs"), "got '3epochs'. Write '3ep'."),
    "Duration '2 Batches'": (lambda: dt.schedules.Duration.parse("2 Batches"), "got '2 Batches'. Write '2ba'."),
    "Duration '10 minutes'": (lambda: dt.schedules.Duration.parse("10 minutes"), "got '10 minutes'. Write '10m'."),
    "Duration '1.5 epochs'": (lambda: dt.schedules.Duration.parse("1.5 epochs"), "got '1.5 epochs'. Write '1ep'."),
    "dt.checkpoint.LoadResult": (
        lambda: dt.checkpoint.LoadResult,
        "Use state.restored of state = dt.load_sharded('ckpt', state).",
    ),
    "dt.metrics": (lambda: dt.metrics, "Use dt.reduce_metrics(metrics)['loss']."),
    "dt.log": (lambda: dt.log, "Use dt.open_run('runs') and dt.loggers."),
    "dt.chain": (lambda: dt.chain, "List the transforms, the first one outermost: dt.compose_step(loss_fn, ["),
    "dt.epochs": (lambda: dt.epochs, "Use `for batch in loader.until('3ep'):`."),
    "dt.progress_line": (lambda: dt.progress_line, "Use dt.loggers.progress_bar(600)."),
    "evaluate(state, loader, loss_fn)": (
        lambda: dt.evaluate(init(), [DATA], LOSS),
        "evaluate: model must be a torch.nn.Module, got TrainState. Pass state.model.",
    ),
    "reduce_metrics(metrics['loss'])": (
        lambda: dt.reduce_metrics(METRIC),
        "reduce_metrics: metrics must be the metrics of a step by name, got Metric. Pass all of them, and take",
    ),
    "metrics['loss'] + 1": (
        lambda: METRIC + 1,
        "metrics: + needs a number, got the sum and the weight of one rank. Write dt.reduce_metrics(",
    ),
    "1 + metrics['loss']": (
        lambda: 1 + METRIC,
        "metrics: + needs a number, got the sum and the weight of one rank. Write dt.reduce_metrics(",
    ),
    "dt.init_distributed()": (lambda: dt.init_distributed, "Open the process groups with `with dt.init_dist() as dist:`."),
    "dt.prepare(model)": (lambda: dt.prepare, "Use model = dt.shard_model(model, dt.build_mesh()), then dt.compose_step("),
    "dt.Trainer(model)": (
        lambda: dt.Trainer,
        "module 'dtrain' has no attribute 'Trainer'. Write the loop yourself: dt.compose",
    ),
    "dt.Accelerator()": (lambda: dt.Accelerator, "Use model = dt.shard_model(model, dt.build_mesh()), then dt.compose_step("),
    "dt.fsdp(model)": (lambda: dt.fsdp, "Use dt.shard_model(model, dt.build_mesh(), strategy='full_shard')."),
    "dt.DDP(model)": (lambda: dt.DDP, "Use dt.shard_model(model, dt.build_mesh(), strategy='replicate')."),
    "dt.save_checkpoint('ckpt', state)": (lambda: dt.save_checkpoint, "Use dt.save_sharded('ckpt', state)."),
    "dt.load_checkpoint('ckpt', state)": (lambda: dt.load_checkpoint, "Use dt.load_sharded('ckpt', state, missing_ok=True)."),
    "dt.DataLoader(ds)": (lambda: dt.DataLoader, "Use dt.build_loader(dataset, global_batch_size=32, seed=0, mesh=mesh)."),
    "dt.clip_by_norm(1.0)": (lambda: dt.clip_by_norm, "Use dt.transforms.clip_by_norm."),
    "dt.ema(0.999)": (lambda: dt.ema, "Use dt.transforms.ema."),
    "dt.ConfigError": (lambda: dt.ConfigError, "Use dt.errors.ConfigError."),
    "dt.Batch": (lambda: dt.Batch, "Use dt.typing.Batch."),
    "dt.cosine(1.0)": (lambda: dt.cosine, "has no attribute 'cosine'. Use dt.schedules.cosine."),
    "dt.AdamW(params)": (lambda: dt.AdamW, "such as torch.optim.AdamW(model.parameters())."),
    "dt.seed_everything(0)": (lambda: dt.seed_everything, "Use dt.seed_all(seed)."),
    "dt.shard_modle(model)": (lambda: dt.shard_modle, "has no attribute 'shard_modle'. Use dt.shard_model."),
    "dt.losssum": (lambda: dt.losssum, "Use dt.LossSum."),
    "dt.transforms.clip_norm(1.0)": (lambda: dt.transforms.clip_norm, "Use dt.transforms.clip_by_norm."),
    "dt.transforms.cosine(1.0)": (lambda: dt.transforms.cosine, "Use dt.schedules.cosine."),
    "torch's clip_grad_norm_ as a transform": (
        lambda: dt.compose_step(LOSS, [nn.utils.clip_grad_norm_]),
        "compose_step: needs a Transform, got the function clip_grad_norm_. Use compose_step(loss_fn, "
        "[dt.transforms.clip_by_norm(1.0)]).",
    ),
    "a function as a transform": (
        lambda: dt.compose_step(LOSS, [F.relu]),
        "compose_step: needs a Transform, got the function relu. Make one with dt.Transform(name='relu', update=...), or take",
    ),
    "auto_microbatch without a call": (
        lambda: dt.compose_step(LOSS, [dt.auto_microbatch]),
        "compose_step: got the function auto_microbatch instead of its result. Use compose_step(loss_fn, [dt.auto_microbatch(",
    ),
    "mixup with indices": (classify(dt.transforms.mixup(0.2, num_classes=3)), PROBABILITIES + "label_smoothing make them. Use"),
    "cutmix with indices": (
        classify(dt.transforms.on_batch(lambda b, g: {**b, "y": F.one_hot(b["y"], 3).float()}, name="cutmix")),
        "Use dt.soft_cross_entropy.",
    ),
    "label_smoothing with indices": (
        classify(dt.transforms.label_smoothing(0.1, num_classes=3)),
        PROBABILITIES + "label_smoothing make them. Use dt.soft_cross_entropy.",
    ),
    "logits with the classes second": (
        lambda: dt.cross_entropy(torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)),
        "got (2, 3, 4, 4) and (2, 4, 4). Move the classes last: logits.movedim(1, -1).",
    ),
}


@pytest.mark.parametrize("typed", LINES)
def test_first_line_gets_one_line_that_helps(typed: str) -> None:
    call, expected = LINES[typed]
    with pytest.raises((ConfigError, TypeError, AttributeError)) as caught:
        call()
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message


# The records that a user makes.
RECORDS = (
    "Precision Transform data.BlockShuffle data.ElasticSampler optim.ParamGroup planning.Accelerator planning.Network "
    "planning.ParallelismConfig planning.Workload schedules.RunLength shard.CommConfig"
)


@pytest.mark.parametrize("path", RECORDS.split())
def test_record_without_such_an_argument_names_its_own(path: str) -> None:
    record = public.value(f"dtrain.{path}")
    with pytest.raises(TypeError, match=rf"^{record.__name__}: has no argument colour\b.*\. The arguments are "):
        record(colour=1)


@pytest.mark.parametrize("package", public.DOORS)
def test_near_miss_of_every_public_name_names_it(package: str) -> None:
    """A letter too few, or another case, at the door that has the name."""
    door = public.door(package)
    if not hasattr(door, "__path__"):
        return
    taken = {word.lower() for words in FOREIGN_NAMES.values() for word in words.split()}
    taken |= {path.rpartition(".")[2] for path in public.all_names()}
    missed = []
    for name in public.names(package):
        for typed in {name[:-1], name.upper(), name.replace("_", "")}:
            if len(typed) < 4 or typed.startswith("_") or typed in taken or typed.lower() in taken:
                continue
            with pytest.raises(AttributeError) as caught:
                getattr(door, typed)
            advised = re.findall(r"[\w.]+\.(\w+)(?=\.$| or )", str(caught.value))
            # A name of another door may be nearer, such as a class beside a function.
            if name not in advised and typed.replace("_", "").lower() not in [n.replace("_", "").lower() for n in advised]:
                missed.append((typed, str(caught.value)))
    assert missed == []


def test_name_like_no_other_gets_no_advice() -> None:
    with pytest.raises(AttributeError, match=r"^module 'dtrain' has no attribute 'qqxyzzy'$") as caught:
        dt.qqxyzzy  # noqa: B018
    assert caught.value.name == "qqxyzzy"
    assert not hasattr(dt, "Trainer")
    assert getattr(dt, "Trainer", 3) == 3


def test_advice_names_only_what_exists() -> None:
    lines = [*FOREIGN_NAMES, *(line for table in FOREIGN_ARGUMENTS.values() for line in table)]
    for path in {path for line in lines for path in re.findall(r"\bdt((?:\.\w+)+)", line)}:
        value: object = dt
        for name in path[1:].split("."):
            value = getattr(value, name)
    full_names = {full.rpartition(".")[2]: full for full in sorted(public.all_names(), reverse=True)}
    parameters = {name: public.value(full_names[name]) for name in FOREIGN_ARGUMENTS if name != "init"}
    parameters["init"] = dt.step.Step.init
    parameters |= {name: value.__init__ for name, value in parameters.items() if isinstance(value, type)}
    for function, table in FOREIGN_ARGUMENTS.items():
        names = set(parameters[function].__wrapped__.__kwdefaults__ or ()) | set(parameters[function].__annotations__)
        assert names.isdisjoint(word for words in table.values() for word in words.split()), function
    assert list(FOREIGN_VALUES) == ["shard_model strategy"]
