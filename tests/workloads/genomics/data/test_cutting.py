import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.workloads.genomics.data.rows import (
    Row,
    both_strands,
    held_out_tails,
    shortened,
    split_rows,
    windows,
    without,
)
from narrowcast.workloads.genomics.sequences.alphabets import DNA, RNA

letters = st.text(alphabet="ACGT", min_size=1, max_size=60)


def row(text, **more):
    numbers = np.arange(len(text)) if "letters" not in more else more.pop("letters")
    return Row(sequence=text, letters=numbers, name="chr1", **more)


@given(letters, st.integers(1, 20))
def test_windows_hold_every_letter_once_with_its_class(text, length):
    cut = windows([row(text)], length, None)
    assert "".join(each.sequence for each in cut) == text
    assert np.concatenate([each.letters for each in cut]).tolist() == list(range(len(text)))
    assert all(len(each.sequence) == length for each in cut[:-1])
    assert all(each.start == each.letters[0] for each in cut)


@given(letters, st.integers(2, 20), st.data())
def test_windows_that_overlap_leave_no_letter_out(text, length, data):
    stride = data.draw(st.integers(1, length))
    cut = windows([row(text)], length, stride)
    assert set(np.concatenate([each.letters for each in cut]).tolist()) == set(range(len(text)))
    assert all(each.letters[0] == number * stride for number, each in enumerate(cut))
    assert all(text[each.letters[0] :].startswith(each.sequence) for each in cut)


@given(st.lists(letters, min_size=1, max_size=6), st.floats(0.01, 0.99))
def test_tails_that_are_judged_are_never_learnt(texts, share):
    learnt, judged = held_out_tails([row(text) for text in texts], share)
    assert sum(len(each.sequence) for each in [*learnt, *judged]) == sum(map(len, texts))
    for text in texts:
        cut = round(len(text) * (1 - share))
        assert (text[:cut] in [each.sequence for each in learnt]) or not cut
        assert (text[cut:] in [each.sequence for each in judged]) or cut == len(text)
    assert all(each.start == each.letters[0] for each in judged)


def test_a_window_of_a_tail_is_named_by_its_place_in_the_genome():
    _, judged = held_out_tails([row("A" * 100)], 0.2)
    assert [each.title for each in windows(judged, 8, None)] == ["chr1:81", "chr1:89", "chr1:97"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(0, 2**32))
def test_variants_of_one_site_stay_on_one_side(sites, seed):
    rows = [row("A", alternative="CGT"[at % 3], site=f"1:{site}") for at, site in enumerate(sites)]
    learnt, judged = split_rows(rows, 0.3, seed=seed)
    assert len(learnt) + len(judged) == len(sites)
    assert not {each.site for each in learnt} & {each.site for each in judged}


@given(
    st.lists(st.sampled_from(["A", "C", "G", "T", "AA", "CC"]), min_size=1, max_size=40),
    st.floats(0.01, 0.99),
    st.integers(0, 2**32),
)
def test_rows_of_one_sequence_stay_on_one_side(texts, share, seed):
    rows = [row(text, label=str(at)) for at, text in enumerate(texts)]
    learnt, judged = split_rows(rows, share, seed=seed)
    assert sorted(int(each.label) for each in [*learnt, *judged]) == list(range(len(texts)))
    assert not {each.sequence for each in learnt} & {each.sequence for each in judged}
    assert len(judged) >= round(len(texts) * share) or not learnt
    again = split_rows(rows, share, seed=seed)
    assert [each.label for each in again[1]] == [each.label for each in judged]


def test_a_sequence_with_another_variant_is_another_pair():
    pairs = [Row(sequence="ACGT", alternative=text) for text in ("ACGA", "ACGC", "ACGG")]
    assert without(pairs, pairs[:1]) == pairs[1:]


def test_a_cut_pair_keeps_its_variant_in_the_middle():
    text = "A" * 500 + "C" + "A" * 500
    (kept,), cut = shortened([Row(sequence=text, alternative="A" * 1001)], 21)
    assert (kept.sequence, kept.alternative) == ("A" * 10 + "C" + "A" * 10, "A" * 21)
    assert cut == 1
    (inserted,), _ = shortened([Row(sequence="G" * 30, alternative="G" * 30 + "T" * 30)], 20)
    assert (inserted.sequence, inserted.alternative) == ("G" * 10, "G" * 10 + "T" * 10)


@given(letters, st.integers(1, 70))
def test_what_is_short_enough_is_as_it_was(text, length):
    (kept,), cut = shortened([row(text)], length)
    assert kept.sequence == text[:length]
    assert len(kept.letters) == len(kept.sequence)
    assert cut == (len(text) > length)


def test_the_other_strand_has_the_complements_and_the_classes_of_the_other_strand():
    classes = ("intergenic", "gene+", "gene-", "promoter")
    given_row = row("AACGT", alternative="AACGC", letters=np.array([0, 1, 1, 2, 3]))
    same, turned = both_strands([given_row], DNA, classes)
    assert same is given_row
    assert (turned.sequence, turned.alternative) == ("ACGTT", "GCGTT")
    assert turned.letters.tolist() == [3, 1, 2, 2, 0]
    (_, rna) = both_strands([Row(sequence="ACGU")], RNA, ())
    assert rna.sequence == "ACGU"
