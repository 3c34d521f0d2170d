import pytest
import torch

from narrowcast.strategies.hybrid.card_watch import EVERY, CardWatch
from narrowcast.strategies.hybrid.control.vram import Card

CPU = torch.device("cpu")


def watch(shares):
    left = iter(shares)
    look = lambda device: Card(total_bytes=16_000, used_bytes=round(16_000 * next(left)))  # noqa: E731
    return CardWatch(CPU, look=look)


def test_a_cpu_has_no_card_to_look_at():
    assert not CardWatch(CPU).is_due(EVERY)


def test_it_looks_now_and_then():
    due = [step for step in range(3 * EVERY) if watch([]).is_due(step)]
    assert due == [EVERY, 2 * EVERY]


def test_a_card_that_fills_is_told_once_a_threshold_and_saved_at_the_last():
    shares = [0.5, 0.63, 0.7, 0.76, 0.88, 0.9, 0.5, 0.88]
    watched = watch(shares)
    told, saved = [], []
    for step in range(len(shares)):
        told.append([found.what for found in watched.act(step)])
        saved.append(watched.wants_checkpoint)
    assert told == [
        [], ["the card is 63% full"], [], ["the card is 76% full"], ["the card is 88% full"],
        [], [], ["the card is 88% full"],
    ]  # fmt: skip
    assert saved == [False, False, False, False, True, False, False, True]


@pytest.mark.parametrize("share", [0.62, 0.0])
def test_a_card_with_room_is_no_news(share):
    assert watch([share]).act(1) == []
