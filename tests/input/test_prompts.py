"""Prompts as text and as token ids: chats of several turns, templates of several kinds, raw token
ids."""

import base64
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from apbv import HostGroup, PrefillConfig
from apbv.errors import PromptError
from apbv.input.media.video import probe, sample_fps, sample_uniform
from apbv.input.prompts.prompt_reader import PromptReader
from apbv.model.parts import inspect_model
from apbv.request.request import Question
from apbv.stats import StageTimer

from apbv_tests import families

HOSTS = HostGroup.single("cpu")
# What three kinds of templates do with a content: read strings only, read both, or read lists only.
STRING = (
    "{%- for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}{% if "
    "add_generation_prompt %}>{% endif %}"
)
BOTH = (
    "{%- for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% "
    "for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}>{% if thinks %}<think>{% endif %}{% endif %}"
)
LOSING = (
    "{%- for m in messages %}[{{ m.role }}]{{ m.content if m.content is string else '' }}{% endfor "
    "%}>"
)


def reader_of(family: str, template: str | None = None, **config) -> PromptReader:
    processor = families.build_processor(family)
    if template is not None:
        processor.chat_template = template
    return PromptReader(
        inspect_model(families.build_model(family)), processor, 8, PrefillConfig(**config)
    )


def turn(role: str, *texts: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def rendered(template: str, messages: list[dict], **options) -> str:
    return reader_of("qwen3", template).render(Question(messages=messages, template=options)).text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (STRING, "[system]be brief[user]one\ntwo[assistant]yes[user]three>"),
        (LOSING, "[system]be brief[user]one\ntwo[assistant]yes[user]three>"),
        (BOTH, "[system]be brief[user]onetwo[assistant]yes[user]three>"),
    ],
    ids=["strings", "loses lists", "lists"],
)
def test_text_parts_reach_a_template_as_it_reads_them(template, expected):
    """As in vLLM: a list to a template that reads lists, else one string, a part a line."""
    chat = [
        turn("system", "be brief"),
        turn("user", "one", "two"),
        turn("assistant", "yes"),
        turn("user", "three"),
    ]
    assert rendered(template, chat) == expected
    as_strings = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "yes"},
        turn("user", "x"),
    ]
    assert rendered(template, as_strings) == "[user]one[assistant]yes[user]x>"


def test_a_developer_is_a_system_to_templates_that_do_not_know_the_role():
    """All system messages are then one, the first, as in vLLM; without a developer they stay where
    they are."""
    chat = [turn("system", "a"), turn("user", "b"), turn("developer", "c", "d"), turn("user", "e")]
    assert rendered(STRING, chat) == "[system]a\n\nc\nd[user]b[user]e>"
    assert rendered(STRING, chat[2:]) == "[system]c\nd[user]e>"
    assert rendered(STRING + "{# 'developer' #}", chat[2:]) == "[developer]c\nd[user]e>"
    assert rendered(STRING, [turn("user", "b"), turn("system", "a")]) == "[user]b[system]a>"


def test_options_of_the_template():
    chat = [turn("user", "a"), turn("assistant", "b")]
    assert rendered(BOTH, chat, thinks=True) == "[user]a[assistant]b><think>"
    assert rendered(BOTH, chat, unknown=1) == rendered(BOTH, chat) == "[user]a[assistant]b>"
    assert rendered(BOTH, chat, add_generation_prompt=False) == "[user]a[assistant]b"
    closed = BOTH.replace("{% endfor %}{% if add", "</s>{% endfor %}{% if add")
    open_ended = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered(closed, chat, **open_ended) == "[user]a</s>[assistant]b"
    with pytest.raises(PromptError, match="needs add_generation_prompt to be false"):
        rendered(closed, chat, continue_final_message=True)
    with pytest.raises(PromptError, match="'tokenize' is not"):
        rendered(BOTH, chat, tokenize=True)
    with pytest.raises(PromptError, match=r"the chat template .*: only users"):
        rendered("{{ raise_exception('only users') }}", chat)


def test_where_a_chats_question_begins():
    reader = reader_of("qwen3", STRING, query_len=500)
    chat = [turn("user", "q q"), turn("assistant", "a"), turn("user", " q", "q ")]
    question = Question(messages=chat)
    prompt = reader.render(question)
    # The last one, though the template has trimmed it.
    assert prompt.text[prompt.query_char :] == "q\nq>"
    inputs, _ = reader.read(prompt, [], HOSTS, StageTimer(HOSTS))
    assert reader.tokenizer.decode(inputs.input_ids[0, inputs.query_start :]) == "q\nq>"
    altered = reader.render(replace(question, messages=[*chat[:2], turn("user", "q", "lost")]))
    assert altered.query_char is not None
    lossy = reader_of("qwen3", STRING.replace("trim", "replace('lost', '')"), query_len=3)
    question = Question(messages=[*chat[:2], turn("user", "is lost here")])
    prompt = lossy.render(question)
    assert prompt.query_char is None
    assert lossy.read(prompt, [], HOSTS, StageTimer(HOSTS))[0].query_start == len(prompt.text) - 3


@pytest.mark.parametrize("family", families.VISION_FAMILIES)
def test_a_chat_about_an_earlier_picture_has_the_templates_tokens(family):
    """Text before and after it, an answer, and a question that follows."""
    processor = families.build_processor(family)
    parts = inspect_model(families.build_model(family))
    picture = families.synthetic_image(84, 112)
    said = [
        turn("system", "be brief"),
        turn("user", "before", "after"),
        turn("assistant", "a"),
        turn("user", "and?"),
    ]
    said[1]["content"].insert(1, {"type": "image"})
    expected = processor(
        text=[processor.apply_chat_template(said, add_generation_prompt=True, tokenize=False)],
        images=[picture],
        return_tensors="pt",
    )["input_ids"]
    said[1]["content"][1] = {"type": "image", "image": picture}
    question = Question(messages=said)
    reader = PromptReader(parts, processor, 8)
    inputs, _ = reader.read(reader.render(question), [], HOSTS, StageTimer(HOSTS))
    assert torch.equal(inputs.input_ids, expected)
    asked = reader.tokenizer.decode(inputs.input_ids[0, inputs.query_start :])
    assert "after" in asked and "and?" in asked and "before" not in asked


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "llama"])
def test_token_ids_are_read_as_they_are(family):
    reader = reader_of(family, query_len=5)
    token_ids = reader.tokenizer("some <|im_start|> text of some length")["input_ids"]
    question = Question(token_ids=token_ids)
    inputs, piece = reader.read(reader.render(question), [], HOSTS, StageTimer(HOSTS))
    assert inputs.input_ids.tolist() == [token_ids] and piece is None and inputs.visual is None
    assert inputs.query_start == len(token_ids) - 5
    assert inputs.position_ids.flatten()[-1] == len(token_ids) - 1


def test_token_ids_that_cannot_be_read():
    reader = reader_of("qwen2_5_vl")
    size = reader.parts.vocab_size
    reader.render(Question(token_ids=[0, size - 1]))
    for token_ids, message in [
        ([], "the prompt is empty"),
        ([1, size], f"token id {size}: .* 0 to {size - 1}"),
        ([-1], "token id -1: "),
        ([1, reader.parts.video_token_id], "placeholders of images or video"),
        ([reader.parts.image_token_id], "placeholders of images or video"),
    ]:
        with pytest.raises(PromptError, match=message):
            reader.render(Question(token_ids=token_ids))
    with pytest.raises(PromptError, match="either token ids or a prompt"):
        reader.render(Question("why?", token_ids=[1]))


def test_parts_are_read_as_people_write_them(tmp_path):
    """Texts, images and videos, as OpenAI's, Qwen's and transformers' examples have them."""
    picture = Image.new("RGB", (84, 112))
    path = tmp_path / "a picture.png"
    reader = reader_of("qwen2_5_vl")
    picture.save(path)
    inline = base64.b64encode(path.read_bytes()).decode()
    forms = [
        {"type": "image", "image": picture},
        {"type": "image", "image": str(path)},
        {"image": path},
    ]
    forms += [
        {"type": "image", "path": path},
        {"type": "image", "url": path.as_uri()},
        {"image_url": str(path)},
    ]
    forms += [
        {"type": "image_url", "image_url": {"url": path.as_uri()}},
        {"type": "image", "base64": inline},
    ]
    forms += [{"type": "image", "image": f"data:image;base64,{inline}"}]
    for form in forms:
        told = reader.render(
            Question(messages=[{"role": "user", "content": [form, "what?", {"text": "when?"}]}])
        )
        (found,) = told.pictures
        assert found.load().tobytes() == picture.tobytes() and "what?when?" in told.text, form
    for form in (
        {"type": "video", "video": str(path)},
        {"video_url": path.as_uri()},
        {"video": path},
    ):
        (found,) = reader.render(
            Question(messages=[{"role": "user", "content": [form, "what?"]}])
        ).videos
        assert found == str(path)
    for part, message in (
        (
            {"type": "image", "image": picture, "max_pixel": 9, "b": 1},
            "unknown in a content part of type image: b, max_p",
        ),
        (
            {"type": "image", "image": {"url": path, "first": 9}},
            "unknown in a content part of type image: first",
        ),
        (
            {"type": "image", "image": picture, "fps": 2},
            "fps beside image cannot be followed: options of videos",
        ),
        (
            {"type": "video", "video": path, "sample_fps": 9},
            "unknown in a content part of type video: sample_fps",
        ),
        (
            {"type": "audio", "audio": path, "audio_start": 9},
            "unknown in a content part of type audio: audio_start",
        ),
        (
            {"type": "text", "text": "x", "max_pixels": 9},
            "max_pixels beside text cannot be followed",
        ),
    ):
        with pytest.raises(PromptError, match=message):
            reader.render(Question(messages=[{"role": "user", "content": [part, "what?"]}]))
    for asked in (
        {"messages": [{"role": "user", "content": "what?", "fps": 2}]},
        {"messages": [{"role": "user", "content": "what?"}], "template": {"video_start": 2}},
    ):
        with pytest.raises(PromptError, match=r"fps|video_start"):
            reader.render(Question(**asked))
    unset = {
        "type": "image_url",
        "image_url": {"url": str(path), "detail": "low"},
        "max_pixels": None,
        "other": None,
    }
    cached = {"type": "text", "text": "what?", "cache_control": {"type": "ephemeral"}}
    reader.render(Question(messages=[{"role": "user", "content": [unset, cached]}]))
    content = [{"type": "image", "image": "data:image/png;base64,AAAA"}, "what?"]
    with pytest.raises(PromptError, match="cannot read 'data:image/png;base64,AAAA' as an image"):
        reader.render(Question(messages=[{"role": "user", "content": content}]))


def test_a_video_may_say_how_its_frames_are_sampled(clip):
    """Beside the file, or with its URL; the others are sampled as the question says."""
    reader = reader_of("qwen2_5_vl")
    info = probe(clip)
    content = [
        {"type": "video", "video": str(clip), "fps": 1, "max_frames": 3},
        {"type": "video_url", "video_url": {"url": str(clip), "nframes": 2}},
        {"type": "video", "video": str(clip)},
        "what?",
    ]
    question = Question(messages=[{"role": "user", "content": content}], num_frames=4)
    prompt = reader.render(question)
    videos = reader.sample([info] * 3, question, prompt.sampling)
    expected = [sample_fps(info, 1, max_frames=3), sample_uniform(info, 2), sample_uniform(info, 4)]
    assert [list(video.frames) for video in videos] == expected
    for wrong, message in (
        ({"fps": 0}, "fps of a video must"),
        ({"nframes": 1.5}, "nframes of a video must be an integer"),
        ({"max_frames": True}, "max_frames of a video must be an integer"),
        ({"fps": 1, "nframes": 2}, "either fps or nframes"),
    ):
        with pytest.raises(PromptError, match=message):
            reader.render(
                Question(messages=[{"role": "user", "content": [{**content[2], **wrong}, "what?"]}])
            )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"images": [torch.zeros(84, 112, 3)]}, r"must be \[3, H, W\], not \[84, 112, 3\]"),
        ({"images": [torch.zeros(1, 3, 84, 112)]}, r"not \[1, 3, 84, 112\]"),
        ({"images": [torch.zeros(84, 112).numpy()]}, "not of type ndarray"),
        ({"images": [None]}, "not of type NoneType"),
        ({"video": torch.zeros(4, 3, 84, 112)}, "a video must be a file, not of type Tensor"),
        ({"video": [["a.png", "b.png"]]}, "a video must be a file, not of type list"),
    ],
    ids=str,
)
def test_a_source_of_another_kind_is_named(asked, message):
    with pytest.raises(PromptError, match=message):
        reader_of("qwen2_5_vl").render(Question("what?", **asked))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a list of parts, got None"),
        ({"type": "text", "text": "a"}, "a list of parts"),
        *(
            ([part], "a content part must be")
            for part in (
                5,
                {"type": "text"},
                {"kind": "a"},
                {"type": "image"},
                {"image": "a", "video": "b"},
            )
        ),
    ],
    ids=str,
)
def test_a_chat_of_another_shape_is_refused(content, message):
    with pytest.raises(PromptError, match=message):
        reader_of("qwen2_5_vl").render(Question(messages=[{"role": "user", "content": content}]))


CALLS = STRING.replace(
    "{% endfor %}{% if",
    "{% for c in m.tool_calls or () %}{{ c.function.name }}({{ c.function.arguments.at }}){% "
    "endfor %}{{ m.tool_call_id }}{% endfor %}{% for t in tools or () %}<{{ t.function.name }}>{% "
    "endfor %}{% if",
)
CALL = {"id": "1", "type": "function", "function": {"name": "seek", "arguments": '{"at": 3}'}}


def seek(at: int) -> str:
    """Seeks.

    Args:
        at: where.
    """


def test_calls_of_tools_and_what_they_tell_are_rendered_by_the_template():
    """Arguments as objects; a tool's texts as one string, also for a template that reads lists, as
    in vLLM."""
    told = {**turn("tool", "a", "b"), "tool_call_id": "1"}
    for content in ({}, {"content": None}, {"content": ""}, {"content": []}):
        for arguments in ('{"at": 3}', {"at": 3}):
            call = {**CALL, "function": {"name": "seek", "arguments": arguments}}
            chat = [turn("user", "x"), {"role": "assistant", **content, "tool_calls": [call]}, told]
            assert rendered(CALLS, chat) == "[user]x[assistant]seek(3)[tool]a\nb1>"
    for nothing in ("", None, "{}"):
        call = {"function": {"name": "seek", "arguments": nothing}}
        assert rendered(
            CALLS, [turn("user", "x"), {"role": "assistant", "tool_calls": [call]}]
        ).endswith("seek()>")
    both = BOTH.replace("m.content is string", "m.content is string and m.role == 'tool'")
    assert rendered(both, [turn("user", "a", "b"), told]) == "[user]ab[tool]a\nb>"
    no_calls = [turn("user", "x"), {**turn("assistant", "y"), "tool_calls": []}]
    assert rendered(CALLS + "{{ messages[1] }}", no_calls).endswith(
        ">{'role': 'assistant', 'content': 'y'}"
    )
    for wrong in (
        {"name": "seek", "arguments": "[]"},
        {"name": "seek", "arguments": "{"},
        {"arguments": "{}"},
        None,
    ):
        with pytest.raises(PromptError, match="a JSON object, got"):
            rendered(
                CALLS,
                [turn("user", "x"), {"role": "assistant", "tool_calls": [{"function": wrong}]}],
            )
    with pytest.raises(PromptError, match="needs a role and a content"):
        rendered(CALLS, [turn("user", "x"), {"role": "assistant", "tool_calls": []}])


THINKING = STRING.replace(
    "]{{", "]{% if m.reasoning %}({{ m.reasoning }}|{{ m.reasoning_content }}){% endif %}{{"
)


def test_what_an_answer_thought_reaches_a_template_by_both_names():
    """As in vLLM: of an assistant's message, which may have nothing else."""
    for given, expected in (
        ({"reasoning": "a"}, "(a|a)"),
        ({"reasoning_content": "a"}, "(a|a)"),
        ({"reasoning": "a", "reasoning_content": "b"}, "(a|a)"),
        ({"reasoning": None, "reasoning_content": "b"}, "(b|b)"),
        ({"reasoning": None}, ""),
    ):
        chat = [turn("user", "x"), {**turn("assistant", "y"), **given}, turn("user", "z")]
        assert rendered(THINKING, chat) == f"[user]x[assistant]{expected}y[user]z>"
        assert rendered(THINKING, [{**turn("user", "x"), **given}]) == "[user]x>"
        if expected:
            for content in ({}, {"content": None}):
                alone = [turn("user", "x"), {"role": "assistant", **content, **given}]
                assert rendered(THINKING, alone) == f"[user]x[assistant]{expected}>"
    with pytest.raises(PromptError, match="reasoning must be a text, got 5"):
        rendered(THINKING, [turn("user", "x"), {**turn("assistant", "y"), "reasoning": 5}])


def test_parts_of_earlier_answers_are_text():
    for part in (
        {"type": "output_text", "text": "no"},
        {"type": "refusal", "refusal": "no"},
        {"type": "input_text", "text": "no"},
        {"type": "thinking", "thinking": "no"},
    ):
        chat = [turn("user", "x"), {"role": "assistant", "content": [part, "b"]}]
        assert rendered(STRING, chat) == "[user]x[assistant]no\nb>"


def test_a_model_without_a_chat_template_takes_no_messages():
    """Their roles would be lost; a prompt has none."""
    reader = reader_of("qwen3")
    reader.processor.chat_template = None
    for chat in ([turn("user", "x")], [turn("system", "a"), turn("user", "x")]):
        with pytest.raises(PromptError, match="no chat template"):
            reader.render(Question(messages=chat))
    assert reader.render(Question(prompt="x")).text == "x"


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"', '["\\udfff"]', '{"\\ud800": 1}']
)
def test_arguments_of_a_call_are_json(value):
    for arguments in (f'{{"at": {value}}}', {"at": json.loads(value)}):
        call = {**CALL, "function": {"name": "seek", "arguments": arguments}}
        with pytest.raises(PromptError, match="half of a surrogate pair, which JSON has not"):
            rendered(CALLS, [turn("user", "x"), {"role": "assistant", "tool_calls": [call]}])


def test_half_of_a_surrogate_pair_is_named():
    half = "a\ud83d"
    tool = {"type": "function", "function": {"name": "seek", "description": half}}
    reader = reader_of("qwen3", CALLS.replace("t.function.name", "t.function.description"))
    for asked in (
        {"prompt": half},
        {"messages": [turn("user", half)]},
        {"prompt": "x", "tools": [tool]},
    ):
        with pytest.raises(PromptError, match="half of a surrogate pair"):
            reader.render(Question(**asked))
    call = {**CALL, "function": {"name": half, "arguments": '{"at": "\\ud83d\\ude00"}'}}
    with pytest.raises(PromptError, match="half of a surrogate pair"):
        reader.render(
            Question(messages=[turn("user", "x"), {"role": "assistant", "tool_calls": [call]}])
        )
    call["function"]["name"] = "seek"
    asked = Question(messages=[turn("user", "x"), {"role": "assistant", "tool_calls": [call]}])
    assert "seek(\N{GRINNING FACE})" in reader.render(asked).text


def test_tools_are_shown_by_templates_that_know_them():
    reader = reader_of("qwen3", CALLS)
    described = {"type": "function", "function": {"name": "seek"}}
    for tool in (seek, described):
        for asked in ({"messages": [turn("user", "x")]}, {"prompt": "x"}):
            assert reader.render(Question(**asked, tools=[tool])).text == "[user]x<seek>>"
    assert reader.render(Question(prompt="x", tools=[])).text == "[user]x>"
    with pytest.raises(PromptError, match="knows no tools"):
        reader_of("qwen3", STRING).render(Question(prompt="x", tools=[described]))
    with pytest.raises(ValueError, match="tools must be a list"):
        Question(prompt="x", tools="seek")
