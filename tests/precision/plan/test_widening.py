import pytest

from narrowcast.hardware import Hardware, Support
from narrowcast.precision.plan.gains import rungs
from narrowcast.precision.plan.policy import Policy, policy_from, short_text

NATIVE = Support(how="native", reason="it does")


def machine(*formats):
    return Hardware(
        device="cuda:0", name="a GPU", memory_bytes=None, products=dict.fromkeys(formats, NATIVE)
    )


EVERYTHING = machine("fp32", "bf16", "fp16", "e4m3", "e5m2")


@pytest.mark.parametrize(
    ("policy", "above"),
    [
        ("fp16", ["bf16", "fp32"]),
        ("bf16", ["fp32"]),
        ("fp32", []),
        ("tf32", ["fp32"]),
        ("fp8-delayed", ["bf16", "fp32"]),
        ("fp8-block", ["bf16", "fp32"]),
        ("fp8-row, head=fp32", ["bf16, head=fp32", "fp32"]),
        (
            "fp16, params=fp16, grads=fp16, master=fp32",
            [
                "compute=bf16, params=bf16, grads=bf16, master=fp32",
                "compute=fp32, params=bf16, grads=bf16, master=fp32",
            ],
        ),
        ("fp16, reduce=fp16", ["compute=bf16, reduce=bf16", "compute=fp32, reduce=bf16"]),
        ("fp16; *.a: fp32", ["bf16; *.a: fp32", "fp32; *.a: fp32"]),
        ("fp16; *.a: bf16", ["bf16; *.a: bf16", "fp32; *.a: fp32"]),
        ("bf16; *.a: fp16", ["bf16; *.a: bf16", "fp32; *.a: fp32"]),
        (
            "fp32; *.a: fp16, params=fp32",
            ["fp32; *.a: bf16, params=fp32", "fp32; *.a: fp32, params=fp32"],
        ),
        (
            "fp16; *.a: fp32, reduce=fp16",
            ["bf16; *.a: fp32, reduce=bf16", "fp32; *.a: fp32, reduce=bf16"],
        ),
    ],
)
def test_a_policy_has_wider_ones_above_it(policy, above):
    own, *wider = rungs(policy_from(policy), EVERYTHING)
    assert own == policy_from(policy)
    assert wider == [policy_from(text) for text in above]


@pytest.mark.parametrize("policy", ["fp16", "fp16; head: fp16", "fp16, params=fp16, master=kahan"])
def test_nothing_above_needs_a_loss_scale(policy):
    assert not any(p.needs_loss_scale for p in rungs(policy_from(policy), EVERYTHING)[1:])


def test_a_gpu_without_bf16_goes_from_fp16_to_fp32():
    found = rungs(policy_from("fp16"), machine("fp32", "fp16"))
    assert list(map(short_text, found)) == ["fp16", "fp32"]


def test_where_all_is_emulated_bf16_is_between():
    found = rungs(policy_from("fp16"), machine("fp32"))
    assert list(map(short_text, found)) == ["fp16", "bf16", "fp32"]


def test_a_rung_is_a_policy_that_its_text_gives_again():
    for policy in rungs(Policy(forward="fp16", grad_input="e5m2", scaling="row"), EVERYTHING):
        assert policy_from(str(policy)) == policy
