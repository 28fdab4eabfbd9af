# ruff: noqa
import torch
from torch import nn
import torch.nn.functional as F


class ToyDETR(nn.Module):
    def __init__(self, queries=6, classes=4, d=32):
        super().__init__()
        self.backbone = nn.Conv2d(3, d, 4, stride=4)
        self.query = nn.Parameter(torch.randn(queries, d) * 0.1)
        self.dec = nn.MultiheadAttention(d, 2, batch_first=True)
        self.cls, self.box = nn.Linear(d, classes), nn.Linear(d, 4)

    def forward(self, x):
        mem = self.backbone(x).flatten(2).transpose(1, 2)
        q = self.query.expand(len(x), -1, -1)
        h = q + self.dec(q, mem, mem, need_weights=False)[0]
        return self.cls(h), self.box(h).sigmoid()


def sample(gen):
    n = int(torch.randint(1, 6, (1,), generator=gen))
    return (
        torch.randn(3, 16, 16, generator=gen),
        torch.randint(0, 4, (n,), generator=gen),
        torch.rand(n, 4, generator=gen),
    )


def loss_sum(model, items):
    cls, box = model(torch.stack([i[0] for i in items]))
    total = 0.0
    for b, (_, labels, boxes) in enumerate(items):
        n = len(labels)
        total = total + F.cross_entropy(cls[b, :n], labels, reduction="sum")
        total = total + 5 * F.l1_loss(box[b, :n], boxes, reduction="none").sum()
    return total


def main(updates=4, micro_batches=3, images=2):
    torch.manual_seed(34)
    gen = torch.Generator().manual_seed(34)
    model = ToyDETR()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for u in range(updates):
        window = [[sample(gen) for _ in range(images)] for _ in range(micro_batches)]
        num_boxes = sum(len(it[1]) for mb in window for it in mb)
        value = 0.0
        for mb in window:
            loss = loss_sum(model, mb) / num_boxes
            loss.backward()
            value += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
        print(f"update {u} loss {value:.4f} boxes {num_boxes}")


if __name__ == "__main__":
    main()
