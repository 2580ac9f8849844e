"""The engine and launch/infer.py, from real H.264 files to text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from apbv import (
    Engine,
    HostError,
    HostGroup,
    PrefillConfig,
    ReduceConfig,
    SamplingParams,
    VideoError,
    demo,
)
from apbv.errors import PromptError, UnsupportedModelError
from apbv.layout import LayoutError
from apbv.model.families import require_supported
from apbv.model.parts import inspect_model
from apbv.stats import STAGES

from apbv_tests import families
from apbv_tests.engines import QUESTION
from apbv_tests.families import IMAGE_FAMILIES, VISION_FAMILIES
from apbv_tests.scripts import infer


def says(*content, role: str = "user") -> dict:
    return {"messages": [{"role": role, "content": list(content)}]}


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_every_family_is_loaded_and_answers_about_files(checkpoints, clip, family, tmp_path):
    """However a file is named, and as the model does that was never saved."""
    picture = str(tmp_path / "picture.png")
    hosts = HostGroup.single("cpu")
    families.synthetic_image(84, 112).save(picture)
    question = {"type": "text", "text": QUESTION}
    sources = [{"prompt": QUESTION, "images": [picture]}]
    chats = [says({"type": "image", "path": picture}, question)]
    if family in IMAGE_FAMILIES:  # the same image twice instead
        sources.append({"prompt": QUESTION, "images": [picture, picture]})
        chats.append(says(*[{"type": "image", "path": picture}] * 2, question))
    else:
        sources.append({"prompt": QUESTION, "video": clip})
        chats.append(says({"type": "video", "video": clip}, question))
    loaded = Engine.from_pretrained(checkpoints(family), hosts=hosts)
    built = Engine(families.build_model(family), loaded.processor, hosts)

    def answers(engine: Engine, requests: list[dict]) -> list[list[int]]:
        found = []
        for request in requests:
            found.append(engine.generate(max_new_tokens=6, num_frames=9, **request).token_ids)
        return found

    first, second = answers(loaded, sources)
    assert first != second
    assert answers(built, chats) == [first, second]


def test_the_command_line_prints_an_answer_and_writes_its_figures(checkpoints, clip, tmp_path):
    figures = tmp_path / "figures.jsonl"
    options = [
        "--model",
        checkpoints("qwen2_5_vl"),
        "--video",
        clip,
        "--prompt",
        QUESTION,
        "--json",
        figures,
    ]
    options += [
        "--frames",
        20,
        "--passing-len",
        4,
        "--early-passing-len",
        5,
        "--anchor-len",
        12,
        "--max-new-tokens",
        5,
    ]
    for hosts in (2, 1):
        result = infer(*options, hosts=hosts)
        assert result.returncode == 0, result.stderr
        assert ("answers were less accurate with l_a below 128" in result.stderr) == (hosts == 2)
    two, one = map(json.loads, figures.read_text().splitlines())
    assert (two["method"], two["hosts"], one["method"], one["hosts"]) == ("apbv", 2, "full", 1)
    for record in (two, one):
        assert (record["num_video_tokens"], len(record["token_ids"])) == (10 * 2 * 3, 5)
        assert record["output_throughput"] > 0 and set(record["stages_ms"]) == set(STAGES)
        assert all(peak > 50 * 2**20 for peak in record["peak_memory_bytes"])
    assert two["anchor_len"] >= 12 and (two["passing_len"], two["early_passing_len"]) == (4, 5)
    assert "l_p below 256" in two["warning"] and one["warning"] is None
    assert one["comm_bytes"] == [0] and min(two["comm_bytes"]) > 0
    assert two["comm_bytes_total"] == sum(two["comm_bytes"])


def bad_videos_job(hosts: HostGroup, path: str, good: str, bad: list[str]):
    """Only the last host's files are unreadable; afterwards the same group still answers."""
    engine = Engine.from_pretrained(path, hosts=hosts)
    failures = []
    for file in bad:
        with pytest.raises(VideoError) as error:
            engine.generate(
                QUESTION, video=file if hosts.rank == hosts.size - 1 else good, num_frames=8
            )
        failures.append(f"{error.typename}: {error.value}")
    return failures, engine.generate(QUESTION, video=good, num_frames=8, max_new_tokens=2).token_ids


def test_one_host_with_an_unreadable_video_fails_all_and_breaks_nothing(
    pool, checkpoints, clip, tmp_path
):
    (tmp_path / "text.mp4").write_text("not a video\n" * 50)
    (tmp_path / "truncated.mp4").write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])
    bad = [str(tmp_path / name) for name in ("missing.mp4", "text.mp4", "truncated.mp4", "")]
    results = pool.run(3, bad_videos_job, str(checkpoints("qwen2_vl")), str(clip), bad)
    for file, *failures in zip(bad, *(said for said, _ in results), strict=True):
        assert failures[0].startswith("VideoError: ") and file in failures[0]
        assert failures == [failures[0]] * 3
    assert all(tokens == results[0][1] for _, tokens in results)


def different_prompts_job(hosts: HostGroup, path: str):
    engine = Engine.from_pretrained(path, hosts=hosts)
    with pytest.raises(
        HostError, match=r"prompt is 'What is 1\?' on host 1, but 'What is 0\?' on host 0"
    ):
        engine.generate(f"What is {hosts.rank}?", context="word " * 60)
    with pytest.raises(HostError, match="the prompt of host 1 differs from that of host 0"):
        engine.generate("What?", context=f"word {hosts.rank} " * 60)
    long = PrefillConfig(anchor_len=10**6)
    with pytest.raises(LayoutError, match="anchor_len=1000000 leaves no context"):
        Engine.from_pretrained(path, hosts=hosts, prefill=long).generate(
            "What?", context="word " * 60
        )


def test_hosts_with_different_prompts_or_no_context_are_refused(pool, checkpoints):
    pool.run(2, different_prompts_job, str(checkpoints("llama")))


REFUSED = [
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": "a", "context": "b", "images": ["c.png"]}, "images and context"),
    ({"prompt": "a", "images": ["missing.png"]}, "cannot read the image missing.png"),
    ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "not both"),
    ({"messages": [{"content": "b"}]}, "role and a content"),
    (says({"type": "smell"}), "a content part must be .*'smell'"),
    ({"prompt": "a", "video": "http://a/b.mp4"}, "no such file"),
    ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens"),
    ({"prompt": "a", "video": "CLIP", "num_frames": 0}, "0"),
    ({"prompt": "a", "video": "CLIP", "fps": float("nan")}, "nan"),
    ({"prompt": "a", "sampling": SamplingParams(), "seed": 3}, "not both"),
]
OF_WRONG_TYPES = {
    "prompt": 3,
    "context": b"x",
    "messages": "x",
    "num_frames": "8",
    "fps": "2",
    "audio_in_video": "no",
    "max_new_tokens": "3",
    "temperature": "x",
    "sampling": {},
    "stop": "x",
    "on_token": 3,
    "on_stage": 3,
}


def test_former_names_warn_and_work(checkpoints):
    engine = Engine.from_pretrained(checkpoints("llama"), hosts=HostGroup.single("cpu"))
    with pytest.warns(DeprecationWarning, match="batching_obstacle"):
        assert engine.why_one_by_one is engine.batching_obstacle is None
        assert engine.num_homes == engine.num_decode_hosts == 1
    with pytest.warns(DeprecationWarning, match="for_kv_export"):
        assert engine.handing_over().prefill_config.kv == "sharded"
    with pytest.warns(DeprecationWarning, match="keeps_all"):
        assert ReduceConfig(method="dycoke", ratio=1).leaves_all


def test_a_bad_request_is_refused(checkpoints, clip):
    paths = (checkpoints("qwen2_5_vl"), checkpoints("llama"))
    hosts = HostGroup.single("cpu")
    video_engine, engine = (Engine.from_pretrained(path, hosts=hosts) for path in paths)
    for request, message in REFUSED:
        request = {name: str(clip) if value == "CLIP" else value for name, value in request.items()}
        with pytest.raises(ValueError, match=message):
            video_engine.generate(**request)
    for name, value in OF_WRONG_TYPES.items():
        with pytest.raises(ValueError, match=f"^{name} must .*, not "):
            video_engine.generate(**{"prompt": "a", "video": str(clip), name: value})
    for settings in ("hosts", "prefill", "speculate", "reuse", "decode"):
        with pytest.raises(ValueError, match=f"^{settings} must be a .*, not 'x'"):
            Engine.from_pretrained(paths[0], **{settings: "x"})
    for source in ({"video": clip}, {"images": [families.synthetic_image()]}):
        with pytest.raises(PromptError, match="llama models read text only"):
            engine.generate("What?", **source)
    for family in IMAGE_FAMILIES:
        seeing = Engine.from_pretrained(checkpoints(family), hosts=hosts)
        for source in ({"video": clip}, says({"type": "video", "video": str(clip)}, "What?")):
            prompt = None if "messages" in source else "What?"
            with pytest.raises(PromptError, match=f"^{family} models read images only"):
                seeing.generate(prompt, **source)
    answer = engine.generate("What?", max_new_tokens=3)
    for text, shown in (("a" * 60, "a" * 60), ("a" * 61, "a" * 60 + "…")):
        assert repr(replace(answer, text=text)).startswith(f"GenerateResult({shown!r}, ")


def test_models_that_are_missing_or_unsupported_are_refused():
    for name in ("/no/such/model", "./model", "~/model", "a/b/model", Path("model")):
        with pytest.raises(
            ValueError, match=f"^cannot load the model {name}: there is no such directory$"
        ):
            Engine.from_pretrained(name, hosts=HostGroup.single("cpu"))
    with pytest.raises(
        ValueError, match=r"dmeo: there is no such directory \(did you mean demo\?\)"
    ):
        Engine.from_pretrained("dmeo", hosts=HostGroup.single("cpu"))
    config = families.build_config("qwen2")
    config.use_sliding_window = True
    config.sliding_window = 16
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="sliding_window=4096"):
        require_supported(transformers.MistralConfig())  # as in its first release
    with pytest.raises(
        UnsupportedModelError,
        match="molmo2 models are not supported; visual tokens attend to later",
    ):
        require_supported(transformers.Molmo2Config())
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .* sliding_attention"):
        inspect_model(transformers.Qwen2ForCausalLM(config))
    with pytest.raises(UnsupportedModelError, match="no language-model head"):
        inspect_model(transformers.LlamaModel(families.build_config("llama")))


@pytest.mark.parametrize("question", ["which <|image_pad|> letter", "a <|video_pad|> letter"])
def test_a_placeholder_in_a_question_is_refused(question):
    """It would get a row that nothing writes."""
    engine = Engine.from_pretrained("demo")
    about = (
        {"video": demo.video_path()}
        if "image" in question
        else {"images": families.synthetic_image(56, 56)}
    )
    with pytest.raises(PromptError, match="placeholder tokens, but its images and videos have"):
        engine.generate(question, **about, num_frames=4)
