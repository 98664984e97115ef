"""Owners in natural order, by hand."""

from canzona_cli.planner.contiguous import balanced_cuts, even_start


def test_a_piece_belongs_to_the_share_it_starts_in() -> None:
    assert even_start([1, 1, 1, 1], 2) == [0, 0, 1, 1]
    assert even_start([3, 1, 1, 1], 3) == [0, 1, 2, 2]


def test_cuts_are_at_the_boundary_nearest_to_an_even_share() -> None:
    """Shares end at 4 and 8, pieces at 1, 4.5, 7.5 and 11: one above its share's end, one below."""
    assert balanced_cuts([[1, 3.5, 3, 3.5, 1]], 3, alpha=0.0) == [[0, 0, 1, 2, 2]]


def test_with_alpha_one_a_bucket_makes_up_for_another() -> None:
    """The larger bucket gives its first owner 6 of 10; of the smaller one, 6, that owner needs 2 for an even total."""
    assert balanced_cuts([[2, 1, 1, 2], [6, 4]], 2, alpha=1.0) == [[0, 1, 1, 1], [0, 1]]
    assert balanced_cuts([[2, 1, 1, 2], [6, 4]], 2, alpha=0.0) == [[0, 0, 1, 1], [0, 1]]
