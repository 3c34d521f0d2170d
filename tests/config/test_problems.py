from narrowcast.config.problems import LONGEST_LINE, Problems, shortened


def test_the_first_ten_are_told_and_the_rest_is_counted_without_words():
    problems = Problems()
    for number in range(1000):
        problems.add((lambda n=number: f"number {n}") if number < 10 else lambda: 1 / 0)
    assert problems.lines() == [*(f"number {n}" for n in range(10)), "and 990 more"]


def test_one_problem_is_one_line_of_bounded_length():
    problems = Problems()
    problems.add("x" * 10**6)
    assert [len(line) for line in problems.lines()] == [LONGEST_LINE]
    assert shortened("x" * 100).endswith("...")


def test_thousands_of_unknown_keys_are_summed_up(refusal):
    said = refusal(more="\n".join(f"key{n}: 1" for n in range(5000)))
    assert said.startswith("5000 problems in the recipe:\n  ")
    assert said.endswith("\n  and 4990 more")
    assert len(said.splitlines()) == 12


def test_a_word_and_the_number_of_words_are_bounded(refusal):
    assert "1001 words KEY=VALUE were given; write at most 1000" in refusal(*["steps=1"] * 1001)
    said = refusal("description=" + "x" * 10**6)
    assert "1000012 characters are too long for a word" in said
    assert len(said) < 300


def test_long_texts_lists_and_names_are_refused_with_their_length(refusal):
    assert "5000 characters are too many; write at most 4096" in refusal(
        "description=" + "x" * 5000
    )
    names = ", ".join(f"m{n}" for n in range(2000))
    said = refusal(f"precision.loss_scale.scale_groups=[{names}]")
    assert "2000 entries are too many; write at most 1000" in said
    assert "240 bytes are too long for the name of a folder" in refusal("name=" + "é" * 120)
    assert "201 characters are too many; write at most 200" in refusal("name=" + "x" * 201)


def test_integers_of_any_length_and_base_are_refused_in_words(refusal):
    for value in ("9" * 5000, "0x" + "f" * 5000, "0o" + "7" * 9000):
        assert "needs a whole number of at most 9223372036854775807" in refusal(f"seed={value}")
    assert "needs a whole number of at least 0" in refusal("seed=-" + "9" * 5000)


def test_brackets_are_counted_while_they_are_read(refusal):
    assert "nested too deeply for a recipe" in refusal("optimizer.betas=" + "[" * 50_000)
