"""Small networks of the shapes that people train with BatchNorm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short = nn.Sequential(nn.Conv2d(inside, out, 1, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


class Dense(nn.Module):
    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inside + growth * k),
                nn.ReLU(),
                nn.Conv2d(inside + growth * k, growth, 3, padding=1),
            )
            for k in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.join = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        top = self.down(x)
        bottom = self.deep(F.max_pool2d(top, 2))
        return self.join(torch.cat([top, self.up(bottom)], 1))


class Inverted(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = channels * 2
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide, momentum=None),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels, affine=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Reused(nn.Module):
    """One BatchNorm called twice, and one that keeps no running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.last = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.bn(self.first(x)))
        return self.last(torch.tanh(self.bn(self.second(x))))


def _headed(body: nn.Module, channels: int) -> nn.Module:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(channels * 4, 5))
    return nn.Sequential(body, head)


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    return _headed(nn.Sequential(stem, Residual(4, 4), Residual(4, 6)), 6)


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1×1, 3×3 and 1×1 convolutions, each with a BatchNorm."""

    def __init__(self, given: int, inner: int, stride: int) -> None:
        super().__init__()
        made = 4 * inner
        self.body = nn.Sequential(
            *(nn.Conv2d(given, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, made, 1, bias=False), nn.BatchNorm2d(made)),
        )
        self.short: nn.Module = nn.Identity()
        if stride > 1 or given != made:
            project = nn.Conv2d(given, made, 1, stride, bias=False)
            self.short = nn.Sequential(project, nn.BatchNorm2d(made))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet50(width: int = 64) -> nn.Module:
    """Return ResNet-50; `width` is 64 in the original."""
    stem = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    given = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(blocks):
            layers.append(Bottleneck(given, inner, 2 if stage and not block else 1))
            given = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 5))


def densenet() -> nn.Module:
    return _headed(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Dense(4, 3)), 13)


def unet() -> nn.Module:
    return _headed(UNet(), 4)


def mobilenet() -> nn.Module:
    return _headed(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Inverted(4), Inverted(4)), 4)


def reused() -> nn.Module:
    return _headed(Reused(), 4)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet": resnet,
    "densenet": densenet,
    "unet": unet,
    "mobilenet": mobilenet,
    "reused": reused,
}
