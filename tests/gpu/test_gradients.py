"""On a CUDA device: every other place for gradients, beside the plain window."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import wholebatch as wb
from wholebatch.offload.host_store import SumsOnDevice
from wholebatch.offload.packed_moments import keys_of, pack, unpack
from wholebatch.options import grouped

Micro = dict[str, Tensor]
MIB = 2**20


class Net(nn.Module):
    """Large matrices, small vectors, a tied embedding, and another order of memory."""

    def __init__(self, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = self.norm(x + self.conv(x[:, None]).mean(1))
        return nn.functional.linear(x, self.embed.weight)


def loss(model: nn.Module, micro: Micro) -> wb.Loss:
    return wb.cross_entropy(model(micro["x"]), micro["y"])


def batch(samples: int = 13, length: int = 17) -> Micro:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (samples, length), generator=generator)
    return {"x": tokens, "y": tokens.roll(1, 1)}


def run(
    dtype: torch.dtype,
    *,
    device: str = "cuda",
    width: int = 96,
    layers: int = 4,
    updates: int = 3,
    **options: Any,
) -> tuple[nn.Module, list[wb.Step], wb.WholeBatch]:
    torch.manual_seed(0)
    model = Net(width, layers).to(dtype).to(device)
    fused = options.pop("fused", True)
    adding = options.pop("adding", True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    options = {"micro_batch": 3, "units": lambda m: m["y"].numel(), **options}
    options = {"execute": "eager", **options}
    train = wb.WholeBatch(model, optimizer, loss=loss, **grouped(options))
    train._runner.executor._eager.allowed = adding
    return model, [train.step(batch()) for _ in range(updates)], train


def same_bits(dtype: torch.dtype, gradients: str, **options: Any) -> wb.WholeBatch:
    """Hold a store to the bits of the plain window in which autograd adds, as it does here.

    Left to itself the plain window has kernels that add into `.grad`: an embedding's rows, 16-bit
    products. They round in another order, which a test of memory has no say in.
    """
    with torch.backends.cudnn.flags(enabled=False):  # torch's convolution repeats its bits
        plain, _, _ = run(dtype, adding=False, **options)
        ours, _, train = run(dtype, gradients=gradients, adding=False, **options)
    # The plain window reckons a clipping on the device, these on the host.
    at_most = 1e-6 if "clip_norm" in options else 0.0
    assert far(ours, plain) <= at_most, (dtype, gradients, options, far(ours, plain))
    return train


def far(ours: nn.Module, right: nn.Module) -> float:
    a = nn.utils.parameters_to_vector(p.detach().cpu().double() for p in ours.parameters())
    b = nn.utils.parameters_to_vector(p.detach().cpu().double() for p in right.parameters())
    return float((a - b).norm() / b.norm())


def test_host_sums_make_the_update_of_the_plain_window() -> None:
    # Adam makes a whole step of a gradient that is rounding alone, on the host another than on the
    # device: float64 tells that the update is the same.
    for dtype, at_most in ((torch.float64, 1e-11), (torch.float32, 1e-3), (torch.bfloat16, 1e-2)):
        for options in ({}, {"clip_norm": 0.05}, {"clip_value": 0.001}, {"fused": False}):
            plain, steps, _ = run(dtype, **options)
            for on in ("device", "host"):
                host, ours, _ = run(dtype, gradients="host", optimizer_on=on, **options)
                assert far(host, plain) <= at_most, (dtype, options, on, far(host, plain))
                for a, b in zip(ours, steps, strict=True):
                    assert abs(a.grad_norm / b.grad_norm - 1) < 1e-2, (a, b)


def test_host_sums_have_the_bits_of_the_plain_window() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        same_bits(dtype, "host")


def test_sums_that_stay_on_the_device_have_the_bits_of_the_plain_window() -> None:
    stayed: list[int] = []

    def always(self: SumsOnDevice, parameter: nn.Parameter, total: Tensor) -> Tensor | None:
        if parameter.dim() == 1:
            return None
        stayed.append(total.numel())
        self.sums[id(parameter)] = torch.empty_like(total, device=parameter.device)
        return self.sums[id(parameter)]

    with mock.patch.object(SumsOnDevice, "room_for", always):
        for dtype in (torch.float32, torch.bfloat16):
            for options in ({}, {"clip_norm": 0.05}, {"clip_value": 0.001}, {"fused": False}):
                same_bits(dtype, "host", **options)
    assert stayed


def test_sums_stay_where_activations_have_left_room() -> None:
    _, _, train = run(torch.float32, width=1024, layers=8, updates=1, gradients="host")
    store: Any = train._window.store
    torch.cuda.synchronize()
    moved: list[int] = []
    for length in (512, 17):  # with room in memory, and without
        torch.cuda.reset_peak_memory_stats()
        before = store.bytes_out
        train.step(batch(12, length))
        moved.append(store.bytes_out - before)
    assert moved[0] < 0.85 * moved[1], moved


def test_release_has_the_bits_of_the_plain_window() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for micro in (3, 13):
            same_bits(dtype, "release", micro_batch=micro, nonfinite="skip")


def test_swap_has_the_bits_of_the_plain_window() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"clip_norm": 0.05}, {"fused": False}):
            train = same_bits(dtype, "swap", **options)
            states = train._window.target.optimizers[0].state.values()
            assert {s["exp_avg"].device.type for s in states} == {"cpu"}
            assert all(s["exp_avg"].is_pinned() for s in states)


def test_stores_with_recorded_micro_steps_make_the_update_of_the_eager_ones() -> None:
    # In float64 alone: Adam makes whole steps of the conv's bias gradient, which is rounding.
    more: dict[str, Any]
    for gradients, more in (
        ("swap", {"clip_norm": 0.05}),
        ("release", {"nonfinite": "skip"}),
        ("host", {"clip_norm": 0.05}),
        ("host", {"optimizer_on": "host"}),
    ):
        options: Any = {"gradients": gradients, "micro_batch": 4, "updates": 4, **more}
        eager, _, _ = run(torch.float64, **options)
        recorded, _, train = run(torch.float64, execute="graph", **options)
        steps = train._runner.executor._steps.values()
        assert any(step.captured for step in steps), (gradients, train._runner.executor.notes)
        assert far(recorded, eager) <= 1e-10, (gradients, more, far(recorded, eager))


def test_swapped_moments_are_on_the_host_in_a_window() -> None:
    _, _, train = run(torch.bfloat16, gradients="swap", updates=1)
    states = train._window.target.optimizers[0].state.values()
    before = [s["exp_avg"].cpu() for s in states]
    seen: list[bool] = []

    def look(done: int, of: int) -> None:
        if done == 1:
            train.state_dict()  # waits for what is on its way
            seen.extend(torch.equal(s["exp_avg"], b) for s, b in zip(states, before, strict=True))
            seen.extend(s["exp_avg_sq"].is_cpu for s in states)

    train.step(batch(), after_micro=look)
    assert seen
    assert all(seen)


def test_moments_are_those_of_the_plain_window_but_for_rounding() -> None:
    for dtype, at_most in ((torch.float64, 1e-6), (torch.float32, 1e-2)):
        plain, _, _ = run(dtype)
        for fused in (True, False):  # Adam's own counts of steps are on the device, or not
            ours, _, _ = run(dtype, gradients="moments", fused=fused)
            assert far(ours, plain) <= at_most, (dtype, fused, far(ours, plain))


def test_layers_add_into_the_moments() -> None:
    plain, _, _ = run(torch.float32, precision="bf16")
    ours, _, train = run(torch.float32, precision="bf16", gradients="moments")
    assert far(ours, plain) <= 2e-2, far(ours, plain)
    # Four layers and an embedding, in all but the first of five micro-batches of three windows.
    assert train._runner.executor._eager.added == 5 * 4 * 3
    optimizer = train._window.target.optimizers[0]
    seen: list[bool] = []

    def look(*_: int) -> None:
        seen.extend(p.grad is optimizer.state[p]["exp_avg"] for p in ours.parameters())

    train.step(batch(), after_micro=look)
    assert seen
    assert all(seen)


def test_moments_are_packed_as_on_a_cpu() -> None:
    torch.manual_seed(0)
    firsts = [torch.randn(n, 7) * torch.randn(n, 7).exp() for n in (1, 300, 5)]
    seconds = [(m * torch.randn_like(m)).square() for m in firsts]
    seconds[1][:3] = 0.0
    for counts in ([3.0, 3.0, 3.0], [0.0, 5.0, 9.0], [torch.tensor(float(n)) for n in range(3)]):
        packed = []
        for device in ("cpu", "cuda"):
            ms, vs = ([t.to(device, copy=True) for t in ts] for ts in (firsts, seconds))
            alone = [v.to(device, copy=True) for v in seconds]
            keys = keys_of(ms, vs, counts)
            pack(ms, vs, keys)
            for m, v, both, key in zip(ms, alone, vs, keys, strict=True):
                pack([m], [v], [key])
                assert torch.equal(v.view(torch.int32), both.view(torch.int32)), (device, counts)
            rows = [key.row for key in keys]
            old = [t.cpu().clone() for _, *both in unpack(ms, vs, rows) for t in both]
            packed.append(old)
        assert all(map(torch.equal, *packed)), counts


def test_state_on_the_host_leaves_none_on_the_device() -> None:
    _, _, train = run(torch.float32, gradients="host", optimizer_on="host")
    states = train._window.target.optimizers[0].state.values()
    assert {t.device.type for state in states for t in state.values()} == {"cpu"}


def test_resume_in_the_middle_of_a_window() -> None:
    with torch.backends.cudnn.flags(enabled=False):  # torch's convolution repeats its bits
        for gradients in ("host", "swap"):
            resume_in_the_middle(gradients)


def resume_in_the_middle(gradients: str) -> None:
    straight, _, train = run(torch.float32, gradients=gradients, updates=1)
    saved: dict[str, Any] = {}

    def keep(done: int, of: int) -> None:
        if done == 2:
            saved["train"] = train.state_dict()
            saved["model"] = {n: t.clone() for n, t in straight.state_dict().items()}

    optimizer = train._window.target.optimizers[0].state_dict()
    optimizer = {
        "state": {i: {n: t.clone() for n, t in s.items()} for i, s in optimizer["state"].items()},
        "param_groups": optimizer["param_groups"],
    }
    train.step(batch(), after_micro=keep)
    resumed, _, again = run(torch.float32, gradients=gradients, updates=0)
    resumed.load_state_dict(saved["model"])
    again._window.target.optimizers[0].load_state_dict(optimizer)
    again.load_state_dict(saved["train"])
    again.step(batch())
    assert all(map(torch.equal, straight.parameters(), resumed.parameters())), gradients


def peak(**options: Any) -> tuple[int, int]:
    """Bytes at the peak of a third window, those of model and optimizer too; and of gradients."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, _, train = run(
        torch.float32, width=2048, layers=16, updates=2, micro_batch=13, **options
    )
    numbers = sum(p.numel() for p in model.parameters())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train.step(batch())
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, 4 * numbers


def test_every_store_needs_less_memory_than_the_plain_one() -> None:
    plain, gradients = peak()
    peaks = {}
    for name in ("host", "swap", "moments", "release"):
        extra: dict[str, Any] = {"nonfinite": "skip"} if name == "release" else {}
        peaks[name], _ = peak(gradients=name, **extra)
    print(f"  plain {plain}, gradients {gradients}, {peaks}")
    # Sixteen matrices of 16 MiB; at the close two buckets of four of them are on their way.
    assert max(peaks.values()) < plain - gradients / 4, (plain, gradients, peaks)
