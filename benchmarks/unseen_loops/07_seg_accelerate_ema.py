# ruff: noqa
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(70)
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    ds = TensorDataset(torch.randn(32, 3, 8, 8), torch.randint(0, 4, (32, 8, 8)))
    net, opt, loader = accelerator.prepare(net, opt, DataLoader(ds, batch_size=2, shuffle=True))
    for epoch in range(2):
        for img, mask in loader:
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(img), mask)
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()
                ema.update_parameters(net)
        print("epoch", epoch, loss.item())


if __name__ == "__main__":
    main()
