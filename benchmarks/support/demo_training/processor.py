"""Builds the demo model's tokenizer, chat template and processor from scratch.

The tokenizer is a byte-level BPE, so any text can be encoded and decoded; its merges come from the demo's own
sentences, so that every word in them, with the space before it and the punctuation after it, is one token.
"""

import string

import apbv  # noqa: F401  (before transformers: see apbv.torchvision_guard)

# isort: split
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from .. import clips

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- macro part(item) -%}
{%- if item is string -%}{{ item }}
{%- elif item.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif item.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ item.text }}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ '\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for item in message.content -%}{{ part(item) }}{%- endfor -%}
{%- endif -%}
<|im_end|>{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the demo's tokenizer, deterministically; it has about 500 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n| ?[^\s]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # never reached: merging stops when every word of the sentences is one token
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        clean_up_tokenization_spaces=False,
        model_max_length=65536,
    )


def build_processor() -> Qwen2_5_VLProcessor:
    """Build Qwen2.5-VL's own processor with the demo's tokenizer; it scales frames to 56^2 to 168^2 pixels."""
    smallest, largest = ((clips.TOKEN_SIZE * grid) ** 2 for grid in (min(clips.GRIDS), max(clips.GRIDS)))
    size = {"shortest_edge": smallest, "longest_edge": largest}
    vision = {"size": size, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**vision),
        video_processor=Qwen2VLVideoProcessor(
            **vision,
            num_frames=2048,  # all frames of any clip, because questions are about every shot
            do_sample_frames=False,
            cap_pixels_per_frame=False,
        ),
        tokenizer=build_tokenizer(),
        chat_template=CHAT_TEMPLATE,
    )


def _sentences() -> list[str]:
    """List everything that the demo's questions and answers are made of."""
    asked = [clips.RETRIEVAL_QUESTION.format(colour=colour) for colour in clips.COLOURS]
    asked += [clips.ORDERING_QUESTION, clips.COUNTING_QUESTION, clips.DESCRIBE_QUESTION]
    words = [*clips.COLOURS, *string.ascii_uppercase, *string.digits, *" ".join(clips.SCENES).split(), "end"]
    forms = [form for word in words for form in (word, f" {word}", f" {word},")]
    roles = ["system", "user", "assistant"]
    # The list is doubled because BPE merges only what it sees more than once.
    return 2 * [*asked, *(f" {sentence}" for sentence in asked), *forms, *roles]
