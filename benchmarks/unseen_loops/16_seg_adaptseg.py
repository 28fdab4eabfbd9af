# ruff: noqa
# reduced from wasidennis/AdaptSegNet train_gta2cityscapes_multi.py (one level)
import torch
import torch.nn as nn
import torch.nn.functional as F

ITER_SIZE, NUM_STEPS, CLASSES, LAMBDA_ADV = 2, 6, 4, 0.01


def lr_poly(base, it):
    return base * (1 - it / NUM_STEPS) ** 0.9


def endless(n, with_label):
    while True:
        x = torch.randn(n, 3, 8, 8)
        yield (x, torch.randint(0, CLASSES, (n, 8, 8))) if with_label else x


def main():
    torch.manual_seed(46)
    model = nn.Sequential(nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, CLASSES, 1))
    model_D = nn.Sequential(
        nn.Conv2d(CLASSES, 8, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=2.5e-3, momentum=0.9)
    optimizer_D = torch.optim.Adam(model_D.parameters(), lr=1e-3, betas=(0.9, 0.99))
    bce = nn.BCEWithLogitsLoss()
    source, target = endless(2, True), endless(2, False)
    for i_iter in range(NUM_STEPS):
        loss_seg_value = loss_adv_value = loss_D_value = 0.0
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = lr_poly(2.5e-3, i_iter)
        optimizer_D.zero_grad()
        for sub_i in range(ITER_SIZE):
            # train G, don't accumulate grads in D
            for p in model_D.parameters():
                p.requires_grad = False
            images, labels = next(source)
            pred = model(images)
            loss_seg = F.cross_entropy(pred, labels)
            (loss_seg / ITER_SIZE).backward()
            loss_seg_value += loss_seg.item() / ITER_SIZE
            pred_t = model(next(target))
            out = model_D(pred_t.softmax(1))
            loss_adv = bce(out, torch.zeros_like(out))
            (LAMBDA_ADV * loss_adv / ITER_SIZE).backward()
            loss_adv_value += loss_adv.item() / ITER_SIZE
            # train D
            for p in model_D.parameters():
                p.requires_grad = True
            for prob, value in ((pred, 0.0), (pred_t, 1.0)):
                out = model_D(prob.detach().softmax(1))
                loss_D = bce(out, torch.full_like(out, value)) / ITER_SIZE / 2
                loss_D.backward()
                loss_D_value += loss_D.item()
        optimizer.step()
        optimizer_D.step()
        print(
            f"iter {i_iter}/{NUM_STEPS} seg {loss_seg_value:.3f} adv {loss_adv_value:.3f} D {loss_D_value:.3f}"
        )


if __name__ == "__main__":
    main()
