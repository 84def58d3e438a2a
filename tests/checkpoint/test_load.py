"""Options of a load: weights alone, names that only one side has, other dtypes, several states; and its messages."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import dtrain as dt
from checkpoint.states import Counter, Net, digest, plain_state, train, watching
from checkpoint.stored import compact, json_of, shards_of, sign
from dtrain.checkpoint.checkpoint_info import latest_checkpoint
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.rng import rng_state
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError, CorruptCheckpointError
from dtrain.state import TrainState, init_state

SHADOW = "ema"


def weights_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in state.params.items()} | {"seen": state.model.seen.clone()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Weights alone


def test_weights_load_keeps_optimizer_clock_and_generators(tmp_path):
    saved = train(plain_state(), 3)
    save_sharded(tmp_path, saved)
    state = train(plain_state(1), 1)
    optimizer = {name: dict(state.optimizer.state[p]) for name, p in state.params.items()}
    moments = {name: content["exp_avg"].clone() for name, content in optimizer.items()}
    lr, random = state.optimizer.param_groups[0]["lr"], rng_state()
    restored = load_sharded(tmp_path, state, scope="weights")
    assert equal(weights_of(restored), weights_of(saved))
    assert (restored.restored.step, restored.step, restored.seed) == (3, 1, 1)
    assert all(torch.equal(state.optimizer.state[p]["exp_avg"], moments[name]) for name, p in state.params.items())
    assert state.optimizer.param_groups[0]["lr"] == lr
    assert repr(rng_state()) == repr(random)
    assert restored._run_context.lineage.run_id is None, "it is a run of its own"
    with pytest.raises(RuntimeError, match="passed to load_sharded"):
        state._check_not_stale("here")


def begin(seed: int):
    torch.manual_seed(seed)
    model = Net()
    step = dt.compose_step(dt.mean_loss(lambda m, x: m(x).square().mean(), weight=len), [dt.transforms.ema(0.5)])
    return step, step.init(model, torch.optim.AdamW(model.parameters()), seed=seed)


def test_weights_load_reinitializes_transform_states(tmp_path):
    step, state = begin(0)
    state, _ = step(state, torch.ones(4, 5))
    save_sharded(tmp_path, state)
    saved = weights_of(state)
    _, other = begin(1)
    state = load_sharded(tmp_path, other, scope="weights")
    for name, average in state.transform_states[SHADOW]["params"].items():
        assert torch.equal(average, saved[name]), "not the average of random weights"


def test_weights_checkpoint_requires_what_weights(tmp_path):
    saved = train(plain_state(), 2)
    save_sharded(tmp_path, saved, scope="weights")
    state = plain_state(1)
    before = digest(state)
    with pytest.raises(CheckpointMismatchError, match=r"was saved with scope='weights'. Pass scope='weights' to load it"):
        load_sharded(tmp_path, state)
    assert digest(state) == before
    restored = load_sharded(tmp_path, state, scope="weights")
    assert equal(weights_of(restored), weights_of(saved))


def test_trainable_checkpoint_loads_without_frozen_parameters(tmp_path):
    def adapted(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = Net()
        model.first.requires_grad_(False)
        return init_state(model, torch.optim.AdamW(model.last.parameters()))

    saved, state = adapted(0), adapted(1)
    frozen = state.params["first.weight"].detach().clone()
    save_sharded(tmp_path, saved, scope="trainable")
    load_sharded(tmp_path, state, scope="weights")
    assert torch.equal(state.params["last.weight"], saved.params["last.weight"])
    assert torch.equal(state.params["first.weight"], frozen)


# Names and dtypes


class Headed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)


class Reheaded(Headed):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 5)


def state_of(kind: type[Net], seed: int, *, steps: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = kind()
    state = init_state(model, torch.optim.AdamW(model.parameters()), seed=seed)
    shadow = {name: p.detach().clone() for name, p in state.params.items()}
    state = replace(state, transform_states={"ema": {"shadow": shadow, "updates": 0}})
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        state.optimizer.step()
        state = state._next(clock=state.clock.tick(samples=1, tokens=0, seconds=0.0))
    return state


def test_ignored_names_of_only_one_side_are_skipped_and_reported(tmp_path):
    saved = state_of(Net, 0, steps=1)
    save_sharded(tmp_path, replace(saved, transform_states={**saved.transform_states, "gone": {"t": torch.ones(2)}}))
    state = replace(state := state_of(Headed, 1), transform_states={**state.transform_states, "new": {"count": 7}})
    head = [p.detach().clone() for p in state.model.head.parameters()]
    with pytest.raises(
        CheckpointMismatchError,
        match=r"\(1 unexpected, 3 missing\).*ignore=\[\"head.weight\", \"head.bias\", \"transforms/gone\", \"trans",
    ):
        load_sharded(tmp_path, state)
    now = load_sharded(tmp_path, state, ignore=["head.**", "transforms/gone", "transforms/new"])
    assert now.restored.ignored == ("head.bias", "head.weight", "transforms/gone", "transforms/new")
    assert torch.equal(now.params["first.weight"], saved.params["first.weight"])
    assert all(map(torch.equal, now.model.head.parameters(), head))
    assert torch.equal(
        now.transform_states["ema"]["shadow"]["first.bias"], saved.transform_states["ema"]["shadow"]["first.bias"]
    )
    assert torch.equal(now.transform_states["ema"]["shadow"]["head.bias"], head[1]), "the slice knows of the new parameter"
    assert now.transform_states["new"] == {"count": 7}
    assert "gone" not in now.transform_states
    assert now.params["head.weight"] not in now.optimizer.state
    assert torch.equal(
        now.optimizer.state[now.params["last.bias"]]["exp_avg"], saved.optimizer.state[saved.params["last.bias"]]["exp_avg"]
    )
    assert now.step == 1


def test_new_ema_starts_from_loaded_parameters(tmp_path):
    def begin(seed: int, *transforms: dt.Transform) -> tuple[dt.step.Step, dt.TrainState]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).sum(), weight=len), transforms)
        return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))

    step, state = begin(0, dt.transforms.scale_lr(1.0))
    save_sharded(tmp_path, step(state, torch.ones(1, 3))[0])
    restored = load_sharded(
        tmp_path, begin(1, dt.transforms.ema(0.5), dt.transforms.scale_lr(1.0))[1], ignore=["transforms/ema"]
    )
    assert restored.restored.ignored == ("transforms/ema",)
    for name, average in restored.transform_states["ema"]["params"].items():
        assert torch.equal(average, restored.params[name])


def test_ignored_parameters_that_were_removed_are_skipped(tmp_path):
    save_sharded(tmp_path, state_of(Headed, 0, steps=1))
    restored = load_sharded(tmp_path, state_of(Net, 1), ignore=["head.**"])
    assert restored.restored.ignored == ("head.bias", "head.weight")
    assert set(restored.transform_states["ema"]["shadow"]) == set(restored.params)
    assert len(restored.optimizer.state) == 4


@pytest.mark.parametrize("what", ["all", "weights"])
def test_ignored_names_keep_their_values(tmp_path, what):
    save_sharded(tmp_path, saved := state_of(Headed, 0, steps=1))
    state = state_of(Reheaded, 1, steps=1)
    with pytest.raises(CheckpointMismatchError, match=r"2 of another shape"):
        load_sharded(tmp_path, state, scope=what)
    head, average = state.model.head.weight.detach().clone(), state.transform_states["ema"]["shadow"]["head.weight"].clone()
    moment = state.optimizer.state[state.model.head.weight]["exp_avg"].clone()
    now = load_sharded(tmp_path, state, scope=what, ignore=["head.*"])
    assert torch.equal(now.model.head.weight, head)
    assert torch.equal(now.transform_states["ema"]["shadow"]["head.weight"], average)
    assert torch.equal(now.optimizer.state[now.model.head.weight]["exp_avg"], moment)
    assert torch.equal(now.params["first.weight"], saved.params["first.weight"])


def test_dtype_mismatch_requires_cast(tmp_path):
    save_sharded(tmp_path, saved := state_of(Net, 0, steps=1))
    torch.manual_seed(1)
    model = Net().to(torch.bfloat16)
    state = init_state(model, torch.optim.AdamW(model.parameters()))
    state = replace(
        state, transform_states={"ema": {"shadow": {n: p.detach().clone() for n, p in state.params.items()}, "updates": 0}}
    )
    with pytest.raises(
        CheckpointMismatchError, match=r"4 of another dtype\).*allow_cast=True to convert floating-point dtypes"
    ):
        load_sharded(tmp_path, state)
    now = load_sharded(tmp_path, state, allow_cast=True)
    for name, param in now.params.items():
        assert torch.equal(param, saved.params[name].bfloat16())
        content = now.optimizer.state[param]
        assert content["exp_avg"].dtype == torch.bfloat16, "as the optimizer would have made it"
        assert torch.equal(content["exp_avg"], saved.optimizer.state[saved.params[name]]["exp_avg"].bfloat16())
        assert content["step"].dtype == torch.float32
    for p in now.params.values():
        p.grad = torch.ones_like(p)
    now.optimizer.step()


def test_integers_are_not_cast(tmp_path):
    save_sharded(tmp_path, plain_state())
    state = plain_state(1)
    state.model.seen = state.model.seen.int()
    with pytest.raises(CheckpointMismatchError, match=r"buffers/seen: checkpoint I64 \[\], here I32 \[\]"):
        load_sharded(tmp_path, state, allow_cast=True)


def test_cast_restores_dtype_of_weights_saved_with_cast(tmp_path):
    save_sharded(tmp_path, saved := plain_state(), scope="weights", dtype=torch.bfloat16)
    state = plain_state(1)
    with pytest.raises(CheckpointMismatchError, match="of another dtype"):
        load_sharded(tmp_path, state, scope="weights")
    load_sharded(tmp_path, state, scope="weights", allow_cast=True)
    assert torch.equal(state.params["first.weight"], saved.params["first.weight"].bfloat16().float())


def test_mismatch_table_suggests_nearest_names(tmp_path):
    class Renamed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.final = self.last
            del self.last

    save_sharded(tmp_path, plain_state())
    model = Renamed()
    with pytest.raises(CheckpointMismatchError) as caught:
        load_sharded(tmp_path, init_state(model, torch.optim.AdamW(model.parameters())), scope="weights")
    text = str(caught.value)
    assert "params/last.weight: checkpoint F32 [2, 7], here nothing (nearest: params/final.weight)" in text
    assert "params/final.bias: checkpoint nothing, here F32 [2] (nearest: params/last.bias)" in text


# Several states


def pair(seed: int) -> dict[str, TrainState]:
    return {"generator": train(plain_state(seed), 1), "critic": train(plain_state(seed + 10, optimizer="sgd"), 2)}


def test_several_states_round_trip_by_name(tmp_path):
    saved = pair(0)
    before = {name: digest(state, rng=False) for name, state in saved.items()}
    save_sharded(tmp_path, saved, extra={"history": [1]})
    history: list[int] = []
    restored = load_sharded(tmp_path, pair(5), extra={"history": history})
    assert {name: digest(state, rng=False) for name, state in restored.items()} == before
    assert history == [1]
    assert (restored["generator"].step, restored["critic"].step) == (1, 2)


def test_several_states_load_in_any_order(tmp_path):
    save_sharded(tmp_path, pair(0))
    generator, critic = pair(5).items()
    assert load_sharded(tmp_path, dict([critic, generator]))["generator"].step == 1


def test_mismatch_in_one_state_changes_no_state(tmp_path):
    save_sharded(tmp_path, pair(0))
    states = pair(5)
    states["critic"] = plain_state(3)
    before = {name: digest(state) for name, state in states.items()}
    with pytest.raises(CheckpointMismatchError, match=r"step-00000001: critic does not fit"):
        load_sharded(tmp_path, states)
    assert {name: digest(state) for name, state in states.items()} == before


STATES = {
    "one for several": (pair, lambda: plain_state(), "holds the states generator, critic. Pass a dict of states"),
    "several for one": (lambda _: plain_state(), lambda: pair(1), "holds one state without a name"),
    "another name": (pair, lambda: {"generator": plain_state(), "critics": plain_state()}, "Leave out 'critics'"),
    "one left": (pair, lambda: {"generator": train(plain_state(), 1)}, "Pass the state 'critic', too"),
}


@pytest.mark.parametrize(("made", "given", "message"), STATES.values(), ids=STATES)
def test_different_state_names_are_refused(tmp_path, made, given, message):
    save_sharded(tmp_path, made(0))
    with pytest.raises(CheckpointMismatchError, match=message):
        load_sharded(tmp_path, given())


def test_weights_of_one_of_several_states_are_loaded(tmp_path):
    saved = pair(0)
    save_sharded(tmp_path, saved)
    states = load_sharded(tmp_path, {"critic": plain_state(3)}, scope="weights")
    assert equal(weights_of(states["critic"]), weights_of(saved["critic"]))


# Options and messages

BAD_OPTIONS = {
    "scope": ({"scope": "trainable"}, r"scope must be 'all' or 'weights', got 'trainable'"),
    "what as a tuple": ({"scope": ("model",)}, r"scope must be 'all' or 'weights', got \('model',\)"),
    "what and extra": ({"scope": "weights", "extra": {"a": 1}}, "extra must be empty"),
    "on_corrupt": ({"on_corrupt": "ignore"}, "on_corrupt must be 'raise' or 'previous', got 'ignore'"),
    "ignore as text": ({"ignore": "head.*"}, r"ignore must be a list of patterns"),
    "ignore nothing": ({"ignore": ["head.*"]}, r"a pattern must match a name in the model or the checkpoint, got 'head\.\*'"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_invalid_options_are_refused(tmp_path, options, message):
    save_sharded(tmp_path, plain_state())
    with pytest.raises(ConfigError, match=message):
        load_sharded(tmp_path, plain_state(), **options)


@pytest.mark.parametrize("wrong", [None, 3, {}, {"a": None}, [1]], ids=repr)
def test_invalid_state_is_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match="state must be a TrainState, or a dict of states by name, got"):
        load_sharded(tmp_path, wrong)


@pytest.fixture
def root(tmp_path) -> Path:
    state = plain_state()
    for _ in range(3):
        state = train(state, 1)
        save_sharded(tmp_path, state)
    return tmp_path


def said(capsys) -> list[str]:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dtrain: ")]
    return [re.sub(r" in [0-9.e-]+ s\b", " in N s", line) for line in lines]


def test_load_logs_selected_step(root, capsys):
    load_sharded(root, plain_state())
    assert said(capsys) == [f"dtrain: load_sharded: loaded {root}/step-00000003 in N s"]
    load_sharded(root / "step-00000002", plain_state(), ignore=["optimizer", "rng"])
    assert said(capsys) == [f"dtrain: load_sharded: loaded {root}/step-00000002 in N s; ignored optimizer, rng"]


def test_load_logs_missing_checkpoint(tmp_path, capsys):
    load_sharded(tmp_path / "none", plain_state(), missing_ok=True)
    assert said(capsys) == [f"dtrain: load_sharded: no checkpoint found in {tmp_path}/none; starting from scratch"]


def test_load_logs_reasons_for_skipped_steps(root, capsys):
    (root / "step-00000003" / "rank-00000.safetensors").write_bytes(b"")
    (root / "step-00000009.tmp-01234567-89abcdef").mkdir()
    (root / "step-00000007").mkdir()
    with pytest.warns(UserWarning, match="is corrupt"):
        load_sharded(root, plain_state(), on_corrupt="previous")
    (line,) = said(capsys)
    assert line.startswith(
        f"dtrain: load_sharded: loaded {root}/step-00000002 in N s; skipped step-00000003 (corrupt: rank 0: rank-0"
    )
    assert "skipped step-00000007 (its save was not completed)" in line
    assert "skipped step-00000009.tmp-01234567-89abcdef (its save was not completed)" in line


def test_load_logs_skipped_step_of_superseded_lineage(root, capsys):
    state = load_sharded(root / "step-00000001", plain_state())
    save_sharded(root, train(state, 1))
    load_sharded(root, plain_state())
    line = said(capsys)[-1]
    assert line.endswith("step-00000002 in N s; skipped step-00000003 (committed earlier, before the run went back)")


def test_latest_checkpoint_of_step_folder_returns_it(root):
    assert latest_checkpoint(root) == root / "step-00000003"
    assert latest_checkpoint(root / "step-00000002") == root / "step-00000002"
    (root / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"latest_checkpoint: .*has no manifest.json, because its save was not completed"):
        latest_checkpoint(root / "step-00000002")
    (root / "step-00000001" / "manifest.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"latest_checkpoint: .*step-00000001: manifest.json: "):
        latest_checkpoint(root / "step-00000001")


# Nothing changes when it fails


def test_failed_file_operation_leaves_state_unchanged(tmp_path):
    path = save_sharded(tmp_path, train(plain_state(), 1), extra={"counter": Counter()}).path
    with watching() as watched:
        load_sharded(path, plain_state(), extra={"counter": Counter()})
    state = train(plain_state(7), 2)
    before = digest(state)
    raised = 0
    for operation in range(len(watched.calls)):
        with watching(operation=operation) as failing:
            try:
                load_sharded(path, state, extra={"counter": Counter()})
            except CheckpointError:
                raised += 1
                assert digest(state) == before, (operation, failing.calls[operation])
                state._check_not_stale("here")
            else:
                assert failing.calls[operation] == "close", failing.calls[operation]
                state = train(plain_state(7), 2)
                before = digest(state)
        assert failing.fired
    assert raised >= len(watched.calls) // 2


def test_bit_flip_during_read_is_detected(tmp_path):
    path = save_sharded(tmp_path, train(plain_state(), 1)).path
    with watching(kind="preadv") as watched:
        load_sharded(path, plain_state())
    state = train(plain_state(7), 2)
    before = digest(state)
    for operation in range(len(watched.calls)):
        with watching(operation=operation, kind="preadv", action="flip") as flipping, pytest.raises(CorruptCheckpointError):
            load_sharded(path, state)
        assert flipping.fired
        assert digest(state) == before
        state._check_not_stale("here")


class Refusing(Counter):
    """Draws random numbers, and then refuses its state."""

    def load_state_dict(self, state) -> None:
        torch.rand(3)
        super().load_state_dict({"not": state})


def test_failing_load_state_dict_keeps_generators_unchanged(tmp_path):
    save_sharded(tmp_path, train(plain_state(), 1), extra={"counter": Counter()})
    state = plain_state(3)
    before = digest(state)
    with pytest.raises(ValueError, match="what is"):
        load_sharded(tmp_path, state, extra={"counter": Refusing()})
    assert digest(state) == before
    state._check_not_stale("here")


def test_load_reads_all_tensors_in_one_request(tmp_path):
    path = save_sharded(tmp_path, train(plain_state(), 1)).path
    size = (path / "rank-00000.safetensors").stat().st_size
    state = plain_state(1)
    with watching(kind="preadv") as watched:
        load_sharded(path, state)
    assert size < 2**20
    assert len(watched.calls) == 5, (
        "the manifest, for the list of steps and for the load, both indexes, and all tensors at once"
    )


def test_index_with_overlapping_byte_ranges_is_refused(tmp_path):
    """All digests match; the same bytes would be read once for each shard."""
    path = save_sharded(tmp_path, plain_state()).path
    body, shards = json_of(path, "rank-00000.json"), shards_of(path)
    first, second = (shards[key].begin for key in ("params/last.bias", "transforms/ema/shadow/last.bias"))
    body["begins"][body["begins"].index(second)] = first
    sign(path, ranks={0: compact(body)})
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000.json: rank-00000.safetensors: .*inside of another shard"):
        load_sharded(path, plain_state())


@pytest.mark.parametrize("there", [False, True], ids=["nothing saved yet", "a step"])
def test_load_warns_about_insufficient_space_for_next_save(tmp_path, monkeypatch, there):
    if there:
        save_sharded(tmp_path, train(plain_state(), 1))
    monkeypatch.setattr("dtrain.storage.free_bytes", lambda path: 100)
    with pytest.warns(UserWarning, match=r"the next save will fail: .* got 100 B"):
        load_sharded(tmp_path, plain_state(1), missing_ok=True)
    if there:  # a program that only reads a step gets no warning
        assert load_sharded(tmp_path / "step-00000001", plain_state(1)).step == 1
