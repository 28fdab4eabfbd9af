"""The accumulation loop of most tutorials. It trains, and it makes the wrong update.

wholebatch lint examples/usual_loop.py
wholebatch verify examples/usual_loop.py:train
"""

from torch.nn import functional as F

steps = 4


def train(model, optimizer, loader):
    for i, batch in enumerate(loader):
        loss = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
        (loss / steps).backward()
        if (i + 1) % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
