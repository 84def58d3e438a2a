"""Config and tokenizer travel with a checkpoint: one folder in its root, which a conversion reads."""

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoTokenizer, GPT2LMHeadModel, PreTrainedTokenizerFast

from checkpoint.conversion.models import gpt2, loaded, saved
from dtrain.checkpoint.checkpoint_info import list_steps
from dtrain.checkpoint.conversion.convert import convert, save_pretrained_files
from dtrain.dist.init import get_dist_info
from dtrain.errors import CheckpointError, ConfigError, DtrainError


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["[UNK]", "red", "green"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")), unk_token="[UNK]")


@pytest.mark.parametrize("step", [False, True])
def test_conversion_finds_config_and_tokenizer_in_the_root(tmp_path, step):
    model = gpt2()
    root = saved(model, tmp_path / "root")
    folder = save_pretrained_files(root, model.config, tokenizer())
    assert AutoTokenizer.from_pretrained(folder)("green")["input_ids"] == [2]
    assert AutoConfig.from_pretrained(folder).n_layer == 2
    source = list_steps(root)[-1].path if step else root
    done = convert(source, tmp_path / "out", to="hf")
    loaded(GPT2LMHeadModel, done.path)
    assert AutoTokenizer.from_pretrained(done.path)("red")["input_ids"] == [1]
    assert [info.step for info in list_steps(root)] == [0], "the folder is no step"


def test_files_are_replaced_and_reach_a_remote_root(tmp_path):
    model = gpt2()
    for layers in (2, 3):
        model.config.n_layer = layers
        folder = save_pretrained_files(tmp_path / "new" / "root", model.config)
    assert AutoConfig.from_pretrained(folder).n_layer == 3
    remote = save_pretrained_files("memory://bucket/run", model.config)
    assert str(remote) == "memory://bucket/run/pretrained"


def on_ranks(root: str, problem: str) -> list:
    sources = [gpt2().config, "text" if problem == "type" and get_dist_info().rank else tokenizer()]
    try:
        save_pretrained_files(root, *sources)
    except DtrainError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def test_one_rank_writes_and_a_failure_of_one_is_that_of_all(tmp_path, ranks):
    assert ranks(2).run(on_ranks, str(tmp_path / "root"), "") == [["", ""]] * 2
    first, second = ranks(2).run(on_ranks, str(tmp_path / "other"), "type")
    assert first[0] == "PeerError"
    assert second[0] == "ConfigError"
    (tmp_path / "file").write_text("no folder")
    first, second = ranks(2).run(on_ranks, str(tmp_path / "file"), "")
    assert [first[0], second[0]] == [CheckpointError.__name__, "PeerError"]


def test_a_model_is_refused_because_its_weights_are_in_shards(tmp_path):
    with pytest.raises(
        ConfigError, match=r"configs must be configs or tokenizers with save_pretrained, got GPT2LMHeadModel. Pass"
    ):
        save_pretrained_files(tmp_path, gpt2())
