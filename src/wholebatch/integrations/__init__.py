"""Exact accumulation in other trainers: one adapter per library, none imports another.

| import | for |
|---|---|
| `wholebatch.integrations.accelerate` | Accelerate's loop |
| `wholebatch.integrations.lightning` | Lightning's Trainer, and Fabric |
| `wholebatch.integrations.transformers` | Transformers' Trainer, and TRL's SFTTrainer |
| `wholebatch.integrations.keras` | Keras 3 on TensorFlow, JAX and torch |
| `wholebatch.integrations.jax` | JAX, and optax |

An adapter imports its library when it is imported itself; a library that is missing or too old is
refused there, with the versions that work.
"""
