import numpy as np
import pytest

from mulstm.errors import DataError
from mulstm.surprise import recovery


def test_losses_after_a_surprise_are_averaged_by_delay() -> None:
    nats = np.full(100, np.log(2.0))
    nats_b = nats.copy()
    surprises = np.array([10, 30, 50, 70, 95])
    nats[surprises], nats_b[surprises] = 8 * np.log(2.0), 6 * np.log(2.0)
    nats_b[surprises[:-1] + 2] = 3 * np.log(2.0)
    found = recovery(nats, nats_b, share=0.05, delays=4)
    assert found.symbols == 5
    assert found.by_delay[0] == pytest.approx((8.0, 6.0))
    assert found.by_delay[1] == pytest.approx((1.0, 1.0))
    assert found.by_delay[2] == pytest.approx((1.0, (4 * 3 + 1) / 5))
    assert found.overall == pytest.approx((nats.mean() / np.log(2), nats_b.mean() / np.log(2)))


def test_surprising_is_what_both_together_find_so() -> None:
    a, b = np.ones(20), np.ones(20)
    a[3], b[8] = 3.0, 9.0
    assert recovery(a, b, share=0.05).by_delay[0] == pytest.approx((1 / np.log(2), 9 / np.log(2)))
    a[12], b[12] = 6.0, 6.0  # in the middle for each, and most for both
    assert recovery(a, b, share=0.05).by_delay[0] == pytest.approx((6 / np.log(2), 6 / np.log(2)))


def test_a_surprise_at_the_end_has_nothing_after_it() -> None:
    nats = np.ones(20)
    nats[[3, 19]] = 5.0
    found = recovery(nats, nats, share=0.1, delays=1)
    assert found.by_delay[0] == pytest.approx((5 / np.log(2),) * 2)
    assert found.by_delay[1] == pytest.approx((1 / np.log(2),) * 2)


def test_texts_of_different_length_are_refused() -> None:
    with pytest.raises(DataError, match="20 and 21"):
        recovery(np.ones(20), np.ones(21))
    with pytest.raises(DataError, match="4 symbols are too few"):
        recovery(np.ones(4), np.ones(4))
    with pytest.raises(DataError, match="1 symbol is too few"):
        recovery(np.ones(1), np.ones(1))
    with pytest.raises(DataError, match="100 and 100"):
        recovery(np.ones((2, 50)), np.ones((2, 50)))
    assert len(recovery(np.ones(50), np.ones(50)).by_delay) == 1 + 4  # as many steps as the paper's figure
    ending = np.ones(11)
    ending[8] = 5.0  # with two symbols after it
    assert len(recovery(ending, ending, delays=2).by_delay) == 3
    with pytest.raises(DataError, match="11 symbols are too few for the 10% most surprising and 3 steps"):
        recovery(ending, ending, delays=3)
    for share in (0.005, 1.0):
        with pytest.raises(DataError, match=f"the {100 * share:g}% most surprising"):
            recovery(ending, ending, share=share)
