"""Settings that differ between hosts: one error on each, with the setting's name and both values,
before the work."""

import re

import pytest
import torch.distributed as dist

from apbv import (
    DecodeConfig,
    Engine,
    HostGroup,
    InvalidRequestError,
    ModelInputs,
    PrefillConfig,
    ReuseConfig,
    SamplingParams,
    SpeculativeConfig,
    VideoConfig,
    demo,
    prefill,
)
from apbv.model.parts import inspect_model

from apbv_tests import families
from apbv_tests.engines import QUESTION, build_engine
from apbv_tests.fresh_hosts import Store, described, run_fresh
from apbv_tests.patience import HANGING
from apbv_tests.prompts import text_batch

LOADED = [
    (
        {"speculate": SpeculativeConfig(strategy="vanilla")},
        "speculate is {'strategy': 'vanilla', .* on host 1, but None",
    ),
    (
        {"prefill": PrefillConfig(anchor_len=64)},
        "prefill.anchor_len is 64 on host 1, but None on host 0",
    ),
    ({"reuse": ReuseConfig()}, "reuse is 'exact' on host 1, but None on host 0"),
    (
        {"decode": DecodeConfig(cuda_graphs="off")},
        "decode.cuda_graphs is 'off' on host 1, but 'auto' on host 0",
    ),
    ({"dtype": "bfloat16"}, "dtype is 'bfloat16' on host 1, but 'auto' on host 0"),
]


def loading_job(hosts: HostGroup, others: list[dict]) -> list[str]:
    failures = []
    for settings in others:
        given = settings if hosts.rank == 1 else {}
        failures.append(
            described(lambda given=given: Engine.from_pretrained("demo", hosts=hosts, **given))
        )
    return failures


def test_an_engine_whose_settings_differ_is_not_loaded(pool):
    """On neither host: that with a draft would load it and wait for the other."""
    first, second = pool.run(2, loading_job, [settings for settings, _ in LOADED])
    assert first == second
    for (_, message), said in zip(LOADED, first, strict=True):
        start = "HostError: the engine's settings must be the same on every host: "
        assert re.match(start + message, said), said


def machines_job(hosts: HostGroup) -> str:
    """Of what fits the machine, each host has its own."""
    video = VideoConfig(threads=1 + hosts.rank, chunk_bytes=2**20 * (1 + hosts.rank))
    reuse = ReuseConfig(max_bytes=2**20 * (1 + hosts.rank))
    engine = Engine.from_pretrained(
        "demo", hosts=hosts, prefill=PrefillConfig(video=video), reuse=reuse
    )
    return engine.generate(demo.DEMO_QUESTION, video=demo.video_path()).text


def test_hosts_have_their_own_limits(pool):
    assert pool.run(2, machines_job) == ["J"] * 2


def built_job(hosts: HostGroup) -> str:
    return described(
        lambda: build_engine(hosts, "llama", kv="sharded" if hosts.rank else "gathered")
    )


def test_an_engine_of_own_models_whose_settings_differ_is_not_built(pool):
    said = "HostError: the engine's settings must be the same on every host: "
    said += "prefill.kv is 'sharded' on host 1, but 'gathered' on host 0"
    assert pool.run(2, built_job) == [said] * 2


REQUESTS = [
    ({"max_new_tokens": 9}, "sampling.max_new_tokens is 9 on host 1, but None on host 0"),
    ({"seed": 4}, "sampling.seed is 4 on host 1, but 0 on host 0"),
    (
        {"temperature": 0.5, "top_p": 0.5},
        "sampling.temperature is 0.5 on host 1, but None on host 0; sampling.top_p",
    ),
    (
        {"sampling": SamplingParams(json_schema="{}")},
        "sampling.json_schema is '{}' on host 1, but None on host 0",
    ),
    ({"num_frames": 4}, "num_frames is 4 on host 1, but None on host 0"),
    ({"fps": 2.0}, "fps is 2.0 on host 1, but None on host 0"),
    ({"audio_in_video": False}, "audio_in_video is False on host 1, but None on host 0"),
    ({"stop": len}, "stop is 'given' on host 1, but None on host 0"),
]
START = "HostError: the request must be the same on every host: "


def request_job(hosts: HostGroup, clip: str):
    engine = build_engine(hosts, "qwen2_5_vl")
    same = {"prompt": QUESTION, "video": clip}
    failures = []
    for others, _ in REQUESTS:
        given = same | (others if hosts.rank == 1 else {})
        failures.append(described(lambda given=given: engine.generate(**given)))

    # The other calls.
    number = 5 + hosts.rank
    failures.append(described(lambda: engine.prefill(**same, num_frames=number)))
    state = engine.prefill(**same, num_frames=4)
    failures.append(described(lambda: engine.decode(state, seed=number)))
    question = same | {"num_frames": 4}
    ((_, error),) = engine.generate_all([question], sampling=SamplingParams(seed=number))
    failures.append(f"HostError: {error}")
    ((_, error),) = engine.generate_all([question], max_together=number)
    failures.append(f"HostError: {error}")

    answer = engine.generate(**question, max_new_tokens=2)  # the group stays usable
    return failures, answer.token_ids


def test_a_request_whose_settings_differ_is_refused_by_name_and_values(pool, clip):
    (first, answer), second = pool.run(2, request_job, str(clip))
    assert second == (first, answer)
    of_others = ["num_frames is 6", "sampling.seed is 6", "sampling.seed is 6", "max_together is 6"]
    expected = [message for _, message in REQUESTS] + [
        f"{said} on host 1, but 5 on host 0" for said in of_others
    ]
    assert len(first) == len(expected)
    for said, message in zip(first, expected, strict=True):
        assert said.startswith(START + message), said


def models_job(hosts: HostGroup) -> list[str]:
    """What :func:`apbv.prefill` says itself, without an engine."""
    model = families.build_model("llama")
    batch = text_batch(90)
    config = PrefillConfig(passing_len=16 + hosts.rank)
    first = described(lambda: prefill(model, batch, hosts=hosts, config=config))
    model.config.rms_norm_eps = 0.5 if hosts.rank else 0.25
    second = described(lambda: prefill(model, batch, hosts=hosts))
    parts = inspect_model(families.build_model("llama"))
    inputs = ModelInputs.from_processor(parts, batch, hosts)
    assert prefill(parts, inputs, hosts=hosts).num_tokens == 90
    return [first, second]


def test_a_prefill_whose_config_or_model_differs_is_refused(pool):
    first = "HostError: the prefill configuration must be the same on every host: "
    second = "HostError: the model's configuration must be the same on every host: "
    expected = [
        first + "passing_len is 17 on host 1, but 16 on host 0",
        second + "rms_norm_eps is 0.5 on host 1, but 0.25 on host 0",
    ]
    assert pool.run(2, models_job) == [expected] * 2


def parallel_job(hosts: HostGroup) -> str:
    return described(
        lambda: HostGroup.from_process_group(
            dist.group.WORLD, "cpu", tensor_parallel=1 + hosts.rank
        )
    )


def test_hosts_of_different_sizes_are_refused(tmp_path):
    """Host 0 would be one process for one of them, and two for the other."""
    said = "HostError: the number of processes must be the same on every host: "
    said += "tensor_parallel is 2 on host 1, but 1 on host 0"
    outcomes = run_fresh(Store(tmp_path), 2, parallel_job)
    assert [outcome.result for outcome in outcomes] == [said] * 2


def ending_job(hosts: HostGroup) -> None:
    speculate = SpeculativeConfig(strategy="vanilla") if hosts.rank else None
    Engine.from_pretrained("demo", hosts=hosts, speculate=speculate)


def test_two_nodes_of_which_one_drafts_end_with_the_same_error(tmp_path):
    """As programs on two machines would, each with a status that is not 0, and soon."""
    outcomes = run_fresh(Store(tmp_path), 2, ending_job)
    for outcome in outcomes:
        assert outcome.exit_status == 1 and outcome.seconds < HANGING
        assert outcome.error.startswith(
            "HostError: the engine's settings must be the same on every host: speculate is"
        )
        assert outcome.error.endswith("on host 1, but None on host 0")


QUESTIONS = [
    (
        ["a question"],
        "question 0 must be a dict of generate's arguments, such as .*, not 'a question'",
    ),
    ("a question", "question 0 must be a dict"),
    ([("a question", "clip.mp4")], "question 0 must be a dict"),
    (
        [{"prompt": "Why?", "max_new_tokens": 3}],
        "unknown arguments: max_new_tokens; a question takes prompt, .*sampling",
    ),
]


@pytest.mark.parametrize(("questions", "message"), QUESTIONS, ids=str)
def test_what_is_no_question_is_refused(questions, message):
    engine = build_engine(HostGroup.single("cpu"), "llama")
    with pytest.raises(ValueError, match=message):
        list(engine.generate_all(questions))


def test_an_iterator_may_yield_what_is_no_question():
    """It is read while others are answered, and costs none of them."""
    engine = build_engine(HostGroup.single("cpu"), "llama")
    questions = iter([{"prompt": "Why?"}, "a question", {"prompt": "Who?"}])
    answers = dict(engine.generate_all(questions, sampling=SamplingParams(max_new_tokens=3)))
    assert [len(answers[number].token_ids) for number in (0, 2)] == [3, 3]
    assert str(answers[1]).startswith("question 1 must be a dict of generate's arguments")


def one_bad_question_job(hosts: HostGroup) -> str:
    engine = build_engine(hosts, "llama")
    questions = [{"prompt": "Why?"}, "Why?" if hosts.rank else {"prompt": "Why?"}]
    with pytest.raises(InvalidRequestError) as error:
        list(engine.generate_all(questions, sampling=SamplingParams(max_new_tokens=2)))
    return str(error.value)


def test_what_is_no_question_on_one_host_is_refused_on_all(pool):
    first, second = pool.run(2, one_bad_question_job)
    assert first == second and second.startswith("question 1 must be a dict")
