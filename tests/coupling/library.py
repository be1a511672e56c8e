"""Models of transformers', small, with the losses that they bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from zoo import SAMPLES, Known, generator, tokens

SMALL = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
SMALL_LM = {**SMALL, "intermediate_size": 32, "max_position_embeddings": 32}


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make().train()

    return build


def gpt2(dropout: float) -> Callable[[], nn.Module]:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = hf.GPT2Config(vocab_size=40, n_layer=2, n_head=2, n_embd=16, n_positions=32, **drops)
    return seeded(lambda: hf.GPT2LMHeadModel(config))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL_LM))


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        **SMALL_LM,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    return hf.MixtralForCausalLM(config)


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**SMALL_LM, num_labels=3))


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def resnet() -> nn.Module:
    config = hf.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return hf.ResNetForImageClassification(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    return hf.ViTForImageClassification(config)


def clip() -> nn.Module:
    text = {**SMALL_LM, "eos_token_id": 39, "projection_dim": 8}
    vision = {**text, "image_size": 8, "patch_size": 4}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def wav2vec2() -> nn.Module:
    config = hf.Wav2Vec2Config(
        **{**SMALL, "vocab_size": 6},
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        ctc_loss_reduction="sum",
    )
    return hf.Wav2Vec2ForCTC(config)


def own_loss(count: Callable[[dict[str, Tensor]], Any]) -> Any:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        return model(**batch).loss, count(batch)

    return loss


def next_tokens(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def samples(batch: dict[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def classed() -> dict[str, Tensor]:
    batch = tokens()
    return {**batch, "labels": torch.arange(8) % 3}


def pictures() -> dict[str, Tensor]:
    pixels = torch.randn(8, 3, 8, 8, generator=generator())
    return {"pixel_values": pixels, "labels": torch.arange(8) % 3}


def pairs() -> dict[str, Tensor]:
    batch = tokens()
    del batch["labels"]
    pixels = torch.randn(8, 3, 8, 8, generator=generator())
    return {**batch, "pixel_values": pixels, "return_loss": torch.ones(8, dtype=torch.bool)}


def clip_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    return model(**{**batch, "return_loss": True}).loss, len(batch["input_ids"])


def sound() -> dict[str, Tensor]:
    wave = torch.randn(SAMPLES, 160, generator=generator())
    labels = torch.tensor([[1, 2, 3], [4, 5, -100]]).repeat(SAMPLES // 2, 1)
    return {"input_values": wave, "labels": labels}


MEAN = {"reduction": "mean"}
LIBRARY: dict[str, Known] = {
    "GPT-2, tokens counted": Known(gpt2(0.0), own_loss(next_tokens), tokens, options=MEAN),
    "GPT-2, samples counted": Known(
        gpt2(0.0), own_loss(samples), tokens, ("shares",), options=MEAN
    ),
    "GPT-2, taken for a sum": Known(gpt2(0.0), own_loss(next_tokens), tokens, ("factor",)),
    "GPT-2 with dropout": Known(
        gpt2(0.1),
        own_loss(next_tokens),
        tokens,
        ("dropout",),
        ("transformer.drop", "transformer.h.0.attn", "transformer.h.1.mlp.dropout"),
        MEAN,
    ),
    "Llama": Known(seeded(llama), own_loss(next_tokens), tokens, options=MEAN),
    "Mixtral with its load balancing": Known(
        seeded(mixtral),
        own_loss(next_tokens),
        tokens,
        ("coupled",),
        options=MEAN,
        dtype="float32",  # the experts' grouped product knows nothing wider
    ),
    "BERT, a classifier, in eval mode": Known(
        lambda: seeded(bert)().eval(), own_loss(samples), classed, options=MEAN
    ),
    "BERT, a classifier": Known(
        seeded(bert), own_loss(samples), classed, ("dropout",), options=MEAN
    ),
    "T5": Known(seeded(t5), own_loss(lambda b: (b["labels"] != -100).sum()), tokens, options=MEAN),
    "ResNet": Known(
        seeded(resnet),
        own_loss(samples),
        pictures,
        ("batchnorm",),
        ("resnet.embedder.embedder.normalization",),
        MEAN,
    ),
    "ViT": Known(seeded(vit), own_loss(samples), pictures, options=MEAN),
    "CLIP": Known(seeded(clip), clip_loss, pairs, ("coupled",), options=MEAN),
    "wav2vec 2.0 with CTC": Known(seeded(wav2vec2), own_loss(samples), sound),
}
