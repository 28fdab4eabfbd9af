"""Programs that failed once: right ones that were wrong or refused, mistakes that nobody named."""

from __future__ import annotations

from tests.programs.description import Micro, Program

ONE = (Micro(1),)
FOUND = (
    # A short last window is closed by the loader's end: its Step is `last_step`.
    Program(windows=((*ONE, *ONE), ONE), way="backward"),
    # Complex parameters, whose optimizer's state is on the host.
    Program(
        model="complex",
        windows=((Micro(3), Micro(3), Micro(1)),),
        clip="norm",
        memory="host",
        optimizer="adamw",
    ),
    # A loss whose smallest losses are clamped to 0.
    Program(windows=((Micro(4), *ONE, Micro(5), Micro(3)),) * 2, loss="hinge", way="backward"),
    # The limit of a clip by value was rounded to float32.
    Program(windows=(ONE, ONE), loss="terms", way="announce", loop="last", clip="value"),
    # A mean over one label was taken for a mean that is given as a sum.
    Program(
        windows=((Micro(3, "one"), *ONE, *ONE, *ONE),),
        loss="terms",
        given="mean",
        way="announce",
        loop="last",
    ),
    # Micro-batches of one sample: no test of the loss looked for a division by the steps.
    Program(windows=((*ONE, *ONE),), way="run", mistake="divided by steps"),
    # The number of steps was also that of the rows.
    Program(way="backward", mistake="divided by steps"),
    Program(windows=((Micro(2, "some"), *ONE),), way="run", mistake="divided by steps", seed=2),
    Program(windows=((Micro(2, "some"),) * 2,), way="backward", mistake="divided by steps"),
    # A weighted mean over one label, as the sum over its weight.
    Program(
        windows=((*ONE, Micro(1, "some")),), loss="classes", way="backward", mistake="mean as total"
    ),
    # Six samples of which one has units: the five that were compared had none.
    Program(
        windows=((Micro(4, "none"), Micro(2, "some")),),
        way="gradient",
        mistake="detached statistics",
    ),
    # One of the two parts that were compared had no units.
    Program(
        windows=((Micro(4, "none"), Micro(4), *ONE),),
        given="mean",
        way="gradient",
        mistake="total as mean",
    ),
    # Padding that is trimmed, with a mask of bool.
    Program(model="lstm", windows=((Micro(3), Micro(2)),), batch="tuple", tokens=True),
    Program(model="tokens", windows=(ONE,), tokens=True),
    # Units that are a sum of weights, which rounds otherwise without the padding.
    Program(
        model="tokens",
        windows=((Micro(3), Micro(3), Micro(2, "one")),),
        loss="weighted",
        tokens=True,
        precision="float32",
        seed=2,
    ),
    # The first micro-batches of a loop had no units.
    Program(
        windows=((Micro(3, "none"), Micro(4, "none"), Micro(2), Micro(3)),),
        given="mean",
        way="run",
        mistake="total as mean",
    ),
    # A mean over two labels, as a quotient.
    Program(
        windows=((Micro(2), Micro(1, "one"), Micro(2)),),
        way="backward",
        mistake="quotient as total",
    ),
    # A layer under torch.vmap, in a search for the layer that couples samples.
    Program(
        model="functional",
        windows=((Micro(6), Micro(2)),),
        way="run",
        mistake="variance of the batch",
    ),
    # A mean over one label beside one over five, as one unit each.
    Program(
        windows=((Micro(5), *ONE),),
        loss="mse",
        given="mean",
        way="backward",
        mistake="units of one",
    ),
    # A mean beside a weighted mean, as a sum.
    Program(windows=((Micro(4), Micro(3)),), way="backward", mistake="means as total"),
    # Two experts with a row each, whose samples are not the same, beside a gate with two rows.
    Program(
        model="experts",
        windows=((Micro(2, "all"), Micro(1, "all")),),
        way="backward",
        call="forward",
    ),
    # The weights that an LSTM lists were put back while FSDP2 held others.
    Program(
        model="lstm",
        windows=((Micro(2, "all"), Micro(3, "all")),),
        way="run",
        ranks=2,
        sharded="fsdp",
    ),
    # A sum of squares, as a mean.
    Program(
        windows=((Micro(3), Micro(2)),),
        loss="mse",
        given="mean",
        way="backward",
        mistake="total as mean",
    ),
    # Plain torch in fp16 overflows there, too: the scaler skips the update.
    Program(
        model="causal",
        windows=(
            (Micro(2),),
            (*ONE, Micro(1, "none"), *ONE),
            (Micro(4), Micro(2), Micro(1, "some"), Micro(2)),
        ),
        way="more",
        optimizer="rmsprop",
        precision="fp16",
    ),
    # A first window of one micro-batch is not tested, and the second is refused.
    Program(
        windows=((Micro(1, "some"),), (*ONE, Micro(1, "one"))),
        loss="mse",
        given="mean",
        way="over",
        mistake="total as mean",
    ),
    # The same number of micro-batches in each window, which nothing but steps= ends.
    Program(windows=((Micro(3), *ONE),) * 2, way="backward", loop="steps"),
    # Labels count beyond the mask: these columns are no padding.
    Program(model="tokens", windows=((Micro(3), Micro(3), Micro(2)),), tokens=True, seed=1),
    # The last of three ranks has fewer micro-batches, or the first.
    Program(model="counter", windows=((Micro(2),) * 4,), way="backward", ranks=3),
    Program(model="counter", windows=((Micro(2),) * 4,), way="backward", ranks=3, seed=1),
    # Ranks that hold shards, and stages.
    Program(windows=((Micro(2), *ONE),), way="backward", ranks=2, sharded="fsdp"),
    Program(windows=((Micro(2), *ONE),), way="backward", ranks=2, sharded="hsdp"),
    Program(model="mlp", windows=((Micro(2), *ONE),), given="mean", way="pipeline", ranks=2),
)
