"""The text of the models and of their data: plain torch, in the script and in the oracle alike.

Every model has 3 classes. `Net()(x)` returns logits of the samples, `Net()(x, mask)` of tokens.
"""

from __future__ import annotations

from textwrap import dedent

from tests.programs.description import NEXT_TOKEN, Program
from tests.programs.mistakes import mistake_of

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
        self.table = nn.Embedding(7, 4, padding_idx=0)
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
_CAUSAL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 4), nn.RMSNorm(4)
        self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
        self.out = nn.Linear(4, 3)
        self.angles = None

    def turn(self, x):
        if self.angles is None or len(self.angles) < x.shape[1]:
            self.angles = torch.outer(torch.arange(x.shape[1]), 0.1 ** torch.arange(2)).to(x.dtype)
        a, b = x.chunk(2, -1)
        cos, sin = self.angles[: x.shape[1]].cos(), self.angles[: x.shape[1]].sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x, mask):
        hidden = self.table(x)
        key = self.turn(self.norm(hidden))
        hidden = hidden + F.scaled_dot_product_attention(key, key, hidden, is_causal=True)
        return self.out(hidden + self.down(F.silu(self.gate(hidden)) * self.up(hidden)))
"""
_EXPERTS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        share, choice = self.gate(x).softmax(1).max(1)
        hidden = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            at = (choice == number).nonzero()[:, 0]
            rows = (expert(x[at]) * share[at, None]).to(hidden.dtype)
            hidden = hidden.index_add(0, at, rows)
        return self.out(hidden.tanh())
"""
_PARAMETRIZED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
        self.second = nn.utils.parametrizations.orthogonal(nn.Linear(5, 3))

    def forward(self, x):
        return self.second(self.first(x).tanh())
"""
_PHYSICS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            y = self.out(self.body(x).tanh())
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + slope[:, :3]
"""
_COMPLEX = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 2) / 2)
        self.out = nn.Linear(3, 3)

    def forward(self, x):
        weight = torch.view_as_complex(self.weight.contiguous())
        return self.out((torch.fft.fft(x.to(weight.real.dtype)) @ weight.T).abs())
"""
_REMEMBERS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.calls, self.last, self.sizes = 0, torch.empty(0), []
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.body.register_forward_hook(lambda m, a, out: self.sizes.append(out.detach().mean()))

    def forward(self, x):
        self.calls += 1
        self.seen = self.seen + len(x)
        hidden = self.body(x).tanh()
        if hidden.requires_grad:  # the gradient is reversed, as in domain adaptation
            hidden.register_hook(lambda g: -0.5 * g)
        self.last = self.out(hidden)
        return self.last
"""
_STILL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 3)
        self.train()

    def train(self, mode=True):
        super().train(mode)
        self.first.eval()
        self.norm.eval()
        return self

    def forward(self, x):
        return self.out(self.norm(self.first(x)).tanh())
"""
_RANDOM = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.codes = nn.Parameter(torch.randn(5, 5) / 2)

    def forward(self, x):
        x = x * (torch.rand(len(x), 1) < 0.9).to(x.dtype) + 0.1 * torch.randn_like(x)
        hidden = F.dropout(self.body(x), 0.3, self.training)
        return self.out(F.gumbel_softmax(hidden, tau=0.7) @ self.codes.to(hidden.dtype))
"""
_NAMED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.dropout = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.zeros(4))
        self.sparse, self.loss = nn.Linear(4, 3), nn.PReLU(3)
        self.register_buffer("total", torch.ones(3))
        self.register_buffer("units", torch.zeros(2, 2), persistent=False)
        self.steps, self.batch_first, self.weight = "eight", None, None

    def forward(self, x):
        return self.loss(self.sparse(x @ self.p + self.dropout)) * self.total
"""
_SHARED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(2, 2)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.0))
        self.again, self.out = self.body, nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.out(self.again(self.body(x)) + x) * self.scale
"""
_FUNCTIONAL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 5), "b": nn.Linear(5, 3)})

    def forward(self, x):
        weights = {name: p * 1.5 for name, p in self.layers["a"].named_parameters()}
        hidden = torch.func.functional_call(self.layers["a"], weights, (x,))
        return torch.vmap(self.layers["b"])(hidden.sigmoid())
"""
_GAINED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x) * getattr(self.out.weight, "gain", 1.0)
"""
_PATCHED = """
def activation(x):
    return torch.tanh(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.outer(activation(self.inner(x)))
"""
_GRAPH = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        nodes = torch.tanh(self.inner(x))
        edges = torch.softmax(nodes @ nodes.T, dim=1)
        return self.outer(nodes + edges @ nodes)
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
    "causal": _CAUSAL,
    "experts": _EXPERTS,
    "parametrized": _PARAMETRIZED,
    "physics": _PHYSICS,
    "complex": _COMPLEX,
    "remembers": _REMEMBERS,
    "still": _STILL,
    "named": _NAMED,
    "shared": _SHARED,
    "functional": _FUNCTIONAL,
    "random": _RANDOM,
    "gained": _GAINED,
    "patched": _PATCHED,
    "graph": _GRAPH,
}
CALLS = {
    "plain": "model({0})",
    "forward": "model.forward({0})",
    "twice": "(model({0}) + 0.3 * model({0}).tanh())",
    "teacher": "(model({0}) - 0.5 * elder({0}))",
    "output": 'model({0})["logits"]',
    "pair": "model[1](model[0]({0}))",
    "vmapped": "torch.vmap(lambda row: model(row[None])[0])({0})",
    "in place": "model({0}.mul_(0.5))",
    "parts": "torch.cat([model(*part) for part in zip(*(one.split(2) for one in ({0},)))])",
}
"""How the loss calls the model: the same text in the script and oracle."""
_OUTPUT = """
class Output(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *inputs):
        return {"logits": self.net(*inputs), "loss": None}
"""
_LANGUAGE = """
class Language(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.head = net, nn.Linear(3, 7)

    def forward(self, input_ids, attention_mask):
        return self.head(self.net(input_ids, attention_mask))
"""
JUDGE = "judge = nn.Linear(3, 2).to(dtype=dtype)"
JUDGED = "judge(logits.detach()[counted]).square().sum()"
"""The loss of a judge, over the units `counted.sum()`."""
TEACHER = "elder = copy.deepcopy(model).eval().requires_grad_(False)"
ROW_LOSSES = {
    "hinge": "F.relu(1.0 - logits[:, 0])",
    "labels": "F.binary_cross_entropy_with_logits(logits, (target > 0).to(logits.dtype), "
    "pos_weight=torch.tensor([1.0, 2.0, 3.0]).to(logits), reduction='none').mean(1)",
    "distilled": "F.kl_div(logits.log_softmax(1), target.softmax(1), reduction='none').sum(1)",
    "preferred": "-F.logsigmoid(2.0 * logits[:, 0] - 2.0 * logits[:, 1] - target[:, 0])",
    "policy": "F.cross_entropy(logits, y.clamp(min=0), reduction='none') * target[:, 0]",
    "triplet": "F.triplet_margin_loss(logits, target, target.roll(1, 1), reduction='none')",
    "nll": "F.nll_loss(logits.log_softmax(1), y.clamp(min=0), reduction='none')",
    "focal": "(1 - logits.softmax(1).gather(1, y.clamp(min=0)[:, None])[:, 0]) ** 2 "
    "* F.cross_entropy(logits, y.clamp(min=0), reduction='none')",
    "cosine": "1 - F.cosine_similarity(logits, target, dim=1, eps=0.1)",
    "entropy bonus": "F.cross_entropy(logits, y.clamp(min=0), reduction='none') "
    "+ 0.01 * (logits.softmax(1) * logits.log_softmax(1)).sum(1)",
    "clipped ratio": "-torch.minimum((logits[:, 0] - target[:, 0]).exp() * target[:, 1], "
    "(logits[:, 0] - target[:, 0]).exp().clamp(0.8, 1.2) * target[:, 1])",
}
"""Losses of each row, from `logits`, `y` and `target`: the same text in the script and oracle."""
OWN_OPTIMIZER = """
class Normed(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 0.01), alpha=group["lr"])
        return loss
"""
LIMIT = """
def limit(optimizer, *_):
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None:
            p.grad.mul_(0.02 / p.grad.norm().clamp(min=0.02))
"""
"""A hook before an optimizer's step, which wants the whole gradient."""

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
    """Return the class `Net`, and the others that are made beside it."""
    parts = [MODELS[program.model], mistake_of(program).behind]
    parts += [_OUTPUT] if program.call == "output" else []
    parts += [_LANGUAGE] if program.loss in NEXT_TOKEN else []
    parts += [OWN_OPTIMIZER] if program.optimizer == "own" else []
    parts += [LIMIT] if program.optimizer == "hooked" else []
    return "\n\n\n".join(dedent(part).strip() for part in parts if part)


def model_call(program: Program) -> str:
    """Return the expression that makes the model."""
    if mistake_of(program).behind:
        return "nn.Sequential(Net(), Behind())"
    if program.loss in NEXT_TOKEN:
        return "Language(Net())"
    wrapped = {"output": "Output(Net())", "pair": "nn.ModuleList([Net(), nn.Linear(3, 3)])"}
    return wrapped.get(program.call, "Net()")


def data_text(program: Program) -> str:
    """Return the function `make_data`, which draws the fields of a micro-batch."""
    text = "def make_data(seed, rows, labels):"
    text += "\n    draw = torch.Generator().manual_seed(seed)"
    text += (_SEQUENCES if program.has_tokens else _ROWS).rstrip() + _LABELS.rstrip()
    if program.loss in NEXT_TOKEN:  # of one token, none is the next
        text = text.replace("torch.randint(1, 6,", "torch.randint(2, 6,")
    if program.tokens and program.seed % 4 == 1:  # labels that count where nothing else does
        counted = "\n    y[~mask] = 2 * torch.arange(int((~mask).sum())) % 3"
        text = text.replace(".masked_fill(~mask, -100)", counted).replace(
            ", 6, (rows,)", ", 4, (rows,)"
        )
    text += "\n    x[~mask] = 0" if program.tokens else ""  # padding, which may be trimmed
    text += _WEIGHT.rstrip() if "weight" in program.fields else ""
    text += _TARGET.rstrip() if "target" in program.fields else ""
    return f"{text}\n    return {', '.join(program.fields)}"


def data_seed(program: Program, window: int, place: int) -> int:
    """Return the seed of a micro-batch's data."""
    return 1 + program.seed * 1000 + window * 20 + place
