import numpy as np
import pytest

from mulstm.data.pairs import pairs_of, room_for


@pytest.mark.parametrize(("B", "T", "N"), [(1, 1, 3), (3, 7, 2), (16, 50, 205), (5, 40, 1)])
def test_every_place_has_its_pair(B: int, T: int, N: int) -> None:
    x = np.random.default_rng(B).integers(N, size=(B, T)).astype(np.uint8)
    p = pairs_of(x)
    distinct = [(b, s) for b in range(B) for s in sorted(set(x[b].tolist()))]
    assert list(zip(p.lane.tolist(), p.symbol.tolist(), strict=True)) == distinct
    for t in range(T):
        for b in range(B):
            assert distinct[p.pair[t * B + b]] == (b, x[b, t])


def test_places_stand_pair_after_pair_and_in_the_order_of_time() -> None:
    x = np.random.default_rng(0).integers(4, size=(3, 20)).astype(np.uint8)
    p = pairs_of(x)
    assert sorted(p.order.tolist()) == list(range(60))
    assert (p.first[0], p.first[-1]) == (0, 60)
    for k, (start, stop) in enumerate(zip(p.first, p.first[1:], strict=False)):
        places = p.order[start:stop]
        assert len(places) > 0
        assert (np.diff(places) > 0).all()
        assert (p.pair[places] == k).all()


def test_room_is_a_round_number_or_none() -> None:
    few = np.tile(np.arange(100, dtype=np.uint8) % 29, (256, 1))
    assert room_for(pairs_of(few)) == 8000
    assert room_for(pairs_of(few % 25)) == 6400  # just as many as there are
    assert room_for(pairs_of(few[:, :50])) == 0
    many = np.tile(np.arange(100, dtype=np.uint8), (256, 1))
    assert room_for(pairs_of(many)) == 0
    assert room_for(pairs_of(np.zeros((1, 40), dtype=np.uint8))) == 16
