"""The text of the models and of their data: plain torch, in the script and in the oracle alike.

Every model has 3 classes. `Net()(x)` returns logits of the samples, `Net()(x, mask)` of tokens.
"""

from __future__ import annotations

from textwrap import dedent

from tests.programs.description import Program

CLASSES = 3
WORDS = 7
LENGTH = 5

_LINEAR = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x)
"""
_MLP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x)
"""
_CONV = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 2)
        self.norm = nn.GroupNorm(2, 4)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        return self.out(self.norm(self.conv(x[:, None])).relu().flatten(1))
"""
_FROZEN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 6).requires_grad_(False)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.base(x).tanh())
"""
_LORA = """
class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.3)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) * 0.3)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Adapted(nn.Linear(4, 6))
        self.out = Adapted(nn.Linear(6, 3))

    def forward(self, x):
        return self.out(self.body(x).tanh())
"""
_HEADS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.classes = nn.Linear(5, 3)
        self.value = nn.Linear(5, 1)

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return self.classes(hidden) + self.value(hidden)
"""
_COUNTER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.seen += len(x)
            self.calls += 1
        return self.out(x)
"""
_BATCHNORM = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.norm(self.body(x)).tanh())
"""
_SPARSE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.table((x[:, 0].abs() * 4).long() % 7) + x)
"""
_TIED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 4)
        self.out = nn.Linear(4, 3, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(x.tanh() + self.table((x[:, 0].abs() * 4).long() % 3))
"""
_CHECKPOINTED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(checkpoint(self.body, x, use_reentrant=False))
"""
_TOKENS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x, mask):
        return self.out(self.mix(self.table(x)).tanh())[..., :3]
"""
_ATTENTION = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x, mask):
        hidden = self.table(x)
        mixed, _ = self.attention(hidden, hidden, hidden, key_padding_mask=~mask)
        return self.out(hidden + mixed)
"""
_LSTM = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.out(self.lstm(self.table(x))[0])
"""
MODELS = {
    "linear": _LINEAR,
    "mlp": _MLP,
    "conv": _CONV,
    "heads": _HEADS,
    "frozen": _FROZEN,
    "lora": _LORA,
    "tied": _TIED,
    "counter": _COUNTER,
    "sparse": _SPARSE,
    "checkpointed": _CHECKPOINTED,
    "batchnorm": _BATCHNORM,
    "tokens": _TOKENS,
    "attention": _ATTENTION,
    "lstm": _LSTM,
}

_ROWS = """
    x = torch.randn(rows, 4, generator=draw, dtype=torch.float32).to(dtype)
    y = torch.randint(3, (rows,), generator=draw)
"""
_SEQUENCES = """
    x = torch.randint(7, (rows, 5), generator=draw)
    lengths = torch.randint(1, 6, (rows,), generator=draw)
    mask = torch.arange(5) < lengths[:, None]
    y = torch.randint(3, (rows, 5), generator=draw).masked_fill(~mask, -100)
"""
_LABELS = """
    place = torch.rand(y.shape, generator=draw).masked_fill(y == -100, 2.0)
    if labels == "some":
        y[(place > 0.5) & (place != place.min())] = -100
    if labels == "one":
        y[place != place.min()] = -100
    if labels == "none":
        y[:] = -100
"""
_WEIGHT = """
    weight = torch.rand(rows, generator=draw, dtype=torch.float32).to(dtype)
    weight[1::2] *= (weight[1::2] > 0.4)
"""
_TARGET = """
    target = torch.randn(*y.shape, 3, generator=draw, dtype=torch.float32).to(dtype)
"""


def model_text(program: Program) -> str:
    """Return the class `Net`."""
    return dedent(MODELS[program.model]).strip()


def data_text(program: Program) -> str:
    """Return the function `make_data`, which draws the fields of a micro-batch."""
    text = "def make_data(seed, rows, labels):"
    text += "\n    draw = torch.Generator().manual_seed(seed)"
    text += (_SEQUENCES if program.has_tokens else _ROWS).rstrip() + _LABELS.rstrip()
    text += "\n    x[~mask] = 0" if program.tokens else ""  # padding, which may be trimmed
    text += _WEIGHT.rstrip() if "weight" in program.fields else ""
    text += _TARGET.rstrip() if "target" in program.fields else ""
    return f"{text}\n    return {', '.join(program.fields)}"


def data_seed(program: Program, window: int, place: int) -> int:
    """Return the seed of a micro-batch's data."""
    return 1 + program.seed * 1000 + window * 20 + place
