"""Tiny random models with genuine processors, one per supported family, built without hub access.

The model classes, configurations, processors and video processors are the library's own; only the
sizes, the weights and the byte-level tokenizer are ours. Weights are drawn so that activations keep
unit scale: attention really selects, biases and norms are not neutral, and greedy continuations
vary.
"""

from __future__ import annotations

import tomllib
from copy import deepcopy
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import nn

from apbv.compat.torchvision_guard import ensure_torchvision_imports

ensure_torchvision_imports()

import transformers as tf  # noqa: E402  (the guard must run before the video processors are imported)

OMNI = "qwen2_5_omni_thinker"
VIDEO_FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "internvl",
    "llava_onevision",
    "llava_next_video",
    OMNI,
    "glm4v",
    "glm46v",
    "qwen3_5",
    "qwen3_5_moe",
    "video_llama_3",
    "glm4v_moe",
    "glm_ocr",
)
IMAGE_FAMILIES = ("llava", "llava_next")  # they read no video
VISION_FAMILIES = VIDEO_FAMILIES + IMAGE_FAMILIES
TEXT_FAMILIES = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "smollm3", "glm4"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
HYBRID_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_QWEN3_ALIKE = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")

SPECIAL_TOKENS = (
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
    ),
    *("<|image_pad|>", "<|video_pad|>", "<image>", "<video>", "<img>", "</img>", "<IMG_CONTEXT>"),
)
EOS = "<|im_end|>"
PAD = "<|endoftext|>"

FIRST_SPECIAL = 256  # token ids below are bytes

HIDDEN = 64
EXPERT_WIDTH = 48
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
MEL_BINS = 16  # of sound; a window of 40 mel frames is 0.4 s, and makes 10 tokens
_DATA = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
FAMILY_DATA = {name: data for data in _DATA["family"] for name in data["names"]}


def build_tokenizer(family: str) -> tf.PreTrainedTokenizerFast:
    """A byte-level tokenizer (one token a byte) with the special tokens of every family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    # As Qwen2Tokenizer, which AutoTokenizer puts in for qwen2.
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in _special_tokens(family)]
    )
    own = FAMILY_DATA.get(family, {})
    named = {"extra_special_tokens": own["named"]} if "named" in own else {}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=_chat_template(family),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _special_tokens(family: str) -> tuple[str, ...]:
    return (*SPECIAL_TOKENS, *FAMILY_DATA.get(family, {}).get("own", []))


def _chat_template(family: str) -> str:
    """ChatML turns; content is a string or a list of text, image, video and audio parts."""
    placeholders = [
        text.replace("\n", "\\n") for text in FAMILY_DATA.get(family, {}).get("placeholders", [])
    ]
    image, video, audio, *_ = (*placeholders, "", "", "")
    return (
        "{%- for message in messages -%}"
        "{{- '<|im_start|>' + message.role + '\\n' -}}"
        "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
        "{%- for part in message.content -%}"
        "{%- if part.type == 'image' -%}{{- '" + image + "' -}}"
        "{%- elif part.type == 'video' -%}{{- '" + video + "' -}}"
        "{%- elif part.type == 'audio' -%}{{- '" + audio + "' -}}"
        "{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}"
        "{{- '<|im_end|>\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def build_processor(family: str):
    """The family's own processor class (the bare tokenizer for a text family)."""
    tokenizer = build_tokenizer(family)
    if family in TEXT_FAMILIES:
        return tokenizer
    own = deepcopy(FAMILY_DATA[family])  # tests change a processor's sizes
    classes = own["processor"]
    parts = {
        "tokenizer": tokenizer,
        "chat_template": tokenizer.chat_template,
        "image_processor": getattr(tf, f"{classes['image']}ImageProcessor")(**own["image"]),
        **classes.get("options", {}),
    }
    if "video" in classes:
        video_class = getattr(tf, f"{classes['video']}VideoProcessor")
        parts["video_processor"] = video_class(**own["video"])
    if family == OMNI:
        # It cuts what is longer than ``chunk_length`` seconds; the checkpoints have 300.
        parts["feature_extractor"] = tf.WhisperFeatureExtractor(
            feature_size=MEL_BINS, chunk_length=8, return_attention_mask=True
        )
    processor = getattr(tf, f"{classes['name']}Processor")(**parts)
    if family == OMNI:
        # Of its own it makes 128 tokens of a frame at least.
        processor.videos_kwargs = {"size": own["video"]["size"]}
    return processor


def build_config(
    family: str,
    *,
    layers: int | None = None,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    decoder: str | None = None,
) -> tf.PreTrainedConfig:
    """The family's configuration, tiny, with token ids that match ``build_tokenizer``.

    ``decoder`` is the family of the text part, of a vision-language family that may have any; None:
    the one that ``families.toml`` names.
    """
    decoder = decoder or FAMILY_DATA.get(family, {}).get("decoder", "qwen2")
    layers = layers or (4 if family in HYBRID_FAMILIES else 3)
    tokenizer = build_tokenizer(family)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in _special_tokens(family)}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
        "tie_word_embeddings": False,
    }
    if family in ("llama", "mistral", "smollm3", "glm4") or "qwen3" in (family[:5], decoder[:5]):
        text["head_dim"] = HEAD_DIM
    if family == "glm4v_moe":
        text |= {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        }
        text |= {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH}
    elif family.endswith("_moe") or decoder.endswith("_moe"):
        text |= {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_WIDTH,
            "norm_topk_prob": True,
        }
    if family in HYBRID_FAMILIES:
        text["rope_parameters"]["partial_rotary_factor"] = 0.5
        text["layer_types"] = [
            "full_attention" if index % 2 else "linear_attention" for index in range(layers)
        ]
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
        text |= {"linear_value_head_dim": 12}
        if family not in ("qwen3_5", "qwen3_5_text"):
            text |= {
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": EXPERT_WIDTH,
            }
            text["shared_expert_intermediate_size"] = HIDDEN // 2
    own_class = type(tf.AutoConfig.for_model(family).get_text_config())
    if family in HYBRID_FAMILIES and not hasattr(own_class(), "intermediate_size"):
        del text["intermediate_size"]  # as in checkpoints, whose layers all have experts
    if family == "mistral":
        text["sliding_window"] = None  # as in the releases from 0.2 on
    if family == "smollm3":
        text["no_rope_layer_interval"] = 2  # every second layer has no positions
    if family.startswith(("glm4", "glm_ocr")):
        text["rope_parameters"]["partial_rotary_factor"] = 0.5
    if family in TEXT_FAMILIES:
        return tf.AutoConfig.for_model(family, **text)

    is_glm = family.startswith(("glm4", "glm_ocr"))
    own = deepcopy(FAMILY_DATA[family])
    if is_glm or family in ("qwen2_vl", "qwen2_5_vl", OMNI, *_QWEN3_ALIKE):
        # Halves of the rotary dimensions: time, height, width.
        section = {"mrope_section": [2, 3, 3]}
        if family in _QWEN3_ALIKE:
            section = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
        if family in HYBRID_FAMILIES:
            section["mrope_section"] = [2, 1, 1]  # of the half of a head that is turned
        if is_glm:
            section["mrope_section"] = [1, 1, 2]  # of the pairs of numbers that are turned
        text["rope_parameters"].update(section)
    else:
        text["model_type"] = decoder
    return tf.AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=own["vision"],
        tie_word_embeddings=False,
        **{name: ids[token] for name, token in own["ids"].items()},
        **own.get("settings", {}),
    )


def build_model(
    family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: int
) -> tf.PreTrainedModel:
    """The family's own model class with random weights, in eval mode, with sdpa attention.

    ``sizes`` are those of ``build_config``, of the text model. The same arguments give the same
    weights; the global random state is left as it was.
    """
    config = build_config(family, **sizes)
    auto = tf.AutoModelForCausalLM if family in TEXT_FAMILIES else tf.AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Grouped products of experts have no kernel for doubles.
        has_experts = "_moe" in family or family == "qwen3_next"
        experts = (
            {"experts_implementation": "eager"} if dtype == torch.float64 and has_experts else {}
        )
        model = auto.from_config(config, attn_implementation="sdpa", **experts)
        randomise(model)
    text = config.get_text_config()
    generation = model.generation_config
    generation.eos_token_id = text.eos_token_id
    generation.pad_token_id = text.pad_token_id
    generation.do_sample = False
    return model.to(dtype).eval()


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Draw weights that keep activations at unit scale, and move norms and biases off neutral.

    Special tokens get small output weights, so that greedy decoding emits bytes, never a
    placeholder or EOS.
    """
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                weight.normal_(std=0.5)
            elif (
                isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
                and name == "weight"
            ):
                weight.normal_(std=1.7 / weight[0].numel() ** 0.5)
            elif type(module).__name__.endswith(("Experts", "Router")):
                weight.normal_(std=1.7 / weight.shape[-1] ** 0.5)
            elif name == "A_log":  # states that remember from one to two hundred tokens
                weight.uniform_(-5, 0)
            else:  # biases, norms, layer scales, class tokens, newline embeddings
                weight.add_(torch.randn_like(weight), alpha=0.2)
    model.get_output_embeddings().weight[FIRST_SPECIAL:] *= 0.1


def save_checkpoint(family: str, directory: str | Path, **kwargs) -> Path:
    """Write model (``kwargs`` go to ``build_model``) and processor so that the Auto classes load
    them."""
    directory = Path(directory)
    build_model(family, **kwargs).save_pretrained(directory)
    build_processor(family).save_pretrained(directory)
    return directory


def synthetic_video(
    frames: int = 10, height: int = 84, width: int = 112, *, seed: int = 0
) -> torch.Tensor:
    """A uint8 [frames, 3, height, width] clip: drifting colour gradients with some noise."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(frames).view(-1, 1, 1, 1)
    channel = torch.arange(1, 4).view(1, -1, 1, 1)
    y = torch.arange(height).view(1, 1, -1, 1)
    x = torch.arange(width).view(1, 1, 1, -1)
    noise = torch.randint(0, 64, (frames, 3, height, width), generator=generator)
    return ((3 * x + 5 * channel * y + 11 * t * channel) % 192 + noise).to(torch.uint8)


def synthetic_image(height: int = 84, width: int = 112, *, seed: int = 0):
    """The first frame of ``synthetic_video`` as a PIL image."""
    from PIL import Image

    return Image.fromarray(synthetic_video(1, height, width, seed=seed)[0].permute(1, 2, 0).numpy())


def timed(processor, batch: dict, metadata: list) -> dict:
    """A processor's batch at the rates that its videos' frames really have, as ``VideoMetadata``
    says.

    Qwen2.5-Omni's processor does not ask the metadata: it is told one rate for all videos.
    """
    if not isinstance(processor, tf.Qwen2_5OmniProcessor) or not metadata:
        return batch
    seconds = [each.total_num_frames / each.fps / len(each.frames_indices) for each in metadata]
    return {**batch, "video_second_per_grid": 2 * torch.tensor(seconds)}
