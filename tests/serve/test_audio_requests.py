"""Chats with sound, as vLLM's clients and OpenAI's send it."""

import base64

import audio_files
import pytest

from apbv.serve.media import MediaSettings

import families
from servers import InProcess, post
from video_files import encode


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    """A server of a model that hears, before a folder with a sound and a video that has one."""
    folder = tmp_path_factory.mktemp("heard")
    audio_files.write(folder / "a.wav", [(0, 1.3)])
    audio_files.write(folder / "b.mp4", [(0, 2)], "aac", video=(0, 2), size=(56, 84))
    model = families.save_checkpoint(families.OMNI, tmp_path_factory.mktemp("model"))
    app = InProcess(MediaSettings(folder=folder), model=str(model), max_model_len=2000)
    yield app, folder
    app.close()


def asked(app: InProcess, *content: dict, **options):
    """The status, and the text or the error."""
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What?"}]}]
    reply = post(app, "/v1/chat/completions", model="demo", messages=messages, max_tokens=5, **options)
    said = reply.json()
    return reply.status_code, said["choices"][0]["message"]["content"] if reply.status_code == 200 else said[
        "error"
    ]


def test_sound_comes_by_url_or_inline(hearing):
    app, folder = hearing
    inline = base64.b64encode((folder / "a.wav").read_bytes()).decode()
    expected = app.engine.generate("What?", audio=folder / "a.wav", max_new_tokens=5).text
    for part in (
        {"type": "audio_url", "audio_url": {"url": "a.wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{inline}"}},
        {"type": "input_audio", "input_audio": {"data": inline, "format": "wav"}},
    ):
        assert asked(app, part) == (200, expected), part["type"]


def test_a_video_is_heard(hearing):
    app, folder = hearing
    answers = {
        heard: app.engine.generate(
            "What?", video=folder / "b.mp4", num_frames=8, max_new_tokens=5, audio_in_video=heard
        )
        for heard in (True, False)
    }
    assert answers[True].text != answers[False].text
    video = {"type": "video_url", "video_url": {"url": "b.mp4"}}
    assert asked(app, video) == (200, answers[True].text)
    for heard, answer in answers.items():
        status, text = asked(app, video, audio_in_video=heard)
        assert (status, text) == (200, answer.text.rstrip("\ufffd")), "a character's beginning is not told"


def test_a_silent_video_comes_beside_one_with_sound_where_none_is_heard(hearing):
    app, folder = hearing
    encode(folder / "mute.mp4", n=10, size=(56, 84))
    both = [{"type": "video_url", "video_url": {"url": name}} for name in ("b.mp4", "mute.mp4")]
    status, error = asked(app, *both)
    assert status == 400 and "mute.mp4: is not heard, but another" in error["message"]
    status, _ = asked(app, *both, audio_in_video=False)
    assert status == 200


def test_what_cannot_be_heard_is_refused(hearing, app):
    for part, where, message in (
        ({"type": "audio_url", "audio_url": {"url": "none.wav"}}, "messages.0.content.0.audio_url", "no file"),
        (
            {"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}},
            "messages.0.content.0.input_audio",
            "base64",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
            "messages",
            "the inline data: the audio cannot be decoded",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "QUJD"}},
            "messages.0.content.0.input_audio.format",
            "required",
        ),
    ):
        status, error = asked(hearing[0], part)
        assert (status, error["param"]) == (400, where) and message in error["message"], error
    status, error = asked(app, {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}})
    assert status == 400 and "qwen2_5_vl models do not hear" in error["message"]
