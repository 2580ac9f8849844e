"""Options beside a file: those of a video's sampling are followed, others are named; so are ignored
fields."""

import pytest

from apbv.input.media.video import probe, sample_fps, sample_uniform
from apbv.input.prompts.content import OTHER_FILE_OPTIONS

from apbv_tests.servers import part, post, text

CHAT = "/v1/chat/completions"
QUESTION = text("which letter has the border: red")


def chat(*content, **fields) -> dict:
    return {
        "messages": [{"role": "user", "content": [*content, QUESTION]}],
        "max_tokens": 1,
        **fields,
    }


def forms(**options) -> list[dict]:
    """A video with options, as people write it."""
    url = "clip.mp4"
    return [
        {"type": "video", "video": url, **options},
        {"type": "video_url", "video_url": {"url": url}, **options},
        {"type": "video_url", "video_url": {"url": url, **options}},
        {"video_url": url, **options},
    ]


@pytest.fixture
def sampled(app, monkeypatch):
    """The frames of each video that the engine was asked about, request by request."""
    found = []
    read = app.reader.read

    def reading(*arguments):
        ready = read(*arguments)
        found.append([video.frames for video in ready.prompt.videos])
        return ready

    monkeypatch.setattr(app.reader, "read", reading)
    return found


def test_each_video_is_sampled_as_its_part_says(app, media, sampled):
    info = probe(media / "clip.mp4")
    for options, fields, expected in (
        ({}, {}, sample_uniform(info, 8)),
        ({"fps": 0.25}, {}, sample_fps(info, 0.25)),
        ({"fps": 2}, {"fps": 0.25, "num_frames": 3}, sample_fps(info, 2, max_frames=3)),
        ({"fps": 4.0, "max_frames": 5}, {}, sample_fps(info, 4, max_frames=5)),
        ({"nframes": 4}, {"fps": 0.25}, sample_uniform(info, 4)),
        ({"num_frames": 4}, {"num_frames": 2}, sample_uniform(info, 4)),
        ({"max_frames": 2}, {}, sample_uniform(info, 2)),
        ({"fps": 0.25, "min_frames": 6}, {"num_frames": 3}, sample_uniform(info, 6)),
        ({"fps": None, "max_pixels": None}, {}, sample_uniform(info, 8)),
    ):
        for video in forms(**options):
            reply = post(app, CHAT, **chat(video, **fields))
            assert reply.status_code == 200, reply.text
            assert sampled.pop() == [tuple(expected)], (video, fields)
    both = [forms(nframes=2)[0], forms(fps=0.25)[2], part("video", "clip.mp4")]
    assert post(app, CHAT, **chat(*both, num_frames=3)).status_code == 200
    assert [*map(len, sampled.pop())] == [2, len(sample_fps(info, 0.25, max_frames=3)), 3]


def test_only_the_asked_part_of_a_video_is_sampled(app, media, sampled):
    """Of 32 seconds at 4 frames per second; the same file may come again, with another part."""
    whole = forms()[0]
    for options, expected in (
        ({"video_start": 10, "video_end": 12.5, "nframes": 3}, [40, 45, 50]),
        ({"video_start": 30.0, "fps": 1}, [120, 124]),
        ({"video_end": 2, "fps": 0.5}, [0, 8]),
    ):
        for video in forms(**options):
            reply = post(app, CHAT, **chat(video, whole, num_frames=4))
            assert reply.status_code == 200, reply.text
            assert sampled.pop() == [
                tuple(expected),
                tuple(sample_uniform(probe(media / "clip.mp4"), 4)),
            ]
    for options, message in (
        ({"video_start": 32}, "clip.mp4: video_start is 32 s, but the video lasts 32.000 s"),
        ({"video_start": 3, "video_end": 1}, "video_start of a video is 3.0, but video_end is 1.0"),
        (
            {"video_start": 1.1, "video_end": 1.2},
            "no frame between video_start 1.1 s and video_end 1.2 s",
        ),
    ):
        reply = post(app, CHAT, **chat(forms(**options)[1]))
        assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text


def test_frames_are_as_large_as_their_part_says(app):
    """A visual token is 28 pixels square: 784."""

    def num_tokens(video) -> int:
        tokens = post(app, "/tokenize", **chat(video)).json()["tokens"]
        return tokens.count(app.engine.parts.video_token_id)

    for video, usual in zip(forms(fps=0.25, max_pixels=784), forms(fps=0.25), strict=True):
        assert post(app, CHAT, **chat(video)).status_code == 200
        assert 0 < num_tokens(video) < num_tokens(usual)
    assert num_tokens(forms(fps=0.25, max_pixels=10**6)[0]) == num_tokens(forms(fps=0.25)[0])
    # A token of 2 frames each; all pixels for 8 frames; 2 x 3 tokens.
    assert num_tokens(forms(nframes=8, total_pixels=4 * 784)[0]) == 4
    assert num_tokens(forms(nframes=8, total_pixels=10**9)[0]) == num_tokens(forms(nframes=8)[0])
    assert num_tokens(forms(nframes=8, resized_height=56, resized_width=80)[0]) == 4 * 6


def test_an_image_is_as_large_as_its_part_says(app):
    def num_tokens(**options) -> int:
        picture = {"type": "image_url", "image_url": {"url": "picture.png"}, **options}
        assert post(app, CHAT, **chat(picture)).status_code == 200
        return (
            post(app, "/tokenize", **chat(picture))
            .json()["tokens"]
            .count(app.engine.parts.image_token_id)
        )

    usual = num_tokens()
    assert num_tokens(max_pixels=784) == 1 and num_tokens(min_pixels=784 * 4 * usual) >= 4 * usual
    assert num_tokens(resized_height=30, resized_width=84) == 3
    picture = {"type": "image", "image": "picture.png", "min_pixels": 10**9}
    error = post(app, CHAT, **chat(picture)).json()["error"]
    assert "may be enlarged to" in error["message"], error


def test_options_that_are_not_followed_are_all_named(app):
    for options in (
        {"fps": 0.25, "sample_fps": 2},
        dict.fromkeys(OTHER_FILE_OPTIONS, 1),
        {"start": 0.0},
    ):
        for video in forms(**options):
            reply = post(app, CHAT, **chat(video))
            error = reply.json()["error"]
            assert reply.status_code == 400, error
            assert error["param"].startswith("messages.0.content.0"), error
            assert all(name in error["message"] for name in options), error
    image = {
        "type": "image_url",
        "image_url": {"url": "picture.png", "total_pixels": 9},
        "video_start": 28,
    }
    error = post(app, CHAT, **chat(image)).json()["error"]
    assert "total_pixels" in error["message"] and "video_start" in error["message"]


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ({**part("video", "clip.mp4"), "fps": 1, "nframes": 2}, "fps"),
        ({**part("video", "clip.mp4"), "nframes": 2, "num_frames": 2}, "nframes"),
        ({**part("video", "clip.mp4"), "fps": 0}, "fps"),
        ({**part("video", "clip.mp4"), "nframes": 0}, "nframes"),
        ({**part("video", "clip.mp4"), "max_frames": "4"}, "max_frames"),
        ({**part("video", "clip.mp4"), "max_pixels": 0}, "max_pixels"),
        ({**part("video", "clip.mp4"), "min_pixels": 9, "max_pixels": 8}, "min_pixels"),
        ({**part("image", "picture.png"), "fps": 1}, "fps"),
        ({**part("video", "clip.mp4"), "video_start": 2, "video_end": 2}, "video_start"),
        ({**part("video", "clip.mp4"), "video_start": -1}, "video_start"),
        ({**part("video", "clip.mp4"), "video_end": "2"}, "video_end"),
        ({**part("video", "clip.mp4"), "min_frames": 3, "max_frames": 2}, "min_frames"),
        ({**part("video", "clip.mp4"), "resized_height": 28}, "resized_height"),
        (
            {
                **part("video", "clip.mp4"),
                "resized_height": 28,
                "resized_width": 28,
                "total_pixels": 1,
            },
            "total_pixels",
        ),
        ({**part("image", "picture.png"), "total_pixels": 9000}, "total_pixels"),
        ({**part("image", "picture.png"), "min_pixels": 9, "max_pixels": 8}, "min_pixels"),
        ({**text("x"), "nframes": 1}, "nframes"),
        ({**text("x"), **part("image", "picture.png"), "type": "text"}, "image_url"),
        ({**part("image", "picture.png"), "text": "x"}, "text"),
    ],
    ids=str,
)
def test_options_that_are_wrong_are_named(app, content, param):
    reply = post(app, CHAT, **chat(content))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == f"messages.0.content.0.{param}", reply.text


def test_fields_that_would_change_an_answer_are_refused(app):
    named = {
        "no_repeat_ngram_size": 3,
        "enable_thinking": False,
        "regex": "a",
        "max_pixels": 784,
        "nframes": 4,
    }
    named |= {
        "max_new_tokens": 5,
        "do_sample": True,
        "video_start": 1.0,
        "num_beams": 4,
        "json_schema": "{}",
    }
    named |= {
        "total_pixels": 784,
        "min_frames": 2,
        "videos_kwargs": {"fps": 1},
        "resized_width": 28,
    }
    for name, value in named.items():
        error = post(app, CHAT, **chat(**{name: value})).json()["error"]
        assert error["param"] == name and name in error["message"]
    message = post(app, CHAT, **chat(**named)).json()["error"]["message"]
    assert all(name in message for name in named) and "chat_template_kwargs" in message
    for fields in (
        {"mm_processor_kwargs": {"max_pixels": 9, "fps": 1}},
        {"chat_template_kwargs": {"max_pixels": 9, "fps": 1}},
    ):
        (name,) = fields
        assert post(app, CHAT, **chat(**fields)).json()["error"]["param"] == name
    of_message = chat()
    of_message["messages"][0]["fps"] = 1
    assert post(app, CHAT, **of_message).json()["error"]["param"] == "messages.0.fps"
    assert (
        post(
            app, CHAT, **chat(no_repeat_ngram_size=0, num_beams=1, enable_thinking=None)
        ).status_code
        == 200
    )


def test_every_ignored_field_is_named_in_the_log(app, caplog):
    asked = chat(
        {**part("video", "clip.mp4"), "first": 1},
        second=1,
        third=1,
        chat_template_kwargs={"fourth": 1},
    )
    assert post(app, CHAT, **asked).status_code == 200
    assert all(f"'{name}'" in caplog.text for name in ("first", "second", "third", "fourth"))
