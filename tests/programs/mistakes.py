"""Planted mistakes: lines that people leave in a loop, and losses that do not add up.

A program with one of them must be refused or warned of in words that name it, or the mistake is
named on docs/laws.md, or the update is exact all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.programs.description import LOOPS, WHOLE_BATCH, Program

EVERYWHERE = (*WHOLE_BATCH, *LOOPS, "run")
OWN_LOOPS = (*LOOPS, "run")
TESTED = (*WHOLE_BATCH, "run")
"""The ways in that run the forward pass, and so compare samples with parts of them."""

COUPLES = r"coupl|compar|depends? on .*(others|samples)|other samples|samples.* (act|mix)"
MOVES = r"state|buffer|moves|changes .*forward|forward .*(changes|moves)|counter"
SUMS = r"add up|adds up|\bsum\b|coupl|regularis"
TOUCHED = r"window|gradient|between"
UNITS = r"padd|units|add up|mean|finite"


@dataclass(frozen=True)
class Mistake:
    """A mistake: what it changes in a program, and what must be said of it."""

    words: str = ""
    """A regular expression that a message must contain, upper or lower case."""
    ways: tuple[str, ...] = EVERYWHERE
    given: tuple[str, ...] = ("total", "mean")
    losses: tuple[str, ...] = ("ce", "smooth", "classes", "mse", "weighted")
    models: tuple[str, ...] = ()
    """The models that it fits; empty for all."""
    listed: Mapping[str, str] = field(default_factory=dict)
    """Words of docs/laws.md that name the mistake, by way in."""
    before: tuple[str, ...] = ()
    """Lines before the loss function, at the level of the module."""
    data: tuple[str, ...] = ()
    """Lines after the data was drawn."""
    start: tuple[str, ...] = ()
    """Lines before the loop."""
    forward: tuple[str, ...] = ()
    """Lines between the forward pass and the loss."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Other expressions of the loss, made of the right {total}, {mean}, {unit} and {units}."""
    after: tuple[str, ...] = ()
    """Lines after a backward that is not the last of its window; in the loss of a whole batch."""
    behind: str = ""
    """The class of a module that is put behind the model."""
    own_truth: bool = False
    """True if the undivided batch has the mistake, too: its loss is another one."""
    encode: tuple[str, ...] = ()
    """Lines in the `encode` of a `wb.Coupled`."""
    windows: int = 0
    """How many windows it needs at least."""
    wide: bool = False
    """True if it needs several samples in a micro-batch, with all their labels."""
    counts: bool = False
    """True if `units=` counts the units before the first backward."""


SIZE = "a sum divided by a number that is also a size of what it sums"
"""Words of docs/laws.md: it may be a mean over the parts of a sample."""
ONE_ROW = "A batch with one sample that counts"
"""Words of docs/laws.md: where one sample or micro-batch is all, there is nothing to compare."""
BY_CHANCE = "A coupling whose parts add up by chance in the tested samples"
LATER = "whatever but the units shows only after the first window"
"""Words of docs/laws.md: most checks of a loop are asked in its first window."""


def _listed(words: str, *ways: str) -> dict[str, str]:
    return dict.fromkeys(ways or LOOPS, words)


# -------------------------------------------- sums, means and units, given as each other

_UNITS = {
    "mean as total": Mistake(r"\bmean\b|finite", given=("total",), values={"total": "{mean}"}),
    "quotient as total": Mistake(
        r"\bmean\b|finite|divided",
        given=("total",),
        values={"total": "{total} / {units}"},
        listed=_listed("a mean given as a sum by `.mean()`, by hand"),
    ),
    "means as total": Mistake(
        r"\bmean\b|finite",
        given=("total",),
        losses=("ce", "smooth", "mse"),
        values={"total": "{mean} + 9.7 * logits.square().mean()"},
        own_truth=True,
        wide=True,
        listed=_listed("a mean given as a sum by `.mean()`, by hand"),
    ),
    "total as mean": Mistake(
        r"\bsum\b|add up",
        given=("mean",),
        values={"mean": "{total}"},
        listed=_listed("a sum of products or quotients that is given as a mean"),
    ),
    "units of one": Mistake(
        UNITS,
        given=("mean",),
        values={"units": "1"},
        listed=_listed("a mean over several samples that is given with `units=1`"),
    ),
    "units clamped": Mistake(
        UNITS,
        given=("mean",),
        losses=("ce", "smooth", "classes"),
        values={"units": "{units}.clamp(min=1)", "mean": "{total} / {units}.clamp(min=1)"},
        listed=_listed("`units=` that are clamped to 1 where nothing counts", *EVERYWHERE),
    ),
    "count of all": Mistake(
        r"units",
        ways=WHOLE_BATCH,
        losses=("ce", "smooth"),
        values={"count": "y.numel()"},
        counts=True,
    ),
    "count a little off": Mistake(
        r"units",
        ways=WHOLE_BATCH,
        losses=("ce", "smooth"),
        values={"count": "counted.sum() * 1.05"},
        counts=True,
        wide=True,
    ),
    "divided by steps": Mistake(
        r"steps|divi",
        ways=OWN_LOOPS,
        values={"total": "{total} / {steps}", "mean": "{mean} / {steps}"},
    ),
    "regulariser": Mistake(
        SUMS + "|are divided by",
        given=("total",),
        values={
            "total": "{total} + 0.1 * sum(p.square().sum() for p in model.parameters()"
            " if p.requires_grad)"
        },
        listed=_listed("a penalty on the weights added to every sum"),
    ),
    "a NaN": Mistake(
        r"finite|nan",
        losses=("ce",),
        data=("drawn[0][0][0][0, 0] = float('nan')",),
        wide=True,
        models=("linear", "mlp", "lora", "heads"),
    ),
}

# ---------------------------------------------------------------------- lines of a loop

_LINES = {
    "inner backward": Mistake(
        forward=("logits.square().sum().backward(retain_graph=True)", "model.zero_grad()")
    ),
    "zero_grad": Mistake(TOUCHED, after=("optimizer.zero_grad()",)),
    "optimizer step": Mistake(TOUCHED, after=("optimizer.step()",)),
    "clipping": Mistake(
        TOUCHED + "|clip", after=("nn.utils.clip_grad_norm_(model.parameters(), 1e-3)",)
    ),
    "scheduler step": Mistake(
        r"learning rate|schedul|\blr\b",
        ways=tuple(way for way in EVERYWHERE if way != "gradient"),  # it is given no optimizer
        after=('optimizer.param_groups[0]["lr"] *= 0.9',),
    ),
    "plain backward": Mistake(
        TOUCHED,
        ways=(*WHOLE_BATCH, "backward"),
        after=("{other}", "other.square().mean().backward()"),
    ),
    "weights decayed": Mistake(
        r"parameter|changed in the middle|modified by an inplace",
        ways=OWN_LOOPS,  # a whole batch's own backward ends in torch's error
        after=(
            "with torch.no_grad():",
            "    next(p for p in model.parameters() if p.requires_grad).mul_(0.99)",
        ),
    ),
    "frozen in the window": Mistake(
        r"froz|requires_grad|freez|grad",
        before=("frozen = []",),
        after=(
            "trained = [p for p in model.parameters() if p.requires_grad]",
            "frozen or frozen.append(trained[-1].requires_grad_(False))",
        ),
    ),
    "gradients left": Mistake(
        r"gradient", start=("sum(p.square().sum() for p in model.parameters()).backward()",)
    ),
}

# ----------------------------------------------------------- losses that compare samples

_PARTS = ("losses = {unit}", "z = logits[counted]")
_SIMILAR = (
    *_PARTS,
    "z = F.normalize(torch.cat([z, losses[:, None]], 1), dim=1)",
    "scores = z @ z.T * 3.0",
    "same = torch.arange(len(z))",
)


def _compares(
    forward: tuple[str, ...] = (),
    words: str = COUPLES,
    ways: tuple[str, ...] = TESTED,
    before: tuple[str, ...] = (),
    given: tuple[str, ...] = ("total", "mean"),
    models: tuple[str, ...] = (),
    **values: str,
) -> Mistake:
    """Return a loss of all samples; without `values`, a mean with a `term` of the whole batch."""
    if "term" in values:
        term = values.pop("term")
        values = {"mean": f"losses.mean() + {term}", "total": f"losses.sum() + len(z) * ({term})"}
    if "mean" not in values:
        values["mean"] = f"({values['total']}) / len(z)"
    if "total" not in values:
        values["total"] = f"({values['mean']}) * len(z)"
    return Mistake(
        words,
        ways=ways,
        given=given,
        losses=("ce", "smooth"),
        models=models,
        before=before,
        forward=(*_PARTS, *forward),
        values={"units": "len(z)", **values},
        own_truth=True,
        wide=True,
    )


_COMPARING = {
    "contrastive": _compares(
        _SIMILAR[2:],
        ways=EVERYWHERE,
        given=("total", "mean", "helper"),
        total='F.cross_entropy(scores, same, reduction="sum")',
        mean="F.cross_entropy(scores, same)",
        helper="wb.cross_entropy(scores, same)",
    ),
    "info_nce": _compares(
        ways=EVERYWHERE,
        given=("helper",),
        helper="wb.losses.info_nce(z, z.flip(1))",
        mean="losses.mean()",
    ),
    "batch-hard mining": _compares(
        (
            *_SIMILAR[2:3],
            "apart = torch.cdist(z, z) + 100.0 * torch.eye(len(z), dtype=z.dtype)",
        ),
        term="F.softplus(-apart.min(1).values).mean()",
    ),
    "variance of the batch": _compares(
        ways=EVERYWHERE, term="F.relu(3 - (z.var(0, unbiased=False) + 1e-3).sqrt()).mean()"
    ),
    "dice": _compares(
        ("p, truth = z.sigmoid(), torch.tensor([0.0, 1.0, 0.0], dtype=z.dtype)",),
        ways=EVERYWHERE,
        term="1 - 2 * (p * truth).sum() / (p.square().sum() + len(z) + 1)",
    ),
    "correlation": _compares(
        ("a, b = z[:, 0] - z[:, 0].mean(), losses.detach() - losses.detach().mean()",),
        ways=EVERYWHERE,
        term="1 - (a * b).sum() / (a.norm() * b.norm() + 0.1)",
    ),
    "hardest half": _compares(
        ("keep = max(1, len(losses) // 2)",),
        COUPLES + "|units",
        total="losses.topk(keep).values.sum()",
        mean="losses.topk(keep).values.mean()",
        units="keep",
    ),
    # The total is the number of samples, or near 0, whatever they are: only gradients tell.
    "divided by their mean": _compares(
        given=("total",), total="(losses / losses.detach().mean()).sum()"
    ),
    "advantages of the micro-batch": _compares(
        (
            "reward = losses.detach().sin()",
            "advantage = (reward - reward.mean()) / (reward.std(unbiased=False) + 0.01)",
        ),
        given=("total",),
        total="(losses * advantage).sum()",
    ),
    "negatives drawn": _compares(
        ("negative = z[torch.randperm(len(z))]",),
        COUPLES + "|random",
        total="losses.sum() + F.softplus((z * negative).sum(1)).sum()",
    ),
    "detached statistics": Mistake(
        COUPLES,
        given=("total",),
        values={"total": "{total} * (1 + logits.detach().square().mean())"},
        listed=_listed("detached statistics of the micro-batch"),
    ),
    "centred": Mistake(
        COUPLES + "|row",
        forward=("logits = logits - logits.mean(0)",),
        listed=_listed("a model that mixes the rows of its batch, in micro-batches of one row"),
    ),
}

# ----------------------------------------------------------- state that moves in the loss

_MOVING = {
    "another encoding": Mistake(  # in a window that no test looks at
        r"different representations",
        ways=WHOLE_BATCH,
        given=("total",),
        losses=("coupled",),
        models=("linear", "mlp", "heads"),
        before=("calls = [0]",),
        encode=(
            "calls[0] += 1",
            "if len(record) == 2:",
            "    logits = logits * (1 + 0.1 * (calls[0] % 7))",
        ),
        windows=3,
        wide=True,
    ),
    "moving baseline": _compares(
        ("baseline.mul_(0.8).add_(losses.detach().mean(), alpha=0.2)",),
        MOVES + "|" + COUPLES,
        before=("baseline = torch.zeros((), dtype=dtype)",),
        total="(losses * (losses.detach() - baseline)).sum()",
    ),
    "growing weight": _compares(
        ("calls[0] += 1",),
        MOVES,
        before=("calls = [0]",),
        total="losses.sum() * min(1.0, calls[0] / 20)",
    ),
    "queue of negatives": _compares(
        (
            "added = sum(F.softplus(z @ old.T).mean(1).sum() for old in queue[-1:])",
            "queue.append(z.detach())",
        ),
        MOVES + "|" + COUPLES,
        before=("queue = []",),
        total="losses.sum() + added",
    ),
    "moved teacher": _compares(
        (
            "with torch.no_grad():",
            "    if not teacher:",
            "        teacher.append(copy.deepcopy(model))",
            "        for old in teacher[0].parameters():",
            "            old.mul_(0.5)",
            "    for old, new in zip(teacher[0].parameters(), model.parameters()):",
            "        old.lerp_(new, 0.3)",
            "    {goal}",
        ),
        MOVES,
        before=("teacher = []",),
        models=("linear", "mlp", "lora", "frozen", "attention"),
        total="losses.sum() + (z - goal[counted]).square().sum()",
    ),
    "BatchNorm's counter": Mistake(
        MOVES,
        ways=WHOLE_BATCH,
        models=("batchnorm",),
        losses=("ce",),
        values={
            "total": "{total} / (1.0 + model.norm.num_batches_tracked)",
            "mean": "{mean} / (1.0 + model.norm.num_batches_tracked)",
        },
        own_truth=True,
        wide=True,
    ),
}


# ------------------------------------------- modules that keep state, or mix the samples


def _module(
    forward: str,
    made: str = "",
    words: str = MOVES,
    ways: tuple[str, ...] = EVERYWHERE,
    listed: str = "",
) -> Mistake:
    """Return a mistake in a module behind the model; `x` are its logits."""
    body = "\n".join(f"        {line}" for line in forward.strip().splitlines())
    init = "\n".join(f"        {line}" for line in ["super().__init__()", *made.splitlines()])
    text = (
        f"class Behind(nn.Module):\n    def __init__(self):\n{init}\n\n    def forward(self, x):\n"
    )
    return Mistake(
        # It is named; a loop's test of calls names the model.
        rf"\(Behind\).*({words})|depends on state that|a forward moves"
        if words == MOVES
        else words,
        ways=ways,
        losses=("ce", "smooth", "mse"),
        models=("linear", "mlp", "conv", "heads", "frozen", "lora"),
        behind=text + body,
        own_truth=True,
        wide=True,
        listed=_listed(listed, *ways) if listed else {},
    )


_HOOKED = "x = x * 1.0\nif x.requires_grad:\n    x.register_hook(HOOK)\nreturn x"
_MODULES = {
    "running mean": _module(
        "with torch.no_grad():\n    self.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)\n"
        "return (x - self.centre) * (1 + self.centre)",
        'self.register_buffer("centre", torch.zeros(3))',
    ),
    "codebook": replace(
        _module(
            "with torch.no_grad():\n    choice = torch.cdist(x, self.codes).argmin(1)\n"
            "    for code in choice.unique():\n"
            "        self.codes[code].lerp_(x[choice == code].mean(0), 0.2)\n"
            "return x + 0.5 * (self.codes[choice] - x.detach())",
            'self.register_buffer("codes", torch.randn(4, 3))',
        ),
        listed=_listed(BY_CHANCE, "run"),
    ),
    "counter": _module("self.calls += 1\nreturn x * min(1.0, self.calls / 50)", "self.calls = 0"),
    "observer": _module(
        "with torch.no_grad():\n"
        "    self.largest.copy_(torch.maximum(self.largest, x.abs().max()))\n"
        "return x / self.largest",
        'self.register_buffer("largest", torch.full((), 0.1))',
        MOVES + "|" + COUPLES,
        listed="a layer that divides by a statistic which it moves",
    ),
    "initialised by its first batch": _module(
        "if not self.ready:\n    self.shift.copy_(x.detach().mean(0))\n    self.ready = True\n"
        "return x - self.shift",
        'self.register_buffer("shift", torch.zeros(3))\nself.ready = False',
        MOVES + "|" + COUPLES,
    ),
    "torch's spectral norm": _module(
        "return self.linear(x)",
        "self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))",
        MOVES + "|spectral|gradient",
    ),
    "BatchNorm by hand": _module(
        "mean, var = x.mean(0), x.var(0, unbiased=False)\n"
        "with torch.no_grad():\n    self.mean.lerp_(mean, 0.1)\n"
        "return (x - mean) / (var + 1e-2).sqrt()",
        'self.register_buffer("mean", torch.zeros(3))',
        MOVES + "|" + COUPLES + "|BatchNorm",
    ),
    "batch_norm as a function": _module(
        "return F.batch_norm(x, None, None, training=True, eps=1e-2)",
        words=COUPLES + "|BatchNorm|batch_norm|more than 1 value per channel",
    ),
    "softmax over samples": _module("return x * (1 + 0.5 * x.softmax(0))", words=COUPLES),
    "capacity of experts": _module(
        "place = x.sum(1).argsort().argsort()\n"
        "expert = (place >= (len(x) + 1) // 2).long()\n"
        "return x * self.scale[expert][:, None]",
        "self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))",
        COUPLES,
        TESTED,
        BY_CHANCE,
    ),
    "running statistics of InstanceNorm": _module(
        "return self.norm(x[:, None])[:, 0]",
        "self.norm = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)",
        MOVES + "|InstanceNorm",
    ),
    "normalised gradient": _module(
        _HOOKED.replace("HOOK", "lambda g: g / (g.norm() + 1e-3)"),
        words=r"gradient|" + COUPLES,
        ways=TESTED,
    ),
    "clamped gradient": _module(
        _HOOKED.replace("HOOK", "lambda g: g.clamp(-0.01, 0.01)"), words=r"gradient", ways=TESTED
    ),
}

MISTAKES = {**_UNITS, **_LINES, **_COMPARING, **_MOVING, **_MODULES}
PLAIN = Mistake()


def mistake_of(program: Program) -> Mistake:
    """Return the program's mistake; one that changes nothing if it has none."""
    return MISTAKES.get(program.mistake, PLAIN)


def in_values(program: Program, value: dict[str, str]) -> dict[str, str]:
    """Return the expressions of a loss with the mistake in them."""
    steps = max(len(window) for window in program.windows)
    changed = mistake_of(program).values.items()
    return {**value, **{name: text.format(**value, steps=steps) for name, text in changed}}


def lines_of(lines: tuple[str, ...], value: dict[str, str], forward: str) -> list[str]:
    """Fill in the loss's expressions, and further calls of the model like its line `forward`."""
    other = forward.replace("logits = model(", "other = model(", 1)
    goal = forward.replace("logits = model(", "goal = teacher[0](", 1)
    return [line.format(**value, other=other, goal=goal) for line in lines]
