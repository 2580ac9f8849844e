"""What a request leaves open is the checkpoint's: its generation config, as transformers applies
it."""

import json
import re
import shutil
from contextlib import closing
from dataclasses import replace

import pytest
from transformers import GenerationConfig

from apbv import DecodeConfig, Engine, HostGroup, PrefillConfig, SamplingParams
from apbv.request.request import Question, Request, RequestSettings
from apbv.stats import StageTimer

from apbv_tests.pairs import each_choice
from apbv_tests.servers import InProcess, post

STEPS = 12
EXACT = PrefillConfig(method="zigzag_ring")
SAMPLED = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.1,
}
CONFIGS = {
    "nothing": {},
    "a penalty": {"repetition_penalty": 1.6},
    "almost greedy": {"do_sample": True, "temperature": 1e-6, "repetition_penalty": 1.3},
    "sampling": SAMPLED,
    "a length": {"max_new_tokens": 5, "repetition_penalty": 0.6},
    "neutral values": {
        "num_beams": 1,
        "no_repeat_ngram_size": 0,
        "typical_p": 1.0,
        "top_k": 50,
        "temperature": 1.0,
    },
}


def saved(checkpoints, folder, family: str, config: dict):
    """A checkpoint of a family with this generation config, beside its end tokens."""
    path = folder / family
    shutil.copytree(checkpoints(family), path)
    there = path / "generation_config.json"
    before = json.loads(there.read_text()) if there.exists() else {}
    there.write_text(json.dumps({**before, **config}))
    return path


def answers_job(hosts: HostGroup, path: str, question: dict):
    """Greedy tokens: the engine's, of generate_all, and neutral; on host 0 transformers' with each
    config."""
    engine = Engine.from_pretrained(path, hosts=hosts, prefill=EXACT, dtype="float32")
    ((_, of_all),) = engine.generate_all([question])
    decode = DecodeConfig(generation_config="neutral")
    neutral = Engine(engine.model, engine.processor, hosts, EXACT, decode=decode)
    ours = [engine.generate(**question), of_all, neutral.generate(**question)]
    state = engine.prefill(**question)
    theirs = []
    end = {"eos_token_id": list(engine.parts.eos_token_ids)}
    for config in (
        (engine.model.generation_config, GenerationConfig(**end)) if hosts.is_leader else ()
    ):
        engine.model.generation_config = config
        settings = {"do_sample": False, "max_new_tokens": config.max_new_tokens or STEPS}
        told = engine.model.generate(**state.generate_inputs(), **settings)
        theirs.append(told[0, state.num_tokens :].tolist())
    return [answer.token_ids for answer in ours], theirs


@pytest.mark.filterwarnings("ignore:.*generation flags are not valid")
@each_choice(config=CONFIGS, family=["llama", "qwen2_5_vl"])
def test_greedy_answers_are_those_of_transformers_with_the_same_config(
    pool, checkpoints, tmp_path, clip, config, family
):
    config, path = CONFIGS[config], str(saved(checkpoints, tmp_path, family, CONFIGS[config]))
    video = {"video": str(clip), "num_frames": 4}
    context = {"context": "one two three four " * 20}
    question = {"prompt": "What?", **(context if family == "llama" else video)}
    answers = pool.run(2, answers_job, path, question)
    (ours, of_all, plain), (theirs, neutral) = answers[0]
    assert answers[1][0] == answers[0][0] and ours == of_all
    limit = config.get("max_new_tokens", STEPS)
    assert ours[: len(theirs)] == theirs and plain[: len(neutral)] == neutral
    assert len(theirs) == limit and ("max_new_tokens" not in config or len(ours) == limit)
    assert theirs != neutral[:limit] or abs(config.get("repetition_penalty", 1) - 1) < 0.3


def test_a_call_that_samples_takes_the_rest_from_the_checkpoint(checkpoints, tmp_path):
    """But what it gives itself counts, zero included."""
    path = saved(checkpoints, tmp_path, "llama", SAMPLED)
    engine = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"))
    given = SamplingParams(
        max_new_tokens=STEPS, temperature=1.5, top_k=20, top_p=0.8, repetition_penalty=1.1
    )
    bare = SamplingParams(temperature=1.5, max_new_tokens=STEPS)
    for more in ({}, {"top_k": 0, "top_p": 1.0}, {"repetition_penalty": 1.0}):
        asked = replace(bare, **more)
        meant = replace(given, **more)
        assert asked.filled(engine.sampling) == replace(meant, min_p=0.0)
        told, expected = (
            engine.generate("What?", sampling=each).token_ids for each in (asked, meant)
        )
        assert told == expected
    told = engine.generate("What?", temperature=1.5, max_new_tokens=STEPS)
    assert told.token_ids == engine.generate("What?", sampling=given).token_ids
    assert (told.stats["temperature"], told.stats["top_p"]) == (1.5, 0.8)
    assert SamplingParams(temperature=1e-7) == SamplingParams(temperature=0)


def test_the_server_takes_the_temperature_too(checkpoints, tmp_path):
    """Unless the request or an option says another."""
    path = saved(checkpoints, tmp_path, "llama", SAMPLED)
    engine = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"))
    prompt = "one two three"
    question = Question(token_ids=engine.tokenizer(prompt)["input_ids"])
    for options, temperature, top_p in (
        ({}, 0.7, 0.8),
        ({"temperature": 0.2, "top_p": 0.5}, 0.2, 0.5),
    ):
        with closing(InProcess(model=engine, max_model_len=64, **options)) as app:
            body = {
                "prompt": prompt,
                "max_tokens": STEPS,
                "seed": 3,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            meant = {"max_new_tokens": STEPS, "seed": 3, "ignore_eos": True}
            meant |= {
                "temperature": temperature,
                "top_p": top_p,
                "top_k": 20,
                "repetition_penalty": 1.1,
            }
            for more in (
                {},
                {"temperature": 1.4},
                {"temperature": 1e-7},
                {"top_k": -1, "repetition_penalty": 1.0},
            ):
                (choice,) = post(app, "/v1/completions", **body, **more).json()["choices"]
                sampling = SamplingParams(
                    **meant | {name: max(value, 0) for name, value in more.items()}
                )
                request = Request(
                    question, StageTimer(engine.hosts), RequestSettings(sampling=sampling)
                )
                assert choice["token_ids"] == engine.answer(request).token_ids, (options, more)


def test_what_a_generation_config_asks_for_in_vain_is_told():
    engine = Engine.from_pretrained("demo", hosts=HostGroup.single("cpu"))
    engine.model.generation_config.update(no_repeat_ngram_size=3, min_new_tokens=2, num_beams=1)
    with pytest.warns(
        UserWarning, match=re.escape("ignored: min_new_tokens, no_repeat_ngram_size")
    ):
        Engine(engine.model, engine.processor, engine.hosts)
    for name, value, message in (
        ("top_k", "5", r"top_k must be an integer in 0 .. 2\^20, not '5'"),
        ("top_p", 1.5, r"top_p must lie in \(0, 1\], not 1.5"),
    ):
        engine.model.generation_config.update(**{"top_k": -1, name: value})
        with pytest.raises(ValueError, match=f"^the model's generation config: {message}$"):
            Engine(engine.model, engine.processor, engine.hosts)
    Engine(
        engine.model,
        engine.processor,
        engine.hosts,
        decode=DecodeConfig(generation_config="neutral"),
    )
