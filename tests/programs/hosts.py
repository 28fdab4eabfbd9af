"""The text of loops that others own: Accelerate, Fabric, Lightning, Trainer, Keras, JAX, stages."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import dedent, indent

from tests.programs.description import Program

IMPORTS = {
    "accelerate": "from accelerate import Accelerator\n"
    "from torch.utils.data import DataLoader\n"
    "from wholebatch.integrations.accelerate import AccelerateAccumulator",
    "fabric": "from lightning.fabric import Fabric\n"
    "from wholebatch.integrations.lightning import FabricAccumulator",
    "lightning": "from lightning.pytorch import LightningModule, Trainer\n"
    "from torch.utils.data import DataLoader\n"
    "from wholebatch.integrations.lightning import ExactAccumulation",
    "trainer": "from types import SimpleNamespace\n"
    "from torch.utils.data import DataLoader\n"
    "from transformers import Trainer, TrainerCallback, TrainingArguments\n"
    "from wholebatch.integrations.transformers import exact",
    "keras": "import os\n\n"
    'os.environ["KERAS_BACKEND"] = "torch"\n'
    "import keras\n"
    "from wholebatch.integrations.keras import GradientAccumulateModel",
    "jax": "import jax\n"
    "from jax import numpy as jnp\n"
    "from wholebatch.integrations.jax import accumulate",
    "pipeline": "from torch.distributed.pipelining import PipelineStage",
}
HOSTS = tuple(IMPORTS)


def loop_text(
    program: Program, forward: list[str], value: dict[str, str], left: Sequence[str] = ()
) -> str:
    """Return the loop of the library; `forward` leads from `micro` to the loss.

    The lines `left` stand after each backward that is not the last of its window.
    """
    steps = str(len(program.windows[0]) // program.ranks)
    text = dedent(_LOOPS[program.way]).strip().replace("STEPS", steps)
    lines = {
        "FORWARD": "\n".join(forward),
        "LEFT": "\n".join(left or ["pass"]),
        "BACKWARD": f"mean={value['mean']}, units={value['units']}"
        if program.given == "mean"
        else f"{value['total']}, units={value['units']}",
        "MEAN": value["mean"],
        "UNITS": value["units"],
        "CLIP": _CLIP.get(program.way, "") if program.clip == "norm" else "pass",
        "MAX_NORM": "0.1" if program.clip == "norm" else "0.0",
        "MICRO_BATCH": str(program.micro_batch),
    }
    for name, replacement in lines.items():
        text = _filled(text, name, replacement)
    return text


def _filled(text: str, name: str, replacement: str) -> str:
    """Replace a word; lines of the replacement are indented as the word is."""
    lines = []
    for line in text.splitlines():
        if line.strip() == name:
            line = indent(replacement, line[: len(line) - len(line.lstrip())])
        lines.append(line.replace(name, replacement))
    return "\n".join(lines)


_CLIP = {
    "accelerate": "accelerator.clip_grad_norm_(model.parameters(), 0.1)",
    "fabric": "fabric.clip_gradients(model, optimizer, max_norm=0.1)",
}
_ACCELERATE = """
    loader = [micro for window in windows for micro in window]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(loader, batch_size=None)
    )
    train = AccelerateAccumulator(accelerator, model, optimizer)
    for micro in loader:
        with accelerator.accumulate(model):
            FORWARD
            step = train.backward(BACKWARD)
            if accelerator.sync_gradients:
                CLIP
            else:
                LEFT
            optimizer.step()
            optimizer.zero_grad()
            if step is not None:
                note(step)
"""
_FABRIC = """
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, optimizer)
    train = FabricAccumulator(fabric, model, optimizer)
    for window in windows:
        for place, micro in enumerate(window):
            FORWARD
            step = train.backward(BACKWARD, last=place == len(window) - 1)
            if step is None:
                LEFT
        CLIP
        optimizer.step()
        optimizer.zero_grad()
        note(step)
"""
_LIGHTNING = """
    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, micro, batch_idx):
            FORWARD
            return {"loss": MEAN, "units": UNITS}

        def configure_optimizers(self):
            return optimizer

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.global_step > len(record):
                note(callback.last)
            elif (batch_idx + 1) % STEPS:
                LEFT


    callback = ExactAccumulation()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=STEPS,
        gradient_clip_val=MAX_NORM or None,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = [micro for window in windows for micro in window]
    trainer.fit(Module(), DataLoader(loader, batch_size=None))
"""
_TRAINER = """
    def loss_of(micro):
        FORWARD
        return MEAN, UNITS


    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            report = dict(update=state.global_step, loss=None, units=None, grad_norm=None)
            note(SimpleNamespace(**report, skipped=None))

        def on_substep_end(self, *_, **__):
            LEFT


    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **rest):
            loss = loss_of(inputs)[0]
            return (loss, {}) if return_outputs else loss

        def get_train_dataloader(self):
            return DataLoader(loader, batch_size=None)


    def count(inputs):
        with torch.no_grad():
            return loss_of(inputs)[1]


    loader = [micro for window in windows for micro in window]
    arguments = TrainingArguments(
        output_dir="unused",
        gradient_accumulation_steps=STEPS,
        max_grad_norm=MAX_NORM,
        num_train_epochs=1,
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = exact(Own, units=count)(
        model=model,
        args=arguments,
        train_dataset=loader,
        optimizers=(optimizer, constant),
        callbacks=[Note()],
    )
    trainer.train()
"""
_KERAS = """
    keras.config.set_floatx(str(dtype).removeprefix("torch."))
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(3)(inputs)
    trained = GradientAccumulateModel(inputs, outputs, accum_steps=STEPS)
    trained.set_weights([model.out.weight.detach().numpy().T, model.out.bias.detach().numpy()])
    trained.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
    )
    x, y = (torch.cat(parts) for parts in zip(*(micro for window in drawn for micro in window)))
    counted = (y != -100).to(dtype)
    trained.fit(
        x.numpy(),
        y.clamp(min=0).numpy(),
        sample_weight=counted.numpy(),
        batch_size=MICRO_BATCH,
        shuffle=False,
        verbose=0,
    )
    weight, bias = (torch.as_tensor(keras.ops.convert_to_numpy(one)) for one in trained.weights[:2])
    record.append({"parameters": torch.cat([weight.T.flatten(), bias]).double().tolist()})
"""
_JAX = """
    jax.config.update("jax_enable_x64", True)
    parameters = [jnp.asarray(p.detach().numpy()) for p in model.parameters()]


    def loss_of(parameters, batch):
        logits = batch["x"] @ parameters[0].T + parameters[1]
        counted = batch["y"] != -100
        chances = jax.nn.log_softmax(logits)
        losses = -jnp.take_along_axis(chances, jnp.maximum(batch["y"], 0)[:, None], 1)[:, 0]
        return (losses * counted).sum(), counted.sum()


    for window in drawn:
        x, y = (jnp.asarray(torch.cat(parts).numpy()) for parts in zip(*window))
        value, gradient = accumulate(loss_of, micro_batch=MICRO_BATCH)(parameters, {"x": x, "y": y})
        parameters = [p - 0.1 * g for p, g in zip(parameters, gradient)]
        flat = [float(number) for p in parameters for number in p.ravel()]
        record.append({"loss": float(value), "parameters": flat})
"""
_PIPELINE = """
    part = model.layers[2 * rank : 2 * rank + 2]
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    train = wb.Pipeline(
        PipelineStage(part, rank, 2, torch.device("cpu")),
        optimizer,
        loss=wb.cross_entropy,
        micro_batch=MICRO_BATCH,
        clip_norm=MAX_NORM or None,
    )
    for window in drawn:
        x, y = (torch.cat(parts) for parts in zip(*window))
        step = train.step(*[x][rank:], target=y if rank == 1 else None)
        for number, p in enumerate(model.parameters()):
            dist.broadcast(p.detach(), int(number >= 2))
        note(step)
"""
_LOOPS = {
    "accelerate": _ACCELERATE,
    "fabric": _FABRIC,
    "lightning": _LIGHTNING,
    "trainer": _TRAINER,
    "keras": _KERAS,
    "jax": _JAX,
    "pipeline": _PIPELINE,
}
