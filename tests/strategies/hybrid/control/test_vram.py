import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import RecipeError, UnsupportedError
from narrowcast.strategies.hybrid.control.vram import (
    MIB,
    Card,
    Demand,
    card,
    cleanup_due,
    pressure,
    recommend,
)

GIB = 2**30
CARD = Card(total_bytes=16 * GIB, used_bytes=500 * MIB)


def demand(batch=8, item=400 * MIB, kept=4 * GIB):
    return Demand(
        weights_bytes=kept // 4,
        gradients_bytes=kept // 4,
        moments_bytes=kept // 2,
        activation_bytes_per_item=item,
        batch=batch,
    )


@pytest.mark.parametrize("scale", [1, 5])
@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [(9.9, "fine"), (10, "warning"), (12, "cleanup"), (13.9, "cleanup"), (14, "emergency")],
)
def test_thresholds_are_shares_of_the_card(gigabytes, expected, scale):
    used = int(gigabytes * scale * GIB)
    assert pressure(used, total_bytes=16 * scale * GIB) == expected
    assert Card(total_bytes=16 * scale * GIB, used_bytes=used).pressure == expected


def test_adam_keeps_four_numbers_of_every_weight():
    made = Demand.of_adam(100_000_000, batch=2)
    assert made.base_bytes == 16 * 100_000_000 + 1000 * MIB
    assert made.whole_bytes == made.base_bytes + 2 * 200 * MIB
    sizes = [Demand.of_adam(int(n), batch=1).activation_bytes_per_item for n in (1e8, 1e9, 7e9)]
    assert sizes == [200 * MIB, 400 * MIB, 600 * MIB]


def test_what_fits_is_left_as_it_is():
    made = recommend(CARD, demand())
    assert made.fits
    assert (made.batch, made.accumulation) == (8, 1)
    assert (made.mixed_precision, made.checkpointing) == (False, False)
    assert made.reasons == ()
    assert made.available_bytes == 16 * GIB - 1000 * MIB


def test_mixed_precision_comes_first():
    made = recommend(CARD, demand(batch=40))  # 16,000 MiB of activations, room for 10,288
    assert (made.mixed_precision, made.checkpointing, made.batch) == (True, False, 40)
    assert made.needed_bytes == demand().base_bytes + 40 * 200 * MIB
    assert made.reasons == ("mixed precision saves 8,000 MiB of activations",)


def test_checkpointing_comes_where_that_is_not_enough():
    made = recommend(CARD, demand(batch=100))
    assert (made.mixed_precision, made.checkpointing, made.batch) == (True, True, 100)
    assert made.possible
    assert "checkpointing" in made.reasons[1]


def test_then_batches_are_accumulated():
    made = recommend(CARD, demand(batch=1000))
    assert made.batch == 10288 // 50 == 205
    assert made.accumulation == 5
    assert made.possible


def test_a_saving_of_less_than_100_mib_is_not_worth_another_format():
    tight = Card(total_bytes=6 * GIB)
    made = recommend(tight, demand(batch=1, item=190 * MIB, kept=int(4.45 * GIB)))
    assert not made.fits
    assert not made.mixed_precision


def test_weights_that_do_not_fit_are_said_not_to():
    made = recommend(CARD, demand(kept=40 * GIB))
    assert not made.possible
    assert "have to be fewer, narrower, or elsewhere" in made.reasons[-1]


@given(
    batch=st.integers(1, 500),
    item=st.integers(8, GIB),
    kept=st.integers(0, 20 * GIB),
    total=st.integers(2 * GIB, 80 * GIB),
)
def test_a_recommendation_is_for_the_whole_batch_and_fits_if_it_says_so(batch, item, kept, total):
    made = recommend(Card(total_bytes=total), demand(batch, item, kept))
    assert made.batch * made.accumulation >= batch
    assert made.possible == (made.needed_bytes <= total - 500 * MIB)
    assert made.possible or not made.fits
    if made.batch > 1:
        assert made.possible


def test_caches_are_freed_now_and_then_and_at_once_in_an_emergency():
    assert [cleanup_due(step, "cleanup") for step in (9, 10, 11)] == [False, True, False]
    assert cleanup_due(7, "emergency")
    assert not any(cleanup_due(10, calm) for calm in ("fine", "warning"))


@pytest.mark.parametrize("bad", [{"total_bytes": 0}, {"total_bytes": 5, "used_bytes": 6}])
def test_a_card_that_is_none_is_refused(bad):
    with pytest.raises(RecipeError, match="write a positive total and a use within it"):
        Card(**bad)


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(RecipeError, match="write at least 1"):
        demand(batch=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_a_card_has_to_be_told():
    with pytest.raises(UnsupportedError, match="write Card"):
        card()


def test_a_gpu_tells_its_memory(cuda):
    made = card(cuda)
    assert made.total_bytes == torch.cuda.mem_get_info(cuda)[1]
    assert 0 < made.used_bytes < made.total_bytes
