# ruff: noqa
import torch
import wholebatch as wb


def loss(model, micro):
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def main():
    torch.manual_seed(52)
    model = torch.nn.Sequential(torch.nn.Linear(10, 24), torch.nn.ReLU(), torch.nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(90, 10), torch.randint(0, 3, (90,))
    train = wb.WholeBatch(model, optimizer, loss=loss, micro_batch=8, clip_norm=1.0)
    for epoch in range(2):
        for idx in torch.randperm(90).split(30):
            step = train.step({"x": x[idx], "y": y[idx]})
        print(epoch, step.update, float(step.loss), step.micro_batches)


if __name__ == "__main__":
    main()
