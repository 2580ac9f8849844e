"""This module decodes with draft trees: a tree is drafted, then verified, in turn."""

from torch import Tensor

from ..decode.answer import NO_TOKEN, Answer
from ..decode.sampling import NotFiniteError
from ..timeline import Recorder
from .drafters import pack_tokens, unpack_tokens
from .pace import Pace
from .serial import SWITCHED_OFF
from .speculation_stats import LOSING, SpeculationStats
from .tree import Tree, verify_tree
from .tree_drafter import TreeProposer


def generate_by_tree(
    answer: Answer, drafter: TreeProposer | None, tree: Tree, pace: Pace
) -> tuple[list[int], SpeculationStats]:
    """Decode as :func:`~apbv.speculate.serial.generate_speculatively` does, but draft a tree per round.

    The tokens are those of decoding without a draft, also where they are sampled; see :func:`verify_tree`.

    Args:
        drafter: the drafter on the leader; None on the others.
        tree: the shape of the tree that is drafted per round, on every host.
        pace: decides how many levels are drafted, and whether a draft is dropped that costs more than it saves.

    Returns:
        The new tokens, and the statistics, in which a node of a tree is a drafted token.

    Raises:
        AgreedError: the target's logits are NaN or infinite; on every host. A draft with such logits is dropped.
    """
    hosts, decoder, tokens = answer.hosts, answer.decoder, answer.tokens
    stats = SpeculationStats(record=Recorder("decoding", hosts.clock))
    token, has_ended = answer.choose(answer.logits)
    new, is_drafting = [token], True
    while True:
        answer.add(new)
        if has_ended:
            return tokens, stats
        # The target adds one token to those that it accepts.
        shape, drafted = tree.cut(answer.num_left - 1), None
        if is_drafting and shape.num_drafted:
            with stats.record.span("draft") as details:
                shape, drafted = _draft_levels(shape, drafter, answer, pace, stats)
                details["tokens"] = shape.num_drafted
            is_drafting = drafted is not None
        else:
            shape = tree.cut(0)
        drafted = drafted or tokens[-1:]
        verdict = None
        with stats.record.span("verify", tokens=len(shape)) as details:
            rows = decoder.advance_tree(drafted, shape.depths, shape.visible)
            if hosts.is_leader:
                hosts.settle()
                verdict = _encode_verdict(answer, shape, drafted, rows)
            token, num_new, has_ended, *path = hosts.broadcast_ints(verdict, shape.depth + 5)
            answer.require_token(token)
            path = unpack_tokens(path)
            new = [*(drafted[node] for node in path[1:]), token][:num_new]
            # All new tokens but the last are in the KV then, and no others.
            decoder.keep_path(len(shape), path[: len(new)])
            details["accepted"] = len(path) - 1
        stats.rounds += is_drafting
        stats.num_target_forwards += 1
        stats.num_drafted += shape.num_drafted
        stats.num_accepted += len(path) - 1
        stats.num_rejections += not shape.is_leaf(path[-1])
        if is_drafting:
            pace.learn(shape.depth, len(path) - 1, len(new), *stats.seconds_of_round())


def _encode_verdict(answer: Answer, shape: Tree, drafted: list[int], rows: Tensor) -> list[int]:
    """Encode for all hosts the token after the accepted path, the number of new tokens, the end, and the path."""
    rows = answer.allowed(rows, [answer.next_index + depth for depth in shape.depths])
    try:
        path, token = verify_tree(shape, drafted, rows, answer.next_index, answer.sampling)
    except NotFiniteError:
        return [NO_TOKEN, 1, True, *pack_tokens([0], shape.depth + 1)]
    new, has_ended = answer.cut([*(drafted[node] for node in path[1:]), token])
    return [token, len(new), has_ended, *pack_tokens(path, shape.depth + 1)]


def _draft_levels(
    tree: Tree, drafter: TreeProposer | None, answer: Answer, pace: Pace, stats: SpeculationStats
) -> tuple[Tree, list[int] | None]:
    """Draft levels of a tree on host 0; return their shape and all nodes' tokens on every host.

    The tokens are None where host 0 has switched the draft off.
    """
    hosts, tokens, numbers = answer.hosts, answer.tokens, None
    if hosts.is_leader:
        depth, proposed = SWITCHED_OFF, []
        if pace.is_losing():
            stats.switch_off(LOSING, len(tokens))
        else:
            depth = min(pace.next_window(), tree.depth)
            try:
                proposed = drafter.propose(tokens, tree.cut(depth)) if depth else []
            except NotFiniteError as error:
                stats.switch_off(f"it gave {error}", len(tokens))
                depth = SWITCHED_OFF
        numbers = [depth, *proposed, *[0] * (tree.num_drafted - len(proposed))]
    depth, *proposed = hosts.broadcast_ints(numbers, 1 + tree.num_drafted)
    if depth == SWITCHED_OFF:
        return tree.cut(0), None
    shape = tree.cut(depth)
    return shape, [tokens[-1], *proposed[: shape.num_drafted]]
