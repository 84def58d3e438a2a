"""First contact: mistakes that newcomers make with states and steps, each answered by one line with the remedy."""

import re
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dtrain as dt
from dtrain.errors import ConfigError

BATCH = {"x": torch.arange(12.0).reshape(4, 3), "labels": torch.zeros(4, dtype=torch.int64)}
LOSS = dt.mean_loss(lambda model, batch: model(batch["x"]).square().mean(), weight=lambda batch: len(batch["x"]))
STEP = dt.compose_step(LOSS)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(body=nn.Linear(3, 3), head=nn.Linear(3, 2)))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def begun() -> dt.TrainState:
    model = net()
    return STEP.init(model, sgd(model))


def initialised(*given: Callable[[nn.Module], object], **options: object) -> Callable[[], object]:
    """Return a call of ``init`` with the result of each function in ``given`` for one model."""

    def call() -> object:
        model = net()
        return STEP.init(*(make(model) for make in given), **options)

    return call


def lost(value: Callable[[Tensor], object], wrap: Callable = lambda fn: fn) -> Callable[[], object]:
    """A step whose loss function returns ``value`` of a mean."""

    def call() -> object:
        model = net()
        step = dt.compose_step(wrap(lambda model, batch: value(model(batch["x"]).square().mean())))
        return step(step.init(model, sgd(model)), BATCH)

    return call


class ModelOutput(OrderedDict):
    """As transformers' models return: a mapping whose items are attributes."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def same(model: nn.Module) -> nn.Module:
    return model


def over_mean(fn: Callable) -> Callable:
    return dt.mean_loss(fn, weight=lambda batch: len(batch["x"]))


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "batch before state": (
        lambda: STEP(BATCH, begun()),
        "step: the arguments must be (state, batch), got (dict, TrainState). Swap them: `state, metrics = step(state, batch)`.",
    ),
    "module instead of a state": (
        lambda: STEP(net(), BATCH),
        "step: the first argument must be a TrainState, got the module Sequential. Make a state first: "
        "`state = step.init(model, optimizer)`, then `state, metrics = step(state, batch)`",
    ),
    "what a step returns instead of a state": (
        lambda: STEP(STEP(begun(), BATCH), BATCH),
        "step: the first argument must be a TrainState, got tuple. Use `state, metrics = step(state, batch)`.",
    ),
    "module in a step by hand": (
        lambda: dt.microbatch_step(net(), BATCH, loss_fn=LOSS),
        "microbatch_step: the first argument must be a TrainState, got the module Sequential. Make a state first",
    ),
    "module in an update by hand": (
        lambda: dt.apply_gradients(net(), {}),
        "apply_gradients: the first argument must be a TrainState, got the module Sequential. Make a state first",
    ),
    "optimizer before model": (
        initialised(sgd, same),
        "init: got the optimizer before the model. Swap them: `state = step.init(model, optimizer)`.",
    ),
    "list of optimizers": (
        initialised(same, lambda model: [sgd(half) for half in model]),
        "init: optimizer must be a torch.optim.Optimizer or a dict of optimizers, got a list of 2. Name the optimizers: "
        "step.init(model, {'matrices': muon, 'rest': adamw}).",
    ),
    "class of an optimizer": (
        initialised(same, lambda model: torch.optim.AdamW),
        "init: optimizer must be a torch.optim.Optimizer, got the class AdamW. Use step.init(model, torch.optim.AdamW(",
    ),
    "parameters for an optimizer": (
        initialised(same, lambda model: model.parameters()),
        "init: optimizer must be a torch.optim.Optimizer, got a generator. Use step.init(model, torch.optim.AdamW(",
    ),
    "scheduler for an optimizer": (
        initialised(same, lambda model: torch.optim.lr_scheduler.ConstantLR(sgd(model))),
        "init: optimizer must be a torch.optim.Optimizer, got the scheduler ConstantLR. Give its optimizer, and the schedule "
        "to the step: dt.compose_step(loss_fn, [dt.transforms.scale_lr(...)]).",
    ),
    "class of a model": (
        initialised(lambda model: nn.Linear, sgd),
        "init: model must be an nn.Module, got the class Linear. Use `state = step.init(model, optimizer)`.",
    ),
    "optimizer of a part": (
        initialised(same, lambda model: sgd(model.head)),
        "init: SGD holds 2 of 4 trainable parameters, so these would never train: body.weight, body.bias. Add them, freeze "
        "them with requires_grad_(False), or pass missing_ok=True.",
    ),
    "plain mean": (
        lost(lambda mean: mean),
        "microbatch_step: loss_fn must return a LossSum, got Tensor []. For a mean, wrap loss_fn in dt.mean_loss(loss_fn, "
        'weight=lambda batch: len(batch["labels"])). For a sum, return dt.LossSum(total=loss, weight=count).',
    ),
    "detached mean": (
        lost(lambda mean: mean.detach()),
        "loss_fn must return a LossSum, got Tensor [] without a graph. Leave out .detach() and no_grad. For a mean,",
    ),
    "float": (
        lost(lambda mean: mean.item()),
        ", which has no graph. Return the tensor without .item(). For a mean, wrap loss_fn in dt.mean_loss(loss_fn,",
    ),
    "tuple": (
        lost(lambda mean: (mean, {"accuracy": 1.0})),
        "got tuple of 2. Return dt.LossSum(total=loss, weight=count, aux={'accuracy': (right, count)})",
    ),
    "no return": (
        lost(lambda mean: None),
        "loss_fn must return a LossSum, got None. End loss_fn with `return dt.LossSum(total=loss, weight=count)`",
    ),
    "output of transformers": (
        lost(lambda mean: ModelOutput(loss=mean, logits=mean)),
        "got ModelOutput. Use dt.transformers_loss as loss_fn, which counts the labels of model(**batch)",
    ),
    "dictionary of losses": (
        lost(lambda mean: {"loss": mean}),
        "loss_fn must return a LossSum, got dict. Return dt.LossSum(total=loss, weight=count). For a mean, wrap",
    ),
    "output of transformers in mean_loss": (
        lost(lambda mean: ModelOutput(loss=mean), over_mean),
        "mean_loss: the function must return one tensor, got ModelOutput. Return its loss, or use dt.transformers_loss.",
    ),
    "float in mean_loss": (
        lost(lambda mean: mean.item(), over_mean),
        "mean_loss: the function must return one tensor, got float. Return the mean loss, a tensor [].",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_common_mistake_raises_a_one_line_error(name):
    call, line = MISTAKES[name]
    with pytest.raises(ConfigError, match=re.escape(line)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_launched_rank_without_init_dist_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = (
        r"init: this process is one of 4 ranks \(WORLD_SIZE=4\), but init_dist is not open, so every rank would train alone. "
        r"Put the loop into `with dt.init_dist\(\) as info:`"
    )
    with pytest.raises(ConfigError, match=line):
        begun()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert begun().step == 0


def optimizer_before_shards() -> str:
    model = net()
    stale = sgd(model)
    model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=(nn.Linear,))
    with pytest.raises(
        ConfigError, match=r"shard_model, .* make new Parameter objects. Build the optimizer after them"
    ) as error:
        STEP.init(model, stale)
    return str(error.value)


def test_an_optimizer_built_before_sharding_is_refused(ranks):
    assert all("4 of 4 optimizer parameters are not in the model" in said for said in ranks(2).run(optimizer_before_shards))


# Parameters that an optimizer does not hold


def test_frozen_parameters_need_no_optimizer():
    model = net()
    model.body.requires_grad_(False)
    assert STEP.init(model, sgd(model.head)).step == 0


def test_tied_parameter_is_recognized_by_any_alias():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert STEP.init(model, sgd(model[1])).aliases == {"1.weight": "0.weight"}


def test_later_frozen_parameters_must_be_in_the_optimizer():
    model = net()
    step = dt.compose_step(LOSS, [dt.transforms.freeze("body.**", start=1)])
    with pytest.raises(ConfigError, match="these would never train: body"):
        step.init(model, sgd(model.head))
    assert step.init(model, sgd(model)).step == 0


def test_param_groups_and_muon_groups_cover_all_parameters():
    model = net()
    for optimizer in (
        torch.optim.AdamW(dt.optim.param_groups(model)),
        dt.optim.Muon(dt.optim.muon_groups(model, head="head.**")),
    ):
        assert STEP.init(model, optimizer).step == 0


def test_partial_optimizer_updates_only_its_own_parameters():
    model = net()
    state = STEP.init(model, sgd(model.head), missing_ok=True)
    before = {name: param.detach().clone() for name, param in state.params.items()}
    state, _ = STEP(state, BATCH)
    moved = [name for name, param in state.params.items() if not torch.equal(param, before[name])]
    assert moved == ["head.weight", "head.bias"]
    early = dt.step.optimizer_in_backward(LOSS, batch_spec=dt.batch_spec(weight=lambda batch: len(batch["x"])))
    state, _ = early(early.init(model, sgd(model.body), missing_ok=True), BATCH)
    assert torch.equal(model.head.weight, state.params["head.weight"])
    assert not torch.equal(model.body.weight, before["body.weight"])
