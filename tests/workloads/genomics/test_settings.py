import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads import load_recipe
from narrowcast.workloads.genomics.settings import TASK_LABELS, Objective


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("protein_function", ["data.reverse_complement=true"], "no reverse complement"),
        (
            "generation",
            ["data.tokenizer=kmer", "data.kmer=3", "data.overlap=3"],
            "below kmer=3, got 3",
        ),
        ("generation", ["data.tokenizer=kmer", "data.mutate=0.1"], "tokenizer=byte"),
        ("variant_effect", ["data.reference=g.fa"], "needs sequences from a file"),
        ("annotation", ["data.features=g.gff"], "needs sequences from a file"),
        (
            "variant_effect",
            ["data.reference=g.fa", "data.path=v.vcf", "data.alphabet=rna"],
            "Write alphabet=dna",
        ),
        ("variant_effect", ["model.reverse_complement=true", "model.pool=cls"], "Write mean, max"),
        ("generation", ["objective.target=value"], "Leave target out"),
        ("variant_effect", ["objective.target=value"], "no classes to smooth"),
        ("annotation", ["objective.labels=[a, b, a]"], "occurs twice"),
        ("annotation", ["tuning.freeze=true", "tuning.unfreeze_over=0.5"], "Leave one of them out"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(recipe, words, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(f"genomics/{recipe}", words)


@pytest.mark.parametrize(
    ("objective", "labels"),
    [
        ({"task": "protein_function"}, "protein_function_go"),
        ({"task": "protein_function", "function": "ec"}, "protein_function_ec"),
        ({"task": "annotation"}, "annotation"),
    ],
)
def test_a_task_knows_its_classes_unless_they_are_named(objective, labels):
    assert Objective(**objective).known_labels == TASK_LABELS[labels]
    assert Objective(**objective, labels=("x", "y")).known_labels == ("x", "y")


def test_the_seven_classes_of_enzymes_are_those_of_the_commission():
    assert [name[:5] for name in TASK_LABELS["protein_function_ec"]] == [
        "oxido", "trans", "hydro", "lyase", "isome", "ligas", "trans",
    ]  # fmt: skip
