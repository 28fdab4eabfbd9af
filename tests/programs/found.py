"""Programs that failed once, and one of each kind on ranks; what is drawn often is not here."""

from __future__ import annotations

from tests.programs.description import Micro, Program

ONE = (Micro(1),)
UNEVEN = ((Micro(3), Micro(3), Micro(3, "one"), Micro(3)), (Micro(3, "none"), Micro(3), Micro(3)))
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
    # The limit of a clip by value was rounded to float32.
    Program(windows=(ONE, ONE), loss="terms", way="announce", loop="last", clip="value"),
    # The number of steps was also that of the rows.
    Program(way="backward", mistake="divided by steps"),
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
    # Labels count beyond the mask: these columns are no padding.
    Program(model="tokens", windows=((Micro(3), Micro(3), Micro(2)),), tokens=True, seed=1),
    # The first micro-batches of a loop had no units.
    Program(
        windows=((Micro(3, "none"), Micro(4, "none"), Micro(2), Micro(3)),),
        given="mean",
        way="run",
        mistake="total as mean",
    ),
    # A layer under torch.vmap, in a search for the layer that couples samples.
    Program(
        model="functional",
        windows=((Micro(6), Micro(2)),),
        way="run",
        mistake="variance of the batch",
    ),
    # A mean beside a weighted mean, as a sum.
    Program(windows=((Micro(4), Micro(3)),), way="backward", mistake="means as total"),
    # Two experts with a row each, whose samples are not the same, beside a gate with two rows.
    Program(model="experts", windows=((Micro(2), Micro(1)),), way="backward", call="forward"),
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
    # The same number of micro-batches in each window, which nothing but steps= ends.
    Program(windows=((Micro(3), *ONE),) * 2, way="backward", loop="steps"),
    # The weights that an LSTM lists were put back while FSDP2 held others.
    Program(model="lstm", windows=((Micro(2), Micro(3)),), way="run", ranks=2, sharded="fsdp"),
    # The last of three ranks has fewer micro-batches, or the first.
    Program(model="counter", windows=((Micro(2),) * 4,), way="backward", ranks=3),
    Program(model="counter", windows=((Micro(2),) * 4,), way="backward", ranks=3, seed=1),
    # Ranks that hold a model, shards or stages; the first has more micro-batches in the end.
    *(
        Program(model="mlp", windows=UNEVEN, way="run", ranks=2, execute=execute, clip="norm")
        for execute in ("eager", "traced")
    ),
    *(
        Program(windows=UNEVEN, way=way, ranks=2, sharded=sharded, optimizer="adamw")
        for way, sharded in (
            *(("backward", sharded) for sharded in ("fsdp", "hsdp", "every")),
            *(("over", sharded) for sharded in ("hsdp", "gathered")),
        )
    ),
    Program(windows=UNEVEN[:1] * 2, way="backward", ranks=2, sharded="gathered"),
    Program(model="mlp", windows=UNEVEN, way="over", ranks=2, sharded="gathered", execute="traced"),
    Program(model="mlp", windows=((Micro(2), *ONE),), given="mean", way="pipeline", ranks=2),
)
