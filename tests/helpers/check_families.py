"""A look at the tiny models of every family, for whoever adds one: ``python tests/helpers/check_families.py``."""

import tempfile
import time

import families  # before transformers: it lets the video processors be imported

# isort: split
import torch
import transformers as tf
from transformers.video_utils import VideoMetadata


def main() -> None:
    """Say what every family makes of video, image and text, and of a model that was saved and loaded."""
    for family in families.VIDEO_FAMILIES + families.TEXT_FAMILIES:
        start = time.perf_counter()
        model, processor = families.build_model(family), families.build_processor(family)
        parameters = sum(p.numel() for p in model.parameters())
        built = time.perf_counter() - start

        def prompt(*kinds, processor=processor):
            content = [{"type": kind} for kind in kinds] + [{"type": "text", "text": "What happens here? é日"}]
            turns = [{"role": "user", "content": content}]
            return processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)

        cases = {"text": processor(text=[prompt()], return_tensors="pt")}
        if family in families.VIDEO_FAMILIES:
            meta = VideoMetadata(total_num_frames=40, fps=8.0, frames_indices=list(range(0, 40, 4)))
            cases["video"] = processor(
                text=[prompt("video")],
                videos=[families.synthetic_video()],
                video_metadata=[meta],
                do_sample_frames=False,
                return_tensors="pt",
            )
            cases["image"] = processor(
                text=[prompt("image")], images=[families.synthetic_image()], return_tensors="pt"
            )
        summary = []
        for name, inputs in cases.items():
            length = inputs["input_ids"].shape[1]
            tokens = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8)[0, length:].tolist()
            assert len(set(tokens)) > 2 and max(tokens) < 256, (family, name, tokens)
            with torch.no_grad():
                spread = model(**inputs).logits.std().item()
            summary.append(f"{name} {length} tokens, {len(set(tokens))} distinct, logit std {spread:.2f}")

        with tempfile.TemporaryDirectory() as directory:
            families.save_checkpoint(family, directory)
            auto = tf.AutoModelForImageTextToText if family in families.VIDEO_FAMILIES else tf.AutoModelForCausalLM
            loaded = auto.from_pretrained(directory).eval()
            again = (tf.AutoProcessor if family in families.VIDEO_FAMILIES else tf.AutoTokenizer).from_pretrained(
                directory
            )
            inputs = list(cases.values())[-1]
            with torch.no_grad():
                assert torch.equal(model(**inputs).logits, loaded(**inputs).logits), family
            assert family in families.TEXT_FAMILIES or type(again) is type(processor), family
            assert prompt(processor=again) == prompt()
            text = cases["text"]["input_ids"]
            assert torch.equal(again(text=[prompt()], return_tensors="pt")["input_ids"], text), family
        print(f"{family}: {parameters} parameters, built in {built:.2f} s; " + "; ".join(summary))


if __name__ == "__main__":
    main()
