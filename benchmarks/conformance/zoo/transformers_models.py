"""Trials of transformers: one model of each architecture, with two to four narrow layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.conformance.trial import Call, Trial

_VOCABULARY = 128


def _text(sentences: int, words: int) -> Callable[[], Call]:
    return lambda: ((torch.randint(3, _VOCABULARY, (sentences, words)),), {"use_cache": False})


def _words(sentences: int, words: int) -> Callable[[], Call]:
    return lambda: ((torch.randint(3, _VOCABULARY, (sentences, words)),), {})


def _pairs(sentences: int, words: int) -> Callable[[], Call]:
    def make_call() -> Call:
        source, target = (torch.randint(3, _VOCABULARY, (sentences, words)) for _ in range(2))
        return (), {"input_ids": source, "labels": target}

    return make_call


def _images(images: int, side: int) -> Callable[[], Call]:
    return lambda: ((), {"pixel_values": torch.randn(images, 3, side, side)})


def _sound(seconds: float) -> Callable[[], Call]:
    return lambda: ((torch.randn(2, int(16000 * seconds)),), {})


_NARROW = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_DECODER = {**_NARROW, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0}
_SEQUENCE = {
    "vocab_size": _VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
_VISION = {**{key: value for key, value in _NARROW.items() if key != "vocab_size"}, "image_size": 64, "patch_size": 8}
_HEARING = {
    **_NARROW,
    "conv_dim": (32,) * 3,
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}

# By name: configuration, its arguments, the class of the model, and a call.
_MODELS: dict[str, tuple[str, dict[str, Any], str, Callable[[], Call]]] = {
    "albert": ("AlbertConfig", {**_NARROW, "embedding_size": 32}, "AlbertForMaskedLM", _words(8, 96)),
    "bart": ("BartConfig", _SEQUENCE, "BartForConditionalGeneration", _pairs(8, 64)),
    "bert": ("BertConfig", _NARROW, "BertForMaskedLM", _words(8, 96)),
    "bloom": (
        "BloomConfig", {"vocab_size": _VOCABULARY, "hidden_size": 64, "n_layer": 3, "n_head": 4},
        "BloomForCausalLM", _text(8, 96),
    ),
    "clip": (
        "CLIPConfig",
        {"text_config": {**_NARROW, "max_position_embeddings": 32, "eos_token_id": 2}, "vision_config": _VISION},
        "CLIPModel",
        lambda: ((), {"input_ids": torch.randint(3, _VOCABULARY, (8, 32)), "pixel_values": torch.randn(8, 3, 64, 64)}),
    ),
    "convbert": ("ConvBertConfig", _NARROW, "ConvBertForMaskedLM", _words(8, 96)),
    "deberta_v2": (
        "DebertaV2Config",
        {**_NARROW, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 128},
        "DebertaV2ForMaskedLM", _words(8, 96),
    ),
    "detr": (
        "DetrConfig",
        {**{key: value for key, value in _SEQUENCE.items() if key != "vocab_size"}, "num_queries": 10,
         "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
         "backbone_config": transformers.ResNetConfig(
             embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], out_features=["stage4"])},
        "DetrForObjectDetection", _images(2, 128),
    ),
    "distilbert": (
        "DistilBertConfig", {"vocab_size": _VOCABULARY, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128},
        "DistilBertForMaskedLM", _words(8, 96),
    ),
    "dpt": (
        "DPTConfig",
        {**_VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "fusion_hidden_size": 32,
         "neck_hidden_sizes": [16, 32, 64, 64], "num_labels": 4, "use_auxiliary_head": False},
        "DPTForDepthEstimation", _images(2, 64),
    ),
    "falcon": ("FalconConfig", _NARROW, "FalconForCausalLM", _text(8, 96)),
    "fnet": ("FNetConfig", _NARROW, "FNetForMaskedLM", _words(8, 96)),
    "funnel": (
        "FunnelConfig",
        {"vocab_size": _VOCABULARY, "d_model": 64, "block_sizes": [1, 1], "n_head": 4, "d_head": 16, "d_inner": 128},
        "FunnelForMaskedLM", _words(8, 96),
    ),
    "gemma": ("GemmaConfig", {**_DECODER, "head_dim": 16}, "GemmaForCausalLM", _text(8, 96)),
    "gpt2": (
        "GPT2Config", {"vocab_size": _VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4}, "GPT2LMHeadModel",
        _text(8, 96),
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
         "attention_types": [[["global", "local"], 1]]},
        "GPTNeoForCausalLM", _text(8, 96),
    ),
    "llama": ("LlamaConfig", _DECODER, "LlamaForCausalLM", _text(8, 96)),
    "longformer": ("LongformerConfig", {**_NARROW, "attention_window": 16}, "LongformerForMaskedLM", _words(4, 64)),
    "mamba": (
        "MambaConfig", {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        "MambaForCausalLM", lambda: ((torch.randint(3, _VOCABULARY, (4, 24)),), {"use_cache": False}),
    ),
    "mistral": ("MistralConfig", {**_DECODER, "sliding_window": 32}, "MistralForCausalLM", _text(8, 96)),
    "mixtral": (
        "MixtralConfig", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, "MixtralForCausalLM",
        _text(8, 96),
    ),
    "mobilebert": ("MobileBertConfig", {**_NARROW, "embedding_size": 32, "intra_bottleneck_size": 32},
                   "MobileBertForMaskedLM", _words(8, 96)),
    "reformer": (
        "ReformerConfig",
        {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_attention_heads": 4, "attention_head_size": 16,
         "attn_layers": ["local", "lsh"], "feed_forward_size": 128, "axial_pos_embds": False, "is_decoder": True,
         "num_hashes": 1, "num_buckets": 4, "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16,
         "max_position_embeddings": 128},
        "ReformerModelWithLMHead", _text(4, 64),
    ),
    "roberta": ("RobertaConfig", _NARROW, "RobertaForMaskedLM", _words(8, 96)),
    "segformer": (
        "SegformerConfig",
        {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "decoder_hidden_size": 64, "drop_path_rate": 0.1},
        "SegformerForSemanticSegmentation", _images(4, 128),
    ),
    "swin": (
        "SwinConfig",
        {"image_size": 64, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        "SwinForImageClassification", _images(8, 64),
    ),
    "t5": (
        "T5Config",
        {"vocab_size": _VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
        "T5ForConditionalGeneration", _pairs(8, 64),
    ),
    "videomae": (
        "VideoMAEConfig", {**_VISION, "num_frames": 4}, "VideoMAEForVideoClassification",
        lambda: ((torch.randn(2, 4, 3, 64, 64),), {}),
    ),
    "vit": ("ViTConfig", _VISION, "ViTForImageClassification", _images(8, 64)),
    "vit_mae": (
        "ViTMAEConfig", {**_VISION, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2,
                         "decoder_num_attention_heads": 4, "decoder_intermediate_size": 64},
        "ViTMAEForPreTraining", _images(8, 64),
    ),
    "wav2vec2": ("Wav2Vec2Config", _HEARING, "Wav2Vec2Model", _sound(1.0)),
    "whisper": (
        "WhisperConfig",
        {**_SEQUENCE, "num_mel_bins": 20, "max_source_positions": 100, "max_target_positions": 64,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        "WhisperForConditionalGeneration",
        lambda: ((torch.randn(4, 20, 200),), {"labels": torch.randint(3, _VOCABULARY, (4, 48))}),
    ),
    "xlnet": (
        "XLNetConfig", {"vocab_size": _VOCABULARY, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
        "XLNetLMHeadModel", _words(8, 96),
    ),
    "yolos": ("YolosConfig", {**_VISION, "image_size": [64, 64], "num_detection_tokens": 10},
              "YolosForObjectDetection", _images(8, 64)),
}  # fmt: skip
NAMES = tuple(_MODELS)


def trials(name: str) -> Iterator[Trial]:
    """The model in training mode on one batch of noise."""
    configuration, options, kind, make_call = _MODELS[name]

    def make_model() -> nn.Module:
        model: nn.Module = getattr(transformers, kind)(getattr(transformers, configuration)(**options))
        return model

    yield Trial(make_model, make_call)
