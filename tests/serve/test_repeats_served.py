"""A server of VideoLLaMA 3, whose prompts depend on pixels, which it reads before its engine
does."""

from contextlib import closing
from unittest.mock import patch

import numpy as np

from apbv.input.prompts.repeats import kept_tokens

from apbv_tests import families, video_files
from apbv_tests.servers import InProcess, part, post, text


def moving_corner(i: int, height: int, width: int) -> np.ndarray:
    """A picture that stands still but for one corner."""
    image = video_files.picture(0, height, width)
    image[: height // 2, : width // 2] += np.uint8(20 * i)
    return image


def test_a_video_is_compared_once_for_all_requests(tmp_path):
    video_files.encode(
        tmp_path / "a.mp4", n=8, size=(84, 112), draw=moving_corner, x264="qp=0:scenecut=0"
    )
    model = families.save_checkpoint("video_llama_3", tmp_path / "model")
    with (
        closing(InProcess(media_dir=tmp_path, model=str(model), max_model_len=2000)) as app,
        patch("apbv.input.prompts.prompt_reader.kept_tokens", wraps=kept_tokens) as compared,
    ):
        messages = [{"role": "user", "content": [part("video", "a.mp4"), text("What?")]}]
        options = {"messages": messages, "max_tokens": 5, "num_frames": 8}
        replies = [post(app, "/v1/chat/completions", **options).json() for _ in range(2)]
        assert compared.call_count == 1
        asked = {"prompt": "What?", "video": tmp_path / "a.mp4", "num_frames": 8}
        expected = app.engine.generate(**asked, max_new_tokens=5)
        state = app.engine.prefill(**asked)
        for reply in replies:
            assert reply["choices"][0]["message"]["content"] == expected.text.rstrip("\ufffd")
            assert reply["usage"]["prompt_tokens"] == state.num_tokens
    assert 12 + 7 <= state.inputs.num_visual_tokens < 8 * 12
