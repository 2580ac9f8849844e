"""What a request means where it does not say: how many frames and tokens, and which tokens are the
question."""

import pytest

from apbv import Engine, HostGroup, PrefillConfig, demo
from apbv.errors import PromptError
from apbv.model.parts import inspect_model

from apbv_tests.families import build_model
from apbv_tests.scripts import infer

COUNTING = demo.EXAMPLE_QUESTIONS[2]
PARAGRAPH = "The quick brown fox jumps over the lazy dog. "


def test_the_library_asks_the_demo_as_the_script_does():
    """Six letters are shown; of 64 frames, half of the clip's, it would see four."""
    engine = Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"))
    answer = engine.generate(COUNTING, video=demo.video_path())
    assert (answer.text, answer.stats["dtype"]) == ("6", "float32")
    script = infer("--model", demo.model_path(), "--video", "demo", "--prompt", COUNTING, hosts=1)
    assert script.stdout.strip() == "6", script.stderr


def test_the_checkpoint_says_how_much_the_model_reads_and_writes(checkpoints):
    packaged = Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"))
    assert (packaged.num_frames, packaged.max_new_tokens) == (2048, 512)
    silent = Engine.from_pretrained(checkpoints("qwen2_5_vl"), hosts=HostGroup.single("cpu"))
    assert (silent.num_frames, silent.max_new_tokens) == (64, 128)


def beyond_positions_job(hosts: HostGroup, path: str) -> tuple[int, int]:
    """Prompts and answers that do not fit; then one that does, on the same hosts."""
    engine = Engine.from_pretrained(path, hosts=hosts)
    engine.model.config.max_position_embeddings = 64
    for request in ({"context": PARAGRAPH * 9}, {"max_new_tokens": 60}, {"prompt": PARAGRAPH * 9}):
        with pytest.raises(PromptError, match=r" 64 \(max_position_embeddings\)"):
            engine.generate(**{"prompt": "What is it about?", **request})
    engine.model.generation_config.eos_token_id = None
    engine = Engine(engine.model, engine.processor, hosts)
    answer = engine.generate("What is it about?")
    with pytest.raises(PromptError):
        engine.decode(engine.prefill("What is it about?"), max_new_tokens=64)
    return answer.stats["num_input_tokens"], len(answer.token_ids)


def test_what_exceeds_the_models_positions_is_refused_on_every_host(pool, checkpoints):
    for num_tokens, num_new in pool.run(2, beyond_positions_job, str(checkpoints("llama"))):
        assert num_tokens + num_new == 64, (
            "where nobody says how many, as many as there is room for"
        )


def test_stretched_positions_count():
    model = build_model("llama")
    model.config.max_position_embeddings = 32768
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for rope, positions in (
        ({**yarn, "original_max_position_embeddings": 32768}, 131072),
        ({**yarn, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "linear", "factor": 2.0}, 65536),
    ):
        model.config.rope_parameters = {"rope_theta": 10000.0, **rope}
        assert inspect_model(model).max_position_embeddings == positions


def long_text_job(hosts: HostGroup, path: str, request: dict, settings: dict):
    engine = Engine.from_pretrained(path, hosts=hosts, prefill=PrefillConfig(**settings))
    state = engine.prefill(**request)
    answer = engine.generate(**request, max_new_tokens=4)
    return (
        state.layout.is_split,
        state.num_tokens - state.inputs.query_start,
        answer.token_ids,
        state.method,
    )


LONG = PARAGRAPH * 8
CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": LONG + "What?"},
]
TURNS = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "A fox."}]
# Where somebody names the question it is taken as it is, however long.
LONG_TEXTS = {
    "a prompt": ({"prompt": LONG + "What jumps?"}, range(128, 129)),
    "a long last message": ({"messages": CHAT}, range(128, 129)),
    "a context": ({"prompt": LONG, "context": PARAGRAPH * 8}, range(129, 4000)),
    "a chat": ({"messages": [*TURNS, {"role": "user", "content": "What jumps?"}]}, range(3, 40)),
}


@pytest.mark.parametrize("kind", LONG_TEXTS)
def test_a_long_text_is_shared_out_whoever_says_what_the_question_is(pool, checkpoints, kind):
    path = str(checkpoints("qwen2"))
    (request, lengths) = LONG_TEXTS[kind]
    engine = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"))
    expected = engine.generate(**request, max_new_tokens=4).token_ids
    for is_split, query_len, tokens, method in pool.run(
        2, long_text_job, path, request, {"passing_len": 4096}
    ):
        assert (is_split, tokens, method) == (True, expected, "apbv") and query_len in lengths
    if "prompt" in kind:
        for is_split, query_len, *_ in pool.run(2, long_text_job, path, request, {"query_len": 7}):
            assert (is_split, query_len) == (True, 7)
