"""Drafts by the target itself: LayerSkip's by its first layers, Streaming's on a part of its KV.

Their answers are transformers' own, on 1 to 4 hosts, with KV in one place or shared out, and in
batches. A wrong draft changes no answer: so what is drafted is compared, too, token by token, with
what transformers' own model drafts that has fewer layers, or that sees less.
"""

import copy
from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

import pytest
import torch

from apbv import HostGroup, SamplingParams, SpeculativeConfig
from apbv.speculate.drafters.drafters import ModelDrafter
from apbv.speculate.loops import speculative_batch

from apbv_tests import families
from apbv_tests.configs import speculative_config
from apbv_tests.engines import QUESTION, build_engine
from apbv_tests.oracle import masked_attention, with_attention
from apbv_tests.pairs import pairwise
from apbv_tests.prompts import by_processor, reset_rope, sampled

FAMILY = "qwen2_5_vl"
LAYERS = 3
FRAMES = 12
STEPS = 20
GAMMA = 4
# Of 36 visual tokens; of three layers.
STREAMING = {"strategy": "streaming", "keep_ratio": 0.3}
LAYERSKIP = {"strategy": "layerskip", "layer_ratio": 0.6}
NUM_LATEST = 11
NUM_FIRST_LAYERS = 2
EXACT = {"passing_len": 10**6, "anchor_len": 12}
QUESTIONS = (QUESTION, "And who is it that comes in?", "Why?")


def config_of(way: dict) -> SpeculativeConfig:
    settings = {"keep_losing_draft": True, "num_draft_tokens": GAMMA, **way}
    return speculative_config(**settings)


def engine_of(hosts: HostGroup, kv: str, way: dict | None):
    speculate = None if way is None else config_of(way)
    return build_engine(hosts, FAMILY, kv, speculate, layers=LAYERS, **EXACT)


@cache
def model_of():
    return families.build_model(FAMILY, dtype=torch.float64, layers=LAYERS)


@cache
def batch_of(clip: str, question: str) -> dict:
    content = [{"type": "video"}, {"type": "text", "text": question}]
    processor = families.build_processor(FAMILY)
    return by_processor(processor, content, [sampled(clip, FRAMES)])


@cache
def generated(clip: str, question: str, num_tokens: int = STEPS) -> list[int]:
    """The answer of transformers' own generate()."""
    model = model_of()
    asked = batch_of(clip, question)
    reset_rope(model)
    answer = model.generate(**asked, max_new_tokens=num_tokens, do_sample=False)
    return answer[0, asked["input_ids"].shape[1] :].tolist()


# ---- answers ----


def answers_job(hosts: HostGroup, clip: str, kv: str, ways: list, sampling: SamplingParams):
    """Tokens in every way, and how many drafted tokens were accepted, of how many."""
    found = []
    for way in ways:
        engine = engine_of(hosts, kv, way)
        answer = engine.generate(QUESTION, video=clip, num_frames=FRAMES, sampling=sampling)
        figures = answer.stats.get("speculation") or {}
        found.append((answer.token_ids, figures.get("num_accepted"), figures.get("num_drafted")))
    return found


CHAINS = [LAYERSKIP, STREAMING]
TREES = [{**way, "num_tree_nodes": 9} for way in CHAINS]


@pairwise(num_hosts=[1, 2, 3, 4], kv=["gathered", "sharded"], ways=[CHAINS, TREES])
def test_greedy_answers_are_those_of_transformers(pool, clip, num_hosts, kv, ways):
    sampling = SamplingParams(max_new_tokens=STEPS)
    for found in pool.run(num_hosts, answers_job, str(clip), kv, ways, sampling):
        for way, (tokens, accepted, drafted) in zip(ways, found, strict=True):
            assert tokens == generated(str(clip), QUESTION), way
            assert 0 < accepted < drafted, "some are right, and some are rolled back"


@pytest.mark.parametrize(("num_hosts", "kv"), [(1, "gathered"), (2, "sharded"), (4, "gathered")])
def test_trees_give_the_sampled_tokens_of_no_draft(pool, clip, num_hosts, kv):
    sampling = SamplingParams(max_new_tokens=STEPS, temperature=0.8, top_p=0.9, seed=4)
    for plain, *found in pool.run(num_hosts, answers_job, str(clip), kv, [None, *TREES], sampling):
        assert [tokens for tokens, *_ in found] == [plain[0]] * len(TREES)


IN_TURN = {"strategy": "vanilla", "draft_host": True, "concurrent_prefill": False}


@pytest.mark.parametrize(("num_hosts", "kv"), [(2, "sharded"), (3, "sharded"), (4, "gathered")])
def test_so_are_those_beside_a_draft_that_prefills_in_turn(pool, clip, num_hosts, kv):
    sampling = SamplingParams(max_new_tokens=STEPS)
    for ((tokens, *_),) in pool.run(num_hosts, answers_job, str(clip), kv, [IN_TURN], sampling):
        assert tokens == generated(str(clip), QUESTION)


# ---- in batches ----


def batch_job(hosts: HostGroup, clip: str, kv: str, way: dict):
    """Answers to several questions at once, and what was drafted for each of them here, behind
    which tokens."""
    engine = engine_of(hosts, kv, way)
    drafted = []
    decide = speculative_batch.decide

    def noted(answer, window, rows):
        prompt = answer.prompt_ids.tolist()
        drafted.append((prompt, list(answer.tokens), window.tokens.tolist()))
        return decide(answer, window, rows)

    questions = [{"prompt": each, "video": clip, "num_frames": FRAMES} for each in QUESTIONS]
    with patch.object(speculative_batch, "decide", noted):
        found = dict(
            engine.generate_all(
                questions, sampling=SamplingParams(max_new_tokens=STEPS), max_together=3
            )
        )
    return [found[number].token_ids for number in range(len(QUESTIONS))], drafted


@pairwise(num_hosts=[1, 2, 3, 4], way=CHAINS, kv=["gathered", "sharded"])
def test_answers_of_a_batch_are_those_of_transformers(pool, clip, num_hosts, way, kv):
    """With sharded KV they are answered one by one."""
    expected = [generated(str(clip), question) for question in QUESTIONS]
    num_rounds = 0
    for tokens, drafted in pool.run(num_hosts, batch_job, str(clip), kv, way):
        assert tokens == expected
        num_rounds += len(drafted)
    assert (num_rounds > 0) == (kv == "gathered")


# ---- what is drafted ----


@dataclass
class Masked:
    """Attention with one mask in all layers and heads, bool ``[n, n]``."""

    visible: torch.Tensor

    def attend(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        visible = self.visible[None, None].expand(1, query.shape[1], -1, -1)
        return masked_attention(query, key, value, visible, scale), None


def longer(asked: dict, tokens: list[int]) -> dict:
    """A prompt with the answer's tokens behind it, as a processor would return it."""
    new = torch.tensor([tokens])
    behind = {"input_ids": new, "attention_mask": torch.ones_like(new)}
    behind["mm_token_type_ids"] = torch.zeros_like(new)
    return {
        name: torch.cat([value, behind[name]], dim=1) if name in behind else value
        for name, value in asked.items()
    }


@cache
def truncated_model():
    """Transformers' own model without its last layers."""
    model = copy.deepcopy(model_of())
    model.get_decoder().layers = model.get_decoder().layers[:NUM_FIRST_LAYERS]
    return model


@torch.no_grad()
def by_first_layers(asked: dict, tokens: list[int], count: int) -> list[int]:
    """LayerSkip: greedy tokens of the truncated model behind these, each from the whole text
    anew."""
    model = truncated_model()
    drafted = []
    for _ in range(count):
        reset_rope(model)
        logits = model(**longer(asked, [*tokens, *drafted]), use_cache=False).logits[0, -1]
        drafted.append(int(logits.argmax()))
    return drafted


@torch.no_grad()
def by_latest(asked: dict, tokens: list[int], count: int) -> list[int]:
    """Streaming: greedy tokens of the model whose newest tokens see all text, the latest visual
    tokens, and one another.

    The prompt and the verified tokens, all but the last, have seen everything: their KV is the
    target's.
    """
    model = model_of()
    drafted = []
    (visual,) = torch.where(asked["input_ids"][0] == model.config.video_token_id)
    hidden = visual[: len(visual) - NUM_LATEST]
    num_dense = asked["input_ids"].shape[1]
    num_dense += len(tokens) - 1
    for _ in range(count):
        reset_rope(model)
        whole = longer(asked, [*tokens, *drafted])
        length = whole["input_ids"].shape[1]
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        for row in range(num_dense, length):
            visible[row, hidden] = False
        with with_attention(model, Masked(visible)):
            logits = model(**whole, use_cache=False).logits[0, -1]
        drafted.append(int(logits.argmax()))
    return drafted


DEFINITIONS = {"layerskip": by_first_layers, "streaming": by_latest}


def proposals_job(hosts: HostGroup, clip: str, kv: str, way: dict):
    """What was drafted in every round, behind which tokens, on host 0."""
    found = []
    propose = ModelDrafter.propose

    def noted(drafter, tokens, tree):
        proposal = propose(drafter, tokens, tree)
        found.append((list(tokens), proposal.tokens))
        return proposal

    with patch.object(ModelDrafter, "propose", noted):
        engine = engine_of(hosts, kv, way)
        sampling = SamplingParams(max_new_tokens=STEPS)
        engine.generate(QUESTION, video=clip, num_frames=FRAMES, sampling=sampling)
    return found


def require_as_defined(way: dict, asked: dict, rounds: list[tuple[list[int], list[int]]]) -> None:
    """Every round's draft is that of the definition, and not that of the whole model."""
    define = DEFINITIONS[way["strategy"]]
    for tokens, drafted in rounds:
        assert drafted == define(asked, tokens, len(drafted)), len(tokens)


@pytest.mark.parametrize("way", CHAINS, ids=str)
@pytest.mark.parametrize(
    ("num_hosts", "kv"), [(1, "gathered"), (2, "sharded"), (3, "gathered"), (4, "sharded")]
)
def test_what_is_drafted_is_what_the_papers_say(pool, clip, way, num_hosts, kv):
    rounds = pool.run(num_hosts, proposals_job, str(clip), kv, way)[0]
    right = generated(str(clip), QUESTION)
    wrong = sum(drafted != right[len(tokens) :][: len(drafted)] for tokens, drafted in rounds)
    assert len(rounds) > 3 and wrong, "drafts that are rejected, and rolled back"
    require_as_defined(way, batch_of(str(clip), QUESTION), rounds)


@pytest.mark.parametrize("way", CHAINS, ids=str)
def test_so_it_is_in_a_batch(pool, clip, way):
    of_prompt = {}
    for question in QUESTIONS:
        asked = batch_of(str(clip), question)
        of_prompt[tuple(asked["input_ids"][0].tolist())] = asked, []
    for _, drafted in pool.run(2, batch_job, str(clip), "gathered", way):
        for prompt, tokens, window in drafted:
            of_prompt[tuple(prompt)][1].append((tokens, window))
    for asked, rounds in of_prompt.values():
        assert len(rounds) > 3
        require_as_defined(way, asked, rounds)
