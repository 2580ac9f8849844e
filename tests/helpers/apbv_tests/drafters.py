"""Drafters that know the answer and err where a test tells them to, and decoders to verify what
they draft."""

import torch

from apbv import HostGroup, prefill
from apbv.model.parts import inspect_model
from apbv.runner.decoder import Decoder
from apbv.speculate.drafters.drafters import Drafter, Proposal

from apbv_tests.configs import prefill_config
from apbv_tests.prompts import UNCOMPRESSED, as_inputs

STEPS = 26
VOCABULARY = 250
# Of every window: which drafted tokens are the right ones.
PATTERNS = {
    "none": lambda place: False,
    "all": lambda place: True,
    "alternating": lambda place: place % 2 == 0,
    "all but the first": lambda place: place > 0,
    "all but the last": lambda place: place % 5 != 4,
}


class ScriptedDrafter(Drafter):
    """Knows the answer, and errs where it is told to."""

    def __init__(self, answer: list[int], pattern):
        self.answer = answer
        self.pattern = pattern

    def propose(self, tokens, tree):
        assert tokens == self.answer[: len(tokens)]
        right = self.answer[len(tokens) :][: tree.depth]
        said = []
        for place, token in enumerate(right):
            is_right = self.pattern(place)
            said.append(token if is_right else (token + 1) % VOCABULARY)
        return Proposal(said)


def decoders(model, hosts: HostGroup, batch: dict, query_start, kv: str):
    """A decoder after a fresh prefill, the prefill, and a look at the whole KV on host 0."""
    parts = inspect_model(model)
    inputs = as_inputs(model.config.model_type, batch, query_start, hosts, torch.float64)
    config = prefill_config(kv=kv, passing_len=UNCOMPRESSED, on_single_host=True)
    state = prefill(model, inputs, hosts=hosts, config=config)
    decoder = Decoder(parts, state.kv, state.next_position, goes_back=True)
    return (
        decoder,
        state,
        lambda: state.kv.cache.gather(hosts) if kv == "sharded" else state.kv.cache,
    )


class ScriptedTree(ScriptedDrafter):
    """Knows the answer, and puts it where it is told to; other branches say the right thing in a
    wrong place."""

    def propose(self, tokens, tree):
        assert tokens == self.answer[: len(tokens)] and tree.num_drafted
        right = [self.answer[len(tokens) - 1 + depth] for depth in range(tree.depth + 1)]
        said = [right[depth] for depth in tree.depths]
        node = 0
        for depth, token in enumerate(right[1:], start=1):
            chosen = self.pattern(len(tokens) + depth) if node is not None else None
            on_path = () if node is None else tree.children[node]
            for rank, child in enumerate(on_path):
                said[child] = token if rank == chosen else (token + 1 + rank) % VOCABULARY
            node = on_path[chosen] if chosen is not None and chosen < len(on_path) else None
        return Proposal(said[1:])
