"""Models of transformers and torchvision, built from their configurations with random weights.

Nothing is downloaded. Every model has two sizes: one where speed shows on a GPU, and a tiny one to
try the program. Dropout is off, so that gradients can be compared, except where the name says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb

__all__ = ["MODELS", "REFERENCES", "Architecture", "Batch", "Size"]

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of its batch."""

    layers: int = 8
    width: int = 768
    heads: int = 12
    inner: int = 3072
    vocabulary: int = 32_000
    length: int = 512
    image: int = 224
    patch: int = 16
    classes: int = 100
    window: int = 32
    micro: int = 4
    images: int = 128
    """The samples of a window of images, and of sounds."""
    images_micro: int = 16

    @property
    def head(self) -> int:
        return self.width // self.heads


FULL = Size()
TINY = Size(
    layers=2,
    width=32,
    heads=4,
    inner=64,
    vocabulary=64,
    length=24,
    image=64,
    patch=16,
    classes=5,
    window=8,
    micro=4,
    images=8,
    images_micro=4,
)


@dataclass(frozen=True)
class Architecture:
    """One architecture: how to build it, its batch, and its loss function."""

    name: str
    group: str
    build: Callable[[Size], nn.Module]
    batch: Callable[[Size, int], Batch]
    """Returns this number of samples."""
    loss: Callable[[Any, Batch], wb.Loss]
    size: Size = FULL
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of WholeBatch."""
    random: bool = False
    """True if its forward draws random numbers, so that gradients cannot be compared."""
    is_text: bool = True
    ways: tuple[str, ...] = ("wholebatch", "loop", "torch.compile")
    """The ways in which it is measured."""

    def sized(self, *, tiny: bool, micro: int = 0) -> Architecture:
        """Return it in this size, with micro-batches of this many samples if it is not 0."""
        size = TINY if tiny else self.size
        if micro:
            size = replace(size, micro=micro, images_micro=micro)
        return replace(self, size=size)

    @property
    def tokens(self) -> int:
        """Tokens of a sample; patches of an image."""
        return self.size.length if self.is_text else (self.size.image // self.size.patch) ** 2

    @property
    def window(self) -> int:
        return self.size.window if self.is_text else self.size.images

    @property
    def micro(self) -> int:
        return self.size.micro if self.is_text else self.size.images_micro


# -------------------------------------------------------------------- batches


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def texts(size: Size, number: int) -> Batch:
    """Return sequences of full length."""
    tokens = torch.randint(3, size.vocabulary, (number, size.length), generator=_draw())
    return {"input_ids": tokens, "labels": tokens}


def padded_texts(size: Size, number: int) -> Batch:
    """Return sequences that are padded on the right, with their mask."""
    draw = _draw()
    tokens = torch.randint(3, size.vocabulary, (number, size.length), generator=draw)
    lengths = torch.randint(size.length // 2, size.length + 1, (number, 1), generator=draw)
    beyond = torch.arange(size.length) >= lengths
    return {
        "input_ids": tokens.masked_fill(beyond, 0),
        "attention_mask": (~beyond).long(),
        "labels": tokens.masked_fill(beyond, -100),
    }


def pairs_of_texts(size: Size, number: int) -> Batch:
    made = padded_texts(size, number)
    return {**made, "decoder_input_ids": made["input_ids"].roll(1, dims=1)}


def images(size: Size, number: int) -> Batch:
    pixels = torch.randn(number, 3, size.image, size.image, generator=_draw())
    return {"pixel_values": pixels, "labels": torch.arange(number) % size.classes}


def sounds(size: Size, number: int) -> Batch:
    samples = 16_000 if size.length > 100 else 1600
    return {
        "input_values": torch.randn(number, samples, generator=_draw()),
        "labels": torch.arange(number) % size.classes,
    }


def spoken_texts(size: Size, number: int) -> Batch:
    made = texts(size, number)
    features = torch.randn(number, 80, 2 * size.length, generator=_draw())
    return {
        "input_features": features,
        "decoder_input_ids": made["input_ids"][:, : size.length // 4],
        "labels": made["labels"][:, : size.length // 4],
    }


# ------------------------------------------------------------- loss functions


def _logits(model: Any, micro: Batch) -> Tensor:
    made: Tensor = model(**{name: value for name, value in micro.items() if name != "labels"})[0]
    return made


def next_token(model: Any, micro: Batch) -> wb.Loss:
    """Return the loss as transformers computes it: the labels are shifted, not the logits."""
    labels = nn.functional.pad(micro["labels"][:, 1:], (0, 1), value=-100)
    return wb.cross_entropy(_logits(model, micro), labels)


def each_token(model: Any, micro: Batch) -> wb.Loss:
    return wb.cross_entropy(_logits(model, micro), micro["labels"])


def image_class(model: Any, micro: Batch) -> wb.Loss:
    """Return the loss of a classifier of torchvision, which takes the pixels alone."""
    return wb.cross_entropy(model(micro["pixel_values"]), micro["labels"])


# --------------------------------------------------------------- transformers

_RATES = """
    dropout attention_dropout activation_dropout hidden_dropout attn_dropout hidden_dropout_prob
    attention_probs_dropout_prob resid_pdrop embd_pdrop attn_pdrop classifier_dropout dropout_rate
    classifier_dropout_prob embedding_dropout mlp_dropout layerdrop encoder_layerdrop
    decoder_layerdrop drop_path_rate feat_proj_dropout final_dropout attention_dropout_rate
"""
NO_DROPOUT: dict[str, Any] = dict.fromkeys(_RATES.split(), 0.0)


def _common(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.inner,
        "max_position_embeddings": size.length + 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }


Sizes = Callable[[Size], dict[str, Any]]


def of(kind: str, config: str, more: Sizes, *, dropout: bool = False) -> Callable[[Size], Any]:
    """Return a builder of the class `kind` of transformers; `more` completes its configuration."""

    def build(size: Size) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        rates = {} if dropout else NO_DROPOUT
        made = getattr(transformers, config)(**{**_common(size), **rates, **more(size)})
        model: nn.Module = getattr(transformers, kind)(made)
        return model.train()

    return build


def _nothing(_: Size) -> dict[str, Any]:
    return {}


def _grouped(size: Size) -> dict[str, Any]:
    """Four query heads share one key and value head."""
    return {"num_key_value_heads": size.heads // 4, "head_dim": size.head}


def _sliding(size: Size) -> dict[str, Any]:
    return {**_grouped(size), "sliding_window": size.length // 2}


def _experts(size: Size) -> dict[str, Any]:
    return {
        **_grouped(size),
        "num_local_experts": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": size.inner // 2,
        "moe_intermediate_size": size.inner // 2,
        "shared_expert_intermediate_size": size.inner // 2,
        "sliding_window": size.length // 2,
    }


def causal(
    name: str, prefix: str, more: Sizes = _nothing, group: str = "causal", **kinds: str
) -> Architecture:
    kind = kinds.get("kind", f"{prefix}ForCausalLM")
    config = kinds.get("config", f"{prefix}Config")
    return Architecture(name, group, of(kind, config, more), texts, next_token)


def encoder(name: str, prefix: str, more: Sizes = _nothing) -> Architecture:
    build = of(f"{prefix}ForMaskedLM", f"{prefix}Config", more)
    return Architecture(name, "encoder", build, padded_texts, each_token)


def _bart(size: Size) -> dict[str, Any]:
    return {
        "d_model": size.width,
        "encoder_layers": size.layers // 2,
        "decoder_layers": size.layers // 2,
        "encoder_attention_heads": size.heads,
        "decoder_attention_heads": size.heads,
        "encoder_ffn_dim": size.inner,
        "decoder_ffn_dim": size.inner,
        "decoder_start_token_id": 2,
        "max_position_embeddings": size.length,
    }


def _t5(size: Size) -> dict[str, Any]:
    return {
        "d_model": size.width,
        "d_kv": size.head,
        "d_ff": size.inner,
        "num_layers": size.layers // 2,
        "num_decoder_layers": size.layers // 2,
        "num_heads": size.heads,
        "decoder_start_token_id": 0,
    }


def two_stacks(name: str, prefix: str, more: Sizes, kind: str = "") -> Architecture:
    build = of(kind or f"{prefix}ForConditionalGeneration", f"{prefix}Config", more)
    return Architecture(name, "encoder-decoder", build, pairs_of_texts, each_token)


def vision(name: str, prefix: str, more: Sizes = _nothing) -> Architecture:
    def sizes(size: Size) -> dict[str, Any]:
        common = {"image_size": size.image, "patch_size": size.patch, "num_labels": size.classes}
        return {**common, **more(size)}

    build = of(f"{prefix}ForImageClassification", f"{prefix}Config", sizes)
    return Architecture(name, "vision", build, images, each_token, is_text=False)


def _sound(size: Size) -> dict[str, Any]:
    return {
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "conv_dim": (min(size.width, 512),) * 7,
        "classifier_proj_size": 256,
        "num_labels": size.classes,
        "mask_time_prob": 0.0,
        "mask_feature_prob": 0.0,
    }


def speech(name: str, prefix: str) -> Architecture:
    build = of(f"{prefix}ForSequenceClassification", f"{prefix}Config", _sound)
    size = replace(FULL, images=64, images_micro=8)
    return Architecture(name, "speech", build, sounds, each_token, size, is_text=False)


def _deepseek(size: Size) -> dict[str, Any]:
    return {
        **_experts(size),
        "head_dim": size.head // 2,
        "num_key_value_heads": size.heads,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": size.width // 4,
        "kv_lora_rank": size.width // 4,
        "qk_rope_head_dim": size.head // 2,
        "qk_nope_head_dim": size.head // 2,
        "v_head_dim": size.head // 2,
    }


def _swin(size: Size) -> dict[str, Any]:
    large = size.image > 100
    return {
        "embed_dim": 96 if large else 16,
        "depths": [2, 2, 6, 2] if large else [1, 1],
        "num_attention_heads": [3, 6, 12, 24] if large else [2, 4],
        "window_size": 7 if large else 2,
        "patch_size": 4,
    }


def _convnext(size: Size) -> dict[str, Any]:
    large = size.image > 100
    return {
        "depths": [3, 3, 9, 3] if large else [1, 1, 1, 1],
        "hidden_sizes": [96, 192, 384, 768] if large else [8, 16, 16, 16],
        "patch_size": 4,
    }


def _deberta(size: Size) -> dict[str, Any]:
    return {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": size.length // 2,
        "norm_rel_ebd": "layer_norm",
    }


def _whisper(size: Size) -> dict[str, Any]:
    return {
        **_bart(size),
        "num_mel_bins": 80,
        "max_source_positions": size.length,
        "max_target_positions": size.length,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }


# ---------------------------------------------------------------- torchvision


def torchvision(name: str) -> Architecture:
    """Return a classifier of torchvision in its own size."""

    def build(size: Size) -> nn.Module:
        from torchvision import models  # type: ignore[import-not-found, unused-ignore]

        torch.manual_seed(0)
        made = models.get_model(name, weights=None, num_classes=size.classes)
        return without_dropout(made).train()

    def batch(size: Size, number: int) -> Batch:
        return images(replace(size, image=224), number)  # Some take no other size.

    return Architecture(name, "torchvision", build, batch, image_class, is_text=False)


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every rate of dropout and of stochastic depth to 0."""
    for module in model.modules():
        if isinstance(getattr(module, "p", None), float):
            module.p = 0.0  # type: ignore[assignment]
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


MOE = "mixture of experts"

MODELS: tuple[Architecture, ...] = (
    causal("gpt2", "GPT2", kind="GPT2LMHeadModel"),
    causal("llama", "Llama", _grouped),
    causal("qwen2", "Qwen2", _grouped),
    causal("qwen3", "Qwen3", _grouped),
    causal("mistral", "Mistral", _sliding),
    causal("gemma2", "Gemma2", _sliding),
    causal("gemma3", "Gemma3", _sliding, config="Gemma3TextConfig"),
    causal("phi", "Phi"),
    causal("phi3", "Phi3", _grouped),
    causal("opt", "OPT", lambda s: {"ffn_dim": s.inner, "word_embed_proj_dim": s.width}),
    causal("gpt_neox", "GPTNeoX"),
    causal("bloom", "Bloom"),
    causal("falcon", "Falcon"),
    causal("olmo2", "Olmo2", _grouped),
    causal("granite", "Granite", _grouped),
    causal("stablelm", "StableLm", _grouped),
    causal("smollm3", "SmolLM3", _grouped),
    causal("mixtral", "Mixtral", _experts, MOE),
    causal("qwen2_moe", "Qwen2Moe", _experts, MOE),
    causal("qwen3_moe", "Qwen3Moe", _experts, MOE),
    causal("gpt_oss", "GptOss", _experts, MOE),
    causal("deepseek_v3", "DeepseekV3", _deepseek, MOE),
    encoder("bert", "Bert"),
    encoder("roberta", "Roberta", lambda _: {"pad_token_id": 1}),
    encoder(
        "distilbert",
        "DistilBert",
        lambda s: {"dim": s.width, "hidden_dim": s.inner, "n_layers": s.layers, "n_heads": s.heads},
    ),
    encoder("electra", "Electra", lambda s: {"embedding_size": s.width}),
    encoder("deberta-v2", "DebertaV2", _deberta),
    encoder("albert", "Albert", lambda s: {"embedding_size": s.width // 2}),
    encoder("modernbert", "ModernBert", lambda s: {"local_attention": s.length // 4}),
    two_stacks("t5", "T5", _t5),
    two_stacks("bart", "Bart", _bart),
    two_stacks("pegasus", "Pegasus", _bart),
    two_stacks("marian", "Marian", _bart, "MarianMTModel"),
    vision("vit", "ViT"),
    vision("beit", "Beit", lambda _: {"use_relative_position_bias": True}),
    vision("swin", "Swin", _swin),
    vision("convnext", "ConvNext", _convnext),
    vision("dinov2", "Dinov2", lambda _: {"mlp_ratio": 4}),
    speech("wav2vec2", "Wav2Vec2"),
    Architecture(
        "whisper",
        "speech",
        of("WhisperForConditionalGeneration", "WhisperConfig", _whisper),
        spoken_texts,
        each_token,
    ),
    *map(
        torchvision,
        (
            "resnet50",
            "resnext50_32x4d",
            "efficientnet_b0",
            "mobilenet_v3_large",
            "densenet121",
            "regnet_y_1_6gf",
            "shufflenet_v2_x1_0",
            "vgg16",
            "convnext_tiny",
            "swin_t",
            "vit_b_16",
            "maxvit_t",
        ),
    ),
)
"""40 models of transformers and 12 of torchvision."""


def _reference(
    name: str, like: str, size: Size, build: Callable[[Size], Any], **more: Any
) -> Architecture:
    shape = next(model for model in MODELS if model.name == like)
    common: dict[str, Any] = {"group": "reference", "ways": ("wholebatch",)}
    return replace(shape, name=name, size=size, build=build, **{**common, **more})


_LLAMA = of("LlamaForCausalLM", "LlamaConfig", _nothing)
_SMALL = Size(layers=12, inner=2048, length=1024, window=64)
_LARGE = Size(layers=22, width=2048, heads=32, inner=5632, length=1024)
_BESIDE = {"ways": ("wholebatch", "undivided")}

REFERENCES: tuple[Architecture, ...] = (
    _reference("llama 12x768 micro 4", "llama", _SMALL, _LLAMA, **_BESIDE),
    _reference("llama 12x768 micro 1", "llama", replace(_SMALL, micro=1), _LLAMA),
    _reference("llama 4x2048", "llama", replace(_LARGE, layers=4), _LLAMA),
    _reference("llama 22x2048 micro 4", "llama", _LARGE, _LLAMA, **_BESIDE),
    _reference(
        "gpt2 micro 4",
        "gpt2",
        Size(layers=12, vocabulary=50_257, length=1024, window=64),
        of("GPT2LMHeadModel", "GPT2Config", _nothing),
    ),
    _reference(
        "t5-base micro 4",
        "t5",
        Size(layers=24, vocabulary=32_128, window=64),
        of("T5ForConditionalGeneration", "T5Config", _t5),
        batch=texts,
        loss=lambda model, micro: wb.mean_loss(model(**micro).loss, micro["labels"].numel()),
    ),
    _reference(
        "vit-b micro 16",
        "vit",
        Size(layers=12, images=256, classes=1000),
        of(
            "ViTForImageClassification",
            "ViTConfig",
            lambda s: {"image_size": s.image, "patch_size": s.patch, "num_labels": s.classes},
        ),
    ),
    _reference(
        "bert-base with dropout micro 8",
        "bert",
        Size(layers=12, vocabulary=30_522, window=128, micro=8),
        of("BertForMaskedLM", "BertConfig", _nothing, dropout=True),
        random=True,
    ),
)
"""The models whose times are compared from one version to the next."""
