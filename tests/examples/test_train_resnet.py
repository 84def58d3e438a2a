"""The vision example: digits and a folder of pictures, on two ranks, resumed, and that it learns."""

import shutil
from pathlib import Path

import pytest
import torch

import dtrain as dt
from example_runs import ended, here, last_files, launched
from helpers.pictures import read_digits, read_folder, shifted
from helpers.resnet import ARCHS, ResNet

SCRIPT = "train_resnet.py"


@pytest.mark.slow
def test_training_on_two_ranks_learns_digits(tmp_path):
    ending = ended(launched(SCRIPT, "--until", "40ba", out=tmp_path / "out"))
    assert ending.baseline < 0.15, "ten classes"
    assert ending.value > 0.6


@pytest.mark.parametrize(
    ("how", "length"), [(here, 12), pytest.param(launched, 40, marks=pytest.mark.slow)], ids=["one rank", "two ranks"]
)
def test_training_resumes_bit_for_bit(tmp_path, how, length):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    printed = how(SCRIPT, "--until", f"{length}ba", out=straight)
    step = f"step-{3 * length // 4:08d}"
    shutil.copytree(straight / "checkpoints" / step, resumed / "checkpoints" / step)
    assert how(SCRIPT, "--until", f"{length}ba", out=resumed).splitlines()[-1] == printed.splitlines()[-1]
    assert last_files(resumed) == last_files(straight)


def pictures(root: Path) -> Path:
    """Photographs, cut into a training and a held-out set of two classes."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    for name, image in zip(("temple", "flower"), load_sample_images().images, strict=True):
        for index in range(9):
            folder = root / ("train" if index % 3 else "val") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[40 * index : 40 * index + 90, 60 * index : 60 * index + 120]).save(folder / f"{index}.png")
    return root


def test_image_folder_is_read(tmp_path):
    images = read_folder(pictures(tmp_path), 32)
    assert (len(images.train), len(images.held_out), images.classes, images.channels) == (12, 6, 2, 3)
    sample = images.train[0]
    assert (sample["x"].shape, sample["x"].dtype, int(sample["y"])) == ((3, 32, 32), torch.float32, 0)
    assert [int(images.train[index]["y"]) for index in range(12)] == [0] * 6 + [1] * 6


def test_grey_image_is_read_and_broken_image_is_named(tmp_path):
    from PIL import Image

    root = pictures(tmp_path)
    grey, broken = root / "train" / "flower" / "1.png", root / "train" / "flower" / "2.png"
    Image.open(grey).convert("L").save(grey)
    broken.write_bytes(broken.read_bytes()[:300])
    images = read_folder(root, 16).train
    assert images[0]["x"].shape == (3, 16, 16)
    with pytest.raises(OSError, match=rf"{broken} cannot be read: "):
        images[1]


def test_folder_without_images_is_refused_before_training(tmp_path):
    root = pictures(tmp_path)
    shutil.rmtree(root / "val")
    with pytest.raises(FileNotFoundError, match=rf"no pictures \(.jpg, .*\) in {root}/val/<class>/; classes: flower, temple"):
        read_folder(root, 16)


def test_resnet50_trains_a_few_steps_on_an_image_folder(tmp_path):
    folder = pictures(tmp_path / "pictures")
    options = ["--arch", "resnet50", "--strategy", "replicate", "--data", str(folder), "--size", "32", "--batch", "4"]
    printed = here(SCRIPT, *options, "--until", "3ba", out=tmp_path / "out")
    assert 0.0 <= ended(printed).value <= 1.0
    assert [path.step for path in dt.checkpoint.list_steps(tmp_path / "out" / "checkpoints")] == [2, 3]


@pytest.mark.parametrize(("arch", "params"), [("resnet50", 25_557_032), ("resnet18", 11_689_512)])
def test_networks_match_the_paper(arch, params):
    with torch.device("meta"):
        model = ResNet(ARCHS[arch], channels=3, classes=1000)
    assert sum(p.numel() for p in model.parameters()) == params
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_digits_are_split_and_shifted():
    digits = read_digits()
    assert (len(digits.train), len(digits.held_out)) == (1437, 360)
    sample = digits.train[0]
    moved = shifted(sample, torch.Generator().manual_seed(1))
    assert moved["x"].shape == sample["x"].shape == (1, 8, 8)
    assert not torch.equal(moved["x"], sample["x"])
