"""What a request means where it does not say: how many frames and tokens, and which tokens are the question."""

import pytest

from apbv import Engine, HostGroup, PrefillConfig, demo
from apbv.input.visual import PromptError
from apbv.model.parts import inspect_model

from families import build_model
from scripts import infer

COUNTING = demo.EXAMPLE_QUESTIONS[2]
PARAGRAPH = "The quick brown fox jumps over the lazy dog. "


def test_the_library_asks_the_demo_as_the_script_does():
    """Six letters are shown; of 64 frames, half of the clip's, it would see four."""
    for name in ("demo", str(demo.model_path())):
        answer = Engine.from_pretrained(name, hosts=HostGroup.single("cpu")).generate(
            COUNTING, video=demo.video_path()
        )
        assert (answer.text, answer.stats["dtype"]) == ("6", "float32")
    script = infer("--model", name, "--video", "demo", "--prompt", COUNTING, hosts=1)
    assert script.stdout.strip() == "6", script.stderr


def test_the_checkpoint_says_how_much_the_model_reads_and_writes(checkpoints):
    packaged = Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"))
    assert (packaged.num_frames, packaged.max_new_tokens) == (2048, 512)
    silent = Engine.from_pretrained(checkpoints("qwen2_5_vl"), hosts=HostGroup.single("cpu"))
    assert (silent.num_frames, silent.max_new_tokens) == (64, 128)


def beyond_positions_job(hosts: HostGroup, path: str) -> tuple[list[str], int, int]:
    """Prompts and answers that do not fit; then one that does, on the same hosts."""
    engine = Engine.from_pretrained(path, hosts=hosts)
    engine.model.config.max_position_embeddings = 64
    messages = []
    for request in (
        {"context": PARAGRAPH * 9},
        {"max_new_tokens": 60},
        {"prompt": PARAGRAPH * 9},
    ):
        with pytest.raises(PromptError) as error:
            engine.generate(**{"prompt": "What is it about?", **request})
        messages.append(str(error.value))
    engine.model.generation_config.eos_token_id = None
    engine = Engine(engine.model, engine.processor, hosts)
    answer = engine.generate("What is it about?")
    state = engine.prefill("What is it about?")
    with pytest.raises(PromptError):
        engine.decode(state, max_new_tokens=64)
    return messages, answer.stats["num_input_tokens"], len(answer.token_ids)


def test_what_exceeds_the_models_positions_is_refused_on_every_host(pool, checkpoints):
    for messages, num_tokens, num_new in pool.run(2, beyond_positions_job, str(checkpoints("llama"))):
        assert all("made for 64 (max_position_embeddings)" in message for message in messages)
        assert "an answer of 60 take" in messages[1]
        assert num_tokens + num_new == 64, "where nobody says how many, as many as there is room for"


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "linear", "factor": 2.0}, 65536),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
    ],
    ids=lambda value: value if isinstance(value, int) else value["rope_type"],
)
def test_stretched_positions_count(rope, positions):
    model = build_model("llama")
    model.config.max_position_embeddings = 32768
    model.config.rope_parameters = {"rope_theta": 10000.0, **rope}
    assert inspect_model(model).max_position_embeddings == positions


def long_text_job(hosts: HostGroup, path: str, request: dict, settings: dict):
    engine = Engine.from_pretrained(path, hosts=hosts, prefill=PrefillConfig(**settings))
    state = engine.prefill(**request)
    answer = engine.generate(**request, max_new_tokens=4)
    return state.layout.is_split, state.num_tokens - state.inputs.query_start, answer.token_ids, state.method


LONG_CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": PARAGRAPH * 40 + "What?"},
]


@pytest.mark.parametrize("kind", ["prompt", "a long last message"])
def test_a_long_text_is_shared_out_though_nobody_says_what_the_question_is(pool, checkpoints, kind):
    path = str(checkpoints("qwen2"))
    request = {"prompt": PARAGRAPH * 40 + "What jumps?"} if kind == "prompt" else {"messages": LONG_CHAT}
    engine = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"))
    expected = engine.generate(**request, max_new_tokens=4).token_ids
    for is_split, query_len, tokens, method in pool.run(2, long_text_job, path, request, {"passing_len": 4096}):
        assert (is_split, query_len, tokens, method) == (True, 128, expected, "apbv")
    for is_split, query_len, *_ in pool.run(2, long_text_job, path, request, {"query_len": 7}):
        assert (is_split, query_len) == (True, 7)


def test_a_question_that_somebody_names_is_taken_as_it_is(checkpoints):
    engine = Engine.from_pretrained(checkpoints("qwen2"), hosts=HostGroup.single("cpu"))
    count = len(engine.tokenizer(PARAGRAPH * 40, add_special_tokens=False).input_ids)
    asked = engine.prefill(PARAGRAPH * 40, context=PARAGRAPH)
    assert asked.num_tokens - asked.inputs.query_start >= count > 128
    turns = [{"role": "user", "content": PARAGRAPH * 40}, {"role": "assistant", "content": "A fox."}]
    chat = engine.prefill(messages=[*turns, {"role": "user", "content": "What jumps?"}])
    question = engine.tokenizer.decode(chat.inputs.input_ids[0, chat.inputs.query_start :])
    assert question.startswith("What jumps?")
