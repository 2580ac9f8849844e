"""Chats with sound, as vLLM's clients and OpenAI's send it."""

import base64
from contextlib import closing

import pytest

from apbv_tests import audio_files, families
from apbv_tests.servers import InProcess, data_url, part, post, text


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    """A server of a model that hears, before a folder with a sound and a video that has one; and
    the folder."""
    folder = tmp_path_factory.mktemp("heard")
    audio_files.write(folder / "a.wav", [(0, 1.3)])
    audio_files.write(folder / "b.mp4", [(0, 2)], "aac", video=(0, 2), size=(56, 84))
    model = families.save_checkpoint(families.OMNI, tmp_path_factory.mktemp("model"))
    with closing(InProcess(media_dir=folder, model=str(model), max_model_len=2000)) as app:
        yield app, folder


def sent(data: bytes | str, **fields) -> dict:
    encoded = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav", **fields}}


def asked(app: InProcess, *content: dict, **options) -> tuple[int, str | dict]:
    """The status, and the text or the error."""
    messages = [{"role": "user", "content": [*content, text("What?")]}]
    reply = post(app, "/v1/chat/completions", messages=messages, max_tokens=5, **options)
    said = reply.json()
    if "error" in said:
        return reply.status_code, said["error"]
    return reply.status_code, said["choices"][0]["message"]["content"]


def test_sound_comes_by_url_or_inline_or_with_a_video(hearing):
    app, folder = hearing
    data = (folder / "a.wav").read_bytes()
    expected = app.engine.generate("What?", audio=folder / "a.wav", max_new_tokens=5).text
    for sound in (part("audio", "a.wav"), part("audio", data_url(folder / "a.wav")), sent(data)):
        assert asked(app, sound) == (200, expected), sound["type"]
    for wanted in (True, False):
        options = {"num_frames": 8, "max_new_tokens": 5, "audio_in_video": wanted}
        answer = app.engine.generate("What?", video=folder / "b.mp4", **options).text
        found = asked(app, part("video", "b.mp4"), audio_in_video=wanted)
        assert found == (200, answer.rstrip("\ufffd"))  # a character's beginning is not told


def test_what_cannot_be_heard_is_refused(hearing, app):
    where = "messages.0.content.0"
    for sound, param, message in (
        (part("audio", "none.wav"), f"{where}.audio_url", "no file"),
        (sent("?"), f"{where}.input_audio", "base64"),
        (sent(b"ABC"), "messages", "the inline data: the audio cannot be decoded"),
        (sent(b"ABC", format=None), f"{where}.input_audio.format", "valid string"),
    ):
        status, error = asked(hearing[0], sound)
        assert (status, error["param"]) == (400, param) and message in error["message"], error
    status, error = asked(app, sent(b"ABC"))
    assert status == 400 and "qwen2_5_vl models take no audio" in error["message"]
