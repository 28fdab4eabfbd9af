# ruff: noqa
import torch
from torch import nn
import torch.nn.functional as F


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 48), nn.ReLU())
        self.obj = nn.Linear(48, 9)
        self.reg = nn.Linear(48, 36)

    def forward(self, x):
        h = self.trunk(x)
        return self.obj(h), self.reg(h).view(-1, 9, 4)


class Criterion:
    """Objectness on 9 anchors and box regression; already scaled for accumulation."""

    def __init__(self, steps, box_gain=2.0):
        self.steps = steps
        self.box_gain = box_gain

    def __call__(self, out, obj_t, box_t):
        obj, reg = out
        l_obj = F.binary_cross_entropy_with_logits(obj, obj_t)
        l_box = F.smooth_l1_loss(reg, box_t)
        return (l_obj + self.box_gain * l_box) / self.steps


class Trainer:
    def __init__(self, model, steps=4, lr=5e-3):
        self.model, self.steps = model, steps
        self.criterion = Criterion(steps)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.count = 0

    def train_step(self, img, obj_t, box_t):
        loss = self.criterion(self.model(img), obj_t, box_t)
        (loss / self.steps).backward()
        self.count += 1
        if self.count == self.steps:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.count = 0
        return loss.item() * self.steps


def main():
    torch.manual_seed(20)
    tr = Trainer(Head())
    for epoch in range(2):
        losses = [
            tr.train_step(
                torch.randn(4, 3, 8, 8), (torch.rand(4, 9) > 0.8).float(), torch.rand(4, 9, 4)
            )
            for _ in range(8)
        ]
        print(epoch, sum(losses) / len(losses))


if __name__ == "__main__":
    main()
