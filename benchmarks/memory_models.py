"""Models of the usual kinds, and batches of random data for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.losses.loss import Loss, cross_entropy

__all__ = ["GPT", "UNet", "ViT", "images", "loss", "masks", "resnet", "texts"]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, w = x.shape
        q, k, v = (
            part.view(n, t, self.heads, w // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, w))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class GPT(nn.Module):
    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        length: int,
        words: int = 50304,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, causal=causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result


class ViT(nn.Module):
    def __init__(self, *, layers: int = 12, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.layers = nn.ModuleList(Layer(width, heads, causal=False) for _ in range(layers))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x.mean(1))
        return result


class Bottleneck(nn.Module):
    def __init__(self, before: int, inside: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, inside, 1, bias=False), nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inside)
        self.conv3, self.norm3 = nn.Conv2d(inside, after, 1, bias=False), nn.BatchNorm2d(after)
        self.skip = (
            nn.Identity()
            if before == after and stride == 1
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.skip(x), inplace=True)


def resnet(depths: tuple[int, ...], width: int = 64) -> nn.Module:
    stages: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    before = width
    for stage, depth in enumerate(depths):
        inside = width * 2**stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            stages.append(Bottleneck(before, inside, 4 * inside, stride))
            before = 4 * inside
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


class UNet(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.down1, self.down2 = self._pair(3, width), self._pair(width, 2 * width)
        self.bottom = self._pair(2 * width, 4 * width)
        self.up2, self.up1 = self._pair(6 * width, 2 * width), self._pair(3 * width, width)
        self.head = nn.Conv2d(width, 8, 1)

    @staticmethod
    def _pair(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(8, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GroupNorm(8, after),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        y = F.interpolate(self.bottom(F.max_pool2d(two, 2)), scale_factor=2.0)
        y = F.interpolate(self.up2(torch.cat([two, y], 1)), scale_factor=2.0)
        result: Tensor = self.head(self.up1(torch.cat([one, y], 1)))
        return result.movedim(1, -1)


def loss(model: nn.Module, micro: dict[str, Tensor]) -> Loss:
    return cross_entropy(model(micro["x"]), micro["y"])


def texts(n: int, length: int, words: int = 50304) -> dict[str, Tensor]:
    return {name: torch.randint(0, words, (n, length)) for name in ("x", "y")}


def images(n: int, side: int = 224) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, side, side), "y": torch.randint(0, 1000, (n,))}


def masks(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, 96, 96), "y": torch.randint(0, 8, (n, 96, 96))}
