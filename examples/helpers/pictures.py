"""Pictures with labels: the handwritten digits that come with scikit-learn, or a folder with a sub-folder for each class."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

HELD_OUT_EVERY = 5
_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_MEAN, _SPREAD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])  # of ImageNet


class Folder:
    """The pictures below ``root/<class>/``, at one size: the largest square in the middle."""

    def __init__(self, root: Path, classes: list[str], size: int) -> None:
        self.files = [(path, label) for label, name in enumerate(classes) for path in sorted((root / name).rglob("*"))]
        self.files = [(path, label) for path, label in self.files if path.suffix.lower() in _ENDINGS]
        if not self.files:
            raise FileNotFoundError(f"no pictures ({', '.join(_ENDINGS)}) in {root}/<class>/; classes: {', '.join(classes)}")
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        from PIL import Image, ImageOps

        path, label = self.files[index]
        try:
            with Image.open(path) as image:
                square = ImageOps.fit(image.convert("RGB"), (self.size, self.size), Image.Resampling.BILINEAR)
        except (OSError, SyntaxError) as error:  # Pillow raises SyntaxError for some broken PNG files
            raise OSError(f"{path} cannot be read: {error}") from error
        pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8)
        x = pixels.view(self.size, self.size, 3).float() / 255.0
        return {"x": ((x - _MEAN) / _SPREAD).permute(2, 0, 1).contiguous(), "y": torch.tensor(label)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Training and held-out datasets of ``{"x": float [channels, height, width], "y": class}``."""

    train: TensorDict | Folder
    held_out: TensorDict | Folder
    channels: int
    classes: int
    most_frequent: float  # share of the most frequent class of held-out pictures


def read_digits() -> Pictures:
    """Read 1,797 handwritten digits of 8x8 pixels, every fifth of them held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.images).float().unsqueeze(1) / 8.0 - 1.0
    whole = TensorDict({"x": x, "y": torch.from_numpy(digits.target)}, batch_size=[len(x)])
    held = torch.arange(len(x)) % HELD_OUT_EVERY == 0
    share = _most_frequent(whole[held]["y"].tolist())
    return Pictures(train=whole[~held], held_out=whole[held], channels=1, classes=10, most_frequent=share)


def read_folder(root: Path, size: int) -> Pictures:
    """Read ``root/train/<class>/`` and ``root/val/<class>/``, the layout of ImageNet."""
    classes = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
    train, held_out = (Folder(root / split, classes, size) for split in ("train", "val"))
    share = _most_frequent([label for _, label in held_out.files])
    return Pictures(train=train, held_out=held_out, channels=3, classes=len(classes), most_frequent=share)


def _most_frequent(labels: list[int]) -> float:
    return Counter(labels).most_common(1)[0][1] / len(labels)


def shifted(sample: TensorDict | dict[str, Tensor], generator: torch.Generator) -> TensorDict | dict[str, Tensor]:
    """Shift the sample by up to an eighth of its side, and fill it with its edge: for ``build_loader(transform=...)``."""
    x = sample["x"]
    most = max(x.shape[-1] // 8, 1)
    down, right = torch.randint(2 * most + 1, (2,), generator=generator).tolist()
    padded = torch.nn.functional.pad(x.unsqueeze(0), (most,) * 4, mode="replicate")[0]
    return {"x": padded[:, down : down + x.shape[-2], right : right + x.shape[-1]].contiguous(), "y": sample["y"]}
