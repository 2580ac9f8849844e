"""From logits to a token: the distribution that is drawn from, and numbers that depend on their keys only."""

import itertools
import math

import numpy as np
import pytest
import torch

from apbv import SamplingConfig
from apbv.decode import sampling
from apbv.decode.sampling import PURPOSE_NEXT_TOKEN, probabilities, sample, uniform


def random_logits(seed, size, spread=2.0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def chi_square(counts, expected):
    """Pearson's statistic; its mean is the number of cells less one."""
    return float((((counts - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("value", [0, -1, 2**20 + 1, 1.5, "8", None], ids=repr)
def test_max_new_tokens_out_of_range(value):
    with pytest.raises(ValueError, match=r"^max_new_tokens must lie in 1 .. 2\^20, not ") as raised:
        SamplingConfig(max_new_tokens=value)
    assert str(raised.value).endswith(repr(value))


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan], ids=repr)
def test_temperature_out_of_range(value):
    with pytest.raises(ValueError, match=f"^temperature must be 0 \\(greedy\\) or at least 1e-6, not {value}$"):
        SamplingConfig(temperature=value)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.0001, math.nan], ids=repr)
def test_top_p_out_of_range(value):
    with pytest.raises(ValueError, match=rf"^top_p must lie in \(0, 1\], not {value}$"):
        SamplingConfig(top_p=value)


@pytest.mark.parametrize("value", [-1, 2**64], ids=repr)
def test_seed_out_of_range(value):
    with pytest.raises(ValueError, match=rf"^seed must lie in 0 .. 2\^64-1, not {value}$"):
        SamplingConfig(seed=value)


def test_extreme_settings_in_range_can_be_drawn_with():
    config = SamplingConfig(max_new_tokens=2**20, temperature=1e-3, top_p=1e-9, seed=2**64 - 1)
    assert sample(torch.tensor([0.0, 3.0, 1.0]), config, position=2**40) == 1


def test_uniform_is_a_function_of_its_arguments():
    calls = list(itertools.product((0, 1, 2**64 - 1), (0, 1, 2, 2**33), (0, 1)))
    first = {call: uniform(*call) for call in calls}
    again = {call: uniform(*call) for call in reversed(calls)}
    assert first == again
    assert len(set(first.values())) == len(calls), "two keys share a number"
    assert all(0.0 <= number < 1.0 for number in first.values())


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ((0, 0, 0), 0.011546754286331562),
        ((7, 272, 0), 0.7292900204044579),
        ((7, 272, 1), 0.18702180569014648),
        ((2**64 - 1, 2**33, 2), 0.1725574004888618),
    ],
)
def test_numbers_stay_what_they_were(key, number):
    """A seed draws the same answer as it did in earlier versions."""
    assert uniform(*key) == number


@pytest.mark.parametrize("vary", ["seed", "position", "purpose"])
def test_uniform_is_uniform_along_every_key(vary):
    count, bins = 4000, 20
    numbers = np.array([uniform(**{"seed": 7, "position": 11, "purpose": 3} | {vary: i}) for i in range(count)])
    # 80 is exceeded once in 2e9 for 19 degrees of freedom; the numbers are fixed, so this is not flaky.
    counts = np.histogram(numbers, bins=bins, range=(0.0, 1.0))[0]
    assert chi_square(counts, np.full(bins, count / bins)) < 80
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / math.sqrt(count)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_probabilities_without_top_p_are_the_softmax(temperature):
    logits = random_logits(0, 50).float()
    weights = [math.exp(logit / temperature) for logit in logits.tolist()]
    expected = torch.tensor([weight / math.fsum(weights) for weight in weights], dtype=torch.float64)
    p = probabilities(logits, temperature, top_p=1.0)
    assert p.dtype == torch.float64
    torch.testing.assert_close(p, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_probabilities_of_half_precision_logits_are_computed_in_fp64(dtype):
    logits = random_logits(1, 64, spread=8.0).to(dtype)
    torch.testing.assert_close(
        probabilities(logits, 0.7, 0.9), probabilities(logits.double(), 0.7, 0.9), rtol=0, atol=0
    )


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("seed", range(5))
def test_top_p_keeps_the_smallest_sufficient_set(seed, top_p):
    logits = random_logits(seed, 30)
    whole = torch.softmax(logits, dim=0)
    p = probabilities(logits, 1.0, top_p)
    kept = p > 0
    assert math.isclose(float(p.sum()), 1.0, rel_tol=1e-12)
    assert whole[kept].sum() >= top_p - 1e-12
    assert whole[kept].sum() - whole[kept].min() < top_p + 1e-12, "a smaller set would do"
    if not kept.all():
        assert whole[kept].min() >= whole[~kept].max(), "a more probable token was dropped"
    torch.testing.assert_close(p[kept], whole[kept] / whole[kept].sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.2, 1), (0.25, 1), (0.3, 2), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_top_p_among_equals_keeps_no_more_than_needed(top_p, kept):
    p = probabilities(torch.zeros(4), 1.0, top_p)
    assert sorted(p.tolist()) == pytest.approx([0.0] * (4 - kept) + [1 / kept] * kept)


def by_sorting_all(p: torch.Tensor, top_p: float) -> torch.Tensor:
    """What top-p keeps, by its definition, of rows of probabilities."""
    kept = torch.zeros_like(p)
    for row, values in enumerate(p.tolist()):
        total = 0.0
        for token in sorted(range(len(values)), key=lambda token: (-values[token], token)):
            if total >= top_p:
                break
            kept[row, token] = values[token]
            total += values[token]
    return kept / kept.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 12.0])
def test_top_p_of_a_long_vocabulary_is_that_of_sorting_it(spread, top_p):
    logits = random_logits(7, (2, 20000), spread).bfloat16().double()  # of many equals
    whole = torch.softmax(logits, dim=-1)
    torch.testing.assert_close(probabilities(logits, 1.0, top_p), by_sorting_all(whole, top_p), rtol=1e-12, atol=0)


@pytest.mark.parametrize("lead", [8191, 8192, 8193, 9000])
def test_equals_at_the_end_of_what_is_sorted_are_kept_in_order(lead):
    """So many tokens are equally probable that it takes all of them, or one of them must not be left out."""
    logits = torch.zeros(20000)
    logits[5000 : 5000 + lead] = 9.0
    whole = torch.softmax(logits.double(), dim=-1)
    for top_p in (0.5, float(whole[5000] * (lead - 1.5)), float(whole[5000] * (lead + 1e-3))):
        p = probabilities(logits, 1.0, top_p)
        torch.testing.assert_close(p, by_sorting_all(whole[None], top_p)[0], rtol=1e-12, atol=0)


def test_a_few_tokens_are_found_without_sorting_a_vocabulary(monkeypatch):
    sort, lengths = torch.Tensor.sort, []
    monkeypatch.setattr(torch.Tensor, "sort", lambda p, **how: lengths.append(p.shape[-1]) or sort(p, **how))
    probabilities(random_logits(3, 150_000, 4.0), 1.0, 0.95)
    assert lengths and max(lengths) < 10_000


def test_greedy_is_the_argmax_whatever_else_is_set():
    for seed in range(20):
        logits = random_logits(seed, 100)
        best = max(range(100), key=logits.tolist().__getitem__)
        for position in range(3):
            config = SamplingConfig(temperature=0.0, top_p=0.3, seed=seed)
            assert sample(logits, config, position) == best


@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.8)],
    ids=["T=1", "T=0.5", "T=2", "top_p=0.8"],
)
def test_drawn_frequencies_are_the_probabilities(temperature, top_p):
    logits, draws = torch.tensor([0.0, 1.0, -0.5, 2.0, 1.5, -1.0, 0.5, 1.0]), 4000
    config = SamplingConfig(temperature=temperature, top_p=top_p, seed=5)
    weights = np.exp(logits.double().numpy() / temperature)
    p = weights / weights.sum()
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        p[order[np.searchsorted(p[order].cumsum(), top_p) + 1 :]] = 0
        assert 0 < (p == 0).sum() < len(p) - 1
        p /= p.sum()
    counts = np.bincount([sample(logits, config, i) for i in range(draws)], minlength=len(p))
    assert counts[p == 0].sum() == 0
    # 45 is exceeded once in 7e6 for 7 degrees of freedom.
    assert chi_square(counts[p > 0], draws * p[p > 0]) < 45


def test_draws_depend_on_seed_and_position_not_on_history():
    logits = torch.zeros(1000)
    draw = {
        (seed, i): sample(logits, SamplingConfig(temperature=1.0, seed=seed), i)
        for seed in range(3)
        for i in range(20)
    }
    for (seed, position), token in sorted(draw.items(), reverse=True):
        assert sample(logits, SamplingConfig(temperature=1.0, seed=seed), position) == token
    assert len(set(draw.values())) > 50


@pytest.mark.parametrize("number", [0.0, 0.25, 0.5, 0.75, math.nextafter(1.0, 0.0)])
def test_token_without_probability_is_never_drawn(monkeypatch, number):
    asked = []
    monkeypatch.setattr(sampling, "uniform", lambda *key: asked.append(key) or number)
    never = -math.inf
    logits = torch.tensor([never, never, 0.0, never, 0.0, 0.0, never, 0.0, never])
    expected = {0.0: 2, 0.25: 4, 0.5: 5, 0.75: 7}.get(number, 7)
    assert sample(logits, SamplingConfig(temperature=1.0, seed=9), position=4) == expected
    assert asked == [(9, 4, PURPOSE_NEXT_TOKEN)]
