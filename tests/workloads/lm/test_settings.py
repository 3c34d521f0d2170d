import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads import load_recipe
from narrowcast.workloads.lm.settings import LmModel


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("model.heads=3", "3 heads do not divide width 128; write heads=2"),
        ("model.heads=128", "an even head width, got 1 .*write width=256"),
        ("model.kv_heads=3", r"kv_heads must divide heads \(4\); write kv_heads=2"),
        ("model.mlp=gleu", "Did you mean gelu"),
        ("model.norm=none", "rmsnorm"),
        ("data.lenght=64", "no such setting. Did you mean length"),
        ("data.text=", "python-topics"),
        ("data.text=[synthetic, a.txt]", "cannot be combined with text"),
        ("data.validation_share=1", "below 1"),
        ("data.length=0", "data.length"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_what_to_write(word, why):
    with pytest.raises(ConfigError, match=why):
        load_recipe("quickstart", [word])


def test_a_tokenizer_beside_synthetic_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"need no tokenizer.*model\.vocab"):
        load_recipe("quickstart", ["data.text=synthetic", "data.tokenizer=bpe"])


@pytest.mark.parametrize(
    ("word", "sources"),
    [
        ("data.text=corpus/*.txt", ("corpus/*.txt",)),
        ("data.text=*.txt", ("*.txt",)),
        ("data.text=[a.txt, b.txt]", ("a.txt", "b.txt")),
    ],
)
def test_text_is_one_source_or_several(word, sources):
    assert load_recipe("quickstart", [word]).recipe.data.sources == sources


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        (LmModel(width=128), 512),
        (LmModel(width=128, mlp="swiglu"), 384),
        (LmModel(width=768, mlp="swiglu"), 2048),
        (LmModel(width=128, mlp_width=100), 100),
    ],
)
def test_the_mlp_is_four_times_as_wide_or_costs_as_much(settings, width):
    assert settings.hidden_width == width
