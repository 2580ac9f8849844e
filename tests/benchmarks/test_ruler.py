"""The RULER-shaped tasks of benchmarks/ruler.py, their scoring, and the pretrained model where it is installed."""

import re
from collections import Counter

import pytest
import ruler
from transformers import AutoModelForImageTextToText, AutoTokenizer

from apbv import HostGroup, PrefillConfig, demo

from support.ruler import RULER_TASKS, make_task
from support.ruler.needles import SMALL_TASKS
from support.ruler.scoring import score_ruler


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.model_path())


def load_demo():
    return AutoModelForImageTextToText.from_pretrained(demo.model_path(), dtype="float32").eval()


def read_needles(context: str) -> dict[str, list[str]]:
    """Read what a context hides: all values of each key."""
    found: dict[str, list[str]] = {}
    pattern = r"[Oo]ne of the special magic \w+s for (\S+) is: (\S+)\.|The special magic \w+ for (\S+) is (\S+)\."
    for key, value, plain_key, plain_value in re.findall(pattern, context):
        found.setdefault(key or plain_key, []).append(value or plain_value)
    return found


def read_assignments(text: str, value: str) -> set[str]:
    """Read which variables have a value, by the assignments that lead to it."""
    assigned = dict(re.findall(r"VAR (\w+) = (VAR \w+|\d+)\.", text))

    def resolved(name: str) -> str:
        said = assigned[name]
        return resolved(said.removeprefix("VAR ")) if said.startswith("VAR") else said

    return {name for name in assigned if resolved(name) == value}


def answers_by_reading(task: str, context: str, question: str) -> set[str]:
    """Answer a question by a reader that knows nothing of how the text was made."""
    if task == "vt":
        *_, value = re.findall(r"\d+", question)
        return read_assignments(context, value)
    if task == "cwe":
        words = re.findall(r"\d+\. ([a-z-]+)", context.rpartition("numbered list")[2])
        return most_frequent(words, 10)
    if task == "fwe":
        words = re.findall(r"(?<= )[a-z]{6}(?= |$)", context.partition("coded words.")[2])
        return most_frequent(words, 3)
    asked = re.search(r" for (.*?)(?: mentioned|\?)", question)[1]
    needles = read_needles(context)
    return {value for key in re.split(r", and |, ", asked) for value in needles[key]}


def most_frequent(words: list[str], number: int) -> set[str]:
    counts = Counter(words).most_common(number + 1)
    assert counts[number - 1][1] > counts[number][1]  # there is one answer
    return {word for word, _ in counts[:number]}


# The demo's tokenizer spells most words, so that a list of words needs many tokens.
@pytest.mark.parametrize("task", [*SMALL_TASKS, *RULER_TASKS])
def test_a_reader_of_the_text_finds_the_answers(tokenizer, task):
    num_tokens = 3000
    made = make_task(task, 0, num_tokens, tokenizer)
    assert 0.95 * num_tokens <= len(tokenizer(made.context).input_ids) <= num_tokens
    assert answers_by_reading(task, made.context, made.question) == set(made.answers)
    assert len(set(made.answers)) == len(made.answers)
    assert made == make_task(task, 0, num_tokens, tokenizer) != make_task(task, 7, num_tokens, tokenizer)
    assert not any(answer in made.question + made.answer_start for answer in made.answers)


def test_what_cannot_be_made_is_refused(tokenizer):
    with pytest.raises(ValueError, match="unknown task 'double'; known are single"):
        make_task("double", 0, 1000, tokenizer)
    for task in ("vt", "single", "cwe"):
        with pytest.raises(ValueError, match="does not fit into 100 tokens: it needs"):
            make_task(task, 0, 100, tokenizer)


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


def test_what_cannot_be_asked_is_refused_in_one_line(capsys):
    assert ruler.main(["--model", "demo", "--tasks", "vt", "--tokens", "64", "--samples", "1"]) == 1
    assert "does not fit into 64 tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        ruler.parse_arguments(["--passing-len", "0", "some"])
    assert exit.value.code == 2 and "'some'" in capsys.readouterr().err
    assert ruler.parse_arguments(["--passing-len", "0", "default"]).passing_len == [0, None]
