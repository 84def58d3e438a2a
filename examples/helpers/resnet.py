"""Residual networks in plain PyTorch (He et al. 2016, arXiv:1512.03385): small ones for small images, and ResNet-50."""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """Blocks of each stage, channels of the first stage, and the ratio of a block's output width to its middle width."""

    blocks: tuple[int, ...]
    width: int
    expansion: int
    large_images: bool


ARCHS = {
    "resnet8": Arch(blocks=(1, 1, 1), width=32, expansion=1, large_images=False),
    "resnet20": Arch(blocks=(3, 3, 3), width=16, expansion=1, large_images=False),
    "resnet18": Arch(blocks=(2, 2, 2, 2), width=64, expansion=1, large_images=True),
    "resnet50": Arch(blocks=(3, 4, 6, 3), width=64, expansion=4, large_images=True),
}


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution and its batch norm, which has the bias."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two 3x3 convolutions, or a 3x3 between two 1x1 convolutions where the output is wider, beside a shortcut."""

    def __init__(self, inputs: int, width: int, expansion: int, stride: int) -> None:
        super().__init__()
        outputs = width * expansion
        if expansion == 1:
            layers = [conv(inputs, width, 3, stride), nn.ReLU(), conv(width, width, 3)]
        else:
            layers = [conv(inputs, width, 1), nn.ReLU(), conv(width, width, 3, stride), nn.ReLU(), conv(width, outputs, 1)]
        self.branch = nn.Sequential(*layers)
        self.shortcut = nn.Identity() if (inputs, stride) == (outputs, 1) else conv(inputs, outputs, 1, stride)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.shortcut(x) + self.branch(x))


class ResNet(nn.Module):
    """A stem, stages that each halve the image, and a linear layer on the mean over the image."""

    def __init__(self, arch: Arch, *, channels: int, classes: int) -> None:
        super().__init__()
        pool = [nn.MaxPool2d(3, 2, padding=1)] if arch.large_images else []
        size, stride = (7, 2) if arch.large_images else (3, 1)
        self.stem = nn.Sequential(conv(channels, arch.width, size, stride), nn.ReLU(), *pool)
        blocks, inputs = [], arch.width
        for stage, count in enumerate(arch.blocks):
            width = arch.width * 2**stage
            for index in range(count):
                blocks.append(Block(inputs, width, arch.expansion, stride=2 if stage and index == 0 else 1))
                inputs = width * arch.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))
