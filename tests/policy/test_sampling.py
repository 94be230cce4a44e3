import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mzd.errors import MzdError
from mzd.policy.sampling import Sampler, SamplingParams

OPEN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

finite = st.floats(-50, 50, width=32)
logit_arrays = hnp.arrays(np.float32, st.integers(1, 60), elements=finite | st.just(-np.inf)).filter(
    lambda logits: np.isfinite(logits.max())
)
params = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(0.01, 5),
    top_k=st.integers(0, 70),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)


def logits_of(*probabilities):
    return np.log(np.array(probabilities)).astype(np.float32)


def drawn_ids(logits, num_draws=300, **changes):
    sampler = Sampler(SamplingParams(**({**OPEN, "seed": 7} | changes)))
    return {sampler.sample(logits) for _ in range(num_draws)}


def kept_by_llama_cpp(logits, chosen):
    """Reference: the default chain, filter by filter, on (logit, -id) pairs."""
    pairs = sorted(((float(v), -i) for i, v in enumerate(logits)), reverse=True)
    if chosen.top_k:
        pairs = pairs[: chosen.top_k]
    weights = [math.exp(value - pairs[0][0]) for value, _ in pairs]
    cumulative, count = 0.0, 0
    while count < len(pairs) and (count == 0 or cumulative < chosen.top_p):
        cumulative += weights[count] / math.fsum(weights)
        count += 1
    pairs = pairs[:count] if chosen.top_p < 1 else pairs
    if chosen.min_p > 0:
        pairs = [p for p in pairs if p[0] >= pairs[0][0] + math.log(chosen.min_p)]
    return {-negative_id for _, negative_id in pairs}


@given(logit_arrays, params)
def test_what_is_drawn_passes_the_filters(logits, chosen):
    token = Sampler(chosen).sample(logits)
    assert np.isfinite(logits[token])
    slack = 1e-6  # float64 sums in another order
    loose = SamplingParams(
        top_k=chosen.top_k, top_p=min(1.0, chosen.top_p + slack), min_p=max(0.0, chosen.min_p - slack)
    )
    assert token in kept_by_llama_cpp(logits, loose)


@given(logit_arrays, params)
def test_the_same_seed_draws_the_same_tokens(logits, chosen):
    one, other = Sampler(chosen), Sampler(chosen)
    assert [one.sample(logits) for _ in range(5)] == [other.sample(logits) for _ in range(5)]


@given(logit_arrays, params)
def test_sampling_leaves_the_logits_as_they_are(logits, chosen):
    before = logits.copy()
    sampler = Sampler(chosen)
    sampler.sample(logits)
    sampler.top_logprobs(logits, 3)
    np.testing.assert_array_equal(logits, before)


@given(logit_arrays)
def test_temperature_0_takes_the_first_maximum(logits):
    expected = min(i for i, value in enumerate(logits) if value == logits.max())
    assert Sampler(SamplingParams(temperature=0.0)).sample(logits) == expected


def test_a_seed_names_its_sequence_for_ever():
    sampler = Sampler(SamplingParams(**OPEN, seed=42))
    assert [sampler.sample(np.zeros(1000, np.float32)) for _ in range(5)] == EXPECTED_FOR_SEED_42


EXPECTED_FOR_SEED_42 = [773, 438, 858, 697, 94]


def test_seeds_differ_up_to_the_last_bit():
    flat = np.zeros(10**6, np.float32)
    drawn = [Sampler(SamplingParams(**OPEN, seed=s)).sample(flat) for s in (0, 1, 2**63, 2**64 - 1)]
    assert len(set(drawn)) == 4


def test_without_a_seed_runs_differ():
    flat = np.zeros(10**6, np.float32)
    assert len({Sampler(SamplingParams(**OPEN)).sample(flat) for _ in range(4)}) > 1


def test_top_k_keeps_the_largest_and_the_lower_id_of_equals():
    assert drawn_ids(np.array([1, 3, 2, 3, 2], np.float32), top_k=3) == {1, 2, 3}
    assert drawn_ids(np.zeros(50, np.float32), top_k=4) == {0, 1, 2, 3}


@given(
    size=st.integers(1, 9000),
    n=st.integers(0, 200),
    num_values=st.sampled_from([1, 3, 100, 10**6]),
    seed=st.integers(0, 2**32),
)
def test_the_most_probable_of_any_vocabulary(size, n, num_values, seed):
    """Large ones are searched by their peaks; few values are many ties."""
    drawn = np.random.default_rng(seed).integers(0, num_values, size)
    logits = (drawn * (50 / num_values)).astype(np.float32)
    expected = sorted(range(size), key=lambda i: (-logits[i], i))[:n]
    assert [i for i, _ in Sampler(SamplingParams()).top_logprobs(logits, n)] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("where", [0, 64 * 70 - 1, 64 * 70, 64 * 70 + 5])
def test_no_token_is_drawn_beside_a_nan(where, temperature):
    logits = np.zeros(64 * 70 + 6, np.float32)
    logits[where] = np.nan
    with pytest.raises(MzdError, match="NaN as its largest logit"):
        Sampler(SamplingParams(temperature=temperature)).sample(logits)


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = logits_of(0.1, 0.5, 0.25, 0.15)
    assert drawn_ids(logits, top_p=0.6) == {1, 2}
    assert drawn_ids(logits, top_p=0.49) == {1}
    assert drawn_ids(logits, top_p=0.0) == {1}
    assert drawn_ids(logits, top_p=0.95) == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_most_probable():
    logits = logits_of(0.1, 0.5, 0.26, 0.14)
    assert drawn_ids(logits, min_p=0.5) == {1, 2}
    assert drawn_ids(logits, min_p=1.0) == {1}


def test_top_p_counts_in_what_top_k_kept():
    # Of the two kept, id 0 has 0.4 / 0.7 = 57 %; of all it has 40 %.
    logits = logits_of(0.4, 0.3, 0.15, 0.15)
    assert drawn_ids(logits, top_k=2, top_p=0.5) == {0}


def test_temperature_comes_after_the_filters():
    # At temperature 100 all four are equally likely, yet top-p still sees the model's own probabilities.
    logits = logits_of(0.1, 0.5, 0.25, 0.15)
    assert drawn_ids(logits, temperature=100.0, top_p=0.6) == {1, 2}


def test_draws_follow_the_probabilities():
    sampler = Sampler(SamplingParams(**OPEN, seed=1))
    logits = logits_of(0.2, 0.5, 0.3)
    counts = np.bincount([sampler.sample(logits) for _ in range(6000)], minlength=3)
    np.testing.assert_allclose(counts / 6000, [0.2, 0.5, 0.3], atol=0.03)


def test_temperature_sharpens():
    sampler = Sampler(SamplingParams(**{**OPEN, "temperature": 0.5}, seed=1))
    logits = logits_of(0.2, 0.4, 0.4)  # squared and renormalised: 1/9, 4/9, 4/9
    counts = np.bincount([sampler.sample(logits) for _ in range(6000)], minlength=3)
    np.testing.assert_allclose(counts / 6000, [1 / 9, 4 / 9, 4 / 9], atol=0.03)


def test_a_tiny_temperature_is_greedy_without_overflow():
    assert drawn_ids(np.array([1, 3, 2], np.float32), temperature=5e-324) == {1}


def test_excluded_tokens_are_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf, 0], np.float32)
    assert drawn_ids(logits) == {1, 3}


@pytest.mark.parametrize("bad", [[np.nan, 1], [1, np.inf], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unsound_logits_are_an_error_and_no_token(bad, temperature):
    sampler = Sampler(SamplingParams(temperature=temperature))
    logits = np.array(bad, np.float32)
    for attempt in (sampler.sample, lambda values: sampler.top_logprobs(values, 1)):
        with pytest.raises(MzdError, match="largest logit") as caught:
            attempt(logits)
        assert caught.value.code == "internal"


def test_nan_is_named():
    with pytest.raises(MzdError, match="NaN"):
        Sampler(SamplingParams()).sample(np.full(3, np.nan, np.float32))


@given(logit_arrays, st.integers(0, 70))
def test_top_logprobs_are_the_log_softmax_in_order(logits, n):
    sampler = Sampler(SamplingParams())
    exact = logits.astype(np.longdouble)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:n]
    top = sampler.top_logprobs(logits, n)
    assert [token for token, _ in top] == order
    np.testing.assert_allclose([value for _, value in top], exact[order].astype(float), atol=1e-12)
    assert all(sampler.logprob(logits, token) == value for token, value in top)


def test_logprobs_ignore_the_filters():
    sampler = Sampler(SamplingParams(temperature=0.1, top_k=1))
    assert sampler.logprob(logits_of(0.25, 0.75), 0) == pytest.approx(math.log(0.25), abs=1e-6)


def test_a_large_vocabulary_is_ranked_exactly():
    logits = np.random.default_rng(3).normal(0, 3, 150_000).astype(np.float32).round(2)  # many equals
    top = Sampler(SamplingParams()).top_logprobs(logits, 200)
    assert [token for token, _ in top] == np.argsort(-logits, kind="stable")[:200].tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_k", 2**31),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("min_p", 1.01),
        ("min_p", -0.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
    ],
)
def test_params_out_of_bounds_are_refused_by_name(name, value):
    with pytest.raises(MzdError, match=name) as caught:
        SamplingParams(**{name: value})
    assert (caught.value.code, caught.value.data["parameter"]) == ("invalid_params", name)


def test_bounds_themselves_are_allowed():
    SamplingParams(temperature=0, top_k=0, top_p=0, min_p=0, seed=0)
    SamplingParams(temperature=2, top_k=2**31 - 1, top_p=1, min_p=1, seed=2**64 - 1)
