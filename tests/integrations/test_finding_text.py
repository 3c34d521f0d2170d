from narrowcast.integrations.finding_text import sentence
from narrowcast.runs import FindingRecord


def test_a_finding_is_one_line_with_its_place_and_what_to_try():
    found = FindingRecord(
        step=3,
        since=2,
        module="0",
        role="output",
        what="overflow of fp16",
        why="amax 1e6",
        action="",
        advice="try bf16",
    )
    assert sentence(found) == "step 3: 0 output: overflow of fp16: amax 1e6; try bf16"
