"""The diffusion example: it draws digits of a chosen class, and resumes bit for bit; its codec, noise and pictures."""

import shutil

import pytest
import torch
from tensordict import TensorDict

import dtrain as dt
from example_runs import ended, here, last_files, launched
from helpers.diffusion import UNet, noised, rotation, sample
from helpers.drawn import likeness, write_grid
from helpers.latents import Codec, Pixels, at_size, decoded, encoded
from helpers.pictures import read_digits

SCRIPT = "train_diffusion.py"


LOSS = "held-out loss"


def figures(printed: str) -> list[str]:
    return printed.splitlines()[-4:]


@pytest.mark.slow
def test_training_on_two_ranks_generates_the_requested_class(tmp_path):
    printed = launched(SCRIPT, "--until", "60ba", out=tmp_path / "out")
    end = ended(printed)
    assert (end.baseline, end.value > 0.6) == (0.1, True), "ten classes; a whole run comes above 0.95"
    loss = ended(printed, LOSS)
    assert loss.value < 0.5 * loss.baseline
    assert (tmp_path / "out" / "samples.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "length"), [(here, 10), (launched, 60)], ids=["one rank", "two ranks"])
def test_training_resumes_bit_for_bit(tmp_path, how, length):
    """The average has begun when the run resumes; the latents are those of its begin."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    options = ["--until", f"{length}ba", "--size", "8"]
    printed = how(SCRIPT, *options, out=straight)
    step = f"step-{4 * length // 5:08d}"
    shutil.copytree(straight / "latents-8", resumed / "latents-8")
    shutil.copytree(straight / "checkpoints" / step, resumed / "checkpoints" / step)
    assert figures(how(SCRIPT, *options, out=resumed)) == figures(printed)
    assert last_files(resumed) == last_files(straight)
    assert (resumed / "samples.png").read_bytes() == (straight / "samples.png").read_bytes()


@pytest.mark.slow
def test_complete_run_generates_digits(tmp_path):
    printed = launched(SCRIPT, out=tmp_path / "whole")
    assert ended(printed).value > 0.9
    assert ended(printed, LOSS).value < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["latents", "low_precision_norm", "guidance", "ema"])
def test_each_method_can_be_left_out(tmp_path, method):
    printed = launched(SCRIPT, "--until", "3ba", "--without", method, out=tmp_path / "out", n=1)
    assert ended(printed).baseline == 0.1
    assert (tmp_path / "out" / "pixels-16").exists() == (method == "latents")


@pytest.mark.slow
def test_training_accepts_a_folder_of_color_images(tmp_path):
    from PIL import Image
    from sklearn.datasets import load_sample_images

    for name, image in zip(("temple", "flower"), load_sample_images().images, strict=True):
        for index in range(9):
            folder = tmp_path / "pictures" / ("train" if index % 3 else "val") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[40 * index : 40 * index + 90, 60 * index : 60 * index + 120]).save(folder / f"{index}.png")
    options = ["--data", str(tmp_path / "pictures"), "--size", "32", "--batch", "4", "--until", "4ba"]
    assert ended(launched(SCRIPT, *options, out=tmp_path / "out")).baseline == 0.5


def test_image_size_not_divisible_by_four_raises_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        here(SCRIPT, "--size", "18", out=tmp_path / "out")
    assert "--size: needs a multiple of 4, from 8 on, got 18" in capsys.readouterr().err.splitlines()[-1]


def test_noise_and_time_depend_on_the_sample():
    z = torch.randn(64, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDict({"z": z, "y": torch.arange(64) % 10}, batch_size=[64])

    def seen(forget: float, seed: int = 0) -> TensorDict:
        def transform(sample, generator):
            return noised(sample, generator, nobody=10, forget=forget)

        loader = dt.build_loader(data, global_batch_size=64, seed=seed, shuffle=False, transform=transform)
        return next(iter(loader.one_epoch()))

    batch = seen(0.0)
    kept, added = rotation(batch["time"])
    torch.testing.assert_close(kept * batch["noisy"] - added * batch["velocity"], z)
    noise = added * batch["noisy"] + kept * batch["velocity"]
    assert (0.9 < float(noise.std()) < 1.1, batch["time"].min() < 0.1, batch["time"].max() > 0.9) == (True, True, True)
    assert torch.equal(batch["label"], data["y"])
    assert (seen(0.0) == batch).all()
    assert not torch.equal(seen(0.0, seed=1)["noisy"], batch["noisy"])
    forgotten = seen(0.25)
    assert torch.equal(forgotten["noisy"], batch["noisy"])
    assert 4 <= int((forgotten["label"] == 10).sum()) <= 28
    assert (seen(1.0)["label"] == 10).all()


class Oracle(torch.nn.Module):
    """Return the velocity towards one picture for each class, as a perfect model predicts it."""

    def __init__(self, images: torch.Tensor) -> None:
        super().__init__()
        self.known, self.asked = images, 0

    def forward(self, noisy, time, label):
        kept, added = rotation(time)
        self.asked += 1
        return (kept * noisy - self.known[label]) / added


@pytest.mark.parametrize(("guidance", "asked"), [(1.0, 5), (2.0, 10)])
def test_sampling_with_an_exact_model_reproduces_the_image(guidance, asked):
    images = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(1))  # the last is nobody's
    noise, label = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(2)), torch.arange(6) % 2
    oracle = Oracle(images)
    made = sample(oracle, noise, label, nobody=2, guidance=guidance, steps=5)
    assert oracle.asked == asked
    torch.testing.assert_close(made, images[2] + guidance * (images[label] - images[2]), atol=1e-4, rtol=1e-4)  # float32


def test_model_output_depends_on_time_and_class():
    torch.manual_seed(0)
    model, x = UNet(2, 10, width=16), torch.randn(1, 2, 8, 8)

    def said(time: float, label: int) -> torch.Tensor:
        with torch.no_grad():
            return model(x, torch.tensor([time]), torch.tensor([label]))

    assert said(0.5, 3).shape == x.shape
    for other in (said(0.6, 3), said(0.5, 4), said(0.5, 10)):
        assert not torch.allclose(said(0.5, 3), other)


@pytest.fixture(scope="module")
def digits() -> TensorDict:
    return at_size(read_digits().train, 16)[:256]


def fitted(digits: TensorDict, *, drawn_before: int = 0) -> Codec:
    torch.manual_seed(0)
    codec = Codec(1)
    torch.rand(drawn_before)
    codec.fit_(digits["x"], steps=60)
    return codec.requires_grad_(False)


@pytest.mark.slow
def test_codec_reconstructs_its_input_deterministically(digits):
    codec = fitted(digits)
    z = encoded(codec, digits, 16)["z"]
    assert z.shape == (256, 2, 8, 8)
    torch.testing.assert_close(z.mean((0, 2, 3)), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(z.std((0, 2, 3)), torch.ones(2), atol=1e-4, rtol=0)
    wrong = (decoded(codec, z) - digits["x"]).square().mean()
    assert wrong < 0.1 * digits["x"].var()
    again = fitted(digits, drawn_before=1).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in codec.state_dict().items())


def test_pixel_codec_normalizes_and_restores_exactly(digits):
    pixels = Pixels(1)
    pixels.fit_(digits["x"])
    z = encoded(pixels, digits, 16)["z"]
    assert (abs(float(z.mean())) < 1e-4, abs(float(z.std()) - 1) < 1e-4) == (True, True)
    torch.testing.assert_close(decoded(pixels, z), digits["x"])


@pytest.mark.parametrize("channels", [1, 3])
def test_image_grid_is_a_png_readable_by_pillow(tmp_path, channels):
    import numpy as np
    from PIL import Image

    pictures = torch.zeros(6, channels, 4, 4)
    pictures[1, 0, 2, 3] = 1.0
    pictures[4] = 5.0  # more than the most: white
    write_grid(
        tmp_path / "grid.png", pictures, columns=3, like=torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand(2, channels, 1, 1)
    )
    with Image.open(tmp_path / "grid.png") as image:
        shown = np.asarray(image).reshape(24, 36, channels)  # 2 by 3 pictures of 4 + 2 pixels, twice as large
    assert (shown[0].max(), shown[2, 2].tolist()) == (0, [128] * channels)
    assert shown[6, 20].tolist() == [255, *[128] * (channels - 1)]
    assert (shown[14:22, 14:22] == 255).all()


def test_likeness_detects_a_copy_and_a_wrong_class(digits):
    some = digits[:20]
    assert likeness(some["x"], some["y"], digits) == (1.0, 0.0)
    assert likeness(some["x"], (some["y"] + 1) % 10, digits)[0] == 0.0
    right, far = likeness(some["x"] + 0.05, some["y"], some)
    assert right == 1.0
    assert far == pytest.approx(0.05, rel=1e-3)
