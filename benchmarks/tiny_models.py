"""Tiny models of `transformers`, from random configurations, each with a batch and a loss function.

Nothing is downloaded. Dropout is off, so that gradients can be compared, except where the name says
so. Texts are padded on the right and have a mask, as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb

__all__ = ["MODELS", "Tiny"]

Batch = dict[str, Tensor]
VOCABULARY, LENGTH, CLASSES, IMAGE = 64, 24, 5, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_RATES = """
    dropout attention_dropout activation_dropout hidden_dropout attn_dropout hidden_dropout_prob
    attention_probs_dropout_prob resid_pdrop embd_pdrop attn_pdrop summary_first_dropout
    classifier_dropout dropout_rate classifier_dropout_prob embedding_dropout mlp_dropout
    layerdrop encoder_layerdrop decoder_layerdrop drop_path_rate feat_proj_dropout final_dropout
    hidden_dropout_rate attention_dropout_rate pooler_dropout qa_dropout seq_classif_dropout
    head_dropout positional_dropout path_dropout ff_dropout
"""
NO_DROPOUT: dict[str, Any] = dict.fromkeys(_RATES.split(), 0.0)


@dataclass(frozen=True)
class Tiny:
    """One architecture: how to build it, its batch, and its loss function."""

    name: str
    group: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    """Returns this number of samples, drawn with this seed."""
    loss: Callable[[Any, Any], wb.Loss]
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of WholeBatch."""
    random: bool = False
    """True if its forward draws random numbers, so that gradients cannot be compared."""


# ------------------------------------------------------------------ batches


def texts(number: int, seed: int) -> Batch:
    """Return tokens padded on the right, their mask, and their labels; seed 0 needs no padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (number, LENGTH), generator=generator)
    shortest = LENGTH // 2 if seed else LENGTH
    lengths = torch.randint(shortest, LENGTH + 1, (number, 1), generator=generator)
    beyond = torch.arange(LENGTH) >= lengths
    tokens = tokens.masked_fill(beyond, 0)
    return {
        "input_ids": tokens,
        "attention_mask": (~beyond).long(),
        "labels": tokens.masked_fill(beyond, -100),
    }


def pairs_of_texts(number: int, seed: int) -> Batch:
    made, targets = texts(number, seed), texts(number, 10 * seed)
    return {**made, "decoder_input_ids": targets["input_ids"], "labels": targets["labels"]}


def classes(number: int) -> Tensor:
    return torch.arange(number) % CLASSES


def classified_texts(number: int, seed: int) -> Batch:
    return {**texts(number, seed), "labels": classes(number)}


def images(number: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(number, 3, IMAGE, IMAGE, generator=generator)
    return {"pixel_values": pixels, "labels": classes(number)}


def sounds(number: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_values": torch.randn(number, 1600, generator=generator),
        "labels": classes(number),
    }


def spoken_texts(number: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    made = texts(number, seed)
    return {
        "input_features": torch.randn(number, 16, 2 * LENGTH, generator=generator),
        "decoder_input_ids": made["input_ids"],
        "labels": made["labels"],
    }


def captioned_images(number: int, seed: int) -> Batch:
    return {**texts(number, seed), "pixel_values": images(number, seed)["pixel_values"]}


def images_in_texts(number: int, seed: int) -> Batch:
    """Return one image for each text; its four patches are the first tokens."""
    made = captioned_images(number, seed)
    tokens, mask = made["input_ids"].clone(), made["attention_mask"].clone()
    tokens[:, :4], mask[:, :4] = VOCABULARY - 1, 1
    tokens[:, 4:][tokens[:, 4:] == VOCABULARY - 1] = 3
    return {**made, "input_ids": tokens, "attention_mask": mask}


def series(number: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    past, future = 40, 8
    return {
        "past_values": torch.randn(number, past, generator=generator),
        "past_time_features": torch.randn(number, past, 1, generator=generator),
        "past_observed_mask": torch.ones(number, past),
        "future_values": torch.randn(number, future, generator=generator),
        "future_time_features": torch.randn(number, future, 1, generator=generator),
    }


def channels(number: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "past_values": torch.randn(number, 32, 3, generator=generator),
        "future_values": torch.randn(number, 8, 3, generator=generator),
    }


# ------------------------------------------------------------ loss functions


def _called(model: Any, micro: Batch) -> Any:
    return model(**{name: value for name, value in micro.items() if name != "labels"})


def next_token(model: Any, micro: Batch) -> wb.Loss:
    """Return the loss of a causal language model, from its logits."""
    logits = _called(model, micro).logits
    return wb.cross_entropy(logits[:, :-1], micro["labels"][:, 1:])


def each_token(model: Any, micro: Batch) -> wb.Loss:
    return wb.cross_entropy(_called(model, micro).logits, micro["labels"])


def by_its_own_loss(model: Any, micro: Batch) -> wb.Loss:
    """Return the loss that the model computes from labels: a mean over the labelled tokens."""
    counted = (micro["labels"][:, 1:] != -100).sum()
    return wb.mean_loss(model(**micro).loss, counted)


def whole_class(model: Any, micro: Batch) -> wb.Loss:
    return wb.cross_entropy(_called(model, micro).logits, micro["labels"])


def output_against_noise(*names: str) -> Callable[[Any, Any], wb.Loss]:
    """Return a loss for models without labels: their outputs, weighed by fixed numbers."""

    def loss(model: Any, micro: Batch) -> wb.Loss:
        out = _called(model, micro)
        parts = []
        for name in names:
            found = getattr(out, name)
            weights = torch.arange(found[0].numel(), device=found.device, dtype=found.dtype)
            parts.append((found.flatten(1) * weights.sin()).square().sum())
        return wb.Loss(torch.stack(parts).sum(), len(out[names[0]]))

    return loss


def forecast(model: Any, micro: Batch) -> wb.Loss:
    return wb.mean_loss(model(**micro).loss, len(micro["past_values"]))


# -------------------------------------------------------------------- models


def of(kind: str, config: str, **more: Any) -> Callable[[], nn.Module]:
    """Return a builder of the class `kind` of transformers, with a tiny configuration."""

    def build() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        made = getattr(transformers, config)(**{**SIZES, **NO_DROPOUT, **more})
        model: nn.Module = getattr(transformers, kind)(made)
        return model.train()

    return build


def causal(name: str, prefix: str, group: str = "causal language model", **more: Any) -> Tiny:
    kind = more.pop("kind", f"{prefix}ForCausalLM")
    config = more.pop("config", f"{prefix}Config")
    return Tiny(name, group, of(kind, config, **more), texts, next_token)


def encoder(name: str, prefix: str, **more: Any) -> Tiny:
    build = of(f"{prefix}ForMaskedLM", f"{prefix}Config", **more)
    return Tiny(name, "encoder", build, texts, each_token)


def two_stacks(name: str, prefix: str, **more: Any) -> Tiny:
    kind = more.pop("kind", f"{prefix}ForConditionalGeneration")
    return Tiny(
        name, "encoder-decoder", of(kind, f"{prefix}Config", **more), pairs_of_texts, each_token
    )


def vision(name: str, prefix: str, loss: Any = whole_class, **more: Any) -> Tiny:
    options = more.pop("options", {})
    kind = more.pop("kind", f"{prefix}ForImageClassification")
    sizes = {"image_size": IMAGE, "patch_size": 8, "num_labels": CLASSES, "vocab_size": VOCABULARY}
    build = of(kind, f"{prefix}Config", **{**sizes, **more})
    return Tiny(name, "vision", build, images, loss, options)


KV: dict[str, Any] = {"num_key_value_heads": 2}
HEADS: dict[str, Any] = {"head_dim": 8, **KV}
BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, **KV}
SOUND: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_stride": (8, 8),
    "conv_kernel": (16, 16),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "num_labels": CLASSES,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}
SERIES: dict[str, Any] = {
    "prediction_length": 8,
    "context_length": 32,
    "lags_sequence": [1, 2, 8],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "scaling": "mean",
}
SMALL_TEXT: dict[str, Any] = {k: v for k, v in SIZES.items() if not k.endswith("_id")}
SMALL_IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": 16,
}


class Recurrent(nn.Module):
    """A byte-level model with torch's own LSTM or GRU."""

    def __init__(self, kind: Any, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.recur = kind(32, 32, num_layers=2, batch_first=True, dropout=dropout)
        self.read = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.read(self.recur(self.embed(input_ids))[0])
        return logits


def recurrent_loss(model: Any, micro: Batch) -> wb.Loss:
    return wb.cross_entropy(model(micro["input_ids"])[:, :-1], micro["labels"][:, 1:])


def llama(**more: Any) -> nn.Module:
    return of("LlamaForCausalLM", "LlamaConfig", **{**KV, **more})()


def checkpointed(*, reentrant: bool, **more: Any) -> Callable[[], nn.Module]:
    """Return a builder of a Llama with transformers' own gradient checkpointing."""

    def build() -> nn.Module:
        model: Any = llama(**more)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model.train()  # type: ignore[no-any-return]

    return build


def with_lora(*, checkpoint: bool = False) -> nn.Module:
    """Return a Llama with PEFT's LoRA, set up as PEFT's guides say."""
    from peft import LoraConfig, get_peft_model

    base: Any = llama()
    base.enable_input_require_grads()
    if checkpoint:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # They begin at zero, and then A gets no gradient.
            nn.init.normal_(parameter, std=0.1)
    return model.train()  # type: ignore[no-any-return]


def frozen_below(*, checkpoint: bool = False) -> nn.Module:
    """Return a Llama whose embeddings are frozen, with the hook that LoRA's users register."""
    model: Any = llama()
    model.get_input_embeddings().weight.requires_grad_(False)
    model.enable_input_require_grads()
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()  # type: ignore[no-any-return]


def clip() -> nn.Module:
    return of(
        "CLIPModel",
        "CLIPConfig",
        text_config={**SMALL_TEXT, "eos_token_id": 2},
        vision_config=SMALL_IMAGE,
        projection_dim=16,
    )()


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig

    return of(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        text_config=LlamaConfig(**{**SIZES, **KV}),
        vision_config=CLIPVisionConfig(**SMALL_IMAGE),
        image_token_id=VOCABULARY - 1,
        image_token_index=VOCABULARY - 1,
        image_seq_length=4,
        vision_feature_layer=-1,
    )()


def qwen2_vl() -> nn.Module:
    return of(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        text_config={
            **SIZES,
            **KV,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "mlp_ratio": 2,
        },
        image_token_id=VOCABULARY - 1,
        video_token_id=VOCABULARY - 2,
        vision_start_token_id=VOCABULARY - 3,
        vision_end_token_id=VOCABULARY - 4,
    )()


def patches_in_texts(number: int, seed: int) -> Batch:
    """Return one image for each text, as Qwen2-VL takes it: a row of patches for each sample."""
    made = images_in_texts(number, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = made["input_ids"]
    tokens[(tokens >= VOCABULARY - 4) & (tokens < VOCABULARY - 1)] = 3
    return {
        **made,
        "input_ids": tokens,
        "pixel_values": torch.randn(number, 16, 3 * 2 * 8 * 8, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(number, 1),
        "mm_token_type_ids": (tokens == VOCABULARY - 1).int(),
    }


def patched_loss(model: Any, micro: Batch) -> wb.Loss:
    flat = {**micro, "pixel_values": micro["pixel_values"].flatten(0, 1)}
    return next_token(model, flat)


MOE = "mixture of experts"
LINEAR = "state space, recurrent"

MODELS: tuple[Tiny, ...] = (
    causal("gpt2", "GPT2", kind="GPT2LMHeadModel", n_inner=64),
    causal("llama", "Llama", **KV),
    Tiny("llama, its own loss", "causal language model", llama, texts, by_its_own_loss),
    causal("qwen2", "Qwen2", **KV),
    causal("qwen3", "Qwen3", **HEADS),
    causal("mistral", "Mistral", **KV, sliding_window=8),
    causal("gemma2", "Gemma2", **HEADS, sliding_window=8),
    causal("gemma3", "Gemma3", config="Gemma3TextConfig", **HEADS, sliding_window=8),
    causal("phi3", "Phi3", **KV),
    causal("opt", "OPT", ffn_dim=64, word_embed_proj_dim=32),
    causal("gpt_neox", "GPTNeoX"),
    causal("bloom", "Bloom"),
    causal("falcon", "Falcon"),
    causal("mpt", "Mpt", expansion_ratio=2),
    causal("stablelm", "StableLm", **KV),
    causal("starcoder2", "Starcoder2", **KV),
    causal("olmo2", "Olmo2", **KV),
    causal("granite", "Granite", **KV),
    causal("cohere", "Cohere", **KV),
    causal("gptj", "GPTJ", rotary_dim=4, n_inner=64),
    causal("codegen", "CodeGen", rotary_dim=4, n_inner=64),
    causal(
        "gpt_neo", "GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    causal("smollm3", "SmolLM3", **KV),
    causal("mixtral", "Mixtral", MOE, **EXPERTS),
    causal(
        "qwen2_moe",
        "Qwen2Moe",
        MOE,
        **EXPERTS,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    causal("qwen3_moe", "Qwen3Moe", MOE, **EXPERTS, head_dim=8, moe_intermediate_size=32),
    causal("olmoe", "Olmoe", MOE, **EXPERTS),
    causal("gpt_oss", "GptOss", MOE, **EXPERTS, head_dim=8, sliding_window=8),
    causal(
        "deepseek_v3",
        "DeepseekV3",
        MOE,
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    two_stacks(
        "switch_transformers",
        "SwitchTransformers",
        **T5,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        router_jitter_noise=0.0,
    ),
    causal("mamba", "Mamba", LINEAR, state_size=8, time_step_rank=4),
    causal(
        "mamba2", "Mamba2", LINEAR, state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8
    ),
    causal("rwkv", "Rwkv", LINEAR, context_length=64, attention_hidden_size=32),
    Tiny("nn.LSTM", LINEAR, lambda: Recurrent(nn.LSTM), texts, recurrent_loss),
    Tiny("nn.GRU", LINEAR, lambda: Recurrent(nn.GRU), texts, recurrent_loss),
    Tiny(
        "nn.LSTM, dropout",
        LINEAR,
        lambda: Recurrent(nn.LSTM, 0.1),
        texts,
        recurrent_loss,
        random=True,
    ),
    encoder("bert", "Bert"),
    encoder("roberta", "Roberta", max_position_embeddings=66, pad_token_id=1),
    encoder("distilbert", "DistilBert", hidden_dim=64, dim=32, n_layers=2, n_heads=4),
    encoder("electra", "Electra", embedding_size=32),
    encoder(
        "deberta-v2",
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
    ),
    encoder("albert", "Albert", embedding_size=16),
    encoder("modernbert", "ModernBert", local_attention=8, global_attn_every_n_layers=2),
    encoder("mpnet", "MPNet"),
    Tiny(
        "bert, classifier",
        "encoder",
        of("BertForSequenceClassification", "BertConfig", num_labels=CLASSES),
        classified_texts,
        whole_class,
    ),
    two_stacks("t5", "T5", **T5),
    two_stacks("t5 v1.1", "T5", **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    two_stacks("bart", "Bart", **BART),
    two_stacks("mbart", "MBart", **BART),
    two_stacks("pegasus", "Pegasus", **BART),
    two_stacks("marian", "Marian", kind="MarianMTModel", **BART),
    Tiny(
        "whisper",
        "encoder-decoder",
        of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **BART,
            num_mel_bins=16,
            max_source_positions=LENGTH,
            max_target_positions=64,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        spoken_texts,
        each_token,
    ),
    vision("vit", "ViT"),
    vision("deit", "DeiT"),
    vision("beit", "Beit", use_relative_position_bias=True),
    vision(
        "swin",
        "Swin",
        embed_dim=16,
        depths=[1, 1],
        num_attention_heads=[2, 4],
        window_size=2,
        patch_size=4,
    ),
    vision("convnext", "ConvNext", depths=[1, 1], hidden_sizes=[16, 32], num_stages=2),
    vision("dinov2", "Dinov2", mlp_ratio=2),
    vision(
        "segformer",
        "Segformer",
        depths=[1, 1],
        hidden_sizes=[16, 32],
        num_encoder_blocks=2,
        num_attention_heads=[2, 4],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    vision(
        "resnet, BatchNorm frozen",
        "ResNet",
        depths=[1, 1],
        hidden_sizes=[16, 32],
        embedding_size=16,
        layer_type="basic",
        options={"batchnorm": "freeze"},
    ),
    Tiny(
        "wav2vec2",
        "audio",
        of("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **SOUND),
        sounds,
        whole_class,
    ),
    Tiny(
        "hubert",
        "audio",
        of("HubertForSequenceClassification", "HubertConfig", **SOUND),
        sounds,
        whole_class,
    ),
    Tiny(
        "clip",
        "multimodal",
        clip,
        captioned_images,
        output_against_noise("text_embeds", "image_embeds"),
    ),
    Tiny("llava", "multimodal", llava, images_in_texts, next_token),
    Tiny("qwen2_vl", "multimodal", qwen2_vl, patches_in_texts, patched_loss),
    Tiny(
        "time_series_transformer",
        "time series",
        of("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", **SERIES),
        series,
        forecast,
    ),
    Tiny(
        "patchtst",
        "time series",
        of(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            num_input_channels=3,
            context_length=32,
            prediction_length=8,
            patch_length=8,
            patch_stride=8,
            d_model=16,
            ffn_dim=32,
            loss="mse",
            norm_type="layernorm",
        ),
        channels,
        forecast,
    ),
    Tiny(
        "patchtsmixer",
        "time series",
        of(
            "PatchTSMixerForPrediction",
            "PatchTSMixerConfig",
            num_input_channels=3,
            context_length=32,
            prediction_length=8,
            patch_length=8,
            patch_stride=8,
            d_model=16,
            norm_mlp="LayerNorm",
        ),
        channels,
        forecast,
    ),
    Tiny("llama, LoRA (PEFT)", "as it is trained", with_lora, texts, next_token),
    Tiny(
        "llama, LoRA (PEFT), checkpointed",
        "as it is trained",
        lambda: with_lora(checkpoint=True),
        texts,
        next_token,
    ),
    Tiny("llama, enable_input_require_grads", "as it is trained", frozen_below, texts, next_token),
    Tiny(
        "llama, the same, checkpointed",
        "as it is trained",
        lambda: frozen_below(checkpoint=True),
        texts,
        next_token,
    ),
    Tiny(
        "llama, checkpointed", "as it is trained", checkpointed(reentrant=False), texts, next_token
    ),
    Tiny(
        "llama, checkpointed, reentrant",
        "as it is trained",
        checkpointed(reentrant=True),
        texts,
        next_token,
    ),
    Tiny(
        "llama, checkpointed, attention dropout",
        "as it is trained",
        checkpointed(reentrant=False, attention_dropout=0.1),
        texts,
        next_token,
        random=True,
    ),
    Tiny(
        "t5, dropout",
        "as it is trained",
        of("T5ForConditionalGeneration", "T5Config", **{**T5, "dropout_rate": 0.1}),
        pairs_of_texts,
        each_token,
        random=True,
    ),
    Tiny(
        "gpt2, dropout",
        "as it is trained",
        of(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_inner=64,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
        ),
        texts,
        next_token,
        random=True,
    ),
)
