import json

from narrowcast.workloads import shipped_recipes


def test_every_shipped_recipe_has_a_line_with_what_it_is(narrowcast):
    ended = narrowcast("recipes")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines] == [name for name, _ in shipped_recipes()]
    assert "quickstart" in lines[0]
    assert all(len(line.split()) > 3 for line in lines)


def test_every_shipped_recipe_can_be_planned(narrowcast):
    for name, _ in shipped_recipes():
        if name == "decompose/lm":  # of a model that must be there: tests/workloads/decompose
            continue
        # One that fine-tunes is given rows and, as there may be no network, a model.
        words = ["data.path=sums", "model.path=tiny"] if name.startswith("sft/") else []
        # On a CPU, the updates of these large models are emulated weight by weight.
        words += ["hardware=h200"] if name.startswith("lm/llama") else []
        ended = narrowcast("plan", name, *words, "--json")
        fits = json.loads(ended.out)["predicted"].get("fits")
        assert ended.code == (3 if fits is False else 0)
