"""A method, a drafting strategy, a reducer and a route of another program, which are registered as
docs/architecture.md says and are no part of the package."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from apbv import HostGroup, PrefillConfig, ReduceConfig, SpeculativeConfig
from apbv.config import (
    METHOD_FACTS,
    REDUCER_FACTS,
    STRATEGY_FACTS,
    MethodFacts,
    ReducerFacts,
    SamplingParams,
    StrategyFacts,
)
from apbv.kernels.torch_attention import empty_output
from apbv.launch.options import OptionParser, add_draft_options, add_prefill_options
from apbv.layout import ContextLayout, plan_layout, split_evenly
from apbv.model.attention import gather_and_merge
from apbv.prefilling.methods import METHODS, PrefillMethod
from apbv.prefilling.reduction import REDUCERS
from apbv.prefilling.reduction.frames import KeptRows, SharedVideo
from apbv.serve.protocols.requests import TokenizeRequest
from apbv.speculate import STRATEGIES
from apbv.speculate.drafters.draft import Draft, DraftTask
from apbv.speculate.drafters.drafters import Drafter, Proposal
from apbv.speculate.drafters.tree import Tree
from apbv.speculate.strategies.table import Strategy

from apbv_tests.engines import QUESTION, build_engine
from apbv_tests.oracle import masked_attention, run_oracle
from apbv_tests.prompts import (
    build,
    check_prefill,
    prefill_job,
    reset_rope,
    text_batch,
    video_batch,
)
from apbv_tests.servers import InProcess, post

# ---- what the other program has ----


class WindowMethod(PrefillMethod):
    """Blocks see the last l_p tokens of the block before, and themselves; the query sees all."""

    name = "window"
    facts = MethodFacts(takes_sparse=False)

    @classmethod
    def plan(
        cls,
        num_hosts: int,
        num_tokens: int,
        context_start: int,
        query_start: int,
        config: PrefillConfig,
    ) -> ContextLayout:
        return plan_layout(
            num_hosts=num_hosts,
            num_tokens=num_tokens,
            context_start=context_start,
            query_start=query_start,
            anchor_len=0,
            passing_len=config.passing_len,
            zigzag=False,
        )

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, layer: int
    ) -> torch.Tensor:
        hosts = self.hosts
        layout = self.layout
        block, query = (slice(rows.start, rows.stop) for rows in layout.block_rows(hosts.rank))
        own = (k[:, :, block], v[:, :, block])

        # Pass the block's last pairs on to the next host; those of the last block are not used.
        kv = torch.stack(own)
        sent = kv[:, :, :, kv.shape[3] - layout.num_passed(hosts.rank) :]
        num_received = layout.num_passed((hosts.rank - 1) % hosts.size)
        window = hosts.shift(sent, (*kv.shape[:3], num_received, kv.shape[4])).wait()

        out = empty_output(q)
        segments = [own]
        if hosts.rank > 0:
            segments.insert(0, (window[0], window[1]))
        self.attend(q[:, :, block], segments, scale, causal_last=True, out=out[:, :, block])

        # Host 0 has the query's own keys.
        seen = [own]
        if hosts.is_leader:
            seen.append((k[:, :, query], v[:, :, query]))
        partial = self.attend(q[:, :, query], seen, scale, causal_last=hosts.is_leader)
        gather_and_merge([partial], hosts, self.config.backend, out=out[:, :, query]).wait()
        return out


class TableDrafter(Drafter):
    """Drafts what a table says follows the last token.

    Args:
        following: the next token, by token.
    """

    def __init__(self, following: dict[int, int]):
        self._following = following

    def propose(self, tokens: list[int], tree: Tree) -> Proposal:
        return Proposal(continued(self._following, tokens[-1], tree.depth))


def continued(following: dict[int, int], token: int, count: int) -> list[int]:
    """At most so many tokens that follow one by the table."""
    found = []
    while len(found) < count and token in following:
        token = following[token]
        found.append(token)
    return found


def table_strategy(following: dict[int, int]) -> Strategy:
    def draft_by_table(task: DraftTask) -> Draft:
        return Draft(TableDrafter(following) if task.is_decode_host else None, num_visual=0)

    return Strategy(StrategyFacts(drafts_trees=False), draft_by_table)


def keep_alternate(video: SharedVideo, count: int) -> KeptRows:
    """Keep the first tokens of every second frame; of the others only what is left to keep."""
    tokens = torch.arange(video.num_frames * video.frame_size).view(video.num_frames, -1)
    order = torch.cat([tokens[::2].flatten(), tokens[1::2].flatten()])
    return video.kept(order[:count].sort().values)


@contextmanager
def registered(following: dict[int, int] | None = None) -> Iterator[None]:
    """All of it is known by its names until the end of the block."""
    strategy = table_strategy(following or {})
    with (
        patch.dict(METHODS, {"window": WindowMethod}),
        patch.dict(METHOD_FACTS, {"window": WindowMethod.facts}),
        patch.dict(STRATEGIES, {"table": strategy}),
        patch.dict(STRATEGY_FACTS, {"table": strategy.facts}),
        patch.dict(REDUCERS, {"alternate": keep_alternate}),
        patch.dict(REDUCER_FACTS, {"alternate": ReducerFacts()}),
    ):
        yield


# ---- names ----

ADDED = [
    (PrefillConfig, "method", "window"),
    (SpeculativeConfig, "strategy", "table"),
    (ReduceConfig, "method", "alternate"),
]


@pytest.mark.parametrize(("config", "field", "name"), ADDED)
def test_a_registered_name_is_one_of_those_that_configs_take(config, field, name):
    with registered():
        assert getattr(config(**{field: name}), field) == name
        with pytest.raises(ValueError, match=rf"{field} must be one of .*, {name}, not 'nonsense'"):
            config(**{field: "nonsense"})
    with pytest.raises(ValueError, match=f"not '{name}'$"):
        config(**{field: name})


def test_a_registered_name_is_a_choice_of_the_command_line(capsys):
    arguments = ["--method", "window", "--reduce", "alternate", "--speculate", "table"]

    def parse():
        parser = OptionParser("a program")
        add_prefill_options(parser)
        add_draft_options(parser)
        return parser.parse_args(arguments)

    with registered():
        options = parse()
    assert (options.method, options.reduce, options.speculate) == ("window", "alternate", "table")
    with pytest.raises(SystemExit):
        parse()
    assert "invalid choice: 'window'" in capsys.readouterr().err


# ---- a method ----


class WindowOracle:
    """The method's attention by a dense mask over the whole prompt; see ``run_oracle``.

    Attributes:
        keys, values: what each layer saw, ``[1, Hkv, n, D]``.
    """

    separate_query = False

    def __init__(self, num_blocks: int, query_start: int, window: int):
        self._num_blocks = num_blocks
        self._query_start = query_start
        self._window = window
        self.keys = []
        self.values = []

    def attend(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        self.keys.append(key)
        self.values.append(value)
        num_tokens = key.shape[2]
        visible = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
        before: list[int] = []
        for block in torch.arange(self._query_start).tensor_split(self._num_blocks):
            window = before[-self._window :] if self._window else []
            for token in block.tolist():
                visible[token, [*window, *block.tolist()]] = True
            before = block.tolist()
        visible[self._query_start :] = True
        visible &= torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        of_all_heads = visible.expand(1, query.shape[1], -1, -1)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return masked_attention(query, key, value, of_all_heads, scale), None


def window_job(hosts: HostGroup, *args):
    with registered():
        return prefill_job(hosts, *args)


# The longer window is all of the block before.
@pytest.mark.parametrize(("num_hosts", "window"), [(2, 5), (3, 0), (3, 60)])
def test_a_registered_method_computes_its_dense_mask(pool, num_hosts, window):
    num_tokens = 131
    query_start = 121
    batch = text_batch(num_tokens)
    settings = {"method": "window", "passing_len": window}
    results = pool.run(num_hosts, window_job, "qwen2", batch, query_start, settings, torch.float64)
    assert {result.method for result in results} == {"window"}
    assert not any(result.exact for result in results)
    model = build("qwen2", torch.float64)
    reset_rope(model)
    oracle = WindowOracle(num_hosts, query_start, window)
    expected = run_oracle(model, batch, oracle)
    check_prefill(results, expected, zip(oracle.keys, oracle.values, strict=True), 1e-6)


# ---- a drafting strategy ----

STEPS = 16
GAMMA = 4


def table_of(answer: list[int]) -> dict[int, int]:
    """What follows the tokens of an answer, wrong for one of them, and without another."""
    following = dict(pairwise(answer))
    following[answer[8]] += 1
    del following[answer[4]]
    return following


def expected_figures(answer: list[int], following: dict[int, int]) -> dict[str, int]:
    """How greedy decoding of an answer with these drafts goes."""
    figures = {"num_target_forwards": 0, "num_drafted": 0, "num_accepted": 0}
    done = 1  # tokens that there are; the prefill chose the first
    while done < len(answer):
        # The target adds a token to the drafted ones.
        most = min(GAMMA, len(answer) - done - 1)
        drafted = continued(following, answer[done - 1], most)
        num_accepted = 0
        while num_accepted < len(drafted) and drafted[num_accepted] == answer[done + num_accepted]:
            num_accepted += 1
        done += num_accepted + 1
        figures["num_target_forwards"] += 1
        figures["num_drafted"] += len(drafted)
        figures["num_accepted"] += num_accepted
    return figures


def table_job(hosts: HostGroup, clip: str):
    """The answer without a draft; with one, alone and in a batch of two; and figures of one."""
    asked = {"prompt": QUESTION, "video": clip, "num_frames": 12}
    sampling = SamplingParams(max_new_tokens=STEPS)
    plain = build_engine(hosts, "qwen2_5_vl").generate(**asked, sampling=sampling).token_ids
    with registered(table_of(plain)):
        speculate = SpeculativeConfig(
            strategy="table", num_draft_tokens=GAMMA, keep_losing_draft=True
        )
        engine = build_engine(hosts, "qwen2_5_vl", speculate=speculate)
        alone = engine.generate(**asked, sampling=sampling)
        in_batch = dict(engine.generate_all([asked] * 2, sampling=sampling))
    return plain, alone, in_batch


def test_a_registered_strategy_changes_no_answer_and_saves_passes(pool, clip):
    for plain, alone, in_batch in pool.run(2, table_job, str(clip)):
        assert len(set(plain)) > 3
        assert alone.token_ids == plain
        assert [in_batch[number].token_ids for number in range(2)] == [plain, plain]
        figures = expected_figures(plain, table_of(plain))
        assert 0 < figures["num_accepted"] < figures["num_drafted"]
        assert figures.items() <= alone.stats["speculation"].items()


# ---- a reducer ----


def alternate_rows(num_frames: int, size: int, count: int) -> list[int]:
    """The tokens that the reducer keeps, ascending, of a video with ``size`` tokens a frame."""
    frames = [*range(0, num_frames, 2), *range(1, num_frames, 2)]
    order = [frame * size + place for frame in frames for place in range(size)]
    return sorted(order[:count])


def rows_job(hosts: HostGroup, movie: torch.Tensor, count: int) -> KeptRows:
    shares = tuple(split_evenly(range(len(movie)), hosts.size))
    own = movie[shares[hosts.rank].start : shares[hosts.rank].stop]
    video = SharedVideo(own, shares, 2, 3, movie.shape[2], hosts)
    with registered():
        return REDUCERS["alternate"](video, count)


@pytest.mark.parametrize("count", [1, 20, 34])
def test_a_registered_reducer_keeps_every_second_frame(pool, count):
    movie = torch.randn(7, 6, 5, generator=torch.Generator().manual_seed(0))
    expected = alternate_rows(7, 6, count)
    for num_hosts in (1, 3):
        results = pool.run(num_hosts, rows_job, movie, count)
        assert torch.cat([result.places for result in results]).tolist() == expected
        values = torch.cat([result.values for result in results])
        assert torch.equal(values, movie.flatten(0, 1)[expected])


def reduced_job(hosts: HostGroup, ratio: float):
    with registered():
        reduce = ReduceConfig(method="alternate", ratio=ratio)
        settings = {"method": "zigzag_ring", "reduce": reduce}
        return prefill_job(hosts, "qwen2_5_vl", video_batch("qwen2_5_vl"), None, settings)


def test_a_registered_reducer_prunes_a_prompt(pool):
    ((num_frames, height, width),) = video_batch("qwen2_5_vl")["video_grid_thw"].tolist()
    size = height * width // 4  # the vision tower merges squares of four patches
    expected = alternate_rows(num_frames, size, round(0.4 * num_frames * size))
    (alone,) = pool.run(1, reduced_job, 0.4)
    for result in pool.run(3, reduced_job, 0.4):
        assert result.reduction.kept.tolist() == expected
        torch.testing.assert_close(result.logits, alone.logits, rtol=1e-5, atol=1e-5)


# ---- a route ----


def test_a_route_of_another_program_is_served_as_others_are():
    async def count_tokens(request: Request) -> JSONResponse:
        body = TokenizeRequest.parse(await request.body())
        return JSONResponse({"count": len(server.reader.tokenize(body))})

    with closing(InProcess()) as server:
        server.app.routes.append(Route("/v1/count-tokens", count_tokens, methods=["POST"]))
        prompt = "which letter is it"
        reply = post(server, "/v1/count-tokens", prompt=prompt)
        assert reply.json() == {"count": len(server.engine.tokenizer(prompt)["input_ids"])}
        assert reply.headers["x-request-id"]
        # Errors are in OpenAI's form.
        for wrong, status, param in (
            (post(server, "/v1/count-tokens", prompt=1), 400, "prompt"),
            (post(server, "/v1/count-tokens", prompt="x " * 999), 400, "prompt"),
            (server.request("GET", "/v1/count-tokens"), 405, None),
        ):
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (status, param)
