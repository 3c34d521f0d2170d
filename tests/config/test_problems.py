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


def test_long_texts_lists_and_names_raise_in_a_short_message(refusal):
    said = refusal("description=" + "x" * 10**6)
    assert "must have at most 4096 characters" in said
    assert len(said) < 300
    names = ", ".join(f"m{n}" for n in range(2000))
    said = refusal(f"precision.loss_scale.scale_groups=[{names}]")
    assert "must have at most 1000 items" in said
    assert "must have at most 200 bytes to name a folder, got 240" in refusal("name=" + "é" * 120)
    assert "must have at most 200 characters" in refusal("name=" + "x" * 201)


def test_integers_of_any_length_and_base_raise_in_words(refusal):
    for value in ("9" * 5000, "0x" + "f" * 5000, "0o" + "7" * 9000, "-" + "9" * 5000):
        assert "must be a whole number" in refusal(f"seed={value}")
