"""The server with a model that reads images and no video."""

import openai
import pytest

from apbv import Engine, HostGroup

from apbv_tests.servers import data_url, part, serving, text

QUESTION = "What is shown?"


def test_a_server_answers_about_images_and_refuses_video(tmp_path, media, checkpoints):
    """On two hosts, which share out two images; the answer is that of the library."""
    path = checkpoints("llava")
    picture = media / "picture.png"
    engine = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"))
    expected = engine.generate(QUESTION, images=[picture, picture], max_new_tokens=6)
    words = ["--model", path, "--served-model-name", "demo", "--dtype", "float32"]
    words += ["--method", "zigzag_ring", "--media-dir", media]
    with serving(tmp_path / "out", *words) as server:
        content = [part("image", picture), part("image", data_url(picture)), text(QUESTION)]
        options = {"max_tokens": 6, "extra_body": {"return_token_ids": True}}
        answer = server.ask(content, **options)
        assert answer.choices[0].model_extra["token_ids"] == expected.token_ids
        assert answer.usage.prompt_tokens == expected.stats["num_input_tokens"]
        with pytest.raises(openai.BadRequestError, match="llava models read images only"):
            server.ask([part("video", media / "clip.mp4"), text(QUESTION)])
