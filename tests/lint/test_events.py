"""Rules read events of the loop: what the code around it says, and nothing else, decides."""

from __future__ import annotations

import textwrap

import pytest

from wholebatch.lint import lint_source

LOOPS = {
    "a while loop whose boundary, with its last micro-batch, is a function": (
        """
        import torch.nn.functional as F
        def boundary(n, k, length):
            return n % k == 0 or n == length
        def train(model, optimizer, loader, k):
            batches, n = iter(loader), 0
            while (batch := next(batches, None)) is not None:
                x, y = batch
                (F.cross_entropy(model(x), y) / k).backward()
                n += 1
                if boundary(n, k, len(loader)):
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        "WB109",
    ),
    "comments, strings and a function that nothing calls": (
        """
        import torch.nn.functional as F
        # p.grad /= accum ; with model.no_sync(): ; num_items_in_batch GradCache
        def unrelated(model):
            for p in model.parameters():
                p.grad /= 4
            with model.no_sync():
                pass
            'mask_ratio num_items_in_batch'
        def train(model, optimizer, loader, accum):
            "zero_grad grad = None no_sync p.grad /= accum"
            model = DistributedDataParallel(model)
            for i, (x, y) in enumerate(cycle(loader)):
                loss = F.cross_entropy(model(x), y, ignore_index=pad)
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        "WB101 WB103",
    ),
    "a loop of TensorFlow": (
        """
        import tensorflow as tf
        for x, y in data:
            with tf.GradientTape() as tape:
                loss = f(x)
            opt.apply_gradients(zip(tape.gradient(loss, v), v))
        """,
        "WB003",
    ),
    "a loop over windows of wholebatch": (
        """
        import torch, wholebatch as wb
        acc = wb.Accumulator(model, opt, steps=args.accum, clip_norm=1.0)
        for x, y in acc.over(loader):
            total = F.cross_entropy(model(x), y, reduction="sum")
            step = acc.backward(total, units=y.numel())
            if step is not None and step.index % args.log_every == 0:
                print(step.loss)
        """,
        "",
    ),
    "gradients cleared only by a function that nothing calls": (
        """
        import torch
        def evaluate(model):
            model.zero_grad()
        def train(model, loader):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in loader:
                criterion(model(x), y).backward()
                optimizer.step()
        """,
        "WB122",
    ),
    "a policy that is updated once in a while": (
        """
        def train(q, q_optimizer, actor, actor_optimizer, rb, start, total, policy_frequency):
            for step in range(total):
                if step > start:
                    x = rb.sample(8)
                    q_loss = q(x).square().mean()
                    q_optimizer.zero_grad()
                    q_loss.backward()
                    q_optimizer.step()
                    if step % policy_frequency == 0:
                        for _ in range(policy_frequency):
                            actor_loss = -q(actor(x)).mean()
                            actor_optimizer.zero_grad()
                            actor_loss.backward()
                            actor_optimizer.step()
        """,
        "",
    ),
    "an update for every batch beside an evaluator that accumulates": (
        """
        for samples, targets in loader:
            losses = sum(criterion(model(samples), targets).values())
            optimizer.zero_grad()
            losses.backward()
            optimizer.step()
        evaluator.accumulate()
        """,
        "",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loop(name: str) -> None:
    source, codes = LOOPS[name]
    findings = lint_source(textwrap.dedent(source), path="train.py")
    assert sorted({f.code for f in findings}) == codes.split()
