"""The accumulation loop of most tutorials, as a script. It trains, and it makes the wrong update.

wholebatch verify examples/usual_script.py
"""

import torch
from torch.nn import functional as F

torch.manual_seed(0)
texts = [torch.randint(0, 50, (int(n),)) for n in torch.randint(4, 40, (52,))]
data = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model = torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Linear(32, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
steps = 4

for i, tokens in enumerate(loader):
    logits = model(tokens[:, :-1].clamp(min=0))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-100)
    (loss / steps).backward()
    if (i + 1) % steps == 0:
        optimizer.step()
        optimizer.zero_grad()
