from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from narrowcast.workloads.sft.data.packing import (
    IGNORED,
    Packs,
    alone,
    attention_mask,
    document_ids,
    packed,
    sequence_lengths,
)
from narrowcast.workloads.sft.data.tokenised import TokenRows

VOCAB = 64
LENGTHS = st.lists(st.integers(1, 50), max_size=60)


def rows_of(lengths, seed=0):
    chance = np.random.default_rng(seed)
    return TokenRows.joined(
        [
            (chance.integers(1, VOCAB, n).astype(np.int32), np.arange(n) >= min(2, n))
            for n in lengths
        ]
    )


def fewest(lengths, capacity):
    """The fewest packs there can be, by trying everything."""
    best = len(lengths)

    def put(number, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if number == len(lengths):
            best = len(rooms)
            return
        for at in {room: at for at, room in enumerate(rooms)}.values():
            if rooms[at] >= lengths[number]:
                put(number + 1, [r - lengths[number] * (i == at) for i, r in enumerate(rooms)])
        put(number + 1, [*rooms, capacity - lengths[number]])

    put(0, [])
    return best


@given(lengths=LENGTHS, capacity=st.integers(50, 80))
def test_nothing_is_lost_cut_or_put_in_twice_and_one_pack_at_most_is_half_empty(lengths, capacity):
    packs = packed(lengths, capacity)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    filled = [sum(lengths[row] for row in pack) for pack in packs]
    assert all(0 < each <= capacity for each in filled)
    assert sum(2 * each <= capacity for each in filled) <= 1


@given(lengths=st.lists(st.integers(1, 20), max_size=8))
def test_packs_are_few_as_best_fit_decreasing_promises(lengths):
    assert 9 * len(packed(lengths, 20)) <= 11 * fewest(lengths, 20) + 6


@given(lengths=LENGTHS.filter(len), seed=st.integers(0, 9))
def test_a_batch_holds_every_row_whole_and_asks_nobody_to_go_on_as_another(lengths, seed):
    rows = rows_of(lengths, seed)
    packs = Packs(rows=rows, packs=packed(lengths, 64), padding=0, width=64)
    batch = packs.__getitems__(list(range(len(packs))))
    documents = document_ids(batch["position_ids"])
    for row, pack in enumerate(packs.packs):
        for number, which in enumerate(pack):
            tokens, learnt = rows.row(which)
            here = documents[row] == number
            assert batch["input_ids"][row, here].tolist() == tokens.tolist()
            assert batch["position_ids"][row, here].tolist() == list(range(len(tokens)))
            labels = np.where(learnt, tokens, IGNORED).tolist()
            assert batch["labels"][row, here].tolist() == labels
        rest = documents[row] >= len(pack)
        assert (batch["labels"][row, rest] == IGNORED).all()
    assert (batch["labels"][batch["position_ids"] == 0] == IGNORED).all()
    assert packs.efficiency == sum(lengths) / batch["input_ids"].numel()


def test_rows_alone_are_filled_up_to_the_longest_in_full_eights():
    rows = rows_of([3, 9, 17])
    packs = Packs(rows=rows, packs=alone(3), padding=5, width=None)
    batch = packs.__getitems__([1, 0])
    assert batch["input_ids"].shape == (2, 16)
    assert (batch["input_ids"][1, 3:] == 5).all()
    assert (batch["labels"] != IGNORED).sum() == rows.row(0)[1].sum() + rows.row(1)[1].sum()


def test_an_end_is_learnt_where_it_is_also_what_fills_rows():
    rows = TokenRows.joined(
        [(np.array([1, 2, 3, 0], np.int32), np.array([False, True, True, True]))]
    )
    batch = Packs(rows=rows, packs=alone(1), padding=0, width=None).__getitems__([0])
    assert batch["labels"].tolist() == [[IGNORED, 2, 3, 0] + [IGNORED] * 4]


def llama():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=64)
    )


HOW = {
    "bool mask": lambda positions: {"attention_mask": attention_mask(positions)},
    "float mask": lambda positions: {"attention_mask": attention_mask(positions, torch.float32)},
    "positions alone": lambda positions: {},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_packed_row_gives_what_its_conversations_give_alone(build, how):
    torch.manual_seed(0)
    model = build().eval()
    lengths = [7, 1, 12, 30, 5, 3]
    rows = rows_of(lengths)
    packs = Packs(rows=rows, packs=packed(lengths, 40), padding=0, width=40)
    batch = packs.__getitems__(list(range(len(packs))))
    positions = batch["position_ids"]
    with torch.no_grad():
        together = model(
            input_ids=batch["input_ids"],
            position_ids=positions,
            use_cache=False,
            **HOW[how](positions),
        ).logits
        for row, pack in enumerate(packs.packs):
            for number, which in enumerate(pack):
                ids = torch.from_numpy(rows.row(which)[0]).long()[None]
                own = model(input_ids=ids).logits[0]
                here = document_ids(positions)[row] == number
                # Sums of 64 terms of about 1, in another order.
                assert (together[row, here] - own).abs().max() < 64 * 2**-23


@pytest.mark.parametrize("build", [llama, gpt2])
def test_the_loss_of_a_packed_batch_is_the_mean_over_learnt_tokens_of_its_conversations(build):
    torch.manual_seed(0)
    model = build().eval()
    lengths = [7, 12, 30, 5]
    rows = rows_of(lengths)
    one = Packs(rows=rows, packs=packed(lengths, 40), padding=0, width=40).__getitems__([0, 1])
    each = Packs(rows=rows, packs=alone(4), padding=0, width=None)
    with torch.no_grad():
        together = model(**one, use_cache=False).loss
        parts = [each.__getitems__([number]) for number in range(4)]
        counts = [int((part["labels"] != IGNORED).sum()) for part in parts]
        losses = [
            model(**part, use_cache=False).loss * n for part, n in zip(parts, counts, strict=True)
        ]
    assert together.item() == pytest.approx(sum(losses).item() / sum(counts), rel=2**-20)


def test_without_boundaries_a_conversation_would_see_the_one_before():
    torch.manual_seed(0)
    model = llama().eval()
    rows = rows_of([8, 8])
    batch = Packs(rows=rows, packs=[(0, 1)], padding=0, width=16).__getitems__([0])
    with torch.no_grad():
        blind = model(input_ids=batch["input_ids"]).logits[0, 8:]
        own = model(input_ids=batch["input_ids"][:, 8:]).logits[0]
    assert (blind - own).abs().max() > 1e-3


def test_lengths_are_those_of_conversations_laid_end_to_end():
    rows = rows_of([4, 3, 6])
    packs = Packs(rows=rows, packs=[(0, 1), (2,)], padding=0, width=8)
    positions = packs.__getitems__([0, 1])["position_ids"]
    found = sequence_lengths(positions)
    assert found.cu_seqlens.dtype == torch.int32
    assert [b - a for a, b in pairwise(found.cu_seqlens.tolist())] == [4, 3, 1, 6, 2]
    assert found.max_seqlen == 6
    blocks = attention_mask(positions.reshape(1, -1))[0, 0]
    parts = [torch.ones(n, n).tril() for n in (4, 3, 1, 6, 2)]
    assert torch.equal(blocks.float(), torch.block_diag(*parts))
