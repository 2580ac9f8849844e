"""The engine and launch/infer.py, from real H.264 files to text."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging as transformers_logging

from apbv import Engine, HostGroup, PrefillConfig
from apbv.input.video import VideoError
from apbv.input.visual import PromptError
from apbv.layout import LayoutError
from apbv.model.parts import UnsupportedModelError, inspect_model
from apbv.stats import STAGES

import families
from engines import QUESTION
from families import TEXT_FAMILIES, VIDEO_FAMILIES
from patience import HANGING
from scripts import INFER, infer, run_script


def answers_job(hosts: HostGroup, path: str, settings: dict, request: dict):
    engine = Engine.from_pretrained(path, prefill=PrefillConfig(**settings), hosts=hosts)
    answer = engine.generate(QUESTION, max_new_tokens=6, **request)
    return answer.token_ids, answer.text, answer.stats


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_every_family_answers_about_a_file_as_one_process_would(pool, checkpoints, clip, family):
    """Nothing compressed: two and three hosts, either KV placement, give plain full attention's answer."""
    path, request = str(checkpoints(family)), {"video": str(clip), "num_frames": 21}
    engine = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"))
    expected = engine.generate(QUESTION, max_new_tokens=6, **request)
    assert expected.stats["method"] == "full"
    for hosts, kv in ((2, "gathered"), (3, "sharded")):
        for tokens, text, stats in pool.run(hosts, answers_job, path, {"kv": kv, "passing_len": 10**6}, request):
            assert (tokens, text) == (expected.token_ids, expected.text)
            assert (stats["method"], stats["hosts"]) == ("apbv", hosts)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_long_text_is_split_and_the_question_is_the_query(pool, checkpoints, family):
    path = str(checkpoints(family))
    request = {"context": "The quick brown fox jumps over the lazy dog. " * 6}
    engine = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"))
    expected = engine.generate(QUESTION, max_new_tokens=6, **request)
    state = engine.prefill(QUESTION, **request)
    question = engine.tokenizer.decode(state.inputs.input_ids[0, state.inputs.query_start :])
    assert question.startswith(f"\n\n{QUESTION}")
    for tokens, _, stats in pool.run(2, answers_job, path, {}, request):
        assert tokens == expected.token_ids
        assert stats["method"] == "apbv"


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_images_and_chats(pool, checkpoints, clip, family, tmp_path):
    path = str(checkpoints(family))
    picture = tmp_path / "picture.png"
    families.synthetic_image(84, 112).save(picture)
    engine = Engine.from_pretrained(path, hosts=HostGroup.single("cpu"))
    expected = engine.generate(QUESTION, images=[picture], max_new_tokens=6).token_ids
    for tokens, *_ in pool.run(2, answers_job, path, {}, {"images": [str(picture)]}):
        assert tokens == expected
    turns = chat({"type": "image", "path": str(picture)})
    assert engine.generate(messages=turns, max_new_tokens=6).token_ids == expected
    turns = chat({"type": "video", "video": str(clip)})
    video = engine.generate(QUESTION, video=clip, num_frames=8, max_new_tokens=6).token_ids
    assert engine.generate(messages=turns, num_frames=8, max_new_tokens=6).token_ids == video


def chat(source: dict) -> list[dict]:
    return [{"role": "user", "content": [source, {"type": "text", "text": QUESTION}]}]


def test_the_command_line_prints_an_answer_and_writes_its_figures(checkpoints, clip, tmp_path):
    figures = tmp_path / "figures.jsonl"
    options = ["--model", checkpoints("qwen2_5_vl"), "--video", clip, "--prompt", QUESTION, "--frames", 20]
    options += ["--passing-len", 4, "--anchor-len", 12, "--max-new-tokens", 5, "--json", figures]
    for hosts in (2, 1):
        result = infer(*options, hosts=hosts)
        assert result.returncode == 0, result.stderr
    two, one = map(json.loads, figures.read_text().splitlines())
    assert (two["method"], two["hosts"], one["method"], one["hosts"]) == ("apbv", 2, "full", 1)
    for record in (two, one):
        assert record["num_video_tokens"] == 10 * 2 * 3
        assert len(record["token_ids"]) == 5
        assert record["ttft_ms"] > 0 and record["output_throughput"] > 0
        assert set(record["stages_ms"]) == {
            "decode_video", "preprocess", "encode", "exchange", "prefill", "handoff", "draft", "decode",
        }  # fmt: skip
        assert all(peak > 50 * 2**20 for peak in record["peak_memory_bytes"])
        assert record["speculation"] is None and record["versions"]["torch"] == torch.__version__
    assert two["anchor_len"] >= 12 and two["passing_len"] == 4
    assert one["comm_bytes"] == [0] and all(received > 0 for received in two["comm_bytes"])
    assert two["comm_bytes_total"] == sum(two["comm_bytes"])


def broken_files(folder: Path, clip: Path) -> dict[str, Path]:
    data = clip.read_bytes()
    (folder / "text.mp4").write_text("not a video\n" * 50)
    (folder / "truncated.mp4").write_bytes(data[: len(data) // 2])
    (folder / "empty.mp4").write_bytes(b"")
    return {
        "missing file": folder / "missing.mp4",
        "not a video": folder / "text.mp4",
        "truncated file": folder / "truncated.mp4",
        "zero frames": folder / "empty.mp4",
        "a folder": folder,
    }


@pytest.mark.parametrize("case", ["missing file", "not a video", "truncated file", "zero frames", "a folder"])
def test_a_bad_video_is_one_clear_error_on_every_host(checkpoints, clip, tmp_path, case):
    file = broken_files(tmp_path, clip)[case]
    asked = ["--model", checkpoints("qwen2_5_vl"), "--video", file, "--prompt", QUESTION]
    result = run_script(INFER, *asked, hosts=2, timeout=HANGING)
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert sorted({line.split(":")[0] for line in errors}) == ["error (host 0)", "error (host 1)"]
    assert all(str(file) in line for line in errors)


def one_bad_host_job(hosts: HostGroup, path: str, good: str, bad: str):
    """Only the last host's file is unreadable; afterwards the same group still answers."""
    engine = Engine.from_pretrained(path, hosts=hosts)
    mine = bad if hosts.rank == hosts.size - 1 else good
    try:
        engine.generate(QUESTION, video=mine, num_frames=8, max_new_tokens=2)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return failure, engine.generate(QUESTION, video=good, num_frames=8, max_new_tokens=2).token_ids


def test_one_host_with_an_unreadable_video_fails_all_and_breaks_nothing(pool, checkpoints, clip, tmp_path):
    bad = broken_files(tmp_path, clip)["truncated file"]
    results = pool.run(3, one_bad_host_job, str(checkpoints("qwen2_vl")), str(clip), str(bad))
    failures = [failure for failure, _ in results]
    assert failures[2].startswith("VideoError: ")
    assert all(f.startswith("HostError: host 2 failed in reading the video: VideoError") for f in failures[:2])
    assert all(tokens == results[0][1] for _, tokens in results)


def different_prompts_job(hosts: HostGroup, path: str):
    engine = Engine.from_pretrained(path, hosts=hosts)
    try:
        engine.generate(f"What is number {hosts.rank}?", context="word " * 60)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_hosts_with_different_prompts_are_refused(pool, checkpoints):
    for failure in pool.run(2, different_prompts_job, str(checkpoints("llama"))):
        assert failure == "HostError: the prompt of host 1 differs from that of host 0"


@pytest.fixture(scope="session")
def engines(checkpoints):
    loaded = {}

    def get(family: str) -> Engine:
        if family not in loaded:
            loaded[family] = Engine.from_pretrained(checkpoints(family), hosts=HostGroup.single("cpu"))
        return loaded[family]

    return get


def test_what_is_printed_of_an_engine_and_its_results_is_short(engines):
    engine = engines("llama")
    assert repr(engine.hosts) == "HostGroup(host 0 of 1, cpu)"
    assert repr(engine) == f"Engine({engine.name!r}, llama, method='apbv', kv='gathered', {engine.hosts})"
    state = engine.prefill("What?")
    what = f"{state.num_tokens} tokens, method='full', exact=True, kv='gathered'"
    assert repr(state) == f"PrefillResult({what}, {engine.hosts})"
    answer = engine.decode(state, max_new_tokens=3)
    taken = f"ttft_ms={answer.stats['ttft_ms']:.1f}, total_ms={answer.stats['total_ms']:.1f}"
    assert repr(answer) == f"GenerateResult({answer.text!r}, 3 tokens, 'length', {taken})"
    long = replace(answer, text="a" * 61)
    assert repr(long).startswith(f"GenerateResult({'a' * 60 + '…'!r}, ")


@pytest.mark.parametrize("is_on", [True, False])
def test_weights_are_loaded_without_a_bar_and_the_setting_stays(checkpoints, capfd, is_on):
    was_on = transformers_logging.is_progress_bar_enabled()
    (transformers_logging.enable_progress_bar if is_on else transformers_logging.disable_progress_bar)()
    try:
        Engine.from_pretrained(checkpoints("llama"), hosts=HostGroup.single("cpu"))
        assert transformers_logging.is_progress_bar_enabled() == is_on
        assert are_progress_bars_disabled() != is_on
    finally:
        (transformers_logging.enable_progress_bar if was_on else transformers_logging.disable_progress_bar)()
    assert "Loading" not in capfd.readouterr().err


def test_the_configuration_is_written_out_once(checkpoints, monkeypatch):
    """Hosts compare it for every prompt."""
    engine = Engine.from_pretrained(checkpoints("llama"), hosts=HostGroup.single("cpu"))
    written, config = [], type(engine.model.config)
    monkeypatch.setattr(config, "__str__", lambda config: written.append(1) or "", raising=False)
    for _ in range(3):
        engine.prefill("What?")
    assert len(written) == 1


def test_the_stages_are_named_as_they_begin(engines, clip):
    begun = []
    engines("qwen2_5_vl").generate(QUESTION, video=clip, num_frames=4, max_new_tokens=2, on_stage=begun.append)
    assert set(begun) <= set(STAGES)
    in_order = list(dict.fromkeys(begun))
    wanted = ["decode_video", "encode", "exchange", "prefill", "decode"]
    assert [stage for stage in in_order if stage in wanted] == wanted


def warning_job(hosts: HostGroup, path: str) -> list[tuple[str, str]]:
    engine = Engine.from_pretrained(path, hosts=hosts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            engine.generate("What?", max_new_tokens=1)
    return [(Path(each.filename).name, str(each.message)) for each in caught]


def test_a_warning_is_said_once_by_one_host_at_the_callers_line(pool, checkpoints):
    first, second = pool.run(2, warning_job, str(checkpoints("llama")))
    ((file, message),) = first
    assert file == Path(__file__).name and "is too short to be split over 2 hosts" in message
    assert not second


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "../model", "~/model", "a/b/model", Path("model")])
def test_a_missing_directory_is_called_that(name):
    with pytest.raises(ValueError, match=f"^cannot load the model {name}: there is no such directory$"):
        Engine.from_pretrained(name, hosts=HostGroup.single("cpu"))


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"prompt": ""}, PromptError, "prompt is empty"),
        ({"prompt": " \n"}, PromptError, "prompt is empty"),
        ({"prompt": None}, PromptError, "prompt is empty"),
        ({"prompt": "a", "context": " "}, PromptError, "context is empty"),
        ({"prompt": "a", "context": "b", "images": ["c.png"]}, PromptError, "images and context"),
        ({"prompt": "a", "images": ["missing.png"]}, PromptError, "cannot read the image missing.png"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, PromptError, "instead of"),
        ({"messages": []}, PromptError, "chat is empty"),
        ({"messages": [{"content": "b"}]}, PromptError, "role and a content"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, PromptError, "not 'smell'"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, PromptError, "must name a local file"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "video": "http://a/b.mp4"}]}]},
            PromptError,
            "local file",
        ),
        ({"prompt": "a", "max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"prompt": "a", "temperature": -1.0}, ValueError, "temperature"),
        ({"prompt": "a", "top_p": 0.0}, ValueError, "top_p"),
        ({"prompt": "a", "seed": -1}, ValueError, "seed"),
        ({"prompt": "a", "video": "CLIP", "num_frames": 0}, ValueError, "0"),
        ({"prompt": "a", "video": "CLIP", "num_frames": -3}, ValueError, "-3"),
        ({"prompt": "a", "video": "CLIP", "fps": 0.0}, ValueError, "0"),
        ({"prompt": "a", "video": "CLIP", "fps": float("nan")}, ValueError, "nan"),
    ],
    ids=lambda value: None if isinstance(value, type) else str(value)[:50],
)
def test_a_bad_request_is_refused(engines, clip, request_, error, message):
    request_ = {name: str(clip) if value == "CLIP" else value for name, value in request_.items()}
    with pytest.raises(error, match=message):
        engines("qwen2_5_vl").generate(**request_)


def test_a_text_model_refuses_video_and_images(engines, clip):
    for source in ({"video": clip}, {"images": [families.synthetic_image()]}):
        with pytest.raises(PromptError, match="llama models read text only"):
            engines("llama").generate("What?", **source)


def test_a_missing_video_names_the_file(engines):
    with pytest.raises(VideoError, match=r"nowhere\.mp4"):
        engines("internvl").generate("What?", video="nowhere.mp4")


def long_anchor_job(hosts: HostGroup, path: str):
    config = PrefillConfig(anchor_len=10**6)
    try:
        Engine.from_pretrained(path, hosts=hosts, prefill=config).generate("What?", context="word " * 60)
    except LayoutError as error:
        return str(error)


def test_an_anchor_longer_than_the_context_is_refused(pool, checkpoints):
    for message in pool.run(2, long_anchor_job, str(checkpoints("llama"))):
        assert message.startswith("anchor_len=1000000 leaves no context")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"anchor_len": -1}, "anchor_len"),
        ({"passing_len": -5}, "passing_len"),
        ({"passing_len": 2**40}, "passing_len"),
        ({"passing_len": 1.5}, "passing_len must be an integer"),
        ({"kv": "nowhere"}, "gathered, sharded"),
    ],
)
def test_absurd_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PrefillConfig(**settings)


def sliding_qwen2():
    config = families.build_config("qwen2")
    config.use_sliding_window, config.sliding_window = True, 16
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM(config)


def gemma():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=16))


def headless():
    from transformers import LlamaModel

    return LlamaModel(families.build_config("llama"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sliding_qwen2, "layer 1 .* sliding_attention"),
        (gemma, "gemma2 models are not supported"),
        (headless, "no language-model head"),
    ],
)
def test_unsupported_models_are_refused_by_name(make, message):
    with pytest.raises(UnsupportedModelError, match=message):
        inspect_model(make())


def test_a_missing_model_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="cannot load the model"):
        Engine.from_pretrained(tmp_path / "nothing", hosts=HostGroup.single("cpu"))
