"""What a loop trains: the text of a model, of its data and of its loss, as mean and as sum."""

from __future__ import annotations

from dataclasses import dataclass

_MLP = "model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, {out}))"
_CLASSES = "inputs = torch.randn({n}, 6)\ntargets = torch.randint(0, 3, ({n},))"
_NET = """class Net(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.body(x))


model = Net()"""
_FROZEN = """model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
for p in model[0].parameters():
    p.requires_grad_(False)"""
_TOKENS = """class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embed(ids))))


model = TinyLM()"""
_GPT = """class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, idx, targets=None):
        logits = self.head(self.embed(idx))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1){ignored})
        return logits, loss


model = GPT()"""
_LABELLED = """inputs = torch.randint(0, 11, ({n}, 7))
targets = torch.randint(0, 11, ({n}, 7))
"""
_PADDED = _LABELLED + "targets[torch.arange(7) >= torch.randint(1, 8, ({n}, 1))] = -100"
_CARRIED = """class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, carry=None):
        carry = x.new_zeros(len(x), 8) if carry is None else carry
        state = self.cell(x, carry)
        return self.head(state), state.detach()


model = Recurrent()"""
_NORMED = "model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))"
_CE = "F.cross_entropy(logits, y{})"
_FLAT = "F.cross_entropy(logits.flatten(0, 1), y.flatten(){})"
_SUM = ', reduction="sum"'


@dataclass(frozen=True)
class Task:
    """The text of a model, its data and its loss; x and y are a micro-batch, logits its outputs."""

    model: str
    data: str
    mean: str
    total: str = ""
    """The loss as a sum; empty if only its mean can be had."""
    units: str = "len(y)"
    padded: str = ""
    """Units that count too much, for a mistake."""
    forward: tuple[str, ...] = ("logits = model(x)",)
    before: str = ""
    is_uneven: bool = False
    is_right: bool = True
    """False if no accumulation of means or sums makes the undivided batch's update."""


def _task(model: str, data: str, mean: str, units: str = "len(y)", **options: object) -> Task:
    """Return a task whose loss is `mean` with "" or reduction="sum" in its braces."""
    return Task(model, data, mean.format(""), mean.format(_SUM), units, **options)  # type: ignore[arg-type]


_MLP3 = _MLP.format(out=3)
_VALUES = "inputs = torch.randn({n}, 6)\ntargets = torch.randn({n}, 3)"

TASKS: dict[str, Task] = {
    "classes": _task(_MLP3, _CLASSES, _CE),
    "net": _task(_NET, _CLASSES, _CE),
    "frozen": _task(_FROZEN, _CLASSES, _CE),
    "criterion": Task(
        _MLP3, _CLASSES, "criterion(logits, y)", before="criterion = nn.CrossEntropyLoss()"
    ),
    "criterion sum": Task(
        _MLP3,
        _CLASSES,
        "summed(logits, y) / len(y)",
        "summed(logits, y)",
        before='summed = nn.CrossEntropyLoss(reduction="sum")',
    ),
    "regression": _task(_MLP3, _VALUES, "F.mse_loss(logits, y{})", "y.numel()"),
    "by hand": Task(
        _MLP3, _VALUES, "(logits - y).pow(2).mean()", "(logits - y).pow(2).sum()", "y.numel()"
    ),
    "two terms": Task(
        _MLP3,
        _CLASSES,
        "F.cross_entropy(logits, y) + 0.1 * logits.square().mean()",
        'F.cross_entropy(logits, y, reduction="sum") + 0.1 * logits.square().mean(1).sum()',
    ),
    "class weights": Task(
        _MLP3,
        _CLASSES,
        "F.cross_entropy(logits, y, weight=balance)",
        'F.cross_entropy(logits, y, weight=balance, reduction="sum")',
        "balance[y].sum()",
        "len(y)",
        before="balance = torch.tensor([0.2, 1.0, 3.0], dtype=torch.get_default_dtype())",
        is_uneven=True,
    ),
    "tokens": _task(
        _TOKENS, _PADDED, _FLAT, "(y != -100).sum()", padded="y.numel()", is_uneven=True
    ),
    "full tokens": _task(_TOKENS, _LABELLED, _FLAT, "y.numel()"),
    "inside": Task(
        _GPT.replace("{ignored}", ""),
        _LABELLED,
        "loss",
        units="y.numel()",
        forward=("logits, loss = model(x, y)",),
    ),
    "inside, padded": Task(
        _GPT.replace("{ignored}", ", ignore_index=-100"),
        _PADDED,
        "loss",
        units="(y != -100).sum()",
        padded="y.numel()",
        forward=("logits, loss = model(x, y)",),
        is_uneven=True,
    ),
    "shifted": Task(
        _TOKENS,
        _PADDED,
        "F.cross_entropy(logits[:, :-1].reshape(-1, 11), y[:, 1:].reshape(-1))",
        'F.cross_entropy(logits[:, :-1].reshape(-1, 11), y[:, 1:].reshape(-1), reduction="sum")',
        "(y[:, 1:] != -100).sum()",
        "(y != -100).sum()",
        is_uneven=True,
    ),
    "carried": _task(_CARRIED, _CLASSES, _CE, forward=("logits, carry = model(x)",)),
    # Two models, a generator and a discriminator: `pairs.py` writes their loop.
    "pair": Task(
        "generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))\n"
        "discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))",
        "inputs = torch.randn({n}, 6)\ntargets = torch.randn({n}, 4)",
        "",
    ),
    "normed": _task(_NORMED, _CLASSES, _CE, is_right=False),
    "contrastive": Task(
        _MLP.format(out=8),
        "inputs = torch.randn({n}, 6)\ntargets = torch.randn({n}, 6)",
        "F.cross_entropy(F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.5, "
        "torch.arange(len(a)))",
        forward=("a, b = model(x), model(y)",),
        is_right=False,
    ),
}
