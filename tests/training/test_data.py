"""The samples that a rank trains on: a property of the run, never of its layout."""

from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.training.data import _indices
from tests.sizes import layout


@given(
    dp=st.integers(1, 8),
    micro_batch_size=st.integers(1, 4),
    micro_batches=st.integers(1, 4),
    batches=st.integers(0, 5),
    first_batch=st.integers(0, 3),
    left_over=st.integers(0, 31),
)
def test_the_ranks_of_a_step_read_exactly_the_samples_of_its_global_batch(
    dp: int, micro_batch_size: int, micro_batches: int, batches: int, first_batch: int, left_over: int
) -> None:
    """Batch `b` is samples `[b * G, (b + 1) * G)`, each read once, for every dp and every micro-batch size."""
    size = dp * micro_batch_size * micro_batches
    total = batches * size + left_over % size
    ranks = layout(dp=dp, micro=micro_batch_size, count=micro_batches)
    by_rank = [_indices(ranks, rank, first_sample=first_batch * size, sample_count=total) for rank in range(dp)]
    expected_batches = range(first_batch, batches)
    for of_rank in by_rank:
        assert len(of_rank) == micro_batches * len(expected_batches)
        assert all(len(samples) == micro_batch_size for samples in of_rank)
    for done, batch in enumerate(expected_batches):
        step = slice(done * micro_batches, (done + 1) * micro_batches)
        read = [sample for of_rank in by_rank for samples in of_rank[step] for sample in samples]
        assert sorted(read) == list(range(batch * size, (batch + 1) * size))


@given(batch=st.integers(0, 4), skip=st.integers(0, 4), dp=st.sampled_from([1, 2, 4]))
def test_starting_later_continues_the_same_sequence(batch: int, skip: int, dp: int) -> None:
    def micro_batches(first: int) -> list[list[int]]:
        return _indices(layout(dp=dp, micro=2, count=4 // dp), dp - 1, first_sample=8 * first, sample_count=80)

    per_step = 8 // (2 * dp)
    assert micro_batches(batch)[skip * per_step :] == micro_batches(batch + skip)
