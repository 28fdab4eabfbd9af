# ruff: noqa
import torch
from lightning.fabric import Fabric
from torch import nn


class FrameClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(6, 16, batch_first=True), nn.Linear(16, 7)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def utterances(n):
    for t in torch.randint(5, 40, (n,)).tolist():
        yield torch.randn(2, t, 6), torch.randint(0, 7, (2, t))


def main(k=4):
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(75)
    model = FrameClassifier()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=2e-3))
    data = list(utterances(14))
    for epoch in range(2):
        for s in range(0, len(data), k):
            window = data[s : s + k]
            frames = sum(y.numel() for _, y in window)
            for i, (x, y) in enumerate(window):
                with fabric.no_backward_sync(model, enabled=i < len(window) - 1):
                    loss = (
                        nn.functional.cross_entropy(
                            model(x).flatten(0, 1), y.flatten(), reduction="sum"
                        )
                        / frames
                    )
                    fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(epoch, loss.item(), frames)


if __name__ == "__main__":
    main()
