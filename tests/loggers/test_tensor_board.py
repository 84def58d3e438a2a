"""TensorBoard's files, read back by its own reader."""

import math
from argparse import Namespace

import pytest
import torch

from dtrain.loggers.logger import close, failed_loggers
from dtrain.loggers.media import log_images, log_table, log_text
from dtrain.loggers.trackers import tensorboard
from dtrain.testing import inject_fault


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder, name):
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def write(folder, records, **more):
    log = tensorboard(folder, **more)
    for step, numbers in records:
        log(step, numbers)
    close(log)


def test_event_reader_finds_every_number_at_its_step(tmp_path):
    folder = tmp_path / "run" / "tb"
    write(folder, [(10, {"loss": 0.5, "speed/tokens": 3}), (20, {"loss": torch.tensor(0.25)})])
    assert scalars(folder, "loss") == [(10, 0.5), (20, 0.25)]
    assert scalars(folder, "speed/tokens") == [(10, 3.0)]
    assert read(folder).Tags()["scalars"] == ["loss", "speed/tokens"]


def test_resumed_run_replaces_repeated_steps(tmp_path):
    write(tmp_path, [(10, {"loss": 4.0}), (20, {"loss": 3.0}), (30, {"loss": 2.0})], settings={"lr": 0.1})
    write(tmp_path, [(20, {"loss": 3.5}), (40, {"loss": 1.0})], settings={"lr": 0.1})
    assert scalars(tmp_path, "loss") == [(10, 4.0), (20, 3.5), (40, 1.0)]
    assert read(tmp_path).Tags()["tensors"] == ["settings/text_summary"]


def test_settings_are_written_as_text_without_secrets(tmp_path):
    write(tmp_path, [(1, {"loss": 1.0})], settings=Namespace(lr=0.1, model={"width": 64}, api_key="12ab"))
    (event,) = read(tmp_path).Tensors("settings/text_summary")
    assert event.tensor_proto.string_val[0].decode().split() == ["lr:", "0.1", "model.width:", "64", "api_key:", '"[redacted]"']


def test_non_finite_numbers_are_written_and_non_numbers_warn(tmp_path):
    log = tensorboard(tmp_path)
    with pytest.warns(UserWarning, match=r"tensorboard .*: metric 'bad' must be a number, got Tensor \[2\]"):
        log(1, {"loss": math.nan, "bad": torch.ones(2)})
    log(2, {"loss": math.inf, "bad": torch.ones(2), "big": 10**400})
    with pytest.warns(UserWarning, match=r"metric 'note' must be a number, got 'text'"):
        log(3, {"loss": True, "note": "text"})
    close(log)
    (first, *rest) = scalars(tmp_path, "loss")
    assert math.isnan(first[1])
    assert rest == [(2, math.inf), (3, 1.0)]
    assert scalars(tmp_path, "big") == [(2, math.inf)]


def test_uncreatable_folder_warns_once(tmp_path):
    (tmp_path / "file").write_text("")
    log, before = tensorboard(tmp_path / "file" / "tb"), len(failed_loggers())
    log(1, {"loss": 1.0})
    with pytest.warns(UserWarning, match=r"tensorboard .*. Metrics are no longer logged there"):
        close(log)
    assert len(failed_loggers()) == before + 1


def test_full_disk_warns_once(tmp_path):
    log = tensorboard(tmp_path)
    full = OSError(28, "No space left on device")
    with inject_fault("raise", at="torch.utils.tensorboard.writer.FileWriter.flush", error=full, call=None):
        log(1, {"loss": 1.0})
        with pytest.warns(UserWarning, match="No space left on device"):
            close(log)


def test_pictures_texts_and_tables_are_read_back(tmp_path):
    log = tensorboard(tmp_path)
    log_images(log, 4, {"frame": torch.ones(2, 1, 3, 5)})
    log_text(log, 4, {"answer": "a\n# b"})
    log_table(log, 4, {"rollouts": [{"prompt": "1|2", "reward": 0.5}]})
    close(log)
    events = read(tmp_path)
    (picture,) = events.Images("frame")
    assert (picture.step, picture.height, picture.width) == (4, 3, 10)
    (answer,) = events.Tensors("answer/text_summary")
    assert answer.tensor_proto.string_val[0].decode() == "    a\n    # b"
    (rows,) = events.Tensors("rollouts/text_summary")
    assert rows.tensor_proto.string_val[0].decode().splitlines()[2] == r"| 1\|2 | 0.5 |"
