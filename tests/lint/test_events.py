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
    "a while loop whose step is in a function": (
        """
        import torch.nn.functional as F
        def maybe_step(n, k, optimizer):
            if n % k == 0:
                optimizer.step()
                optimizer.zero_grad()
        def train(model, optimizer, batches, k):
            n = 0
            while True:
                x, y = next(batches)
                F.cross_entropy(model(x), y).backward()
                n += 1
                maybe_step(n, k, optimizer)
        """,
        "WB101",
    ),
    "a boundary in several statements": (
        """
        import torch.nn.functional as F
        def is_boundary(n, k):
            n = int(n)
            full = n % k
            if full == 0:
                return True
            return False
        def train(model, optimizer, batches, k):
            n = 0
            while n < 1000:
                x, y = next(batches)
                F.cross_entropy(model(x), y).backward()
                n += 1
                if is_boundary(n, k):
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        "WB101",
    ),
    "a leftover clip in windows of wholebatch": (
        """
        import torch, wholebatch as wb
        model = torch.nn.Linear(4, 3); opt = torch.optim.SGD(model.parameters(), lr=0.1)
        acc = wb.Accumulator(model, opt, steps=3)
        for i, (x, y) in enumerate(acc.over(loader)):
            acc.backward(mean=loss(model(x), y), units=len(y))
            if (i + 1) % 3 == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        """,
        "WB105",
    ),
    "a counter by :=": (
        """
        import torch.nn.functional as F
        n = 0
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            if (n := n + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "WB101 WB109",
    ),
    "a loss by :=": (
        """
        import torch.nn.functional as F
        for i, (x, y) in enumerate(loader):
            (loss := F.cross_entropy(model(x), y)).backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "WB101 WB109",
    ),
    "a compiled and wrapped model whose loss is in another file": (
        """
        import torch
        from mine import Model
        model = torch.nn.DataParallel(torch.compile(Model()))
        for i, (x, y) in enumerate(cycle(loader)):
            loss = model(x, y) / accum
            loss.backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "WB003",
    ),
    "a product that has the count as a factor": (
        """
        for pass_idx in range(num_passes):
            loss = F.cross_entropy(model(x), y, reduction="sum") / (num_passes * examples_per_rank)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        """,
        "",
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
    "two callers of one helper, of which one does not divide": (
        """
        import torch.nn.functional as F
        def loss_of(model, x, y, k):
            return F.cross_entropy(model(x), y) / k
        def step(model, x, y, k):
            loss = loss_of(model, x, y, k)
            loss.backward()
        def a(model, optimizer, loader):
            for i, (x, y) in enumerate(cycle(loader)):
                step(model, x, y, 1)
                if (i + 1) % 4 == 0:
                    optimizer.step(); optimizer.zero_grad()
        def b(model, optimizer, loader):
            for i, (x, y) in enumerate(cycle(loader)):
                step(model, x, y, 8)
                if (i + 1) % 8 == 0:
                    optimizer.step(); optimizer.zero_grad()
        """,
        "WB101",
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
    "a pass through the data in pieces": (
        """
        import torch
        criterion = torch.nn.NLLLoss()
        def train(source):
            for batch, i in enumerate(range(0, source.size(0) - 1, args.bptt)):
                loss = criterion(model(source[i : i + 8]), source[i + 1 : i + 9])
                (loss / args.accum).backward()
                if (batch + 1) % args.accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if args.dry_run:
                    break
        """,
        "WB109",
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


RESCALED = """
    def update(parameters, count):
        for p in parameters:
            p.grad /= count
    def train(model, optimizer, loader, accum):
        for i, (x, y) in enumerate(cycle(loader)):
            F.cross_entropy(model(x), y).backward()
            if (i + 1) % accum == 0:
                {first}
                optimizer.step()
                optimizer.zero_grad()
        for i, (x, y) in enumerate(cycle(loader)):
            F.cross_entropy(model(x), y).backward()
            if (i + 1) % accum == 0:
                {second}
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        ("update(model.parameters(), accum)", "pass", [13]),
        ("pass", "update(model.parameters(), accum)", [7]),
        ("pass", "model.weight.grad.div_(accum)", [7]),
        ("pass", "update(model.parameters(), dist.get_world_size())", [7, 13]),
    ],
)
def test_rescaled_gradients_speak_for_their_own_window(
    first: str, second: str, lines: list[int]
) -> None:
    source = textwrap.dedent(RESCALED).format(first=first, second=second)
    assert [f.line for f in lint_source(source) if f.code == "WB101"] == lines
